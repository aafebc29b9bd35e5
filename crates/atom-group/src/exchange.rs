//! The one exchange of a step, between lanes of one host, and parking in it.

use crate::facts::Facts;
use crate::machine::{self, BOARDS, Visit};
use crate::meeting::{Meeting, WaitError};
use crate::sync::{AtomicU64, Ordering};
use atom_base::StepNo;
use std::fmt;
use std::time::Duration;
use thiserror::Error;

/// All lanes of a group bring their [`Facts`] and leave with everybody's.
///
/// What happens in which order is said by [`Visit`]; two boards of facts take turns, see
/// [`machine::board`].
pub struct Exchange {
    meeting: Meeting,
    facts: [Box<[Words]>; BOARDS],
    doing: Box<[AtomicU64]>,
}

type Words = [AtomicU64; Facts::WORDS];

/// What a lane was last seen doing: the name for the error when it does not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Activity {
    /// Not yet started.
    Starting,
    /// Sleeping without work.
    Parked,
    /// Taking in mail and looking for work.
    Wanting,
    /// Waiting for other lanes' facts.
    Exchanging,
    /// Building its plan.
    Committing,
    /// Recording a bucket.
    Recording,
    /// Replaying a recording.
    Replaying,
    /// Taking in results.
    Applying,
    /// Telling its other ranks that the group ends, and waiting for them.
    Leaving,
    /// Gone.
    Ended,
}

/// A lane that did not come, and where it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// Place in the group.
    pub lane: usize,
    /// Step it was in.
    pub step: StepNo,
    /// What it was doing there.
    pub activity: Activity,
}

/// Why an exchange failed. The group can't go on without its members.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ExchangeError {
    /// Lanes stayed away past the deadline.
    #[error("step {step}: waited {waited:?} for {}", list(.missing))]
    Late {
        /// The step.
        step: StepNo,
        /// How long.
        waited: Duration,
        /// Who.
        missing: Vec<Sighting>,
    },
    /// The group was closed.
    #[error("the group was closed")]
    Closed,
}

impl Exchange {
    /// For `lanes` lanes; `spins` as in [`Meeting::new`].
    pub fn new(lanes: usize, spins: u32) -> Self {
        let words = || (0..lanes).map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect();
        Self {
            meeting: Meeting::new(lanes, spins),
            facts: [words(), words()],
            doing: (0..lanes).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Brings `mine` and fills `all[lane]` for every lane; waits `patience` for the others.
    pub fn exchange(
        &self,
        lane: usize,
        mine: &Facts,
        patience: Duration,
        all: &mut [Facts],
    ) -> Result<(), ExchangeError> {
        let step = mine.step;
        assert_eq!(all.len(), self.meeting.seats(), "room for every lane's facts");
        assert_eq!(self.meeting.number(lane) + 1, step.0, "lane {lane} skips a step");
        self.note(lane, step, Activity::Exchanging);
        let board = &self.facts[machine::board(step.0)];
        let mut visit = Visit::Write;
        loop {
            let outcome = match visit {
                Visit::Write => {
                    for (cell, word) in board[lane].iter().zip(mine.to_words()) {
                        cell.store(word, Ordering::Relaxed);
                    }
                    Ok(())
                }
                Visit::Arrive => {
                    self.meeting.raise(lane, step.0);
                    Ok(())
                }
                Visit::Ring => {
                    self.meeting.ring();
                    Ok(())
                }
                Visit::Wait => self.meeting.wait_all(step.0, patience),
                Visit::LookClosed if self.meeting.is_closed() => Err(WaitError::Closed),
                Visit::LookClosed => Ok(()),
                Visit::Read => {
                    for (facts, words) in all.iter_mut().zip(board) {
                        *facts = Facts::from_words(std::array::from_fn(|i| words[i].load(Ordering::Relaxed)));
                    }
                    Ok(())
                }
                Visit::Over(end) => return end.map_err(|e| self.explain(step, e)),
            };
            visit = visit.after(outcome);
        }
    }

    /// Brings the facts of a lane on another host. As that lane would, were it here: it comes to a step
    /// only after it has seen everybody at the one before.
    pub fn deliver(&self, lane: usize, facts: &Facts) {
        self.note(lane, facts.step, Activity::Exchanging);
        let board = &self.facts[machine::board(facts.step.0)];
        for (cell, word) in board[lane].iter().zip(facts.to_words()) {
            cell.store(word, Ordering::Relaxed);
        }
        self.meeting.arrive(lane, facts.step.0);
    }

    /// Sleeps before exchange `next` until `wake` holds (followed by a [`ring`](Self::ring)) or a peer
    /// has brought its facts for it.
    pub fn park(&self, lane: usize, next: StepNo, wake: impl Fn() -> bool) -> Result<(), ExchangeError> {
        self.note(lane, next, Activity::Parked);
        let peer_came = || machine::somebody_came(self.meeting.numbers(), next.0);
        let parked = self.meeting.wait_until(|| wake() || peer_came(), None);
        self.note(lane, next, Activity::Exchanging);
        parked.map_err(|e| self.explain(next, e))
    }

    /// Wakes parked lanes to look for work.
    pub fn ring(&self) {
        self.meeting.ring();
    }

    /// Ends every wait: a member is lost.
    pub fn close(&self) {
        self.meeting.close();
    }

    /// True once closed.
    pub fn is_closed(&self) -> bool {
        self.meeting.is_closed()
    }

    /// Writes down what a lane does, for others' errors and for health checks.
    pub fn note(&self, lane: usize, step: StepNo, activity: Activity) {
        self.doing[lane].store(step.0 << 8 | activity as u64, Ordering::Release);
    }

    /// The last step that a lane brought its facts for.
    pub fn step_of(&self, lane: usize) -> u64 {
        self.meeting.number(lane)
    }

    /// What a lane was last seen doing.
    pub fn sighting(&self, lane: usize) -> Sighting {
        let word = self.doing[lane].load(Ordering::Acquire);
        Sighting { lane, step: StepNo(word >> 8), activity: Activity::from_byte(word as u8) }
    }

    fn explain(&self, step: StepNo, error: WaitError) -> ExchangeError {
        match error {
            WaitError::Closed => ExchangeError::Closed,
            WaitError::TimedOut(waited) => {
                let late = |&lane: &usize| self.meeting.number(lane) < step.0;
                let missing =
                    (0..self.meeting.seats()).filter(late).map(|lane| self.sighting(lane)).collect();
                ExchangeError::Late { step, waited, missing }
            }
        }
    }
}

impl Activity {
    const ALL: [Self; 10] = [
        Self::Starting,
        Self::Parked,
        Self::Wanting,
        Self::Exchanging,
        Self::Committing,
        Self::Recording,
        Self::Replaying,
        Self::Applying,
        Self::Leaving,
        Self::Ended,
    ];

    fn from_byte(byte: u8) -> Self {
        Self::ALL[usize::from(byte)]
    }
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Starting => "starting",
            Self::Parked => "parked",
            Self::Wanting => "looking for work",
            Self::Exchanging => "in the exchange",
            Self::Committing => "building its plan",
            Self::Recording => "recording",
            Self::Replaying => "replaying",
            Self::Applying => "taking in results",
            Self::Leaving => "leaving",
            Self::Ended => "gone",
        })
    }
}

impl fmt::Display for Sighting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lane {} (last seen {} at step {})", self.lane, self.activity, self.step)
    }
}

fn list(missing: &[Sighting]) -> String {
    missing.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
mod tests;
