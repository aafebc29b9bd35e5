//! What the engine says of itself beyond its health.

use std::path::PathBuf;
use thiserror::Error;

/// How the model is laid out: fixed at start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Where it computes, in a few words.
    pub device: String,
    /// Ranks that share a lane's requests.
    pub ranks_per_lane: usize,
    /// Lanes of all hosts.
    pub lanes: usize,
    /// Lanes that take every step together.
    pub lanes_per_group: usize,
    /// Processes that the lanes are dealt to.
    pub hosts: usize,
    /// Rows of every step that there can be, ascending.
    pub step_rows: Vec<u32>,
    /// Positions of a page of the KV cache.
    pub page_size: usize,
}

/// One lane's cache of keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUse {
    /// Pages that running requests hold.
    pub pages_held: usize,
    /// Pages kept for their content only.
    pub pages_kept: usize,
    /// Prompt tokens of requests that started.
    pub prompt_tokens: u64,
    /// Of those, tokens found in the cache.
    pub cached_tokens: u64,
    /// Times that a request gave way for want of pages.
    pub preempted: u64,
}

/// A profile that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// The file.
    pub file: PathBuf,
    /// Steps in it.
    pub steps: usize,
    /// Steps before those, for which there was no room.
    pub steps_lost: u64,
}

/// Why a profile does not begin or end.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ProfileRefusal {
    /// The operator's choice: there is no place to write to.
    #[error("this server writes no profiles; start it with --profile-dir DIR")]
    Off,
    /// The client's fault, or another client was first.
    #[error("a profile is being recorded already; /stop_profile ends it")]
    Running,
    /// The client's fault, or another client was first.
    #[error("no profile is being recorded; /start_profile begins one")]
    NotRunning,
    /// The file system's fault. What was recorded is lost.
    #[error("the profile can't be written to {}: {reason}", file.display())]
    Unwritten {
        /// Where to.
        file: PathBuf,
        /// What the system says.
        reason: String,
    },
}
