//! The conversation: messages made of content blocks, read into the turns that a chat has too.

use super::signature;
use crate::chat::history::{History, PastArguments, PastCall, Turn};
use crate::chat::tools::{PAST_TOOL_NAME, past_tool_name};
use crate::declare::Takes::{Either, Flag, List, Map, Object as Inner, OneOf, Only, Text, Unread, Word};
use crate::declare::{Field, Object, Takes, field, idle, needed};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use serde_json::Value;

/// What was said so far.
#[derive(Debug, Default)]
pub(super) struct Conversation {
    pub(super) history: History,
    /// The beginning of the answer, when the last message is the assistant's.
    pub(super) beginning: Option<String>,
}

/// Takes `system` and `messages`.
pub(super) fn read(fields: &mut Fields) -> Result<Conversation, ApiError> {
    let system = read_system(fields)?;
    let mut messages = read_messages(fields)?;
    let mut conversation = Conversation::default();
    if let Some(system) = system {
        conversation.history.push("system", Turn::System(system), None)?;
    }
    if messages.last().is_some_and(|last| last.role == Role::Assistant) {
        conversation.beginning = messages.pop().map(beginning).transpose()?.filter(|text| !text.is_empty());
    }
    for message in messages {
        for turn in turns(message.role, message.blocks) {
            conversation.history.push(&message.place, turn, None)?;
        }
    }
    Ok(conversation)
}

/// Neighbours of one role are one message.
struct Message {
    role: Role,
    place: String,
    blocks: Vec<Block>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    System,
    User,
    Assistant,
}

enum Block {
    Text(String),
    Thinking(String),
    Call(PastCall),
    Result { place: String, call_id: String, content: String },
}

fn read_system(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let Some(system) = fields.take("system") else { return Ok(None) };
    let mut texts = read_texts("system", system)?;
    // Claude Code begins with a line of bookkeeping that differs from request to request: with it, no
    // prompt would have a beginning in common with the last one.
    texts.retain(|text| !text.starts_with(BILLING_HEADER));
    Ok((!texts.is_empty()).then(|| texts.join("\n")))
}

fn read_messages(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    let items = fields.list("messages")?.ok_or(ApiError::Missing {
        name: "messages".into(),
        expected: "send a list of messages, each with a role and a content",
    })?;
    if items.is_empty() {
        return Err(wrong("messages", &Value::Array(items), "a list of at least one message"));
    }
    let mut messages: Vec<Message> = Vec::new();
    for (at, item) in items.into_iter().enumerate() {
        let place = format!("messages[{at}]");
        let (role, blocks) = read_message(&place, item)?;
        match messages.last_mut().filter(|last| last.role == role) {
            Some(last) => last.blocks.extend(blocks),
            None => messages.push(Message { role, place, blocks }),
        }
    }
    Ok(messages)
}

fn read_message(place: &str, item: Value) -> Result<(Role, Vec<Block>), ApiError> {
    let mut fields = Fields::nested(place, item, &MESSAGE)?;
    let role = fields.string("role")?.ok_or_else(|| ApiError::Missing {
        name: fields.name("role"),
        expected: "it is \"user\" or \"assistant\"",
    })?;
    let role = match role.as_str() {
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "system" => Role::System,
        _ => return Err(wrong(&fields.name("role"), &role.into(), "\"user\" or \"assistant\"")),
    };
    let content = fields.take("content").ok_or_else(|| ApiError::Missing {
        name: fields.name("content"),
        expected: "send a string or a list of content blocks",
    })?;
    let place = fields.name("content");
    fields.finish()?;
    let blocks = match content {
        Value::String(text) => vec![Block::Text(text)],
        Value::Array(items) => {
            let mut blocks = Vec::with_capacity(items.len());
            for (at, item) in items.into_iter().enumerate() {
                blocks.extend(read_block(&format!("{place}[{at}]"), item, role)?);
            }
            blocks
        }
        other => return Err(wrong(&place, &other, "a string or a list of content blocks")),
    };
    Ok((role, blocks))
}

/// `None` for a block that says nothing to the model.
fn read_block(place: &str, item: Value, role: Role) -> Result<Option<Block>, ApiError> {
    let mut fields = Fields::nested(place, item, &TEXT)?;
    let kind = read_kind(&mut fields)?;
    take_cache_control(&mut fields)?;
    for (word, declared) in BLOCKS {
        if kind == word {
            fields.is_declared_as(declared);
        }
    }
    let block = match (kind.as_str(), role) {
        ("text", _) => Some(Block::Text(read_text(&mut fields)?)),
        ("thinking", Role::Assistant) => Some(Block::Thinking(read_thinking(&mut fields)?)),
        // Only who wrote it can read it.
        ("redacted_thinking", Role::Assistant) => None,
        ("tool_use", Role::Assistant) => Some(Block::Call(read_call(&mut fields)?)),
        ("tool_result", Role::User) => Some(read_result(&mut fields)?),
        ("thinking" | "redacted_thinking" | "tool_use", _) => {
            return Err(wrong(&fields.name("type"), &kind.into(), "a block of a message of the assistant"));
        }
        ("tool_result", _) => {
            return Err(wrong(&fields.name("type"), &kind.into(), "a block of a message of the user"));
        }
        _ => return Err(refused_kind(&fields, kind)),
    };
    fields.finish()?;
    Ok(block)
}

