//! Who holds what: a rank's share of each matrix.
//!
//! Attention is split by heads over the ranks of a lane, and so are vocabulary and dense MLPs, by
//! columns in whole quantisation blocks, as evenly as they allow. Experts are split over all ranks of a
//! group: a slice of each on every rank, or whole ones spread over them.
//!
//! A dense model under DP attention splits its MLPs over the lanes of the group; in a mixture the
//! experts are what a group shares, and dense MLPs and shared experts are whole in every lane.

use crate::moe::ExchangeChoice;
use atom_base::{Mesh, Seat};
use atom_weights::{Checkpoint, ModelConfig, MoeConfig, WeightsError};
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

/// The share of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPlan {
    /// Query heads.
    pub q_heads: Range<usize>,
    /// Key/value heads; several ranks hold the same one when there are fewer heads than ranks.
    pub kv_heads: Range<usize>,
    /// Columns of gate and up, inputs of down.
    pub mlp: Range<usize>,
    /// Rows of the output matrix.
    pub vocab: Range<usize>,
    /// Vocabulary rows of every rank of the lane, in rank order.
    pub vocab_widths: Vec<usize>,
    /// Ranks that split attention (the lane).
    pub lane_ranks: usize,
    /// This rank's place among them.
    pub rank_in_lane: usize,
    /// Lanes that take every step together (DP attention); 1 otherwise.
    pub group_lanes: usize,
    /// This lane's place among them.
    pub lane_in_group: usize,
    /// Of a mixture's layers; none in a dense model.
    pub experts: Option<ExpertShare>,
}

/// What a rank holds of every mixture layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertShare {
    /// Experts.
    pub experts: Range<usize>,
    /// Of each, columns of gate and up, inputs of down.
    pub columns: Range<usize>,
    /// Columns of the shared expert; empty if there is none.
    pub shared: Range<usize>,
    /// Set if rows are dispatched: lane `l` holds experts `owners[l] .. owners[l + 1]`.
    pub owners: Option<Arc<[usize]>>,
}

/// How experts are spread over the ranks of a group, and met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertLayout {
    /// `--enable-expert-parallel`: every rank holds some experts whole, not a slice of all.
    pub expert_parallel: bool,
    /// `--moe-exchange`.
    pub exchange: ExchangeChoice,
}

/// Quantisation blocks of the matrices that are split along their inputs; 1 for plain types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Of attention's output projection.
    pub o: usize,
    /// Of the dense MLPs' down projection.
    pub down: usize,
    /// Of the experts' down projection.
    pub expert: usize,
    /// Of the shared expert's down projection.
    pub shared: usize,
}

/// A layout that does not divide. The user's fault; says what does.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ShardError {
    /// Heads can't be dealt to the ranks.
    #[error(
        "-tp {tp} does not divide this model's attention: it has {q_heads} query heads and {kv_heads} key/value heads; \
         -tp values that work: {}", list(.works)
    )]
    Heads {
        /// Ranks of a lane.
        tp: usize,
        /// Query heads.
        q_heads: usize,
        /// Key/value heads.
        kv_heads: usize,
        /// Values that would do.
        works: Vec<usize>,
    },
    /// More ranks than there are pieces of the MLP.
    #[error("{ranks} ranks can't share an MLP of {width} columns in blocks of {block}: at most {} can", .width / .block)]
    Mlp {
        /// Ranks.
        ranks: usize,
        /// `intermediate_size`.
        width: usize,
        /// Elements of a quantisation block.
        block: usize,
    },
    /// Expert parallelism with more ranks than experts.
    #[error(
        "--enable-expert-parallel spreads {experts} experts over {ranks} ranks: some would hold none; use at most \
         {experts} ranks, or leave the flag out to give every rank a slice of each expert"
    )]
    Experts {
        /// Ranks of the group.
        ranks: usize,
        /// Experts of a layer.
        experts: usize,
    },
    /// A flag for experts on a model that has none, or on a single rank.
    #[error("{flag} has no meaning here: {why}; leave it out")]
    NoExperts {
        /// The flag.
        flag: &'static str,
        /// What is missing.
        why: String,
    },
    /// Rows can be dispatched to whole experts only.
    #[error(
        "--moe-exchange dispatch needs whole experts in several lanes: add --enable-dp-attention and \
         --enable-expert-parallel, or use --moe-exchange gather"
    )]
    Dispatch,
    /// A head group's columns of the output projection end inside a quantisation block.
    #[error(
        "-tp {tp} gives each rank {columns} input columns of the attention output projection, which is stored in \
         blocks of {block}; use a -tp whose share is a multiple of {block}"
    )]
    Block {
        /// Ranks of a lane.
        tp: usize,
        /// Columns of a rank.
        columns: usize,
        /// Elements of a quantisation block.
        block: usize,
    },
}

