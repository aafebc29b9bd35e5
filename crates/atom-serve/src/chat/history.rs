//! What was said before: turns of a conversation, checked to belong together, in the shape that chat
//! templates expect.
//!
//! Every API reads its own messages into [`Turn`]s; [`History`] checks that tools were answered.

use crate::error::ApiError;
use crate::fields::wrong;
use crate::server::Server;
use serde_json::{Map, Value, json};
use std::hash::{DefaultHasher, Hash, Hasher};

/// One message.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Turn {
    System(String),
    User(String),
    Assistant {
        content: String,
        /// What it thought, if the client kept it. Most templates drop it but for the last calls.
        reasoning: Option<String>,
        calls: Vec<PastCall>,
    },
    /// What a tool said to a call.
    Answer {
        /// How the client spells the place of `call_id`.
        place: String,
        call_id: String,
        content: String,
    },
}

/// A call that the assistant made.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PastCall {
    pub(crate) id: String,
    /// The tool's, as the model wrote it: it may name one that there is none of.
    pub(crate) name: String,
    pub(crate) arguments: PastArguments,
}

/// What a call was made with.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PastArguments {
    Object(Map<String, Value>),
    /// Text that is no object, as of an answer that was cut off. The model should see what it did, and an agent is
    /// stuck if its own history is refused.
    Broken(String),
}

/// How a template wants calls to be written; found out by rendering some.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CallStyle {
    /// Arguments as JSON text. Most templates iterate them or write the JSON themselves.
    pub(crate) arguments_are_text: bool,
    /// Ids of nine letters and digits, as the templates of Mistral insist on.
    pub(crate) has_short_ids: bool,
    /// What the assistant thought stands in `thinking`, as the template of GPT-OSS has it, and not in
    /// `reasoning_content`.
    pub(crate) thoughts_are_thinking: bool,
}

/// Turns in order. Calls are answered before the user speaks again; an answer names a call. Answers before
/// the first call are taken as they are: their calls were cut off with the beginning of the conversation.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    turns: Vec<(Turn, Option<String>)>,
    /// Ids of calls that nobody answered yet, in order.
    waiting: Vec<String>,
    has_calls: bool,
}

impl History {
    /// Adds a turn; `place` is how the client spells where it stands, `name` the author's name.
    pub(crate) fn push(&mut self, place: &str, turn: Turn, name: Option<String>) -> Result<(), ApiError> {
        match &turn {
            Turn::User(_) if !self.waiting.is_empty() => {
                return Err(ApiError::CallsUnanswered {
                    name: place.to_owned(),
                    missing: self.waiting.join(", "),
                });
            }
            Turn::System(_) | Turn::User(_) => {}
            // Models that number their calls may give one id twice; then the first answer is that of the first call.
            Turn::Assistant { calls, .. } => {
                self.has_calls |= !calls.is_empty();
                self.waiting.extend(calls.iter().map(|call| call.id.clone()));
            }
            Turn::Answer { place, call_id, .. } => self.answer(place, call_id)?,
        }
        self.turns.push((turn, name));
        Ok(())
    }

    /// The messages as templates know them.
    pub(crate) fn for_template(&self, style: CallStyle) -> Value {
        self.turns.iter().map(|(turn, name)| message(turn, name.as_deref(), style)).collect()
    }

    fn answer(&mut self, place: &str, call_id: &str) -> Result<(), ApiError> {
        match self.waiting.iter().position(|id| id == call_id) {
            Some(at) => drop(self.waiting.remove(at)),
            None if !self.has_calls => {}
            None if self.waiting.is_empty() => {
                return Err(wrong(place, &call_id.into(), "the id of a call, and none waits for an answer"));
            }
            None => {
                let expected =
                    format!("the id of a call that waits for its answer: {}", self.waiting.join(", "));
                return Err(wrong(place, &call_id.into(), expected));
            }
        }
        Ok(())
    }
}

impl PastArguments {
    /// Reads them: the text of a JSON object. Small models write `"C:\dir"`; a backslash that begins no escape is
    /// taken as one. No text at all, and null, is no arguments.
    pub(crate) fn read(text: &str) -> Self {
        if text.trim().is_empty() {
            return Self::Object(Map::new());
        }
        let parsed =
            serde_json::from_str(text).or_else(|_| serde_json::from_str(&with_escaped_backslashes(text)));
        match parsed {
            Ok(Value::Object(arguments)) => Self::Object(arguments),
            Ok(Value::Null) => Self::Object(Map::new()),
            Ok(_) | Err(_) => Self::Broken(text.to_owned()),
        }
    }

