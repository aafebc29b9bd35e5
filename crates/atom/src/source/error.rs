//! What can go wrong between a name and a path.

use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why no model could be had. Each says what was looked for, and what to do.
#[derive(Debug, Error)]
pub(crate) enum SourceError {
    /// Neither a known name, nor a hub id, nor a path that exists. The user's fault.
    #[error(
        "`{spec}` is no model that I know, and no file or folder of that name exists.\n\
         Known names: {known}.\n\
         Other forms: org/name or org/name:FILE.gguf (Hugging Face hub), a folder with config.json \
         and .safetensors, or a .gguf file"
    )]
    Unknown {
        /// What was typed.
        spec: String,
        /// The catalog's names, separated by commas.
        known: String,
    },
    /// A path that does not exist. The user's fault.
    #[error("{} does not exist; --model takes a name, a hub id (org/name), a folder or a .gguf file", path.display())]
    PathMissing {
        /// The path as typed.
        path: PathBuf,
    },
    /// A path that exists and holds no model. The user's fault.
    #[error("{} holds no model: {why}", path.display())]
    NotAModel {
        /// The path as typed.
        path: PathBuf,
        /// What was found instead.
        why: String,
    },
    /// `atom pull` of something that already lies here. The user's fault.
    #[error("{} is on this machine already: there is nothing to pull; use it with --model", path.display())]
    NothingToPull {
        /// The path as typed.
        path: PathBuf,
    },
    /// Not in the cache, and the network may not be used. The user's choice.
    #[error(
        "`{spec}` {} ({}), and --offline forbids fetching it. Where there is a network, run:\n  atom pull {spec}",
        broken.as_ref().map_or_else(|| "is not in the cache".to_owned(), |why| format!("is broken in the cache: {why}")),
        folder.display()
    )]
    Offline {
        /// What was typed.
        spec: String,
        /// Where it would lie.
        folder: PathBuf,
        /// What is wrong with the copy that is there.
        broken: Option<String>,
    },
    /// Every source was tried and none had the right file. The world's fault.
    #[error("`{name}` could not be fetched. Tried in order:\n{}\n{advice}", lines(attempts))]
    AllSourcesFailed {
        /// What was asked for.
        name: String,
        /// What each source said.
        attempts: Vec<Attempt>,
        /// What the user may do now.
        advice: String,
    },
    /// The cache can't be written or read: disk full, no permission. The machine's fault.
    #[error("can't {action} {}: {}", path.display(), explain(error, *needed_bytes))]
    Cache {
        /// What was being done, as a verb: "write", "create" ..
        action: &'static str,
        /// To which file or folder.
        path: PathBuf,
        /// Bytes that the file needs in all, where known.
        needed_bytes: Option<u64>,
        /// The system's word. Part of the message, hence no `source()` that would repeat it.
        error: io::Error,
    },
    /// No place for a cache: neither `ATOM_HOME`, `XDG_CACHE_HOME` nor `HOME` is set.
    #[error("no place for the cache: set ATOM_HOME to a folder (neither it, XDG_CACHE_HOME nor HOME is set)")]
    NoHome,
}

/// What one source said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attempt {
    /// The source, for a person.
    pub(crate) source: String,
    /// Why it gave nothing. One line.
    pub(crate) why: String,
}

/// Why one source gave nothing: whether the next one may be tried.
#[derive(Debug)]
pub(super) enum Failure {
    /// The source's: unreachable, wrong file. The next source may do better. One line.
    There(String),
    /// This machine's: no source can help.
    Here(SourceError),
}

impl SourceError {
    /// A failed operation on the cache.
    pub(super) fn cache(action: &'static str, path: &Path, error: io::Error) -> Self {
        Self::Cache { action, path: path.into(), needed_bytes: None, error }
    }
}

fn lines(attempts: &[Attempt]) -> String {
    let line = |attempt: &Attempt| format!("  - {}: {}", attempt.source, attempt.why);
    attempts.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn explain(error: &io::Error, needed_bytes: Option<u64>) -> String {
    let needed = needed_bytes.map_or_else(String::new, |bytes| format!(" ({bytes} bytes are needed)"));
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            format!("the disk is full{needed}; free some space, or set ATOM_HOME to a folder on another disk")
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            format!("{error}; set ATOM_HOME to a folder that you may write")
        }
        _ => error.to_string(),
    }
}
