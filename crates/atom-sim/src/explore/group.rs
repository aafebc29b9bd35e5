//! `settle`, the one that ships, called once for each distinct input, with what must hold of every step.

use super::Broken;
use super::lane::{Brought, LANES_MAX};
use atom_base::StepNo;
use atom_group::{
    Bucket, ExitCause, Facts, FactsFlags, Grant, GroupState, GroupStep, Lattice, LatticeArgs, Policy,
    Prefill, settle,
};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// All states of the group that were seen, and all that was concluded in them.
pub(super) struct Group {
    lanes: usize,
    replay_us: fn(u32) -> u32,
    /// The state that exploration starts from, and the signature of what was recorded last.
    pub(super) start: (u16, u8),
    states: Vec<(GroupState, u64)>,
    known: HashMap<u64, u16>,
    /// What was concluded at least once.
    pub(super) saw: BTreeSet<&'static str>,
    concluded: HashMap<(u16, [Brought; LANES_MAX]), Result<Conclusion, Broken>>,
}

/// What one lane concludes from everybody's facts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Conclusion {
    /// The state that follows.
    pub(super) state: u16,
    pub(super) step: Deed,
    /// Of each lane, whatever the group does.
    pub(super) grants: [Grant; LANES_MAX],
    /// The lane that ended the group, one bit.
    pub(super) blamed: u8,
}

/// What the group does, without what differs from lane to lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Deed {
    #[default]
    Nothing,
    Park,
    Leave,
    Fatal,
    /// Place of the bucket.
    Record(u8),
    /// Place of the bucket.
    Replay(u8),
}

impl Group {
    /// Before its first step, or past its start-up recordings. The lattice is 1, 2, 4.
    pub(super) fn new(lanes: usize, policy: Policy, replay_us: fn(u32) -> u32, started: bool) -> Self {
        let args = LatticeArgs { rows_max: ROWS_MAX, max_num_seqs: 2, ..LatticeArgs::default() };
        let lattice = Lattice::new(&args).expect("a legal lattice");
        let state = GroupState::new(Arc::new(lattice), lanes, started).with_policy(policy);
        let (known, concluded) = (HashMap::new(), HashMap::new());
        let mut group = Self {
            lanes,
            replay_us,
            start: (0, 0),
            states: Vec::new(),
            known,
            saw: BTreeSet::new(),
            concluded,
        };
        let (mut at, mut signature) = (group.intern(state), 0);
        while started && !group.states[usize::from(at)].0.ready() {
            let idle = Brought { step: group.step(at) + 1, state: at, signature, ..Brought::default() };
            let conclusion = group.conclude(at, &[idle; LANES_MAX]).expect("idle lanes agree");
            if let Deed::Record(bucket) = conclusion.step {
                signature = bucket + 1;
            }
            at = conclusion.state;
        }
        group.start = (at, signature);
        group
    }

    /// The number of the last step that this state knows.
    pub(super) fn step(&self, state: u16) -> u8 {
        (self.states[usize::from(state)].0.next_step().0 - 1) as u8
    }

    /// The smallest bucket that holds so many rows: for lanes that pick their own.
    pub(super) fn place_holding(&self, rows: u32) -> u8 {
        [1, 2, ROWS_MAX].iter().position(|&bucket| bucket >= rows).expect("rows are capped") as u8
    }

    /// What a lane in `state` concludes from what everybody brought.
    pub(super) fn conclude(
        &mut self,
        state: u16,
        brought: &[Brought; LANES_MAX],
    ) -> Result<Conclusion, Broken> {
        if let Some(known) = self.concluded.get(&(state, *brought)) {
            return known.clone();
        }
        let conclusion = self.settle(state, brought);
        self.concluded.insert((state, *brought), conclusion.clone());
        conclusion
    }

    fn settle(&mut self, at: u16, brought: &[Brought; LANES_MAX]) -> Result<Conclusion, Broken> {
        let facts: Vec<Facts> = brought[..self.lanes].iter().map(|b| self.facts(*b)).collect();
        let state = &self.states[usize::from(at)].0;
        let (next, step) = settle(state, &facts).map_err(Broken::Diverged)?;
        check(state.policy(), &facts, &step)?;
        self.check_symmetry(state, &facts, (&next, &step))?;
        self.saw.extend(kinds(&facts, &step));
        let granted = grants_of(&facts, &step);
        let conclusion = Conclusion {
            state: self.intern(next),
            step: Deed::of(&step),
            grants: std::array::from_fn(|lane| granted.get(lane).copied().unwrap_or_default()),
            blamed: match step {
                GroupStep::Exit(ExitCause::Fatal { lane }) => 1 << lane,
                _ => 0,
            },
        };
        Ok(conclusion)
    }

    /// The search takes worlds for equal that differ in the order of their lanes only. That is right
    /// if lanes that change places change nothing but their places, which is tried here.
    fn check_symmetry(
        &self,
        state: &GroupState,
        facts: &[Facts],
        (next, step): (&GroupState, &GroupStep),
    ) -> Result<(), Broken> {
        for left in 0..facts.len() - 1 {
            let mut swapped = facts.to_vec();
            swapped.swap(left, left + 1);
            let (its_next, its_step) = settle(state, &swapped).map_err(Broken::Diverged)?;
            let mut grants = grants_of(facts, step);
            if !grants.is_empty() {
                grants.swap(left, left + 1);
            }
            let same = its_next.hash() == next.hash() && Deed::of(&its_step) == Deed::of(step);
            if !same || grants_of(&swapped, &its_step) != grants {
                return Err(Broken::Rule("a step depends on the order of the lanes"));
            }
        }
        Ok(())
    }

