//! A backend that writes down every replay: what the tests of lockstep look at.

use atom_base::ScoredToken;
use atom_ops::{
    Backend, Collectives, ExpertRows, OpsError, Recording, Reserve, Slice, StepInputs, StepShape, Weight,
};
use atom_weights::Tensor;
use std::sync::{Arc, Mutex};

/// One replay of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Replayed {
    pub shape: StepShape,
    /// Operators of the recording, in order.
    pub ops: Arc<Vec<&'static str>>,
    /// Real rows of this rank.
    pub rows: usize,
    /// Of those, rows of sequences that bring one row.
    pub decode_rows: usize,
    /// What every lane was granted.
    pub granted: Vec<u32>,
    pub experts: ExpertRows,
}

/// What all ranks replayed, by rank.
pub type Trace = Arc<Mutex<Vec<Vec<Replayed>>>>;

/// Wraps a backend.
pub struct Traced {
    pub inner: Box<dyn Backend>,
    pub rank: usize,
    pub trace: Trace,
    pub recordings: Vec<(StepShape, Arc<Vec<&'static str>>)>,
}

impl Backend for Traced {
    fn load_matrix(&mut self, parts: &[Slice]) -> Result<Weight, OpsError> {
        self.inner.load_matrix(parts)
    }

    fn load_experts(&mut self, experts: &[Vec<Slice>]) -> Result<Weight, OpsError> {
        self.inner.load_experts(experts)
    }

    fn load_vector(&mut self, parts: &[Slice]) -> Result<Weight, OpsError> {
        self.inner.load_vector(parts)
    }

    fn load_table(&mut self, table: &Tensor) -> Result<Weight, OpsError> {
        self.inner.load_table(table)
    }

    fn reserve(&mut self, reserve: &Reserve) -> Result<(), OpsError> {
        self.inner.reserve(reserve)
    }

    fn record(&mut self, recording: Recording) -> Result<usize, OpsError> {
        let ops = recording.ops().iter().map(|op| op.name()).collect();
        self.recordings.push((recording.shape(), Arc::new(ops)));
        self.inner.record(recording)
    }

    fn replay(
        &mut self,
        recording: usize,
        inputs: &StepInputs<'_>,
        collectives: &dyn Collectives,
        results: &mut [ScoredToken],
    ) -> Result<(), OpsError> {
        self.inner.replay(recording, inputs, collectives, results)?;
        let (shape, ops) = self.recordings[recording].clone();
        self.trace.lock().unwrap()[self.rank].push(Replayed {
            shape,
            ops,
            rows: inputs.tokens.len(),
            decode_rows: inputs.spans.iter().filter(|span| span.rows == 1).count(),
            granted: inputs.group_rows.to_vec(),
            experts: self.inner.expert_rows(),
        });
        Ok(())
    }

    fn expert_rows(&self) -> ExpertRows {
        self.inner.expert_rows()
    }
}
