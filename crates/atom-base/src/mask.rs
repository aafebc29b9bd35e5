//! Which tokens a row may choose, where that becomes known while the step already runs.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A place for the mask of one token of one request: filled once, by whoever computes it, and read by
/// every rank of the lane just before the row is sampled. Nobody waits past the deadline; the first who
/// comes to it decides for all that the mask is late.
pub struct MaskCell {
    state: Mutex<State>,
    filled: Condvar,
}

/// Until when a step waits for its masks, all of them together: some time from when it first needed one that was
/// not there. What is computed while the layers before run costs the step nothing.
#[derive(Debug)]
pub struct MaskClock {
    state: Mutex<Running>,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    /// From the first wait on.
    wait_max: Duration,
    /// However late the first wait is.
    latest: Instant,
    /// When the step first needed a mask that was not there.
    needed: Option<Instant>,
}

/// Why there is no mask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MaskFault {
    /// It was not there in time.
    Late {
        /// How long the step waited for it.
        waited: Duration,
    },
    /// Too many were to be computed before it.
    Busy {
        /// Masks that wait to be computed, the most that may.
        waiting: usize,
    },
    /// It can't be computed, or allows nothing.
    Failed(String),
}

struct State {
    content: Content,
    clock: Option<Arc<MaskClock>>,
    /// From when to when a step waited, if the mask was not there when it was needed.
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
        let state = State { content: Content::Awaited, clock: None, wait: None };
        Self { state: Mutex::new(state), filled: Condvar::new() }
    }

    /// Puts the outcome in. What comes behind a missed deadline is dropped.
    pub fn fill(&self, outcome: Result<Box<[u32]>, String>) {
        self.settle(match outcome {
            Ok(mask) => Content::Mask(mask),
            Err(reason) => Content::Fault(MaskFault::Failed(reason)),
        });
    }

    /// Says that it will not be computed.
    pub fn refuse(&self, fault: MaskFault) {
        self.settle(Content::Fault(fault));
    }

    fn settle(&self, content: Content) {
        let mut state = self.lock();
        if matches!(state.content, Content::Awaited) {
            state.content = content;
        }
        drop(state);
        self.filled.notify_all();
    }

    /// Says until when a step waits that is about to be launched: by a clock that all its cells share.
    pub fn set_clock(&self, clock: &Arc<MaskClock>) {
        let mut state = self.lock();
        (state.clock, state.wait) = (Some(Arc::clone(clock)), None);
    }

    /// The same for one cell and a time.
    pub fn set_deadline(&self, deadline: Instant) {
        let clock = MaskClock::new();
        clock.start(Duration::MAX, deadline);
        self.set_clock(&Arc::new(clock));
    }

    /// Waits for the mask and hands it to `use_it`; none if it does not come, or can't be.
    ///
    /// Panics without a clock: a step would wait for ever.
    pub fn wait<T>(&self, use_it: impl FnOnce(&[u32]) -> T) -> Option<T> {
        let mut state = self.lock();
        let clock = state.clock.clone().expect("whoever launches a step sets the clock of its masks");
        if matches!(state.content, Content::Awaited) {
            let begun = Instant::now();
            let deadline = clock.needed(begun);
            let mut now = begun;
            while matches!(state.content, Content::Awaited) {
                if now >= deadline {
                    state.content = Content::Fault(MaskFault::Late { waited: now - begun });
                    self.filled.notify_all();
                    break;
                }
                let left = deadline - now;
                state = self.filled.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                now = Instant::now();
            }
            let (from, to) = state.wait.unwrap_or((begun, now));
            state.wait = Some((from.min(begun), to.max(now)));
        }
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

    /// From when to when the last step with this clock waited, all of its ranks together; none if the mask was there
    /// when it was needed.
    pub fn waited(&self) -> Option<(Instant, Instant)> {
        self.lock().wait
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MaskClock {
    /// One that has to be started.
    #[allow(clippy::new_without_default, reason = "a clock that stands is no sane default")]
    pub fn new() -> Self {
        let running = Running { wait_max: Duration::ZERO, latest: Instant::now(), needed: None };
        Self { state: Mutex::new(running) }
    }

    /// For a step that is about to be launched: it waits for `wait_max` from when it first needs a mask that is
    /// not there, and never longer than until `latest`.
    pub fn start(&self, wait_max: Duration, latest: Instant) {
        *self.lock() = Running { wait_max, latest, needed: None };
    }

    /// A mask is needed now that is not there. Until when it is waited for.
    fn needed(&self, now: Instant) -> Instant {
        let mut state = self.lock();
        let needed = *state.needed.get_or_insert(now);
        needed.checked_add(state.wait_max).map_or(state.latest, |end| end.min(state.latest))
    }

    fn lock(&self) -> MutexGuard<'_, Running> {
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
            Self::Busy { waiting } => {
                write!(
                    f,
                    "{waiting} masks of grammars wait to be computed, the most that may; try again later"
                )
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
            assert_eq!(cell.waited(), None, "it was there, or known not to come");
        }
        let cell = MaskCell::new();
        cell.fill(Err("why".into()));
        cell.set_deadline(Instant::now());
        assert_eq!((cell.wait(|_| ()), cell.fault()), (None, Some(MaskFault::Failed("why".into()))));
    }

    #[test]
    fn a_mask_that_was_ready_was_not_waited_for_and_starts_no_clock() {
        let clock = Arc::new(MaskClock::new());
        let (ready, late) = (MaskCell::new(), MaskCell::new());
        // The commit lies long back, as if layers had run since.
        let commit = Instant::now();
        clock.start(Duration::ZERO, commit + Duration::from_secs(600));
        for cell in [&ready, &late] {
            cell.set_clock(&clock);
        }
        ready.fill(Ok(vec![1].into()));
        assert_eq!((ready.wait(<[u32]>::to_vec), ready.waited()), (Some(vec![1]), None));
        assert_eq!(clock.lock().needed, None);
        assert_eq!(late.wait(<[u32]>::to_vec), None);
        assert!(matches!(late.fault(), Some(MaskFault::Late { .. })) && late.waited().is_some());
    }

    #[test]
    fn the_time_to_wait_begins_when_the_step_first_needs_a_mask_and_is_one_for_all() {
        let clock = MaskClock::new();
        let commit = Instant::now();
        let at = |ms| commit + Duration::from_millis(ms);
        let second = Duration::from_secs(1);
        clock.start(second, at(60_000));
        // 700 ms of layers before.
        assert_eq!(clock.needed(at(700)), at(1700));
        assert_eq!(clock.needed(at(1600)), at(1700), "another row, or another rank");
        clock.start(second, at(1200));
        assert_eq!(clock.needed(at(700)), at(1200), "the step's own deadline");
        clock.start(Duration::MAX, at(5));
        assert_eq!(clock.needed(at(1)), at(5));
    }

    #[test]
    fn a_mask_that_is_refused_says_so_and_stays_so() {
        let cell = MaskCell::new();
        cell.set_deadline(Instant::now() + Duration::from_secs(600));
        cell.refuse(MaskFault::Busy { waiting: 9 });
        cell.fill(Ok(vec![1].into()));
        assert_eq!((cell.wait(|_| ()), cell.fault()), (None, Some(MaskFault::Busy { waiting: 9 })));
        assert!(cell.fault().unwrap().to_string().starts_with("9 masks"));
    }
}
