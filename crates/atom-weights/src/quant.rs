//! The element types in plain code: the reference that kernels and tests compare with, and how weights are
//! expanded where they are loaded as plain numbers.
//!
//! Blocks of 32 as ggml stores them (see [`DType`]); scales are rounded to f16 after the elements were
//! divided by the unrounded scale, as ggml's own reference quantisers do.

use crate::fp8;
use crate::tensor::{DType, Tensor};
use half::{bf16, f16};
use std::ops::Range;

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
/// `out` has another length. Allocates nothing for FP8.
pub fn expand_row(tensor: &Tensor, row: usize, cols: Range<usize>, out: &mut [f32]) {
    assert_eq!(cols.len(), out.len(), "columns {cols:?} of {tensor:?}");
    let dtype = tensor.dtype;
    let bytes = &tensor.row(row)[dtype.row_bytes(cols.start)..dtype.row_bytes(cols.end)];
    if dtype != DType::F8_E4M3 {
        return out.copy_from_slice(&dequantize_bytes(dtype, bytes));
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
    let blocks = bytes.chunks_exact(dtype.block_bytes());
    assert!(blocks.remainder().is_empty(), "{} bytes cut a {dtype:?} block", bytes.len());
    let mut values = Vec::with_capacity(bytes.len() / dtype.block_bytes() * dtype.block_elements());
    match dtype {
        DType::F32 => values.extend(blocks.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        DType::F16 => values.extend(blocks.map(half_at_start)),
        DType::BF16 => values.extend(blocks.map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())),
        DType::F8_E4M3 => values.extend(bytes.iter().map(|&code| fp8::VALUES[usize::from(code)])),
        DType::Q8_0 => {
            for block in blocks {
                let d = half_at_start(block);
                values.extend(block[2..].iter().map(|&q| d * f32::from(q as i8)));
            }
        }
        DType::Q4_0 => {
            for block in blocks {
                let d = half_at_start(block);
                values.extend(nibbles(&block[2..]).map(|q| d * (f32::from(q) - 8.0)));
            }
        }
        DType::Q4_1 => {
            for block in blocks {
                let (d, m) = (half_at_start(block), half_at_start(&block[2..]));
                values.extend(nibbles(&block[4..]).map(|q| d * f32::from(q) + m));
            }
        }
    }
    values
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

fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    bytes.iter().map(|b| b & 15).chain(bytes.iter().map(|b| b >> 4))
}

fn half_at_start(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

#[cfg(test)]
mod tests;
