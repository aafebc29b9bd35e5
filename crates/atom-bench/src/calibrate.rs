//! How many words make a prompt of a given number of tokens: asked of the server itself.

use crate::client::{Client, Job};
use crate::error::Failure;
use crate::prompt::Prompts;

/// `tokens = overhead + per_word * words`, by the server's own tokenizer and chat template.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Calibration {
    /// Tokens that the template adds to any prompt.
    overhead: f64,
    per_word: f64,
}

/// Prompt numbers of the probes: no workload counts this far.
pub(crate) const PROBE: u64 = u64::MAX;
/// Outside of this a server's counts make no sense for words of five letters.
const PER_WORD_PLAUSIBLE: std::ops::RangeInclusive<f64> = 0.2..=10.0;

impl Calibration {
    /// One token a word: what is assumed of a server that counts no prompt tokens.
    pub(crate) const ASSUMED: Self = Self { overhead: 0.0, per_word: 1.0 };

    /// Token ids: nothing is added to them.
    pub(crate) const IDS: Self = Self { overhead: 0.0, per_word: 1.0 };

    /// Sends one prompt of token ids and gives the server's count of them, if it counts.
    pub(crate) async fn count_ids(
        client: &mut Client,
        prompts: Prompts,
        input_tokens: usize,
    ) -> Result<Option<u64>, Failure> {
        let prompt = prompts.prompt(PROBE, input_tokens);
        let job = Job { number: 0, prompt, max_tokens: 1, temperature: 0.0, seed: None };
        Ok(client.complete(&job).await?.prompt_tokens)
    }

    /// Sends two prompts, the shorter the beginning of the longer, and compares their counts.
    /// `Ok(None)`: the server gives no usable counts.
    pub(crate) async fn measure(
        client: &mut Client,
        prompts: Prompts,
        input_tokens: usize,
    ) -> Result<Option<Self>, Failure> {
        let long = input_tokens.max(2);
        let short = long.div_ceil(2);
        let mut counts = [0.0; 2];
        for (count, words) in counts.iter_mut().zip([short, long]) {
            let job = Job {
                number: 0,
                prompt: prompts.prompt(PROBE, words),
                max_tokens: 1,
                temperature: 0.0,
                seed: None,
            };
            match client.complete(&job).await?.prompt_tokens {
                Some(tokens) => *count = tokens as f64,
                None => return Ok(None),
            }
        }
        Ok(Self::through([short, long], counts))
    }

    /// The line through two points.
    fn through(words: [usize; 2], tokens: [f64; 2]) -> Option<Self> {
        let per_word = (tokens[1] - tokens[0]) / (words[1] as f64 - words[0] as f64);
        let overhead = (tokens[0] - per_word * words[0] as f64).max(0.0);
        PER_WORD_PLAUSIBLE.contains(&per_word).then_some(Self { overhead, per_word })
    }

    /// Words of a whole prompt of nearly `tokens` tokens, one at least.
    pub(crate) fn words(&self, tokens: usize) -> usize {
        (((tokens as f64 - self.overhead) / self.per_word).round() as usize).max(1)
    }

    /// Words of a part of a prompt.
    pub(crate) fn words_of_part(&self, tokens: usize) -> usize {
        (tokens as f64 / self.per_word).round() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_follow_from_two_counts() {
        let calibration = Calibration::through([100, 200], [180.0, 330.0]).unwrap();
        assert_eq!(calibration, Calibration { overhead: 30.0, per_word: 1.5 });
        assert_eq!(calibration.words(330), 200);
        assert_eq!(calibration.words_of_part(150), 100);
        assert_eq!(calibration.words(3), 1, "the template alone is longer");
        assert_eq!(Calibration::ASSUMED.words(77), 77);
    }

    #[test]
    fn counts_that_make_no_sense_are_not_used() {
        for tokens in [[5.0, 5.0], [9.0, 3.0], [1.0, 5000.0]] {
            assert_eq!(Calibration::through([100, 200], tokens), None);
        }
    }
}
