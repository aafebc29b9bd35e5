//! The fields that chat and plain completions have in common.

use crate::constraint::{self, Wanted};
use crate::declare::Takes::{
    Either, Flag, List, Never, Number, NumberAbove, Object as Inner, Only, Schema, Short, Text, Token,
    Unread, Whole,
};
use crate::declare::{Field, Object, field, idle};
use crate::error::ApiError;
use crate::fields::{Fields, integer, wrong};
use crate::server::Server;
use atom_base::limits::{
    CHOICES_MAX, LOGIT_BIAS_MAX, REPETITION_PENALTY_MIN, STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX,
    STOP_TOKENS_MAX,
};
use atom_base::{LaneId, SamplingParams, TokenId};
use atom_engine::GrammarRef;
use atom_text::StopStrings;
use serde_json::Value;

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
        fields.take_idle()?;
        let sampling = read_sampling(fields, server)?;
        let n = fields.integer("n")?.unwrap_or(1) as u32;
        if fields.integer("best_of")?.is_some_and(|best| best != i64::from(n)) {
            return Err(ApiError::Unsupported {
                name: "best_of".into(),
                reason: "no choices are thrown away",
            });
        }
        Ok(Self {
            model,
            sampling,
            n,
            max_tokens: read_max_tokens(fields)?,
            stops: read_stops(fields)?,
            stop_token_ids: read_stop_tokens(fields, server.engine.limits().vocab_size)?,
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
            lane: fields.integer("data_parallel_rank")?.map(|lane| LaneId(lane as u16)),
            constraint: constraint::read(fields)?,
            grammar: None,
            stream: read_stream(fields)?,
        })
    }
}

fn read_sampling(fields: &mut Fields, server: &Server) -> Result<SamplingParams, ApiError> {
    let defaults = &server.options.defaults;
    let vocab = server.engine.limits().vocab_size as u32;
    let top_k = fields.integer("top_k")?;
    let seed = fields.integer("seed")?;
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
        logit_bias: read_logit_bias(fields, vocab)?,
        logprobs: None,
        prompt_logprobs: None,
    };
    sampling.validate(vocab)?;
    Ok(sampling)
}

/// `{"token id": bias}`, the ids as strings since JSON has no other keys.
fn read_logit_bias(fields: &mut Fields, vocab: u32) -> Result<Box<[(TokenId, f32)]>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(Box::default()) };
    if map.len() > LOGIT_BIAS_MAX {
        let expected = format!("an object of at most {LOGIT_BIAS_MAX} fields");
        return Err(wrong("logit_bias", &Value::Object(map), expected));
    }
    map.iter()
        .map(|(key, value)| {
            // "+5" and "05" would make the same token twice.
            if key.is_empty()
                || key.bytes().any(|byte| !byte.is_ascii_digit())
                || key.starts_with('0') && key != "0"
            {
                let expected = "an object whose keys are token ids, like \"50256\"";
                return Err(wrong("logit_bias", &Value::String(key.clone()), expected));
            }
            let token = key.parse::<TokenId>().map_err(|_| ApiError::BadField {
                name: "logit_bias".into(),
                found: format!("for token {key}"),
                expected: format!("for tokens below {vocab}"),
            })?;
            let bias =
                value.as_f64().ok_or_else(|| wrong(&format!("logit_bias.{key}"), value, "a number"))?;
            // Before it is rounded.
            if !(-100.0..=100.0).contains(&bias) {
                let found = format!("{value} for token {key}");
                let expected = "from -100 to 100".into();
                return Err(ApiError::BadField { name: "logit_bias".into(), found, expected });
            }
            Ok((token, bias as f32))
        })
        .collect()
}

