//! What every rank replayed: what the tests of lockstep look at.

use super::hooked::Hooks;
use atom_ops::{ExpertRows, OpsError, Recording, StepInputs, StepShape};
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

/// Writes down what one rank replays.
pub struct Tracer {
    pub rank: usize,
    pub trace: Trace,
    pub recordings: Vec<(StepShape, Arc<Vec<&'static str>>)>,
}

impl Hooks for Tracer {
    fn before_record(&mut self, recording: &Recording) -> Result<(), OpsError> {
        let ops = recording.ops().iter().map(|op| op.name()).collect();
        self.recordings.push((recording.shape(), Arc::new(ops)));
        Ok(())
    }

    fn after_replay(&mut self, recording: usize, inputs: &StepInputs<'_>, experts: ExpertRows) {
        let (shape, ops) = self.recordings[recording].clone();
        self.trace.lock().unwrap()[self.rank].push(Replayed {
            shape,
            ops,
            rows: inputs.tokens.len(),
            decode_rows: inputs.spans.iter().filter(|span| span.rows == 1).count(),
            granted: inputs.group_rows.to_vec(),
            experts,
        });
    }
}
