//! What kind of worlds are made. Parsed once.

use atom_base::limits::LANES_MAX;
use atom_engine::Plan;
use atom_group::Bucket;
use std::ops::Range;
use thiserror::Error;

/// What a user asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorldArgs {
    /// `--lanes`: lanes of the group.
    pub lanes: usize,
    /// `--requests`: how many arrive in each world.
    pub requests: usize,
    /// Aborts, forced preemptions, late lanes, lane faults, divergence. Off with `--no-faults`.
    pub faults: bool,
    /// What a step costs in virtual time.
    pub cost: CostModel,
}

/// Checked [`WorldArgs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorldOptions(WorldArgs);

/// Time of a step: a part for every step, a part for each row of the bucket, and a part for what the
/// busiest lane's rows attend to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostModel {
    /// Every step, µs.
    pub step_us: u32,
    /// Each row of the bucket, padding too, µs.
    pub row_us: u32,
    /// Each pair of a real row and a position that it reads, ns. The lane with most of them is waited for.
    pub pair_ns: u32,
}

/// A world that can't be: the user's fault.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ArgsError {
    /// No lanes, or more than a mesh may have.
    #[error("--lanes {got}: a group has from 1 to {max} lanes", max = LANES_MAX)]
    Lanes {
        /// What was asked for.
        got: usize,
    },
    /// No requests, or more than are worth a world.
    #[error("--requests {got}: a world has from 1 to {max} requests; use more seeds", max = REQUESTS_MAX)]
    Requests {
        /// What was asked for.
        got: usize,
    },
    /// Not a range of seeds.
    #[error("--seeds {text:?}: expected a range such as 0..1000, or one seed")]
    Seeds {
        /// What was given.
        text: String,
    },
}

impl WorldOptions {
    /// Checks what was asked for.
    pub fn new(args: WorldArgs) -> Result<Self, ArgsError> {
        if args.lanes == 0 || args.lanes > LANES_MAX {
            return Err(ArgsError::Lanes { got: args.lanes });
        }
        if args.requests == 0 || args.requests > REQUESTS_MAX {
            return Err(ArgsError::Requests { got: args.requests });
        }
        Ok(Self(args))
    }

    /// What was asked for.
    pub fn args(&self) -> &WorldArgs {
        &self.0
    }

    /// The command that runs `seed` again.
    pub fn command(&self, seed: u64) -> String {
        let WorldArgs { lanes, requests, faults, .. } = self.0;
        let faults = if faults { "" } else { " --no-faults" };
        format!(
            "atom sim --seeds {seed}..{} --lanes {lanes} --requests {requests}{faults}",
            seed.saturating_add(1)
        )
    }
}

impl Default for WorldArgs {
    fn default() -> Self {
        Self { lanes: 4, requests: 32, faults: true, cost: CostModel::default() }
    }
}

impl Default for CostModel {
    /// Of the order of a small model on a CPU; only proportions matter.
    fn default() -> Self {
        Self { step_us: 2000, row_us: 100, pair_ns: 200 }
    }
}

impl CostModel {
    /// µs of a step in `bucket`, whose busiest lane reads `pairs` positions; see [`pairs`](Self::pairs).
    pub fn of(self, bucket: Bucket, pairs: u64) -> u64 {
        let rows = bucket.rows() as u64;
        u64::from(self.step_us) + u64::from(self.row_us) * rows + u64::from(self.pair_ns) * pairs / 1000
    }

    /// Pairs of a row and a position that it reads, itself included.
    pub fn pairs(plan: &Plan) -> u64 {
        plan.spans.iter().map(crate::cost::pairs).sum()
    }
}

/// Reads `--seeds`: `from..to`, or one seed.
pub fn parse_seeds(text: &str) -> Result<Range<u64>, ArgsError> {
    let number = |part: &str| part.trim().parse::<u64>().ok();
    let range = match text.split_once("..") {
        Some((from, to)) => number(from).zip(number(to)).map(|(from, to)| from..to),
        None => number(text).and_then(|seed| Some(seed..seed.checked_add(1)?)),
    };
    range.filter(|range| !range.is_empty()).ok_or_else(|| ArgsError::Seeds { text: text.to_owned() })
}

/// A world of more would take seconds, and one seed more finds more than one request more.
const REQUESTS_MAX: usize = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_a_range_that_is_not_empty() {
        assert_eq!(parse_seeds("0..1000"), Ok(0..1000));
        assert_eq!(parse_seeds(" 7 "), Ok(7..8));
        for text in ["", "5..5", "9..3", "a..b", "-1..4", "1...4", "18446744073709551615"] {
            assert_eq!(parse_seeds(text), Err(ArgsError::Seeds { text: text.to_owned() }));
        }
    }

    #[test]
    fn worlds_without_lanes_or_requests_are_refused_with_the_numbers() {
        let refused = |lanes, requests| {
            WorldOptions::new(WorldArgs { lanes, requests, ..WorldArgs::default() }).unwrap_err().to_string()
        };
        assert!(refused(0, 1).contains("--lanes 0"));
        assert!(refused(1025, 1).contains("from 1 to 1024"));
        assert!(refused(1, 0).contains("--requests 0"));
        assert!(refused(1, 10_001).contains("10000"));
    }

    #[test]
    fn a_seed_is_repeated_by_one_command() {
        let options =
            WorldOptions::new(WorldArgs { lanes: 3, faults: false, ..WorldArgs::default() }).unwrap();
        assert_eq!(options.command(7), "atom sim --seeds 7..8 --lanes 3 --requests 32 --no-faults");
    }
}