fn read_kind(fields: &mut Fields) -> Result<String, ApiError> {
    fields.string("type")?.ok_or_else(|| ApiError::Missing {
        name: fields.name("type"),
        expected: "every content block has one, like \"text\"",
    })
}

fn refused_kind(fields: &Fields, kind: String) -> ApiError {
    let reason = match kind.as_str() {
        "image" => "the model reads text only, no images",
        "document" | "search_result" | "container_upload" => "the model reads plain text only, no documents",
        "server_tool_use" | "tool_reference" => "no tools run on this server",
        _ if kind.ends_with("_tool_result") => "no tools run on this server",
        _ => return wrong(&fields.name("type"), &kind.into(), "a type that the API has, like \"text\""),
    };
    ApiError::unsupported_kind(fields.name("type"), &kind, reason)
}

fn read_text(fields: &mut Fields) -> Result<String, ApiError> {
    fields.required_string("text", "a text block has one")
}

fn read_thinking(fields: &mut Fields) -> Result<String, ApiError> {
    let thinking = fields.required_string("thinking", "send the text that came with the block")?;
    let signature = fields.required_string("signature", "send the one that came with the block")?;
    if !signature::is_believable(&signature, &thinking) {
        return Err(wrong(
            &fields.name("signature"),
            &signature.into(),
            "the signature of this very text: send thinking blocks back as they came, or leave them out",
        ));
    }
    Ok(thinking)
}

fn read_call(fields: &mut Fields) -> Result<PastCall, ApiError> {
    let id = fields.required_string("id", "it is the one that the answer gave to the call")?;
    let name = past_tool_name(fields.required_string("name", "it is the tool's")?, &fields.name("name"))?;
    let arguments = fields.object("input")?.ok_or_else(|| ApiError::Missing {
        name: fields.name("input"),
        expected: "send the object that came with the block",
    })?;
    Ok(PastCall { id, name, arguments: PastArguments::Object(arguments) })
}

fn read_result(fields: &mut Fields) -> Result<Block, ApiError> {
    let place = fields.name("tool_use_id");
    let call_id = fields.required_string("tool_use_id", "it is the id of the call that this answers")?;
    let content_place = fields.name("content");
    let texts = match fields.take("content") {
        None => Vec::new(),
        Some(content) => read_texts(&content_place, content)?,
    };
    let mut content = texts.join("\n");
    // No template knows a field for it; in words, every model does.
    if fields.boolean("is_error")?.unwrap_or(false) {
        content.insert_str(0, "Error: ");
    }
    Ok(Block::Result { place, call_id, content })
}

/// A string or a list of text blocks.
fn read_texts(place: &str, value: Value) -> Result<Vec<String>, ApiError> {
    let items = match value {
        Value::String(text) => return Ok(vec![text]),
        Value::Array(items) => items,
        other => return Err(wrong(place, &other, "a string or a list of text blocks")),
    };
    let read = |(at, item)| {
        let mut fields = Fields::nested(&format!("{place}[{at}]"), item, &TEXT)?;
        let kind = read_kind(&mut fields)?;
        if kind != "text" {
            return Err(refused_kind(&fields, kind));
        }
        take_cache_control(&mut fields)?;
        let text = read_text(&mut fields)?;
        fields.finish()?;
        Ok(text)
    };
    items.into_iter().enumerate().map(read).collect()
}

/// A hint of what to cache, and for how long. Everything is cached that fits, without being asked.
pub(super) fn take_cache_control(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(mut inner) = fields.inner("cache_control")? else { return Ok(()) };
    let name = inner.name("type");
    match inner.string("type")?.as_deref() {
        Some("ephemeral") => {}
        Some(other) => return Err(wrong(&name, &other.into(), "\"ephemeral\"")),
        None => return Err(ApiError::Missing { name, expected: "it is \"ephemeral\"" }),
    }
    inner.finish()
}

/// The turns of one message. What tools said comes before what the user says, as the API wants it.
fn turns(role: Role, blocks: Vec<Block>) -> Vec<Turn> {
    let (mut texts, mut thoughts) = (Vec::new(), Vec::new());
    let (mut calls, mut turns) = (Vec::new(), Vec::new());
    for block in blocks {
        match block {
            Block::Text(text) => texts.push(text),
            // An omitted thought, which nobody kept.
            Block::Thinking(text) if text.is_empty() => {}
            Block::Thinking(text) => thoughts.push(text),
            Block::Call(call) => calls.push(call),
            Block::Result { place, call_id, content } => turns.push(Turn::Answer { place, call_id, content }),
        }
    }
    let content = texts.join("\n");
    match role {
        Role::System => turns.push(Turn::System(content)),
        Role::User if texts.is_empty() && !turns.is_empty() => {}
        Role::User => turns.push(Turn::User(content)),
        Role::Assistant => {
            let reasoning = (!thoughts.is_empty()).then(|| thoughts.join("\n"));
            turns.push(Turn::Assistant { content, reasoning, calls });
        }
    }
    turns
}

