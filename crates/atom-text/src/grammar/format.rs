//! Structural tags as xgrammar has them since 0.1.24 and vLLM takes them: a format made of formats.
//!
//! What is text is put together to regular expressions as far as it goes, so that all of it is read as a whole; schemas
//! and grammars stand between. The parser reads each such piece as long as it goes on: where one could swallow what
//! follows it, or one that may stand beside it could, the format is refused ([`check`]).

mod check;
mod lower;

use super::source::CHOICE_BYTES;
use serde_json::Value;

/// A format, and where the client wrote it.
#[derive(Clone, Debug, PartialEq)]
pub struct Format {
    /// In errors.
    pub place: String,
    /// What it is.
    pub kind: FormatKind,
}

/// What a part of a text looks like.
#[derive(Clone, Debug, PartialEq)]
pub enum FormatKind {
    /// This text.
    ConstString(String),
    /// JSON of this schema.
    JsonSchema(Value),
    /// A text that the regular expression matches.
    Regex(String),
    /// A text of this grammar in EBNF.
    Grammar(String),
    /// Any text without these, and without the ends of the tag that it stands in.
    AnyText {
        /// What may not occur.
        excludes: Vec<String>,
        /// Characters at the most.
        chars_max: Option<u32>,
    },
    /// One behind the other.
    Sequence(Vec<Format>),
    /// One of them.
    Or(Vec<Format>),
    /// So many of it, one behind the other.
    Repeat {
        /// At least.
        least: u32,
        /// At the most; none: without end.
        most: Option<u32>,
        /// What comes again.
        content: Box<Format>,
    },
    /// Between two texts.
    Tag(Tag),
    /// Free text; from a trigger on, one of the tags that begin with it.
    TriggeredTags {
        /// Each tag begins with exactly one of them.
        triggers: Vec<String>,
        /// The tags.
        tags: Vec<Tag>,
        /// What may not occur in the free text.
        excludes: Vec<String>,
        /// How many tags.
        count: TagCount,
    },
    /// Tags, and nothing but a separator between them.
    TagsWithSeparator {
        /// The tags.
        tags: Vec<Tag>,
        /// Between two of them.
        separator: String,
        /// How many tags.
        count: TagCount,
    },
}

/// Something between two texts.
#[derive(Clone, Debug, PartialEq)]
pub struct Tag {
    /// In front.
    pub begin: String,
    /// Between.
    pub content: Box<Format>,
    /// One of these is behind it.
    pub ends: Vec<String>,
}

/// How many tags there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TagCount {
    /// There is one, and no free text before the first.
    pub at_least_one: bool,
    /// Nothing comes behind the first.
    pub stop_after_first: bool,
}

impl Format {
    pub(super) fn bytes(&self) -> usize {
        let texts = |texts: &[String]| texts.iter().map(|text| text.len() + CHOICE_BYTES).sum::<usize>();
        let tags = |tags: &[Tag]| tags.iter().map(|tag| tag.bytes() + CHOICE_BYTES).sum::<usize>();
        CHOICE_BYTES
            + match &self.kind {
                FormatKind::ConstString(text) | FormatKind::Regex(text) | FormatKind::Grammar(text) => {
                    text.len()
                }
                FormatKind::JsonSchema(schema) => schema.to_string().len(),
                FormatKind::AnyText { excludes, .. } => texts(excludes),
                FormatKind::Sequence(parts) | FormatKind::Or(parts) => parts.iter().map(Self::bytes).sum(),
                FormatKind::Repeat { content, .. } => content.bytes(),
                FormatKind::Tag(tag) => tag.bytes(),
                FormatKind::TriggeredTags { triggers, tags: of, excludes, .. } => {
                    texts(triggers) + texts(excludes) + tags(of)
                }
                FormatKind::TagsWithSeparator { tags: of, separator, .. } => separator.len() + tags(of),
            }
    }

    /// The same in Lark, if its parts can be told apart. Errors name the place.
    pub(super) fn lark(&self) -> Result<String, String> {
        let lowered = lower::lower(self)?;
        check::check(&lowered)?;
        lowered.lark()
    }
}

impl Tag {
    fn bytes(&self) -> usize {
        let ends: usize = self.ends.iter().map(|end| end.len() + CHOICE_BYTES).sum();
        self.begin.len() + ends + self.content.bytes()
    }
}

#[cfg(test)]
mod tests;
