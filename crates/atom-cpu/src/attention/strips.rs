//! The two inner loops of attention, compiled for each number of pairs so that their accumulators stay
//! in registers.

use super::cache::Element;
use super::kernel::{BLOCKS, Blocks};
use super::{BUNDLE, PARTITION};
use crate::elementwise::lanes::{Kernel, LANES, Lanes};
use std::ops::Range;

/// A loop over `R` pairs and, where the registers allow, `N` vectors at once.
pub(super) trait Strip {
    fn run<S: Lanes, const R: usize, const N: usize>(self, s: S);
}

/// Runs `loops` for `pairs` pairs, at most [`BUNDLE`] and at most what the registers hold. How many
/// vectors go together changes no bit: each accumulator is a chain of its own.
#[inline(always)]
pub(super) fn strip<S: Lanes>(s: S, pairs: usize, loops: impl Strip) {
    if S::ACCUMULATORS == 16 {
        match pairs {
            1 => s.call(Shaped::<_, 1, 4>(loops)),
            2 => s.call(Shaped::<_, 2, 4>(loops)),
            3 => s.call(Shaped::<_, 3, 4>(loops)),
            4 => s.call(Shaped::<_, 4, 4>(loops)),
            5 => s.call(Shaped::<_, 5, 2>(loops)),
            6 => s.call(Shaped::<_, 6, 2>(loops)),
            7 => s.call(Shaped::<_, 7, 2>(loops)),
            8 => s.call(Shaped::<_, 8, 2>(loops)),
            _ => unreachable!("{pairs} pairs in a bundle"),
        }
    } else {
        match pairs {
            1 => s.call(Shaped::<_, 1, 4>(loops)),
            2 => s.call(Shaped::<_, 2, 2>(loops)),
            3 => s.call(Shaped::<_, 3, 1>(loops)),
            4 => s.call(Shaped::<_, 4, 1>(loops)),
            _ => unreachable!("{pairs} pairs in four accumulators"),
        }
    }
}

/// Scores of the positions that the pairs see, rounded up to whole vectors; nothing is masked yet.
pub(super) struct Scores<'a, T> {
    pub(super) blocks: &'a Blocks<T>,
    /// `[head_dim, BUNDLE]`
    pub(super) queries: &'a [f32],
    /// First of the pairs within the bundle.
    pub(super) first: usize,
    /// Positions that each pair sees, ascending. `[pairs]`
    pub(super) seen: &'a [usize],
    /// Where scores go. `[pairs, PARTITION]`
    pub(super) weights: &'a mut [f32],
}

impl<T: Element> Strip for Scores<'_, T> {
    #[inline(always)]
    fn run<S: Lanes, const R: usize, const N: usize>(mut self, s: S) {
        let most = *self.seen.last().expect("a strip has pairs");
        let len = most.div_ceil(LANES);
        assert!(self.seen.len() == R && self.first + R <= BUNDLE && len <= BLOCKS);
        assert!(self.weights.len() == R * PARTITION);
        let whole = len - len % N;
        for block in (0..whole).step_by(N) {
            self.score::<S, R, N>(s, block);
        }
        for block in whole..len {
            self.score::<S, R, 1>(s, block);
        }
    }
}

impl<T: Element> Scores<'_, T> {
    /// Scores of `N` blocks from `block`.
    #[inline(always)]
    fn score<S: Lanes, const R: usize, const N: usize>(&mut self, s: S, block: usize) {
        let mut sums = [[s.splat(0.0); N]; R];
        let (columns, _) = self.queries.as_chunks::<BUNDLE>();
        let mut offset = 0;
        for (element, column) in columns.iter().enumerate() {
            if R <= BUNDLE / 2 {
                self.ask::<S, N>(s, block, element);
            }
            // SAFETY: `offset` walks the head's elements within the keys of a block that was looked up,
            // and the assertion of `run` bounds the columns.
            unsafe {
                let mut keys = [s.splat(0.0); N];
                for (n, keys) in keys.iter_mut().enumerate() {
                    let at = self.blocks.keys.get_unchecked(block + n).add(offset);
                    *keys = T::widen(s, &*at.cast());
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let query = s.splat(*column.get_unchecked(self.first + r));
                    for (sum, keys) in sums.iter_mut().zip(keys) {
                        *sum = s.fma(query, keys, *sum);
                    }
                }
            }
            offset += self.blocks.key_stride;
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (n, sum) in sums.into_iter().enumerate() {
                // SAFETY: [R, PARTITION] floats, as asserted in `run`, and block + n < BLOCKS.
                unsafe {
                    let at = self.weights.as_mut_ptr().add(r * PARTITION + (block + n) * LANES);
                    s.store(sum, &mut *at.cast());
                }
            }
        }
    }
}

