//! What steps took, from when a profile is begun until it is ended: the newest of them, in a ring of fixed
//! size. A step allocates nothing for it and waits for nobody.

use crate::recent::StepRecord;
use crossbeam_queue::ArrayQueue;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Steps on their way into a profile.
#[derive(Default)]
pub(crate) struct Profile {
    /// The profile that is recorded: 1 is the first. 0 while there is none.
    now: AtomicU64,
    /// Made by the first who begins a profile: most hosts never need the room. Each step with its profile: a lane
    /// may add one after the profile ended in which it took it.
    steps: OnceLock<ArrayQueue<(u64, StepRecord)>>,
    lost: AtomicU64,
    /// How many were begun. Whoever begins or ends one holds it.
    begun: Mutex<u64>,
}

impl Profile {
    /// False if one was begun already.
    pub(crate) fn start(&self) -> bool {
        let mut begun = self.begun();
        if self.now.load(Ordering::SeqCst) != 0 {
            return false;
        }
        let steps = self.steps.get_or_init(|| ArrayQueue::new(STEPS_MAX));
        while steps.pop().is_some() {}
        self.lost.store(0, Ordering::SeqCst);
        *begun += 1;
        self.now.store(*begun, Ordering::SeqCst);
        true
    }

    /// The steps, oldest first, and how many older ones gave way; `None` if none was begun.
    pub(crate) fn stop(&self) -> Option<(Vec<StepRecord>, u64)> {
        let begun = self.begun();
        if self.now.swap(0, Ordering::SeqCst) == 0 {
            return None;
        }
        let steps = self.steps.get()?;
        let all = std::iter::from_fn(|| steps.pop());
        let own = all.filter(|(profile, _)| *profile == *begun).map(|(_, step)| step).collect();
        Some((own, self.lost.load(Ordering::SeqCst)))
    }

    /// Costs one look while there is no profile.
    pub(crate) fn add(&self, step: impl FnOnce() -> StepRecord) {
        let profile = self.now.load(Ordering::Relaxed);
        if profile != 0
            && let Some(steps) = self.steps.get()
            && steps.force_push((profile, step())).is_some_and(|(lost, _)| lost == profile)
        {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn begun(&self) -> MutexGuard<'_, u64> {
        // Nothing under the lock can panic short of memory.
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
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

    #[test]
    fn a_step_of_a_profile_that_ended_meanwhile_is_in_no_other() {
        let profile = Profile::default();
        profile.start();
        profile.add(|| step(1));
        // The lane looked before the end, and adds its step after the next begin.
        profile.add(|| {
            assert_eq!(profile.stop(), Some((vec![step(1)], 0)));
            assert!(profile.start());
            step(2)
        });
        profile.add(|| step(3));
        assert_eq!(profile.stop(), Some((vec![step(3)], 0)));
    }

    #[test]
    fn whoever_begins_or_ends_a_profile_does_so_alone() {
        let profile = Profile::default();
        let (started, stopped) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        started.fetch_add(profile.start().into(), Ordering::SeqCst);
                        if let Some((steps, _)) = profile.stop() {
                            stopped.fetch_add(1, Ordering::SeqCst);
                            assert!(steps.is_empty());
                        }
                    }
                });
            }
        });
        let left = u64::from(profile.stop().is_some());
        assert_eq!(started.into_inner(), stopped.into_inner() + left);
    }
}
