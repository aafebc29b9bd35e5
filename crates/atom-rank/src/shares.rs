//! Shares of padding, counted step by step.

use std::sync::atomic::{AtomicU64, Ordering};

/// Steps by the share of their bucket that was padding.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PaddingShares {
    /// `steps[i]` had a share of at most [`Self::BOUNDS`]`[i]`, and more than the bound before.
    pub steps: [u64; PaddingShares::BOUNDS.len()],
    /// The sum of all shares.
    pub sum: f64,
}

/// The same while it is counted. Relaxed: each number is right by itself.
#[derive(Default)]
pub(crate) struct ShareGauge {
    steps: [AtomicU64; PaddingShares::BOUNDS.len()],
    /// In millionths: a million steps of nothing but padding are 2^40.
    sum_ppm: AtomicU64,
}

impl PaddingShares {
    /// Ascending; no share is larger than the last. A quarter is what `--padding-max` allows by default.
    pub const BOUNDS: [f64; 7] = [0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0];

    /// Steps counted.
    pub fn count(&self) -> u64 {
        self.steps.iter().sum()
    }

    /// Steps with a share of more than a bound.
    pub fn above(&self, bound: f64) -> u64 {
        Self::BOUNDS.iter().zip(self.steps).filter(|(upper, _)| **upper > bound).map(|(_, steps)| steps).sum()
    }
}

impl ShareGauge {
    /// Counts a step of `rows` rows in a bucket of `bucket`, which is not 0.
    pub(crate) fn count(&self, rows: usize, bucket: usize) {
        let padding = bucket - rows;
        let share = padding as f64 / bucket as f64;
        let at = PaddingShares::BOUNDS.iter().position(|&bound| share <= bound);
        let at = at.expect("a bucket is no more than padding");
        self.steps[at].fetch_add(1, Ordering::Relaxed);
        self.sum_ppm.fetch_add((padding * 1_000_000 / bucket) as u64, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> PaddingShares {
        PaddingShares {
            steps: std::array::from_fn(|at| self.steps[at].load(Ordering::Relaxed)),
            sum: self.sum_ppm.load(Ordering::Relaxed) as f64 / 1e6,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_counted_below_the_first_bound_that_holds_its_share() {
        let gauge = ShareGauge::default();
        for (rows, bucket) in [(8, 8), (19, 20), (18, 20), (96, 128), (95, 128), (1, 4), (0, 4), (0, 1)] {
            gauge.count(rows, bucket);
        }
        let shares = gauge.read();
        assert_eq!(shares.steps, [1, 1, 1, 1, 1, 1, 2]);
        assert_eq!((shares.count(), shares.above(0.25), shares.above(0.75)), (8, 4, 2));
        assert!(
            (shares.sum - (0.05 + 0.1 + 0.25 + 33.0 / 128.0 + 0.75 + 2.0)).abs() < 1e-5,
            "{}",
            shares.sum
        );
    }
}
