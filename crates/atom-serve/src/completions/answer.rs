//! The answer, whole or in chunks.

use crate::choice::{Entry, Finish, Piece};
use crate::params::Params;
use crate::server::Server;
use crate::shape::{Chunks, Envelope, Shape, Usage, finite, push, push_string, token_string};
use atom_text::Tokenizer;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `text_completion` objects.
pub(crate) struct CompletionShape {
    envelope: Envelope,
    tokenizer: Arc<Tokenizer>,
    logprobs: bool,
    chunks: Chunks,
}

impl CompletionShape {
    pub(crate) fn new(server: &Server, params: &Params) -> Self {
        let envelope = Envelope::new(server.answer_id("cmpl"), params.model.clone());
        Self {
            chunks: Chunks::new(&envelope, OBJECT, params.stream.unwrap_or_default()),
            envelope,
            tokenizer: server.text.tokenizer.clone(),
            logprobs: params.sampling.logprobs.is_some(),
        }
    }

    fn chunk(&self, choice: &Value, usage: &Usage, out: &mut String) {
        self.chunks.push(out, usage, |out| push(out, format_args!("{choice}")));
    }

    /// The same for text without log-probabilities: what nearly every chunk is.
    fn text_chunk(&self, piece: &Piece, usage: &Usage, out: &mut String) {
        self.chunks.push(out, usage, |out| {
            push(out, format_args!("{{\"index\":{},\"text\":", piece.index));
            push_string(out, &piece.content());
            out.push_str(",\"logprobs\":null,\"finish_reason\":null}");
        });
    }

    fn choice(&self, piece: &Piece, finish: Option<Finish>) -> Value {
        let logprobs = if self.logprobs && !piece.entries.is_empty() {
            logprobs(&self.tokenizer, &piece.entries)
        } else {
            Value::Null
        };
        json!({
            "index": piece.index,
            "text": piece.content(),
            "logprobs": logprobs,
            "finish_reason": finish.map(Finish::as_str),
        })
    }
}

impl Shape for CompletionShape {
    fn piece(&mut self, piece: &Piece, usage: &Usage, out: &mut String) {
        if !piece.entries.is_empty() {
            self.chunk(&self.choice(piece, None), usage, out);
        } else if !piece.parts.is_empty() {
            self.text_chunk(piece, usage, out);
        }
        if let Some(finish) = piece.finish {
            let end = Piece { index: piece.index, ..Piece::default() };
            self.chunk(&self.choice(&end, Some(finish)), usage, out);
        }
    }

    fn end(&mut self, usage: &Usage, out: &mut String) {
        self.chunks.push_end(out, usage);
    }

    fn whole(&mut self, pieces: &[Piece], usage: &Usage) -> Value {
        let choices = pieces.iter().map(|piece| self.choice(piece, piece.finish)).collect();
        let mut whole = self.envelope.wrap(OBJECT, choices);
        whole.insert("usage".into(), usage.to_json());
        Value::Object(whole)
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

/// A part and a whole have the same name here.
const OBJECT: &str = "text_completion";