    fn for_template(&self, style: CallStyle) -> Value {
        let object = match self {
            Self::Broken(text) if style.arguments_are_text => return text.as_str().into(),
            // Most templates go through the members of an object.
            Self::Broken(text) => json!({BROKEN: text}),
            Self::Object(arguments) => Value::Object(arguments.clone()),
        };
        if style.arguments_are_text { object.to_string().into() } else { object }
    }
}

/// What broken arguments are called in front of the model, where a name is needed.
const BROKEN: &str = "unparsed_arguments";

/// Doubles the backslashes that begin no escape of JSON.
fn with_escaped_backslashes(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        let is_unicode =
            |hex: &str| hex.len() >= 4 && hex.bytes().take(4).all(|byte| byte.is_ascii_hexdigit());
        let is_escape = match after.chars().next() {
            Some('"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => true,
            Some('u') => is_unicode(&after[1..]),
            _ => false,
        };
        if is_escape {
            // Both characters of the escape are ASCII.
            out.push_str(&rest[at..at + 2]);
            rest = &after[1..];
        } else {
            out.push_str("\\\\");
            rest = after;
        }
    }
    out + rest
}

fn message(turn: &Turn, name: Option<&str>, style: CallStyle) -> Value {
    let mut message = match turn {
        Turn::System(content) => json!({"role": "system", "content": content}),
        Turn::User(content) => json!({"role": "user", "content": content}),
        Turn::Assistant { content, reasoning, calls } => {
            let mut message = json!({"role": "assistant", "content": content});
            match reasoning {
                Some(reasoning) if !style.thoughts_are_thinking => {
                    message["reasoning_content"] = reasoning.as_str().into();
                }
                // That template refuses calls that come with both.
                Some(reasoning) if content.is_empty() || calls.is_empty() => {
                    message["thinking"] = reasoning.as_str().into();
                }
                _ => {}
            }
            if !calls.is_empty() {
                message["tool_calls"] = calls.iter().map(|call| past_call(call, style)).collect();
            }
            message
        }
        Turn::Answer { call_id, content, .. } => {
            json!({"role": "tool", "tool_call_id": style.id(call_id), "content": content})
        }
    };
    // Most templates don't print it; for those that do, it is part of the prompt.
    if let Some(name) = name {
        message["name"] = name.into();
    }
    message
}

fn past_call(call: &PastCall, style: CallStyle) -> Value {
    json!({
        "id": style.id(&call.id),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments.for_template(style)},
    })
}

impl CallStyle {
    /// The id as the template takes it: the same for the same id.
    pub(crate) fn id(self, id: &str) -> String {
        let is_short = id.len() == SHORT_ID_LETTERS && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if !self.has_short_ids || is_short {
            return id.to_owned();
        }
        let mut hasher = DefaultHasher::new();
        id.hash(&mut hasher);
        short_id(hasher.finish())
    }
}

/// Ids for the calls of one answer, where the model gives none.
#[derive(Clone, Debug)]
pub(crate) struct CallIds {
    /// That of no other answer.
    stem: String,
    style: CallStyle,
}

impl CallIds {
    pub(crate) fn new(server: &Server) -> Self {
        Self { stem: server.answer_id("call"), style: server.text.call_style() }
    }

    /// Ids that are the same in every run.
    #[cfg(test)]
    pub(crate) fn fixed(stem: &str) -> Self {
        Self { stem: stem.to_owned(), style: CallStyle::default() }
    }

    /// The id of a call of a choice: of the form `call_..`, or as short as the template wants to have it back.
    pub(crate) fn of(&self, choice: u32, call: u32) -> String {
        self.style.id(&format!("{}{choice:02x}{call:02x}", self.stem).replace('-', "_"))
    }
}

/// Nine letters and digits that say a number, but for its upper bits.
fn short_id(mut number: u64) -> String {
    let letters = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let letter = |_| {
        let letter = letters[(number % letters.len() as u64) as usize];
        number /= letters.len() as u64;
        char::from(letter)
    };
    (0..SHORT_ID_LETTERS).map(letter).collect()
}

