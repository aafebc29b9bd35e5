//! The loop of a lane's other ranks: do what the first one posted.

use crate::board::Order;
use crate::device::Device;
use crate::host::GroupShared;
use crate::lane::RankError;
use std::sync::Arc;

/// A rank that holds a share of its lane's heads and columns.
pub(crate) struct Follower {
    pub(crate) shared: Arc<GroupShared>,
    pub(crate) lane_in_group: usize,
    pub(crate) rank_in_lane: usize,
    pub(crate) device: Device,
}

impl Follower {
    /// Runs until told to leave.
    pub(crate) fn run(&mut self) -> Result<(), RankError> {
        let board = &self.shared.lanes[self.lane_in_group].board;
        for number in 1.. {
            match board.next(number)? {
                Order::Nothing => {}
                Order::Record(bucket) => board.note_signature(self.rank_in_lane, self.device.record(bucket)?),
                Order::Replay(bucket) => {
                    let post = board.post_of(number).read().expect("a panic ends the rank");
                    self.device.replay(bucket, &post.plan, &post.group_rows, post.patience)?;
                }
                Order::Exit => return Ok(()),
            }
            board.done(self.rank_in_lane, number);
        }
        Ok(())
    }
}
