//! Waiting for a GPU: looks at first, then sleeps that grow with the wait, and always an end.

use crate::error::CudaError;
use std::time::{Duration, Instant};

/// Looks until `is_done`, which gets the time since the beginning. Returns how long it took.
///
/// # Errors
/// [`CudaError::Late`] behind `limit`, and whatever `is_done` says.
pub(crate) fn until(
    what: &'static str,
    limit: Duration,
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
        match pause(elapsed) {
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

/// What to do until the next look. A wait becomes longer by a 64th at the most, and the more there is to wait for
/// the less the core has to do.
fn pause(elapsed: Duration) -> Duration {
    if elapsed < SPIN { Duration::ZERO } else { (elapsed / LONGER_BY).clamp(SLEEP_MIN, SLEEP_MAX) }
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

/// Waits as short as this are not worth a sleep, which takes some 10 µs to wake from.
const SPIN: Duration = Duration::from_micros(50);
const LONGER_BY: u32 = 64;
const SLEEP_MIN: Duration = Duration::from_micros(5);
const SLEEP_MAX: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_wait_and_are_a_small_part_of_it() {
        assert_eq!(pause(SPIN - Duration::from_nanos(1)), Duration::ZERO);
        let waits = [50, 100, 800, 5000, 32_000, 100_000, 60_000_000].map(Duration::from_micros);
        let pauses = waits.map(pause);
        assert!(pauses.is_sorted() && pauses[0] == SLEEP_MIN && pauses[6] == SLEEP_MAX, "{pauses:?}");
        assert!(waits.iter().zip(&pauses).all(|(wait, &pause)| pause <= SLEEP_MIN.max(*wait / LONGER_BY)));
        // How often a core looks in 100 ms.
        let (mut at, mut looks) = (SPIN, 0);
        while at < Duration::from_millis(100) {
            (at, looks) = (at + pause(at), looks + 1);
        }
        assert!((100..800).contains(&looks), "{looks} looks");
    }

    #[test]
    fn a_wait_ends_with_what_it_waits_for_or_with_its_limit_or_with_an_error() {
        let mut looks = 0;
        let done = until("a", Duration::from_secs(600), |_| {
            looks += 1;
            Ok(looks == 3)
        });
        assert!(done.is_ok() && looks == 3);
        let late = until("the step", Duration::ZERO, |_| Ok(false)).unwrap_err();
        assert!(matches!(late, CudaError::Late { what: "the step", .. }), "{late}");
        let failed = until("a", Duration::from_secs(600), |_| Err(CudaError::Unsupported("b".into())));
        assert!(matches!(failed, Err(CudaError::Unsupported(_))));
    }
}