const SHORT_ID_LETTERS: usize = 9;

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str) -> PastCall {
        let arguments = PastArguments::read("{\"x\": [1, \"é\"]}");
        PastCall { id: id.into(), name: "f".into(), arguments }
    }

    fn calls(ids: &[&str]) -> Turn {
        let calls = ids.iter().map(|id| call(id)).collect();
        Turn::Assistant { content: String::new(), reasoning: None, calls }
    }

    fn answer(id: &str) -> Turn {
        Turn::Answer { place: format!("answer {id}"), call_id: id.into(), content: "42".into() }
    }

    fn user() -> Turn {
        Turn::User("go on".into())
    }

    fn push_all(turns: Vec<Turn>) -> Result<History, String> {
        let mut history = History::default();
        for (at, turn) in turns.into_iter().enumerate() {
            history.push(&format!("messages[{at}]"), turn, None).map_err(|error| error.to_string())?;
        }
        Ok(history)
    }

    #[test]
    fn calls_are_answered_by_name_before_the_user_speaks_again() {
        for fine in [
            vec![user(), calls(&["a", "b"]), answer("b"), answer("a"), user()],
            vec![user(), calls(&["a"]), calls(&["b"]), answer("a"), answer("b")],
            vec![user(), calls(&["a"]), answer("a"), user(), calls(&["a"]), answer("a")],
            vec![user(), calls(&["a"])],
            vec![answer("cut"), user(), calls(&["a"]), answer("a")],
            vec![user(), calls(&["a", "a"]), answer("a"), answer("a"), user()],
            vec![user(), calls(&["a"]), calls(&["a"]), answer("a"), answer("a")],
        ] {
            assert!(push_all(fine.clone()).is_ok(), "{fine:?}");
        }
        let refused: [(Vec<Turn>, &[&str]); 4] = [
            (vec![user(), calls(&["a", "b"]), answer("a"), user()], &["messages[3]", "missing: b"]),
            (vec![user(), calls(&["a"]), answer("c")], &["answer c", "\"c\"", ": a"]),
            (vec![user(), calls(&["a"]), answer("a"), answer("a")], &["answer a", "none waits"]),
            (vec![user(), calls(&["a", "a"]), answer("a"), user()], &["messages[3]", "missing: a"]),
        ];
        for (turns, words) in refused {
            let error = push_all(turns.clone()).unwrap_err();
            for word in words {
                assert!(error.contains(word), "no {word:?} in {error:?}");
            }
        }
    }

    #[test]
    fn templates_get_calls_in_the_style_that_they_can_read() {
        let history = push_all(vec![user(), calls(&["call_17"]), answer("call_17")]).unwrap();
        let plain = history.for_template(CallStyle::default());
        assert_eq!(
            plain[1],
            json!({"role": "assistant", "content": "", "tool_calls": [
                {"id": "call_17", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "é"]}}},
            ]})
        );
        assert_eq!(plain[2], json!({"role": "tool", "tool_call_id": "call_17", "content": "42"}));
        let odd = CallStyle { arguments_are_text: true, has_short_ids: true, ..CallStyle::default() };
        let odd = history.for_template(odd);
        assert_eq!(odd[1]["tool_calls"][0]["function"]["arguments"], "{\"x\":[1,\"é\"]}");
        let id = odd[1]["tool_calls"][0]["id"].as_str().unwrap();
        assert!(id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
        assert_eq!(odd[2]["tool_call_id"], id);
        let short = CallStyle { has_short_ids: true, ..CallStyle::default() };
        assert_eq!(short.id("abc123XYZ"), "abc123XYZ");
        assert_ne!(short.id("call_1"), short.id("call_2"));
    }

    #[test]
    fn arguments_are_the_text_of_an_object_and_stray_backslashes_are_letters() {
        for (text, value) in [
            ("", json!({})),
            (" ", json!({})),
            ("{}", json!({})),
            ("null", json!({})),
            (r#"{"a": {"b": "{\"c\": 1}"}}"#, json!({"a": {"b": "{\"c\": 1}"}})),
            (r#"{"p": "C:\dir\new"}"#, json!({"p": "C:\\dir\new"})),
            (r#"{"p": "\u12 é\é"}"#, json!({"p": "\\u12 é\\é"})),
        ] {
            let PastArguments::Object(read) = PastArguments::read(text) else { panic!("{text}") };
            assert_eq!(Value::Object(read), value, "{text}");
        }
    }

    #[test]
    fn arguments_of_an_answer_that_was_cut_come_back_as_the_model_wrote_them() {
        for text in ["[1]", "\"{}\"", "{\"a\": ", "{} {}"] {
            let arguments = PastArguments::read(text);
            assert_eq!(arguments, PastArguments::Broken(text.into()));
            assert_eq!(arguments.for_template(CallStyle::default()), json!({"unparsed_arguments": text}));
            let style = CallStyle { arguments_are_text: true, ..CallStyle::default() };
            assert_eq!(arguments.for_template(style), json!(text));
        }
    }
}
