//! A whole model as GGUF.

use super::GgufWriter;
use crate::checkpoint::Checkpoint;
use crate::config::{Architecture, ModelConfig, MoeConfig, Rope, RopeLayout, RopeScaling, Scoring};
use crate::error::WeightsError;
use crate::experts::stack_of;
use crate::family::{Role, TensorSpec};
use crate::gguf::names::gguf_name;
use crate::gguf::{BOS_KEY, EOS_KEYS};
use crate::quant::{dequantize, quantize};
use crate::tensor::{DType, Tensor};
use std::path::Path;

/// Writes a checkpoint's configuration and tensors: matrices and the embedding as `matrices`, vectors
/// and routers as F32, as is usual, and a layer's experts as stacks. Rows of q and k of a Llama or
/// Mixtral are reordered for interleaved pairs.
///
/// The tokenizer is not part of it: add its keys to the writer. Fails if a matrix has rows that are no
/// multiple of the type's block.
pub fn from_checkpoint(checkpoint: &Checkpoint, matrices: DType) -> Result<GgufWriter, WeightsError> {
    let config = checkpoint.config();
    if config.eos.len() > EOS_KEYS.len() {
        let what = format!("{} end tokens", config.eos.len());
        let supported = format!("at most {} are", EOS_KEYS.len());
        return Err(WeightsError::unsupported(Path::new("GGUF"), what, supported));
    }
    let mut writer = GgufWriter::new();
    write_config(&mut writer, config);
    for spec in crate::family::tensors(config) {
        match stack_of(&spec.name) {
            // The first expert stands for the stack.
            Some((stack, 0)) => write_stack(&mut writer, checkpoint, &stack, &spec, matrices)?,
            Some(_) => {}
            None => write_tensor(&mut writer, checkpoint, &spec, matrices)?,
        }
    }
    if let Some(divisors) = divisors(&config.rope) {
        let bytes = quantize(DType::F32, &divisors);
        writer.tensor("rope_freqs.weight", DType::F32, &[divisors.len()], &bytes);
    }
    Ok(writer)
}

fn write_tensor(
    writer: &mut GgufWriter,
    checkpoint: &Checkpoint,
    spec: &TensorSpec,
    matrices: DType,
) -> Result<(), WeightsError> {
    let config = checkpoint.config();
    let tensor = checkpoint.tensor(&spec.name)?;
    let name = name(&spec.name, config);
    let vector = spec.shape.len() == 1 || spec.role == Role::Router;
    let dtype = if vector { DType::F32 } else { matrices };
    check_columns(&spec.name, tensor.cols(), dtype)?;
    let heads = match name.split('.').nth(2) {
        Some("attn_q") => config.q_heads,
        Some("attn_k") => config.kv_heads,
        _ => 0,
    };
    let permuted = matches!(config.architecture, Architecture::Llama | Architecture::Mixtral);
    let values = if permuted && config.rope.layout == RopeLayout::Halves && heads > 0 {
        pairs_from_halves(&tensor, heads, config.rope.dim)
    } else {
        dequantize(&tensor)
    };
    writer.tensor(&name, dtype, &spec.shape, &quantize(dtype, &values));
    Ok(())
}

/// One matrix of every expert of a layer, `[experts, rows, columns]`. `first` is expert 0's.
fn write_stack(
    writer: &mut GgufWriter,
    checkpoint: &Checkpoint,
    stack: &str,
    first: &TensorSpec,
    dtype: DType,
) -> Result<(), WeightsError> {
    let config = checkpoint.config();
    let experts = config.moe.as_ref().expect("only layers with experts have stacks").experts;
    let (rows, cols) = (first.shape[0], first.shape[1]);
    check_columns(&first.name, cols, dtype)?;
    let mut bytes = Vec::with_capacity(experts * rows * dtype.row_bytes(cols));
    for expert in 0..experts {
        let name = first.name.replacen(".experts.0.", &format!(".experts.{expert}."), 1);
        bytes.extend(quantize(dtype, &dequantize(&checkpoint.tensor(&name)?)));
    }
    writer.tensor(&name(stack, config), dtype, &[experts, rows, cols], &bytes);
    Ok(())
}

