//! The loop of a lane: want, exchange, settle, commit, replay, apply. Run by the lane's first rank.

use crate::board::{Order, Post};
use crate::collectives::SharedCollectives;
use crate::device::Device;
use crate::host::HostConfig;
use crate::link::Link;
use crate::mail::Mail;
use crate::masks;
use crate::outbox::{Batch, Outbox};
use crate::probe::{Stage, Tap};
use crate::profile::Profile;
use crate::recent::{StepRecord, StepRing};
use crate::shared::{Form, FormLane, GroupShared, HostShared, LaneShared};
use crate::stats::{EagerCause, Gauges};
use crate::step_trace::StepTrace;
use atom_base::{LaneId, Seat, StepNo};
use atom_engine::{Scheduler, Want};
use atom_group::machine::Calls;
use atom_group::{
    Activity, Bucket, Divergence, ExchangeError, ExitCause, Facts, FactsFlags, Grants, GroupState, GroupStep,
    Prefill, StepNote, WaitError, settle,
};
use atom_ops::OpsError;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// One lane, as its first rank runs it.
pub(crate) struct Lane<T> {
    group: Arc<GroupShared>,
    /// Of the epoch that runs.
    form: Option<Arc<Form>>,
    lane: LaneId,
    lane_in_group: usize,
    outbox: Arc<Outbox>,
    shared: Arc<HostShared>,
    start: Instant,
    state: GroupState,
    /// The step that goes on.
    step: StepNo,
    scheduler: Scheduler,
    device: Device,
    mail: VecDeque<Mail>,
    events: Batch,
    facts: Vec<Facts>, // [lanes]
    last_signature: u64,
    last_replay_us: u32,
    /// In the last exchange.
    waited_us: u32,
    /// Prompts wait in the step that goes on.
    is_held: bool,
    order: u64,
    /// Steps that may be in flight when the next one is planned.
    depth: usize,
    /// How long a step may wait for masks.
    mask_wait: Duration,
    flight: Option<Flight>,
    /// When the last step ended.
    landed: Instant,
    /// To lanes on other hosts.
    link: Option<Arc<Link>>,
    /// What this lane last told the group of what the outside wants.
    told: FactsFlags,
    /// Why no recording is kept and every step makes its own, if so.
    eager: Option<EagerCause>,
    fail_on_eager: bool,
    /// Of the group's first lane, with the number of the group.
    step_trace: Option<(Arc<StepTrace>, usize)>,
    profile: Arc<Profile>,
    tap: T,
}

/// What a lane is made of.
pub(crate) struct LaneParts<'a> {
    pub(crate) config: &'a HostConfig,
    pub(crate) seat: &'a Seat,
    pub(crate) group: Arc<GroupShared>,
    pub(crate) shared: Arc<HostShared>,
    pub(crate) device: Device,
    pub(crate) step_trace: Option<Arc<StepTrace>>,
    pub(crate) profile: Arc<Profile>,
}

/// Why a rank thread ended other than by being asked to.
#[derive(Debug, Error)]
pub(crate) enum RankError {
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    #[error(transparent)]
    Divergence(#[from] Divergence),
    #[error(transparent)]
    Ops(#[from] OpsError),
    #[error("waiting for the other ranks of the lane: {0}")]
    Board(#[from] WaitError),
    #[error(
        "rank {rank} of the lane recorded collectives {theirs:#x}, the lane's first rank {ours:#x}; refused before any replay"
    )]
    Signature { rank: usize, theirs: u64, ours: u64 },
    #[error("step {step} is no replay (cause: {}), which --fail-on-eager does not allow", cause.name())]
    Eager { step: StepNo, cause: EagerCause },
    #[error("lane {lane} of the group reported that it can't go on")]
    Fatal { lane: usize },
}

impl RankError {
    /// Somebody else did not come, or the epoch is over: this rank itself could go on.
    pub(crate) fn blames_others(&self) -> bool {
        match self {
            Self::Exchange(_) | Self::Board(_) | Self::Fatal { .. } => true,
            Self::Ops(error) => matches!(error, OpsError::Collective(_)),
            Self::Divergence(_) | Self::Signature { .. } | Self::Eager { .. } => false,
        }
    }

