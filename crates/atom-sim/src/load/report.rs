//! What a load came to, in virtual time.

use super::args::LoadArgs;
use crate::cost::StepWork;
use atom_group::{Prefill, StepNote};
use hdrhistogram::Histogram;
use std::fmt;

/// Rates, times and shares. Those of steps, tokens and times are of the window between the end of the
/// warm-up and the end of arrivals; counts of requests are of all.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadReport {
    /// Lanes of the group.
    pub lanes: usize,
    /// What was counted.
    pub counts: LoadCounts,
    /// From arrival to the first token, µs.
    pub first_token_us: Histogram<u64>,
    /// From one token to the next, µs.
    pub next_token_us: Histogram<u64>,
    /// From arrival to the end, µs.
    pub end_us: Histogram<u64>,
    from_us: f64,
    until_us: f64,
}

/// What is counted.
#[derive(Clone, Debug, Default, PartialEq)]
#[expect(missing_docs, reason = "each name says what it counts")]
pub struct LoadCounts {
    pub requests: u64,
    pub finished: u64,
    /// At the door, since all queues were full.
    pub refused: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub generated_tokens: u64,
    pub preemptions: u64,
    /// In the window, as everything below.
    pub window_tokens: u64,
    pub window_finished: u64,
    pub steps: u64,
    pub records: u64,
    /// Steps in which prompts waited for other lanes'.
    pub held_steps: u64,
    pub time_cut_rows: u64,
    pub edge_cut_rows: u64,
    /// Steps with prompt rows in some lane.
    pub prefill_steps: u64,
    /// Lanes with prompt rows, summed over those steps.
    pub prefill_lanes: u64,
    pub rows: u64,
    /// Of the fullest lane.
    pub largest_rows: u64,
    pub bucket_rows: u64,
    /// Time in steps, µs.
    pub step_us: f64,
}

impl LoadReport {
    pub(super) fn new(args: &LoadArgs) -> Self {
        let histogram = || Histogram::new(3).expect("3 digits are within its bounds");
        Self {
            lanes: args.lanes,
            counts: LoadCounts::default(),
            first_token_us: histogram(),
            next_token_us: histogram(),
            end_us: histogram(),
            from_us: args.warm_up_seconds * 1e6,
            until_us: args.seconds * 1e6,
        }
    }

    /// True for what happens in the window.
    pub(super) fn counts_at(&self, now_us: f64) -> bool {
        (self.from_us..self.until_us).contains(&now_us)
    }

    pub(super) fn first_token(&mut self, arrived_us: f64, now_us: f64) {
        self.counts.window_tokens += u64::from(self.counts_at(now_us));
        // By arrival: of an overload, those who waited longest must not be missing.
        if self.counts_at(arrived_us) {
            note(&mut self.first_token_us, arrived_us, now_us);
        }
    }

    pub(super) fn next_token(&mut self, last_us: f64, now_us: f64) {
        if self.counts_at(now_us) {
            self.counts.window_tokens += 1;
            note(&mut self.next_token_us, last_us, now_us);
        }
    }

    pub(super) fn end(&mut self, arrived_us: f64, now_us: f64) {
        self.counts.window_finished += u64::from(self.counts_at(now_us));
        if self.counts_at(arrived_us) {
            note(&mut self.end_us, arrived_us, now_us);
        }
    }

    pub(super) fn count(&mut self, work: &StepWork, us: f64, prefilling: u64, note: StepNote) {
        let c = &mut self.counts;
        c.steps += 1;
        c.held_steps += u64::from(matches!(note.prefill, Prefill::Held { .. }));
        c.time_cut_rows += u64::from(note.time_cut_rows);
        c.edge_cut_rows += u64::from(note.edge_cut_rows);
        c.prefill_steps += u64::from(prefilling > 0);
        c.prefill_lanes += prefilling;
        c.rows += work.rows.sum;
        c.largest_rows += work.rows.max;
        c.bucket_rows += work.bucket_rows;
        c.step_us += us;
    }

