//! Llama 3.1 to 3.3: a JSON object, bare or behind `<|python_tag|>`.
//!
//! ```text
//! {"name": "get_weather", "parameters": {"city": "Paris"}}
//! ```
//!
//! A bare object is a call only where an answer begins with it and it names a tool that is offered: any
//! answer in JSON could have a name. Several calls are separated by `;` or white space.
//!
//! Source: the chat template of meta-llama/Llama-3.1-8B-Instruct, as in vLLM's
//! `examples/tool_chat_template_llama3.1_json.jinja`, and the fixtures of its
//! `tests/tool_parsers/test_llama3_json_tool_parser.py`.

use super::AnswerEnd;
use super::end::Left;
use super::format::{Format, Sink, Step};
use super::json_call::{CallStep, JsonCall, NameRule};

pub(super) const MARKERS: &[&str] = &[PYTHON_TAG];
pub(super) const OPENINGS: &[&str] = &[PYTHON_TAG];
pub(super) const FIRST_OPENINGS: &[&str] = &["{"];

const PYTHON_TAG: &str = "<|python_tag|>";

/// From the character after the opening marker on, or after the bracket of a bare object.
#[derive(Debug)]
pub(super) struct Llama3Json {
    call: JsonCall,
    is_after_call: bool,
}

impl Llama3Json {
    pub(super) fn new(opening: &str) -> Self {
        let call = if opening == PYTHON_TAG { JsonCall::new(NameRule::Any) } else { bare() };
        Self { call, is_after_call: false }
    }
}

/// A bare object whose bracket has been read.
fn bare() -> JsonCall {
    JsonCall::within(NameRule::Offered)
}

impl Format for Llama3Json {
    fn push(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        if self.is_after_call {
            return match c {
                _ if c.is_whitespace() || c == ';' => Step::Going,
                '{' => {
                    self.is_after_call = false;
                    self.call = bare();
                    Step::Going
                }
                _ => Step::NotACall,
            };
        }
        match self.call.push(c, sink) {
            CallStep::Going => Step::Going,
            CallStep::Done => {
                self.is_after_call = true;
                Step::Settled
            }
            CallStep::Failed if self.call.is_announced() => Step::Before(c.into()),
            CallStep::Failed => Step::NotACall,
        }
    }

    fn finish(&mut self, end: AnswerEnd, sink: &mut Sink<'_>) -> Left {
        if self.is_after_call { Left::Frame } else { self.call.end_answer(end, sink) }
    }
}
