//! The words that every other crate shares: ids, the mesh, limits, sampling parameters, the
//! counter-based generator and a hash.
//!
//! Nothing here knows a model, a device, a socket or, but for the wait in a [`MaskCell`], a clock. A type lives here only when at least
//! two crates that may not see each other need it.

#![forbid(unsafe_code)]

pub mod hash;
mod ids;
pub mod limits;
mod mask;
mod mesh;
pub mod rng;
mod sampling;
mod step;
mod token;

pub use ids::{LaneId, PageId, RankId, RequestId, SlotId, StepNo, TokenId};
pub use mask::{MaskCell, MaskClock, MaskFault};
pub use mesh::{Mesh, MeshArgs, MeshError, Seat};
pub use sampling::{SamplingError, SamplingParams, StopParams};
pub use step::{OutRow, SlotLoad, Span, TableEntry, last_of, slot_of_last};
pub use token::{FinishReason, MAX_TOP_LOGPROBS, ScoredToken, TopLogprobs};
