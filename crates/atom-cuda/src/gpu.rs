//! A GPU that is ready for a model: libraries found, context open, kernels compiled and loaded.

use crate::api::{CublasLt, Driver, Nvrtc};
use crate::compile::{Compiler, Program};
use crate::device::Device;
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::library::Search;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Opened once; a backend takes it.
pub struct Gpu {
    pub(crate) device: Device,
    pub(crate) cublaslt: Arc<CublasLt>,
    pub(crate) kernels: Kernels,
    driver: Arc<Driver>,
    nvrtc: Nvrtc,
    pub(crate) cache: Option<PathBuf>,
}

/// How to open one.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// Where libraries may lie.
    pub search: Search,
    /// Which GPU.
    pub ordinal: usize,
    /// Folder of compiled kernels.
    pub cache: Option<PathBuf>,
}

impl Gpu {
    /// True if there is a driver that sees a GPU. An error says that a user named a driver which can't be used.
    pub fn is_there(search: &Search) -> Result<bool, CudaError> {
        match Driver::load(search) {
            Ok(driver) => Device::count(&driver).map(|count| count > 0),
            Err(CudaError::NoLibrary { .. }) if search.driver.is_none() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Finds the libraries and opens the GPU.
    pub fn open(options: &GpuOptions) -> Result<Self, CudaError> {
        let driver = Arc::new(Driver::load(&options.search)?);
        let device = Device::open(&driver, options.ordinal)?;
        let nvrtc = Nvrtc::load(&options.search)?;
        let cublaslt = Arc::new(CublasLt::load(&options.search)?);
        tracing::info!(
            "{}, {}; driver {}, NVRTC {}, cuBLASLt {}",
            device.properties().name,
            device.arch(),
            driver.path(),
            nvrtc.path(),
            cublaslt.path()
        );
        let kernels = Kernels::new(&device);
        Ok(Self { device, cublaslt, kernels, driver, nvrtc, cache: options.cache.clone() })
    }

    /// Compiles and loads programs that are not there yet: from the cache, or by NVRTC on all cores.
    pub(crate) fn load(&mut self, programs: &[Program]) -> Result<(), CudaError> {
        if programs.iter().all(|program| self.kernels.has(program)) {
            return Ok(());
        }
        let start = Instant::now();
        let compiler = Compiler::new(&self.nvrtc, &self.device.arch(), self.cache.clone())?;
        // What lies on disk is there at once and not worth a line.
        let told = AtomicU64::new(1);
        let new = self.kernels.load(&compiler, programs, &|done, of| {
            let seconds = start.elapsed().as_secs();
            if told.fetch_max(seconds + 1, Ordering::Relaxed) <= seconds {
                tracing::info!("compiling kernel programs: {done} of {of}");
            }
        })?;
        if new > 0 {
            tracing::info!("{new} kernel programs compiled in {:.2} s", start.elapsed().as_secs_f64());
        }
        Ok(())
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The driver's table, whose counts show what steps ask of it.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// cuBLASLt's table, with counts alike.
    pub fn cublaslt(&self) -> &Arc<CublasLt> {
        &self.cublaslt
    }

    /// Bytes that a rank may take now if all of this process may take `utilization` of the GPU's memory.
    pub fn budget(&self, utilization: f64) -> Result<u64, CudaError> {
        let (free, total) = self.device.memory()?;
        let may = (total as f64 * utilization) as u64;
        let others = total - free;
        Ok(may.saturating_sub(others).min(free))
    }
}
