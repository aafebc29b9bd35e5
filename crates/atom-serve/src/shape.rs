//! What chat and plain completions answer with, seen from the code that streams and collects.

use crate::choice::{Finish, Piece};
use crate::server::unix_s;
use atom_base::TokenId;
use atom_text::Tokenizer;
use serde_json::{Map, Value};
use std::fmt::Write;

/// The JSON of one API. Streaming and collecting know it only through this, so that a stream can't say
/// anything else than the whole answer.
pub(crate) trait Shape: Send + Unpin + 'static {
    /// The choice object that opens choice `index` in a stream, where the API has one.
    fn opening(&self, index: u32) -> Option<Value>;

    /// The choice object for a piece's text and entries.
    fn delta(&self, piece: &Piece) -> Value;

    /// The choice object that ends choice `index` in a stream.
    fn closing(&self, index: u32, finish: Finish) -> Value;

    /// A chunk around choice objects.
    fn chunk(&self, choices: Vec<Value>) -> Map<String, Value>;

    /// The whole answer. Every piece is a complete choice.
    fn whole(&self, pieces: &[Piece]) -> Map<String, Value>;
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
