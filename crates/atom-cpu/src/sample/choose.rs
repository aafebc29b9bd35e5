//! The draw: temperature, truncation, and the inverse of the cumulative distribution.

use crate::elementwise::exp::exp;
use crate::elementwise::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::isa::Isa;
use atom_base::{SamplingParams, TokenId, rng};
use std::cmp::Ordering;

/// A token that may be drawn, with its weight: its probability times an unknown constant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    weight: f32,
    token: TokenId,
}

/// Draws one token. `logits` becomes the weights `exp((logit - most) / temperature)`.
///
/// Without truncation the candidates are all tokens in order of id; with it they are the likeliest,
/// in order of weight and then of id.
pub(crate) fn choose(
    isa: Isa,
    logits: &mut [f32],
    most: f32,
    params: &SamplingParams,
    position: u32,
    candidates: &mut Vec<Candidate>,
) -> TokenId {
    dispatch(isa, Weights { logits, most, inverse: 1.0 / params.temperature });
    let uniform = f64::from(rng::uniform(params.seed, params.choice, position, 0));
    let weights = &*logits;
    // The likeliest weight is exactly 1.
    let floor = if params.min_p > 0.0 { params.min_p } else { 0.0 };
    let top_k = if params.top_k == 0 { weights.len() } else { (params.top_k as usize).min(weights.len()) };
    if floor == 0.0 && top_k == weights.len() && params.top_p >= 1.0 {
        return draw(weights.iter().enumerate().map(|(token, &weight)| (token as TokenId, weight)), uniform);
    }
    if top_k < weights.len() {
        collect(weights, floor, candidates);
        keep_likeliest(candidates, top_k);
    } else if params.top_p < 1.0 {
        collect_nucleus(weights, floor, params.top_p, candidates);
    } else {
        collect(weights, floor, candidates);
    }
    candidates.sort_unstable_by(likelier);
    if params.top_p < 1.0 {
        let total = if top_k < weights.len() {
            sum(candidates.iter().map(|c| c.weight))
        } else {
            above(weights, floor)
        };
        keep_nucleus(candidates, f64::from(params.top_p) * total);
    }
    draw(candidates.iter().map(|c| (c.token, c.weight)), uniform)
}

/// All tokens whose weight reaches `floor` and isn't zero.
fn collect(weights: &[f32], floor: f32, candidates: &mut Vec<Candidate>) {
    candidates.clear();
    let reaches = |&(_, &weight): &(usize, &f32)| weight > 0.0 && weight >= floor;
    let candidate = |(token, &weight): (usize, &f32)| Candidate { weight, token: token as TokenId };
    candidates.extend(weights.iter().enumerate().filter(reaches).map(candidate));
}

/// A set that surely holds the nucleus, without sorting the vocabulary: tokens above a threshold that is
/// lowered until they have enough weight together.
fn collect_nucleus(weights: &[f32], floor: f32, top_p: f32, candidates: &mut Vec<Candidate>) {
    let enough = f64::from(top_p) * above(weights, floor);
    let mut threshold = NUCLEUS_START;
    loop {
        collect(weights, threshold.max(floor), candidates);
        let complete = threshold <= floor.max(f32::MIN_POSITIVE);
        // A little more than enough, since the sum is made in another order later.
        if complete || sum(candidates.iter().map(|c| c.weight)) >= enough * (1.0 + 1e-9) {
            return;
        }
        threshold *= NUCLEUS_STEP;
    }
}

fn above(weights: &[f32], floor: f32) -> f64 {
    sum(weights.iter().copied().filter(|&w| w >= floor))
}

/// The smallest set of the likeliest whose weight reaches `enough`; at least one.
fn keep_nucleus(candidates: &mut Vec<Candidate>, enough: f64) {
    let mut reached = 0.0;
    let crossing = candidates.iter().position(|c| {
        reached += f64::from(c.weight);
        reached >= enough
    });
    if let Some(last) = crossing {
        candidates.truncate(last + 1);
    }
}

fn keep_likeliest(candidates: &mut Vec<Candidate>, k: usize) {
    if k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, likelier);
        candidates.truncate(k);
    }
}

/// By weight, heaviest first, then by id: a total order, so that sorting is deterministic.
fn likelier(a: &Candidate, b: &Candidate) -> Ordering {
    b.weight.total_cmp(&a.weight).then(a.token.cmp(&b.token))
}

fn sum(weights: impl Iterator<Item = f32>) -> f64 {
    weights.map(f64::from).sum()
}

/// The token at which the running sum passes `uniform` of the whole.
fn draw(candidates: impl Iterator<Item = (TokenId, f32)> + Clone, uniform: f64) -> TokenId {
    let target = uniform * sum(candidates.clone().map(|c| c.1));
    let mut reached = 0.0;
    let mut last = 0;
    for (token, weight) in candidates {
        if weight > 0.0 {
            last = token;
            reached += f64::from(weight);
            if reached > target {
                return token;
            }
        }
    }
    last
}

struct Weights<'a> {
    logits: &'a mut [f32],
    most: f32,
    inverse: f32,
}

impl Kernel for Weights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let (most, inverse) = (s.splat(self.most), s.splat(self.inverse));
        let weigh = |x| exp(s, s.mul(s.sub(x, most), inverse));
        for chunk in self.logits.chunks_mut(LANES) {
            s.write(weigh(s.read(chunk)), chunk);
        }
    }
}

/// A thousandth of the likeliest: most nuclei end above.
const NUCLEUS_START: f32 = 1e-3;
const NUCLEUS_STEP: f32 = 1e-2;
