//! Where threads of one host meet: each has a seat with a number that only grows; anyone can wait
//! until all seats reached a number, with a deadline. Waiters spin shortly, then sleep.

use crate::machine::{self, Bell, Wait};
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, spin_loop};
use std::time::{Duration, Instant};
use thiserror::Error;

/// One number per participant, and a bell for those who sleep.
///
/// The bell can't be missed: see [`Wait`] and [`Bell`], which say in which order threads do what is done
/// here.
pub struct Meeting {
    seats: Box<[Seat]>,
    closed: AtomicBool,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    bell: Condvar,
    spins: u32,
}

/// A seat on its own cache lines: neighbours write theirs all the time.
#[repr(align(128))]
struct Seat(AtomicU64);

/// Why a wait ended without what it waited for.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq, Hash)]
pub enum WaitError {
    /// The deadline passed.
    #[error("waited {0:?} and not everybody came")]
    TimedOut(Duration),
    /// The meeting was closed: the epoch ended, for instance because a rank was lost.
    #[error("the group was closed while waiting")]
    Closed,
}

impl Meeting {
    /// A meeting of `seats` participants. `spins`: looks before going to sleep; 0 where threads
    /// outnumber cores.
    pub fn new(seats: usize, spins: u32) -> Self {
        Self {
            seats: (0..seats).map(|_| Seat(AtomicU64::new(0))).collect(),
            closed: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            bell: Condvar::new(),
            spins,
        }
    }

    /// Participants.
    pub fn seats(&self) -> usize {
        self.seats.len()
    }

    /// The number a seat has reached.
    pub fn number(&self, seat: usize) -> u64 {
        self.seats[seat].0.load(Ordering::SeqCst)
    }

    /// Raises a seat's number and wakes all sleepers. Everything written before is visible to whoever
    /// sees the number.
    pub fn arrive(&self, seat: usize, number: u64) {
        self.raise(seat, number);
        self.ring();
    }

    /// The first half of [`arrive`](Self::arrive): a [`ring`](Self::ring) must follow.
    pub(crate) fn raise(&self, seat: usize, number: u64) {
        self.seats[seat].0.store(number, Ordering::SeqCst);
    }

    /// Wakes all sleepers to look again.
    pub fn ring(&self) {
        let mut bell = Bell::AnySleepers;
        while bell != Bell::Over {
            let outcome = match bell {
                Bell::AnySleepers => self.sleepers.load(Ordering::SeqCst) > 0,
                Bell::PassLock => {
                    drop(self.lock.lock().expect("nobody panics under this lock"));
                    true
                }
                Bell::Notify => {
                    self.bell.notify_all();
                    true
                }
                Bell::Over => true,
            };
            bell = bell.after(outcome);
        }
    }

    /// Ends every present and future wait with [`WaitError::Closed`].
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.ring();
    }

    /// True after [`close`](Self::close).
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Waits until every seat has reached `number`.
    pub fn wait_all(&self, number: u64, patience: Duration) -> Result<(), WaitError> {
        self.wait_until(|| machine::everybody_came(self.numbers(), number), Some(patience))
    }

    /// Waits until `ready`, which must turn true only before an [`arrive`](Self::arrive) or a
    /// [`ring`](Self::ring). `patience: None` is for parked threads, whose wait is not part of a step.
    pub fn wait_until(&self, ready: impl Fn() -> bool, patience: Option<Duration>) -> Result<(), WaitError> {
        let mut wait = Wait::new(self.spins);
        while let Wait::Glance { .. } | Wait::GlanceClosed { .. } = wait {
            let outcome = match wait {
                Wait::Glance { .. } => ready(),
                _ => {
                    spin_loop();
                    self.is_closed()
                }
            };
            wait = wait.after(outcome, || unreachable!("looking has no deadline"));
        }
        match wait {
            Wait::Over(end) => end,
            asleep => self.sleep_until(asleep, &ready, patience),
        }
    }

    /// The numbers of all seats.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.seats.iter().map(|seat| seat.0.load(Ordering::SeqCst))
    }

    fn sleep_until(
        &self,
        mut wait: Wait,
        ready: &impl Fn() -> bool,
        patience: Option<Duration>,
    ) -> Result<(), WaitError> {
        let start = Instant::now();
        let mut guard = None;
        loop {
            let outcome = match wait {
                Wait::Glance { .. } | Wait::Look => ready(),
                Wait::GlanceClosed { .. } | Wait::LookClosed => self.is_closed(),
                Wait::Enlist => {
                    self.sleepers.fetch_add(1, Ordering::SeqCst);
                    true
                }
                Wait::Lock => {
                    guard = Some(self.lock.lock().expect("nobody panics under this lock"));
                    true
                }
                Wait::Sleep => {
                    let held = guard.take().expect("a sleeper holds the lock");
                    let left = patience.map(|patience| patience.checked_sub(start.elapsed()));
                    guard = Some(match left {
                        None => self.bell.wait(held).expect("nobody panics under this lock"),
                        Some(Some(left)) => {
                            self.bell.wait_timeout(held, left).expect("nobody panics under this lock").0
                        }
                        Some(None) => held,
                    });
                    left == Some(None)
                }
                Wait::Unlock(_) => {
                    drop(guard.take());
                    true
                }
                Wait::Retire(_) => {
                    self.sleepers.fetch_sub(1, Ordering::SeqCst);
                    true
                }
                Wait::Over(end) => return end,
            };
            wait = wait.after(outcome, || WaitError::TimedOut(start.elapsed()));
        }
    }
}
