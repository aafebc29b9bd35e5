//! A backend whose steps a test looks into, or spoils.

use atom_base::ScoredToken;
use atom_ops::{
    Backend, Collectives, ExpertRows, LoadWeights, OpsError, Recording, Reserve, Slice, StepInputs, Weight,
};
use atom_weights::Tensor;

/// What a test does around the calls of a rank's thread.
pub trait Hooks: Send {
    fn before_record(&mut self, _: &Recording) -> Result<(), OpsError> {
        Ok(())
    }

    fn before_replay(&mut self, _recording: usize, _: &StepInputs<'_>) -> Result<(), OpsError> {
        Ok(())
    }

    fn after_replay(&mut self, _recording: usize, _: &StepInputs<'_>, _: ExpertRows) {}
}

/// A backend with hooks.
pub struct Hooked<H> {
    pub inner: Box<dyn Backend>,
    pub hooks: H,
}

impl<H: Hooks> LoadWeights for Hooked<H> {
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
}

impl<H: Hooks> Backend for Hooked<H> {
    fn reserve(&mut self, reserve: &Reserve) -> Result<(), OpsError> {
        self.inner.reserve(reserve)
    }

    fn record(&mut self, recording: Recording) -> Result<usize, OpsError> {
        self.hooks.before_record(&recording)?;
        self.inner.record(recording)
    }

    fn forget(&mut self, recording: usize) {
        self.inner.forget(recording);
    }

    fn replay(
        &mut self,
        recording: usize,
        inputs: &StepInputs<'_>,
        collectives: &dyn Collectives,
        results: &mut [ScoredToken],
    ) -> Result<(), OpsError> {
        self.hooks.before_replay(recording, inputs)?;
        self.inner.replay(recording, inputs, collectives, results)?;
        self.hooks.after_replay(recording, inputs, self.inner.expert_rows());
        Ok(())
    }

    fn expert_rows(&self) -> ExpertRows {
        self.inner.expert_rows()
    }
}
