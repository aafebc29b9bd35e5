//! Taking secrets out of what is written down, wherever they stand: in JSON, in JSON within a text, and over several
//! events of a stream, since a model writes a key in pieces. What is taken for one is in `secrets`.

mod secrets;

use crate::auth::ApiKeys;
use secrets::{is_secret_name, secrets};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::ops::Range;

/// Takes them out of every text in `value`, and out of fields with a secret's name. True if there was one.
pub(crate) fn redact(value: &mut Value, keys: &ApiKeys) -> bool {
    let mut any = false;
    let mut each = |_, text: &mut String| {
        let secrets = secrets(text, keys);
        if !secrets.is_empty() {
            *text = without(text, 0, &secrets);
        }
        any |= !secrets.is_empty();
    };
    let mut names = Names::default();
    let named = Walk { names: &mut names, each: &mut each }.walk(value, TOP);
    any | named | redact_names(value, keys)
}

/// The same for a stream of server-sent events, where each text goes on in the same place of later events.
/// `spelled`: a secret was found elsewhere in the exchange, see [`redact_spelled`]. True if there was one here.
pub(crate) fn redact_stream(stream: &str, keys: &ApiKeys, spelled: bool) -> (String, bool) {
    let lines: Vec<&str> = stream.split('\n').collect();
    let parse = |line: &&str| serde_json::from_str::<Value>(line.strip_prefix(DATA)?).ok();
    let mut events: Vec<Option<Value>> = lines.iter().map(parse).collect();
    let mut changed = vec![false; lines.len()];
    let mut names = Names::default();
    let mut channels: HashMap<u32, Channel> = HashMap::new();
    for (event, changed) in events.iter_mut().zip(&mut changed) {
        let mut each = |name, text: &mut String| channels.entry(name).or_default().text.push_str(text);
        if let Some(event) = event {
            *changed = Walk { names: &mut names, each: &mut each }.walk(event, TOP);
        }
    }
    for channel in channels.values_mut() {
        channel.secrets = secrets(&channel.text, keys);
    }
    for (event, changed) in events.iter_mut().zip(&mut changed) {
        let mut each = |name, text: &mut String| {
            let channel = channels.get_mut(&name).expect("every text was met before");
            *changed |= channel.next(text);
        };
        if let Some(event) = event {
            Walk { names: &mut names, each: &mut each }.walk(event, TOP);
            *changed |= redact_names(event, keys);
        }
    }
    let plain = |(line, event): (&&str, &Option<Value>)| match event {
        None => secrets(line, keys),
        Some(_) => Vec::new(),
    };
    // No JSON of ours: a comment, an end, the name of an event.
    let plain: Vec<_> = lines.iter().zip(&events).map(plain).collect();
    let any = changed.contains(&true) || plain.iter().any(|secrets| !secrets.is_empty());
    if spelled || any {
        for (event, changed) in events.iter_mut().zip(&mut changed) {
            *changed |= event.as_mut().is_some_and(redact_spelled);
        }
    }
    let shown = lines.iter().enumerate().map(|(at, line)| match &events[at] {
        None => without(line, 0, &plain[at]),
        Some(event) if changed[at] => format!("{DATA}{event}"),
        Some(_) => (*line).to_owned(),
    });
    (shown.collect::<Vec<_>>().join("\n"), any)
}

/// Takes out the tokens that a text was made of, or into: they spell what was taken out of the text. True if there
/// were any.
pub(crate) fn redact_spelled(value: &mut Value) -> bool {
    match value {
        Value::Array(items) => items.iter_mut().fold(false, |any, item| redact_spelled(item) | any),
        Value::Object(map) => map.iter_mut().fold(false, |any, (name, value)| {
            if SPELLED.contains(&&**name) && (value.is_array() || value.is_object()) {
                *value = REDACTED.into();
                return true;
            }
            redact_spelled(value) | any
        }),
        _ => false,
    }
}

/// One text of a stream, in the order of its events.
#[derive(Default)]
struct Channel {
    text: String,
    secrets: Vec<Range<usize>>,
    /// Where the next part begins, and the first secret that ends behind it.
    at: usize,
    ahead: usize,
}

impl Channel {
    /// Takes secrets out of the next part. True if there were any.
    fn next(&mut self, part: &mut String) -> bool {
        let start = self.at;
        self.at += part.len();
        self.ahead += self.secrets[self.ahead..].iter().take_while(|secret| secret.end <= start).count();
        let ahead = &self.secrets[self.ahead..];
        let own = &ahead[..ahead.iter().take_while(|secret| secret.start < self.at).count()];
        if part.is_empty() || own.is_empty() {
            return false;
        }
        *part = without(part, start, own);
        true
    }
}

