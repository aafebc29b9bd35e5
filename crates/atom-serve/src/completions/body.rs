//! The request: prompts as text or as tokens, and what a plain completion has of its own.

use super::CompletionShape;
use crate::constraint;
use crate::declare::Takes::{Either, Flag, List, Text, Token, Whole};
use crate::declare::{Field, Object, field, needed};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::generation::{Prompt, Work};
use crate::params::{FIELDS, NO_CONVERSATION, Params, U32, token_id};
use crate::prompt::encode;
use crate::server::Server;
use crate::text::Reading;
use atom_base::TokenId;
use atom_base::limits::{PROMPTS_MAX, TOP_LOGPROBS_MAX};
use serde_json::{Value, json};

/// Reads a body and turns its prompts into tokens. Runs on a text thread.
pub(crate) fn read(server: &Server, body: &[u8]) -> Result<(Work, CompletionShape), ApiError> {
    let mut fields = Fields::parse(body, &BODY)?;
    let mut params = Params::read(&mut fields, server)?;
    let raw = read_prompts(&mut fields, server.engine.limits().vocab_size)?;
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let logprobs = fields.integer("logprobs")?.map(|k| k as u8);
    fields.finish()?;

    params.sampling.logprobs = logprobs;
    params.sampling.prompt_logprobs = logprobs.filter(|_| echo);
    let max_tokens = params.max_tokens.unwrap_or(MAX_TOKENS_DEFAULT);
    if max_tokens == 0 && params.sampling.prompt_logprobs.is_none() {
        return Err(wrong(
            "max_tokens",
            &json!(0),
            "at least 1, unless 'echo' and 'logprobs' ask to score the prompt",
        ));
    }
    let prompts = raw
        .into_iter()
        .map(|raw| {
            let (tokens, shown) = match raw {
                RawPrompt::Text(text) => (encode(server, &text, true)?, echo.then_some(text)),
                RawPrompt::Tokens(tokens) => {
                    let shown = echo.then(|| server.text.tokenizer.decode(&tokens, false));
                    (tokens.into(), shown)
                }
            };
            Ok(Prompt { tokens, max_tokens, echo: shown })
        })
        .collect::<Result<_, ApiError>>()?;
    let shape = CompletionShape::new(server, &params);
    Ok((Work { params, prompts, session: None, reading: Reading::plain() }, shape))
}

enum RawPrompt {
    Text(String),
    Tokens(Vec<TokenId>),
}

/// A string, a list of strings, a list of token ids, or a list of those.
fn read_prompts(fields: &mut Fields, vocab: usize) -> Result<Vec<RawPrompt>, ApiError> {
    let expected = "a string, a list of strings, a list of token ids or a list of lists of token ids";
    let items = match fields.take("prompt") {
        None => return Err(ApiError::Missing { name: "prompt".into(), expected: "send a text to continue" }),
        Some(Value::String(text)) => return Ok(vec![RawPrompt::Text(text)]),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong("prompt", &other, expected)),
    };
    match items.first() {
        None => Err(wrong("prompt", &Value::Array(items), "not empty")),
        Some(Value::Number(_)) => Ok(vec![RawPrompt::Tokens(read_tokens("prompt", &items, vocab)?)]),
        Some(_) if items.len() > PROMPTS_MAX => {
            Err(wrong("prompt", &Value::Array(items), format!("at most {PROMPTS_MAX} prompts")))
        }
        Some(_) => items
            .into_iter()
            .enumerate()
            .map(|(at, item)| match item {
                Value::String(text) => Ok(RawPrompt::Text(text)),
                Value::Array(ids) => {
                    Ok(RawPrompt::Tokens(read_tokens(&format!("prompt[{at}]"), &ids, vocab)?))
                }
                other => Err(wrong(&format!("prompt[{at}]"), &other, "a string or a list of token ids")),
            })
            .collect(),
    }
}

fn read_tokens(name: &str, ids: &[Value], vocab: usize) -> Result<Vec<TokenId>, ApiError> {
    ids.iter().enumerate().map(|(at, id)| token_id(&format!("{name}[{at}]"), id, vocab)).collect()
}

/// As in the OpenAI API.
const MAX_TOKENS_DEFAULT: u32 = 16;

/// What a body may have.
pub(crate) const BODY: Object =
    Object { name: "CompletionRequest", groups: &[OWN, FIELDS, constraint::FIELDS, NO_CONVERSATION] };

const OWN: &[Field] = &[
    needed(
        "prompt",
        Either(&[
            Text,
            List(&Text, 1, PROMPTS_MAX),
            List(&Token, 1, usize::MAX),
            List(&List(&Token, 1, usize::MAX), 1, PROMPTS_MAX),
        ]),
        "Texts or tokens to continue.",
    ),
    field("max_tokens", Whole(0, U32), "Tokens of the answer, 16 if absent; 0 only to score the prompt."),
    field("max_completion_tokens", Whole(0, U32), "The newer name, and wins."),
    field("echo", Flag, "The prompt is part of the answer."),
    field("logprobs", Whole(0, TOP_LOGPROBS_MAX as i64), "Log-probabilities, with so many alternatives."),
];
