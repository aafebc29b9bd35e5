//! Models with random weights, made in memory from nothing but a configuration and a number.

use crate::config::ModelConfig;
use crate::error::WeightsError;
use crate::family::{self, Role, TensorSpec};
use crate::fp8::{self, Fp8Scales};
use crate::quant::quantize;
use crate::tensor::{DType, Recipe, Tensor};
use atom_base::rng::philox;
use std::f64::consts::TAU;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Which of the documented rules makes the elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// That of [`Checkpoint::synthetic`](crate::Checkpoint::synthetic), with its salt.
    Synthetic(u64),
    /// That of [`Checkpoint::dummy`](crate::Checkpoint::dummy): rows choose experts evenly.
    Dummy,
}

/// All tensors of a model; matrices in `dtype`, vectors in f32. Made by as many threads as there
/// are cores.
pub(crate) fn tensors(
    config: &ModelConfig,
    rule: Rule,
    dtype: DType,
) -> Result<Vec<(String, Tensor)>, WeightsError> {
    let specs = family::tensors(config);
    let bytes = specs.iter().map(|spec| bytes_of(spec, dtype)).sum();
    if bytes > BYTES_MAX {
        return Err(WeightsError::SyntheticSize { bytes, dtype, max: BYTES_MAX });
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let work = || {
        let mut made = Vec::new();
        while let Some(spec) = specs.get(next.fetch_add(1, Ordering::Relaxed)) {
            made.push((spec.name.clone(), tensor(spec, config.tied_embeddings, rule, dtype)));
        }
        made
    };
    Ok(std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|w| w.join().expect("making numbers does not panic")).collect()
    }))
}

/// The same, made only where somebody asks for bytes: a device makes them itself from their recipes. Of any size. Matrices
/// that a checkpoint of this configuration would have in FP8 are so, if `dtype` is bf16.
pub(crate) fn unmade(config: &ModelConfig, rule: Rule, dtype: DType) -> Vec<(String, Tensor)> {
    let tied = config.tied_embeddings;
    let one = |spec: TensorSpec| {
        let (name, shape, recipe) = (spec.name.clone(), spec.shape.clone(), recipe(&spec, tied, rule));
        let is_matrix = matches!(spec.role, Role::Matrix | Role::ResidualMatrix | Role::AttentionOutput);
        if let (Some(form), DType::BF16, true) = (config.fp8, dtype, is_matrix) {
            return (name, unmade_codes(spec, form, tied, rule));
        }
        let dtype = stored(&spec, dtype);
        (name, Tensor::unmade(dtype, shape, recipe, move || quantize(dtype, &values_of(&spec, tied, rule))))
    };
    family::tensors(config).into_iter().map(one).collect()
}

/// Numbers divided by a scale that all of them have, so that the largest that the rule can give is the largest code.
fn unmade_codes(spec: TensorSpec, form: Fp8Scales, tied: bool, rule: Rule) -> Tensor {
    let recipe = recipe(&spec, tied, rule);
    let scale = (recipe.scale * LARGEST_NORMAL / 448.0) as f32;
    let (shape, scales) = (spec.shape.clone(), form.shape(spec.shape[0], spec.shape[1]));
    let values = vec![scale; scales.iter().product()];
    let make = move || values_of(&spec, tied, rule).iter().map(|value| fp8::nearest(value / scale)).collect();
    Tensor::unmade(DType::F8_E4M3, shape, recipe, make).scaled(form, Tensor::from_f32(scales, values))
}

fn bytes_of(spec: &TensorSpec, dtype: DType) -> u128 {
    let elements: u128 = spec.shape.iter().map(|&n| n as u128).product();
    let dtype = stored(spec, dtype);
    elements * dtype.block_bytes() as u128 / dtype.block_elements() as u128
}

