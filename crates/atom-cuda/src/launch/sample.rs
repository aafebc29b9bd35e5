//! Sampling: from logits to tokens and log-probabilities, see `kernels/sample.cu`.

use crate::error::CudaError;
use crate::gate::GateAt;
use crate::kernels::Queue;
use crate::memory::Address;
use crate::module::{Arg, Launch};
use crate::sample_rows::{BIAS_BYTES, RESULT_BYTES};
use atom_base::limits::LOGIT_BIAS_MAX;

/// Where sampling's arrays lie in one piece of device memory: what slots keep over steps, and scratch of a step.
/// Nothing of it needs to be cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleMemory {
    vocab: usize,
    out_rows: usize,
    seen: usize,   // u16[slots, blocks * 512]
    biased: usize, // u32[slots, blocks * 16]
    biases: usize, // {token, bias}[slots, LOGIT_BIAS_MAX]
    keys: usize,   // u32[out rows, 2, blocks * 4]
    masses: usize, // u64[out rows, 2, blocks]
    peaks: usize,  // u32[out rows, 2, splits]
    end: usize,
}

/// The arrays of a step that others own.
#[derive(Clone, Copy, Debug)]
pub struct SampleStep {
    /// The step's header.
    pub header: Address,
    /// `[out rows, vocab]` f32, starts on 16 bytes; written where a mask forbids a token.
    pub logits: Address,
    /// `[out rows]` records of [`crate::sample_rows::row_bytes`], in the step's upload.
    pub rows: Address,
    /// `[out rows]` results of [`RESULT_BYTES`] each.
    pub results: Address,
    /// `u32[slots]`: what each slot's request said last. Rows that sample write their slot's.
    pub last_token: Address,
    /// Where the host leaves masks; null if no row has one.
    pub gate: GateAt,
}

impl SampleMemory {
    /// For a model with `vocab` tokens, at most `out_rows` rows a step, and `slots` slots.
    pub fn new(vocab: usize, out_rows: usize, slots: usize) -> Self {
        assert!((1..=VOCAB_MAX).contains(&vocab), "{vocab} tokens; sampling takes up to {VOCAB_MAX}");
        let blocks = vocab.div_ceil(BLOCK);
        let mut end = 0;
        let mut place = |bytes: usize| {
            let start = end;
            end = (end + bytes).next_multiple_of(ALIGN);
            start
        };
        Self {
            vocab,
            out_rows,
            seen: place(slots * blocks * BLOCK * 2),
            biased: place(slots * blocks * (BLOCK / 8)),
            biases: place(slots * LOGIT_BIAS_MAX * BIAS_BYTES),
            keys: place(out_rows * 2 * blocks * 4 * 4),
            masses: place(out_rows * 2 * blocks * 8),
            peaks: place(out_rows * 2 * blocks * 4),
            end,
        }
    }

    /// Bytes of the whole.
    pub fn bytes(&self) -> usize {
        self.end
    }
}

/// Samples up to `out_rows` rows, the capacity of the step's shape.
///
/// # Safety
/// `memory` is the start of what `at` describes, on 256 bytes; the arrays of `step` are as long as they say. Every
/// slot with penalties or biases was loaded, and no two rows that sample share a slot.
pub unsafe fn sample(
    queue: &Queue<'_>,
    at: &SampleMemory,
    memory: Address,
    step: &SampleStep,
    out_rows: usize,
) -> Result<(), CudaError> {
    assert!(out_rows <= at.out_rows, "{out_rows} out rows, {} were planned", at.out_rows);
    let splits = splits(at.vocab, out_rows, queue.processors());
    let mut args = [0_u8; ARGS_BYTES];
    let addresses = [
        step.logits,
        step.rows,
        step.header,
        memory.plus(at.seen),
        memory.plus(at.biased),
        memory.plus(at.biases),
        memory.plus(at.keys),
        memory.plus(at.masses),
        memory.plus(at.peaks),
        step.results,
        step.last_token,
        step.gate.address,
    ];
    let (pointers, words) = args.split_at_mut(8 * addresses.len());
    for (place, address) in pointers.as_chunks_mut::<8>().0.iter_mut().zip(addresses) {
        *place = address.0.to_le_bytes();
    }
    let gate = [step.gate.stride as u32, step.gate.masks as u32];
    let sizes = [at.vocab as u32, splits, LOGIT_BIAS_MAX as u32, gate[0], gate[1], 0];
    for (place, size) in words.as_chunks_mut::<4>().0.iter_mut().zip(sizes) {
        *place = size.to_le_bytes();
    }
    let args = [Arg::Bytes(&args)];
    let over_all = Launch::new(splits, 128).by(out_rows as u32, 1).overlapping();
    let over_rows = Launch::new(out_rows as u32, 512).overlapping();
    // SAFETY: the caller's; the struct is `SampleArgs` of kernels/sample.cuh.
    unsafe {
        queue.launch("sample", "sample_peaks", over_all, &args)?;
        queue.launch("sample", "sample_masses", over_all, &args)?;
        queue.launch("sample_finish", "sample_finish", over_rows, &args)
    }
}

