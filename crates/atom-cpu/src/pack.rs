//! Weights as the kernels read them: panels of 16 outputs.
//!
//! A plain panel is `[inputs][16]` in the storage type. A quantised panel is its blocks' codes, block
//! by block, and behind them its blocks' scales:
//!
//! * Q8_0: `[8][16][4]` bytes, code + 128 of 4 consecutive inputs of each output; 16 f16 scales.
//! * Q4_0, Q4_1: `[4][16][4]` bytes; the low nibbles are inputs `4i ..`, the high ones `16 + 4i ..`,
//!   so that one load gives two vectors; 16 f16 scales, for Q4_1 then 16 f16 offsets.
//! * Q5_0, Q5_1: nibbles as those, and behind them `[16][4]` bytes: bit `i` of each is the fifth bit of
//!   inputs `4i ..`. Scales and offsets as in Q4_0 and Q4_1.
//! * Q4_K, Q5_K: codes in blocks of 32 as in Q4_1 and Q5_1. Scales in super-blocks of 8 such blocks: 16 f16
//!   that scales are multiplied with, 16 f16 that minima are, negative, so that they are added; then for each
//!   block 16 bytes of scales and 16 of minima.
//! * Q6_K: nibbles as in Q4_0, and behind them `[2][16][4]` bytes: bits `2i ..` of each are the upper bits of
//!   inputs `4i ..`, then of `16 + 4i ..`. Scales as in Q4_K without minima: 16 f16, then for each block 16
//!   signed bytes for its first 16 inputs and 16 for the others.
//!
//! All take what they take in the file (Q6_K 6.56 bits an element) but Q4_K and Q5_K, whose scales and minima
//! of 6 bits are bytes here: 4.625 and 5.625 bits instead of 4.5 and 5.5.
//!
//! FP8 is expanded to f32, code times scale, and held as such. bf16 that meets rounded activations lies in
//! pairs: `[inputs / 2][16][2]`, the last pair filled up with a zero, what is too small made zero (`round`).
//!
//! The last panel is filled up with zeros. Every panel starts on a cache line.

use crate::aligned::Piece;
use crate::elementwise::lanes::LANES;
use crate::pool::Pool;
use crate::quads::QUAD;
use crate::quantise::BLOCK;
use crate::round::flushed;
use crate::shared::share;

use atom_ops::{OpsError, Slice};
use atom_weights::{DType, quant, quant::SuperBlock};
use half::{bf16, f16};

/// A rank's slice of one tensor, packed.
pub(crate) struct Packed {
    /// How elements are held here.
    pub(crate) dtype: DType,
    /// They lie in pairs.
    pub(crate) paired: bool,
    /// Width of the rows that it multiplies.
    pub(crate) inputs: usize,
    /// Outputs, without the padding.
    pub(crate) outputs: usize,
    panel_bytes: usize,
    data: Piece,
}

impl Packed {
    /// Bytes that a checked slice takes when it is packed.
    pub(crate) fn bytes_of(slice: &Slice, paired: bool) -> usize {
        slice.rows.len().div_ceil(LANES) * panel_bytes(slice, paired)
    }

    /// Packs a checked slice into a piece of that size, panels in parallel; bf16 in pairs if that is wanted.
    pub(crate) fn new(slice: &Slice, paired: bool, data: Piece, pool: &mut Pool) -> Self {
        let paired = paired && slice.tensor.dtype == DType::BF16;
        assert_eq!(data.len(), Self::bytes_of(slice, paired), "room for {:?}", slice.tensor);
        let (dtype, inputs, outputs) = (held(slice.tensor.dtype), slice.cols.len(), slice.rows.len());
        let (panels, panel_bytes) = (outputs.div_ceil(LANES), panel_bytes(slice, paired));
        let base = PanelBase(data.as_ptr());
        pool.run(&|worker| {
            for panel in share(panels, worker.index, worker.count) {
                // SAFETY: within the piece, which nobody else has yet; each panel is written by one
                // worker, and zeroed before there are references to it.
                let bytes = unsafe {
                    base.at(panel * panel_bytes).write_bytes(0, panel_bytes);
                    std::slice::from_raw_parts_mut(base.at(panel * panel_bytes), panel_bytes)
                };
                pack_panel(slice, paired, panel, bytes);
            }
        });
        Self { dtype, paired, inputs, outputs, panel_bytes, data }
    }

