//! A request at the engine's door, what the door may answer, and what comes back from inside.

use crate::constraint::GrammarRef;
use atom_base::{
    FinishReason, LaneId, MaskFault, RequestId, SamplingParams, ScoredToken, StopParams, TokenId,
};
use std::sync::Arc;
use thiserror::Error;

/// One continuation to compute. A request with `n` choices is `n` of these, sharing `prompt`.
#[derive(Clone, Debug)]
pub struct Request {
    /// Unique in the process; chosen by the caller.
    pub id: RequestId,
    /// At least one token.
    pub prompt: Arc<[TokenId]>,
    /// Validated against the vocabulary.
    pub sampling: Arc<SamplingParams>,
    /// When it ends.
    pub stop: StopParams,
    /// What its tokens are held to, if anything.
    pub grammar: Option<GrammarRef>,
    /// `Some`: this lane and no other. `None`: the session's, or the one with the least to do.
    pub lane: Option<LaneId>,
    /// Requests of equal sessions go to one lane, where what they share is cached.
    pub session: Option<u64>,
}

/// What the engine can serve: fixed at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineLimits {
    /// Tokens of prompt and continuation together.
    pub max_model_len: usize,
    /// Cache positions of one lane: a longer request can never fit.
    pub cache_tokens: usize,
    /// Requests that may wait in one lane.
    pub queue_max: usize,
    /// Requests that run at once in one lane.
    pub max_num_seqs: usize,
    /// Tokens known to the model.
    pub vocab_size: usize,
    /// Lanes that take requests.
    pub lanes: usize,
    /// The device can hold a request to a grammar.
    pub grammars: bool,
}

/// Why a request is not taken. Nothing was allocated for it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// No token to start from.
    #[error("the prompt is empty; it needs at least one token")]
    EmptyPrompt,
    /// Prompt plus `max_tokens` is more than the model can hold.
    #[error(
        "this model's maximum context length is {max} tokens, but {prompt} of prompt and {max_tokens} of completion \
         were asked for; shorten the prompt or lower max_tokens"
    )]
    TooLong {
        /// Tokens of prompt.
        prompt: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// `max_model_len`.
        max: usize,
    },
    /// It would fit the model but not the KV cache, even alone.
    #[error(
        "prompt and completion need {needed} tokens of KV cache, but a lane has {cache}; shorten the request or give \
         the server a larger cache"
    )]
    NeverFits {
        /// Positions needed at the most.
        needed: usize,
        /// Positions of the cache.
        cache: usize,
    },
    /// A token outside of the vocabulary.
    #[error("token id {token} is outside of the vocabulary of {vocab}")]
    UnknownToken {
        /// The id.
        token: TokenId,
        /// Vocabulary size.
        vocab: usize,
    },
    /// `lane` names a lane that does not exist.
    #[error("data_parallel_rank {lane} does not exist: this server has {lanes} lanes, counted from 0")]
    NoSuchLane {
        /// What was asked for.
        lane: u16,
        /// What there is.
        lanes: usize,
    },
    /// A grammar, where the device would not heed it.
    #[error(
        "the device that this server runs on can't hold the output to a grammar or schema yet; leave it out, or use a \
         server with --device cpu"
    )]
    NoGrammars,
    /// The bounded queue is full: try again later (HTTP 429).
    #[error("{waiting} requests are waiting, the most this server queues; try again later")]
    QueueFull {
        /// Requests waiting.
        waiting: usize,
    },
    /// The server is draining or a rank has failed (HTTP 503).
    #[error("the server is not accepting requests: {0}")]
    Closed(String),
}

/// Why a request that was taken could not be finished.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum EngineError {
    /// A rank failed while the request was running; what was streamed before stands.
    #[error("the engine failed while computing this request: {0}")]
    Rank(String),
    /// The model produced NaN logits for this request.
    #[error("the model's logits for this request are not numbers (NaN) at position {position}")]
    NotANumber {
        /// Position of the token that could not be chosen.
        position: u32,
    },
    /// Its grammar left nothing to choose, could not be computed, or not in time. Others go on.
    #[error("the output can't be held to its grammar any further, at token {token} of it: {fault}")]
    Grammar {
        /// Which token of the output could not be chosen; the first one is 1.
        token: u32,
        /// Why.
        fault: MaskFault,
    },
}

/// What the engine says about one request, in order; exactly one terminal event, then silence.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Admitted: computation starts. `cached_tokens` of the prompt are taken from the prefix cache.
    Started {
        /// Prompt tokens whose keys and values were found in the cache.
        cached_tokens: u32,
    },
    /// Log-probability of prompt token `index` given those before it; in order, `index` from 1.
    PromptScored {
        /// Index in the prompt.
        index: u32,
        /// The prompt's own token with its log-probability.
        scored: ScoredToken,
    },
    /// The next token of the continuation. A stop token is not sent: it ends the text.
    Token(ScoredToken),
    /// Terminal: done.
    Finished(FinishReason),
    /// Terminal: failed.
    Failed(EngineError),
}

impl EngineLimits {
    /// Refuses what can never run. Queue space is checked by the caller, which knows the queue.
    pub fn check(&self, request: &Request) -> Result<(), Refusal> {
        let prompt = request.prompt.len();
        let max_tokens = request.stop.max_tokens as usize;
        if prompt == 0 {
            return Err(Refusal::EmptyPrompt);
        }
        if let Some(&token) = request.prompt.iter().find(|&&t| t as usize >= self.vocab_size) {
            return Err(Refusal::UnknownToken { token, vocab: self.vocab_size });
        }
        if request.grammar.is_some() && !self.grammars {
            return Err(Refusal::NoGrammars);
        }
        let needed = prompt.saturating_add(max_tokens);
        if needed > self.max_model_len {
            return Err(Refusal::TooLong { prompt, max_tokens, max: self.max_model_len });
        }
        if needed > self.cache_tokens {
            return Err(Refusal::NeverFits { needed, cache: self.cache_tokens });
        }
        if let Some(lane) = request.lane.filter(|lane| usize::from(lane.0) >= self.lanes) {
            return Err(Refusal::NoSuchLane { lane: lane.0, lanes: self.lanes });
        }
        Ok(())
    }
}
