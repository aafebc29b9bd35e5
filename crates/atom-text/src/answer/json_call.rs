//! A call that is one JSON object: `{"name": "f", "arguments": {..}}`.

use super::AnswerEnd;
use super::end::Left;
use super::format::Sink;
use super::json::{JsonText, Took};
use serde_json::Value;

/// Reads such an object. The name leaves when it is known, arguments as they come; arguments before the name
/// wait for it. Other members (`"id"`, `"type"`) are read over.
#[derive(Clone, Debug)]
pub(super) struct JsonCall {
    rule: NameRule,
    at: At,
    /// The key or the value that is being read, where it isn't passed on.
    text: String,
    value: JsonText,
    key: String,
    name: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    is_announced: bool,
    has_arguments: bool,
    /// There is a member that calls don't have.
    is_foreign: bool,
}

/// Which names make a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameRule {
    /// Any: the object stands between markers of tool calls.
    Any,
    /// Those of offered tools, and only beside arguments: any JSON object could have a name.
    Offered,
}

/// Which part of the object comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Open,
    FirstKey,
    Key,
    Colon,
    Value,
    Comma,
}

/// What a character was to the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallStep {
    /// A part of it.
    Going,
    /// Its last character.
    Done,
    /// It can't be a part of such an object. The call, if there is one, is closed.
    Failed,
}

impl JsonCall {
    pub(super) fn new(rule: NameRule) -> Self {
        Self {
            rule,
            at: At::Open,
            text: String::new(),
            value: JsonText::default(),
            key: String::new(),
            name: None,
            early: None,
            is_announced: false,
            has_arguments: false,
            is_foreign: false,
        }
    }

    /// An object whose opening bracket has been read.
    pub(super) fn within(rule: NameRule) -> Self {
        Self { at: At::FirstKey, ..Self::new(rule) }
    }

    pub(super) fn push(&mut self, c: char, sink: &mut Sink<'_>) -> CallStep {
        let is_ok = match self.at {
            At::Key if !self.text.is_empty() => self.push_in_key(c),
            At::Value => return self.push_in_value(c, sink),
            _ if c.is_whitespace() => true,
            At::Open => self.goes_on(c == '{', At::FirstKey),
            At::FirstKey if c == '}' => return self.end(sink),
            At::FirstKey | At::Key => {
                self.at = At::Key;
                c == '"' && self.push_in_key(c)
            }
            At::Colon => self.goes_on(c == ':', At::Value),
            At::Comma if c == '}' => return self.end(sink),
            At::Comma => self.goes_on(c == ',', At::Key),
        };
        if is_ok { CallStep::Going } else { self.fail(sink) }
    }

    /// The answer ends here.
    pub(super) fn end_answer(&mut self, end: AnswerEnd, sink: &mut Sink<'_>) -> Left {
        let is_whole = self.has_arguments;
        match end {
            _ if !self.is_announced && end == AnswerEnd::Cut && self.may_yet_call(sink) => Left::Frame,
            _ if !self.is_announced => Left::Text,
            _ if is_whole => Left::Call,
            AnswerEnd::Whole => {
                self.finish(sink);
                Left::Call
            }
            AnswerEnd::Cut => {
                if self.at == At::Value && self.is_arguments() {
                    sink.arguments(&std::mem::take(&mut self.text));
                }
                Left::CutCall
            }
        }
    }

    /// True while the object is the beginning of a call. A bare one could be anything until it has a key, and it
    /// has to have those of a call.
    fn may_yet_call(&self, sink: &Sink<'_>) -> bool {
        if self.rule == NameRule::Any {
            return true;
        }
        let is_begun = |text: &str, whole: &str| text.len() > 1 && whole.starts_with(&text[1..]);
        match self.at {
            _ if self.is_foreign => false,
            At::Key if self.text.len() > 1 => KEYS.iter().any(|key| is_begun(&self.text, key)),
            At::Value if self.key == "name" && self.name.is_none() && self.text.len() > 1 => {
                sink.tools.iter().any(|tool| is_begun(&self.text, &tool.name))
            }
            _ => !self.key.is_empty(),
        }
    }

    /// The object ends before it is whole. Closes the call if one has begun.
    pub(super) fn finish(&mut self, sink: &mut Sink<'_>) {
        if !self.is_announced {
            return;
        }
        if self.at == At::Value && self.is_arguments() && self.value.is_begun() {
            if !self.is_streamed() {
                sink.arguments(&std::mem::take(&mut self.text));
            } else if let Some(brackets) = self.value.missing_brackets() {
                sink.arguments(&brackets);
            }
        } else if !self.has_arguments {
            sink.arguments("{}");
        }
        self.has_arguments = true;
    }

