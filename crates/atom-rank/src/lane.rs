//! The loop of a lane: want, exchange, settle, commit, replay, apply. Run by the lane's first rank.

use crate::board::Order;
use crate::device::Device;
use crate::host::{GroupShared, LaneShared};
use crate::mail::Mail;
use crate::outbox::Outbox;
use crate::stats::Gauges;
use atom_base::RequestId;
use atom_engine::{Event, Scheduler};
use atom_group::{
    Activity, Bucket, Divergence, ExchangeError, ExitCause, Facts, FactsFlags, Grants, GroupState, GroupStep,
    Prefill, StepNote, WaitError, settle,
};
use atom_ops::OpsError;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use thiserror::Error;

/// One lane, as its first rank runs it.
pub(crate) struct Lane {
    pub(crate) shared: Arc<GroupShared>,
    pub(crate) lane_in_group: usize,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) epoch: Instant,
    pub(crate) state: GroupState,
    pub(crate) scheduler: Scheduler,
    pub(crate) device: Device,
    pub(crate) mail: VecDeque<Mail>,
    pub(crate) events: Vec<(RequestId, Event)>,
    pub(crate) facts: Vec<Facts>, // [lanes]
    pub(crate) last_signature: u64,
    pub(crate) last_replay_us: u32,
    pub(crate) order: u64,
    /// What this lane last asked of the group.
    pub(crate) asked_pause: bool,
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
    #[error("lane {lane} of the group reported that it can't go on")]
    Fatal { lane: usize },
}

impl Lane {
    /// Runs until the group ends.
    pub(crate) fn run(&mut self) -> Result<(), RankError> {
        loop {
            self.take_mail();
            let step = self.exchange()?;
            match step {
                GroupStep::Park => self.park()?,
                GroupStep::Record(bucket) => self.record(bucket)?,
                GroupStep::Step { bucket, grants, note } => {
                    self.count_note(&note);
                    self.step(bucket, &grants)?;
                }
                GroupStep::Exit(ExitCause::Asked) => return self.leave(),
                GroupStep::Exit(ExitCause::Fatal { lane }) => return Err(RankError::Fatal { lane }),
            }
        }
    }

    fn lane(&self) -> &LaneShared {
        &self.shared.lanes[self.lane_in_group]
    }

    fn gauges(&self) -> &Gauges {
        &self.lane().gauges
    }

