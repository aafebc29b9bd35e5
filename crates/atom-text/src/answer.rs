//! What an answer says beside its text: reasoning and tool calls.
//!
//! A model writes one stream of characters. What of it is reasoning, what a call of a function and what is
//! meant for the reader is marked in the text, and every family of models marks it otherwise. A [`Dialect`]
//! names the two conventions of a checkpoint, an [`AnswerParser`] cuts one answer into [`AnswerPart`]s.
//!
//! * The parts don't depend on how the text was cut into deltas: the parser decides after every character,
//!   from the characters so far and nothing else, so there is no second way of reading.
//! * Text is held back only while it could still be the beginning of a marker, or of a call whose name
//!   isn't known yet.
//! * Nothing is lost and nothing invented. What looks like a call and turns out to be none is text.
//!   Arguments are the characters that the model wrote; only formats that write them as tags are brought to
//!   JSON, with the types that the tool declares. Left out are the markers themselves and white space
//!   beside them.
//! * Where an answer is [cut](AnswerEnd::Cut), its parts are a beginning of what they would have been: nothing is
//!   added to a call, and the beginning of a marker, or of a call that has no name yet, is left out.

mod arguments;
mod deepseek_v3;
mod deepseek_v31;
mod deepseek_v4;
mod dialect;
mod end;
mod format;
mod glm45;
mod grammar;
mod harmony;
mod hermes;
mod json;
mod json_call;
mod kimi_k2;
mod llama3_json;
mod marker;
mod minimax_m2;
mod mistral;
mod name;
mod parameters;
mod parser;
mod qwen3_coder;
mod reasoning;
mod section;
mod tagged;

pub use dialect::{AnswerStart, Dialect, ToolFormat};
pub use end::AnswerEnd;
pub use grammar::{Calls, Instead};
pub use parser::AnswerParser;
pub use reasoning::ReasoningFormat;

use serde_json::Value;

/// One function that the client offers.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// What the model calls it by.
    pub name: String,
    /// What it does, for the model.
    pub description: Option<String>,
    /// JSON schema of the arguments; `{}` if there is none.
    pub parameters: Value,
    /// Arguments must follow the schema.
    pub strict: bool,
}

/// A piece of an answer. Adjacent pieces of one kind concatenate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// Text for the reader.
    Content(String),
    /// What the model thought before or between.
    Reasoning(String),
    /// A call begins. Calls are numbered in order from 0, and each begins once.
    Call {
        /// Number of the call within the answer.
        index: u32,
        /// The id that the model itself gave, in formats that have one.
        id: Option<String>,
        /// The function, offered or not.
        name: String,
    },
    /// The next piece of the arguments of the call that began last. Concatenated they are the JSON object
    /// that the model wrote. Where the model ends a call or its answer too early, missing closing brackets
    /// are added if nothing else is missing; arguments that end within a string, a number or a key stay cut
    /// off. Where the answer is cut within a call, nothing is added, so that there may be no piece at all.
    Arguments {
        /// Number of the call.
        index: u32,
        /// A piece of JSON text.
        json: String,
    },
}
