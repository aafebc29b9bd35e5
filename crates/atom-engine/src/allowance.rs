//! How much of a processor's time the masks of one request may take. Every request of a lane waits behind a mask
//! that is slow, so one with slow masks all the way ends, and the others go on.

use crate::constraint::{Grammar, TokenConstraint};
use atom_base::TokenId;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What the masks of a request may take, all of its choices together: so much for each of them, and so much beside.
/// What is saved by fast masks is there for slow ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// For each mask.
    pub each: Duration,
    /// Once, for what a grammar builds at its beginning and needs only then.
    pub beside: Duration,
}

/// What the masks of a request took so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Of a processor: what a thread waits for one does not count.
    pub time: Duration,
    /// How many there were.
    pub masks: u32,
}

/// A request's masks took more than they may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overdrawn {
    /// What they took.
    pub spent: Spent,
    /// What they may take.
    pub allowance: Allowance,
}

/// A grammar whose masks are held to an allowance. `clock` says how much of a processor's time the thread that asks
/// it has had; only differences count, of one thread.
pub struct Metered<C> {
    inner: Arc<dyn Grammar>,
    meter: Arc<Meter<C>>,
}

struct Meter<C> {
    allowance: Allowance,
    clock: C,
    spent: Mutex<Spent>,
}

/// One continuation of it.
struct MeteredOne<C> {
    inner: Box<dyn TokenConstraint>,
    meter: Arc<Meter<C>>,
}

impl Allowance {
    /// Of a server: masks of honest grammars take 36 us on average and 4 to 9 ms at the most
    /// (docs/structured_output.md), and what the parser allows one is some 15 ms. Half a second is for the states that a
    /// large grammar builds at its beginning.
    pub const OF_A_REQUEST: Self =
        Self { each: Duration::from_millis(10), beside: Duration::from_millis(500) };

    /// Says whether a request may go on that has spent so much.
    pub fn verdict(&self, spent: Spent) -> Result<(), Overdrawn> {
        let most = self.each.saturating_mul(spent.masks).saturating_add(self.beside);
        if spent.time <= most { Ok(()) } else { Err(Overdrawn { spent, allowance: *self }) }
    }
}

impl<C: Fn() -> Duration> Metered<C> {
    /// `inner` with nothing spent yet; all continuations draw on one allowance.
    pub fn new(inner: Arc<dyn Grammar>, allowance: Allowance, clock: C) -> Self {
        Self { inner, meter: Arc::new(Meter { allowance, clock, spent: Mutex::default() }) }
    }

    /// What was spent so far.
    pub fn spent(&self) -> Spent {
        *self.meter.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C: Fn() -> Duration> Meter<C> {
    /// Does the work and charges it, as `masks` masks.
    fn charge<T>(&self, masks: u32, work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        let begun = (self.clock)();
        let outcome = work();
        let took = (self.clock)().saturating_sub(begun);
        let mut spent = self.spent.lock().unwrap_or_else(PoisonError::into_inner);
        spent.time = spent.time.saturating_add(took);
        spent.masks = spent.masks.saturating_add(masks);
        let verdict = self.allowance.verdict(*spent);
        drop(spent);
        // The grammar's own reason tells more.
        let done = outcome?;
        // Between masks nobody waits yet: whoever asks for the next one is told.
        if masks > 0 {
            verdict.map_err(|overdrawn| overdrawn.to_string())?;
        }
        Ok(done)
    }
}

impl<C: Fn() -> Duration + Send + Sync + 'static> Grammar for Metered<C> {
    fn start(&self) -> Result<Box<dyn TokenConstraint>, String> {
        let inner = self.meter.charge(0, || self.inner.start())?;
        Ok(Box::new(MeteredOne { inner, meter: Arc::clone(&self.meter) }))
    }
}

impl<C: Fn() -> Duration + Send + Sync> TokenConstraint for MeteredOne<C> {
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
        self.meter.charge(1, || self.inner.mask(allowed))
    }

    fn advance(&mut self, token: TokenId) -> Result<(), String> {
        self.meter.charge(0, || self.inner.advance(token))
    }
}

