//! What all lanes of a group know alike, and how they find out that they don't.

use crate::facts::{Facts, FactsFlags};
use crate::hold::Hold;
use crate::lattice::{BUCKETS_MAX, Bucket, GroupRows, Lattice};
use crate::pace::Pace;
use crate::policy::Policy;
use atom_base::{StepNo, limits::LANES_MAX};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// What all lanes of a group know alike. Equal by induction: same start, same facts, same function.
#[derive(Clone, Debug)]
pub struct GroupState {
    pub(crate) lattice: Arc<Lattice>,
    pub(crate) lanes: usize,
    pub(crate) record_all: bool,
    pub(crate) policy: Policy,
    pub(crate) patience: Patience,
    /// Hash of all of the above, which never changes.
    start_hash: u64,
    pub(crate) step: StepNo,
    pub(crate) last: Last,
    /// The replay before the last one with the rows that were granted in it, if nothing came between.
    pub(crate) before: Option<(Bucket, u32)>,
    recorded: [Option<u64>; BUCKETS_MAX],
    pub(crate) pace: Pace,
    pub(crate) hold: Hold,
    /// Steps in succession in which `--step-ms-max` left somebody's prompts no row.
    pub(crate) starved_steps: u32,
    pub(crate) steps_since_record: u32,
}

/// Deadlines that don't depend on measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// No deadline is shorter: schedulers of a loaded host may hold a thread back this long.
    pub min: Duration,
    /// Recordings and first replays load code, touch memory and compile.
    pub first: Duration,
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
pub(crate) enum Last {
    Nothing,
    Recorded(Bucket),
    /// With the rows of the largest lane.
    Replayed(Bucket, u32),
}

impl GroupState {
    /// The state before the first step, with the default [`Policy`]. `record_all` records every bucket
    /// before anything is served.
    pub fn new(lattice: Arc<Lattice>, lanes: usize, record_all: bool) -> Self {
        assert!((1..=LANES_MAX).contains(&lanes), "{lanes} lanes; a group has at most {LANES_MAX}");
        let state = Self {
            lattice,
            lanes,
            record_all,
            policy: Policy::default(),
            patience: Patience::default(),
            start_hash: 0,
            step: StepNo(0),
            last: Last::Nothing,
            before: None,
            recorded: [None; BUCKETS_MAX],
            pace: Pace::new(),
            hold: Hold::default(),
            starved_steps: 0,
            steps_since_record: 0,
        };
        state.started()
    }

    /// The same with other deadlines: equal on all lanes, like everything here.
    pub fn with_patience(self, patience: Patience) -> Self {
        Self { patience, ..self }.started()
    }

    /// The same with another policy: equal on all lanes, like everything here.
    pub fn with_policy(self, policy: Policy) -> Self {
        Self { policy, ..self }.started()
    }

    /// The step that comes next.
    pub fn next_step(&self) -> StepNo {
        StepNo(self.step.0 + 1)
    }

    /// The largest bucket: what a lane's want is capped by.
    pub fn top(&self) -> Bucket {
        self.lattice.top()
    }

    /// See [`Policy`].
    pub fn policy(&self) -> &Policy {
        &self.policy
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
        // A step in flight may have to end first.
        let is_first = self.before.is_some_and(|(bucket, _)| !self.pace.is_measured(bucket));
        let base = match self.last {
            Last::Replayed(bucket, _) if !is_first && self.pace.is_measured(bucket) => self.patience.min,
            Last::Nothing | Last::Recorded(_) | Last::Replayed(..) => self.patience.first,
        };
        base.max(Duration::from_micros(self.pace.slowest_us().into()) * PATIENCE_FACTOR)
    }

    /// What a full replay of a bucket is predicted to take, µs. `None`: nothing as small was measured.
    pub fn predicted_us(&self, bucket: Bucket) -> Option<u32> {
        let mut all = self.pace.predicted(self.lattice.buckets(), self.step);
        all.find(|(other, _)| *other == bucket).and_then(|(_, us)| us)
    }

