//! How ranks form lanes and lanes form groups. Parsed once; after that every divisibility holds.

use crate::ids::{LaneId, RankId};
use thiserror::Error;

/// What the user asked for: `-tp`, `-dp`, `--enable-dp-attention`, `--enable-expert-parallel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshArgs {
    /// Tensor-parallel ranks (`-tp`).
    pub tp: u16,
    /// Data-parallel replicas (`-dp`).
    pub dp: u16,
    /// `--enable-dp-attention`: every rank becomes a lane of its own, all lanes one group.
    pub dp_attention: bool,
}

/// The layout of ranks: `groups x lanes_per_group x ranks_per_lane`, in that order of numbering.
///
/// A *lane* shares requests and KV bookkeeping; its ranks split attention heads. A *group* shares
/// collectives, and so takes every step together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    groups: u16,
    lanes_per_group: u16,
    ranks_per_lane: u16,
}

/// Where one rank sits in the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Number of the rank over the whole mesh.
    pub rank: RankId,
    /// Number of its lane over the whole mesh.
    pub lane: LaneId,
    /// Number of its group.
    pub group: u16,
    /// Position of the lane within the group: `0 .. lanes_per_group`.
    pub lane_in_group: usize,
    /// Position of the rank within its lane: `0 .. ranks_per_lane`. Rank 0 leads the lane.
    pub rank_in_lane: usize,
}

/// Why a mesh can't be built from the arguments. The user's fault; each says what to change.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum MeshError {
    /// A count of zero.
    #[error("-{flag} 0 asks for no ranks at all; use 1 or more")]
    Zero {
        /// `tp` or `dp`.
        flag: &'static str,
    },
    /// More ranks than this build accepts.
    #[error("-tp {tp} x -dp {dp} is {ranks} ranks; at most {max} are supported", max = crate::limits::RANKS_MAX)]
    TooMany {
        /// `-tp`.
        tp: u16,
        /// `-dp`.
        dp: u16,
        /// Their product.
        ranks: usize,
    },
}

impl Mesh {
    /// A single rank: one lane, one group.
    pub const SINGLE: Self = Self { groups: 1, lanes_per_group: 1, ranks_per_lane: 1 };

    /// Builds the mesh for a dense model.
    ///
    /// `-tp N` is one lane of N ranks. `-dp N` alone is N lanes that share no collective, so each is
    /// a group of one and never waits for another. `-tp N --enable-dp-attention` is N lanes of one
    /// rank that meet in every MLP: one group.
    pub fn new(args: MeshArgs) -> Result<Self, MeshError> {
        let MeshArgs { tp, dp, dp_attention } = args;
        if tp == 0 {
            return Err(MeshError::Zero { flag: "tp" });
        }
        if dp == 0 {
            return Err(MeshError::Zero { flag: "dp" });
        }
        let ranks = usize::from(tp) * usize::from(dp);
        if ranks > crate::limits::RANKS_MAX {
            return Err(MeshError::TooMany { tp, dp, ranks });
        }
        Ok(if dp_attention {
            Self { groups: 1, lanes_per_group: tp * dp, ranks_per_lane: 1 }
        } else {
            Self { groups: dp, lanes_per_group: 1, ranks_per_lane: tp }
        })
    }

    /// Groups: sets of lanes that share collectives.
    pub fn groups(&self) -> usize {
        usize::from(self.groups)
    }

    /// Lanes in each group.
    pub fn lanes_per_group(&self) -> usize {
        usize::from(self.lanes_per_group)
    }

    /// Ranks in each lane (attention tensor parallelism).
    pub fn ranks_per_lane(&self) -> usize {
        usize::from(self.ranks_per_lane)
    }

    /// Lanes over the whole mesh.
    pub fn lanes(&self) -> usize {
        self.groups() * self.lanes_per_group()
    }

    /// Ranks over the whole mesh.
    pub fn ranks(&self) -> usize {
        self.lanes() * self.ranks_per_lane()
    }

    /// The seat of every rank, in rank order.
    pub fn seats(&self) -> impl Iterator<Item = Seat> + '_ {
        (0..self.ranks()).map(|rank| {
            let lane = rank / self.ranks_per_lane();
            Seat {
                rank: RankId(rank as u16),
                lane: LaneId(lane as u16),
                group: (lane / self.lanes_per_group()) as u16,
                lane_in_group: lane % self.lanes_per_group(),
                rank_in_lane: rank % self.ranks_per_lane(),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh(tp: u16, dp: u16, dp_attention: bool) -> Mesh {
        Mesh::new(MeshArgs { tp, dp, dp_attention }).unwrap()
    }

    #[test]
    fn layouts_follow_the_flags() {
        let shape = |m: Mesh| (m.groups(), m.lanes_per_group(), m.ranks_per_lane());
        assert_eq!(shape(mesh(1, 1, false)), (1, 1, 1));
        assert_eq!(shape(mesh(3, 1, false)), (1, 1, 3));
        assert_eq!(shape(mesh(1, 2, false)), (2, 1, 1));
        assert_eq!(shape(mesh(3, 2, false)), (2, 1, 3));
        assert_eq!(shape(mesh(4, 1, true)), (1, 4, 1));
        assert_eq!(shape(mesh(2, 2, true)), (1, 4, 1));
    }

    #[test]
    fn seats_number_ranks_lane_by_lane() {
        let seats: Vec<_> = mesh(2, 2, false).seats().collect();
        assert_eq!(seats[3].lane, LaneId(1));
        assert_eq!(seats[3].group, 1);
        assert_eq!(seats[3].lane_in_group, 0);
        assert_eq!(seats[3].rank_in_lane, 1);
    }

    #[test]
    fn zero_and_absurd_counts_are_refused_with_the_numbers() {
        let refused = |tp, dp| Mesh::new(MeshArgs { tp, dp, dp_attention: false }).unwrap_err().to_string();
        assert!(refused(0, 1).contains("-tp 0"));
        assert!(refused(1, 0).contains("-dp 0"));
        assert!(refused(300, 300).contains("90000"));
    }
}
