//! Small groups in every order of events, and faults that the exploration must find.

#![allow(clippy::unwrap_used, reason = "the exemption for tests stops at their helper functions")]

use atom_sim::explore::{Broken, Plant, Setup, planted, small};
use std::collections::BTreeSet;

/// Explores the setups of one epoch with so many lanes, and prints how many worlds they have.
fn check(lanes: usize, fine: bool) -> BTreeSet<&'static str> {
    explore(|setup| (setup.lanes, setup.fine, setup.restarts_max) == (lanes, fine, None))
}

/// The same for groups that lose ranks and form again.
fn check_supervised(lanes: usize) -> BTreeSet<&'static str> {
    explore(|setup| setup.lanes == lanes && setup.restarts_max.is_some())
}

fn explore(wanted: impl Fn(&Setup) -> bool) -> BTreeSet<&'static str> {
    let mut saw = BTreeSet::new();
    for setup in small().into_iter().filter(wanted) {
        match setup.explore() {
            Ok(explored) => {
                println!("{explored}");
                assert!(explored.depth > 10, "next to nothing happens: {explored}");
                saw.extend(explored.saw);
            }
            Err(violation) => panic!("{violation}"),
        }
    }
    saw
}

#[test]
fn no_order_of_events_breaks_a_group_of_one_lane() {
    check(1, false);
}

#[test]
fn no_order_of_events_breaks_a_group_of_two_lanes() {
    let saw = check(2, false);
    let all = [
        "a lane without rows",
        "cut to its time",
        "decode rows beside prompts",
        "fatal",
        "held",
        "leave",
        "park",
        "record",
        "rest with work",
    ];
    assert_eq!(
        saw.into_iter().collect::<Vec<_>>(),
        all,
        "an exploration that does not come by proves nothing"
    );
}

#[test]
fn no_order_of_events_breaks_a_group_of_three_lanes() {
    check(3, false);
}

#[test]
fn no_order_of_events_breaks_a_group_of_four_lanes() {
    check(4, false);
}

#[test]
fn b_16_no_order_of_operations_of_one_or_two_lanes_loses_a_wake_up() {
    check(1, true);
    check(2, true);
}

#[test]
fn b_16_no_order_of_operations_of_three_lanes_loses_a_wake_up() {
    check(3, true);
}

#[test]
fn b_16_no_order_of_operations_of_four_lanes_loses_a_wake_up() {
    check(4, true);
}

#[test]
fn no_order_of_losses_breaks_a_group_of_one_lane() {
    let saw = check_supervised(1);
    for what in [
        "a ghost wakes",
        "a letter is withdrawn",
        "a letter to nobody",
        "diverged",
        "lost while stopping",
        "spent",
    ] {
        assert!(saw.contains(what), "no way leads to {what}: {saw:?}");
    }
}

#[test]
fn no_order_of_losses_breaks_a_group_of_two_lanes() {
    let saw = check_supervised(2);
    for what in ["a ghost wakes", "a loss while it forms", "formed again", "spent"] {
        assert!(saw.contains(what), "no way leads to {what}: {saw:?}");
    }
}

#[test]
fn no_order_of_losses_breaks_a_group_of_three_or_four_lanes() {
    let saw = check_supervised(3);
    assert!(saw.contains("formed again"), "{saw:?}");
    check_supervised(4);
}

#[test]
fn planted_faults_are_found_with_a_way_to_them() {
    let asleep = |broken: &Broken| matches!(broken, Broken::LostWakeUp | Broken::Deadlock);
    let diverged = |broken: &Broken| matches!(broken, Broken::Diverged(_));
    let rule = |broken: &Broken| matches!(broken, Broken::Rule(_));
    type Found = fn(&Broken) -> bool;
    let any = |broken: &Broken| matches!(broken, Broken::Rule(_) | Broken::Deadlock | Broken::LostWakeUp);
    let cases: [(Plant, Found); 14] = [
        (Plant::SkipsWithoutRows, asleep),
        (Plant::NeverRings, asleep),
        (Plant::LooksBeforeCounting, asleep),
        (Plant::OneBoard, diverged),
        (Plant::OwnBucket, diverged),
        (Plant::PausesAlone, rule),
        (Plant::MailBeforeCalls, rule),
        (Plant::WaitsStayOpen, any),
        (Plant::EveryComplaintCounts, rule),
        (Plant::StateKept, diverged),
        (Plant::MailForAnybody, rule),
        (Plant::SeatsKept, rule),
        (Plant::AnswersBeforeRed, rule),
        (Plant::LooksOnce, rule),
    ];
    for (plant, expected) in cases {
        let setup = planted(plant);
        let violation = setup.explore().expect_err("the fault is there");
        println!("{violation}");
        assert!(expected(&violation.broken), "{plant:?}: {violation}");
        assert!(violation.trace.len() > 2, "{violation}");
        // The same setup without the fault is sound.
        let sound = Setup { plant: None, ..setup };
        if let Err(violation) = sound.explore() {
            panic!("{violation}");
        }
    }
}
