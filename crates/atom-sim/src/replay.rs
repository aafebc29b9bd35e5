//! A step trace made to happen again: every step's facts go through the `settle` that ships, and what
//! it says is compared with what the trace has.

use atom_group::{
    Decision, Difference, Facts, Grant, GroupState, Prefill, TraceEnd, TraceError, TraceHeader, TraceReader,
    TraceRecord, TracedStep, settle,
};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use thiserror::Error;

/// What came of a trace.
#[derive(Clone, Debug)]
pub struct Replayed {
    /// What the groups started with.
    pub header: TraceHeader,
    /// Steps that were settled again and found equal, of all groups.
    pub equal_steps: u64,
    /// The first step that was not; nothing after it was looked at.
    pub mismatch: Option<Mismatch>,
    /// How the trace ends.
    pub ending: TraceEnding,
    /// What each group did, within the steps that were asked for.
    pub timelines: Vec<Timeline>,
}

/// What a group did.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// In order, equal steps in succession as one.
    pub runs: Vec<Run>,
    /// Sums over the runs.
    pub totals: Totals,
    /// Where the trace lost steps of this group.
    pub gaps: Vec<Gap>,
}

/// Equal steps in succession.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Number of the first, as counted from the start of the trace; an epoch's own count begins anew.
    pub first: u64,
    /// The epoch of the group.
    pub epoch: u64,
    /// How many.
    pub steps: u64,
    /// What was decided in each.
    pub decision: Decision,
    /// Rows of its bucket; 0 if it has none.
    pub rows: usize,
    /// What each lane wanted.
    pub wanted: Vec<Grant>,
    /// Of the steps, those whose replay times are known: the step after them is in the trace.
    pub timed_steps: u64,
    /// Replay time of the slowest lane, summed over the timed steps.
    pub slowest_us: u64,
    /// By how much the fastest lane was faster, summed in the same way.
    pub spread_us: u64,
}

/// Sums over steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Steps of each kind.
    pub replays: u64,
    /// Recordings made.
    pub records: u64,
    /// Rests.
    pub parks: u64,
    /// Rows that lanes were granted.
    pub rows: u64,
    /// Rows of buckets that no lane was granted.
    pub padding_rows: u64,
    /// Steps in which prompts waited for other lanes'.
    pub held_steps: u64,
    /// Prompt rows left for later, to keep to `--step-ms-max`.
    pub time_cut_rows: u64,
    /// Prompt rows left for later, to land on a bucket's edge.
    pub edge_cut_rows: u64,
    /// Replays by rows of their bucket.
    pub buckets: BTreeMap<usize, u64>,
    /// From each replay's decision to the next decision, µs.
    pub step_us: u64,
    /// In replays, by the slowest lane, µs.
    pub replay_us: u64,
    /// Lanes' replays were shorter than the slowest one's by so much, µs over all lanes.
    pub wait_us: u64,
}

/// Steps that the writer of the trace lost. What a group knows is the sum of all of its steps, so the
/// steps after it can't be settled again until the group forms again and starts over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The last step before it; 0 if there is none.
    pub after_step: u64,
    /// Steps lost.
    pub lost_steps: u64,
    /// Steps after it that are in the trace and were not settled again.
    pub unchecked_steps: u64,
}

/// A step that this build settles otherwise than the trace has it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "step {step} of group {group} differs in {}: the trace has {}, this build decides {}",
    .difference.field, .difference.recorded, .difference.replayed
)]
pub struct Mismatch {
    /// The group.
    pub group: usize,
    /// The step, as counted from the start of the trace.
    pub step: u64,
    /// What differs.
    pub difference: Difference,
}

/// How a trace ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TraceEnding {
    /// Cleanly.
    Closed,
    /// In the middle: its writer was killed, or still writes.
    Cut {
        /// Bytes before the record that is not whole.
        offset: usize,
        /// Bytes of that record.
        bytes: usize,
    },
    /// It goes on, but can't be read.
    Damaged(TraceError),
    /// It goes on, but was not read past a [`Mismatch`].
    Unread,
}