    fn now_ms(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    /// Says what the lane does from now on and how long that may take.
    fn note(&self, activity: Activity, patience: Duration) {
        let gauges = self.gauges();
        let (now, patience) = (self.now_ms(), patience.as_millis().min(u128::from(u64::MAX)) as u64);
        gauges.deadline_ms.store(now.saturating_add(patience), Ordering::Relaxed);
        gauges.since_ms.store(now, Ordering::Relaxed);
        self.shared.exchange.note(self.lane_in_group, self.state.next_step(), activity);
    }

    fn take_mail(&mut self) {
        let shared = Arc::clone(&self.shared);
        shared.lanes[self.lane_in_group].mailbox.take(&mut self.mail);
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
        self.outbox.post(&mut self.events);
    }

    fn exchange(&mut self) -> Result<GroupStep, RankError> {
        let want = self.scheduler.want(self.now_ms()).facts();
        let mut flags = want.flags;
        if self.shared.exit.load(Ordering::SeqCst) {
            flags = flags.with(FactsFlags::EXIT);
        }
        self.asked_pause = self.shared.paused.load(Ordering::SeqCst);
        if self.asked_pause {
            flags = flags.with(FactsFlags::PAUSE);
        }
        let mine = Facts {
            step: self.state.next_step(),
            state_hash: self.state.hash(),
            last_signature: self.last_signature,
            replay_us: self.last_replay_us,
            flags,
            ..want
        };
        let (start, patience) = (Instant::now(), self.state.patience());
        self.note(Activity::Exchanging, patience);
        self.shared.exchange.exchange(self.lane_in_group, &mine, patience, &mut self.facts)?;
        Gauges::add(&self.gauges().exchange_us, start.elapsed().as_micros() as u64);
        let (state, step) = settle(&self.state, &self.facts)?;
        self.state = state;
        if self.state.ready() {
            self.gauges().ready.store(true, Ordering::SeqCst);
        }
        Ok(step)
    }

    fn park(&mut self) -> Result<(), RankError> {
        self.note(Activity::Parked, Duration::MAX);
        let (lane, shared) = (self.lane(), &self.shared);
        let wake = || {
            let resumed = self.asked_pause && !shared.paused.load(Ordering::SeqCst);
            resumed || !lane.mailbox.is_empty() || shared.exit.load(Ordering::SeqCst)
        };
        self.shared.exchange.park(self.lane_in_group, self.state.next_step(), wake)?;
        Ok(())
    }

    fn record(&mut self, bucket: Bucket) -> Result<(), RankError> {
        let patience = self.state.patience();
        self.note(Activity::Recording, patience);
        self.next_order(patience)?;
        self.lane().board.order(self.order, Order::Record(bucket));
        let signature = self.device.record(bucket)?;
        if let Some((rank, theirs)) = self.lane().board.wait_signatures(self.order, signature, patience)? {
            return Err(RankError::Signature { rank, theirs, ours: signature });
        }
        self.last_signature = signature;
        Gauges::add(&self.gauges().recordings, 1);
        Ok(())
    }

    fn step(&mut self, bucket: Bucket, grants: &Grants) -> Result<(), RankError> {
        let patience = self.state.patience();
        self.note(Activity::Committing, patience);
        self.next_order(patience)?;
        let shared = Arc::clone(&self.shared);
        let board = &shared.lanes[self.lane_in_group].board;
        {
            let mut post = board.post_of(self.order).write().expect("a panic ends the rank");
            post.patience = patience;
            for (rows, grant) in post.group_rows.iter_mut().zip(grants.as_slice()) {
                *rows = grant.rows();
            }
            self.scheduler.commit(grants.as_slice()[self.lane_in_group], &mut post.plan);
        }
        board.order(self.order, Order::Replay(bucket));
        self.note(Activity::Replaying, patience);
        let post = board.post_of(self.order).read().expect("a panic ends the rank");
        let start = Instant::now();
        let (signature, results) = self.device.replay(bucket, &post.plan, &post.group_rows, patience)?;
        let took = start.elapsed();
        self.last_signature = signature;
        self.last_replay_us = took.as_micros().clamp(1, u128::from(u32::MAX)) as u32;
        self.shared.exchange.note(self.lane_in_group, self.state.next_step(), Activity::Applying);
        self.scheduler.apply(&post.plan, results, &mut self.events);
        // Counters first: who sees a request end finds them up to date.
        self.count(bucket, post.plan.rows(), took);
        self.outbox.post(&mut self.events);
        Ok(())
    }

    fn count(&self, bucket: Bucket, rows: usize, took: Duration) {
        let gauges = self.gauges();
        Gauges::add(&gauges.replays, 1);
        Gauges::add(&gauges.real_rows, rows as u64);
        Gauges::add(&gauges.padding_rows, (bucket.rows() - rows) as u64);
        Gauges::add(&gauges.replay_us, took.as_micros() as u64);
        let experts = self.device.expert_rows();
        Gauges::add(&gauges.expert_rows_chosen, experts.chosen);
        Gauges::add(&gauges.expert_rows_computed, experts.computed);
        gauges.set_counters(&self.scheduler.counters());
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
        self.lane().board.wait_free(self.order, patience)?;
        Ok(())
    }

    fn leave(&mut self) -> Result<(), RankError> {
        self.note(Activity::Ended, Duration::MAX);
        self.next_order(self.state.patience())?;
        self.lane().board.order(self.order, Order::Exit);
        Ok(())
    }
}
