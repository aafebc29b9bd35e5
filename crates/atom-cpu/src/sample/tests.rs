//! Sampling against plain f64 references, and the same on every instruction set.

use super::*;
use crate::elementwise::tests::{noise, supported};
use atom_base::{SamplingParams, SlotId, TokenId, rng};
use std::sync::Arc;

fn reserve(vocab: usize) -> Reserve {
    let rotary = atom_ops::Rotary { frequencies: vec![1.0], dim: 2, pairs: false, magnitude: 1.0 };
    let attention = atom_ops::AttentionSpec { q_heads: 1, kv_heads: 1, head_dim: 2, scale: 1.0, rotary };
    Reserve {
        top: atom_ops::StepShape { rows: 64, out_rows: 64, lanes: 1 },
        layers: 1,
        attention: Arc::new(attention),
        page_size: 16,
        pages: 2,
        pages_per_sequence: 1,
        kv_dtype: atom_ops::KvDType::F32,
        slots: 65,
        vocab,
        samples: true,
        poison: false,
    }
}

fn sampler(isa: Isa, vocab: usize) -> Sampler {
    Sampler::new(isa, 1, &reserve(vocab)).unwrap()
}

fn row(params: SamplingParams, position: u32) -> OutRow {
    OutRow { row: 0, slot: SlotId(1), position, target: None, params: Arc::new(params), mask: None }
}

/// Logits between -6 and 6.
fn logits(seed: u64, vocab: usize) -> Vec<f32> {
    noise(seed, vocab).into_iter().map(|x| x * 6.0).collect()
}

/// The token that every set chooses.
fn agreed(vocab: usize, logits: &[f32], row: &OutRow) -> TokenId {
    let choose = |isa| sampler(isa, vocab).sample(0, row, &mut logits.to_vec()).token;
    let first = choose(Isa::Portable);
    for isa in supported() {
        assert_eq!(choose(isa), first, "{isa} chooses another token for {row:?}");
    }
    first
}

/// Tokens in the order in which they are drawn from, with their probabilities.
fn distribution(logits: &[f32], params: &SamplingParams) -> Vec<(TokenId, f64)> {
    let largest = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
    let weight = |l: f32| ((f64::from(l) - largest) / f64::from(params.temperature)).exp();
    let mut kept: Vec<(TokenId, f64)> = (0..).zip(logits.iter().map(|&l| weight(l))).collect();
    let top_k = params.top_k as usize;
    let truncates = params.min_p > 0.0 || (1..logits.len()).contains(&top_k) || params.top_p < 1.0;
    if truncates {
        kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        kept.retain(|&(_, weight)| weight >= f64::from(params.min_p));
        if top_k > 0 {
            kept.truncate(top_k);
        }
        if params.top_p < 1.0 {
            let enough = f64::from(params.top_p) * kept.iter().map(|k| k.1).sum::<f64>();
            let mut sum = 0.0;
            let last = kept.iter().position(|k| {
                sum += k.1;
                sum >= enough * (1.0 - 1e-12)
            });
            kept.truncate(1 + last.unwrap());
        }
    }
    let total: f64 = kept.iter().map(|k| k.1).sum();
    kept.into_iter().map(|(token, weight)| (token, weight / total)).collect()
}

/// Asserts that draws fall where the distribution puts them, whatever rounding does at its edges.
fn check_draws(logits: &[f32], params: &SamplingParams, draws: u32) {
    let distribution = distribution(logits, params);
    let mut checked = 0;
    for position in 0..draws {
        let uniform = f64::from(rng::uniform(params.seed, params.choice, position, 0));
        let (mut sum, mut expected) = (0.0, None);
        for &(token, probability) in &distribution {
            // No verdict where the sum passes the number by a hair.
            if (sum + probability - uniform).abs() < 1e-6 {
                break;
            }
            sum += probability;
            if sum > uniform {
                expected = Some(token);
                break;
            }
        }
        if let Some(expected) = expected {
            let got = agreed(logits.len(), logits, &row(params.clone(), position));
            assert_eq!(got, expected, "position {position}, {params:?}");
            checked += 1;
        }
    }
    assert!(checked > draws / 2, "only {checked} of {draws} draws had a verdict for {params:?}");
}

