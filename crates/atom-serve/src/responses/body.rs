//! The request.

use super::{ResponsesShape, input, tools};
use crate::chat::conversation::Conversation;
use crate::chat::thinking::Variables;
use crate::constraint::{self, Wanted};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::generation::Work;
use crate::params::{Params, StreamOptions};
use crate::server::Server;
use atom_text::StopStrings;
use serde_json::{Map, Value, json};

/// Reads a body and turns its items into tokens. Runs on a text thread.
pub(crate) fn read(server: &Server, body: &[u8]) -> Result<(Work, ResponsesShape), ApiError> {
    let mut fields = Fields::parse(body)?;
    let model = server.resolve_model(fields.string("model")?)?;
    refuse_memory(&mut fields)?;
    refuse_unsupported(&mut fields)?;
    let mut params = Params::new(server, model.clone(), StopStrings::new(&[""; 0])?);
    let mut echo = Map::new();
    echo.insert("model".into(), model.into());
    read_sampling(&mut fields, server, &mut params)?;
    params.stream = read_stream(&mut fields)?;
    read_bookkeeping(&mut fields, &mut echo)?;
    let instructions = fields.string("instructions")?;
    let (tools, spellings) = tools::read(&mut fields, &mut echo)?;
    let history = input::read(&mut fields, instructions.as_deref())?;
    let variables = read_reasoning(&mut fields, server, &mut echo)?;
    params.constraint = read_text(&mut fields, &mut echo)?;
    fields.finish()?;

    echo.insert("instructions".into(), instructions.map_or(Value::Null, Value::from));
    echo.insert("max_output_tokens".into(), params.max_tokens.map_or(Value::Null, Value::from));
    echo.insert("temperature".into(), short(params.sampling.temperature));
    echo.insert("top_p".into(), short(params.sampling.top_p));
    echo.extend(FIXED.map(|(name, value)| (name.to_owned(), value())));
    let conversation =
        Conversation { history, tools, variables, add_generation_prompt: true, beginning: None };
    Ok((conversation.into_work(server, params)?, ResponsesShape::new(server, echo, spellings)))
}

/// What would need the server to remember something.
fn refuse_memory(fields: &mut Fields) -> Result<(), ApiError> {
    let is_false = |value: &Value| *value == json!(false);
    fields.refuse_unless("store", "nothing is stored", is_false)?;
    fields.refuse_unless(
        "background",
        "an answer that nobody waits for would have to be stored",
        is_false,
    )?;
    let stored = "nothing is stored; send the whole conversation as 'input'";
    fields.refuse_unless("previous_response_id", stored, |_| false)?;
    fields.refuse_unless("conversation", stored, |_| false)?;
    fields
        .refuse_unless("prompt", "no prompt templates are stored; send 'instructions' and 'input'", |_| false)
}

fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    fields.refuse_unless("truncation", "a conversation is answered as a whole or refused", |value| {
        value == "disabled"
    })?;
    fields.refuse_unless("context_management", "a conversation is taken as it is", |value| {
        *value == json!([])
    })?;
    // Clients of the stateless API ask for it always. What they would carry back encrypted is in the
    // reasoning items as text.
    fields.refuse_unless("include", "answers have nothing more", |value| {
        let items = value.as_array().map(Vec::as_slice);
        items.is_some_and(|items| items.iter().all(|item| item == "reasoning.encrypted_content"))
    })?;
    fields.refuse_unless("top_logprobs", "log-probabilities are given by /v1/chat/completions", |value| {
        *value == json!(0)
    })?;
    fields.refuse_unless("max_tool_calls", "no tools run on this server", |_| false)?;
    fields.refuse_unless("moderation", "nothing is moderated", |_| false)
}

fn read_sampling(fields: &mut Fields, server: &Server, params: &mut Params) -> Result<(), ApiError> {
    if let Some(temperature) = fields.number("temperature")? {
        params.sampling.temperature = temperature;
    }
    if let Some(top_p) = fields.number("top_p")? {
        params.sampling.top_p = top_p;
    }
    let max_tokens = fields.integer("max_output_tokens", 1, i64::from(u32::MAX))?;
    params.max_tokens = max_tokens.map(|tokens| tokens as u32);
    Ok(params.sampling.validate(server.engine.limits().vocab_size as u32)?)
}

