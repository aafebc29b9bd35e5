//! Log-probabilities: of one token, and of the likeliest.

use super::keys::{self, Key};
use super::passes::{self, ONE_PARTS, Peak, Weights};
use crate::isa::Isa;
use atom_base::{ScoredToken, TokenId, TopLogprobs};

/// `token` with its log-probability and those of the `top` likeliest.
pub(super) fn score(
    isa: Isa,
    logits: &[f32],
    peak: Peak,
    token: TokenId,
    top: u8,
    keys: &mut Vec<Key>,
) -> ScoredToken {
    let weights = Weights { largest: peak.logit, temperature: 1.0 };
    let log_total = (passes::mass(isa, logits, weights) as f64 / ONE_PARTS).ln();
    let logprob = |logit: f32| (f64::from(logit) - f64::from(peak.logit) - log_total) as f32;
    let mut scored = ScoredToken { token, logprob: logprob(logits[token as usize]), top: TopLogprobs::EMPTY };
    if top > 0 {
        keys::likeliest(isa, logits, usize::from(top), keys);
        keys.sort_unstable_by(|a, b| b.cmp(a));
        // Less likely than anything are only tokens that a mask forbids.
        let possible = keys.iter().filter(|key| key.logit() > f32::NEG_INFINITY);
        possible.for_each(|key| scored.top.push(key.token(), logprob(key.logit())));
    }
    scored
}