impl fmt::Display for Overdrawn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { spent: Spent { time, masks }, allowance: Allowance { each, beside } } = self;
        write!(
            f,
            "its grammar is too slow: what may come next took {time:.3?} of a processor for {masks} tokens, at most \
             {each:?} a token and {beside:?} beside are allowed; make it less ambiguous"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GrammarRef, MaskWork};
    use atom_base::MaskFault;
    use std::sync::atomic::{AtomicU64, Ordering};

    const MS: Duration = Duration::from_millis(1);
    const ALLOWANCE: Allowance = Allowance::OF_A_REQUEST;

    #[test]
    fn an_allowance_is_so_much_a_mask_and_so_much_beside() {
        let verdict = |ms: u32, masks| ALLOWANCE.verdict(Spent { time: MS * ms, masks });
        assert_eq!(verdict(0, 0), Ok(()));
        assert_eq!(verdict(500, 0), Ok(()));
        assert_eq!(verdict(510, 1), Ok(()));
        assert_eq!(verdict(1500, 100), Ok(()));
        let spent = Spent { time: MS * 1501, masks: 100 };
        assert_eq!(verdict(1501, 100), Err(Overdrawn { spent, allowance: ALLOWANCE }));
        assert_eq!(verdict(511, 1).unwrap_err().spent.masks, 1);
        let text = verdict(1501, 100).unwrap_err().to_string();
        for number in ["1.501s", "100 tokens", "10ms", "500ms"] {
            assert!(text.contains(number), "{number}: {text}");
        }
        // No overflow, however long it goes on.
        let endless = Allowance { each: Duration::MAX, beside: Duration::MAX };
        assert_eq!(endless.verdict(Spent { time: Duration::MAX, masks: u32::MAX }), Ok(()));
    }

    /// Takes so many milliseconds of its own clock for everything it does.
    struct Slow {
        clock: Arc<AtomicU64>,
        start: u64,
        mask: u64,
        advance: u64,
    }

    struct SlowOne(Arc<AtomicU64>, u64, u64);

    impl Grammar for Slow {
        fn start(&self) -> Result<Box<dyn TokenConstraint>, String> {
            self.clock.fetch_add(self.start, Ordering::SeqCst);
            Ok(Box::new(SlowOne(Arc::clone(&self.clock), self.mask, self.advance)))
        }
    }

    impl TokenConstraint for SlowOne {
        fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
            self.0.fetch_add(self.1, Ordering::SeqCst);
            allowed[0] = 1;
            Ok(())
        }

        fn advance(&mut self, token: TokenId) -> Result<(), String> {
            self.0.fetch_add(self.2, Ordering::SeqCst);
            if token == 7 { Err("7 can't follow".into()) } else { Ok(()) }
        }
    }

    fn metered(
        start: u64,
        mask: u64,
        advance: u64,
    ) -> Metered<impl Fn() -> Duration + Send + Sync + 'static> {
        let clock = Arc::new(AtomicU64::new(12345));
        let slow = Slow { clock: Arc::clone(&clock), start, mask, advance };
        Metered::new(Arc::new(slow), ALLOWANCE, move || MS * clock.load(Ordering::SeqCst) as u32)
    }

    /// How many masks there are before the allowance is used up, and the words then.
    fn until_it_ends(grammar: &dyn Grammar) -> (u32, String) {
        let mut one = grammar.start().unwrap();
        for masks in 0..1000 {
            if let Err(words) = one.mask(&mut [0]) {
                return (masks, words);
            }
            one.advance(1).unwrap();
        }
        (1000, String::new())
    }

    #[test]
    fn starting_advancing_and_masks_all_draw_on_the_allowance() {
        // 500 + 10 n < 170 n, from the 4th on; 60 more at the start, one less.
        assert_eq!(until_it_ends(&metered(0, 170, 0)).0, 3);
        assert_eq!(until_it_ends(&metered(50, 170, 0)).0, 2);
        // After an advance that used it up the next mask says so.
        let (masks, words) = until_it_ends(&metered(0, 0, 600));
        assert!(
            masks == 1 && words.contains("600.000ms") && words.contains("for 2 tokens"),
            "{masks}: {words}"
        );
        // At the average nothing ends.
        assert_eq!(until_it_ends(&metered(500, 9, 1)).0, 1000);
    }

    #[test]
    fn choices_of_a_request_draw_on_one_allowance_and_requests_on_their_own() {
        let (one, other) = (metered(0, 170, 0), metered(0, 170, 0));
        let mut choices = [one.start().unwrap(), one.start().unwrap()];
        for at in 0..3 {
            choices[at % 2].mask(&mut [0]).unwrap();
        }
        assert!(choices[1].mask(&mut [0]).is_err(), "the fourth of both");
        assert!(choices[0].mask(&mut [0]).is_err());
        assert_eq!(one.spent(), Spent { time: MS * 850, masks: 5 });
        assert_eq!((other.spent(), until_it_ends(&other).0), (Spent::default(), 3));
    }

    #[test]
    fn a_grammars_own_reason_goes_before_the_allowances() {
        let grammar = metered(0, 0, 9000);
        let mut one = grammar.start().unwrap();
        assert_eq!(one.advance(7), Err("7 can't follow".into()));
    }

    #[test]
    fn a_request_that_used_its_allowance_up_has_a_failed_mask_with_the_numbers() {
        let (work, cell) = MaskWork::first(&GrammarRef(Arc::new(metered(0, 511, 0))));
        work.run(32);
        let Some(MaskFault::Failed(reason)) = cell.fault() else { panic!("{cell:?}") };
        assert!(reason.contains("511.000ms") && reason.contains("10ms"), "{reason}");
    }
}
