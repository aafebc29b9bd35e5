//! Text in, tokens out, and back: the tokenizer, the incremental detokenizer, stop strings and chat
//! templates of a checkpoint.
//!
//! * [`Tokenizer`] encodes with the rules of the checkpoint's own tokenizer, read from a
//!   `tokenizer.json` or rebuilt from the metadata of a GGUF file ([`TokenizerSource`]). Only byte-level
//!   BPE is supported: there every token is a string of bytes, which makes decoding a concatenation.
//! * [`TokenCache`] encodes as well, and remembers: a prompt that begins with an earlier one costs its new end.
//! * [`Detokenizer`] turns one continuation into text deltas. It works on bytes, holds back at most
//!   three of them (a character that isn't complete yet), and its deltas always concatenate to
//!   [`Tokenizer::decode`] of the whole.
//! * [`StopStrings`] cuts a stream of deltas at the first stop string. The result doesn't depend on how
//!   the text was cut into deltas.
//! * [`AnswerParser`] cuts an answer into what it says: text, reasoning, tool calls. [`Dialect`] names the
//!   conventions of a checkpoint, found by rendering its template.
//! * [`ChatTemplate`] renders messages with the checkpoint's Jinja template, in an environment that
//!   behaves like the one of Python's transformers, within a bound on work and on output.
//! * [`GrammarVocabulary`] compiles what a continuation may look like (a JSON schema, a regular
//!   expression ..) to a [`Grammar`], whose [`Constraint`]s say which tokens may come next.
//!
//! The way of a chat request is: [`flatten_messages`], [`ChatTemplate::render`], [`Tokenizer::encode`]
//! without added special tokens (the template wrote them), the engine, [`Detokenizer`],
//! [`StopStrings`], [`AnswerParser`]. A plain completion is encoded with added special tokens, and only there does the
//! tokenizer put a BOS in front.
//!
//! What this crate must never know: HTTP, the engine, sampling, devices, and the clock (the time that a
//! template prints is a parameter). It reads files once, while loading.

#![forbid(unsafe_code)]

mod answer;
mod cache;
mod content;
mod detokenizer;
mod error;
mod folder;
mod gguf;
mod grammar;
mod pieces;
mod source;
mod stop;
mod template;
#[cfg(test)]
mod testing;
mod tokenizer;

pub use answer::{
    AnswerEnd, AnswerParser, AnswerPart, AnswerStart, Calls, Dialect, Instead, ReasoningFormat, Tool,
    ToolFormat,
};
pub use cache::{TokenCache, TokenCacheCounts};
pub use content::{flatten_content, flatten_messages};
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use grammar::{
    Constraint, Format, FormatKind, Grammar, GrammarSource, GrammarVocabulary, StructuralTag, StructuralTags,
    Tag, TagCount,
};
pub use source::{GgufVocabulary, TokenizerSource};
pub use stop::{StopStrings, Stopped};
pub use template::{ChatTemplate, TemplateInput};
pub use tokenizer::Tokenizer;

/// Requests are handled on many threads.
const fn assert_shared<T: Send + Sync>() {}
const fn assert_sent<T: Send>() {}
const _: () = {
    assert_sent::<Constraint>();
    assert_shared::<Tokenizer>();
    assert_shared::<TokenCache>();
    assert_shared::<ChatTemplate>();
    assert_shared::<Detokenizer>();
    assert_shared::<StopStrings>();
    assert_shared::<AnswerParser>();
    assert_shared::<TextError>();
    assert_shared::<GrammarVocabulary>();
    assert_shared::<Grammar>();
};
