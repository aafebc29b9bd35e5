//! Who holds what: a rank's share of each matrix.
//!
//! Attention is split by heads over the ranks of a lane. The MLP and, under DP attention, the same
//! MLP over the lanes of a group, is split by columns in whole quantisation blocks, as evenly as they
//! allow. The vocabulary is split over the ranks of a lane.

use atom_base::{Mesh, Seat};
use atom_weights::ModelConfig;
use std::ops::Range;
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
    /// Lanes that split the MLP (DP attention); 1 otherwise.
    pub group_lanes: usize,
    /// This lane's place among them.
    pub lane_in_group: usize,
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
    /// The share of the rank at `seat`. `o_block` and `down_block` are the quantisation blocks of the
    /// two matrices that are split along their inputs (1 for plain types).
    pub fn new(
        config: &ModelConfig,
        mesh: &Mesh,
        seat: &Seat,
        o_block: usize,
        down_block: usize,
    ) -> Result<Self, ShardError> {
        let (lane_ranks, rank_in_lane) = (mesh.ranks_per_lane(), seat.rank_in_lane);
        let (group_lanes, lane_in_group) = (mesh.lanes_per_group(), seat.lane_in_group);
        let (q_heads, kv_heads) = split_heads(config, lane_ranks, rank_in_lane)?;
        let columns = q_heads.len() * config.head_dim;
        if lane_ranks > 1 && !columns.is_multiple_of(o_block) {
            return Err(ShardError::Block { tp: lane_ranks, columns, block: o_block });
        }
        let mlp_ranks = lane_ranks * group_lanes;
        let mlp_rank = lane_in_group * lane_ranks + rank_in_lane;
        let width = config.intermediate_size;
        if width / down_block < mlp_ranks {
            return Err(ShardError::Mlp { ranks: mlp_ranks, width, block: down_block });
        }
        let vocab_of = |rank| share(config.vocab_size, VOCAB_BLOCK, rank, lane_ranks);
        Ok(Self {
            q_heads,
            kv_heads,
            mlp: share(width, down_block, mlp_rank, mlp_ranks),
            vocab: vocab_of(rank_in_lane),
            vocab_widths: (0..lane_ranks).map(|rank| vocab_of(rank).len()).collect(),
            lane_ranks,
            rank_in_lane,
            group_lanes,
            lane_in_group,
        })
    }
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
