//! config.json to [`ModelConfig`], in both spellings of the rotary parameters: `rope_parameters` with
//! everything inside (transformers 5), and `rope_theta` beside `rope_scaling` (what most published
//! checkpoints have).

mod fp8;
mod keys;
mod moe;
mod rope;

use super::{
    Architecture, HEAD_DIM_MAX, HEADS_MAX, KeyNames, LAYERS_MAX, ModelConfig, POSITIONS_MAX, VOCAB_MAX,
    WIDTH_MAX,
};
use crate::error::WeightsError;
use atom_base::TokenId;
pub(crate) use fp8::modelopt_scales;
use keys::Keys;
use serde_json::Value;
use std::path::Path;

/// Parses the contents of a config.json. `origin` is for messages.
pub(crate) fn from_json(origin: &Path, raw: &Value) -> Result<ModelConfig, WeightsError> {
    let keys = Keys::top(origin, raw)?;
    let architecture = architecture(&keys)?;
    refuse_what_is_not_built(&keys)?;

    let hidden_size = keys.count("hidden_size", WIDTH_MAX)?;
    let q_heads = keys.count("num_attention_heads", HEADS_MAX)?;
    let kv_heads = keys.count_or("num_key_value_heads", q_heads, HEADS_MAX)?;
    let head_dim = head_dim(&keys, architecture, hidden_size, q_heads)?;
    let layers = keys.count("num_hidden_layers", LAYERS_MAX)?;
    let max_position = keys.count("max_position_embeddings", POSITIONS_MAX)?;
    refuse_active_windows(&keys, architecture, layers, max_position)?;
    let llama = architecture == Architecture::Llama;

    let config = ModelConfig {
        architecture,
        vocab_size: keys.count("vocab_size", VOCAB_MAX)?,
        hidden_size,
        intermediate_size: keys.count("intermediate_size", WIDTH_MAX)?,
        layers,
        q_heads,
        kv_heads,
        head_dim,
        norm_eps: keys.within("rms_norm_eps", 1e-12, 0.1)? as f32,
        rope: rope::read(&keys, architecture, head_dim)?,
        tied_embeddings: keys.flag("tie_word_embeddings", false)?,
        // Qwen2 has its biases without a key that says so.
        attention_bias: architecture == Architecture::Qwen2 || keys.flag("attention_bias", false)?,
        mlp_bias: llama && keys.flag("mlp_bias", false)?,
        qk_norm: moe::qk_norm(&keys, architecture)?,
        moe: moe::read(&keys, architecture, layers)?,
        fp8: fp8::read(&keys)?,
        max_position,
        bos: token_ids(origin, "bos_token_id", raw.get("bos_token_id"))?.first().copied(),
        eos: token_ids(origin, "eos_token_id", raw.get("eos_token_id"))?,
    };
    let names = KeyNames {
        q_heads: "num_attention_heads",
        kv_heads: "num_key_value_heads",
        head_dim: "head_dim",
        rope_dim: "partial_rotary_factor",
        bos: "bos_token_id",
        eos: "eos_token_id",
        moe: moe::key_names(architecture),
    };
    config.check(origin, &names)?;
    Ok(config)
}

/// A token id, a list of them, or null: all three are written for end tokens.
pub(crate) fn token_ids(
    origin: &Path,
    key: &str,
    value: Option<&Value>,
) -> Result<Vec<TokenId>, WeightsError> {
    let one = |value: &Value| {
        let id = value.as_u64().and_then(|id| TokenId::try_from(id).ok());
        id.ok_or_else(|| {
            WeightsError::config(origin, key, format!("is {value}; a token id is a whole number"))
        })
    };
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(one).collect(),
        Some(value) => Ok(vec![one(value)?]),
    }
}

