//! The seam between models and devices.
//!
//! A model family calls the methods of [`Ops`], once per bucket, and so writes down a flat list of
//! fused operators over a handful of buffers: the [`Recording`]. A [`Backend`] owns weights, buffers
//! and the KV cache of one rank, and replays recordings: a CPU walks the list with its real row
//! count, a GPU captures it once into a graph.
//!
//! * [`Ops`] -> [`Recording`]: what is computed, in order, and its collective [`Recording::signature`];
//! * [`StepInputs`]: the arrays of one step; [`Backend::replay`] runs a recording on them;
//! * [`Collectives`]: how ranks meet inside a recording; sizes come from the recording's shape only.
//!
//! This crate must never know a request, a scheduler, or which backend runs it.

#![forbid(unsafe_code)]

mod backend;
mod ops;
mod recording;
mod step;

pub use backend::{Backend, Collectives, ExpertRows, KvDType, LoadWeights, OpsError, Reserve, Slice, Weight};
pub use ops::{Ops, Rotary};
pub use recording::{
    AttentionSpec, Buf, BufSpec, Collective, CollectiveKind, Comm, ExpertSpec, Extent, NO_EXPERT, Op,
    Recording, RouteSpec, StepShape,
};
pub use step::{PageTables, StepInputs};
