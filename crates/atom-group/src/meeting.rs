//! Where threads of one host meet: each has a seat with a number that only grows; anyone can wait
//! until all seats reached a number, with a deadline. Waiters spin shortly, then sleep.

use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, spin_loop};
use std::time::{Duration, Instant};
use thiserror::Error;

/// One number per participant, and a bell for those who sleep.
///
/// The bell can't be missed: a sleeper first counts itself, then looks at the seats under the lock; a
/// writer first writes its seat, then looks at the count. Both orders are sequentially consistent, so
/// at least one of them sees the other.
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
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
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

    /// Raises a seat's number. Everything written before is visible to whoever sees the number.
    pub fn arrive(&self, seat: usize, number: u64) {
        self.seats[seat].0.store(number, Ordering::SeqCst);
        self.ring();
    }

    /// Wakes all sleepers to look again.
    pub fn ring(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().expect("nobody panics under this lock"));
            self.bell.notify_all();
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
        self.wait_until(|| self.seats.iter().all(|s| s.0.load(Ordering::SeqCst) >= number), Some(patience))
    }

    /// Waits until `ready`, which must turn true only before an [`arrive`](Self::arrive) or a
    /// [`ring`](Self::ring). `patience: None` is for parked threads, whose wait is not part of a step.
    pub fn wait_until(&self, ready: impl Fn() -> bool, patience: Option<Duration>) -> Result<(), WaitError> {
        for _ in 0..=self.spins {
            if ready() {
                return Ok(());
            }
            if self.is_closed() {
                return Err(WaitError::Closed);
            }
            spin_loop();
        }
        self.sleep_until(&ready, patience)
    }

    fn sleep_until(&self, ready: &impl Fn() -> bool, patience: Option<Duration>) -> Result<(), WaitError> {
        let start = Instant::now();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.lock.lock().expect("nobody panics under this lock");
        let outcome = loop {
            if ready() {
                break Ok(());
            }
            if self.is_closed() {
                break Err(WaitError::Closed);
            }
            guard = match patience.map(|p| p.checked_sub(start.elapsed())) {
                None => self.bell.wait(guard).expect("nobody panics under this lock"),
                Some(Some(left)) => {
                    self.bell.wait_timeout(guard, left).expect("nobody panics under this lock").0
                }
                Some(None) => break Err(WaitError::TimedOut(start.elapsed())),
            };
        };
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        outcome
    }
}
