//! What was seen: counts, times in virtual time, and failures with the command that repeats them.

use crate::broken::Broken;
use crate::ledger::Gaps;
use crate::options::WorldOptions;
use crate::world::World;
use hdrhistogram::Histogram;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use thiserror::Error;

/// A seed that broke a rule.
#[derive(Clone, Debug, Error, PartialEq)]
#[error("seed {seed}, tick {tick}: {broken}\n  repeat with: {command}")]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// Exchanges of the group until then.
    pub tick: u64,
    /// What was found.
    pub broken: Box<Broken>,
    /// How to see it again.
    pub command: String,
}

/// Sums over worlds.
#[derive(Clone, Debug)]
pub struct Report {
    /// Worlds that ran.
    pub worlds: u64,
    /// What was counted in them.
    pub counts: Counts,
    /// Steps by rows of their bucket.
    pub buckets: BTreeMap<usize, u64>,
    /// A hash of all plans, results and decisions: equal seeds, equal traces.
    pub trace: u64,
    /// From arrival to the first token, µs.
    pub first_token_us: Histogram<u64>,
    /// From one token to the next, µs.
    pub next_token_us: Histogram<u64>,
    /// From arrival to the end of a request, steps of its group.
    pub steps_to_finish: Histogram<u64>,
    /// Seeds that broke a rule.
    pub failures: Vec<Failure>,
}

/// What is counted in a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "each name says what it counts")]
pub struct Counts {
    pub steps: u64,
    pub records: u64,
    pub parks: u64,
    /// Parks of a paused group that has work.
    pub pauses: u64,
    /// Steps in which prompts waited for other lanes'.
    pub held_steps: u64,
    /// Prompt rows put off by the bound of a step's time.
    pub time_cut_rows: u64,
    /// Prompt rows put off by the bound of padding.
    pub edge_cut_rows: u64,
    /// Lanes times steps in which the lane had no row.
    pub idle_lane_steps: u64,
    pub requests: u64,
    pub refused: u64,
    pub finished: u64,
    pub aborted: u64,
    pub failed: u64,
    pub admissions: u64,
    pub preemptions: u64,
    /// Lane faults that the group survived.
    pub lane_faults: u64,
    /// Groups that ended before their time.
    pub calamities: u64,
    pub rows: u64,
    pub padding_rows: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub generated_tokens: u64,
}

/// Runs one world for each seed. Failing seeds are kept in the report, panics too, and don't stop it.
pub fn run_seeds(seeds: Range<u64>, options: &WorldOptions) -> Report {
    let mut report = Report::new();
    for seed in seeds {
        match World::new(seed, options).run() {
            Ok(world) => report.add(&world),
            Err(failure) => report.failures.push(failure),
        }
    }
    report
}

impl Report {
    pub(crate) fn new() -> Self {
        let histogram = || Histogram::new(2).expect("2 digits are within its bounds");
        Self {
            worlds: 0,
            counts: Counts::default(),
            buckets: BTreeMap::new(),
            trace: 0,
            first_token_us: histogram(),
            next_token_us: histogram(),
            steps_to_finish: histogram(),
            failures: Vec::new(),
        }
    }

    pub(crate) fn note(&mut self, gaps: &Gaps) {
        let pairs = [
            (&mut self.first_token_us, &gaps.first_token_us),
            (&mut self.next_token_us, &gaps.next_token_us),
            (&mut self.steps_to_finish, &gaps.steps_to_finish),
        ];
        for (histogram, values) in pairs {
            for &value in values {
                histogram.record(value).expect("it grows as needed");
            }
        }
    }

    fn add(&mut self, other: &Self) {
        self.worlds += other.worlds;
        self.counts.add(&other.counts);
        for (&rows, steps) in &other.buckets {
            *self.buckets.entry(rows).or_default() += steps;
        }
        self.trace = self.trace.rotate_left(1) ^ other.trace;
        let pairs = [
            (&mut self.first_token_us, &other.first_token_us),
            (&mut self.next_token_us, &other.next_token_us),
            (&mut self.steps_to_finish, &other.steps_to_finish),
        ];
        for (sum, part) in pairs {
            sum.add(part).expect("it grows as needed");
        }
    }
}

