use super::*;
use crate::elementwise::tests::{noise, supported};

/// Experts in ascending order and their weights, straight from the rule in f64.
fn reference(spec: &RouteSpec, logits: &[f32], bias: &[f32]) -> Vec<(usize, f64)> {
    let logits: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
    let total: f64 = logits.iter().map(|x| x.exp()).sum();
    let score = |x: &f64| if spec.is_sigmoid { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / total };
    let scores: Vec<f64> = logits.iter().map(score).collect();
    let keys: Vec<f64> = scores.iter().zip(bias).map(|(s, &b)| s + f64::from(b)).collect();
    let best = |keys: &[f64], candidates: Vec<usize>, count: usize| {
        let mut order = candidates;
        order.sort_by(|&a, &b| keys[b].total_cmp(&keys[a]).then(a.cmp(&b)));
        order.truncate(count);
        order.sort_unstable();
        order
    };
    let size = spec.experts / spec.groups;
    let groups: Vec<f64> = (keys.chunks(size))
        .map(|keys| {
            let mut keys = keys.to_vec();
            keys.sort_by(|a, b| b.total_cmp(a));
            keys.iter().take(2).sum()
        })
        .collect();
    let kept = best(&groups, (0..spec.groups).collect(), spec.groups_kept);
    let candidates = (0..spec.experts).filter(|e| kept.contains(&(e / size))).collect();
    let chosen = best(&keys, candidates, spec.top_k);
    let sum: f64 = if spec.normalise { chosen.iter().map(|&e| scores[e]).sum() } else { 1.0 };
    chosen.into_iter().map(|e| (e, scores[e] / sum * f64::from(spec.scale))).collect()
}

fn run(isa: Isa, spec: &RouteSpec, logits: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let (mut scratch, mut out) = (vec![f32::NAN; scratch_len(spec)], vec![f32::NAN; 2 * spec.top_k]);
    route(isa, spec, logits, bias, &mut scratch, &mut out);
    out
}

fn spec(experts: usize, top_k: usize, is_sigmoid: bool) -> RouteSpec {
    RouteSpec { experts, top_k, is_sigmoid, groups: 1, groups_kept: 1, normalise: false, scale: 1.0 }
}

#[test]
fn choices_and_weights_are_those_of_the_rule_and_all_sets_agree() {
    // Experts, choices, groups, groups that stay.
    let cases = [(5, 2, 1, 1), (16, 4, 4, 2), (40, 40, 1, 1), (128, 8, 1, 1), (64, 6, 8, 3), (12, 3, 12, 5)];
    let mut seed = 0;
    for (experts, top_k, groups, groups_kept) in cases {
        for (is_sigmoid, with_bias, normalise) in
            [(false, false, true), (false, false, false), (true, true, true), (true, false, false)]
        {
            let scale = if normalise { 1.0 } else { 2.5 };
            let spec =
                RouteSpec { groups, groups_kept, normalise, scale, ..spec(experts, top_k, is_sigmoid) };
            for _ in 0..20 {
                seed += 1;
                let logits: Vec<f32> = noise(seed, experts).iter().map(|x| 6.0 * x).collect();
                let bias = if with_bias { noise(seed + 5000, experts) } else { vec![0.0; experts] };
                let got = run(Isa::Portable, &spec, &logits, with_bias.then_some(&bias[..]));
                for (i, (expert, weight)) in reference(&spec, &logits, &bias).into_iter().enumerate() {
                    assert_eq!(got[i], expert as f32, "{spec:?}, choice {i}");
                    let error = (f64::from(got[top_k + i]) - weight).abs();
                    assert!(error < 1e-6 * weight, "{spec:?}: {} instead of {weight}", got[top_k + i]);
                }
                for isa in supported() {
                    let other = run(isa, &spec, &logits, with_bias.then_some(&bias[..]));
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&other), bits(&got), "{isa}");
                }
            }
        }
    }
}

#[test]
fn of_equal_scores_and_groups_the_first_are_taken() {
    for is_sigmoid in [false, true] {
        assert_eq!(run(Isa::detect(), &spec(20, 3, is_sigmoid), &[0.5; 20], None)[..3], [0.0, 1.0, 2.0]);
        let grouped = RouteSpec { groups: 5, groups_kept: 2, ..spec(20, 5, is_sigmoid) };
        let mut logits = [0.5; 20];
        assert_eq!(run(Isa::detect(), &grouped, &logits, None)[..5], [0.0, 1.0, 2.0, 3.0, 4.0]);
        logits[13] = 2.0;
        assert_eq!(run(Isa::detect(), &grouped, &logits, None)[..5], [0.0, 1.0, 2.0, 3.0, 13.0]);
    }
}

/// Every expert outside the groups that stay has a larger score than some that are chosen.
#[test]
fn experts_of_groups_that_went_are_never_chosen_however_low_the_others_are() {
    let spec = RouteSpec { groups: 2, groups_kept: 1, normalise: true, ..spec(8, 4, true) };
    let logits = [9.0, 9.0, -200.0, -200.0, 5.0, 5.0, 5.0, 5.0];
    for bias in [None, Some(&[0.0, 0.0, -1e30, f32::NEG_INFINITY, 0.0, 0.0, 0.0, 0.0][..])] {
        let got = run(Isa::detect(), &spec, &logits, bias);
        assert_eq!(got[..4], [0.0, 1.0, 2.0, 3.0]);
        assert!((got[4] - 0.5).abs() < 1e-6 && got[6] < 1e-30);
    }
}

#[test]
fn rows_that_are_not_numbers_choose_different_experts_and_show() {
    for is_sigmoid in [false, true] {
        for (groups, groups_kept) in [(1, 1), (4, 1), (16, 5)] {
            let top_k = 4;
            let spec = RouteSpec { groups, groups_kept, normalise: true, ..spec(16, top_k, is_sigmoid) };
            let good = noise(9, 16);
            for poisoned in [vec![3], vec![0, 15], (0..16).collect()] {
                let mut logits = good.clone();
                poisoned.iter().for_each(|&i| logits[i] = f32::NAN);
                for isa in supported() {
                    for bias in [None, Some(&logits[..])] {
                        let got = run(isa, &spec, &logits, bias);
                        assert!(got[..top_k].is_sorted_by(|a, b| a < b), "{got:?}");
                        assert!(got[0] >= 0.0 && got[top_k - 1] < 16.0, "{got:?}");
                        assert!(got[top_k..].iter().all(|weight| weight.is_nan()), "{got:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn logits_of_any_size_stay_numbers() {
    let mut logits = [1e30; 10];
    logits[7] = 2e30;
    logits[2] = f32::NEG_INFINITY;
    let soft = RouteSpec { normalise: true, ..spec(10, 2, false) };
    assert_eq!(run(Isa::detect(), &soft, &logits, None), [0.0, 7.0, 0.0, 1.0]);
    let zeros = run(Isa::detect(), &RouteSpec { normalise: true, ..spec(4, 2, true) }, &[-1e30; 4], None);
    assert!(zeros[..2] == [0.0, 1.0] && zeros[2] < 1e-18, "{zeros:?}: their sum is not 0");
}
