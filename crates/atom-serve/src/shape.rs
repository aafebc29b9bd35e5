//! What the APIs answer with, seen from the code that streams and collects.

use crate::choice::Piece;
use crate::error::ApiError;
use crate::params::StreamOptions;
use crate::server::unix_s;
use atom_base::TokenId;
use atom_text::Tokenizer;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// The words of one API. Streaming and collecting know it only through this, and both are made of the same
/// pieces, so a stream can't say anything else than the whole answer.
///
/// The methods that stream append whole server-sent events to `out`.
pub(crate) trait Shape: Send + Unpin + 'static {
    /// What comes before any piece; asked once, together with the first piece.
    fn begin(&mut self, _usage: &Usage, _out: &mut String) {}

    /// A piece of a choice, and with its last one the choice's end.
    fn piece(&mut self, piece: &Piece, usage: &Usage, out: &mut String);

    /// What comes behind the last piece of the last choice.
    fn end(&mut self, usage: &Usage, out: &mut String);

    /// The last event of a stream that failed. No [`end`](Self::end) follows, so that nobody takes a part
    /// for the whole.
    fn failed(&self, error: &ApiError, out: &mut String) {
        push_event(out, &error.body());
    }

    /// Sent into a silence, so that no proxy takes the connection for dead.
    fn keep_alive(&self) -> &'static str {
        ": keep-alive\n\n"
    }

    /// The whole answer, and the choices in their order. Every piece is a complete choice.
    fn whole(&mut self, pieces: &[Piece], usage: &Usage) -> Value;
}

/// Tokens of a request so far. A prompt counts once, however many choices continue it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt: usize,
    /// Of the prompt's, those that were found in the cache.
    pub(crate) cached: usize,
    pub(crate) generated: usize,
}

impl Usage {
    /// In the words of the OpenAI API.
    pub(crate) fn to_json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}

/// What an OpenAI stream says of usage: in every chunk what `stream_options` ask for.
pub(crate) fn chunk_usage(options: StreamOptions, usage: &Usage) -> Option<Value> {
    if options.continuous_usage_stats {
        Some(usage.to_json())
    } else {
        options.include_usage.then_some(Value::Null)
    }
}

/// The chunks that end an OpenAI stream: the usage, if it was asked for, and the end mark.
pub(crate) fn push_end(
    out: &mut String,
    options: StreamOptions,
    mut empty_chunk: Map<String, Value>,
    usage: &Usage,
) {
    if options.include_usage {
        empty_chunk.insert("usage".into(), usage.to_json());
        push_event(out, &Value::Object(empty_chunk));
    }
    out.push_str("data: [DONE]\n\n");
}

/// JSON has no raw line breaks, so an event's data is one line.
pub(crate) fn push_event(out: &mut String, data: &Value) {
    write!(out, "data: {data}\n\n").expect("writing to a String can't fail");
}

/// What is the same in every object of one answer.
pub(crate) struct Envelope {
    id: String,
    created_s: u64,
    model: String,
}

impl Envelope {
    pub(crate) fn new(id: String, model: String) -> Self {
        Self { id, created_s: unix_s(), model }
    }

    pub(crate) fn wrap(&self, object: &str, choices: Vec<Value>) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".into(), self.id.as_str().into());
        map.insert("object".into(), object.into());
        map.insert("created".into(), self.created_s.into());
        map.insert("model".into(), self.model.as_str().into());
        map.insert("choices".into(), choices.into());
        map
    }
}

/// A token as a JSON string. A part of a character can't be one: it is spelled as the OpenAI API does,
/// `bytes:\xe2\x82`, and so stays distinct from other parts.
pub(crate) fn token_string(tokenizer: &Tokenizer, token: TokenId) -> String {
    let bytes = tokenizer.token_bytes(token).unwrap_or_default();
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold(String::from("bytes:"), |mut text, byte| {
            write!(text, "\\x{byte:02x}").expect("writing to a String can't fail");
            text
        }),
    }
}

/// JSON has no infinity; this is the API's word for "practically never".
pub(crate) fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob.max(LOGPROB_MIN) } else { LOGPROB_MIN }
}

const LOGPROB_MIN: f32 = -9999.0;
