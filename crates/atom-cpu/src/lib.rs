//! The CPU backend.

mod aligned;
mod attention;
mod backend;
mod elementwise;
mod isa;
mod matmul;
mod pack;
mod phase;
mod pool;
mod quads;
mod quantise;
mod record;
mod replay;
mod room;
mod sample;
mod shared;
mod weights;

pub use backend::{Activations, CpuBackend, CpuOptions};
pub use isa::Isa;
pub use weights::WeightShare;
