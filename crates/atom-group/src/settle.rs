//! The decision: from everybody's facts to what the group does next. Pure: no clock, no
//! configuration, no randomness that is not in [`GroupState`].

use crate::facts::{Facts, FactsFlags};
use crate::lattice::{BUCKETS_MAX, Bucket, GroupRows, Lattice};
use atom_base::{StepNo, limits::RANKS_MAX};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// What all lanes of a group know alike. Equal by induction: same start, same facts, same function.
#[derive(Clone, Debug)]
pub struct GroupState {
    lattice: Arc<Lattice>,
    lanes: usize,
    record_all: bool,
    patience: Patience,
    step: StepNo,
    last: Last,
    recorded: [Option<u64>; BUCKETS_MAX],
    slowest_us: [u32; BUCKETS_MAX],
    steps_since_record: u32,
}

/// Deadlines that don't depend on measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// No deadline is shorter: schedulers of a loaded host may hold a thread back this long.
    pub min: Duration,
    /// Recordings and first replays load code, touch memory and compile.
    pub first: Duration,
}

/// What the group does in a step. Equal on all lanes.
#[expect(clippy::large_enum_variant, reason = "grants are inline so that a step allocates nothing")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GroupStep {
    /// Nobody has work: sleep in the next exchange until somebody does.
    Park,
    /// The group ends.
    Exit(ExitCause),
    /// Everybody records this bucket.
    Record(Bucket),
    /// Everybody replays this bucket, a lane without rows too.
    Step {
        /// The shape of everything in this step.
        bucket: Bucket,
        /// Rows of each lane.
        grants: Grants,
    },
}

/// Why a group ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitCause {
    /// Every lane asked for it and has no work left.
    Asked,
    /// This lane (its place in the group) can't go on.
    Fatal {
        /// Place of the lane within the group.
        lane: usize,
    },
}

/// What one lane may run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Requests that decode one token.
    pub decode_rows: u32,
    /// Prompt positions.
    pub prefill_rows: u32,
}

/// The grants of all lanes, inline: a step allocates nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grants {
    len: usize,
    lanes: [Grant; RANKS_MAX],
}

/// Two lanes that should agree do not: a bug, or a corrupted lane. Found at the next exchange.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "step {step}: lane {lane} says {what} {theirs:#x}, lane {own_lane} has {ours:#x}; the lanes of this group have diverged"
)]
pub struct Divergence {
    /// The step whose exchange found it.
    pub step: StepNo,
    /// What differs: `step`, `group state`, `recording signature`.
    pub what: &'static str,
    /// The lane that differs.
    pub lane: usize,
    /// Its value.
    pub theirs: u64,
    /// The lane compared with.
    pub own_lane: usize,
    /// That lane's value.
    pub ours: u64,
}

/// What the step before did, and so what the signature in the facts is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    Nothing,
    Recorded(Bucket),
    Replayed(Bucket),
}

impl GroupState {
    /// The state before the first step. `record_all` records every bucket before anything is served.
    pub fn new(lattice: Arc<Lattice>, lanes: usize, record_all: bool) -> Self {
        assert!((1..=RANKS_MAX).contains(&lanes), "{lanes} lanes");
        Self {
            lattice,
            lanes,
            record_all,
            patience: Patience::default(),
            step: StepNo(0),
            last: Last::Nothing,
            recorded: [None; BUCKETS_MAX],
            slowest_us: [0; BUCKETS_MAX],
            steps_since_record: 0,
        }
    }

    /// The same with other deadlines: equal on all lanes, like everything here.
    pub fn with_patience(self, patience: Patience) -> Self {
        Self { patience, ..self }
    }

    /// The step that comes next.
    pub fn next_step(&self) -> StepNo {
        StepNo(self.step.0 + 1)
    }

    /// The largest bucket: what a lane's want is capped by.
    pub fn top(&self) -> Bucket {
        self.lattice.top()
    }

