//! Logits and greedy tokens against an independent implementation, through the whole host: scheduler,
//! chunked prefill, paged cache, recordings, sampling.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_base::{SamplingParams, TokenId};
use atom_model::{ExchangeChoice, ExpertLayout};
use atom_rank::Host;
use common::{Setup, ask, expert_parallel, golden, greedy, ids, mesh, reference, request, tensors, tiny};

const MODELS: &[&str] =
    &["llama", "llama_tied", "llama_bias", "qwen2", "qwen2_untied", "qwen3", "qwen3_tied"];
const MIXTURES: &[&str] = &["qwen3_moe", "qwen3_moe_unnormalised", "mixtral", "glm4_moe", "minimax_m2"];
const PROMPTS: &[&str] = &["short", "chat", "long"];
/// Absolute, in f32; logits have a standard deviation of about 3.
const BOUND: f32 = 1e-3;

fn scoring(top: u8) -> SamplingParams {
    SamplingParams { prompt_logprobs: Some(top), logprobs: Some(top), ..SamplingParams::greedy() }
}

fn check(name: &str, setup: &Setup) {
    let checkpoint = tiny(name);
    let host = setup.start(&checkpoint);
    let reference = reference(name);
    let tensors = tensors(&golden(name).join("reference.safetensors"));
    for prompt_name in PROMPTS {
        let prompt = &reference["prompts"][prompt_name];
        let (tokens, expected) = (ids(&prompt["ids"]), ids(&prompt["greedy"]));
        assert_eq!(greedy(&host, &tokens, 24), expected, "{name} {prompt_name}: greedy tokens");
        let answer = ask(&host, request(&tokens, 24, scoring(8)));
        assert_eq!(answer.ids(), expected, "{name} {prompt_name}: greedy tokens while scoring");
        let top = |kind: &str| &tensors[&format!("{prompt_name}.{kind}")];
        let rows = answer.prompt.iter().zip(top("top_ids").chunks(8).zip(top("top_logits").chunks(8)));
        for (position, (scored, (ids, logits))) in rows.enumerate() {
            same_row(
                scored.top.as_slice(),
                ids,
                logits,
                &format!("{name} {prompt_name} position {position}"),
            );
        }
        let rows =
            answer.tokens.iter().zip(top("greedy_top_ids").chunks(8).zip(top("greedy_top_logits").chunks(8)));
        for (step, (scored, (ids, logits))) in rows.enumerate() {
            same_row(scored.top.as_slice(), ids, logits, &format!("{name} {prompt_name} greedy {step}"));
        }
    }
    last_row_in_full(&host, name, &reference, &tensors["chat.last_logits"]);
}

/// Log-probabilities are logits less a constant of the row: compared by their differences to the first.
fn same_row(found: &[(TokenId, f32)], ids: &[f32], logits: &[f32], at: &str) {
    assert_eq!(found.len(), 8, "{at}");
    for (id, logit) in ids.iter().zip(logits) {
        // Near-equal logits may change places; the value is what counts.
        let Some((_, logprob)) = found.iter().find(|(token, _)| *token == *id as TokenId) else {
            let last = found[7].1 - found[0].1;
            assert!((last - (logit - logits[0])).abs() < BOUND, "{at}: token {id} is missing");
            continue;
        };
        let difference = (logprob - found[0].1) - (logit - logits[0]);
        assert!(difference.abs() < BOUND, "{at}: token {id} differs by {difference}");
    }
}

/// Every token of the vocabulary scored after the chat prompt, against all 512 reference logits.
fn last_row_in_full(host: &Host, name: &str, reference: &serde_json::Value, last_logits: &[f32]) {
    let prompt = ids(&reference["prompts"]["chat"]["ids"]);
    let logits = &last_logits[3 * 512..];
    let most = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - most).exp()).sum();
    let norm = f64::from(most) + sum.ln();
    for (token, &logit) in logits.iter().enumerate() {
        let mut prompt = prompt.clone();
        prompt.push(token as TokenId);
        let answer = ask(
            host,
            request(&prompt, 0, SamplingParams { prompt_logprobs: Some(0), ..SamplingParams::greedy() }),
        );
        let found = f64::from(answer.prompt.last().unwrap().logprob);
        let difference = found - (f64::from(logit) - norm);
        assert!(difference.abs() < f64::from(BOUND), "{name}: token {token} differs by {difference}");
    }
}

