//! Super-blocks of 256: Q4_K, Q5_K and Q6_K.

use crate::tensor::DType;
use half::f16;

/// A super-block with every part in a place of its own.
///
/// Element `i` is `d * scales[i / 16] * (codes[i] - zero) - dmin * minima[i / 32]`. Its products are exact in
/// f32, so that it is rounded once, at the difference.
#[derive(Clone, Debug, PartialEq)]
pub struct SuperBlock {
    /// What all scales are multiplied with.
    pub d: f16,
    /// What all minima are multiplied with; 0 in Q6_K, which has none.
    pub dmin: f16,
    /// Of 16 elements each; in pairs of equal ones where a scale is that of 32. Signed in Q6_K, below 64
    /// elsewhere.
    pub scales: [i8; 16],
    /// Of 32 elements each, below 64.
    pub minima: [i8; 8],
    /// Unsigned, of 4, 5 or 6 bits.
    pub codes: [u8; 256],
}

/// Code that stands for zero: 32 in Q6_K, 0 in the others.
const fn zero(dtype: DType) -> f32 {
    if matches!(dtype, DType::Q6_K) { 32.0 } else { 0.0 }
}

impl SuperBlock {
    /// Takes a stored block apart. Panics if it has another length, or if `dtype` has no super-blocks.
    pub fn read(dtype: DType, block: &[u8]) -> Self {
        assert_eq!(block.len(), dtype.block_bytes(), "bytes of a block of {dtype:?}");
        match dtype {
            DType::Q4_K => Self::read_with_minima(block, &[0; 32], &block[16..]),
            DType::Q5_K => Self::read_with_minima(block, &block[16..48], &block[48..]),
            DType::Q6_K => Self::read_q6(block),
            _ => panic!("{dtype:?} has no super-blocks"),
        }
    }

    /// Byte `j` of `fifth` has the fifth bits of elements `j`, `32 + j`, `64 + j`, ..
    fn read_with_minima(block: &[u8], fifth: &[u8], nibbles: &[u8]) -> Self {
        let (mut scales, mut minima, mut codes) = ([0; 16], [0; 8], [0; 256]);
        for b in 0..8 {
            let (scale, minimum) = six_bits(&block[4..16], b);
            scales[2 * b..2 * b + 2].fill(scale as i8);
            minima[b] = minimum as i8;
            // Blocks share bytes in pairs: the first has the low nibbles.
            let bytes = &nibbles[b / 2 * 32..][..32];
            for ((code, &byte), &fifth) in codes[b * 32..][..32].iter_mut().zip(bytes).zip(fifth) {
                *code = (byte >> (b % 2 * 4) & 15) | (fifth >> b & 1) << 4;
            }
        }
        Self { d: half(block, 0), dmin: half(block, 2), scales, minima, codes }
    }

    /// Each half of the block has 64 bytes of nibbles and 32 of upper bits; a quarter of its elements is in
    /// the low nibbles of the first 32 bytes, the next one in those of the others, the other two in the high
    /// nibbles.
    fn read_q6(block: &[u8]) -> Self {
        let (mut scales, mut codes) = ([0; 16], [0; 256]);
        for (scale, &byte) in scales.iter_mut().zip(&block[192..208]) {
            *scale = byte as i8;
        }
        for (b, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (half, quarter) = (b / 4, b % 4);
            let nibbles = &block[half * 64 + quarter % 2 * 32..][..32];
            let upper = &block[128 + half * 32..][..32];
            for ((code, &byte), &upper) in codes.iter_mut().zip(nibbles).zip(upper) {
                *code = (byte >> (quarter / 2 * 4) & 15) | (upper >> (2 * quarter) & 3) << 4;
            }
        }
        Self { d: half(block, 208), dmin: f16::ZERO, scales, minima: [0; 8], codes }
    }

