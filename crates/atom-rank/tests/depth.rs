//! A step that is planned while the one before is in flight changes no bit of anybody's answer, whatever
//! ends, gives way, is aborted or is lost meanwhile.

#![allow(clippy::unwrap_used, reason = "the exemption for tests stops at their helper functions")]

mod common;

use atom_base::{SamplingParams, StopParams, TokenId};
use atom_engine::Request;
use common::{Setup, expert_parallel, mesh, request, rest, send, tiny};

/// Requests of all kinds: greedy and sampled, penalties, log-probabilities, stop tokens, scores of prompts.
fn requests() -> impl Iterator<Item = Request> {
    (0..40u32).map(|i| {
        let sampling = SamplingParams {
            temperature: if i % 3 == 0 { 0.0 } else { 0.9 },
            seed: i.into(),
            presence_penalty: if i % 4 == 1 { 0.7 } else { 0.0 },
            repetition_penalty: if i % 4 == 2 { 1.2 } else { 1.0 },
            logprobs: (i % 5 == 0).then_some(3),
            prompt_logprobs: (i % 7 == 0).then_some(2),
            ..SamplingParams::default()
        };
        let text: Vec<TokenId> =
            (0..2 + i * 5 % 70).map(|at| (at * at * 31 + at * 7 + i * 13) % 256).collect();
        let mut made = request(&text, 1 + i * 7 % 45, sampling);
        // Some of these come: who stops early has a row in flight.
        let stop_token_ids = if i % 2 == 0 { (0..64).collect() } else { Box::default() };
        made.stop = StopParams { stop_token_ids, ..made.stop };
        made
    })
}

fn answers(setup: &Setup, model: &str) -> (Vec<Vec<(TokenId, u32)>>, u64) {
    let host = setup.start(&tiny(model));
    let sent: Vec<_> = requests().map(|request| send(&host, request)).collect();
    let bits = sent.into_iter().map(|sent| sent.wait().bits()).collect();
    rest(&host);
    let stats = host.stats();
    host.shutdown().unwrap();
    (bits, stats.iter().map(|lane| lane.counters.preempted).sum())
}

#[test]
fn answers_at_depth_1_have_the_bits_of_depth_0() {
    let small = Setup { max_num_seqs: 6, rows_max: 48, max_model_len: 160, pages: 90, ..Setup::default() };
    let layouts = [
        ("llama", "one rank", Setup { ..small.clone() }),
        ("llama", "a full cache", Setup { pages: 12, ..small.clone() }),
        ("llama", "TP2", Setup { mesh: mesh(2, 1, false), pages: 12, ..small.clone() }),
        ("qwen3_moe", "DEP4", Setup { mesh: mesh(4, 1, true), experts: expert_parallel(), ..small.clone() }),
    ];
    for (model, name, setup) in layouts {
        let (expected, _) = answers(&setup, model);
        let (got, preempted) = answers(&Setup { depth: 1, ..setup.clone() }, model);
        for (at, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert_eq!(got, expected, "{name}: request {at}");
        }
        assert!(setup.pages > 12 || preempted > 0, "{name}: nobody gave way");
    }
}
