//! Attention of a layer: projections, norms of q and k, rotary embedding, the cache.

use crate::ModelError;
use crate::loader::{Loader, Part};
use crate::shard::ShardPlan;
use atom_ops::{AttentionSpec, Buf, Comm, Extent, Ops, Rotary, Weight};
use atom_weights::{ModelConfig, QkNorm, RopeLayout};
use std::ops::Range;
use std::sync::Arc;

/// Weights of one layer's attention; shapes are this rank's share.
pub(crate) struct Attention {
    qkv: Weight,              // [(q + 2 kv) * head_dim, hidden]
    qkv_bias: Option<Weight>, // [(q + 2 kv) * head_dim]
    norms: Norms,
    o: Weight,              // [hidden, q * head_dim]
    o_bias: Option<Weight>, // [hidden]
}

enum Norms {
    None,
    PerHead { q: Weight, k: Weight, eps: f32 }, // [head_dim] each
    Whole { q: Weight, k: Weight, eps: f32 },   // [q * head_dim], [kv * head_dim]
}

/// Buffers that all layers share.
pub(crate) struct AttentionBuffers {
    qkv: Buf,
    attended: Buf,
    /// Sums of squares of q and of k, where norms are over all heads.
    sums: Option<Buf>,
}

impl Attention {
    pub(crate) fn load(loader: &mut Loader<'_>, layer: usize) -> Result<Self, ModelError> {
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}");
        let (config, shard) = (loader.config, loader.shard);
        let head_rows = |heads: &Range<usize>| heads.start * config.head_dim..heads.end * config.head_dim;
        let (q, kv) = (head_rows(&shard.q_heads), head_rows(&shard.kv_heads));
        let qkv = |kind: &str| {
            [("q", &q), ("k", &kv), ("v", &kv)]
                .map(|(p, rows)| (name(&format!("{p}_proj.{kind}")), Part::Rows(rows.clone())))
        };
        let eps = config.norm_eps;
        let norms = match config.qk_norm {
            QkNorm::None => Norms::None,
            QkNorm::PerHead => Norms::PerHead {
                q: loader.vector(&name("q_norm.weight"))?,
                k: loader.vector(&name("k_norm.weight"))?,
                eps,
            },
            QkNorm::Whole => Norms::Whole {
                q: loader.vectors(&[(name("q_norm.weight"), Part::Rows(q.clone()))])?,
                k: loader.vectors(&[(name("k_norm.weight"), Part::Rows(kv.clone()))])?,
                eps,
            },
        };
        Ok(Self {
            qkv: loader.matrix(&qkv("weight"))?,
            qkv_bias: if config.attention_bias { Some(loader.vectors(&qkv("bias"))?) } else { None },
            norms,
            o: loader.matrix(&[(name("o_proj.weight"), Part::Cols(q.clone()))])?,
            // Added once: a sum over the ranks of the lane would count it once a rank.
            o_bias: if config.output_bias() && shard.rank_in_lane == 0 {
                Some(loader.vector(&name("o_proj.bias"))?)
            } else {
                None
            },
        })
    }

    /// `out = Wo attention(x)`
    pub(crate) fn record(
        &self,
        ops: &mut Ops,
        (layer, config, shard): (usize, &ModelConfig, &ShardPlan),
        spec: &Arc<AttentionSpec>,
        buffers: &AttentionBuffers,
        (x, out): (Buf, Buf),
    ) {
        let &AttentionBuffers { qkv, attended, sums } = buffers;
        ops.linear(x, self.qkv, self.qkv_bias, qkv);
        let mut per_head = None;
        match self.norms {
            Norms::None => {}
            Norms::PerHead { q, k, eps } => per_head = Some((q, k, eps)),
            Norms::Whole { q, k, eps } => {
                let sums = sums.expect("declared for models with such norms");
                ops.square_sums(qkv, spec, sums);
                if shard.lane_ranks > 1 {
                    ops.all_reduce(sums, Comm::Lane);
                }
                // Ranks that share a key/value head each add its squares: all heads count alike.
                let k_heads = shard.lane_ranks * shard.kv_heads.len();
                let elements = (config.q_heads * config.head_dim, k_heads * config.head_dim);
                ops.scale_heads(qkv, spec, sums, (q, k), elements, eps);
            }
        }
        ops.rotate_and_cache(qkv, layer, per_head, spec);
        ops.attend(qkv, layer, spec, attended);
        ops.linear(attended, self.o, self.o_bias, out);
        if shard.lane_ranks > 1 {
            ops.all_reduce(out, Comm::Lane);
        }
    }
}

impl AttentionBuffers {
    pub(crate) fn new(ops: &mut Ops, config: &ModelConfig, spec: &AttentionSpec) -> Self {
        Self {
            qkv: ops.buffer(Extent::Rows, (spec.q_heads + 2 * spec.kv_heads) * spec.head_dim),
            attended: ops.buffer(Extent::Rows, spec.q_heads * spec.head_dim),
            sums: (config.qk_norm == QkNorm::Whole).then(|| ops.buffer(Extent::Rows, 2)),
        }
    }
}

/// Heads and rotary table of one rank.
pub(crate) fn attention_spec(config: &ModelConfig, shard: &ShardPlan) -> AttentionSpec {
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
