//! What can be read from outside while lanes run: counters, activity, health.

use crate::shares::{PaddingShares, ShareGauge};
use atom_base::{LaneId, StepNo};
use atom_engine::Counters;
use atom_group::Activity;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// One lane's totals since start, and what it holds now.
#[derive(Clone, Copy, Debug, Default)]
pub struct LaneStats {
    /// The group's epoch: 1, and one more for every time that it formed again.
    pub epoch: u64,
    /// Steps that replayed a recording.
    pub replays: u64,
    /// Steps that were no replay, by [`EagerCause`].
    pub eager_steps: EagerSteps,
    /// Buckets recorded.
    pub recordings: u64,
    /// Rows computed for requests.
    pub real_rows: u64,
    /// Rows of buckets that no request used.
    pub padding_rows: u64,
    /// Of this lane, step by step.
    pub padding_shares: PaddingShares,
    /// The same of the group's fullest lane: what `--padding-max` bounds.
    pub fullest_padding_shares: PaddingShares,
    /// Experts that rows of this lane were routed to, over all layers.
    pub expert_rows_chosen: u64,
    /// Of those and other lanes', what this lane's first rank computed its share of; 0 on GPUs that share experts, where
    /// only kernels know.
    pub expert_rows_computed: u64,
    /// Steps in which prompts of the group waited for other lanes' prompts.
    pub held_steps: u64,
    /// Prompt rows of the group that `--step-ms-max` left for a later step.
    pub time_cut_rows: u64,
    /// Prompt rows of the group that the bound of padding left for a later step.
    pub edge_cut_rows: u64,
    /// Time in exchanges.
    pub exchange_wait: Duration,
    /// Time in replays.
    pub replay_time: Duration,
    /// The scheduler's counters.
    pub counters: Counters,
}

/// Why a step was no replay of a recording that was there before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EagerCause {
    /// `--enforce-eager`: no recording is kept.
    EnforceEager,
}

/// Steps that were no replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EagerSteps([u64; EagerCause::ALL.len()]);

/// How one lane is.
#[derive(Clone, Debug)]
pub struct LaneHealth {
    /// Which lane.
    pub lane: LaneId,
    /// In which epoch of its group.
    pub epoch: u64,
    /// What it is doing.
    pub activity: Activity,
    /// In which step.
    pub step: StepNo,
    /// For how long.
    pub since: Duration,
}

/// How the host is.
#[derive(Clone, Debug)]
pub struct Health {
    /// Every start-up recording is made: requests are admitted.
    pub ready: bool,
    /// Told to stop: running requests end, new ones are refused.
    pub draining: bool,
    /// Told to rest: nothing is computed until it is told to go on.
    pub paused: bool,
    /// Why a group does not run at the moment, if it will again: it lost a rank and waits for another.
    pub forming: Option<String>,
    /// Why the host can't go on, if it can't.
    pub fault: Option<String>,
    /// Every lane.
    pub lanes: Vec<LaneHealth>,
}

/// Counters that the lane writes and anyone reads. Relaxed: each is right by itself.
#[derive(Default)]
pub(crate) struct Gauges {
    pub(crate) ready: AtomicBool,
    pub(crate) epoch: AtomicU64,
    pub(crate) replays: AtomicU64,
    eager_steps: [AtomicU64; EagerCause::ALL.len()],
    pub(crate) recordings: AtomicU64,
    pub(crate) real_rows: AtomicU64,
    pub(crate) padding_rows: AtomicU64,
    pub(crate) padding_shares: ShareGauge,
    pub(crate) fullest_padding_shares: ShareGauge,
    pub(crate) expert_rows_chosen: AtomicU64,
    pub(crate) expert_rows_computed: AtomicU64,
    pub(crate) held_steps: AtomicU64,
    pub(crate) time_cut_rows: AtomicU64,
    pub(crate) edge_cut_rows: AtomicU64,
    pub(crate) exchange_us: AtomicU64,
    pub(crate) replay_us: AtomicU64,
    /// When the present activity began, in milliseconds since the host's start.
    pub(crate) since_ms: AtomicU64,
    /// When it must be over. One word, written before the activity is: the supervisor must never see a
    /// new deadline's parts mixed with an old one's.
    pub(crate) deadline_ms: AtomicU64,
    counters: [AtomicU64; 12],
}

impl EagerCause {
    /// Every cause that there is. A bucket that was not recorded is none: `settle` replays what was
    /// recorded and nothing else. What a group makes while it serves is a step of its own
    /// ([`LaneStats::recordings`]).
    pub const ALL: [Self; 1] = [Self::EnforceEager];

    /// As metrics and messages have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::EnforceEager => "enforce_eager",
        }
    }
}

impl EagerSteps {
    /// Of any cause.
    pub fn total(self) -> u64 {
        self.0.iter().sum()
    }

    /// Of one cause.
    pub fn by(self, cause: EagerCause) -> u64 {
        self.0[cause as usize]
    }
}

impl Gauges {
    pub(crate) fn add_eager(&self, cause: EagerCause) {
        Self::add(&self.eager_steps[cause as usize], 1);
    }

    pub(crate) fn add(counter: &AtomicU64, value: u64) {
        counter.fetch_add(value, Ordering::Relaxed);
    }

    pub(crate) fn set_counters(&self, c: &Counters) {
        let values = [
            c.running as u64,
            c.waiting as u64,
            c.pages_held as u64,
            c.pages_kept as u64,
            c.admitted,
            c.preempted,
            c.finished,
            c.prompt_tokens,
            c.cached_tokens,
            c.generated_tokens,
            c.rows,
            c.leaving as u64,
        ];
        for (cell, value) in self.counters.iter().zip(values) {
            cell.store(value, Ordering::Relaxed);
        }
    }

    pub(crate) fn stats(&self) -> LaneStats {
        let get = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        let c = &self.counters;
        LaneStats {
            epoch: get(&self.epoch),
            replays: get(&self.replays),
            eager_steps: EagerSteps(std::array::from_fn(|at| get(&self.eager_steps[at]))),
            recordings: get(&self.recordings),
            real_rows: get(&self.real_rows),
            padding_rows: get(&self.padding_rows),
            padding_shares: self.padding_shares.read(),
            fullest_padding_shares: self.fullest_padding_shares.read(),
            expert_rows_chosen: get(&self.expert_rows_chosen),
            expert_rows_computed: get(&self.expert_rows_computed),
            held_steps: get(&self.held_steps),
            time_cut_rows: get(&self.time_cut_rows),
            edge_cut_rows: get(&self.edge_cut_rows),
            exchange_wait: Duration::from_micros(get(&self.exchange_us)),
            replay_time: Duration::from_micros(get(&self.replay_us)),
            counters: Counters {
                running: get(&c[0]) as usize,
                waiting: get(&c[1]) as usize,
                pages_held: get(&c[2]) as usize,
                pages_kept: get(&c[3]) as usize,
                admitted: get(&c[4]),
                preempted: get(&c[5]),
                finished: get(&c[6]),
                prompt_tokens: get(&c[7]),
                cached_tokens: get(&c[8]),
                generated_tokens: get(&c[9]),
                rows: get(&c[10]),
                leaving: get(&c[11]) as usize,
            },
        }
    }
}
