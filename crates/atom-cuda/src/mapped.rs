//! Host memory that host and GPU see at the same time: for words by which they tell each other something, and for the
//! little that goes with them.

use crate::device::Device;
use crate::error::CudaError;
use crate::memory::Address;
use std::ffi::c_void;
use std::sync::atomic::AtomicU32;

/// Pinned memory in the GPU's address space. It has no slices: a GPU may be writing any of it.
pub struct Mapped {
    device: Device,
    start: *mut u8,
    address: Address,
    bytes: usize,
}

// SAFETY: plain memory with one owner; what is shared is read and written by words.
unsafe impl Send for Mapped {}

impl Mapped {
    /// Takes `bytes`, all 0.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        let (bytes, driver) = (bytes.max(4), device.driver());
        let (mut start, mut address) = (std::ptr::null_mut::<c_void>(), 0);
        // SAFETY: the places live for the calls.
        unsafe {
            let result = driver.cuMemHostAlloc(&raw mut start, bytes, HOST_ALLOC_PORTABLE_MAPPED);
            driver
                .check("cuMemHostAlloc", result)
                .map_err(|error| error.with_bytes(bytes, "pinned memory"))?;
            let result = driver.cuMemHostGetDevicePointer_v2(&raw mut address, start, 0);
            let memory =
                Self { device: device.clone(), start: start.cast(), address: Address(address), bytes };
            driver.check("cuMemHostGetDevicePointer", result)?;
            memory.start.write_bytes(0, bytes);
            Ok(memory)
        }
    }

    /// Where it is for a kernel.
    pub fn address(&self) -> Address {
        self.address
    }

    /// The word at an offset. What the GPU stored with `st.release.sys` before it stored this one is seen by whoever
    /// loads it with `Acquire`; and the other way round with `ld.acquire.sys` and `Release`.
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.bytes, "a word within the memory");
        // SAFETY: in bounds and aligned, alive as long as this, and only ever used as an atomic.
        unsafe { AtomicU32::from_ptr(self.start.add(offset).cast()) }
    }

    /// Copies what lies at an offset.
    ///
    /// # Safety
    /// The GPU doesn't write there now: a word was loaded behind what it wrote, and it was not told to go on.
    pub unsafe fn read(&self, offset: usize, to: &mut [u8]) {
        assert!(offset <= self.bytes && to.len() <= self.bytes - offset, "a copy within the memory");
        // SAFETY: in bounds; the rest is the caller's.
        unsafe { self.start.add(offset).copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) }
    }

    /// Writes words to an offset.
    ///
    /// # Safety
    /// The GPU neither reads nor writes there before it was told to by a word that is stored afterwards.
    pub unsafe fn write(&mut self, offset: usize, words: &[u32]) {
        let bytes = size_of_val(words);
        assert!(offset <= self.bytes && bytes <= self.bytes - offset, "a copy within the memory");
        // SAFETY: in bounds; the rest is the caller's.
        unsafe { self.start.add(offset).copy_from_nonoverlapping(words.as_ptr().cast(), bytes) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: nobody else frees it.
        self.device.release(|driver| unsafe { driver.cuMemFreeHost(self.start.cast()) });
    }
}

/// CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
const HOST_ALLOC_PORTABLE_MAPPED: u32 = 1 | 2;
