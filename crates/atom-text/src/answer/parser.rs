//! One answer, character by character.

use super::format::{Format, Sink, Step};
use super::marker::{MarkerScan, Scan};
use super::{AnswerPart, AnswerStart, Dialect, ReasoningFormat, Tool, ToolFormat};
use std::sync::Arc;

/// Cuts the text of one choice into parts.
#[derive(Debug)]
pub struct AnswerParser {
    reasoning: Option<(&'static str, &'static str)>,
    /// Tool calls end reasoning that wasn't closed.
    is_reasoning_open_to_tools: bool,
    format: Option<ToolFormat>,
    tools: Arc<[Tool]>,
    is_reasoning: bool,
    blanks: Blanks,
    /// Nothing but white space came since the beginning, the end of reasoning or a call.
    is_first: bool,
    /// The character before the one that is read.
    last: Option<char>,
    scan: MarkerScan,
    attempt: Option<Attempt>,
    /// Characters to read again, the next one last.
    again: Vec<char>,
    calls: u32,
}

/// What happens to white space until the next other character.
#[derive(Debug)]
enum Blanks {
    /// It is text.
    Keep,
    /// It separates a marker from text, and is dropped.
    Drop,
    /// It is text if text follows, and dropped if a marker does.
    Hold { held: String, at_end: AtEnd },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AtEnd {
    Emit,
    Drop,
}

/// What may be tool calls.
#[derive(Debug)]
struct Attempt {
    format: Box<dyn Format>,
    /// What has been read and belongs to no call yet, for the case that it is text.
    raw: String,
    /// How much of `raw` is the opening marker, which isn't read again.
    marker_bytes: usize,
    is_recording: bool,
}

impl AnswerParser {
    /// A parser for which everything is content.
    pub fn plain() -> Self {
        Self::new(Dialect::default(), AnswerStart::Content, Arc::new([]))
    }

    /// A parser for one choice. Without tools, their markers are content.
    pub fn new(dialect: Dialect, start: AnswerStart, tools: Arc<[Tool]>) -> Self {
        let reasoning = dialect.reasoning.and_then(ReasoningFormat::tags);
        let is_reasoning = start == AnswerStart::Reasoning && reasoning.is_some();
        let format = dialect.tools.filter(|_| !tools.is_empty());
        let blanks = match (is_reasoning, reasoning.is_some() || format.is_some()) {
            (true, _) => Blanks::Drop,
            (false, true) => Blanks::Hold { held: String::new(), at_end: AtEnd::Emit },
            (false, false) => Blanks::Keep,
        };
        Self {
            reasoning,
            is_reasoning_open_to_tools: dialect.reasoning == Some(ReasoningFormat::KimiK2),
            format,
            tools,
            is_reasoning,
            blanks,
            is_first: true,
            last: None,
            scan: MarkerScan::default(),
            attempt: None,
            again: Vec::new(),
            calls: 0,
        }
    }

    /// True while what comes next is reasoning, unless a marker ends it.
    pub fn is_reasoning(&self) -> bool {
        self.is_reasoning
    }

    /// How many calls have begun.
    pub fn calls(&self) -> u32 {
        self.calls
    }

    /// Reads the next piece of the answer and appends what is certain after it.
    pub fn push(&mut self, delta: &str, out: &mut Vec<AnswerPart>) {
        for c in delta.chars() {
            self.again.push(c);
            self.read(out);
        }
    }

    /// The end of the answer: closes the open call, and gives out what was held back.
    pub fn finish(&mut self, out: &mut Vec<AnswerPart>) {
        while let Some(mut attempt) = self.attempt.take() {
            let mut sink = Sink { out, calls: &mut self.calls, tools: &self.tools };
            if !attempt.format.finish(&mut sink) {
                self.read_as_text(&attempt.raw, attempt.marker_bytes, out);
                self.read(out);
            }
        }
        for c in self.scan.take().chars() {
            self.text(c, out);
        }
        if let Blanks::Hold { held, at_end: AtEnd::Emit } = std::mem::replace(&mut self.blanks, Blanks::Keep)
        {
            self.emit(&held, out);
        }
    }

    fn read(&mut self, out: &mut Vec<AnswerPart>) {
        while let Some(c) = self.again.pop() {
            if self.attempt.is_some() {
                self.read_in_attempt(c, out);
            } else {
                self.read_outside(c, out);
            }
            self.last = Some(c);
        }
    }

    fn read_outside(&mut self, c: char, out: &mut Vec<AnswerPart>) {
        self.scan.push(c);
        loop {
            let markers = self.markers();
            match self.scan.next(&markers) {
                Scan::Wait => return,
                Scan::Text(c) => self.text(c, out),
                Scan::Marker(index) => return self.marker(markers[index]),
            }
        }
    }

