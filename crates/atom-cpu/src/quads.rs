//! Integer products of quantised codes on sixteen lanes, beside the floats of [`Lanes`].
//!
//! A lane is an output of a panel. Integer sums are exact, so they may be made in any order and are
//! the same on every instruction set.

#[cfg(target_arch = "x86_64")]
mod x86;

use crate::elementwise::lanes::{LANES, Lanes, Portable};
use half::bf16;

/// Inputs that one integer dot product takes per lane.
pub(crate) const QUAD: usize = 4;

/// Codes of [`QUAD`] consecutive inputs of each lane: `[LANES][QUAD]`.
pub(crate) type CodeBytes = [u8; LANES * QUAD];

/// What the matrix kernels need of an instruction set. Methods are inlined into functions that enable
/// its features; a value proves that the processor has them.
pub(crate) trait Quads: Lanes {
    /// Most rows of a register tile: 2, 4 or 6.
    const ROWS: usize;
    /// Panels of such a tile: 1 or 2. Sums, codes and a spread activation should find registers.
    const PANELS: usize;
    /// Panels of a tile of one row, 2 or 4: enough independent sums to hide the latency.
    const WIDE: usize;
    /// [`CodeBytes`] in registers.
    type B: Copy;
    /// `[i32; LANES]`
    type I: Copy;
    /// Running sums of nibble products.
    type Nibbles: Copy;

    /// Asks for a cache line that will be read after a while: into the second-level cache. It need not be
    /// valid.
    fn prefetch_far(self, line: *const u8);
    /// Reads codes in order.
    fn load_codes(self, from: &CodeBytes) -> Self::B;
    /// The low nibble of every byte.
    fn low(self, x: Self::B) -> Self::B;
    /// The high nibble of every byte, shifted down.
    fn high(self, x: Self::B) -> Self::B;
    /// `low`, nibbles, with bits above them: of every byte of `upper` those from `at < 8` on, as many as
    /// `mask` has from bit 4 on (`0x10` or `0x30`).
    fn with_upper(self, low: Self::B, upper: Self::B, at: usize, mask: u8) -> Self::B;
    /// Signed bytes as floats.
    fn load_i8(self, from: &[i8; LANES]) -> Self::F;
    /// Byte `index < QUAD` of every lane as a float.
    fn byte(self, x: Self::B, index: usize) -> Self::F;
    /// Nearest floats; exact below 2^24.
    fn to_float(self, x: Self::I) -> Self::F;
    /// The first and the second bf16 of every lane, widened; exact.
    fn load_pairs(self, from: &[[bf16; 2]; LANES]) -> [Self::F; 2];

    /// Starts a block's sum of nibble products at `start`.
    fn nibbles(self, start: i32) -> Self::Nibbles;
    /// Adds the products of each lane's 4 weights and the 4 signed bytes of `x`, `-127 ..= 127`, the first in
    /// the lowest bits. Weights are `0 ..= 15`, and this at most 8 times after [`Self::nibbles`]; or they are
    /// up to 31 and it at most 4 times, or up to 63 and twice.
    fn dot_nibbles(self, sum: Self::Nibbles, weights: Self::B, x: i32) -> Self::Nibbles;
    /// The sum; `start` as it was given to [`Self::nibbles`].
    fn nibbles_sum(self, sum: Self::Nibbles, start: i32) -> Self::I;
    /// `a + b`
    fn add_sums(self, a: Self::I, b: Self::I) -> Self::I;

    /// Starts a block's sum of products of signed bytes; `total` is the sum of all the block's `x`.
    fn bytes(self, total: i32) -> Self::I;
    /// Adds the products of each lane's 4 weights, stored plus 128, and the 4 signed bytes of `x`.
    fn dot_bytes(self, sum: Self::I, weights: Self::B, x: i32) -> Self::I;
}

