//! Sixteen f32 lanes, the same on every instruction set.
//!
//! A kernel is written once against [`Lanes`] and compiled three times by [`dispatch`]. Every method
//! is either exact (loads, widening, comparisons) or rounds once as IEEE 754 says (add, mul, fma,
//! div), so a kernel gives the same bits whichever set runs it: portable lanes are an array, AVX2's
//! two registers, AVX-512's one.

use super::e4m3::E4M3;
use crate::isa::Isa;
use half::{bf16, f16};

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Work that [`dispatch`] compiles for each instruction set. `run` must be `#[inline(always)]`, and so
/// must every generic function below it that touches lanes; loops, not closures given to iterators. Code
/// that stays a function of its own is right, but compiled without the instructions and many times slower.
pub(crate) trait Kernel {
    /// What it gives back.
    type Output;

    /// Does the work.
    fn run<S: Lanes>(self, s: S) -> Self::Output;
}

/// Operations on sixteen lanes. A value of the type proves that the processor has the instructions.
pub(crate) trait Lanes: Copy {
    /// Sixteen f32.
    type F: Copy;
    /// Sixteen truth values.
    type M: Copy;

    /// Vectors that fit in registers as accumulators, with room for operands beside them.
    const ACCUMULATORS: usize;

    /// Runs a kernel as a function of its own, so that callers don't grow by its body.
    fn call<K: Kernel>(self, kernel: K) -> K::Output;

    /// Asks for the cache line at `address`, which need not be valid.
    fn prefetch<T>(self, address: *const T);

    /// `x` in all lanes.
    fn splat(self, x: f32) -> Self::F;
    /// Reads lanes in order.
    fn load(self, from: &[f32; LANES]) -> Self::F;
    /// Writes lanes in order.
    fn store(self, v: Self::F, to: &mut [f32; LANES]);
    /// Widens halves; exact.
    fn load_f16(self, from: &[f16; LANES]) -> Self::F;
    /// Rounds to the nearest half, ties to even.
    fn to_f16(self, v: Self::F) -> [f16; LANES];
    /// Widens bf16; exact.
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F;
    /// Widens e4m3; exact, and NaN stays NaN.
    fn load_e4m3(self, from: &[E4M3; LANES]) -> Self::F;

    /// `a + b`
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`: `b` when either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }`: `b` when either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// Lanes `2i` and `2i + 1` exchanged.
    fn swap_pairs(self, v: Self::F) -> Self::F;
    /// The float whose bits are `(bits(v) << 23) + bits(1.0)`: a power of two, see [`super::exp::exp`].
    fn power_of_two(self, v: Self::F) -> Self::F;

    /// `a > b`; false when either is NaN.
    fn greater(self, a: Self::F, b: Self::F) -> Self::M;
    /// Lanes that are NaN.
    fn nan(self, v: Self::F) -> Self::M;
    /// The first `n` lanes; all of them from 16 on.
    fn first(self, n: usize) -> Self::M;
    /// Either.
    fn or(self, a: Self::M, b: Self::M) -> Self::M;
    /// Bit `i` is lane `i`.
    fn bits(self, m: Self::M) -> u16;
    /// `m ? a : b`, lane by lane.
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F;

    /// Reads a chunk of a row: sixteen elements, or fewer at its end, with zeros behind.
    #[inline(always)]
    fn read(self, chunk: &[f32]) -> Self::F {
        if let Ok(whole) = chunk.try_into() {
            return self.load(whole);
        }
        let mut lanes = [0.0; LANES];
        lanes[..chunk.len()].copy_from_slice(chunk);
        self.load(&lanes)
    }

    /// Writes a chunk of a row: as many lanes as it has elements.
    #[inline(always)]
    fn write(self, v: Self::F, chunk: &mut [f32]) {
        if let Ok(whole) = chunk.as_mut().try_into() {
            return self.store(v, whole);
        }
        let len = chunk.len();
        chunk.copy_from_slice(&self.array(v)[..len]);
    }

    /// Lanes as an array.
    #[inline(always)]
    fn array(self, v: Self::F) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        lanes
    }

    /// Sum of the lanes, halves added pairwise: `(i, i + 8)`, then 4, 2, 1 apart.
    #[inline(always)]
    fn sum(self, v: Self::F) -> f32 {
        let mut lanes = self.array(v);
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
            width /= 2;
        }
        lanes[0]
    }

    /// Largest lane. Which one a NaN hides is unspecified but the same everywhere.
    #[inline(always)]
    fn largest(self, v: Self::F) -> f32 {
        let mut lanes = self.array(v);
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                let (a, b) = (lanes[i], lanes[i + width]);
                lanes[i] = if a > b { a } else { b };
            }
            width /= 2;
        }
        lanes[0]
    }
}

/// Runs a kernel with the instructions of `isa`. Panics if this processor does not have them, which
/// [`Isa::choose`] rules out.
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    assert!(isa.is_supported(), "{isa} was chosen on a processor without it");
    match isa {
        Isa::Portable => kernel.run(Portable),
        // SAFETY: the processor has the instructions, as asserted.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { super::x86::Avx2::new() }.call(kernel),
        // SAFETY: the processor has the instructions, as asserted.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => unsafe { super::x86::Avx512::new() }.call(kernel),
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unreachable!("not supported, as asserted"),
    }
}

/// Lanes as an array: what other sets are measured against.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn each<T: Copy>(f: impl Fn(usize) -> T) -> [T; LANES] {
    std::array::from_fn(f)
}

impl Lanes for Portable {
    type F = [f32; LANES];
    type M = [bool; LANES];

    const ACCUMULATORS: usize = 4;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }
    #[inline(always)]
    fn prefetch<T>(self, _: *const T) {}
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        *from
    }
    #[inline(always)]
    fn store(self, v: Self::F, to: &mut [f32; LANES]) {
        *to = v;
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        each(|i| from[i].to_f32())
    }
    #[inline(always)]
    fn to_f16(self, v: Self::F) -> [f16; LANES] {
        each(|i| f16::from_f32(v[i]))
    }
    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F {
        each(|i| from[i].to_f32())
    }
    #[inline(always)]
    fn load_e4m3(self, from: &[E4M3; LANES]) -> Self::F {
        each(|i| from[i].to_f32())
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        each(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn swap_pairs(self, v: Self::F) -> Self::F {
        each(|i| v[i ^ 1])
    }
    #[inline(always)]
    fn power_of_two(self, v: Self::F) -> Self::F {
        each(|i| f32::from_bits((v[i].to_bits() << 23).wrapping_add(1.0f32.to_bits())))
    }
    #[inline(always)]
    fn greater(self, a: Self::F, b: Self::F) -> Self::M {
        each(|i| a[i] > b[i])
    }
    #[inline(always)]
    fn nan(self, v: Self::F) -> Self::M {
        each(|i| v[i].is_nan())
    }
    #[inline(always)]
    fn first(self, n: usize) -> Self::M {
        each(|i| i < n)
    }
    #[inline(always)]
    fn or(self, a: Self::M, b: Self::M) -> Self::M {
        each(|i| a[i] | b[i])
    }
    #[inline(always)]
    fn bits(self, m: Self::M) -> u16 {
        m.iter().enumerate().map(|(i, &on)| u16::from(on) << i).sum()
    }
    #[inline(always)]
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F {
        each(|i| if m[i] { a[i] } else { b[i] })
    }
}
