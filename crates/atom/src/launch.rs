//! From arguments to a running host: model found and opened, layout checked, memory planned, ranks
//! started.

use crate::args::{DummyType, EngineArgs, LoadBalanceArg, MoeExchangeArg};
use crate::cuda::{self, Gpus};
use crate::kv_cache::{gpu_kv_dtype, kv_dtype, plan_pages};
use crate::models;
use crate::step_bench::Workshop;
use crate::steps;
use crate::text::Text;
use anyhow::{Context, Result, bail, ensure};
use atom_base::hash::fnv1a_64;
use atom_base::{Mesh, MeshArgs, Seat, TokenId};
use atom_cpu::{CpuBackend, CpuOptions, WeightShare};
use atom_cuda::{Element, Plan};
use atom_engine::SchedulerConfig;
use atom_group::{Alignment, Patience, Policy};
use atom_model::{ExchangeChoice, ExpertLayout};
use atom_ops::{Backend, OpsError};
use atom_rank::{Host, HostConfig, Link, LinkArgs, LoadBalance, Progress};
use atom_serve::Layout;
use atom_weights::{Checkpoint, DType};
use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A model that computes.
pub(crate) struct Running {
    pub(crate) host: Host,
    pub(crate) text: Text,
    pub(crate) served_name: String,
    pub(crate) seed: u64,
    /// How the model is laid out.
    pub(crate) layout: Layout,
    /// All tokens that end an answer.
    pub(crate) end_tokens: Vec<TokenId>,
}

/// The same for whoever brings token ids: nothing of text was loaded.
pub(crate) struct Ranks {
    pub(crate) host: Host,
    pub(crate) name: String,
    pub(crate) layout: Layout,
    pub(crate) checkpoint: Arc<Checkpoint>,
    /// What a GPU's memory was planned for, in words.
    pub(crate) plan: Option<String>,
    end_tokens: Vec<TokenId>,
}

/// What ranks are started with besides.
#[derive(Default)]
struct Extras<'a> {
    /// The tokenizer's; the configuration may know more.
    end_tokens: &'a [TokenId],
    /// Recordings can count the experts of a step.
    counts: bool,
    workshop: Option<Arc<Workshop>>,
}

/// A checkpoint that was found, and where it shall be computed.
struct Opened {
    name: String,
    checkpoint: Arc<Checkpoint>,
    gpus: Option<Gpus>,
    start: Instant,
}

/// Where ranks compute.
enum Target {
    Cpu(Threads),
    Cuda(Gpus, Element),
}

/// Finds, opens, plans, starts; says on standard error what it decided.
pub(crate) fn launch(args: &EngineArgs) -> Result<Running> {
    launch_with(args, policy(args, mesh(args)?.lanes_per_group())?)
}

/// The same with a policy that is not the user's.
pub(crate) fn launch_with(args: &EngineArgs, policy: Policy) -> Result<Running> {
    let opened = Opened::new(args)?;
    let checkpoint = &opened.checkpoint;
    let text = Text::load(checkpoint, args.chat_template.as_deref())?;
    ensure!(
        text.tokenizer.vocab_size() <= checkpoint.config().vocab_size,
        "the tokenizer knows {} tokens but the model has {}: they don't belong together",
        text.tokenizer.vocab_size(),
        checkpoint.config().vocab_size
    );
    let ranks = opened.start(
        args,
        Extras { end_tokens: text.tokenizer.end_tokens(), ..Extras::default() },
        policy,
    )?;
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    Ok(Running {
        host: ranks.host,
        text,
        served_name: ranks.name,
        seed: args.seed.unwrap_or_else(clock),
        layout: ranks.layout,
        end_tokens: ranks.end_tokens,
    })
}

