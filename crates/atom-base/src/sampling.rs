//! What a request asks of sampling and of stopping, checked once at the door.

use crate::ids::TokenId;
use crate::limits;
use thiserror::Error;

/// How the next token is chosen. Build it, then [`validate`](Self::validate) it once.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy; otherwise logits are divided by it. `0 ..= 2`.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probability reaches this. `(0, 1]`; 1 keeps all.
    pub top_p: f32,
    /// Keep the k likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep tokens at least this fraction as likely as the likeliest. `0 ..= 1`; 0 keeps all.
    pub min_p: f32,
    /// Key of the generator, with `choice` and the token's position.
    pub seed: u64,
    /// Which of the request's `n` choices this is.
    pub choice: u32,
    /// Subtracted once from the logit of every token generated so far. `-2 ..= 2`.
    pub presence_penalty: f32,
    /// Subtracted per occurrence among the generated tokens. `-2 ..= 2`.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in the prompt or generated. `0.01 ..= 2`; 1 is off.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens. Each in `-100 ..= 100`.
    pub logit_bias: Box<[(TokenId, f32)]>,
    /// Report the log-probability of the sampled token and this many alternatives.
    pub logprobs: Option<u8>,
    /// Report log-probabilities of the prompt's own tokens, with this many alternatives.
    pub prompt_logprobs: Option<u8>,
}

/// When a continuation ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopParams {
    /// Tokens to generate at the most. 0 is allowed with prompt log-probabilities: score only.
    pub max_tokens: u32,
    /// Tokens that end the text, besides the model's own end tokens. They are not part of the text.
    pub stop_token_ids: Box<[TokenId]>,
    /// Go on past the model's end tokens.
    pub ignore_eos: bool,
}

/// A sampling parameter out of range: the client's fault, HTTP 400.
#[derive(Clone, Debug, Error, PartialEq)]
#[error("{name} is {got}; it must be {expected}")]
pub struct SamplingError {
    /// The field as the API spells it.
    pub name: &'static str,
    /// What was sent.
    pub got: String,
    /// The legal range, in words.
    pub expected: String,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            choice: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Box::default(),
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

impl Default for StopParams {
    fn default() -> Self {
        Self { max_tokens: 16, stop_token_ids: Box::default(), ignore_eos: false }
    }
}

impl SamplingParams {
    /// Greedy decoding, everything else off.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// True when token counts of the request's past are needed.
    pub fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repetition_penalty != 1.0
    }

    /// Checks every range, NaN included, against a vocabulary of `vocab` tokens.
    pub fn validate(&self, vocab: u32) -> Result<(), SamplingError> {
        let within = |name, value: f32, low: f32, high: f32| {
            // Written so that NaN fails.
            if value >= low && value <= high {
                Ok(())
            } else {
                Err(refuse(name, value, format!("from {low} to {high}")))
            }
        };
        within("temperature", self.temperature, 0.0, 2.0)?;
        within("top_p", self.top_p, f32::MIN_POSITIVE, 1.0)
            .map_err(|_| refuse("top_p", self.top_p, "above 0 and at most 1".into()))?;
        within("min_p", self.min_p, 0.0, 1.0)?;
        within("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        within("repetition_penalty", self.repetition_penalty, limits::REPETITION_PENALTY_MIN, 2.0)?;
        if self.logit_bias.len() > limits::LOGIT_BIAS_MAX {
            let expected = format!("at most {} entries", limits::LOGIT_BIAS_MAX);
            return Err(refuse("logit_bias", format!("{} entries", self.logit_bias.len()), expected));
        }
        for &(token, bias) in &self.logit_bias {
            within("logit_bias", bias, -100.0, 100.0)?;
            if token >= vocab {
                return Err(refuse(
                    "logit_bias",
                    format!("for token {token}"),
                    format!("for tokens below {vocab}"),
                ));
            }
        }
        for (name, count) in [("top_logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            if count.is_some_and(|n| usize::from(n) > limits::TOP_LOGPROBS_MAX) {
                let expected = format!("at most {}", limits::TOP_LOGPROBS_MAX);
                return Err(refuse(name, count.unwrap_or_default(), expected));
            }
        }
        Ok(())
    }
}

fn refuse(name: &'static str, got: impl ToString, expected: String) -> SamplingError {
    SamplingError { name, got: got.to_string(), expected }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_range_is_checked_and_nan_is_never_in_range() {
        let bad = |f: fn(&mut SamplingParams)| {
            let mut params = SamplingParams::default();
            f(&mut params);
            params.validate(100).unwrap_err().name
        };
        assert_eq!(bad(|p| p.temperature = f32::NAN), "temperature");
        assert_eq!(bad(|p| p.temperature = -0.1), "temperature");
        assert_eq!(bad(|p| p.top_p = 0.0), "top_p");
        assert_eq!(bad(|p| p.top_p = 1.1), "top_p");
        assert_eq!(bad(|p| p.min_p = f32::INFINITY), "min_p");
        assert_eq!(bad(|p| p.presence_penalty = 2.5), "presence_penalty");
        assert_eq!(bad(|p| p.frequency_penalty = -2.5), "frequency_penalty");
        assert_eq!(bad(|p| p.repetition_penalty = 0.0), "repetition_penalty");
        assert_eq!(bad(|p| p.logit_bias = Box::new([(100, 0.0)])), "logit_bias");
        assert_eq!(bad(|p| p.logit_bias = Box::new([(1, f32::NAN)])), "logit_bias");
        assert_eq!(bad(|p| p.logprobs = Some(21)), "top_logprobs");
        assert!(SamplingParams::default().validate(100).is_ok());
    }
}
