//! Where other threads leave requests and aborts for a lane.

use atom_base::RequestId;
use atom_engine::Request;
use atom_group::Addressee;
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
    to: Addressee,
}

impl Mailbox {
    pub(crate) fn put(&self, mail: Mail) {
        let mut queue = self.lock();
        queue.mail.push_back(mail);
        self.len.store(queue.mail.len(), Ordering::SeqCst);
    }

    /// Says who takes the mail from now on.
    pub(crate) fn address(&self, to: Addressee) {
        self.lock().to = to;
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
        if queue.to.is(epoch) {
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
        mailbox.address(Addressee::of(2));
        mailbox.put(Mail::Abort(RequestId(7)));
        mailbox.take(1, &mut taken);
        assert!(taken.is_empty() && !mailbox.is_empty());
        mailbox.take(2, &mut taken);
        assert!(taken.len() == 1 && mailbox.is_empty());
    }
}
