//! GLM 4.5 and later: the name behind the tag, then keys and values in turn.
//!
//! ```text
//! <tool_call>get_weather
//! <arg_key>city</arg_key>
//! <arg_value>Paris</arg_value>
//! </tool_call>
//! ```
//!
//! Source: the chat template of zai-org/GLM-4.6, as in llama.cpp's `models/templates/GLM-4.6.jinja`.
//! GLM 4.7 leaves out the line breaks.

use super::AnswerEnd;
use super::end::Left;
use super::format::{Format, Sink, Step};
use super::marker::{MarkerScan, Scan};
use super::name::NameText;
use super::parameters::{Kind, Parameters};

pub(super) const MARKERS: &[&str] = &["<tool_call>", CLOSE, KEY, "</arg_key>", "<arg_value>", "</arg_value>"];
pub(super) const OPENINGS: &[&str] = &["<tool_call>"];

const CLOSE: &str = "</tool_call>";
const KEY: &str = "<arg_key>";

/// From the character after `<tool_call>` on.
#[derive(Debug, Default)]
pub(super) struct Glm45 {
    at: At,
    name: NameText,
    key: String,
    is_announced: bool,
    scan: MarkerScan,
    parameters: Parameters,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum At {
    #[default]
    Name,
    /// Between parameters.
    Body,
    Key,
    /// Between a key and its value.
    Between,
    Value,
}

impl Glm45 {
    fn markers(&self) -> &'static [&'static str] {
        match self.at {
            At::Name | At::Body => &[KEY, CLOSE],
            At::Key => &["</arg_key>"],
            At::Between => &["<arg_value>"],
            At::Value => &["</arg_value>"],
        }
    }

    fn text(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        match self.at {
            At::Name if self.name.push(c) => Step::Going,
            At::Name => Step::NotACall,
            At::Key => {
                self.key.push(c);
                Step::Going
            }
            At::Value => {
                self.parameters.push(c, sink);
                Step::Going
            }
            At::Body | At::Between if c.is_whitespace() => Step::Going,
            At::Body | At::Between => {
                self.parameters.close(sink);
                Step::Before(format!("{c}{}", self.scan.take()))
            }
        }
    }

    fn marker(&mut self, index: usize, sink: &mut Sink<'_>) -> Step {
        let name = self.name.name();
        match self.at {
            At::Name | At::Body => {
                let Some(name) = name else { return Step::NotACall };
                if !self.is_announced {
                    self.is_announced = true;
                    sink.call(name, None);
                }
                if index == 1 {
                    self.parameters.close(sink);
                    return Step::Done;
                }
                self.key.clear();
                self.at = At::Key;
            }
            At::Key => self.at = At::Between,
            At::Between => {
                let key = self.key.trim();
                let kind = name.and_then(|name| Kind::declared(sink, name, key)).unwrap_or_default();
                self.parameters.begin(key, kind, sink);
                self.at = At::Value;
            }
            At::Value => {
                self.parameters.end(sink);
                self.at = At::Body;
            }
        }
        Step::Going
    }
}

impl Format for Glm45 {
    fn push(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        if self.at == At::Value && self.parameters.is_in_string() {
            return self.parameters.push_in_string(c, sink).map_or(Step::Going, Step::Again);
        }
        self.scan.push(c);
        loop {
            match self.scan.next(self.markers()) {
                Scan::Wait => return Step::Going,
                Scan::Marker(index) => return self.marker(index, sink),
                Scan::Text(c) => match self.text(c, sink) {
                    Step::Going => {}
                    step => return step,
                },
            }
        }
    }

    fn finish(&mut self, end: AnswerEnd, sink: &mut Sink<'_>) -> Left {
        if !self.is_announced {
            return Left::unnamed(end);
        }
        match self.at {
            At::Body => self.parameters.end_answer(end, sink),
            At::Value => self.parameters.cut(end, &self.scan.take(), sink),
            At::Name | At::Key | At::Between => Left::CutCall,
        }
    }
}
