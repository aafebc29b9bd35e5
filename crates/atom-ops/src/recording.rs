//! A recorded forward pass: buffers, operators in order, and the collectives among them.

use crate::backend::Weight;
use crate::ops::Rotary;
use atom_base::hash::{FNV_64, fnv1a_64};
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
    /// Everyone gets what each of the others has for it.
    AllToAll,
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

/// How a router turns scores into choices.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteSpec {
    /// Experts to choose from: the width of the logits.
    pub experts: usize,
    /// Experts that a row goes to.
    pub top_k: usize,
    /// A score is the sigmoid of its logit if true, else the softmax over all logits.
    pub is_sigmoid: bool,
    /// Experts are chosen among the best groups only; 1 if there are none. Divides `experts`.
    pub groups: usize,
    /// Groups that stay, by the sum of their two largest scores.
    pub groups_kept: usize,
    /// The weights of the chosen are divided by their sum.
    pub normalise: bool,
    /// Factor on every weight.
    pub scale: f32,
}

/// Which experts of a layer a rank holds, and how it computes a share of them.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertSpec {
    /// Experts that a row chose: half the width of its routes.
    pub top_k: usize,
    /// Number of the first expert that this rank holds.
    pub first: usize,
    /// Experts that it holds, one behind the other.
    pub held: usize,
    /// Columns of gate and up, inputs of down, on this rank.
    pub width: usize,
}

impl ExpertSpec {
    /// Of a row's choices, how many can fall on experts held here.
    pub fn choices_per_row(&self) -> usize {
        self.top_k.min(self.held)
    }
}

