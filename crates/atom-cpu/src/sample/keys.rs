//! Tokens in order of likelihood.

use super::passes::{self, Weights};
use crate::isa::Isa;
use atom_base::TokenId;

/// A token and its logit as one number: the larger, the likelier, and among equals the lower id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key(u64);

impl Key {
    /// `logit` isn't NaN.
    #[inline(always)]
    pub(super) fn new(logit: f32, token: TokenId) -> Self {
        // Adding 0 makes one zero of two; flipping makes negative floats sort below positive ones.
        let bits = (logit + 0.0).to_bits();
        let ordered = if bits & SIGN == 0 { bits | SIGN } else { !bits };
        Self(u64::from(ordered) << 32 | u64::from(!token))
    }

    #[inline(always)]
    pub(super) fn logit(self) -> f32 {
        let ordered = (self.0 >> 32) as u32;
        f32::from_bits(if ordered & SIGN == 0 { !ordered } else { ordered & !SIGN })
    }

    #[inline(always)]
    pub(super) fn token(self) -> TokenId {
        !(self.0 as u32)
    }
}

/// Leaves the `n` likeliest, at least one, in `keys`, in no order. Needs room for all.
pub(super) fn likeliest(isa: Isa, logits: &[f32], n: usize, keys: &mut Vec<Key>) {
    keys.clear();
    // Pruning costs as much as it drops, and what it teaches keeps most blocks from adding anything.
    let full = (2 * n).max(PRUNE_MIN);
    let mut floor = f32::NEG_INFINITY;
    for (index, block) in logits.chunks(passes::BLOCK).enumerate() {
        passes::collect(isa, block, index * passes::BLOCK, floor, keys);
        if keys.len() > full {
            prune(keys, n);
            // A later token with this logit has a higher id than the n that are kept.
            floor = keys[n - 1].logit().next_up();
        }
    }
    if keys.len() > n {
        prune(keys, n);
    }
}

/// Keeps the `n` likeliest; the last of them stands last.
fn prune(keys: &mut Vec<Key>, n: usize) {
    keys.select_nth_unstable_by(n - 1, |a, b| b.cmp(a));
    keys.truncate(n);
}

/// The least number of likeliest keys whose weight reaches `need`, at least 1 and at most what all of
/// them weigh. They are moved to the front, the least likely of them last.
///
/// A quickselect by weight: each round halves what is left, and weighs only one half.
pub(super) fn reach(isa: Isa, keys: &mut [Key], weights: Weights, need: u64) -> usize {
    let (mut start, mut end, mut before) = (0, keys.len(), 0);
    // The answer lies in start + 1 ..= end; what stands before `start` weighs `before`.
    while end - start > 1 {
        let middle = (end - start) / 2;
        let part = &mut keys[start..end];
        part.select_nth_unstable_by(middle, |a, b| b.cmp(a));
        let heavier = passes::mass_of(isa, &part[..middle], weights);
        if before + heavier >= need {
            end = start + middle;
        } else {
            before += heavier;
            start += middle;
        }
    }
    end
}

const SIGN: u32 = 1 << 31;

/// Fewer keys than this are not worth a pruning.
const PRUNE_MIN: usize = 256;
