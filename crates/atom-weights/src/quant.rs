//! The element types in plain code: the reference that kernels and tests compare with, and how weights are
//! expanded where they are loaded as plain numbers.
//!
//! Blocks of 32 as ggml stores them (see [`DType`]); scales are rounded to f16 after the elements were
//! divided by the unrounded scale, as ggml's own reference quantisers do. Super-blocks of 256 are in
//! [`SuperBlock`].

mod super_blocks;

use crate::fp8;
use crate::tensor::{DType, Tensor};
use half::{bf16, f16};
use std::ops::Range;

pub use super_blocks::SuperBlock;

/// All elements as f32, row-major.
pub fn dequantize(tensor: &Tensor) -> Vec<f32> {
    if tensor.dtype != DType::F8_E4M3 {
        return dequantize_bytes(tensor.dtype, tensor.bytes());
    }
    let mut values = vec![0.0; tensor.rows() * tensor.cols()];
    for (row, values) in values.chunks_exact_mut(tensor.cols()).enumerate() {
        expand_row(tensor, row, 0..tensor.cols(), values);
    }
    values
}

/// Columns of a row as f32: for FP8, code times scale, rounded once. Panics if the columns cut a block or
/// `out` has another length. Allocates nothing.
pub fn expand_row(tensor: &Tensor, row: usize, cols: Range<usize>, out: &mut [f32]) {
    assert_eq!(cols.len(), out.len(), "columns {cols:?} of {tensor:?}");
    let dtype = tensor.dtype;
    let bytes = &tensor.row(row)[dtype.row_bytes(cols.start)..dtype.row_bytes(cols.end)];
    if dtype != DType::F8_E4M3 {
        return dequantize_into(dtype, bytes, out);
    }
    let mut at = cols.start;
    while at < cols.end {
        let (scale, next) = tensor.scale_at(row, at);
        let part = at - cols.start..next.min(cols.end) - cols.start;
        for (out, &code) in out[part.clone()].iter_mut().zip(&bytes[part]) {
            *out = fp8::VALUES[usize::from(code)] * scale;
        }
        at = next;
    }
}

/// The elements of whole blocks as f32; of FP8, whose scales are elsewhere, the codes' values. Panics if
/// `bytes` ends within a block.
pub fn dequantize_bytes(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_elements()];
    dequantize_into(dtype, bytes, &mut values);
    values
}