/// Fills histories of slots from one [`crate::sample_rows::Part`] of loads. Goes between steps, outside of recordings:
/// only steps that admit a request with penalties need it.
///
/// # Safety
/// As for [`sample`]; `loads` has records of [`crate::sample_rows::SeenParts`] for as many loads as the `u32` at
/// `count` says, at most `loads_max`, and `tokens` what they name.
pub unsafe fn load_seen(
    queue: &Queue<'_>,
    at: &SampleMemory,
    memory: Address,
    (loads, count, loads_max): (Address, Address, usize),
    tokens: Address,
) -> Result<(), CudaError> {
    let ranges = (at.vocab.div_ceil(BLOCK) * BLOCK).div_ceil(SEEN_RANGE);
    let launch = Launch::new(ranges as u32, 256).by(loads_max as u32, 1);
    let (seen, vocab) = (memory.plus(at.seen), at.vocab as u32);
    let args = [loads.into(), count.into(), tokens.into(), seen.into(), vocab.into()];
    // SAFETY: the caller's.
    unsafe { queue.launch("sample_load", "sample_load_seen", launch, &args) }
}

/// Fills bias tables of slots, likewise.
///
/// # Safety
/// As for [`load_seen`], with records and entries of [`crate::sample_rows::BiasTables::update`].
pub unsafe fn load_biases(
    queue: &Queue<'_>,
    at: &SampleMemory,
    memory: Address,
    (loads, count, loads_max): (Address, Address, usize),
    entries: Address,
) -> Result<(), CudaError> {
    let launch = Launch::new(loads_max as u32, 256);
    let (biased, biases) = (memory.plus(at.biased), memory.plus(at.biases));
    let (vocab, bias_max) = (at.vocab as u32, LOGIT_BIAS_MAX as u32);
    let args = [
        loads.into(),
        count.into(),
        entries.into(),
        biased.into(),
        biases.into(),
        vocab.into(),
        bias_max.into(),
    ];
    // SAFETY: the caller's.
    unsafe { queue.launch("sample_load", "sample_load_biases", launch, &args) }
}

/// Blocks that share a row. Any number gives the same bits; eight blocks fit on a processor at a time, and one
/// warp has at least 512 tokens.
fn splits(vocab: usize, out_rows: usize, processors: u32) -> u32 {
    let most = vocab.div_ceil(4 * BLOCK) as u32;
    (8 * processors / out_rows.max(1) as u32).clamp(1, most)
}

/// Tokens whose weight is kept as one sum, `BLOCK` of kernels/sample.cuh.
const BLOCK: usize = 512;

/// `GROUPS_MAX` of kernels/sample_search.cuh, in tokens.
pub(crate) const VOCAB_MAX: usize = 327_680;

/// `RANGE` of kernels/sample_load.cu.
const SEEN_RANGE: usize = 4096;

/// `SampleArgs` of kernels/sample.cuh.
const ARGS_BYTES: usize = 120;

/// Where arrays start.
const ALIGN: usize = 256;

const _: () = assert!(RESULT_BYTES == 176, "`Scored` of kernels/sample.cuh");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_follow_one_another_and_every_split_fits() {
        for (vocab, out_rows, slots) in [(1, 1, 2), (257, 3, 4), (151_936, 256, 257), (VOCAB_MAX, 8, 9)] {
            let at = SampleMemory::new(vocab, out_rows, slots);
            let blocks = vocab.div_ceil(512);
            let sizes = [
                slots * blocks * 1024,
                slots * blocks * 64,
                slots * 8192,
                out_rows * blocks * 32,
                out_rows * blocks * 16,
                out_rows * blocks * 8,
            ];
            let starts = [at.seen, at.biased, at.biases, at.keys, at.masses, at.peaks, at.end];
            for (i, size) in sizes.into_iter().enumerate() {
                assert!(starts[i].is_multiple_of(256) && starts[i] + size <= starts[i + 1], "{at:?}");
            }
            for rows in 1..=out_rows {
                assert!((1..=blocks as u32).contains(&splits(vocab, rows, 132)), "{vocab} {rows}");
            }
        }
    }

    #[test]
    fn a_lone_row_is_spread_and_many_rows_are_not() {
        assert_eq!((splits(151_936, 1, 132), splits(151_936, 256, 132), splits(300, 1, 132)), (75, 4, 1));
    }
}
