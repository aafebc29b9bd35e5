//! Faults that were found, each by its name.

use atom_base::{FinishReason, RequestId, SamplingParams, ScoredToken, StopParams, TokenId};
use atom_engine::{EngineError, Event, Pages, Plan, Prefix, Request, Scheduler, SchedulerConfig, Want};
use atom_group::{Facts, FactsFlags, Grant};
use std::sync::Arc;

const ID: RequestId = RequestId(1);

struct Lane {
    scheduler: Scheduler,
    plan: Plan,
    events: Vec<(RequestId, Event)>,
}

impl Lane {
    fn new(max_num_seqs: usize, rows_max: usize) -> Self {
        let config = SchedulerConfig {
            pages: 65,
            page_size: 2,
            max_num_seqs,
            rows_max,
            max_model_len: 64,
            prefix_cache: true,
            eos: Box::new([]),
        };
        Self { scheduler: Scheduler::new(config), plan: Plan::default(), events: Vec::new() }
    }

    fn submit(&mut self, id: RequestId, prompt: usize, max_tokens: u32, prompt_logprobs: Option<u8>) {
        let request = Request {
            id,
            prompt: (0..prompt as TokenId).collect(),
            sampling: Arc::new(SamplingParams { prompt_logprobs, ..SamplingParams::default() }),
            stop: StopParams { max_tokens, ..StopParams::default() },
            lane: None,
            session: None,
            grammar: None,
        };
        self.scheduler.submit(request, 0, &mut self.events);
    }

    /// Commits all that is wanted; the token at `nan`, if it has logits, is not a number.
    fn step(&mut self, nan: Option<u32>) {
        let Want { decode_rows, prefill_rows, .. } = self.scheduler.want(0);
        self.scheduler.commit(Grant { decode_rows, prefill_rows }, &mut self.plan);
        let result = |row: &atom_base::OutRow| {
            let is_nan = nan == Some(row.position);
            if is_nan { ScoredToken::NOT_A_NUMBER } else { ScoredToken::bare(row.target.unwrap_or(7)) }
        };
        let results: Vec<_> = self.plan.out.iter().map(result).collect();
        self.scheduler.apply(&self.plan, &results, &mut self.events);
    }

    fn heard(&self) -> Vec<&Event> {
        self.events.iter().map(|(_, event)| event).collect()
    }
}

/// `Failed` was followed by `Finished` when the last row of a scored prompt was the NaN.
#[test]
fn a_nan_in_the_last_scored_row_ended_a_request_twice() {
    let mut lane = Lane::new(8, 8);
    lane.submit(ID, 4, 0, Some(0));
    lane.step(Some(3));
    let failed = Event::Failed(EngineError::NotANumber { position: 3 });
    let heard = lane.heard();
    assert!(
        matches!(
            heard[..],
            [Event::Started { .. }, Event::PromptScored { index: 1, .. }, Event::PromptScored { index: 2, .. }, last]
                if *last == failed
        ),
        "{heard:?}"
    );
    assert_eq!(lane.scheduler.counters().finished, 1);
}

/// Scores of later rows of the same chunk came after `Failed`.
#[test]
fn a_nan_in_the_middle_of_a_chunk_was_followed_by_scores() {
    let mut lane = Lane::new(8, 8);
    lane.submit(ID, 6, 2, Some(0));
    lane.step(Some(2));
    let failed = Event::Failed(EngineError::NotANumber { position: 2 });
    let heard = lane.heard();
    assert!(
        matches!(
            heard[..],
            [Event::Started { .. }, Event::PromptScored { index: 1, .. }, last] if *last == failed
        ),
        "{heard:?}"
    );
    assert!(lane.scheduler.is_idle());
}

/// A chunk that led to NaN stayed findable, so that a passing fault would fail its prompt for ever.
#[test]
fn pages_behind_a_nan_stayed_in_the_prefix_cache() {
    let mut lane = Lane::new(8, 8);
    lane.submit(ID, 6, 1, None);
    lane.step(Some(6));
    assert_eq!(lane.scheduler.counters().pages_kept, 0);
    lane.submit(RequestId(2), 6, 1, None);
    lane.events.clear();
    lane.step(None);
    assert_eq!(lane.heard()[0], &Event::Started { cached_tokens: 0 });
    assert_eq!(lane.heard().last(), Some(&&Event::Finished(FinishReason::Length)));
}

