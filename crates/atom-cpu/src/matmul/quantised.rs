//! Q8_0, Q4_0 and Q4_1 weights, with quantised or with f32 activations.

use super::{Codes, Kernel, Operands};
use crate::elementwise::lanes::LANES;
use crate::pack::{code_bytes, scale_bytes};
use crate::quads::{CodeBytes, QUAD, Quads};
use crate::quantise::{BLOCK, BlockScale};
use atom_weights::DType;
use half::f16;
use std::marker::PhantomData;

/// Q8_0. Per block: `sum = fma(d * step, codes . codes, sum)`.
pub(super) struct Bytes;

/// Q4_0: as Q8_0; the integer sum is over `code - 8`.
pub(super) struct Nibbles;

/// Q4_1: as Q8_0, then `sum = fma(m, step * total, sum)`.
pub(super) struct NibblesAndMinimum;

/// The same weights with f32 activations: `sum = fma(x[k], w[k], sum)` for k ascending, where `w[k]`
/// is `d * code`, for Q4_1 `fma(d, code, m)`.
pub(super) struct Exact<Q>(PhantomData<Q>);

/// A row of quantised activations.
#[derive(Clone, Copy)]
pub(super) struct Quantised {
    /// `[inputs]`
    pub(super) codes: *const i8,
    /// `[inputs / 32]`
    pub(super) scales: *const BlockScale,
    /// 1, or 2 if another set of both stands behind the first: what it left over.
    pub(super) planes: usize,
}

/// A block format.
pub(super) trait Blocks {
    /// Its name in checkpoints.
    const DTYPE: DType;
    /// Two codes a byte.
    const NIBBLES: bool;
    /// Stored minus true code.
    const ZERO: i32;
    /// A block has an offset behind its scale.
    const MINIMUM: bool;
}

impl Blocks for Bytes {
    const DTYPE: DType = DType::Q8_0;
    const NIBBLES: bool = false;
    const ZERO: i32 = 128;
    const MINIMUM: bool = false;
}

impl Blocks for Nibbles {
    const DTYPE: DType = DType::Q4_0;
    const NIBBLES: bool = true;
    const ZERO: i32 = 8;
    const MINIMUM: bool = false;
}

impl Blocks for NibblesAndMinimum {
    const DTYPE: DType = DType::Q4_1;
    const NIBBLES: bool = true;
    const ZERO: i32 = 0;
    const MINIMUM: bool = true;
}

impl<Q: Blocks> Kernel for Q {
    type Row = Quantised;

    #[inline(always)]
    unsafe fn row(operands: &Operands<'_>, row: usize) -> Self::Row {
        let Codes { codes, scales, rows } = operands.codes.expect("chosen only when there are codes");
        // SAFETY: passed on.
        unsafe {
            let (planes, row) = (codes.width() / operands.x.width(), rows.at(row));
            Quantised { codes: codes.row(row).as_ptr(), scales: scales.row(row).as_ptr(), planes }
        }
    }

    #[inline(always)]
    unsafe fn tile<S: Quads, const R: usize, const P: usize>(
        s: S,
        rows: [Self::Row; R],
        panels: [*const u8; P],
        blocks: usize,
        ahead: usize,
    ) -> [[S::F; P]; R] {
        let mut sums = [[s.splat(0.0); P]; R];
        // The second plane meets panels that the first one left in the cache.
        for x_block in 0..rows[0].planes * blocks {
            let b = if x_block < blocks { x_block } else { x_block - blocks };
            if ahead > 0 && x_block < blocks {
                prefetch::<Q, S, P>(s, &panels, blocks, b, ahead);
            }
            // SAFETY: panels have `blocks` blocks, rows as many in each plane.
            let dots = unsafe {
                if Q::NIBBLES {
                    nibble_dots::<Q, S, R, P>(s, &rows, &panels, b, x_block)
                } else {
                    byte_dots::<Q, S, R, P>(s, &rows, &panels, b, x_block)
                }
            };
            for p in 0..P {
                // SAFETY: as above.
                let (step, minimum) = unsafe { scales::<Q, S>(s, panels[p], blocks, b) };
                for r in 0..R {
                    // SAFETY: as above.
                    let x = unsafe { &*rows[r].scales.add(x_block) };
                    sums[r][p] = s.fma(s.mul(step, s.splat(x.step)), s.to_float(dots[r][p]), sums[r][p]);
                    if Q::MINIMUM {
                        sums[r][p] = s.fma(minimum, s.splat(x.scaled_total), sums[r][p]);
                    }
                }
            }
        }
        sums
    }
}