impl Counts {
    fn add(&mut self, other: &Self) {
        // Taken apart, so that a count that is added later can't be forgotten here.
        let Self {
            steps,
            records,
            parks,
            pauses,
            held_steps,
            time_cut_rows,
            edge_cut_rows,
            idle_lane_steps,
            requests,
            refused,
            finished,
            aborted,
            failed,
            admissions,
            preemptions,
            lane_faults,
            calamities,
            rows,
            padding_rows,
            prompt_tokens,
            cached_tokens,
            generated_tokens,
        } = other;
        let pairs = [
            (&mut self.steps, steps),
            (&mut self.records, records),
            (&mut self.parks, parks),
            (&mut self.pauses, pauses),
            (&mut self.held_steps, held_steps),
            (&mut self.time_cut_rows, time_cut_rows),
            (&mut self.edge_cut_rows, edge_cut_rows),
            (&mut self.idle_lane_steps, idle_lane_steps),
            (&mut self.requests, requests),
            (&mut self.refused, refused),
            (&mut self.finished, finished),
            (&mut self.aborted, aborted),
            (&mut self.failed, failed),
            (&mut self.admissions, admissions),
            (&mut self.preemptions, preemptions),
            (&mut self.lane_faults, lane_faults),
            (&mut self.calamities, calamities),
            (&mut self.rows, rows),
            (&mut self.padding_rows, padding_rows),
            (&mut self.prompt_tokens, prompt_tokens),
            (&mut self.cached_tokens, cached_tokens),
            (&mut self.generated_tokens, generated_tokens),
        ];
        for (sum, part) in pairs {
            *sum += part;
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.counts;
        let percent = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
        writeln!(
            f,
            "worlds       {} and {} failed; trace {:016x}",
            self.worlds,
            self.failures.len(),
            self.trace
        )?;
        writeln!(
            f,
            "steps        {}; {} records, {} parks, {} lane steps without rows",
            c.steps, c.records, c.parks, c.idle_lane_steps
        )?;
        writeln!(
            f,
            "policy       {} steps held, {} rows cut by time, {} to an edge, {} parks with work",
            c.held_steps, c.time_cut_rows, c.edge_cut_rows, c.pauses
        )?;
        writeln!(
            f,
            "requests     {}; {} finished, {} aborted, {} failed, {} refused at the door",
            c.requests, c.finished, c.aborted, c.failed, c.refused
        )?;
        writeln!(
            f,
            "disturbed    {} preemptions in {} admissions, {} lane faults, {} groups ended by a calamity",
            c.preemptions, c.admissions, c.lane_faults, c.calamities
        )?;
        writeln!(
            f,
            "tokens       {} of prompt ({:.1}% from the cache), {} generated",
            c.prompt_tokens,
            percent(c.cached_tokens, c.prompt_tokens),
            c.generated_tokens
        )?;
        let all = c.rows + c.padding_rows;
        writeln!(f, "rows         {} real, {:.1}% padding", c.rows, percent(c.padding_rows, all))?;
        let mut buckets: Vec<_> = self.buckets.iter().collect();
        buckets.sort_by_key(|&(_, steps)| std::cmp::Reverse(steps));
        let share = |&(rows, &steps): &(&usize, &u64)| format!("{rows} ({:.1}%)", percent(steps, c.steps));
        let most: Vec<_> = buckets.iter().take(BUCKETS_SHOWN).map(share).collect();
        writeln!(f, "buckets      {} of different rows, most often {}", buckets.len(), most.join(", "))?;
        let times = [
            ("first token", &self.first_token_us, "µs"),
            ("next token", &self.next_token_us, "µs"),
            ("to finish", &self.steps_to_finish, "steps"),
        ];
        for (name, histogram, unit) in times {
            let at = |quantile| histogram.value_at_quantile(quantile);
            writeln!(f, "{name:12} p50 {} p99 {} max {} {unit}", at(0.5), at(0.99), histogram.max())?;
        }
        self.failures.iter().try_for_each(|failure| writeln!(f, "FAILED {failure}"))
    }
}

/// Sizes are drawn anew for each world, so there are many; these make most steps.
const BUCKETS_SHOWN: usize = 8;
