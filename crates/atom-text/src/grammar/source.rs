//! What a constraint is described by, and how it becomes a grammar of llguidance.

use super::ebnf;
use super::format::Format;
use super::schema::{self, OPTIONS};
use crate::TextError;
use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};
use std::fmt::Write;

/// How a client describes what may be written.
#[derive(Clone, Debug, PartialEq)]
pub enum GrammarSource {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema describes.
    JsonSchema(Value),
    /// A text that the regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in the Lark dialect of llguidance.
    Lark(String),
    /// A grammar in the EBNF of llama.cpp and xgrammar, `root ::= ..`.
    Ebnf(String),
    /// Free text in which tagged parts have to follow their schemas.
    StructuralTags(StructuralTags),
    /// Formats made of formats, as xgrammar has them.
    Format(Format),
}

/// Text in which, from a trigger on, one of the tags has to stand.
#[derive(Clone, Debug, PartialEq)]
pub struct StructuralTags {
    /// Texts that begin a tag. Each tag begins with exactly one of them.
    pub triggers: Vec<String>,
    /// The tags.
    pub tags: Vec<StructuralTag>,
}

/// `begin`, JSON, `end`.
#[derive(Clone, Debug, PartialEq)]
pub struct StructuralTag {
    /// The text in front, trigger included.
    pub begin: String,
    /// What stands between.
    pub schema: Value,
    /// The text behind.
    pub end: String,
}

impl GrammarSource {
    /// A grammar in the notation that it is written in: EBNF where a rule is defined with `::=`, else Lark.
    pub fn of_grammar(text: String) -> Self {
        if ebnf::is_ebnf(&text) { Self::Ebnf(text) } else { Self::Lark(text) }
    }

    /// True if it is the grammar of a whole answer, and can't stand within another one.
    pub fn stands_alone(&self) -> bool {
        matches!(self, Self::Lark(_) | Self::Ebnf(_) | Self::StructuralTags(_) | Self::Format(_))
    }

    /// Says which one it is, in errors.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::JsonObject => "JSON object",
            Self::JsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Choice(_) => "choice",
            Self::Lark(_) | Self::Ebnf(_) => "grammar",
            Self::StructuralTags(_) | Self::Format(_) => "structural tag",
        }
    }

    /// Refuses what is too large to be looked at.
    pub(super) fn check_bytes(&self) -> Result<(), TextError> {
        match self.bytes() {
            bytes if bytes > SOURCE_BYTES_MAX => {
                Err(self.refuse(format!("it has {bytes} bytes; at most {SOURCE_BYTES_MAX} are taken")))
            }
            _ => Ok(()),
        }
    }

    /// The grammar of a source that is not too large.
    pub(super) fn grammar(&self) -> Result<TopLevelGrammar, String> {
        Ok(match self {
            Self::JsonObject => TopLevelGrammar::from_json_schema(with_options(&json!({"type": "object"}))),
            Self::JsonSchema(value) => {
                schema::check(value)?;
                TopLevelGrammar::from_json_schema(with_options(value))
            }
            Self::Regex(regex) => TopLevelGrammar::from_regex(unanchored(regex)),
            Self::Choice(choices) => {
                let quoted: Vec<String> = choices.iter().map(|choice| quote(choice)).collect();
                if quoted.is_empty() {
                    return Err("it has nothing to choose from".into());
                }
                TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {}\n", quoted.join(" | ")))
            }
            Self::Lark(text) => {
                if text.trim_start().is_empty() {
                    return Err("it is empty".into());
                }
                TopLevelGrammar::from_lark(text.clone())
            }
            Self::Ebnf(text) => TopLevelGrammar::from_lark(ebnf::to_lark(text, "")?),
            Self::StructuralTags(tags) => TopLevelGrammar::from_lark(tags.lark()?),
            Self::Format(format) => TopLevelGrammar::from_lark(format.lark()?),
        })
    }

    /// The right side of a rule that stands for it within another grammar; `None` for what is a grammar of its own.
    pub(crate) fn rule(&self) -> Result<Option<String>, TextError> {
        let rule = match self {
            Self::JsonObject => format!("%json {}", with_options(&json!({"type": "object"}))),
            Self::JsonSchema(value) => {
                schema::check(value).map_err(|reason| self.refuse(reason))?;
                format!("%json {}", with_options(value))
            }
            Self::Regex(regex) => format!("/{}/", between_slashes(unanchored(regex))),
            Self::Choice(choices) if choices.is_empty() => {
                return Err(self.refuse("it has nothing to choose from".into()));
            }
            Self::Choice(choices) => {
                choices.iter().map(|choice| quote(choice)).collect::<Vec<_>>().join(" | ")
            }
            // See `stands_alone`.
            Self::Lark(_) | Self::Ebnf(_) | Self::StructuralTags(_) | Self::Format(_) => return Ok(None),
        };
        Ok(Some(rule))
    }

    pub(super) fn refuse(&self, reason: String) -> TextError {
        TextError::Grammar { kind: self.kind(), reason }
    }

    /// What notation was read, where there may be doubt.
    pub(super) fn with_hint(&self, reason: String) -> String {
        match self {
            Self::Lark(text) if text.contains("::=") => {
                format!(
                    "{reason}; it was read as Lark: a rule of EBNF is 'name ::= ..' at the beginning of a line"
                )
            }
            _ => reason,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::JsonObject => 0,
            Self::JsonSchema(value) => value.to_string().len(),
            Self::Regex(text) | Self::Lark(text) | Self::Ebnf(text) => text.len(),
            Self::Choice(choices) => choices.iter().map(|choice| choice.len() + CHOICE_BYTES).sum(),
            Self::Format(format) => format.bytes(),
            Self::StructuralTags(StructuralTags { triggers, tags }) => {
                let of_tag = |tag: &StructuralTag| {
                    tag.begin.len() + tag.end.len() + tag.schema.to_string().len() + CHOICE_BYTES
                };
                let triggers: usize = triggers.iter().map(|trigger| trigger.len() + CHOICE_BYTES).sum();
                triggers + tags.iter().map(of_tag).sum::<usize>()
            }
        }
    }
}

