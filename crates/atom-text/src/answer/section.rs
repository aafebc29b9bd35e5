//! Formats with a section of calls, each a name and the JSON of its arguments between markers.

use super::AnswerEnd;
use super::arguments::{ArgumentStep, Arguments};
use super::end::Left;
use super::format::{Format, Sink, Step};
use super::marker::{MarkerScan, Scan};
use super::name::NAME_BYTES_MAX;

/// The markers of one format.
#[derive(Debug)]
pub(super) struct Markers {
    pub(super) call: &'static str,
    /// What stands between the head of a call and the rest.
    pub(super) separator: &'static str,
    /// What ends a call, and then what ends sections.
    pub(super) ends: &'static [&'static str],
    pub(super) head: Head,
}

/// Where the name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// Before the separator.
    Name,
    /// Before the separator, as `functions.NAME:NUMBER`, which is the id as well.
    NumberedName,
    /// Behind the separator, on a line of its own before fenced arguments.
    Line,
}

/// From the character after the opening marker on.
#[derive(Debug)]
pub(super) struct Section {
    markers: &'static Markers,
    at: At,
    head: String,
    scan: MarkerScan,
    is_settled: bool,
}

#[derive(Debug)]
enum At {
    /// Between calls.
    Section,
    Head,
    Line,
    /// Before fenced arguments.
    Fence,
    Arguments(Arguments),
}

impl Section {
    pub(super) fn new(markers: &'static Markers) -> Self {
        Self { markers, at: At::Section, head: String::new(), scan: MarkerScan::default(), is_settled: false }
    }

    fn push_in_section(&mut self, c: char) -> Step {
        let calls = self.markers.ends.len();
        let mut markers = self.markers.ends.to_vec();
        markers.push(self.markers.call);
        self.scan.push(c);
        loop {
            match self.scan.next(&markers) {
                Scan::Wait => return Step::Going,
                // The fence of arguments ends here too.
                Scan::Text(c) if c.is_whitespace() || (c == '`' && self.is_settled) => {}
                Scan::Text(_) => return Step::NotACall,
                Scan::Marker(index) if index == calls => {
                    self.at = At::Head;
                    self.head.clear();
                    return Step::Going;
                }
                Scan::Marker(_) if !self.is_settled => return Step::NotACall,
                Scan::Marker(0) => return Step::Settled,
                Scan::Marker(_) => return Step::Done,
            }
        }
    }

    fn push_in_head(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        self.scan.push(c);
        loop {
            match self.scan.next(&[self.markers.separator]) {
                Scan::Wait => return Step::Going,
                Scan::Text(c) => {
                    self.head.push(c);
                    if c == '\n' || self.head.len() > NAME_BYTES_MAX {
                        return Step::NotACall;
                    }
                }
                Scan::Marker(_) if self.markers.head == Head::Line => {
                    self.head.clear();
                    self.at = At::Line;
                    return Step::Going;
                }
                Scan::Marker(_) => return self.announce(sink),
            }
        }
    }

    fn push_in_line(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        if c == '\n' {
            let step = self.announce(sink);
            self.at = At::Fence;
            return step;
        }
        self.head.push(c);
        if self.head.len() > NAME_BYTES_MAX { Step::NotACall } else { Step::Going }
    }

    fn announce(&mut self, sink: &mut Sink<'_>) -> Step {
        let head = self.head.trim();
        let (name, id) = match self.markers.head {
            Head::NumberedName => numbered_name(head),
            Head::Name | Head::Line => (head, None),
        };
        if name.is_empty() {
            return Step::NotACall;
        }
        sink.call(name, id);
        self.begin_arguments();
        Step::Going
    }

    fn begin_arguments(&mut self) {
        self.at = At::Arguments(Arguments::new(self.markers.ends));
    }

    fn settle(&mut self) -> Step {
        self.is_settled = true;
        self.at = At::Section;
        Step::Settled
    }
}

impl Format for Section {
    fn push(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        match &mut self.at {
            At::Section => self.push_in_section(c),
            At::Head => self.push_in_head(c, sink),
            At::Line => self.push_in_line(c, sink),
            At::Fence if "`json \n".contains(c) => Step::Going,
            At::Fence => {
                self.begin_arguments();
                self.push(c, sink)
            }
            At::Arguments(arguments) => match arguments.push(c, sink) {
                ArgumentStep::Going => Step::Going,
                ArgumentStep::Whole | ArgumentStep::Ended(0) => self.settle(),
                ArgumentStep::Ended(_) => Step::Done,
            },
        }
    }

    fn finish(&mut self, end: AnswerEnd, sink: &mut Sink<'_>) -> Left {
        match &mut self.at {
            At::Section if self.is_settled => Left::Frame,
            At::Section | At::Head | At::Line => Left::unnamed(end),
            At::Fence => Arguments::new(self.markers.ends).end(end, sink),
            At::Arguments(arguments) => arguments.end(end, sink),
        }
    }
}

/// `functions.NAME:NUMBER`. Without a number it is a name and no id; a number alone names nothing.
fn numbered_name(head: &str) -> (&str, Option<&str>) {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (name, id) = match head.rsplit_once(':') {
        Some((name, number)) if is_number(number) => (name, Some(head)),
        _ if is_number(head) => ("", None),
        _ => (head, None),
    };
    (name.strip_prefix("functions.").unwrap_or(name), id)
}
