//! Decoders, one forward pass for all families: Llama (Touvron et al. 2023; Grattafiori et al. 2024),
//! Qwen2 (Yang et al. 2024), Qwen3 and Qwen3-MoE (Yang et al. 2025), Mixtral (Jiang et al. 2024),
//! GLM-4-MoE (GLM-4.5 team 2025), MiniMax-M2 (MiniMax 2025).
//!
//! ```text
//! x = E[token]
//! each layer:  a = attention(norm(x));  x += Wo a
//!              m = norm(x);             x += mlp(m) or experts(m)
//! logits = Whead norm(x)
//! ```
//!
//! What sets families apart is declared by the checkpoint's [`ModelConfig`]: biases, norms of q and k,
//! rotated share of a head, which layers are mixtures and how they route.

use crate::attention::{Attention, AttentionBuffers, attention_spec};
use crate::loader::{Loader, Part};
use crate::mlp::{Mlp, MlpBuffers};
use crate::moe::{Mixture, MoeBuffers, MoeLayer};
use crate::shard::{Blocks, ExpertLayout, ShardError, ShardPlan};
use atom_base::{Mesh, Seat};
use atom_ops::{AttentionSpec, Buf, Comm, Extent, LoadWeights, Ops, OpsError, Recording, StepShape, Weight};
use atom_weights::{Checkpoint, ModelConfig, WeightsError};
use std::sync::Arc;
use thiserror::Error;

/// One rank's share of a decoder, loaded into its backend.
pub struct Model {
    config: ModelConfig,
    shard: ShardPlan,
    attention: Arc<AttentionSpec>,
    mixture: Option<Mixture>,
    embedding: Weight,
    layers: Vec<Layer>,
    final_norm: Weight,
    head: Weight,
}

/// Why a model can't be loaded.
#[derive(Debug, Error)]
pub enum ModelError {
    /// The layout does not divide.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// The checkpoint lacks something.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The backend refused a weight.
    #[error("loading {tensor}: {source}")]
    Backend {
        /// The tensor, or the first of several that are fused.
        tensor: String,
        /// What the backend said.
        source: OpsError,
    },
}

/// Weights of one layer; shapes are this rank's share.
struct Layer {
    input_norm: Weight, // [hidden]
    attention: Attention,
    post_norm: Weight, // [hidden]
    feed: Feed,
}

/// What follows attention in a layer.
enum Feed {
    Dense(Mlp),
    Mixture(MoeLayer),
}

/// Buffers of the pass; widths are this rank's share.
struct Buffers {
    residual: Buf,
    normed: Buf,
    projected: Buf,
    attention: AttentionBuffers,
    mlp: Option<MlpBuffers>,
    moe: Option<MoeBuffers>,
}

