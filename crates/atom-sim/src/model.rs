//! The model of the simulated device: a pure function of all tokens so far. And the answer that it
//! gives to a request alone, computed naively: no cache, no pages, no batch, nothing remembered.

use atom_base::{SamplingParams, ScoredToken, TokenId, TopLogprobs};
use atom_engine::Request;

/// A model whose next token is a hash of its whole context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FakeModel {
    /// Tokens are `0 .. vocab`.
    pub vocab: u32,
    /// The end token.
    pub eos: TokenId,
    /// Of 1000 choices, how many are the end token whatever the hash says.
    pub eos_per_mille: u32,
    /// Of 1000 rows with logits, how many are not numbers.
    pub nan_per_mille: u32,
}

/// What keys and values of a position depend on: the tokens of all positions up to it, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Context(u64);

/// How often each token occurs in the prompt and in the continuation: what penalties depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct History {
    prompt: u64,
    generated: u64,
}

/// All that a request must get to hear.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Scores of prompt tokens 1, 2 ..; empty when none were asked for.
    pub scored: Vec<ScoredToken>,
    /// The continuation.
    pub tokens: Vec<ScoredToken>,
    /// How it ends if nobody interferes.
    pub ending: Ending,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// An end token.
    Stop,
    /// As long as asked for.
    Length,
    /// Logits that are not numbers, for the token at `position`.
    NotANumber {
        /// Position of the token that could not be chosen or scored.
        position: u32,
    },
    /// Aborted from outside.
    Aborted,
    /// Its lane failed.
    Failed,
}

impl FakeModel {
    /// What `request` is answered when it runs alone.
    pub fn answer(&self, request: &Request) -> Answer {
        let params = &*request.sampling;
        let prompt = &*request.prompt;
        let (mut scored, mut tokens) = (Vec::new(), Vec::new());
        let targets = if params.prompt_logprobs.is_some() { 1..prompt.len() } else { 0..0 };
        for index in targets {
            let score = self.score(Context::of(&prompt[..index]), prompt[index], params);
            if score.is_not_a_number() {
                return Answer { scored, tokens, ending: Ending::NotANumber { position: index as u32 } };
            }
            scored.push(score);
        }
        let mut all = prompt.to_vec();
        while tokens.len() < request.stop.max_tokens as usize {
            let history = params.has_penalties().then(|| History::of(prompt, &all[prompt.len()..]));
            let next = self.choose(Context::of(&all), history, params);
            if next.is_not_a_number() {
                return Answer { scored, tokens, ending: Ending::NotANumber { position: all.len() as u32 } };
            }
            let is_end = next.token == self.eos && !request.stop.ignore_eos;
            if is_end || request.stop.stop_token_ids.contains(&next.token) {
                return Answer { scored, tokens, ending: Ending::Stop };
            }
            tokens.push(next);
            all.push(next.token);
        }
        Answer { scored, tokens, ending: Ending::Length }
    }

    /// Chooses the token that follows `context`.
    pub(crate) fn choose(
        &self,
        context: Context,
        history: Option<History>,
        params: &SamplingParams,
    ) -> ScoredToken {
        let key = mix(params.seed ^ u64::from(params.choice) << 48);
        let past = history.map_or(0, |h| mix(h.prompt) ^ h.generated);
        let word = mix(context.0 ^ key ^ past);
        if self.is_not_a_number(word) {
            return ScoredToken::NOT_A_NUMBER;
        }
        let token =
            if out_of_1000(word ^ 2) < self.eos_per_mille { self.eos } else { self.token_of(word ^ 3) };
        self.scored(context, token, params.logprobs)
    }

    /// Scores a token that the prompt itself has after `context`.
    pub(crate) fn score(&self, context: Context, token: TokenId, params: &SamplingParams) -> ScoredToken {
        if self.is_not_a_number(context.0) {
            return ScoredToken::NOT_A_NUMBER;
        }
        self.scored(context, token, params.prompt_logprobs)
    }

    fn is_not_a_number(&self, word: u64) -> bool {
        out_of_1000(word ^ 1) < self.nan_per_mille
    }

    fn token_of(&self, word: u64) -> TokenId {
        (mix(word) % u64::from(self.vocab)) as TokenId
    }

    fn scored(&self, context: Context, token: TokenId, alternatives: Option<u8>) -> ScoredToken {
        let Some(alternatives) = alternatives else { return ScoredToken::bare(token) };
        let mut top = TopLogprobs::EMPTY;
        for rank in 0..alternatives {
            let other = self.token_of(context.0 ^ (16 + u64::from(rank)));
            top.push(other, context.logprob(other));
        }
        ScoredToken { token, logprob: context.logprob(token), top }
    }
}

impl Context {
    /// The context of the last of `tokens`, from scratch.
    pub fn of(tokens: &[TokenId]) -> Self {
        tokens.iter().fold(Self::default(), |context, &token| context.then(token))
    }

    /// The context one token further.
    pub(crate) fn then(self, token: TokenId) -> Self {
        Self(mix(self.0.rotate_left(17) ^ (u64::from(token) + 1)))
    }

    fn logprob(self, token: TokenId) -> f32 {
        -((mix(self.0 ^ u64::from(token) << 20) >> 40) as f32) / 1e6
    }
}

impl History {
    pub(crate) fn of(prompt: &[TokenId], generated: &[TokenId]) -> Self {
        let count = |tokens: &[TokenId]| tokens.iter().fold(0, |sum, &t| count_in(sum, t));
        Self { prompt: count(prompt), generated: count(generated) }
    }

    pub(crate) fn push(&mut self, token: TokenId) {
        self.generated = count_in(self.generated, token);
    }
}

/// True when both say the same, to the bit. (A log-probability that nobody asked for is NaN.)
pub(crate) fn identical(a: &ScoredToken, b: &ScoredToken) -> bool {
    a.token == b.token && a.logprob.to_bits() == b.logprob.to_bits() && a.top.as_slice() == b.top.as_slice()
}

/// A good mixer of 64 bits: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
pub(crate) fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// Counts, not order: adding is commutative.
fn count_in(sum: u64, token: TokenId) -> u64 {
    sum.wrapping_add(mix(token.into()))
}

fn out_of_1000(word: u64) -> u32 {
    (mix(word) % 1000) as u32
}
