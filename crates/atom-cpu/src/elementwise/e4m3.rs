//! e4m3, as the Open Compute Project defines it ("8-bit floating point specification", 2023).

/// A sign, four bits of exponent with a bias of 7, three of fraction. The largest number is 448; 0x7f and 0xff are NaN;
/// nothing is infinite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct E4M3(pub(crate) u8);

impl E4M3 {
    pub(crate) const ZERO: Self = Self(0);
    pub(crate) const NAN: Self = Self(0x7f);
    /// 448
    const MAX: u8 = 0x7e;

    /// Exact; NaN stays NaN.
    #[inline(always)]
    pub(crate) fn to_f32(self) -> f32 {
        let Self(code) = self;
        let magnitude = code & 0x7f;
        let value = match magnitude {
            0x7f => f32::NAN,
            // Multiples of 2^-9.
            0..8 => f32::from(magnitude) / 512.0,
            // f32's exponent has a bias of 127.
            _ => f32::from_bits((u32::from(magnitude) << 20) + (120 << 23)),
        };
        if code & 0x80 == 0 { value } else { -value }
    }

    /// The nearest number, ties to even; beyond 448 that is 448. NaN stays NaN.
    #[inline(always)]
    pub(crate) fn from_f32(x: f32) -> Self {
        let sign = (x.to_bits() >> 24) as u8 & 0x80;
        let magnitude = x.abs();
        if magnitude.is_nan() {
            return Self::NAN;
        }
        if magnitude >= 448.0 {
            return Self(sign | Self::MAX);
        }
        if magnitude < 1.0 / 64.0 {
            // Behind 2^23 there is no room for fractions: the sum is rounded to a multiple of 2^-9, in its last bits.
            let sum = magnitude * 512.0 + 8_388_608.0;
            return Self(sign | sum.to_bits() as u8);
        }
        let bits = magnitude.to_bits();
        let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
        Self(sign | ((rounded >> 20) - (120 << 3)) as u8)
    }
}
