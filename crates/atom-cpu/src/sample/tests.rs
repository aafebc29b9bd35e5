//! Sampling against plain f64 references, and the same on every instruction set.

use super::*;
use atom_base::{SamplingParams, SlotId, TokenId, rng};
use std::sync::Arc;

const VOCAB: usize = 1000;

fn reserve() -> Reserve {
    let rotary = atom_ops::Rotary { frequencies: vec![1.0], dim: 2, pairs: false, magnitude: 1.0 };
    let attention = atom_ops::AttentionSpec { q_heads: 1, kv_heads: 1, head_dim: 2, scale: 1.0, rotary };
    Reserve {
        top: atom_ops::StepShape { rows: 4, out_rows: 4, lanes: 1 },
        layers: 1,
        attention: Arc::new(attention),
        page_size: 16,
        pages: 2,
        pages_per_sequence: 1,
        kv_dtype: atom_ops::KvDType::F32,
        slots: 3,
        vocab: VOCAB,
        samples: true,
        poison: false,
    }
}

fn isas() -> Vec<Isa> {
    [Isa::Portable, Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| isa.is_supported()).collect()
}

fn logits(seed: u32) -> Vec<f32> {
    (0..VOCAB as u32).map(|i| rng::uniform(seed.into(), 0, i, 1) * 12.0 - 6.0).collect()
}

fn row(params: SamplingParams, position: u32) -> OutRow {
    OutRow { row: 0, slot: SlotId(1), position, target: None, params: Arc::new(params) }
}

fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let most = logits.iter().copied().fold(f32::MIN, f32::max);
    let weights: Vec<f64> = logits.iter().map(|&l| (f64::from(l - most) / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / total).collect()
}

#[test]
fn log_probabilities_are_the_models_own() {
    for isa in isas() {
        let sampler = Sampler::new(isa, 1, &reserve()).unwrap();
        let logits = logits(1);
        let expected = softmax(&logits, 1.0);
        // Whatever changes the choice does not change what is reported.
        let params = SamplingParams {
            temperature: 0.5,
            logit_bias: Box::new([(17, 50.0)]),
            logprobs: Some(5),
            ..SamplingParams::default()
        };
        let scored = sampler.sample(0, &row(params, 9), &mut logits.clone());
        assert_eq!(scored.token, 17, "a bias of 50 decides");
        let mut order: Vec<usize> = (0..VOCAB).collect();
        order.sort_by(|&a, &b| expected[b].total_cmp(&expected[a]));
        let top = scored.top.as_slice();
        assert_eq!(top.iter().map(|t| t.0 as usize).collect::<Vec<_>>(), order[..5]);
        for (token, logprob) in top.iter().chain([&(17, scored.logprob)]) {
            assert!((f64::from(*logprob) - expected[*token as usize].ln()).abs() < 1e-5);
        }
    }
}

#[test]
fn a_target_is_scored_and_not_replaced() {
    let sampler = Sampler::new(Isa::Portable, 1, &reserve()).unwrap();
    let params = SamplingParams { prompt_logprobs: Some(1), ..SamplingParams::greedy() };
    let scored = sampler.sample(0, &OutRow { target: Some(5), ..row(params, 3) }, &mut logits(2));
    assert_eq!(scored.token, 5);
    assert!((f64::from(scored.logprob) - softmax(&logits(2), 1.0)[5].ln()).abs() < 1e-5);
}

#[test]
fn greedy_takes_the_lowest_id_among_equals() {
    let sampler = Sampler::new(Isa::Portable, 1, &reserve()).unwrap();
    let mut flat = vec![0.0; VOCAB];
    (flat[700], flat[33]) = (4.0, 4.0);
    assert_eq!(sampler.sample(0, &row(SamplingParams::greedy(), 1), &mut flat).token, 33);
}

#[test]
fn logits_that_are_not_numbers_choose_nothing() {
    for isa in isas() {
        let sampler = Sampler::new(isa, 1, &reserve()).unwrap();
        for (at, bad) in [(0, f32::NAN), (999, f32::NAN), (500, f32::INFINITY), (998, f32::INFINITY)] {
            let mut logits = logits(3);
            logits[at] = bad;
            assert!(
                sampler.sample(0, &row(SamplingParams::default(), 1), &mut logits).is_not_a_number(),
                "{bad} at {at}"
            );
        }
    }
}

/// Draws at many positions follow the distribution: each frequent token within five standard deviations.
fn check_distribution(params: SamplingParams, expected: &[f64]) {
    const DRAWS: u32 = 20_000;
    let sampler = Sampler::new(Isa::detect(), 1, &reserve()).unwrap();
    let mut counts = vec![0u32; VOCAB];
    for position in 0..DRAWS {
        counts[sampler.sample(0, &row(params.clone(), position), &mut logits(4)).token as usize] += 1;
    }
    for (token, (&count, &p)) in counts.iter().zip(expected).enumerate() {
        assert!(p > 0.0 || count == 0, "token {token} is cut off and was drawn {count} times");
        let (mean, deviation) = (p * f64::from(DRAWS), (p * (1.0 - p) * f64::from(DRAWS)).sqrt());
        assert!(
            (f64::from(count) - mean).abs() <= 5.0 * deviation + 1.0,
            "token {token}: {count} for {mean}"
        );
    }
}

