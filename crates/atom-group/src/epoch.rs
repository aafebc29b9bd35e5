//! What becomes of a group that lost a rank. An epoch is the life of a group from its forming to the loss
//! of a member: every wait of it ends with the loss, and nothing of it is carried over but what each
//! member knows by itself.

use thiserror::Error;

/// The epochs of one group, as its supervisor counts them. Pure: time and reasons stay outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Epochs {
    current: u64,
    reforms_max: u32,
}

/// How a rank was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loss {
    /// It ended by itself, with an error or a panic: its thread is gone.
    Ended,
    /// It stayed away past a deadline: its thread may wake at any time, and is no member any more.
    Stuck,
    /// Members that should agree don't. Whatever computed that can't be trusted to go on.
    Diverged,
}

/// What the group does about a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Everybody leaves; with others in the place of the lost ones it forms again as this epoch.
    Form {
        /// The number of the next epoch.
        epoch: u64,
    },
    /// The group ends: every request is answered with an error.
    End(EndCause),
}

/// Why a group does not form again.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq, Hash)]
pub enum EndCause {
    /// The bound was reached, or there is none to reach.
    #[error("it has formed again as often as it may ({max})")]
    Spent {
        /// `--rank-restarts-max`.
        max: u32,
    },
    /// See [`Loss::Diverged`].
    #[error("its lanes have diverged")]
    Diverged,
    /// It was told to stop.
    #[error("it is being stopped")]
    Stopping,
}

impl Epochs {
    /// Before the first loss. The group may form again `reforms_max` times in its life.
    pub fn new(reforms_max: u32) -> Self {
        Self { current: 1, reforms_max }
    }

    /// The epoch that runs.
    pub fn current(&self) -> u64 {
        self.current
    }

    /// Decides about a loss in the epoch that runs. Many see the same loss; [`crate::Watch`] counts it once.
    pub fn lose(&mut self, loss: Loss, stopping: bool) -> Verdict {
        if loss == Loss::Diverged {
            return Verdict::End(EndCause::Diverged);
        }
        if stopping {
            return Verdict::End(EndCause::Stopping);
        }
        // The first epoch is no reform.
        if self.current > u64::from(self.reforms_max) {
            return Verdict::End(EndCause::Spent { max: self.reforms_max });
        }
        self.current += 1;
        Verdict::Form { epoch: self.current }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_forms_again_only_so_often() {
        let mut epochs = Epochs::new(2);
        assert_eq!(epochs.lose(Loss::Ended, false), Verdict::Form { epoch: 2 });
        assert_eq!(epochs.lose(Loss::Stuck, false), Verdict::Form { epoch: 3 });
        assert_eq!(epochs.lose(Loss::Ended, false), Verdict::End(EndCause::Spent { max: 2 }));
        assert_eq!(epochs.current(), 3);
        let never = Epochs::new(0).lose(Loss::Stuck, false);
        assert_eq!(never, Verdict::End(EndCause::Spent { max: 0 }));
    }

    #[test]
    fn who_diverged_or_is_told_to_stop_does_not_form_again() {
        let mut epochs = Epochs::new(5);
        assert_eq!(epochs.lose(Loss::Diverged, false), Verdict::End(EndCause::Diverged));
        assert_eq!(epochs.lose(Loss::Ended, true), Verdict::End(EndCause::Stopping));
    }
}