impl ShardPlan {
    /// The share of the rank at `seat`.
    pub fn new(
        config: &ModelConfig,
        mesh: &Mesh,
        seat: &Seat,
        blocks: &Blocks,
        layout: ExpertLayout,
    ) -> Result<Self, ShardError> {
        let (lane_ranks, rank_in_lane) = (mesh.ranks_per_lane(), seat.rank_in_lane);
        let (q_heads, kv_heads) = split_heads(config, lane_ranks, rank_in_lane)?;
        let columns = q_heads.len() * config.head_dim;
        if lane_ranks > 1 && !columns.is_multiple_of(blocks.o) {
            return Err(ShardError::Block { tp: lane_ranks, columns, block: blocks.o });
        }
        let vocab_of = |rank| share(config.vocab_size, VOCAB_BLOCK, rank, lane_ranks);
        let mut plan = Self {
            q_heads,
            kv_heads,
            mlp: 0..0,
            vocab: vocab_of(rank_in_lane),
            vocab_widths: (0..lane_ranks).map(|rank| vocab_of(rank).len()).collect(),
            lane_ranks,
            rank_in_lane,
            group_lanes: mesh.lanes_per_group(),
            lane_in_group: seat.lane_in_group,
            experts: None,
        };
        match &config.moe {
            Some(moe) => plan.experts = Some(plan.expert_share(moe, blocks, layout)?),
            None => refuse_flags(layout, || "this model has no experts".into())?,
        }
        if (0..config.layers).any(|layer| config.is_dense(layer)) {
            let ranks = if plan.mlp_is_grouped() { plan.group_ranks() } else { lane_ranks };
            plan.mlp = split_columns(config.intermediate_size, blocks.down, plan.mlp_rank(), ranks)?;
        }
        Ok(plan)
    }

    /// Dense MLPs are split over the lanes of the group, not over those of a lane only.
    pub fn mlp_is_grouped(&self) -> bool {
        self.group_lanes > 1 && self.experts.is_none()
    }

    /// This rank's place among those that split a dense MLP.
    pub fn mlp_rank(&self) -> usize {
        if self.mlp_is_grouped() { self.rank_in_group() } else { self.rank_in_lane }
    }

    fn group_ranks(&self) -> usize {
        self.lane_ranks * self.group_lanes
    }

    fn rank_in_group(&self) -> usize {
        self.lane_in_group * self.lane_ranks + self.rank_in_lane
    }

    fn expert_share(
        &self,
        moe: &MoeConfig,
        blocks: &Blocks,
        layout: ExpertLayout,
    ) -> Result<ExpertShare, ShardError> {
        let (ranks, rank) = (self.group_ranks(), self.rank_in_group());
        if ranks == 1 {
            refuse_flags(layout, || "a group of one rank holds all experts and exchanges nothing".into())?;
        }
        let whole = layout.expert_parallel;
        if layout.exchange == ExchangeChoice::Dispatch && !(whole && self.group_lanes > 1) {
            return Err(ShardError::Dispatch);
        }
        if whole && moe.experts < ranks {
            return Err(ShardError::Experts { ranks, experts: moe.experts });
        }
        let experts_of = |rank| if whole { share(moe.experts, 1, rank, ranks) } else { 0..moe.experts };
        let columns = match whole {
            true => 0..moe.expert_width,
            false => split_columns(moe.expert_width, blocks.expert, rank, ranks)?,
        };
        let dispatches = whole && self.group_lanes > 1 && layout.exchange != ExchangeChoice::Gather;
        let edges = (0..ranks).map(|rank| experts_of(rank).start).chain([moe.experts]);
        Ok(ExpertShare {
            experts: experts_of(rank),
            columns,
            shared: match moe.shared_width {
                0 => 0..0,
                width => split_columns(width, blocks.shared, self.rank_in_lane, self.lane_ranks)?,
            },
            owners: dispatches.then(|| edges.collect()),
        })
    }
}

