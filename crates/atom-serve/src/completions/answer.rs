//! The answer, whole or in chunks.

use crate::choice::{Entry, Finish, Piece};
use crate::params::Params;
use crate::server::Server;
use crate::shape::{Envelope, Shape, finite, token_string};
use atom_text::Tokenizer;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `text_completion` objects.
pub(crate) struct CompletionShape {
    envelope: Envelope,
    tokenizer: Arc<Tokenizer>,
    logprobs: bool,
}

impl CompletionShape {
    pub(crate) fn new(server: &Server, params: &Params) -> Self {
        Self {
            envelope: Envelope::new(server.answer_id("cmpl"), params.model.clone()),
            tokenizer: server.text.tokenizer.clone(),
            logprobs: params.sampling.logprobs.is_some(),
        }
    }

    fn choice(&self, piece: &Piece, finish: Option<Finish>) -> Value {
        let logprobs = if self.logprobs && !piece.entries.is_empty() {
            logprobs(&self.tokenizer, &piece.entries)
        } else {
            Value::Null
        };
        json!({
            "index": piece.index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": finish.map(Finish::as_str),
        })
    }
}

impl Shape for CompletionShape {
    fn opening(&self, _index: u32) -> Option<Value> {
        None
    }

    fn delta(&self, piece: &Piece) -> Value {
        self.choice(piece, None)
    }

    fn closing(&self, index: u32, finish: Finish) -> Value {
        self.choice(&Piece { index, ..Piece::default() }, Some(finish))
    }

    fn chunk(&self, choices: Vec<Value>) -> Map<String, Value> {
        self.envelope.wrap("text_completion", choices)
    }

    fn whole(&self, pieces: &[Piece]) -> Map<String, Value> {
        let choices = pieces.iter().map(|piece| self.choice(piece, piece.finish)).collect();
        self.envelope.wrap("text_completion", choices)
    }
}

/// Four parallel lists. The map of alternatives always contains the token itself, so that "was it the
/// likeliest" can be read from the map alone.
fn logprobs(tokenizer: &Tokenizer, entries: &[Entry]) -> Value {
    let (mut tokens, mut scores, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for entry in entries {
        let token = token_string(tokenizer, entry.token);
        match &entry.score {
            None => {
                scores.push(Value::Null);
                tops.push(Value::Null);
            }
            Some(scored) => {
                let mut map = Map::new();
                let alternatives = scored.top.as_slice().iter().copied();
                for (id, logprob) in alternatives.chain([(entry.token, scored.logprob)]) {
                    // Two tokens may be spelled alike; the likelier one comes first and stays.
                    map.entry(token_string(tokenizer, id)).or_insert_with(|| finite(logprob).into());
                }
                scores.push(finite(scored.logprob).into());
                tops.push(Value::Object(map));
            }
        }
        tokens.push(token);
        offsets.push(entry.offset);
    }
    json!({"tokens": tokens, "token_logprobs": scores, "top_logprobs": tops, "text_offset": offsets})
}
