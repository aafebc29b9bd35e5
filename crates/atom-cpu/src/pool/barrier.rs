//! A barrier that spins briefly, then yields, then sleeps.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::available_parallelism;

/// Where a fixed number of threads meet, again and again.
pub(super) struct Barrier {
    members: u32,
    arrived: Line<AtomicU32>,
    /// Counts meetings; its change lets the waiting go.
    generation: Line<AtomicU32>,
    broken: AtomicBool,
    sleepers: AtomicU32,
    lock: Mutex<()>,
    wake: Condvar,
}

/// A member panicked: the meeting won't happen.
pub(super) struct Broken;

/// Keeps two hot words from sharing a cache line.
#[repr(align(64))]
struct Line<T>(T);

impl Barrier {
    pub(super) fn new(members: usize) -> Self {
        Self {
            members: members as u32,
            arrived: Line(AtomicU32::new(0)),
            generation: Line(AtomicU32::new(0)),
            broken: AtomicBool::new(false),
            sleepers: AtomicU32::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        }
    }

    /// Waits for all members.
    pub(super) fn wait(&self) -> Result<(), Broken> {
        if self.members > 1 {
            let generation = self.generation.0.load(Ordering::Relaxed);
            if !self.arrive() {
                self.await_change(generation);
            }
        }
        if self.broken.load(Ordering::Acquire) { Err(Broken) } else { Ok(()) }
    }

    /// Waits for all members of a barrier that nobody breaks.
    pub(super) fn pass(&self) {
        assert!(self.wait().is_ok(), "gates are not broken");
    }

    /// Counts one member as arrived; true if it was the last one, which lets the others go.
    pub(super) fn arrive(&self) -> bool {
        // AcqRel: the last one has seen what all others wrote, and passes it on with `generation`.
        let last = self.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == self.members;
        if last {
            self.arrived.0.store(0, Ordering::Relaxed);
            self.release();
        }
        last
    }

    /// Lets everyone go with [`Broken`], now and until [`Self::mend`].
    pub(super) fn shatter(&self) {
        self.broken.store(true, Ordering::SeqCst);
        self.release();
    }

    /// Makes a broken barrier whole. No member may be at it.
    pub(super) fn mend(&self) {
        self.arrived.0.store(0, Ordering::Relaxed);
        self.broken.store(false, Ordering::Relaxed);
    }

    fn release(&self) {
        // SeqCst with `sleepers` in `sleep`: either this load sees the sleeper, or the sleeper's check
        // of the generation sees this change.
        self.generation.0.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.wake.notify_all();
        }
    }

    fn await_change(&self, generation: u32) {
        let waiting = || {
            self.generation.0.load(Ordering::Acquire) == generation && !self.broken.load(Ordering::Acquire)
        };
        let spins = if crowded() { SPINS_CROWDED } else { SPINS };
        for _ in 0..spins {
            if !waiting() {
                return;
            }
            std::hint::spin_loop();
        }
        for _ in 0..YIELDS {
            if !waiting() {
                return;
            }
            std::thread::yield_now();
        }
        self.sleep(generation);
    }

    fn sleep(&self, generation: u32) {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.generation.0.load(Ordering::SeqCst) == generation && !self.broken.load(Ordering::SeqCst) {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Workers of all pools of this process, idle or not.
static WORKERS: AtomicUsize = AtomicUsize::new(0);

/// Processors that this process may use; 0 until asked for.
static PROCESSORS: AtomicUsize = AtomicUsize::new(0);

/// Counts a pool's workers in.
pub(super) fn workers_joined(count: usize) {
    // The largest answer: a thread that is bound to one core is told 1.
    PROCESSORS.fetch_max(available_parallelism().map_or(1, usize::from), Ordering::Relaxed);
    WORKERS.fetch_add(count, Ordering::Relaxed);
}

/// Counts them out.
pub(super) fn workers_left(count: usize) {
    WORKERS.fetch_sub(count, Ordering::Relaxed);
}

/// True when spinning takes time from the one that is waited for.
fn crowded() -> bool {
    WORKERS.load(Ordering::Relaxed) > PROCESSORS.load(Ordering::Relaxed)
}

/// About 50 us at 3.5 GHz and 60 cycles a pause: longer than workers of one operator differ, shorter
/// than a turn of the scheduler.
const SPINS: usize = 3000;

/// About 1 us: the other one may just be finishing.
const SPINS_CROWDED: usize = 60;

/// Turns offered to others before sleeping, which costs the waker a system call.
const YIELDS: usize = 8;