    /// Seconds of the window.
    pub fn window_seconds(&self) -> f64 {
        (self.until_us - self.from_us) / 1e6
    }

    /// Tokens generated in a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.counts.window_tokens as f64 / self.window_seconds()
    }

    /// Requests finished in a second.
    pub fn requests_per_second(&self) -> f64 {
        self.counts.window_finished as f64 / self.window_seconds()
    }

    /// Rows of buckets, over all lanes, that no request used.
    pub fn padding_share(&self) -> f64 {
        1.0 - share(self.counts.rows as f64, (self.counts.bucket_rows * self.lanes as u64) as f64)
    }

    /// Rows of buckets that not even the fullest lane used: what another lattice could save.
    pub fn rounding_share(&self) -> f64 {
        1.0 - share(self.counts.largest_rows as f64, self.counts.bucket_rows as f64)
    }

    /// Lanes that prefill in a step in which some lane does, of all.
    pub fn alignment_share(&self) -> f64 {
        share(self.counts.prefill_lanes as f64, (self.counts.prefill_steps * self.lanes as u64) as f64)
    }

    /// Steps that replayed, of those and recordings.
    pub fn replay_share(&self) -> f64 {
        share(self.counts.steps as f64, (self.counts.steps + self.counts.records) as f64)
    }

    /// Time in steps, of the window.
    pub fn busy_share(&self) -> f64 {
        self.counts.step_us / 1e6 / self.window_seconds()
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.counts;
        let percent = |share: f64| format!("{:.1}%", 100.0 * share);
        writeln!(
            f,
            "requests     {}; {} finished, {} refused at the door, {} times preempted",
            c.requests, c.finished, c.refused, c.preemptions
        )?;
        writeln!(
            f,
            "tokens       {} of prompt ({} from the cache), {} generated",
            c.prompt_tokens,
            percent(share(c.cached_tokens as f64, c.prompt_tokens as f64)),
            c.generated_tokens
        )?;
        writeln!(
            f,
            "rates        {:.1} tokens/s, {:.2} requests/s over {:.1} s, {} of them in steps",
            self.tokens_per_second(),
            self.requests_per_second(),
            self.window_seconds(),
            percent(self.busy_share())
        )?;
        let mean_ms = share(c.step_us / 1000.0, c.steps as f64);
        writeln!(
            f,
            "steps        {} of {mean_ms:.2} ms in the mean, {} recordings (replays {})",
            c.steps,
            c.records,
            percent(self.replay_share())
        )?;
        writeln!(
            f,
            "rows         {} real; padding {}, of which beside the fullest lane {}",
            c.rows,
            percent(self.padding_share()),
            percent(self.rounding_share())
        )?;
        writeln!(
            f,
            "alignment    {} of lanes prefill in the {} steps in which some do; {} steps held prompts",
            percent(self.alignment_share()),
            c.prefill_steps,
            c.held_steps
        )?;
        writeln!(f, "cuts         {} rows by time, {} to an edge", c.time_cut_rows, c.edge_cut_rows)?;
        let times = [
            ("first token", &self.first_token_us),
            ("next token", &self.next_token_us),
            ("whole request", &self.end_us),
        ];
        times.into_iter().try_for_each(|(name, histogram)| {
            let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1000.0;
            let (p50, p90, p99, max) = (at(0.5), at(0.9), at(0.99), histogram.max() as f64 / 1000.0);
            writeln!(f, "{name:13} p50 {p50:.2} p90 {p90:.2} p99 {p99:.2} max {max:.2} ms")
        })
    }
}

/// Nothing of nothing is nothing.
fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

fn note(histogram: &mut Histogram<u64>, from_us: f64, to_us: f64) {
    histogram.record((to_us - from_us).round() as u64).expect("it grows as needed");
}
