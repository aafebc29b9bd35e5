//! The request.

use super::blocks::Thinking;
use super::{MessagesShape, content, thinking, tools};
use crate::chat::conversation::Conversation;
use crate::chat::thinking::Variables;
use crate::constraint::{self, Wanted};
use crate::declare::Takes::{
    Flag, List, Never, Number, NumberAbove, Object as Inner, OneOf, Only, Schema, Short, Text, Unread, Whole,
};
use crate::declare::{Field, Object, field, idle, needed};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::generation::Work;
use crate::params::{MODEL, Params, StreamOptions, U32};
use crate::prompt::encode;
use crate::server::Server;
use atom_base::limits::{STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX, TOOLS_MAX};
use atom_text::{StopStrings, TextError};
use serde_json::{Value, json};

/// Reads a body and turns its messages into tokens. Runs on a text thread.
pub(crate) fn read(server: &Server, body: &[u8]) -> Result<(Work, MessagesShape), ApiError> {
    let mut fields = Fields::parse(body, &BODY)?;
    let model = server.resolve_model(fields.string("model")?)?;
    let max_tokens = read_max_tokens(&mut fields)?;
    let (conversation, thinking, format) = read_conversation(&mut fields, server, Some(max_tokens))?;
    let (stop_sequences, stops) = read_stops(&mut fields)?;
    let mut params = Params::new(server, model.clone(), stops);
    read_sampling(&mut fields, server, &mut params)?;
    params.constraint = format;
    params.stream = fields.boolean("stream")?.unwrap_or(false).then(StreamOptions::default);
    if let Some(metadata) = fields.inner("metadata")? {
        metadata.finish()?;
    }
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
    let mut fields = Fields::parse(body, &COUNT)?;
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
    let read = fields.integer("max_tokens")?;
    read.map(|tokens| tokens as u32).ok_or(ApiError::Missing {
        name: "max_tokens".into(),
        expected: "send the most tokens that the answer may have",
    })
}

fn read_sampling(fields: &mut Fields, server: &Server, params: &mut Params) -> Result<(), ApiError> {
    let sampling = &mut params.sampling;
    if let Some(temperature) = fields.number("temperature")? {
        sampling.temperature = temperature;
    }
    if let Some(top_p) = fields.number("top_p")? {
        sampling.top_p = top_p;
    }
    if let Some(top_k) = fields.integer("top_k")? {
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

/// Fields whose usual values ask for what happens anyway. Others are refused with the reason.
fn take_harmless(fields: &mut Fields) -> Result<(), ApiError> {
    content::take_cache_control(fields)?;
    fields.refuse_unless("context_management", "messages are taken as they are", keeps_all)
}

/// An order to edit nothing.
fn keeps_all(value: &Value) -> bool {
    let keep = |edits: &Vec<Value>| {
        edits.iter().all(|edit| *edit == json!({"type": "clear_thinking_20251015", "keep": "all"}))
    };
    value.as_object().is_some_and(|fields| {
        fields
            .iter()
            .all(|(name, edits)| edits.is_null() || name == "edits" && edits.as_array().is_some_and(keep))
    })
}

/// What a body may have.
pub(crate) const BODY: Object =
    Object { name: "MessagesRequest", groups: &[PROMPT, OUTPUT, CONTEXT_FIELDS, IDLE] };
/// What a body of `count_tokens` may have.
pub(crate) const COUNT: Object =
    Object { name: "CountTokensRequest", groups: &[PROMPT, CONTEXT_FIELDS, IDLE] };

const PROMPT: &[Field] = &[
    MODEL,
    content::MESSAGES,
    field("system", content::TEXTS, "Instructions; text blocks are joined by line breaks."),
    field("tools", List(&Inner(&tools::TOOL), 0, TOOLS_MAX), "Tools that the model may call."),
    field("tool_choice", OneOf(tools::CHOICES), "`any` and `tool` hold the answer to calls."),
    field("thinking", OneOf(thinking::KINDS), "Whether the model thinks, and thoughts are shown."),
    field("output_config", Inner(&thinking::OUTPUT), ""),
    field("output_format", OneOf(constraint::FORMATS), "Where `output_config.format` stood; not beside it."),
];
const OUTPUT: &[Field] = &[
    needed("max_tokens", Whole(1, U32), "Tokens of the answer, thoughts included."),
    field("temperature", Number(0.0, 1.0), "0: the likeliest token always."),
    field("top_p", NumberAbove(0.0, 1.0), "The smallest set of tokens with this probability."),
    field("top_k", Whole(0, U32), "So many of the likeliest tokens; 0: all."),
    field(
        "stop_sequences",
        List(&Short(1, STOP_STRING_BYTES_MAX), 0, STOP_STRINGS_MAX),
        "Texts that end the answer, and are no part of it.",
    ),
    field("stream", Flag, "The answer as server-sent events."),
    field("metadata", Inner(&METADATA), "Of no consequence."),
];
const CONTEXT_FIELDS: &[Field] = &[
    content::CACHE_CONTROL,
    field("context_management", Schema(KEEPS_ALL), "What keeps everything is taken."),
];
const IDLE: &[Field] = &[
    idle("service_tier", Only(&["\"auto\"", "\"standard_only\""], "there is one tier")),
    idle("speed", Only(&["\"standard\""], "there is one speed")),
    idle("mcp_servers", Only(&["[]"], "no tools run on this server")),
    idle("container", Never("no code runs on this server")),
    idle("inference_geo", Never("it runs where it runs")),
];
// Who the request is for is nobody's business here.
const METADATA: Object =
    Object { name: "MessagesMetadata", groups: &[&[field("user_id", Unread(&Text), "")]] };
/// See [`keeps_all`].
const KEEPS_ALL: &str = r#"{"type": "object", "additionalProperties": {"type": "null"}, "properties": {"edits": {"type": ["array", "null"],
    "items": {"const": {"type": "clear_thinking_20251015", "keep": "all"}}}}}"#;
