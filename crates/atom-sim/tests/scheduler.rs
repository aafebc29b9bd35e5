//! One scheduler against the reference: whatever is asked of it and whatever it is granted.

#![allow(clippy::unwrap_used, reason = "the exemption for tests stops at their helper functions")]

mod common;

use atom_base::{RequestId, SamplingParams, StopParams, TokenId};
use atom_engine::{EngineLimits, Request, SchedulerConfig};
use atom_group::{Grant, Lattice, LatticeArgs};
use atom_sim::{Ending, FakeModel, Lane};
use common::{MODEL, config, lane, request};
use proptest::prelude::*;
use std::sync::Arc;

#[derive(Clone, Debug)]
enum Action {
    /// A stem, how much of it, tokens of its own, how many to generate, and which kind of sampling.
    Submit {
        stem: u32,
        shared: usize,
        own: Vec<TokenId>,
        max_tokens: u32,
        kind: u8,
    },
    Abort(usize),
    Preempt,
    Fail,
    /// A step with these shares (of 4) of what is wanted.
    Step {
        decode: u32,
        prefill: u32,
    },
}

fn action() -> impl Strategy<Value = Action> {
    let own = prop::collection::vec(0u32..3, 1..6);
    let submit =
        (0u32..2, 0usize..14, own, 0u32..9, any::<u8>()).prop_map(|(stem, shared, own, max_tokens, kind)| {
            Action::Submit { stem, shared, own, max_tokens, kind }
        });
    prop_oneof![
        4 => submit,
        1 => any::<usize>().prop_map(Action::Abort),
        1 => Just(Action::Preempt),
        12 => (0u32..=4, 0u32..=4).prop_map(|(decode, prefill)| Action::Step { decode, prefill }),
        12 => Just(Action::Step { decode: 4, prefill: 4 }),
        1 => (0u8..8).prop_map(|n| if n == 0 { Action::Fail } else { Action::Preempt }),
    ]
}

fn submission(id: u64, action: &Action) -> Option<Request> {
    let &Action::Submit { stem, shared, ref own, max_tokens, kind } = action else { return None };
    let prompt = (0..shared as u32).map(|i| (i * (stem + 1)) % 3).chain(own.iter().copied());
    let sampling = SamplingParams {
        seed: (kind % 2).into(),
        presence_penalty: if kind & 2 == 0 { 0.0 } else { 1.0 },
        logprobs: (kind & 4 != 0).then_some(1),
        prompt_logprobs: (kind & 24 == 24).then_some(0),
        ..SamplingParams::default()
    };
    Some(Request {
        id: RequestId(id),
        prompt: prompt.collect(),
        sampling: Arc::new(sampling),
        stop: StopParams { max_tokens, stop_token_ids: Box::new([1]), ignore_eos: kind & 32 != 0 },
        lane: None,
        session: None,
        grammar: None,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6000))]

    /// Caches of a few pages, requests for a multiple of them, and grants of any size.
    #[test]
    fn a_lane_agrees_with_the_reference(
        actions in prop::collection::vec(action(), 1..90),
        page_size in 1usize..5,
        spare_pages in 0usize..4,
        max_num_seqs in 1usize..6,
        spare_rows in 0usize..9,
        prefix_cache: bool,
        eos_per_mille in prop::sample::select(vec![0u32, 100]),
        nan_per_mille in prop::sample::select(vec![0u32, 0, 40]),
        depth in 0usize..2,
    ) {
        // The longest request just fits.
        let longest = 27usize;
        let config = SchedulerConfig {
            pages: longest.div_ceil(page_size) + spare_pages + 1,
            page_size,
            max_num_seqs,
            rows_max: max_num_seqs + spare_rows,
            max_model_len: longest,
            prefix_cache,
            eos: Box::new([2]),
        };
        let model = FakeModel { vocab: 3, eos: 2, eos_per_mille, nan_per_mille };
        let args = LatticeArgs { rows_max: config.rows_max as u32, max_num_seqs: max_num_seqs as u32, ..LatticeArgs::default() };
        let bucket = Lattice::new(&args).unwrap().top();
        let mut lane = Lane::new(config, model).at_depth(depth);
        // Records the bucket; nothing else happens.
        lane.step_alone(bucket).unwrap();
        let mut submitted = 0;
        for action in &actions {
            match action {
                Action::Submit { .. } => {
                    submitted += 1;
                    let request = submission(submitted, action).unwrap();
                    lane.submit(request, 0).unwrap();
                }
                Action::Abort(at) if submitted > 0 => {
                    lane.abort(RequestId(*at as u64 % submitted + 1)).unwrap();
                }
                Action::Abort(_) => {}
                Action::Preempt => { lane.preempt_youngest(); }
                Action::Fail => lane.fail("on purpose").unwrap(),
                Action::Step { decode, prefill } => {
                    let want = lane.want(0);
                    let grant = Grant {
                        decode_rows: want.decode_rows * decode / 4,
                        prefill_rows: want.prefill_rows * prefill / 4,
                    };
                    lane.commit(grant).unwrap();
                    lane.replay(bucket).unwrap();
                    lane.apply().unwrap();
                }
            }
        }
        lane.finish_alone(bucket).unwrap();
        lane.check_baseline().unwrap();
        lane.probe(bucket, 1 << 32).unwrap();
    }
}

