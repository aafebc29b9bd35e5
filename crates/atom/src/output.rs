//! Standard output as a user's pipe: it may be closed or full, and that is no panic. And as a terminal, which does
//! what the characters tell it: those of a model, or of a server elsewhere, are none of the user's orders.

use anyhow::{Context, Result};
use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::Write;

/// Standard output takes no more: there is nobody to talk to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gone;

impl std::fmt::Display for Gone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("writing to standard output")
    }
}

/// Writes and flushes; the error's context is [`Gone`].
pub(crate) fn say(text: impl std::fmt::Display) -> Result<()> {
    let mut out = std::io::stdout().lock();
    write!(out, "{text}").and_then(|()| out.flush()).context(Gone)
}

/// A text of somebody else's for the eyes: control characters but line feeds and tabs are written as `\\u{1b}`.
/// Those of Unicode's second set too, of which terminals take one for the beginning of a command.
pub(crate) fn visible(text: &str) -> Cow<'_, str> {
    let acts = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(acts) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if acts(c) {
            write!(shown, "{}", c.escape_default()).expect("a String takes all");
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_character_of_a_text_acts_on_a_terminal() {
        for (text, shown) in [
            ("a line\n\tand é 🦀", "a line\n\tand é 🦀"),
            ("\x1b]0;title\x07", "\\u{1b}]0;title\\u{7}"),
            ("\x1b[2Jgone", "\\u{1b}[2Jgone"),
            ("over\rwritten\x08\x7f", "over\\rwritten\\u{8}\\u{7f}"),
            ("\u{9b}2J \0", "\\u{9b}2J \\u{0}"),
        ] {
            assert_eq!(visible(text), shown);
        }
        let all: String = (0..0x300u32).filter_map(char::from_u32).collect();
        assert!(visible(&all).chars().all(|c| !c.is_control() || c == '\n' || c == '\t'));
    }
}
