//! What a device must offer, and how ranks meet inside a recording.

use crate::recording::{AttentionSpec, Comm, Recording, StepShape};
use crate::step::StepInputs;
use atom_base::ScoredToken;
use atom_weights::Tensor;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// A weight that a backend has loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Weight(pub u32);

/// A rank's share of a tensor: a rectangle of a matrix `[rows, cols]` (a vector is one row).
/// `cols` starts and ends on quantisation-block edges.
#[derive(Clone, Debug)]
pub struct Slice {
    /// The whole tensor.
    pub tensor: Tensor,
    /// Outputs taken.
    pub rows: Range<usize>,
    /// Inputs taken.
    pub cols: Range<usize>,
}

/// How keys and values are stored in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDType {
    /// 4 bytes an element.
    F32,
    /// 2 bytes, 11 bits of mantissa.
    F16,
    /// 2 bytes, 8 bits of mantissa.
    BF16,
    /// 1 byte, 4 bits of mantissa: e4m3 of the Open Compute Project, rounded to nearest even. What is beyond 448 becomes 448,
    /// and NaN stays NaN. Nothing is scaled.
    E4M3,
}

impl KvDType {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::E4M3 => 1,
        }
    }
}

/// Everything a step may touch, reserved before the first one.
#[derive(Clone, Debug)]
pub struct Reserve {
    /// The largest shape that will be recorded.
    pub top: StepShape,
    /// Layers of the cache.
    pub layers: usize,
    /// Heads of this rank.
    pub attention: Arc<AttentionSpec>,
    /// Positions in a page.
    pub page_size: usize,
    /// Pages, the Sink included.
    pub pages: usize,
    /// Pages of the longest sequence: the stride of the page tables.
    pub pages_per_sequence: usize,
    /// Element type of the cache.
    pub kv_dtype: KvDType,
    /// Slots of per-request state, the Sink included.
    pub slots: usize,
    /// Logits of a row.
    pub vocab: usize,
    /// This rank samples: it leads its lane.
    pub samples: bool,
    /// Fill padding rows, the Sink and fresh pages with NaN, to prove that nothing reads them.
    pub poison: bool,
}

/// Why a backend can't load, reserve or replay.
#[derive(Clone, Debug, Error)]
pub enum OpsError {
    /// The weights' types or shapes don't fit the operator: a checkpoint this build can't run.
    #[error("weights: {0}")]
    Weights(String),
    /// Not enough memory for what was asked; the numbers are in the text.
    #[error("memory: {0}")]
    Memory(String),
    /// A peer did not come to a collective, or left. The step failed; the group decides what next.
    #[error("collective: {0}")]
    Collective(String),
    /// The device failed.
    #[error("device: {0}")]
    Device(String),
}

/// What a rank's share of a model is loaded into.
pub trait LoadWeights {
    /// A matrix for [`crate::Op::Linear`]; the outputs of several slices stand one behind the other.
    fn load_matrix(&mut self, parts: &[Slice]) -> Result<Weight, OpsError>;

    /// The matrices of all experts held here, in order, for [`crate::Op::Experts`]; of each expert the
    /// outputs of several slices stand one behind the other. All have the same shape.
    fn load_experts(&mut self, experts: &[Vec<Slice>]) -> Result<Weight, OpsError>;

    /// A vector (norm weight, bias) as f32; several slices are concatenated.
    fn load_vector(&mut self, parts: &[Slice]) -> Result<Weight, OpsError>;

    /// A table for [`crate::Op::Embed`].
    fn load_table(&mut self, table: &Tensor) -> Result<Weight, OpsError>;
}

/// One rank's device: weights, buffers, KV cache, recordings. Owned by the rank's thread.
pub trait Backend: LoadWeights + Send {
    /// Reserves buffers, cache and per-slot state. Called once, after loading.
    fn reserve(&mut self, reserve: &Reserve) -> Result<(), OpsError>;

    /// Keeps a recording and returns its number. Its shape must fit the reserve.
    fn record(&mut self, recording: Recording) -> Result<usize, OpsError>;

    /// Gives a recording up. Its number may be given to another one.
    fn forget(&mut self, recording: usize);

