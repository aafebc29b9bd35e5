//! The answer, whole or in chunks.

use crate::choice::{Entry, Finish, Piece};
use crate::params::Params;
use crate::server::Server;
use crate::shape::{Envelope, Shape, finite, token_string};
use atom_base::TokenId;
use atom_text::Tokenizer;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `chat.completion` objects, and `chat.completion.chunk` in a stream.
pub(crate) struct ChatShape {
    envelope: Envelope,
    tokenizer: Arc<Tokenizer>,
    logprobs: bool,
}

impl ChatShape {
    pub(crate) fn new(server: &Server, params: &Params) -> Self {
        Self {
            envelope: Envelope::new(server.answer_id("chatcmpl"), params.model.clone()),
            tokenizer: server.text.tokenizer.clone(),
            logprobs: params.sampling.logprobs.is_some(),
        }
    }

    fn logprobs(&self, entries: &[Entry]) -> Value {
        if !self.logprobs || entries.is_empty() {
            return Value::Null;
        }
        let content: Vec<Value> = entries.iter().map(|entry| logprob(&self.tokenizer, entry)).collect();
        json!({"content": content})
    }
}

impl Shape for ChatShape {
    fn opening(&self, index: u32) -> Option<Value> {
        Some(chunk_choice(index, json!({"role": "assistant", "content": ""}), Value::Null, None))
    }

    fn delta(&self, piece: &Piece) -> Value {
        let delta = json!({"content": piece.text});
        chunk_choice(piece.index, delta, self.logprobs(&piece.entries), None)
    }

    fn closing(&self, index: u32, finish: Finish) -> Value {
        chunk_choice(index, json!({}), Value::Null, Some(finish))
    }

    fn chunk(&self, choices: Vec<Value>) -> Map<String, Value> {
        self.envelope.wrap("chat.completion.chunk", choices)
    }

    fn whole(&self, pieces: &[Piece]) -> Map<String, Value> {
        let choice = |piece: &Piece| {
            json!({
                "index": piece.index,
                "message": {"role": "assistant", "content": piece.text},
                "logprobs": self.logprobs(&piece.entries),
                "finish_reason": piece.finish.map(Finish::as_str),
            })
        };
        self.envelope.wrap("chat.completion", pieces.iter().map(choice).collect())
    }
}

fn chunk_choice(index: u32, delta: Value, logprobs: Value, finish: Option<Finish>) -> Value {
    json!({
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish.map(Finish::as_str),
    })
}

fn logprob(tokenizer: &Tokenizer, entry: &Entry) -> Value {
    let scored =
        entry.score.as_ref().expect("only a prompt's first token has no score, and chat has no echo");
    let mut value = token_logprob(tokenizer, entry.token, scored.logprob);
    let top = scored.top.as_slice().iter().map(|&(token, logprob)| token_logprob(tokenizer, token, logprob));
    value["top_logprobs"] = top.collect();
    value
}

fn token_logprob(tokenizer: &Tokenizer, token: TokenId, logprob: f32) -> Value {
    json!({
        "token": token_string(tokenizer, token),
        "logprob": finite(logprob),
        "bytes": tokenizer.token_bytes(token).unwrap_or_default(),
    })
}