/// The text of a last message that the answer goes on from.
fn beginning(message: Message) -> Result<String, ApiError> {
    let place = message.place;
    let texts = message.blocks.into_iter().map(|block| match block {
        Block::Text(text) => Ok(text),
        Block::Call(call) => Err(ApiError::CallsUnanswered { name: "the answer".into(), missing: call.id }),
        Block::Thinking(_) | Block::Result { .. } => Err(ApiError::BadField {
            name: place.clone(),
            found: "the last message, of the assistant, with thinking".into(),
            expected: "text alone, for the answer to go on from, or followed by the user's message".into(),
        }),
    });
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

const BILLING_HEADER: &str = "x-anthropic-billing-header";

pub(super) const MESSAGES: Field = needed(
    "messages",
    List(&OneOf(&[&USER, &ASSISTANT, &SYSTEM]), 1, usize::MAX),
    "The conversation so far.",
);

/// A message of which nothing is known yet.
const MESSAGE: Object =
    Object { name: "Message", groups: &[&[needed("role", Text, ""), needed("content", TEXTS, "")]] };
const USER: Object = Object {
    name: "MessagesUserMessage",
    groups: &[&[
        needed("role", Word(&["user"]), ""),
        needed("content", Either(&[Text, List(&OneOf(&[&TEXT, &RESULT]), 0, usize::MAX)]), ""),
    ]],
};
const ASSISTANT: Object = Object {
    name: "MessagesAssistantMessage",
    groups: &[&[
        needed("role", Word(&["assistant"]), ""),
        needed("content", Either(&[Text, List(&OneOf(ASSISTANT_BLOCKS), 0, usize::MAX)]), ""),
    ]],
};
const ASSISTANT_BLOCKS: &[&Object] = &[&TEXT, &THINKING, &REDACTED, &CALL];
const SYSTEM: Object = Object {
    name: "MessagesSystemMessage",
    groups: &[&[needed("role", Word(&["system"]), ""), needed("content", TEXTS, "")]],
};
/// A text or text blocks.
pub(super) const TEXTS: Takes = Either(&[Text, List(&Inner(&TEXT), 0, usize::MAX)]);

/// Blocks of other types than text.
const BLOCKS: [(&str, &Object); 4] = [
    ("thinking", &THINKING),
    ("redacted_thinking", &REDACTED),
    ("tool_use", &CALL),
    ("tool_result", &RESULT),
];
const TEXT: Object = Object {
    name: "MessagesTextBlock",
    groups: &[&[
        needed("type", Word(&["text"]), ""),
        needed("text", Text, ""),
        idle("citations", Only(&["[]"], "nothing is cited")),
        CACHE_CONTROL,
    ]],
};
const THINKING: Object = Object {
    name: "MessagesThinkingBlock",
    groups: &[&[
        needed("type", Word(&["thinking"]), ""),
        needed("thinking", Text, ""),
        needed("signature", Text, "The one that came with the block."),
        CACHE_CONTROL,
    ]],
};
const REDACTED: Object = Object {
    name: "MessagesRedactedThinkingBlock",
    groups: &[&[
        needed("type", Word(&["redacted_thinking"]), ""),
        field("data", Unread(&Text), "Left out: only who wrote it can read it."),
        CACHE_CONTROL,
    ]],
};
const CALL: Object = Object {
    name: "MessagesToolUseBlock",
    groups: &[&[
        needed("type", Word(&["tool_use"]), ""),
        needed("id", Text, "How the tool's answer names the call."),
        needed("name", PAST_TOOL_NAME, ""),
        needed("input", Map, ""),
        idle("caller", Only(&[r#"{"type": "direct"}"#], "no code runs on this server")),
        CACHE_CONTROL,
    ]],
};
const RESULT: Object = Object {
    name: "MessagesToolResultBlock",
    groups: &[&[
        needed("type", Word(&["tool_result"]), ""),
        needed("tool_use_id", Text, "The call that it answers."),
        field("content", TEXTS, ""),
        field("is_error", Flag, "Puts `Error: ` before the content."),
        CACHE_CONTROL,
    ]],
};
pub(super) const CACHE_CONTROL: Field =
    field("cache_control", Inner(&CACHE), "Of no consequence: what fits is cached, without being asked.");
const CACHE: Object = Object {
    name: "CacheControl",
    groups: &[&[
        needed("type", Word(&["ephemeral"]), ""),
        idle("ttl", Only(&["\"5m\"", "\"1h\""], "entries live until their room is needed")),
    ]],
};