/// Integer sums of one block.
///
/// # Safety
/// Panels have more than `block` blocks, rows more than `x_block`.
#[inline(always)]
unsafe fn nibble_dots<Q: Blocks, S: Quads, const R: usize, const P: usize>(
    s: S,
    rows: &[Quantised; R],
    panels: &[*const u8; P],
    block: usize,
    x_block: usize,
) -> [[S::I; P]; R] {
    let mut start = [0; R];
    let mut sums = [[s.nibbles(0); P]; R];
    for r in 0..R {
        // SAFETY: the row has this block.
        start[r] = -Q::ZERO * unsafe { (*rows[r].scales.add(x_block)).total };
        sums[r] = [s.nibbles(start[r]); P];
    }
    for quad in 0..QUADS_PER_HALF {
        let mut pairs = [(s.low(s.load_codes(&NO_CODES)), s.high(s.load_codes(&NO_CODES))); P];
        for p in 0..P {
            // SAFETY: the panel has this block.
            let both = s.load_codes(unsafe { codes::<Q>(panels[p], block, quad) });
            pairs[p] = (s.low(both), s.high(both));
        }
        for r in 0..R {
            // SAFETY: the row has this block.
            let (x_low, x_high) =
                unsafe { (rows[r].quad(x_block, quad), rows[r].quad(x_block, quad + QUADS_PER_HALF)) };
            for p in 0..P {
                sums[r][p] = s.dot_nibbles(sums[r][p], pairs[p].0, x_low);
                sums[r][p] = s.dot_nibbles(sums[r][p], pairs[p].1, x_high);
            }
        }
    }
    let mut dots = [[s.bytes(0); P]; R];
    for r in 0..R {
        for p in 0..P {
            dots[r][p] = s.nibbles_sum(sums[r][p], start[r]);
        }
    }
    dots
}

/// As [`nibble_dots`], for codes of a byte.
///
/// # Safety
/// Panels have more than `block` blocks, rows more than `x_block`.
#[inline(always)]
unsafe fn byte_dots<Q: Blocks, S: Quads, const R: usize, const P: usize>(
    s: S,
    rows: &[Quantised; R],
    panels: &[*const u8; P],
    block: usize,
    x_block: usize,
) -> [[S::I; P]; R] {
    let mut sums = [[s.bytes(0); P]; R];
    for r in 0..R {
        // SAFETY: the row has this block.
        sums[r] = [s.bytes(unsafe { (*rows[r].scales.add(x_block)).total }); P];
    }
    for quad in 0..2 * QUADS_PER_HALF {
        let mut weights = [s.load_codes(&NO_CODES); P];
        for p in 0..P {
            // SAFETY: the panel has this block.
            weights[p] = s.load_codes(unsafe { codes::<Q>(panels[p], block, quad) });
        }
        for r in 0..R {
            // SAFETY: the row has this block.
            let x = unsafe { rows[r].quad(x_block, quad) };
            for p in 0..P {
                sums[r][p] = s.dot_bytes(sums[r][p], weights[p], x);
            }
        }
    }
    sums
}

impl<Q: Blocks> Kernel for Exact<Q> {
    type Row = *const f32;

    #[inline(always)]
    unsafe fn row(operands: &Operands<'_>, row: usize) -> Self::Row {
        // SAFETY: passed on.
        unsafe { operands.x.row(operands.x_rows.at(row)).as_ptr() }
    }

    #[inline(always)]
    unsafe fn tile<S: Quads, const R: usize, const P: usize>(
        s: S,
        rows: [Self::Row; R],
        panels: [*const u8; P],
        blocks: usize,
        ahead: usize,
    ) -> [[S::F; P]; R] {
        let mut sums = [[s.splat(0.0); P]; R];
        for b in 0..blocks {
            if ahead > 0 {
                prefetch::<Q, S, P>(s, &panels, blocks, b, ahead);
            }
            let mut block_scales = [(s.splat(0.0), s.splat(0.0)); P];
            for p in 0..P {
                // SAFETY: the panel has this block.
                block_scales[p] = unsafe { scales::<Q, S>(s, panels[p], blocks, b) };
            }
            for quad in 0..2 * QUADS_PER_HALF {
                let mut quads = [s.load_codes(&NO_CODES); P];
                for p in 0..P {
                    // SAFETY: the panel has this block.
                    quads[p] = unsafe { codes_at::<Q, S>(s, panels[p], b, quad) };
                }
                for index in 0..QUAD {
                    let mut weights = [s.splat(0.0); P];
                    for p in 0..P {
                        weights[p] = weight::<Q, S>(s, block_scales[p], s.byte(quads[p], index));
                    }
                    for r in 0..R {
                        // SAFETY: a row has `blocks * BLOCK` floats.
                        let x = s.splat(unsafe { *rows[r].add(b * BLOCK + quad * QUAD + index) });
                        for p in 0..P {
                            sums[r][p] = s.fma(x, weights[p], sums[r][p]);
                        }
                    }
                }
            }
        }
        sums
    }
}

