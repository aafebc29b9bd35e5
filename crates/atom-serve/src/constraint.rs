//! What a request holds its output to: OpenAI's `response_format`, vLLM's `guided_*` and
//! `structured_outputs`. One of them at most, read here, compiled on the text thread, and given to the
//! engine with every choice.

mod formats;

use crate::declare::Takes::{
    Either, Filled, Flag, List, Object as Inner, OneOf, Schema, Short, Text, Unread, Word,
};
use crate::declare::{Field, Object, Takes, field, needed};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::generation::Work;
use crate::json;
use crate::server::Server;
use crate::text::Reading;
use atom_base::TokenId;
use atom_engine::{Allowance, Grammar, GrammarRef, Metered, TokenConstraint};
use atom_text::{GrammarSource, GrammarVocabulary, Instead, StructuralTag, StructuralTags, TextError, Tool};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// A constraint as a client asks for it.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// The field that it came in.
    name: String,
    source: GrammarSource,
}

/// A compiled grammar as the engine takes it.
struct Held(atom_text::Grammar);

/// One continuation of it.
struct Continuation(atom_text::Constraint);

/// Takes all fields that constrain the output.
pub(crate) fn read(fields: &mut Fields) -> Result<Option<Wanted>, ApiError> {
    let mut wanted = read_response_format(fields)?;
    for name in ["guided_json", "guided_regex", "guided_choice", "guided_grammar"] {
        if let Some(value) = fields.take(name) {
            let kind = name.strip_prefix("guided_").expect("all of these names begin so");
            only(&mut wanted, name, read_source(name, kind, value)?)?;
        }
    }
    if let Some(mut inner) = fields.inner("structured_outputs")? {
        for kind in ["json", "regex", "choice", "grammar", "structural_tag"] {
            if let Some(value) = inner.take(kind) {
                let name = inner.name(kind);
                only(&mut wanted, &name, read_source(&name, kind, value)?)?;
            }
        }
        if inner.boolean("json_object")? == Some(true) {
            only(&mut wanted, &inner.name("json_object"), GrammarSource::JsonObject)?;
        }
        inner.finish()?;
    }
    Ok(wanted)
}

/// Compiles what the request asks for. Runs on a text thread.
pub(crate) fn compile(server: &Server, work: &mut Work) -> Result<(), ApiError> {
    let Some(Wanted { name, source }) = work.params.constraint.take() else { return Ok(()) };
    let (thinks, calls) = (work.reading.begins_in_reasoning(), work.reading.expects_calls());
    // A reader of JSON may think before it writes; other texts might look like the beginning of a thought.
    let may_think = work.reading.knows_reasoning()
        && matches!(source, GrammarSource::JsonObject | GrammarSource::JsonSchema(_));
    if !(thinks || calls || may_think || work.reading.is_harmony()) {
        // Whatever it looks like, it is content.
        work.reading = Reading::plain();
        return constrain(server, work, &name, &source);
    }
    if source.stands_alone() {
        return match (thinks, calls) {
            (true, _) => Err(ApiError::ThinksFirst { name }),
            (false, true) => Err(ApiError::FormatBesideTools { name }),
            (false, false) => {
                work.reading = Reading::plain();
                constrain(server, work, &name, &source)
            }
        };
    }
    constrain_answer(server, work, &name, &work.reading.tools(), Instead::Format(&source))?;
    work.reading = work.reading.clone().with_whole_content();
    Ok(())
}

/// Holds an answer to calls of `tools` and to what it may be instead; `name` is the field that asks for it.
///
/// A schema that no grammar can hold is refused, with the tool's name, where its tool is strict or the answer has to be a
/// call: whoever insists on one counts on its schema. Elsewhere its arguments are any object.
pub(crate) fn constrain_answer(
    server: &Server,
    work: &mut Work,
    name: &str,
    tools: &[Tool],
    instead: Instead<'_>,
) -> Result<(), ApiError> {
    check_constrains(server, work, name)?;
    let vocabulary =
        server.vocabulary().map_err(|error| ApiError::Grammar { name: name.to_owned(), error })?;
    let compile = |tools: &[Tool], instead| {
        let lark = work.reading.grammar(&server.text.tokenizer, tools, instead)?;
        vocabulary.compile(&GrammarSource::Lark(lark.unwrap_or_default()))
    };
    let grammar = compile(tools, instead).or_else(|error| {
        // Who is to blame: the format by itself, or a tool.
        if let Instead::Format(source) = instead {
            vocabulary.compile(source).map_err(|error| ApiError::Grammar { name: name.to_owned(), error })?;
        }
        let is_forced = matches!(instead, Instead::Nothing);
        let mut held = tools.to_vec();
        for tool in &mut held {
            let alone = compile(std::slice::from_ref(tool), Instead::Nothing);
            match alone {
                Ok(_) => {}
                Err(error) if tool.strict || is_forced => {
                    let is_loose = !tool.strict;
                    return Err(tool_error(vocabulary, tool, error, is_loose.then_some(UNFORCED)));
                }
                Err(_) => tool.parameters = json!({"type": "object"}),
            }
        }
        if held == tools {
            return Err(ApiError::Grammar { name: name.to_owned(), error });
        }
        compile(&held, instead).map_err(|error| ApiError::Grammar { name: name.to_owned(), error })
    })?;
    work.params.grammar = Some(held(grammar));
    Ok(())
}

