//! Results that come after the request that they were computed for has ended or given way.

#![allow(clippy::unwrap_used, reason = "the exemption for tests stops at their helper functions")]

use atom_base::{FinishReason, RequestId, SamplingParams, ScoredToken, StopParams, TokenId, last_of};
use atom_engine::{Event, Plan, Request, Scheduler, SchedulerConfig, Want};
use atom_group::Grant;
use std::sync::Arc;

/// A lane that plans a step while the one before is in flight.
struct Lane {
    scheduler: Scheduler,
    events: Vec<(RequestId, Event)>,
}

impl Lane {
    fn new(pages: usize, max_num_seqs: usize) -> Self {
        let config = SchedulerConfig {
            pages,
            page_size: 2,
            max_num_seqs,
            rows_max: 8,
            max_model_len: 16,
            prefix_cache: false,
            eos: Box::new([EOS]),
        };
        Self { scheduler: Scheduler::new(config), events: Vec::new() }
    }

    fn submit(&mut self, id: u64, max_tokens: u32) {
        let request = Request {
            id: RequestId(id),
            prompt: [1 as TokenId, 2, 3].into(),
            sampling: Arc::new(SamplingParams::default()),
            stop: StopParams { max_tokens, ..StopParams::default() },
            lane: None,
            session: None,
            grammar: None,
        };
        self.scheduler.submit(request, 0, &mut self.events);
    }

    /// Plans all that is wanted.
    fn commit(&mut self) -> Plan {
        let Want { decode_rows, prefill_rows, .. } = self.scheduler.want(0);
        let mut plan = Plan::default();
        self.scheduler.commit(Grant { decode_rows, prefill_rows }, &mut plan);
        plan
    }

    /// The step chose `token` everywhere.
    fn apply(&mut self, plan: &Plan, token: TokenId) -> Vec<(u64, Event)> {
        let results = vec![ScoredToken::bare(token); plan.out.len()];
        self.scheduler.apply(plan, &results, &mut self.events);
        self.events.drain(..).map(|(id, event)| (id.0, event)).collect()
    }
}

/// B-76: the results of a step were applied to whoever held the slots by then.
#[test]
fn b_76_a_late_result_of_a_preempted_request_reaches_nobody() {
    let mut lane = Lane::new(17, 1);
    lane.submit(1, 8);
    let late = lane.commit();
    assert_eq!(late.out.len(), 1, "the first token is on its way");
    assert!(lane.scheduler.preempt_youngest());
    assert!(lane.scheduler.abort(RequestId(1), &mut lane.events));
    lane.submit(2, 8);
    lane.events.clear();
    assert_eq!(lane.commit().rows(), 0, "the slot and its pages are taken until the step is applied");
    assert_eq!(lane.scheduler.counters().leaving, 1);
    assert_eq!(lane.apply(&late, 7), [], "request 2 heard what was computed for 1");
    let plan = lane.commit();
    assert_eq!(plan.spans[0].slot, late.spans[0].slot, "the slot changes hands");
    assert!(matches!(lane.apply(&plan, 9)[..], [(2, Event::Started { .. }), (2, Event::Token(_))]));
}

/// Who ended by a token has one more row in flight: what that computes is dropped, and until then nobody
/// gets the pages that it writes.
#[test]
fn the_row_behind_an_end_token_reaches_nobody() {
    let mut lane = Lane::new(17, 2);
    lane.submit(1, 8);
    let first = lane.commit();
    let ghost = lane.commit();
    let slot = first.spans[0].slot;
    assert_eq!((&ghost.tokens[..], &ghost.positions[..]), (&[last_of(slot)][..], &[3][..]));
    let heard = lane.apply(&first, EOS);
    assert!(matches!(heard[..], [(1, Event::Started { .. }), (1, Event::Finished(FinishReason::Stop))]));
    let counters = lane.scheduler.counters();
    assert_eq!((counters.running, counters.leaving, counters.pages_held), (0, 1, 2));
    assert!(!lane.scheduler.is_idle());
    assert_eq!(lane.apply(&ghost, 7), []);
    let counters = lane.scheduler.counters();
    assert_eq!((counters.leaving, counters.pages_held, counters.finished), (0, 0, 1));
    assert!(lane.scheduler.is_idle());
}

/// How many tokens a request may have is known beforehand: no row follows the last one.
#[test]
fn no_row_is_planned_behind_the_last_token() {
    let mut lane = Lane::new(17, 2);
    lane.submit(1, 2);
    let first = lane.commit();
    let second = lane.commit();
    assert_eq!((first.rows(), second.rows()), (3, 1));
    assert_eq!(lane.commit().rows(), 0, "two tokens are on their way");
    lane.apply(&first, 7);
    let heard = lane.apply(&second, 7);
    assert!(matches!(heard[..], [(1, Event::Token(_)), (1, Event::Finished(FinishReason::Length))]));
    assert!(lane.scheduler.is_idle());
}

/// A full cache with a step in flight: the youngest gives way once and for one only, and its pages are
/// waited for.
#[test]
fn nobody_else_gives_way_while_pages_are_on_their_way_back() {
    // Two requests of two pages each, and one page for the first that grows.
    let mut lane = Lane::new(8, 3);
    (1..=3).for_each(|id| lane.submit(id, 8));
    let first = lane.commit();
    assert_eq!(first.spans.len(), 2, "a page in reserve for everybody who runs");
    let mut steps = std::collections::VecDeque::from([first]);
    while lane.scheduler.counters().preempted == 0 {
        steps.push_back(lane.commit());
        let done = steps.pop_front().unwrap();
        lane.apply(&done, 7);
        assert!(lane.scheduler.counters().generated_tokens < 32, "the cache never fills");
    }
    assert_eq!(lane.scheduler.counters().preempted, 1);
    for _ in 0..200 {
        steps.push_back(lane.commit());
        let done = steps.pop_front().unwrap();
        lane.apply(&done, 7);
    }
    let counters = lane.scheduler.counters();
    assert_eq!((counters.finished, counters.generated_tokens, counters.leaving), (3, 24, 0));
    assert!(lane.scheduler.is_idle());
}

const EOS: TokenId = 5;
