//! The life of a rank's thread, and the way of mail to it, one operation at a time; see [`crate::machine`].

use crate::epoch::Loss;

/// What a rank's thread does once it has loaded: one epoch after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Life {
    /// Wait for an epoch after `seen`, or for the end of the group.
    Await {
        /// The last one that it took part in; 0 if none.
        seen: u64,
    },
    /// Join this epoch and take its steps.
    Run {
        /// Its number.
        epoch: u64,
    },
    /// Tell the supervisor.
    Tell(Tale),
    /// It is over.
    Over,
}

/// What a thread tells its supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tale {
    /// It can't go on for the others; it waits for the next epoch.
    Alone {
        /// Where that was.
        epoch: u64,
    },
    /// It ends because of something in itself.
    Lost {
        /// What.
        loss: Loss,
    },
    /// It ends because it was asked to, or because its group did.
    Left,
}

/// How an epoch ended for one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RunEnd {
    /// The group was told to leave, and left.
    Left,
    /// The others did not come, or the epoch was closed.
    Alone,
    /// An error or a panic of its own.
    Lost(Loss),
}

/// Whom the mail in a box is for. A thread that was stuck and wakes in a later epoch would take requests to
/// its grave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Addressee(Option<u64>);

/// Leaving a request for a lane that may be lost at any moment: it is answered once, or refused.
///
/// A supervisor turns red before it answers everybody, and forgets a lost lane's mail while it answers. So
/// whoever registers and finds neither then has an answer coming.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Letter {
    /// Look whether the host is red; outcome: it is.
    LookRed,
    /// Choose a lane and register whom its answers go to.
    Register,
    /// Put it into the lane's mailbox and ring.
    Put,
    /// Look whether it is still registered; outcome: it is.
    LookOpen,
    /// Look whether the host is red by now; outcome: it is.
    LookRedAgain,
    /// Take back the registration; outcome: it was still there.
    Withdraw,
    /// Put an abort of it into the same mailbox and ring: nobody shall compute for nobody.
    Void {
        /// It was taken back.
        refused: bool,
    },
    /// It is on its way, or was answered already.
    Sent,
    /// It was not taken.
    Refused,
}

impl Life {
    /// A wait for an epoch is over, with the number of one, or none if there won't be any.
    pub fn formed(epoch: Option<u64>, holds_seat: bool) -> Self {
        match epoch {
            _ if !holds_seat => Self::Over,
            Some(epoch) => Self::Run { epoch },
            None => Self::Tell(Tale::Left),
        }
    }

    /// A run in `epoch` is over.
    pub fn ran(epoch: u64, end: RunEnd, holds_seat: bool) -> Self {
        match end {
            _ if !holds_seat => Self::Over,
            RunEnd::Left => Self::Tell(Tale::Left),
            RunEnd::Alone => Self::Tell(Tale::Alone { epoch }),
            RunEnd::Lost(loss) => Self::Tell(Tale::Lost { loss }),
        }
    }

    /// The supervisor was told.
    pub fn told(tale: Tale) -> Self {
        match tale {
            Tale::Alone { epoch } => Self::Await { seen: epoch },
            Tale::Lost { .. } | Tale::Left => Self::Over,
        }
    }
}

impl Addressee {
    /// Of mail that waits for an epoch.
    pub const NOBODY: Self = Self(None);

    /// The lane as it is in this epoch.
    pub fn of(epoch: u64) -> Self {
        Self(Some(epoch))
    }

    /// True if a lane in `epoch` may take it.
    pub fn is(self, epoch: u64) -> bool {
        self.0 == Some(epoch)
    }
}

impl Letter {
    /// What follows, after an operation with this outcome; only looks and [`Letter::Withdraw`] have one.
    pub fn after(self, outcome: bool) -> Self {
        match self {
            Self::LookRed if outcome => Self::Refused,
            Self::LookRed => Self::Register,
            Self::Register => Self::Put,
            Self::Put => Self::LookOpen,
            Self::LookOpen if outcome => Self::LookRedAgain,
            // Its lane was lost in between, and it was answered.
            Self::LookOpen => Self::Void { refused: false },
            Self::LookRedAgain if outcome => Self::Withdraw,
            Self::LookRedAgain => Self::Sent,
            Self::Withdraw => Self::Void { refused: outcome },
            Self::Void { refused: true } | Self::Refused => Self::Refused,
            Self::Void { refused: false } | Self::Sent => Self::Sent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_lost_its_seat_says_nothing_and_joins_nothing() {
        for end in [RunEnd::Left, RunEnd::Alone, RunEnd::Lost(Loss::Ended)] {
            assert_eq!(Life::ran(3, end, false), Life::Over);
        }
        assert_eq!((Life::formed(Some(4), false), Life::formed(None, false)), (Life::Over, Life::Over));
    }

    #[test]
    fn who_is_alone_waits_for_the_next_epoch() {
        let alone = Life::ran(3, RunEnd::Alone, true);
        assert_eq!(alone, Life::Tell(Tale::Alone { epoch: 3 }));
        assert_eq!(Life::told(Tale::Alone { epoch: 3 }), Life::Await { seen: 3 });
        assert_eq!(Life::told(Tale::Left), Life::Over);
    }

    /// A rank that was stuck in a step without collectives woke, and took the next request with it.
    #[test]
    fn mail_is_for_the_lane_of_one_epoch() {
        assert!(Addressee::of(2).is(2) && !Addressee::of(2).is(1) && !Addressee::NOBODY.is(1));
    }

    #[test]
    fn a_request_is_refused_only_if_nobody_answers_it() {
        assert_eq!(Letter::LookRed.after(true), Letter::Refused);
        let withdrawn = Letter::Withdraw.after(true);
        assert_eq!(withdrawn.after(true), Letter::Refused);
        // The supervisor was faster.
        assert_eq!(Letter::Withdraw.after(false).after(true), Letter::Sent);
        assert_eq!(Letter::LookOpen.after(false).after(true), Letter::Sent);
    }
}
