//! A backend whose steps a test looks into, or spoils.

use super::kept::Kept;
use atom_base::ScoredToken;
use atom_ops::{
    Backend, Collectives, ExpertRows, LoadWeights, OpsError, Recording, Reserve, Slice, StepInputs, Weight,
};
use atom_weights::Tensor;
use std::collections::VecDeque;

/// What a test does around the calls of a rank's thread.
pub trait Hooks: Send {
    fn before_record(&mut self, _: &Recording) -> Result<(), OpsError> {
        Ok(())
    }

    fn before_replay(&mut self, _recording: usize, _: &StepInputs<'_>) -> Result<(), OpsError> {
        Ok(())
    }

    /// Pretends to heed no masks.
    fn is_deaf(&self) -> bool {
        false
    }

    fn after_replay(&mut self, _recording: usize, _: &StepInputs<'_>, _: ExpertRows) {}
}

/// A backend with hooks.
pub struct Hooked<H> {
    inner: Box<dyn Backend>,
    hooks: H,
    flights: VecDeque<Kept>,
}

impl<H> Hooked<H> {
    pub fn new(inner: Box<dyn Backend>, hooks: H) -> Self {
        Self { inner, hooks, flights: VecDeque::new() }
    }
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

    fn launch(
        &mut self,
        recording: usize,
        inputs: &StepInputs<'_>,
        collectives: &dyn Collectives,
    ) -> Result<(), OpsError> {
        self.hooks.before_replay(recording, inputs)?;
        self.flights.push_back(Kept::of(recording, inputs));
        self.inner.launch(recording, inputs, collectives)
    }

    fn finish(&mut self, results: &mut [ScoredToken]) -> Result<(), OpsError> {
        let kept = self.flights.pop_front().expect("a step is in flight");
        self.inner.finish(results)?;
        self.hooks.after_replay(kept.recording, &kept.inputs(), self.inner.expert_rows());
        Ok(())
    }

    fn abandon(&mut self) {
        self.flights.clear();
        self.inner.abandon();
    }

    fn heeds_masks(&self) -> bool {
        !self.hooks.is_deaf() && self.inner.heeds_masks()
    }

    fn count_experts(&mut self, counts: bool) {
        self.inner.count_experts(counts);
    }

    fn expert_rows(&self) -> ExpertRows {
        self.inner.expert_rows()
    }
}
