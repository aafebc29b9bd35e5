//! One lane as a member of a group: facts out, facts of all in, and the step that follows from them.

use crate::broken::Broken;
use crate::lane::Lane;
use crate::model::mix;
use atom_group::{Divergence, Facts, FactsFlags, GroupState, GroupStep, settle};

/// A lane with its copy of the group's state: all that a rank has but the thread.
pub struct Member {
    /// The lane.
    pub lane: Lane,
    place: usize,
    state: GroupState,
    flags: FactsFlags,
    /// What it said of itself in the last exchange: its grant follows from it.
    said: Facts,
    last_signature: u64,
    replay_us: u32,
    /// The next recording shall be one that no peer has.
    skew_next_recording: bool,
}

impl Member {
    /// The member at `place` in a group that starts with `state`.
    pub fn new(place: usize, lane: Lane, state: GroupState) -> Self {
        let flags = FactsFlags::default();
        let said = Facts::default();
        Self { lane, place, state, flags, said, last_signature: 0, replay_us: 0, skew_next_recording: false }
    }

    /// What it tells the others. `now_ms` by its own clock.
    pub fn facts(&self, now_ms: u64) -> Facts {
        let want = self.lane.want(now_ms).facts();
        Facts {
            step: self.state.next_step(),
            state_hash: self.state.hash(),
            last_signature: self.last_signature,
            replay_us: self.replay_us,
            flags: want.flags.with(self.flags),
            ..want
        }
    }

    /// Raises bits in its facts, from the next on.
    pub fn raise(&mut self, flags: FactsFlags) {
        self.flags = self.flags.with(flags);
    }

    /// Takes bits back.
    pub fn lower(&mut self, flags: FactsFlags) {
        self.flags = self.flags.without(flags);
    }

    /// Bits that it raises.
    pub fn flags(&self) -> FactsFlags {
        self.flags
    }

    /// Concludes from everybody's facts what the group does.
    pub fn settle(&mut self, facts: &[Facts]) -> Result<GroupStep, Divergence> {
        let (state, step) = settle(&self.state, facts)?;
        self.state = state;
        self.said = facts[self.place];
        Ok(step)
    }

    /// Does what the group does: [`plan`](Self::plan), then [`execute`](Self::execute).
    pub fn perform(&mut self, step: &GroupStep, torn: bool) -> Result<(), Broken> {
        self.plan(step)?;
        self.execute(step, torn)
    }

    /// Plans its part of a step.
    pub fn plan(&mut self, step: &GroupStep) -> Result<(), Broken> {
        match step {
            GroupStep::Step { grants, .. } => self.lane.commit(grants.of(&self.said)),
            GroupStep::Park | GroupStep::Exit(_) | GroupStep::Record(_) => Ok(()),
        }
    }

    /// Computes what it planned, or records. `torn`: its part of a step fails, and so do its requests;
    /// the group goes on.
    pub fn execute(&mut self, step: &GroupStep, torn: bool) -> Result<(), Broken> {
        match step {
            GroupStep::Park | GroupStep::Exit(_) => self.lane.drain()?,
            GroupStep::Record(bucket) => {
                self.lane.drain()?;
                let skewed = std::mem::take(&mut self.skew_next_recording);
                self.last_signature = self.lane.device_mut().record(*bucket, skewed);
            }
            GroupStep::Step { bucket, .. } if torn => {
                self.last_signature = self.lane.replay_torn(*bucket)?;
                self.raise(FactsFlags::FAULT);
            }
            GroupStep::Step { bucket, .. } => {
                self.last_signature = self.lane.replay(*bucket)?;
                self.lane.apply()?;
            }
        }
        Ok(())
    }

    /// Notes how long the last replay took.
    pub fn took(&mut self, replay_us: u32) {
        self.replay_us = replay_us;
    }

    /// The group's state as this member knows it.
    pub fn state(&self) -> &GroupState {
        &self.state
    }

    pub(crate) fn skew_next_recording(&mut self) {
        self.skew_next_recording = true;
    }

    /// A hash of what it computed and knows.
    pub(crate) fn fingerprint(&self) -> u64 {
        mix(self.lane.fingerprint() ^ self.state.hash()) ^ self.last_signature
    }
}
