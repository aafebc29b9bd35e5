//! A GPU that is ready for a model: libraries found, context open, kernels compiled and loaded.

use crate::api::{CublasLt, Driver, Nvrtc};
use crate::compile::{Compiler, Program};
use crate::device::Device;
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::library::Search;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Opened once; a backend takes it.
pub struct Gpu {
    pub(crate) device: Device,
    pub(crate) cublaslt: Arc<CublasLt>,
    pub(crate) kernels: Kernels,
    driver: Arc<Driver>,
    nvrtc: Nvrtc,
    pub(crate) cache: Option<PathBuf>,
    sharers: u32,
}

/// How to open one.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// Where libraries may lie.
    pub search: Search,
    /// Which GPU.
    pub ordinal: usize,
    /// Ranks that compute there, this one included.
    pub sharers: u32,
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
        let device = Device::open(&driver, options.ordinal, options.sharers)?;
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
        Ok(Self {
            device,
            cublaslt,
            kernels,
            driver,
            nvrtc,
            cache: options.cache.clone(),
            sharers: options.sharers.max(1),
        })
    }

    /// Compiles and loads programs that are not there yet: from the cache, or by NVRTC on all cores.
    pub(crate) fn load(&mut self, programs: &[Program]) -> Result<(), CudaError> {
        if programs.iter().all(|program| self.kernels.has(program)) {
            return Ok(());
        }
        // Ranks of one process want the same at the same time: what one of them compiles the next one finds on disk.
        let _turn = COMPILING.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Lets this GPU's kernels read and write what the other allocates.
    ///
    /// # Errors
    /// There is no path between them: [`CudaError::Unsupported`] with their numbers.
    pub fn reach(&self, other: &Self) -> Result<(), CudaError> {
        self.device.bind()?;
        self.device.reach(&other.device)
    }

    /// Ranks that compute there.
    pub fn sharers(&self) -> u32 {
        self.sharers
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

    /// How many GPUs the driver sees.
    pub fn count(search: &Search) -> Result<usize, CudaError> {
        Device::count(&Driver::load(search)?)
    }

    /// Bytes that a rank may take if all of this process may take `utilization` of the GPU's memory. Asked before any of
    /// the ranks that share it takes something.
    pub fn budget(&self, utilization: f64) -> Result<u64, CudaError> {
        let (free, total) = self.device.memory()?;
        let may = (total as f64 * utilization) as u64;
        let others = total - free;
        Ok(may.saturating_sub(others).min(free) / u64::from(self.sharers))
    }
}

static COMPILING: Mutex<()> = Mutex::new(());