/// A trace of which nothing can be replayed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ReplayError {
    /// No trace, or one of another version.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The first state is another one here.
    #[error(
        "the trace's groups start from state {recorded:#x}, and this build makes {rebuilt:#x} of the same settings: it \
         keeps other things in its state; replay the trace with the build that wrote it"
    )]
    OtherStart {
        /// The trace's hash.
        recorded: u64,
        /// This build's.
        rebuilt: u64,
    },
}

impl Replayed {
    /// Settles every step of a trace again. `shown`: the steps whose runs and totals are kept; all are
    /// compared.
    pub fn new(trace: &[u8], shown: &RangeInclusive<u64>) -> Result<Self, ReplayError> {
        let mut reader = TraceReader::new(trace)?;
        let header = reader.header().clone();
        let start = header.state();
        if start.hash() != header.start_hash {
            return Err(ReplayError::OtherStart { recorded: header.start_hash, rebuilt: start.hash() });
        }
        let sizes: Vec<_> = header.lattice.buckets().iter().map(|bucket| bucket.rows()).collect();
        let mut groups: Vec<_> =
            (0..header.groups).map(|_| Group::new(start.clone(), &sizes, shown)).collect();
        let (mut equal_steps, mut mismatch) = (0, None);
        let ending = loop {
            match reader.read() {
                Ok(Some(TraceRecord::Gap { group, steps })) => groups[group].lose(steps),
                Ok(Some(TraceRecord::Epoch { group, epoch })) => groups[group].start_over(&start, epoch),
                Ok(Some(TraceRecord::Step(step))) => match groups[step.group].step(step) {
                    Ok(checked) => equal_steps += u64::from(checked),
                    Err(found) => {
                        mismatch = Some(found);
                        break TraceEnding::Unread;
                    }
                },
                Ok(None) => match reader.end().expect("no record is left") {
                    TraceEnd::Closed => break TraceEnding::Closed,
                    TraceEnd::Cut { offset, bytes } => break TraceEnding::Cut { offset, bytes },
                },
                Err(error) => break TraceEnding::Damaged(error),
            }
        };
        let timelines = groups.into_iter().map(|group| group.timeline).collect();
        Ok(Self { header, equal_steps, mismatch, ending, timelines })
    }
}

/// A group on its way through the trace.
struct Group<'a> {
    state: GroupState,
    /// Steps so far, of all epochs, lost ones too.
    count: u64,
    epoch: u64,
    /// Between a gap and the next epoch, when nobody knows the state.
    is_lost: bool,
    sizes: &'a [usize],
    shown: &'a RangeInclusive<u64>,
    timeline: Timeline,
    /// The step before was a replay within what is shown: when it was decided.
    replayed_at_us: Option<u64>,
}

impl<'a> Group<'a> {
    fn new(state: GroupState, sizes: &'a [usize], shown: &'a RangeInclusive<u64>) -> Self {
        let timeline = Timeline { runs: Vec::new(), totals: Totals::default(), gaps: Vec::new() };
        Self { state, count: 0, epoch: 1, is_lost: false, sizes, shown, timeline, replayed_at_us: None }
    }

    fn lose(&mut self, steps: u64) {
        self.timeline.gaps.push(Gap { after_step: self.count, lost_steps: steps, unchecked_steps: 0 });
        self.count = self.count.saturating_add(steps);
        (self.is_lost, self.replayed_at_us) = (true, None);
    }

    fn start_over(&mut self, start: &GroupState, epoch: u64) {
        self.state = start.clone();
        (self.epoch, self.is_lost, self.replayed_at_us) = (epoch, false, None);
    }

