//! F32, F16 and BF16 weights: widened to f32 in registers.

use super::{Kernel, Operands};
use crate::elementwise::lanes::LANES;
use crate::quads::Quads;
use half::{bf16, f16};
use std::marker::PhantomData;

/// `sum = fma(x[k], w[k], sum)` for k ascending.
pub(super) struct Plain<E>(PhantomData<E>);

/// A storage type.
pub(super) trait Element: Sized {
    /// Widens `LANES` of them; exact.
    fn load<S: Quads>(s: S, from: &[Self; LANES]) -> S::F;
}

impl Element for f32 {
    #[inline(always)]
    fn load<S: Quads>(s: S, from: &[Self; LANES]) -> S::F {
        s.load(from)
    }
}

impl Element for f16 {
    #[inline(always)]
    fn load<S: Quads>(s: S, from: &[Self; LANES]) -> S::F {
        s.load_f16(from)
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn load<S: Quads>(s: S, from: &[Self; LANES]) -> S::F {
        s.load_bf16(from)
    }
}

impl<E: Element> Kernel for Plain<E> {
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
        let panels = panels.map(|panel| panel.cast::<[E; LANES]>());
        let mut sums = [[s.splat(0.0); P]; R];
        for k in 0..blocks {
            let mut weights = [s.splat(0.0); P];
            for p in 0..P {
                if ahead > 0 && (k * size_of::<[E; LANES]>()).is_multiple_of(64) {
                    s.prefetch_far(panels[p].wrapping_add(k).cast::<u8>().wrapping_add(ahead));
                }
                // SAFETY: a panel has `blocks` vectors and starts on a cache line.
                weights[p] = E::load(s, unsafe { &*panels[p].add(k) });
            }
            for r in 0..R {
                // SAFETY: a row has `blocks` floats.
                let x = s.splat(unsafe { *rows[r].add(k) });
                for p in 0..P {
                    sums[r][p] = s.fma(x, weights[p], sums[r][p]);
                }
            }
        }
        sums
    }
}