/// As [`launch`] does, for token ids: needs no tokenizer. The ranks of a mixture can count experts. A GPU's rank can be
/// asked to take steps apart if there is a workshop.
pub(crate) fn launch_ranks(args: &EngineArgs, workshop: Option<Arc<Workshop>>) -> Result<Ranks> {
    let policy = policy(args, mesh(args)?.lanes_per_group())?;
    let opened = Opened::new(args)?;
    ensure!(
        workshop.is_none() || opened.gpus.is_some(),
        "--operators takes steps of a GPU apart, and this is a CPU; leave it out"
    );
    ensure!(
        workshop.is_none() || mesh(args)?.ranks() == 1,
        "--operators takes the steps of one rank apart; with others it would wait for them in the middle of a step"
    );
    let counts = opened.checkpoint.config().moe.is_some();
    opened.start(args, Extras { end_tokens: &[], counts, workshop }, policy)
}

impl Opened {
    fn new(args: &EngineArgs) -> Result<Self> {
        args.refuse_unbuilt()?;
        let start = Instant::now();
        let gpus = cuda::choose(args, &mesh(args)?)?;
        let (name, checkpoint) = open(args, gpus.is_some())?;
        Ok(Self { name, checkpoint, gpus, start })
    }

    fn start(self, args: &EngineArgs, extras: Extras<'_>, policy: Policy) -> Result<Ranks> {
        let Extras { end_tokens, counts, workshop } = extras;
        let Self { name, checkpoint, gpus, start } = self;
        tracing::info!("{name}: {}", checkpoint.description());
        refuse_unused_layers(&checkpoint)?;
        if checkpoint.unused_scales() > 0 {
            tracing::info!("{}", unused_scales(&checkpoint));
        }
        let target = match gpus {
            Some(gpus) => Target::Cuda(gpus, cuda::element(args)),
            None => Target::Cpu(Threads::new(args)?),
        };
        let (mut config, plans) = host_config(args, &checkpoint, (end_tokens, counts), &target, policy)?;
        config.link = link(args, &config, &checkpoint)?;
        if workshop.is_some() {
            // A rank that takes a step apart is not late.
            config.patience.min = TAKEN_APART_WITHIN;
        }
        let layout = layout(&config, &target);
        let end_tokens = config.scheduler.eos.to_vec();
        let progress = progress(config.mesh.ranks());
        let planned = plans.first().map(ToString::to_string);
        let host = match target {
            Target::Cuda(gpus, _) => {
                let backend = cuda::backend(gpus, plans, config.mesh, workshop);
                Host::start(&config, &checkpoint, backend, progress)?
            }
            Target::Cpu(threads) => {
                Host::start(&config, &checkpoint, cpu_backend(args, &threads, &checkpoint), progress)?
            }
        };
        tracing::info!("ready in {:.2} s", start.elapsed().as_secs_f64());
        Ok(Ranks { host, name, layout, checkpoint, plan: planned, end_tokens })
    }
}

fn layout(config: &HostConfig, target: &Target) -> Layout {
    let mesh = &config.mesh;
    Layout {
        device: match target {
            Target::Cpu(threads) => format!("CPU, {} threads for each rank", threads.per_rank),
            Target::Cuda(gpus, element) => format!("{gpus}, {element:?}"),
        },
        ranks_per_lane: mesh.ranks_per_lane(),
        lanes: mesh.lanes(),
        lanes_per_group: mesh.lanes_per_group(),
        hosts: config.link.as_ref().map_or(1, |link| link.nodes()),
        step_rows: config.lattice.buckets().iter().map(|bucket| bucket.rows() as u32).collect(),
        page_size: config.scheduler.page_size,
    }
}

fn cpu_backend(
    args: &EngineArgs,
    threads: &Threads,
    checkpoint: &Checkpoint,
) -> impl Fn(&Seat) -> Result<Box<dyn Backend>, OpsError> + Send + Sync + 'static {
    let (isa, threads, share) = (args.isa(), threads.per_rank, Arc::new(WeightShare::new()));
    let activations = steps::activations(args, checkpoint);
    move |_| {
        let options = CpuOptions { threads, isa, activations, share: Arc::clone(&share), cores: Vec::new() };
        Ok(Box::new(CpuBackend::new(options)?) as Box<dyn Backend>)
    }
}