    /// True once every recording that start-up asks for has been made and compared.
    pub fn ready(&self) -> bool {
        self.next_start_record().is_none() && self.last_is_compared()
    }

    /// How long a lane waits for the others in the next exchange, and what a replay of the last bucket
    /// may take: `max(2 s, 20 x slowest)`, and at least 60 s while recording and for a first replay.
    ///
    /// The slowest replay of any bucket counts: a small bucket with long contexts may take longer than
    /// it ever did before, but whoever decodes at a length has prefilled it.
    pub fn patience(&self) -> Duration {
        let measured = |bucket: Bucket| self.slowest_us[bucket.index()] > 0;
        let base = match self.last {
            Last::Replayed(bucket) if measured(bucket) => self.patience.min,
            Last::Nothing | Last::Recorded(_) | Last::Replayed(_) => self.patience.first,
        };
        let slowest = self.slowest_us.iter().copied().max().unwrap_or(0);
        base.max(Duration::from_micros(slowest.into()) * PATIENCE_FACTOR)
    }

    /// Hash of everything above, for [`Facts::state_hash`].
    pub fn hash(&self) -> u64 {
        let mut hash = 0x9e37_79b9_7f4a_7c15_u64;
        let mut eat = |word: u64| hash = (hash ^ word).wrapping_mul(0xd6e8_feb8_6659_fd93).rotate_left(29);
        eat(self.step.0);
        eat(match self.last {
            Last::Nothing => 0,
            Last::Recorded(bucket) => 1 << 32 | bucket.index() as u64,
            Last::Replayed(bucket) => 2 << 32 | bucket.index() as u64,
        });
        eat(self.steps_since_record.into());
        let used = self.lattice.buckets().len();
        for (signature, slowest) in self.recorded.iter().zip(&self.slowest_us).take(used) {
            eat(signature.map_or(0, |s| s | 1));
            eat(u64::from(*slowest));
        }
        hash
    }

    /// Buckets recorded so far.
    pub fn recordings(&self) -> usize {
        self.recorded.iter().flatten().count()
    }

    fn last_is_compared(&self) -> bool {
        !matches!(self.last, Last::Recorded(bucket) if self.recorded[bucket.index()].is_none())
    }

    /// What must be recorded before serving: the largest first, so that every step has a recording above.
    fn next_start_record(&self) -> Option<Bucket> {
        let buckets = self.lattice.buckets();
        let small = if self.record_all { buckets.len() } else { START_SMALL.min(buckets.len()) };
        let wanted = std::iter::once(self.lattice.top()).chain(buckets[..small].iter().rev().copied());
        wanted.into_iter().find(|b| self.recorded[b.index()].is_none())
    }

    fn recorded_at_or_above(&self, bucket: Bucket) -> Bucket {
        let above = &self.lattice.buckets()[bucket.index()..];
        *above.iter().find(|b| self.recorded[b.index()].is_some()).expect("the top is recorded first")
    }

    /// Takes in what lanes say of the step before; finds lanes that disagree.
    fn compare(&mut self, facts: &[Facts]) -> Result<(), Divergence> {
        let step = self.next_step();
        let hash = self.hash();
        let differ = |what, lane, theirs, ours| Divergence { step, what, lane, theirs, own_lane: 0, ours };
        for (lane, f) in facts.iter().enumerate() {
            if f.step != step {
                return Err(differ("step", lane, f.step.0, step.0));
            }
            if f.state_hash != hash {
                return Err(differ("group state", lane, f.state_hash, hash));
            }
        }
        let expected = match self.last {
            Last::Nothing => return Ok(()),
            Last::Recorded(_) => facts[0].last_signature,
            Last::Replayed(bucket) => {
                self.recorded[bucket.index()].expect("only recorded buckets are replayed")
            }
        };
        if let Some(lane) = facts.iter().position(|f| f.last_signature != expected) {
            return Err(differ("recording signature", lane, facts[lane].last_signature, expected));
        }
        match self.last {
            Last::Nothing => {}
            Last::Recorded(bucket) => self.recorded[bucket.index()] = Some(expected),
            Last::Replayed(bucket) => {
                let slowest = &mut self.slowest_us[bucket.index()];
                *slowest = facts.iter().map(|f| f.replay_us).fold(*slowest, u32::max);
            }
        }
        Ok(())
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self { min: Duration::from_secs(2), first: Duration::from_secs(60) }
    }
}

