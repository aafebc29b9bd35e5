//! Model families over the recorder: which weights a rank takes, and the forward pass as a list of
//! fused operators.
//!
//! * [`ShardPlan`]: a rank's share of heads, MLP, experts and vocabulary, every divisibility checked;
//! * [`Model::load`] hands a rank's slices to its backend; [`Model::record`] writes the pass of one
//!   step shape. All families are one decoder with different declarations, see [`decoder`];
//! * [`exchange`]: how rows reach the experts of a mixture and come home.
//!
//! A family never asks which backend runs it, and never sees a request or a row count.

#![forbid(unsafe_code)]

mod attention;
pub mod decoder;
pub mod exchange;
mod loader;
mod mlp;
mod moe;
mod shard;

pub use decoder::{Model, ModelError};
pub use moe::ExchangeChoice;
pub use shard::{Blocks, ExpertLayout, ExpertShare, ShardError, ShardPlan};
