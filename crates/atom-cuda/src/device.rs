//! One GPU: its context, its properties, its streams and events.

use crate::api::Driver;
use crate::error::CudaError;
use crate::wait;
use cudarc::driver::sys as cu;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A GPU and its primary context. Clones share it; the last one gives it back.
#[derive(Clone)]
pub struct Device {
    context: Arc<Context>,
}

/// What kernels and plans need to know of a GPU.
#[derive(Clone, Debug)]
pub struct Properties {
    /// As the vendor calls it.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Multiprocessors that a rank may count on: all of them, unless ranks share the GPU.
    pub processors: u32,
    /// Bytes of shared memory that one block may have.
    pub shared_bytes_max: u32,
    /// Bytes of the L2 cache.
    pub l2_bytes: u64,
}

struct Context {
    driver: Arc<Driver>,
    device: cu::CUdevice,
    handle: cu::CUcontext,
    properties: Properties,
    /// The first failure that nothing comes back from.
    fault: OnceLock<String>,
}

// SAFETY: the driver's handles may be used from any thread; a call needs the context to be current, which
// `Device::bind` sees to.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks what it shares.
unsafe impl Sync for Context {}

impl Device {
    /// How many GPUs the driver sees. Initialises the driver.
    pub fn count(driver: &Driver) -> Result<usize, CudaError> {
        let mut count: c_int = 0;
        // SAFETY: the place lives for the call.
        unsafe {
            let result = driver.cuInit(0);
            if result == cu::CUresult::CUDA_ERROR_NO_DEVICE {
                return Ok(0);
            }
            driver.check("cuInit", result)?;
            driver.check("cuDeviceGetCount", driver.cuDeviceGetCount(&raw mut count))?;
        }
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Opens GPU `ordinal` and makes it the calling thread's. Of its multiprocessors grids take the part of one of
    /// `sharers`: kernels that wait for each other must find room beside those of the other ranks.
    pub fn open(driver: &Arc<Driver>, ordinal: usize, sharers: u32) -> Result<Self, CudaError> {
        let count = Self::count(driver)?;
        if count == 0 {
            return Err(CudaError::NoDevice { path: driver.path().to_owned() });
        }
        if count <= ordinal {
            return Err(CudaError::NoSuchDevice { ordinal, count });
        }
        let (mut device, mut handle) = (0, std::ptr::null_mut());
        // SAFETY: the places live for the calls.
        unsafe {
            driver.check("cuDeviceGet", driver.cuDeviceGet(&raw mut device, ordinal as c_int))?;
        }
        let mut properties = Properties::read(driver, device)?;
        properties.processors = (properties.processors / sharers.max(1)).max(1);
        // SAFETY: as above; the context is given back when the last owner goes.
        unsafe {
            let result = driver.cuDevicePrimaryCtxRetain(&raw mut handle, device);
            driver.check("cuDevicePrimaryCtxRetain", result)?;
        }
        let driver = Arc::clone(driver);
        let device = Self {
            context: Arc::new(Context { driver, device, handle, properties, fault: OnceLock::new() }),
        };
        device.bind()?;
        Ok(device)
    }

    /// Makes this GPU the one that calls of this thread mean.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is alive.
        let result = unsafe { self.driver().cuCtxSetCurrent(self.context.handle) };
        self.driver().check("cuCtxSetCurrent", result)
    }

    /// Lets kernels of this GPU, which must be the calling thread's, read and write what `other` allocates.
    pub(crate) fn reach(&self, other: &Self) -> Result<(), CudaError> {
        let (driver, peer) = (self.driver(), &other.context);
        if self.context.handle == peer.handle {
            return Ok(());
        }
        let mut can: c_int = 0;
        // SAFETY: the place lives for the call; both contexts are alive.
        unsafe {
            let result = driver.cuDeviceCanAccessPeer(&raw mut can, self.context.device, peer.device);
            driver.check("cuDeviceCanAccessPeer", result)?;
            if can == 0 {
                return Err(CudaError::Unsupported(format!(
                    "GPU {} can't reach the memory of GPU {}: there is neither NVLink nor a PCIe path for peers between \
                     them, and a group of ranks needs one; use -dp N without --enable-dp-attention, whose ranks don't meet",
                    self.context.device, peer.device
                )));
            }
            let result = driver.cuCtxEnablePeerAccess(peer.handle, 0);
            if result == cu::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
                return Ok(());
            }
            driver.check("cuCtxEnablePeerAccess", result)
        }
    }

    /// Takes note of a failure that the context doesn't survive, and hands it on. The first one is kept: what comes
    /// later follows from it.
    pub(crate) fn fail(&self, error: CudaError) -> CudaError {
        let _ = self.context.fault.set(error.to_string());
        error
    }

    /// An error if the GPU has failed before.
    pub(crate) fn check_usable(&self) -> Result<(), CudaError> {
        self.context.fault.get().map_or(Ok(()), |fault| Err(CudaError::Failed(fault.clone())))
    }

    /// Gives something of the context back. After a failure it is left to the end of the process: the driver would
    /// wait for a kernel that may never end.
    pub(crate) fn release<R>(&self, free: impl FnOnce(&Driver) -> R) {
        if self.context.fault.get().is_none() && self.bind().is_ok() {
            let _ = free(self.driver());
        }
    }

    /// The table of the driver's functions.
    pub fn driver(&self) -> &Driver {
        &self.context.driver
    }

    /// See [`Properties`].
    pub fn properties(&self) -> &Properties {
        &self.context.properties
    }

    /// What NVRTC compiles for: with the suffix that unlocks a generation's own instructions, if it has some.
    pub fn arch(&self) -> String {
        let (major, minor) = self.properties().capability;
        let suffix = if major >= 9 && minor == 0 { "a" } else { "" };
        format!("sm_{major}{minor}{suffix}")
    }

    /// Bytes of device memory: free, and in all.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the places live for the call.
        let result = unsafe { self.driver().cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        self.driver().check("cuMemGetInfo", result)?;
        Ok((free as u64, total as u64))
    }

    /// A queue of work.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place lives for the call. The default stream is never used, so nothing need wait for it.
        let result = unsafe { self.driver().cuStreamCreate(&raw mut handle, STREAM_NON_BLOCKING) };
        self.driver().check("cuStreamCreate", result)?;
        Ok(Stream { device: self.clone(), handle })
    }

    /// A mark in a queue that measures time.
    pub fn event(&self) -> Result<Event, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place lives for the call.
        let result = unsafe { self.driver().cuEventCreate(&raw mut handle, 0) };
        self.driver().check("cuEventCreate", result)?;
        Ok(Event { device: self.clone(), handle })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.fault.get().is_none() {
            // SAFETY: nothing of the context is left: whatever is in it holds a `Device`. A failure can't be helped.
            let _ = unsafe { self.driver.cuDevicePrimaryCtxRelease_v2(self.device) };
        }
    }
}

