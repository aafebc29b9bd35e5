//! A host over a tiny synthetic model, and requests that are waited for.
#![allow(dead_code, unreachable_pub, reason = "each test file is a crate that uses its own part")]

pub mod fp8;
pub mod goldens;
pub mod hooked;
pub mod hosts;
pub mod kept;
pub mod spoil;
pub mod sums;
pub mod trace;

use atom_base::{
    FinishReason, Mesh, MeshArgs, RequestId, SamplingParams, ScoredToken, Seat, StopParams, TokenId,
};
use atom_cpu::{Activations, CpuBackend, CpuOptions, WeightShare};
use atom_engine::{EngineError, Event, Request, SchedulerConfig};
use atom_group::{Activity, Lattice, LatticeArgs, Patience, Policy};
use atom_model::{ExchangeChoice, ExpertLayout};
use atom_ops::{Backend, KvDType, OpsError};
use atom_rank::{Host, HostConfig, HostError, Link, LoadBalance, Probe};
use atom_weights::Checkpoint;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// How a host is started; the defaults suit a tiny model.
#[derive(Clone)]
pub struct Setup {
    pub mesh: Mesh,
    pub experts: ExpertLayout,
    pub link: Option<Arc<Link>>,
    pub rows_max: u32,
    pub max_num_seqs: u32,
    pub pages: usize,
    pub page_size: usize,
    pub max_model_len: usize,
    pub prefix_cache: bool,
    pub threads: usize,
    pub kv_dtype: KvDType,
    pub activations: Activations,
    pub sizes: Option<Vec<u32>>,
    pub record_all: bool,
    pub depth: usize,
    pub enforce_eager: bool,
    pub fail_on_eager: bool,
    pub mask_threads: usize,
    pub mask_wait: Duration,
    pub poison: bool,
    pub patience: Patience,
    pub policy: Policy,
    pub step_trace: Option<PathBuf>,
    pub rank_restarts_max: u32,
    pub eos: Vec<TokenId>,
    pub count_experts: bool,
}

/// What came of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub cached_tokens: u32,
    pub prompt: Vec<ScoredToken>,
    pub tokens: Vec<ScoredToken>,
    pub end: Option<Result<FinishReason, EngineError>>,
}

/// A request on its way.
pub struct Pending {
    pub id: RequestId,
    events: mpsc::Receiver<Event>,
}

pub fn mesh(tp: u16, dp: u16, dp_attention: bool) -> Mesh {
    Mesh::new(MeshArgs { tp, dp, dp_attention }).unwrap()
}

/// `--enable-expert-parallel`.
pub fn expert_parallel() -> ExpertLayout {
    ExpertLayout { expert_parallel: true, exchange: ExchangeChoice::Auto }
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            mesh: Mesh::SINGLE,
            experts: ExpertLayout::default(),
            link: None,
            rows_max: 64,
            max_num_seqs: 16,
            pages: 600,
            page_size: 16,
            max_model_len: 512,
            prefix_cache: true,
            threads: 1,
            kv_dtype: KvDType::F32,
            activations: Activations::default(),
            sizes: None,
            record_all: true,
            depth: 0,
            enforce_eager: false,
            fail_on_eager: false,
            mask_threads: 2,
            // Nobody is to be late because the machine is busy.
            mask_wait: Duration::from_secs(600),
            // Padding must never matter, so every test proves it on the way.
            poison: true,
            patience: Patience::default(),
            policy: Policy::default(),
            step_trace: None,
            rank_restarts_max: 0,
            eos: Vec::new(),
            count_experts: false,
        }
    }
}

impl Setup {
    pub fn config(&self) -> HostConfig {
        let lattice = LatticeArgs {
            rows_max: self.rows_max,
            max_num_seqs: self.max_num_seqs,
            sizes: self.sizes.clone(),
            ..LatticeArgs::default()
        };
        HostConfig {
            mesh: self.mesh,
            experts: self.experts,
            link: self.link.clone(),
            lattice: Arc::new(Lattice::new(&lattice).unwrap()),
            scheduler: SchedulerConfig {
                pages: self.pages,
                page_size: self.page_size,
                max_num_seqs: self.max_num_seqs as usize,
                rows_max: self.rows_max as usize,
                max_model_len: self.max_model_len,
                prefix_cache: self.prefix_cache,
                eos: self.eos.clone().into(),
            },
            kv_dtype: self.kv_dtype,
            queue_max: 10_000,
            load_balance: LoadBalance::default(),
            rank_restarts_max: self.rank_restarts_max,
            record_all: self.record_all,
            depth: self.depth,
            enforce_eager: self.enforce_eager,
            fail_on_eager: self.fail_on_eager,
            mask_threads: self.mask_threads,
            mask_wait: self.mask_wait,
            count_experts: self.count_experts,
            poison: self.poison,
            spins: 0,
            patience: self.patience,
            policy: self.policy,
            step_trace: self.step_trace.clone(),
        }
    }