impl Quads for Portable {
    const ROWS: usize = 2;
    const PANELS: usize = 2;
    const WIDE: usize = 2;
    /// Input by input, in the type that products fit in: 255 * 127 is below 2^15.
    type B = [[i16; LANES]; QUAD];
    type I = [i32; LANES];
    type Nibbles = [i32; LANES];

    #[inline(always)]
    fn prefetch_far(self, _line: *const u8) {}
    #[inline(always)]
    fn load_codes(self, from: &CodeBytes) -> Self::B {
        let mut codes = [[0; LANES]; QUAD];
        for (lane, quad) in from.as_chunks::<QUAD>().0.iter().enumerate() {
            for index in 0..QUAD {
                codes[index][lane] = i16::from(quad[index]);
            }
        }
        codes
    }
    #[inline(always)]
    fn low(self, mut x: Self::B) -> Self::B {
        x.as_flattened_mut().iter_mut().for_each(|code| *code &= 15);
        x
    }
    #[inline(always)]
    fn high(self, mut x: Self::B) -> Self::B {
        x.as_flattened_mut().iter_mut().for_each(|code| *code >>= 4);
        x
    }
    #[inline(always)]
    fn with_upper(self, mut low: Self::B, upper: Self::B, at: usize, mask: u8) -> Self::B {
        for (low, upper) in low.as_flattened_mut().iter_mut().zip(upper.as_flattened()) {
            *low |= (upper << 4 >> at) & i16::from(mask);
        }
        low
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F {
        let mut floats = [0.0; LANES];
        for (float, &byte) in floats.iter_mut().zip(from) {
            *float = f32::from(byte);
        }
        floats
    }
    #[inline(always)]
    fn byte(self, x: Self::B, index: usize) -> Self::F {
        let mut floats = [0.0; LANES];
        for (float, &code) in floats.iter_mut().zip(&x[index]) {
            *float = f32::from(code);
        }
        floats
    }
    #[inline(always)]
    fn to_float(self, x: Self::I) -> Self::F {
        let mut floats = [0.0; LANES];
        for (float, int) in floats.iter_mut().zip(x) {
            *float = int as f32;
        }
        floats
    }
    #[inline(always)]
    fn load_pairs(self, from: &[[bf16; 2]; LANES]) -> [Self::F; 2] {
        [0, 1].map(|i| std::array::from_fn(|lane| from[lane][i].to_f32()))
    }
    #[inline(always)]
    fn nibbles(self, start: i32) -> Self::Nibbles {
        [start; LANES]
    }
    #[inline(always)]
    fn dot_nibbles(self, sum: Self::Nibbles, weights: Self::B, x: i32) -> Self::Nibbles {
        dot(sum, &weights, x)
    }
    #[inline(always)]
    fn nibbles_sum(self, sum: Self::Nibbles, _start: i32) -> Self::I {
        sum
    }
    #[inline(always)]
    fn add_sums(self, mut a: Self::I, b: Self::I) -> Self::I {
        for (a, b) in a.iter_mut().zip(b) {
            *a = a.wrapping_add(b);
        }
        a
    }
    #[inline(always)]
    fn bytes(self, total: i32) -> Self::I {
        // Weights are stored plus 128: sum (w + 128) x - 128 sum x.
        [-128 * total; LANES]
    }
    #[inline(always)]
    fn dot_bytes(self, sum: Self::I, weights: Self::B, x: i32) -> Self::I {
        dot(sum, &weights, x)
    }
}

#[inline(always)]
fn dot(mut sum: [i32; LANES], weights: &[[i16; LANES]; QUAD], x: i32) -> [i32; LANES] {
    for (weights, x) in weights.iter().zip(x.to_le_bytes()) {
        let x = i16::from(x as i8);
        for (sum, weight) in sum.iter_mut().zip(weights) {
            // They fit, see above; the wrapping kinds spare a check that keeps this from being a vector.
            *sum = sum.wrapping_add(i32::from(weight.wrapping_mul(x)));
        }
    }
    sum
}