/// What is wrong with a tool's schema, in the words for schemas where these say it.
fn tool_error(vocabulary: &GrammarVocabulary, tool: &Tool, error: TextError, hint: Option<&str>) -> ApiError {
    let parameters = format!("parameters of {:?}: ", tool.name);
    let error = match vocabulary.compile(&GrammarSource::JsonSchema(tool.parameters.clone())) {
        Err(TextError::Grammar { kind, reason }) => {
            TextError::Grammar { kind, reason: parameters.clone() + &reason }
        }
        Ok(_) | Err(_) => error,
    };
    let error = match error {
        TextError::Grammar { kind, reason } => {
            let before = if reason.starts_with(&parameters) { "" } else { &parameters };
            TextError::Grammar { kind, reason: format!("{before}{reason}{}", hint.unwrap_or_default()) }
        }
        other => other,
    };
    ApiError::Grammar { name: "tools".into(), error }
}

/// Holds every choice of a request to a grammar; `name` is the field that asks for it. Runs on a text thread.
pub(crate) fn constrain(
    server: &Server,
    work: &mut Work,
    name: &str,
    source: &GrammarSource,
) -> Result<(), ApiError> {
    check_constrains(server, work, name)?;
    let grammar = server.vocabulary().and_then(|vocabulary| vocabulary.compile(source));
    let grammar = grammar.map_err(|error| ApiError::Grammar { name: name.to_owned(), error })?;
    work.params.grammar = Some(held(grammar));
    Ok(())
}

/// Refuses a constraint beside another one, and where nothing could hold it.
fn check_constrains(server: &Server, work: &Work, name: &str) -> Result<(), ApiError> {
    if work.params.grammar.is_some() || work.params.constraint.is_some() {
        return Err(twice(name, "another constraint of the output"));
    }
    if !server.engine.limits().grammars {
        return Err(ApiError::Unsupported { name: name.to_owned(), reason: NO_GRAMMARS });
    }
    if work.params.ignore_eos {
        return Err(ApiError::BadField {
            name: "ignore_eos".into(),
            found: "true".into(),
            expected: format!("false beside '{name}': a complete text can't go on"),
        });
    }
    Ok(())
}

/// Takes the field `name` in which the younger APIs say the format of the answer: a schema stands beside its
/// type. `strict` changes nothing: the schema always holds.
pub(crate) fn read_format(fields: &mut Fields, name: &str) -> Result<Option<Wanted>, ApiError> {
    let place = fields.name(name);
    let Some(value) = fields.take(name) else { return Ok(None) };
    let mut inner = Fields::nested(&place, value, &SCHEMA_FORMAT)?;
    let kind = inner.required_string("type", "it is one of text, json_object and json_schema")?;
    if let Some(kind) = of_type(FORMATS, &kind) {
        inner.is_declared_as(kind);
    }
    let source = match kind.as_str() {
        "text" => None,
        "json_object" => Some(GrammarSource::JsonObject),
        "json_schema" => {
            let schema = inner.take("schema").ok_or_else(|| ApiError::Missing {
                name: inner.name("schema"),
                expected: "send the JSON schema; for any JSON object, use the type json_object",
            })?;
            Some(GrammarSource::JsonSchema(schema_of(&inner.name("schema"), schema)?))
        }
        _ => {
            let expected = "one of \"text\", \"json_object\" and \"json_schema\"";
            return Err(wrong(&inner.name("type"), &Value::String(kind), expected));
        }
    };
    inner.finish()?;
    Ok(source.map(|source| Wanted { name: place, source }))
}

