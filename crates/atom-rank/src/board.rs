//! Where the first rank of a lane posts what the lane's other ranks do next.

use atom_engine::Plan;
use atom_group::{Bucket, Meeting, WaitError};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::Duration;

/// Orders and plans by parity of their number. A follower's seat shows the last order that it carried
/// out, the leader's the last one it posted; the leader writes order N after all have carried out N-2.
pub(crate) struct Board {
    pub(crate) meeting: Meeting,
    orders: [Mutex<Order>; 2],
    posts: [RwLock<Post>; 2],
    signatures: Box<[AtomicU64]>, // [ranks], of the last recording
}

/// A plan with what the whole group was granted.
pub(crate) struct Post {
    pub(crate) plan: Plan,
    /// Rows granted to each lane of the group. `[lanes]`
    pub(crate) group_rows: Vec<u32>,
    pub(crate) patience: Duration,
}

/// What all ranks of a lane do.
#[derive(Clone, Copy)]
pub(crate) enum Order {
    Nothing,
    Record(Bucket),
    Replay(Bucket),
    /// The same, of a recording that is made for it.
    Eager(Bucket),
    Exit,
}

impl Board {
    pub(crate) fn new(ranks: usize, lanes: usize, spins: u32, plan: impl Fn() -> Plan) -> Self {
        let post =
            || RwLock::new(Post { plan: plan(), group_rows: vec![0; lanes], patience: Duration::ZERO });
        Self {
            meeting: Meeting::new(ranks, spins),
            orders: [Mutex::new(Order::Nothing), Mutex::new(Order::Nothing)],
            posts: [post(), post()],
            signatures: (0..ranks).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    pub(crate) fn post_of(&self, number: u64) -> &RwLock<Post> {
        &self.posts[(number % 2) as usize]
    }

    /// Leader: waits until order `number`'s place is free. Call before writing its post.
    pub(crate) fn wait_free(&self, number: u64, patience: Duration) -> Result<(), WaitError> {
        let carried_out = |seat| self.meeting.number(seat) + 2 >= number;
        self.meeting.wait_until(|| (1..self.meeting.seats()).all(carried_out), Some(patience))
    }

    /// Leader: posts order `number`; its post must be written.
    pub(crate) fn order(&self, number: u64, order: Order) {
        *self.orders[(number % 2) as usize].lock().unwrap_or_else(PoisonError::into_inner) = order;
        self.meeting.arrive(0, number);
    }

    /// Follower: waits for order `number`, for as long as the lane is parked.
    pub(crate) fn next(&self, number: u64) -> Result<Order, WaitError> {
        self.meeting.wait_until(|| self.meeting.number(0) >= number, None)?;
        Ok(*self.orders[(number % 2) as usize].lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Follower: says that order `number` was carried out.
    pub(crate) fn done(&self, rank: usize, number: u64) {
        self.meeting.arrive(rank, number);
    }

    pub(crate) fn note_signature(&self, rank: usize, signature: u64) {
        self.signatures[rank].store(signature, Ordering::SeqCst);
    }

    /// Leader: waits until all followers carried out the Record `number`; returns the first rank whose
    /// recording has another signature.
    pub(crate) fn wait_signatures(
        &self,
        number: u64,
        mine: u64,
        patience: Duration,
    ) -> Result<Option<(usize, u64)>, WaitError> {
        let seats = 1..self.meeting.seats();
        self.meeting
            .wait_until(|| seats.clone().all(|seat| self.meeting.number(seat) >= number), Some(patience))?;
        Ok(seats
            .map(|rank| (rank, self.signatures[rank].load(Ordering::SeqCst)))
            .find(|&(_, theirs)| theirs != mine))
    }
}
