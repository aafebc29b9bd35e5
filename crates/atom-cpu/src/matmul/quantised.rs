//! Weights in blocks, with quantised or with f32 activations.

use super::{Codes, Kernel, Operands};
use crate::elementwise::lanes::LANES;
use crate::pack::{SUPER_BLOCK, code_bytes, scale_bytes};
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

/// Q5_0: as Q4_0; the integer sum is over `code - 16`.
pub(super) struct FiveBits;

/// Q5_1: as Q4_1.
pub(super) struct FiveBitsAndMinimum;

/// Q4_K: as Q4_1, with scales and minima that are products, exact in f32: 11 bits and 6.
pub(super) struct SuperNibbles;

/// Q5_K: as Q4_K.
pub(super) struct SuperFiveBits;

/// Q6_K: as Q8_0 for each half of a block, whose scale is a product, exact in f32; the integer sums are over
/// `code - 32`.
pub(super) struct SuperSixBits;

/// The same weights with f32 activations: `sum = fma(x[k], w[k], sum)` for k ascending, where `w[k]`
/// is the element as its format defines it: `d * code` or `fma(d, code, m)`, with exact products.
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
    /// Of a code: 4, 5, 6 or 8. What is above four is held in vectors of its own, but for 8.
    const BITS: u32;
    /// Stored minus true code.
    const ZERO: i32;
    /// A block has an offset behind its scale.
    const MINIMUM: bool;
    /// Scales are those of super-blocks.
    const SUPER: bool = Self::DTYPE.block_elements() > BLOCK;
    /// Each half of a block has a scale of its own.
    const HALVES: bool = Self::SUPER && !Self::MINIMUM;
}

macro_rules! formats {
    ($($name:ident = $dtype:ident: bits $bits:literal, zero $zero:literal, minimum $minimum:literal;)+) => {
        $(impl Blocks for $name {
            const DTYPE: DType = DType::$dtype;
            const BITS: u32 = $bits;
            const ZERO: i32 = $zero;
            const MINIMUM: bool = $minimum;
        })+
    };
}

formats! {
    Bytes = Q8_0: bits 8, zero 128, minimum false;
    Nibbles = Q4_0: bits 4, zero 8, minimum false;
    NibblesAndMinimum = Q4_1: bits 4, zero 0, minimum true;
    FiveBits = Q5_0: bits 5, zero 16, minimum false;
    FiveBitsAndMinimum = Q5_1: bits 5, zero 0, minimum true;
    SuperNibbles = Q4_K: bits 4, zero 0, minimum true;
    SuperFiveBits = Q5_K: bits 5, zero 0, minimum true;
    SuperSixBits = Q6_K: bits 6, zero 32, minimum false;
}

impl<Q: Blocks> Kernel for Q {
    type Row = Quantised;

    #[inline(always)]
    unsafe fn row(operands: &Operands<'_>, row: usize) -> Self::Row {
        let Codes { codes, scales, rows, .. } = operands.codes.expect("chosen only when there are codes");
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
            for half in 0..const { if Q::HALVES { 2 } else { 1 } } {
                // SAFETY: panels have `blocks` blocks, rows as many in each plane.
                let dots = unsafe { dots::<Q, S, R, P>(s, &rows, &panels, b, x_block, half) };
                for p in 0..P {
                    // SAFETY: as above.
                    let (step, minimum) = unsafe { half_scales::<Q, S>(s, panels[p], blocks, b, half) };
                    for r in 0..R {
                        // SAFETY: as above.
                        let x = unsafe { &*rows[r].scales.add(x_block) };
                        let scale = s.mul(step, s.splat(x.step));
                        sums[r][p] = s.fma(scale, s.to_float(dots[r][p]), sums[r][p]);
                        if Q::MINIMUM {
                            sums[r][p] = s.fma(minimum, s.splat(x.scaled_total), sums[r][p]);
                        }
                    }
                }
            }
        }
        sums
    }
}

/// Integer sums of one block, or of half of it if halves have scales of their own.
///
/// # Safety
/// Panels have more than `block` blocks, rows more than `x_block`.
#[inline(always)]
unsafe fn dots<Q: Blocks, S: Quads, const R: usize, const P: usize>(
    s: S,
    rows: &[Quantised; R],
    panels: &[*const u8; P],
    block: usize,
    x_block: usize,
    half: usize,
) -> [[S::I; P]; R] {
    // SAFETY: passed on.
    unsafe {
        if Q::BITS == 4 {
            return nibble_dots::<Q, S, R, P>(s, rows, panels, block, x_block);
        }
        if Q::BITS == 8 {
            return byte_dots::<Q, S, R, P>(s, rows, panels, block, x_block);
        }
        let mut sums = half_dots::<Q, S, R, P>(s, rows, panels, block, x_block, half);
        if !Q::HALVES {
            let second = half_dots::<Q, S, R, P>(s, rows, panels, block, x_block, 1);
            for r in 0..R {
                for p in 0..P {
                    sums[r][p] = s.add_sums(sums[r][p], second[r][p]);
                }
            }
        }
        sums
    }
}

/// Integer sums of codes of 4 bits.
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

