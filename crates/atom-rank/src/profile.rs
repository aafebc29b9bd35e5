//! What steps took, from when a profile is begun until it is ended: the newest of them, in a ring of fixed
//! size. A step allocates nothing for it and waits for nobody.

use crate::recent::StepRecord;
use crossbeam_queue::ArrayQueue;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Steps on their way into a profile.
#[derive(Default)]
pub(crate) struct Profile {
    is_on: AtomicBool,
    /// Made by the first who begins a profile: most hosts never need the room.
    steps: OnceLock<ArrayQueue<StepRecord>>,
    lost: AtomicU64,
}

impl Profile {
    /// False if one was begun already.
    pub(crate) fn start(&self) -> bool {
        if self.is_on.load(Ordering::SeqCst) {
            return false;
        }
        // Of a lane that was about to add it when the last profile ended.
        let steps = self.steps.get_or_init(|| ArrayQueue::new(STEPS_MAX));
        while steps.pop().is_some() {}
        self.lost.store(0, Ordering::SeqCst);
        !self.is_on.swap(true, Ordering::SeqCst)
    }

    /// The steps, oldest first, and how many older ones gave way; `None` if none was begun.
    pub(crate) fn stop(&self) -> Option<(Vec<StepRecord>, u64)> {
        if !self.is_on.swap(false, Ordering::SeqCst) {
            return None;
        }
        let steps = self.steps.get()?;
        Some((std::iter::from_fn(|| steps.pop()).collect(), self.lost.load(Ordering::SeqCst)))
    }

    /// Costs one look while there is no profile.
    pub(crate) fn add(&self, step: impl FnOnce() -> StepRecord) {
        if self.is_on.load(Ordering::Relaxed)
            && let Some(steps) = self.steps.get()
            && steps.force_push(step()).is_some()
        {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Some minutes of one lane's steps, in 6 MiB; older ones give way.
const STEPS_MAX: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;
    use atom_base::StepNo;

    fn step(number: u64) -> StepRecord {
        StepRecord { step: StepNo(number), bucket_rows: 8, ..StepRecord::default() }
    }

    #[test]
    fn a_profile_has_the_newest_steps_between_its_begin_and_its_end() {
        let profile = Profile::default();
        profile.add(|| unreachable!("nobody asked"));
        assert!(profile.stop().is_none());
        assert!(profile.start() && !profile.start());
        (0..STEPS_MAX as u64 + 5).for_each(|number| profile.add(|| step(number)));
        let (steps, lost) = profile.stop().unwrap();
        assert_eq!((steps.len(), lost, steps[0]), (STEPS_MAX, 5, step(5)));
        assert!(steps.windows(2).all(|pair| pair[0].step < pair[1].step));
        assert!(profile.start());
        profile.add(|| step(1));
        assert_eq!(profile.stop(), Some((vec![step(1)], 0)));
        assert!(profile.stop().is_none());
    }
}
