//! Waiting for a GPU: looks at first, then sleeps that grow with the wait, and always an end.

use crate::error::CudaError;
use std::time::{Duration, Instant};

/// Looks until `is_done`, which gets the time since the beginning. Returns how long it took. What is waited for is not
/// expected before `least`, which is 0 if nothing is known.
///
/// # Errors
/// [`CudaError::Late`] behind `limit`, and whatever `is_done` says.
pub(crate) fn until(
    what: &'static str,
    (least, limit): (Duration, Duration),
    mut is_done: impl FnMut(Duration) -> Result<bool, CudaError>,
) -> Result<Duration, CudaError> {
    let start = Instant::now();
    loop {
        let elapsed = start.elapsed();
        if is_done(elapsed)? {
            return Ok(elapsed);
        }
        if elapsed >= limit {
            return Err(CudaError::Late { what, waited: elapsed });
        }
        match pause(elapsed, least) {
            Duration::ZERO => std::hint::spin_loop(),
            pause => std::thread::sleep(pause.min(limit - elapsed)),
        }
    }
}

/// Ends the process at once, without what libraries have left to do at its exit: there the driver waits for kernels, of
/// which one may never end. Prints what is left to print.
pub fn quit(code: u8) -> ! {
    use std::io::Write as _;
    let _ = std::io::stdout().flush();
    unsafe extern "C" {
        fn _exit(code: std::ffi::c_int) -> !;
    }
    // SAFETY: it takes a number and doesn't return.
    unsafe { _exit(code.into()) }
}

/// Lets sleeps of this thread end when they should: by default the system may add 50 µs to each.
pub(crate) fn sleep_exactly() {
    #[cfg(target_os = "linux")]
    {
        use std::ffi::{c_int, c_ulong};
        unsafe extern "C" {
            fn prctl(option: c_int, argument: c_ulong, ...) -> c_int;
        }
        const PR_SET_TIMERSLACK: c_int = 29;
        const SLACK_NS: c_ulong = 1000;
        // SAFETY: the option takes a number of nanoseconds and changes this thread only. Refused, sleeps are longer.
        let _ = unsafe { prctl(PR_SET_TIMERSLACK, SLACK_NS) };
    }
}

/// What to do until the next look: sleep for half of what is left until shortly before the end is expected, look often
/// around it, and then the more seldom the longer it takes: a wait that nobody expected becomes longer by a 64th at most.
fn pause(elapsed: Duration, least: Duration) -> Duration {
    let early = (least - least / EARLY_BY).saturating_sub(WAKE);
    if elapsed < early {
        return ((early - elapsed) / 2).max(WAKE);
    }
    if elapsed < SPIN {
        return Duration::ZERO;
    }
    if elapsed < least + 2 * least / EARLY_BY {
        SLEEP_MIN
    } else {
        (elapsed / LONGER_BY).clamp(SLEEP_MIN, SLEEP_MAX)
    }
}

/// Waits as short as this are not worth a sleep, which takes some 10 µs to wake from.
const SPIN: Duration = Duration::from_micros(50);
/// How much earlier than expected a thread is awake: a part of the time, and what waking takes.
const EARLY_BY: u32 = 16;
const WAKE: Duration = Duration::from_micros(50);
const LONGER_BY: u32 = 64;
const SLEEP_MIN: Duration = Duration::from_micros(5);
const SLEEP_MAX: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    #[test]
    fn pauses_grow_with_the_wait_and_are_a_small_part_of_it() {
        assert_eq!(pause(SPIN - Duration::from_nanos(1), us(0)), us(0));
        let waits = [50, 100, 800, 5000, 64_000, 100_000, 60_000_000].map(us);
        let pauses = waits.map(|wait| pause(wait, us(0)));
        assert!(pauses.is_sorted() && pauses[0] == SLEEP_MIN && pauses[6] == SLEEP_MAX, "{pauses:?}");
        assert!(waits.iter().zip(&pauses).all(|(wait, &pause)| pause <= SLEEP_MIN.max(*wait / LONGER_BY)));
    }

    /// How often a core looks, and how late it is at the most, from the time that was expected on.
    #[test]
    fn what_is_expected_is_seen_at_once_and_costs_few_looks() {
        for least in [100, 800, 5000, 20_000, 100_000].map(us) {
            let (mut at, mut looks) = (us(0), 0);
            while at < least - least / EARLY_BY - WAKE {
                let sleep = pause(at, least);
                assert!(at + sleep < least, "{at:?} and {sleep:?} of {least:?}");
                (at, looks) = (at + sleep, looks + 1);
            }
            assert!(looks < 16, "{looks} looks before {least:?}");
            assert!(pause(at.max(SPIN), least) == SLEEP_MIN && pause(least, least) == SLEEP_MIN);
            assert!(pause(2 * least, least) <= SLEEP_MIN.max(2 * least / LONGER_BY));
        }
    }

    #[test]
    fn a_wait_ends_with_what_it_waits_for_or_with_its_limit_or_with_an_error() {
        let mut looks = 0;
        let done = until("a", (us(0), us(600_000_000)), |_| {
            looks += 1;
            Ok(looks == 3)
        });
        assert!(done.is_ok() && looks == 3);
        let late = until("the step", (us(70_000_000), us(0)), |_| Ok(false)).unwrap_err();
        assert!(matches!(late, CudaError::Late { what: "the step", .. }), "{late}");
        let failed = until("a", (us(0), us(600_000_000)), |_| Err(CudaError::Unsupported("b".into())));
        assert!(matches!(failed, Err(CudaError::Unsupported(_))));
    }
}