    /// Ranks that should agree don't.
    pub(crate) fn is_divergence(&self) -> bool {
        matches!(self, Self::Divergence(_) | Self::Signature { .. })
    }
}

impl<T: Tap> Lane<T> {
    pub(crate) fn new(parts: LaneParts<'_>, tap: T) -> Self {
        let LaneParts { config, seat, group, shared, device, step_trace, profile } = parts;
        let start = shared.start;
        // Every lane has everybody's facts.
        let step_trace = step_trace.filter(|_| seat.lane_in_group == 0);
        // Before the first step, and kept when the rank is replaced.
        group.lanes[seat.lane_in_group].recent.get_or_init(StepRing::new);
        Self {
            form: None,
            lane: seat.lane,
            lane_in_group: seat.lane_in_group,
            outbox: Arc::clone(&shared.outbox),
            start,
            state: config.first_state(),
            step: StepNo(0),
            scheduler: Scheduler::new(config.scheduler.clone()),
            device,
            mail: VecDeque::new(),
            events: shared.outbox.batch(),
            shared,
            facts: vec![Facts::default(); group.lanes.len()],
            last_signature: 0,
            last_replay_us: 0,
            waited_us: 0,
            is_held: false,
            order: 0,
            depth: config.steps_ahead(),
            mask_wait: config.mask_wait,
            flight: None,
            landed: start,
            link: config.link.clone(),
            told: FactsFlags::default(),
            eager: config.enforce_eager.then_some(EagerCause::EnforceEager),
            fail_on_eager: config.fail_on_eager,
            profile,
            step_trace: step_trace.map(|trace| (trace, usize::from(seat.group))),
            tap,
            group,
        }
    }

    /// Begins an epoch. Whoever ran in the last one waits again, with all tokens: the step that was cut
    /// short may have left anything in the pages that it wrote.
    pub(crate) fn join(&mut self, form: Arc<Form>, collectives: SharedCollectives, config: &HostConfig) {
        self.device.join(collectives);
        self.state = config.first_state();
        self.scheduler.start_over(form.lanes[self.lane_in_group].cache_is_lost);
        (self.last_signature, self.last_replay_us, self.order) = (0, 0, 0);
        self.flight = None;
        self.step = self.state.next_step();
        self.gauges().epoch.store(form.epoch, Ordering::Relaxed);
        self.gauges().set_counters(&self.scheduler.counters());
        self.form = Some(form);
    }

    /// The step that goes on.
    pub(crate) fn step(&self) -> StepNo {
        self.step
    }

    /// Runs until the group ends.
    pub(crate) fn run(&mut self) -> Result<(), RankError> {
        loop {
            self.step = self.state.next_step();
            // A lane that slept had no deadline.
            self.note(Activity::Wanting, self.state.patience());
            self.tap.reach(self.step, Stage::Want)?;
            // The wish to leave first, then the mail: who asks to leave has taken in what came before.
            let calls = self.calls();
            self.take_mail();
            let step = self.exchange(calls)?;
            if !matches!(step, GroupStep::Step { .. }) {
                self.drain()?;
            }
            match step {
                GroupStep::Park => self.park()?,
                GroupStep::Record(bucket) => self.record(bucket)?,
                GroupStep::Step { bucket, grants, note } => {
                    self.count_note(&note);
                    self.is_held = matches!(note.prefill, Prefill::Held { .. });
                    self.replay(bucket, grants)?;
                }
                GroupStep::Exit(ExitCause::Asked) => return self.leave(),
                GroupStep::Exit(ExitCause::Fatal { lane }) => return Err(RankError::Fatal { lane }),
            }
        }
    }

    fn form(&self) -> &Form {
        self.form.as_ref().expect("a rank joins before it runs")
    }

    fn meetings(&self) -> &FormLane {
        &self.form().lanes[self.lane_in_group]
    }

    fn lane(&self) -> &LaneShared {
        &self.group.lanes[self.lane_in_group]
    }

    fn gauges(&self) -> &Gauges {
        &self.lane().gauges
    }

    fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// Says what the lane does from now on and how long that may take.
    fn note(&self, activity: Activity, patience: Duration) {
        if self.form().exchange.is_closed() {
            // The epoch is over; the lane's clock may be another thread's by now.
            return;
        }
        let gauges = self.gauges();
        let (now, patience) = (self.now_ms(), patience.as_millis().min(u128::from(u64::MAX)) as u64);
        gauges.deadline_ms.store(now.saturating_add(patience), Ordering::Relaxed);
        gauges.since_ms.store(now, Ordering::Relaxed);
        self.form().exchange.note(self.lane_in_group, self.step, activity);
    }

    fn take_mail(&mut self) {
        let group = Arc::clone(&self.group);
        let epoch = self.form().epoch;
        group.lanes[self.lane_in_group].mailbox.take(epoch, &mut self.mail);
        if self.mail.is_empty() {
            return;
        }
        let now = self.now_ms();
        for mail in self.mail.drain(..) {
            match mail {
                Mail::Submit(request) => self.scheduler.submit(request, now, &mut self.events),
                Mail::Abort(id) => {
                    self.scheduler.abort(id, &mut self.events);
                }
            }
        }
        self.gauges().set_counters(&self.scheduler.counters());
        self.outbox.post(self.lane, &mut self.events);
    }

    /// What the outside wants of this lane.
    fn calls(&self) -> Calls {
        Calls {
            mail: !self.lane().mailbox.is_empty(),
            exit: self.group.exit.load(Ordering::SeqCst),
            pause: self.group.paused.load(Ordering::SeqCst),
        }
    }

    fn exchange(&mut self, calls: Calls) -> Result<GroupStep, RankError> {
        let want = self.want()?.facts();
        self.told = calls.flags();
        let ahead = if self.flight.is_some() { FactsFlags::AHEAD } else { FactsFlags::default() };
        let flags = want.flags.with(self.told).with(ahead);
        let mine = Facts {
            step: self.step,
            state_hash: self.state.hash(),
            last_signature: self.last_signature,
            replay_us: self.last_replay_us,
            flags,
            ..want
        };
        let (start, patience) = (Instant::now(), self.state.patience());
        self.note(Activity::Exchanging, patience);
        self.tap.reach(self.step, Stage::Exchange)?;
        let form = Arc::clone(self.form.as_ref().expect("a rank joins before it runs"));
        if let Some(link) = &self.link {
            link.send_facts(self.lane_in_group, &mine)
                .map_err(|error| RankError::Ops(OpsError::Collective(error.to_string())))?;
        }
        form.exchange.exchange(self.lane_in_group, &mine, patience, &mut self.facts)?;
        self.tap.reach(self.step, Stage::Settle)?;
        if form.exchange.is_closed() {
            // Who was held up since may find another thread in its seat: what follows is written there.
            return Err(ExchangeError::Closed.into());
        }
        if self.link.is_some() && self.facts.iter().any(|facts| facts.flags.has(FactsFlags::EXIT)) {
            // A group ends as a whole: whoever was told to leave leaves with everybody.
            self.group.exit.store(true, Ordering::SeqCst);
        }
        let waited = start.elapsed();
        self.waited_us = micros(waited);
        Gauges::add(&self.gauges().exchange_us, waited.as_micros() as u64);
        let outcome = settle(&self.state, &self.facts).map(|(state, step)| {
            self.state = state;
            step
        });
        if let Some((trace, group)) = &self.step_trace {
            trace.step(*group, form.epoch, &self.facts, &outcome);
        }
        let step = outcome?;
        if self.state.ready() {
            self.gauges().ready.store(true, Ordering::SeqCst);
        }
        Ok(step)
    }

    /// What could run now. Where requests are here that can do nothing before the step in flight has
    /// ended, it is waited for: the group must not hear that nothing is left to do. So is a step whose
    /// tokens decide what its requests may say next: they would else take part in every other step only.
    fn want(&mut self) -> Result<Want, RankError> {
        if self.flight.as_ref().is_some_and(|flight| flight.has_masks) {
            self.drain()?;
        }
        let want = self.scheduler.want(self.now_ms());
        if want.rows() > 0 || self.scheduler.is_idle() || self.flight.is_none() {
            return Ok(want);
        }
        self.drain()?;
        Ok(self.scheduler.want(self.now_ms()))
    }

