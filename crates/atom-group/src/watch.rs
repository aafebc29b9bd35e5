//! What the supervisor of a group does about it, one operation at a time, and nothing of how it is done.
//!
//! As in [`crate::machine`], the order of operations is written down once: `atom-rank` carries it out over
//! threads and locks, the explorer in `atom-sim` over plain data with all that others may do in between.
//! A supervisor has one thread, so it takes the next news when all operations of the last are done.

use crate::epoch::{EndCause, Epochs, Loss, Verdict};

/// What a supervisor knows of one group. Who holds which seat, and why it was lost, stays outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Watch {
    epochs: Epochs,
    phase: Phase,
    holders: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// So many ranks load here; so many hosts have not said that they are ready.
    Forming {
        loading: usize,
        hosts: usize,
    },
    Running,
    Ended,
}

/// An operation. Those of a loss are about the seats that are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Act {
    /// Nothing is left to do.
    Rest,
    /// End every wait of the epoch that runs; what is published is that the group forms.
    Close {
        /// The one that will follow.
        epoch: u64,
    },
    /// Address the mailboxes to nobody.
    ShutMail,
    /// Take the lost seats from their threads, see [`Watch::take_seat`].
    TakeSeats {
        /// The group ends, and why.
        end: Option<EndCause>,
    },
    /// Answer all requests of the lost lanes with an error and forget their mail, before anybody is told
    /// where the next request goes.
    FailLost,
    /// Start threads for the lost seats, which load; see [`Watch::spawned`].
    Replace,
    /// Address the mailboxes to the lanes of the next epoch.
    OpenMail {
        /// Its number.
        epoch: u64,
    },
    /// Publish the epoch: members may join it.
    Publish {
        /// Its number.
        epoch: u64,
    },
    /// Keep the fault where everybody who brings a request looks.
    TurnRed,
    /// End every wait of the epoch that runs; what is published is that there won't be another.
    CloseForGood,
    /// Answer all requests of the group with an error.
    FailAll,
}

impl Watch {
    /// Before any rank has loaded. The group may form again `reforms_max` times in its life, and waits for
    /// `hosts` other hosts to load.
    pub fn new(reforms_max: u32, hosts: usize) -> Self {
        let phase = Phase::Forming { loading: 0, hosts };
        Self { epochs: Epochs::new(reforms_max), phase, holders: 0 }
    }

    /// The epoch that runs, or the next one while the group forms.
    pub fn epoch(&self) -> u64 {
        self.epochs.current()
    }

    /// True while ranks load.
    pub fn is_forming(&self) -> bool {
        matches!(self.phase, Phase::Forming { .. })
    }

    /// True once the group won't run again.
    pub fn is_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// Threads that hold their seats. The supervisor's work is done when there are none.
    pub fn holders(&self) -> usize {
        self.holders
    }

    /// A thread was started for a seat, and loads.
    pub fn spawned(&mut self) {
        self.holders += 1;
        if let Phase::Forming { loading, .. } = &mut self.phase {
            *loading += 1;
        }
    }

    /// A rank has loaded. True if it was the last of this host.
    pub fn loaded(&mut self) -> bool {
        match &mut self.phase {
            Phase::Forming { loading, .. } => {
                *loading -= 1;
                *loading == 0
            }
            Phase::Running => unreachable!("a group runs once all have loaded"),
            // It ended while this one loaded.
            Phase::Ended => false,
        }
    }

    /// Another host has loaded its ranks.
    pub fn host_ready(&mut self) {
        if let Phase::Forming { hosts, .. } = &mut self.phase {
            *hosts = hosts.saturating_sub(1);
        }
    }

    /// Begins the epoch if everybody has loaded.
    pub fn complete(&mut self) -> Act {
        if self.phase != (Phase::Forming { loading: 0, hosts: 0 }) {
            return Act::Rest;
        }
        self.phase = Phase::Running;
        Act::OpenMail { epoch: self.epoch() }
    }

    /// A thread has ended. If its seat was taken from it before, it is not counted.
    pub fn gone(&mut self, holds_seat: bool) {
        self.holders -= usize::from(holds_seat);
    }

    /// A thread has ended because of something in itself. What became of one whose seat was taken before is
    /// no news, unless it had diverged from others: they still run.
    pub fn lost(&mut self, holds_seat: bool, loss: Loss, stopping: bool) -> Act {
        self.gone(holds_seat);
        if holds_seat || loss == Loss::Diverged { self.lose(loss, stopping) } else { Act::Rest }
    }

    /// A seat is taken from its thread, if that `holds_seat` still. Who ended was counted when it said so.
    pub fn take_seat(&mut self, holds_seat: bool, loss: Loss) {
        self.holders -= usize::from(holds_seat && loss == Loss::Stuck);
    }

    /// True if it matters that somebody in epoch `seen` could not go on for the others: while the group
    /// forms or has ended that is what its close does, and the close of an older epoch is no news.
    pub fn heeds(&self, seen: u64) -> bool {
        self.phase == Phase::Running && seen == self.epoch()
    }

