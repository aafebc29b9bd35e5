//! Where steps end for the host: a word for each of two turns in memory that the GPU writes, and results behind it.

use crate::device::{Device, Stream};
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::step;
use crate::mapped::Mapped;
use crate::memory::Address;
use crate::sample_rows::{RESULT_BYTES, result};
use crate::wait;
use atom_base::ScoredToken;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Memory of `publish` in kernels/step_end.cu.
pub struct Landing {
    memory: Mapped,
    stride: usize,
    sequence: u32,
}

/// How long replays of a recording take; 0 before the first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    last: Duration,
    /// Of the last ones.
    least: Duration,
}

impl Landing {
    /// For steps of so many out rows.
    pub fn new(device: &Device, out_rows: usize) -> Result<Self, CudaError> {
        let stride = (out_rows * RESULT_BYTES).next_multiple_of(LINE);
        Ok(Self { memory: Mapped::new(device, TURNS * (LINE + stride))?, stride, sequence: 0 })
    }

    /// Number of the next step; its lowest bit is its turn. Two steps may be on their way.
    pub fn begin(&mut self) -> u32 {
        self.sequence = following(self.sequence);
        self.sequence
    }

    /// Captures the end of a step.
    ///
    /// # Safety
    /// As for [`step::publish`].
    pub unsafe fn record(
        &self,
        queue: &Queue<'_>,
        header: Address,
        results: Address,
        count: Option<Address>,
    ) -> Result<(), CudaError> {
        let host = (self.memory.address(), self.stride);
        // SAFETY: the caller's.
        unsafe { step::publish(queue, header, results, count.unwrap_or(Address::NULL), host) }
    }

    /// Waits for the end of a step of the stream that began then. What fails is left to the caller. If that takes longer than
    /// is usual, it asks the driver now and then whether anything failed; a steady step asks nobody.
    pub fn wait(
        &self,
        stream: &Stream,
        sequence: u32,
        (pace, begun): (Pace, Instant),
        patience: Duration,
    ) -> Result<(), CudaError> {
        let gone = begun.elapsed();
        let (least, limit) = (pace.least.saturating_sub(gone), patience.saturating_sub(gone));
        let mut ask_at = ASK_AFTER.max(2 * pace.last);
        let waited = wait::until("a step", (least, limit), |elapsed| {
            if self.has_ended(sequence) {
                return Ok(true);
            }
            if elapsed < ask_at {
                return Ok(false);
            }
            ask_at = elapsed + (elapsed / 4).min(ASK_EVERY_MAX);
            let is_done = stream.is_done()?;
            assert!(!is_done || self.has_ended(sequence), "a step that is done has said so");
            Ok(is_done)
        });
        waited.map(drop)
    }

    fn has_ended(&self, sequence: u32) -> bool {
        self.memory.word(turn(sequence) * LINE).load(Ordering::Acquire) == sequence
    }

    /// What a step that has ended and counts has counted, likewise.
    pub fn count(&self, sequence: u32) -> u64 {
        assert!(self.has_ended(sequence), "a count that is here");
        let mut bytes = [0; 8];
        // SAFETY: as in `read`.
        unsafe { self.memory.read(turn(sequence) * LINE + COUNT, &mut bytes) };
        u64::from_le_bytes(bytes)
    }

    /// Results of a step that has ended, before the next but one begins.
    pub fn read(&self, sequence: u32, results: &mut [ScoredToken]) {
        assert!(
            self.has_ended(sequence) && results.len() * RESULT_BYTES <= self.stride,
            "results that are here"
        );
        let start = TURNS * LINE + turn(sequence) * self.stride;
        let mut bytes = [0; RESULT_BYTES];
        for (row, result_of_row) in results.iter_mut().enumerate() {
            // SAFETY: the step's word was seen, and its turn comes again with a step that is not launched yet.
            unsafe { self.memory.read(start + row * RESULT_BYTES, &mut bytes) };
            *result_of_row = result(&bytes);
        }
    }
}

impl Pace {
    /// After one more replay.
    #[must_use]
    pub fn with(self, took: Duration) -> Self {
        // What was slow for a while is not expected to stay so, nor the other way round.
        let least = if self.least.is_zero() { took } else { took.min(self.least + self.least / 16) };
        Self { last: took, least }
    }
}

/// Which of the two buffers a step has.
pub(crate) fn turn(sequence: u32) -> usize {
    (sequence & 1) as usize
}

/// 31 bits, so that a word has one to spare, and never 0, which is in words of no step. Turns alternate behind the last
/// number too.
fn following(sequence: u32) -> u32 {
    if sequence == u32::MAX >> 1 { 2 } else { sequence + 1 }
}

/// Steps at once: each has a buffer of its own on the host.
pub(crate) const TURNS: usize = 2;
/// `LINE` of kernels/step_end.cu: what is polled shares no line of a cache with anything.
const LINE: usize = 128;
/// Where in a line a count lies, behind the number.
const COUNT: usize = 8;
/// A step that takes longer than this, and twice as long as the last of its recording, has the driver asked whether
/// something failed.
const ASK_AFTER: Duration = Duration::from_millis(5);
/// A GPU that failed is found this late at the most, however long its steps take.
const ASK_EVERY_MAX: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_follows_faster_steps_at_once_and_slower_ones_in_time() {
        let ms = Duration::from_millis;
        let fast = Pace::default().with(ms(8)).with(ms(4));
        assert_eq!((fast.last, fast.least), (ms(4), ms(4)));
        let slower = fast.with(ms(40));
        assert_eq!((slower.last, slower.least), (ms(40), ms(4) + ms(4) / 16));
        let slow = (0..100).fold(slower, |pace, _| pace.with(ms(40)));
        assert_eq!(slow.least, ms(40));
    }

    #[test]
    fn turns_alternate_for_ever() {
        let last = u32::MAX >> 1;
        assert_eq!((following(0), following(7), following(last)), (1, 8, 2));
        for sequence in [0, 1, 2, last - 1, last] {
            assert_ne!(turn(sequence), turn(following(sequence)), "{sequence}");
        }
    }
}
