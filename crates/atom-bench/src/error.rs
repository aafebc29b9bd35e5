//! Two kinds of trouble: what ends a bench, and what one request of it ran into.

use std::fmt;
use std::path::PathBuf;
use thiserror::Error;

/// Why a bench could not start or not be written down. Failed requests are no error: they are
/// counted in the report.
#[derive(Debug, Error)]
pub enum BenchError {
    /// The address is no `http://host[:port][/path]`. The user's fault.
    #[error("the address `{url}` can't be used: {why}")]
    Url {
        /// As typed.
        url: String,
        /// What is wrong, and what to type instead.
        why: String,
    },
    /// Options that contradict each other or make no load. The user's fault.
    #[error("{0}")]
    Options(String),
    /// The server did not answer the first requests as it must. The server's fault, or the address's.
    #[error("{url} can't be measured: {while_doing} failed: {why}")]
    NotServing {
        /// The server.
        url: String,
        /// Which of the first requests.
        while_doing: &'static str,
        /// What came instead.
        why: String,
    },
    /// It ran, and not every request got its answer; the table says why. A soak that compared no
    /// two answers counts as this, too.
    #[error(
        "{failed} requests failed and {unsent} were not sent{}",
        match (*interrupted, *failed + *unsent) {
            (true, _) => " (interrupted)",
            (false, 0) => "; no two answers were compared: soak for longer",
            (false, _) => "",
        }
    )]
    Unclean {
        /// Over all levels.
        failed: usize,
        /// Over all levels that were begun.
        unsent: usize,
        /// The user stopped it.
        interrupted: bool,
    },
    /// Stopped before the first measured request. The user's wish.
    #[error("interrupted before anything was measured")]
    Interrupted,
    /// The results can't be written to the file that was asked for. The machine's fault.
    #[error("can't write the results to {}: {error}", path.display())]
    Write {
        /// `--json`.
        path: PathBuf,
        /// The system's word.
        error: std::io::Error,
    },
}

/// Why one request gave no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) kind: FailureKind,
    /// The particulars, in one line.
    pub(crate) message: String,
}

/// The kinds of failure that are counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FailureKind {
    /// No connection.
    Connect,
    /// An HTTP status other than 200.
    Status(u16),
    /// The answer is no stream of completion chunks.
    Protocol,
    /// An error event inside a stream that began well.
    InStream,
    /// The connection ended before the answer did.
    Closed,
    /// `--timeout` ran out.
    Timeout,
    /// The user stopped the bench while the request ran.
    Interrupted,
    /// Soak: not the number of tokens that was asked for.
    WrongCount,
    /// Soak: the same request gave another text than before.
    TextChanged,
}

impl Failure {
    pub(crate) fn new(kind: FailureKind, message: impl fmt::Display) -> Self {
        Self { kind, message: message.to_string() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("no connection"),
            Self::Status(status) => write!(f, "HTTP {status}"),
            Self::Protocol => f.write_str("not a stream of completions"),
            Self::InStream => f.write_str("error in the stream"),
            Self::Closed => f.write_str("closed before the end"),
            Self::Timeout => f.write_str("timeout"),
            Self::Interrupted => f.write_str("interrupted"),
            Self::WrongCount => f.write_str("wrong number of tokens"),
            Self::TextChanged => f.write_str("other text than before"),
        }
    }
}
