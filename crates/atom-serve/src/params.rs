//! The fields that chat and plain completions have in common.

use crate::constraint::{self, Wanted};
use crate::error::ApiError;
use crate::fields::{Fields, integer, wrong};
use crate::server::Server;
use atom_base::limits::{CHOICES_MAX, LOGIT_BIAS_MAX, STOP_TOKENS_MAX};
use atom_base::{LaneId, SamplingParams, TokenId};
use atom_engine::GrammarRef;
use atom_text::StopStrings;
use serde_json::{Value, json};

/// What a request asks of the continuation, whatever its prompt looks like.
#[derive(Debug)]
pub(crate) struct Params {
    /// The model's name as the client spelled it, checked.
    pub(crate) model: String,
    /// In range, but for the log-probabilities, which each endpoint spells in its own way.
    pub(crate) sampling: SamplingParams,
    /// Choices per prompt, at least 1.
    pub(crate) n: u32,
    /// `None`: the endpoint's default.
    pub(crate) max_tokens: Option<u32>,
    /// A fresh matcher, to be cloned for each choice.
    pub(crate) stops: StopStrings,
    pub(crate) stop_token_ids: Box<[TokenId]>,
    pub(crate) ignore_eos: bool,
    pub(crate) lane: Option<LaneId>,
    /// What the output is to be held to, until it is compiled.
    pub(crate) constraint: Option<Wanted>,
    /// The same, compiled.
    pub(crate) grammar: Option<GrammarRef>,
    /// `None`: one answer at the end.
    pub(crate) stream: Option<StreamOptions>,
}

/// How a stream reports usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamOptions {
    /// One more chunk at the end, with the usage and no choices.
    pub(crate) include_usage: bool,
    /// The usage so far in every chunk.
    pub(crate) continuous_usage_stats: bool,
}

impl Params {
    /// One choice by the server's defaults, for APIs that read their fields themselves.
    pub(crate) fn new(server: &Server, model: String, stops: StopStrings) -> Self {
        let defaults = &server.options.defaults;
        let sampling = SamplingParams {
            temperature: defaults.temperature,
            top_p: defaults.top_p,
            top_k: defaults.top_k,
            min_p: defaults.min_p,
            repetition_penalty: defaults.repetition_penalty,
            seed: server.options.seeds.draw(),
            ..SamplingParams::default()
        };
        Self {
            model,
            sampling,
            n: 1,
            max_tokens: None,
            stops,
            stop_token_ids: Box::default(),
            ignore_eos: false,
            lane: None,
            constraint: None,
            grammar: None,
            stream: None,
        }
    }

    /// Takes the common fields. The model comes first: a request to the wrong server has no other fault.
    pub(crate) fn read(fields: &mut Fields, server: &Server) -> Result<Self, ApiError> {
        let model = server.resolve_model(fields.string("model")?)?;
        take_harmless(fields)?;
        refuse_unsupported(fields)?;
        let sampling = read_sampling(fields, server)?;
        let n = fields.integer("n", 1, i64::from(CHOICES_MAX))?.unwrap_or(1) as u32;
        let wanted = json!(n);
        fields.refuse_unless("best_of", "no choices are thrown away", |value| *value == wanted)?;
        Ok(Self {
            model,
            sampling,
            n,
            max_tokens: read_max_tokens(fields)?,
            stops: read_stops(fields)?,
            stop_token_ids: read_stop_tokens(fields, server.engine.limits().vocab_size)?,
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
            lane: fields
                .integer("data_parallel_rank", 0, i64::from(u16::MAX))?
                .map(|lane| LaneId(lane as u16)),
            constraint: constraint::read(fields)?,
            grammar: None,
            stream: read_stream(fields)?,
        })
    }
}

/// Fields that can't change an answer and that clients send by habit: bookkeeping of OpenAI's own.
fn take_harmless(fields: &mut Fields) -> Result<(), ApiError> {
    for name in ["user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"] {
        fields.string(name)?;
    }
    fields.object("metadata")?;
    fields.refuse_unless("store", "nothing is stored", |value| *value == json!(false))?;
    fields.refuse_unless("service_tier", "there is one tier", |value| {
        ["auto", "default"].iter().any(|tier| value == tier)
    })
}

/// Fields that would change the answer and that are not built, but for the values that ask for nothing.
fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    fields.refuse_unless("verbosity", "no model here knows it", |value| value == "medium")?;
    fields.refuse_unless("modalities", "it writes text only", |value| *value == json!(["text"]))?;
    fields.refuse_unless("suffix", "it only continues text", |value| value == "")?;
    for (name, reason) in NEVER {
        fields.refuse_unless(name, reason, |_| false)?;
    }
    Ok(())
}

/// Fields of conversations, for endpoints that have none, but for the values that ask for nothing.
pub(crate) fn refuse_conversation(fields: &mut Fields) -> Result<(), ApiError> {
    let empty_list = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let is_none = |value: &Value| value == "none";
    fields.refuse_unless("tools", CONVERSATION, empty_list)?;
    fields.refuse_unless("tool_choice", CONVERSATION, is_none)?;
    fields.refuse_unless("functions", CONVERSATION, empty_list)?;
    fields.refuse_unless("function_call", CONVERSATION, is_none)?;
    for name in ["parallel_tool_calls", "reasoning_effort", "thinking"] {
        fields.refuse_unless(name, CONVERSATION, |_| false)?;
    }
    Ok(())
}