#[test]
fn draws_are_the_inverse_of_the_truncated_distribution() {
    let base = SamplingParams { seed: 11, choice: 2, ..SamplingParams::default() };
    for vocab in [1usize, 2, 15, 17, 511, 512, 513, 1030] {
        let logits = logits(vocab as u64, vocab);
        for temperature in [0.3, 1.0, 2.0] {
            for (min_p, top_k, top_p) in [
                (0.0, 0, 1.0),
                (0.1, 0, 1.0),
                (0.0, 1, 1.0),
                (0.0, 40, 1.0),
                (0.0, 0, 0.1),
                (0.0, 0, 0.9),
                (0.0, 0, 0.9999),
                (0.02, 7, 1.0),
                (0.0, 300, 0.8),
                (0.05, 0, 0.7),
                (0.001, 50, 0.95),
                (0.0, 5000, 1.0),
            ] {
                check_draws(
                    &logits,
                    &SamplingParams { temperature, min_p, top_k, top_p, ..base.clone() },
                    12,
                );
            }
        }
    }
}

#[test]
fn a_flat_distribution_over_a_large_vocabulary_is_truncated_right() {
    let flat: Vec<f32> = noise(3, 40_000).into_iter().map(|x| x * 0.5).collect();
    let steep: Vec<f32> = noise(4, 40_000).into_iter().map(|x| x * 60.0).collect();
    for logits in [flat, steep] {
        for (top_k, top_p) in [(0, 0.5), (0, 0.99), (30_000, 0.9), (1000, 1.0)] {
            let params = SamplingParams { top_k, top_p, seed: 5, ..SamplingParams::default() };
            check_draws(&logits, &params, 6);
        }
    }
}

#[test]
fn a_draw_takes_the_token_whose_share_holds_the_number() {
    let weights = passes::Weights { largest: 1.0, temperature: 1.0 };
    for isa in supported() {
        for (uniform, expected) in [(0.0, 6), (0.2499999, 6), (0.25, 7), (0.5, 8), (0.75, 9), (0.9999999, 9)]
        {
            let mut keys = [9, 7, 8, 6].map(|token| Key::new(1.0, token));
            assert_eq!(choose::draw(isa, &mut keys, weights, uniform), expected, "{isa} {uniform}");
            let mut masses = Vec::new();
            let by_id = choose::draw_by_id(isa, &[1.0; 4], weights, uniform, &mut masses);
            assert_eq!(by_id + 6, expected, "{isa} {uniform}");
        }
    }
}

#[test]
fn frequencies_follow_the_probabilities() {
    let logits = logits(21, 12);
    for (top_p, temperature) in [(1.0, 1.0), (0.9, 2.0)] {
        let params = SamplingParams { top_p, temperature, seed: 77, ..SamplingParams::default() };
        let expected = distribution(&logits, &params);
        let sampler = sampler(Isa::detect(), logits.len());
        let draws = 20_000;
        let mut counts = vec![0u32; logits.len()];
        for position in 0..draws {
            let scored = sampler.sample(0, &row(params.clone(), position), &mut logits.clone());
            counts[scored.token as usize] += 1;
        }
        let likely = || expected.iter().filter(|e| e.1 * f64::from(draws) > 5.0);
        let chi_square: f64 = likely()
            .map(|&(token, p)| {
                let expected = p * f64::from(draws);
                (f64::from(counts[token as usize]) - expected).powi(2) / expected
            })
            .sum();
        // 12 tokens at the most: beyond 40 lies one in 20,000 for a fair sampler, and seeds are fixed.
        assert!(likely().count() >= 3 && chi_square < 40.0, "chi-square {chi_square}, {counts:?}");
        let kept: Vec<TokenId> = expected.iter().map(|e| e.0).collect();
        let foreign = counts.iter().enumerate().filter(|&(t, &n)| n > 0 && !kept.contains(&(t as TokenId)));
        assert_eq!(foreign.count(), 0, "tokens outside of the nucleus were drawn");
    }
}

