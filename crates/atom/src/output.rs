//! Standard output as a user's pipe: it may be closed or full, and that is no panic.

use anyhow::{Context, Result};
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
