//! [`CpuBackend`]: weights, buffers, cache and recordings of one rank.

use crate::attention::Attention;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::record::{ExpertsSeen, Recorded, record};
use crate::replay::{Failure, Replay};
use crate::room::Room;
use crate::round;
use crate::sample::Sampler;
use crate::shared::Rows;
use crate::weights::{Experts, Loaded, Matrix, WeightShare, check_table, load_vector};
use atom_base::{PageId, ScoredToken};
use atom_ops::{
    Backend, Collectives, ExpertRows, LoadWeights, OpsError, Recording, Reserve, Slice, StepInputs, Weight,
};
use atom_weights::{DType, Tensor};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// What quantised weights are multiplied with, or those of bf16. All others meet f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// Signed bytes, one scale per row and 32 inputs: integer products, the fastest.
    Int8,
    /// Two of those, the second for what the first left over: integer products, nearly exact.
    #[default]
    Int16,
    /// Rounded to bf16, for weights of bf16; products of eight rows and more by AMX, if it is there. Quantised
    /// weights are refused.
    Bf16,
    /// f32, exact but for rounding.
    F32,
}

impl Activations {
    /// What a rank with these instructions takes for weights of this type if nothing else is asked for: `Bf16`
    /// where AMX meets weights of bf16, since it multiplies many rows several times as fast and loses what other
    /// engines lose too.
    pub fn of(isa: Isa, weights: DType) -> Self {
        if isa == Isa::Amx && weights == DType::BF16 { Self::Bf16 } else { Self::default() }
    }

    /// Bytes that an activation is made into; 0 if it stays as it is.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::F32 => 0,
            Self::Int8 => 1,
            Self::Int16 => 2,
            Self::Bf16 => round::BYTES,
        }
    }

    /// True if weights of this type don't meet activations as they are.
    pub(crate) fn quantise_for(self, dtype: DType) -> bool {
        self != Self::F32 && dtype.block_elements() > 1 || self.pairs(dtype)
    }

    /// True if weights of this type can be multiplied with such activations.
    pub fn suits(self, dtype: DType) -> bool {
        self != Self::Bf16 || dtype.block_elements() == 1
    }

    /// True if weights of this type are packed in pairs.
    pub(crate) fn pairs(self, dtype: DType) -> bool {
        self == Self::Bf16 && dtype == DType::BF16
    }
}

/// How a rank uses the processor.
pub struct CpuOptions {
    /// Threads, the rank's own included.
    pub threads: usize,
    /// Instructions to use; the best that the processor has if not set.
    pub isa: Option<Isa>,
    /// What weights are multiplied with.
    pub activations: Activations,
    /// Given to all ranks of the process, so that equal slices are held once.
    pub share: Arc<WeightShare>,
    /// A core for each thread, the rank's own first; empty lets the system place them.
    pub cores: Vec<usize>,
}

/// One rank on a set of processor cores.
pub struct CpuBackend {
    pool: Pool,
    isa: Isa,
    activations: Activations,
    /// Until all is loaded: it keeps tensors alive.
    share: Option<Arc<WeightShare>>,
    weights: Vec<Loaded>,
    reserved: Option<Reserved>,
    /// None where one was given up.
    recordings: Vec<Option<Recorded>>,
    /// Of the step that was finished last.
    expert_rows: ExpertRows,
    /// Steps count the different experts that their rows choose.
    counts_experts: bool,
}

/// What steps work in.
struct Reserved {
    reserve: Reserve,
    attention: Attention,
    sampler: Option<Sampler>,
    room: Room,
    /// Steps that were launched and not finished, the oldest first. They were computed at once.
    flights: [Flight; FLIGHTS_MAX],
    in_flight: usize,
}

/// What a step computed, until it is asked for.
struct Flight {
    results: Vec<ScoredToken>, // [out rows]
    count: usize,
    expert_rows: ExpertRows,
    outcome: Result<(), OpsError>,
}

