//! `--step-trace`: what every group's first lane saw and decided in each step, through rings of fixed
//! size to one thread that writes it. A step allocates nothing for it and never waits: without a free
//! entry the step is lost, counted, and the trace says so.

use crate::host::HostError;
use atom_base::StepNo;
use atom_group::{Facts, GroupStep, Outcome, TraceEncoder, TraceHeader};
use crossbeam_queue::ArrayQueue;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::Instant;

/// Entries on their way to the file, and back.
pub(crate) struct StepTrace {
    header: TraceHeader,
    start: Instant,
    free: ArrayQueue<Box<Entry>>,
    full: ArrayQueue<Box<Entry>>,
    lost: Box<[AtomicU64]>, // [groups], steps without an entry
    closed: AtomicBool,
    thread: OnceLock<Thread>,
}

/// A step of a group.
struct Entry {
    group: usize,
    epoch: u64,
    at_us: u64,
    /// Steps that the group had lost by then.
    lost: u64,
    facts: Box<[Facts]>, // [lanes]
    outcome: Outcome,
}

/// What the writing thread knows of a group.
#[derive(Clone, Copy)]
struct Written {
    epoch: u64,
    lost: u64,
}

impl StepTrace {
    /// A trace of groups that begin as `header` says, at the time `start`.
    pub(crate) fn new(header: TraceHeader, start: Instant) -> Self {
        let free = ArrayQueue::new(RING_STEPS);
        for _ in 0..RING_STEPS {
            let facts = vec![Facts::default(); header.lanes].into();
            let (group, epoch, at_us, lost, outcome) = (0, 0, 0, 0, Ok(GroupStep::Park));
            let _ = free.push(Box::new(Entry { group, epoch, at_us, lost, facts, outcome }));
        }
        Self {
            start,
            free,
            full: ArrayQueue::new(RING_STEPS),
            lost: (0..header.groups).map(|_| AtomicU64::new(0)).collect(),
            closed: AtomicBool::new(false),
            thread: OnceLock::new(),
            header,
        }
    }

    /// Makes the file and starts the thread that writes it.
    pub(crate) fn write_to(self: &Arc<Self>, path: &Path) -> Result<JoinHandle<()>, HostError> {
        let failed = |source| HostError::StepTrace { path: path.to_owned(), source };
        let file = File::create(path).map_err(failed)?;
        let (trace, path) = (Arc::clone(self), path.to_owned());
        let write = move || {
            if let Err(error) = trace.write(file) {
                tracing::error!("--step-trace: the trace ends here: writing {}: {error}", path.display());
            }
            let lost: u64 = trace.lost.iter().map(|lost| lost.load(Ordering::Relaxed)).sum();
            if lost > 0 {
                tracing::warn!("--step-trace: {lost} steps are not in {}", path.display());
            }
        };
        std::thread::Builder::new().name("step trace".into()).spawn(write).map_err(HostError::Thread)
    }

    /// Takes a step of a group. Called by the group's first lane, between settling and what follows.
    pub(crate) fn step(&self, group: usize, epoch: u64, facts: &[Facts], outcome: &Outcome) {
        let Some(mut entry) = self.free.pop() else {
            self.lost[group].fetch_add(1, Ordering::Relaxed);
            return;
        };
        (entry.group, entry.epoch) = (group, epoch);
        entry.at_us = self.start.elapsed().as_micros() as u64;
        entry.lost = self.lost[group].load(Ordering::Relaxed);
        entry.facts.copy_from_slice(facts);
        entry.outcome.clone_from(outcome);
        assert!(self.full.push(entry).is_ok(), "there are no more entries than places");
        self.wake();
    }

    /// Ends the trace, once no lane takes a step any more.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Writes until [`close`](Self::close). Whenever no step waits, all is in the file's hands: what a
    /// killed process leaves behind is whole but for its last steps.
    fn write(&self, mut file: impl Write) -> io::Result<()> {
        self.thread.set(std::thread::current()).expect("one thread writes");
        let mut buffer = Vec::with_capacity(BUFFER_BYTES + TraceEncoder::RECORD_BYTES_MAX);
        let mut encoder = TraceEncoder::new(&self.header, &mut buffer);
        let mut groups = vec![Written { epoch: 1, lost: 0 }; self.header.groups];
        loop {
            // In this order: what came before the end is in the ring.
            let closed = self.closed.load(Ordering::SeqCst);
            while let Some(entry) = self.full.pop() {
                self.encode(&mut encoder, &mut groups[entry.group], &entry, &mut buffer);
                assert!(self.free.push(entry).is_ok(), "there are no more entries than places");
                if buffer.len() >= BUFFER_BYTES {
                    flush(&mut file, &mut buffer)?;
                }
            }
            if closed {
                for (group, (lost, written)) in self.lost.iter().zip(&groups).enumerate() {
                    let lost = lost.load(Ordering::Relaxed) - written.lost;
                    if lost > 0 {
                        encoder.gap(group, lost, &mut buffer);
                    }
                }
                encoder.end(&mut buffer);
                return flush(&mut file, &mut buffer);
            }
            flush(&mut file, &mut buffer)?;
            // Whatever waited while writing may have taken the wake-up for its own.
            if self.full.is_empty() && !self.closed.load(Ordering::SeqCst) {
                std::thread::park();
            }
        }
    }

    fn encode(&self, encoder: &mut TraceEncoder, written: &mut Written, entry: &Entry, out: &mut Vec<u8>) {
        let Entry { group, epoch, at_us, lost, ref facts, ref outcome } = *entry;
        if epoch < written.epoch {
            // The thread that held the seat in an epoch that is over was stuck just here.
            tracing::warn!("--step-trace: a step of group {group}'s past epoch {epoch} came too late");
            return;
        }
        // Steps lost before an epoch's first one are of the epoch before.
        let begins = facts[0].step == StepNo(1);
        let missing = lost.saturating_sub(written.lost);
        if missing > 0 && begins {
            encoder.gap(group, missing, out);
        }
        if epoch > written.epoch {
            encoder.epoch(group, epoch, out);
        }
        if missing > 0 && !begins {
            encoder.gap(group, missing, out);
        }
        encoder.step(group, at_us, facts, outcome, out);
        *written = Written { epoch, lost: lost.max(written.lost) };
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

fn flush(file: &mut impl Write, buffer: &mut Vec<u8>) -> io::Result<()> {
    file.write_all(buffer)?;
    buffer.clear();
    file.flush()
}

/// Steps on their way: a tenth of a second of the fastest models. The writing thread needs microseconds
/// for each.
const RING_STEPS: usize = 1024;
/// What is written at once while steps wait.
const BUFFER_BYTES: usize = 64 << 10;

#[cfg(test)]
#[path = "step_trace_tests.rs"]
mod tests;
