//! [`Lanes`] on x86-64: two AVX2 registers or one of AVX-512.
#![cfg(target_arch = "x86_64")]

use super::e4m3::E4M3;
use super::lanes::{Kernel, LANES, Lanes};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Runs an intrinsic. Methods of the tokens below are inlined into functions that enable its feature.
macro_rules! have {
    ($e:expr) => {
        // SAFETY: a token exists only on a processor that has the instructions (see `new`); memory
        // operands are references to arrays of the full width, and none needs alignment.
        unsafe { $e }
    };
}

/// Proof of AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

/// Proof of AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx2 {
    /// # Safety
    /// The processor has AVX2, FMA and F16C.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }
}

impl Avx512 {
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ, VL and VNNI, and what [`Avx2`] needs.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }
}

/// `f` of the low and the high half.
macro_rules! both {
    ($f:ident, $($v:ident),+) => {
        [have!($f($($v[0]),+)), have!($f($($v[1]),+))]
    };
}

/// Codes as halves that are 2^8 too small, for a half's exponent has a bias of 15 instead of 7.
macro_rules! small_halves {
    ($from:ident) => {{
        let codes = have!(_mm_loadu_si128($from.as_ptr().cast()));
        // The sign bit fills the upper byte, so it stands where a half's exponent begins, too.
        let wide = have!(_mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(codes)));
        let halves = have!(_mm256_and_si256(wide, _mm256_set1_epi16(0xbfff_u16 as i16)));
        let ones = have!(_mm_cmpeq_epi8(_mm_or_si128(codes, _mm_set1_epi8(-128)), _mm_set1_epi8(-1)));
        let nan = have!(_mm256_and_si256(_mm256_cvtepi8_epi16(ones), _mm256_set1_epi16(0x7c00)));
        have!(_mm256_or_si256(halves, nan))
    }};
}

/// Lane numbers, for [`Lanes::first`].
const NUMBERS: [i32; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

impl Lanes for Avx2 {
    type F = [__m256; 2];
    type M = [__m256; 2];

    // 8 of 16 registers; the rest hold a widened operand, a broadcast and temporaries.
    const ACCUMULATORS: usize = 4;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn with<K: Kernel>(s: Avx2, kernel: K) -> K::Output {
            kernel.run(s)
        }
        have!(with(self, kernel))
    }
    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        have!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [have!(_mm256_set1_ps(x)); 2]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        let p = from.as_ptr();
        [have!(_mm256_loadu_ps(p)), have!(_mm256_loadu_ps(p.add(8)))]
    }
    #[inline(always)]
    fn store(self, v: Self::F, to: &mut [f32; LANES]) {
        let p = to.as_mut_ptr();
        have!(_mm256_storeu_ps(p, v[0]));
        have!(_mm256_storeu_ps(p.add(8), v[1]));
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        let p = from.as_ptr().cast::<__m128i>();
        [have!(_mm256_cvtph_ps(_mm_loadu_si128(p))), have!(_mm256_cvtph_ps(_mm_loadu_si128(p.add(1))))]
    }
    #[inline(always)]
    fn to_f16(self, v: Self::F) -> [f16; LANES] {
        let mut halves = [f16::ZERO; LANES];
        let p = halves.as_mut_ptr().cast::<__m128i>();
        have!(_mm_storeu_si128(p, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0])));
        have!(_mm_storeu_si128(p.add(1), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1])));
        halves
    }
    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F {
        let p = from.as_ptr().cast::<__m128i>();
        let one = |p: *const __m128i| {
            let words = have!(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)));
            have!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)))
        };
        [one(p), one(have!(p.add(1)))]
    }
    #[inline(always)]
    fn load_e4m3(self, from: &[E4M3; LANES]) -> Self::F {
        let halves = small_halves!(from);
        let (low, high) =
            (have!(_mm256_castsi256_si128(halves)), have!(_mm256_extracti128_si256::<1>(halves)));
        let one = |halves| have!(_mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0)));
        [one(low), one(high)]
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    fn swap_pairs(self, v: Self::F) -> Self::F {
        [have!(_mm256_permute_ps::<0b10_11_00_01>(v[0])), have!(_mm256_permute_ps::<0b10_11_00_01>(v[1]))]
    }
    #[inline(always)]
    fn power_of_two(self, v: Self::F) -> Self::F {
        let one = |v: __m256| {
            let shifted = have!(_mm256_slli_epi32::<23>(_mm256_castps_si256(v)));
            let bias = have!(_mm256_castps_si256(_mm256_set1_ps(1.0)));
            have!(_mm256_castsi256_ps(_mm256_add_epi32(shifted, bias)))
        };
        [one(v[0]), one(v[1])]
    }
    #[inline(always)]
    fn greater(self, a: Self::F, b: Self::F) -> Self::M {
        [have!(_mm256_cmp_ps::<_CMP_GT_OQ>(a[0], b[0])), have!(_mm256_cmp_ps::<_CMP_GT_OQ>(a[1], b[1]))]
    }
    #[inline(always)]
    fn nan(self, v: Self::F) -> Self::M {
        [have!(_mm256_cmp_ps::<_CMP_UNORD_Q>(v[0], v[0])), have!(_mm256_cmp_ps::<_CMP_UNORD_Q>(v[1], v[1]))]
    }
    #[inline(always)]
    fn first(self, n: usize) -> Self::M {
        let p = NUMBERS.as_ptr().cast::<__m256i>();
        let n = have!(_mm256_set1_epi32(n.min(LANES) as i32));
        [
            have!(_mm256_castsi256_ps(_mm256_cmpgt_epi32(n, _mm256_loadu_si256(p)))),
            have!(_mm256_castsi256_ps(_mm256_cmpgt_epi32(n, _mm256_loadu_si256(p.add(1))))),
        ]
    }
    #[inline(always)]
    fn or(self, a: Self::M, b: Self::M) -> Self::M {
        both!(_mm256_or_ps, a, b)
    }
    #[inline(always)]
    fn bits(self, m: Self::M) -> u16 {
        (have!(_mm256_movemask_ps(m[0])) | have!(_mm256_movemask_ps(m[1])) << 8) as u16
    }
    #[inline(always)]
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_blendv_ps, b, a, m)
    }
}

