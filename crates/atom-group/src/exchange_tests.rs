//! Schedules of exchange and park, explored by shuttle: the code that ships, over its primitives.

use super::*;
use shuttle::sync::atomic::AtomicBool;
use shuttle::sync::{Arc, Mutex};
use shuttle::thread;

const PATIENCE: Duration = Duration::from_secs(3600);
const SCHEDULES: usize = 2000;

fn facts(step: u64, rows: u32) -> Facts {
    Facts { step: StepNo(step), decode_rows: rows, ..Facts::default() }
}

#[test]
fn every_lane_leaves_every_exchange_with_the_same_facts() {
    shuttle::check_random(
        || {
            let exchange = Arc::new(Exchange::new(3, 1));
            let seen = Arc::new(Mutex::new(vec![Vec::new(); 3]));
            let lane = |lane: usize| {
                let (exchange, seen) = (Arc::clone(&exchange), Arc::clone(&seen));
                thread::spawn(move || {
                    for step in 1..=4u64 {
                        let mut all = [Facts::default(); 3];
                        exchange
                            .exchange(lane, &facts(step, step as u32 * 10 + lane as u32), PATIENCE, &mut all)
                            .unwrap();
                        seen.lock().unwrap()[lane].push(all.map(|f| f.decode_rows));
                    }
                })
            };
            for handle in [lane(0), lane(1), lane(2)] {
                handle.join().unwrap();
            }
            let seen = seen.lock().unwrap();
            let expected: Vec<_> = (1..=4).map(|s| [s * 10, s * 10 + 1, s * 10 + 2]).collect();
            assert!(seen.iter().all(|lane| *lane == expected), "{seen:?}");
        },
        SCHEDULES,
    );
}

/// A lost wake-up would leave a thread asleep for ever: shuttle reports that as a deadlock.
#[test]
fn work_for_one_parked_lane_wakes_all() {
    shuttle::check_random(
        || {
            let exchange = Arc::new(Exchange::new(2, 1));
            let work = Arc::new(AtomicBool::new(false));
            let lane = |lane: usize| {
                let (exchange, work) = (Arc::clone(&exchange), Arc::clone(&work));
                thread::spawn(move || {
                    exchange.park(lane, StepNo(1), || lane == 0 && work.load(Ordering::SeqCst)).unwrap();
                    let mut all = [Facts::default(); 2];
                    exchange.exchange(lane, &facts(1, lane as u32), PATIENCE, &mut all).unwrap();
                    all[0].decode_rows + all[1].decode_rows
                })
            };
            let lanes = [lane(0), lane(1)];
            work.store(true, Ordering::SeqCst);
            exchange.ring();
            for handle in lanes {
                assert_eq!(handle.join().unwrap(), 1);
            }
        },
        SCHEDULES,
    );
}

#[test]
fn closing_ends_every_wait() {
    shuttle::check_random(
        || {
            let exchange = Arc::new(Exchange::new(2, 1));
            let parked = {
                let exchange = Arc::clone(&exchange);
                thread::spawn(move || exchange.park(0, StepNo(1), || false))
            };
            exchange.close();
            let mut all = [Facts::default(); 2];
            let left = exchange.exchange(1, &facts(1, 0), PATIENCE, &mut all);
            let parked = parked.join().unwrap();
            assert_eq!(left, Err(ExchangeError::Closed));
            // The parked lane either saw its peer come or the close.
            assert!(matches!(parked, Ok(()) | Err(ExchangeError::Closed)));
        },
        SCHEDULES,
    );
}