fn name(hugging_face: &str, config: &ModelConfig) -> String {
    gguf_name(hugging_face, config.architecture).expect("every family's names have a GGUF spelling")
}

fn check_columns(name: &str, cols: usize, dtype: DType) -> Result<(), WeightsError> {
    if cols.is_multiple_of(dtype.block_elements()) {
        return Ok(());
    }
    let what = format!("{name} of {cols} columns as {dtype:?}");
    let supported = format!("multiples of {} are, and F32, F16 and BF16", dtype.block_elements());
    Err(WeightsError::unsupported(Path::new("GGUF"), what, supported))
}

fn write_config(writer: &mut GgufWriter, config: &ModelConfig) {
    let architecture = config.architecture.gguf_name();
    writer.string("general.architecture", architecture);
    // Every count is below the bounds of the config module, which fit.
    for (key, value) in [
        ("block_count", config.layers),
        ("context_length", config.max_position),
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.q_heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.rope.dim),
        ("vocab_size", config.vocab_size),
    ] {
        writer.u32(&format!("{architecture}.{key}"), value as u32);
    }
    writer.f32(&format!("{architecture}.attention.layer_norm_rms_epsilon"), config.norm_eps);
    writer.f32(&format!("{architecture}.rope.freq_base"), config.rope.theta as f32);
    if let RopeScaling::Linear { factor } = config.rope.scaling {
        writer.string(&format!("{architecture}.rope.scaling.type"), "linear");
        writer.f32(&format!("{architecture}.rope.scaling.factor"), factor as f32);
    }
    if let Some(moe) = &config.moe {
        write_moe(writer, architecture, moe);
    }
    if let Some(bos) = config.bos {
        writer.u32(BOS_KEY, bos);
    }
    for (key, &token) in EOS_KEYS.iter().zip(&config.eos) {
        writer.u32(key, token);
    }
}

/// Which layers are dense is read off the tensors.
fn write_moe(writer: &mut GgufWriter, architecture: &str, moe: &MoeConfig) {
    let key = |key: &str| format!("{architecture}.{key}");
    for (name, value) in [
        ("expert_count", moe.experts),
        ("expert_used_count", moe.top_k),
        ("expert_feed_forward_length", moe.expert_width),
        ("expert_shared_count", moe.shared_width / moe.expert_width),
        ("expert_group_count", moe.groups),
        ("expert_group_used_count", moe.groups_kept),
        ("leading_dense_block_count", moe.dense_layers.iter().take_while(|dense| **dense).count()),
    ] {
        writer.u32(&key(name), value as u32);
    }
    let gating = match moe.scoring {
        Scoring::Softmax => 1,
        Scoring::Sigmoid => 2,
    };
    writer.u32(&key("expert_gating_func"), gating);
    writer.bool(&key("expert_weights_norm"), moe.normalise);
    writer.f32(&key("expert_weights_scale"), moe.scale);
}

/// Scalings without a key of their own are stored as what each frequency is divided by.
fn divisors(rope: &Rope) -> Option<Vec<f32>> {
    match &rope.scaling {
        RopeScaling::None | RopeScaling::Linear { .. } => None,
        RopeScaling::Divisors(divisors) => Some(divisors.clone()),
        RopeScaling::Llama3 { .. } => {
            let plain = Rope { scaling: RopeScaling::None, ..rope.clone() };
            let pairs = plain.inverse_frequencies().into_iter().zip(rope.inverse_frequencies());
            Some(pairs.map(|(base, scaled)| base / scaled).collect())
        }
    }
}

/// Within each head, element `i` of a pair's first half goes to `2i`, of its second half to `2i + 1`.
fn pairs_from_halves(tensor: &Tensor, heads: usize, rope_dim: usize) -> Vec<f32> {
    let values = dequantize(tensor);
    // A bias is a matrix of one column.
    let cols = if tensor.shape.len() == 1 { 1 } else { tensor.cols() };
    let head_dim = values.len() / cols / heads;
    let row = |row: usize| &values[row * cols..(row + 1) * cols];
    let source = |element: usize| match element {
        e if e >= rope_dim => e,
        e => e / 2 + e % 2 * (rope_dim / 2),
    };
    (0..heads * head_dim)
        .flat_map(|out| row(out / head_dim * head_dim + source(out % head_dim)))
        .copied()
        .collect()
}
