//! What a lane does to meet the others, one atomic operation at a time, and nothing of how it is done.
//!
//! Each machine here is a value that says which operation comes next; whoever drives it carries the
//! operation out and asks with its outcome what follows. [`crate::Meeting`] and [`crate::Exchange`]
//! drive them over real memory and real threads. The explorer in `atom-sim` drives the same values in
//! every order that threads could have. So the order of operations, which all depends on, is written
//! down once, here.
//!
//! Every operation is one load, store or addition of one word (all sequentially consistent), or one
//! thing done to the lock and the bell. Looks at several seats count as one operation: numbers only
//! grow, so "all have come" holds from the last load on, and "not all" held at the load that failed.

use crate::facts::FactsFlags;
use crate::meeting::WaitError;

/// How a wait or a visit ended.
pub type End = Result<(), WaitError>;

/// Waiting until something holds: looks for a while, then sleeps.
///
/// A sleeper is counted before its last look, and a writer writes before it looks at the count (see
/// [`Bell`]): at least one of them sees the other, so no wake-up is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wait {
    /// Look whether it holds; outcome: it does. `left`: further looks before going to sleep.
    Glance {
        /// Further looks.
        left: u32,
    },
    /// Look whether the meeting is closed; outcome: it is.
    GlanceClosed {
        /// Further looks.
        left: u32,
    },
    /// Count oneself among the sleepers.
    Enlist,
    /// Take the lock.
    Lock,
    /// Look whether it holds, under the lock; outcome: it does.
    Look,
    /// Look whether the meeting is closed, under the lock; outcome: it is.
    LookClosed,
    /// Let go of the lock and sleep until the bell, both at once, then take the lock again. Outcome: the
    /// deadline had passed, and there was no sleep.
    Sleep,
    /// Let go of the lock.
    Unlock(End),
    /// Count oneself out.
    Retire(End),
    /// It is over.
    Over(End),
}

/// Waking those who sleep, after having written what they wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bell {
    /// Look whether anybody is counted as a sleeper; outcome: somebody is.
    AnySleepers,
    /// Take the lock and let go of it: whoever has looked and not slept yet sleeps by then.
    PassLock,
    /// Wake all that sleep.
    Notify,
    /// It is over.
    Over,
}

/// A lane's visit to the exchange: brings its facts, leaves with everybody's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Visit {
    /// Write one's facts on the board of the step.
    Write,
    /// Raise one's seat to the step.
    Arrive,
    /// Ring the [`Bell`].
    Ring,
    /// [`Wait`] until [`everybody_came`].
    Wait,
    /// Look whether the meeting is closed: a wait that is over at once does not look.
    LookClosed,
    /// Read everybody's facts from the board of the step.
    Read,
    /// It is over.
    Over(End),
}

/// What the world outside the group wants of a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Calls {
    /// There are requests or aborts that the lane has not taken in.
    pub mail: bool,
    /// The group shall end once it has no work.
    pub exit: bool,
    /// The group shall rest.
    pub pause: bool,
}

impl Wait {
    /// The first operation, with `spins` further looks before sleeping.
    pub fn new(spins: u32) -> Self {
        Self::Glance { left: spins }
    }

    /// What follows, after an operation with this outcome. `waited` names the error of a deadline.
    #[inline]
    pub fn after(self, outcome: bool, waited: impl FnOnce() -> WaitError) -> Self {
        match self {
            Self::Glance { .. } if outcome => Self::Over(Ok(())),
            Self::Glance { left } => Self::GlanceClosed { left },
            Self::GlanceClosed { .. } if outcome => Self::Over(Err(WaitError::Closed)),
            Self::GlanceClosed { left: 0 } => Self::Enlist,
            Self::GlanceClosed { left } => Self::Glance { left: left - 1 },
            Self::Enlist => Self::Lock,
            Self::Lock => Self::Look,
            Self::Look if outcome => Self::Unlock(Ok(())),
            Self::Look => Self::LookClosed,
            Self::LookClosed if outcome => Self::Unlock(Err(WaitError::Closed)),
            Self::LookClosed => Self::Sleep,
            Self::Sleep if outcome => Self::Unlock(Err(waited())),
            Self::Sleep => Self::Look,
            Self::Unlock(end) => Self::Retire(end),
            Self::Retire(end) | Self::Over(end) => Self::Over(end),
        }
    }
}

impl Bell {
    /// What follows, after an operation with this outcome.
    #[inline]
    pub fn after(self, outcome: bool) -> Self {
        match self {
            Self::AnySleepers if outcome => Self::PassLock,
            Self::PassLock => Self::Notify,
            Self::AnySleepers | Self::Notify | Self::Over => Self::Over,
        }
    }
}

impl Visit {
    /// What follows, after an operation with this outcome; only looks and waits have one that matters.
    #[inline]
    pub fn after(self, outcome: End) -> Self {
        match self {
            Self::Write => Self::Arrive,
            Self::Arrive => Self::Ring,
            Self::Ring => Self::Wait,
            Self::Wait | Self::LookClosed if outcome.is_err() => Self::Over(outcome),
            Self::Wait => Self::LookClosed,
            Self::LookClosed => Self::Read,
            Self::Read => Self::Over(Ok(())),
            Self::Over(end) => Self::Over(end),
        }
    }
}

impl Calls {
    /// What the lane says of it to the others.
    pub fn flags(self) -> FactsFlags {
        let flag = |is_set, flag| if is_set { flag } else { FactsFlags::default() };
        flag(self.exit, FactsFlags::EXIT).with(flag(self.pause, FactsFlags::PAUSE))
    }

    /// True if a lane that parked after having said `told` must wake.
    ///
    /// Whoever was told to rest wakes when that is over, since it may have kept work. A wish to rest
    /// wakes nobody: a parked lane has said that it has no work, or rests.
    pub fn wake(self, told: FactsFlags) -> bool {
        let resumed = told.has(FactsFlags::PAUSE) && !self.pause;
        resumed || self.mail || self.exit
    }
}

/// The board of a step. Two take turns: a lane writes its facts of step N+2 only after everybody came to
/// N+1, and so after everybody has read those of N.
#[inline]
pub fn board(step: u64) -> usize {
    (step % BOARDS as u64) as usize
}

/// True once every seat has reached `number`: what a visit waits for.
#[inline]
pub fn everybody_came(mut seats: impl Iterator<Item = u64>, number: u64) -> bool {
    seats.all(|seat| seat >= number)
}

/// True once any seat has reached `number`: what ends the rest of a parked lane, beside its [`Calls`].
#[inline]
pub fn somebody_came(mut seats: impl Iterator<Item = u64>, number: u64) -> bool {
    seats.any(|seat| seat >= number)
}

/// Whose number is not the largest: who holds up the others.
pub fn behind(seats: std::ops::Range<usize>, number: impl Fn(usize) -> u64) -> Vec<usize> {
    let most = seats.clone().map(&number).max().unwrap_or(0);
    seats.filter(|&seat| number(seat) < most).collect()
}

/// Boards of an exchange.
pub const BOARDS: usize = 2;