    /// Panels of 16 outputs.
    pub(crate) fn panels(&self) -> usize {
        self.outputs.div_ceil(LANES)
    }

    /// First byte of a panel.
    pub(crate) fn panel(&self, panel: usize) -> *const u8 {
        assert!(panel < self.panels(), "panel {panel} of {}", self.panels());
        // SAFETY: within the piece by the assert.
        unsafe { self.data.as_ptr().add(panel * self.panel_bytes) }
    }

    /// Distance of panels.
    pub(crate) fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// Blocks of a row: inputs for plain types.
    pub(crate) fn blocks(&self) -> usize {
        self.inputs / block_inputs(self.dtype)
    }

    /// Bytes that one product reads.
    pub(crate) fn bytes(&self) -> usize {
        self.data.len()
    }
}

/// The type that a file's elements have in a panel.
const fn held(dtype: DType) -> DType {
    match dtype {
        DType::F8_E4M3 => DType::F32,
        other => other,
    }
}

fn panel_bytes(slice: &Slice, paired: bool) -> usize {
    let dtype = held(slice.tensor.dtype);
    let elements = if paired { slice.cols.len().next_multiple_of(2) } else { slice.cols.len() };
    let blocks = elements / block_inputs(dtype);
    (blocks * (code_bytes(dtype) + scale_bytes(dtype))).next_multiple_of(PANEL_ALIGN)
}

/// Panels start on cache lines.
const PANEL_ALIGN: usize = 64;

/// The start of a panel array that is being written.
#[derive(Clone, Copy)]
struct PanelBase(*mut u8);

// SAFETY: workers write disjoint panels through it.
unsafe impl Sync for PanelBase {}

impl PanelBase {
    /// # Safety
    /// `offset` lies within the allocation.
    unsafe fn at(&self, offset: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(offset) }
    }
}

/// Inputs of a block of a panel: super-blocks are held as blocks of 32.
const fn block_inputs(dtype: DType) -> usize {
    if dtype.block_elements() == 1 { 1 } else { BLOCK }
}

/// Bytes of one block of codes of a panel.
pub(crate) const fn code_bytes(dtype: DType) -> usize {
    match dtype {
        DType::F32 | DType::F8_E4M3 => 4 * LANES,
        DType::F16 | DType::BF16 => 2 * LANES,
        DType::Q8_0 => 32 * LANES,
        DType::Q4_0 | DType::Q4_1 | DType::Q4_K => 16 * LANES,
        DType::Q5_0 | DType::Q5_1 | DType::Q5_K => 20 * LANES,
        DType::Q6_K => 24 * LANES,
    }
}

/// Bytes of one block of scales of a panel, with its part of what a super-block has once.
pub(crate) const fn scale_bytes(dtype: DType) -> usize {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 | DType::F8_E4M3 => 0,
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => 2 * LANES,
        DType::Q4_1 | DType::Q5_1 => 4 * LANES,
        DType::Q4_K | DType::Q5_K => 4 * LANES / SUPER_BLOCK + 2 * LANES,
        DType::Q6_K => 2 * LANES / SUPER_BLOCK + 2 * LANES,
    }
}

/// Blocks of 32 of a super-block.
pub(crate) const SUPER_BLOCK: usize = 8;

/// Checks that a slice lies within its tensor and cuts no block.
pub(crate) fn check(slice: &Slice) -> Result<(), OpsError> {
    let Slice { tensor, rows, cols } = slice;
    let block = tensor.dtype.block_elements();
    let refuse = |what: String| Err(OpsError::Weights(format!("a slice of {tensor:?}: {what}")));
    if rows.is_empty() || rows.end > tensor.rows() {
        return refuse(format!("outputs {rows:?} are none, or not among its {}", tensor.rows()));
    }
    if cols.is_empty() || cols.end > tensor.cols() {
        return refuse(format!("inputs {cols:?} are none, or not among its {}", tensor.cols()));
    }
    if !cols.start.is_multiple_of(block) || !cols.end.is_multiple_of(block) {
        return refuse(format!("inputs {cols:?} cut a block of {block}; split on multiples of {block}"));
    }
    Ok(())
}