fn read_response_format(fields: &mut Fields) -> Result<Option<Wanted>, ApiError> {
    let name = "response_format";
    let Some(value) = fields.take(name) else { return Ok(None) };
    let mut inner = Fields::nested(name, value, &RESPONSE_SCHEMA)?;
    let kind = inner.string("type")?.ok_or_else(|| ApiError::Missing {
        name: inner.name("type"),
        expected: "it is one of text, json_object, json_schema and structural_tag",
    })?;
    if let Some(kind) = of_type(RESPONSE_FORMATS, &kind) {
        inner.is_declared_as(kind);
    }
    let source = match kind.as_str() {
        "text" => None,
        "json_object" => Some(GrammarSource::JsonObject),
        "json_schema" => {
            let schema = inner.inner("json_schema")?.ok_or_else(|| ApiError::Missing {
                name: inner.name("json_schema"),
                expected: "send an object with a name and a schema",
            })?;
            Some(read_json_schema(schema)?)
        }
        "structural_tag" => Some(read_tags(&mut inner, &RESPONSE_FORMAT, &RESPONSE_TAGS)?),
        _ => {
            let expected = "one of \"text\", \"json_object\", \"json_schema\" and \"structural_tag\"";
            return Err(wrong(&inner.name("type"), &Value::String(kind), expected));
        }
    };
    inner.finish()?;
    Ok(source.map(|source| Wanted { name: name.into(), source }))
}

/// `strict` changes nothing: the schema always holds.
fn read_json_schema(mut inner: Fields) -> Result<GrammarSource, ApiError> {
    let title = inner.string("name")?;
    if title.is_none_or(|title| title.is_empty()) {
        return Err(ApiError::Missing { name: inner.name("name"), expected: "give the schema a name" });
    }
    let schema = inner.take("schema").ok_or_else(|| ApiError::Missing {
        name: inner.name("schema"),
        expected: "send the JSON schema; for any JSON object, use the type json_object",
    })?;
    let schema = schema_of(&inner.name("schema"), schema)?;
    inner.finish()?;
    Ok(GrammarSource::JsonSchema(schema))
}

fn read_source(name: &str, kind: &str, value: Value) -> Result<GrammarSource, ApiError> {
    match (kind, value) {
        // A schema may come as text, since some clients make it so.
        ("json", value) => Ok(GrammarSource::JsonSchema(schema_of(name, object_or_text(name, value)?)?)),
        ("regex", Value::String(text)) => Ok(GrammarSource::Regex(text)),
        ("grammar", Value::String(text)) => Ok(GrammarSource::of_grammar(text)),
        ("choice", Value::Array(items)) if items.is_empty() => {
            Err(wrong(name, &Value::Array(items), "a list of at least one string"))
        }
        ("choice", Value::Array(items)) => {
            let choices = items.into_iter().enumerate().map(|(at, item)| match item {
                Value::String(text) => Ok(text),
                other => Err(wrong(&format!("{name}[{at}]"), &other, "a string")),
            });
            Ok(GrammarSource::Choice(choices.collect::<Result<_, _>>()?))
        }
        ("structural_tag", value) => {
            let mut inner = Fields::nested(name, object_or_text(name, value)?, &TAGS)?;
            if inner.string("type")?.is_some_and(|kind| kind != "structural_tag") {
                return Err(ApiError::Unsupported {
                    name: inner.name("type"),
                    reason: "tags are of the type structural_tag, with a format, or with structures and triggers",
                });
            }
            let tags = read_tags(&mut inner, &FORMAT_TAGS, &TAGS)?;
            inner.finish()?;
            Ok(tags)
        }
        ("choice", other) => Err(wrong(name, &other, "a list of strings")),
        (_, other) => Err(wrong(name, &other, "a string")),
    }
}

/// Nothing else is a JSON schema.
fn schema_of(name: &str, value: Value) -> Result<Value, ApiError> {
    match value {
        Value::Object(_) | Value::Bool(_) => Ok(value),
        other => Err(wrong(name, &other, "a JSON schema: an object, true or false")),
    }
}

fn object_or_text(name: &str, value: Value) -> Result<Value, ApiError> {
    let Value::String(text) = value else { return Ok(value) };
    json::parse_field(name, &text, "an object, or the same as JSON text")
}

