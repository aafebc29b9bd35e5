//! Model families over the recorder: which weights a rank takes, and the forward pass as a list of
//! fused operators.
//!
//! * [`ShardPlan`]: a rank's share of heads, MLP and vocabulary, every divisibility checked;
//! * [`Model::load`] hands a rank's slices to its backend; [`Model::record`] writes the pass of one
//!   step shape. Llama, Qwen2 and Qwen3 are one decoder with three declarations, in [`dense`].
//!
//! A family never asks which backend runs it, and never sees a request or a row count.

#![forbid(unsafe_code)]

pub mod dense;
mod shard;

pub use dense::{Model, ModelError};
pub use shard::{ShardError, ShardPlan};