fn read_sampling(fields: &mut Fields, server: &Server) -> Result<SamplingParams, ApiError> {
    let defaults = &server.options.defaults;
    let vocab = server.engine.limits().vocab_size as u32;
    let top_k = fields.integer("top_k", -1, i64::from(u32::MAX))?;
    let seed = fields.integer("seed", i64::MIN, i64::MAX)?;
    let sampling = SamplingParams {
        temperature: fields.number("temperature")?.unwrap_or(defaults.temperature),
        top_p: fields.number("top_p")?.unwrap_or(defaults.top_p),
        // -1 is vLLM's way to say off, 0 ours.
        top_k: top_k.map_or(defaults.top_k, |k| k.max(0) as u32),
        min_p: fields.number("min_p")?.unwrap_or(defaults.min_p),
        seed: seed.map_or_else(|| server.options.seeds.draw(), |seed| seed as u64),
        choice: 0,
        presence_penalty: fields.number("presence_penalty")?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty")?.unwrap_or(0.0),
        repetition_penalty: fields.number("repetition_penalty")?.unwrap_or(defaults.repetition_penalty),
        logit_bias: read_logit_bias(fields)?,
        logprobs: None,
        prompt_logprobs: None,
    };
    sampling.validate(vocab)?;
    Ok(sampling)
}

/// `{"token id": bias}`, the ids as strings since JSON has no other keys.
fn read_logit_bias(fields: &mut Fields) -> Result<Box<[(TokenId, f32)]>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(Box::default()) };
    if map.len() > LOGIT_BIAS_MAX {
        let expected = format!("an object of at most {LOGIT_BIAS_MAX} fields");
        return Err(wrong("logit_bias", &Value::Object(map), expected));
    }
    map.iter()
        .map(|(key, value)| {
            // "+5" and "05" would make the same token twice.
            let token =
                key.parse::<TokenId>().ok().filter(|token| token.to_string() == *key).ok_or_else(|| {
                    wrong(
                        "logit_bias",
                        &Value::String(key.clone()),
                        "an object whose keys are token ids, like \"50256\"",
                    )
                })?;
            let bias =
                value.as_f64().ok_or_else(|| wrong(&format!("logit_bias.{key}"), value, "a number"))?;
            Ok((token, bias as f32))
        })
        .collect()
}

/// `max_completion_tokens` is the newer name, and wins.
fn read_max_tokens(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let older = fields.integer("max_tokens", 0, i64::from(u32::MAX))?;
    let newer = fields.integer("max_completion_tokens", 0, i64::from(u32::MAX))?;
    Ok(newer.or(older).map(|tokens| tokens as u32))
}

/// Their number and lengths are checked where they are matched.
fn read_stops(fields: &mut Fields) -> Result<StopStrings, ApiError> {
    let stops = match fields.take("stop") {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(items)) => items
            .into_iter()
            .map(|item| match item {
                Value::String(text) => Ok(text),
                other => Err(wrong("stop", &other, "a string or a list of strings")),
            })
            .collect::<Result<_, _>>()?,
        Some(other) => return Err(wrong("stop", &other, "a string or a list of strings")),
    };
    Ok(StopStrings::new(&stops)?)
}

fn read_stop_tokens(fields: &mut Fields, vocab: usize) -> Result<Box<[TokenId]>, ApiError> {
    let items = fields.list("stop_token_ids")?.unwrap_or_default();
    if items.len() > STOP_TOKENS_MAX {
        return Err(wrong("stop_token_ids", &Value::Array(items), format!("at most {STOP_TOKENS_MAX} ids")));
    }
    items.iter().map(|item| token_id("stop_token_ids", item, vocab)).collect()
}

/// A token of the vocabulary.
pub(crate) fn token_id(name: &str, value: &Value, vocab: usize) -> Result<TokenId, ApiError> {
    integer(name, value, 0, vocab as i64 - 1).map(|id| id as TokenId)
}

fn read_stream(fields: &mut Fields) -> Result<Option<StreamOptions>, ApiError> {
    let streams = fields.boolean("stream")?.unwrap_or(false);
    let Some(options) = fields.take("stream_options") else {
        return Ok(streams.then(StreamOptions::default));
    };
    let mut inner = Fields::nested("stream_options", options)?;
    let options = StreamOptions {
        include_usage: inner.boolean("include_usage")?.unwrap_or(false),
        continuous_usage_stats: inner.boolean("continuous_usage_stats")?.unwrap_or(false),
    };
    // OpenAI pads its chunks against traffic analysis; a client may turn off what we don't do.
    inner.refuse_unless("include_obfuscation", "chunks are not padded", |value| *value == json!(false))?;
    inner.finish()?;
    if !streams {
        return Err(ApiError::BadField {
            name: "stream_options".into(),
            found: "given without a stream".into(),
            expected: "absent unless 'stream' is true".into(),
        });
    }
    Ok(Some(options))
}

const CONVERSATION: &str = "it is for conversations: /v1/chat/completions";

/// Fields for which no value means nothing.
const NEVER: [(&str, &str); 4] = [
    ("audio", "it writes text only"),
    ("prediction", "predicted outputs are not built"),
    ("web_search_options", "it searches nothing"),
    ("logits_processors", "no code is taken from clients"),
];
