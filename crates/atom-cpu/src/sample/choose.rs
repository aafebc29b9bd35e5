//! The draw: truncation, and the inverse of the cumulative distribution.

use super::Scratch;
use super::keys::{self, Key};
use super::passes::{self, BLOCK, Peak, Weights};
use crate::isa::Isa;
use atom_base::{SamplingParams, TokenId, rng};

/// Draws one token at a temperature above 0.
///
/// The order (likelier first, then lower id) is total, and every truncation keeps the first of it: so
/// it leaves a list of keys, which is then drawn from in that order. Where nothing truncates, tokens are
/// drawn from in order of id.
pub(super) fn choose(
    isa: Isa,
    logits: &[f32],
    peak: Peak,
    params: &SamplingParams,
    position: u32,
    scratch: &mut Scratch,
) -> TokenId {
    let weights = Weights { largest: peak.logit, temperature: params.temperature };
    let uniform = rng::uniform(params.seed, params.choice, position, 0);
    let keys = &mut scratch.keys;
    let top_k = params.top_k as usize;
    if (1..logits.len()).contains(&top_k) {
        keys::likeliest(isa, logits, top_k, keys);
        if params.min_p > 0.0 {
            let floor = min_p_floor(weights, params.min_p);
            keys.retain(|key| key.logit() >= floor);
        }
    } else if params.min_p > 0.0 {
        collect(isa, logits, min_p_floor(weights, params.min_p), keys);
    } else if params.top_p < 1.0 {
        let need = share_of(passes::mass(isa, logits, weights), params.top_p);
        collect_nucleus(isa, logits, weights, need, keys);
        let kept = keys::reach(isa, keys, weights, need);
        keys.truncate(kept);
        return draw(isa, keys, weights, uniform);
    } else {
        return draw_by_id(isa, logits, weights, uniform, &mut scratch.masses);
    }
    if params.top_p < 1.0 {
        let need = share_of(passes::mass_of(isa, keys, weights), params.top_p);
        let kept = keys::reach(isa, keys, weights, need);
        keys.truncate(kept);
    }
    draw(isa, keys, weights, uniform)
}

/// The logit of a token that is `min_p` times as likely as the likeliest, which stays whatever rounding
/// does to it.
fn min_p_floor(weights: Weights, min_p: f32) -> f32 {
    let Weights { largest, temperature } = weights;
    (f64::from(largest) + f64::from(temperature) * f64::from(min_p).ln()).min(f64::from(largest)) as f32
}

/// The least mass that is `top_p` of `total`.
fn share_of(total: u64, top_p: f32) -> u64 {
    ((f64::from(top_p) * total as f64).ceil() as u64).clamp(1, total)
}

/// Tokens whose logits are at least `floor`.
fn collect(isa: Isa, logits: &[f32], floor: f32, keys: &mut Vec<Key>) {
    keys.clear();
    for (index, block) in logits.chunks(BLOCK).enumerate() {
        passes::collect(isa, block, index * BLOCK, floor, keys);
    }
}

/// The likeliest tokens, as many as surely weigh `need`, without sorting the vocabulary.
fn collect_nucleus(isa: Isa, logits: &[f32], weights: Weights, need: u64, keys: &mut Vec<Key>) {
    for depth in NUCLEUS_DEPTHS {
        collect(isa, logits, weights.largest - depth * weights.temperature, keys);
        if passes::mass_of(isa, keys, weights) >= need {
            return;
        }
    }
    unreachable!("all tokens together weigh at least any part of their weight");
}

/// The key at which the running weight passes `uniform` of the whole.
pub(super) fn draw(isa: Isa, keys: &mut [Key], weights: Weights, uniform: f32) -> TokenId {
    let target = part_of(passes::mass_of(isa, keys, weights), uniform);
    let reached = keys::reach(isa, keys, weights, target + 1);
    keys[reached - 1].token()
}

/// The same over all tokens in order of id.
pub(super) fn draw_by_id(
    isa: Isa,
    logits: &[f32],
    weights: Weights,
    uniform: f32,
    masses: &mut Vec<u64>,
) -> TokenId {
    passes::block_masses(isa, logits, weights, masses);
    let mut left = part_of(masses.iter().sum(), uniform);
    let mut pass = |mass: u64| {
        let passed = mass > left;
        left -= if passed { 0 } else { mass };
        passed
    };
    let block = masses.iter().position(|&mass| pass(mass)).expect("the target is below the sum");
    let block_logits = &logits[block * BLOCK..][..BLOCK.min(logits.len() - block * BLOCK)];
    let each = passes::each_mass(isa, block_logits, weights);
    let token = each.iter().position(|&mass| pass(mass)).expect("a block weighs what its tokens weigh");
    (block * BLOCK + token) as TokenId
}

/// `total * uniform`, exactly, rounded down: below `total`. A uniform number is a multiple of 2^-24.
fn part_of(total: u64, uniform: f32) -> u64 {
    let numerator = (uniform * (1u32 << 24) as f32) as u128;
    ((u128::from(total) * numerator) >> 24) as u64
}

/// Distances below the likeliest, in temperatures. A step down costs one pass over the logits; a step too
/// far brings candidates that have to be sorted out again.
const NUCLEUS_DEPTHS: [f32; 8] = [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, f32::INFINITY];
