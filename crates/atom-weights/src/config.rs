//! What a checkpoint says about its model, whichever format and spelling it came in.

mod gguf;
mod json;
mod moe;
mod rope;

pub(crate) use gguf::{from_gguf, gguf_architecture};
pub(crate) use json::{from_json, modelopt_scales, token_ids};
pub use moe::{MoeConfig, Scoring};

use crate::error::WeightsError;
use crate::fp8::Fp8Scales;
use atom_base::TokenId;
use moe::MoeKeyNames;
use std::path::Path;

/// The model families this build can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 2, 3 and everything shaped like it (SmolLM2).
    Llama,
    /// Qwen2 and 2.5: Llama with biases on q, k and v.
    Qwen2,
    /// Qwen3 (dense): Llama with an RMS norm on each head of q and k.
    Qwen3,
    /// Qwen3 with experts: softmax scores.
    Qwen3Moe,
    /// Mixtral: Llama with experts, softmax scores.
    Mixtral,
    /// GLM-4.5 to 4.7: sigmoid scores with a selection bias, groups, a shared expert; a part of each
    /// head rotates.
    Glm4Moe,
    /// MiniMax-M2: sigmoid scores with a selection bias; norms over the whole of q and of k; a part of
    /// each head rotates.
    MiniMaxM2,
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
    /// Width of plain MLPs. An expert's is [`MoeConfig::expert_width`].
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
    /// Biases on q, k and v (and on o, see [`ModelConfig::output_bias`]).
    pub attention_bias: bool,
    /// Biases in plain MLPs.
    pub mlp_bias: bool,
    /// RMS norms on q and k.
    pub qk_norm: QkNorm,
    /// The layers with experts, in families that have them.
    pub moe: Option<MoeConfig>,
    /// Which weights share a scale, where matrices are stored in FP8.
    pub fp8: Option<Fp8Scales>,
    /// Longest context the model was made for.
    pub max_position: usize,
    /// Prepended when the tokenizer says so.
    pub bos: Option<TokenId>,
    /// Tokens that end a text.
    pub eos: Vec<TokenId>,
}

/// RMS norms on q and k before the rotary embedding, with the `norm_eps` of all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QkNorm {
    /// None.
    None,
    /// Of each head apart, all with the same weights `[head_dim]`.
    PerHead,
    /// Over all heads of q, and all of k, at once: weights `[q_heads * head_dim]` and
    /// `[kv_heads * head_dim]`. A rank with a part of the heads needs the others' sums of squares.
    Whole,
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

impl Architecture {
    /// Every family.
    pub const ALL: [Self; 7] = [
        Self::Llama,
        Self::Qwen2,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::Mixtral,
        Self::Glm4Moe,
        Self::MiniMaxM2,
    ];

    /// `model_type` in config.json.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen3Moe => "qwen3_moe",
            Self::Mixtral => "mixtral",
            Self::Glm4Moe => "glm4_moe",
            Self::MiniMaxM2 => "minimax_m2",
        }
    }

    /// `general.architecture` in GGUF. Mixtral is there a llama whose expert count is not 0.
    pub const fn gguf_name(self) -> &'static str {
        match self {
            Self::Llama | Self::Mixtral => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen3Moe => "qwen3moe",
            Self::Glm4Moe => "glm4moe",
            Self::MiniMaxM2 => "minimax-m2",
        }
    }

    /// The entry of `architectures` in config.json.
    pub const fn class(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
            Self::Glm4Moe => "Glm4MoeForCausalLM",
            Self::MiniMaxM2 => "MiniMaxM2ForCausalLM",
        }
    }

    /// Whether the family's layers have experts.
    pub const fn has_experts(self) -> bool {
        match self {
            Self::Llama | Self::Qwen2 | Self::Qwen3 => false,
            Self::Qwen3Moe | Self::Mixtral | Self::Glm4Moe | Self::MiniMaxM2 => true,
        }
    }

    /// "supported are llama, qwen2, ..", each name once, for messages.
    pub(crate) fn supported(spelling: fn(Self) -> &'static str) -> String {
        let mut names = Self::ALL.map(spelling).to_vec();
        let mut seen = std::collections::HashSet::new();
        names.retain(|name| seen.insert(*name));
        format!("supported are {}", names.join(", "))
    }
}

