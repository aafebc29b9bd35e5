//! One answer, character by character.

use super::end::Left;
use super::format::{Format, Sink, Step};
use super::harmony::Harmony;
use super::marker::{MarkerScan, Scan};
use super::{AnswerEnd, AnswerPart, AnswerStart, Dialect, ReasoningFormat, Tool, ToolFormat};
use std::collections::HashSet;
use std::sync::Arc;

/// Cuts the text of one choice into parts.
#[derive(Debug)]
pub struct AnswerParser {
    reasoning: Option<(&'static str, &'static str)>,
    format: Option<ToolFormat>,
    tools: Arc<[Tool]>,
    /// Reads the whole answer instead, where it is a row of messages.
    harmony: Option<Harmony>,
    markers: MarkerSets,
    is_reasoning: bool,
    blanks: Blanks,
    /// Nothing but white space came since the beginning, the end of reasoning or a call.
    is_first: bool,
    /// Content that has begun goes on to the end of the answer.
    is_whole: bool,
    scan: MarkerScan,
    attempt: Option<Attempt>,
    /// Characters to read again, the next one last.
    again: Vec<char>,
    calls: u32,
    is_call_cut: bool,
    ids: HashSet<String>,
    /// Bytes of values that were read twice.
    reread: usize,
}

/// The markers that mean something, by place.
#[derive(Debug, Default)]
struct MarkerSets {
    /// Where nothing was said yet.
    first: Vec<&'static str>,
    content: Vec<&'static str>,
    reasoning: Vec<&'static str>,
}

/// What happens to white space until the next other character.
#[derive(Debug)]
enum Blanks {
    /// It is text.
    Keep,
    /// It separates a marker from text, and is dropped.
    Drop,
    /// This many line breaks separate a marker from the text of a format; blanks behind them are text.
    Lines(u8),
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

    /// A parser for one choice. Without tools, their markers are content. Harmony is a convention for whole
    /// answers: if either format is harmony, the other one only says whether that part is wanted.
    pub fn new(dialect: Dialect, start: AnswerStart, tools: Arc<[Tool]>) -> Self {
        let reasoning = dialect.reasoning.and_then(ReasoningFormat::tags);
        let is_reasoning = start == AnswerStart::Reasoning && reasoning.is_some();
        let format = dialect.tools.filter(|_| !tools.is_empty());
        let is_harmony =
            dialect.reasoning == Some(ReasoningFormat::Harmony) || dialect.tools == Some(ToolFormat::Harmony);
        let blanks = match (is_reasoning, reasoning.is_some() || format.is_some()) {
            (true, _) => Blanks::Drop,
            (false, true) => Blanks::Hold { held: String::new(), at_end: AtEnd::Emit },
            (false, false) => Blanks::Keep,
        };
        Self {
            reasoning,
            format,
            tools,
            harmony: is_harmony.then(|| Harmony::new(dialect.reasoning.is_some(), format.is_some(), start)),
            markers: MarkerSets::new(dialect.reasoning, format),
            is_reasoning,
            blanks,
            is_first: true,
            is_whole: false,
            scan: MarkerScan::default(),
            attempt: None,
            again: Vec::new(),
            calls: 0,
            is_call_cut: false,
            ids: HashSet::new(),
            reread: 0,
        }
    }

    /// An answer that is content of a format once it has begun, whatever markers that holds: as part of a JSON string,
    /// a tag is a text. Harmony's messages say by themselves what is content.
    pub fn with_whole_content(mut self) -> Self {
        self.is_whole = true;
        self
    }

    /// True while what comes next is reasoning, unless a marker ends it.
    pub fn is_reasoning(&self) -> bool {
        self.harmony.as_ref().map_or(self.is_reasoning, Harmony::is_reasoning)
    }

    /// True if the answer ended within the arguments of its last call.
    pub fn is_call_cut(&self) -> bool {
        self.is_call_cut
    }

    /// How many calls have begun.
    pub fn calls(&self) -> u32 {
        self.calls
    }

    /// Reads the next piece of the answer and appends what is certain after it.
    pub fn push(&mut self, delta: &str, out: &mut Vec<AnswerPart>) {
        if let Some(harmony) = &mut self.harmony {
            let mut sink = Sink {
                out,
                calls: &mut self.calls,
                ids: &mut self.ids,
                reread: &mut self.reread,
                tools: &self.tools,
            };
            delta.chars().for_each(|c| harmony.push(c, &mut sink));
            return;
        }
        let mut rest = delta;
        while !rest.is_empty() {
            let (text, after) = rest.split_at(self.running_text(rest));
            self.emit(text, out);
            let mut chars = after.chars();
            if let Some(c) = chars.next() {
                self.again.push(c);
                self.read(out);
            }
            rest = chars.as_str();
        }
    }

    /// How many bytes at the beginning can't begin a marker, in the middle of text. They would be read to the
    /// same end one by one.
    fn running_text(&self, text: &str) -> usize {
        if self.attempt.is_some() || self.scan.is_holding() || self.is_first {
            return 0;
        }
        let Blanks::Keep = self.blanks else { return 0 };
        let markers = self.markers.here(self.is_reasoning, self.is_first);
        text.find(|c| markers.iter().any(|marker| marker.starts_with(c))).unwrap_or(text.len())
    }

