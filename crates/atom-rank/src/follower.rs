//! The loop of a lane's other ranks: do what the first one posted.

use crate::board::{Board, Order};
use crate::collectives::SharedCollectives;
use crate::device::Device;
use crate::lane::RankError;
use crate::probe::{Stage, Tap};
use crate::shared::Form;
use atom_base::{Seat, StepNo};
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

/// A rank that holds a share of its lane's heads and columns.
pub(crate) struct Follower<T> {
    form: Option<Arc<Form>>,
    lane_in_group: usize,
    rank_in_lane: usize,
    device: Device,
    /// Of the last order.
    step: StepNo,
    depth: usize,
    /// Rows with logits of each step in flight, the oldest first.
    flights: VecDeque<usize>,
    tap: T,
}

impl<T: Tap> Follower<T> {
    pub(crate) fn new(seat: &Seat, device: Device, depth: usize, tap: T) -> Self {
        let Seat { lane_in_group, rank_in_lane, .. } = *seat;
        let flights = VecDeque::with_capacity(depth + 1);
        Self { form: None, lane_in_group, rank_in_lane, device, step: StepNo(0), depth, flights, tap }
    }

    /// Begins an epoch.
    pub(crate) fn join(&mut self, form: Arc<Form>, collectives: SharedCollectives) {
        self.form = Some(form);
        self.step = StepNo(0);
        self.flights.clear();
        self.device.join(collectives);
    }

    /// The step of the last order.
    pub(crate) fn step(&self) -> StepNo {
        self.step
    }

    /// Runs until told to leave.
    pub(crate) fn run(&mut self) -> Result<(), RankError> {
        let form = Arc::clone(self.form.as_ref().expect("a rank joins before it runs"));
        let board = &form.lanes[self.lane_in_group].board;
        for number in 1.. {
            let posted = board.next(number)?;
            self.step = posted.step;
            self.tap.reach(self.step, Stage::Commit)?;
            self.carry_out(posted.order, board, number)?;
            board.done(self.rank_in_lane, number);
            if matches!(posted.order, Order::Exit) {
                return Ok(());
            }
        }
        Ok(())
    }

    fn carry_out(&mut self, order: Order, board: &Board, number: u64) -> Result<(), RankError> {
        match order {
            Order::Nothing => {}
            Order::Record(bucket) => {
                self.tap.reach(self.step, Stage::Record)?;
                board.note_signature(self.rank_in_lane, self.device.record(bucket)?);
            }
            Order::Replay(bucket) | Order::Eager(bucket) => {
                let post = board.post_of(number).read().unwrap_or_else(PoisonError::into_inner);
                self.tap.reach(self.step, Stage::Replay)?;
                if matches!(order, Order::Eager(_)) {
                    self.device.record_anew(bucket)?;
                }
                self.device.launch(bucket, &post.plan, &post.group_rows, post.patience)?;
                self.flights.push_back(post.plan.out.len());
                self.land(self.depth)?;
                self.tap.reach(self.step, Stage::Apply)?;
            }
            Order::Land => self.land(0)?,
            Order::Exit => self.tap.reach(self.step, Stage::Leave)?,
        }
        Ok(())
    }

    /// Waits until so many steps are left in flight.
    fn land(&mut self, left: usize) -> Result<(), RankError> {
        while self.flights.len() > left {
            let out_rows = self.flights.pop_front().expect("counted above");
            self.device.finish(out_rows)?;
        }
        Ok(())
    }
}
