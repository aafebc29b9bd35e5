//! Formats that write a call as tags with a name in them, and parameters as tags within.

use super::AnswerEnd;
use super::end::Left;
use super::format::{Format, Sink, Step};
use super::marker::{MarkerScan, Scan};
use super::name::NAME_BYTES_MAX;
use super::parameters::{Kind, Parameters};

/// The tags of one format. Opening tags are given without the name that follows and the `>` behind it.
#[derive(Debug)]
pub(super) struct Tags {
    /// The ends of a section of calls.
    pub(super) section_closes: &'static [&'static str],
    pub(super) call: &'static str,
    pub(super) call_close: &'static str,
    pub(super) parameter: &'static str,
    /// What ends a value.
    pub(super) value_ends: &'static [&'static str],
    /// What else each of these ends.
    pub(super) closes: &'static [Closes],
    /// The value stands on lines of its own, so its first line break isn't part of it.
    pub(super) is_on_lines: bool,
}

/// What the end of a value ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Closes {
    Value,
    /// The value, and another parameter begins.
    ValueForNext,
    /// The value and its call.
    Call,
}

/// From the character after an opening marker on.
#[derive(Debug)]
pub(super) struct Tagged {
    tags: &'static Tags,
    at: At,
    scan: MarkerScan,
    /// The opening tag that is being read.
    head: String,
    name: String,
    /// The call has left. One without a section around it waits for a second tag.
    is_announced: bool,
    has_section: bool,
    is_settled: bool,
    parameters: Parameters,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Between calls.
    Section,
    /// Within the opening tag of a call.
    Call,
    /// Between parameters.
    Body,
    /// Within the opening tag of a parameter.
    Parameter,
    /// At the first character of a value.
    ValueStart,
    Value,
}

impl Tagged {
    /// `opening` is the tag of a section or of a call.
    pub(super) fn new(tags: &'static Tags, opening: &str) -> Self {
        let has_section = opening != tags.call;
        Self {
            tags,
            at: if has_section { At::Section } else { At::Call },
            scan: MarkerScan::default(),
            head: String::new(),
            name: String::new(),
            is_announced: false,
            has_section,
            is_settled: false,
            parameters: Parameters::default(),
        }
    }

    fn push_in_section(&mut self, c: char) -> Step {
        self.scan.push(c);
        let mut markers = vec![self.tags.call];
        markers.extend(self.tags.section_closes);
        loop {
            match self.scan.next(&markers) {
                Scan::Wait => return Step::Going,
                Scan::Text(c) if c.is_whitespace() => {}
                Scan::Text(_) => return Step::NotACall,
                Scan::Marker(0) => {
                    self.begin_head(At::Call);
                    self.is_announced = false;
                    self.parameters = Parameters::default();
                    return Step::Going;
                }
                Scan::Marker(_) if self.is_settled => return Step::Done,
                Scan::Marker(_) => return Step::NotACall,
            }
        }
    }

    fn begin_head(&mut self, at: At) {
        self.at = at;
        self.head.clear();
    }

    /// An opening tag up to its `>`. False if it can't be one.
    fn push_in_head(&mut self, c: char) -> bool {
        self.head.push(c);
        self.head.len() <= NAME_BYTES_MAX && !matches!(c, '\n' | '<')
    }

    fn announce(&mut self, sink: &mut Sink<'_>) {
        if !self.is_announced {
            self.is_announced = true;
            sink.call(&self.name, None);
        }
    }

    fn push_in_call_tag(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        if c != '>' {
            return if self.push_in_head(c) { Step::Going } else { Step::NotACall };
        }
        let (name, _) = name_and_attributes(&self.head);
        if name.is_empty() {
            return Step::NotACall;
        }
        self.name = name.to_owned();
        self.at = At::Body;
        if self.has_section {
            self.announce(sink);
        }
        Step::Going
    }