    /// Begins a step: runs a recording on `inputs`, which may change as soon as this returns. Two steps may
    /// be in flight; they run in order. A token made by [`atom_base::last_of`] is the one that the step
    /// before sampled, which only a rank that samples knows. Allocates nothing.
    fn launch(
        &mut self,
        recording: usize,
        inputs: &StepInputs<'_>,
        collectives: &dyn Collectives,
    ) -> Result<(), OpsError>;

    /// Waits for the oldest step in flight. `results[i]` is filled for its `inputs.out[i]` if this rank
    /// samples. Allocates nothing.
    fn finish(&mut self, results: &mut [ScoredToken]) -> Result<(), OpsError>;

    /// Waits for steps in flight and drops what they computed.
    fn abandon(&mut self);

    /// A whole step: [`launch`](Self::launch), then [`finish`](Self::finish). None may be in flight.
    fn replay(
        &mut self,
        recording: usize,
        inputs: &StepInputs<'_>,
        collectives: &dyn Collectives,
        results: &mut [ScoredToken],
    ) -> Result<(), OpsError> {
        self.launch(recording, inputs, collectives)?;
        self.finish(results)
    }

    /// True if rows whose [`mask`](atom_base::OutRow::mask) is set choose among its tokens only. A backend that
    /// can't is given none: requests with a grammar are refused at the door.
    fn heeds_masks(&self) -> bool {
        false
    }

    /// From the next launch on, steps of recordings that [can](Recording::counting_experts) count the different
    /// experts that their rows choose; or no longer, as it is at first. Costs time.
    fn count_experts(&mut self, counts: bool);

    /// What went to experts in the step that was finished last, over all layers.
    fn expert_rows(&self) -> ExpertRows;
}

/// Rows times experts of one replay of one rank, summed over layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertRows {
    /// Choices that this rank's own rows made: `rows * top_k * layers` with a router, never padding.
    pub chosen: u64,
    /// Choices, of whatever lane's rows, that this rank computed its share of; 0 where the host can't know.
    pub computed: u64,
    /// Different experts of a layer that this rank's own rows chose, summed over layers; 0 where they were not
    /// counted, see [`Backend::count_experts`].
    pub distinct: u64,
}

/// Meetings inside a recording, called by each rank's thread in recording order.
///
/// Every member passes the same `capacity`; real counts are known to all from the group's step.
/// Sums are made in f32 in member order, so every member gets the same bits.
pub trait Collectives: Sync {
    /// How long a step may take once those before it have ended: the deadline of every wait within it.
    fn patience(&self) -> Duration {
        PATIENCE
    }

    /// This rank's place in the communicator.
    fn member(&self, comm: Comm) -> usize;

    /// Members of the communicator.
    fn members(&self, comm: Comm) -> usize;

    /// `x` becomes the sum of all members' `x`. All pass the same length.
    fn all_reduce(&self, comm: Comm, capacity: usize, x: &mut [f32]) -> Result<(), OpsError>;

    /// Member `m`'s `mine` lands at `out[m * stride ..][.. its length]` on every member.
    /// `counts[m]` is the length that member `m` passes; `stride >= max(counts)`.
    fn all_gather(
        &self,
        comm: Comm,
        capacity: usize,
        mine: &[f32],
        counts: &[usize],
        stride: usize,
        out: &mut [f32],
    ) -> Result<(), OpsError>;

    /// `mine` becomes the sum over members of their `x[me * stride ..][.. mine.len()]`.
    fn reduce_scatter(
        &self,
        comm: Comm,
        capacity: usize,
        x: &[f32],
        counts: &[usize],
        stride: usize,
        mine: &mut [f32],
    ) -> Result<(), OpsError>;

    /// Brings `counts[m]` elements for every member `m`, one behind the other in `mine`, and receives
    /// `due[m]` from each, one behind the other in `out`. Every pair agrees: what `a` brings for `b` is
    /// what is due to `b` from `a`.
    fn all_to_all(
        &self,
        comm: Comm,
        capacity: usize,
        mine: &[f32],
        counts: &[usize],
        due: &[usize],
        out: &mut [f32],
    ) -> Result<(), OpsError>;
}

/// Where nobody measures: as for a first replay.
const PATIENCE: Duration = Duration::from_secs(60);