impl Properties {
    fn read(driver: &Driver, device: cu::CUdevice) -> Result<Self, CudaError> {
        let attribute = |attribute: Attribute| {
            let mut value: c_int = 0;
            // SAFETY: the place lives for the call.
            let result = unsafe { driver.cuDeviceGetAttribute(&raw mut value, attribute, device) };
            driver.check("cuDeviceGetAttribute", result).map(|()| value)
        };
        let mut name: [c_char; 256] = [0; 256];
        // SAFETY: the driver writes at most 256 bytes, the last of them 0.
        let result = unsafe { driver.cuDeviceGetName(name.as_mut_ptr(), 256, device) };
        driver.check("cuDeviceGetName", result)?;
        // SAFETY: the driver ended it with a 0.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(CudaError::OldDevice { name, major, minor });
        }
        let positive = |value: c_int| u32::try_from(value).unwrap_or(0);
        Ok(Self {
            name,
            capability: (major, minor),
            processors: positive(attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?),
            shared_bytes_max: positive(attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?),
            l2_bytes: u64::from(positive(attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?)),
        })
    }
}

/// Work in order: copies, kernels, graphs.
pub struct Stream {
    device: Device,
    handle: cu::CUstream,
}

// SAFETY: as for `Context`.
unsafe impl Send for Stream {}

impl Stream {
    /// Its GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn handle(&self) -> cu::CUstream {
        self.handle
    }

    /// True if all of it is done; an error if something of the context failed, now or before.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let driver = self.device.driver();
        // SAFETY: the stream is alive.
        driver.is_ready("cuStreamQuery", unsafe { driver.cuStreamQuery(self.handle) })
    }

    /// Waits until all of it is done, and says whether it went well. For what is no step: as long as a start may take.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.wait_within("what was queued on the GPU", WAIT_MAX)
    }

    /// The same with a limit. Behind it the GPU counts as failed.
    pub fn wait_within(&self, what: &'static str, limit: Duration) -> Result<(), CudaError> {
        let waited = wait::until(what, (Duration::ZERO, limit), |_| self.is_done());
        waited.map(drop).map_err(|error| self.device.fail(error))
    }

    /// Puts a mark at its end.
    pub fn mark(&self, event: &Event) -> Result<(), CudaError> {
        let driver = self.device.driver();
        // SAFETY: both are alive and of one context.
        driver.check("cuEventRecord", unsafe { driver.cuEventRecord(event.handle, self.handle) })
    }

    /// What comes after this starts when the mark is passed.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        let driver = self.device.driver();
        // SAFETY: both are alive and of one context.
        let result = unsafe { driver.cuStreamWaitEvent(self.handle, event.handle, 0) };
        driver.check("cuStreamWaitEvent", result)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle; the driver finishes what is queued.
        self.device.release(|driver| unsafe { driver.cuStreamDestroy_v2(self.handle) });
    }
}

/// A mark in a stream.
pub struct Event {
    device: Device,
    handle: cu::CUevent,
}

// SAFETY: as for `Context`.
unsafe impl Send for Event {}

impl Event {
    /// Waits until it was passed, as long as a start may take; then the GPU counts as failed.
    pub fn wait(&self) -> Result<(), CudaError> {
        let driver = self.device.driver();
        let limits = (Duration::ZERO, WAIT_MAX);
        let waited = wait::until("what was queued before an event", limits, |_| {
            // SAFETY: the event is alive.
            driver.is_ready("cuEventQuery", unsafe { driver.cuEventQuery(self.handle) })
        });
        waited.map(drop).map_err(|error| self.device.fail(error))
    }

    /// Milliseconds from `start` to this one. Both must have been passed.
    pub fn since_ms(&self, start: &Self) -> Result<f32, CudaError> {
        let (driver, mut ms) = (self.device.driver(), 0.0);
        // SAFETY: both are alive; the place lives for the call.
        let result = unsafe { driver.cuEventElapsedTime_v2(&raw mut ms, start.handle, self.handle) };
        driver.check("cuEventElapsedTime", result).map(|()| ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle.
        self.device.release(|driver| unsafe { driver.cuEventDestroy_v2(self.handle) });
    }
}

/// Copies and fills of a start, and kernels of a check: the deadline of a first replay.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// CU_STREAM_NON_BLOCKING
const STREAM_NON_BLOCKING: u32 = 1;
