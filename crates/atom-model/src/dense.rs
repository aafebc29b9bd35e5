//! Dense decoders: Llama (Touvron et al. 2023; Grattafiori et al. 2024), Qwen2 (Yang et al. 2024),
//! Qwen3 (Yang et al. 2025).
//!
//! ```text
//! x = E[token]
//! each layer:  a = attention(norm(x));  x += Wo a
//!              m = norm(x);             x += Wdown (silu(Wgate m) * Wup m)
//! logits = Whead norm(x)
//! ```
//!
//! Qwen2 adds biases to q, k and v; Qwen3 an RMS norm on every head of q and k.

use crate::shard::{ShardError, ShardPlan};
use atom_base::{Mesh, Seat};
use atom_ops::{
    AttentionSpec, Backend, Buf, Comm, Extent, Ops, OpsError, Recording, Rotary, Slice, StepShape, Weight,
};
use atom_weights::{Checkpoint, ModelConfig, QkNorm, RopeLayout, Tensor, WeightsError};
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

/// One rank's share of a dense decoder, loaded into its backend.
pub struct Model {
    config: ModelConfig,
    shard: ShardPlan,
    attention: Arc<AttentionSpec>,
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
    input_norm: Weight,                     // [hidden]
    qkv: Weight,                            // [(q + 2 kv) * head_dim, hidden]
    qkv_bias: Option<Weight>,               // [(q + 2 kv) * head_dim]
    qk_norm: Option<(Weight, Weight, f32)>, // [head_dim] each
    o: Weight,                              // [hidden, q * head_dim]
    o_bias: Option<Weight>,                 // [hidden]
    post_norm: Weight,                      // [hidden]
    gate_up: Weight,                        // [2 * mlp, hidden]
    gate_up_bias: Option<Weight>,           // [2 * mlp]
    down: Weight,                           // [hidden, mlp]
    down_bias: Option<Weight>,              // [hidden]
}

/// Buffers of the pass; widths are this rank's share.
struct Buffers {
    residual: Buf,
    normed: Buf,
    qkv: Buf,
    attended: Buf,
    projected: Buf,
    mlp: MlpBuffers,
}

struct MlpBuffers {
    input: Buf,
    gate_up: Buf,
    gated: Buf,
    output: Buf,
}