    /// The markers that mean something here.
    fn markers(&self) -> Vec<&'static str> {
        let mut markers = Vec::new();
        if let Some((open, close)) = self.reasoning {
            markers.push(if self.is_reasoning { close } else { open });
        }
        if let Some(format) = self.format
            && (!self.is_reasoning || self.is_reasoning_open_to_tools)
        {
            markers.extend(format.openings());
            if self.is_first && !self.is_reasoning {
                markers.extend(format.first_openings());
            }
        }
        markers
    }

    fn marker(&mut self, marker: &'static str) {
        match (self.reasoning, self.format) {
            (Some((open, _)), _) if marker == open => {
                self.is_reasoning = true;
                self.blanks = Blanks::Drop;
            }
            (Some((_, close)), _) if marker == close => {
                self.is_reasoning = false;
                self.is_first = true;
                self.blanks = Blanks::Drop;
            }
            (_, Some(format)) => {
                self.attempt = Some(Attempt {
                    format: format.begin(marker),
                    raw: marker.to_owned(),
                    marker_bytes: marker.len(),
                    is_recording: true,
                });
            }
            (_, None) => unreachable!("only markers of the dialect are looked for"),
        }
    }

    fn read_in_attempt(&mut self, c: char, out: &mut Vec<AnswerPart>) {
        let Some(attempt) = &mut self.attempt else { return };
        if attempt.is_recording {
            attempt.raw.push(c);
        }
        let calls = self.calls;
        let step = attempt.format.push(c, &mut Sink { out, calls: &mut self.calls, tools: &self.tools });
        if self.calls != calls {
            self.is_reasoning = false;
            attempt.settle(false);
        }
        match step {
            Step::Going if attempt.raw.len() > UNDECIDED_BYTES_MAX => self.reject(out),
            Step::Going => {}
            Step::Settled => attempt.settle(true),
            Step::Done => self.leave(),
            Step::Before(text) => {
                self.leave();
                self.again.extend(text.chars().rev());
            }
            Step::NotACall => self.reject(out),
        }
    }

    /// Behind a call.
    fn leave(&mut self) {
        self.attempt = None;
        self.is_first = true;
        self.blanks = Blanks::Hold { held: String::new(), at_end: AtEnd::Drop };
    }

    /// What was read since the last call, or since the opening marker, is text.
    fn reject(&mut self, out: &mut Vec<AnswerPart>) {
        let Some(attempt) = self.attempt.take() else { return };
        if attempt.marker_bytes == 0 {
            self.leave();
        }
        self.read_as_text(&attempt.raw, attempt.marker_bytes, out);
    }

    fn read_as_text(&mut self, raw: &str, marker_bytes: usize, out: &mut Vec<AnswerPart>) {
        let (marker, rest) = raw.split_at(marker_bytes);
        for c in marker.chars() {
            self.text(c, out);
        }
        self.again.extend(rest.chars().rev());
    }

    /// A character that is no part of a marker.
    fn text(&mut self, c: char, out: &mut Vec<AnswerPart>) {
        if c.is_whitespace() {
            match &mut self.blanks {
                Blanks::Keep => {}
                Blanks::Drop => return,
                Blanks::Hold { held, .. } => {
                    held.push(c);
                    if held.len() < BLANKS_BYTES_MAX {
                        return;
                    }
                }
            }
        } else {
            self.is_first = false;
        }
        let blanks = std::mem::replace(&mut self.blanks, Blanks::Keep);
        if let Blanks::Hold { held, .. } = blanks {
            self.emit(&held, out);
            if c.is_whitespace() {
                return;
            }
        }
        self.emit(c.encode_utf8(&mut [0; 4]), out);
    }

    fn emit(&mut self, text: &str, out: &mut Vec<AnswerPart>) {
        let mut sink = Sink { out, calls: &mut self.calls, tools: &self.tools };
        for c in text.chars() {
            if self.is_reasoning {
                sink.reasoning(c);
            } else {
                sink.content(c);
            }
        }
    }
}

impl Attempt {
    fn settle(&mut self, is_recording: bool) {
        self.raw.clear();
        self.marker_bytes = 0;
        self.is_recording = is_recording;
    }
}

/// Bytes that may wait for the name of a call, or between two calls. In all published formats the name comes
/// first, so this is long for a name and short for a memory.
const UNDECIDED_BYTES_MAX: usize = 64 << 10;

/// Bytes of white space that are held to see whether a marker follows. Models write one or two line breaks;
/// more are no separation but text.
const BLANKS_BYTES_MAX: usize = 16;

#[cfg(test)]
mod tests;
