//! The request log: one JSON object a line for every request, without what was asked and answered unless the
//! operator wants it.
//!
//! A thread of its own writes it, from a queue that never makes a request wait: what finds it full is dropped
//! and counted.

use crate::auth::ApiKeys;
use crate::kept::ContentRoom;
use crate::record::{Entry, RESPONSE};
use crate::redact::{redact, redact_spelled, redact_stream};
use atom_telemetry::ServeMetrics;
use serde_json::Value;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Where the request log goes, open already: a path that can't be written is found at start.
#[derive(Debug)]
pub struct LogSink {
    target: Target,
    content: bool,
}

enum Target {
    Stdout,
    File {
        path: PathBuf,
        file: File,
    },
    #[cfg(test)]
    Test(Box<dyn Write + Send + Sync>),
}

/// The queue to the thread that writes.
pub(crate) struct RequestLog {
    /// `None` once it is closing.
    queue: Option<SyncSender<Message>>,
    state: Arc<Shared>,
    /// For what requests and answers say, where that is wanted.
    content: Option<ContentRoom>,
    /// Ends with the thread.
    written: Mutex<Receiver<()>>,
}

struct Shared {
    metrics: Arc<ServeMetrics>,
    keys: Arc<ApiKeys>,
    wants_reopen: AtomicBool,
}

enum Message {
    Entry(Box<Entry>),
    /// Look at the flags.
    Wake,
}

impl LogSink {
    /// Appends to a file, which only its owner may read if it is new.
    pub fn file(path: &Path) -> io::Result<Self> {
        let target = Target::File { path: path.to_owned(), file: open(path)? };
        Ok(Self { target, content: false })
    }

    /// Writes to standard output.
    pub fn stdout() -> Self {
        Self { target: Target::Stdout, content: false }
    }

    /// Writes requests and answers too, without the keys in them.
    pub fn with_content(self, content: bool) -> Self {
        Self { content, ..self }
    }

    pub(crate) fn start(self, metrics: Arc<ServeMetrics>, keys: Arc<ApiKeys>) -> RequestLog {
        let (queue, entries) = sync_channel(QUEUE_ENTRIES_MAX);
        let (running, written) = channel();
        let state = Arc::new(Shared { metrics, keys, wants_reopen: AtomicBool::new(false) });
        let (shared, target) = (state.clone(), self.target);
        let thread = std::thread::Builder::new().name("request-log".into());
        let spawned = thread.spawn(move || {
            write_all(target, &entries, &shared);
            drop(running);
        });
        if let Err(error) = spawned {
            // Every entry will be counted as dropped.
            tracing::error!("no thread for the request log: {error}");
        }
        let content = self.content.then(|| ContentRoom::new(CONTENTS_BYTES_MAX));
        RequestLog { queue: Some(queue), state, content, written: Mutex::new(written) }
    }
}

impl RequestLog {
    /// Where bodies are kept on their way, if they are wanted.
    pub(crate) fn content(&self) -> Option<&ContentRoom> {
        self.content.as_ref()
    }

    /// Queues an entry, or drops it when the writer is that far behind.
    pub(crate) fn write(&self, entry: Entry) {
        let queue = self.queue.as_ref().expect("it is taken in drop only");
        if queue.try_send(Message::Entry(Box::new(entry))).is_err() {
            self.state.metrics.log_dropped(1);
        }
    }

    /// Opens the file anew, after what is in the queue now: somebody has moved it away.
    pub(crate) fn reopen(&self) {
        self.state.wants_reopen.store(true, Ordering::Release);
        let queue = self.queue.as_ref().expect("it is taken in drop only");
        // A full queue wakes the writer anyway.
        if let Err(TrySendError::Disconnected(_)) = queue.try_send(Message::Wake) {
            tracing::error!("the request log's thread is gone");
        }
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        self.queue = None;
        let written = self.written.get_mut().unwrap_or_else(PoisonError::into_inner);
        if written.recv_timeout(CLOSE) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the end of the request log could not be written within {CLOSE:?}");
        }
    }
}

impl fmt::Debug for RequestLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestLog").field("content", &self.content.is_some()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdout => f.write_str("stdout"),
            Self::File { path, .. } => write!(f, "{}", path.display()),
            #[cfg(test)]
            Self::Test(_) => f.write_str("test"),
        }
    }
}

/// The thread: as many entries at a time as are there.
fn write_all(mut target: Target, queue: &Receiver<Message>, shared: &Shared) {
    let mut lines = Vec::new();
    let mut is_failing = false;
    while let Ok(first) = queue.recv() {
        let mut count = 0;
        for message in std::iter::once(first).chain(queue.try_iter().take(BATCH)) {
            // What comes behind the order to reopen belongs into the new file.
            let Message::Entry(entry) = message else { break };
            lines.extend_from_slice(line(*entry, &shared.keys).as_bytes());
            count += 1;
        }
        let outcome = target.write(&lines);
        lines.clear();
        if let Err(error) = &outcome {
            shared.metrics.log_dropped(count);
            if !is_failing {
                tracing::error!("can't write the request log, entries are lost: {error}");
            }
            // What was cut must not run into the next one.
            lines.push(b'\n');
        }
        is_failing = outcome.is_err();
        if shared.wants_reopen.swap(false, Ordering::Acquire) {
            target.reopen();
        }
    }
}

impl Target {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(bytes).and_then(|()| out.flush())
            }
            Self::File { file, .. } => file.write_all(bytes),
            #[cfg(test)]
            Self::Test(out) => out.write_all(bytes),
        }
    }

    fn reopen(&mut self) {
        let Self::File { path, file } = self else { return };
        match open(path) {
            Ok(opened) => *file = opened,
            Err(error) => {
                tracing::error!("the request log goes on in the old file; {}: {error}", path.display())
            }
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(OWNER_ONLY).open(path)
}

/// An entry as JSON, without secrets: not those that it knows, nor what looks like one.
fn line(entry: Entry, keys: &ApiKeys) -> String {
    let is_stream = entry.is_stream();
    let mut value = entry.into_json();
    let stream = match value.get_mut(RESPONSE) {
        Some(Value::String(answer)) if is_stream => Some(std::mem::take(answer)),
        _ => None,
    };
    let mut any = redact(&mut value, keys);
    if let Some(answer) = stream {
        let (answer, in_it) = redact_stream(&answer, keys, any);
        value[RESPONSE] = answer.into();
        any |= in_it;
    }
    if any {
        redact_spelled(&mut value);
    }
    format!("{value}\n")
}

/// Entries that may wait for the disk: a second at the rate of a busy server.
const QUEUE_ENTRIES_MAX: usize = 4096;
/// Bytes of bodies that are kept for the log, of requests that run and of those that wait for the disk.
const CONTENTS_BYTES_MAX: usize = 64 << 20;
/// Entries of one write.
const BATCH: usize = 256;
/// How long the end of the process may wait for the last entries.
const CLOSE: Duration = Duration::from_secs(2);
/// The log may hold what people wrote.
const OWNER_ONLY: u32 = 0o600;

#[cfg(test)]
#[path = "request_log_tests.rs"]
mod tests;
