//! The formats of answers as flags name them.

use atom_text::{ReasoningFormat, ToolFormat};

/// Which format of answers to expect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FormatArg<T> {
    /// What the chat template shows.
    Auto,
    None,
    Named(T),
}

pub(crate) fn parse_tool_format(name: &str) -> Result<FormatArg<ToolFormat>, String> {
    parse_format(name, ToolFormat::by_name, &ToolFormat::ALL.map(ToolFormat::name))
}

pub(crate) fn parse_reasoning_format(name: &str) -> Result<FormatArg<ReasoningFormat>, String> {
    parse_format(name, ReasoningFormat::by_name, &ReasoningFormat::ALL.map(ReasoningFormat::name))
}

fn parse_format<T>(
    name: &str,
    by_name: impl Fn(&str) -> Option<T>,
    known: &[&str],
) -> Result<FormatArg<T>, String> {
    match name {
        "auto" => Ok(FormatArg::Auto),
        "none" => Ok(FormatArg::None),
        _ => by_name(name)
            .map(FormatArg::Named)
            .ok_or_else(|| format!("no such format; auto, none, {} are known", known.join(", "))),
    }
}
