//! The expert layers in a GGUF header.

use super::Keys;
use crate::checkpoint::Entries;
use crate::config::moe::{EXPERTS_MAX, MoeConfig, SCALE_MAX, Scoring};
use crate::config::{Architecture, QkNorm, WIDTH_MAX};
use crate::error::WeightsError;

/// The expert layers of a family that has them. Which layers are dense, and whether there is a bias
/// for the choice, is read off the tensors where the header has no key for it.
pub(super) fn read(
    keys: &Keys<'_>,
    layers: usize,
    entries: &Entries,
) -> Result<Option<MoeConfig>, WeightsError> {
    if !keys.architecture.has_experts() {
        return Ok(None);
    }
    let own_width = keys.architecture != Architecture::Mixtral;
    let width_key = if own_width { "expert_feed_forward_length" } else { "feed_forward_length" };
    let expert_width = keys.count(width_key, WIDTH_MAX)?;
    let dense_layers = dense_layers(keys, layers, entries)?;
    let has_bias = |layer: usize| entries.contains_key(&layer_name(layer, "gate.e_score_correction_bias"));
    Ok(Some(MoeConfig {
        experts: keys.count("expert_count", EXPERTS_MAX)?,
        top_k: keys.count("expert_used_count", EXPERTS_MAX)?,
        expert_width,
        shared_width: shared_width(keys, expert_width)?,
        selection_bias: dense_layers.iter().position(|dense| !dense).is_some_and(has_bias),
        dense_layers,
        scoring: scoring(keys)?,
        // Writers put 0 for "no groups".
        groups: keys.whole_or("expert_group_count", 1, EXPERTS_MAX)?.max(1),
        groups_kept: keys.whole_or("expert_group_used_count", 1, EXPERTS_MAX)?.max(1),
        normalise: normalise(keys)?,
        scale: scale(keys)?,
    }))
}

/// Norms on q and k are part of a family, but for GLM-4-MoE, whose files have their tensors or not.
pub(super) fn qk_norm(architecture: Architecture, entries: &Entries) -> QkNorm {
    match architecture {
        Architecture::Llama | Architecture::Qwen2 | Architecture::Mixtral => QkNorm::None,
        Architecture::Qwen3 | Architecture::Qwen3Moe => QkNorm::PerHead,
        Architecture::Glm4Moe if entries.contains_key("model.layers.0.self_attn.q_norm.weight") => {
            QkNorm::PerHead
        }
        Architecture::Glm4Moe => QkNorm::None,
        Architecture::MiniMaxM2 => QkNorm::Whole,
    }
}

fn layer_name(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.mlp.{part}")
}

fn dense_layers(keys: &Keys<'_>, layers: usize, entries: &Entries) -> Result<Vec<bool>, WeightsError> {
    let leading = keys.whole_or("leading_dense_block_count", 0, layers)?;
    let has = |layer, part| entries.contains_key(&layer_name(layer, part));
    let plain = |layer| has(layer, "gate_proj.weight") && !has(layer, "gate.weight");
    Ok((0..layers).map(|layer| layer < leading || plain(layer)).collect())
}

fn shared_width(keys: &Keys<'_>, expert_width: usize) -> Result<usize, WeightsError> {
    const KEY: &str = "expert_shared_count";
    let count = keys.whole_or(KEY, 0, EXPERTS_MAX)?;
    if count > 0 && keys.architecture != Architecture::Glm4Moe {
        return Err(keys.unsupported(format!("{} = {count}", keys.name(KEY)), "0 is in this architecture"));
    }
    let width = count * expert_width;
    if width > WIDTH_MAX {
        let problem =
            format!("is {count}; times a width of {expert_width} it passes the bound of {WIDTH_MAX}");
        return Err(keys.wrong(KEY, problem));
    }
    Ok(width)
}

/// Numbered as in ggml: 1 is softmax, 2 sigmoid; 0 and no key are the family's own.
fn scoring(keys: &Keys<'_>) -> Result<Scoring, WeightsError> {
    const KEY: &str = "expert_gating_func";
    let (own, number) = match keys.architecture {
        Architecture::Glm4Moe | Architecture::MiniMaxM2 => (Scoring::Sigmoid, 2),
        _ => (Scoring::Softmax, 1),
    };
    match keys.whole_or(KEY, number, usize::MAX)? {
        0 => Ok(own),
        found if found == number => Ok(own),
        found => {
            let what = format!("{} = {found}", keys.name(KEY));
            Err(keys.unsupported(what, format!("{number} ({own:?}) is in this architecture")))
        }
    }
}

/// Without the key, what the reader that these files are made for does.
fn normalise(keys: &Keys<'_>) -> Result<bool, WeightsError> {
    const KEY: &str = "expert_weights_norm";
    let name = keys.name(KEY);
    let stated = keys.gguf.bool(&name)?;
    match keys.architecture {
        Architecture::Qwen3Moe => Ok(stated.unwrap_or(true)),
        Architecture::Glm4Moe => Ok(stated.unwrap_or(false)),
        _ if stated == Some(false) => {
            Err(keys.unsupported(format!("{name} = false"), "only true is in this architecture"))
        }
        _ => Ok(true),
    }
}

/// 0 and 1 scale nothing.
fn scale(keys: &Keys<'_>) -> Result<f32, WeightsError> {
    const KEY: &str = "expert_weights_scale";
    if !keys.has(KEY) || keys.not_negative(KEY)? == 0.0 {
        return Ok(1.0);
    }
    keys.positive(KEY, SCALE_MAX)
}
