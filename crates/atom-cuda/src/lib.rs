//! The CUDA backend: one GPU behind [`atom_ops::Backend`].
//!
//! * [`Search`] says where the vendor's libraries may lie; [`Driver`], [`Nvrtc`] and [`CublasLt`] are tables of
//!   their functions, bound when a GPU is asked for. The program is built and starts without any of them.
//! * [`Device`], [`Stream`], [`Event`], [`DeviceMem`], [`Pinned`], [`Module`], [`Kernel`] and [`Graph`] own what
//!   the driver hands out; each call is a `Result`, and nothing is global.
//! * [`Compiler`] makes cubins of the sources in `kernels/` and keeps them on disk; [`Kernels`] has them loaded.
//! * [`launch`] has a function for each operator's kernels.
//!
//! This crate must never know a request, a scheduler or a model family. No other crate may know CUDA.

mod api;
mod backend;
mod blas;
mod blas_fp8;
mod buffers;
mod choices;
mod compile;
mod device;
mod element;
mod error;
mod fp8;
mod fuse;
mod gate;
mod gpu;
mod graph;
mod kernels;
mod landing;
pub mod launch;
mod layout;
mod library;
mod mapped;
mod masks;
mod meetings;
mod memory;
mod module;
mod order;
mod peers;
mod plan;
mod product_kernel;
mod record;
pub mod sample_rows;
mod sampler;
mod staging;
mod wait;
mod weights;
mod window;
mod work;

pub use api::{CublasLt, Driver, Nvrtc};
pub use backend::{CudaBackend, OperatorTime, StepTimes};
pub use blas::{Blas, Product};
pub use blas_fp8::Fp8Blas;
pub use choices::AllChoices;
pub use compile::{Compiler, Program};
pub use cudarc::driver::sys::{CUtensorMapDataType as MapElement, CUtensorMapSwizzle as MapSwizzle};
pub use device::{Device, Event, Properties, Stream};
pub use element::{Element, KvElement};
pub use error::CudaError;
pub use fp8::Fp8Form;
pub use gate::{Gate, GateAt};
pub use gpu::{Gpu, GpuOptions};
pub use graph::Graph;
pub use kernels::{Kernels, Queue, SOURCES, Source};
pub use landing::{Landing, Pace};
pub use layout::{Layout, Limits};
pub use library::Search;
pub use mapped::Mapped;
pub use memory::{Address, DeviceMem, Pinned};
pub use module::{Arg, Kernel, Launch, Module, TensorMap, Tiling};
pub use order::SumOrder;
pub use peers::{Members, Peers, Place};
pub use plan::{Plan, Sizer, Sizes};
pub use wait::quit;
pub use window::{Absence, Circle, Distress, Window};
pub use work::{Piece, Tile, WorkCounts, WorkCutter, WorkRoom, WorkSpec};
