//! Checkpoints: finds the files of a model, maps them, and says what is in them.
//!
//! [`Checkpoint::open`] takes a folder (config.json and safetensors, or a single GGUF) or a `.gguf`
//! file and gives a [`ModelConfig`] and tensors by their Hugging Face names, whichever format and
//! spelling they came in. Nothing is copied: a [`Tensor`] is a view of the mapped file, cheap to
//! clone, and keeps the mapping alive.
//!
//! * [`ModelConfig`] is parsed, not validated later: every number is present, within bounds, and
//!   every divisibility holds that a model on one rank needs.
//!   [`ModelConfig::moe`] has the layers with experts, whose tensors have one set of names too, one
//!   tensor an expert, also where a file stacks them.
//! * [`family::tensors`] is the one list of the tensors that a configuration needs. `open` checks
//!   that each is there with the right shape, and [`Checkpoint::synthetic`] makes models from it.
//! * [`Gguf`] gives a GGUF file's metadata to the tokenizer; [`gguf::write`] makes such files.
//! * [`quant`] is the reference for ggml's block formats: kernels are tested against it. It also expands
//!   FP8 codes, whose [`Tensor`] carries the scales that belong to them ([`Fp8Scales`]).
//!
//! Files are the world's and may be hostile. Every count, length and offset is checked against the
//! bytes that are there before anything is allocated or read; a bad file is a [`WeightsError`] that
//! says which file, what was found and what to do, never a panic.
//!
//! This crate must never know a device, a kernel, a tokenizer's rules or how weights are split over
//! ranks. It opens paths it is given and touches no network.

#![deny(unsafe_code)]

mod checkpoint;
pub mod config;
mod error;
mod experts;
pub mod family;
mod folder;
mod fp8;
pub mod gguf;
mod map;
pub mod quant;
mod safetensors;
mod synthetic;
mod tensor;

pub use checkpoint::Checkpoint;
pub use config::{Architecture, ModelConfig, MoeConfig, QkNorm, Rope, RopeLayout, RopeScaling, Scoring};
pub use error::WeightsError;
pub use fp8::{Fp8Problem, Fp8Scales, nearest as nearest_e4m3};
pub use gguf::Gguf;
pub use quant::dequantize;
pub use tensor::{DType, Recipe, Tensor};
