//! Invariant 10: the same bits alone or among others, in any lane, bucket, chunking, cache state, after a
//! preemption, with any number of threads. Padding is poisoned in all of these runs (invariant 5).
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_base::{LaneId, SamplingParams, TokenId};
use atom_engine::Request;
use common::{Answer, Setup, ask, mesh, request, send, tiny};

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|i| atom_base::rng::philox([i, 0, 0, 0], [seed, 0])[0] % 500).collect()
}

fn sampled(seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 0.9,
        top_p: 0.95,
        frequency_penalty: 0.3,
        repetition_penalty: 1.1,
        seed,
        logprobs: Some(3),
        ..SamplingParams::default()
    }
}

fn probe() -> Request {
    request(&prompt(7, 45), 30, sampled(42))
}

/// The answer of a host that does nothing else, with one thread.
fn alone() -> Answer {
    let answer = ask(&Setup::default().start(&tiny("llama")), probe());
    assert_eq!(answer.tokens.len(), 30);
    answer
}

#[test]
fn a_seeded_answer_is_the_same_among_63_others() {
    let setup = Setup { max_num_seqs: 64, rows_max: 128, threads: 2, ..Setup::default() };
    let host = setup.start(&tiny("llama"));
    let others: Vec<_> = (0..63)
        .map(|i| send(&host, request(&prompt(100 + i, 3 + i as usize % 50), 40, sampled(i.into()))))
        .collect();
    let among = ask(&host, probe());
    others.into_iter().for_each(|o| assert_eq!(o.wait().tokens.len(), 40));
    assert_eq!(among.bits(), alone().bits());
}

#[test]
fn a_seeded_answer_is_the_same_at_every_bucket_and_chunking() {
    let expected = alone().bits();
    for (rows_max, sizes) in [(16, None), (19, None), (64, Some(vec![64])), (256, Some(vec![200]))] {
        let setup = Setup { rows_max, sizes, ..Setup::default() };
        assert_eq!(ask(&setup.start(&tiny("llama")), probe()).bits(), expected, "steps of {rows_max}");
    }
}

#[test]
fn a_seeded_answer_is_the_same_cold_and_warm() {
    let host = Setup::default().start(&tiny("llama"));
    let cold = ask(&host, probe());
    let warm = ask(&host, probe());
    assert_eq!((cold.cached_tokens, warm.cached_tokens), (0, 32), "two full pages of 16 of a prompt of 45");
    assert_eq!(warm.bits(), cold.bits());
    assert_eq!(cold.bits(), alone().bits());
}

#[test]
fn a_seeded_answer_is_the_same_in_every_lane() {
    let host = Setup { mesh: mesh(1, 3, false), ..Setup::default() }.start(&tiny("llama"));
    for lane in 0..3 {
        let answer = ask(&host, Request { lane: Some(LaneId(lane)), ..probe() });
        assert_eq!(answer.bits(), alone().bits(), "lane {lane}");
    }
    let host = Setup { mesh: mesh(3, 1, true), ..Setup::default() }.start(&tiny("llama"));
    let answers: Vec<_> =
        (0..3).map(|lane| send(&host, Request { lane: Some(LaneId(lane)), ..probe() })).collect();
    let mut bits: Vec<_> = answers.into_iter().map(|a| a.wait().bits()).collect();
    bits.push(ask(&host, Request { lane: Some(LaneId(1)), ..probe() }).bits());
    assert!(bits.windows(2).all(|w| w[0] == w[1]), "lanes of one group");
}

#[test]
fn a_seeded_answer_survives_preemption() {
    // 14 pages of 16 for five requests that need 5 to 6 pages each.
    let setup = Setup { pages: 15, max_model_len: 128, ..Setup::default() };
    let host = setup.start(&tiny("llama"));
    let others: Vec<_> =
        (0..4).map(|i| send(&host, request(&prompt(200 + i, 40), 50, sampled(i.into())))).collect();
    let preempted = send(&host, probe()).wait();
    others.into_iter().for_each(|o| assert_eq!(o.wait().tokens.len(), 50));
    assert!(host.stats()[0].counters.preempted > 0, "nobody was preempted");
    assert_eq!(preempted.bits(), alone().bits());
}

#[test]
fn threads_do_not_change_a_bit() {
    for threads in [2, 3, 5] {
        let host = Setup { threads, ..Setup::default() }.start(&tiny("llama"));
        assert_eq!(ask(&host, probe()).bits(), alone().bits(), "{threads} threads");
    }
}