/// The bytes of a slice's columns in output `row` of the slice.
fn row_bytes(slice: &Slice, row: usize) -> &[u8] {
    let dtype = slice.tensor.dtype;
    let bytes = slice.tensor.row(slice.rows.start + row);
    &bytes[dtype.row_bytes(slice.cols.start)..dtype.row_bytes(slice.cols.end)]
}

fn pack_panel(slice: &Slice, paired: bool, panel: usize, to: &mut [u8]) {
    let dtype = slice.tensor.dtype;
    let blocks = slice.cols.len() / block_inputs(dtype);
    if dtype == DType::F8_E4M3 {
        return expand_panel(slice, panel, to);
    }
    let (codes, scales) =
        if paired { (to, &mut [][..]) } else { to.split_at_mut(blocks * code_bytes(dtype)) };
    let first = panel * LANES;
    for lane in 0..LANES.min(slice.rows.len() - first) {
        let from = row_bytes(slice, first + lane);
        match dtype {
            DType::F32 => interleave::<4>(from, codes, lane),
            DType::BF16 if paired => interleave_pairs(from, codes, lane),
            DType::F16 | DType::BF16 => interleave::<2>(from, codes, lane),
            DType::Q8_0 => pack_blocks::<34, 2>(from, codes, scales, lane, 0x80),
            DType::Q4_0 => pack_blocks::<18, 2>(from, codes, scales, lane, 0),
            DType::Q4_1 => pack_blocks::<20, 4>(from, codes, scales, lane, 0),
            DType::Q5_0 => pack_five_bits::<22, 2>(from, codes, scales, lane),
            DType::Q5_1 => pack_five_bits::<24, 4>(from, codes, scales, lane),
            DType::Q4_K | DType::Q5_K | DType::Q6_K => pack_super_blocks(dtype, from, codes, scales, lane),
            DType::F8_E4M3 => unreachable!("expanded above"),
        }
    }
}