fn read_stream(fields: &mut Fields) -> Result<Option<StreamOptions>, ApiError> {
    let streams = fields.boolean("stream")?.unwrap_or(false);
    if let Some(options) = fields.take("stream_options") {
        let mut inner = Fields::nested("stream_options", options)?;
        // A client may turn off what we don't do, and ask for what we do anyway.
        inner
            .refuse_unless("include_obfuscation", "events are not padded", |value| *value == json!(false))?;
        inner.refuse_unless(
            "include_usage",
            "the last event has the whole response, usage included",
            |value| *value == json!(true),
        )?;
        inner.finish()?;
    }
    Ok(streams.then(StreamOptions::default))
}

/// Fields that can't change an answer: some are repeated in it, as clients expect.
fn read_bookkeeping(fields: &mut Fields, echo: &mut Map<String, Value>) -> Result<(), ApiError> {
    fields.object("client_metadata")?;
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        if let Some(text) = fields.string(name)? {
            echo.insert(name.into(), text.into());
        }
    }
    fields.refuse_unless("prompt_cache_retention", "entries live until their room is needed", |value| {
        value == "in_memory" || value == "in-memory"
    })?;
    fields
        .refuse_unless("service_tier", "there is one tier", |value| value == "auto" || value == "default")?;
    let metadata = fields.object("metadata")?.unwrap_or_default();
    echo.insert("metadata".into(), Value::Object(metadata));
    Ok(())
}

fn read_reasoning(
    fields: &mut Fields,
    server: &Server,
    echo: &mut Map<String, Value>,
) -> Result<Variables, ApiError> {
    let mut variables = Variables::default();
    let mut effort = None;
    if let Some(reasoning) = fields.take("reasoning") {
        let mut inner = Fields::nested("reasoning", reasoning)?;
        effort = inner.string("effort")?;
        if let Some(effort) = &effort {
            variables.effort(&server.text.template, effort, "reasoning.effort")?;
        }
        // Of every length there is the same: none, but the reasoning itself. The response says so.
        for name in ["summary", "generate_summary"] {
            if let Some(summary) = inner.string(name)?
                && !SUMMARIES.contains(&summary.as_str())
            {
                let expected = format!("one of {}", SUMMARIES.join(", "));
                return Err(wrong(&inner.name(name), &summary.into(), expected));
            }
        }
        inner.refuse_unless("context", "the chat template says which thoughts it shows again", |value| {
            value == "auto"
        })?;
        inner.finish()?;
    }
    echo.insert("reasoning".into(), json!({"effort": effort, "summary": null}));
    Ok(variables)
}

/// The format that the answer must have, which every response repeats.
fn read_text(fields: &mut Fields, echo: &mut Map<String, Value>) -> Result<Option<Wanted>, ApiError> {
    let (mut wanted, mut format) = (None, json!({"type": "text"}));
    if let Some(text) = fields.take("text") {
        if let Some(asked) = text.get("format").filter(|asked| !asked.is_null()) {
            format = asked.clone();
        }
        let mut inner = Fields::nested("text", text)?;
        wanted = constraint::read_format(&mut inner, "format")?;
        inner.refuse_unless("verbosity", "no model here knows it", |value| value == "medium")?;
        inner.finish()?;
    }
    echo.insert("text".into(), json!({"format": format}));
    Ok(wanted)
}

/// The decimal number that was meant: 0.7, not the nearest binary one.
fn short(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// How long a summary of the reasoning may be.
const SUMMARIES: [&str; 3] = ["auto", "concise", "detailed"];

/// What is the same in every response.
const FIXED: [(&str, Fixed); 6] = [
    ("background", || false.into()),
    ("previous_response_id", || Value::Null),
    ("service_tier", || "default".into()),
    ("store", || false.into()),
    ("top_logprobs", || 0.into()),
    ("truncation", || "disabled".into()),
];

/// A JSON value that no constant can hold.
type Fixed = fn() -> Value;