    pub fn cpu(&self) -> impl Fn(&Seat) -> Result<Box<dyn Backend>, OpsError> + Send + Sync + 'static {
        let (threads, activations, share) = (self.threads, self.activations, Arc::new(WeightShare::new()));
        move |_| {
            let options =
                CpuOptions { threads, isa: None, activations, share: share.clone(), cores: Vec::new() };
            Ok(Box::new(CpuBackend::new(options)?))
        }
    }

    pub fn start(&self, checkpoint: &Arc<Checkpoint>) -> Host {
        self.try_start(checkpoint).unwrap()
    }

    /// With another backend.
    pub fn start_with(
        &self,
        checkpoint: &Arc<Checkpoint>,
        backend: impl Fn(&Seat) -> Result<Box<dyn Backend>, OpsError> + Send + Sync + 'static,
    ) -> Host {
        Host::start(&self.config(), checkpoint, backend, Arc::new(|_, _, _| {})).unwrap()
    }

    /// With a test in every stage of every rank.
    pub fn start_probed(&self, checkpoint: &Arc<Checkpoint>, probe: Arc<impl Probe + 'static>) -> Host {
        let progress = Arc::new(|_, _, _| {});
        Host::start_probed(&self.config(), checkpoint, self.cpu(), progress, probe).unwrap()
    }

    pub fn try_start(&self, checkpoint: &Arc<Checkpoint>) -> Result<Host, HostError> {
        Host::start(&self.config(), checkpoint, self.cpu(), Arc::new(|_, _, _| {}))
    }
}

/// The folder of a golden model.
pub fn golden(name: &str) -> PathBuf {
    // A check that was built elsewhere is told where the data lies.
    let elsewhere = std::env::var_os("ATOM_TESTS_DATA").map(PathBuf::from);
    let data = elsewhere.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data"));
    data.join("golden").join(name)
}

/// A golden model with its generated weights.
pub fn tiny(name: &str) -> Arc<Checkpoint> {
    let config = std::fs::read_to_string(golden(name).join("config.json")).unwrap();
    Arc::new(Checkpoint::synthetic(&config, reference(name)["salt"].as_u64().unwrap()).unwrap())
}

/// The golden model's `reference.json`.
pub fn reference(name: &str) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(golden(name).join("reference.json")).unwrap()).unwrap()
}

/// A safetensors file of f32 values.
pub fn tensors(path: &Path) -> HashMap<String, Vec<f32>> {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let values = |data: &[u8]| data.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    file.iter().map(|(name, view)| (name.to_owned(), values(view.data()))).collect()
}

pub fn ids(value: &serde_json::Value) -> Vec<TokenId> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as TokenId).collect()
}

pub fn request(prompt: &[TokenId], max_tokens: u32, sampling: SamplingParams) -> Request {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    Request {
        id: RequestId(NEXT.fetch_add(1, Ordering::Relaxed)),
        prompt: prompt.into(),
        sampling: Arc::new(sampling),
        stop: StopParams { max_tokens, ..StopParams::default() },
        lane: None,
        session: None,
        grammar: None,
    }
}

/// Sends a request.
pub fn send(host: &Host, request: Request) -> Pending {
    let (sender, events) = mpsc::channel();
    let id = request.id;
    host.submit(request, Box::new(move |event| drop(sender.send(event)))).unwrap();
    Pending { id, events }
}

/// Sends a request and waits for its end.
pub fn ask(host: &Host, request: Request) -> Answer {
    send(host, request).wait()
}

/// Waits until every lane is parked, and so has counted its last step. Lanes of a group end a step
/// together, not at once: who got an answer is ahead of those who had no part in it.
pub fn rest(host: &Host) {
    let start = std::time::Instant::now();
    while !host.health().lanes.iter().all(|lane| lane.activity == Activity::Parked) {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", host.health());
        std::thread::yield_now();
    }
}

/// Greedy tokens.
pub fn greedy(host: &Host, prompt: &[TokenId], max_tokens: u32) -> Vec<TokenId> {
    ask(host, request(prompt, max_tokens, SamplingParams::greedy())).ids()
}

impl Pending {
    /// The next event; a minute without one is a failure, not a hang.
    pub fn next(&self) -> Event {
        self.events.recv_timeout(Duration::from_secs(60)).expect("an event within a minute")
    }

    /// Everything until the end.
    pub fn wait(self) -> Answer {
        let mut answer = Answer::default();
        while answer.end.is_none() {
            match self.next() {
                Event::Started { cached_tokens } => answer.cached_tokens = cached_tokens,
                Event::PromptScored { index, scored } => {
                    assert_eq!(index as usize, answer.prompt.len() + 1, "prompt scores come in order, once");
                    answer.prompt.push(scored);
                }
                Event::Token(token) => answer.tokens.push(token),
                Event::Finished(reason) => answer.end = Some(Ok(reason)),
                Event::Failed(error) => answer.end = Some(Err(error)),
            }
        }
        assert!(self.events.try_recv().is_err(), "silence after the terminal event");
        answer
    }
}

impl Answer {
    pub fn ids(&self) -> Vec<TokenId> {
        self.tokens.iter().map(|t| t.token).collect()
    }

    /// Ids and the bits of their log-probabilities.
    pub fn bits(&self) -> Vec<(TokenId, u32)> {
        self.prompt.iter().chain(&self.tokens).map(|t| (t.token, t.logprob.to_bits())).collect()
    }
}
