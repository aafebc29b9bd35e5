//! Activations as signed bytes: one scale per row and block of 32.

use crate::isa::Isa;

/// Elements that share a scale, as in the weights' blocks.
pub(crate) const BLOCK: usize = 32;

/// What a product needs of a block of activations besides its codes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BlockScale {
    /// Value of one code step; NaN if the block held a NaN or an infinity, so that it shows.
    pub(crate) step: f32,
    /// `step * total`
    pub(crate) scaled_total: f32,
    /// Sum of the codes.
    pub(crate) total: i32,
    /// Sum of the first 16 of them, for weights whose scales are of 16.
    pub(crate) first_total: i32,
}

impl BlockScale {
    /// Sum of the codes of half 0 or 1.
    #[inline(always)]
    pub(crate) fn half_total(&self, half: usize) -> i32 {
        if half == 0 { self.first_total } else { self.total - self.first_total }
    }
}

/// Quantises a row of whole blocks: `code = round(x / step)` with ties to even,
/// `step = max |x| / 127`. The same bits on every instruction set.
///
/// With room for two planes of codes, the second one holds what the first left over, quantised alike:
/// together they are nearly f32 (16 bits a block).
pub(crate) fn quantise_row(isa: Isa, x: &[f32], codes: &mut [i8], scales: &mut [BlockScale]) {
    let planes = codes.len() / x.len().max(1);
    assert!(planes == 1 || planes == 2 || x.is_empty(), "{planes} planes of codes");
    assert!(
        codes.len() == planes * x.len() && codes.len() == scales.len() * BLOCK,
        "{} activations",
        x.len()
    );
    match isa {
        Isa::Portable => quantise(x, codes, scales),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa` values are made only where the processor has the instructions.
        Isa::Avx2 => unsafe { quantise_avx2(x, codes, scales) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 | Isa::Amx => unsafe { quantise_avx512(x, codes, scales) },
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unreachable!("{isa} is refused on this processor"),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn quantise_avx2(x: &[f32], codes: &mut [i8], scales: &mut [BlockScale]) {
    quantise(x, codes, scales);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn quantise_avx512(x: &[f32], codes: &mut [i8], scales: &mut [BlockScale]) {
    quantise(x, codes, scales);
}

#[inline(always)]
fn quantise(x: &[f32], codes: &mut [i8], scales: &mut [BlockScale]) {
    let blocks = x.len() / BLOCK;
    let (codes, rest_codes) = codes.split_at_mut(x.len());
    let (scales, rest_scales) = scales.split_at_mut(blocks);
    let x = x.as_chunks::<BLOCK>().0;
    let mut rests = rest_codes.as_chunks_mut::<BLOCK>().0.iter_mut().zip(rest_scales);
    for ((x, codes), scale) in x.iter().zip(codes.as_chunks_mut::<BLOCK>().0).zip(scales) {
        *scale = quantise_block(x, codes);
        if let Some((rest_codes, rest_scale)) = rests.next() {
            let mut rest = *x;
            for (rest, &code) in rest.iter_mut().zip(&*codes) {
                *rest -= scale.step * f32::from(code);
            }
            *rest_scale = quantise_block(&rest, rest_codes);
        }
    }
}

/// Written for the vectoriser: no branches within a block. Maxima are taken over the bits of |x|,
/// which order as the values do and put infinities and NaN on top.
#[inline(always)]
fn quantise_block(x: &[f32; BLOCK], codes: &mut [i8; BLOCK]) -> BlockScale {
    let mut top_bits = 0;
    for x in x {
        top_bits = top_bits.max(x.to_bits() & 0x7fff_ffff);
    }
    let top = f32::from_bits(top_bits);
    let (step, inverse) = if top < TINY {
        (0.0, 0.0)
    } else if top < f32::INFINITY {
        (top / 127.0, 127.0 / top)
    } else {
        (f32::NAN, 0.0)
    };
    let mut totals = [0; BLOCK];
    for ((x, code), total) in x.iter().zip(codes).zip(&mut totals) {
        // Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
        let rounded = (x * inverse + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits()) as i8;
        *code = rounded;
        *total = i32::from(rounded);
    }
    let (first, second) = totals.split_at(BLOCK / 2);
    let first_total = first.iter().sum();
    let total = first_total + second.iter().sum::<i32>();
    BlockScale { step, scaled_total: step * total as f32, total, first_total }
}

const ROUNDER: f32 = 12_582_912.0;

/// Blocks that stay below this are zero: 127 / top would overflow.
const TINY: f32 = 1e-30;

#[cfg(test)]
mod tests {
    use super::*;

    fn quantised(isa: Isa, x: &[f32]) -> (Vec<i8>, Vec<BlockScale>) {
        let mut codes = vec![99; x.len()];
        let mut scales =
            vec![BlockScale { step: 9.0, scaled_total: 9.0, total: 9, first_total: 9 }; x.len() / BLOCK];
        quantise_row(isa, x, &mut codes, &mut scales);
        (codes, scales)
    }

    #[test]
    fn codes_are_the_nearest_and_all_sets_agree() {
        let x: Vec<f32> = (0..320u32)
            .map(|i| atom_base::rng::uniform(3, 0, i, 0) * 2.0 - 1.0)
            .map(|u| u * 10f32.powf(u * 8.0))
            .collect();
        let (codes, scales) = quantised(Isa::Portable, &x);
        for (i, (&x, &code)) in x.iter().zip(&codes).enumerate() {
            let scale = scales[i / BLOCK];
            assert!(
                (f64::from(x) - f64::from(scale.step) * f64::from(code)).abs()
                    <= f64::from(scale.step) * 0.50001
            );
        }
        for (block, scale) in codes.chunks(BLOCK).zip(&scales) {
            let sum = |codes: &[i8]| codes.iter().map(|&c| i32::from(c)).sum::<i32>();
            assert_eq!(scale.total, sum(block));
            assert_eq!([0, 1].map(|half| scale.half_total(half)), [sum(&block[..16]), sum(&block[16..])]);
            assert_eq!(scale.scaled_total, scale.step * scale.total as f32);
            assert_eq!(block.iter().map(|c| c.unsigned_abs()).max(), Some(127));
        }
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            let (other, other_scales) = quantised(isa, &x);
            assert_eq!(other, codes, "{isa}");
            for (a, b) in scales.iter().zip(&other_scales) {
                assert_eq!((a.step.to_bits(), a.total), (b.step.to_bits(), b.total), "{isa}");
                assert_eq!(a.first_total, b.first_total, "{isa}");
            }
        }
    }

    #[test]
    fn two_planes_are_nearly_exact_and_all_sets_agree() {
        let x: Vec<f32> = (0..320u32).map(|i| atom_base::rng::uniform(4, 0, i, 0) * 6.0 - 3.0).collect();
        let mut first = None;
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            let (mut codes, mut scales) = (vec![99; 640], vec![BlockScale::default(); 20]);
            quantise_row(isa, &x, &mut codes, &mut scales);
            for (i, &x) in x.iter().enumerate() {
                let plane =
                    |p: usize| f64::from(scales[p * 10 + i / BLOCK].step) * f64::from(codes[p * 320 + i]);
                let error = (f64::from(x) - plane(0) - plane(1)).abs();
                assert!(error < 3.0 / 127.0 / 127.0 / 1.9, "{isa} {i}: {error}");
            }
            assert_eq!(first.get_or_insert(codes.clone()), &codes, "{isa}");
        }
    }

    #[test]
    fn zeros_stay_zero_and_what_is_not_finite_shows() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            let mut x = [0.0; 3 * BLOCK];
            x[5] = f32::NAN;
            x[BLOCK + 7] = f32::NEG_INFINITY;
            x[2 * BLOCK] = 1e-38;
            let (codes, scales) = quantised(isa, &x);
            assert!(scales[0].step.is_nan() && scales[1].step.is_nan());
            assert_eq!((scales[2].step, scales[2].total), (0.0, 0));
            assert!(codes[2 * BLOCK..].iter().all(|&c| c == 0));
        }
    }
}
