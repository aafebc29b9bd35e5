//! Weights as the kernels read them: panels of 16 outputs.
//!
//! A plain panel is `[inputs][16]` in the storage type. A quantised panel is its blocks' codes, block
//! by block, and behind them its blocks' scales:
//!
//! * Q8_0: `[8][16][4]` bytes, code + 128 of 4 consecutive inputs of each output; 16 f16 scales.
//! * Q4_0, Q4_1: `[4][16][4]` bytes; the low nibbles are inputs `4i ..`, the high ones `16 + 4i ..`,
//!   so that one load gives two vectors; 16 f16 scales, for Q4_1 then 16 f16 offsets.
//!
//! FP8 is expanded to f32, code times scale, and held as such.
//!
//! The last panel is filled up with zeros. Every panel starts on a cache line.

use crate::aligned::Piece;
use crate::elementwise::lanes::LANES;
use crate::pool::Pool;
use crate::quads::QUAD;
use crate::shared::share;

use atom_ops::{OpsError, Slice};
use atom_weights::{DType, quant};

/// A rank's slice of one tensor, packed.
pub(crate) struct Packed {
    /// How elements are held here.
    pub(crate) dtype: DType,
    /// Width of the rows that it multiplies.
    pub(crate) inputs: usize,
    /// Outputs, without the padding.
    pub(crate) outputs: usize,
    panel_bytes: usize,
    data: Piece,
}

impl Packed {
    /// Bytes that a checked slice takes when it is packed.
    pub(crate) fn bytes_of(slice: &Slice) -> usize {
        slice.rows.len().div_ceil(LANES) * panel_bytes(slice)
    }

    /// Packs a checked slice into a piece of that size, panels in parallel.
    pub(crate) fn new(slice: &Slice, data: Piece, pool: &mut Pool) -> Self {
        assert_eq!(data.len(), Self::bytes_of(slice), "room for {:?}", slice.tensor);
        let (dtype, inputs, outputs) = (held(slice.tensor.dtype), slice.cols.len(), slice.rows.len());
        let (panels, panel_bytes) = (outputs.div_ceil(LANES), panel_bytes(slice));
        let base = PanelBase(data.as_ptr());
        pool.run(&|worker| {
            for panel in share(panels, worker.index, worker.count) {
                // SAFETY: within the piece, which nobody else has yet; each panel is written by one
                // worker, and zeroed before there are references to it.
                let bytes = unsafe {
                    base.at(panel * panel_bytes).write_bytes(0, panel_bytes);
                    std::slice::from_raw_parts_mut(base.at(panel * panel_bytes), panel_bytes)
                };
                pack_panel(slice, panel, bytes);
            }
        });
        Self { dtype, inputs, outputs, panel_bytes, data }
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
        self.inputs / self.dtype.block_elements()
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

fn panel_bytes(slice: &Slice) -> usize {
    let dtype = held(slice.tensor.dtype);
    let blocks = slice.cols.len() / dtype.block_elements();
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

/// Bytes of one block of codes of a panel.
pub(crate) const fn code_bytes(dtype: DType) -> usize {
    match dtype {
        DType::F32 | DType::F8_E4M3 => 4 * LANES,
        DType::F16 | DType::BF16 => 2 * LANES,
        DType::Q8_0 => 32 * LANES,
        DType::Q4_0 | DType::Q4_1 => 16 * LANES,
    }
}

/// Bytes of one block of scales of a panel.
pub(crate) const fn scale_bytes(dtype: DType) -> usize {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 | DType::F8_E4M3 => 0,
        DType::Q8_0 | DType::Q4_0 => 2 * LANES,
        DType::Q4_1 => 4 * LANES,
    }
}

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

fn pack_panel(slice: &Slice, panel: usize, to: &mut [u8]) {
    let dtype = slice.tensor.dtype;
    let blocks = slice.cols.len() / dtype.block_elements();
    if dtype == DType::F8_E4M3 {
        return expand_panel(slice, panel, to);
    }
    let (codes, scales) = to.split_at_mut(blocks * code_bytes(dtype));
    let first = panel * LANES;
    for lane in 0..LANES.min(slice.rows.len() - first) {
        let from = row_bytes(slice, first + lane);
        match dtype {
            DType::F32 => interleave::<4>(from, codes, lane),
            DType::F16 | DType::BF16 => interleave::<2>(from, codes, lane),
            DType::Q8_0 => pack_blocks::<34, 2>(from, codes, scales, lane, 0x80),
            DType::Q4_0 => pack_blocks::<18, 2>(from, codes, scales, lane, 0),
            DType::Q4_1 => pack_blocks::<20, 4>(from, codes, scales, lane, 0),
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

/// Packs blocks of `BLOCK` bytes that begin with `SCALES` bytes of f16 scales; codes are xored with
/// `flip` (0x80 turns a signed byte into that byte plus 128).
fn pack_blocks<const BLOCK: usize, const SCALES: usize>(
    from: &[u8],
    codes: &mut [u8],
    scales: &mut [u8],
    lane: usize,
    flip: u8,
) {
    let quads_per_block = (BLOCK - SCALES) / QUAD;
    for (b, block) in from.as_chunks::<BLOCK>().0.iter().enumerate() {
        for (s, scale) in block[..SCALES].as_chunks::<2>().0.iter().enumerate() {
            let at = b * SCALES * LANES + (s * LANES + lane) * 2;
            scales[at..at + 2].copy_from_slice(scale);
        }
        for (q, quad) in block[SCALES..].as_chunks::<QUAD>().0.iter().enumerate() {
            let at = ((b * quads_per_block + q) * LANES + lane) * QUAD;
            codes[at..at + QUAD].copy_from_slice(&quad.map(|byte| byte ^ flip));
        }
    }
}