impl Quantised {
    /// Codes `block * 32 + quad * 4 ..`, the first in the lowest bits.
    ///
    /// # Safety
    /// The row has this block.
    #[inline(always)]
    unsafe fn quad(&self, block: usize, quad: usize) -> i32 {
        // SAFETY: the caller's promise; the read is unaligned.
        i32::from_le(unsafe { self.codes.add(block * BLOCK + quad * QUAD).cast::<i32>().read_unaligned() })
    }
}

/// Fetches a block of the panels that are `ahead` bytes further on.
#[inline(always)]
fn prefetch<Q: Blocks, S: Quads, const P: usize>(
    s: S,
    panels: &[*const u8; P],
    blocks: usize,
    block: usize,
    ahead: usize,
) {
    let (codes, scales) = (code_bytes(Q::DTYPE), scale_bytes(Q::DTYPE));
    for panel in panels {
        let panel = panel.wrapping_add(ahead);
        for line in 0..codes / 64 {
            s.prefetch_far(panel.wrapping_add(block * codes + line * 64));
        }
        s.prefetch_far(panel.wrapping_add(blocks * codes + block * scales));
    }
}

/// Vector `vector` of a block of codes.
///
/// # Safety
/// The panel has this block, and lives for `'a`.
#[inline(always)]
unsafe fn codes<'a, Q: Blocks>(panel: *const u8, block: usize, vector: usize) -> &'a CodeBytes {
    // SAFETY: the caller's promise; bytes need no alignment.
    unsafe { &*panel.add(block * code_bytes(Q::DTYPE)).cast::<CodeBytes>().add(vector) }
}

/// Codes of inputs `quad * 4 ..` of a block, one a byte.
///
/// # Safety
/// The panel has this block.
#[inline(always)]
unsafe fn codes_at<Q: Blocks, S: Quads>(s: S, panel: *const u8, block: usize, quad: usize) -> S::B {
    // SAFETY: the caller's promise.
    unsafe {
        if !Q::NIBBLES {
            s.load_codes(codes::<Q>(panel, block, quad))
        } else if quad < QUADS_PER_HALF {
            s.low(s.load_codes(codes::<Q>(panel, block, quad)))
        } else {
            s.high(s.load_codes(codes::<Q>(panel, block, quad - QUADS_PER_HALF)))
        }
    }
}

/// Scale and offset of each lane in a block; the offset only if the format has one.
///
/// # Safety
/// The panel has `blocks` blocks, more than `block`.
#[inline(always)]
unsafe fn scales<Q: Blocks, S: Quads>(s: S, panel: *const u8, blocks: usize, block: usize) -> (S::F, S::F) {
    // SAFETY: scales stand behind the codes, on even addresses.
    unsafe {
        let scales = panel.add(blocks * code_bytes(Q::DTYPE) + block * scale_bytes(Q::DTYPE));
        let scales = scales.cast::<[f16; LANES]>();
        let minimum = if Q::MINIMUM { s.load_f16(&*scales.add(1)) } else { s.splat(0.0) };
        (s.load_f16(&*scales), minimum)
    }
}

/// The weight that a stored code stands for.
#[inline(always)]
fn weight<Q: Blocks, S: Quads>(s: S, (step, minimum): (S::F, S::F), code: S::F) -> S::F {
    if Q::MINIMUM {
        s.fma(step, code, minimum)
    } else {
        // Small integers are exact, so this rounds once.
        s.mul(step, s.sub(code, s.splat(Q::ZERO as f32)))
    }
}

const NO_CODES: CodeBytes = [0; size_of::<CodeBytes>()];

/// Vectors of 4 inputs in half a block.
const QUADS_PER_HALF: usize = BLOCK / QUAD / 2;