impl CpuBackend {
    /// Starts the workers. The calling thread is the rank's: it becomes worker 0.
    pub fn new(options: CpuOptions) -> Result<Self, OpsError> {
        let isa = Isa::choose(options.isa)?;
        let pool = Pool::new(options.threads, &options.cores)?;
        tracing::debug!(threads = options.threads, %isa, activations = ?options.activations, "CPU backend");
        Ok(Self {
            pool,
            isa,
            activations: options.activations,
            share: Some(options.share),
            weights: Vec::new(),
            reserved: None,
            recordings: Vec::new(),
            expert_rows: ExpertRows::default(),
            counts_experts: false,
        })
    }

    /// The instructions in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Bytes of packed weights that one step reads if it visits all experts held here, shared ones included.
    pub fn matrix_bytes(&self) -> usize {
        let bytes = |weight: &Loaded| match weight {
            Loaded::Matrix(matrix) => matrix.bytes(),
            Loaded::Experts(experts) => experts.matrices.iter().map(Matrix::bytes).sum(),
            Loaded::Vector(_) | Loaded::Table(_) => 0,
        };
        self.weights.iter().map(bytes).sum()
    }

    /// Bytes of buffers and scratch that steps of what was recorded so far work in; see [`crate::Sketch`].
    pub fn step_bytes(&self) -> usize {
        self.reserved.as_ref().map_or(0, |reserved| reserved.room.bytes().total())
    }

    /// What a buffer held at the end of the last replay, padding rows included.
    #[cfg(test)]
    pub(crate) fn read(&mut self, recording: usize, buf: atom_ops::Buf) -> Vec<f32> {
        let reserved = self.reserved.as_mut().expect("reserved");
        reserved.room.read(
            &self.recordings[recording].as_ref().expect("it was not given up").places[usize::from(buf.0)],
        )
    }

    /// First bytes of all packed experts.
    #[cfg(test)]
    pub(crate) fn panels(&self) -> Vec<*const u8> {
        let experts = self.weights.iter().filter_map(|weight| match weight {
            Loaded::Experts(experts) => Some(&experts.matrices),
            _ => None,
        });
        experts.flatten().flat_map(|matrix| &matrix.parts).map(|part| part.weights.panel(0)).collect()
    }

    fn keep(&mut self, weight: Loaded) -> Weight {
        self.weights.push(weight);
        Weight(u32::try_from(self.weights.len() - 1).expect("a model has thousands of weights"))
    }
}

impl LoadWeights for CpuBackend {
    fn load_matrix(&mut self, parts: &[Slice]) -> Result<Weight, OpsError> {
        let share = self.share.as_deref().ok_or_else(|| too_late("a matrix"))?;
        let matrix = Matrix::load(parts, self.activations, share, &mut self.pool)?;
        Ok(self.keep(Loaded::Matrix(matrix)))
    }

    fn load_experts(&mut self, experts: &[Vec<Slice>]) -> Result<Weight, OpsError> {
        let share = self.share.as_deref().ok_or_else(|| too_late("a layer's experts"))?;
        let experts = Experts::load(experts, self.activations, share, &mut self.pool)?;
        Ok(self.keep(Loaded::Experts(experts)))
    }

    fn load_vector(&mut self, parts: &[Slice]) -> Result<Weight, OpsError> {
        let vector = load_vector(parts)?;
        Ok(self.keep(Loaded::Vector(vector)))
    }

    fn load_table(&mut self, table: &Tensor) -> Result<Weight, OpsError> {
        check_table(table)?;
        Ok(self.keep(Loaded::Table(table.clone())))
    }
}

impl Backend for CpuBackend {
    fn reserve(&mut self, reserve: &Reserve) -> Result<(), OpsError> {
        if self.reserved.is_some() {
            return Err(OpsError::Device("reserve was called a second time".into()));
        }
        self.share = None;
        let attention = Attention::new(self.isa, self.pool.workers(), reserve)?;
        let sampler =
            reserve.samples.then(|| Sampler::new(self.isa, self.pool.workers(), reserve)).transpose()?;
        let room = Room::new(&reserve.top, self.pool.workers())?;
        let flight = || Flight {
            results: vec![ScoredToken::NOT_A_NUMBER; reserve.top.out_rows],
            count: 0,
            expert_rows: ExpertRows::default(),
            outcome: Ok(()),
        };
        let flights = [flight(), flight()];
        self.reserved =
            Some(Reserved { reserve: reserve.clone(), attention, sampler, room, flights, in_flight: 0 });
        Ok(())
    }