    /// True if the step was settled again, and is equal.
    fn step(&mut self, traced: TracedStep) -> Result<bool, Mismatch> {
        self.count = self.count.saturating_add(1);
        if self.is_lost {
            let gap = self.timeline.gaps.last_mut().expect("it is what is lost by");
            gap.unchecked_steps += 1;
            return Ok(false);
        }
        let step = self.count;
        let TracedStep { group, at_us, facts, decision, step_hash } = traced;
        let outcome = settle(&self.state, &facts).map(|(next, step)| {
            self.state = next;
            step
        });
        let replayed = Decision::of(&facts, &outcome);
        let hash = TracedStep::step_hash_of(&facts, &outcome);
        let difference = decision.difference(&replayed).or_else(|| {
            let (recorded, replayed) = (format!("{step_hash:#x}"), format!("{hash:#x}"));
            let differ = Difference { field: "the hash of the decision".to_owned(), recorded, replayed };
            (step_hash != hash).then_some(differ)
        });
        if let Some(difference) = difference {
            return Err(Mismatch { group, step, difference });
        }
        self.take_times(at_us, &facts);
        if self.shown.contains(&step) {
            self.show(step, at_us, &facts, decision);
        }
        Ok(true)
    }

    /// What lanes say now of the replay before.
    fn take_times(&mut self, at_us: u64, facts: &[Facts]) {
        let Some(since_us) = self.replayed_at_us.take() else { return };
        let times = || facts.iter().map(|f| u64::from(f.replay_us));
        let slowest = times().max().unwrap_or(0);
        let fastest = times().min().unwrap_or(0);
        let run = self.timeline.runs.last_mut().expect("the replay is in one");
        run.timed_steps += 1;
        run.slowest_us += slowest;
        run.spread_us += slowest - fastest;
        let totals = &mut self.timeline.totals;
        totals.step_us += at_us.saturating_sub(since_us);
        totals.replay_us += slowest;
        totals.wait_us += times().map(|us| slowest - us).sum::<u64>();
    }

    fn show(&mut self, step: u64, at_us: u64, facts: &[Facts], decision: Decision) {
        let wants = |f: &Facts| Grant { decode_rows: f.decode_rows, prefill_rows: f.prefill_rows };
        let rows = match &decision {
            Decision::Record { bucket } | Decision::Replay { bucket, .. } => self.sizes[*bucket],
            _ => 0,
        };
        self.timeline.totals.add(&decision, rows);
        if matches!(decision, Decision::Replay { .. }) {
            self.replayed_at_us = Some(at_us);
        }
        let wanted: Vec<_> = facts.iter().map(wants).collect();
        match self.timeline.runs.last_mut() {
            Some(run) if run.epoch == self.epoch && run.decision == decision && run.wanted == wanted => {
                run.steps += 1;
            }
            _ => self.timeline.runs.push(Run {
                first: step,
                epoch: self.epoch,
                steps: 1,
                decision,
                rows,
                wanted,
                timed_steps: 0,
                slowest_us: 0,
                spread_us: 0,
            }),
        }
    }
}

impl Run {
    /// Number of the last step.
    pub fn last(&self) -> u64 {
        self.first + self.steps - 1
    }

    /// What each lane was granted; nothing if it was no replay.
    pub fn grants(&self) -> &[Grant] {
        match &self.decision {
            Decision::Replay { grants, .. } => grants,
            _ => &[],
        }
    }

    /// Rows of all lanes, and of those the padding.
    pub fn rows_and_padding(&self) -> (u64, u64) {
        rows_and_padding(self.grants(), self.rows)
    }
}

impl Totals {
    fn add(&mut self, decision: &Decision, bucket_rows: usize) {
        match decision {
            Decision::Park => self.parks += 1,
            Decision::Record { .. } => self.records += 1,
            Decision::Exit | Decision::Fatal { .. } | Decision::Diverged { .. } => {}
            Decision::Replay { grants, note, .. } => {
                let (rows, padding) = rows_and_padding(grants, bucket_rows);
                self.replays += 1;
                self.rows += rows - padding;
                self.padding_rows += padding;
                self.held_steps += u64::from(matches!(note.prefill, Prefill::Held { .. }));
                self.time_cut_rows += u64::from(note.time_cut_rows);
                self.edge_cut_rows += u64::from(note.edge_cut_rows);
                *self.buckets.entry(bucket_rows).or_default() += 1;
            }
        }
    }
}

fn rows_and_padding(grants: &[Grant], bucket_rows: usize) -> (u64, u64) {
    let rows = grants.len() as u64 * bucket_rows as u64;
    let real: u64 = grants.iter().map(|grant| u64::from(grant.rows())).sum();
    (rows, rows - real)
}
