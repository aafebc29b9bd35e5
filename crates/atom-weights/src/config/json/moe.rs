//! The expert layers in config.json.

use super::keys::Keys;
use crate::config::moe::{EXPERTS_MAX, MoeConfig, MoeKeyNames, SCALE_MAX, Scoring};
use crate::config::{Architecture, QkNorm, WIDTH_MAX};
use crate::error::WeightsError;
use serde_json::{Value, json};

/// The expert layers of a family that has them. Defaults are those of the reference's configuration
/// classes: keys with these values may be left out of a file.
pub(super) fn read(
    keys: &Keys<'_>,
    architecture: Architecture,
    layers: usize,
) -> Result<Option<MoeConfig>, WeightsError> {
    if !architecture.has_experts() {
        return Ok(None);
    }
    refuse_what_is_not_built(keys, architecture)?;
    let glm = architecture == Architecture::Glm4Moe;
    let sigmoid = matches!(architecture, Architecture::Glm4Moe | Architecture::MiniMaxM2);
    let own_width = matches!(architecture, Architecture::Qwen3Moe | Architecture::Glm4Moe);
    let width_key = if own_width { "moe_intermediate_size" } else { "intermediate_size" };
    let expert_width = keys.count(width_key, WIDTH_MAX)?;
    Ok(Some(MoeConfig {
        experts: experts(keys, architecture)?,
        top_k: keys.count("num_experts_per_tok", EXPERTS_MAX)?,
        expert_width,
        shared_width: if glm { shared_width(keys, expert_width)? } else { 0 },
        dense_layers: dense_layers(keys, architecture, layers)?,
        scoring: if sigmoid { Scoring::Sigmoid } else { Scoring::Softmax },
        selection_bias: glm || sigmoid && keys.flag("use_routing_bias", true)?,
        groups: if glm { keys.count_or("n_group", 1, EXPERTS_MAX)? } else { 1 },
        groups_kept: if glm { keys.count_or("topk_group", 1, EXPERTS_MAX)? } else { 1 },
        normalise: match architecture {
            Architecture::Qwen3Moe => keys.flag("norm_topk_prob", false)?,
            Architecture::Glm4Moe => keys.flag("norm_topk_prob", true)?,
            _ => true,
        },
        scale: match keys.value("routed_scaling_factor") {
            Some(_) if glm => keys.within("routed_scaling_factor", 1e-6, SCALE_MAX.into())? as f32,
            _ => 1.0,
        },
    }))
}

/// Norms on q and k are part of a family, but for GLM-4-MoE, which says.
pub(super) fn qk_norm(keys: &Keys<'_>, architecture: Architecture) -> Result<QkNorm, WeightsError> {
    Ok(match architecture {
        Architecture::Llama | Architecture::Qwen2 | Architecture::Mixtral => QkNorm::None,
        Architecture::Qwen3 | Architecture::Qwen3Moe => QkNorm::PerHead,
        Architecture::Glm4Moe if keys.flag("use_qk_norm", false)? => QkNorm::PerHead,
        Architecture::Glm4Moe => QkNorm::None,
        Architecture::MiniMaxM2 => QkNorm::Whole,
    })
}

/// How the family's files spell what the checks of [`MoeConfig`] may complain of.
pub(super) fn key_names(architecture: Architecture) -> MoeKeyNames<'static> {
    MoeKeyNames {
        experts: experts_key(architecture),
        top_k: "num_experts_per_tok",
        groups: "n_group",
        groups_kept: "topk_group",
    }
}

const fn experts_key(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::Qwen3Moe => "num_experts",
        Architecture::Glm4Moe => "n_routed_experts",
        _ => "num_local_experts",
    }
}

/// The reference reads and writes this number under aliases as well; they must agree.
fn experts(keys: &Keys<'_>, architecture: Architecture) -> Result<usize, WeightsError> {
    let own = experts_key(architecture);
    let mut found: Option<(&str, usize)> = None;
    for key in [own, "num_experts", "num_local_experts", "n_routed_experts"] {
        if keys.value(key).is_none() {
            continue;
        }
        let count = keys.count(key, EXPERTS_MAX)?;
        match found {
            Some((other, first)) if first != count => {
                return Err(keys.wrong(key, format!("is {count}, but {other} is {first}")));
            }
            Some(_) => {}
            None => found = Some((key, count)),
        }
    }
    found.map(|(_, count)| count).ok_or_else(|| keys.wrong(own, "is missing"))
}

/// Several shared experts are one of the sum of their widths.
fn shared_width(keys: &Keys<'_>, expert_width: usize) -> Result<usize, WeightsError> {
    const KEY: &str = "n_shared_experts";
    let count = keys.whole_or(KEY, 1, EXPERTS_MAX)?;
    let width = count * expert_width;
    if width > WIDTH_MAX {
        let problem =
            format!("is {count}; times a width of {expert_width} it passes the bound of {WIDTH_MAX}");
        return Err(keys.wrong(KEY, problem));
    }
    Ok(width)
}

