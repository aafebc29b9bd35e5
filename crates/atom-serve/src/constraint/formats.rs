//! Structural tags of the younger kind: a format made of formats, as xgrammar's documentation has them.

use super::{SCHEMA_OF_JSON, of_type, schema_of};
use crate::declare::Takes::{
    Either, Flag, List, Named, Never, Object as Inner, Only, Schema, Short, Text, Whole, Word,
};
use crate::declare::{Field, Object, Takes, field, idle, needed};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use atom_text::{Format, FormatKind, Tag, TagCount};
use serde_json::{Value, json};

/// Reads the format at a place.
pub(super) fn read(place: &str, value: Value) -> Result<Format, ApiError> {
    let mut fields = Fields::nested(place, value, &CONST_STRING)?;
    let kind = fields.required_string("type", "it names a format, such as \"tag\"")?;
    if let Some((_, reason)) = REFUSED.iter().find(|(refused, _)| *refused == kind) {
        return Err(ApiError::Unsupported { name: format!("{}: {kind}", fields.name("type")), reason });
    }
    let Some(declared) = of_type(&FORMATS, &kind) else {
        let known: Vec<String> = FORMATS.iter().map(|format| type_of(format)).collect();
        return Err(wrong(&fields.name("type"), &kind.into(), format!("one of {}", known.join(", "))));
    };
    fields.is_declared_as(declared);
    let kind = match kind.as_str() {
        "const_string" => FormatKind::ConstString(fields.required_string("value", "send a text")?),
        "regex" => FormatKind::Regex(fields.required_string("pattern", "send a regular expression")?),
        "grammar" => FormatKind::Grammar(fields.required_string("grammar", "send a grammar in EBNF")?),
        "json_schema" => {
            let name = fields.name("json_schema");
            let schema = fields.take("json_schema");
            let schema = schema.ok_or_else(|| missing(&name, "send a JSON schema"))?;
            FormatKind::JsonSchema(schema_of(&name, schema)?)
        }
        "any_text" => {
            let chars_max = fields.integer("max_chars")?.map(|most| most as u32);
            FormatKind::AnyText { excludes: texts(&mut fields, "excludes", 0)?, chars_max }
        }
        "sequence" => FormatKind::Sequence(elements(&mut fields)?),
        "or" => FormatKind::Or(elements(&mut fields)?),
        "optional" => repeat(0, Some(1), &mut fields)?,
        "plus" => repeat(1, None, &mut fields)?,
        "star" => repeat(0, None, &mut fields)?,
        "repeat" => {
            let least =
                fields.integer("min")?.ok_or_else(|| missing(&fields.name("min"), "how often at least"))?;
            let name = fields.name("max");
            let most = fields
                .integer("max")?
                .ok_or_else(|| missing(&name, "how often at the most; -1: any number"))?;
            if (0..least).contains(&most) {
                return Err(wrong(&name, &json!(most), format!("-1, or at least the {least} of 'min'")));
            }
            repeat(least as u32, u32::try_from(most).ok(), &mut fields)?
        }
        "tag" => FormatKind::Tag(tag(&mut fields)?),
        "triggered_tags" => FormatKind::TriggeredTags {
            triggers: texts(&mut fields, "triggers", 1)?,
            tags: tags(&mut fields)?,
            excludes: texts(&mut fields, "excludes", 0)?,
            count: count(&mut fields)?,
        },
        _ => FormatKind::TagsWithSeparator {
            tags: tags(&mut fields)?,
            separator: fields.required_string("separator", "send a text; it may be empty")?,
            count: count(&mut fields)?,
        },
    };
    fields.finish()?;
    Ok(Format { place: place.to_owned(), kind })
}

fn missing(name: &str, expected: &'static str) -> ApiError {
    ApiError::Missing { name: name.to_owned(), expected }
}

fn elements(fields: &mut Fields) -> Result<Vec<Format>, ApiError> {
    let place = fields.name("elements");
    let items = fields.list("elements")?.ok_or_else(|| missing(&place, "send a list of formats"))?;
    if items.is_empty() {
        return Err(wrong(&place, &json!([]), "a list of at least one"));
    }
    items.into_iter().enumerate().map(|(at, item)| read(&format!("{place}[{at}]"), item)).collect()
}

