//! The tensors of each model family, in one list. `Checkpoint::open` checks files against it, and
//! synthetic models are made from it.

use crate::config::{ModelConfig, MoeConfig, QkNorm};

/// A tensor that a model of some configuration has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Hugging Face name.
    pub name: String,
    /// Slowest first: a matrix is `[outputs, inputs]`.
    pub shape: Vec<usize>,
    /// What it is for.
    pub role: Role,
}

/// What a tensor does in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The embedding table, `[vocab, hidden]`.
    Embedding,
    /// The output matrix, `[vocab, hidden]`, where it is not the embedding table.
    Head,
    /// Weights of an RMS norm.
    Norm,
    /// The bias of a matrix.
    Bias,
    /// The router's matrix, `[experts, hidden]`.
    Router,
    /// What is added to the experts' scores for the choice, `[experts]`.
    SelectionBias,
    /// An MLP's matrix whose result enters the residual stream: `down_proj`.
    ResidualMatrix,
    /// Attention's, `o_proj`.
    AttentionOutput,
    /// Any other matrix.
    Matrix,
}

/// Every tensor of a model, in the order of the forward pass.
pub fn tensors(config: &ModelConfig) -> Vec<TensorSpec> {
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    let mut list = vec![spec("model.embed_tokens.weight".into(), vec![vocab, hidden], Role::Embedding)];
    for layer in 0..config.layers {
        layer_tensors(config, layer, &mut list);
    }
    list.push(spec("model.norm.weight".into(), vec![hidden], Role::Norm));
    if !config.tied_embeddings {
        list.push(spec("lm_head.weight".into(), vec![vocab, hidden], Role::Head));
    }
    list
}

fn layer_tensors(config: &ModelConfig, layer: usize, list: &mut Vec<TensorSpec>) {
    let hidden = config.hidden_size;
    let (q, kv) = (config.q_heads * config.head_dim, config.kv_heads * config.head_dim);
    let mut norm = |name: &str, len| {
        list.push(spec(format!("model.layers.{layer}.{name}.weight"), vec![len], Role::Norm));
    };
    norm("input_layernorm", hidden);
    norm("post_attention_layernorm", hidden);
    let norms = match config.qk_norm {
        QkNorm::None => None,
        QkNorm::PerHead => Some((config.head_dim, config.head_dim)),
        QkNorm::Whole => Some((q, kv)),
    };
    if let Some((q, k)) = norms {
        norm("self_attn.q_norm", q);
        norm("self_attn.k_norm", k);
    }
    let mut linear = |name: &str, outputs, inputs, role, bias| {
        let prefix = format!("model.layers.{layer}.{name}");
        list.push(spec(format!("{prefix}.weight"), vec![outputs, inputs], role));
        if bias {
            list.push(spec(format!("{prefix}.bias"), vec![outputs], Role::Bias));
        }
    };
    linear("self_attn.q_proj", q, hidden, Role::Matrix, config.attention_bias);
    linear("self_attn.k_proj", kv, hidden, Role::Matrix, config.attention_bias);
    linear("self_attn.v_proj", kv, hidden, Role::Matrix, config.attention_bias);
    linear("self_attn.o_proj", hidden, q, Role::AttentionOutput, config.output_bias());
    let prefix = format!("model.layers.{layer}.mlp");
    match &config.moe {
        Some(moe) if !config.is_dense(layer) => moe_tensors(moe, &prefix, hidden, list),
        _ => mlp_tensors(&prefix, config.intermediate_size, hidden, config.mlp_bias, list),
    }
}

fn moe_tensors(moe: &MoeConfig, prefix: &str, hidden: usize, list: &mut Vec<TensorSpec>) {
    list.push(spec(format!("{prefix}.gate.weight"), vec![moe.experts, hidden], Role::Router));
    if moe.selection_bias {
        let name = format!("{prefix}.gate.e_score_correction_bias");
        list.push(spec(name, vec![moe.experts], Role::SelectionBias));
    }
    for expert in 0..moe.experts {
        mlp_tensors(&format!("{prefix}.experts.{expert}"), moe.expert_width, hidden, false, list);
    }
    if moe.shared_width > 0 {
        mlp_tensors(&format!("{prefix}.shared_experts"), moe.shared_width, hidden, false, list);
    }
}

fn mlp_tensors(prefix: &str, width: usize, hidden: usize, bias: bool, list: &mut Vec<TensorSpec>) {
    for (name, outputs, inputs, role) in [
        ("gate_proj", width, hidden, Role::Matrix),
        ("up_proj", width, hidden, Role::Matrix),
        ("down_proj", hidden, width, Role::ResidualMatrix),
    ] {
        list.push(spec(format!("{prefix}.{name}.weight"), vec![outputs, inputs], role));
        if bias {
            list.push(spec(format!("{prefix}.{name}.bias"), vec![outputs], Role::Bias));
        }
    }
}

fn spec(name: String, shape: Vec<usize>, role: Role) -> TensorSpec {
    TensorSpec { name, shape, role }
}
