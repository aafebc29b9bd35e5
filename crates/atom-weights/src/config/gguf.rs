//! A GGUF header to [`ModelConfig`]. What the header does not say (biases, tying, vocabulary) is read
//! off the tensors.

mod moe;

use super::moe::MoeKeyNames;
use super::{
    Architecture, HEAD_DIM_MAX, HEADS_MAX, KeyNames, LAYERS_MAX, ModelConfig, POSITIONS_MAX, Rope,
    RopeLayout, RopeScaling, VOCAB_MAX, WIDTH_MAX,
};
use crate::checkpoint::Entries;
use crate::error::WeightsError;
use crate::gguf::{BOS_KEY, EOS_KEYS, Gguf};
use crate::quant::dequantize;
use atom_base::TokenId;

/// Reads the configuration. `entries` are the file's tensors by their Hugging Face names;
/// `rope_freqs.weight`, which belongs to the configuration, is taken out.
pub(crate) fn from_gguf(
    gguf: &Gguf,
    architecture: Architecture,
    entries: &mut Entries,
) -> Result<ModelConfig, WeightsError> {
    let keys = Keys { gguf, architecture };
    refuse_what_is_not_built(&keys)?;

    let hidden_size = keys.count("embedding_length", WIDTH_MAX)?;
    let q_heads = keys.count("attention.head_count", HEADS_MAX)?;
    let kv_heads = keys.count_or("attention.head_count_kv", q_heads, HEADS_MAX)?;
    let head_dim = head_dim(&keys, hidden_size, q_heads)?;
    let max_position = keys.count("context_length", POSITIONS_MAX)?;
    refuse_active_window(&keys, max_position)?;
    let layers = layers(&keys)?;
    let has = |name: &str| entries.contains_key(name);
    let has_any = |module: &str, names: &[&str]| {
        names.iter().any(|name| has(&format!("model.layers.0.{module}.{name}_proj.bias")))
    };

    let config = ModelConfig {
        architecture,
        vocab_size: vocab_size(gguf, entries, hidden_size)?,
        hidden_size,
        intermediate_size: keys.count("feed_forward_length", WIDTH_MAX)?,
        layers,
        q_heads,
        kv_heads,
        head_dim,
        norm_eps: keys.positive("attention.layer_norm_rms_epsilon", 0.1)?,
        // One of a module's biases calls for all of them: a part of them is no model we know.
        attention_bias: architecture == Architecture::Qwen2 || has_any("self_attn", &["q", "k", "v", "o"]),
        mlp_bias: has_any("mlp", &["gate", "up", "down"]),
        qk_norm: moe::qk_norm(architecture, entries),
        moe: moe::read(&keys, layers, entries)?,
        tied_embeddings: !has("lm_head.weight"),
        fp8: None,
        max_position,
        bos: gguf.u32(BOS_KEY)?,
        eos: end_tokens(gguf)?,
        rope: rope(&keys, head_dim, entries)?,
    };
    let names = KeyNames {
        q_heads: &keys.name("attention.head_count"),
        kv_heads: &keys.name("attention.head_count_kv"),
        head_dim: &keys.name("attention.key_length"),
        rope_dim: &keys.name("rope.dimension_count"),
        bos: BOS_KEY,
        eos: EOS_KEYS[0],
        moe: MoeKeyNames {
            experts: &keys.name("expert_count"),
            top_k: &keys.name("expert_used_count"),
            groups: &keys.name("expert_group_count"),
            groups_kept: &keys.name("expert_group_used_count"),
        },
    };
    config.check(gguf.origin(), &names)?;
    Ok(config)
}

/// The family. A llama with experts is a Mixtral.
pub(crate) fn gguf_architecture(gguf: &Gguf) -> Result<Architecture, WeightsError> {
    const KEY: &str = "general.architecture";
    let name = gguf.string(KEY)?.ok_or_else(|| WeightsError::config(gguf.origin(), KEY, "is missing"))?;
    let experts = gguf.u64(&format!("{name}.expert_count"))?.unwrap_or(0);
    let found = Architecture::ALL
        .into_iter()
        .find(|a| a.gguf_name() == name && (*a != Architecture::Llama || experts == 0));
    found.ok_or_else(|| {
        let supported = Architecture::supported(Architecture::gguf_name);
        WeightsError::unsupported(gguf.origin(), format!("{KEY} {name:?}"), supported)
    })
}

/// Decoder layers. Layers that predict further tokens are counted among the blocks and come last.
fn layers(keys: &Keys<'_>) -> Result<usize, WeightsError> {
    let blocks = keys.count("block_count", LAYERS_MAX)?;
    let further = keys.whole_or("nextn_predict_layers", 0, LAYERS_MAX)?;
    if further >= blocks {
        let problem = format!("is {further} of block_count = {blocks}, which leaves no layer");
        return Err(keys.wrong("nextn_predict_layers", problem));
    }
    Ok(blocks - further)
}

