//! The request: messages through the model's chat template, and what chat has of its own.

use super::ChatShape;
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::generation::{Prompt, Work};
use crate::params::Params;
use crate::prompt::encode;
use crate::server::{Server, unix_s};
use atom_base::limits::TOP_LOGPROBS_MAX;
use atom_engine::Refusal;
use atom_text::{AnswerParser, TemplateInput, flatten_content};
use serde_json::{Map, Value, json};

/// Reads a body and turns its messages into tokens. Runs on a text thread.
pub(crate) fn read(server: &Server, body: &[u8]) -> Result<(Work, ChatShape), ApiError> {
    let mut fields = Fields::parse(body)?;
    let mut params = Params::read(&mut fields, server)?;
    params.sampling.logprobs = read_logprobs(&mut fields)?;
    let messages = read_messages(&mut fields)?;
    let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(true);
    let kwargs = fields.object("chat_template_kwargs")?;
    fields.refuse_unless("echo", "a chat has no prompt text to repeat", |value| *value == json!(false))?;
    fields.finish()?;

    let rendered = server.text.template.render(&TemplateInput {
        messages: &messages,
        tools: None,
        add_generation_prompt,
        kwargs: kwargs.as_ref(),
        now_unix_s: unix_s() as i64,
    })?;
    // The template writes the special tokens itself.
    let tokens = encode(server, &rendered, false)?;
    let max_tokens = match params.max_tokens {
        Some(0) => return Err(wrong("max_tokens", &json!(0), "at least 1")),
        Some(max_tokens) => max_tokens,
        None => room(server, tokens.len())?,
    };
    let shape = ChatShape::new(server, &params);
    let prompts = vec![Prompt { tokens, max_tokens, echo: None }];
    Ok((Work { params, prompts, session: None, parser: AnswerParser::plain() }, shape))
}

/// What is left of the context behind a prompt: the default of `max_tokens`.
fn room(server: &Server, prompt: usize) -> Result<u32, ApiError> {
    match server.context().checked_sub(prompt) {
        None | Some(0) => Err(Refusal::TooLong { prompt, max_tokens: 1, max: server.context() }.into()),
        Some(left) => Ok(u32::try_from(left).unwrap_or(u32::MAX)),
    }
}

/// `logprobs` says whether, `top_logprobs` how many alternatives.
fn read_logprobs(fields: &mut Fields) -> Result<Option<u8>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0, TOP_LOGPROBS_MAX as i64)?.unwrap_or(0) as u8;
    if top > 0 && !wanted {
        return Err(wrong("top_logprobs", &json!(top), "absent unless 'logprobs' is true"));
    }
    Ok(wanted.then_some(top))
}

fn read_messages(fields: &mut Fields) -> Result<Value, ApiError> {
    let items = fields.list("messages")?.ok_or(ApiError::Missing {
        name: "messages".into(),
        expected: "send a list of messages, each with a role and a content",
    })?;
    if items.is_empty() {
        return Err(wrong("messages", &Value::Array(items), "a list of at least one message"));
    }
    let messages = items.into_iter().enumerate().map(|(at, item)| read_message(at, item));
    Ok(Value::Array(messages.collect::<Result<_, _>>()?))
}

fn read_message(at: usize, item: Value) -> Result<Value, ApiError> {
    let place = format!("messages[{at}]");
    let mut fields = Fields::nested(&place, item)?;
    let role = read_role(&mut fields)?;
    // What clients send back with an answer of ours or of others, as long as it says nothing.
    for name in ["tool_calls", "annotations"] {
        fields.refuse_unless(name, "tools are not built yet", |value| *value == json!([]))?;
    }
    let content = fields.take("content").ok_or_else(|| ApiError::Missing {
        name: fields.name("content"),
        expected: "send a string or a list of text parts",
    })?;
    let mut message = Map::new();
    message.insert("role".into(), role.into());
    message.insert("content".into(), flatten_content(&content, &fields.name("content"))?.into());
    // Most templates don't print it; for those that do, it is part of the prompt.
    if let Some(name) = fields.string("name")? {
        message.insert("name".into(), name.into());
    }
    fields.finish()?;
    Ok(Value::Object(message))
}

fn read_role(fields: &mut Fields) -> Result<&'static str, ApiError> {
    let role = fields.string("role")?.ok_or_else(|| ApiError::Missing {
        name: fields.name("role"),
        expected: "it is one of system, developer, user and assistant",
    })?;
    match role.as_str() {
        // The API's newer word for the same; templates know the older one.
        "system" | "developer" => Ok("system"),
        "user" => Ok("user"),
        "assistant" => Ok("assistant"),
        "tool" | "function" => {
            Err(ApiError::Unsupported { name: fields.name("role"), reason: "tools are not built yet" })
        }
        _ => Err(wrong(
            &fields.name("role"),
            &Value::String(role),
            "one of \"system\", \"developer\", \"user\" and \"assistant\"",
        )),
    }
}
