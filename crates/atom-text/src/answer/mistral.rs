//! Mistral: `[TOOL_CALLS]`, then a name and its arguments, or a list of objects.
//!
//! ```text
//! [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
//! [TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time{}
//! [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
//! ```
//!
//! Source: the chat templates of mistralai/Ministral-3-14B-Reasoning-2512 (`[ARGS]`), of
//! mistralai/Mistral-Small-3.2-24B-Instruct-2506 (`[CALL_ID]` and an id of nine characters before `[ARGS]`) and
//! of mistralai/Mistral-Nemo-Instruct-2407 (a list), as in llama.cpp's `models/templates`, and the fixtures of
//! vLLM's `tests/tool_parsers/test_mistral_tool_parser.py`.

use super::AnswerEnd;
use super::arguments::{ArgumentStep, Arguments};
use super::end::Left;
use super::format::{Format, Sink, Step};
use super::json_call::{CallStep, JsonCall, NameRule};
use super::marker::{MarkerScan, Scan};
use super::name::NameText;

pub(super) const MARKERS: &[&str] = &[OPEN, ARGS, CALL_ID];
pub(super) const OPENINGS: &[&str] = &[OPEN];

const OPEN: &str = "[TOOL_CALLS]";
const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";

/// From the character after `[TOOL_CALLS]` on.
#[derive(Debug)]
pub(super) struct Mistral {
    at: At,
    name: NameText,
    id: NameText,
    scan: MarkerScan,
}

#[derive(Debug)]
enum At {
    Start,
    Name,
    Id,
    Arguments(Arguments),
    /// Before an object of a list.
    Item,
    Object(JsonCall),
    /// Behind an object of a list.
    Comma,
}

impl Mistral {
    pub(super) fn new() -> Self {
        Self {
            at: At::Start,
            name: NameText::default(),
            id: NameText::default(),
            scan: MarkerScan::default(),
        }
    }

    /// The name, and the id if there is one, up to the arguments.
    fn push_in_head(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        self.scan.push(c);
        loop {
            match self.scan.next(&[ARGS, CALL_ID]) {
                Scan::Wait => return Step::Going,
                Scan::Marker(0) => return self.begin_arguments("", sink),
                Scan::Marker(_) if matches!(self.at, At::Name) => self.at = At::Id,
                Scan::Marker(_) => return Step::NotACall,
                Scan::Text('{') => return self.begin_arguments("{", sink),
                Scan::Text(c) => {
                    let text = if matches!(self.at, At::Id) { &mut self.id } else { &mut self.name };
                    if !text.push(c) {
                        return Step::NotACall;
                    }
                }
            }
        }
    }

    fn begin_arguments(&mut self, first: &str, sink: &mut Sink<'_>) -> Step {
        let Some(name) = self.name.name() else { return Step::NotACall };
        sink.call(name, self.id.name());
        let mut arguments = Arguments::new(&[OPEN]);
        for c in first.chars() {
            arguments.push(c, sink);
        }
        self.at = At::Arguments(arguments);
        Step::Going
    }
}

impl Format for Mistral {
    fn push(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        match &mut self.at {
            At::Start | At::Item | At::Comma if c.is_whitespace() => Step::Going,
            At::Start if c == '[' => {
                self.at = At::Item;
                Step::Going
            }
            At::Start => {
                self.at = At::Name;
                self.push_in_head(c, sink)
            }
            At::Name | At::Id => self.push_in_head(c, sink),
            At::Arguments(arguments) => match arguments.push(c, sink) {
                ArgumentStep::Going => Step::Going,
                ArgumentStep::Whole => Step::Done,
                ArgumentStep::Ended(_) => Step::Before(OPEN.into()),
            },
            At::Item if c == '{' => {
                self.at = At::Object(JsonCall::within(NameRule::Any));
                Step::Going
            }
            At::Object(call) => match call.push(c, sink) {
                CallStep::Going => Step::Going,
                CallStep::Done => {
                    self.at = At::Comma;
                    Step::Settled
                }
                CallStep::Failed if call.is_announced() => Step::Before(c.into()),
                CallStep::Failed => Step::NotACall,
            },
            At::Comma if c == ',' => {
                self.at = At::Item;
                Step::Going
            }
            At::Comma if c == ']' => Step::Done,
            At::Item | At::Comma => Step::NotACall,
        }
    }

    fn finish(&mut self, end: AnswerEnd, sink: &mut Sink<'_>) -> Left {
        match &mut self.at {
            At::Arguments(arguments) => arguments.end(end, sink),
            At::Object(call) => call.end_answer(end, sink),
            At::Comma => Left::Frame,
            At::Start | At::Name | At::Id | At::Item => Left::unnamed(end),
        }
    }
}
