//! Large aligned allocations: packed weights, buffers.

use atom_ops::OpsError;
use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

/// Zeroed bytes that start on a cache line, and on a huge page when there are enough of them.
/// All pages are touched on creation.
pub(crate) struct Aligned {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns plain bytes, like a `Box<[u8]>`.
unsafe impl Send for Aligned {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Aligned {}

impl Aligned {
    /// `bytes` zeros. `what` names them in the error.
    pub(crate) fn zeroed(bytes: usize, what: &str) -> Result<Self, OpsError> {
        let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { CACHE_LINE_BYTES };
        let refused = || OpsError::Memory(format!("no {bytes} bytes for {what}"));
        let layout = Layout::from_size_align(bytes.max(1), align).map_err(|_| refused())?;
        // SAFETY: the size is not zero.
        let ptr = NonNull::new(unsafe { alloc(layout) }).ok_or_else(refused)?;
        if bytes >= HUGE_PAGE_BYTES {
            advise_huge(ptr, bytes);
        }
        // SAFETY: freshly allocated with this size. Zeroing after the advice, so that the first touch
        // already gets huge pages.
        unsafe { ptr.write_bytes(0, layout.size()) };
        Ok(Self { ptr, layout })
    }

    /// First byte.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// First byte, for writing. Whoever writes through it must have this allocation to itself.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Sets every byte.
    pub(crate) fn fill(&mut self, byte: u8) {
        // SAFETY: the allocation has this size and is ours alone.
        unsafe { self.ptr.write_bytes(byte, self.layout.size()) };
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout, freed once.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) };
    }
}

/// Asks for huge pages. A hint: where it is refused, the memory is as good but slower to walk.
#[cfg(target_os = "linux")]
fn advise_huge(ptr: NonNull<u8>, bytes: usize) {
    use std::ffi::{c_int, c_void};
    unsafe extern "C" {
        fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int;
    }
    const MADV_HUGEPAGE: c_int = 14;
    // SAFETY: the range is ours and page-aligned; the advice changes no content.
    unsafe { madvise(ptr.as_ptr().cast(), bytes, MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge(_ptr: NonNull<u8>, _bytes: usize) {}

const CACHE_LINE_BYTES: usize = 64;
const HUGE_PAGE_BYTES: usize = 2 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_zero_and_aligned() {
        for bytes in [0, 1, 100, HUGE_PAGE_BYTES + 5] {
            let aligned = Aligned::zeroed(bytes, "a test").unwrap();
            assert!(aligned.as_ptr().addr().is_multiple_of(CACHE_LINE_BYTES));
            assert_eq!(aligned.len(), bytes.max(1));
            // SAFETY: the allocation has `bytes` initialised bytes.
            let read = unsafe { std::slice::from_raw_parts(aligned.as_ptr(), bytes) };
            assert!(read.iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn an_impossible_size_is_an_error_with_the_number() {
        let error = Aligned::zeroed(usize::MAX, "a test").err().unwrap().to_string();
        assert!(error.contains(&usize::MAX.to_string()), "{error}");
    }
}
