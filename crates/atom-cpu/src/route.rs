//! Routers: from a row's logits to its experts and their weights.

use crate::elementwise::exp::exp;
use crate::elementwise::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::isa::Isa;
use atom_ops::RouteSpec;

/// Floats of scratch for a row.
pub(crate) fn scratch_len(spec: &RouteSpec) -> usize {
    // Scores, keys, and keys of groups.
    (2 * spec.experts + spec.groups).next_multiple_of(LANES)
}

/// Chooses for one row; see [`atom_ops::Op::Route`] and [`RouteSpec`]. Of equal scores (or groups) the
/// first is taken. `logits` and `bias` are `[experts]`, `out` is `[2 * top_k]`.
///
/// A NaN among the logits makes all weights NaN; the experts are some `top_k` different ones all the same.
pub(crate) fn route(
    isa: Isa,
    spec: &RouteSpec,
    logits: &[f32],
    bias: Option<&[f32]>,
    scratch: &mut [f32],
    out: &mut [f32],
) {
    assert_eq!(logits.len(), spec.experts, "logits of a row");
    assert_eq!(out.len(), 2 * spec.top_k, "numbers and weights of the chosen");
    let (scores, rest) = scratch.split_at_mut(spec.experts);
    let (keys, rest) = rest.split_at_mut(spec.experts);
    let groups = &mut rest[..spec.groups];
    dispatch(isa, Scores { logits, is_sigmoid: spec.is_sigmoid, scores });
    let has_nan = scores.iter().any(|score| score.is_nan());
    match bias {
        None => keys.copy_from_slice(scores),
        Some(bias) => {
            for ((key, score), bias) in keys.iter_mut().zip(&*scores).zip(bias) {
                *key = score + bias;
            }
        }
    }
    keys.iter_mut().for_each(sort_last);
    if spec.groups > 1 {
        keep_best_groups(spec, keys, groups);
    }
    let (numbers, weights) = out.split_at_mut(spec.top_k);
    for number in &mut *numbers {
        let best = take_largest(keys).expect("recorded only where enough experts stay");
        *number = best as f32;
    }
    numbers.sort_unstable_by(f32::total_cmp);
    let mut sum = 0.0;
    for (weight, number) in weights.iter_mut().zip(numbers) {
        *weight = if has_nan { f32::NAN } else { scores[*number as usize] };
        sum += *weight;
    }
    if spec.normalise {
        let sum = if spec.is_sigmoid { sum + SIGMOID_SUM_MIN } else { sum };
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }
    weights.iter_mut().for_each(|weight| *weight *= spec.scale);
}

/// Takes the experts of all groups but the best out of `keys`.
fn keep_best_groups(spec: &RouteSpec, keys: &mut [f32], groups: &mut [f32]) {
    let size = spec.experts / spec.groups;
    for (group, keys) in groups.iter_mut().zip(keys.chunks_exact(size)) {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &key in keys {
            (first, second) = if key > first { (key, first) } else { (first, second.max(key)) };
        }
        *group = if size == 1 { first } else { first + second };
        sort_last(group);
    }
    for _ in 0..spec.groups_kept {
        take_largest(groups).expect("at most all groups are kept");
    }
    for (group, keys) in groups.iter().zip(keys.chunks_exact_mut(size)) {
        if !group.is_nan() {
            keys.fill(TAKEN);
        }
    }
}

/// A key that is no number comes after all others.
fn sort_last(key: &mut f32) {
    if key.is_nan() {
        *key = f32::NEG_INFINITY;
    }
}

/// Where the largest key is that is not taken, the first of equals; takes it.
fn take_largest(keys: &mut [f32]) -> Option<usize> {
    let mut best: Option<usize> = None;
    for (i, &key) in keys.iter().enumerate() {
        if !key.is_nan() && best.is_none_or(|best| key > keys[best]) {
            best = Some(i);
        }
    }
    keys[best?] = TAKEN;
    best
}

/// In the place of a key that was taken.
const TAKEN: f32 = f32::NAN;

/// Added to the sum of sigmoids, as the reference implementations of such routers do.
const SIGMOID_SUM_MIN: f32 = 1e-20;

struct Scores<'a> {
    logits: &'a [f32],
    is_sigmoid: bool,
    scores: &'a mut [f32],
}

impl Kernel for Scores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let Self { logits, is_sigmoid, scores } = self;
        if is_sigmoid {
            for (logits, scores) in logits.chunks(LANES).zip(scores.chunks_mut(LANES)) {
                let e = exp(s, s.sub(s.splat(0.0), s.read(logits)));
                s.write(s.div(s.splat(1.0), s.add(s.splat(1.0), e)), scores);
            }
            return;
        }
        let mut peak = f32::NEG_INFINITY;
        for &logit in logits {
            peak = if logit > peak { logit } else { peak };
        }
        let mut sums = s.splat(0.0);
        for (logits, scores) in logits.chunks(LANES).zip(scores.chunks_mut(LANES)) {
            let e = exp(s, s.sub(s.read(logits), s.splat(peak)));
            // Lanes beyond the end of the row hold no logit.
            let e = s.select(s.first(logits.len()), e, s.splat(0.0));
            sums = s.add(sums, e);
            s.write(e, scores);
        }
        let sum = s.splat(s.sum(sums));
        for scores in scores.chunks_mut(LANES) {
            s.write(s.div(s.read(scores), sum), scores);
        }
    }
}

#[cfg(test)]
mod tests;
