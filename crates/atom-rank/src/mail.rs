//! Where other threads leave requests and aborts for a lane.

use atom_base::RequestId;
use atom_engine::Request;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// What a lane can be told.
pub(crate) enum Mail {
    Submit(Request),
    Abort(RequestId),
}

/// A lane's mailbox. Whoever leaves mail rings the lane's exchange afterwards.
#[derive(Default)]
pub(crate) struct Mailbox {
    queue: Mutex<VecDeque<Mail>>,
    len: AtomicUsize,
}

impl Mailbox {
    pub(crate) fn put(&self, mail: Mail) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.push_back(mail);
        self.len.store(queue.len(), Ordering::SeqCst);
    }

    /// Forgets everything: the requests in it were answered otherwise.
    pub(crate) fn clear(&self) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.clear();
        self.len.store(0, Ordering::SeqCst);
    }

    /// True without taking the lock when there is nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(Ordering::SeqCst) == 0
    }

    /// Exchanges the queue for `empty`, which must be so.
    pub(crate) fn take(&self, empty: &mut VecDeque<Mail>) {
        if self.is_empty() {
            return;
        }
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut *queue, empty);
        self.len.store(0, Ordering::SeqCst);
    }
}
