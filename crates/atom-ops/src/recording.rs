//! A recorded forward pass: buffers, operators in order, and the collectives among them.

use crate::backend::Weight;
use crate::ops::Rotary;
use std::sync::Arc;

/// An activation buffer of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buf(pub u16);

/// How many rows a buffer has in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// One per row of this lane's step.
    Rows,
    /// The rows of all lanes of the group: lane `l` starts at `l * shape.rows`.
    GroupRows,
    /// One per row whose logits are needed.
    OutRows,
}

/// f32 `[extent, width]`, row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufSpec {
    /// Rows.
    pub extent: Extent,
    /// Elements of a row.
    pub width: usize,
}

/// The sizes that a recording is made for; all of them come from the bucket and the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepShape {
    /// Row capacity.
    pub rows: usize,
    /// Capacity of rows with logits.
    pub out_rows: usize,
    /// Lanes of the group.
    pub lanes: usize,
}

/// Who meets in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Comm {
    /// The ranks of one lane.
    Lane,
    /// The lanes of one group.
    Group,
}

/// What a collective does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveKind {
    /// Everyone gets the sum, added in rank order.
    AllReduce,
    /// Everyone gets everyone's rows.
    AllGather,
    /// Everyone gets the sum of its own rows, added in rank order.
    ReduceScatter,
}

/// One collective of a signature. Counts are capacities: the same on every rank by construction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Collective {
    /// What it does.
    pub kind: CollectiveKind,
    /// Who takes part.
    pub comm: Comm,
    /// f32 elements that each member contributes at the most.
    pub elements: usize,
}

/// The attention of one layer as one rank computes it.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads on this rank.
    pub q_heads: usize,
    /// Key/value heads on this rank; divides `q_heads`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Scores are multiplied by this (1 / sqrt(head_dim)).
    pub scale: f32,
    /// Rotary embedding of q and k.
    pub rotary: Rotary,
}

/// One fused operator. `rows` below is the real row count of the step for the buffer's extent.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `out[r] = table[token[r]]`, dequantised.
    Embed {
        /// Loaded by [`crate::Backend::load_table`].
        table: Weight,
        /// `[rows, hidden]`
        out: Buf,
    },
    /// `out = x / sqrt(mean(x^2) + eps) * weight`
    Norm {
        /// `[rows, width]`
        x: Buf,
        /// `[width]`
        weight: Weight,
        /// Added to the mean square.
        eps: f32,
        /// `[rows, width]`
        out: Buf,
    },
    /// `residual += x; out = norm(residual)`
    AddNorm {
        /// `[rows, width]`, updated
        residual: Buf,
        /// `[rows, width]`
        x: Buf,
        /// `[width]`
        weight: Weight,
        /// Added to the mean square.
        eps: f32,
        /// `[rows, width]`
        out: Buf,
    },
    /// `out = x W^T + bias`
    Linear {
        /// `[rows, inputs]`
        x: Buf,
        /// `[outputs, inputs]`
        weight: Weight,
        /// `[outputs]`
        bias: Option<Weight>,
        /// `[rows, outputs]`
        out: Buf,
    },
    /// Per-head norms (optional), rotary embedding, and k, v into the cache at `cache_rows`.
    /// q is rotated in place; k and v of `qkv` are scratch afterwards.
    RotateAndCache {
        /// `[rows, (q_heads + 2 kv_heads) * head_dim]`: q heads, k heads, v heads
        qkv: Buf,
        /// Layer of the cache.
        layer: usize,
        /// RMS-norm weights of q and k heads, `[head_dim]` each, with their eps.
        qk_norm: Option<(Weight, Weight, f32)>,
        /// Heads and rotary table.
        spec: Arc<AttentionSpec>,
    },
    /// Causal attention of every row over its sequence's cached positions `0 ..= position`.
    Attend {
        /// q heads first, as [`Op::RotateAndCache`] left them
        qkv: Buf,
        /// Layer of the cache.
        layer: usize,
        /// Heads and scale.
        spec: Arc<AttentionSpec>,
        /// `[rows, q_heads * head_dim]`
        out: Buf,
    },
    /// `out = silu(gate) * up`
    GatedSilu {
        /// `[rows, 2 * width]`: gate, then up
        gate_up: Buf,
        /// `[rows, width]`
        out: Buf,
    },
    /// `x = sum over ranks of x`, added in rank order.
    AllReduce {
        /// `[rows, width]`, updated
        x: Buf,
        /// Who.
        comm: Comm,
    },
    /// `out[l] = x of lane l` for every lane of the group.
    GatherRows {
        /// `[rows, width]`
        x: Buf,
        /// `[group rows, width]`
        out: Buf,
    },
    /// `out = sum over lanes m of (x on lane m)[my lane]`, added in lane order.
    ScatterSum {
        /// `[group rows, width]`
        x: Buf,
        /// `[rows, width]`
        out: Buf,
    },
    /// `out[i] = x[out row i]`
    PickRows {
        /// `[rows, width]`
        x: Buf,
        /// `[out rows, width]`
        out: Buf,
    },
    /// `out[i] = x of rank 0 [i] ++ x of rank 1 [i] ++ ..`: the vocabulary shards of a lane.
    GatherColumns {
        /// `[out rows, widths[my rank]]`
        x: Buf,
        /// Columns of each rank.
        widths: Vec<usize>,
        /// `[out rows, sum(widths)]`
        out: Buf,
    },
    /// Penalties, bias, temperature, truncation, draw, log-probabilities; one result per out row.
    Sample {
        /// `[out rows, vocab]`, may be overwritten
        logits: Buf,
    },
}

/// A finished list, replayed many times.
#[derive(Clone, Debug)]
pub struct Recording {
    pub(crate) shape: StepShape,
    pub(crate) buffers: Vec<BufSpec>,
    pub(crate) ops: Vec<Op>,
    pub(crate) collectives: Vec<Collective>,
}

impl BufSpec {
    /// Rows of the buffer at full capacity.
    pub fn capacity_rows(&self, shape: &StepShape) -> usize {
        match self.extent {
            Extent::Rows => shape.rows,
            Extent::GroupRows => shape.rows * shape.lanes,
            Extent::OutRows => shape.out_rows,
        }
    }

    /// Elements of the buffer at full capacity.
    pub fn capacity(&self, shape: &StepShape) -> usize {
        self.capacity_rows(shape) * self.width
    }
}

impl Recording {
    /// What it was recorded for.
    pub fn shape(&self) -> StepShape {
        self.shape
    }

    /// Its buffers; a [`Buf`] is an index.
    pub fn buffers(&self) -> &[BufSpec] {
        &self.buffers
    }

    /// Its operators, in order.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// Its collectives, in order.
    pub fn collectives(&self) -> &[Collective] {
        &self.collectives
    }

    /// Hash of the ordered list of collectives with kind, count, type and communicator. Ranks compare
    /// it before the first replay; equal hashes mean that no collective can meet another one.
    pub fn signature(&self) -> u64 {
        // FNV-1a: stable across builds and hosts, unlike the standard hasher.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut eat = |word: u64| {
            for byte in word.to_le_bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        };
        for c in &self.collectives {
            eat(c.kind as u64);
            eat(c.comm as u64);
            eat(c.elements as u64);
        }
        eat(self.shape.rows as u64);
        eat(self.shape.lanes as u64);
        hash
    }
}
