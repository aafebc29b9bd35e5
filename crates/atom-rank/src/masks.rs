//! The threads that compute masks of constrained requests, beside the steps of all lanes.

use atom_engine::{MaskWork, Plan};
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A queue of masks to be computed. It holds at most one for each request that runs.
pub(crate) struct MaskPool {
    queue: Mutex<Queue>,
    came: Condvar,
    vocab: usize,
}

struct Queue {
    work: VecDeque<MaskWork>,
    is_closed: bool,
}

impl MaskPool {
    /// For a model's logits, with room for so many masks at once.
    pub(crate) fn new(vocab: usize, room: usize) -> Self {
        let work = VecDeque::with_capacity(room);
        Self { queue: Mutex::new(Queue { work, is_closed: false }), came: Condvar::new(), vocab }
    }

    /// Leaves work for the threads.
    pub(crate) fn hand_out(&self, work: impl Iterator<Item = MaskWork>) {
        let mut work = work.peekable();
        if work.peek().is_none() {
            return;
        }
        self.lock().work.extend(work);
        self.came.notify_all();
    }

    /// A thread's loop, until the pool is closed.
    pub(crate) fn compute(&self) {
        loop {
            let mut queue = self.lock();
            let work = loop {
                if queue.is_closed {
                    return;
                }
                match queue.work.pop_front() {
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
        drop(queue);
        self.came.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says until when a step waits for its masks: long enough for any, and so that it ends well before its
/// peers give the whole step up.
pub(crate) fn set_deadlines(plan: &Plan, now: Instant, wait_max: Duration, patience: Duration) {
    let deadline = now + wait_max.min(patience / PATIENCE_SHARE);
    for mask in plan.out.iter().filter_map(|row| row.mask.as_ref()) {
        mask.set_deadline(deadline);
    }
}

/// How long a step waited for masks, which says nothing of how long a step takes.
pub(crate) fn waited(plan: &Plan) -> Duration {
    let waits = plan.out.iter().filter_map(|row| row.mask.as_ref()?.waited());
    let all = waits.reduce(|(from, to), (begun, ended)| (from.min(begun), to.max(ended)));
    all.map_or(Duration::ZERO, |(from, to)| to - from)
}

/// A step may take its patience; the slowest without a wait took a twentieth of it.
const PATIENCE_SHARE: u32 = 2;
