//! Products of bf16 weights with activations that are bf16 numbers, in the order in which AMX adds: over 32
//! inputs, the products of even inputs make one chain and those of odd ones another; then
//! `sum = sum + (even + odd)`.
//!
//! A product of two bf16 numbers is exact in f32, so it is the same with a fused addition or without one.

use super::{Kernel, Operands};
use crate::elementwise::lanes::LANES;
use crate::quads::Quads;
use crate::round::TILE_ELEMENTS;
use half::bf16;

/// bf16 weights, two inputs side by side.
pub(super) struct Pairs;

/// A row of rounded activations.
#[derive(Clone, Copy)]
pub(super) struct Row {
    /// `[inputs]`
    x: *const f32,
    inputs: usize,
}

/// # Safety
/// As for [`Kernel::row`].
#[inline(always)]
unsafe fn row(operands: &Operands<'_>, row: usize) -> Row {
    let codes = operands.codes.expect("chosen only when there are rounded rows");
    let row = codes.rows.at(row);
    // SAFETY: passed on.
    unsafe { Row { x: codes.codes.row(row).as_ptr().cast(), inputs: operands.x.width() } }
}

/// `dots[r][p] += x[r][input] * weights[p]`
///
/// # Safety
/// Rows have this input.
#[inline(always)]
unsafe fn add<S: Quads, const R: usize, const P: usize>(
    s: S,
    rows: &[Row; R],
    input: usize,
    weights: &[S::F; P],
    dots: &mut [[S::F; P]; R],
) {
    for r in 0..R {
        // SAFETY: the caller's promise.
        let x = s.splat(unsafe { *rows[r].x.add(input) });
        for p in 0..P {
            dots[r][p] = s.fma(x, weights[p], dots[r][p]);
        }
    }
}

impl Kernel for Pairs {
    type Row = Row;

    #[inline(always)]
    unsafe fn row(operands: &Operands<'_>, index: usize) -> Row {
        // SAFETY: passed on.
        unsafe { row(operands, index) }
    }

    #[inline(always)]
    unsafe fn tile<S: Quads, const R: usize, const P: usize>(
        s: S,
        rows: [Row; R],
        panels: [*const u8; P],
        _blocks: usize,
        ahead: usize,
    ) -> [[S::F; P]; R] {
        let panels = panels.map(|panel| panel.cast::<[[bf16; 2]; LANES]>());
        let inputs = rows[0].inputs;
        let mut sums = [[s.splat(0.0); P]; R];
        for first in (0..inputs).step_by(TILE_ELEMENTS) {
            let (mut even, mut odd) = ([[s.splat(0.0); P]; R], [[s.splat(0.0); P]; R]);
            let end = inputs.min(first + TILE_ELEMENTS);
            for pair in first / 2..end / 2 {
                let (mut weights, mut next) = ([s.splat(0.0); P], [s.splat(0.0); P]);
                for p in 0..P {
                    if ahead > 0 {
                        s.prefetch_far(panels[p].wrapping_add(pair).cast::<u8>().wrapping_add(ahead));
                    }
                    // SAFETY: a panel has `inputs / 2` vectors, rounded up, and starts on a cache line.
                    [weights[p], next[p]] = s.load_pairs(unsafe { &*panels[p].add(pair) });
                }
                // SAFETY: a row has `inputs` floats.
                unsafe {
                    add::<S, R, P>(s, &rows, 2 * pair, &weights, &mut even);
                    add::<S, R, P>(s, &rows, 2 * pair + 1, &next, &mut odd);
                }
            }
            if end % 2 == 1 {
                let mut weights = [s.splat(0.0); P];
                for p in 0..P {
                    // SAFETY: as above: the last pair is half a one.
                    [weights[p], _] = s.load_pairs(unsafe { &*panels[p].add(end / 2) });
                }
                // SAFETY: as above.
                unsafe { add::<S, R, P>(s, &rows, end - 1, &weights, &mut even) };
            }
            for r in 0..R {
                for p in 0..P {
                    sums[r][p] = s.add(sums[r][p], s.add(even[r][p], odd[r][p]));
                }
            }
        }
        sums
    }
}
