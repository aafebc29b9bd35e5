//! The answer, whole or in chunks.

use crate::chat::history::CallIds;
use crate::choice::{Entry, Finish, Piece};
use crate::params::Params;
use crate::server::Server;
use crate::shape::{Chunks, Envelope, Shape, Usage, finite, push, push_string, token_string};
use atom_base::TokenId;
use atom_text::{AnswerPart, Tokenizer};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `chat.completion` objects, and `chat.completion.chunk` in a stream.
pub(crate) struct ChatShape {
    envelope: Envelope,
    ids: CallIds,
    tokenizer: Arc<Tokenizer>,
    logprobs: bool,
    /// Thoughts are part of the answer.
    reasoning: bool,
    chunks: Chunks,
    /// Choices that have said that they begin.
    opened: Box<[bool]>,
}

impl ChatShape {
    pub(crate) fn new(server: &Server, params: &Params, reasoning: bool) -> Self {
        let envelope = Envelope::new(server.answer_id("chatcmpl"), params.model.clone());
        Self {
            chunks: Chunks::new(&envelope, "chat.completion.chunk", params.stream.unwrap_or_default()),
            envelope,
            ids: CallIds::new(server),
            tokenizer: server.text.tokenizer.clone(),
            logprobs: params.sampling.logprobs.is_some(),
            reasoning,
            opened: vec![false; params.n as usize].into(),
        }
    }

    /// One chunk with one choice, which is how every client knows them.
    fn chunk(&self, index: u32, delta: Value, end: &End, usage: &Usage, out: &mut String) {
        let choice = json!({
            "index": index,
            "delta": delta,
            "logprobs": self.logprobs(end.entries),
            "finish_reason": end.finish.map(Finish::as_str),
        });
        self.chunks.push(out, usage, |out| push(out, format_args!("{choice}")));
    }

    /// The same for text without log-probabilities: what nearly every chunk is.
    fn text_chunk(&self, index: u32, text: &str, usage: &Usage, out: &mut String) {
        self.chunks.push(out, usage, |out| {
            push(out, format_args!("{{\"index\":{index},\"delta\":{{\"content\":"));
            push_string(out, text);
            out.push_str("},\"logprobs\":null,\"finish_reason\":null}");
        });
    }

    fn logprobs(&self, entries: &[Entry]) -> Value {
        if !self.logprobs || entries.is_empty() {
            return Value::Null;
        }
        let content: Vec<Value> = entries.iter().map(|entry| logprob(&self.tokenizer, entry)).collect();
        json!({"content": content})
    }

    fn delta(&self, choice: u32, part: &AnswerPart) -> Value {
        match part {
            AnswerPart::Content(text) => json!({"content": text}),
            AnswerPart::Reasoning(text) => json!({"reasoning_content": text}),
            AnswerPart::Call { index, id, name } => json!({"tool_calls": [{
                "index": index,
                "id": self.call_id(choice, *index, id.as_deref()),
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }]}),
            AnswerPart::Arguments { index, json } => {
                json!({"tool_calls": [{"index": index, "function": {"arguments": json}}]})
            }
        }
    }

    fn message(&self, piece: &Piece) -> Value {
        let (mut reasoning, mut calls) = (String::new(), Vec::<(String, &str, String)>::new());
        for part in piece.parts.iter().filter(|part| self.shows(part)) {
            match part {
                AnswerPart::Content(_) => {}
                AnswerPart::Reasoning(text) => reasoning.push_str(text),
                AnswerPart::Call { index, id, name } => {
                    calls.push((self.call_id(piece.index, *index, id.as_deref()), name, String::new()));
                }
                AnswerPart::Arguments { index, json } => calls[*index as usize].2.push_str(json),
            }
        }
        let content = piece.content();
        let says_nothing = content.is_empty() && !calls.is_empty();
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        message.insert("content".into(), if says_nothing { Value::Null } else { content.into() });
        if !reasoning.is_empty() {
            message.insert("reasoning_content".into(), reasoning.into());
        }
        if !calls.is_empty() {
            let calls = calls.into_iter().map(|(id, name, arguments)| {
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            });
            message.insert("tool_calls".into(), calls.collect());
        }
        Value::Object(message)
    }

    fn shows(&self, part: &AnswerPart) -> bool {
        self.reasoning || !matches!(part, AnswerPart::Reasoning(_))
    }

    /// The id that the model gave a call, or one of ours that no other call has.
    fn call_id(&self, choice: u32, call: u32, own: Option<&str>) -> String {
        own.map_or_else(|| self.ids.of(choice, call), str::to_owned)
    }
}

/// What a chunk says beside its delta.
#[derive(Default)]
struct End<'a> {
    entries: &'a [Entry],
    finish: Option<Finish>,
}

impl Shape for ChatShape {
    fn piece(&mut self, piece: &Piece, usage: &Usage, out: &mut String) {
        let index = piece.index;
        if !std::mem::replace(&mut self.opened[index as usize], true) {
            self.chunk(index, json!({"role": "assistant", "content": ""}), &End::default(), usage, out);
        }
        // The entries of a piece leave with its first part.
        let mut entries = piece.entries.as_slice();
        for part in piece.parts.iter().filter(|part| self.shows(part)) {
            let end = End { entries: std::mem::take(&mut entries), finish: None };
            match part {
                AnswerPart::Content(text) if end.entries.is_empty() => {
                    self.text_chunk(index, text, usage, out);
                }
                part => self.chunk(index, self.delta(index, part), &end, usage, out),
            }
        }
        if !entries.is_empty() {
            self.chunk(index, json!({"content": ""}), &End { entries, finish: None }, usage, out);
        }
        if piece.finish.is_some() {
            self.chunk(index, json!({}), &End { entries: &[], finish: piece.finish }, usage, out);
        }
    }

    fn end(&mut self, usage: &Usage, out: &mut String) {
        self.chunks.push_end(out, usage);
    }

    fn whole(&mut self, pieces: &[Piece], usage: &Usage) -> Value {
        let choice = |piece: &Piece| {
            json!({
                "index": piece.index,
                "message": self.message(piece),
                "logprobs": self.logprobs(&piece.entries),
                "finish_reason": piece.finish.map(Finish::as_str),
            })
        };
        let mut whole = self.envelope.wrap("chat.completion", pieces.iter().map(choice).collect());
        whole.insert("usage".into(), usage.to_json());
        Value::Object(whole)
    }
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
