//! The messages of a chat completion, as OpenAI's clients send them and send them back.

use super::history::{History, PastArguments, PastCall, Turn};
use super::tools::past_tool_name;
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use atom_text::flatten_content;
use serde_json::{Value, json};

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
    let mut fields = Fields::nested(place, item)?;
    let role = fields.string("role")?.ok_or_else(|| ApiError::Missing {
        name: fields.name("role"),
        expected: "it is one of system, developer, user, assistant and tool",
    })?;
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
    // What some clients write into every message, as long as it says nothing.
    fields.refuse_unless("tool_calls", "only the assistant calls tools", |value| *value == json!([]))?;
    fields.refuse_unless("annotations", "they would not reach the model", |value| *value == json!([]))?;
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
    fields.refuse_unless("function_call", "send 'tool_calls' instead", |_| false)?;
    fields.refuse_unless("refusal", "it would not reach the model; send it as 'content'", |_| false)?;
    fields.refuse_unless("audio", "it reads text only", |_| false)?;
    // The content once more, as the Python client parsed it.
    fields.take("parsed");
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
    let mut fields = Fields::nested(place, item)?;
    if let Some(kind) = fields.string("type")?.filter(|kind| kind != "function") {
        return Err(wrong(&fields.name("type"), &kind.into(), "\"function\", the only type built here"));
    }
    let id = fields.string("id")?.ok_or_else(|| ApiError::Missing {
        name: fields.name("id"),
        expected: "it is how the tool's answer names the call",
    })?;
    // Left over from the chunks of a stream.
    fields.integer("index", 0, i64::from(u32::MAX))?;
    let place = fields.name("function");
    let function = fields.take("function").ok_or_else(|| ApiError::Missing {
        name: place.clone(),
        expected: "send the name and the arguments that were called",
    })?;
    fields.finish()?;
    let mut fields = Fields::nested(&place, function)?;
    let name = fields.string("name")?.ok_or_else(|| ApiError::Missing {
        name: fields.name("name"),
        expected: "it is the tool that was called",
    })?;
    let name = past_tool_name(name, &fields.name("name"))?;
    let arguments = PastArguments::read(&fields.string("arguments")?.unwrap_or_default());
    // The arguments once more, as the Python client parsed them.
    fields.take("parsed_arguments");
    fields.finish()?;
    Ok(PastCall { id, name, arguments })
}

const ROLES: &str = "one of \"system\", \"developer\", \"user\", \"assistant\" and \"tool\"";
