//! [`Quads`] on x86-64: `maddubs` with AVX2, `vpdpbusd` with AVX-512 VNNI.

use super::{CodeBytes, QUAD, Quads};
use crate::elementwise::lanes::LANES;
use crate::elementwise::x86::{Avx2, Avx512};
use half::bf16;
use std::arch::x86_64::*;

/// Runs an intrinsic. Methods of the tokens below are inlined into functions that enable its feature.
macro_rules! have {
    ($e:expr) => {
        // SAFETY: a token exists only on a processor that has the instructions; memory operands are
        // references to arrays of the full width, and none needs alignment.
        unsafe { $e }
    };
}

/// `f` of the low and the high half.
macro_rules! both {
    ($f:path, $($v:expr),+) => {
        [have!($f($($v[0]),+)), have!($f($($v[1]),+))]
    };
}

const LOW_NIBBLES: i32 = 0x0f0f_0f0f;

/// Of a lane of two bf16, the second: the upper half of an f32 as it stands.
const UPPER_WORD: i32 = 0xffff_0000_u32 as i32;

impl Quads for Avx2 {
    const ROWS: usize = 4;
    const PANELS: usize = 1;
    const WIDE: usize = 2;
    type B = [__m256i; 2];
    type I = [__m256i; 2];
    /// i16 sums of pairs: 8 of at most `2 * 15 * 127` stay below 2^15, and 4 of `2 * 31 * 127`, 2 of
    /// `2 * 63 * 127`.
    type Nibbles = [__m256i; 2];

    #[inline(always)]
    fn prefetch_far(self, line: *const u8) {
        have!(_mm_prefetch::<_MM_HINT_T1>(line.cast()));
    }
    #[inline(always)]
    fn load_codes(self, from: &CodeBytes) -> Self::B {
        let p = from.as_ptr().cast::<__m256i>();
        [have!(_mm256_loadu_si256(p)), have!(_mm256_loadu_si256(p.add(1)))]
    }
    #[inline(always)]
    fn low(self, x: Self::B) -> Self::B {
        let mask = [have!(_mm256_set1_epi32(LOW_NIBBLES)); 2];
        both!(_mm256_and_si256, x, mask)
    }
    #[inline(always)]
    fn high(self, x: Self::B) -> Self::B {
        self.low(both!(_mm256_srli_epi32::<4>, x))
    }
    #[inline(always)]
    fn with_upper(self, low: Self::B, upper: Self::B, at: usize, mask: u8) -> Self::B {
        // Bits that cross from one byte to the next are not under the mask.
        let mask = [have!(_mm256_set1_epi8(mask as i8)); 2];
        let moved = if at < 4 {
            let count = [have!(_mm_cvtsi32_si128(4 - at as i32)); 2];
            both!(_mm256_sll_epi32, upper, count)
        } else {
            let count = [have!(_mm_cvtsi32_si128(at as i32 - 4)); 2];
            both!(_mm256_srl_epi32, upper, count)
        };
        let bits = both!(_mm256_and_si256, moved, mask);
        both!(_mm256_or_si256, low, bits)
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F {
        let p = from.as_ptr().cast::<__m128i>();
        let both = have!(_mm_loadu_si128(p));
        let halves = [both, have!(_mm_unpackhi_epi64(both, both))];
        self.to_float(both!(_mm256_cvtepi8_epi32, halves))
    }
    #[inline(always)]
    fn byte(self, x: Self::B, index: usize) -> Self::F {
        let (count, mask) =
            ([have!(_mm256_set1_epi32(8 * index as i32)); 2], [have!(_mm256_set1_epi32(0xff)); 2]);
        let shifted = both!(_mm256_srlv_epi32, x, count);
        self.to_float(both!(_mm256_and_si256, shifted, mask))
    }
    #[inline(always)]
    fn to_float(self, x: Self::I) -> Self::F {
        both!(_mm256_cvtepi32_ps, x)
    }
    #[inline(always)]
    fn load_pairs(self, from: &[[bf16; 2]; LANES]) -> [Self::F; 2] {
        let p = from.as_ptr().cast::<__m256i>();
        let pairs = [have!(_mm256_loadu_si256(p)), have!(_mm256_loadu_si256(p.add(1)))];
        let mask = [have!(_mm256_set1_epi32(UPPER_WORD)); 2];
        let (first, second) = (both!(_mm256_slli_epi32::<16>, pairs), both!(_mm256_and_si256, pairs, mask));
        [both!(_mm256_castsi256_ps, first), both!(_mm256_castsi256_ps, second)]
    }
    #[inline(always)]
    fn nibbles(self, _start: i32) -> Self::Nibbles {
        [have!(_mm256_setzero_si256()); 2]
    }
    #[inline(always)]
    fn dot_nibbles(self, sum: Self::Nibbles, weights: Self::B, x: i32) -> Self::Nibbles {
        let x = [have!(_mm256_set1_epi32(x)); 2];
        let pairs = both!(_mm256_maddubs_epi16, weights, x);
        both!(_mm256_add_epi16, sum, pairs)
    }
    #[inline(always)]
    fn nibbles_sum(self, sum: Self::Nibbles, start: i32) -> Self::I {
        let (ones, start) = ([have!(_mm256_set1_epi16(1)); 2], [have!(_mm256_set1_epi32(start)); 2]);
        let quads = both!(_mm256_madd_epi16, sum, ones);
        both!(_mm256_add_epi32, quads, start)
    }
    #[inline(always)]
    fn add_sums(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_add_epi32, a, b)
    }
    #[inline(always)]
    fn bytes(self, _total: i32) -> Self::I {
        [have!(_mm256_setzero_si256()); 2]
    }
    #[inline(always)]
    fn dot_bytes(self, sum: Self::I, weights: Self::B, x: i32) -> Self::I {
        // One side must be unsigned and pairs saturate at 2^15: |w| <= 128 and x with w's sign give
        // pairs of at most 2 * 128 * 127, which fit.
        let (flip, ones) = ([have!(_mm256_set1_epi8(-128)); 2], [have!(_mm256_set1_epi16(1)); 2]);
        let signed = both!(_mm256_xor_si256, weights, flip);
        let size = both!(_mm256_abs_epi8, signed);
        let x = [have!(_mm256_set1_epi32(x)); 2];
        let x = both!(_mm256_sign_epi8, x, signed);
        let pairs = both!(_mm256_maddubs_epi16, size, x);
        let quads = both!(_mm256_madd_epi16, pairs, ones);
        both!(_mm256_add_epi32, sum, quads)
    }
}

