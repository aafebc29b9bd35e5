//! Memory of a GPU, and memory of the host that a GPU copies from and to at full speed.

use crate::device::{Device, Stream};
use crate::error::CudaError;
use std::ffi::c_void;
use std::ops::{Deref, DerefMut};

/// A place in device memory, as kernels get it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address(pub u64);

impl Address {
    /// What an absent argument is.
    pub const NULL: Self = Self(0);

    /// So many bytes further.
    #[must_use]
    pub fn plus(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// A piece of device memory.
pub struct DeviceMem {
    device: Device,
    address: u64,
    bytes: usize,
}

impl DeviceMem {
    /// Takes `bytes`; they hold anything. Of 0 bytes nothing is taken.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: the place lives for the call.
            let result = unsafe { device.driver().cuMemAlloc_v2(&raw mut address, bytes) };
            device.driver().check("cuMemAlloc", result).map_err(|error| {
                if !error.is_out_of_memory() {
                    return error;
                }
                let (free, total) = device.memory().unwrap_or_default();
                CudaError::Memory(format!(
                    "{bytes} bytes of GPU memory were asked for and {free} of {total} are free"
                ))
            })?;
        }
        Ok(Self { device: device.clone(), address, bytes })
    }

    /// Where it starts.
    pub fn address(&self) -> Address {
        Address(self.address)
    }

    /// Its GPU.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// How much it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Queues a copy of `from` to `offset`.
    ///
    /// # Safety
    /// `from` must stay as it is until the stream has passed the copy. (Of memory that isn't pinned the driver
    /// takes a copy first, so there it need not.)
    pub unsafe fn upload(&self, stream: &Stream, offset: usize, from: &[u8]) -> Result<(), CudaError> {
        assert!(offset <= self.bytes && from.len() <= self.bytes - offset, "a copy within its target");
        if from.is_empty() {
            return Ok(());
        }
        let (driver, to) = (self.device.driver(), self.address + offset as u64);
        // SAFETY: source and target are in bounds and, as the caller says, the source outlives the copy.
        let result =
            unsafe { driver.cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream.handle()) };
        driver.check("cuMemcpyHtoDAsync", result)
    }

    /// Copies `from` to `offset` and waits.
    pub fn write(&self, stream: &Stream, offset: usize, from: &[u8]) -> Result<(), CudaError> {
        // SAFETY: the wait keeps `from` borrowed until the copy is done.
        unsafe { self.upload(stream, offset, from) }?;
        stream.wait()
    }

    /// Queues a copy of what lies at `offset` to `to`.
    ///
    /// # Safety
    /// `to` must be neither read nor written until the stream has passed the copy.
    pub unsafe fn download(&self, stream: &Stream, offset: usize, to: &mut [u8]) -> Result<(), CudaError> {
        assert!(offset <= self.bytes && to.len() <= self.bytes - offset, "a copy within its source");
        if to.is_empty() {
            return Ok(());
        }
        let (driver, from) = (self.device.driver(), self.address + offset as u64);
        // SAFETY: source and target are in bounds and, as the caller says, the target outlives the copy.
        let result =
            unsafe { driver.cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), stream.handle()) };
        driver.check("cuMemcpyDtoHAsync", result)
    }

    /// Copies what lies at `offset` to `to` and waits.
    pub fn read(&self, stream: &Stream, offset: usize, to: &mut [u8]) -> Result<(), CudaError> {
        // SAFETY: the wait keeps `to` borrowed until the copy is done.
        unsafe { self.download(stream, offset, to) }?;
        stream.wait()
    }

    /// Queues a copy of all of `from`, which is as large.
    pub fn copy(&self, stream: &Stream, from: &Self) -> Result<(), CudaError> {
        assert_eq!(self.bytes, from.bytes, "a copy of equals");
        let driver = self.device.driver();
        // SAFETY: both are alive and of this size; the driver frees neither before the stream has passed the copy.
        let result =
            unsafe { driver.cuMemcpyDtoDAsync_v2(self.address, from.address, self.bytes, stream.handle()) };
        driver.check("cuMemcpyDtoDAsync", result)
    }

    /// Queues a fill of `bytes` from `offset` with one byte. 0xff makes NaN of every float type.
    pub fn fill(&self, stream: &Stream, offset: usize, bytes: usize, value: u8) -> Result<(), CudaError> {
        assert!(offset <= self.bytes && bytes <= self.bytes - offset, "a fill within its target");
        if bytes == 0 {
            return Ok(());
        }
        let (driver, to) = (self.device.driver(), self.address + offset as u64);
        // SAFETY: the target is in bounds.
        let result = unsafe { driver.cuMemsetD8Async(to, value, bytes, stream.handle()) };
        driver.check("cuMemsetD8Async", result)
    }
}

impl Drop for DeviceMem {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: nobody else frees it; the driver waits for work that uses it.
            self.device.release(|driver| unsafe { driver.cuMemFree_v2(self.address) });
        }
    }
}

/// Host memory that stays where it is, so that the GPU can reach it by itself.
pub struct Pinned {
    device: Device,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Takes `bytes`, all 0.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        let bytes = bytes.max(1);
        let mut start: *mut c_void = std::ptr::null_mut();
        // SAFETY: the place lives for the call. Portable memory is pinned for every context of the process.
        let result = unsafe { device.driver().cuMemHostAlloc(&raw mut start, bytes, HOST_ALLOC_PORTABLE) };
        device
            .driver()
            .check("cuMemHostAlloc", result)
            .map_err(|error| error.with_bytes(bytes, "pinned memory"))?;
        // SAFETY: the driver gave `bytes` writable bytes.
        unsafe { start.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { device: device.clone(), start: start.cast(), bytes })
    }
}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `bytes` initialised bytes that this owns. Copies by the GPU borrow it or are waited for.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: nobody else frees it.
        self.device.release(|driver| unsafe { driver.cuMemFreeHost(self.start.cast()) });
    }
}

/// CU_MEMHOSTALLOC_PORTABLE
const HOST_ALLOC_PORTABLE: u32 = 1;
