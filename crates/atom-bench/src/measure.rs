//! Samples added up: histograms, sums and failures.

use crate::client::Sample;
use crate::error::{Failure, FailureKind};
use hdrhistogram::Histogram;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Where the values of a metric lie, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Arithmetic mean.
    pub mean: f64,
    /// Half of the values are at most this.
    pub p50: f64,
    /// 90 of 100 are.
    pub p90: f64,
    /// 99 of 100 are.
    pub p99: f64,
    /// The largest.
    pub max: f64,
}

/// What a worker saw; several are merged into a level.
#[derive(Clone, Debug)]
pub(crate) struct Tally {
    pub(crate) ttft: Values,
    pub(crate) tpot: Values,
    pub(crate) itl: Values,
    pub(crate) e2e: Values,
    pub(crate) completed: usize,
    /// Answers whose tokens the server did not count.
    pub(crate) uncounted: usize,
    /// Answers that ended before `max_tokens`.
    pub(crate) short: usize,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) output_tokens: u64,
    /// Count and first message of each kind.
    pub(crate) failures: BTreeMap<FailureKind, (usize, String)>,
}

/// A histogram of durations. Three digits, a microsecond to six hours; larger values count as that.
#[derive(Clone, Debug)]
pub(crate) struct Values(Histogram<u64>);

const LONGEST_US: u64 = 6 * 3600 * 1_000_000;
const DIGITS: u8 = 3;

impl Tally {
    pub(crate) fn new() -> Self {
        Self {
            ttft: Values::new(),
            tpot: Values::new(),
            itl: Values::new(),
            e2e: Values::new(),
            completed: 0,
            uncounted: 0,
            short: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            output_tokens: 0,
            failures: BTreeMap::new(),
        }
    }

    pub(crate) fn add(&mut self, sample: &Sample, max_tokens: u32) {
        let tokens = sample.output_tokens();
        self.completed += 1;
        self.uncounted += usize::from(sample.completion_tokens.is_none());
        self.short += usize::from(tokens < u64::from(max_tokens));
        self.prompt_tokens += sample.prompt_tokens.unwrap_or(0);
        self.cached_tokens += sample.cached_tokens.unwrap_or(0);
        self.output_tokens += tokens;
        self.e2e.record(sample.e2e);
        if let Some(ttft) = sample.ttft {
            self.ttft.record(ttft);
        }
        for &gap in &sample.gaps {
            self.itl.record(gap);
        }
        if let Some(gaps) =
            u32::try_from(tokens).ok().and_then(|tokens| tokens.checked_sub(1)).filter(|&n| n > 0)
            && sample.ttft.is_some()
        {
            self.tpot.record(sample.gaps.iter().sum::<Duration>() / gaps);
        }
    }

    pub(crate) fn fail(&mut self, failure: Failure) {
        self.failures.entry(failure.kind).or_insert((0, failure.message)).0 += 1;
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.ttft.merge(&other.ttft);
        self.tpot.merge(&other.tpot);
        self.itl.merge(&other.itl);
        self.e2e.merge(&other.e2e);
        self.completed += other.completed;
        self.uncounted += other.uncounted;
        self.short += other.short;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.output_tokens += other.output_tokens;
        for (kind, (count, message)) in other.failures {
            self.failures.entry(kind).or_insert((0, message)).0 += count;
        }
    }

    pub(crate) fn failed(&self) -> usize {
        self.failures.values().map(|(count, _)| count).sum()
    }
}

impl Values {
    fn new() -> Self {
        Self(Histogram::new_with_bounds(1, LONGEST_US, DIGITS).expect("constant bounds that are legal"))
    }

    fn record(&mut self, value: Duration) {
        self.0.saturating_record(value.as_micros().min(u128::from(LONGEST_US)) as u64);
    }

    fn merge(&mut self, other: &Self) {
        self.0.add(&other.0).expect("both have the same bounds");
    }

    /// None without values.
    pub(crate) fn spread(&self) -> Option<Spread> {
        let ms = |us: u64| us as f64 / 1e3;
        let at = |quantile| ms(self.0.value_at_quantile(quantile));
        (!self.0.is_empty()).then(|| Spread {
            mean: self.0.mean() / 1e3,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            max: ms(self.0.max()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(value: f64, expected: f64) {
        // Three digits of the histogram.
        assert!((value - expected).abs() <= expected / 500.0, "{value} instead of {expected}");
    }

    #[test]
    fn quantiles_are_those_of_the_values_whoever_recorded_them() {
        let mut parts = vec![Values::new(); 3];
        for ms in 1..=1000_u64 {
            parts[ms as usize % 3].record(Duration::from_millis(ms));
        }
        let mut all = Values::new();
        parts.iter().for_each(|part| all.merge(part));
        let spread = all.spread().unwrap();
        near(spread.mean, 500.5);
        near(spread.p50, 500.0);
        near(spread.p90, 900.0);
        near(spread.p99, 990.0);
        near(spread.max, 1000.0);
        assert_eq!(Values::new().spread(), None);
        all.record(Duration::from_secs(1_000_000));
        near(all.spread().unwrap().max, LONGEST_US as f64 / 1e3);
    }

    #[test]
    fn time_per_token_divides_by_the_tokens_the_server_counted() {
        let sample = |completion_tokens| Sample {
            ttft: Some(Duration::from_millis(100)),
            gaps: vec![Duration::from_millis(30), Duration::from_millis(50)],
            e2e: Duration::from_millis(190),
            prompt_tokens: Some(7),
            completion_tokens,
            ..Sample::default()
        };
        let mut tally = Tally::new();
        // Nine tokens in three pieces.
        tally.add(&sample(Some(9)), 9);
        near(tally.tpot.spread().unwrap().mean, 10.0);
        assert_eq!((tally.output_tokens, tally.uncounted, tally.short), (9, 0, 0));
        let mut tally = Tally::new();
        tally.add(&sample(None), 9);
        near(tally.tpot.spread().unwrap().mean, 40.0);
        assert_eq!((tally.output_tokens, tally.uncounted, tally.short), (3, 1, 1));
        let mut tally = Tally::new();
        tally.add(&sample(Some(1)), 1);
        assert_eq!(tally.tpot.spread(), None, "a single token has no time per further token");
    }

    #[test]
    fn failures_are_counted_by_kind_with_the_first_message() {
        let mut tally = Tally::new();
        for (kind, message) in
            [(FailureKind::Timeout, "a"), (FailureKind::Status(500), "b"), (FailureKind::Timeout, "c")]
        {
            tally.fail(Failure::new(kind, message));
        }
        let mut all = Tally::new();
        all.fail(Failure::new(FailureKind::Timeout, "z"));
        all.merge(tally);
        assert_eq!(all.failed(), 4);
        assert_eq!(all.failures[&FailureKind::Timeout], (3, "z".into()));
        assert_eq!(all.failures[&FailureKind::Status(500)], (1, "b".into()));
    }
}