#[test]
fn greedy_takes_the_largest_and_of_equals_the_first() {
    for vocab in [1usize, 5, 16, 100, 511, 512, 513, 2000] {
        for at in [0, vocab / 3, vocab - 1] {
            let mut logits = logits(1, vocab);
            logits[at..].iter_mut().step_by(7).for_each(|l| *l = 9.0);
            assert_eq!(agreed(vocab, &logits, &row(SamplingParams::greedy(), 3)), at as TokenId);
        }
    }
    let zeros = [-1.0, -0.0, 0.0, -0.0];
    assert_eq!(agreed(4, &zeros, &row(SamplingParams::greedy(), 3)), 1, "both zeros are equal");
}

#[test]
fn the_tightest_truncations_leave_the_likeliest() {
    let mut logits = logits(8, 700);
    (logits[300], logits[600]) = (7.0, 7.0);
    let base = SamplingParams { seed: 1, temperature: 1.5, ..SamplingParams::default() };
    for position in 0..20 {
        let choose = |params| agreed(700, &logits, &row(params, position));
        assert_eq!(choose(SamplingParams { top_k: 1, ..base.clone() }), 300);
        assert_eq!(choose(SamplingParams { top_p: f32::MIN_POSITIVE, ..base.clone() }), 300);
        assert_eq!(choose(SamplingParams { top_k: 2, top_p: 0.5, ..base.clone() }), 300);
        assert!([300, 600].contains(&choose(SamplingParams { min_p: 1.0, ..base.clone() })));
        assert!([300, 600].contains(&choose(SamplingParams { top_k: 2, ..base.clone() })));
        for temperature in [1e-40, 1e-6] {
            assert!([300, 600].contains(&choose(SamplingParams { temperature, ..base.clone() })));
        }
    }
}

#[test]
fn what_is_asked_of_equals_keeps_lower_ids() {
    // Both zeros are one number.
    let logits: Vec<f32> = (0..1000).map(|i| [0.0, -0.0][i % 2]).collect();
    let base = SamplingParams { seed: 4, ..SamplingParams::default() };
    for position in 0..50 {
        let choose = |params| agreed(1000, &logits, &row(params, position));
        assert!(choose(SamplingParams { top_k: 10, ..base.clone() }) < 10);
        assert!(choose(SamplingParams { top_p: 0.25, ..base.clone() }) < 250);
        assert!(choose(SamplingParams { top_k: 400, top_p: 0.5, ..base.clone() }) < 200);
    }
}

fn softmax(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::MIN, f32::max);
    let weights: Vec<f64> = logits.iter().map(|&l| (f64::from(l) - f64::from(largest)).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / total).collect()
}

#[test]
fn log_probabilities_are_the_models_own() {
    for vocab in [3usize, 700, 5000] {
        let mut logits = logits(31, vocab);
        (logits[0], logits[vocab - 1]) = (5.5, 5.5);
        let exact = softmax(&logits);
        let mut order: Vec<TokenId> = (0..vocab as TokenId).collect();
        order.sort_by(|&a, &b| exact[b as usize].total_cmp(&exact[a as usize]).then(a.cmp(&b)));
        for (isa, top) in supported().flat_map(|isa| [(isa, 0), (isa, 1), (isa, 20)]) {
            // Whatever changes the choice does not change what is reported.
            let params = SamplingParams {
                temperature: 0.5,
                repetition_penalty: 1.5,
                frequency_penalty: 2.0,
                logit_bias: Box::new([(1, 80.0)]),
                logprobs: Some(top),
                ..SamplingParams::default()
            };
            let mut sampler = sampler(isa, vocab);
            let history = Arc::from([0, 1, 2]);
            sampler.load(&[SlotLoad { slot: SlotId(1), prompt: Arc::clone(&history), generated: history }]);
            let scored = sampler.sample(0, &row(params, 9), &mut logits.clone());
            assert_eq!(scored.token, 1, "a bias of 80 decides");
            let listed: Vec<TokenId> = scored.top.as_slice().iter().map(|t| t.0).collect();
            assert_eq!(listed, order[..usize::from(top).min(vocab)]);
            for &(token, logprob) in scored.top.as_slice().iter().chain([&(1, scored.logprob)]) {
                let exact = exact[token as usize].ln();
                assert!(
                    (f64::from(logprob) - exact).abs() < 1e-6 * exact.abs().max(1.0),
                    "{logprob} {exact}"
                );
            }
        }
    }
}