    fn park(&mut self) -> Result<(), RankError> {
        self.step = self.state.next_step();
        self.note(Activity::Parked, Duration::MAX);
        let wake = || self.calls().wake(self.told);
        self.form().exchange.park(self.lane_in_group, self.step, wake)?;
        Ok(())
    }

    fn record(&mut self, bucket: Bucket) -> Result<(), RankError> {
        let patience = self.state.patience();
        self.note(Activity::Recording, patience);
        self.next_order(patience)?;
        self.meetings().board.order(self.order, self.step, Order::Record(bucket));
        self.tap.reach(self.step, Stage::Record)?;
        let signature = self.device.record(bucket)?;
        if let Some((rank, theirs)) =
            self.meetings().board.wait_signatures(self.order, signature, patience)?
        {
            return Err(RankError::Signature { rank, theirs, ours: signature });
        }
        self.last_signature = signature;
        Gauges::add(&self.gauges().recordings, 1);
        Ok(())
    }

    fn replay(&mut self, bucket: Bucket, grants: Grants) -> Result<(), RankError> {
        let patience = self.state.patience();
        self.note(Activity::Committing, patience);
        self.next_order(patience)?;
        let form = Arc::clone(self.form.as_ref().expect("a rank joins before it runs"));
        let board = &form.lanes[self.lane_in_group].board;
        {
            let mut post = board.post_of(self.order).write().unwrap_or_else(PoisonError::into_inner);
            post.patience = patience;
            for (rows, grant) in post.group_rows.iter_mut().zip(grants.each(&self.facts)) {
                *rows = grant.rows();
            }
            self.tap.reach(self.step, Stage::Commit)?;
            self.scheduler.commit(grants.of(&self.facts[self.lane_in_group]), &mut post.plan);
            self.shared.masks.hand_out(self.scheduler.mask_work());
            // Before the lane's other ranks see the plan.
            masks::start_clock(&post.mask_clock, &post.plan, Instant::now(), self.mask_wait, patience);
        }
        let order = if self.eager.is_some() { Order::Eager(bucket) } else { Order::Replay(bucket) };
        board.order(self.order, self.step, order);
        self.note(Activity::Replaying, patience);
        let post = board.post_of(self.order).read().unwrap_or_else(PoisonError::into_inner);
        self.tap.reach(self.step, Stage::Replay)?;
        let start = Instant::now();
        let has_masks = post.plan.has_masks();
        if let Some(cause) = self.eager {
            if self.fail_on_eager {
                return Err(RankError::Eager { step: self.step, cause });
            }
            self.device.record_anew(bucket)?;
            self.gauges().add_eager(cause);
        }
        self.device.count_experts(self.shared.counts_experts.load(Ordering::Relaxed));
        self.last_signature = self.device.launch(bucket, &post.plan, &post.group_rows, patience)?;
        drop(post);
        let mine = &self.facts[self.lane_in_group];
        let record = StepRecord {
            step: self.step,
            epoch: form.epoch as u32,
            bucket_rows: bucket.rows() as u32,
            wait_us: self.waited_us,
            oldest_wait_ms: mine.oldest_wait_ms,
            kv_per_mille: mine.kv_per_mille,
            is_held: self.is_held,
            ..StepRecord::default()
        };
        let flight = Flight { order: self.order, bucket, start, record, has_masks };
        if self.depth == 0 {
            return self.land(&flight);
        }
        match self.flight.replace(flight) {
            Some(before) => self.land(&before),
            None => Ok(()),
        }
    }

    /// Waits for the step in flight and takes in what it computed. The lane's other ranks do so too.
    fn drain(&mut self) -> Result<(), RankError> {
        let Some(flight) = self.flight.take() else { return Ok(()) };
        self.next_order(self.state.patience())?;
        self.meetings().board.order(self.order, self.step, Order::Land);
        self.land(&flight)
    }

