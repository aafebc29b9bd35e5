//! Hermes and Qwen: one JSON object between tags.
//!
//! ```text
//! <tool_call>
//! {"name": "get_weather", "arguments": {"city": "Paris"}}
//! </tool_call>
//! ```
//!
//! Source: the chat templates of Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B, and of
//! NousResearch/Hermes-2-Pro-Llama-3-8B.

use super::AnswerEnd;
use super::end::Left;
use super::format::{Format, Sink, Step};
use super::json_call::{CallStep, JsonCall, NameRule};
use super::marker::{MarkerScan, Scan};

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";

/// From the character after `<tool_call>` on.
#[derive(Debug)]
pub(super) struct Hermes {
    call: JsonCall,
    is_after_call: bool,
    scan: MarkerScan,
}

impl Hermes {
    pub(super) fn new() -> Self {
        Self { call: JsonCall::new(NameRule::Any), is_after_call: false, scan: MarkerScan::default() }
    }

    fn read(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        if self.is_after_call {
            // Several objects within one pair of tags aren't in the template; small models write them.
            match c {
                '{' => {
                    self.is_after_call = false;
                    self.call = JsonCall::new(NameRule::Any);
                }
                // A bracket too many says nothing.
                _ if c.is_whitespace() || c == '}' => return Step::Going,
                _ => return Step::NotACall,
            }
        }
        match self.call.push(c, sink) {
            CallStep::Going => Step::Going,
            CallStep::Done => {
                self.is_after_call = true;
                Step::Settled
            }
            CallStep::Failed if self.call.is_announced() => Step::Before(format!("{c}{}", self.scan.take())),
            CallStep::Failed => Step::NotACall,
        }
    }
}

impl Format for Hermes {
    fn push(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        if self.call.is_in_string() {
            return self.read(c, sink);
        }
        self.scan.push(c);
        loop {
            match self.scan.next(&[CLOSE]) {
                Scan::Wait => return Step::Going,
                Scan::Marker(_) if self.is_after_call => return Step::Done,
                Scan::Marker(_) => {
                    self.call.finish(sink);
                    return if self.call.is_announced() { Step::Done } else { Step::NotACall };
                }
                Scan::Text(c) => match self.read(c, sink) {
                    Step::Going => {}
                    step => return step,
                },
            }
        }
    }

    fn finish(&mut self, end: AnswerEnd, sink: &mut Sink<'_>) -> Left {
        if self.is_after_call { Left::Frame } else { self.call.end_answer(end, sink) }
    }
}