    /// A hash of everything above, for [`Facts::state_hash`].
    pub fn hash(&self) -> u64 {
        let mut hash = Hash(self.start_hash);
        hash.eat(self.step.0);
        hash.eat(match self.last {
            Last::Nothing => 0,
            Last::Recorded(bucket) => 1 << 16 | bucket.index() as u64,
            Last::Replayed(bucket, rows) => 2 << 16 | bucket.index() as u64 | u64::from(rows) << 32,
        });
        hash.eat(
            self.before.map_or(0, |(bucket, rows)| 1 << 16 | bucket.index() as u64 | u64::from(rows) << 32),
        );
        hash.eat(u64::from(self.starved_steps) << 32 | u64::from(self.steps_since_record));
        hash.eat_all(&self.hold.words());
        for &bucket in self.lattice.buckets() {
            hash.eat(self.recorded[bucket.index()].map_or(0, |s| s | 1));
            hash.eat_all(&self.pace.words(bucket));
        }
        hash.0
    }

    /// Buckets recorded so far.
    pub fn recordings(&self) -> usize {
        self.recorded.iter().flatten().count()
    }

    /// The same state with the hash of what never changes: lattice, lanes, policy, deadlines.
    fn started(mut self) -> Self {
        let mut hash = Hash(0x9e37_79b9_7f4a_7c15);
        hash.eat(self.lanes as u64);
        hash.eat(self.record_all.into());
        hash.eat(u64::from(self.lattice.max_num_seqs()));
        for bucket in self.lattice.buckets() {
            hash.eat((bucket.rows() as u64) << 32 | bucket.out_rows() as u64);
        }
        hash.eat_all(&self.policy.words());
        let Patience { min, first } = self.patience;
        hash.eat_all(&[min, first].map(|time| time.as_nanos() as u64));
        self.start_hash = hash.0;
        self
    }

    fn last_is_compared(&self) -> bool {
        !matches!(self.last, Last::Recorded(bucket) if !self.has_recorded(bucket))
    }

    pub(crate) fn has_recorded(&self, bucket: Bucket) -> bool {
        self.recorded[bucket.index()].is_some()
    }

    /// What must be recorded before serving: the largest first, so that every step has a recording above.
    pub(crate) fn next_start_record(&self) -> Option<Bucket> {
        let buckets = self.lattice.buckets();
        let small = if self.record_all { buckets.len() } else { START_SMALL.min(buckets.len()) };
        let wanted = std::iter::once(self.lattice.top()).chain(buckets[..small].iter().rev().copied());
        wanted.into_iter().find(|b| !self.has_recorded(*b))
    }

    /// The smallest recorded bucket that holds the group's largest count.
    pub(crate) fn recorded_holding(&self, rows: GroupRows) -> Bucket {
        let above = &self.lattice.buckets()[self.lattice.holding(rows).index()..];
        *above.iter().find(|b| self.has_recorded(**b)).expect("the top is recorded first")
    }

    /// Takes in what lanes say of the step before; finds lanes that disagree.
    pub(crate) fn compare(&mut self, facts: &[Facts]) -> Result<(), Divergence> {
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
            Last::Replayed(bucket, _) => {
                self.recorded[bucket.index()].expect("only recorded buckets are replayed")
            }
        };
        if let Some(lane) = facts.iter().position(|f| f.last_signature != expected) {
            return Err(differ("recording signature", lane, facts[lane].last_signature, expected));
        }
        match self.last {
            Last::Nothing => {}
            Last::Recorded(bucket) => self.recorded[bucket.index()] = Some(expected),
            Last::Replayed(bucket, rows) => {
                let slowest = |ahead| {
                    let such = facts.iter().filter(|f| f.flags.has(FactsFlags::AHEAD) == ahead);
                    such.map(|f| f.replay_us).max()
                };
                if let Some(us) = slowest(false) {
                    self.pace.observe(bucket, us, rows, self.step);
                }
                if let (Some(us), Some((bucket, rows))) = (slowest(true), self.before) {
                    self.pace.observe(bucket, us, rows, self.step);
                }
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

/// Words in order, mixed.
pub(crate) struct Hash(pub(crate) u64);

impl Hash {
    pub(crate) fn eat(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0xd6e8_feb8_6659_fd93).rotate_left(29);
    }

    pub(crate) fn eat_all(&mut self, words: &[u64]) {
        words.iter().for_each(|&word| self.eat(word));
    }
}

/// Replays of one bucket differ with context length; 20 times the slowest seen is no longer noise.
const PATIENCE_FACTOR: u32 = 20;
/// Small buckets recorded at start: a first request decodes in them.
const START_SMALL: usize = 4;