/// Keeps the given tokens and makes their probabilities sum to 1.
fn truncated(probabilities: &[f64], keep: &[usize]) -> Vec<f64> {
    let total: f64 = keep.iter().map(|&t| probabilities[t]).sum();
    let mut kept = vec![0.0; probabilities.len()];
    keep.iter().for_each(|&t| kept[t] = probabilities[t] / total);
    kept
}

fn by_probability(p: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[b].total_cmp(&p[a]));
    order
}

#[test]
fn draws_follow_the_distribution() {
    let params = SamplingParams { temperature: 0.8, seed: 7, ..SamplingParams::default() };
    check_distribution(params, &softmax(&logits(4), f64::from(0.8f32)));
}

#[test]
fn top_k_keeps_the_likeliest() {
    let p = softmax(&logits(4), 1.0);
    let params = SamplingParams { top_k: 20, seed: 8, ..SamplingParams::default() };
    check_distribution(params, &truncated(&p, &by_probability(&p)[..20]));
}

#[test]
fn top_p_keeps_the_smallest_set_that_reaches_it() {
    let p = softmax(&logits(4), 1.0);
    for (top_p, top_k) in [(0.1, 0), (0.6, 0), (0.995, 0), (0.5, 40)] {
        let order = by_probability(&p);
        let order = if top_k == 0 { &order[..] } else { &order[..top_k] };
        let total: f64 = order.iter().map(|&t| p[t]).sum();
        let mut reached = 0.0;
        let size = 1 + order
            .iter()
            .position(|&t| {
                reached += p[t];
                reached >= f64::from(top_p as f32) * total
            })
            .unwrap();
        let params =
            SamplingParams { top_p: top_p as f32, top_k: top_k as u32, seed: 9, ..SamplingParams::default() };
        check_distribution(params, &truncated(&p, &order[..size]));
    }
}

#[test]
fn min_p_is_relative_to_the_likeliest() {
    let p = softmax(&logits(4), 1.0);
    let most = p.iter().copied().fold(0.0, f64::max);
    let keep: Vec<usize> = (0..VOCAB).filter(|&t| p[t] >= 0.3 * most).collect();
    let params = SamplingParams { min_p: 0.3, seed: 10, ..SamplingParams::default() };
    check_distribution(params, &truncated(&p, &keep));
}

#[test]
fn penalties_count_prompt_and_continuation_as_the_api_says() {
    let mut sampler = Sampler::new(Isa::detect(), 1, &reserve()).unwrap();
    let (prompt, generated): (Vec<TokenId>, Vec<TokenId>) = (vec![10, 11], vec![11, 12, 12]);
    sampler.load(&[SlotLoad { slot: SlotId(1), prompt: prompt.into(), generated: generated.into() }]);
    let params = SamplingParams {
        temperature: 0.0,
        repetition_penalty: 1.5,
        frequency_penalty: 0.25,
        presence_penalty: 0.5,
        ..SamplingParams::default()
    };
    let mut logits = vec![-9.0; VOCAB];
    (logits[10], logits[11], logits[12], logits[13]) = (3.0, 3.9, 4.0, 1.8);
    sampler.history.penalise(SlotId(1), &params, &mut logits);
    let expected = [2.0, 3.9 / 1.5 - 0.25 - 0.5, 4.0 / 1.5 - 0.5 - 0.5, 1.8];
    for (found, expected) in logits[10..14].iter().zip(expected) {
        assert!((found - expected).abs() < 1e-6, "{found} for {expected}");
    }
    assert_eq!(logits[0], -9.0, "a token that was not said is left alone");
    // Negative logits move away from zero; what is sampled is counted.
    let mut flat = vec![-1.0; VOCAB];
    let first = sampler.sample(0, &row(params.clone(), 1), &mut flat.clone()).token;
    let second = sampler.sample(0, &row(params, 2), &mut flat).token;
    assert_eq!((first, second), (0, 1));
}

#[test]
fn every_instruction_set_chooses_the_same_bits() {
    let kinds = [
        SamplingParams::greedy(),
        SamplingParams { logprobs: Some(20), seed: 3, ..SamplingParams::default() },
        SamplingParams { top_p: 0.9, temperature: 1.3, logprobs: Some(0), ..SamplingParams::default() },
        SamplingParams { top_k: 7, top_p: 0.8, min_p: 0.01, seed: 5, ..SamplingParams::default() },
    ];
    for params in kinds {
        for position in 0..50 {
            let sample = |isa| {
                let sampler = Sampler::new(isa, 1, &reserve()).unwrap();
                let scored = sampler.sample(0, &row(params.clone(), position), &mut logits(position));
                (
                    scored.token,
                    scored.logprob.to_bits(),
                    scored.top.as_slice().iter().map(|t| (t.0, t.1.to_bits())).collect::<Vec<_>>(),
                )
            };
            let results: Vec<_> = isas().into_iter().map(sample).collect();
            assert!(results.windows(2).all(|w| w[0] == w[1]), "{results:?}");
        }
    }
}