/// Scored prompts wanted rows for which they had no logits left: the whole group computed padding.
#[test]
fn a_scored_prompt_wanted_rows_that_it_could_not_use() {
    let mut lane = Lane::new(4, 32);
    lane.submit(ID, 40, 1, Some(0));
    lane.submit(RequestId(2), 40, 1, Some(0));
    while !lane.scheduler.is_idle() {
        let Want { decode_rows, prefill_rows, .. } = lane.scheduler.want(0);
        lane.step(None);
        assert_eq!(lane.plan.rows(), (decode_rows + prefill_rows) as usize, "what is wanted is used");
    }
}

/// Decoding took the last pages that the want had counted for an admission.
#[test]
fn a_want_counted_pages_that_decoding_takes_first() {
    let config = SchedulerConfig {
        pages: 7,
        page_size: 1,
        max_num_seqs: 4,
        rows_max: 8,
        max_model_len: 6,
        prefix_cache: false,
        eos: Box::new([]),
    };
    let mut lane = Lane { scheduler: Scheduler::new(config), ..Lane::new(4, 8) };
    lane.submit(ID, 1, 4, None);
    lane.step(None);
    // One page is held; the next row takes one, and one more stays in reserve.
    lane.submit(RequestId(2), 4, 2, None);
    let want = lane.scheduler.want(0);
    assert_eq!((want.decode_rows, want.prefill_rows), (1, 0));
    lane.step(None);
    assert_eq!(lane.plan.rows(), 1);
}

/// A panic with the pool locked made each lease panic again while it was dropped: the process aborted,
/// and with it every lane that was well.
#[test]
fn a_panic_in_one_lane_aborted_the_process() {
    let panicked = std::panic::catch_unwind(|| {
        let mut lease = Pages::new(3, 2).lease(1);
        assert!(lease.grow());
        lease.seal(1, Prefix::default());
    });
    assert!(panicked.is_err(), "there is no page 1");
}

/// A lane whose prompts are held: nobody new is let in, and what was begun stays first (a predecessor
/// queued it again at the end).
#[test]
fn a_held_prompt_lost_its_place() {
    let mut lane = Lane::new(4, 8);
    lane.submit(ID, 2, 8, None);
    lane.step(None);
    for id in 2..=4 {
        lane.submit(RequestId(id), 20, 4, None);
    }
    lane.step(None);
    let before = lane.scheduler.want(0);
    assert!(before.partial && before.kv_per_mille > 0 && before.prefill_rows == 7, "{before:?}");
    let counters = lane.scheduler.counters();
    for _ in 0..3 {
        let decode_rows = lane.scheduler.want(0).decode_rows;
        lane.scheduler.commit(Grant { decode_rows, prefill_rows: 0 }, &mut lane.plan);
        assert_eq!((lane.plan.owners.as_slice(), lane.plan.rows()), (&[ID][..], 1), "decode goes on alone");
        let results: Vec<_> = lane.plan.out.iter().map(|_| ScoredToken::bare(7)).collect();
        lane.scheduler.apply(&lane.plan, &results, &mut lane.events);
    }
    let after = lane.scheduler.counters();
    assert_eq!((after.running, after.waiting, after.admitted), (counters.running, counters.waiting, 2));
    lane.step(None);
    assert_eq!(lane.plan.owners, [ID, RequestId(2)], "what was begun goes on first");
    let span = lane.plan.spans[1];
    assert_eq!((span.start, span.rows), (9, 7), "where it was: a page was cached, a chunk computed");
}

#[test]
fn a_want_says_what_the_group_must_know() {
    let mut lane = Lane::new(4, 8);
    let facts = lane.scheduler.want(0).facts();
    assert_eq!(facts, Facts::default(), "an idle lane has nothing to say");
    lane.submit(ID, 20, 4, None);
    let facts = lane.scheduler.want(0).facts();
    assert_eq!((facts.decode_rows, facts.prefill_rows, facts.kv_per_mille), (0, 8, 0));
    assert!(!facts.flags.has(FactsFlags::PARTIAL), "it has not begun");
    lane.step(None);
    let facts = lane.scheduler.want(0).facts();
    // 10 of 64 pages, taken at once.
    assert_eq!((facts.prefill_rows, facts.kv_per_mille), (8, 156));
    assert!(facts.flags.has(FactsFlags::PARTIAL));
    while !lane.scheduler.is_idle() {
        lane.step(None);
    }
    assert_eq!(lane.scheduler.want(0).facts(), Facts::default());
}
