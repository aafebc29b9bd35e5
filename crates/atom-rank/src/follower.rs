//! The loop of a lane's other ranks: do what the first one posted.

use crate::board::Order;
use crate::collectives::SharedCollectives;
use crate::device::Device;
use crate::lane::RankError;
use crate::shared::Form;
use atom_base::Seat;
use std::sync::{Arc, PoisonError};

/// A rank that holds a share of its lane's heads and columns.
pub(crate) struct Follower {
    form: Option<Arc<Form>>,
    lane_in_group: usize,
    rank_in_lane: usize,
    device: Device,
}

impl Follower {
    pub(crate) fn new(seat: &Seat, device: Device) -> Self {
        let Seat { lane_in_group, rank_in_lane, .. } = *seat;
        Self { form: None, lane_in_group, rank_in_lane, device }
    }

    /// Begins an epoch.
    pub(crate) fn join(&mut self, form: Arc<Form>, collectives: SharedCollectives) {
        self.form = Some(form);
        self.device.join(collectives);
    }

    /// Runs until told to leave.
    pub(crate) fn run(&mut self) -> Result<(), RankError> {
        let form = self.form.as_ref().expect("a rank joins before it runs");
        let board = &form.lanes[self.lane_in_group].board;
        for number in 1.. {
            let order = board.next(number)?;
            match order {
                Order::Nothing => {}
                Order::Record(bucket) => board.note_signature(self.rank_in_lane, self.device.record(bucket)?),
                Order::Replay(bucket) | Order::Eager(bucket) => {
                    if matches!(order, Order::Eager(_)) {
                        self.device.record_anew(bucket)?;
                    }
                    let post = board.post_of(number).read().unwrap_or_else(PoisonError::into_inner);
                    self.device.replay(bucket, &post.plan, &post.group_rows, post.patience)?;
                }
                Order::Exit => return Ok(()),
            }
            board.done(self.rank_in_lane, number);
        }
        Ok(())
    }
}
