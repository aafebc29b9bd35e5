//! What comes back from a step for one row: a token, its log-probability, and the alternatives.

use crate::ids::TokenId;

/// Room for alternatives in a [`ScoredToken`]; see [`crate::limits::TOP_LOGPROBS_MAX`].
pub const MAX_TOP_LOGPROBS: usize = crate::limits::TOP_LOGPROBS_MAX;

/// The likeliest tokens of a row, likeliest first. Inline, so that a step allocates nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopLogprobs {
    len: u8,
    entries: [(TokenId, f32); MAX_TOP_LOGPROBS],
}

/// A token with its natural-log probability under the model (before temperature and penalties).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoredToken {
    /// The token.
    pub token: TokenId,
    /// `ln p(token)`; NaN when no log-probability was asked for.
    pub logprob: f32,
    /// Alternatives, when asked for.
    pub top: TopLogprobs,
}

/// Why a continuation ended, in the engine's own words; the HTTP layer maps them to its API's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The model's end token, or one of the request's `stop_token_ids`.
    Stop,
    /// `max_tokens` reached, or the model's context is full.
    Length,
    /// The client went away or a stop string was found.
    Aborted,
}

impl TopLogprobs {
    /// No alternatives.
    pub const EMPTY: Self = Self { len: 0, entries: [(0, 0.0); MAX_TOP_LOGPROBS] };

    /// Appends an alternative. Panics beyond [`MAX_TOP_LOGPROBS`], which validation rules out.
    pub fn push(&mut self, token: TokenId, logprob: f32) {
        self.entries[usize::from(self.len)] = (token, logprob);
        self.len += 1;
    }

    /// The alternatives, likeliest first.
    pub fn as_slice(&self) -> &[(TokenId, f32)] {
        &self.entries[..usize::from(self.len)]
    }
}

impl ScoredToken {
    /// What a backend reports for a row whose logits are NaN: no token can be chosen.
    pub const NOT_A_NUMBER: Self = Self { token: TokenId::MAX, logprob: f32::NAN, top: TopLogprobs::EMPTY };

    /// What a backend reports for a row whose mask did not come: see [`crate::MaskCell::fault`].
    pub const NOT_CHOSEN: Self = Self { token: TokenId::MAX - 1, ..Self::NOT_A_NUMBER };

    /// True for [`Self::NOT_A_NUMBER`].
    pub fn is_not_a_number(&self) -> bool {
        self.token == TokenId::MAX
    }

    /// A token without log-probabilities.
    pub fn bare(token: TokenId) -> Self {
        Self { token, logprob: f32::NAN, top: TopLogprobs::EMPTY }
    }
}
