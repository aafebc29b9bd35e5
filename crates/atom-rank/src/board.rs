//! Where the first rank of a lane posts what the lane's other ranks do next.

use atom_base::{MaskClock, StepNo};
use atom_engine::Plan;
use atom_group::{Bucket, Meeting, WaitError};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

/// Orders and plans by parity of their number. A follower's seat shows the last order that it carried
/// out, the leader's the last one it posted; the leader writes order N after all have carried out N-2.
pub(crate) struct Board {
    pub(crate) meeting: Meeting,
    orders: [Mutex<Posted>; 2],
    posts: [RwLock<Post>; 2],
    signatures: Box<[AtomicU64]>, // [ranks], of the last recording
}

/// A plan with what the whole group was granted.
pub(crate) struct Post {
    pub(crate) plan: Plan,
    /// Rows granted to each lane of the group. `[lanes]`
    pub(crate) group_rows: Vec<u32>,
    pub(crate) patience: Duration,
    /// Of the masks that the plan names.
    pub(crate) mask_clock: Arc<MaskClock>,
}

/// An order, and the step that it is part of.
#[derive(Clone, Copy)]
pub(crate) struct Posted {
    pub(crate) step: StepNo,
    pub(crate) order: Order,
}

/// What all ranks of a lane do.
#[derive(Clone, Copy)]
pub(crate) enum Order {
    Nothing,
    Record(Bucket),
    Replay(Bucket),
    /// The same, of a recording that is made for it.
    Eager(Bucket),
    /// Wait for the step in flight.
    Land,
    Exit,
}

impl Board {
    pub(crate) fn new(ranks: usize, lanes: usize, spins: u32, plan: impl Fn() -> Plan) -> Self {
        let post = || {
            RwLock::new(Post {
                plan: plan(),
                group_rows: vec![0; lanes],
                patience: Duration::ZERO,
                mask_clock: Arc::new(MaskClock::new()),
            })
        };
        let nothing = || Mutex::new(Posted { step: StepNo(0), order: Order::Nothing });
        Self {
            meeting: Meeting::new(ranks, spins),
            orders: [nothing(), nothing()],
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
    pub(crate) fn order(&self, number: u64, step: StepNo, order: Order) {
        let posted = Posted { step, order };
        *self.orders[(number % 2) as usize].lock().unwrap_or_else(PoisonError::into_inner) = posted;
        self.meeting.arrive(0, number);
    }

    /// Follower: waits for order `number`, for as long as the lane is parked.
    pub(crate) fn next(&self, number: u64) -> Result<Posted, WaitError> {
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

    /// Leader: waits until all followers carried out order `number`.
    pub(crate) fn wait_done(&self, number: u64, patience: Duration) -> Result<(), WaitError> {
        let carried_out = |seat| self.meeting.number(seat) >= number;
        self.meeting.wait_until(|| (1..self.meeting.seats()).all(carried_out), Some(patience))
    }

    /// The same for the Record `number`; returns the first rank whose recording has another signature.
    pub(crate) fn wait_signatures(
        &self,
        number: u64,
        mine: u64,
        patience: Duration,
    ) -> Result<Option<(usize, u64)>, WaitError> {
        self.wait_done(number, patience)?;
        Ok((1..self.meeting.seats())
            .map(|rank| (rank, self.signatures[rank].load(Ordering::SeqCst)))
            .find(|&(_, theirs)| theirs != mine))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: StepNo = StepNo(7);
    const FAR: Duration = Duration::from_secs(60);

    fn board(ranks: usize) -> Board {
        Board::new(ranks, 1, 0, || Plan::with_capacity(1, 1, 1))
    }

    /// What the leader finds when followers record `theirs` and it `mine`.
    fn signatures(mine: u64, theirs: [u64; 3]) -> Result<Option<(usize, u64)>, WaitError> {
        let board = board(4);
        std::thread::scope(|scope| {
            for (rank, signature) in (1..).zip(theirs) {
                let board = &board;
                scope.spawn(move || {
                    let posted = board.next(1).unwrap();
                    assert!(matches!(posted.order, Order::Nothing) && posted.step == STEP);
                    board.note_signature(rank, signature);
                    board.done(rank, 1);
                });
            }
            board.order(1, STEP, Order::Nothing);
            board.wait_signatures(1, mine, FAR)
        })
    }

    /// A rank of a lane that recorded other collectives would meet the others in the wrong ones.
    #[test]
    fn a_follower_that_recorded_something_else_is_named() {
        assert_eq!(signatures(5, [5, 5, 5]), Ok(None));
        assert_eq!(signatures(5, [5, 6, 5]), Ok(Some((2, 6))));
        assert_eq!(signatures(5, [5, 7, 8]), Ok(Some((2, 7))), "the first one");
        assert_eq!(signatures(4, [5, 5, 5]), Ok(Some((1, 5))));
    }

    #[test]
    fn signatures_are_looked_at_when_all_have_recorded_and_not_before() {
        let board = board(3);
        board.order(1, STEP, Order::Nothing);
        board.note_signature(1, 5);
        board.done(1, 1);
        // Rank 2 has the signature already, of an earlier recording.
        board.note_signature(2, 5);
        let early = board.wait_signatures(1, 5, Duration::from_millis(1));
        assert!(matches!(early, Err(WaitError::TimedOut(_))), "{early:?}");
        board.done(2, 1);
        assert_eq!(board.wait_signatures(1, 5, FAR), Ok(None));
        board.order(2, STEP, Order::Nothing);
        board.meeting.close();
        assert_eq!(board.wait_signatures(2, 5, FAR), Err(WaitError::Closed));
    }

    /// The error ends the group: what has recorded otherwise can't be trusted to record again.
    #[test]
    fn another_signature_is_a_divergence_and_nobody_elses_fault() {
        let error = crate::lane::RankError::Signature { rank: 2, theirs: 6, ours: 5 };
        assert!(error.is_divergence() && !error.blames_others());
        let text = error.to_string();
        assert!(
            text.contains("rank 2 of the lane") && text.contains("0x6") && text.contains("0x5"),
            "{text}"
        );
    }
}