fn content(fields: &mut Fields) -> Result<Box<Format>, ApiError> {
    let place = fields.name("content");
    let value = fields.take("content").ok_or_else(|| missing(&place, "send a format"))?;
    Ok(Box::new(read(&place, value)?))
}

fn repeat(least: u32, most: Option<u32>, fields: &mut Fields) -> Result<FormatKind, ApiError> {
    Ok(FormatKind::Repeat { least, most, content: content(fields)? })
}

fn tag(fields: &mut Fields) -> Result<Tag, ApiError> {
    let begin = text_of_tag(fields, "begin")?;
    let place = fields.name("end");
    let ends = match fields.take("end") {
        None => return Err(missing(&place, "send a text; it may be empty")),
        Some(Value::Array(items)) if items.is_empty() => {
            return Err(wrong(&place, &json!([]), "a text, or a list of at least one"));
        }
        Some(Value::Array(items)) => {
            let ends = items.into_iter().enumerate();
            ends.map(|(at, item)| text_at(&format!("{place}[{at}]"), item)).collect::<Result<_, _>>()?
        }
        Some(other) => vec![text_at(&place, other)?],
    };
    Ok(Tag { begin, content: content(fields)?, ends })
}

fn text_of_tag(fields: &mut Fields, name: &str) -> Result<String, ApiError> {
    let place = fields.name(name);
    let value = fields.take(name).ok_or_else(|| missing(&place, "send a text; it may be empty"))?;
    text_at(&place, value)
}

/// The text that begins or ends a tag.
fn text_at(place: &str, value: Value) -> Result<String, ApiError> {
    match value {
        Value::String(text) => Ok(text),
        Value::Object(_) => Err(ApiError::Unsupported { name: place.to_owned(), reason: TOKENS }),
        other => Err(wrong(place, &other, "a string")),
    }
}

fn tags(fields: &mut Fields) -> Result<Vec<Tag>, ApiError> {
    let place = fields.name("tags");
    let items = fields.list("tags")?.ok_or_else(|| missing(&place, "send a list of tags"))?;
    if items.is_empty() {
        return Err(wrong(&place, &json!([]), "a list of at least one"));
    }
    let tags = items.into_iter().enumerate().map(|(at, item)| {
        let mut inner = Fields::nested(&format!("{place}[{at}]"), item, &TAG)?;
        match inner.string("type")?.as_deref() {
            None | Some("tag") => {}
            Some(other) => return Err(wrong(&inner.name("type"), &other.into(), "\"tag\"")),
        }
        let tag = tag(&mut inner)?;
        inner.finish()?;
        Ok(tag)
    });
    tags.collect()
}

fn count(fields: &mut Fields) -> Result<TagCount, ApiError> {
    Ok(TagCount {
        at_least_one: fields.boolean("at_least_one")?.unwrap_or(false),
        stop_after_first: fields.boolean("stop_after_first")?.unwrap_or(false),
    })
}

/// Texts of which none is empty.
fn texts(fields: &mut Fields, name: &str, least: usize) -> Result<Vec<String>, ApiError> {
    let place = fields.name(name);
    let items = fields.list(name)?.unwrap_or_default();
    if items.len() < least {
        return Err(wrong(&place, &json!(items), "a list of at least one"));
    }
    let texts = items.into_iter().enumerate().map(|(at, item)| match item {
        Value::String(text) if !text.is_empty() => Ok(text),
        other => Err(wrong(&format!("{place}[{at}]"), &other, "a string that is not empty")),
    });
    texts.collect()
}

fn type_of(format: &Object) -> String {
    match format.field("type").map(|field| field.takes) {
        Some(Word(words)) => words.join(", "),
        _ => unreachable!("formats have a type"),
    }
}

const TOKENS: &str =
    "a constraint is of text here: name the text of a token that is none of the special ones";
const REFUSED: &[(&str, &str)] = &[
    ("token", TOKENS),
    ("exclude_token", TOKENS),
    ("any_tokens", TOKENS),
    ("token_triggered_tags", TOKENS),
    ("token_dispatch", TOKENS),
    ("dispatch", "send triggered_tags, whose tags have the pattern as their begin"),
    (
        "qwen_xml_parameter",
        "only JSON is held to a schema here; calls of tools are in the model's own format",
    ),
];