/// The model with its weights, or its shape with random ones.
pub(crate) fn open(args: &EngineArgs, on_gpu: bool) -> Result<(String, Arc<Checkpoint>)> {
    let Some(dummy) = args.load_dummy else {
        let model = models::resolve(&args.model, &args.source)?;
        return Ok((
            model.served_name,
            Arc::new(Checkpoint::open(&model.path).context("opening the model")?),
        ));
    };
    let folder = Path::new(&args.model);
    ensure!(
        folder.join("config.json").is_file(),
        "--load-dummy needs a folder with config.json and the tokenizer; {} is none",
        folder.display()
    );
    let dtype = match dummy {
        DummyType::F32 => DType::F32,
        DummyType::F16 => DType::F16,
        DummyType::Bf16 => DType::BF16,
        DummyType::Q8 => DType::Q8_0,
        DummyType::Q40 => DType::Q4_0,
        DummyType::Q41 => DType::Q4_1,
        DummyType::Q50 => DType::Q5_0,
        DummyType::Q51 => DType::Q5_1,
        DummyType::Q4K => DType::Q4_K,
        DummyType::Q5K => DType::Q5_K,
        DummyType::Q6K => DType::Q6_K,
    };
    let name =
        folder.canonicalize()?.file_name().map_or_else(|| "dummy".into(), |n| n.to_string_lossy().into());
    tracing::warn!("--load-dummy: the weights are random, and so will be the answers");
    // A GPU makes the numbers itself, and may hold more of them than the host.
    let made =
        if on_gpu { Checkpoint::dummy_unmade(folder, dtype) } else { Checkpoint::dummy(folder, dtype) };
    Ok((name, Arc::new(made.context("making a model of random weights")?)))
}

/// What the scales were for that came with FP8 weights and have no use here.
pub(crate) fn unused_scales(checkpoint: &Checkpoint) -> String {
    format!(
        "{} scales of activations or of an FP8 KV cache (input_scale, k_scale ..): a GPU quantises activations by their own",
        checkpoint.unused_scales()
    )
}

/// Tensors of layers that the configuration doesn't mention: the checkpoint is damaged, or a model that this
/// build would run wrongly. (Old Llama checkpoints carry rotary tables, which nobody needs.)
fn refuse_unused_layers(checkpoint: &Checkpoint) -> Result<()> {
    let of_layer = |name: &&String| name.contains("layers.") || name.starts_with("blk.");
    let mut unused =
        checkpoint.unused().iter().filter(of_layer).filter(|name| !name.ends_with("rotary_emb.inv_freq"));
    match unused.next() {
        None => Ok(()),
        Some(first) => bail!(
            "{} tensors of layers have no place in a model of {} layers, the first is {first}: the checkpoint is damaged \
             or of a kind that this build can't run",
            unused.count() + 1,
            checkpoint.config().layers
        ),
    }
}

/// How cores are dealt to ranks.
struct Threads {
    per_rank: usize,
    /// Looks of a waiting rank before it sleeps: none if ranks outnumber cores.
    spins: u32,
}

impl Threads {
    fn new(args: &EngineArgs) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let ranks = mesh(args)?.ranks();
        let all = args.threads.unwrap_or(cores);
        ensure!(all > 0, "--threads 0 leaves nobody to compute; use 1 or more");
        Ok(Self { per_rank: (all / ranks).max(1), spins: if ranks <= cores { SPINS } else { 0 } })
    }
}

fn mesh(args: &EngineArgs) -> Result<Mesh> {
    let mesh = MeshArgs {
        tp: args.tensor_parallel_size,
        dp: args.data_parallel_size,
        dp_attention: args.enable_dp_attention,
    };
    ensure!(
        !args.enable_dp_attention || args.tensor_parallel_size > 1,
        "--enable-dp-attention makes the ranks of -tp N lanes of their own; with -tp 1 there is nothing to make"
    );
    Ok(Mesh::new(mesh)?)
}

