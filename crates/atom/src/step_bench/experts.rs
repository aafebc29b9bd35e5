//! How many different experts steps of a mixture read: what its speed depends on, and what must be as it would be if
//! rows chose evenly, or the speed is another load's.

use atom_rank::StepRecord;
use atom_weights::ModelConfig;
use serde::Serialize;
use std::fmt;

/// A model's mixture layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mixture {
    layers: usize,
    experts: usize,
    top_k: usize,
}

/// Means over steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct ExpertsRead {
    /// Different experts that the rows of a step chose, of each mixture layer.
    pub(super) per_layer_and_step: f64,
    /// The same if every row chose evenly: E (1 - (1 - k/E)^rows).
    pub(super) expected: f64,
    pub(super) deviation_percent: f64,
    /// Near enough for the figure to be of the load that it is named after.
    pub(super) counts: bool,
    pub(super) steps: usize,
}

impl Mixture {
    /// None in a dense model.
    pub(super) fn of(config: &ModelConfig) -> Option<Self> {
        let moe = config.moe.as_ref()?;
        let layers = (0..config.layers).filter(|&layer| !config.is_dense(layer)).count();
        Some(Self { layers, experts: moe.experts, top_k: moe.top_k })
    }

    pub(super) fn expected(&self, rows: u32) -> f64 {
        let experts = self.experts as f64;
        experts * (1.0 - (1.0 - self.top_k as f64 / experts).powf(f64::from(rows)))
    }

    /// Of the steps that counted; none if no step did.
    pub(super) fn read(&self, steps: &[StepRecord]) -> Option<ExpertsRead> {
        let counted: Vec<&StepRecord> = steps.iter().filter(|step| step.distinct_experts > 0).collect();
        let mean = |of: &dyn Fn(&StepRecord) -> f64| {
            counted.iter().map(|step| of(step)).sum::<f64>() / counted.len() as f64
        };
        if counted.is_empty() {
            return None;
        }
        let found = mean(&|step| f64::from(step.distinct_experts) / self.layers as f64);
        let expected = mean(&|step| self.expected(step.decode_rows + step.prefill_rows));
        let deviation_percent = 100.0 * (found / expected - 1.0);
        let counts = deviation_percent.abs() <= DEVIATION_PERCENT_MAX;
        Some(ExpertsRead {
            per_layer_and_step: found,
            expected,
            deviation_percent,
            counts,
            steps: counted.len(),
        })
    }
}

impl fmt::Display for ExpertsRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { per_layer_and_step, expected, deviation_percent, counts, .. } = self;
        write!(f, "{per_layer_and_step:.1} experts, {expected:.1} if even: {deviation_percent:+.1}%")?;
        if *counts { Ok(()) } else { f.write_str(", DOES NOT COUNT") }
    }
}

/// Rows that choose less evenly read fewer weights: such a step would be faster than any real one.
const DEVIATION_PERCENT_MAX: f64 = 5.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_compared_with_even_choices() {
        let mixture = Mixture { layers: 48, experts: 128, top_k: 8 };
        let step = |rows: u32, distinct_experts: u32| StepRecord {
            decode_rows: rows,
            distinct_experts,
            ..StepRecord::default()
        };
        // 128 * (1 - (15/16)^32) = 111.77
        let read = mixture.read(&[step(32, 48 * 110), step(32, 48 * 112), step(32, 0)]).unwrap();
        assert_eq!((read.per_layer_and_step, read.steps, read.counts), (111.0, 2, true));
        assert!((read.expected - 111.77).abs() < 0.01 && (read.deviation_percent + 0.69).abs() < 0.01);
        let one = mixture.read(&[step(1, 48 * 8)]).unwrap();
        assert!((one.expected - 8.0).abs() < 1e-9 && one.counts);
        let uneven = mixture.read(&[step(32, 48 * 100)]).unwrap();
        assert!(!uneven.counts && uneven.to_string().contains("DOES NOT COUNT"), "{uneven}");
        assert_eq!(mixture.read(&[step(32, 0)]), None);
    }
}