/// As [`nibble_dots`], for codes of 5 or 6 bits and half a block.
///
/// # Safety
/// Panels have more than `block` blocks, rows more than `x_block`.
#[inline(always)]
unsafe fn half_dots<Q: Blocks, S: Quads, const R: usize, const P: usize>(
    s: S,
    rows: &[Quantised; R],
    panels: &[*const u8; P],
    block: usize,
    x_block: usize,
    half: usize,
) -> [[S::I; P]; R] {
    let mut dots = [[s.bytes(0); P]; R];
    // As many as a running sum takes.
    let quads = const { if Q::BITS == 5 { QUADS_PER_HALF } else { QUADS_PER_HALF / 2 } };
    for part in 0..QUADS_PER_HALF / quads {
        let mut start = [0; R];
        let mut sums = [[s.nibbles(0); P]; R];
        for r in 0..R {
            // SAFETY: the row has this block.
            let total = unsafe { (*rows[r].scales.add(x_block)).half_total(half) };
            start[r] = if part == 0 { -Q::ZERO * total } else { 0 };
            sums[r] = [s.nibbles(start[r]); P];
        }
        for quad in 0..quads {
            let quad = half * QUADS_PER_HALF + part * quads + quad;
            let mut weights = [s.load_codes(&NO_CODES); P];
            for p in 0..P {
                // SAFETY: the panel has this block.
                weights[p] = unsafe { codes_at::<Q, S>(s, panels[p], block, quad) };
            }
            for r in 0..R {
                // SAFETY: the row has this block.
                let x = unsafe { rows[r].quad(x_block, quad) };
                for p in 0..P {
                    sums[r][p] = s.dot_nibbles(sums[r][p], weights[p], x);
                }
            }
        }
        for r in 0..R {
            for p in 0..P {
                dots[r][p] = s.add_sums(dots[r][p], s.nibbles_sum(sums[r][p], start[r]));
            }
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
            for quad in 0..2 * QUADS_PER_HALF {
                if quad == 0 || Q::HALVES && quad == QUADS_PER_HALF {
                    for p in 0..P {
                        let half = quad / QUADS_PER_HALF;
                        // SAFETY: the panel has this block.
                        block_scales[p] = unsafe { half_scales::<Q, S>(s, panels[p], blocks, b, half) };
                    }
                }
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

/// Vector `vector` of a block of codes, as [`crate::pack`] lays them out.
///
/// # Safety
/// The panel has this block, and lives for `'a`.
#[inline(always)]
pub(super) unsafe fn codes<'a, Q: Blocks>(panel: *const u8, block: usize, vector: usize) -> &'a CodeBytes {
    // SAFETY: the caller's promise; bytes need no alignment.
    unsafe { &*panel.add(block * code_bytes(Q::DTYPE)).cast::<CodeBytes>().add(vector) }
}

/// Stored codes of inputs `quad * 4 ..` of a block, one a byte, whatever the format.
///
/// # Safety
/// The panel has this block.
#[inline(always)]
pub(super) unsafe fn codes_at<Q: Blocks, S: Quads>(
    s: S,
    panel: *const u8,
    block: usize,
    quad: usize,
) -> S::B {
    // SAFETY: the caller's promise.
    let vector = |vector| s.load_codes(unsafe { codes::<Q>(panel, block, vector) });
    if Q::BITS == 8 {
        return vector(quad);
    }
    let (half, in_half) = (quad / QUADS_PER_HALF, quad % QUADS_PER_HALF);
    let nibbles = if half == 0 { s.low(vector(in_half)) } else { s.high(vector(in_half)) };
    match Q::BITS {
        5 => s.with_upper(nibbles, vector(QUADS_PER_HALF), quad, 0x10),
        6 => s.with_upper(nibbles, vector(QUADS_PER_HALF + half), 2 * in_half, 0x30),
        _ => nibbles,
    }
}

/// Scale and offset of each lane in a block; the offset only if the format has one. If halves have scales of
/// their own ([`Blocks::HALVES`]), those of half 0 or 1; else `half` makes no difference.
///
/// # Safety
/// The panel has `blocks` blocks, more than `block`.
#[inline(always)]
pub(super) unsafe fn half_scales<Q: Blocks, S: Quads>(
    s: S,
    panel: *const u8,
    blocks: usize,
    block: usize,
    half: usize,
) -> (S::F, S::F) {
    let none = s.splat(0.0);
    // SAFETY: scales stand behind the codes, halves on even addresses.
    unsafe {
        let scales = panel.add(blocks * code_bytes(Q::DTYPE));
        if !Q::SUPER {
            let scales = scales.add(block * scale_bytes(Q::DTYPE)).cast::<[f16; LANES]>();
            return (s.load_f16(&*scales), if Q::MINIMUM { s.load_f16(&*scales.add(1)) } else { none });
        }
        let head = scales.add(block / SUPER_BLOCK * (SUPER_BLOCK * scale_bytes(Q::DTYPE)));
        let head = head.cast::<[f16; LANES]>();
        let own = head.add(if Q::MINIMUM { 2 } else { 1 }).cast::<[i8; LANES]>();
        let own = own.add(block % SUPER_BLOCK * 2);
        let step = |half| s.mul(s.load_f16(&*head), s.load_i8(&*own.add(half)));
        if Q::MINIMUM {
            (step(0), s.mul(s.load_f16(&*head.add(1)), s.load_i8(&*own.add(1))))
        } else {
            (step(half), none)
        }
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