/// One fused operator. `rows` below is the real row count of the step for the buffer's extent.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `out[r] = table[token[r]]`, dequantised.
    Embed {
        /// Loaded by [`crate::LoadWeights::load_table`].
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
    /// `out[r] = [sum of squares of q, sum of squares of k]` over this rank's heads.
    SquareSums {
        /// q heads, k heads, v heads
        qkv: Buf,
        /// Heads.
        spec: Arc<AttentionSpec>,
        /// `[rows, 2]`
        out: Buf,
    },
    /// RMS norms over all heads of q, and of k, whose sums of squares are there already:
    /// `q *= weight / sqrt(sum / elements + eps)`, and k alike.
    ScaleHeads {
        /// q heads, k heads, v heads; q and k updated
        qkv: Buf,
        /// Heads.
        spec: Arc<AttentionSpec>,
        /// `[rows, 2]`: of q, of k
        sums: Buf,
        /// Weights of this rank's heads of q and of k.
        weights: (Weight, Weight),
        /// Elements that the sums are over.
        elements: (usize, usize),
        /// Added to the mean square.
        eps: f32,
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
    /// `out += x`
    Add {
        /// `[rows, width]`
        x: Buf,
        /// `[rows, width]`, updated
        out: Buf,
    },
    /// Chooses experts for every row: `top_k` expert numbers in ascending order, then their weights in
    /// the same order, all as f32. Rows that this lane was granted but does not run choose
    /// [`NO_EXPERT`]: no padding ever reaches an expert.
    Route {
        /// `[rows, experts]`
        logits: Buf,
        /// Added to the scores when choosing, not to the weights. `[experts]`
        bias: Option<Weight>,
        /// The rule.
        spec: Arc<RouteSpec>,
        /// `[rows, 2 top_k]`
        out: Buf,
    },
    /// `y(r, e) = down_e (silu(gate_e x[r]) * up_e x[r])` for every row and every expert that it chose
    /// and that this rank holds, in ascending order of experts.
    ///
    /// If it `sums`: `out[r] = sum of weight * y(r, e)`, added in that order from 0, for every row, also one
    /// that chose none of them. If not: `y(r, e)` goes unweighted to the row's next place in that order, and
    /// places that are left over are not written. A row has `n = min(top_k, held)` places.
    Experts {
        /// `[rows, hidden]`; rows that chose no expert held here are not read
        x: Buf,
        /// `[rows, 2 top_k]`, see [`Op::Route`]
        routes: Buf,
        /// Loaded by [`crate::LoadWeights::load_experts`]: `[2 width, hidden]` each, gate then up.
        gate_up: Weight,
        /// Loaded alike: `[hidden, width]` each.
        down: Weight,
        /// Who is here.
        spec: Arc<ExpertSpec>,
        /// Scratch, `[rows, n * 2 width]`
        inner: Buf,
        /// Scratch, `[rows, n * width]`
        gated: Buf,
        /// Whether outputs are weighted and added here.
        sums: bool,
        /// `[rows, hidden]` if it sums, else `[rows, n * hidden]`
        out: Buf,
    },
    /// Rows of all lanes that chose an expert held here come to `out`; other rows of it are not written.
    DispatchRows {
        /// `[rows, hidden]`
        x: Buf,
        /// `[group rows, 2 top_k]`, gathered
        routes: Buf,
        /// Lane `l` holds experts `owners[l] .. owners[l + 1]`. `[lanes + 1]`
        owners: Arc<[usize]>,
        /// `[group rows, hidden]`
        out: Buf,
    },
    /// `out[r] = sum of weight * y(r, e)` over the choices of this lane's rows in ascending order of
    /// experts, from 0, wherever `y` was computed.
    CombineRows {
        /// `[group rows, n * hidden]`, as [`Op::Experts`] left it
        y: Buf,
        /// `[group rows, 2 top_k]`, gathered
        routes: Buf,
        /// As for [`Op::DispatchRows`].
        owners: Arc<[usize]>,
        /// `[rows, hidden]`
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

/// The expert number of a choice that was not made.
pub const NO_EXPERT: f32 = -1.0;

/// A finished list, replayed many times.
#[derive(Clone, Debug)]
pub struct Recording {
    pub(crate) shape: StepShape,
    pub(crate) buffers: Vec<BufSpec>,
    pub(crate) ops: Vec<Op>,
    pub(crate) collectives: Vec<Collective>,
    pub(crate) counts_experts: bool,
}

impl Op {
    /// What the operator is called in messages and traces.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Embed { .. } => "embed",
            Self::Norm { .. } => "norm",
            Self::AddNorm { .. } => "add and norm",
            Self::Linear { .. } => "linear",
            Self::SquareSums { .. } => "square sums",
            Self::ScaleHeads { .. } => "scale heads",
            Self::RotateAndCache { .. } => "rotate and cache",
            Self::Attend { .. } => "attend",
            Self::GatedSilu { .. } => "gated SiLU",
            Self::Add { .. } => "add",
            Self::Route { .. } => "route",
            Self::Experts { .. } => "experts",
            Self::DispatchRows { .. } => "dispatch rows",
            Self::CombineRows { .. } => "combine rows",
            Self::AllReduce { .. } => "all-reduce",
            Self::GatherRows { .. } => "gather rows",
            Self::ScatterSum { .. } => "scatter and sum",
            Self::PickRows { .. } => "pick rows",
            Self::GatherColumns { .. } => "gather columns",
            Self::Sample { .. } => "sample",
        }
    }
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

    /// The same, made so that its steps can also count the different experts that their rows choose, when
    /// [`Backend::count_experts`](crate::Backend::count_experts) asks for it.
    #[must_use]
    pub fn counting_experts(self) -> Self {
        Self { counts_experts: true, ..self }
    }

    /// Whether it was made so.
    pub fn counts_experts(&self) -> bool {
        self.counts_experts
    }

    /// Hash of the ordered list of collectives with kind, count, type and communicator. Ranks compare
    /// it before the first replay; equal hashes mean that no collective can meet another one.
    pub fn signature(&self) -> u64 {
        let mut hash = FNV_64;
        let mut eat = |word: u64| hash = fnv1a_64(hash, word.to_le_bytes());
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