impl Lanes for Avx512 {
    type F = __m512;
    type M = __mmask16;

    // 16 of 32 registers; more would not hide more latency.
    const ACCUMULATORS: usize = 16;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn with<K: Kernel>(s: Avx512, kernel: K) -> K::Output {
            kernel.run(s)
        }
        have!(with(self, kernel))
    }
    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        have!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        have!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        have!(_mm512_loadu_ps(from.as_ptr()))
    }
    #[inline(always)]
    fn store(self, v: Self::F, to: &mut [f32; LANES]) {
        have!(_mm512_storeu_ps(to.as_mut_ptr(), v));
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        have!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn to_f16(self, v: Self::F) -> [f16; LANES] {
        let mut halves = [f16::ZERO; LANES];
        let rounded = have!(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v));
        have!(_mm256_storeu_si256(halves.as_mut_ptr().cast(), rounded));
        halves
    }
    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F {
        let words = have!(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast())));
        have!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)))
    }
    #[inline(always)]
    fn load_e4m3(self, from: &[E4M3; LANES]) -> Self::F {
        let halves = small_halves!(from);
        have!(_mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0)))
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        have!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        have!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        have!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        have!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        have!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        have!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        have!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn swap_pairs(self, v: Self::F) -> Self::F {
        have!(_mm512_permute_ps::<0b10_11_00_01>(v))
    }
    #[inline(always)]
    fn power_of_two(self, v: Self::F) -> Self::F {
        let shifted = have!(_mm512_slli_epi32::<23>(_mm512_castps_si512(v)));
        let bias = have!(_mm512_castps_si512(_mm512_set1_ps(1.0)));
        have!(_mm512_castsi512_ps(_mm512_add_epi32(shifted, bias)))
    }
    #[inline(always)]
    fn greater(self, a: Self::F, b: Self::F) -> Self::M {
        have!(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b))
    }
    #[inline(always)]
    fn nan(self, v: Self::F) -> Self::M {
        have!(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v))
    }
    #[inline(always)]
    fn first(self, n: usize) -> Self::M {
        ((1u32 << n.min(LANES)) - 1) as u16
    }
    #[inline(always)]
    fn or(self, a: Self::M, b: Self::M) -> Self::M {
        a | b
    }
    #[inline(always)]
    fn bits(self, m: Self::M) -> u16 {
        m
    }
    #[inline(always)]
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F {
        have!(_mm512_mask_blend_ps(m, b, a))
    }
}
