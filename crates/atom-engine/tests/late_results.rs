//! Results that come after the slot that they were computed for went to somebody else.

#![allow(clippy::unwrap_used, reason = "the exemption for tests stops at their helper functions")]

use atom_base::{RequestId, SamplingParams, ScoredToken, StopParams, TokenId};
use atom_engine::{Plan, Request, Scheduler, SchedulerConfig};
use atom_group::Grant;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

fn request(id: u64) -> Request {
    Request {
        id: RequestId(id),
        prompt: [1 as TokenId, 2, 3].into(),
        sampling: Arc::new(SamplingParams::default()),
        stop: StopParams { max_tokens: 8, ..StopParams::default() },
        lane: None,
        session: None,
    }
}

/// B-76: the results of a step were applied to whoever held the slots by then. Steps are applied before
/// anybody gives way today; whoever changes that must not get tokens into another request.
#[test]
fn b_76_a_late_result_of_a_preempted_request_reaches_nobody() {
    let config = SchedulerConfig {
        pages: 17,
        page_size: 2,
        max_num_seqs: 1,
        rows_max: 8,
        max_model_len: 16,
        prefix_cache: false,
        eos: Box::new([]),
    };
    let mut scheduler = Scheduler::new(config);
    let mut events = Vec::new();
    let (mut late, mut plan) = (Plan::default(), Plan::default());
    scheduler.submit(request(1), 0, &mut events);
    scheduler.commit(Grant { decode_rows: 0, prefill_rows: 3 }, &mut late);
    assert_eq!(late.out.len(), 1, "the first token is on its way");
    assert!(scheduler.preempt_youngest());
    assert!(scheduler.abort(RequestId(1), &mut events));
    scheduler.submit(request(2), 0, &mut events);
    scheduler.commit(Grant { decode_rows: 0, prefill_rows: 3 }, &mut plan);
    assert_eq!(plan.spans[0].slot, late.spans[0].slot, "the slot changed hands");
    events.clear();
    let applied = catch_unwind(AssertUnwindSafe(|| {
        scheduler.apply(&late, &[ScoredToken::bare(7)], &mut events);
    }));
    assert!(applied.is_err() && events.is_empty(), "request 2 heard what was computed for 1: {events:?}");
}