fn head_dim(keys: &Keys<'_>, hidden_size: usize, q_heads: usize) -> Result<usize, WeightsError> {
    if !keys.has("attention.key_length") {
        if !hidden_size.is_multiple_of(q_heads) {
            let problem = format!(
                "is {q_heads}, which does not divide {} = {hidden_size}, and there is no attention.key_length",
                keys.name("embedding_length")
            );
            return Err(keys.wrong("attention.head_count", problem));
        }
        return Ok(hidden_size / q_heads);
    }
    let head_dim = keys.count("attention.key_length", HEAD_DIM_MAX)?;
    let value_dim = keys.count_or("attention.value_length", head_dim, HEAD_DIM_MAX)?;
    if value_dim != head_dim {
        let problem = format!("is {value_dim}, but attention.key_length is {head_dim}; both must be equal");
        return Err(keys.wrong("attention.value_length", problem));
    }
    Ok(head_dim)
}

fn vocab_size(gguf: &Gguf, entries: &Entries, hidden_size: usize) -> Result<usize, WeightsError> {
    const NAME: &str = "model.embed_tokens.weight";
    let entry = entries.get(NAME).ok_or_else(|| {
        WeightsError::damaged(gguf.origin(), "there is no token_embd.weight, which every model has")
    })?;
    match *entry.shape() {
        [rows, cols] if cols == hidden_size && (1..=VOCAB_MAX).contains(&rows) => Ok(rows),
        _ => {
            let problem = format!(
                "token_embd.weight has shape {:?}; [1 to {VOCAB_MAX}, {hidden_size}] is expected",
                entry.shape()
            );
            Err(WeightsError::damaged(gguf.origin(), problem))
        }
    }
}

fn end_tokens(gguf: &Gguf) -> Result<Vec<TokenId>, WeightsError> {
    let mut tokens = Vec::new();
    for key in EOS_KEYS {
        if let Some(token) = gguf.u32(key)?
            && !tokens.contains(&token)
        {
            tokens.push(token);
        }
    }
    Ok(tokens)
}

fn rope(keys: &Keys<'_>, head_dim: usize, entries: &mut Entries) -> Result<Rope, WeightsError> {
    let theta = if keys.has("rope.freq_base") { keys.positive("rope.freq_base", 1e12)? } else { 10_000.0 };
    let layout = match keys.architecture {
        // The converter reorders the rows of q and k of this architecture, and of no other here.
        Architecture::Llama | Architecture::Mixtral => RopeLayout::Pairs,
        Architecture::Qwen2
        | Architecture::Qwen3
        | Architecture::Qwen3Moe
        | Architecture::Glm4Moe
        | Architecture::MiniMaxM2 => RopeLayout::Halves,
    };
    let mut scaling = scaling(keys)?;
    if let Some(entry) = entries.remove("rope_freqs.weight") {
        if scaling != RopeScaling::None {
            let problem = "is there besides the tensor rope_freqs.weight; only one of them can be meant";
            return Err(keys.wrong("rope.scaling.factor", problem));
        }
        let tensor = entry.into_tensor(keys.gguf.origin(), "rope_freqs.weight")?;
        // More than a head can use is not worth reading; the count is checked with the rest.
        if tensor.shape.len() != 1 || tensor.cols() > HEAD_DIM_MAX {
            let problem =
                format!("rope_freqs.weight has shape {:?}; [{}] is expected", tensor.shape, head_dim / 2);
            return Err(WeightsError::damaged(keys.gguf.origin(), problem));
        }
        scaling = RopeScaling::Divisors(dequantize(&tensor));
    }
    let dim = keys.count_or("rope.dimension_count", head_dim, HEAD_DIM_MAX)?;
    Ok(Rope { theta: f64::from(theta), dim, layout, scaling })
}

fn scaling(keys: &Keys<'_>) -> Result<RopeScaling, WeightsError> {
    let kind = keys.gguf.string(&keys.name("rope.scaling.type"))?;
    // Old files have the factor under a name of its own, and a factor without a type is linear.
    let factor_key = ["rope.scaling.factor", "rope.scale_linear"].into_iter().find(|key| keys.has(key));
    let factor = match factor_key {
        Some(key) => f64::from(keys.not_negative(key)?),
        None => 1.0,
    };
    match kind {
        Some("none") => Ok(RopeScaling::None),
        // Writers put 0 for "as trained".
        None | Some("linear") if factor == 0.0 || factor == 1.0 => Ok(RopeScaling::None),
        None | Some("linear") if factor > 1.0 => Ok(RopeScaling::Linear { factor }),
        None | Some("linear") => {
            Err(keys.wrong("rope.scaling.factor", format!("is {factor}; 1 or more is expected")))
        }
        Some(other) => {
            let what = format!("{} {other:?}", keys.name("rope.scaling.type"));
            Err(keys.unsupported(what, "none, linear and a tensor rope_freqs.weight are"))
        }
    }
}

