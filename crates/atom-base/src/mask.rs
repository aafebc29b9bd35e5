//! Which tokens a row may choose, where that becomes known while the step already runs.

use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A place for the mask of one token of one request: filled once, by whoever computes it, and read by
/// every rank of the lane just before the row is sampled. Nobody waits past the deadline; the first who
/// comes to it decides for all that the mask is late.
pub struct MaskCell {
    state: Mutex<State>,
    filled: Condvar,
}

/// Why there is no mask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MaskFault {
    /// It was not there in time.
    Late {
        /// How long the step waited for it.
        waited: Duration,
    },
    /// It can't be computed, or allows nothing.
    Failed(String),
}

struct State {
    content: Content,
    deadline: Option<Instant>,
    /// From when to when a step waited.
    wait: Option<(Instant, Instant)>,
}

enum Content {
    Awaited,
    /// Bit `t % 32` of word `t / 32` is set if token `t` may be chosen.
    Mask(Box<[u32]>),
    Fault(MaskFault),
}

impl MaskCell {
    /// A cell that somebody will fill.
    pub fn new() -> Self {
        let state = State { content: Content::Awaited, deadline: None, wait: None };
        Self { state: Mutex::new(state), filled: Condvar::new() }
    }

    /// Puts the outcome in. What comes behind a missed deadline is dropped.
    pub fn fill(&self, outcome: Result<Box<[u32]>, String>) {
        let mut state = self.lock();
        if matches!(state.content, Content::Awaited) {
            state.content = match outcome {
                Ok(mask) => Content::Mask(mask),
                Err(reason) => Content::Fault(MaskFault::Failed(reason)),
            };
        }
        drop(state);
        self.filled.notify_all();
    }

    /// Says until when a step waits that is about to be launched.
    pub fn set_deadline(&self, deadline: Instant) {
        let mut state = self.lock();
        (state.deadline, state.wait) = (Some(deadline), None);
    }

    /// Waits for the mask and hands it to `use_it`; none if it does not come, or can't be.
    ///
    /// Panics without a deadline: a step would wait for ever.
    pub fn wait<T>(&self, use_it: impl FnOnce(&[u32]) -> T) -> Option<T> {
        let mut state = self.lock();
        let deadline = state.deadline.expect("whoever launches a step sets the deadlines of its masks");
        let begun = Instant::now();
        while matches!(state.content, Content::Awaited) {
            let now = Instant::now();
            if now >= deadline {
                state.content = Content::Fault(MaskFault::Late { waited: now - begun });
                self.filled.notify_all();
                break;
            }
            let left = deadline - now;
            state = self.filled.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let now = Instant::now();
        let (from, to) = state.wait.unwrap_or((begun, now));
        state.wait = Some((from.min(begun), to.max(now)));
        match &state.content {
            Content::Mask(mask) => Some(use_it(mask)),
            Content::Awaited | Content::Fault(_) => None,
        }
    }

    /// Why there is no mask, if that is so.
    pub fn fault(&self) -> Option<MaskFault> {
        match &self.lock().content {
            Content::Fault(fault) => Some(fault.clone()),
            Content::Awaited | Content::Mask(_) => None,
        }
    }

    /// From when to when the last step with this deadline waited, all of its ranks together.
    pub fn waited(&self) -> Option<(Instant, Instant)> {
        self.lock().wait
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for MaskCell {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MaskCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        let content = match &state.content {
            Content::Awaited => "awaited".into(),
            Content::Mask(mask) => format!("{} tokens", mask.iter().map(|w| w.count_ones()).sum::<u32>()),
            Content::Fault(fault) => fault.to_string(),
        };
        f.debug_tuple("MaskCell").field(&content).finish()
    }
}

impl fmt::Display for MaskFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Late { waited } => {
                write!(f, "the tokens that its grammar allows were not known after {waited:?} of waiting")
            }
            Self::Failed(reason) => f.write_str(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_who_wait_get_the_mask_or_all_the_fault() {
        for late in [false, true] {
            let cell = MaskCell::new();
            cell.set_deadline(Instant::now() + Duration::from_secs(if late { 0 } else { 600 }));
            std::thread::scope(|scope| {
                let waiting: Vec<_> = (0..3).map(|_| scope.spawn(|| cell.wait(<[u32]>::to_vec))).collect();
                if !late {
                    cell.fill(Ok(vec![5, 6].into()));
                }
                let got: Vec<_> = waiting.into_iter().map(|thread| thread.join().unwrap()).collect();
                assert!(got.iter().all(|got| *got == (!late).then(|| vec![5, 6])), "{got:?}");
            });
            // A mask behind the deadline changes nothing any more.
            cell.fill(Ok(vec![7].into()));
            cell.set_deadline(Instant::now() + Duration::from_secs(600));
            assert_eq!(cell.wait(<[u32]>::to_vec), (!late).then(|| vec![5, 6]));
            assert_eq!(matches!(cell.fault(), Some(MaskFault::Late { .. })), late);
            assert!(cell.waited().is_some());
        }
        let cell = MaskCell::new();
        cell.fill(Err("why".into()));
        cell.set_deadline(Instant::now());
        assert_eq!((cell.wait(|_| ()), cell.fault()), (None, Some(MaskFault::Failed("why".into()))));
    }
}