impl<T: Element> Scores<'_, T> {
    /// Asks for one element of the keys that are scored next, and for a vector of the values that
    /// follow. Few pairs do little with what they load, so the processor's own guesses come late:
    /// measured, 5-10 % at contexts beyond the caches.
    #[inline(always)]
    fn ask<S: Lanes, const N: usize>(&self, s: S, block: usize, element: usize) {
        let Blocks { keys, values, key_stride, .. } = self.blocks;
        for n in block..block + N {
            s.prefetch(keys[(n + N).min(BLOCKS - 1)].wrapping_add(element * key_stride));
            s.prefetch(values[n.min(BLOCKS - 1)].wrapping_add(element * LANES));
        }
    }
}

/// Adds weighted values of some positions to the sums of the pairs, position by position.
pub(super) struct AddValues<'a, T> {
    pub(super) blocks: &'a Blocks<T>,
    pub(super) positions: Range<usize>,
    /// `[pairs, PARTITION]`
    pub(super) weights: &'a [f32],
    /// `[pairs, sum_width]`
    pub(super) sums: &'a mut [f32],
}

impl<T: Element> Strip for AddValues<'_, T> {
    #[inline(always)]
    fn run<S: Lanes, const R: usize, const N: usize>(mut self, s: S) {
        assert!(self.positions.end <= PARTITION && self.weights.len() == R * PARTITION);
        assert!(self.sums.len() == R * (LANES + self.blocks.value_stride));
        let len = self.blocks.value_stride / LANES;
        let whole = len - len % N;
        for vector in (0..whole).step_by(N) {
            self.add::<S, R, N>(s, vector);
        }
        for vector in whole..len {
            self.add::<S, R, 1>(s, vector);
        }
    }
}

impl<T: Element> AddValues<'_, T> {
    /// Adds `N` vectors of each value from `vector`.
    #[inline(always)]
    fn add<S: Lanes, const R: usize, const N: usize>(&mut self, s: S, vector: usize) {
        let stride = self.blocks.value_stride;
        let width = LANES + stride;
        let mut sums = [[s.splat(0.0); N]; R];
        let at = |r: usize, n: usize| r * width + LANES + (vector + n) * LANES;
        for (r, sums) in sums.iter_mut().enumerate() {
            for (n, sum) in sums.iter_mut().enumerate() {
                *sum = s.read(&self.sums[at(r, n)..][..LANES]);
            }
        }
        let mut position = self.positions.start;
        while position < self.positions.end {
            let end = (position + 1).next_multiple_of(LANES).min(self.positions.end);
            // SAFETY: positions below the end were looked up; a block holds the values of sixteen.
            unsafe {
                let mut values = self.blocks.values.get_unchecked(position / LANES).add(vector * LANES);
                values = values.add(position % LANES * stride);
                for position in position..end {
                    let mut value = [s.splat(0.0); N];
                    for (n, value) in value.iter_mut().enumerate() {
                        *value = T::widen(s, &*values.add(n * LANES).cast());
                    }
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let weight = s.splat(*self.weights.get_unchecked(r * PARTITION + position));
                        for (sum, value) in sums.iter_mut().zip(value) {
                            *sum = s.fma(weight, value, *sum);
                        }
                    }
                    values = values.wrapping_add(stride);
                }
            }
            position = end;
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (n, sum) in sums.into_iter().enumerate() {
                s.write(sum, &mut self.sums[at(r, n)..][..LANES]);
            }
        }
    }
}

/// A strip with its sizes, as a kernel.
struct Shaped<K, const R: usize, const N: usize>(K);

impl<K: Strip, const R: usize, const N: usize> Kernel for Shaped<K, R, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        self.0.run::<S, R, N>(s);
    }
}
