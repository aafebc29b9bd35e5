//! The process's subscriber.

use std::io::IsTerminal;
use thiserror::Error;
use tracing_subscriber::EnvFilter;

/// Logging could not be set up.
#[derive(Debug, Error)]
pub enum LogError {
    /// The user's directive can't be read.
    #[error(
        "log filter '{filter}' can't be read ({reason}); use a level (error, warn, info, debug, trace) or a list \
         such as 'atom_serve=debug,warn'"
    )]
    BadFilter {
        /// What was given.
        filter: String,
        /// What the parser says.
        reason: String,
    },
    /// Our fault: something installed a subscriber before.
    #[error("logging was set up twice in one process")]
    AlreadyInstalled,
}

/// Installs the subscriber: one line an event on standard error, in colour on a terminal.
///
/// `filter` is a level or a comma-separated list of `target=level`. Call it once, first thing.
pub fn init_logging(filter: &str) -> Result<(), LogError> {
    let filter = parse_filter(filter)?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(true)
        .compact()
        .try_init()
        .map_err(|_| LogError::AlreadyInstalled)
}

fn parse_filter(filter: &str) -> Result<EnvFilter, LogError> {
    let refuse = |reason: String| LogError::BadFilter { filter: filter.to_owned(), reason };
    if filter.trim().is_empty() {
        return Err(refuse("it is empty".into()));
    }
    // A bare word that is no level would be taken for a target, and hide every line.
    if let Some(word) = filter.split(',').map(str::trim).find(|part| !part.contains('=') && !is_level(part)) {
        return Err(refuse(format!("'{word}' is not a level")));
    }
    EnvFilter::try_new(filter).map_err(|error| refuse(error.to_string()))
}

fn is_level(word: &str) -> bool {
    ["off", "error", "warn", "info", "debug", "trace"].iter().any(|level| word.eq_ignore_ascii_case(level))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_lists_are_read_and_everything_else_is_refused_with_its_text() {
        for good in ["info", "WARN", "atom_serve=debug,warn", "off"] {
            assert!(parse_filter(good).is_ok(), "{good}");
        }
        for bad in ["", "loud", "atom_serve=loud", "info,verbose"] {
            let message = parse_filter(bad).unwrap_err().to_string();
            assert!(message.contains(&format!("'{bad}'")), "{message}");
        }
    }
}