impl Model {
    /// Loads the share of the rank at `seat` into a backend, or into whatever wants to know how it would
    /// record. `progress(done, total)` is called once a layer.
    pub fn load(
        checkpoint: &Checkpoint,
        (mesh, layout): (&Mesh, ExpertLayout),
        seat: &Seat,
        backend: &mut dyn LoadWeights,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Self, ModelError> {
        let config = checkpoint.config().clone();
        let blocks = Blocks::of(checkpoint)?;
        let shard = ShardPlan::new(&config, mesh, seat, &blocks, layout)?;
        let mut loader = Loader { checkpoint, shard: &shard, config: &config, backend };
        let embedding = loader.table("model.embed_tokens.weight")?;
        let mut layers = Vec::with_capacity(config.layers);
        for index in 0..config.layers {
            layers.push(Layer::load(&mut loader, index)?);
            progress(index + 1, config.layers);
        }
        let final_norm = loader.vector("model.norm.weight")?;
        let head = if config.tied_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
        let head = loader.matrix(&[(head.to_owned(), Part::Rows(shard.vocab.clone()))])?;
        let attention = Arc::new(attention_spec(&config, &shard));
        let mixture = match (&config.moe, &shard.experts) {
            (Some(moe), Some(share)) => Some(Mixture::new(&config, moe, &shard, share)),
            _ => None,
        };
        Ok(Self { config, shard, attention, mixture, embedding, layers, final_norm, head })
    }

    /// What the checkpoint says.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What this rank holds.
    pub fn shard(&self) -> &ShardPlan {
        &self.shard
    }

    /// Attention as this rank computes it: what sizes its share of the cache.
    pub fn attention(&self) -> &Arc<AttentionSpec> {
        &self.attention
    }

    /// The forward pass, embedding to sampled token, for one shape.
    pub fn record(&self, shape: StepShape) -> Recording {
        let mut ops = Ops::new(shape);
        let b = self.buffers(&mut ops);
        let eps = self.config.norm_eps;
        ops.embed(self.embedding, b.residual);
        let first = self.layers.first().map_or(self.final_norm, |l| l.input_norm);
        ops.norm(b.residual, first, eps, b.normed);
        for (index, layer) in self.layers.iter().enumerate() {
            let place = (index, &self.config, &self.shard);
            layer.attention.record(&mut ops, place, &self.attention, &b.attention, (b.normed, b.projected));
            ops.add_norm(b.residual, b.projected, layer.post_norm, eps, b.normed);
            self.record_feed(&mut ops, &layer.feed, &b);
            let next = self.layers.get(index + 1).map_or(self.final_norm, |l| l.input_norm);
            ops.add_norm(b.residual, b.projected, next, eps, b.normed);
        }
        self.record_head(&mut ops, b.normed);
        ops.finish()
    }

    fn record_feed(&self, ops: &mut Ops, feed: &Feed, b: &Buffers) {
        match feed {
            Feed::Dense(mlp) => {
                mlp.record(ops, b.mlp.as_ref().expect("declared for dense layers"), b.normed, b.projected);
            }
            Feed::Mixture(layer) => {
                let mixture = self.mixture.as_ref().expect("a model with such layers has one");
                let buffers = b.moe.as_ref().expect("declared for mixtures");
                layer.record(ops, mixture, buffers, b.normed, b.projected);
            }
        }
        if self.shard.lane_ranks > 1 {
            ops.all_reduce(b.projected, Comm::Lane);
        }
    }

    fn record_head(&self, ops: &mut Ops, normed: Buf) {
        let picked = ops.buffer(Extent::OutRows, self.config.hidden_size);
        let logits = ops.buffer(Extent::OutRows, self.shard.vocab.len());
        ops.pick_rows(normed, picked);
        ops.linear(picked, self.head, None, logits);
        let mut all = logits;
        if self.shard.lane_ranks > 1 {
            all = ops.buffer(Extent::OutRows, self.config.vocab_size);
            ops.gather_columns(logits, self.shard.vocab_widths.clone(), all);
        }
        ops.sample(all);
    }

    fn buffers(&self, ops: &mut Ops) -> Buffers {
        let (config, shard) = (&self.config, &self.shard);
        let hidden = config.hidden_size;
        let has_dense = (0..config.layers).any(|layer| config.is_dense(layer));
        Buffers {
            residual: ops.buffer(Extent::Rows, hidden),
            normed: ops.buffer(Extent::Rows, hidden),
            projected: ops.buffer(Extent::Rows, hidden),
            attention: AttentionBuffers::new(ops, config, &self.attention),
            mlp: has_dense.then(|| MlpBuffers::new(ops, shard.mlp.len(), hidden, shard.mlp_is_grouped())),
            moe: match (&self.mixture, &shard.experts) {
                (Some(mixture), Some(share)) => Some(mixture.buffers(ops, config, share)),
                _ => None,
            },
        }
    }
}

impl Layer {
    fn load(loader: &mut Loader<'_>, index: usize) -> Result<Self, ModelError> {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let (config, shard) = (loader.config, loader.shard);
        Ok(Self {
            input_norm: loader.vector(&name("input_layernorm.weight"))?,
            attention: Attention::load(loader, index)?,
            post_norm: loader.vector(&name("post_attention_layernorm.weight"))?,
            feed: match (&config.moe, &shard.experts) {
                (Some(moe), Some(share)) if !config.is_dense(index) => {
                    Feed::Mixture(MoeLayer::load(loader, index, moe, share)?)
                }
                _ => {
                    let adds_bias = shard.mlp_rank() == 0;
                    Feed::Dense(Mlp::load(loader, &name("mlp"), &shard.mlp, config.mlp_bias, adds_bias)?)
                }
            },
        })
    }
}
