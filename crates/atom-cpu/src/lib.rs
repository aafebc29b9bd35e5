//! The CPU backend: kernels, worker pool, replay.
//!
//! * [`CpuBackend`] owns one rank's weights, buffers, cache and recordings. `record` checks a recording
//!   against them and cuts it into phases; `replay` walks the phases on all workers at once, with a
//!   barrier wherever a worker needs what another one wrote, and stops at the real row counts.
//! * [`CpuOptions`] says with how many threads, which [`Isa`] and which [`Activations`].
//! * [`Sketch`] says what steps will work in, before anything is loaded.
//! * [`WeightShare`] lets ranks of one process hold equal slices once.
//!
//! Kernels are written once over two traits, floats (`elementwise::lanes`) and integer products
//! (`quads`), and compiled for plain Rust, AVX2 and AVX-512. Weights are packed at load into panels of
//! 16 outputs (`pack`) and multiplied in the type they are stored in; for quantised ones activations are
//! quantised to bytes row by row (`quantise`). A layer's experts multiply the rows that chose them with the
//! same kernels (`choices`, `replay::experts`). Keys and values are paged (`attention`).
//!
//! Same bits: an output element is one chain of float operations whose order depends on widths and
//! formats only. All instruction sets, thread counts, tile shapes and neighbours give the same bits, so
//! results of one machine can be compared bit by bit with those of another.
//!
//! `unsafe` is for three things: intrinsics behind proof that the processor has them, buffers whose rows
//! are shared out among workers (`shared`), and memory laid out by hand (`aligned`, `room`, `pack`).
//!
//! This crate must never know a request, a scheduler, a model family, or how ranks meet: a collective is
//! a call on the trait that it is given.

mod aligned;
mod attention;
mod backend;
mod choices;
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
mod round;
mod route;
mod sample;
mod shared;
mod sizes;
mod weights;

pub use backend::{Activations, CpuBackend, CpuOptions};
pub use isa::Isa;
pub use sizes::Sketch;
pub use weights::WeightShare;
