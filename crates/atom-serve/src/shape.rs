//! What the APIs answer with, seen from the code that streams and collects.

use crate::choice::Piece;
use crate::error::ApiError;
use crate::params::StreamOptions;
use crate::server::unix_s;
use atom_base::TokenId;
use atom_text::Tokenizer;
use serde_json::{Map, Value, json};
use std::fmt::{self, Write};

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
    /// for the whole. `_id`: of the request, as its header has it.
    fn failed(&mut self, error: &ApiError, _id: &str, out: &mut String) {
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
    /// Of these, those that came while the model was reasoning, the marker that ends it included; `None`
    /// where reasoning isn't told apart.
    pub(crate) reasoning: Option<usize>,
}

impl Usage {
    /// In the words of the OpenAI API.
    pub(crate) fn to_json(self) -> Value {
        let mut usage = json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        });
        if let Some(reasoning) = self.reasoning {
            usage["completion_tokens_details"] = json!({"reasoning_tokens": reasoning});
        }
        usage
    }
}

/// The chunks of one OpenAI stream. There is one for every token, so what they have in common is written
/// once, and the rest without a tree of values.
pub(crate) struct Chunks {
    /// An event up to the bracket that opens its choices.
    head: String,
    options: StreamOptions,
}

impl Chunks {
    pub(crate) fn new(envelope: &Envelope, object: &str, options: StreamOptions) -> Self {
        let empty = Value::Object(envelope.wrap(object, Vec::new())).to_string();
        let head = empty.strip_suffix("]}").expect("the choices come last");
        Self { head: format!("data: {head}"), options }
    }

    /// Appends a chunk with the choice that `choice` writes, and with what `stream_options` ask for of usage.
    pub(crate) fn push(&self, out: &mut String, usage: &Usage, choice: impl FnOnce(&mut String)) {
        out.push_str(&self.head);
        choice(out);
        out.push(']');
        if self.options.continuous_usage_stats {
            push(out, format_args!(",\"usage\":{}", usage.to_json()));
        } else if self.options.include_usage {
            out.push_str(",\"usage\":null");
        }
        out.push_str("}\n\n");
    }

    /// Appends what ends the stream: the usage, if it was asked for, and the end mark.
    pub(crate) fn push_end(&self, out: &mut String, usage: &Usage) {
        if self.options.include_usage {
            push(out, format_args!("{}],\"usage\":{}}}\n\n", self.head, usage.to_json()));
        }
        out.push_str("data: [DONE]\n\n");
    }
}

/// Appends a text as a JSON string.
pub(crate) fn push_string(out: &mut String, text: &str) {
    // JSON asks for no more; most tokens have nothing of it.
    if text.bytes().any(|byte| byte < b' ' || byte == b'"' || byte == b'\\') {
        push(out, format_args!("{}", Value::from(text)));
    } else {
        out.push('"');
        out.push_str(text);
        out.push('"');
    }
}

pub(crate) fn push(out: &mut String, text: fmt::Arguments<'_>) {
    out.write_fmt(text).expect("writing to a String can't fail");
}

/// JSON has no raw line breaks, so an event's data is one line.
pub(crate) fn push_event(out: &mut String, data: &Value) {
    push(out, format_args!("data: {data}\n\n"));
}

/// An event with a name of its own, as the younger APIs have them.
pub(crate) fn push_named_event(out: &mut String, name: &str, data: &Value) {
    write!(out, "event: {name}\ndata: {data}\n\n").expect("writing to a String can't fail");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_what_the_tree_of_values_would_be() {
        let envelope = Envelope::new("id-1".into(), "a \"model\"".into());
        let usage = Usage { prompt: 5, cached: 2, generated: 3, reasoning: Some(1) };
        let texts = [
            "",
            "word",
            "\"",
            "\\",
            "\n\r\t\u{8}\u{c}",
            "\u{0}\u{1f}\u{7f}",
            "é 日 🦀 \u{2028}",
            "</script>",
        ];
        for (include_usage, continuous_usage_stats) in
            [(false, false), (true, false), (true, true), (false, true)]
        {
            let options = StreamOptions { include_usage, continuous_usage_stats };
            let chunks = Chunks::new(&envelope, "thing", options);
            for text in texts {
                let mut map = envelope.wrap("thing", vec![json!({"text": text})]);
                if continuous_usage_stats {
                    map.insert("usage".into(), usage.to_json());
                } else if include_usage {
                    map.insert("usage".into(), Value::Null);
                }
                let mut out = String::new();
                chunks.push(&mut out, &usage, |out| {
                    out.push_str("{\"text\":");
                    push_string(out, text);
                    out.push('}');
                });
                assert_eq!(out, format!("data: {}\n\n", Value::Object(map)));
            }
            let mut end = String::new();
            chunks.push_end(&mut end, &usage);
            let mut map = envelope.wrap("thing", Vec::new());
            map.insert("usage".into(), usage.to_json());
            let last =
                if include_usage { format!("data: {}\n\n", Value::Object(map)) } else { String::new() };
            assert_eq!(end, last + "data: [DONE]\n\n");
        }
    }
}