impl Model {
    /// Loads the share of the rank at `seat`. `progress(done, total)` is called once a layer.
    pub fn load(
        checkpoint: &Checkpoint,
        mesh: &Mesh,
        seat: &Seat,
        backend: &mut dyn Backend,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Self, ModelError> {
        let config = checkpoint.config().clone();
        let block = |name: String| checkpoint.tensor(&name).map(|t| t.dtype.block_elements());
        let (mut o_block, mut down_block) = (1, 1);
        for layer in 0..config.layers {
            o_block = o_block.max(block(format!("model.layers.{layer}.self_attn.o_proj.weight"))?);
            down_block = down_block.max(block(format!("model.layers.{layer}.mlp.down_proj.weight"))?);
        }
        let shard = ShardPlan::new(&config, mesh, seat, o_block, down_block)?;
        let mut loader = Loader { checkpoint, shard: &shard, config: &config, backend };
        let embedding = loader.table("model.embed_tokens.weight")?;
        let mut layers = Vec::with_capacity(config.layers);
        for index in 0..config.layers {
            layers.push(loader.layer(index)?);
            progress(index + 1, config.layers);
        }
        let final_norm = loader.vector("model.norm.weight")?;
        let head = if config.tied_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
        let head = loader.matrix(&[(head.to_owned(), Part::Rows(shard.vocab.clone()))])?;
        let attention = Arc::new(attention(&config, &shard));
        Ok(Self { config, shard, attention, embedding, layers, final_norm, head })
    }

    /// What the checkpoint says.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Attention as this rank computes it: what sizes its share of the cache.
    pub fn attention(&self) -> &Arc<AttentionSpec> {
        &self.attention
    }

    /// The forward pass, embedding to sampled token, for one shape.
    pub fn record(&self, shape: StepShape) -> Recording {
        let mut ops = Ops::new(shape);
        let buffers = self.buffers(&mut ops);
        let eps = self.config.norm_eps;
        ops.embed(self.embedding, buffers.residual);
        let first = self.layers.first().map_or(self.final_norm, |l| l.input_norm);
        ops.norm(buffers.residual, first, eps, buffers.normed);
        for (index, layer) in self.layers.iter().enumerate() {
            self.record_attention(&mut ops, index, layer, &buffers);
            ops.add_norm(buffers.residual, buffers.projected, layer.post_norm, eps, buffers.normed);
            self.record_mlp(&mut ops, layer, &buffers);
            let next = self.layers.get(index + 1).map_or(self.final_norm, |l| l.input_norm);
            ops.add_norm(buffers.residual, buffers.projected, next, eps, buffers.normed);
        }
        self.record_head(&mut ops, buffers.normed);
        ops.finish()
    }

    fn record_attention(&self, ops: &mut Ops, index: usize, layer: &Layer, b: &Buffers) {
        ops.linear(b.normed, layer.qkv, layer.qkv_bias, b.qkv);
        ops.rotate_and_cache(b.qkv, index, layer.qk_norm, &self.attention);
        ops.attend(b.qkv, index, &self.attention, b.attended);
        ops.linear(b.attended, layer.o, layer.o_bias, b.projected);
        if self.shard.lane_ranks > 1 {
            ops.all_reduce(b.projected, Comm::Lane);
        }
    }

    /// Under DP attention every lane computes its columns of the MLP for the rows of the whole group.
    fn record_mlp(&self, ops: &mut Ops, layer: &Layer, b: &Buffers) {
        let grouped = self.shard.group_lanes > 1;
        if grouped {
            ops.gather_rows(b.normed, b.mlp.input);
        }
        ops.linear(b.mlp.input, layer.gate_up, layer.gate_up_bias, b.mlp.gate_up);
        ops.gated_silu(b.mlp.gate_up, b.mlp.gated);
        ops.linear(b.mlp.gated, layer.down, layer.down_bias, b.mlp.output);
        if grouped {
            ops.scatter_sum(b.mlp.output, b.projected);
        } else if self.shard.lane_ranks > 1 {
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
        let (hidden, mlp) = (self.config.hidden_size, self.shard.mlp.len());
        let spec = &self.attention;
        let residual = ops.buffer(Extent::Rows, hidden);
        let normed = ops.buffer(Extent::Rows, hidden);
        let qkv = ops.buffer(Extent::Rows, (spec.q_heads + 2 * spec.kv_heads) * spec.head_dim);
        let attended = ops.buffer(Extent::Rows, spec.q_heads * spec.head_dim);
        let projected = ops.buffer(Extent::Rows, hidden);
        let grouped = self.shard.group_lanes > 1;
        let extent = if grouped { Extent::GroupRows } else { Extent::Rows };
        let gate_up = ops.buffer(extent, 2 * mlp);
        let gated = ops.buffer(extent, mlp);
        let (input, output) = match grouped {
            true => (ops.buffer(extent, hidden), ops.buffer(extent, hidden)),
            false => (normed, projected),
        };
        Buffers {
            residual,
            normed,
            qkv,
            attended,
            projected,
            mlp: MlpBuffers { input, gate_up, gated, output },
        }
    }
}

/// Hands slices of the checkpoint to the backend.
struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    shard: &'a ShardPlan,
    config: &'a ModelConfig,
    backend: &'a mut dyn Backend,
}

/// Which part of a tensor a rank takes.
enum Part {
    All,
    Rows(Range<usize>),
    Cols(Range<usize>),
}

impl Loader<'_> {
    fn layer(&mut self, index: usize) -> Result<Layer, ModelError> {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let (config, shard) = (self.config, self.shard);
        let head_rows = |heads: &Range<usize>| heads.start * config.head_dim..heads.end * config.head_dim;
        let (q, kv) = (head_rows(&shard.q_heads), head_rows(&shard.kv_heads));
        let mlp = shard.mlp.clone();
        let qkv = |kind: &str| {
            let part = |p: &str, rows: &Range<usize>| {
                (name(&format!("self_attn.{p}_proj.{kind}")), Part::Rows(rows.clone()))
            };
            [part("q", &q), part("k", &kv), part("v", &kv)]
        };
        let gate_up = |kind: &str| {
            ["gate", "up"].map(|p| (name(&format!("mlp.{p}_proj.{kind}")), Part::Rows(mlp.clone())))
        };
        // Added once: a sum over ranks would count it once a rank.
        let adds_bias = shard.rank_in_lane == 0 && shard.lane_in_group == 0;
        let o_bias = config.output_bias();
        Ok(Layer {
            input_norm: self.vector(&name("input_layernorm.weight"))?,
            qkv: self.matrix(&qkv("weight"))?,
            qkv_bias: if config.attention_bias { Some(self.vectors(&qkv("bias"))?) } else { None },
            qk_norm: match config.qk_norm {
                QkNorm::PerHead => Some((
                    self.vector(&name("self_attn.q_norm.weight"))?,
                    self.vector(&name("self_attn.k_norm.weight"))?,
                    config.norm_eps,
                )),
                // Of these, only families with experts have any, which are not loaded here.
                QkNorm::None | QkNorm::Whole => None,
            },
            o: self.matrix(&[(name("self_attn.o_proj.weight"), Part::Cols(q.clone()))])?,
            // Attention is never split over the group, so here only the lane counts.
            o_bias: if o_bias && shard.rank_in_lane == 0 {
                Some(self.vector(&name("self_attn.o_proj.bias"))?)
            } else {
                None
            },
            post_norm: self.vector(&name("post_attention_layernorm.weight"))?,
            gate_up: self.matrix(&gate_up("weight"))?,
            gate_up_bias: if config.mlp_bias { Some(self.vectors(&gate_up("bias"))?) } else { None },
            down: self.matrix(&[(name("mlp.down_proj.weight"), Part::Cols(mlp.clone()))])?,
            down_bias: if config.mlp_bias && adds_bias {
                Some(self.vector(&name("mlp.down_proj.bias"))?)
            } else {
                None
            },
        })
    }