/// Vectors and routers stay exact, and so do rows that are not whole blocks, as converters of checkpoints
/// leave them. Rows that are not whole super-blocks take the type of blocks of 32 that converters take then.
fn stored(spec: &TensorSpec, dtype: DType) -> DType {
    let fits = |dtype: DType| spec.shape.last().is_some_and(|n| n.is_multiple_of(dtype.block_elements()));
    let dtype = match dtype {
        DType::Q4_K if !fits(dtype) => DType::Q5_0,
        DType::Q5_K if !fits(dtype) => DType::Q5_1,
        DType::Q6_K if !fits(dtype) => DType::Q8_0,
        other => other,
    };
    match spec.role {
        _ if !fits(dtype) => DType::F32,
        Role::Norm | Role::Bias | Role::SelectionBias | Role::Router => DType::F32,
        Role::Embedding | Role::Head | Role::Matrix | Role::ResidualMatrix | Role::AttentionOutput => dtype,
    }
}

fn tensor(spec: &TensorSpec, tied: bool, rule: Rule, dtype: DType) -> Tensor {
    let values = values_of(spec, tied, rule);
    let dtype = stored(spec, dtype);
    let bytes = quantize(dtype, &values);
    let len = bytes.len();
    Tensor::new(dtype, spec.shape.clone(), Arc::new(bytes), 0, len)
}

fn recipe(spec: &TensorSpec, tied: bool, rule: Rule) -> Recipe {
    let inputs = spec.shape.last().copied().unwrap_or(1) as f64;
    let embedding = if tied { 0.3 } else { 1.0 };
    let (offset, scale) = match (spec.role, rule) {
        (Role::Embedding, _) => (0.0, embedding),
        (Role::Head, _) => (0.0, 3.0 / inputs.sqrt()),
        (Role::Norm, _) => (1.0, 0.1),
        (Role::SelectionBias, Rule::Dummy) => (0.0, 0.01),
        (Role::Bias | Role::SelectionBias, _) => (0.0, 0.1),
        (Role::Router, _) => (0.0, 1.5 / inputs.sqrt()),
        // What rows of a prompt have in common passes through the averages of attention whole, and what is their own
        // does not. With a larger gain they grow alike from layer to layer, and choose the same experts.
        (Role::AttentionOutput, Rule::Dummy) => (0.0, 0.1 * embedding / inputs.sqrt()),
        (Role::ResidualMatrix | Role::AttentionOutput, _) => (0.0, 2.0 / inputs.sqrt()),
        (Role::Matrix, _) => (0.0, 1.2 / inputs.sqrt()),
    };
    let salt = match rule {
        Rule::Synthetic(salt) => salt,
        Rule::Dummy => 0,
    };
    let key = [crc32(format!("{salt}/{}", spec.name).as_bytes()), salt as u32];
    Recipe { key, offset, scale, first: 0 }
}

fn values_of(spec: &TensorSpec, tied: bool, rule: Rule) -> Vec<f32> {
    let Recipe { key, offset, scale, .. } = recipe(spec, tied, rule);
    let count: usize = spec.shape.iter().product();
    let mut values = Vec::with_capacity(count + 1);
    for pair in 0..count.div_ceil(2) as u64 {
        values.extend(normal_pair(pair, key).map(|x| (offset + f64::from(x) * scale) as f32));
    }
    values.truncate(count);
    values
}

/// Two independent standard normal numbers (Box and Muller, 1958).
fn normal_pair(pair: u64, key: [u32; 2]) -> [f32; 2] {
    let words = philox([pair as u32, (pair >> 32) as u32, 0, 0], key);
    let unit = 1.0 / f64::from(1_u32 << 24);
    let u1 = f64::from((words[0] >> 8) + 1) * unit; // never 0
    let u2 = f64::from(words[1] >> 8) * unit;
    let radius = (-2.0 * u1.ln()).sqrt();
    let (sin, cos) = (TAU * u2).sin_cos();
    [(radius * cos) as f32, (radius * sin) as f32]
}

/// CRC-32 as in zlib and PNG: polynomial 0x04C11DB7, bits reflected.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg()))
    })
}

/// Of numbers made from 24 bits: sqrt(-2 ln 2^-24), rounded up.
const LARGEST_NORMAL: f64 = 5.769;
/// Four billion parameters. A slip in a configuration shall not take a machine's memory.
const BYTES_MAX: u128 = 16 << 30;

#[cfg(test)]
mod tests;
