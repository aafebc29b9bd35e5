//! Preemption and abort, forced at every moment of a request's life.

#![allow(clippy::unwrap_used, reason = "the exemption for tests stops at their helper functions")]

mod common;

use atom_base::{RequestId, SamplingParams};
use atom_group::Bucket;
use atom_sim::{Ending, Lane};
use common::{config, lane, request, samplings};

/// Ten chunks of four rows, then ten tokens.
const PROMPT: usize = 39;
const GENERATED: u32 = 10;

fn subject(id: u64, sampling: &SamplingParams) -> atom_engine::Request {
    request(id, PROMPT, GENERATED, sampling.clone())
}

/// Steps of the request when nobody interferes.
fn undisturbed_steps(sampling: &SamplingParams, prefix_cache: bool) -> usize {
    let (mut lane, bucket) = small(prefix_cache);
    lane.submit(subject(1, sampling), 0).unwrap();
    for steps in 0..100 {
        if lane.is_idle() {
            return steps;
        }
        lane.step_alone(bucket).unwrap();
    }
    panic!("{:?}", lane.counters());
}

fn small(prefix_cache: bool) -> (Lane, Bucket) {
    let mut config = config(33, 2, 4, 4);
    config.prefix_cache = prefix_cache;
    lane(config)
}

fn ended(lane: &Lane, id: u64) -> (Option<Ending>, usize, usize) {
    let account = lane.ledger().account(RequestId(id)).unwrap();
    (account.ended, account.scored, account.tokens)
}

/// The ledger compares each token with the reference, so it is enough that all of them came.
#[test]
fn preemption_before_any_two_steps_loses_and_repeats_nothing() {
    for prefix_cache in [true, false] {
        for sampling in samplings() {
            let steps = undisturbed_steps(&sampling, prefix_cache);
            assert!(steps >= 19, "{steps} steps: ten chunks, ten tokens, the first with the last chunk");
            let scored = if sampling.prompt_logprobs.is_some() { PROMPT - 1 } else { 0 };
            for first in 0..steps {
                for second in first..steps {
                    let (mut lane, bucket) = small(prefix_cache);
                    lane.submit(subject(1, &sampling), 0).unwrap();
                    for step in 0.. {
                        // Its first step brings it in: before, there is nobody who could give way.
                        let forced = step == first || step == second;
                        assert_eq!(forced && lane.preempt_youngest(), forced && step > 0);
                        if lane.is_idle() {
                            break;
                        }
                        lane.step_alone(bucket).unwrap();
                        assert!(step < 10 * steps, "preempted before {first} and {second}: no end");
                    }
                    let all = (Some(Ending::Length), scored, GENERATED as usize);
                    assert_eq!(ended(&lane, 1), all, "preempted before {first} and {second}");
                    lane.check_baseline().unwrap();
                }
            }
        }
    }
}

/// Waiting, in each chunk, at each token, and after a preemption.
#[test]
fn abort_before_any_step_returns_everything() {
    for sampling in samplings() {
        let steps = undisturbed_steps(&sampling, true);
        for moment in 0..steps {
            for preempted in [false, true] {
                let (mut lane, bucket) = small(true);
                lane.submit(subject(1, &sampling), 0).unwrap();
                for _ in 0..moment {
                    lane.step_alone(bucket).unwrap();
                }
                if preempted {
                    assert_eq!(lane.preempt_youngest(), moment > 0);
                }
                assert_eq!(lane.abort(RequestId(1)), Ok(true));
                assert_eq!(ended(&lane, 1).0, Some(Ending::Aborted), "aborted before step {moment}");
                lane.check_baseline().unwrap();
                assert_eq!(lane.abort(RequestId(1)), Ok(false));
                lane.probe(bucket, 100).unwrap();
            }
        }
    }
}

/// The same with neighbours that share its prefix, run beside it, and wait behind it.
#[test]
fn abort_before_any_step_leaves_the_neighbours_right() {
    for sampling in samplings() {
        for moment in 0..40 {
            let (mut lane, bucket) = small(true);
            let twin = |id| atom_engine::Request { id: RequestId(id), ..subject(1, &sampling) };
            for id in 1..=5 {
                lane.submit(twin(id), 0).unwrap();
            }
            for _ in 0..moment {
                lane.step_alone(bucket).unwrap();
            }
            lane.abort(RequestId(2)).unwrap();
            lane.finish_alone(bucket).unwrap();
            for id in [1, 3, 4, 5] {
                let (ending, _, tokens) = ended(&lane, id);
                assert_eq!((ending, tokens), (Some(Ending::Length), GENERATED as usize), "request {id}");
            }
            lane.check_baseline().unwrap();
        }
    }
}

#[test]
fn failing_everybody_before_any_step_returns_everything() {
    for moment in 0..40 {
        let (mut lane, bucket) = small(true);
        for id in 1..=6 {
            lane.submit(subject(id, &samplings()[id as usize % 3]), 0).unwrap();
        }
        for _ in 0..moment {
            lane.step_alone(bucket).unwrap();
        }
        lane.fail("on purpose").unwrap();
        lane.check_baseline().unwrap();
        lane.probe(bucket, 100).unwrap();
    }
}