    /// The end of the answer: closes the open call if the model ended it, and gives out what was held back.
    pub fn finish(&mut self, end: AnswerEnd, out: &mut Vec<AnswerPart>) {
        if let Some(mut harmony) = self.harmony.take() {
            let mut sink = Sink {
                out,
                calls: &mut self.calls,
                ids: &mut self.ids,
                reread: &mut self.reread,
                tools: &self.tools,
            };
            self.is_call_cut = harmony.finish(end, &mut sink) == Left::CutCall;
            return;
        }
        while let Some(mut attempt) = self.attempt.take() {
            let mut sink = Sink {
                out,
                calls: &mut self.calls,
                ids: &mut self.ids,
                reread: &mut self.reread,
                tools: &self.tools,
            };
            let left = attempt.format.finish(end, &mut sink);
            self.is_call_cut = left == Left::CutCall;
            match left {
                Left::Text => {
                    if attempt.marker_bytes == 0 {
                        self.leave();
                    }
                    self.read_as_text(&attempt.raw, attempt.marker_bytes, out);
                    self.read(out);
                }
                Left::Again(text) => {
                    self.attempt = Some(attempt);
                    self.again.extend(text.chars().rev());
                    self.read(out);
                }
                Left::Frame | Left::Call | Left::CutCall => {}
            }
        }
        for c in end.held(self.scan.take()).chars() {
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
        }
    }

    fn read_outside(&mut self, c: char, out: &mut Vec<AnswerPart>) {
        self.scan.push(c);
        loop {
            let markers = self.markers.here(self.is_reasoning, self.is_first);
            match self.scan.next(markers) {
                Scan::Wait => return,
                Scan::Text(c) => self.text(c, out),
                Scan::Marker(index) => {
                    let marker = markers[index];
                    return self.marker(marker);
                }
            }
        }
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
                self.blanks = if self.is_whole { Blanks::Lines(LINES_BEHIND_THOUGHTS) } else { Blanks::Drop };
            }
            _ => {
                let format = self.format.and_then(|format| format.begin(marker));
                self.attempt = format.map(|format| Attempt {
                    format,
                    raw: marker.to_owned(),
                    marker_bytes: marker.len(),
                    is_recording: true,
                });
            }
        }
    }

    fn read_in_attempt(&mut self, c: char, out: &mut Vec<AnswerPart>) {
        let Some(attempt) = &mut self.attempt else { return };
        if attempt.is_recording {
            attempt.raw.push(c);
        }
        let calls = self.calls;
        let step = attempt.format.push(
            c,
            &mut Sink {
                out,
                calls: &mut self.calls,
                ids: &mut self.ids,
                reread: &mut self.reread,
                tools: &self.tools,
            },
        );
        if self.calls != calls {
            attempt.settle(false);
            self.is_reasoning = false;
            // White space before a call separates it, and is no text.
            self.blanks = Blanks::Hold { held: String::new(), at_end: AtEnd::Drop };
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
            Step::Again(text) => self.again.extend(text.chars().rev()),
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
                Blanks::Lines(left @ 1..) if c == '\n' => {
                    *left -= 1;
                    return;
                }
                // A call may follow all the same.
                Blanks::Lines(_) => {
                    self.blanks = Blanks::Hold { held: c.into(), at_end: AtEnd::Emit };
                    return;
                }
                Blanks::Hold { held, .. } => {
                    held.push(c);
                    if held.len() < BLANKS_BYTES_MAX {
                        return;
                    }
                }
            }
        } else {
            self.is_first = false;
            if self.is_whole && !self.is_reasoning {
                self.markers = MarkerSets::default();
            }
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
        let mut sink = Sink {
            out,
            calls: &mut self.calls,
            ids: &mut self.ids,
            reread: &mut self.reread,
            tools: &self.tools,
        };
        if self.is_reasoning {
            sink.reasoning(text);
        } else {
            sink.content(text);
        }
    }
}

impl MarkerSets {
    fn new(reasoning: Option<ReasoningFormat>, format: Option<ToolFormat>) -> Self {
        let tags = reasoning.and_then(ReasoningFormat::tags);
        let openings = format.map_or(&[][..], ToolFormat::openings);
        // In the middle of a text an opening tag is quoted: models think before they speak or call.
        let content = openings.to_vec();
        let mut in_reasoning: Vec<_> = tags.iter().map(|(_, close)| *close).collect();
        // Kimi calls tools without closing its reasoning before. Elsewhere a call in reasoning is a thought.
        if reasoning == Some(ReasoningFormat::KimiK2) {
            in_reasoning.extend(openings);
        }
        let mut first: Vec<_> = tags.iter().map(|(open, _)| *open).chain(openings.iter().copied()).collect();
        // A closing tag before anything else is the end of reasoning that the template has closed already.
        first.extend(tags.iter().map(|(_, close)| *close));
        first.extend(format.map_or(&[][..], ToolFormat::first_openings));
        Self { first, content, reasoning: in_reasoning }
    }

    fn here(&self, is_reasoning: bool, is_first: bool) -> &[&'static str] {
        match (is_reasoning, is_first) {
            (true, _) => &self.reasoning,
            (false, true) => &self.first,
            (false, false) => &self.content,
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

/// Line breaks between thoughts and a text of a format, as the grammar of such an answer has them.
const LINES_BEHIND_THOUGHTS: u8 = 2;

/// Bytes of white space that are held to see whether a marker follows. Models write one or two line breaks;
/// more are no separation but text.
const BLANKS_BYTES_MAX: usize = 16;

#[cfg(test)]
mod tests;