/// Keys that change what is computed, in families that share a name with one of ours.
fn refuse_what_is_not_built(keys: &Keys<'_>) -> Result<(), WeightsError> {
    if keys.gguf.u32("split.count")?.unwrap_or(0) > 1 {
        return Err(keys.unsupported("a GGUF split over several files (split.count)", "merge them into one"));
    }
    let name = keys.name("attention.causal");
    if !keys.gguf.bool(&name)?.unwrap_or(true) {
        return Err(keys.unsupported(name, "causal models are"));
    }
    let name = keys.name("expert_count");
    if !keys.architecture.has_experts() && keys.gguf.u64(&name)?.unwrap_or(0) > 0 {
        return Err(keys.unsupported(name, "files of this architecture without experts are"));
    }
    // Positions of several kinds, for images; rows of q and k may then have yet another order.
    let name = keys.name("rope.dimension_sections");
    if keys.gguf.i32s(&name)?.is_some_and(|sections| sections.iter().any(|&section| section != 0)) {
        return Err(keys.unsupported(name, "one kind of position is"));
    }
    for key in ["attention.scale", "attention.clamp_kqv", "logit_scale", "residual_scale", "embedding_scale"]
    {
        let name = keys.name(key);
        if let Some(value) = keys.gguf.f32(&name)?
            && value != 0.0
        {
            return Err(keys.unsupported(format!("{name} = {value}"), "files without it are"));
        }
    }
    Ok(())
}

/// A window as long as the context changes nothing; a shorter one changes every answer.
fn refuse_active_window(keys: &Keys<'_>, max_position: usize) -> Result<(), WeightsError> {
    let name = keys.name("attention.sliding_window");
    match keys.gguf.u64(&name)? {
        Some(window) if window > 0 && window < max_position as u64 => {
            let what = format!("{name} = {window} below context_length = {max_position}");
            Err(keys.unsupported(what, "full attention is"))
        }
        _ => Ok(()),
    }
}

/// Keys below the architecture's name: `llama.block_count`.
struct Keys<'a> {
    gguf: &'a Gguf,
    architecture: Architecture,
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.gguf_name())
    }

    fn has(&self, key: &str) -> bool {
        self.gguf.contains_key(&self.name(key))
    }

    /// A whole number from 1 to `max`.
    fn count(&self, key: &str, max: usize) -> Result<usize, WeightsError> {
        let value = self.gguf.u64(&self.name(key))?.ok_or_else(|| self.wrong(key, "is missing"))?;
        let number = usize::try_from(value).ok().filter(|n| (1..=max).contains(n));
        number.ok_or_else(|| self.wrong(key, format!("is {value}; 1 to {max} is expected")))
    }

    fn count_or(&self, key: &str, default: usize, max: usize) -> Result<usize, WeightsError> {
        if self.has(key) { self.count(key, max) } else { Ok(default) }
    }

    /// A whole number from 0 to `max`.
    fn whole_or(&self, key: &str, default: usize, max: usize) -> Result<usize, WeightsError> {
        let Some(value) = self.gguf.u64(&self.name(key))? else { return Ok(default) };
        let number = usize::try_from(value).ok().filter(|n| *n <= max);
        number.ok_or_else(|| self.wrong(key, format!("is {value}; 0 to {max} is expected")))
    }

    /// A number above 0 and up to `max`.
    fn positive(&self, key: &str, max: f32) -> Result<f32, WeightsError> {
        let value = self.gguf.f32(&self.name(key))?.ok_or_else(|| self.wrong(key, "is missing"))?;
        if value > 0.0 && value <= max {
            return Ok(value);
        }
        Err(self.wrong(key, format!("is {value}; a number above 0 and up to {max:e} is expected")))
    }

    fn not_negative(&self, key: &str) -> Result<f32, WeightsError> {
        let value = self.gguf.f32(&self.name(key))?.ok_or_else(|| self.wrong(key, "is missing"))?;
        if value >= 0.0 && value.is_finite() {
            return Ok(value);
        }
        Err(self.wrong(key, format!("is {value}; 0 or more is expected")))
    }

    fn wrong(&self, key: &str, problem: impl Into<String>) -> WeightsError {
        WeightsError::config(self.gguf.origin(), self.name(key), problem)
    }

    fn unsupported(&self, what: impl Into<String>, supported: impl Into<String>) -> WeightsError {
        WeightsError::unsupported(self.gguf.origin(), what, supported)
    }
}
