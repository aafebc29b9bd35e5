//! Deadlines on real threads and a real clock.

use atom_base::StepNo;
use atom_group::{Activity, Exchange, ExchangeError, Facts};
use std::time::Duration;

#[test]
fn a_lane_that_stays_away_is_named_with_what_it_was_doing() {
    let exchange = Exchange::new(3, 100);
    exchange.note(1, StepNo(0), Activity::Replaying);
    let facts = Facts { step: StepNo(1), ..Facts::default() };
    let patience = Duration::from_millis(50);
    std::thread::scope(|scope| {
        let wait = |lane| exchange.exchange(lane, &facts, patience, &mut [Facts::default(); 3]).unwrap_err();
        let other = scope.spawn(move || wait(2));
        let error = wait(0);
        assert!(matches!(&error, ExchangeError::Late { missing, .. } if missing.iter().any(|s| s.lane == 1)));
        assert!(error.to_string().contains("lane 1 (last seen replaying at step 0)"), "{error}");
        assert!(matches!(other.join().unwrap(), ExchangeError::Late { .. }));
    });
}