fn expert_layout(args: &EngineArgs) -> ExpertLayout {
    let exchange = match args.moe_exchange {
        MoeExchangeArg::Auto => ExchangeChoice::Auto,
        MoeExchangeArg::Gather => ExchangeChoice::Gather,
        MoeExchangeArg::Dispatch => ExchangeChoice::Dispatch,
    };
    ExpertLayout { expert_parallel: args.enable_expert_parallel, exchange }
}

fn host_config(
    args: &EngineArgs,
    checkpoint: &Checkpoint,
    (end_tokens, count_experts): (&[TokenId], bool),
    target: &Target,
    policy: Policy,
) -> Result<(HostConfig, Vec<Plan>)> {
    let model = checkpoint.config();
    let mesh = mesh(args)?;
    let experts = expert_layout(args);
    let lattice = match target {
        Target::Cpu(threads) => steps::lattice(args, checkpoint, (&mesh, experts), threads.per_rank)?,
        Target::Cuda(..) => steps::gpu_lattice(args)?,
    };
    let rows_max = lattice.top().rows();
    let max_model_len = args.max_model_len.unwrap_or(model.max_position);
    ensure!(
        (1..=model.max_position).contains(&max_model_len),
        "--max-model-len {max_model_len} is not possible: this model was made for 1 to {} tokens",
        model.max_position
    );
    let page_size = args.block_size.unwrap_or(if matches!(target, Target::Cpu(_)) { 16 } else { 64 });
    ensure!(
        matches!(page_size, 16 | 32 | 64 | 128),
        "--block-size {page_size} is not supported; use 16, 32, 64 or 128"
    );
    let useful = (args.max_num_seqs as usize * max_model_len).div_ceil(page_size) + 1;
    let (kv_dtype, pages) = match target {
        Target::Cpu(_) => {
            let kv_dtype = kv_dtype(args.kv_cache_dtype, checkpoint)?;
            (kv_dtype, plan_pages(args, model, &mesh, kv_dtype, (page_size, useful))?)
        }
        // Planned below, as a whole.
        Target::Cuda(_, element) => (gpu_kv_dtype(args.kv_cache_dtype, cuda::own_kv_dtype(*element))?, 0),
    };
    let eos: BTreeSet<TokenId> = model.eos.iter().chain(end_tokens).copied().collect();
    let (restarts, depth, spins) = match target {
        Target::Cpu(threads) => (if args.nodes > 1 { 0 } else { RESTARTS_MAX }, CPU_DEPTH, threads.spins),
        // A context that failed stays so in its process.
        Target::Cuda(..) => (0, GPU_DEPTH, SPINS),
    };
    let mut config = HostConfig {
        mesh,
        experts,
        link: None,
        lattice: Arc::new(lattice),
        scheduler: SchedulerConfig {
            pages,
            page_size,
            max_num_seqs: args.max_num_seqs as usize,
            rows_max,
            max_model_len,
            prefix_cache: !args.no_enable_prefix_caching,
            eos: eos.into_iter().collect(),
        },
        kv_dtype,
        queue_max: args.max_waiting,
        load_balance: load_balance(args.dp_load_balance),
        rank_restarts_max: args.rank_restarts_max.unwrap_or(restarts),
        depth,
        enforce_eager: args.enforce_eager,
        fail_on_eager: args.fail_on_eager,
        // A recording on a CPU is a list of some hundred operators: microseconds. On a GPU it is a captured graph:
        // some milliseconds each.
        record_all: true,
        mask_threads: mask_threads(),
        mask_wait: MASK_WAIT,
        count_experts,
        poison: args.poison_padding,
        spins,
        patience: Patience::default(),
        policy,
        step_trace: args.step_trace.clone(),
    };
    let plans = match target {
        Target::Cpu(_) => Vec::new(),
        Target::Cuda(gpus, element) => {
            let wanted = cuda::Wanted {
                pages_useful: useful,
                cache_bytes: args.kv_cache_memory,
                utilization: args.gpu_memory_utilization,
            };
            cuda::plan(gpus, (checkpoint, &config), (*element, cuda::order(args)), &wanted)?
        }
    };
    if let Some(plan) = plans.first() {
        config.scheduler.pages = plan.pages;
    }
    say_layout(&config, target);
    Ok((config, plans))
}

