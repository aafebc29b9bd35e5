//! What every format of tool calls is to the parser: an automaton that reads characters.

use super::end::Left;
use super::{AnswerEnd, AnswerPart, Tool};
use std::collections::HashSet;
use std::fmt::Debug;

/// Reads the calls of one format, from the character after an opening marker on.
pub(super) trait Format: Debug + Send + Sync {
    /// Takes the next character.
    fn push(&mut self, c: char, sink: &mut Sink<'_>) -> Step;

    /// The answer ends here. Closes the open call if the model ended it.
    fn finish(&mut self, end: AnswerEnd, sink: &mut Sink<'_>) -> Left;
}

/// What a character was to a format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A part of it.
    Going,
    /// A part of it, and the end of a call. Another may follow; what comes from here on is text if not.
    Settled,
    /// The last part of it.
    Done,
    /// No part of it: the last call ended before this text, which is to be read again.
    Before(String),
    /// The format is to read this text once more, which is another thing than it seemed.
    Again(String),
    /// What came since the opening marker, or since the last settled call, is no call.
    NotACall,
}

/// Where parts go.
#[derive(Debug)]
pub(super) struct Sink<'a> {
    pub(super) out: &'a mut Vec<AnswerPart>,
    pub(super) calls: &'a mut u32,
    /// Those that the model gave to calls of this answer.
    pub(super) ids: &'a mut HashSet<String>,
    /// Bytes of this answer that were read twice.
    pub(super) reread: &'a mut usize,
    pub(super) tools: &'a [Tool],
}

impl Sink<'_> {
    pub(super) fn content(&mut self, piece: &str) {
        match self.out.last_mut() {
            _ if piece.is_empty() => {}
            Some(AnswerPart::Content(text)) => text.push_str(piece),
            _ => self.out.push(AnswerPart::Content(piece.to_owned())),
        }
    }

    pub(super) fn reasoning(&mut self, piece: &str) {
        match self.out.last_mut() {
            _ if piece.is_empty() => {}
            Some(AnswerPart::Reasoning(text)) => text.push_str(piece),
            _ => self.out.push(AnswerPart::Reasoning(piece.to_owned())),
        }
    }

    pub(super) fn call(&mut self, name: &str, id: Option<&str>) {
        // Models number their calls, and some always with 0: an id that came before is none.
        let id = id.filter(|id| self.ids.insert((*id).to_owned()));
        self.out.push(AnswerPart::Call {
            index: *self.calls,
            id: id.map(str::to_owned),
            name: name.to_owned(),
        });
        *self.calls += 1;
    }

    /// Arguments of the call that began last.
    pub(super) fn arguments(&mut self, piece: &str) {
        if piece.is_empty() {
            return;
        }
        match self.out.last_mut() {
            Some(AnswerPart::Arguments { json, .. }) => json.push_str(piece),
            _ => {
                let index = self.calls.checked_sub(1).expect("arguments follow a call");
                self.out.push(AnswerPart::Arguments { index, json: piece.to_owned() });
            }
        }
    }

    pub(super) fn tool(&self, name: &str) -> Option<&Tool> {
        self.tools.iter().find(|tool| tool.name == name)
    }
}
