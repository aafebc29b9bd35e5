//! Masks on their way to a step that runs already: which tokens each row may choose, in memory that the GPU reads.

use crate::device::Device;
use crate::error::CudaError;
use crate::landing::{TURNS, turn};
use crate::mapped::Mapped;
use crate::memory::Address;
use std::sync::atomic::{AtomicU32, Ordering};

/// Rows of steps whose masks the host brings while the step runs. A row waits until its word is the step's number.
pub struct Gate {
    memory: Mapped,
    at: GateAt,
    mask_words: usize,
}

/// Where a gate is, for `forbid` of kernels/sample.cu.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GateAt {
    /// `[2 turns]` of `stride` bytes: `u32[out rows]` words, and masks.
    pub address: Address,
    /// Bytes of a turn.
    pub stride: usize,
    /// Where the masks of a turn begin: `u32[out rows, ceil(vocab / 32)]`.
    pub masks: usize,
}

impl GateAt {
    /// Of steps of so many out rows, at 0.
    fn new(vocab: usize, out_rows: usize) -> Self {
        let masks = (4 * out_rows).next_multiple_of(LINE);
        let stride = (masks + 4 * out_rows * vocab.div_ceil(BITS)).next_multiple_of(LINE);
        Self { address: Address::NULL, stride, masks }
    }
}

impl Gate {
    /// For steps of so many out rows over a vocabulary.
    pub fn new(device: &Device, vocab: usize, out_rows: usize) -> Result<Self, CudaError> {
        let mut at = GateAt::new(vocab, out_rows);
        let memory = Mapped::new(device, TURNS * at.stride)?;
        at.address = memory.address();
        Ok(Self { memory, at, mask_words: vocab.div_ceil(BITS) })
    }

    /// For a launch.
    pub fn at(&self) -> GateAt {
        self.at
    }

    /// Before the launch of a step with a mask in this row: what an earlier step left there may have any number.
    pub fn close(&self, sequence: u32, row: usize) {
        self.word(sequence, row).store(0, Ordering::Release);
    }

    /// Lets a row of a step on: among the tokens of its mask, or without one, which chooses nothing.
    pub fn open(&mut self, sequence: u32, row: usize, mask: Option<&[u32]>) {
        let start = turn(sequence) * self.at.stride;
        if let Some(mask) = mask {
            let mask = &mask[..self.mask_words];
            // SAFETY: a row reads its mask when it has seen its word; the step before in this turn has ended.
            unsafe { self.memory.write(start + self.at.masks + 4 * row * self.mask_words, mask) };
        }
        let word = sequence | if mask.is_some() { 0 } else { NO_MASK };
        self.word(sequence, row).store(word, Ordering::Release);
    }

    fn word(&self, sequence: u32, row: usize) -> &AtomicU32 {
        assert!(4 * row < self.at.masks, "a row of the step");
        self.memory.word(turn(sequence) * self.at.stride + 4 * row)
    }
}

/// The bit that numbers of steps leave free, `NO_MASK` of kernels/sample.cu.
const NO_MASK: u32 = 1 << 31;
const LINE: usize = 128;
const BITS: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_masks_lie_apart() {
        for (vocab, out_rows) in [(1, 1), (33, 32), (151_936, 256), (327_680, 33)] {
            let at = GateAt::new(vocab, out_rows);
            assert!(at.masks >= 4 * out_rows && at.masks.is_multiple_of(128), "{at:?}");
            assert!(at.stride >= at.masks + 4 * out_rows * vocab.div_ceil(32), "{at:?}");
        }
        assert_eq!(GateAt::new(151_936, 256), GateAt { stride: 4_862_976, masks: 1024, ..GateAt::default() });
    }
}