/// What was decided, on standard error.
fn say_layout(config: &HostConfig, target: &Target) {
    let HostConfig { mesh, lattice, scheduler, kv_dtype, .. } = config;
    let cache_tokens = (scheduler.pages - 1) * scheduler.page_size;
    let threads = match target {
        Target::Cpu(threads) => format!(", {} threads each", threads.per_rank),
        Target::Cuda(..) => String::new(),
    };
    tracing::info!(
        "{} lanes of {} ranks{threads}; steps of up to {} rows in {} sizes; KV cache {cache_tokens} tokens a lane, {kv_dtype:?}",
        mesh.lanes(),
        mesh.ranks_per_lane(),
        lattice.top().rows(),
        lattice.buckets().len(),
    );
    let max_model_len = scheduler.max_model_len;
    if cache_tokens < max_model_len {
        tracing::warn!(
            "requests of more than {cache_tokens} tokens will be refused: the cache is smaller than the context of \
             {max_model_len}; --kv-cache-memory or --gpu-memory-utilization make it larger"
        );
    }
}

/// A few, beside what computes the steps: a mask takes some tens of microseconds. Never only one, so that
/// one slow mask does not hold up all; many at once, as of a hard grammar with a large `n`, still do.
fn mask_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).div_ceil(4).clamp(2, 8)
}

/// What a lane's other requests may have to wait for the grammar of one. The bounds of what is computed for a
/// mask come to some 20 ms; the rest is for a machine that is busy.
const MASK_WAIT: Duration = Duration::from_secs(1);

/// Equal on hosts that compute the same: build, model with its weights, layout, precision, policy.
fn fingerprint(args: &EngineArgs, config: &HostConfig, checkpoint: &Checkpoint) -> Result<u64> {
    let parts = format!(
        "{} {:?} {:?} {:?} {:?} {:?} {} {} {} {:?} {} {} {}",
        env!("CARGO_PKG_VERSION"),
        config.mesh,
        config.experts,
        config.kv_dtype,
        steps::activations(args, checkpoint),
        checkpoint.config(),
        checkpoint.total_bytes(),
        config.scheduler.page_size,
        config.scheduler.max_model_len,
        config.scheduler.eos,
        config.enforce_eager,
        config.fail_on_eager,
        config.poison,
    );
    // Models of one shape differ in all their weights: some of one matrix tell them apart.
    let typical = checkpoint.tensor(steps::TYPICAL_MATRIX)?;
    let some = typical.bytes().iter().take(WEIGHT_BYTES_COMPARED).copied();
    Ok(fnv1a_64(config.first_state().hash(), parts.bytes().chain(some)))
}