    /// The inverse of [`Self::read`]. Panics if `dtype` has no super-blocks.
    pub fn write(&self, dtype: DType, out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + dtype.block_bytes(), 0);
        let block = &mut out[start..];
        match dtype {
            DType::Q4_K | DType::Q5_K => self.write_with_minima(dtype, block),
            DType::Q6_K => self.write_q6(block),
            _ => panic!("{dtype:?} has no super-blocks"),
        }
    }

    fn write_with_minima(&self, dtype: DType, block: &mut [u8]) {
        block[..2].copy_from_slice(&self.d.to_le_bytes());
        block[2..4].copy_from_slice(&self.dmin.to_le_bytes());
        let (head, rest) = block.split_at_mut(16);
        let (fifth, nibbles) = rest.split_at_mut(if dtype == DType::Q5_K { 32 } else { 0 });
        for b in 0..8 {
            put_six_bits(&mut head[4..], b, self.scales[2 * b] as u8, self.minima[b] as u8);
            for (j, &code) in self.codes[b * 32..][..32].iter().enumerate() {
                nibbles[b / 2 * 32 + j] |= (code & 15) << (b % 2 * 4);
                if let Some(fifth) = fifth.get_mut(j) {
                    *fifth |= (code >> 4) << b;
                }
            }
        }
    }

    fn write_q6(&self, block: &mut [u8]) {
        for (b, codes) in self.codes.as_chunks::<32>().0.iter().enumerate() {
            let (half, quarter) = (b / 4, b % 4);
            for (j, &code) in codes.iter().enumerate() {
                block[half * 64 + quarter % 2 * 32 + j] |= (code & 15) << (quarter / 2 * 4);
                block[128 + half * 32 + j] |= (code >> 4) << (2 * quarter);
            }
        }
        for (byte, &scale) in block[192..208].iter_mut().zip(&self.scales) {
            *byte = scale as u8;
        }
        block[208..].copy_from_slice(&self.d.to_le_bytes());
    }

    /// Elements of a stored block.
    pub(super) fn values(&self, dtype: DType, out: &mut [f32; 256]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        for (i, (out, codes)) in
            out.as_chunks_mut::<16>().0.iter_mut().zip(self.codes.as_chunks::<16>().0).enumerate()
        {
            let step = d * f32::from(self.scales[i]);
            let minimum = dmin * f32::from(self.minima[i / 2]);
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = step * (f32::from(code) - zero(dtype)) - minimum;
            }
        }
    }

    /// Q4_K and Q5_K: of every 32 elements, the least one (or zero) and a step that reaches the greatest,
    /// both as 63rds of the largest in the block; then each element's nearest code.
    pub(super) fn with_minima(values: &[f32; 256], largest_code: f32) -> Self {
        let (mut steps, mut minima) = ([0.0_f32; 8], [0.0_f32; 8]);
        for (b, block) in values.as_chunks::<32>().0.iter().enumerate() {
            let least = block.iter().copied().fold(0.0, f32::min);
            let greatest = block.iter().copied().fold(least, f32::max);
            (steps[b], minima[b]) = ((greatest - least) / largest_code, -least);
        }
        let most = |of: &[f32]| f16::from_f32(of.iter().copied().fold(0.0, f32::max) / 63.0);
        let (d, dmin) = (most(&steps), most(&minima));
        let sixths = |value: f32, of: f16| ratio(value, of.to_f32()).round().min(63.0) as i8;
        let mut made = Self { d, dmin, scales: [0; 16], minima: [0; 8], codes: [0; 256] };
        for b in 0..8 {
            let (scale, minimum) = (sixths(steps[b], d), sixths(minima[b], dmin));
            made.scales[2 * b..2 * b + 2].fill(scale);
            made.minima[b] = minimum;
            let (step, minimum) = (d.to_f32() * f32::from(scale), dmin.to_f32() * f32::from(minimum));
            for (code, value) in made.codes[b * 32..][..32].iter_mut().zip(&values[b * 32..]) {
                *code = ratio(value + minimum, step).round().clamp(0.0, largest_code) as u8;
            }
        }
        made
    }

    /// Q6_K: of every 16 elements, a step that puts the one of largest magnitude at -32, as a part of the
    /// largest such step; then each element's nearest code.
    pub(super) fn of_six_bits(values: &[f32; 256]) -> Self {
        let larger = |m: f32, v: f32| if v.abs() > m.abs() { v } else { m };
        let steps: [f32; 16] =
            std::array::from_fn(|i| values[i * 16..][..16].iter().copied().fold(0.0, larger) / -32.0);
        let d = f16::from_f32(steps.iter().copied().fold(0.0, larger) / -128.0);
        let mut made = Self { d, dmin: f16::ZERO, scales: [0; 16], minima: [0; 8], codes: [32; 256] };
        for (i, &step) in steps.iter().enumerate() {
            made.scales[i] = ratio(step, d.to_f32()).round().clamp(-128.0, 127.0) as i8;
            let step = d.to_f32() * f32::from(made.scales[i]);
            for (code, value) in made.codes[i * 16..][..16].iter_mut().zip(&values[i * 16..]) {
                *code = (ratio(*value, step).round().clamp(-32.0, 31.0) + 32.0) as u8;
            }
        }
        made
    }
}

/// Scale and minimum of block `b` of 8. The first four of both have their 6 bits in a byte each; of the
/// others, a byte has the low nibbles of both, and their upper bits are the upper bits of the first four.
fn six_bits(packed: &[u8], b: usize) -> (u8, u8) {
    if b < 4 {
        return (packed[b] & 63, packed[b + 4] & 63);
    }
    let low = packed[b + 4];
    (low & 15 | packed[b - 4] >> 6 << 4, low >> 4 | packed[b] >> 6 << 4)
}

/// The inverse, into zeros; in ascending order.
fn put_six_bits(packed: &mut [u8], b: usize, scale: u8, minimum: u8) {
    if b < 4 {
        packed[b] |= scale;
        packed[b + 4] |= minimum;
    } else {
        packed[b + 4] |= scale & 15 | (minimum & 15) << 4;
        packed[b - 4] |= scale >> 4 << 6;
        packed[b] |= minimum >> 4 << 6;
    }
}

/// What is divided by a step of zero is zero.
fn ratio(value: f32, step: f32) -> f32 {
    if step == 0.0 { 0.0 } else { value / step }
}

fn half(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}
