//! Arguments that the model writes as JSON, passed on as they come.

use super::AnswerEnd;
use super::end::Left;
use super::format::Sink;
use super::json::{JsonText, Took};
use super::marker::{MarkerScan, Scan};

/// Passes one JSON object on. It ends with its last bracket; a marker outside of strings ends it earlier,
/// and what isn't an object at all.
#[derive(Clone, Debug)]
pub(super) struct Arguments {
    value: JsonText,
    is_object: bool,
    /// Markers that end the call, whatever the state of the object.
    ends: &'static [&'static str],
    scan: MarkerScan,
}

/// What a character was to the arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArgumentStep {
    /// A part of them.
    Going,
    /// Their last character.
    Whole,
    /// The last one of the marker with this index, which ended them.
    Ended(usize),
}

impl Arguments {
    pub(super) fn new(ends: &'static [&'static str]) -> Self {
        Self { value: JsonText::default(), is_object: false, ends, scan: MarkerScan::default() }
    }

    pub(super) fn push(&mut self, c: char, sink: &mut Sink<'_>) -> ArgumentStep {
        if self.is_object && self.value.is_in_string() {
            return self.pass(c, sink);
        }
        self.scan.push(c);
        loop {
            match self.scan.next(self.ends) {
                Scan::Wait => return ArgumentStep::Going,
                Scan::Marker(index) => {
                    self.finish(sink);
                    return ArgumentStep::Ended(index);
                }
                // The end of the object is a bracket, which begins no marker, so nothing is left to ask for.
                Scan::Text(c) => match self.pass(c, sink) {
                    ArgumentStep::Going => {}
                    step => return step,
                },
            }
        }
    }

    fn pass(&mut self, c: char, sink: &mut Sink<'_>) -> ArgumentStep {
        let is_first = !self.value.is_begun();
        if is_first && c.is_whitespace() {
            return ArgumentStep::Going;
        }
        self.is_object |= is_first && c == '{';
        sink.arguments(c.encode_utf8(&mut [0; 4]));
        if self.value.push(c) == Took::End && self.is_object {
            return ArgumentStep::Whole;
        }
        ArgumentStep::Going
    }

    /// The answer ends here.
    pub(super) fn end(&mut self, end: AnswerEnd, sink: &mut Sink<'_>) -> Left {
        // A bracket that could have opened a marker is one of the object.
        if self.scan.take() == "[" {
            self.pass('[', sink);
        }
        match end {
            AnswerEnd::Whole => {
                self.finish(sink);
                Left::Call
            }
            AnswerEnd::Cut => Left::CutCall,
        }
    }

    /// The model has ended the call. Adds closing brackets if nothing else is missing.
    fn finish(&mut self, sink: &mut Sink<'_>) {
        if !self.value.is_begun() {
            sink.arguments("{}");
        } else if let Some(brackets) = self.value.missing_brackets().filter(|_| self.is_object) {
            sink.arguments(&brackets);
        }
    }
}