impl StructuralTags {
    /// `start: (text-up-to-a-trigger the-rest-of-a-tag)* text-without-trigger`.
    fn lark(&self) -> Result<String, String> {
        if self.tags.is_empty() {
            return Err("it has no structures".into());
        }
        let mut rests = vec![Vec::new(); self.triggers.len()];
        for (at, tag) in self.tags.iter().enumerate() {
            schema::check(&tag.schema).map_err(|reason| format!("structures[{at}].schema: {reason}"))?;
            let mut of_tag =
                (0..self.triggers.len()).filter(|&trigger| tag.begin.starts_with(&self.triggers[trigger]));
            let (Some(trigger), None) = (of_tag.next(), of_tag.next()) else {
                return Err(format!(
                    "structures[{at}].begin is {:?}, which has to begin with exactly one of the {} triggers",
                    tag.begin,
                    self.triggers.len()
                ));
            };
            rests[trigger].push(at);
        }
        let mut lark = String::from("start: part* rest\nrest: REST\npart:");
        let mut rules = String::new();
        for (trigger, tags) in rests.iter().enumerate() {
            if self.triggers[trigger].is_empty() {
                return Err(format!("triggers[{trigger}] is empty"));
            }
            if tags.is_empty() {
                return Err(format!(
                    "no structure begins with triggers[{trigger}], {:?}",
                    self.triggers[trigger]
                ));
            }
            let bar = if trigger == 0 { "" } else { " |" };
            _ = write!(lark, "{bar} text_{trigger} tag_{trigger}");
            // Lazy: up to the first trigger.
            _ = writeln!(rules, "text_{trigger}[lazy]: /(?s:.*){}/", regex_literal(&self.triggers[trigger]));
            let options: Vec<String> = tags
                .iter()
                .map(|&at| {
                    let tag = &self.tags[at];
                    let rest = &tag.begin[self.triggers[trigger].len()..];
                    format!("{} json_{at} {}", quote(rest), quote(&tag.end))
                })
                .collect();
            _ = writeln!(rules, "tag_{trigger}: {}", options.join(" | "));
            for &at in tags {
                _ = writeln!(rules, "json_{at}: %json {}", with_options(&self.tags[at].schema));
            }
        }
        let triggers: Vec<String> = self.triggers.iter().map(|trigger| regex_literal(trigger)).collect();
        _ = writeln!(rules, "REST: /(?s:.*)/ & ~/(?s:.*)({})(?s:.*)/", triggers.join("|"));
        lark.push('\n');
        Ok(lark + &rules)
    }
}

/// A schema with what we add: bounded white space, where a small model would write blanks for ever.
pub(crate) fn with_options(value: &Value) -> Value {
    let mut schema = value.clone();
    if let Some(object) = schema.as_object_mut() {
        object.insert(OPTIONS.into(), json!({"whitespace_pattern": WHITE_SPACE}));
    }
    schema
}

/// A match is of the whole text anyway, which llguidance takes no anchors for.
pub(super) fn unanchored(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        Some(inner) if inner.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 0 => inner,
        _ => regex,
    }
}

/// A regular expression as it stands in a line of Lark.
pub(crate) fn between_slashes(regex: &str) -> String {
    let mut out = String::with_capacity(regex.len() + 8);
    let mut is_escaped = false;
    for c in regex.chars() {
        match c {
            '/' if !is_escaped => out.push_str("\\/"),
            // Behind a backslash a line break means itself, as without.
            '\n' if is_escaped => out.push('n'),
            '\n' => out.push_str("\\n"),
            _ => out.push(c),
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    out
}

/// A string of Lark, which is one of JSON; but for DEL, which it wants escaped.
pub(super) fn quote(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A regular expression between slashes that matches exactly this text.
pub(crate) fn regex_literal(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii_alphanumeric() || !c.is_ascii() {
            out.push(c);
        } else {
            _ = write!(out, "\\x{:02x}", c as u32);
        }
    }
    out
}

/// Bytes of one source. The schemas of large APIs have tens of kilobytes; what is built of this much in the
/// worst case is bounded again.
pub(super) const SOURCE_BYTES_MAX: usize = 256 << 10;

/// What an entry of a list costs beside its text.
pub(super) const CHOICE_BYTES: usize = 8;

/// Between symbols of JSON: a line break and 20 levels of four blanks, or less.
const WHITE_SPACE: &str = r"[ \n\r\t]{1,82}";