#[test]
fn a_target_is_scored_and_not_replaced() {
    let logits = logits(2, 600);
    let exact = softmax(&logits);
    for (alternatives, isa) in [(None, Isa::Portable), (Some(3), Isa::detect())] {
        let params =
            SamplingParams { prompt_logprobs: alternatives, temperature: 0.0, ..SamplingParams::default() };
        let out = OutRow { target: Some(5), ..row(params, 3) };
        let scored = sampler(isa, 600).sample(0, &out, &mut logits.clone());
        assert_eq!(scored.token, 5);
        assert!((f64::from(scored.logprob) - exact[5].ln()).abs() < 1e-5);
        assert_eq!(scored.top.as_slice().len(), usize::from(alternatives.unwrap_or(0)));
    }
    let bare = sampler(Isa::detect(), 600).sample(0, &row(SamplingParams::default(), 1), &mut logits.clone());
    assert!(bare.logprob.is_nan() && bare.top.as_slice().is_empty(), "nothing was asked for");
}

#[test]
fn penalties_match_a_plain_count() {
    let vocab = 1030;
    let params = SamplingParams {
        repetition_penalty: 1.3,
        frequency_penalty: 0.7,
        presence_penalty: -0.4,
        logit_bias: Box::new([(7, 1.5), (1029, -2.0)]),
        ..SamplingParams::greedy()
    };
    let prompt: Arc<[TokenId]> = (0..60).map(|i| i * 17 % 1030).collect();
    for isa in supported() {
        let mut sampler = sampler(isa, vocab);
        // What the slot held before is forgotten.
        let stale = SlotLoad { slot: SlotId(1), prompt: Arc::from([9, 10]), generated: Arc::from([11, 11]) };
        let fresh = SlotLoad { slot: SlotId(1), prompt: Arc::clone(&prompt), generated: Arc::from([]) };
        sampler.load(&[stale, fresh]);
        let mut generated: Vec<TokenId> = Vec::new();
        for position in 0..80u32 {
            if position == 40 {
                // A preemption: the slot's state is built anew.
                let again = Arc::from(generated.clone());
                sampler.load(&[SlotLoad { slot: SlotId(2), prompt: Arc::clone(&prompt), generated: again }]);
            }
            let slot = SlotId(if position < 40 { 1 } else { 2 });
            let logits: Vec<f32> = logits(u64::from(position % 3), vocab);
            let mut expected = logits.clone();
            for (token, logit) in (0..).zip(&mut expected) {
                let count = generated.iter().filter(|&&g| g == token).count() as f32;
                if count > 0.0 || prompt.contains(&token) {
                    *logit = if *logit > 0.0 { *logit / 1.3 } else { *logit * 1.3 };
                }
                if count > 0.0 {
                    *logit = *logit - 0.7 * count + 0.4;
                }
            }
            expected[7] += 1.5;
            expected[1029] -= 2.0;
            let best = (0..vocab).rev().max_by(|&a, &b| expected[a].total_cmp(&expected[b])).unwrap();
            let got =
                sampler.sample(0, &OutRow { slot, ..row(params.clone(), position) }, &mut logits.clone());
            assert_eq!(got.token as usize, best, "{isa} position {position}");
            generated.push(got.token);
        }
        let distinct: std::collections::BTreeSet<_> = generated.iter().collect();
        assert!(distinct.len() > 20, "penalties must have moved the choice");
    }
}

#[test]
fn penalties_come_before_the_bias() {
    // 1 / 2 + 1 beats 1.2; (1 + 1) / 2 would not.
    let params = SamplingParams {
        repetition_penalty: 2.0,
        logit_bias: Box::new([(2, 1.0)]),
        ..SamplingParams::greedy()
    };
    for isa in supported() {
        let mut sampler = sampler(isa, 4);
        sampler.load(&[SlotLoad { slot: SlotId(1), prompt: Arc::from([2]), generated: Arc::from([]) }]);
        assert_eq!(sampler.sample(0, &row(params.clone(), 0), &mut [0.0, 1.2, 1.0, 0.0]).token, 2, "{isa}");
    }
}