/// Of the younger kind, with a `format`, or of the older one.
fn read_tags(
    fields: &mut Fields,
    younger: &'static Object,
    older: &'static Object,
) -> Result<GrammarSource, ApiError> {
    fields.is_declared_as(younger);
    let place = fields.name("format");
    if let Some(format) = fields.take("format") {
        return Ok(GrammarSource::Format(formats::read(&place, format)?));
    }
    fields.is_declared_as(older);
    let missing = |name: String, expected| ApiError::Missing { name, expected };
    let structures = fields.list("structures")?;
    let structures = structures
        .ok_or_else(|| missing(fields.name("structures"), "send a format, or structures and triggers"))?;
    let triggers = fields.list("triggers")?;
    let triggers = triggers.ok_or_else(|| missing(fields.name("triggers"), "send a list of texts"))?;
    for (name, items) in [("structures", &structures), ("triggers", &triggers)] {
        if items.is_empty() {
            return Err(wrong(&fields.name(name), &json!([]), "a list of at least one"));
        }
    }
    let triggers = triggers.into_iter().enumerate().map(|(at, item)| match item {
        Value::String(text) => Ok(text),
        other => Err(wrong(&format!("{}[{at}]", fields.name("triggers")), &other, "a string")),
    });
    let triggers = triggers.collect::<Result<_, _>>()?;
    let tags = structures.into_iter().enumerate().map(|(at, item)| {
        let mut inner = Fields::nested(&format!("{}[{at}]", fields.name("structures")), item, &STRUCTURE)?;
        let text = |inner: &mut Fields, name: &str| {
            let text = inner.string(name)?;
            text.ok_or_else(|| missing(inner.name(name), "send a text; it may be empty"))
        };
        let (begin, end) = (text(&mut inner, "begin")?, text(&mut inner, "end")?);
        let schema =
            inner.take("schema").ok_or_else(|| missing(inner.name("schema"), "send a JSON schema"))?;
        let schema = schema_of(&inner.name("schema"), schema)?;
        inner.finish()?;
        Ok(StructuralTag { begin, schema, end })
    });
    let tags = tags.collect::<Result<_, ApiError>>()?;
    Ok(GrammarSource::StructuralTags(StructuralTags { triggers, tags }))
}

fn only(wanted: &mut Option<Wanted>, name: &str, source: GrammarSource) -> Result<(), ApiError> {
    match wanted {
        Some(first) => Err(twice(name, &format!("'{}'", first.name))),
        None => {
            *wanted = Some(Wanted { name: name.to_owned(), source });
            Ok(())
        }
    }
}

fn twice(name: &str, first: &str) -> ApiError {
    ApiError::BadField {
        name: name.to_owned(),
        found: format!("given beside {first}"),
        expected: "the only constraint of the output".into(),
    }
}

/// A grammar that ends a request which makes all others wait.
fn held(grammar: atom_text::Grammar) -> GrammarRef {
    GrammarRef(Arc::new(Metered::new(Arc::new(Held(grammar)), Allowance::OF_A_REQUEST, thread_time)))
}

/// How much of a processor's time this thread has had.
fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

impl Grammar for Held {
    fn start(&self) -> Result<Box<dyn TokenConstraint>, String> {
        Ok(Box::new(Continuation(self.0.start())))
    }
}

impl TokenConstraint for Continuation {
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
        self.0.mask(allowed)
    }

    fn advance(&mut self, token: TokenId) -> Result<(), String> {
        self.0.advance(token)
    }
}

const UNFORCED: &str = "; 'tool_choice' insists on calls, which follow their schemas: with \"auto\" a tool without \
                        'strict' may have any object";

/// As the engine's own refusal, which nothing comes to from here.
const NO_GRAMMARS: &str =
    "the device that it runs on can't hold the output to a grammar yet; one with --device cpu can";

