//! What can be wrong with a checkpoint.

use crate::fp8::Fp8Problem;
use crate::tensor::DType;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a checkpoint can't be used. Each names the file, what was found and what would do.
#[derive(Debug, Error)]
pub enum WeightsError {
    /// The operating system refused to open, size or map a file: the user's path or permissions.
    #[error("can't read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The path holds no model in a form that can be read: the user's choice of path.
    #[error(
        "{path} holds no usable checkpoint: {found}. Give a .gguf file, or a folder with config.json and \
         model.safetensors (or model.safetensors.index.json and its shards), or with one .gguf file"
    )]
    NoCheckpoint {
        /// What was given.
        path: PathBuf,
        /// What is there instead.
        found: String,
    },
    /// A JSON file does not parse: damaged, or edited by hand.
    #[error("{path} is not valid JSON: {source}")]
    Json {
        /// The file.
        path: PathBuf,
        /// Line, column and reason.
        source: serde_json::Error,
    },
    /// A file contradicts its format: cut short, overwritten, or made to do harm.
    #[error("{path} is damaged: {problem}. Fetch or convert it again")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Which part, with the numbers.
        problem: String,
    },
    /// A key of config.json or of a GGUF header is missing or has a value that no model can have.
    #[error("{path}: {key} {problem}")]
    Config {
        /// The file.
        path: PathBuf,
        /// The key, spelled as in the file.
        key: String,
        /// What is wrong with it, with the numbers.
        problem: String,
    },
    /// The model is sound but uses something that this build does not have.
    #[error("{path}: {what} is not supported; {supported}")]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The feature, by the name the file uses.
        what: String,
        /// What would work instead.
        supported: String,
    },
    /// A tensor is stored in a type that this build can't read.
    #[error(
        "{path}: tensor {name} is stored as {found}, which is not supported; \
         F32, F16, BF16, F8_E4M3 (in safetensors, with scales), Q8_0, Q6_K, Q5_K, Q5_1, Q5_0, Q4_K, Q4_1 and \
         Q4_0 (in GGUF files) are"
    )]
    TensorType {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor's Hugging Face name.
        name: String,
        /// The type, as the file's format calls it.
        found: String,
    },
    /// FP8 codes whose scales are not as config.json says: an incomplete checkpoint, or another format.
    #[error("{path}: tensor {name} {shape:?} is stored as F8_E4M3, {problem}")]
    Fp8 {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor's Hugging Face name.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// What is wrong.
        problem: Box<Fp8Problem>,
    },
    /// The configuration calls for a tensor that no file has: an incomplete or mismatched checkpoint.
    #[error("{path}: tensor {name} of shape {expected:?} is missing, and a {architecture} model needs it")]
    MissingTensor {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor's Hugging Face name.
        name: String,
        /// The shape it should have.
        expected: Vec<usize>,
        /// The family.
        architecture: &'static str,
    },
    /// A tensor does not have the shape that follows from the configuration.
    #[error("{path}: tensor {name} has shape {found:?}, but the configuration says {expected:?}")]
    TensorShape {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor's Hugging Face name.
        name: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// The shape it should have.
        expected: Vec<usize>,
    },
    /// A tensor was asked for by a name that the checkpoint does not have: the caller's fault.
    #[error("{path} has no tensor {name}; it has {count} others")]
    NoSuchTensor {
        /// The checkpoint.
        path: PathBuf,
        /// What was asked for.
        name: String,
        /// Tensors in the checkpoint.
        count: usize,
    },
    /// A synthetic model would not fit into memory by any measure: the user's configuration.
    #[error(
        "a synthetic model of this configuration takes {bytes} bytes as {dtype:?}; at most {max} are made. \
         Lower num_hidden_layers, hidden_size or vocab_size"
    )]
    SyntheticSize {
        /// What it would take.
        bytes: u128,
        /// In this type.
        dtype: DType,
        /// The bound.
        max: u128,
    },
}

impl WeightsError {
    /// The same with less to write at the many places that find a damaged file.
    pub(crate) fn damaged(path: &Path, problem: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), problem: problem.into() }
    }

    /// A key with a value that can't be.
    pub(crate) fn config(path: &Path, key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Config { path: path.to_owned(), key: key.into(), problem: problem.into() }
    }

    /// Something that this build does not have.
    pub(crate) fn unsupported(path: &Path, what: impl Into<String>, supported: impl Into<String>) -> Self {
        Self::Unsupported { path: path.to_owned(), what: what.into(), supported: supported.into() }
    }
}
