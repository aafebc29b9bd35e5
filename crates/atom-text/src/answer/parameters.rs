//! Arguments that the model writes as tags, brought to one JSON object.

use super::AnswerEnd;
use super::end::Left;
use super::format::Sink;
use super::json::{JsonText, Took};
use serde_json::Value;

/// Writes the object, parameter by parameter. Text streams; everything else is written when it is complete,
/// since only then it is known to be what the tool declares.
#[derive(Clone, Debug, Default)]
pub(super) struct Parameters {
    count: usize,
    kind: Kind,
    text: String,
    /// Follows a value that may be JSON from its first character on, up to where it ends or is none after all.
    json: Option<JsonText>,
}

/// What a parameter is written as.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Kind {
    /// A string, whatever it looks like.
    #[default]
    Text,
    /// JSON of any type; a string if it is no JSON.
    Json,
    /// JSON of one of these types, and a string if it is none of them.
    TextOr(Vec<Type>),
}

/// Types of JSON schema, but for `string`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Number,
    Boolean,
    Null,
    Array,
    Object,
}

impl Parameters {
    pub(super) fn begin(&mut self, key: &str, kind: Kind, sink: &mut Sink<'_>) {
        let before = if self.count == 0 { "{" } else { ", " };
        sink.arguments(before);
        sink.arguments(&Value::from(key).to_string());
        sink.arguments(": ");
        if kind == Kind::Text {
            sink.arguments("\"");
        }
        self.count += 1;
        self.json = (kind != Kind::Text && *sink.reread < REREAD_BYTES_MAX).then(JsonText::default);
        self.kind = kind;
    }

    pub(super) fn push(&mut self, c: char, sink: &mut Sink<'_>) {
        if self.kind == Kind::Text {
            escape(c, sink);
            return;
        }
        self.text.push(c);
        if let Some(json) = &mut self.json {
            let is_other = !json.is_begun() && !c.is_whitespace() && !self.kind.may_begin(c);
            if is_other || json.push(c) != Took::More {
                self.json = None;
            }
        }
    }

    /// True between the quotes of a string of JSON, where a closing tag is text.
    pub(super) fn is_in_string(&self) -> bool {
        self.json.as_ref().is_some_and(JsonText::is_in_string)
    }

    /// Takes a character of such a string. JSON has no line breaks there: where one comes, a quote is missing, and
    /// the whole value, which is given back, is to be read again as what isn't JSON.
    pub(super) fn push_in_string(&mut self, c: char, sink: &mut Sink<'_>) -> Option<String> {
        self.push(c, sink);
        (c < ' ').then(|| self.give_back(sink))
    }

    fn give_back(&mut self, sink: &mut Sink<'_>) -> String {
        self.json = None;
        *sink.reread += self.text.len();
        std::mem::take(&mut self.text)
    }

    pub(super) fn end(&mut self, sink: &mut Sink<'_>) {
        let text = std::mem::take(&mut self.text);
        match &self.kind {
            Kind::Text => sink.arguments("\""),
            kind => sink.arguments(&coerce(&text, kind)),
        }
    }

    /// The object is complete.
    pub(super) fn close(&mut self, sink: &mut Sink<'_>) {
        sink.arguments(if self.count == 0 { "{}" } else { "}" });
    }

    /// The answer ends between two parameters. If it is cut, there may be more of them.
    pub(super) fn end_answer(&mut self, end: AnswerEnd, sink: &mut Sink<'_>) -> Left {
        match end {
            AnswerEnd::Whole => {
                self.close(sink);
                Left::Call
            }
            AnswerEnd::Cut => Left::CutCall,
        }
    }

    /// The answer ends within a value, which stays as it is. `held`: what could be the beginning of its closing tag,
    /// and is that if the model would have gone on.
    pub(super) fn cut(&mut self, end: AnswerEnd, held: &str, sink: &mut Sink<'_>) -> Left {
        if end == AnswerEnd::Whole && self.is_in_string() {
            return Left::Again(self.give_back(sink));
        }
        if end == AnswerEnd::Whole {
            held.chars().for_each(|c| self.push(c, sink));
        }
        sink.arguments(std::mem::take(&mut self.text).trim_start());
        Left::CutCall
    }
}

