//! Activations rounded to bf16: what products of [`crate::Activations::Bf16`] read.
//!
//! A row becomes floats that are bf16 numbers, or bf16 in the order of AMX tiles; the numbers are the same.
//!
//! What is smaller than 2^-56 becomes zero, among weights too ([`flushed`]): AMX takes denormal numbers for
//! zero, and without such operands none come up, so every instruction set gives the same bits.

use crate::isa::Isa;
use half::bf16;

/// Bytes that a rounded activation takes at the most: an f32.
pub(crate) const BYTES: usize = size_of::<f32>();

/// Rows of a tile of activations.
pub(crate) const TILE_ROWS: usize = 16;

/// Elements of one row of a tile.
pub(crate) const TILE_ELEMENTS: usize = 32;

/// bf16 of a tile: 1 KiB.
pub(crate) const TILE: usize = TILE_ROWS * TILE_ELEMENTS;

/// Rounds a row to bf16 numbers.
pub(crate) fn round_row(isa: Isa, x: &[f32], to: &mut [f32]) {
    assert_eq!(x.len(), to.len(), "a row of {} activations", x.len());
    match isa {
        Isa::Portable => round(x, to),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa` values are made only where the processor has the instructions.
        Isa::Avx2 => unsafe { round_avx2(x, to) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 | Isa::Amx => unsafe { round_avx512(x, to) },
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unreachable!("{isa} is refused on this processor"),
    }
}

/// As [`round_row`], a row of whole blocks to the tiles of its sixteen rows: `[x.len() / 32][16][32]`.
///
/// # Safety
/// `isa` is supported; `tiles` has room for `16 * x.len()` bf16, and nobody else touches row `row` of them.
pub(crate) unsafe fn round_row_to_tiles(isa: Isa, x: &[f32], row: usize, tiles: *mut bf16) {
    assert!(row < TILE_ROWS && x.len().is_multiple_of(TILE_ELEMENTS), "row {row} of {} activations", x.len());
    for (block, x) in x.as_chunks::<TILE_ELEMENTS>().0.iter().enumerate() {
        let mut rounded = [0.0; TILE_ELEMENTS];
        round_row(isa, x, &mut rounded);
        // SAFETY: within the room by the caller's promise.
        let to =
            unsafe { &mut *tiles.add(block * TILE + row * TILE_ELEMENTS).cast::<[u16; TILE_ELEMENTS]>() };
        truncate(&rounded, to);
    }
}

/// Gathers rows that are rounded already into tiles, as [`round_row_to_tiles`] lays them.
///
/// # Safety
/// As there, of `x`, a row of whole blocks.
pub(crate) unsafe fn copy_row_to_tiles(x: &[f32], row: usize, tiles: *mut bf16) {
    assert!(row < TILE_ROWS && x.len().is_multiple_of(TILE_ELEMENTS), "row {row} of {} activations", x.len());
    for (block, x) in x.as_chunks::<TILE_ELEMENTS>().0.iter().enumerate() {
        // SAFETY: the caller's promise.
        let to =
            unsafe { &mut *tiles.add(block * TILE + row * TILE_ELEMENTS).cast::<[u16; TILE_ELEMENTS]>() };
        truncate(x, to);
    }
}

/// A weight as products with rounded activations take it.
pub(crate) fn flushed(weight: bf16) -> bf16 {
    if weight.to_bits() & 0x7fff < (SMALLEST >> 16) as u16 { bf16::ZERO } else { weight }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn round_avx2(x: &[f32], to: &mut [f32]) {
    round(x, to);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn round_avx512(x: &[f32], to: &mut [f32]) {
    round(x, to);
}

#[inline(always)]
fn round(x: &[f32], to: &mut [f32]) {
    for (to, x) in to.iter_mut().zip(x) {
        *to = rounded(*x);
    }
}

/// The nearest bf16, ties to even.
#[inline(always)]
fn rounded(x: f32) -> f32 {
    let bits = x.to_bits();
    let size = bits & 0x7fff_ffff;
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    let kept = if size < SMALLEST { 0 } else { nearest };
    f32::from_bits(if size > 0x7f80_0000 { 0x7fc0_0000 } else { kept })
}

#[inline(always)]
fn truncate(x: &[f32; TILE_ELEMENTS], to: &mut [u16; TILE_ELEMENTS]) {
    for (to, x) in to.iter_mut().zip(x) {
        *to = (x.to_bits() >> 16) as u16;
    }
}

/// Bits of 2^-56. Products of such numbers are multiples of 2^-126, the smallest number that is no denormal.
const SMALLEST: u32 = (127 - 56) << 23;

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(n: usize) -> Vec<f32> {
        let one = |i: u32| {
            let u = atom_base::rng::uniform(8, 0, i, 0) * 2.0 - 1.0;
            u * 10f32.powf(u * 12.0)
        };
        (0..n as u32).map(one).collect()
    }

    #[test]
    fn rows_are_the_nearest_bf16_and_all_sets_agree() {
        let mut x = draws(320);
        x[3] = f32::INFINITY;
        x[4] = -0.0;
        x[5] = f32::from_bits(0x3f80_8000); // a tie, to even
        x[6] = f32::from_bits(0x3f81_8000);
        x[40] = f32::NAN;
        x[70] = 1e-17;
        x[71] = -1e-38;
        let mut to = vec![9.0; 320];
        round_row(Isa::Portable, &x, &mut to);
        for (i, (&x, &to)) in x.iter().zip(&to).enumerate() {
            let want = if x.abs() < 2f32.powi(-56) { bf16::ZERO } else { bf16::from_f32(x) };
            assert!(
                to.is_nan() && x.is_nan() || to.to_bits() == want.to_f32().to_bits(),
                "{i}: {x} became {to}"
            );
        }
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            let mut other = vec![9.0; 320];
            round_row(isa, &x, &mut other);
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&other), bits(&to), "{isa}");
        }
    }

    #[test]
    fn tiles_hold_the_same_numbers() {
        let x = draws(4 * 96);
        let (mut tiles, mut copied) = (vec![bf16::NAN; 16 * 96], vec![bf16::NAN; 16 * 96]);
        for (row, x) in x.chunks(96).enumerate() {
            let mut to = vec![0.0; 96];
            round_row(Isa::detect(), x, &mut to);
            // SAFETY: room for sixteen rows of 96; one thread.
            unsafe {
                round_row_to_tiles(Isa::detect(), x, 3 * row, tiles.as_mut_ptr());
                copy_row_to_tiles(&to, 3 * row, copied.as_mut_ptr());
            }
            for (k, to) in to.iter().enumerate() {
                let at = k / 32 * TILE + 3 * row * 32 + k % 32;
                assert_eq!((tiles[at].to_f32(), copied[at].to_f32()), (*to, *to));
            }
        }
    }

    #[test]
    fn weights_that_could_make_denormals_are_zero() {
        let small = bf16::from_f32(2f32.powi(-57));
        assert_eq!(flushed(small), bf16::ZERO);
        assert_eq!(flushed(-small), bf16::ZERO);
        let kept = [bf16::from_f32(-(2f32.powi(-56))), bf16::ONE, bf16::NEG_INFINITY];
        assert_eq!(kept.map(flushed), kept);
    }
}