impl ModelConfig {
    /// The attention output has a bias too. `attention_bias` covers all four projections of Llama and
    /// Qwen3; Qwen2 and GLM-4-MoE have their biases on q, k and v only.
    pub fn output_bias(&self) -> bool {
        self.attention_bias && !matches!(self.architecture, Architecture::Qwen2 | Architecture::Glm4Moe)
    }

    /// The checks that tie several numbers together; single numbers were bounded when they were read.
    fn check(&self, origin: &Path, keys: &KeyNames<'_>) -> Result<(), WeightsError> {
        let wrong = |key: &str, problem: String| Err(WeightsError::config(origin, key, problem));
        let Self { q_heads, kv_heads, head_dim, .. } = *self;
        if !q_heads.is_multiple_of(kv_heads) {
            let problem = format!("is {kv_heads}, which does not divide {} = {q_heads}", keys.q_heads);
            return wrong(keys.kv_heads, problem);
        }
        if !head_dim.is_multiple_of(2) {
            return wrong(keys.head_dim, format!("is {head_dim}; rotary embeddings need an even number"));
        }
        if q_heads * head_dim > WIDTH_MAX {
            let problem = format!("is {head_dim}; times {q_heads} heads it passes the bound of {WIDTH_MAX}");
            return wrong(keys.head_dim, problem);
        }
        let dim = self.rope.dim;
        if dim < 2 || dim > head_dim || !dim.is_multiple_of(2) {
            let problem = format!(
                "makes {dim} rotated elements of a head's {head_dim}; it must be an even number from 2 to that"
            );
            return wrong(keys.rope_dim, problem);
        }
        if let RopeScaling::Divisors(divisors) = &self.rope.scaling {
            let expected = dim / 2;
            if divisors.len() != expected {
                let found = divisors.len();
                return wrong("rope_freqs.weight", format!("has {found} elements; {expected} are needed"));
            }
            if let Some(bad) = divisors.iter().find(|d| !(d.is_finite() && **d > 0.0)) {
                return wrong("rope_freqs.weight", format!("has a divisor of {bad}; all must be above 0"));
            }
        }
        for (key, token) in
            self.bos.iter().map(|t| (keys.bos, t)).chain(self.eos.iter().map(|t| (keys.eos, t)))
        {
            if *token as usize >= self.vocab_size {
                let problem = format!("is {token}, but the vocabulary has {} entries", self.vocab_size);
                return wrong(key, problem);
            }
        }
        assert_eq!(self.moe.is_some(), self.architecture.has_experts(), "{:?}", self.architecture);
        match &self.moe {
            Some(moe) => moe.check(origin, &keys.moe),
            None => Ok(()),
        }
    }
}

/// How the file at hand spells the keys that [`ModelConfig::check`] may complain of.
struct KeyNames<'a> {
    q_heads: &'a str,
    kv_heads: &'a str,
    head_dim: &'a str,
    rope_dim: &'a str,
    bos: &'a str,
    eos: &'a str,
    moe: MoeKeyNames<'a>,
}

/// Entries of a vocabulary. The largest published ones have about 2^18.
const VOCAB_MAX: usize = 1 << 24;
/// Elements of a row of activations. The largest published MLPs have about 2^17.
const WIDTH_MAX: usize = 1 << 20;
/// Decoder layers; the deepest published models have about 130.
const LAYERS_MAX: usize = 1 << 12;
/// Heads of one layer.
const HEADS_MAX: usize = 1 << 14;
/// Elements of one head.
const HEAD_DIM_MAX: usize = 1 << 13;
/// Positions. Rotary angles in f32 mean nothing far below this.
const POSITIONS_MAX: usize = 1 << 28;
// The largest tensor is counted in usize.
const _: () =
    assert!(VOCAB_MAX.checked_mul(WIDTH_MAX).is_some() && WIDTH_MAX.checked_mul(WIDTH_MAX).is_some());
