//! Thousands of seeded worlds, and proof that they hold what they are meant to hold.

#![allow(clippy::unwrap_used, reason = "the exemption for tests stops at their helper functions")]

use atom_sim::{Report, WorldArgs, WorldOptions, run_seeds};
use std::ops::Range;

fn run(seeds: Range<u64>, lanes: usize, requests: usize, faults: bool) -> Report {
    let args = WorldArgs { lanes, requests, faults, ..WorldArgs::default() };
    run_seeds(seeds, &WorldOptions::new(args).unwrap())
}

#[test]
fn no_seed_breaks_a_rule() {
    for (lanes, requests, seeds) in
        [(1, 32, 0..1000), (2, 32, 1000..2000), (3, 40, 2000..2800), (4, 32, 3000..3800), (8, 64, 4000..4300)]
    {
        let report = run(seeds, lanes, requests, true);
        assert!(report.failures.is_empty(), "{report}");
    }
}

/// Everybody who is let in finishes, with the right answer, though caches are far too small for all.
#[test]
fn without_faults_everybody_finishes() {
    let report = run(0..800, 3, 40, false);
    assert!(report.failures.is_empty(), "{report}");
    let counts = report.counts;
    assert_eq!((counts.aborted, counts.lane_faults, counts.calamities), (0, 0, 0));
    assert!(counts.preemptions > 100, "{report}");
    assert!(counts.finished > 20 * counts.failed, "only a NaN fails a request here: {report}");
}

/// A world in which nothing happens proves nothing.
#[test]
fn worlds_hold_what_they_are_meant_to_hold() {
    let report = run(0..300, 3, 32, true);
    let c = report.counts;
    for (what, count) in [
        ("records", c.records),
        ("parks", c.parks),
        ("parks with work", c.pauses),
        ("steps with prompts held", c.held_steps),
        ("rows cut by a step's time", c.time_cut_rows),
        ("rows cut to an edge", c.edge_cut_rows),
        ("lane steps without rows", c.idle_lane_steps),
        ("refused", c.refused),
        ("finished", c.finished),
        ("aborted", c.aborted),
        ("failed", c.failed),
        ("preemptions", c.preemptions),
        ("lane faults", c.lane_faults),
        ("calamities", c.calamities),
        ("cached tokens", c.cached_tokens),
        ("padding rows", c.padding_rows),
    ] {
        assert!(count >= 20, "only {count} {what}:\n{report}");
    }
    assert_eq!(c.requests, c.refused + c.finished + c.aborted + c.failed, "{report}");
    assert!(report.buckets.len() > 10 && report.buckets.values().sum::<u64>() == c.steps, "{report}");
    assert!(report.next_token_us.min() > 0, "time passes: {report}");
}

#[test]
fn equal_seeds_give_equal_worlds_and_others_others() {
    let (once, again) = (run(0..40, 2, 32, true), run(0..40, 2, 32, true));
    assert_eq!((once.trace, once.counts), (again.trace, again.counts));
    assert_eq!(once.to_string(), again.to_string());
    assert_ne!(once.trace, run(1..41, 2, 32, true).trace);
}
