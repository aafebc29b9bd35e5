//! What an answer says: text, reasoning, calls of tools.

use serde_json::Value;

/// One function that the client offers to the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// By which it is called.
    pub name: String,
    /// What it is good for.
    pub description: Option<String>,
    /// JSON schema of its arguments; `{}` takes anything.
    pub parameters: Value,
    /// Arguments must follow the schema.
    pub strict: bool,
}

/// A piece of an answer. Adjacent pieces of one kind concatenate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// Text for the reader.
    Content(String),
    /// What the model thinks before it answers.
    Reasoning(String),
    /// A call begins: 0, 1, 2 .. in order, once each.
    Call {
        /// Place among the calls of the answer.
        index: u32,
        /// Only where the model's format has ids of its own.
        id: Option<String>,
        /// The tool's.
        name: String,
    },
    /// The next piece of the JSON text of a call's arguments.
    Arguments {
        /// The call's.
        index: u32,
        /// Concatenated: one JSON object.
        json: String,
    },
}

/// Takes the text of one answer apart as it comes. The parts don't depend on how it was cut into deltas.
#[derive(Clone, Debug, Default)]
pub struct AnswerParser {
    calls: u32,
}

impl AnswerParser {
    /// Everything is content.
    pub fn plain() -> Self {
        Self::default()
    }

    /// Takes the next delta and appends what became sure.
    pub fn push(&mut self, delta: &str, out: &mut Vec<AnswerPart>) {
        if !delta.is_empty() {
            out.push(AnswerPart::Content(delta.to_owned()));
        }
    }

    /// The end of the answer: what was held back.
    pub fn finish(&mut self, _out: &mut Vec<AnswerPart>) {}

    /// Calls that began so far.
    pub fn calls(&self) -> u32 {
        self.calls
    }
}
