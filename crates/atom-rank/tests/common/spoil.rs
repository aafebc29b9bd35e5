//! A probe that spoils one stage of one rank, once: an error, a panic, a thread that is slow or stuck.

use atom_base::{RankId, StepNo};
use atom_ops::OpsError;
use atom_rank::{Probe, Stage};
use std::sync::{Condvar, Mutex, MutexGuard};

/// How a rank misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Error,
    Panic,
    /// Comes after all others, and within its deadline.
    Slow,
    /// Stays until it is let go.
    Stuck,
}

/// A fault to come.
#[derive(Clone, Copy, Debug)]
pub struct Spoil {
    pub rank: u16,
    pub stage: Stage,
    pub kind: Kind,
    /// Times that the rank passes the stage unharmed.
    pub passes: u32,
}

/// A fault that came.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spoiled {
    pub rank: u16,
    pub stage: Stage,
    pub kind: Kind,
    pub step: StepNo,
}

/// See the module.
pub struct Spoiler {
    state: Mutex<State>,
    changed: Condvar,
    /// Ranks are one lane, else lanes of one group.
    is_lane: bool,
}

struct State {
    next: Option<Spoil>,
    spoiled: Vec<Spoiled>,
    latest: Vec<(StepNo, Stage)>, // [ranks]
    releases: u64,
}

/// Stages of a lane's first rank in a step that replays or records.
pub const STAGES: [Stage; 7] =
    [Stage::Want, Stage::Exchange, Stage::Settle, Stage::Commit, Stage::Record, Stage::Replay, Stage::Apply];

impl Spoiler {
    pub fn new(ranks: usize, is_lane: bool) -> Self {
        let latest = vec![(StepNo(0), Stage::Want); ranks];
        let state = State { next: None, spoiled: Vec::new(), latest, releases: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new(), is_lane }
    }

    /// The next fault. One that has not come yet is forgotten.
    pub fn arm(&self, spoil: Option<Spoil>) {
        self.lock().next = spoil;
    }

    pub fn is_armed(&self) -> bool {
        self.lock().next.is_some()
    }

    /// What came so far.
    pub fn spoiled(&self) -> Vec<Spoiled> {
        self.lock().spoiled.clone()
    }

    /// Waits until so many faults have come.
    pub fn wait(&self, faults: usize) {
        let state = self.lock();
        drop(self.changed.wait_while(state, |state| state.spoiled.len() < faults).unwrap());
    }

    /// Lets go of whoever is stuck, or slow with nobody to wait for.
    pub fn release(&self) {
        self.lock().releases += 1;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// How far the others get without a rank that has come to `stage` of `step`: the rank is slower than
    /// they are if it waits for that. Nobody, if others wait for its word before they do anything.
    fn others(&self, ranks: usize, rank: u16, step: StepNo, stage: Stage) -> Vec<(usize, StepNo, Stage)> {
        let next = StepNo(step.0 + 1);
        let (step, stage) = match (self.is_lane, stage) {
            (true, Stage::Want | Stage::Exchange | Stage::Settle) => return Vec::new(),
            // The others of a lane have no order yet; its first rank is ahead of them.
            (true, Stage::Commit | Stage::Leave) if rank == 0 => return Vec::new(),
            (true, Stage::Commit | Stage::Replay) => (step, Stage::Replay),
            (true, stage) => (step, stage),
            (false, Stage::Want | Stage::Exchange) => (step, Stage::Exchange),
            (false, Stage::Settle) => (step, Stage::Settle),
            (false, Stage::Commit | Stage::Replay) => (step, Stage::Replay),
            (false, Stage::Record | Stage::Apply) => (next, Stage::Exchange),
            (false, Stage::Leave) => (step, Stage::Leave),
        };
        (0..ranks).filter(|&other| other != usize::from(rank)).map(|other| (other, step, stage)).collect()
    }
}

impl Probe for Spoiler {
    fn reach(&self, rank: RankId, step: StepNo, stage: Stage) -> Result<(), OpsError> {
        let rank = rank.0;
        let mut state = self.lock();
        state.latest[usize::from(rank)] = (step, stage);
        self.changed.notify_all();
        let Some(spoil) = state.next.as_mut().filter(|next| (next.rank, next.stage) == (rank, stage)) else {
            return Ok(());
        };
        if spoil.passes > 0 {
            spoil.passes -= 1;
            return Ok(());
        }
        let kind = spoil.kind;
        state.next = None;
        state.spoiled.push(Spoiled { rank, stage, kind, step });
        let others = self.others(state.latest.len(), rank, step, stage);
        match kind {
            Kind::Error => return Err(OpsError::Device("injected".into())),
            Kind::Panic => {
                drop(state);
                // Without the hook that prints it.
                std::panic::resume_unwind(Box::new("injected"));
            }
            Kind::Slow if !others.is_empty() => {
                let is_first = |state: &mut State| {
                    others.iter().any(|&(other, step, stage)| state.latest[other] < (step, stage))
                };
                drop(self.changed.wait_while(state, is_first).unwrap());
            }
            Kind::Slow | Kind::Stuck => {
                let releases = state.releases;
                drop(self.changed.wait_while(state, |state| state.releases == releases).unwrap());
            }
        }
        Ok(())
    }
}