    fn matrix(&mut self, parts: &[(String, Part)]) -> Result<Weight, ModelError> {
        let slices = self.slices(parts)?;
        self.backend.load_matrix(&slices).map_err(|source| refused(&parts[0].0, source))
    }

    fn vectors(&mut self, parts: &[(String, Part)]) -> Result<Weight, ModelError> {
        let slices = self.slices(parts)?;
        self.backend.load_vector(&slices).map_err(|source| refused(&parts[0].0, source))
    }

    fn vector(&mut self, name: &str) -> Result<Weight, ModelError> {
        self.vectors(&[(name.to_owned(), Part::All)])
    }

    fn table(&mut self, name: &str) -> Result<Weight, ModelError> {
        let tensor = self.checkpoint.tensor(name)?;
        self.backend.load_table(&tensor).map_err(|source| refused(name, source))
    }

    fn slices(&self, parts: &[(String, Part)]) -> Result<Vec<Slice>, ModelError> {
        let slice = |(name, part): &(String, Part)| Ok(slice(self.checkpoint.tensor(name)?, part));
        parts.iter().map(slice).collect()
    }
}

/// A vector's elements are its one row's columns; `Part::Rows` of a bias means elements.
fn slice(tensor: Tensor, part: &Part) -> Slice {
    let (rows, cols) = (tensor.rows(), tensor.cols());
    let vector = tensor.shape.len() == 1;
    match part {
        Part::All => Slice { tensor, rows: 0..rows, cols: 0..cols },
        Part::Rows(range) if vector => Slice { tensor, rows: 0..1, cols: range.clone() },
        Part::Rows(range) => Slice { tensor, rows: range.clone(), cols: 0..cols },
        Part::Cols(range) => Slice { tensor, rows: 0..rows, cols: range.clone() },
    }
}

fn refused(tensor: &str, source: OpsError) -> ModelError {
    ModelError::Backend { tensor: tensor.to_owned(), source }
}

fn attention(config: &ModelConfig, shard: &ShardPlan) -> AttentionSpec {
    AttentionSpec {
        q_heads: shard.q_heads.len(),
        kv_heads: shard.kv_heads.len(),
        head_dim: config.head_dim,
        scale: 1.0 / (config.head_dim as f32).sqrt(),
        rotary: Rotary {
            frequencies: config.rope.inverse_frequencies(),
            dim: config.rope.dim,
            pairs: config.rope.layout == RopeLayout::Pairs,
            magnitude: 1.0,
        },
    }
}
