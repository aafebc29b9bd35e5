//! Experts' tensors under one set of names, whichever way a file has them.
//!
//! | here | Mixtral and MiniMax-M2 | stacked |
//! |---|---|---|
//! | `mlp.gate.weight` | `block_sparse_moe.gate.weight` | |
//! | `mlp.gate.e_score_correction_bias` | `block_sparse_moe.e_score_correction_bias` | |
//! | `mlp.experts.E.gate_proj.weight` | `block_sparse_moe.experts.E.w1.weight` | `gate_proj.weight` |
//! | `mlp.experts.E.up_proj.weight` | `block_sparse_moe.experts.E.w3.weight` | `up_proj.weight` |
//! | `mlp.experts.E.down_proj.weight` | `block_sparse_moe.experts.E.w2.weight` | `down_proj.weight` |
//!
//! A stack is one tensor `[experts, rows, columns]` below `mlp.experts.`: GGUF's, with the names above,
//! and transformers' own, `gate_up_proj` `[experts, 2 * width, hidden]` and `down_proj`. It becomes
//! views of its experts; no byte is moved.

use crate::checkpoint::{Entries, Entry};
use crate::config::{ModelConfig, MoeConfig};
use crate::error::WeightsError;
use std::path::Path;

/// Renames what Mixtral, MiniMax-M2 and transformers spell otherwise, and splits stacks.
pub(crate) fn unify(entries: Entries, config: &ModelConfig, origin: &Path) -> Result<Entries, WeightsError> {
    let Some(moe) = &config.moe else { return Ok(entries) };
    let mut unified = Entries::new();
    for (name, entry) in entries {
        let renamed = renamed(&name).unwrap_or(name);
        insert(&mut unified, renamed, entry, origin)?;
    }
    for layer in (0..config.layers).filter(|&layer| !config.is_dense(layer)) {
        split_layer(&mut unified, layer, config.hidden_size, moe, origin)?;
    }
    Ok(unified)
}

/// The stack that an expert's matrix belongs to, and the expert: `model.layers.1.mlp.experts.3.up_proj.weight`
/// is number 3 of `model.layers.1.mlp.experts.up_proj.weight`.
pub(crate) fn stack_of(name: &str) -> Option<(String, usize)> {
    let (prefix, rest) = name.split_once(EXPERTS)?;
    let (expert, matrix) = rest.split_once('.')?;
    Some((format!("{prefix}{EXPERTS}{matrix}"), expert.parse().ok()?))
}

/// `None` for names that are spelled as here.
fn renamed(name: &str) -> Option<String> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let part = match rest.strip_prefix("block_sparse_moe.") {
        Some("e_score_correction_bias") => "gate.e_score_correction_bias".to_owned(),
        Some(part) => expert_part(part).unwrap_or_else(|| part.to_owned()),
        // transformers' name for MiniMax-M2's.
        None if rest == "mlp.e_score_correction_bias" => "gate.e_score_correction_bias".to_owned(),
        None => expert_part(rest.strip_prefix("mlp.")?)?,
    };
    Some(format!("model.layers.{layer}.mlp.{part}"))
}

/// `experts.3.w1.weight` is `experts.3.gate_proj.weight`.
fn expert_part(part: &str) -> Option<String> {
    let (expert, matrix) = part.strip_prefix("experts.")?.split_once('.')?;
    let (_, matrix) = LETTERS.iter().find(|(letter, _)| *letter == matrix)?;
    Some(format!("experts.{expert}.{matrix}"))
}

fn split_layer(
    entries: &mut Entries,
    layer: usize,
    hidden: usize,
    moe: &MoeConfig,
    origin: &Path,
) -> Result<(), WeightsError> {
    let width = moe.expert_width;
    let (gate, up, down) = ("gate_proj.weight", "up_proj.weight", "down_proj.weight");
    for (stack, matrices, rows, cols) in [
        (gate, &[gate][..], width, hidden),
        (up, &[up], width, hidden),
        (down, &[down], hidden, width),
        ("gate_up_proj", &[gate, up], width, hidden),
        ("gate_up_proj.weight", &[gate, up], width, hidden),
        ("down_proj", &[down], hidden, width),
    ] {
        let name = format!("model.layers.{layer}{EXPERTS}{stack}");
        let Some(entry) = entries.remove(&name) else { continue };
        let expected = vec![moe.experts, matrices.len() * rows, cols];
        if entry.shape() != expected {
            let found = entry.shape().to_vec();
            return Err(WeightsError::TensorShape { path: origin.to_owned(), name, found, expected });
        }
        for expert in 0..moe.experts {
            for (part, matrix) in matrices.iter().enumerate() {
                let first = (expert * matrices.len() + part) * rows;
                let name = format!("model.layers.{layer}{EXPERTS}{expert}.{matrix}");
                insert(entries, name, entry.rows(first..first + rows), origin)?;
            }
        }
    }
    Ok(())
}

fn insert(entries: &mut Entries, name: String, entry: Entry, origin: &Path) -> Result<(), WeightsError> {
    if entries.contains_key(&name) {
        let problem = format!("tensor {name} appears twice, under this and another name or in a stack");
        return Err(WeightsError::damaged(origin, problem));
    }
    entries.insert(name, entry);
    Ok(())
}

/// Within a layer.
const EXPERTS: &str = ".mlp.experts.";
/// Mixtral's names of an expert's matrices.
const LETTERS: [(&str, &str); 3] =
    [("w1.weight", "gate_proj.weight"), ("w3.weight", "up_proj.weight"), ("w2.weight", "down_proj.weight")];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_mixtral_and_minimax_are_mapped() {
        for (file, here) in [
            ("model.layers.3.block_sparse_moe.gate.weight", "model.layers.3.mlp.gate.weight"),
            (
                "model.layers.3.block_sparse_moe.e_score_correction_bias",
                "model.layers.3.mlp.gate.e_score_correction_bias",
            ),
            ("model.layers.3.mlp.e_score_correction_bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
            (
                "model.layers.10.block_sparse_moe.experts.7.w1.weight",
                "model.layers.10.mlp.experts.7.gate_proj.weight",
            ),
            (
                "model.layers.10.block_sparse_moe.experts.7.w2.weight",
                "model.layers.10.mlp.experts.7.down_proj.weight",
            ),
            ("model.layers.0.mlp.experts.255.w3.weight", "model.layers.0.mlp.experts.255.up_proj.weight"),
            (
                "model.layers.0.block_sparse_moe.experts.gate_up_proj",
                "model.layers.0.mlp.experts.gate_up_proj",
            ),
        ] {
            assert_eq!(renamed(file).as_deref(), Some(here));
        }
        for name in [
            "model.layers.0.mlp.gate.weight",
            "model.layers.0.mlp.experts.1.gate_proj.weight",
            "model.layers.0.mlp.gate_proj.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "block_sparse_moe.gate.weight",
        ] {
            assert_eq!(renamed(name), None, "{name}");
        }
    }

    #[test]
    fn an_experts_matrix_names_its_stack() {
        let (stack, expert) = stack_of("model.layers.1.mlp.experts.13.up_proj.weight").unwrap();
        assert_eq!((stack.as_str(), expert), ("model.layers.1.mlp.experts.up_proj.weight", 13));
        for name in ["model.layers.1.mlp.shared_experts.up_proj.weight", "model.layers.1.mlp.gate.weight"] {
            assert_eq!(stack_of(name), None);
        }
    }
}
