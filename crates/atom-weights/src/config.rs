//! What a checkpoint says about its model, whichever format and spelling it came in.

use atom_base::TokenId;

/// The model families this build can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 2, 3 and everything shaped like it (SmolLM2).
    Llama,
    /// Qwen2 and 2.5: Llama with biases on q, k and v.
    Qwen2,
    /// Qwen3 (dense): Llama with an RMS norm on each head of q and k.
    Qwen3,
}

/// A parsed `config.json` or GGUF header: every number present, every divisibility within one rank checked.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Which family.
    pub architecture: Architecture,
    /// Rows of the embedding table, and logits.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key/value heads; divides `q_heads`.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Added to the mean square in RMS norms.
    pub norm_eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// The output matrix is the embedding table.
    pub tied_embeddings: bool,
    /// Biases on q, k and v (and on o for Llama's `attention_bias`).
    pub attention_bias: bool,
    /// Biases in the MLP.
    pub mlp_bias: bool,
    /// Longest context the model was made for.
    pub max_position: usize,
    /// Prepended when the tokenizer says so.
    pub bos: Option<TokenId>,
    /// Tokens that end a text.
    pub eos: Vec<TokenId>,
}

/// Rotary position embedding (Su et al., 2021) and its context extensions.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// Rotated elements of each head; the rest pass through.
    pub dim: usize,
    /// Which elements form a pair.
    pub layout: RopeLayout,
    /// How frequencies are changed for contexts longer than in training.
    pub scaling: RopeScaling,
}

/// Which elements of a head rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// `(i, i + dim/2)`: safetensors checkpoints (GPT-NeoX order).
    Halves,
    /// `(2i, 2i + 1)`: what GGUF files of the llama architecture are permuted to.
    Pairs,
}

/// Changes of the rotary frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// As trained.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// Context extension.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between.
    Llama3 {
        /// Context extension.
        factor: f64,
        /// Wavelengths above `original / low` are scaled.
        low_freq_factor: f64,
        /// Wavelengths below `original / high` are kept.
        high_freq_factor: f64,
        /// Context in training.
        original: f64,
    },
    /// Per-pair divisors stored in the file (GGUF's `rope_freqs.weight`), `dim / 2` of them.
    Divisors(Vec<f32>),
}