/// `max_completion_tokens` is the newer name, and wins.
fn read_max_tokens(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let older = fields.integer("max_tokens")?;
    let newer = fields.integer("max_completion_tokens")?;
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
    let Some(mut inner) = fields.inner("stream_options")? else {
        return Ok(streams.then(StreamOptions::default));
    };
    let options = StreamOptions {
        include_usage: inner.boolean("include_usage")?.unwrap_or(false),
        continuous_usage_stats: inner.boolean("continuous_usage_stats")?.unwrap_or(false),
    };
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

/// What [`Params::read`] takes, but for the tokens of the answer: their number may be 0 in one API.
pub(crate) const FIELDS: &[Field] = &[
    MODEL,
    field("temperature", Number(0.0, 2.0), "0: the likeliest token always."),
    field("top_p", NumberAbove(0.0, 1.0), "The smallest set of tokens with this probability."),
    field("top_k", Whole(-1, U32), "So many of the likeliest tokens; 0 and -1: all."),
    field("min_p", Number(0.0, 1.0), "Tokens at least so likely, compared with the likeliest."),
    field("seed", Whole(i64::MIN, i64::MAX), "The same seed, the same answer."),
    field("n", Whole(1, CHOICES_MAX as i64), "Choices for each prompt."),
    field("best_of", Whole(1, CHOICES_MAX as i64), "Only what `n` says: no choices are thrown away."),
    field(
        "stop",
        Either(&[STOP, List(&STOP, 0, STOP_STRINGS_MAX)]),
        "Texts that end the answer, and are no part of it.",
    ),
    field("stop_token_ids", List(&Token, 0, STOP_TOKENS_MAX), "Tokens that end the answer."),
    field("ignore_eos", Flag, "The answer goes on behind the model's own end."),
    field("presence_penalty", Number(-2.0, 2.0), "Against tokens that came already."),
    field("frequency_penalty", Number(-2.0, 2.0), "Against tokens, as often as they came."),
    field("repetition_penalty", Number(0.01, 2.0), "Against tokens of prompt and answer; 1: none."),
    field("logit_bias", Schema(LOGIT_BIAS), "Added to the logits of these tokens."),
    field("stream", Flag, "The answer as server-sent events."),
    field("stream_options", Inner(&STREAM_OPTIONS), "Only with `stream`."),
    field("data_parallel_rank", Whole(0, u16::MAX as i64), "The lane that computes it."),
    field("user", Unread(&Text), ""),
    field("safety_identifier", Unread(&Text), ""),
    field("prompt_cache_key", Unread(&Text), "Of no consequence: prompts are found by their tokens."),
    field("prompt_cache_retention", Unread(&Text), "Of no consequence."),
    field("metadata", Unread(&crate::declare::Takes::Map), ""),
    idle("store", Only(&["false"], "nothing is stored")),
    idle("service_tier", Only(&["\"auto\"", "\"default\""], "there is one tier")),
    idle("verbosity", Only(&["\"medium\""], VERBOSITY)),
    idle("modalities", Only(&["[\"text\"]"], "it writes text only")),
    idle("suffix", Only(&["\"\""], "it only continues text")),
    idle("audio", Never("it writes text only")),
    idle("prediction", Never("predicted outputs are not built")),
    idle("web_search_options", Never("it searches nothing")),
    idle("logits_processors", Never("no code is taken from clients")),
    idle("min_tokens", Only(&["0"], "the model ends its answer where it ends")),
    idle("prompt_logprobs", Never("/v1/completions scores a prompt, by 'echo' and 'logprobs'")),
];

/// The same in every body.
pub(crate) const MODEL: Field = field("model", Text, "One of the served names; absent: the model.");

/// Of a conversation's answer.
pub(crate) const CHAT_LENGTH: &[Field] = &[
    field("max_tokens", Whole(1, U32), "Tokens of the answer; absent: what is left of the context."),
    field("max_completion_tokens", Whole(1, U32), "The newer name, and wins."),
];

/// Fields of conversations, for endpoints that have none, but for the values that ask for nothing.
pub(crate) const NO_CONVERSATION: &[Field] = &[
    idle("tools", Only(&["[]"], CONVERSATION)),
    idle("tool_choice", Only(&["\"none\""], CONVERSATION)),
    idle("functions", Only(&["[]"], CONVERSATION)),
    idle("function_call", Only(&["\"none\""], CONVERSATION)),
    idle("parallel_tool_calls", Never(CONVERSATION)),
    idle("reasoning_effort", Never(CONVERSATION)),
    idle("thinking", Never(CONVERSATION)),
];

const STREAM_OPTIONS: Object = Object {
    name: "StreamOptions",
    groups: &[&[
        field("include_usage", Flag, "One more chunk at the end, with the usage and no choices."),
        field("continuous_usage_stats", Flag, "The usage so far in every chunk."),
        // OpenAI pads its chunks against traffic analysis; a client may turn off what we don't do.
        idle("include_obfuscation", Only(&["false"], "chunks are not padded")),
    ]],
};

const STOP: crate::declare::Takes = Short(1, STOP_STRING_BYTES_MAX);

const LOGIT_BIAS: &str = r#"{"type": "object", "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}, "maxProperties": 1024}"#;
const _: () = assert!(LOGIT_BIAS_MAX == 1024, "as it is declared");

const _: () = assert!(REPETITION_PENALTY_MIN == 0.01, "as it is declared");

/// The largest number of tokens that can be said.
pub(crate) const U32: i64 = u32::MAX as i64;

/// Why no verbosity but the usual one is taken.
pub(crate) const VERBOSITY: &str =
    "no chat template knows it: say in the messages how long the answer shall be";

const CONVERSATION: &str = "it is for conversations: /v1/chat/completions";