impl Blocks {
    /// Reads them off a checkpoint.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, WeightsError> {
        let config = checkpoint.config();
        let block = |layer: usize, name: &str| {
            let name = format!("model.layers.{layer}.{name}.weight");
            checkpoint.tensor(&name).map(|tensor| tensor.dtype.block_elements())
        };
        let mut blocks = Self { o: 1, down: 1, expert: 1, shared: 1 };
        for layer in 0..config.layers {
            blocks.o = blocks.o.max(block(layer, "self_attn.o_proj")?);
            let Some(moe) = config.moe.as_ref().filter(|_| !config.is_dense(layer)) else {
                blocks.down = blocks.down.max(block(layer, "mlp.down_proj")?);
                continue;
            };
            for expert in 0..moe.experts {
                blocks.expert = blocks.expert.max(block(layer, &format!("mlp.experts.{expert}.down_proj"))?);
            }
            if moe.shared_width > 0 {
                blocks.shared = blocks.shared.max(block(layer, "mlp.shared_experts.down_proj")?);
            }
        }
        Ok(blocks)
    }
}

/// A flag that would change nothing is refused: whoever gave it expects something.
fn refuse_flags(layout: ExpertLayout, why: impl Fn() -> String) -> Result<(), ShardError> {
    if layout.expert_parallel {
        return Err(ShardError::NoExperts { flag: "--enable-expert-parallel", why: why() });
    }
    if layout.exchange != ExchangeChoice::Auto {
        return Err(ShardError::NoExperts { flag: "--moe-exchange", why: why() });
    }
    Ok(())
}

fn split_columns(width: usize, block: usize, rank: usize, ranks: usize) -> Result<Range<usize>, ShardError> {
    if width / block < ranks {
        return Err(ShardError::Mlp { ranks, width, block });
    }
    Ok(share(width, block, rank, ranks))
}

fn split_heads(
    config: &ModelConfig,
    tp: usize,
    rank: usize,
) -> Result<(Range<usize>, Range<usize>), ShardError> {
    let (q, kv) = (config.q_heads, config.kv_heads);
    let divides = |tp: usize| q.is_multiple_of(tp) && (kv.is_multiple_of(tp) || tp.is_multiple_of(kv));
    if !divides(tp) {
        let works = (1..=q).filter(|&tp| divides(tp)).collect();
        return Err(ShardError::Heads { tp, q_heads: q, kv_heads: kv, works });
    }
    let q_heads = rank * q / tp..(rank + 1) * q / tp;
    let kv_heads = if kv.is_multiple_of(tp) {
        rank * kv / tp..(rank + 1) * kv / tp
    } else {
        let shared = rank * kv / tp;
        shared..shared + 1
    };
    Ok((q_heads, kv_heads))
}

/// The `rank`-th of `ranks` shares of `width` in whole blocks; the first ones get what is left over, and
/// the last one an incomplete block at the end.
fn share(width: usize, block: usize, rank: usize, ranks: usize) -> Range<usize> {
    let blocks = width.div_ceil(block);
    let edge = |rank: usize| (rank * (blocks / ranks) + rank.min(blocks % ranks)) * block;
    edge(rank).min(width)..edge(rank + 1).min(width)
}

fn list(values: &[usize]) -> String {
    values.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Vocabulary shares are whole panels of this many outputs, the widest that a CPU kernel packs.
const VOCAB_BLOCK: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_everything_once_in_whole_blocks() {
        for (width, block, ranks) in [(1536, 32, 3), (160, 32, 3), (49152, 16, 5), (100, 16, 3), (7, 1, 4)] {
            let shares: Vec<_> = (0..ranks).map(|rank| share(width, block, rank, ranks)).collect();
            assert_eq!(shares[0].start, 0);
            assert_eq!(shares[ranks - 1].end, width);
            assert!(
                shares.windows(2).all(|w| w[0].end == w[1].start && w[0].end.is_multiple_of(block)),
                "{shares:?}"
            );
        }
    }
}
