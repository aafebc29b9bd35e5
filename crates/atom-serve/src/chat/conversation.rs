//! A conversation, whichever API it came by, on its way to the model: through the chat template, into tokens,
//! with the parser that will take the answer apart.

use super::history::History;
use super::thinking::Variables;
use super::tools::{ToolChoice, Tools};
use crate::constraint::constrain_answer;
use crate::error::ApiError;
use crate::fields::wrong;
use crate::generation::{Prompt, Work};
use crate::params::Params;
use crate::prompt::encode;
use crate::server::{Server, unix_s};
use atom_engine::Refusal;
use atom_text::{AnswerStart, Instead, TemplateInput};
use serde_json::json;

/// Everything that the prompt is made from, checked.
#[derive(Debug)]
pub(crate) struct Conversation {
    pub(crate) history: History,
    pub(crate) tools: Tools,
    pub(crate) variables: Variables,
    /// The prompt ends with the beginning of the assistant's answer.
    pub(crate) add_generation_prompt: bool,
    /// Text of the answer that the client wrote itself, for the model to go on from.
    pub(crate) beginning: Option<String>,
}

impl Conversation {
    /// The prompt as text. The template writes the special tokens itself.
    pub(crate) fn render(&self, server: &Server) -> Result<String, ApiError> {
        let text = &server.text;
        let tools = self.tools.for_template();
        if tools.is_some() {
            text.check_tools()?;
        }
        let mut rendered = text.template.render(&TemplateInput {
            messages: &self.history.for_template(text.call_style()),
            tools: tools.as_ref(),
            add_generation_prompt: self.add_generation_prompt,
            kwargs: self.variables.as_map(),
            now_unix_s: unix_s() as i64,
        })?;
        if let Some(beginning) = &self.beginning {
            if text.dialect.start(&rendered) == AnswerStart::Reasoning {
                return Err(ApiError::BadField {
                    name: "messages".into(),
                    found: "ended by the beginning of an answer, and the model would go on from it thinking"
                        .into(),
                    expected: "ended by the user; or switch thinking off, where the template can".into(),
                });
            }
            rendered.push_str(beginning);
        }
        Ok(rendered)
    }

    /// The request for the engine. Runs on a text thread.
    pub(crate) fn into_work(self, server: &Server, params: Params) -> Result<Work, ApiError> {
        let rendered = self.render(server)?;
        let tokens = encode(server, &rendered, false)?;
        let max_tokens = match params.max_tokens {
            Some(0) => return Err(wrong("max_tokens", &json!(0), "at least 1")),
            Some(max_tokens) => max_tokens,
            None => room(server, tokens.len())?,
        };
        let calls_max = if self.tools.is_parallel() { u32::MAX } else { 1 };
        let reading = server.text.reading(&rendered, self.tools.callable(), calls_max);
        let mut work =
            Work { params, prompts: vec![Prompt { tokens, max_tokens, echo: None }], session: None, reading };
        constrain_calls(server, &mut work, &self.tools)?;
        Ok(work)
    }
}

/// Holds the answer to the calls that the request insists on, and those that it may make to their schemas where one
/// of them is `strict`: the one place where tools meet the grammar. With a format of the answer beside it,
/// [`crate::constraint::compile`] has both.
fn constrain_calls(server: &Server, work: &mut Work, tools: &Tools) -> Result<(), ApiError> {
    let offered = tools.callable();
    let (chosen, instead, field) = match tools.choice() {
        ToolChoice::None => return Ok(()),
        ToolChoice::Auto if !tools.are_strict() || work.params.constraint.is_some() => return Ok(()),
        ToolChoice::Auto => (&offered[..], Instead::Text, "tools"),
        // With a format beside it, these are the calls that the answer may make instead.
        ToolChoice::Allowed { required: false, .. } if work.params.constraint.is_some() => return Ok(()),
        ToolChoice::Allowed { required: false, .. } => (&offered[..], Instead::Text, "tool_choice"),
        ToolChoice::Required | ToolChoice::Allowed { .. } => (&offered[..], Instead::Nothing, "tool_choice"),
        ToolChoice::Named(name) => {
            let at = offered.iter().position(|tool| tool.name == *name);
            let at = at.expect("a named choice is one of the tools: checked when read");
            (std::slice::from_ref(&offered[at]), Instead::Nothing, "tool_choice")
        }
    };
    constrain_answer(server, work, field, chosen, instead)
}

/// What is left of the context behind a prompt: the default of `max_tokens`.
fn room(server: &Server, prompt: usize) -> Result<u32, ApiError> {
    match server.context().checked_sub(prompt) {
        None | Some(0) => Err(Refusal::TooLong { prompt, max_tokens: 1, max: server.context() }.into()),
        Some(left) => Ok(u32::try_from(left).unwrap_or(u32::MAX)),
    }
}
