//! The tensors of each model family, in one list. `Checkpoint::open` checks files against it, and
//! synthetic models are made from it.

use crate::config::{Architecture, ModelConfig};

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
    /// A matrix whose result enters the residual stream: `o_proj`, `down_proj`.
    ResidualMatrix,
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
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (q, kv) = (config.q_heads * config.head_dim, config.kv_heads * config.head_dim);
    let mut norm = |name: &str, len| {
        list.push(spec(format!("model.layers.{layer}.{name}.weight"), vec![len], Role::Norm));
    };
    norm("input_layernorm", hidden);
    norm("post_attention_layernorm", hidden);
    if config.architecture == Architecture::Qwen3 {
        norm("self_attn.q_norm", config.head_dim);
        norm("self_attn.k_norm", config.head_dim);
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
    linear("self_attn.o_proj", hidden, q, Role::ResidualMatrix, config.output_bias());
    linear("mlp.gate_proj", inner, hidden, Role::Matrix, config.mlp_bias);
    linear("mlp.up_proj", inner, hidden, Role::Matrix, config.mlp_bias);
    linear("mlp.down_proj", hidden, inner, Role::ResidualMatrix, config.mlp_bias);
}

fn spec(name: String, shape: Vec<usize>, role: Role) -> TensorSpec {
    TensorSpec { name, shape, role }
}
