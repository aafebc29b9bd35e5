//! A bounded piece of what the example `soak` does for as long as somebody wants.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;
#[path = "common/soak.rs"]
mod soak;

#[test]
fn load_with_aborts_preemption_pauses_and_lost_ranks_leaves_every_answer_right() {
    let totals = soak::soak(1, |totals| totals.finished < 7000);
    let soak::Totals { aborted, lost, faults, stuck, slow, pauses, preempted, rests, .. } = totals;
    let all = [aborted, lost, faults, stuck, slow, pauses, preempted, rests];
    assert!(all.iter().all(|&count| count > 0), "something never happened: {totals:?}");
}