impl Grants {
    fn of(facts: &[Facts], top: Bucket) -> Self {
        let mut lanes = [Grant::default(); RANKS_MAX];
        for (grant, f) in lanes.iter_mut().zip(facts) {
            grant.decode_rows = f.decode_rows.min(top.rows() as u32);
            grant.prefill_rows = f.prefill_rows.min(top.rows() as u32 - grant.decode_rows);
        }
        Self { len: facts.len(), lanes }
    }

    /// One grant a lane, in group order.
    pub fn as_slice(&self) -> &[Grant] {
        &self.lanes[..self.len]
    }
}

impl Grant {
    /// All rows of the lane.
    pub fn rows(self) -> u32 {
        self.decode_rows + self.prefill_rows
    }
}

/// Decides a step. `facts[l]` is what lane `l` of the group said; the same slice on every lane.
///
/// Decode rows are granted whole, prefill rows fill what is left of the largest bucket. The bucket is
/// the smallest recorded one that holds the largest lane.
pub fn settle(state: &GroupState, facts: &[Facts]) -> Result<(GroupState, GroupStep), Divergence> {
    assert_eq!(facts.len(), state.lanes, "facts of every lane");
    let mut next = state.clone();
    next.compare(facts)?;
    let step = decide(&next, facts);
    next.step = next.next_step();
    next.steps_since_record = next.steps_since_record.saturating_add(1);
    next.last = match step {
        GroupStep::Park | GroupStep::Exit(_) => Last::Nothing,
        GroupStep::Record(bucket) => {
            next.steps_since_record = 0;
            Last::Recorded(bucket)
        }
        GroupStep::Step { bucket, .. } => Last::Replayed(bucket),
    };
    Ok((next, step))
}

fn decide(state: &GroupState, facts: &[Facts]) -> GroupStep {
    if let Some(lane) = facts.iter().position(|f| f.flags.has(FactsFlags::FATAL)) {
        return GroupStep::Exit(ExitCause::Fatal { lane });
    }
    let idle = facts.iter().all(|f| f.decode_rows == 0 && f.prefill_rows == 0);
    if idle && facts.iter().all(|f| f.flags.has(FactsFlags::EXIT)) {
        return GroupStep::Exit(ExitCause::Asked);
    }
    if let Some(bucket) = state.next_start_record() {
        return GroupStep::Record(bucket);
    }
    if idle {
        return GroupStep::Park;
    }
    let top = state.lattice.top();
    let wanted = state.lattice.holding(GroupRows::of(facts, top));
    let bucket = state.recorded_at_or_above(wanted);
    if bucket != wanted && worth_recording(state, facts, wanted, bucket) {
        return GroupStep::Record(wanted);
    }
    GroupStep::Step { bucket, grants: Grants::of(facts, top) }
}

/// A recording stalls everybody once and saves padding in every later step of its size.
fn worth_recording(state: &GroupState, facts: &[Facts], wanted: Bucket, instead: Bucket) -> bool {
    let decoding = facts.iter().any(|f| f.decode_rows > 0);
    let saves_much = instead.rows() >= 2 * wanted.rows();
    state.steps_since_record >= RECORD_SPACING_STEPS && (!decoding || saves_much)
}

/// Replays of one bucket differ with context length; 20 times the slowest seen is no longer noise.
const PATIENCE_FACTOR: u32 = 20;
/// Steps between two recordings that are made while serving.
const RECORD_SPACING_STEPS: u32 = 50;
/// Small buckets recorded at start: a first request decodes in them.
const START_SMALL: usize = 4;

#[cfg(test)]
#[path = "settle_tests.rs"]
mod tests;
