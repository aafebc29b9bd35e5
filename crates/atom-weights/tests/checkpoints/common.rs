//! Small models and folders for tests.

use atom_weights::{Checkpoint, DType, dequantize, quant};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A folder that is removed when the test ends.
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// `name` must be unique among the tests of this crate.
    pub(crate) fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    pub(crate) fn write_json(&self, name: &str, value: &Value) -> PathBuf {
        self.write(name, value.to_string())
    }

    pub(crate) fn remove(&self, name: &str) {
        std::fs::remove_file(self.0.join(name)).unwrap();
    }

    pub(crate) fn refused(&self) -> String {
        refused(Checkpoint::open(&self.0))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A configuration of two small layers, in the spelling of published checkpoints.
pub(crate) fn config(family: &str) -> Value {
    let class = match family {
        "llama" => "LlamaForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        other => panic!("no family {other}"),
    };
    json!({
        "architectures": [class], "model_type": family, "hidden_act": "silu",
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2,
    })
}

/// The same of a family with experts: 8, of which 3 (Mixtral: 2) are chosen.
pub(crate) fn moe_config(family: &str) -> Value {
    let mut config = config("llama");
    let own = match family {
        "qwen3_moe" => json!({
            "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "norm_topk_prob": true, "attention_bias": false,
        }),
        "mixtral" => json!({
            "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2,
            "intermediate_size": 32, "sliding_window": null,
        }),
        "glm4_moe" => json!({
            "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 3,
            "n_shared_experts": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 4,
            "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": true, "use_qk_norm": true,
            "attention_bias": true, "partial_rotary_factor": 0.5,
        }),
        "minimax_m2" => json!({
            "architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 3,
            "intermediate_size": 32, "rotary_dim": 16, "scoring_func": "sigmoid", "use_qk_norm": true,
            "qk_norm_type": "per_layer", "use_routing_bias": true,
        }),
        other => panic!("no family {other} with experts"),
    };
    config["model_type"] = json!(family);
    set(&mut config, &own);
    config
}

pub(crate) const MOE_FAMILIES: [&str; 4] = ["qwen3_moe", "mixtral", "glm4_moe", "minimax_m2"];

/// The same with some keys changed.
pub(crate) fn config_with(family: &str, changes: &Value) -> Value {
    let mut config = if MOE_FAMILIES.contains(&family) { moe_config(family) } else { config(family) };
    set(&mut config, changes);
    config
}

fn set(config: &mut Value, changes: &Value) {
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
}

pub(crate) fn synthetic(config: &Value) -> Checkpoint {
    Checkpoint::synthetic(&config.to_string(), 1).unwrap()
}

pub(crate) fn refused(result: Result<Checkpoint, impl std::fmt::Display>) -> String {
    match result {
        Ok(checkpoint) => panic!("{checkpoint:?} was accepted"),
        Err(error) => error.to_string(),
    }
}

/// Asserts that a message has all parts.
#[track_caller]
pub(crate) fn says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
}

/// Tensors of a checkpoint as a safetensors file, written by the format's own library.
pub(crate) fn safetensors_file<'a>(
    checkpoint: &Checkpoint,
    dtype: DType,
    names: impl Iterator<Item = &'a str>,
) -> Vec<u8> {
    let kind = match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        other => panic!("safetensors have no {other:?}"),
    };
    let tensors: Vec<(&str, Vec<usize>, Vec<u8>)> = names
        .map(|name| {
            let tensor = checkpoint.tensor(name).unwrap();
            (name, tensor.shape.clone(), quant::quantize(dtype, &dequantize(&tensor)))
        })
        .collect();
    let views = tensors
        .iter()
        .map(|(name, shape, data)| (*name, TensorView::new(kind, shape.clone(), data).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

/// A header written by hand and a data section.
pub(crate) fn raw_safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}