/// A format of any type.
pub(super) const fn a_format() -> Takes {
    Named("Format", &FORMATS)
}

/// All that are taken.
static FORMATS: [&Object; 11] = [
    &CONST_STRING,
    &JSON,
    &REGEX,
    &GRAMMAR,
    &ANY_TEXT,
    &SEQUENCE,
    &REPEATED,
    &REPEAT,
    &NAMED_TAG,
    &TRIGGERED,
    &SEPARATED,
];
/// Formats are made of formats: each refers to all by their address here, and by one name in the document.
static A_FORMAT: Takes = a_format();
static A_TAG: Takes = Inner(&TAG);
static CONST_STRING: Object = Object {
    name: "ConstStringFormat",
    groups: &[&[needed("type", Word(&["const_string"]), ""), needed("value", Text, "")]],
};
static JSON: Object = Object {
    name: "JsonSchemaTagFormat",
    groups: &[&[
        needed("type", Word(&["json_schema"]), ""),
        needed("json_schema", Schema(SCHEMA_OF_JSON), "A JSON schema."),
        idle("style", Only(&["\"json\""], "only JSON is held to a schema here")),
        idle("any_order", Only(&["false"], "required properties would not be")),
    ]],
};
static REGEX: Object = Object {
    name: "RegexFormat",
    groups: &[&[needed("type", Word(&["regex"]), ""), needed("pattern", Text, "For the whole text.")]],
};
static GRAMMAR: Object = Object {
    name: "GrammarFormat",
    groups: &[&[needed("type", Word(&["grammar"]), ""), needed("grammar", Text, "In EBNF, `root ::= ..`.")]],
};
static ANY_TEXT: Object = Object {
    name: "AnyTextFormat",
    groups: &[&[
        needed("type", Word(&["any_text"]), ""),
        EXCLUDES,
        field("max_chars", Whole(0, 1_000_000), "Characters at the most."),
        idle("max_tokens", Never("the whole answer has 'max_tokens'; a part of it has 'max_chars'")),
    ]],
};
static SEQUENCE: Object = Object {
    name: "SequenceFormat",
    groups: &[&[
        needed("type", Word(&["sequence", "or"]), "One behind the other, or one of them."),
        needed("elements", List(&A_FORMAT, 1, usize::MAX), ""),
    ]],
};
static REPEATED: Object = Object {
    name: "RepeatedFormat",
    groups: &[&[needed("type", Word(&["optional", "plus", "star"]), ""), needed("content", a_format(), "")]],
};
static REPEAT: Object = Object {
    name: "RepeatFormat",
    groups: &[&[
        needed("type", Word(&["repeat"]), ""),
        needed("min", Whole(0, 100_000), ""),
        needed("max", Whole(-1, 100_000), "-1: without end."),
        needed("content", a_format(), ""),
    ]],
};
static NAMED_TAG: Object =
    Object { name: "TagFormat", groups: &[&[needed("type", Word(&["tag"]), "")], &OF_TAG] };
static TAG: Object =
    Object { name: "TriggeredTag", groups: &[&[field("type", Word(&["tag"]), "")], &OF_TAG] };
static TRIGGERED: Object = Object {
    name: "TriggeredTagsFormat",
    groups: &[
        &[
            needed("type", Word(&["triggered_tags"]), ""),
            needed(
                "triggers",
                List(&Short(1, usize::MAX), 1, usize::MAX),
                "Each tag begins with one of them.",
            ),
            EXCLUDES,
        ],
        &OF_TAGS,
    ],
};
static SEPARATED: Object = Object {
    name: "TagsWithSeparatorFormat",
    groups: &[&[needed("type", Word(&["tags_with_separator"]), ""), needed("separator", Text, "")], &OF_TAGS],
};
static OF_TAG: [Field; 3] = [
    needed("begin", Text, ""),
    needed("content", a_format(), ""),
    needed("end", Either(&[Text, List(&Text, 1, usize::MAX)]), "One of them."),
];
static OF_TAGS: [Field; 3] = [
    needed("tags", List(&A_TAG, 1, usize::MAX), ""),
    field("at_least_one", Flag, "And no free text before it."),
    field("stop_after_first", Flag, ""),
];
const EXCLUDES: Field =
    field("excludes", List(&Short(1, usize::MAX), 0, usize::MAX), "What does not occur in the free text.");