/// The same into `out`; allocates nothing. Panics if `bytes` are not the blocks of as many elements.
pub fn dequantize_into(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert!(bytes.len().is_multiple_of(dtype.block_bytes()), "{} bytes cut a {dtype:?} block", bytes.len());
    assert_eq!(bytes.len(), dtype.row_bytes(out.len()), "bytes of {} elements of {dtype:?}", out.len());
    match dtype {
        DType::F32 => each::<4>(bytes, out, f32::from_le_bytes),
        DType::F16 => each::<2>(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        DType::BF16 => each::<2>(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        DType::F8_E4M3 => each::<1>(bytes, out, |[code]| fp8::VALUES[usize::from(code)]),
        DType::Q8_0 => blocks::<34, 32>(bytes, out, |block, out| {
            let d = half_at_start(block);
            for (out, &q) in out.iter_mut().zip(&block[2..]) {
                *out = d * f32::from(q as i8);
            }
        }),
        DType::Q4_0 => blocks::<18, 32>(bytes, out, |block, out| {
            let d = half_at_start(block);
            codes(&nibbles(&block[2..]), out, |q| d * (q - 8.0));
        }),
        DType::Q4_1 => blocks::<20, 32>(bytes, out, |block, out| {
            let (d, m) = (half_at_start(block), half_at_start(&block[2..]));
            codes(&nibbles(&block[4..]), out, |q| d * q + m);
        }),
        DType::Q5_0 => blocks::<22, 32>(bytes, out, |block, out| {
            let d = half_at_start(block);
            codes(&five_bits(&block[2..]), out, |q| d * (q - 16.0));
        }),
        DType::Q5_1 => blocks::<24, 32>(bytes, out, |block, out| {
            let (d, m) = (half_at_start(block), half_at_start(&block[2..]));
            codes(&five_bits(&block[4..]), out, |q| d * q + m);
        }),
        DType::Q4_K => super_blocks::<144>(dtype, bytes, out),
        DType::Q5_K => super_blocks::<176>(dtype, bytes, out),
        DType::Q6_K => super_blocks::<210>(dtype, bytes, out),
    }
}

/// Whole blocks of any type; FP8 codes of a scale of 1. Panics if the number of values is no multiple of the block.
pub fn quantize(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        DType::F8_E4M3 => values.iter().map(|&v| fp8::nearest(v)).collect(),
        DType::Q8_0 => quantize_q8_0(values),
        DType::Q4_0 => quantize_q4_0(values),
        DType::Q4_1 => quantize_q4_1(values),
        DType::Q5_0 => quantize_q5_0(values),
        DType::Q5_1 => quantize_q5_1(values),
        DType::Q4_K | DType::Q5_K | DType::Q6_K => quantize_k(dtype, values),
    }
}

/// Q8_0: `d` = largest magnitude / 127, `q` = round(x / d), halves away from zero.
/// Panics unless `row` is a multiple of 32 long.
pub fn quantize_q8_0(row: &[f32]) -> Vec<u8> {
    by_block(DType::Q8_0, row, |block, out| {
        let largest = block.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
        let d = largest / 127.0;
        let inverse = inverse(d);
        out.extend(f16::from_f32(d).to_le_bytes());
        out.extend(block.iter().map(|v| (v * inverse).round() as i8 as u8));
    })
}

/// Q4_0: `d` = the value of largest magnitude / -8, so that it is stored as 0 exactly;
/// `q` = floor(x / d + 8.5), at most 15. Panics unless `row` is a multiple of 32 long.
pub fn quantize_q4_0(row: &[f32]) -> Vec<u8> {
    by_block(DType::Q4_0, row, |block, out| {
        let extreme = block.iter().fold(0.0_f32, |m, &v| if v.abs() > m.abs() { v } else { m });
        let d = extreme / -8.0;
        let inverse = inverse(d);
        out.extend(f16::from_f32(d).to_le_bytes());
        pack(block, out, |v| v * inverse + 8.5);
    })
}

/// Q4_1: `m` = the least value, `d` = (greatest - least) / 15, `q` = floor((x - m) / d + 0.5), at most
/// 15. Panics unless `row` is a multiple of 32 long.
pub fn quantize_q4_1(row: &[f32]) -> Vec<u8> {
    by_block(DType::Q4_1, row, |block, out| {
        let least = block.iter().copied().fold(f32::INFINITY, f32::min);
        let greatest = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let d = (greatest - least) / 15.0;
        let inverse = inverse(d);
        out.extend(f16::from_f32(d).to_le_bytes());
        out.extend(f16::from_f32(least).to_le_bytes());
        pack(block, out, |v| (v - least) * inverse + 0.5);
    })
}

/// Q5_0: as Q4_0 with `d` = the value of largest magnitude / -16 and `q` = floor(x / d + 16.5), at most 31.
/// Panics unless `row` is a multiple of 32 long.
pub fn quantize_q5_0(row: &[f32]) -> Vec<u8> {
    by_block(DType::Q5_0, row, |block, out| {
        let extreme = block.iter().fold(0.0_f32, |m, &v| if v.abs() > m.abs() { v } else { m });
        let d = extreme / -16.0;
        let inverse = inverse(d);
        out.extend(f16::from_f32(d).to_le_bytes());
        pack_five_bits(block, out, |v| v * inverse + 16.5);
    })
}

/// Q5_1: as Q4_1 with 31 steps. Panics unless `row` is a multiple of 32 long.
pub fn quantize_q5_1(row: &[f32]) -> Vec<u8> {
    by_block(DType::Q5_1, row, |block, out| {
        let least = block.iter().copied().fold(f32::INFINITY, f32::min);
        let greatest = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let d = (greatest - least) / 31.0;
        let inverse = inverse(d);
        out.extend(f16::from_f32(d).to_le_bytes());
        out.extend(f16::from_f32(least).to_le_bytes());
        pack_five_bits(block, out, |v| (v - least) * inverse + 0.5);
    })
}

/// Q4_K, Q5_K or Q6_K, in the plainest way: ggml searches for scales that err less. Panics for other types,
/// and unless `row` is a multiple of 256 long.
pub fn quantize_k(dtype: DType, row: &[f32]) -> Vec<u8> {
    by_block(dtype, row, |block, out| {
        let block = block.try_into().expect("blocks of the types with a K have 256 elements");
        let made = match dtype {
            DType::Q6_K => SuperBlock::of_six_bits(block),
            _ => SuperBlock::with_minima(block, if dtype == DType::Q5_K { 31.0 } else { 15.0 }),
        };
        made.write(dtype, out);
    })
}

fn by_block(dtype: DType, row: &[f32], quantize: impl Fn(&[f32], &mut Vec<u8>)) -> Vec<u8> {
    let blocks = row.chunks_exact(dtype.block_elements());
    assert!(blocks.remainder().is_empty(), "{} values are no whole {dtype:?} blocks", row.len());
    let mut bytes = Vec::with_capacity(dtype.row_bytes(row.len()));
    for block in blocks {
        quantize(block, &mut bytes);
    }
    bytes
}

/// A block of equal values (or zeros) has a scale of 0 and all its elements at 0.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The first 16 elements go to the low nibbles, the others to the high ones.
fn pack(block: &[f32], out: &mut Vec<u8>, scaled: impl Fn(f32) -> f32) {
    let (low, high) = block.split_at(block.len() / 2);
    let nibble = |v: f32| (scaled(v) as u8).min(15);
    out.extend(low.iter().zip(high).map(|(&low, &high)| nibble(low) | nibble(high) << 4));
}

/// As [`pack`], after 4 bytes of fifth bits, the first in the lowest.
fn pack_five_bits(block: &[f32], out: &mut Vec<u8>, scaled: impl Fn(f32) -> f32) {
    let codes: [u8; 32] = std::array::from_fn(|i| (scaled(block[i]) as u8).min(31));
    let fifth = codes.iter().enumerate().fold(0, |bits, (i, &code)| bits | u32::from(code >> 4) << i);
    out.extend(fifth.to_le_bytes());
    out.extend((0..16).map(|i| codes[i] & 15 | (codes[i + 16] & 15) << 4));
}

/// Codes of 4 bits, in order: the low nibbles of 16 bytes, then the high ones.
fn nibbles(bytes: &[u8]) -> [u8; 32] {
    std::array::from_fn(|i| bytes[i % 16] >> (i / 16 * 4) & 15)
}

/// Codes of 5 bits, in order, from 4 bytes of fifth bits and 16 bytes of nibbles.
pub fn five_bits(bytes: &[u8]) -> [u8; 32] {
    let fifth = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let low = nibbles(&bytes[4..]);
    std::array::from_fn(|i| low[i] | ((fifth >> i & 1) as u8) << 4)
}

fn codes(codes: &[u8; 32], out: &mut [f32; 32], value: impl Fn(f32) -> f32) {
    for (out, &code) in out.iter_mut().zip(codes) {
        *out = value(f32::from(code));
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    for (out, &element) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = value(element);
    }
}

fn blocks<const BYTES: usize, const ELEMENTS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    expand: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    for (block, out) in bytes.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<ELEMENTS>().0) {
        expand(block, out);
    }
}

fn super_blocks<const BYTES: usize>(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    blocks::<BYTES, 256>(bytes, out, |block, out| SuperBlock::read(dtype, block).values(dtype, out));
}

fn half_at_start(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

#[cfg(test)]
mod tests;