/// Meets the other hosts. Whoever was started for another mesh, model or policy is refused before any step.
fn link(args: &EngineArgs, config: &HostConfig, checkpoint: &Checkpoint) -> Result<Option<Arc<Link>>> {
    let &EngineArgs { nodes, node_rank: node, .. } = args;
    if nodes == 1 {
        ensure!(
            args.master.is_none() && node == 0,
            "--master and --node-rank are for several hosts; add --nodes N or leave them out"
        );
        return Ok(None);
    }
    let Some(master) = args.master.clone() else {
        bail!("--nodes {nodes} needs --master NAME:PORT of host 0")
    };
    let mesh = &config.mesh;
    ensure!(
        node < nodes,
        "--node-rank {node} of --nodes {nodes}: they count from 0 to {}",
        nodes.saturating_sub(1)
    );
    ensure!(
        mesh.groups() == 1 && mesh.lanes() > 1,
        "--nodes {nodes} deals the lanes of one group to hosts: use -tp N --enable-dp-attention. Replicas (-dp) share \
         nothing; start a server for each"
    );
    ensure!(
        mesh.lanes().is_multiple_of(nodes),
        "{} lanes can't be dealt evenly to --nodes {nodes}",
        mesh.lanes()
    );
    ensure!(
        config.rank_restarts_max == 0,
        "--rank-restarts-max {} is for one process: a group on several hosts ends when it loses a rank",
        config.rank_restarts_max
    );
    ensure!(
        node == 0 || args.step_trace.is_none(),
        "--step-trace is written where lane 0 is: give it to host 0"
    );
    let fingerprint = fingerprint(args, config, checkpoint)?;
    tracing::info!("host {node} of {nodes}: meeting the others at {master}");
    let args = LinkArgs { nodes, node, master, fingerprint, patience: MEET_WITHIN };
    Ok(Some(Arc::new(Link::connect(&args)?)))
}

pub(crate) fn load_balance(arg: LoadBalanceArg) -> LoadBalance {
    match arg {
        LoadBalanceArg::Work => LoadBalance::Work,
        LoadBalanceArg::RoundRobin => LoadBalance::RoundRobin,
        LoadBalanceArg::LeastRequests => LoadBalance::LeastRequests,
        LoadBalanceArg::LeastTokens => LoadBalance::LeastTokens,
    }
}

/// Knobs of the prefill delayer are environment variables, as users of ATOM know them.
fn policy(args: &EngineArgs, lanes: usize) -> Result<Policy> {
    let default = Policy::default();
    let is_typo = |name: &String| {
        name.starts_with("ATOM_PREFILL_DELAYER") && !Alignment::VARIABLES.contains(&name.as_str())
    };
    if let Some(name) = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).find(is_typo) {
        bail!("{name} is not known; there are {}", Alignment::VARIABLES.join(", "));
    }
    Ok(Policy {
        alignment: Alignment::parse(|name| std::env::var(name).ok())?,
        step_ms_max: Policy::step_ms_max_of(args.step_ms_max, lanes),
        padding_per_mille_max: args.padding_max.or(default.padding_per_mille_max),
    })
}

fn progress(ranks: usize) -> Arc<Progress> {
    if !std::io::stderr().is_terminal() {
        return Arc::new(|_, _, _| {});
    }
    let bar = indicatif::ProgressBar::new(0);
    let style = indicatif::ProgressStyle::with_template("loading {bar:30} layer {pos} of {len}");
    bar.set_style(style.expect("the template is fixed"));
    Arc::new(move |_, _, layers| {
        bar.set_length((layers * ranks) as u64);
        bar.inc(1);
        if bar.position() == (layers * ranks) as u64 {
            bar.finish_and_clear();
        }
    })
}

/// A loss in a while is bad luck; four are a fault that a new rank has too.
const RESTARTS_MAX: u32 = 3;
/// Hosts are started by hand or by a scheduler that may take its time.
const MEET_WITHIN: Duration = Duration::from_secs(300);
/// Some hundred graphs, each captured and launched some times.
const TAKEN_APART_WITHIN: Duration = Duration::from_secs(600);
/// Of the weights, that hosts compare.
const WEIGHT_BYTES_COMPARED: usize = 1 << 20;
/// Looks at a peer's number before sleeping: some microseconds.
const SPINS: u32 = 2000;

/// A CPU computes on the rank's own thread: nothing to be ahead of.
const CPU_DEPTH: usize = 0;
/// The next step is planned and queued while a GPU computes.
const GPU_DEPTH: usize = 1;
