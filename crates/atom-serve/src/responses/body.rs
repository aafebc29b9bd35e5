//! The request.

use super::{ResponsesShape, input, tools};
use crate::chat::conversation::Conversation;
use crate::chat::thinking::{EFFORTS, Variables};
use crate::constraint::{self, Wanted};
use crate::declare::Takes::{
    Flag, List, Map as Mapping, Never, Number, NumberAbove, Object as Inner, Only, Text, Unread, Whole, Word,
};
use crate::declare::{Field, Object, field, idle};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::generation::Work;
use crate::params::{MODEL, Params, StreamOptions, U32, VERBOSITY};
use crate::server::Server;
use atom_text::StopStrings;
use serde_json::{Map, Value, json};

/// Reads a body and turns its items into tokens. Runs on a text thread.
pub(crate) fn read(server: &Server, body: &[u8]) -> Result<(Work, ResponsesShape), ApiError> {
    let mut fields = Fields::parse(body, &BODY)?;
    let model = server.resolve_model(fields.string("model")?)?;
    fields.take_idle()?;
    // Clients of the stateless API ask for it always. What they would carry back encrypted is in the
    // reasoning items as text.
    fields.refuse_unless("include", "answers have nothing more", |value| {
        let items = value.as_array().map(Vec::as_slice);
        items.is_some_and(|items| items.iter().all(|item| item == ENCRYPTED))
    })?;
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

fn read_sampling(fields: &mut Fields, server: &Server, params: &mut Params) -> Result<(), ApiError> {
    if let Some(temperature) = fields.number("temperature")? {
        params.sampling.temperature = temperature;
    }
    if let Some(top_p) = fields.number("top_p")? {
        params.sampling.top_p = top_p;
    }
    let max_tokens = fields.integer("max_output_tokens")?;
    params.max_tokens = max_tokens.map(|tokens| tokens as u32);
    Ok(params.sampling.validate(server.engine.limits().vocab_size as u32)?)
}

fn read_stream(fields: &mut Fields) -> Result<Option<StreamOptions>, ApiError> {
    let streams = fields.boolean("stream")?.unwrap_or(false);
    if let Some(options) = fields.inner("stream_options")? {
        options.finish()?;
    }
    Ok(streams.then(StreamOptions::default))
}

/// Fields that can't change an answer, and are repeated in it, as clients expect.
fn read_bookkeeping(fields: &mut Fields, echo: &mut Map<String, Value>) -> Result<(), ApiError> {
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        if let Some(text) = fields.string(name)? {
            echo.insert(name.into(), text.into());
        }
    }
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
    if let Some(mut inner) = fields.inner("reasoning")? {
        effort = inner.string("effort")?;
        if let Some(effort) = &effort {
            variables.effort(&server.text.template, effort, "reasoning.effort")?;
        }
        for name in ["summary", "generate_summary"] {
            if let Some(summary) = inner.string(name)?
                && !SUMMARIES.contains(&summary.as_str())
            {
                let expected = format!("one of {}", SUMMARIES.join(", "));
                return Err(wrong(&inner.name(name), &summary.into(), expected));
            }
        }
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
        let mut inner = Fields::nested("text", text, &TEXT)?;
        wanted = constraint::read_format(&mut inner, "format")?;
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

/// What a body may have.
pub(crate) const BODY: Object =
    Object { name: "ResponsesRequest", groups: &[OWN, tools::FIELDS, UNREAD, MEMORY, UNSUPPORTED] };

const OWN: &[Field] = &[
    MODEL,
    input::FIELD,
    field("instructions", Text, "The first system message."),
    field("max_output_tokens", Whole(1, U32), "Tokens of the answer; absent: what is left of the context."),
    field("temperature", Number(0.0, 2.0), "0: the likeliest token always."),
    field("top_p", NumberAbove(0.0, 1.0), "The smallest set of tokens with this probability."),
    field("stream", Flag, "The answer as server-sent events."),
    field("stream_options", Inner(&STREAM_OPTIONS), ""),
    field("reasoning", Inner(&REASONING), ""),
    field("text", Inner(&TEXT), ""),
    field("include", List(&Word(&[ENCRYPTED]), 0, usize::MAX), "Of no consequence: items have their text."),
];

const UNREAD: &[Field] = &[
    field("user", Text, "Repeated in the answer."),
    field("safety_identifier", Text, "Repeated in the answer."),
    field("prompt_cache_key", Text, "Repeated in the answer."),
    field("metadata", Mapping, "Repeated in the answer."),
    field("client_metadata", Unread(&Mapping), ""),
    idle(
        "prompt_cache_retention",
        Only(&["\"in_memory\"", "\"in-memory\""], "entries live until their room is needed"),
    ),
    idle("service_tier", Only(&["\"auto\"", "\"default\""], "there is one tier")),
];

/// What would need the server to remember something.
const MEMORY: &[Field] = &[
    idle("store", Only(&["false"], "nothing is stored")),
    idle("background", Only(&["false"], "an answer that nobody waits for would have to be stored")),
    idle("previous_response_id", Never(STORED)),
    idle("conversation", Never(STORED)),
    idle("prompt", Never("no prompt templates are stored; send 'instructions' and 'input'")),
];

const UNSUPPORTED: &[Field] = &[
    idle("truncation", Only(&["\"disabled\""], "a conversation is answered as a whole or refused")),
    idle("context_management", Only(&["[]"], "a conversation is taken as it is")),
    idle("top_logprobs", Only(&["0"], "log-probabilities are given by /v1/chat/completions")),
    idle("max_tool_calls", Never("no tools run on this server")),
    idle("moderation", Never("nothing is moderated")),
];

const STREAM_OPTIONS: Object = Object {
    name: "ResponsesStreamOptions",
    // A client may turn off what we don't do, and ask for what we do anyway.
    groups: &[&[
        idle("include_obfuscation", Only(&["false"], "events are not padded")),
        idle("include_usage", Only(&["true"], "the last event has the whole response, usage included")),
    ]],
};
const REASONING: Object = Object {
    name: "ResponsesReasoning",
    groups: &[&[
        field("effort", Word(&EFFORTS), "How much the model thinks, where its template knows it."),
        field("summary", Word(&SUMMARIES), NO_SUMMARY),
        field("generate_summary", Word(&SUMMARIES), NO_SUMMARY),
        idle("context", Only(&["\"auto\""], "the chat template says which thoughts it shows again")),
    ]],
};
const TEXT: Object = Object {
    name: "ResponsesText",
    groups: &[&[constraint::FORMAT, idle("verbosity", Only(&["\"medium\""], VERBOSITY))]],
};

const STORED: &str = "nothing is stored; send the whole conversation as 'input'";
/// Of every length there is the same. The response says so.
const NO_SUMMARY: &str = "Of no consequence: nobody summarises, and the reasoning itself is in the answer.";
const ENCRYPTED: &str = "reasoning.encrypted_content";
