//! What is learnt from replay times.

use super::*;
use crate::testing::lattice;

const FULL: u32 = u32::MAX;

fn observed(samples: &[u32]) -> u32 {
    let (lattice, mut pace) = (lattice(64, 8, None), Pace::new());
    let bucket = lattice.buckets()[3];
    for (step, &us) in samples.iter().enumerate() {
        pace.observe(bucket, us, FULL, StepNo(step as u64 + 1));
    }
    pace.typical_us[bucket.index()]
}

#[test]
fn a_first_replay_is_no_measurement_and_a_hiccup_is_forgotten() {
    assert_eq!(observed(&[90_000]), 0);
    assert_eq!(observed(&[90_000, 1000]), 1000);
    assert_eq!(observed(&[90_000, 1000, 1000, 1_000_000]), 1500, "a hiccup of any length counts double");
    let mut samples = vec![1, 1000, 1_000_000];
    samples.extend([1000; 10]);
    assert!((1000..1150).contains(&observed(&samples)));
    samples.extend([3000; 10]);
    assert!((2900..=3000).contains(&observed(&samples)), "what stays is followed soon");
}

#[test]
fn deadlines_count_every_replay() {
    let (lattice, mut pace) = (lattice(64, 8, None), Pace::new());
    pace.observe(lattice.top(), 90_000, 1, StepNo(1));
    pace.observe(lattice.top(), 10, 1, StepNo(2));
    assert_eq!((pace.slowest_us(), pace.is_measured(lattice.top())), (90_000, true));
}

/// A replay of few rows in a large bucket is short on a backend that computes no padding.
#[test]
fn replays_of_padding_lower_no_estimate() {
    let (lattice, mut pace) = (lattice(64, 8, None), Pace::new());
    let top = lattice.top();
    let mut next = 0;
    let mut observe = |pace: &mut Pace, us, rows| {
        next += 1;
        pace.observe(top, us, rows, StepNo(next));
    };
    (0..3).for_each(|_| observe(&mut pace, 100, 8));
    assert_eq!(pace.typical_us[top.index()], 0, "no measurement of a full one");
    observe(&mut pace, 6400, 48);
    (0..100).for_each(|_| observe(&mut pace, 100, 47));
    assert_eq!(pace.typical_us[top.index()], 6400);
    observe(&mut pace, 12800, 8);
    assert_eq!(pace.typical_us[top.index()], 9600, "but slow is slow");
}

#[test]
fn unmeasured_buckets_are_predicted_from_below_by_rows() {
    let (lattice, mut pace) = (lattice(64, 8, None), Pace::new());
    let at = |rows| *lattice.buckets().iter().find(|b| b.rows() == rows).unwrap();
    let predicted = |pace: &Pace, rows, now| {
        pace.predicted(lattice.buckets(), StepNo(now)).find(|(b, _)| b.rows() == rows).unwrap().1
    };
    for us in [0, 800] {
        pace.observe(at(8), us.max(1), 8, StepNo(1));
    }
    assert_eq!(predicted(&pace, 4, 2), None);
    assert_eq!((predicted(&pace, 8, 2), predicted(&pace, 64, 2)), (Some(800), Some(6400)));
    for us in [1, 9000] {
        pace.observe(at(32), us, 32, StepNo(2));
    }
    assert_eq!((predicted(&pace, 32, 2), predicted(&pace, 64, 2)), (Some(9000), Some(18000)));
    // Nobody dared to replay it again; meanwhile a smaller one says that it was a hiccup.
    assert_eq!(predicted(&pace, 32, 2 + FRESH_STEPS), Some(9000));
    pace.observe(at(8), 800, 8, StepNo(400));
    assert_eq!(predicted(&pace, 32, 401), Some(3200));
    assert_eq!(predicted(&pace, 8, 4000), Some(800), "old, but nothing newer says otherwise");
}
