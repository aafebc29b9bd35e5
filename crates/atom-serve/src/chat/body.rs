//! The request: what chat completions have of their own.

use super::conversation::Conversation;
use super::thinking::Variables;
use super::tools::Tools;
use super::{ChatShape, messages};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::generation::Work;
use crate::params::Params;
use crate::server::Server;
use atom_base::limits::TOP_LOGPROBS_MAX;
use serde_json::json;

/// Reads a body and turns its messages into tokens. Runs on a text thread.
pub(crate) fn read(server: &Server, body: &[u8]) -> Result<(Work, ChatShape), ApiError> {
    let mut fields = Fields::parse(body)?;
    let mut params = Params::read(&mut fields, server)?;
    params.sampling.logprobs = read_logprobs(&mut fields)?;
    let tools = Tools::read(&mut fields)?;
    let history = messages::read(&mut fields)?;
    let variables = Variables::read(&mut fields, &server.text.template)?;
    let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(true);
    // vLLM's name for leaving the thoughts out of the answer.
    let include_reasoning = fields.boolean("include_reasoning")?.unwrap_or(true);
    for name in ["separate_reasoning", "stream_reasoning"] {
        fields.refuse_unless(name, "thoughts are told apart as they come", |value| *value == json!(true))?;
    }
    fields.refuse_unless("echo", "a chat has no prompt text to repeat", |value| *value == json!(false))?;
    fields.finish()?;

    let shape = ChatShape::new(server, &params, include_reasoning);
    let conversation = Conversation { history, tools, variables, add_generation_prompt, beginning: None };
    Ok((conversation.into_work(server, params)?, shape))
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