#[test]
fn a_count_that_is_full_stays_full_and_spares_its_neighbours() {
    let history = History::new(2, 9).unwrap();
    for _ in 0..40_000 {
        history.count(SlotId(1), 5);
    }
    let params = SamplingParams { frequency_penalty: 1.0, ..SamplingParams::default() };
    let mut logits = [0.0; 9];
    history.penalise(SlotId(1), &params, &mut logits);
    assert_eq!(logits, [0.0, 0.0, 0.0, 0.0, 0.0, -32767.0, 0.0, 0.0, 0.0]);
    let mut others = [0.0; 9];
    history.penalise(SlotId(0), &params, &mut others);
    assert_eq!(others, [0.0; 9], "another slot's history");
}

#[test]
fn logits_that_are_no_numbers_are_reported_and_impossible_tokens_never_drawn() {
    for isa in supported() {
        for vocab in [5usize, 600] {
            let sampler = sampler(isa, vocab);
            for params in
                [SamplingParams::greedy(), SamplingParams { top_p: 0.5, ..SamplingParams::default() }]
            {
                for (at, bad) in [(0, f32::NAN), (vocab - 1, f32::NAN), (2, f32::INFINITY)] {
                    let mut logits = logits(1, vocab);
                    logits[at] = bad;
                    assert!(sampler.sample(0, &row(params.clone(), 0), &mut logits).is_not_a_number());
                }
                let mut nothing = vec![f32::NEG_INFINITY; vocab];
                assert!(sampler.sample(0, &row(params.clone(), 0), &mut nothing).is_not_a_number());
                nothing[3] = -50.0;
                assert_eq!(sampler.sample(0, &row(params, 0), &mut nothing).token, 3, "the only one left");
            }
            for (top_k, min_p) in [(0, 0.0), (4, 0.0), (0, 1e-3)] {
                for position in 0..50 {
                    let mut logits = vec![f32::NEG_INFINITY; vocab];
                    (logits[1], logits[4]) = (0.0, 1.0);
                    let params =
                        SamplingParams { top_k, min_p, temperature: 2.0, ..SamplingParams::default() };
                    let token = sampler.sample(0, &row(params, position), &mut logits).token;
                    assert!([1, 4].contains(&token), "{token} is impossible");
                }
            }
        }
    }
}

#[test]
fn a_draw_is_the_same_alone_and_among_63_others_on_any_worker_and_allocates_nothing() {
    let vocab = 3000;
    let rows: Vec<OutRow> = (0..64u32)
        .map(|i| {
            let params = SamplingParams {
                seed: u64::from(i) << 32,
                temperature: 0.2 + i as f32 / 40.0,
                top_k: [0, 50, 2000][i as usize % 3],
                top_p: [1.0, 0.9, 0.5, 0.99][i as usize % 4],
                min_p: [0.0, 0.01][i as usize % 2],
                presence_penalty: [0.0, 0.5][i as usize / 2 % 2],
                logprobs: [None, Some(5)][i as usize / 4 % 2],
                ..SamplingParams::default()
            };
            OutRow { slot: SlotId(1 + i), ..row(params, 1000 + i) }
        })
        .collect();
    let scored =
        |sampler: &Sampler, worker, i: usize| sampler.sample(worker, &rows[i], &mut logits(i as u64, vocab));
    for isa in supported() {
        let alone: Vec<ScoredToken> = (0..64).map(|i| scored(&sampler(isa, vocab), 0, i)).collect();
        let shared = Sampler::new(isa, 3, &reserve(vocab)).unwrap();
        let room = |sampler: &Sampler| -> Vec<usize> {
            let of = |s: &Mutex<Scratch>| {
                let s = s.lock().unwrap();
                s.raw.capacity() + s.keys.capacity() + s.masses.capacity()
            };
            sampler.scratch.iter().map(of).collect()
        };
        let before = room(&shared);
        std::thread::scope(|scope| {
            for worker in 0..3 {
                let (shared, alone, scored) = (&shared, &alone, &scored);
                scope.spawn(move || {
                    for i in crate::shared::share(64, worker, 3).rev() {
                        let (got, expected) = (scored(shared, worker, i), alone[i]);
                        assert_eq!(got.token, expected.token, "{isa} row {i}");
                        assert_eq!(got.logprob.to_bits(), expected.logprob.to_bits(), "{isa} row {i}");
                        assert_eq!(got.top, expected.top, "{isa} row {i}");
                    }
                });
            }
        });
        assert_eq!(room(&shared), before, "scratch grew during a step");
    }
}