    /// Takes in the oldest step in flight.
    fn land(&mut self, flight: &Flight) -> Result<(), RankError> {
        let form = Arc::clone(self.form.as_ref().expect("a rank joins before it runs"));
        let board = &form.lanes[self.lane_in_group].board;
        let post = board.post_of(flight.order).read().unwrap_or_else(PoisonError::into_inner);
        let results = self.device.finish(post.plan.out.len())?;
        let now = Instant::now();
        // It began when the one before it ended.
        let took = (now - flight.start.max(self.landed)).saturating_sub(masks::waited(&post.plan));
        self.landed = now;
        self.last_replay_us = micros(took);
        form.exchange.note(self.lane_in_group, self.step, Activity::Applying);
        self.tap.reach(self.step, Stage::Apply)?;
        self.scheduler.apply(&post.plan, results, &mut self.events);
        self.shared.masks.hand_out(self.scheduler.mask_work());
        self.count(flight, &post, took);
        self.outbox.post(self.lane, &mut self.events);
        Ok(())
    }

    fn count(&self, flight: &Flight, post: &Post, took: Duration) {
        if self.form().exchange.is_closed() {
            // As in `note`; whoever begins the next epoch says what it has.
            return;
        }
        let (bucket, rows) = (flight.bucket, post.plan.rows());
        let gauges = self.gauges();
        if self.eager.is_none() {
            Gauges::add(&gauges.replays, 1);
        }
        Gauges::add(&gauges.real_rows, rows as u64);
        Gauges::add(&gauges.padding_rows, (bucket.rows() - rows) as u64);
        gauges.padding_shares.count(rows, bucket.rows());
        let fullest = post.group_rows.iter().copied().max().unwrap_or(0);
        gauges.fullest_padding_shares.count(fullest as usize, bucket.rows());
        Gauges::add(&gauges.replay_us, took.as_micros() as u64);
        let experts = self.device.expert_rows();
        Gauges::add(&gauges.expert_rows_chosen, experts.chosen);
        Gauges::add(&gauges.expert_rows_computed, experts.computed);
        let counters = self.scheduler.counters();
        gauges.set_counters(&counters);
        let decode_rows = post.plan.decode_rows;
        let record = StepRecord {
            at_us: (self.landed - self.start).as_micros() as u64,
            decode_rows: decode_rows as u32,
            prefill_rows: (rows - decode_rows) as u32,
            replay_us: micros(took),
            running: counters.running as u32,
            waiting: counters.waiting as u32,
            distinct_experts: experts.distinct as u32,
            ..flight.record
        };
        self.lane().recent.get().expect("it is made with the lane").push(&record);
        self.profile.add(|| StepRecord { lane: self.lane, ..record });
    }

    fn count_note(&self, note: &StepNote) {
        let gauges = self.gauges();
        if matches!(note.prefill, Prefill::Held { .. }) {
            Gauges::add(&gauges.held_steps, 1);
        }
        Gauges::add(&gauges.time_cut_rows, note.time_cut_rows.into());
        Gauges::add(&gauges.edge_cut_rows, note.edge_cut_rows.into());
    }

    fn next_order(&mut self, patience: Duration) -> Result<(), RankError> {
        self.order += 1;
        self.meetings().board.wait_free(self.order, patience)?;
        Ok(())
    }

    /// The last order has a deadline too: a rank that is stuck must not hold up the end of the others.
    fn leave(&mut self) -> Result<(), RankError> {
        let patience = self.state.patience();
        self.note(Activity::Leaving, patience);
        self.tap.reach(self.step, Stage::Leave)?;
        self.next_order(patience)?;
        let board = &self.meetings().board;
        board.order(self.order, self.step, Order::Exit);
        board.wait_done(self.order, patience)?;
        self.note(Activity::Ended, Duration::MAX);
        Ok(())
    }
}

/// A step that was launched and not taken in.
struct Flight {
    order: u64,
    bucket: Bucket,
    start: Instant,
    /// What is known of it already.
    record: StepRecord,
    has_masks: bool,
}

fn micros(took: Duration) -> u32 {
    took.as_micros().clamp(1, u128::from(u32::MAX)) as u32
}
