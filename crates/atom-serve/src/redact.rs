//! Taking secrets out of what is written down: keys of this server, words behind `Bearer`, and values of fields
//! whose name says that they are secret, wherever they stand: in JSON, in JSON within a text, and over several
//! events of a stream, since a model writes a key in pieces.

use crate::auth::ApiKeys;
use serde_json::Value;
use std::collections::HashMap;
use std::ops::Range;

/// Takes them out of every text in `value`, and out of fields of these names. True if there was one.
pub(crate) fn redact(value: &mut Value, keys: &ApiKeys) -> bool {
    match value {
        Value::String(text) => {
            let secrets = secrets(text, keys);
            if !secrets.is_empty() {
                *text = without(text, 0, &secrets);
            }
            !secrets.is_empty()
        }
        Value::Array(items) => items.iter_mut().fold(false, |any, item| redact(item, keys) | any),
        Value::Object(map) => map.iter_mut().fold(false, |any, (name, value)| {
            let is_secret = SECRET_NAMES.iter().any(|secret| name.eq_ignore_ascii_case(secret));
            if !is_secret {
                return redact(value, keys) | any;
            }
            let has_value = !value.is_null() && *value != REDACTED;
            if has_value {
                *value = REDACTED.into();
            }
            has_value | any
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

/// The same for a stream of server-sent events, where each text goes on in the same place of later events.
pub(crate) fn redact_stream(stream: &str, keys: &ApiKeys) -> String {
    let lines: Vec<&str> = stream.split('\n').collect();
    let parse = |line: &&str| serde_json::from_str::<Value>(line.strip_prefix(DATA)?).ok();
    let mut events: Vec<Option<Value>> = lines.iter().map(parse).collect();
    let mut channels: HashMap<String, Channel> = HashMap::new();
    for (at, event) in events.iter().enumerate() {
        if let Some(event) = event {
            collect(event, at, &mut String::new(), &mut String::new(), &mut channels);
        }
    }
    let mut changed = vec![false; lines.len()];
    for channel in channels.values() {
        let secrets = secrets(&channel.text, keys);
        if secrets.is_empty() {
            continue;
        }
        for (at, pointer, start) in &channel.leaves {
            let leaf = events[*at].as_mut().and_then(|event| event.pointer_mut(pointer));
            let Some(Value::String(text)) = leaf else { continue };
            let end = start + text.len();
            if secrets.iter().any(|secret| secret.start < end && *start < secret.end) {
                *text = without(text, *start, &secrets);
                changed[*at] = true;
            }
        }
    }
    let mut shown = String::with_capacity(stream.len());
    for (at, line) in lines.iter().enumerate() {
        if at > 0 {
            shown.push('\n');
        }
        let Some(event) = &mut events[at] else {
            // No JSON of ours: a comment, an end, the name of an event.
            shown.push_str(&without(line, 0, &secrets(line, keys)));
            continue;
        };
        if redact(event, keys) | changed[at] {
            shown.push_str(DATA);
            shown.push_str(&event.to_string());
        } else {
            shown.push_str(line);
        }
    }
    shown
}

/// One text of a stream, in the order of its events.
#[derive(Default)]
struct Channel {
    text: String,
    /// The event, the place in it, and where it begins in `text`.
    leaves: Vec<(usize, String, usize)>,
}

/// Adds every text of `value` to its channel. `pointer` is its place (RFC 6901); `name` says which text it goes on
/// with: fields on the way to it, and numbers of choices, calls and parts.
fn collect(
    value: &Value,
    event: usize,
    pointer: &mut String,
    name: &mut String,
    channels: &mut HashMap<String, Channel>,
) {
    let (pointer_end, name_end) = (pointer.len(), name.len());
    match value {
        Value::String(text) => {
            let channel = channels.entry(name.clone()).or_default();
            channel.leaves.push((event, pointer.clone(), channel.text.len()));
            channel.text.push_str(text);
        }
        Value::Array(items) => {
            for (at, item) in items.iter().enumerate() {
                pointer.push_str(&format!("/{at}"));
                // A call of a chunk stands first in its list, whichever it is.
                name.push_str(&item.get("index").map_or_else(|| format!("/{at}"), |_| "/".into()));
                collect(item, event, pointer, name, channels);
                pointer.truncate(pointer_end);
                name.truncate(name_end);
            }
        }
        Value::Object(map) => {
            for place in PLACES {
                if let Some(number) = map.get(place).and_then(Value::as_u64) {
                    name.push_str(&format!("#{number}"));
                }
            }
            let name_end = name.len();
            for (field, value) in map {
                pointer.push('/');
                pointer.push_str(&field.replace('~', "~0").replace('/', "~1"));
                name.push('/');
                name.push_str(field);
                collect(value, event, pointer, name, channels);
                pointer.truncate(pointer_end);
                name.truncate(name_end);
            }
            name.truncate(name_end);
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
    name.truncate(name_end);
}

/// A part of a text, which begins at `start` of it, without secrets: a mark stands where one begins.
fn without(part: &str, start: usize, secrets: &[Range<usize>]) -> String {
    let mut shown = String::with_capacity(part.len());
    let mut at = start;
    let end = start + part.len();
    for secret in secrets.iter().filter(|secret| secret.start < end && start < secret.end) {
        if secret.start >= start {
            shown.push_str(&part[at - start..secret.start - start]);
            shown.push_str(REDACTED);
        }
        at = secret.end.min(end);
    }
    shown.push_str(&part[at - start..]);
    shown
}

/// Where secrets stand in a text: in order, none within another.
fn secrets(text: &str, keys: &ApiKeys) -> Vec<Range<usize>> {
    let mut found = keys.find(text);
    found.extend(bearers(text));
    found.extend(named(text));
    found.sort_by_key(|range| range.start);
    found.dedup_by(|next, last| {
        let overlaps = next.start < last.end;
        if overlaps {
            last.end = last.end.max(next.end);
        }
        overlaps
    });
    found
}

/// The word behind every `Bearer `, whoever's key it is.
fn bearers(text: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    for (at, window) in text.as_bytes().windows(BEARER.len()).enumerate() {
        if !window.eq_ignore_ascii_case(BEARER) {
            continue;
        }
        let start = at + BEARER.len();
        let is_over = |c: char| !c.is_ascii_graphic() || c == '"';
        let end = text[start..].find(is_over).map_or(text.len(), |end| start + end);
        if end - start >= BEARER_BYTES_MIN && !text[start..].starts_with(REDACTED) {
            found.push(start..end);
        }
    }
    found
}

/// Values of fields with a secret's name in JSON that is part of the text, such as a call's arguments.
fn named(text: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices('"') {
        let rest = &text[at + 1..];
        let Some(name) = SECRET_NAMES.iter().find(|name| {
            let (name, rest) = (name.as_bytes(), rest.as_bytes());
            rest.get(name.len()) == Some(&b'"') && rest[..name.len()].eq_ignore_ascii_case(name)
        }) else {
            continue;
        };
        let behind = rest[name.len() + 1..].trim_start();
        let Some(value) = behind.strip_prefix(':').map(str::trim_start) else { continue };
        let (is_text, value) = match value.strip_prefix('"') {
            Some(value) => (true, value),
            None => (false, value),
        };
        let start = text.len() - value.len();
        let end = if is_text { end_of_text(value) } else { value.find([',', '}', ']', '\n']) };
        let end = start + end.unwrap_or(value.len());
        if end > start && !value.starts_with(REDACTED) && &text[start..end] != "null" {
            found.push(start..end);
        }
    }
    found
}

/// Where the quote is that ends a JSON text; none if it is cut.
fn end_of_text(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    text.bytes().position(|byte| {
        let ends = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        ends
    })
}

/// What stands in the place of a secret.
pub(crate) const REDACTED: &str = "[redacted]";

/// Fields whose values are never written.
const SECRET_NAMES: [&str; 9] = [
    "authorization",
    "x-api-key",
    "api_key",
    "api-key",
    "apikey",
    "access_token",
    "secret",
    "password",
    "token_secret",
];
/// Numbers that say to which text of a stream a part belongs.
const PLACES: [&str; 4] = ["index", "output_index", "content_index", "summary_index"];
const DATA: &str = "data: ";
const BEARER: &[u8] = b"Bearer ";
/// Shorter words are prose: "bearer of news".
const BEARER_BYTES_MIN: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn keys() -> ApiKeys {
        ApiKeys::new(["sk-secret"]).unwrap()
    }

    #[test]
    fn what_looks_like_a_key_is_taken_out() {
        let cases = [
            ("a sk-secret, b sk-secret-not", "a [redacted], b [redacted]-not"),
            ("Bearer abcdefgh", "Bearer [redacted]"),
            ("Bearer sk-secret", "Bearer [redacted]"),
            (r#"{"x": "bearer abcdefghi"}"#, r#"{"x": "bearer [redacted]"}"#),
            ("a Bearer 12345678 and a Bearer 12345678.", "a Bearer [redacted] and a Bearer [redacted]"),
            ("the bearer of news", "the bearer of news"),
            ("Bearer ", "Bearer "),
            ("Bearer é12345678", "Bearer é12345678"),
            (r#"call({"API_key" : "a\"b", "x": 1})"#, r#"call({"API_key" : "[redacted]", "x": 1})"#),
            (r#"{"password": 1234, "secret": null}"#, r#"{"password": [redacted], "secret": null}"#),
            (r#"cut: {"password": "half"#, r#"cut: {"password": "[redacted]"#),
            (r#"a "password" and a "secret": "#, r#"a "password" and a "secret": "#),
        ];
        for (text, shown) in cases {
            let mut value = json!([text]);
            assert_eq!(redact(&mut value, &keys()), text != shown, "{text}");
            assert_eq!(value, json!([shown]));
            assert!(!redact(&mut value, &keys()), "{value} has nothing left");
        }
    }

    /// Every text in a stream, by choice and field, put together.
    fn told(stream: &str) -> Vec<String> {
        let mut channels = HashMap::new();
        for line in stream.lines() {
            if let Some(event) = line.strip_prefix(DATA).and_then(|data| serde_json::from_str(data).ok()) {
                collect(&event, 0, &mut String::new(), &mut String::new(), &mut channels);
            }
        }
        channels.into_values().map(|channel| channel.text).collect()
    }

    #[test]
    fn a_key_that_is_split_over_events_is_taken_out_wherever_it_is_cut() {
        let chat = |index: u32, delta: Value| json!({"choices": [{"index": index, "delta": delta}]});
        let call = |index: u32, json: &str| {
            chat(0, json!({"tool_calls": [{"index": index, "function": {"arguments": json}}]}))
        };
        let text = "my key is sk-secret, é, Bearer abcdefgh123 too";
        let arguments = r#"{"n": 1, "api_key": "hunter2hunter2", "q": "x"}"#;
        for width in 1..12 {
            let cut = |text: &str| -> Vec<String> {
                let chars: Vec<char> = text.chars().collect();
                chars.chunks(width).map(|part| part.iter().collect()).collect()
            };
            let mut stream = ": a comment\n\n".to_owned();
            for part in cut(text) {
                // Two choices and two calls in turn, and the shapes of other APIs.
                for event in [
                    chat(0, json!({"content": part})),
                    chat(1, json!({"content": part})),
                    json!({"type": "content_block_delta", "index": 2, "delta": {"type": "text_delta", "text": part}}),
                    json!({"type": "response.output_text.delta", "output_index": 1, "content_index": 0, "delta": part}),
                    json!({"choices": [{"index": 0, "text": part}]}),
                ] {
                    stream.push_str(&format!("data: {event}\n\n"));
                }
            }
            for part in cut(arguments) {
                for index in [0, 1] {
                    stream.push_str(&format!("data: {}\n\n", call(index, &part)));
                }
            }
            stream.push_str("data: [DONE]\n\n");
            let shown = redact_stream(&stream, &keys());
            let texts = told(&shown);
            for secret in ["sk-secret", "abcdefgh123", "hunter2"] {
                assert!(!texts.iter().any(|text| text.contains(secret)), "{width}: {secret} in {texts:?}");
            }
            let expected = "my key is [redacted], é, Bearer [redacted] too";
            assert_eq!(texts.iter().filter(|text| *text == expected).count(), 5, "{width}: {texts:?}");
            let expected = r#"{"n": 1, "api_key": "[redacted]", "q": "x"}"#;
            assert_eq!(texts.iter().filter(|text| *text == expected).count(), 2, "{width}: {texts:?}");
            assert!(shown.starts_with(": a comment\n\ndata: ") && shown.ends_with("data: [DONE]\n\n"));
        }
    }

    #[test]
    fn a_stream_without_secrets_is_written_as_it_was_sent() {
        let stream = "event: x\ndata: {\"b\":1,  \"a\":\"text\"}\n\n: still here\n\ndata: [DONE]\n\n";
        assert_eq!(redact_stream(stream, &keys()), stream);
    }
}