/// A cell that holds the mask of these tokens.
fn cell(vocab: usize, allows: impl Fn(TokenId) -> bool) -> Arc<atom_base::MaskCell> {
    let mut mask = vec![0u32; vocab.div_ceil(32)];
    for token in (0..vocab as TokenId).filter(|&token| allows(token)) {
        mask[token as usize / 32] |= 1 << (token % 32);
    }
    let cell = atom_base::MaskCell::new();
    cell.set_deadline(std::time::Instant::now());
    cell.fill(Ok(mask.into()));
    Arc::new(cell)
}

#[test]
fn a_mask_is_as_if_there_were_no_other_tokens() {
    let vocab = 1030;
    // None of a word, all of it, one at its ends, the last of the vocabulary.
    for allows in [
        |token| token % 3 == 1,
        |token| (64..96).contains(&token),
        |token| token == 1029,
        |token| token == 31 || token == 32,
    ] {
        for case in 0..24u64 {
            let params = SamplingParams {
                temperature: if case % 4 == 0 { 0.0 } else { 0.8 },
                top_k: if case % 3 == 1 { 5 } else { 0 },
                top_p: if case % 3 == 2 { 0.8 } else { 1.0 },
                min_p: if case % 5 == 4 { 0.1 } else { 0.0 },
                presence_penalty: if case % 2 == 1 { 0.5 } else { 0.0 },
                repetition_penalty: if case % 6 == 1 { 1.4 } else { 1.0 },
                logit_bias: if case % 7 == 3 { Box::new([(0, 90.0), (31, 2.0)]) } else { Box::default() },
                logprobs: Some(4),
                seed: case,
                ..SamplingParams::default()
            };
            let logits = logits(case, vocab);
            let mut cut = logits.clone();
            (0..vocab).filter(|&t| !allows(t as TokenId)).for_each(|t| cut[t] = f32::NEG_INFINITY);
            for isa in supported() {
                let plain = row(params.clone(), 7);
                let masked = OutRow { mask: Some(cell(vocab, allows)), ..plain.clone() };
                let got = sampler(isa, vocab).sample(0, &masked, &mut logits.clone());
                assert!(allows(got.token), "{isa}: {} of {params:?}", got.token);
                assert_eq!(got, sampler(isa, vocab).sample(0, &plain, &mut cut.clone()), "{isa} {params:?}");
                let top = got.top.as_slice();
                assert!(top.iter().all(|&(token, p)| allows(token) && p.is_finite()), "{top:?}");
                assert_eq!(top.len(), (0..vocab as TokenId).filter(|&t| allows(t)).count().min(4));
                let total: f64 = softmax(&cut).iter().sum();
                assert!((total - 1.0).abs() < 1e-9);
                assert!((f64::from(got.logprob) - softmax(&cut)[got.token as usize].ln()).abs() < 1e-4);
            }
        }
    }
}

#[test]
fn a_row_without_its_mask_chooses_nothing_and_a_nan_that_a_mask_hides_is_one() {
    let (vocab, isa) = (100, Isa::detect());
    let sample = |mask: Arc<atom_base::MaskCell>, logits: &mut [f32]| {
        let out = OutRow { mask: Some(mask), ..row(SamplingParams::default(), 3) };
        sampler(isa, vocab).sample(0, &out, logits)
    };
    let late = Arc::new(atom_base::MaskCell::new());
    late.set_deadline(std::time::Instant::now());
    assert_eq!(sample(Arc::clone(&late), &mut logits(1, vocab)).token, ScoredToken::NOT_CHOSEN.token);
    assert!(matches!(late.fault(), Some(atom_base::MaskFault::Late { .. })));
    let mut spoilt = logits(1, vocab);
    spoilt[50] = f32::NAN;
    assert!(sample(cell(vocab, |token| token < 10), &mut spoilt).is_not_a_number());
}