    /// Decides about a loss.
    pub fn lose(&mut self, loss: Loss, stopping: bool) -> Act {
        match self.phase {
            Phase::Ended => return Act::Rest,
            // Whoever diverged may have been overtaken by the news of another loss.
            Phase::Forming { .. } if loss == Loss::Diverged => {}
            // When the last epoch was closed nobody knew that this seat is empty too.
            Phase::Forming { .. } => return Act::TakeSeats { end: None },
            Phase::Running => {}
        }
        match self.epochs.lose(loss, stopping) {
            Verdict::Form { epoch } => {
                self.phase = Phase::Forming { loading: 0, hosts: 0 };
                Act::Close { epoch }
            }
            Verdict::End(cause) => {
                self.phase = Phase::Ended;
                Act::TakeSeats { end: Some(cause) }
            }
        }
    }

    /// Ends the group for another reason than a loss; once.
    pub fn end(&mut self) -> Act {
        match std::mem::replace(&mut self.phase, Phase::Ended) {
            Phase::Ended => Act::Rest,
            Phase::Forming { .. } | Phase::Running => Act::TurnRed,
        }
    }
}

impl Act {
    /// What follows.
    pub fn after(self) -> Self {
        match self {
            // A lane that wakes after the close is of an epoch that is over, and must take no mail.
            Self::Close { .. } => Self::ShutMail,
            Self::ShutMail => Self::TakeSeats { end: None },
            // Whoever loses its seat finds out before there is an epoch that it could join.
            Self::TakeSeats { end: None } => Self::FailLost,
            Self::FailLost => Self::Replace,
            Self::OpenMail { epoch } => Self::Publish { epoch },
            Self::TakeSeats { end: Some(_) } => Self::TurnRed,
            // Red before any answer: who gets one finds that nothing more is taken.
            Self::TurnRed => Self::CloseForGood,
            Self::CloseForGood => Self::FailAll,
            Self::Replace | Self::Publish { .. } | Self::FailAll | Self::Rest => Self::Rest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group of `ranks` in its first epoch.
    fn running(ranks: usize, reforms_max: u32) -> Watch {
        let mut watch = Watch::new(reforms_max, 0);
        (0..ranks).for_each(|_| watch.spawned());
        let last: Vec<_> = (0..ranks).map(|_| watch.loaded()).collect();
        assert_eq!(last.iter().position(|last| *last), Some(ranks - 1));
        assert_eq!(watch.complete(), Act::OpenMail { epoch: 1 });
        watch
    }

    fn order(first: Act) -> Vec<Act> {
        std::iter::successors(Some(first), |act| Some(act.after()))
            .take_while(|act| *act != Act::Rest)
            .collect()
    }

    #[test]
    fn a_loss_that_many_see_counts_once() {
        let mut watch = running(3, 3);
        assert!(watch.heeds(1));
        assert_eq!(watch.lost(true, Loss::Ended, false), Act::Close { epoch: 2 });
        // What the close does to the others is no second loss.
        assert!(!watch.heeds(1) && !watch.heeds(2));
        watch.take_seat(true, Loss::Ended);
        watch.spawned();
        assert_eq!(watch.holders(), 3);
        assert!(watch.loaded());
        assert_eq!(watch.complete(), Act::OpenMail { epoch: 2 });
        assert!(!watch.heeds(1) && watch.heeds(2));
    }

    #[test]
    fn a_second_loss_joins_the_epoch_that_forms() {
        let mut watch = running(3, 1);
        assert_eq!(watch.lose(Loss::Stuck, false), Act::Close { epoch: 2 });
        watch.take_seat(true, Loss::Stuck);
        watch.spawned();
        assert_eq!(watch.lost(true, Loss::Ended, false), Act::TakeSeats { end: None });
        watch.spawned();
        assert!(!watch.loaded() && watch.complete() == Act::Rest);
        assert!(watch.loaded() && watch.complete() == Act::OpenMail { epoch: 2 });
    }

    /// Lanes that had diverged went on, if the news of another loss was first.
    #[test]
    fn who_diverged_ends_the_group_even_if_it_was_given_up() {
        let given_up = running(3, 3).lost(false, Loss::Diverged, false);
        assert_eq!(given_up, Act::TakeSeats { end: Some(EndCause::Diverged) });
        let mut watch = running(3, 3);
        assert_eq!(watch.lose(Loss::Ended, false), Act::Close { epoch: 2 });
        let end = Act::TakeSeats { end: Some(EndCause::Diverged) };
        assert_eq!(watch.lose(Loss::Diverged, false), end);
        assert!(watch.is_ended() && watch.lose(Loss::Ended, false) == Act::Rest && watch.end() == Act::Rest);
    }

    #[test]
    fn a_thread_is_counted_out_once() {
        let mut watch = running(2, 1);
        watch.take_seat(true, Loss::Stuck);
        watch.take_seat(false, Loss::Stuck);
        assert_eq!(watch.lost(false, Loss::Ended, false), Act::Rest);
        assert_eq!(watch.holders(), 1);
    }

    #[test]
    fn operations_come_in_their_order() {
        let end = Some(EndCause::Stopping);
        let again = [
            Act::Close { epoch: 2 },
            Act::ShutMail,
            Act::TakeSeats { end: None },
            Act::FailLost,
            Act::Replace,
        ];
        assert_eq!(order(again[0]), again);
        assert_eq!(
            order(Act::OpenMail { epoch: 2 }),
            [Act::OpenMail { epoch: 2 }, Act::Publish { epoch: 2 }]
        );
        let over = [Act::TakeSeats { end }, Act::TurnRed, Act::CloseForGood, Act::FailAll];
        assert_eq!(order(over[0]), over);
    }
}
