//! GPT-OSS, harmony: an answer is a row of messages, each with a header that says what it is.
//!
//! ```text
//! <|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary
//! to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
//! ```
//!
//! (In one line.) The channel `analysis` is reasoning, `commentary` and `final` are for the reader, and a
//! message to somebody is a call. The prompt ends with `<|start|>assistant`. The recipient may also stand
//! before the channel.
//!
//! Source: `docs/format.md` of openai/harmony.

use super::arguments::{ArgumentStep, Arguments};
use super::end::Left;
use super::format::Sink;
use super::marker::{MarkerScan, Scan};
use super::{AnswerEnd, AnswerStart};

pub(super) const MARKERS: &[&str] = &[CALL, END, RETURN, START, CHANNEL, MESSAGE, CONSTRAIN];

/// What opens reasoning, and what closes it.
pub(super) const ANALYSIS: (&str, &str) = ("<|channel|>analysis<|message|>", END);

const CALL: &str = "<|call|>";
const END: &str = "<|end|>";
const RETURN: &str = "<|return|>";
const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
const RECIPIENT: &str = "to=functions.";

/// What ends a message, with or without a word.
pub(super) const ENDS: &[&str] = &[CALL, END, RETURN, START, CHANNEL];

/// Reads messages.
#[derive(Debug)]
pub(super) struct Harmony {
    /// Analysis is told from content.
    has_reasoning: bool,
    /// Messages to functions are calls.
    has_tools: bool,
    at: At,
    scan: MarkerScan,
}

#[derive(Debug)]
enum At {
    /// Between messages. At the beginning of an answer, a recipient may come.
    Between {
        is_start: bool,
    },
    /// Within a header, of which this has been read.
    Header(String),
    Content,
    Reasoning,
    Arguments(Arguments),
}

impl Harmony {
    pub(super) fn new(has_reasoning: bool, has_tools: bool, start: AnswerStart) -> Self {
        let at = match start {
            AnswerStart::Reasoning if has_reasoning => At::Reasoning,
            _ => At::Between { is_start: true },
        };
        Self { has_reasoning, has_tools, at, scan: MarkerScan::default() }
    }

    pub(super) fn is_reasoning(&self) -> bool {
        matches!(self.at, At::Reasoning)
    }

    pub(super) fn push(&mut self, c: char, sink: &mut Sink<'_>) {
        if let At::Arguments(arguments) = &mut self.at {
            match arguments.push(c, sink) {
                ArgumentStep::Going => {}
                ArgumentStep::Whole => self.at = At::Between { is_start: false },
                ArgumentStep::Ended(index) => self.end(ENDS[index]),
            }
            return;
        }
        self.scan.push(c);
        loop {
            let markers: &[&'static str] = match self.at {
                At::Between { is_start: true } => {
                    &[CALL, END, RETURN, START, CHANNEL, MESSAGE, CONSTRAIN, RECIPIENT]
                }
                At::Between { .. } | At::Header(_) => MARKERS,
                _ => ENDS,
            };
            match self.scan.next(markers) {
                Scan::Wait => return,
                Scan::Marker(index) => return self.marker(markers[index], sink),
                Scan::Text(c) => self.text(c, sink),
            }
        }
    }

    pub(super) fn finish(&mut self, end: AnswerEnd, sink: &mut Sink<'_>) -> Left {
        match &mut self.at {
            At::Arguments(arguments) => return arguments.end(end, sink),
            // The beginning of a header says nothing.
            At::Header(_) => {}
            _ => {
                for c in end.held(self.scan.take()).chars() {
                    self.text(c, sink);
                }
            }
        }
        Left::Frame
    }

    fn text(&mut self, c: char, sink: &mut Sink<'_>) {
        match &mut self.at {
            // White space between messages is none of them. Anything else there has no header, as with a
            // prompt that ended within a message.
            At::Between { .. } if c.is_whitespace() => {}
            At::Between { .. } => {
                self.at = At::Content;
                sink.content(c.encode_utf8(&mut [0; 4]));
            }
            At::Header(header) => {
                header.push(c);
                if header.len() > HEADER_BYTES_MAX {
                    sink.content(&std::mem::take(header));
                    self.at = At::Content;
                }
            }
            At::Content => sink.content(c.encode_utf8(&mut [0; 4])),
            At::Reasoning => sink.reasoning(c.encode_utf8(&mut [0; 4])),
            At::Arguments(_) => unreachable!("arguments read their own characters"),
        }
    }

    fn marker(&mut self, marker: &'static str, sink: &mut Sink<'_>) {
        match (marker, &mut self.at) {
            (MESSAGE, At::Header(header)) => {
                let header = std::mem::take(header);
                self.begin(&header, sink);
            }
            (MESSAGE, _) => self.at = At::Content,
            (CHANNEL | CONSTRAIN, At::Header(header)) => header.push_str(&format!(" {marker} ")),
            (CONSTRAIN, _) => {}
            (CALL | END | RETURN, At::Header(_)) => self.at = At::Between { is_start: false },
            (RECIPIENT, _) => self.at = At::Header(RECIPIENT.into()),
            _ => self.end(marker),
        }
    }

    /// A message has ended with this marker, which may begin the next header.
    fn end(&mut self, marker: &'static str) {
        self.at = match marker {
            START => At::Header(String::new()),
            CHANNEL => At::Header(format!(" {CHANNEL} ")),
            _ => At::Between { is_start: false },
        };
    }

    /// A message begins.
    fn begin(&mut self, header: &str, sink: &mut Sink<'_>) {
        let mut words = header.split_whitespace();
        let recipient = words.clone().find_map(|word| word.strip_prefix("to="));
        let channel = words.find(|word| *word == CHANNEL).and_then(|_| words.next());
        let name = recipient
            .filter(|to| self.has_tools && !matches!(*to, "" | "assistant" | "user" | "all"))
            .map(|to| to.strip_prefix("functions.").unwrap_or(to));
        self.at = match name {
            Some(name) => {
                sink.call(name, None);
                At::Arguments(Arguments::new(ENDS))
            }
            None if channel == Some("analysis") && self.has_reasoning => At::Reasoning,
            None => At::Content,
        };
    }
}

/// Bytes of a header: two words, a marker and a name.
const HEADER_BYTES_MAX: usize = 1024;
