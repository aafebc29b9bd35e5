//! The one exponential of this crate: softmax, SiLU and sampling all use it, so all sets agree.

use super::lanes::Lanes;

/// `e^x` within 1.1 ulp; exactly 1 at 0, exactly 0 below [`UNDERFLOW`] and at minus infinity, at most
/// 2.4e38 however large `x` is, NaN for NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`; `e^r` is a polynomial, and `2^n` is made of `n`'s bits.
#[inline(always)]
pub(crate) fn exp<S: Lanes>(s: S, x: S::F) -> S::F {
    // Operands are ordered so that a NaN comes through.
    let clamped = s.max(s.splat(UNDERFLOW), s.min(s.splat(OVERFLOW), x));
    // Adding 1.5 * 2^23 rounds to an integer, which is left in the low bits.
    let magic = s.splat(12_582_912.0);
    let shifted = s.fma(clamped, s.splat(std::f32::consts::LOG2_E), magic);
    let n = s.sub(shifted, magic);
    let r = s.fma(n, s.splat(-LN_2_HIGH), clamped);
    let r = s.fma(n, s.splat(-LN_2_LOW), r);
    let mut p = s.splat(POLYNOMIAL[0]);
    for &c in &POLYNOMIAL[1..] {
        p = s.fma(p, r, s.splat(c));
    }
    let y = s.mul(p, s.power_of_two(shifted));
    s.select(s.greater(s.splat(UNDERFLOW), x), s.splat(0.0), y)
}

/// The least `x` whose exponential isn't taken for 0: just above the smallest normal number.
pub(crate) const UNDERFLOW: f32 = -87.0;

/// Largest `x` for which `n` stays below 128.
const OVERFLOW: f32 = 88.37;

const LN_2_HIGH: f32 = std::f32::consts::LN_2;
const LN_2_LOW: f32 = -1.904_654_2e-9;

/// Minimax fit (Remez) of `(e^r - 1 - r) / r^2` on `|r| <= ln 2 / 2` with relative error 3.1e-9, then
/// the exact 1 and 1; highest power first.
const POLYNOMIAL: [f32; 7] =
    [0.001_381_454, 0.008_368_745, 0.041_668_39, 0.166_665_21, 0.499_999_94, 1.0, 1.0];