    fn record(&mut self, recording: Recording) -> Result<usize, OpsError> {
        let reserved = self.reserved.as_mut().ok_or_else(|| early("record"))?;
        let recorded = record(&recording, &reserved.reserve, &self.weights, self.activations)?;
        reserved.room.fit(&recorded)?;
        if let Some(free) = self.recordings.iter().position(Option::is_none) {
            self.recordings[free] = Some(recorded);
            return Ok(free);
        }
        self.recordings.push(Some(recorded));
        Ok(self.recordings.len() - 1)
    }

    fn forget(&mut self, recording: usize) {
        self.recordings[recording] = None;
    }

    fn launch(
        &mut self,
        recording: usize,
        inputs: &StepInputs<'_>,
        collectives: &dyn Collectives,
    ) -> Result<(), OpsError> {
        let Reserved { reserve, attention, sampler, room, flights, in_flight } =
            self.reserved.as_mut().ok_or_else(|| early("launch"))?;
        assert!(*in_flight < FLIGHTS_MAX, "{FLIGHTS_MAX} steps are in flight");
        let flight = &mut flights[*in_flight];
        *in_flight += 1;
        let recorded = self.recordings[recording].as_ref().expect("it was not given up");
        recorded.assert_fits(inputs);
        let sampled = if sampler.is_some() { inputs.out.len() } else { 0 };
        flight.count = sampled;
        let results = Rows::new(&mut flight.results[..sampled], 1);
        if reserve.poison {
            room.poison();
            attention.poison_page(PageId::SINK.0 as usize);
            // The first row of a page comes when it is fresh: what it held is nobody's.
            for &row in
                inputs.cache_rows.iter().filter(|&&row| (row as usize).is_multiple_of(reserve.page_size))
            {
                attention.poison_page(row as usize / reserve.page_size);
            }
        }
        attention.begin_step(inputs);
        if let Some(sampler) = sampler {
            sampler.load(inputs.slot_loads);
        }
        let seen = Some(&recorded.seen).filter(|seen| self.counts_experts && seen.can_count());
        if let Some(seen) = seen {
            seen.clear();
        }
        let replay = Replay {
            isa: self.isa,
            recorded,
            weights: &self.weights,
            view: room.view(recorded, inputs),
            attention,
            sampler: sampler.as_ref(),
            inputs,
            collectives,
            results,
            failure: Failure::none(),
            chosen: AtomicU64::new(0),
            computed: AtomicU64::new(0),
            seen,
        };
        self.pool.run(&|worker| replay.walk(worker));
        let Replay { failure, chosen, computed, .. } = replay;
        flight.expert_rows = ExpertRows {
            chosen: chosen.into_inner(),
            computed: computed.into_inner(),
            distinct: seen.map_or(0, ExpertsSeen::count),
        };
        flight.outcome = failure.into_result();
        Ok(())
    }

    fn finish(&mut self, results: &mut [ScoredToken]) -> Result<(), OpsError> {
        let reserved = self.reserved.as_mut().ok_or_else(|| early("finish"))?;
        assert!(reserved.in_flight > 0, "no step is in flight");
        let flight = &mut reserved.flights[0];
        let outcome = std::mem::replace(&mut flight.outcome, Ok(()));
        self.expert_rows = flight.expert_rows;
        if outcome.is_ok() {
            results[..flight.count].copy_from_slice(&flight.results[..flight.count]);
        }
        reserved.flights.rotate_left(1);
        reserved.in_flight -= 1;
        outcome
    }

    fn abandon(&mut self) {
        if let Some(reserved) = &mut self.reserved {
            reserved.in_flight = 0;
        }
    }

    fn heeds_masks(&self) -> bool {
        true
    }

    fn count_experts(&mut self, counts: bool) {
        self.counts_experts = counts;
    }

    fn expert_rows(&self) -> ExpertRows {
        self.expert_rows
    }
}

/// As many as any backend may have.
const FLIGHTS_MAX: usize = 2;

fn too_late(what: &str) -> OpsError {
    OpsError::Device(format!("{what} was loaded after reserve; load everything first"))
}

fn early(what: &str) -> OpsError {
    OpsError::Device(format!("{what} was called before reserve"))
}