impl Quads for Avx512 {
    const ROWS: usize = 6;
    const PANELS: usize = 2;
    const WIDE: usize = 4;
    type B = __m512i;
    type I = __m512i;
    type Nibbles = __m512i;

    #[inline(always)]
    fn prefetch_far(self, line: *const u8) {
        have!(_mm_prefetch::<_MM_HINT_T1>(line.cast()));
    }
    #[inline(always)]
    fn load_codes(self, from: &CodeBytes) -> Self::B {
        have!(_mm512_loadu_si512(from.as_ptr().cast()))
    }
    #[inline(always)]
    fn low(self, x: Self::B) -> Self::B {
        have!(_mm512_and_si512(x, _mm512_set1_epi32(LOW_NIBBLES)))
    }
    #[inline(always)]
    fn high(self, x: Self::B) -> Self::B {
        self.low(have!(_mm512_srli_epi32::<4>(x)))
    }
    #[inline(always)]
    fn with_upper(self, low: Self::B, upper: Self::B, at: usize, mask: u8) -> Self::B {
        // Bits that cross from one byte to the next are not under the mask.
        let moved = if at < 4 {
            have!(_mm512_sll_epi32(upper, _mm_cvtsi32_si128(4 - at as i32)))
        } else {
            have!(_mm512_srl_epi32(upper, _mm_cvtsi32_si128(at as i32 - 4)))
        };
        have!(_mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(mask as i8))))
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F {
        self.to_float(have!(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))))
    }
    #[inline(always)]
    fn byte(self, x: Self::B, index: usize) -> Self::F {
        let shifted = have!(_mm512_srlv_epi32(x, _mm512_set1_epi32(8 * index as i32)));
        self.to_float(have!(_mm512_and_si512(shifted, _mm512_set1_epi32(0xff))))
    }
    #[inline(always)]
    fn to_float(self, x: Self::I) -> Self::F {
        have!(_mm512_cvtepi32_ps(x))
    }
    #[inline(always)]
    fn load_pairs(self, from: &[[bf16; 2]; LANES]) -> [Self::F; 2] {
        let pairs = have!(_mm512_loadu_si512(from.as_ptr().cast()));
        let second = have!(_mm512_and_si512(pairs, _mm512_set1_epi32(UPPER_WORD)));
        [have!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs))), have!(_mm512_castsi512_ps(second))]
    }
    #[inline(always)]
    fn nibbles(self, start: i32) -> Self::Nibbles {
        have!(_mm512_set1_epi32(start))
    }
    #[inline(always)]
    fn dot_nibbles(self, sum: Self::Nibbles, weights: Self::B, x: i32) -> Self::Nibbles {
        have!(_mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(x)))
    }
    #[inline(always)]
    fn nibbles_sum(self, sum: Self::Nibbles, _start: i32) -> Self::I {
        sum
    }
    #[inline(always)]
    fn add_sums(self, a: Self::I, b: Self::I) -> Self::I {
        have!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn bytes(self, total: i32) -> Self::I {
        // The instruction takes weights unsigned: sum (w + 128) x - 128 sum x.
        have!(_mm512_set1_epi32(-128 * total))
    }
    #[inline(always)]
    fn dot_bytes(self, sum: Self::I, weights: Self::B, x: i32) -> Self::I {
        have!(_mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(x)))
    }
}

const _: () = assert!(size_of::<CodeBytes>() == size_of::<__m512i>() && QUAD == 4);