    fn facts(&self, brought: Brought) -> Facts {
        let flag = |is_set, flag| if is_set { flag } else { FactsFlags::default() };
        let flags = [
            flag(brought.exit, FactsFlags::EXIT),
            flag(brought.pause, FactsFlags::PAUSE),
            flag(brought.fatal, FactsFlags::FATAL),
            flag(brought.partial, FactsFlags::PARTIAL),
        ];
        let signature = u64::from(brought.signature);
        Facts {
            step: StepNo(brought.step.into()),
            state_hash: self.states[usize::from(brought.state)].1,
            last_signature: 0xfeed_0000 + signature,
            decode_rows: brought.decode.into(),
            prefill_rows: brought.prefill.into(),
            replay_us: brought.signature.checked_sub(1).map_or(0, |place| (self.replay_us)(1 << place)),
            flags: flags.into_iter().fold(FactsFlags::default(), FactsFlags::with),
            ..Facts::default()
        }
    }

    fn intern(&mut self, state: GroupState) -> u16 {
        let (hash, next) = (state.hash(), self.states.len());
        *self.known.entry(hash).or_insert_with(|| {
            assert!(next < usize::from(u16::MAX), "more states of the group than a small setup has");
            self.states.push((state, hash));
            next as u16
        })
    }
}

impl Deed {
    fn of(step: &GroupStep) -> Self {
        let place = |bucket: &Bucket| bucket.index() as u8;
        match step {
            GroupStep::Park => Self::Park,
            GroupStep::Exit(ExitCause::Asked) => Self::Leave,
            GroupStep::Exit(ExitCause::Fatal { .. }) => Self::Fatal,
            GroupStep::Record(bucket) => Self::Record(place(bucket)),
            GroupStep::Step { bucket, .. } => Self::Replay(place(bucket)),
        }
    }
}

/// Names for what a step is: to see that an exploration came by.
fn kinds(facts: &[Facts], step: &GroupStep) -> Vec<&'static str> {
    let with_work = facts.iter().any(|f| f.decode_rows + f.prefill_rows > 0);
    match step {
        GroupStep::Park if with_work => vec!["rest with work"],
        GroupStep::Park => vec!["park"],
        GroupStep::Exit(ExitCause::Asked) => vec!["leave"],
        GroupStep::Exit(ExitCause::Fatal { .. }) => vec!["fatal"],
        GroupStep::Record(_) => vec!["record"],
        GroupStep::Step { grants, note, .. } => {
            let grants: Vec<_> = facts.iter().map(|facts| grants.of(facts)).collect();
            let rows = |rows: fn(&Grant) -> u32| grants.iter().map(rows).any(|rows| rows > 0);
            let all = [
                (matches!(note.prefill, Prefill::Held { .. }), "held"),
                (note.time_cut_rows > 0, "cut to its time"),
                (rows(|g| g.decode_rows) && rows(|g| g.prefill_rows), "decode rows beside prompts"),
                (grants.iter().any(|g| g.rows() == 0), "a lane without rows"),
            ];
            all.into_iter().filter(|(is_so, _)| *is_so).map(|(_, name)| name).collect()
        }
    }
}

fn grants_of(facts: &[Facts], step: &GroupStep) -> Vec<Grant> {
    match step {
        GroupStep::Step { grants, .. } => facts.iter().map(|facts| grants.of(facts)).collect(),
        _ => Vec::new(),
    }
}

/// What must hold of every step, whatever the policy.
fn check(policy: &Policy, facts: &[Facts], step: &GroupStep) -> Result<(), Broken> {
    let all = |flag| facts.iter().all(|f| f.flags.has(flag));
    let idle = facts.iter().all(|f| f.decode_rows + f.prefill_rows == 0);
    let resting = all(FactsFlags::PAUSE) && !all(FactsFlags::EXIT);
    let rule = |holds: bool, what| if holds { Ok(()) } else { Err(Broken::Rule(what)) };
    match step {
        GroupStep::Park => rule(idle || resting, "the group parks with work that nobody paused"),
        GroupStep::Exit(ExitCause::Asked) => rule(idle && all(FactsFlags::EXIT), "the group ends too soon"),
        GroupStep::Exit(ExitCause::Fatal { lane }) => {
            rule(facts[*lane].flags.has(FactsFlags::FATAL), "a sound lane is blamed")
        }
        GroupStep::Record(_) => rule(!resting, "a paused group records"),
        GroupStep::Step { bucket, grants, note } => {
            let grants: Vec<_> = facts.iter().map(|facts| grants.of(facts)).collect();
            rule(!resting, "a paused group steps")?;
            rule(!facts.iter().any(|f| f.flags.has(FactsFlags::FATAL)), "a step with a lane that can't")?;
            rule(grants.iter().any(|g| g.rows() > 0), "a step of no rows while somebody has some")?;
            rule(grants.iter().all(|g| g.rows() as usize <= bucket.rows()), "a bucket too small")?;
            let wanted =
                |(g, f): (&Grant, &Facts)| g.decode_rows == f.decode_rows && g.prefill_rows <= f.prefill_rows;
            rule(grants.iter().zip(facts).all(wanted), "decode rows cut, or more than was wanted")?;
            let held = match note.prefill {
                Prefill::Held { steps } => u32::from(steps),
                _ => 0,
            };
            let bound = policy.alignment.map_or(0, |knobs| knobs.hold_steps_max);
            rule(held <= bound, "a hold beyond its bound")
        }
    }
}

/// Rows of the largest bucket.
pub(super) const ROWS_MAX: u32 = 4;
