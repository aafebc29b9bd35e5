//! Logits and greedy tokens of the golden models against their references, on whatever backend a host runs.

use super::{ask, golden, greedy, ids, reference, request, tensors};
use atom_base::{SamplingParams, TokenId};
use atom_rank::Host;

pub const MODELS: &[&str] =
    &["llama", "llama_tied", "llama_bias", "qwen2", "qwen2_untied", "qwen3", "qwen3_tied"];
pub const MIXTURES: &[&str] = &["qwen3_moe", "qwen3_moe_unnormalised", "mixtral", "glm4_moe", "minimax_m2"];
const PROMPTS: &[&str] = &["short", "chat", "long"];
/// Absolute, in f32; logits have a standard deviation of about 3.
const BOUND: f32 = 1e-3;

fn scoring(top: u8) -> SamplingParams {
    SamplingParams { prompt_logprobs: Some(top), logprobs: Some(top), ..SamplingParams::greedy() }
}

/// Three prompts scored and continued, and one row of logits in full.
pub fn check(name: &str, host: &Host) {
    let reference = reference(name);
    let tensors = tensors(&golden(name).join("reference.safetensors"));
    for prompt_name in PROMPTS {
        let prompt = &reference["prompts"][prompt_name];
        let (tokens, expected) = (ids(&prompt["ids"]), ids(&prompt["greedy"]));
        assert_eq!(greedy(host, &tokens, 24), expected, "{name} {prompt_name}: greedy tokens");
        let answer = ask(host, request(&tokens, 24, scoring(8)));
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
    last_row_in_full(host, name, &reference, &tensors["chat.last_logits"]);
}

/// How far a host's scores of the prompts lie from the reference, in logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distance {
    pub mean: f32,
    pub worst: f32,
}

/// Over the reference's eight best tokens of each position that the host has among its own eight.
pub fn distance(name: &str, host: &Host) -> Distance {
    let reference = reference(name);
    let tensors = tensors(&golden(name).join("reference.safetensors"));
    let mut differences = Vec::new();
    for prompt_name in PROMPTS {
        let answer = ask(host, request(&ids(&reference["prompts"][prompt_name]["ids"]), 0, scoring(8)));
        let top = |kind: &str| &tensors[&format!("{prompt_name}.{kind}")];
        let rows = answer.prompt.iter().zip(top("top_ids").chunks(8).zip(top("top_logits").chunks(8)));
        for (scored, (ids, logits)) in rows {
            let found = |id: f32| scored.top.as_slice().iter().find(|(token, _)| *token == id as TokenId);
            let both: Vec<(f32, f32)> =
                ids.iter().zip(logits).filter_map(|(&id, &logit)| Some((found(id)?.1, logit))).collect();
            // Constants of a row cancel.
            differences.extend(both.windows(2).map(|w| ((w[1].0 - w[0].0) - (w[1].1 - w[0].1)).abs()));
        }
    }
    assert!(differences.len() > 100, "{name}: {} differences", differences.len());
    let mean = differences.iter().sum::<f32>() / differences.len() as f32;
    Distance { mean, worst: differences.iter().copied().fold(0.0, f32::max) }
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
