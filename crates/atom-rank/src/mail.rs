//! Where other threads leave requests and aborts for a lane.

use atom_base::RequestId;
use atom_engine::Request;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a lane can be told.
pub(crate) enum Mail {
    Submit(Request),
    Abort(RequestId),
}

/// A lane's mailbox. Whoever leaves mail rings the lane's exchange afterwards.
#[derive(Default)]
pub(crate) struct Mailbox {
    queue: Mutex<Queue>,
    len: AtomicUsize,
}

#[derive(Default)]
struct Queue {
    mail: VecDeque<Mail>,
    /// The epoch whose lane may take it. A thread that was stuck and wakes in a later one would take
    /// requests to its grave.
    epoch: u64,
}

impl Mailbox {
    pub(crate) fn put(&self, mail: Mail) {
        let mut queue = self.lock();
        queue.mail.push_back(mail);
        self.len.store(queue.mail.len(), Ordering::SeqCst);
    }

    /// From now on the lane of this epoch takes the mail, and none before it does.
    pub(crate) fn open_for(&self, epoch: u64) {
        self.lock().epoch = epoch;
    }

    /// Forgets everything: the requests in it were answered otherwise.
    pub(crate) fn clear(&self) {
        let mut queue = self.lock();
        queue.mail.clear();
        self.len.store(0, Ordering::SeqCst);
    }

    /// True without taking the lock when there is nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(Ordering::SeqCst) == 0
    }

    /// Exchanges the queue for `empty`, which must be so; not for a lane of another epoch.
    pub(crate) fn take(&self, epoch: u64, empty: &mut VecDeque<Mail>) {
        if self.is_empty() {
            return;
        }
        let mut queue = self.lock();
        if queue.epoch == epoch {
            std::mem::swap(&mut queue.mail, empty);
            self.len.store(0, Ordering::SeqCst);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that was stuck in a step without collectives woke, and took the next request with it.
    #[test]
    fn a_lane_of_an_epoch_that_is_over_takes_no_mail() {
        let (mailbox, mut taken) = (Mailbox::default(), VecDeque::new());
        mailbox.open_for(2);
        mailbox.put(Mail::Abort(RequestId(7)));
        mailbox.take(1, &mut taken);
        assert!(taken.is_empty() && !mailbox.is_empty());
        mailbox.take(2, &mut taken);
        assert!(taken.len() == 1 && mailbox.is_empty());
    }
}
