//! `quantization_config`, in the four ways that published FP8 checkpoints write it.
//!
//! | `quant_method` | written by | scales |
//! |---|---|---|
//! | `fp8` | the makers of Qwen3, DeepSeek-V3 and MiniMax-M2; AutoFP8 | of blocks of `weight_block_size`; without one, of tensors |
//! | `compressed-tensors` | llm-compressor | the `strategy` of its `config_groups`: `tensor`, `channel` or `block` |
//! | `fbgemm_fp8` | Meta's | of channels |
//! | `modelopt` | NVIDIA's ModelOpt, also in hf_quant_config.json alone | of tensors (`FP8`) or channels (`FP8_PER_CHANNEL_PER_TOKEN`) |
//!
//! What they say of activations, of the KV cache and of modules left out changes no weight.

use super::keys::Keys;
use crate::error::WeightsError;
use crate::fp8::Fp8Scales;
use serde_json::Value;
use std::path::Path;

/// Of a whole config.json; `None` if the model is not quantised.
pub(super) fn read(keys: &Keys<'_>) -> Result<Option<Fp8Scales>, WeightsError> {
    // The second is what early files of compressed-tensors call it.
    let (key, scheme) = match (keys.object("quantization_config")?, keys.object("compression_config")?) {
        (None, None) => return Ok(None),
        (Some(scheme), None) => ("quantization_config", scheme),
        (None, Some(scheme)) => ("compression_config", scheme),
        (Some(_), Some(_)) => {
            return Err(keys.wrong("compression_config", "is there beside a quantization_config"));
        }
    };
    match scheme.text("quant_method")? {
        Some("fp8") => fine_grained(&scheme),
        Some("compressed-tensors") => compressed_tensors(&scheme),
        Some("fbgemm_fp8") => Ok(Fp8Scales::Channel),
        Some("modelopt") => modelopt(&scheme),
        other => Err(unsupported(&scheme, &format!("{key} ({})", other.unwrap_or("an unnamed method")))),
    }
    .map(Some)
}

/// Of a hf_quant_config.json.
pub(crate) fn modelopt_scales(origin: &Path, raw: &Value) -> Result<Option<Fp8Scales>, WeightsError> {
    match Keys::top(origin, raw)?.object("quantization")? {
        Some(scheme) if scheme.value("quant_algo").is_some() => modelopt(&scheme).map(Some),
        _ => Ok(None),
    }
}

fn fine_grained(scheme: &Keys<'_>) -> Result<Fp8Scales, WeightsError> {
    match scheme.text("fmt")? {
        None | Some("e4m3" | "float8_e4m3fn") => {}
        Some(other) => return Err(unsupported(scheme, &format!("{} {other}", scheme.path("fmt")))),
    }
    match scheme.value("weight_block_size") {
        None => Ok(Fp8Scales::Tensor),
        Some(size) => block(scheme, "weight_block_size", size),
    }
}

fn modelopt(scheme: &Keys<'_>) -> Result<Fp8Scales, WeightsError> {
    match scheme.text("quant_algo")? {
        Some("FP8") => Ok(Fp8Scales::Tensor),
        Some("FP8_PER_CHANNEL_PER_TOKEN") => Ok(Fp8Scales::Channel),
        other => {
            let found = other.unwrap_or("that is missing");
            Err(unsupported(scheme, &format!("{} {found}", scheme.path("quant_algo"))))
        }
    }
}

fn compressed_tensors(scheme: &Keys<'_>) -> Result<Fp8Scales, WeightsError> {
    match scheme.text("format")? {
        None | Some("float-quantized" | "naive-quantized") => {}
        Some(other) => return Err(unsupported(scheme, &format!("{} {other}", scheme.path("format")))),
    }
    if let Some(sparsity) = scheme.object("sparsity_config")?
        && let Some(format) = sparsity.text("format")?
        && format != "dense"
    {
        return Err(unsupported(scheme, &format!("{} {format}", sparsity.path("format"))));
    }
    let groups =
        scheme.object("config_groups")?.ok_or_else(|| scheme.wrong("config_groups", "is missing"))?;
    let mut found: Option<(&String, Fp8Scales)> = None;
    for (name, group) in groups.values() {
        let scales = group_scales(scheme, name, group)?;
        match found {
            Some((first, other)) if other != scales => {
                let what = format!("config_groups of several kinds ({first}: {other}; {name}: {scales})");
                return Err(unsupported(scheme, &what));
            }
            _ => found = Some((name, scales)),
        }
    }
    found.map(|(_, scales)| scales).ok_or_else(|| scheme.wrong("config_groups", "has no group"))
}

fn group_scales(scheme: &Keys<'_>, name: &str, group: &Value) -> Result<Fp8Scales, WeightsError> {
    let key = format!("config_groups.{name}.weights");
    let weights = group.get("weights").filter(|weights| weights.is_object());
    let weights = weights.ok_or_else(|| scheme.wrong(&key, "is missing"))?;
    let (bits, kind) = (&weights["num_bits"], &weights["type"]);
    if bits.as_u64() != Some(8) || kind.as_str() != Some("float") {
        return Err(unsupported(scheme, &format!("{} of {bits} bits and type {kind}", scheme.path(&key))));
    }
    if weights.get("symmetric").and_then(Value::as_bool) == Some(false) {
        return Err(unsupported(scheme, &format!("{} with zero points", scheme.path(&key))));
    }
    match weights["strategy"].as_str() {
        Some("tensor") => Ok(Fp8Scales::Tensor),
        Some("channel") => Ok(Fp8Scales::Channel),
        Some("block") => block(scheme, &format!("{key}.block_structure"), &weights["block_structure"]),
        _ => Err(unsupported(
            scheme,
            &format!("{} {}", scheme.path(&format!("{key}.strategy")), weights["strategy"]),
        )),
    }
}

/// `[128, 128]`; "128x128" in early files of compressed-tensors.
fn block(scheme: &Keys<'_>, key: &str, size: &Value) -> Result<Fp8Scales, WeightsError> {
    let sides: Vec<Option<usize>> = match size {
        Value::Array(sides) => {
            sides.iter().map(|side| side.as_u64().and_then(|n| n.try_into().ok())).collect()
        }
        Value::String(text) => text.split('x').map(|side| side.parse().ok()).collect(),
        _ => Vec::new(),
    };
    match sides[..] {
        [Some(rows @ 1..=BLOCK_MAX), Some(cols @ 1..=BLOCK_MAX)] => Ok(Fp8Scales::Block { rows, cols }),
        _ => {
            Err(scheme.wrong(key, format!("is {size}; two whole numbers from 1 to {BLOCK_MAX} are expected")))
        }
    }
}

fn unsupported(scheme: &Keys<'_>, what: &str) -> WeightsError {
    scheme.unsupported(
        what,
        "FP8 e4m3 weights of quant_method fp8, compressed-tensors (float-quantized), fbgemm_fp8 and modelopt (FP8, \
         FP8_PER_CHANNEL_PER_TOKEN) are; else use the unquantised checkpoint, or a GGUF in Q8_0 or Q4_K_M",
    )
}

/// Sides of a block; published ones have 128.
const BLOCK_MAX: usize = 1 << 16;
