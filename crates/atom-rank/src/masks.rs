//! The threads that compute masks of constrained requests, beside the steps of all lanes.

use atom_base::{MaskClock, MaskFault};
use atom_engine::{MaskWork, Plan};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Masks to be computed, by requests in turn: one with many choices and a heavy grammar delays another by one of
/// its masks a thread, and not by all of them.
///
/// A sequence has one at the most, so those of requests that run always find room. It holds `room` times
/// [`ROOM_SHARE`] of them: sequences that gave way leave theirs behind, and so do those that were aborted until
/// their turn comes or room is short.
pub(crate) struct MaskPool {
    queue: Mutex<Queue>,
    came: Condvar,
    vocab: usize,
}

struct Queue {
    /// The next one is the greatest. Never grows.
    work: BinaryHeap<Turn>,
    /// Who has work that waits. Never grows.
    clients: HashMap<usize, Waiting>,
    room: usize,
    /// Of the work that was taken last.
    turn: u64,
    /// Work that ever came.
    came: u64,
    is_closed: bool,
}

/// Of one request.
#[derive(Clone, Copy)]
struct Waiting {
    masks: usize,
    /// Turn of the last of them.
    last: u64,
}

/// Work, and when it is its turn: of one request's in later and later rounds. The lowest is next, and of equals
/// the one that came first.
struct Turn {
    turn: u64,
    came: u64,
    work: MaskWork,
}

impl Queue {
    fn new(room: usize) -> Self {
        let (work, clients) = (BinaryHeap::with_capacity(room), HashMap::with_capacity(room));
        Self { work, clients, room, turn: 0, came: 0, is_closed: false }
    }

    /// False, and whoever waits for it is told, if there is no room even without what nobody waits for.
    fn push(&mut self, work: MaskWork) -> bool {
        if self.work.len() == self.room {
            self.forget_abandoned();
        }
        if self.work.len() == self.room {
            work.refuse(MaskFault::Busy { waiting: self.room });
            return false;
        }
        let waiting = self.clients.entry(work.client()).or_insert(Waiting { masks: 0, last: self.turn });
        let turn = if waiting.masks == 0 { self.turn } else { (waiting.last + 1).max(self.turn) };
        *waiting = Waiting { masks: waiting.masks + 1, last: turn };
        self.came += 1;
        self.work.push(Turn { turn, came: self.came, work });
        true
    }

    fn pop(&mut self) -> Option<MaskWork> {
        let Turn { turn, work, .. } = self.work.pop()?;
        self.turn = turn;
        let waiting = self.clients.get_mut(&work.client()).expect("it was counted when it came");
        waiting.masks -= 1;
        if waiting.masks == 0 {
            self.clients.remove(&work.client());
        }
        Some(work)
    }

    /// Looks at all that waits, for which a request has ended before or ends now: never in the steady state.
    fn forget_abandoned(&mut self) {
        self.work.retain(|turn| !turn.work.is_abandoned());
        self.clients.clear();
        for Turn { turn, work, .. } in &self.work {
            let waiting = self.clients.entry(work.client()).or_insert(Waiting { masks: 0, last: *turn });
            *waiting = Waiting { masks: waiting.masks + 1, last: waiting.last.max(*turn) };
        }
    }
}

impl Turn {
    /// Greater is earlier.
    fn key(&self) -> Reverse<(u64, u64)> {
        Reverse((self.turn, self.came))
    }
}

impl Ord for Turn {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl PartialOrd for Turn {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Turn {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Turn {}

impl MaskPool {
    /// For a model's logits, and so many sequences that run at once.
    pub(crate) fn new(vocab: usize, sequences: usize) -> Self {
        let queue = Queue::new(ROOM_SHARE * sequences);
        Self { queue: Mutex::new(queue), came: Condvar::new(), vocab }
    }

    /// Leaves work for the threads.
    pub(crate) fn hand_out(&self, work: impl Iterator<Item = MaskWork>) {
        let mut work = work.peekable();
        if work.peek().is_none() {
            return;
        }
        let mut queue = self.lock();
        let refused = work.map(|work| queue.push(work)).filter(|taken| !taken).count();
        drop(queue);
        self.came.notify_all();
        if refused > 0 {
            tracing::warn!("{refused} masks find no room among those that wait: their requests end");
        }
    }

    /// A thread's loop, until the pool is closed.
    pub(crate) fn compute(&self) {
        loop {
            let mut queue = self.lock();
            let work = loop {
                if queue.is_closed {
                    return;
                }
                match queue.pop() {
                    Some(work) => break work,
                    None => queue = self.came.wait(queue).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(queue);
            work.run(self.vocab);
        }
    }

    /// Ends the loops. Nobody waits for what is left.
    pub(crate) fn close(&self) {
        let mut queue = self.lock();
        queue.is_closed = true;
        queue.work.clear();
        queue.clients.clear();
        drop(queue);
        self.came.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says until when a step waits for its masks: `wait_max` from when it first needs one that is not there, and so
/// that it ends well before its peers give the whole step up, whose `patience` runs from now on.
pub(crate) fn start_clock(
    clock: &Arc<MaskClock>,
    plan: &Plan,
    now: Instant,
    wait_max: Duration,
    patience: Duration,
) {
    clock.start(wait_max, now + patience / PATIENCE_SHARE);
    for mask in plan.out.iter().filter_map(|row| row.mask.as_ref()) {
        mask.set_clock(clock);
    }
}

/// How long a step waited for masks that were not there, which says nothing of how long a step takes.
pub(crate) fn waited(plan: &Plan) -> Duration {
    sum(|| plan.out.iter().filter_map(|row| row.mask.as_ref()?.waited()))
}

/// How much time these stretches are together: what lies in several counts once, what lies between them not.
fn sum<I: Iterator<Item = (Instant, Instant)>>(stretches: impl Fn() -> I) -> Duration {
    let mut sum = Duration::ZERO;
    let mut end: Option<Instant> = None;
    loop {
        let open = stretches().filter(|(_, to)| end.is_none_or(|end| *to > end));
        let Some((from, to)) = open.min() else { return sum };
        sum += to - end.map_or(from, |end| from.max(end));
        end = Some(to);
    }
}

/// A step may take its patience; the slowest without a wait took a twentieth of it.
const PATIENCE_SHARE: u32 = 2;

/// Masks that may wait, for each sequence that can run.
const ROOM_SHARE: usize = 2;

#[cfg(test)]
#[path = "masks_tests.rs"]
mod tests;
