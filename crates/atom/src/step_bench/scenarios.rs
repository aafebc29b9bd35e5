//! What is measured: read from the flags, and checked against what the ranks can hold before anything runs.

use anyhow::{Result, ensure};
use atom_engine::EngineLimits;
use clap::ValueEnum;
use std::str::FromStr;

/// So many requests, all at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    pub(super) requests: usize,
    /// Tokens of each prompt.
    pub(super) prompt: usize,
    /// Tokens of each answer.
    pub(super) answer: usize,
}

/// A kind of figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    First,
    Decode,
    Prefill,
    Load,
}

/// One figure to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scenario {
    /// The time to the first token of a prompt that is alone.
    First { prompt: usize },
    /// The time from step to step while a batch decodes, `steps` of them.
    Decode { batch: usize, context: usize, steps: usize },
    /// Prompt tokens each second.
    Prefill(Load),
    /// Tokens of answers each second.
    Load(Load),
}

impl FromStr for Load {
    type Err = String;

    /// `48x2048`: 48 prompts of 2,048 tokens, a token of answer to each; `256x1024+256`: 256 to each.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "'{text}' is no load; write REQUESTSxPROMPT or REQUESTSxPROMPT+ANSWER, such as 256x1024+256"
            )
        };
        let number = |text: &str| text.parse().ok().filter(|&n: &usize| n > 0).ok_or_else(wrong);
        let (requests, tokens) = text.split_once('x').ok_or_else(wrong)?;
        let (prompt, answer) = tokens.split_once('+').unwrap_or((tokens, "1"));
        Ok(Self { requests: number(requests)?, prompt: number(prompt)?, answer: number(answer)? })
    }
}

impl Scenario {
    /// What it is called in the table, and the flag that asks for it.
    pub(super) fn name(&self) -> String {
        match *self {
            Self::First { prompt } => format!("first token, {prompt} tokens"),
            Self::Decode { batch, context, .. } => format!("next token, {batch} at {context}"),
            Self::Prefill(Load { requests, prompt, .. }) => format!("prefill, {requests} x {prompt}"),
            Self::Load(Load { requests, prompt, answer }) => {
                format!("load, {requests} x {prompt} + {answer}")
            }
        }
    }

    fn flag(&self) -> String {
        match *self {
            Self::First { prompt } => format!("--first {prompt}"),
            Self::Decode { batch, context, .. } => format!("--decode {batch} at --context {context}"),
            Self::Prefill(load) => format!("--prefill {}x{}", load.requests, load.prompt),
            Self::Load(load) => format!("--load {}x{}+{}", load.requests, load.prompt, load.answer),
        }
    }

    /// Its requests, and tokens of prompt and answer of each; steps have up to `rows_max` rows.
    pub(super) fn requests(&self, rows_max: usize) -> Load {
        match *self {
            Self::First { prompt } => Load { requests: 1, prompt, answer: 1 },
            Self::Prefill(load) => Load { answer: 1, ..load },
            Self::Load(load) => load,
            Self::Decode { batch, context, steps } => {
                // The first of them decode while the prompts of the last are computed; twice as long, since steps need
                // not be full.
                let beside = (batch * context).div_ceil(rows_max.saturating_sub(batch / 2).max(1));
                Load { requests: batch, prompt: context, answer: 2 * beside + steps + STEPS_BESIDE }
            }
        }
    }

    /// True if all of its requests must run together.
    fn is_together(&self) -> bool {
        matches!(self, Self::Decode { .. })
    }

    /// Refuses what the ranks can't hold, with the numbers.
    pub(super) fn check(&self, limits: &EngineLimits, page_size: usize, rows_max: usize) -> Result<()> {
        let (flag, Load { requests, prompt, answer }) = (self.flag(), self.requests(rows_max));
        let EngineLimits { lanes, max_num_seqs, queue_max, max_model_len, cache_tokens, .. } = *limits;
        ensure!(
            prompt + answer <= max_model_len,
            "{flag} has requests of {prompt} + {answer} tokens, and --max-model-len is {max_model_len}"
        );
        let places = lanes * if self.is_together() { max_num_seqs } else { max_num_seqs + queue_max };
        ensure!(
            requests <= places,
            "{flag} has {requests} requests at once and {places} can be taken: {lanes} lanes with --max-num-seqs \
             {max_num_seqs} and --max-waiting {queue_max}; raise one of them to {} or more",
            requests.div_ceil(lanes)
        );
        let each = (prompt + answer).next_multiple_of(page_size);
        let needed = if self.is_together() { requests.div_ceil(lanes) * each } else { each };
        ensure!(
            needed <= cache_tokens,
            "{flag} needs {needed} tokens of KV cache in a lane and there are {cache_tokens}; raise --kv-cache-memory or \
             --gpu-memory-utilization"
        );
        Ok(())
    }
}

/// Steps of a batch beside those that are timed: the first and the last, which are dropped, those that count experts,
/// and some to spare.
const STEPS_BESIDE: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_read_and_what_is_none_is_refused() {
        let load = |requests, prompt, answer| Ok(Load { requests, prompt, answer });
        assert_eq!("48x2048".parse(), load(48, 2048, 1));
        assert_eq!("256x1024+256".parse(), load(256, 1024, 256));
        for wrong in ["", "48", "48x", "x2", "0x4", "4x0", "4x4+0", "4x4+", "4x4x4", "-1x4", "4 x 4"] {
            let refusal = wrong.parse::<Load>().unwrap_err();
            assert!(refusal.contains(&format!("'{wrong}'")) && refusal.contains("256x1024+256"), "{refusal}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_numbers() {
        let limits = EngineLimits {
            max_model_len: 2048,
            cache_tokens: 40_000,
            queue_max: 100,
            max_num_seqs: 32,
            vocab_size: 1000,
            lanes: 1,
            grammars: false,
        };
        let check = |scenario: Scenario| scenario.check(&limits, 64, 8192).map_err(|error| error.to_string());
        let decode = |batch, context| Scenario::Decode { batch, context, steps: 20 };
        let load = |requests, prompt, answer| Load { requests, prompt, answer };
        for (scenario, parts) in [
            (Scenario::First { prompt: 2048 }, &["--first 2048", "2048 + 1", "--max-model-len is 2048"][..]),
            (
                decode(33, 100),
                &["--decode 33", "33 requests", "32 can be taken", "--max-num-seqs 32", "33 or more"],
            ),
            // 32 requests of 1200 + 10 + 20 + 32 tokens in pages of 64.
            (decode(32, 1200), &["--decode 32 at --context 1200", "40960 tokens", "40000"]),
            (
                Scenario::Prefill(load(133, 2000, 1)),
                &["--prefill 133x2000", "133 requests", "132 can be taken"],
            ),
            (Scenario::Load(load(2, 1024, 1025)), &["--load 2x1024+1025", "1024 + 1025 tokens"]),
        ] {
            let refusal = check(scenario).unwrap_err();
            assert!(parts.iter().all(|part| refusal.contains(part)), "{scenario:?}: {refusal}");
        }
        for scenario in [
            Scenario::First { prompt: 2047 },
            decode(32, 1024),
            // Of a load that is larger than the cache some wait.
            Scenario::Prefill(load(132, 2000, 1)),
            Scenario::Load(load(132, 1024, 1024)),
        ] {
            check(scenario).unwrap();
        }
    }
}