/// The kind of object whose `type` is this word.
fn of_type(kinds: &[&'static Object], word: &str) -> Option<&'static Object> {
    let says = |kind: &Object| matches!(kind.field("type"), Some(Field { takes: Word(words), .. }) if words.contains(&word));
    kinds.iter().copied().find(|kind| says(kind))
}

/// What [`read`] takes.
pub(crate) const FIELDS: &[Field] = &[
    field(
        "response_format",
        OneOf(RESPONSE_FORMATS),
        "What the answer is held to; one constraint at the most.",
    ),
    field("guided_json", SCHEMA_OR_TEXT, "A JSON schema."),
    field("guided_regex", Text, "A regular expression for the whole answer."),
    field("guided_choice", List(&Text, 1, usize::MAX), "One of these."),
    field("guided_grammar", Text, "A grammar in EBNF (`root ::= ..`) or Lark."),
    field("structured_outputs", Filled(&STRUCTURED), "The same in one object."),
];

/// What [`read_format`] takes.
pub(crate) const FORMAT: Field = field("format", OneOf(FORMATS), "What the answer is held to.");

const STRUCTURED: Object = Object {
    name: "StructuredOutputs",
    groups: &[&[
        field("json", SCHEMA_OR_TEXT, "A JSON schema."),
        field("regex", Text, "A regular expression for the whole answer."),
        field("choice", List(&Text, 1, usize::MAX), "One of these."),
        field("grammar", Text, "A grammar in EBNF (`root ::= ..`) or Lark."),
        field(
            "structural_tag",
            Either(&[Inner(&FORMAT_TAGS), Inner(&TAGS), Text]),
            "A format of formats, or tags within free text; may be JSON text.",
        ),
        field("json_object", Flag, "Any JSON object."),
    ]],
};

const RESPONSE_FORMATS: &[&Object] =
    &[&FREE, &ANY_OBJECT, &RESPONSE_SCHEMA, &RESPONSE_FORMAT, &RESPONSE_TAGS];
/// Formats of the younger APIs.
pub(crate) const FORMATS: &[&Object] = &[&FREE, &ANY_OBJECT, &SCHEMA_FORMAT];
const FREE: Object = Object { name: "TextFormat", groups: &[&[needed("type", Word(&["text"]), "")]] };
const ANY_OBJECT: Object =
    Object { name: "JsonObjectFormat", groups: &[&[needed("type", Word(&["json_object"]), "")]] };
const SCHEMA_FORMAT: Object = Object {
    name: "JsonSchemaFormat",
    groups: &[
        &[needed("type", Word(&["json_schema"]), ""), field("name", Unread(&Text), ""), SCHEMA],
        SCHEMA_WORDS,
    ],
};
const RESPONSE_SCHEMA: Object = Object {
    name: "JsonSchemaResponseFormat",
    groups: &[&[needed("type", Word(&["json_schema"]), ""), needed("json_schema", Inner(&NAMED_SCHEMA), "")]],
};
const NAMED_SCHEMA: Object = Object {
    name: "NamedJsonSchema",
    groups: &[&[needed("name", Short(1, usize::MAX), ""), SCHEMA], SCHEMA_WORDS],
};
const RESPONSE_TAGS: Object = Object {
    name: "StructuralTagResponseFormat",
    groups: &[&[needed("type", Word(&["structural_tag"]), "")], TAG_FIELDS],
};
const RESPONSE_FORMAT: Object = Object {
    name: "FormatResponseFormat",
    groups: &[&[needed("type", Word(&["structural_tag"]), ""), FORMAT_OF_TAGS]],
};
const FORMAT_TAGS: Object = Object {
    name: "StructuralFormat",
    groups: &[&[field("type", Word(&["structural_tag"]), ""), FORMAT_OF_TAGS]],
};
const FORMAT_OF_TAGS: Field = needed("format", formats::a_format(), "See docs/structured_output.md.");
const TAGS: Object =
    Object { name: "StructuralTags", groups: &[&[field("type", Word(&["structural_tag"]), "")], TAG_FIELDS] };
const TAG_FIELDS: &[Field] = &[
    needed("structures", List(&Inner(&STRUCTURE), 1, usize::MAX), "Each begins with one of the triggers."),
    needed("triggers", List(&Short(1, usize::MAX), 1, usize::MAX), "Texts behind which a structure goes on."),
];
const STRUCTURE: Object =
    Object { name: "Structure", groups: &[&[needed("begin", Text, ""), SCHEMA, needed("end", Text, "")]] };

const SCHEMA: Field =
    needed("schema", Schema(SCHEMA_OF_JSON), "A JSON schema; see docs/structured_output.md.");
const SCHEMA_WORDS: &[Field] = &[
    field("description", Unread(&Text), ""),
    field("strict", Unread(&Flag), "Of no consequence: the schema always holds."),
];
const SCHEMA_OF_JSON: &str = r#"{"type": ["object", "boolean"]}"#;
const SCHEMA_OR_TEXT: Takes = Schema(r#"{"type": ["object", "boolean", "string"]}"#);

#[cfg(test)]
mod tests {
    use super::*;

    /// Beside a thread that works this one stands still.
    #[test]
    fn the_clock_of_masks_counts_the_work_of_its_own_thread() {
        let before = thread_time();
        let theirs = std::thread::spawn(|| {
            let begun = thread_time();
            while thread_time() < begun + Duration::from_millis(300) {}
            thread_time() - begun
        });
        let theirs = theirs.join().unwrap();
        let ours = thread_time() - before;
        assert!(ours < theirs, "{ours:?} of waiting beside {theirs:?} of work");
        while thread_time() == before {}
        assert!(thread_time() > before);
    }
}