    /// True between the quotes of a string, where a marker is text.
    pub(super) fn is_in_string(&self) -> bool {
        self.value.is_in_string()
    }

    /// True from the moment when the call has left.
    pub(super) fn is_announced(&self) -> bool {
        self.is_announced
    }

    fn goes_on(&mut self, is_expected: bool, next: At) -> bool {
        if next == At::Value {
            self.value = JsonText::default();
            self.text.clear();
        }
        self.at = next;
        is_expected
    }

    fn push_in_key(&mut self, c: char) -> bool {
        self.text.push(c);
        match self.value_of_key(c) {
            Took::End => match serde_json::from_str(&self.text) {
                Ok(key) => {
                    self.key = key;
                    self.is_foreign |= !KEYS.contains(&self.key.as_str());
                    self.text.clear();
                    self.at = At::Colon;
                    true
                }
                Err(_) => false,
            },
            _ => true,
        }
    }

    fn value_of_key(&mut self, c: char) -> Took {
        if self.text.len() == 1 {
            self.value = JsonText::default();
        }
        self.value.push(c)
    }

    fn is_arguments(&self) -> bool {
        matches!(self.key.as_str(), "arguments" | "parameters") && !self.has_arguments
    }

    /// Arguments that are an object leave as they come.
    fn is_streamed(&self) -> bool {
        self.is_announced && self.is_arguments() && self.text.is_empty()
    }

    fn push_in_value(&mut self, c: char, sink: &mut Sink<'_>) -> CallStep {
        let is_first = !self.value.is_begun();
        if is_first && c.is_whitespace() {
            return CallStep::Going;
        }
        if is_first && self.is_arguments() {
            self.announce(true, sink);
        }
        let is_streamed = self.is_streamed() && (c == '{' || !is_first);
        let took = self.value.push(c);
        match took {
            Took::Before if is_first => return self.fail(sink),
            Took::Before => {}
            _ if is_streamed => sink.arguments(c.encode_utf8(&mut [0; 4])),
            _ => self.text.push(c),
        }
        if took == Took::More {
            return CallStep::Going;
        }
        if !self.end_value(is_streamed, sink) {
            return self.fail(sink);
        }
        self.at = At::Comma;
        if took == Took::Before { self.push(c, sink) } else { CallStep::Going }
    }

    /// A member is complete. False if it can't be one of a call.
    fn end_value(&mut self, was_streamed: bool, sink: &mut Sink<'_>) -> bool {
        self.value = JsonText::default();
        let text = std::mem::take(&mut self.text);
        if self.is_arguments() {
            if self.is_announced {
                if !was_streamed {
                    sink.arguments(&object_of(text));
                }
            } else {
                self.early = Some(object_of(text));
            }
            self.has_arguments = true;
            self.announce(true, sink);
        } else if self.key == "name" && self.name.is_none() {
            match serde_json::from_str::<String>(&text) {
                Ok(name) if !name.is_empty() => self.name = Some(name),
                _ => return false,
            }
            if self.rule == NameRule::Offered && !self.is_offered(sink) {
                return false;
            }
            self.announce(self.has_arguments, sink);
        } else if self.key == "type" {
            self.is_foreign |= text != "\"function\"";
        }
        true
    }

    fn is_offered(&self, sink: &Sink<'_>) -> bool {
        self.name.as_ref().is_some_and(|name| sink.tool(name).is_some())
    }

    fn announce(&mut self, has_arguments: bool, sink: &mut Sink<'_>) {
        let Some(name) = &self.name else { return };
        if self.is_announced || (self.rule == NameRule::Offered && !has_arguments) {
            return;
        }
        self.is_announced = true;
        sink.call(name, None);
        if let Some(early) = self.early.take() {
            sink.arguments(&early);
        }
    }

    fn end(&mut self, sink: &mut Sink<'_>) -> CallStep {
        if !self.is_announced {
            return CallStep::Failed;
        }
        if !self.has_arguments {
            sink.arguments("{}");
        }
        CallStep::Done
    }

    fn fail(&mut self, sink: &mut Sink<'_>) -> CallStep {
        self.finish(sink);
        CallStep::Failed
    }
}

/// Members of a bare call.
const KEYS: [&str; 4] = ["name", "type", "arguments", "parameters"];

/// Arguments that aren't written as an object. Some models write the object into a string, or `null` for
/// none; anything else stays as it is.
fn object_of(text: String) -> String {
    match serde_json::from_str(&text) {
        Ok(Value::Null) => "{}".into(),
        Ok(Value::String(inner)) if matches!(serde_json::from_str(&inner), Ok(Value::Object(_))) => inner,
        _ => text,
    }
}
