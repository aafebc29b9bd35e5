//! A GPU whose rank takes a step apart when it is asked to, between two others, and what came of it.

use atom_base::ScoredToken;
use atom_cuda::{CudaBackend, StepTimes};
use atom_ops::{
    Backend, Collectives, ExpertRows, LoadWeights, OpsError, Recording, Reserve, Slice, StepInputs, Weight,
};
use atom_weights::Tensor;
use serde::Serialize;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What is asked of a rank, and its answer.
#[derive(Default)]
pub(crate) struct Workshop(Mutex<Order>);

#[derive(Default)]
enum Order {
    #[default]
    None,
    /// The next step in which so many requests decode and nobody else does anything.
    Wanted {
        rows: usize,
        experts_read: f64,
    },
    Done(Result<StepTimes, OpsError>),
}

/// Passes everything on.
pub(crate) struct Observed {
    inner: CudaBackend,
    workshop: Arc<Workshop>,
    recordings: Vec<Option<Recording>>,
}

/// One step, taken apart.
#[derive(Debug, Serialize)]
pub(super) struct Operators {
    pub(super) batch: usize,
    pub(super) context: usize,
    pub(super) whole_us: f64,
    pub(super) copy_tb_per_s: f64,
    pub(super) kinds: Vec<OperatorKind>,
}

#[derive(Debug, Serialize)]
pub(super) struct OperatorKind {
    pub(super) name: String,
    pub(super) count: usize,
    /// All of them.
    pub(super) us: f64,
    /// Weights, keys and values that all of them read.
    pub(super) bytes: u64,
    /// None of what reads none of these.
    pub(super) tb_per_s: Option<f64>,
}

impl Workshop {
    pub(super) fn ask(&self, rows: usize, experts_read: f64) {
        *self.lock() = Order::Wanted { rows, experts_read };
    }

    /// What was asked for, once it is there.
    pub(super) fn take(&self) -> Option<Result<StepTimes, OpsError>> {
        let mut order = self.lock();
        match std::mem::take(&mut *order) {
            Order::Done(done) => Some(done),
            other => {
                *order = other;
                None
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Order> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observed {
    pub(crate) fn new(inner: CudaBackend, workshop: Arc<Workshop>) -> Self {
        Self { inner, workshop, recordings: Vec::new() }
    }
}

impl LoadWeights for Observed {
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

impl Backend for Observed {
    fn reserve(&mut self, reserve: &Reserve) -> Result<(), OpsError> {
        self.inner.reserve(reserve)
    }

    fn record(&mut self, recording: Recording) -> Result<usize, OpsError> {
        let number = self.inner.record(recording.clone())?;
        self.recordings.resize(self.recordings.len().max(number + 1), None);
        self.recordings[number] = Some(recording);
        Ok(number)
    }

    fn forget(&mut self, recording: usize) {
        self.recordings[recording] = None;
        self.inner.forget(recording);
    }

    fn launch(
        &mut self,
        recording: usize,
        inputs: &StepInputs<'_>,
        collectives: &dyn Collectives,
    ) -> Result<(), OpsError> {
        self.inner.launch(recording, inputs, collectives)?;
        let mut order = self.workshop.lock();
        if let Order::Wanted { rows, experts_read } = *order
            && inputs.spans.len() == rows
            && inputs.tokens.len() == rows
        {
            let recording = self.recordings[recording].as_ref().expect("it was not given up");
            *order = Order::Done(self.inner.time_operators(recording, inputs, experts_read));
        }
        Ok(())
    }

    fn finish(&mut self, results: &mut [ScoredToken]) -> Result<(), OpsError> {
        self.inner.finish(results)
    }

    fn abandon(&mut self) {
        self.inner.abandon();
    }

    fn heeds_masks(&self) -> bool {
        self.inner.heeds_masks()
    }

    fn count_experts(&mut self, counts: bool) {
        self.inner.count_experts(counts);
    }

    fn expert_rows(&self) -> ExpertRows {
        self.inner.expert_rows()
    }
}

impl Operators {
    pub(super) fn new((batch, context): (usize, usize), times: StepTimes) -> Self {
        let kinds = times.operators.into_iter().map(|kind| OperatorKind {
            tb_per_s: (kind.bytes > 0 && kind.us > 0.0).then(|| kind.bytes as f64 / kind.us / 1e6),
            name: kind.name,
            count: kind.count,
            us: kind.us,
            bytes: kind.bytes,
        });
        let copy_tb_per_s = times.copy_bytes_per_us / 1e6;
        Self { batch, context, whole_us: times.whole_us, copy_tb_per_s, kinds: kinds.collect() }
    }
}

impl fmt::Display for Operators {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, context, whole_us, copy_tb_per_s, kinds } = self;
        writeln!(f, "\na step of {batch} at {context}; a copy moves {copy_tb_per_s:.2} TB/s")?;
        writeln!(
            f,
            "{:44} {:>5} {:>10} {:>6} {:>9} {:>6} {:>8}",
            "", "count", "us", "share", "MB", "TB/s", "of copy"
        )?;
        let (mut us, mut bytes) = (0.0, 0);
        for kind in kinds {
            (us, bytes) = (us + kind.us, bytes + kind.bytes);
            write!(
                f,
                "{:44} {:>5} {:>10.1} {:>5.1}%",
                kind.name,
                kind.count,
                kind.us,
                100.0 * kind.us / whole_us
            )?;
            match kind.tb_per_s {
                Some(rate) => writeln!(
                    f,
                    " {:>9.1} {rate:>6.2} {:>7.0}%",
                    kind.bytes as f64 / 1e6,
                    100.0 * rate / copy_tb_per_s
                )?,
                None => writeln!(f)?,
            }
        }
        let rate = bytes as f64 / whole_us / 1e6;
        writeln!(f, "{:44} {:>5} {us:>10.1} {:>5.1}%", "sum", "", 100.0 * us / whole_us)?;
        writeln!(
            f,
            "{:44} {:>5} {whole_us:>10.1} {:>6} {:>9.1} {rate:>6.2} {:>7.0}%",
            "whole step",
            "",
            "",
            bytes as f64 / 1e6,
            100.0 * rate / copy_tb_per_s
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use atom_cuda::OperatorTime;

    #[test]
    fn rates_are_bytes_over_time_and_share_is_of_the_whole() {
        let kind = |name: &str, us, bytes| OperatorTime { name: name.into(), count: 2, us, bytes };
        let operators = vec![kind("linear 8 to 9", 30.0, 90_000_000), kind("norm", 10.0, 0)];
        let times = StepTimes { operators, whole_us: 40.0, copy_bytes_per_us: 4e6 };
        let text = Operators::new((32, 1024), times).to_string();
        for part in
            ["a step of 32 at 1024", "4.00 TB/s", "75.0%", "90.0   3.00      75%", "100.0%", "2.25      56%"]
        {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }
}