    fn push_in_body(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        self.scan.push(c);
        let mut markers = vec![self.tags.parameter, self.tags.call_close];
        markers.extend(self.tags.section_closes);
        loop {
            match self.scan.next(&markers) {
                Scan::Wait => return Step::Going,
                Scan::Text(c) if c.is_whitespace() => {}
                Scan::Text(_) if !self.is_announced => return Step::NotACall,
                Scan::Text(c) => {
                    self.parameters.close(sink);
                    return Step::Before(format!("{c}{}", self.scan.take()));
                }
                Scan::Marker(0) => {
                    self.announce(sink);
                    self.begin_head(At::Parameter);
                    return Step::Going;
                }
                Scan::Marker(1) => return self.end_call(sink),
                Scan::Marker(_) if self.has_section => {
                    self.parameters.close(sink);
                    return Step::Done;
                }
                Scan::Marker(_) => return Step::NotACall,
            }
        }
    }

    fn end_call(&mut self, sink: &mut Sink<'_>) -> Step {
        self.announce(sink);
        self.parameters.close(sink);
        self.is_settled = true;
        self.at = At::Section;
        Step::Settled
    }

    fn push_in_parameter_tag(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        if c != '>' {
            if self.push_in_head(c) {
                return Step::Going;
            }
            self.parameters.close(sink);
            return Step::Before(format!("{}{}", self.tags.parameter, self.head));
        }
        let (key, attributes) = name_and_attributes(&self.head);
        let kind = kind_of(Kind::declared(sink, &self.name, key), attributes);
        self.parameters.begin(key, kind, sink);
        self.at = At::ValueStart;
        Step::Going
    }

    fn push_in_value(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        if self.at == At::ValueStart {
            self.at = At::Value;
            if self.tags.is_on_lines && c == '\n' {
                return Step::Going;
            }
        }
        if self.parameters.is_in_string() {
            return self.parameters.push_in_string(c, sink).map_or(Step::Going, Step::Again);
        }
        self.scan.push(c);
        loop {
            match self.scan.next(self.tags.value_ends) {
                Scan::Wait => return Step::Going,
                Scan::Text(c) => self.parameters.push(c, sink),
                Scan::Marker(index) => {
                    self.parameters.end(sink);
                    match self.tags.closes[index] {
                        Closes::Value => self.at = At::Body,
                        Closes::ValueForNext => self.begin_head(At::Parameter),
                        Closes::Call => return self.end_call(sink),
                    }
                    return Step::Going;
                }
            }
        }
    }
}

impl Format for Tagged {
    fn push(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        match self.at {
            At::Section => self.push_in_section(c),
            At::Call => self.push_in_call_tag(c, sink),
            At::Body => self.push_in_body(c, sink),
            At::Parameter => self.push_in_parameter_tag(c, sink),
            At::ValueStart | At::Value => self.push_in_value(c, sink),
        }
    }

    fn finish(&mut self, end: AnswerEnd, sink: &mut Sink<'_>) -> Left {
        match self.at {
            At::Section if self.is_settled => Left::Frame,
            _ if !self.is_announced => Left::unnamed(end),
            At::Body => self.parameters.end_answer(end, sink),
            // A key that is cut off says nothing, and closing the object would say that it wasn't there.
            At::Section | At::Call | At::Parameter => Left::CutCall,
            At::ValueStart | At::Value => self.parameters.cut(end, &self.scan.take(), sink),
        }
    }
}

/// `NAME`, or `NAME" further="attributes"`.
fn name_and_attributes(head: &str) -> (&str, &str) {
    let (name, attributes) = head.split_once('"').unwrap_or((head, ""));
    (name.trim(), attributes)
}

/// DSML says beside each parameter whether it is a string. A declaration that leaves no choice counts more.
fn kind_of(declared: Option<Kind>, attributes: &str) -> Kind {
    let says = |value: &str| attributes.contains(&format!("string=\"{value}\""));
    match declared {
        None | Some(Kind::TextOr(_)) if says("true") => Kind::Text,
        None | Some(Kind::TextOr(_)) if says("false") => Kind::Json,
        declared => declared.unwrap_or_default(),
    }
}