#[test]
fn every_family_agrees_with_the_reference() {
    for name in MODELS.iter().chain(MIXTURES) {
        check(name, &Setup::default());
    }
}

/// `-tp N --enable-dp-attention` and one expert layout.
fn group(ranks: u16, expert_parallel: bool, exchange: ExchangeChoice) -> Setup {
    let experts = ExpertLayout { expert_parallel, exchange };
    Setup { mesh: mesh(ranks, 1, true), experts, ..Setup::default() }
}

/// DTP2, DTP4 and DTP8: every rank has a slice of each expert.
#[test]
fn slices_of_experts_in_every_rank_agree_with_the_reference() {
    for name in MIXTURES {
        check(name, &group(2, false, ExchangeChoice::Auto));
    }
    check("mixtral", &Setup { threads: 2, ..group(4, false, ExchangeChoice::Gather) });
    check("qwen3_moe", &group(8, false, ExchangeChoice::Auto));
    check("glm4_moe", &group(8, false, ExchangeChoice::Gather));
}

/// DEP2, DEP4 and DEP8: every rank has some experts whole; both exchanges.
#[test]
fn whole_experts_spread_over_ranks_agree_with_the_reference() {
    for name in MIXTURES {
        check(name, &group(2, true, ExchangeChoice::Dispatch));
        check(name, &group(4, true, ExchangeChoice::Gather));
    }
    check("glm4_moe", &Setup { threads: 2, ..group(4, true, ExchangeChoice::Auto) });
    check("qwen3_moe", &group(8, true, ExchangeChoice::Auto));
    check("minimax_m2", &group(8, true, ExchangeChoice::Gather));
    // Uneven: 8 experts over 3 ranks.
    check("mixtral", &group(3, true, ExchangeChoice::Dispatch));
}

/// Experts without DP attention: the ranks of one lane share rows, and the sum over the lane is all.
#[test]
fn experts_within_a_lane_agree_with_the_reference() {
    for name in MIXTURES {
        check(name, &Setup { mesh: mesh(2, 1, false), ..Setup::default() });
        check(name, &Setup { mesh: mesh(2, 1, false), experts: expert_parallel(), ..Setup::default() });
    }
    // More ranks than key/value heads: norms over all heads count shared ones alike.
    check("minimax_m2", &Setup { mesh: mesh(4, 1, false), ..Setup::default() });
}

#[test]
fn the_published_spelling_of_a_config_is_the_same_model() {
    let read = |file| {
        let text = std::fs::read_to_string(golden("llama").join(file)).unwrap();
        atom_weights::Checkpoint::synthetic(&text, 1).unwrap().config().clone()
    };
    assert_eq!(read("config.json"), read("config.published.json"));
}

#[test]
fn tensor_parallel_agrees_with_the_reference() {
    check("llama", &Setup { mesh: mesh(2, 1, false), ..Setup::default() });
    check("llama_bias", &Setup { mesh: mesh(2, 1, false), ..Setup::default() });
    check("llama_tied", &Setup { mesh: mesh(3, 1, false), ..Setup::default() });
    check("qwen2", &Setup { mesh: mesh(4, 1, false), ..Setup::default() });
    check("qwen3", &Setup { mesh: mesh(2, 2, false), threads: 2, ..Setup::default() });
}

#[test]
fn dp_attention_agrees_with_the_reference() {
    check("llama", &Setup { mesh: mesh(2, 1, true), ..Setup::default() });
    check("llama_bias", &Setup { mesh: mesh(3, 1, true), ..Setup::default() });
    check("qwen3_tied", &Setup { mesh: mesh(4, 1, true), threads: 2, ..Setup::default() });
}

#[test]
fn chunks_of_any_size_agree_with_the_reference() {
    for (rows_max, page_size) in [(16, 16), (17, 32), (301, 64)] {
        check("qwen2", &Setup { rows_max, page_size, threads: 2, ..Setup::default() });
    }
}
