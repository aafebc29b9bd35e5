//! The messages of a chat completion, as OpenAI's clients send them and send them back.

use super::history::{History, PastArguments, PastCall, Turn};
use super::tools::{PAST_TOOL_NAME, past_tool_name};
use crate::declare::Takes::{Either, List, Never, Object as Inner, Only, Schema, Text, Unread, Whole, Word};
use crate::declare::{Field, Object, Takes, field, idle, needed};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use atom_text::flatten_content;
use serde_json::Value;

/// Takes `messages`.
pub(crate) fn read(fields: &mut Fields) -> Result<History, ApiError> {
    let items = fields.list("messages")?.ok_or(ApiError::Missing {
        name: "messages".into(),
        expected: "send a list of messages, each with a role and a content",
    })?;
    if items.is_empty() {
        return Err(wrong("messages", &Value::Array(items), "a list of at least one message"));
    }
    let mut history = History::default();
    for (at, item) in items.into_iter().enumerate() {
        let place = format!("messages[{at}]");
        let (turn, name) = read_message(&place, item)?;
        history.push(&place, turn, name)?;
    }
    Ok(history)
}

fn read_message(place: &str, item: Value) -> Result<(Turn, Option<String>), ApiError> {
    let mut fields = Fields::nested(place, item, &MESSAGE)?;
    let role = fields.string("role")?.ok_or_else(|| ApiError::Missing {
        name: fields.name("role"),
        expected: "it is one of system, developer, user, assistant and tool",
    })?;
    let kind = KINDS.iter().find(|kind| {
        matches!(kind.field("role"), Some(Field { takes: Word(roles), .. }) if roles.contains(&&*role))
    });
    if let Some(kind) = kind {
        fields.is_declared_as(kind);
    }
    let name = fields.string("name")?;
    let turn = match role.as_str() {
        // The API's newer word for the same; templates know the older one.
        "system" | "developer" => Turn::System(read_content(&mut fields)?),
        "user" => Turn::User(read_content(&mut fields)?),
        "assistant" => read_assistant(&mut fields)?,
        "tool" => {
            let call_id = fields.string("tool_call_id")?.ok_or_else(|| ApiError::Missing {
                name: fields.name("tool_call_id"),
                expected: "name the call that this is the answer to",
            })?;
            Turn::Answer { place: fields.name("tool_call_id"), call_id, content: read_content(&mut fields)? }
        }
        "function" => {
            let reason = "send the answer as role 'tool', with the call's id";
            return Err(ApiError::Unsupported { name: fields.name("role"), reason });
        }
        _ => return Err(wrong(&fields.name("role"), &role.into(), ROLES)),
    };
    fields.finish()?;
    Ok((turn, name))
}

fn read_content(fields: &mut Fields) -> Result<String, ApiError> {
    let content = fields.take("content").ok_or_else(|| ApiError::Missing {
        name: fields.name("content"),
        expected: "send a string or a list of text parts",
    })?;
    Ok(flatten_content(&content, &fields.name("content"))?.into_owned())
}

/// Content may be absent where there are calls or thoughts. What an answer had beside these, and clients
/// send back, is taken where it says nothing new.
fn read_assistant(fields: &mut Fields) -> Result<Turn, ApiError> {
    let items = fields.list("tool_calls")?.unwrap_or_default();
    let place = fields.name("tool_calls");
    let calls = items.into_iter().enumerate().map(|(at, item)| read_call(&format!("{place}[{at}]"), item));
    let calls = calls.collect::<Result<Vec<_>, _>>()?;
    let reasoning = read_reasoning(fields)?;
    let content = match fields.take("content") {
        Some(content) => flatten_content(&content, &fields.name("content"))?.into_owned(),
        None if calls.is_empty() && reasoning.is_none() => {
            let expected = "send a string, a list of text parts, or 'tool_calls'";
            return Err(ApiError::Missing { name: fields.name("content"), expected });
        }
        None => String::new(),
    };
    Ok(Turn::Assistant { content, reasoning, calls })
}

/// Under either of the names that servers give it.
fn read_reasoning(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let own = fields.string("reasoning_content")?;
    let other = fields.string("reasoning")?;
    match (&own, &other) {
        (Some(own), Some(other)) if own != other => Err(ApiError::BadField {
            name: fields.name("reasoning"),
            found: "not what 'reasoning_content' says".into(),
            expected: "left out: one of the two is enough".into(),
        }),
        _ => Ok(own.or(other).filter(|text| !text.is_empty())),
    }
}