/// Names of places in an event, as numbers: each is a step from another one.
#[derive(Default)]
struct Names {
    known: HashMap<(u32, Step), u32>,
}

#[derive(PartialEq, Eq, Hash)]
enum Step {
    Field(String),
    Item(usize),
    /// To which of several texts a part belongs: by choice, call or part.
    Number(u64),
}

impl Names {
    fn step(&mut self, from: u32, step: Step) -> u32 {
        let next = self.known.len() as u32 + 1;
        *self.known.entry((from, step)).or_insert(next)
    }
}

/// Goes through the texts of a value, and takes out what stands under a secret's name.
struct Walk<'a, E> {
    names: &'a mut Names,
    /// Is told the name of each text's place: the same for what goes on with it in later events.
    each: &'a mut E,
}

impl<E: FnMut(u32, &mut String)> Walk<'_, E> {
    /// True if something was taken out.
    fn walk(&mut self, value: &mut Value, name: u32) -> bool {
        match value {
            Value::String(text) => {
                (self.each)(name, text);
                false
            }
            Value::Array(items) => items.iter_mut().enumerate().fold(false, |any, (at, item)| {
                // A call of a chunk stands first in its list, whichever it is.
                let step = item.get("index").map_or(Step::Item(at), |_| Step::Item(0));
                let name = self.names.step(name, step);
                self.walk(item, name) | any
            }),
            Value::Object(map) => self.walk_fields(map, name),
            Value::Null | Value::Bool(_) | Value::Number(_) => false,
        }
    }

    fn walk_fields(&mut self, map: &mut Map<String, Value>, mut name: u32) -> bool {
        for place in PLACES {
            if let Some(number) = map.get(place).and_then(Value::as_u64) {
                name = self.names.step(name, Step::Number(number));
            }
        }
        // A token of an answer, with its log-probability.
        let is_token = map.contains_key("logprob");
        map.iter_mut().fold(false, |any, (field, value)| {
            if is_secret_name(field) && !(is_token && field == "token") {
                let says_something = can_be_secret(value);
                if says_something {
                    *value = REDACTED.into();
                }
                return any | says_something;
            }
            let name = self.names.step(name, Step::Field(field.clone()));
            self.walk(value, name) | any
        })
    }
}

/// False for what stands for nothing, for flags, and for what no number of a secret is: a probability.
fn can_be_secret(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(_) => false,
        Value::Number(number) => !number.is_f64(),
        Value::String(text) => text != REDACTED,
        Value::Array(_) | Value::Object(_) => true,
    }
}

/// Takes secrets out of names of fields. True if there was one.
fn redact_names(value: &mut Value, keys: &ApiKeys) -> bool {
    match value {
        Value::Array(items) => items.iter_mut().fold(false, |any, item| redact_names(item, keys) | any),
        Value::Object(map) => {
            let any = map.iter_mut().fold(false, |any, (_, value)| redact_names(value, keys) | any);
            if map.keys().all(|name| secrets(name, keys).is_empty()) {
                return any;
            }
            *map = std::mem::take(map)
                .into_iter()
                .map(|(name, value)| (without(&name, 0, &secrets(&name, keys)), value))
                .collect();
            true
        }
        _ => false,
    }
}

/// A part of a text, which begins at `start` of it, without secrets that lie in it, in order: a mark stands where one
/// begins.
fn without(part: &str, start: usize, secrets: &[Range<usize>]) -> String {
    let mut shown = String::with_capacity(part.len());
    let mut at = start;
    let end = start + part.len();
    for secret in secrets {
        if secret.start >= start {
            shown.push_str(&part[at - start..secret.start - start]);
            shown.push_str(REDACTED);
        }
        at = secret.end.min(end);
    }
    shown.push_str(&part[at - start..]);
    shown
}

/// What stands in the place of a secret.
pub(crate) const REDACTED: &str = "[redacted]";

/// Fields that spell a text token by token.
const SPELLED: [&str; 5] = ["logprobs", "top_logprobs", "tokens", "token_strs", "token_ids"];
/// Numbers that say to which text of a stream a part belongs.
const PLACES: [&str; 4] = ["index", "output_index", "content_index", "summary_index"];
const DATA: &str = "data: ";
/// The place of a whole value.
const TOP: u32 = 0;

#[cfg(test)]
#[path = "redact/tests.rs"]
mod tests;