fn dense_layers(
    keys: &Keys<'_>,
    architecture: Architecture,
    layers: usize,
) -> Result<Vec<bool>, WeightsError> {
    match architecture {
        Architecture::Glm4Moe => {
            let leading = keys.whole_or("first_k_dense_replace", 1, layers)?;
            Ok((0..layers).map(|layer| layer < leading).collect())
        }
        Architecture::Qwen3Moe => {
            // Of every `step` layers the last has experts.
            let step = keys.count_or("decoder_sparse_step", 1, usize::MAX)?;
            let mut dense: Vec<bool> = (1..=layers).map(|number| !number.is_multiple_of(step)).collect();
            for layer in mlp_only_layers(keys, layers)? {
                dense[layer] = true;
            }
            Ok(dense)
        }
        _ => Ok(vec![false; layers]),
    }
}

fn mlp_only_layers(keys: &Keys<'_>, layers: usize) -> Result<Vec<usize>, WeightsError> {
    const KEY: &str = "mlp_only_layers";
    let Some(value) = keys.value(KEY) else { return Ok(Vec::new()) };
    let list = value.as_array().ok_or_else(|| keys.wrong(KEY, format!("is {value}; a list is expected")))?;
    let layer = |value: &Value| {
        let number = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n < layers);
        number.ok_or_else(|| {
            keys.wrong(KEY, format!("holds {value}; the number of a layer below {layers} is expected"))
        })
    };
    list.iter().map(layer).collect()
}

/// Keys that would change what is computed, with the only value that is built. They are from these
/// families' published files and from relatives that share their class names or code.
fn refuse_what_is_not_built(keys: &Keys<'_>, architecture: Architecture) -> Result<(), WeightsError> {
    use Architecture::{Glm4Moe, MiniMaxM2, Mixtral, Qwen3Moe};
    let any = &[Qwen3Moe, Mixtral, Glm4Moe, MiniMaxM2][..];
    let softmax = &[Qwen3Moe, Mixtral][..];
    let not_glm = &[Qwen3Moe, Mixtral, MiniMaxM2][..];
    let minimax = &[MiniMaxM2][..];
    for (families, key, built) in [
        (any, "mlp_bias", json!(false)),
        (any, "moe_layer_freq", json!(1)),
        (any, "shared_expert_intermediate_size", json!(0)),
        (softmax, "scoring_func", json!("softmax")),
        (&[Glm4Moe, MiniMaxM2], "scoring_func", json!("sigmoid")),
        (softmax, "use_routing_bias", json!(false)),
        (&[Glm4Moe], "topk_method", json!("noaux_tc")),
        (&[Mixtral, MiniMaxM2], "attention_bias", json!(false)),
        (&[Mixtral, MiniMaxM2], "norm_topk_prob", json!(true)),
        (not_glm, "routed_scaling_factor", json!(1)),
        (not_glm, "n_group", json!(1)),
        (not_glm, "n_shared_experts", json!(0)),
        (not_glm, "first_k_dense_replace", json!(0)),
        (minimax, "use_qk_norm", json!(true)),
        (minimax, "qk_norm_type", json!("per_layer")),
        (minimax, "shared_intermediate_size", json!(0)),
        (minimax, "postnorm", json!(false)),
        (minimax, "attention_output_gate", json!(false)),
        (minimax, "use_gemma_norm", json!(false)),
        // What MiniMax's older models scale their residual streams by.
        (minimax, "layernorm_full_attention_alpha", json!(1)),
        (minimax, "layernorm_full_attention_beta", json!(1)),
        (minimax, "layernorm_linear_attention_alpha", json!(1)),
        (minimax, "layernorm_linear_attention_beta", json!(1)),
        (minimax, "layernorm_mlp_alpha", json!(1)),
        (minimax, "layernorm_mlp_beta", json!(1)),
    ] {
        if !families.contains(&architecture) {
            continue;
        }
        if let Some(value) = keys.value(key)
            && !is_same(value, &built)
        {
            let what = format!("{key} {value} in a {} model", architecture.name());
            return Err(keys.unsupported(what, format!("only {built} is")));
        }
    }
    refuse_linear_attention(keys, architecture)
}

/// 1 and 1.0 are one number.
fn is_same(value: &Value, built: &Value) -> bool {
    value == built || value.as_f64().is_some_and(|number| Some(number) == built.as_f64())
}

/// MiniMax's list of kinds, a layer each: 1 is softmax attention, 0 a linear one.
fn refuse_linear_attention(keys: &Keys<'_>, architecture: Architecture) -> Result<(), WeightsError> {
    const KEY: &str = "attn_type_list";
    match keys.value(KEY) {
        Some(Value::Array(kinds)) if architecture == Architecture::MiniMaxM2 => {
            match kinds.iter().find(|kind| kind.as_u64() != Some(1)) {
                Some(kind) => Err(keys.unsupported(format!("{KEY} with {kind}"), "1 (softmax attention) is")),
                None => Ok(()),
            }
        }
        Some(other) if architecture == Architecture::MiniMaxM2 => {
            Err(keys.wrong(KEY, format!("is {other}; a list is expected")))
        }
        _ => Ok(()),
    }
}