fn read_call(place: &str, item: Value) -> Result<PastCall, ApiError> {
    let mut fields = Fields::nested(place, item, &CALL)?;
    if let Some(kind) = fields.string("type")?.filter(|kind| kind != "function") {
        return Err(wrong(&fields.name("type"), &kind.into(), "\"function\", the only type built here"));
    }
    let id = fields.string("id")?.ok_or_else(|| ApiError::Missing {
        name: fields.name("id"),
        expected: "it is how the tool's answer names the call",
    })?;
    let function = fields.inner("function")?.ok_or_else(|| ApiError::Missing {
        name: fields.name("function"),
        expected: "send the name and the arguments that were called",
    })?;
    fields.finish()?;
    let mut fields = function;
    let name = fields.string("name")?.ok_or_else(|| ApiError::Missing {
        name: fields.name("name"),
        expected: "it is the tool that was called",
    })?;
    let name = past_tool_name(name, &fields.name("name"))?;
    let arguments = PastArguments::read(&fields.string("arguments")?.unwrap_or_default());
    fields.finish()?;
    Ok(PastCall { id, name, arguments })
}

const ROLES: &str = "one of \"system\", \"developer\", \"user\", \"assistant\" and \"tool\"";

/// Messages by their role.
pub(crate) const KINDS: &[&Object] = &[&SYSTEM, &USER, &ASSISTANT, &TOOL];

/// A message of which nothing is known yet.
const MESSAGE: Object = Object {
    name: "ChatMessage",
    groups: &[
        &[needed("role", Word(&["system", "developer", "user", "assistant", "tool", "function"]), "")],
        NAMED,
    ],
};
const SYSTEM: Object = Object {
    name: "ChatSystemMessage",
    groups: &[&[needed("role", Word(&["system", "developer"]), ""), CONTENT], NAMED, NO_CALLS],
};
const USER: Object = Object {
    name: "ChatUserMessage",
    groups: &[&[needed("role", Word(&["user"]), ""), CONTENT], NAMED, NO_CALLS],
};
const TOOL: Object = Object {
    name: "ChatToolMessage",
    groups: &[
        &[
            needed("role", Word(&["tool"]), ""),
            needed("tool_call_id", Text, "The call that it answers."),
            CONTENT,
        ],
        NAMED,
        NO_CALLS,
    ],
};
const ASSISTANT: Object = Object {
    name: "ChatAssistantMessage",
    groups: &[
        &[
            needed("role", Word(&["assistant"]), ""),
            field("content", TEXTS, "May be absent beside calls or thoughts."),
            field("reasoning_content", Text, "What it thought."),
            field("reasoning", Text, "The same by another name."),
            field("tool_calls", List(&Inner(&CALL), 0, usize::MAX), ""),
            // What an answer had beside these, and clients send back.
            field("parsed", Unread(&Schema("{}")), "The content once more, as the Python client parsed it."),
            idle("function_call", Never("send 'tool_calls' instead")),
            idle("refusal", Never("it would not reach the model; send it as 'content'")),
            idle("audio", Never("it reads text only")),
            ANNOTATIONS,
        ],
        NAMED,
    ],
};
const CALL: Object = Object {
    name: "ChatCall",
    groups: &[&[
        field("type", Word(&["function"]), ""),
        needed("id", Text, "How the tool's answer names the call."),
        field("index", Unread(&Whole(0, u32::MAX as i64)), "Left over from the chunks of a stream."),
        needed("function", Inner(&CALLED), ""),
    ]],
};
const CALLED: Object = Object {
    name: "ChatCalledFunction",
    groups: &[&[
        needed("name", PAST_TOOL_NAME, ""),
        field("arguments", Text, "JSON text, as the model wrote it."),
        field("parsed_arguments", Unread(&Schema("{}")), "The same, as the Python client parsed them."),
    ]],
};

const NAMED: &[Field] = &[field("name", Text, "For the template.")];
/// What some clients write into every message, as long as it says nothing.
const NO_CALLS: &[Field] =
    &[idle("tool_calls", Only(&["[]"], "only the assistant calls tools")), ANNOTATIONS];
const ANNOTATIONS: Field = idle("annotations", Only(&["[]"], "they would not reach the model"));
const CONTENT: Field = needed("content", TEXTS, "A text, or parts that are joined by line breaks.");
const TEXTS: Takes = Either(&[Text, List(&Schema(PART), 0, usize::MAX)]);
/// See [`flatten_content`], which looks at nothing else.
const PART: &str = r#"{"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"]}"#;