/// `architectures` and `model_type` must be known, and agree where both are there.
fn architecture(keys: &Keys<'_>) -> Result<Architecture, WeightsError> {
    let by_class = match keys.value("architectures") {
        None => None,
        Some(Value::Array(classes)) => match classes.as_slice() {
            [] => None,
            [class] => Some(known(keys, "architectures", class, Architecture::class)?),
            [..] => {
                let problem = format!("lists {} classes; one is expected", classes.len());
                return Err(keys.wrong("architectures", problem));
            }
        },
        Some(other) => return Err(keys.wrong("architectures", format!("is {other}; a list is expected"))),
    };
    let by_type = match keys.value("model_type") {
        None => None,
        // Its first files had the name of the maker's older, different model here.
        Some(name) if by_class == Some(Architecture::MiniMaxM2) && name == "minimax" => by_class,
        Some(name) => Some(known(keys, "model_type", name, Architecture::name)?),
    };
    match (by_class, by_type) {
        (Some(class), Some(name)) if class != name => {
            let problem = format!("is {}, but architectures says {}", name.name(), class.class());
            Err(keys.wrong("model_type", problem))
        }
        (Some(found), _) | (None, Some(found)) => Ok(found),
        (None, None) => Err(keys.wrong(
            "model_type",
            format!("is missing, and so is architectures; {}", Architecture::supported(Architecture::name)),
        )),
    }
}

fn known(
    keys: &Keys<'_>,
    key: &str,
    value: &Value,
    spelling: fn(Architecture) -> &'static str,
) -> Result<Architecture, WeightsError> {
    let found = value.as_str().and_then(|name| Architecture::ALL.into_iter().find(|&a| spelling(a) == name));
    found.ok_or_else(|| keys.unsupported(format!("{key} {value}"), Architecture::supported(spelling)))
}

fn head_dim(
    keys: &Keys<'_>,
    architecture: Architecture,
    hidden_size: usize,
    q_heads: usize,
) -> Result<usize, WeightsError> {
    let always_stated = matches!(architecture, Architecture::Qwen3 | Architecture::MiniMaxM2);
    if keys.value("head_dim").is_some() || always_stated {
        // These heads are not hidden_size / num_attention_heads wide: nothing to derive it from.
        return keys.count("head_dim", HEAD_DIM_MAX);
    }
    if !hidden_size.is_multiple_of(q_heads) {
        let problem = format!(
            "is {q_heads}, which does not divide hidden_size = {hidden_size}, and there is no head_dim"
        );
        return Err(keys.wrong("num_attention_heads", problem));
    }
    Ok(hidden_size / q_heads)
}

fn refuse_what_is_not_built(keys: &Keys<'_>) -> Result<(), WeightsError> {
    for key in ["hidden_act", "hidden_activation"] {
        if let Some(act) = keys.value(key)
            && act.as_str() != Some("silu")
        {
            return Err(keys.unsupported(format!("{key} {act}"), "silu is"));
        }
    }
    for key in ["rope_interleaved", "add_cross_attention"] {
        if keys.flag(key, false)? {
            return Err(keys.unsupported(format!("{key} true"), "only false is"));
        }
    }
    Ok(())
}

/// A window as long as the context changes nothing; a shorter one changes every answer.
fn refuse_active_windows(
    keys: &Keys<'_>,
    architecture: Architecture,
    layers: usize,
    max_position: usize,
) -> Result<(), WeightsError> {
    // Of these, a window that is stated is used.
    let always = matches!(architecture, Architecture::Mixtral | Architecture::MiniMaxM2);
    let mut windowed = always && keys.value("sliding_window").is_some();
    if let Some(types) = keys.value("layer_types") {
        let list = types.as_array().ok_or_else(|| keys.wrong("layer_types", "is not a list"))?;
        if list.len() != layers {
            let problem = format!("has {} entries for {layers} layers", list.len());
            return Err(keys.wrong("layer_types", problem));
        }
        for kind in list {
            match kind.as_str() {
                Some("full_attention") => {}
                Some("sliding_attention") => windowed = true,
                _ => return Err(keys.unsupported(format!("layer type {kind}"), "full_attention is")),
            }
        }
    } else if keys.flag("use_sliding_window", false)? {
        // Layers below max_window_layers attend to everything.
        let full = keys.value("max_window_layers").and_then(Value::as_u64).unwrap_or(0);
        windowed = full < layers as u64;
    }
    let window = match keys.value("sliding_window") {
        Some(_) if windowed => keys.count("sliding_window", usize::MAX)?,
        _ if windowed => return Err(keys.wrong("sliding_window", "is missing, but layers use a window")),
        _ => return Ok(()),
    };
    if window < max_position {
        return Err(keys.unsupported(
            format!("a sliding window of {window} below max_position_embeddings = {max_position}"),
            "full attention is",
        ));
    }
    Ok(())
}
