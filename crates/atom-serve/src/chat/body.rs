//! The request: what chat completions have of their own.

use super::conversation::Conversation;
use super::thinking::{self, Variables};
use super::tools::{self, Tools};
use super::{ChatShape, messages};
use crate::constraint;
use crate::declare::Takes::{Flag, List, Map, OneOf, Only, Whole};
use crate::declare::{Field, Object, field, idle, needed};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::generation::Work;
use crate::params::{CHAT_LENGTH, FIELDS, Params};
use crate::server::Server;
use atom_base::limits::TOP_LOGPROBS_MAX;
use serde_json::json;

/// Reads a body and turns its messages into tokens. Runs on a text thread.
pub(crate) fn read(server: &Server, body: &[u8]) -> Result<(Work, ChatShape), ApiError> {
    let mut fields = Fields::parse(body, &BODY)?;
    let mut params = Params::read(&mut fields, server)?;
    params.sampling.logprobs = read_logprobs(&mut fields)?;
    let tools = Tools::read(&mut fields)?;
    let history = messages::read(&mut fields)?;
    let variables = Variables::read(&mut fields, &server.text.template)?;
    let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(true);
    // vLLM's name for leaving the thoughts out of the answer.
    let include_reasoning = fields.boolean("include_reasoning")?.unwrap_or(true);
    fields.finish()?;

    let shape = ChatShape::new(server, &params, include_reasoning);
    let conversation = Conversation { history, tools, variables, add_generation_prompt, beginning: None };
    Ok((conversation.into_work(server, params)?, shape))
}

/// `logprobs` says whether, `top_logprobs` how many alternatives.
fn read_logprobs(fields: &mut Fields) -> Result<Option<u8>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs")?.unwrap_or(0) as u8;
    if top > 0 && !wanted {
        return Err(wrong("top_logprobs", &json!(top), "absent unless 'logprobs' is true"));
    }
    Ok(wanted.then_some(top))
}

/// What a body may have.
pub(crate) const BODY: Object = Object {
    name: "ChatCompletionRequest",
    groups: &[&[MESSAGES], FIELDS, CHAT_LENGTH, constraint::FIELDS, PROMPT_FIELDS, OWN],
};

/// The conversation.
pub(crate) const MESSAGES: Field =
    needed("messages", List(&OneOf(messages::KINDS), 1, usize::MAX), "The conversation so far.");

/// What else changes the prompt.
pub(crate) const PROMPT_FIELDS: &[Field] = &[
    tools::TOOLS,
    tools::TOOL_CHOICE,
    tools::PARALLEL,
    thinking::EFFORT_FIELD,
    field("thinking", crate::declare::Takes::Object(&thinking::SWITCH), "Where the template has a switch."),
    field("chat_template_kwargs", Map, "Variables that the template reads; others are refused."),
    field("add_generation_prompt", Flag, "False: the prompt ends with the last message."),
];

const OWN: &[Field] = &[
    field("logprobs", Flag, "Log-probabilities of the tokens."),
    field("top_logprobs", Whole(0, TOP_LOGPROBS_MAX as i64), "So many alternatives, with `logprobs`."),
    field("include_reasoning", Flag, "False leaves `reasoning_content` out."),
    idle("separate_reasoning", Only(&["true"], TOLD_APART)),
    idle("stream_reasoning", Only(&["true"], TOLD_APART)),
    idle("echo", Only(&["false"], "a chat has no prompt text to repeat")),
    idle("functions", Only(&["[]"], "send 'tools' instead")),
    idle("function_call", Only(&["\"none\""], "send 'tool_choice' instead")),
];

const TOLD_APART: &str = "thoughts are told apart as they come";
