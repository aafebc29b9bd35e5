//! What can go wrong with a GPU, and whose fault it is.

use atom_ops::OpsError;
use std::time::Duration;
use thiserror::Error;

/// Why a library can't be used, a kernel can't be compiled, or a call failed.
#[derive(Clone, Debug, Error)]
pub enum CudaError {
    /// No file of the search list could be opened: the machine lacks the library, or it lies elsewhere.
    #[error("{library} was not found ({what}). Tried:\n{}\n{advice}", .tried.join("\n"))]
    NoLibrary {
        /// The library's usual file name.
        library: &'static str,
        /// What it is for.
        what: &'static str,
        /// Each path with what the system said, in order.
        tried: Vec<String>,
        /// What brings it.
        advice: String,
    },
    /// The file is a library, but not this one, or too old.
    #[error("{path} has no function {symbol}: it is not {library}, or too old a version of it")]
    NoSymbol {
        /// The library's usual file name.
        library: &'static str,
        /// The file that was opened.
        path: String,
        /// What is missing.
        symbol: String,
    },
    /// The driver is there and sees no GPU.
    #[error("the CUDA driver {path} sees no GPU")]
    NoDevice {
        /// The driver's file.
        path: String,
    },
    /// A number that no GPU has.
    #[error("there is no GPU {ordinal}: the driver sees {count}, numbered from 0")]
    NoSuchDevice {
        /// What was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The GPU is older than the kernels are written for.
    #[error("{name} has compute capability {major}.{minor}; 8.0 or later is needed")]
    OldDevice {
        /// The GPU's name.
        name: String,
        /// Its compute capability.
        major: i32,
        /// Its compute capability.
        minor: i32,
    },
    /// A call of the driver failed: out of memory, a lost device, or our bug.
    #[error("{call}: {name} ({code}), {text}")]
    Driver {
        /// The function.
        call: &'static str,
        /// The driver's number.
        code: u32,
        /// The driver's name for it.
        name: String,
        /// The driver's explanation.
        text: String,
    },
    /// A call of NVRTC or cuBLASLt failed.
    #[error("{call}: {text} ({code})")]
    Library {
        /// The function.
        call: &'static str,
        /// The library's number.
        code: u32,
        /// The library's explanation.
        text: String,
    },
    /// A kernel does not compile: our bug, or an NVRTC that does not know the GPU.
    #[error("{source_name} does not compile for {arch}:\n{log}")]
    Compile {
        /// The source file.
        source_name: String,
        /// What it was compiled for.
        arch: String,
        /// What NVRTC said.
        log: String,
    },
    /// What was queued did not end in time: a kernel hangs, or the GPU is lost. Nothing of the context can be used
    /// or given back after that.
    #[error(
        "{what} did not end in {waited:.1?}: a kernel hangs, or the GPU is lost; the process has to be started again"
    )]
    Late {
        /// What was waited for.
        what: &'static str,
        /// How long.
        waited: Duration,
    },
    /// Work was asked for after a failure that the context doesn't survive.
    #[error("the GPU failed before ({0}); the process has to be started again")]
    Failed(String),
    /// Memory that was asked for is not there; the numbers are in the text.
    #[error("{0}")]
    Memory(String),
    /// What was asked for can't be computed by this build.
    #[error("{0}")]
    Unsupported(String),
}

impl CudaError {
    /// True if the driver said that memory ran out.
    pub fn is_out_of_memory(&self) -> bool {
        // CUDA_ERROR_OUT_OF_MEMORY is 2 in all versions.
        matches!(self, Self::Driver { code: 2, .. } | Self::Memory(_))
    }
}

impl CudaError {
    /// With what was asked for, if memory ran out.
    pub(crate) fn with_bytes(self, bytes: usize, of: &str) -> Self {
        if self.is_out_of_memory() { Self::Memory(format!("{bytes} bytes of {of}: {self}")) } else { self }
    }
}

impl From<CudaError> for OpsError {
    fn from(error: CudaError) -> Self {
        if error.is_out_of_memory() {
            return Self::Memory(error.to_string());
        }
        match error {
            CudaError::Unsupported(what) => Self::Weights(what),
            error => Self::Device(error.to_string()),
        }
    }
}