fn expand_panel(slice: &Slice, panel: usize, to: &mut [u8]) {
    let mut values = vec![0.0; slice.cols.len()];
    let first = panel * LANES;
    for lane in 0..LANES.min(slice.rows.len() - first) {
        let row = slice.rows.start + first + lane;
        quant::expand_row(&slice.tensor, row, slice.cols.clone(), &mut values);
        for (k, value) in values.iter().enumerate() {
            let at = 4 * (k * LANES + lane);
            to[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
    }
}

/// Spreads a row's elements to lane `lane` of `[..][16]`.
fn interleave<const N: usize>(from: &[u8], to: &mut [u8], lane: usize) {
    let (from, to) = (from.as_chunks::<N>().0, to.as_chunks_mut::<N>().0);
    for (k, element) in from.iter().enumerate() {
        to[k * LANES + lane] = *element;
    }
}

/// Spreads a row of bf16 to lane `lane` of `[..][16][2]`.
fn interleave_pairs(from: &[u8], to: &mut [u8], lane: usize) {
    let to = to.as_chunks_mut::<2>().0;
    for (k, &element) in from.as_chunks::<2>().0.iter().enumerate() {
        to[(k / 2 * LANES + lane) * 2 + k % 2] = flushed(bf16::from_le_bytes(element)).to_le_bytes();
    }
}

/// Packs blocks of `BYTES` bytes that begin with `SCALES` bytes of f16 scales; codes are xored with
/// `flip` (0x80 turns a signed byte into that byte plus 128).
fn pack_blocks<const BYTES: usize, const SCALES: usize>(
    from: &[u8],
    codes: &mut [u8],
    scales: &mut [u8],
    lane: usize,
    flip: u8,
) {
    let quads_per_block = (BYTES - SCALES) / QUAD;
    for (b, block) in from.as_chunks::<BYTES>().0.iter().enumerate() {
        put_halves(&block[..SCALES], &mut scales[b * SCALES * LANES..], lane);
        for (q, quad) in block[SCALES..].as_chunks::<QUAD>().0.iter().enumerate() {
            let at = ((b * quads_per_block + q) * LANES + lane) * QUAD;
            codes[at..at + QUAD].copy_from_slice(&quad.map(|byte| byte ^ flip));
        }
    }
}

/// Packs blocks of `BYTES` bytes: `SCALES` bytes of f16 scales, 4 of fifth bits, 16 of nibbles.
fn pack_five_bits<const BYTES: usize, const SCALES: usize>(
    from: &[u8],
    codes: &mut [u8],
    scales: &mut [u8],
    lane: usize,
) {
    let to = codes.chunks_exact_mut(code_bytes(DType::Q5_0));
    for (b, (block, to)) in from.as_chunks::<BYTES>().0.iter().zip(to).enumerate() {
        put_halves(&block[..SCALES], &mut scales[b * SCALES * LANES..], lane);
        put_codes::<5>(&quant::five_bits(&block[SCALES..]), to, lane);
    }
}

fn pack_super_blocks(dtype: DType, from: &[u8], codes: &mut [u8], scales: &mut [u8], lane: usize) {
    let blocks = from.chunks_exact(dtype.block_bytes());
    let codes = codes.chunks_exact_mut(SUPER_BLOCK * code_bytes(dtype));
    let scales = scales.chunks_exact_mut(SUPER_BLOCK * scale_bytes(dtype));
    for ((block, codes), scales) in blocks.zip(codes).zip(scales) {
        let SuperBlock { d, dmin, scales: steps, minima, codes: unpacked } = SuperBlock::read(dtype, block);
        let halves = [d.to_le_bytes(), f16::to_le_bytes(-dmin)];
        let head = if dtype == DType::Q6_K { &halves[..1] } else { &halves[..] };
        put_halves(head.as_flattened(), scales, lane);
        let scales = scales[head.len() * 2 * LANES..].chunks_exact_mut(2 * LANES);
        let to = codes.chunks_exact_mut(code_bytes(dtype));
        for (b, ((from, to), scales)) in unpacked.as_chunks().0.iter().zip(to).zip(scales).enumerate() {
            scales[lane] = steps[2 * b] as u8;
            scales[LANES + lane] = if dtype == DType::Q6_K { steps[2 * b + 1] } else { minima[b] } as u8;
            match dtype {
                DType::Q4_K => put_codes::<4>(from, to, lane),
                DType::Q5_K => put_codes::<5>(from, to, lane),
                _ => put_codes::<6>(from, to, lane),
            }
        }
    }
}

/// Writes halves to lane `lane` of `[..][16]`.
fn put_halves(from: &[u8], to: &mut [u8], lane: usize) {
    for (s, half) in from.as_chunks::<2>().0.iter().enumerate() {
        let at = (s * LANES + lane) * 2;
        to[at..at + 2].copy_from_slice(half);
    }
}

/// Writes a block of codes of `BITS` bits to lane `lane` of its vectors: nibbles, then what is above them.
fn put_codes<const BITS: usize>(from: &[u8; BLOCK], to: &mut [u8], lane: usize) {
    let mut put = |vector: usize, quad: u32| {
        let at = (vector * LANES + lane) * QUAD;
        to[at..at + QUAD].copy_from_slice(&quad.to_le_bytes());
    };
    let mut quads = [0; BLOCK / QUAD];
    for (quad, from) in quads.iter_mut().zip(from.as_chunks().0) {
        *quad = u32::from_le_bytes(*from);
    }
    let (low, upper) = (0x0f0f_0f0f, 0x0303_0303);
    let (first, second) = quads.split_at(BLOCK / QUAD / 2);
    for (vector, (first, second)) in first.iter().zip(second).enumerate() {
        put(vector, first & low | (second & low) << 4);
    }
    let above = |quads: &[u32], bits: usize| {
        quads.iter().enumerate().fold(0, |all, (i, quad)| all | (quad >> 4 & upper) << (bits * i))
    };
    match BITS {
        5 => put(4, above(&quads, 1)),
        6 => {
            put(4, above(first, 2));
            put(5, above(second, 2));
        }
        _ => {}
    }
}