impl Kind {
    /// True if JSON of this kind may begin so. What begins otherwise has no strings with tags in them.
    fn may_begin(&self, c: char) -> bool {
        let is_of = |of: Type| match self {
            Self::Text => false,
            Self::Json => true,
            Self::TextOr(types) => types.contains(&of),
        };
        match c {
            '{' => is_of(Type::Object),
            '[' => is_of(Type::Array),
            '"' => *self != Self::Text,
            _ => false,
        }
    }

    /// What the tool declares for a parameter, if it does.
    pub(super) fn declared(sink: &Sink<'_>, tool: &str, key: &str) -> Option<Self> {
        Some(Self::of(sink.tool(tool)?.parameters.get("properties")?.get(key)?))
    }

    /// A schema without types is one of a string.
    pub(super) fn of(schema: &Value) -> Self {
        let mut types = Types::default();
        types.collect(schema, 0);
        match (types.is_string, types.others.is_empty()) {
            (_, true) => Self::Text,
            (true, false) => Self::TextOr(types.others),
            (false, false) => Self::Json,
        }
    }
}

#[derive(Default)]
struct Types {
    is_string: bool,
    others: Vec<Type>,
}

impl Types {
    fn collect(&mut self, schema: &Value, depth: usize) {
        if depth > SCHEMA_DEPTH_MAX {
            return;
        }
        match &schema["type"] {
            Value::String(name) => self.add(name),
            Value::Array(names) => names.iter().filter_map(Value::as_str).for_each(|name| self.add(name)),
            _ => {}
        }
        for word in ["anyOf", "oneOf", "allOf"] {
            for part in schema[word].as_array().into_iter().flatten() {
                self.collect(part, depth + 1);
            }
        }
        if schema.get("type").is_none() {
            for value in schema["enum"].as_array().into_iter().flatten().chain(schema.get("const")) {
                self.add(type_of(value));
            }
        }
        // What a reference names isn't looked up: it is an object as a rule.
        if schema.get("$ref").is_some() {
            self.is_string = true;
            self.others.extend([Type::Object, Type::Array]);
        }
    }

