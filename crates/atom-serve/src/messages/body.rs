//! The request.

use super::blocks::Thinking;
use super::{MessagesShape, content, thinking, tools};
use crate::chat::conversation::Conversation;
use crate::chat::thinking::Variables;
use crate::constraint::Wanted;
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::generation::Work;
use crate::params::{Params, StreamOptions};
use crate::prompt::encode;
use crate::server::Server;
use atom_text::{StopStrings, TextError};
use serde_json::{Value, json};

/// Reads a body and turns its messages into tokens. Runs on a text thread.
pub(crate) fn read(server: &Server, body: &[u8]) -> Result<(Work, MessagesShape), ApiError> {
    let mut fields = Fields::parse(body)?;
    let model = server.resolve_model(fields.string("model")?)?;
    let max_tokens = read_max_tokens(&mut fields)?;
    let (conversation, thinking, format) = read_conversation(&mut fields, server, Some(max_tokens))?;
    let (stop_sequences, stops) = read_stops(&mut fields)?;
    let mut params = Params::new(server, model.clone(), stops);
    read_sampling(&mut fields, server, &mut params)?;
    params.constraint = format;
    params.stream = fields.boolean("stream")?.unwrap_or(false).then(StreamOptions::default);
    read_metadata(&mut fields)?;
    take_harmless(&mut fields)?;
    fields.finish()?;

    // Without a bound of its own the request gets what is left of the context. The API takes a bound
    // beyond that, and says when it was the context that ended the answer.
    let mut work = conversation.into_work(server, params)?;
    let prompt = &mut work.prompts[0];
    let fills_context = max_tokens > prompt.max_tokens;
    prompt.max_tokens = prompt.max_tokens.min(max_tokens);
    let shape = MessagesShape::new(server, model, stop_sequences, fills_context, thinking);
    Ok((work, shape))
}

/// The answer to `count_tokens`: the tokens of the prompt that the same messages would make.
pub(crate) fn count(server: &Server, body: &[u8]) -> Result<Value, ApiError> {
    let mut fields = Fields::parse(body)?;
    server.resolve_model(fields.string("model")?)?;
    let (conversation, ..) = read_conversation(&mut fields, server, None)?;
    take_harmless(&mut fields)?;
    fields.finish()?;
    let tokens = encode(server, &conversation.render(server)?, false)?;
    Ok(json!({"input_tokens": tokens.len()}))
}

/// Takes what the prompt is made from. `max_tokens`: of the answer, where there will be one.
fn read_conversation(
    fields: &mut Fields,
    server: &Server,
    max_tokens: Option<u32>,
) -> Result<(Conversation, Thinking, Option<Wanted>), ApiError> {
    let tools = tools::read(fields)?;
    let content::Conversation { history, beginning } = content::read(fields)?;
    let mut variables = Variables::default();
    let (thinking, format) = thinking::read(fields, server, &mut variables, max_tokens)?;
    let conversation = Conversation { history, tools, variables, add_generation_prompt: true, beginning };
    Ok((conversation, thinking, format))
}

fn read_max_tokens(fields: &mut Fields) -> Result<u32, ApiError> {
    let read = fields.integer("max_tokens", 1, i64::from(u32::MAX))?;
    read.map(|tokens| tokens as u32).ok_or(ApiError::Missing {
        name: "max_tokens".into(),
        expected: "send the most tokens that the answer may have",
    })
}

fn read_sampling(fields: &mut Fields, server: &Server, params: &mut Params) -> Result<(), ApiError> {
    let sampling = &mut params.sampling;
    if let Some(temperature) = fields.number("temperature")? {
        if !(0.0..=1.0).contains(&temperature) {
            return Err(wrong("temperature", &json!(temperature), "a number from 0 to 1"));
        }
        sampling.temperature = temperature;
    }
    if let Some(top_p) = fields.number("top_p")? {
        sampling.top_p = top_p;
    }
    if let Some(top_k) = fields.integer("top_k", 0, i64::from(u32::MAX))? {
        sampling.top_k = top_k as u32;
    }
    Ok(sampling.validate(server.engine.limits().vocab_size as u32)?)
}

/// The sequences and what looks for them.
fn read_stops(fields: &mut Fields) -> Result<(Vec<String>, StopStrings), ApiError> {
    let read = |item| match item {
        Value::String(text) => Ok(text),
        other => Err(wrong("stop_sequences", &other, "a list of strings")),
    };
    let items = fields.list("stop_sequences")?.unwrap_or_default();
    let sequences = items.into_iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let stops = StopStrings::new(&sequences).map_err(|error| match error {
        // The matcher knows the field by its other name.
        TextError::Request { field, reason } => {
            TextError::Request { field: field.replacen("stop", "stop_sequences", 1), reason }
        }
        other => other,
    })?;
    Ok((sequences, stops))
}

/// Who the request is for is nobody's business here.
fn read_metadata(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(metadata) = fields.take("metadata") else { return Ok(()) };
    let mut inner = Fields::nested("metadata", metadata)?;
    inner.string("user_id")?;
    inner.finish()
}

/// Fields whose usual values ask for what happens anyway. Others are refused with the reason.
fn take_harmless(fields: &mut Fields) -> Result<(), ApiError> {
    content::take_cache_control(fields)?;
    fields.refuse_unless("service_tier", "there is one tier", |value| {
        ["auto", "standard_only"].iter().any(|tier| value == tier)
    })?;
    fields.refuse_unless("speed", "there is one speed", |value| value == "standard")?;
    fields.refuse_unless("mcp_servers", "no tools run on this server", |value| *value == json!([]))?;
    fields.refuse_unless("container", "no code runs on this server", |_| false)?;
    fields.refuse_unless("inference_geo", "it runs where it runs", |_| false)?;
    fields.refuse_unless("context_management", "messages are taken as they are", keeps_all)
}

/// An order to edit nothing.
fn keeps_all(value: &Value) -> bool {
    let edits = value["edits"].as_array().map(Vec::as_slice).unwrap_or_default();
    value.as_object().is_some_and(|fields| fields.keys().all(|name| name == "edits"))
        && edits.iter().all(|edit| *edit == json!({"type": "clear_thinking_20251015", "keep": "all"}))
}
