//! What the outside wants of all groups of a host, and of a group's other hosts: rest, go on, take no more.
//!
//! A wish is no decision. Every lane says it in its facts, and `settle` rests a group once all of them do;
//! so all hosts have to hear of it. Whoever is asked numbers the wish above all that it has heard of and
//! tells the others. The highest number holds, and of two equal ones that of the higher host: in the end
//! all hosts have the same wish, whoever was asked meanwhile. A drain is for good.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wish {
    pub(crate) number: u64,
    /// The host that was asked.
    pub(crate) node: usize,
    pub(crate) paused: bool,
    pub(crate) draining: bool,
}

/// The wish that holds on this host, and what is known of the others.
pub(crate) struct Wishes {
    node: usize,
    newest: Mutex<Wish>,
    /// Every lane asks its group to rest.
    pub(crate) paused: Arc<AtomicBool>,
    /// No new request is taken.
    pub(crate) draining: AtomicBool,
    /// Under which wish a host was last at rest. `[nodes]`
    resting: Box<[AtomicU64]>,
}

impl Wishes {
    pub(crate) fn new(node: usize, nodes: usize) -> Self {
        Self {
            node,
            newest: Mutex::default(),
            paused: Arc::default(),
            draining: AtomicBool::new(false),
            resting: (0..nodes).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// A new wish, for the others as well.
    pub(crate) fn make(&self, change: impl FnOnce(&mut Wish)) -> Wish {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        newest.number += 1;
        newest.node = self.node;
        change(&mut newest);
        self.obey(&newest);
        *newest
    }

    /// Hears a wish that was made elsewhere.
    pub(crate) fn hear(&self, wish: &Wish) {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let draining = newest.draining || wish.draining;
        if (wish.number, wish.node) > (newest.number, newest.node) {
            *newest = *wish;
        }
        newest.draining = draining;
        self.obey(&newest);
    }

    /// The number of the wish that holds, if it is to rest.
    pub(crate) fn pause(&self) -> Option<u64> {
        let newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        newest.paused.then_some(newest.number)
    }

    /// Host `node` rests under this wish.
    pub(crate) fn note_resting(&self, node: usize, number: u64) {
        self.resting[node].fetch_max(number, Ordering::SeqCst);
    }

    /// True if all other hosts rest under this wish.
    pub(crate) fn others_rest(&self, number: u64) -> bool {
        let others = self.resting.iter().enumerate().filter(|(node, _)| *node != self.node);
        others.map(|(_, resting)| resting.load(Ordering::SeqCst)).all(|theirs| theirs >= number)
    }

    fn obey(&self, wish: &Wish) {
        self.paused.store(wish.paused, Ordering::SeqCst);
        self.draining.fetch_or(wish.draining, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every order in which three hosts can hear of each other's wishes ends with the same one on all.
    #[test]
    fn hosts_that_are_asked_at_once_end_with_one_wish() {
        for bits in 0..8 {
            let hosts: Vec<_> = (0..3).map(|node| Wishes::new(node, 3)).collect();
            let asked = |node: usize| bits & (1 << node) != 0;
            let wishes: Vec<_> =
                hosts.iter().map(|host| host.make(|wish| wish.paused = asked(host.node))).collect();
            for (node, host) in hosts.iter().enumerate() {
                // Each hears the others in another order, and one of them twice.
                for other in 0..4 {
                    host.hear(&wishes[(node + other) % 3]);
                }
                assert_eq!(host.paused.load(Ordering::SeqCst), asked(2), "{bits:#b}: host {node}");
                assert_eq!(host.pause(), asked(2).then_some(1));
            }
        }
    }

    #[test]
    fn a_drain_outlives_the_wish_that_it_came_with() {
        let (one, two) = (Wishes::new(0, 2), Wishes::new(1, 2));
        let drain = one.make(|wish| wish.draining = true);
        let pause = two.make(|wish| wish.paused = true);
        two.hear(&drain);
        one.hear(&pause);
        for host in [&one, &two] {
            assert!(host.draining.load(Ordering::SeqCst) && host.paused.load(Ordering::SeqCst));
            host.hear(&Wish { number: 9, ..Wish::default() });
            assert!(host.draining.load(Ordering::SeqCst) && !host.paused.load(Ordering::SeqCst));
        }
    }

    #[test]
    fn a_host_that_rested_under_an_older_wish_is_not_at_rest() {
        let host = Wishes::new(0, 3);
        host.note_resting(1, 5);
        host.note_resting(2, 4);
        assert!(host.others_rest(4) && !host.others_rest(5));
        host.note_resting(2, 6);
        host.note_resting(1, 3);
        assert!(host.others_rest(5) && !host.others_rest(6));
        assert!(Wishes::new(0, 1).others_rest(1), "nobody else is there");
    }
}