/// 16 requests that need four times the cache, with one page more than the longest alone.
#[test]
fn an_oversubscribed_cache_preempts_and_everybody_finishes() {
    for page_size in [1, 2, 4, 8] {
        let pages = 64 / page_size + 1;
        let (mut lane, bucket) = lane(config(pages, page_size, 8, 16));
        for id in 1..=16 {
            let (prompt, generated) = (4 + id as usize % 5, 8 + id as u32 % 3);
            lane.submit(request(id, prompt, generated, SamplingParams::greedy()), 0).unwrap();
        }
        let needed: usize =
            lane.ledger().accounts().map(|a| a.request.prompt.len() + a.answer.tokens.len()).sum();
        assert!(needed >= 3 * 64, "{needed} positions");
        lane.finish_alone(bucket).unwrap();
        assert!(lane.ledger().accounts().all(|a| a.ended == Some(Ending::Length)));
        assert!(page_size == 8 || lane.counters().preempted > 0, "pages of {page_size}: nobody gave way");
        lane.check_baseline().unwrap();
    }
}

#[test]
fn a_repeated_prompt_reports_exactly_what_it_does_not_compute() {
    for page_size in [1, 3, 4, 16] {
        for tokens in 1..40 {
            let (mut lane, bucket) = lane(config(100, page_size, 4, 8));
            let mut rows = 0;
            for id in [1, 2] {
                let mut twin = request(1, tokens, 1, SamplingParams::greedy());
                twin.id = RequestId(id);
                lane.submit(twin, 0).unwrap();
                lane.finish_alone(bucket).unwrap();
                let cached = lane.ledger().account(RequestId(id)).unwrap().cached_tokens.unwrap() as usize;
                // Full pages, and one row at least is computed.
                let expected = if id == 1 { 0 } else { (tokens - 1) / page_size * page_size };
                assert_eq!(cached, expected, "{tokens} tokens in pages of {page_size}");
                let computed = lane.counters().rows as usize - rows;
                assert_eq!(computed, tokens - cached, "{tokens} tokens in pages of {page_size}");
                rows = lane.counters().rows as usize;
            }
        }
    }
}

/// A small one does not overtake a large one that waits for room.
#[test]
fn nobody_overtakes() {
    let (mut lane, bucket) = lane(config(17, 2, 8, 8));
    lane.submit(request(1, 20, 10, SamplingParams::greedy()), 0).unwrap();
    lane.submit(request(2, 24, 2, SamplingParams::greedy()), 0).unwrap();
    lane.submit(request(3, 1, 2, SamplingParams::greedy()), 0).unwrap();
    let mut first_rows = Vec::new();
    for step in 0.. {
        assert!(step < 1000, "{:?}", lane.counters());
        if lane.is_idle() {
            break;
        }
        lane.step_alone(bucket).unwrap();
        for owner in &lane.plan().owners {
            if !first_rows.contains(owner) {
                first_rows.push(*owner);
            }
        }
    }
    assert_eq!(first_rows, [RequestId(1), RequestId(2), RequestId(3)]);
}

/// Constant lack of pages: the oldest has a row in each step and is never computed again.
#[test]
fn the_oldest_never_gives_way() {
    let (mut lane, bucket) = lane(config(13, 1, 6, 6));
    for id in 1..=12 {
        lane.submit(request(id, 2, 9, SamplingParams::greedy()), 0).unwrap();
    }
    for step in 0.. {
        assert!(step < 1000, "{:?}", lane.counters());
        let Some(&oldest) = lane.ledger().live().first() else { break };
        lane.step_alone(bucket).unwrap();
        assert!(lane.plan().owners.contains(&oldest), "request {oldest} had no row");
    }
    assert!(lane.counters().preempted > 10);
    assert_eq!(lane.ledger().account(RequestId(1)).unwrap().admissions, 1);
}

#[test]
fn the_door_agrees_with_what_a_lane_can_finish() {
    let config = config(5, 2, 2, 4);
    let limits = EngineLimits {
        max_model_len: config.max_model_len,
        cache_tokens: 8,
        queue_max: 4,
        max_num_seqs: 2,
        vocab_size: MODEL.vocab as usize,
        lanes: 1,
        grammars: false,
    };
    for prompt in 1..=9 {
        for generated in 0..=9 {
            let request = request(1, prompt, generated, SamplingParams::greedy());
            let fits = prompt + generated as usize <= 8;
            assert_eq!(limits.check(&request).is_ok(), fits, "{prompt} and {generated}");
            if fits {
                let (mut lane, bucket) = lane(config.clone());
                lane.submit(request, 0).unwrap();
                lane.finish_alone(bucket).unwrap();
                lane.check_baseline().unwrap();
            }
        }
    }
}