    fn add(&mut self, name: &str) {
        match name {
            "string" => self.is_string = true,
            "integer" | "number" => self.others.push(Type::Number),
            "boolean" => self.others.push(Type::Boolean),
            "null" => self.others.push(Type::Null),
            "array" => self.others.push(Type::Array),
            "object" => self.others.push(Type::Object),
            _ => {}
        }
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "string",
        Value::Number(_) => "number",
        Value::Bool(_) => "boolean",
        Value::Null => "null",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// The JSON text of a parameter's text. JSON stays as the model wrote it.
fn coerce(text: &str, kind: &Kind) -> String {
    // Models that learned from Python write its words now and then.
    let word = match text.trim() {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    let is_of = |types: &[Type], value: &Value| match value {
        // Where other types are allowed, a string in quotes is how JSON writes one.
        Value::String(_) => true,
        Value::Number(_) => types.contains(&Type::Number),
        Value::Bool(_) => types.contains(&Type::Boolean),
        Value::Null => types.contains(&Type::Null),
        Value::Array(_) => types.contains(&Type::Array),
        Value::Object(_) => types.contains(&Type::Object),
    };
    let is_json = match (serde_json::from_str::<Value>(word), kind) {
        (Ok(_), Kind::Json) => true,
        (Ok(value), Kind::TextOr(types)) => is_of(types, &value),
        _ => false,
    };
    if is_json { word.to_owned() } else { Value::from(text).to_string() }
}

/// One character within a JSON string.
fn escape(c: char, sink: &mut Sink<'_>) {
    match c {
        '"' => sink.arguments("\\\""),
        '\\' => sink.arguments("\\\\"),
        '\n' => sink.arguments("\\n"),
        '\r' => sink.arguments("\\r"),
        '\t' => sink.arguments("\\t"),
        '\0'..='\x1f' => sink.arguments(&format!("\\u{:04x}", u32::from(c))),
        _ => sink.arguments(c.encode_utf8(&mut [0; 4])),
    }
}

/// Bytes that an answer may have read twice. Values within values could make it read all of them again and again; beyond
/// this a closing tag ends a value, wherever it stands.
const REREAD_BYTES_MAX: usize = 1 << 20;

/// Alternatives within alternatives of one parameter's schema.
const SCHEMA_DEPTH_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_parameter_has_the_declared_type_or_is_a_string() {
        let cases = [
            (json!({"type": "string"}), "5", "\"5\""),
            (json!({"type": "string"}), "null", "\"null\""),
            (json!({"type": "integer"}), " 5\n", "5"),
            (json!({"type": "integer"}), "five", "\"five\""),
            (json!({"type": "integer"}), "12345678901234567890123", "12345678901234567890123"),
            (json!({"type": "number"}), "1.50", "1.50"),
            (json!({"type": "boolean"}), "True", "true"),
            (json!({"type": "boolean"}), "yes", "\"yes\""),
            (json!({"type": "array"}), "[1, \"a\"]", "[1, \"a\"]"),
            (json!({"type": "array"}), "[1, ", "\"[1, \""),
            (json!({"type": "object"}), "{\"a\": {\"b\": \"}\"}}", "{\"a\": {\"b\": \"}\"}}"),
            (json!({"type": ["string", "null"]}), "null", "null"),
            (json!({"type": ["string", "null"]}), "5", "\"5\""),
            (json!({"anyOf": [{"type": "integer"}, {"type": "string"}]}), "5", "5"),
            (json!({"enum": [1, 2]}), "2", "2"),
            (json!({"enum": ["1", "2"]}), "2", "\"2\""),
            (json!({"$ref": "#/$defs/p"}), "{\"x\": 1}", "{\"x\": 1}"),
            (json!({"$ref": "#/$defs/p"}), "1", "\"1\""),
            (json!({}), "1", "\"1\""),
        ];
        for (schema, text, expected) in cases {
            let (mut out, mut calls) = (Vec::new(), 1);
            let mut ids = Default::default();
            let mut sink =
                Sink { out: &mut out, calls: &mut calls, ids: &mut ids, reread: &mut 0, tools: &[] };
            let mut parameters = Parameters::default();
            parameters.begin("k", Kind::of(&schema), &mut sink);
            text.chars().for_each(|c| parameters.push(c, &mut sink));
            parameters.end(&mut sink);
            parameters.close(&mut sink);
            let expected = format!("{{\"k\": {expected}}}");
            assert_eq!(out, [crate::AnswerPart::Arguments { index: 0, json: expected.clone() }], "{schema}");
            serde_json::from_str::<Value>(&expected).unwrap();
        }
    }

    #[test]
    fn text_is_escaped_as_json_escapes_it() {
        let text = "a\"b\\c\nd\r\t\u{0}\u{1f}\u{7f}é城🦀</x>";
        let (mut out, mut calls) = (Vec::new(), 1);
        let mut ids = Default::default();
        let mut sink = Sink { out: &mut out, calls: &mut calls, ids: &mut ids, reread: &mut 0, tools: &[] };
        let mut parameters = Parameters::default();
        parameters.begin("k", Kind::Text, &mut sink);
        text.chars().for_each(|c| parameters.push(c, &mut sink));
        parameters.end(&mut sink);
        parameters.close(&mut sink);
        let [crate::AnswerPart::Arguments { json, .. }] = out.as_slice() else { panic!("{out:?}") };
        assert_eq!(serde_json::from_str::<Value>(json).unwrap(), json!({"k": text}));
    }
}
