//! Where a test looks into a rank's step, or spoils it.
//!
//! Loops are generic over a [`Tap`]. Ranks of a product have [`Untapped`], which compiles to nothing;
//! those of [`Host::start_probed`](crate::Host::start_probed) ask a [`Probe`]. No flag leads there.

use atom_base::{RankId, StepNo};
use atom_ops::OpsError;
use std::sync::Arc;

/// Stages of a step, in the order in which a lane's first rank comes to them. Its other ranks have the
/// last five: they take the first one's orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// Before mail is taken in, and what the lane would like to run is looked up.
    Want,
    /// Before facts are brought.
    Exchange,
    /// With everybody's facts, before a conclusion.
    Settle,
    /// Before the plan is made; on another rank, when it has taken its order.
    Commit,
    /// Before a bucket is recorded.
    Record,
    /// With the plan, before its replay.
    Replay,
    /// With results, before they are taken in; on another rank, before the order is reported as done.
    Apply,
    /// The group ends: before the last order is given, or on another rank, reported as done.
    Leave,
}

/// Looks at ranks, or spoils them. A panic or an error in it is one of the rank; a rank is held up for
/// as long as it takes.
pub trait Probe: Send + Sync {
    /// A rank has come to a stage.
    fn reach(&self, rank: RankId, step: StepNo, stage: Stage) -> Result<(), OpsError>;
}

/// A loop's own side of a [`Probe`], or of none.
pub(crate) trait Tap: Send + 'static {
    fn reach(&self, step: StepNo, stage: Stage) -> Result<(), OpsError>;
}

/// Nobody looks.
pub(crate) struct Untapped;

/// A probe, and the rank that it is asked about.
pub(crate) struct Tapped {
    pub(crate) probe: Arc<dyn Probe>,
    pub(crate) rank: RankId,
}

impl Tap for Untapped {
    #[inline(always)]
    fn reach(&self, _: StepNo, _: Stage) -> Result<(), OpsError> {
        Ok(())
    }
}

impl Tap for Tapped {
    fn reach(&self, step: StepNo, stage: Stage) -> Result<(), OpsError> {
        self.probe.reach(self.rank, step, stage)
    }
}
