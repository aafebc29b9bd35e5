//! The decision: from everybody's facts to what the group does next. Pure: no clock, no
//! configuration, no randomness that is not in [`GroupState`].

use crate::facts::{Facts, FactsFlags};
use crate::hold::Prefill;
use crate::lattice::{Bucket, GroupRows};
use crate::shape::{self, Shape};
use crate::state::{Divergence, GroupState, Last};

/// What the group does in a step. Equal on all lanes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GroupStep {
    /// Nobody has work, or every lane is paused: sleep in the next exchange until somebody wakes.
    Park,
    /// The group ends.
    Exit(ExitCause),
    /// Everybody records this bucket.
    Record(Bucket),
    /// Everybody replays this bucket, a lane without rows too.
    Step {
        /// The shape of everything in this step.
        bucket: Bucket,
        /// What each lane may run of what it wants.
        grants: Grants,
        /// What policy did to it: for counting, nothing follows from it.
        note: StepNote,
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

/// The grants of all lanes, as the rule that makes a lane's grant of its facts. Whoever has everybody's
/// facts has everybody's grants: nothing is kept for each lane, however many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grants {
    /// Rows of a lane at the most, before prompts are cut to an edge.
    cap_rows: u32,
    /// No prompts.
    held: bool,
    /// Rows of a lane at the most: those of the bucket.
    bucket_rows: u32,
}

/// Why lanes got fewer prompt rows than they wanted. Equal on all lanes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepNote {
    /// Whether prompts wait for other lanes'.
    pub prefill: Prefill,
    /// Prompt rows of all lanes that `--step-ms-max` leaves for later steps.
    pub time_cut_rows: u32,
    /// Prompt rows of all lanes that the bound of padding leaves for later steps.
    pub edge_cut_rows: u32,
}

impl Grants {
    /// Everybody's rows, up to those of `cap`; no prompts if they are held. Decode rows come first and
    /// are cut by nothing but the largest bucket, which holds them all.
    pub(crate) fn new(cap: Bucket, held: bool) -> Self {
        let rows = cap.rows() as u32;
        Self { cap_rows: rows, held, bucket_rows: rows }
    }

    /// The same with less for prompts, so that `bucket` holds all lanes.
    pub(crate) fn within(self, bucket: Bucket) -> Self {
        Self { bucket_rows: bucket.rows() as u32, ..self }
    }

    /// What the lane that said this may run.
    pub fn of(&self, facts: &Facts) -> Grant {
        let decode_rows = facts.decode_rows.min(self.cap_rows);
        let room = self.bucket_rows.checked_sub(decode_rows);
        let room = room.expect("no bucket is chosen that does not hold all decode rows");
        let prefill_rows = facts.prefill_rows.min(self.cap_rows - decode_rows).min(room);
        Grant { decode_rows, prefill_rows: if self.held { 0 } else { prefill_rows } }
    }

    /// One grant a lane, in group order.
    pub fn each<'a>(&self, facts: &'a [Facts]) -> impl Iterator<Item = Grant> + Clone + 'a {
        let grants = *self;
        facts.iter().map(move |f| grants.of(f))
    }

    pub(crate) fn largest(&self, facts: &[Facts]) -> GroupRows {
        GroupRows::settled(self.each(facts).map(Grant::rows).max().unwrap_or(0))
    }

    pub(crate) fn prefill_rows(&self, facts: &[Facts]) -> u32 {
        self.each(facts).fold(0, |sum, g| sum.saturating_add(g.prefill_rows))
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
/// Decode rows are granted whole, always. Prompt rows fill what is left of a bucket as [`crate::Policy`]
/// allows. The bucket is the smallest recorded one that holds the largest lane's grant.
pub fn settle(state: &GroupState, facts: &[Facts]) -> Result<(GroupState, GroupStep), Divergence> {
    assert_eq!(facts.len(), state.lanes, "facts of every lane");
    let mut next = state.clone();
    next.compare(facts)?;
    let step = decide(&mut next, facts);
    next.step = next.next_step();
    next.steps_since_record = next.steps_since_record.saturating_add(1);
    next.before = match next.last {
        Last::Replayed(bucket, rows) => Some((bucket, rows)),
        Last::Nothing | Last::Recorded(_) => None,
    };
    next.last = match step {
        GroupStep::Park | GroupStep::Exit(_) => Last::Nothing,
        GroupStep::Record(bucket) => {
            next.steps_since_record = 0;
            Last::Recorded(bucket)
        }
        GroupStep::Step { bucket, grants, .. } => Last::Replayed(bucket, grants.largest(facts).count()),
    };
    Ok((next, step))
}

fn decide(state: &mut GroupState, facts: &[Facts]) -> GroupStep {
    if let Some(lane) = facts.iter().position(|f| f.flags.has(FactsFlags::FATAL)) {
        return GroupStep::Exit(ExitCause::Fatal { lane });
    }
    let all = |flag| facts.iter().all(|f| f.flags.has(flag));
    let idle = facts.iter().all(|f| f.decode_rows == 0 && f.prefill_rows == 0);
    if idle && all(FactsFlags::EXIT) {
        return GroupStep::Exit(ExitCause::Asked);
    }
    // One lane alone can't rest: others would meet it in no collective. And who is told to leave works
    // off what it has, paused or not, since it may not leave before.
    if all(FactsFlags::PAUSE) && !all(FactsFlags::EXIT) {
        return park(state);
    }
    if let Some(bucket) = state.next_start_record() {
        return GroupStep::Record(bucket);
    }
    if idle {
        return park(state);
    }
    match shape::choose(state, facts) {
        Shape::Record(bucket) => GroupStep::Record(bucket),
        Shape::Step { bucket, grants, note, hold, starved_steps } => {
            state.hold = hold;
            state.starved_steps = starved_steps;
            GroupStep::Step { bucket, grants, note }
        }
    }
}

/// Nothing of a rest is remembered as waiting.
fn park(state: &mut GroupState) -> GroupStep {
    state.hold.rest();
    state.starved_steps = 0;
    GroupStep::Park
}

#[cfg(test)]
#[path = "settle_tests.rs"]
mod tests;
