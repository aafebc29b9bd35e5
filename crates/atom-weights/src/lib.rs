//! Checkpoints: GGUF and safetensors files, config.json, and the names of their tensors.

pub mod config;
mod tensor;

pub use config::{Architecture, ModelConfig, Rope, RopeLayout, RopeScaling};
pub use tensor::{DType, Tensor};
