//! Large aligned allocations: packed weights, buffers.

use atom_ops::OpsError;
use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes that start on a cache line, and on a huge page when there are enough of them.
pub(crate) struct Aligned {
    ptr: NonNull<u8>,
    /// Of the allocation, which may begin before the first byte and be longer.
    layout: Layout,
    skipped: usize,
    bytes: usize,
}

// SAFETY: it owns plain bytes, like a `Box<[u8]>`.
unsafe impl Send for Aligned {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Aligned {}

impl Aligned {
    /// `bytes` zeros, all pages touched. `what` names them in the error.
    pub(crate) fn zeroed(bytes: usize, what: &str) -> Result<Self, OpsError> {
        let mut zeroed = Self::uninitialised(bytes, what)?;
        zeroed.fill(0);
        Ok(zeroed)
    }

    /// `bytes` zeros whose pages the system provides when they are first touched: for the worst case that
    /// hardly ever comes. An allocator would clear what it aligns by hand, so the line is found here.
    pub(crate) fn untouched(bytes: usize, what: &str) -> Result<Self, OpsError> {
        let refused = || OpsError::Memory(format!("no {bytes} bytes for {what}"));
        let all = bytes.max(1).checked_add(CACHE_LINE_BYTES - MALLOC_ALIGN).ok_or_else(refused)?;
        let layout = Layout::from_size_align(all, MALLOC_ALIGN).map_err(|_| refused())?;
        // SAFETY: the size is not zero.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refused)?;
        let skipped = ptr.addr().get().next_multiple_of(CACHE_LINE_BYTES) - ptr.addr().get();
        Ok(Self { ptr, layout, skipped, bytes })
    }

    fn uninitialised(bytes: usize, what: &str) -> Result<Self, OpsError> {
        let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { CACHE_LINE_BYTES };
        let refused = || OpsError::Memory(format!("no {bytes} bytes for {what}"));
        let layout = Layout::from_size_align(bytes.max(1), align).map_err(|_| refused())?;
        // SAFETY: the size is not zero.
        let ptr = NonNull::new(unsafe { alloc(layout) }).ok_or_else(refused)?;
        if bytes >= HUGE_PAGE_BYTES {
            // Before the first touch, so that this already gets huge pages.
            advise_huge(ptr, bytes);
        }
        Ok(Self { ptr, layout, skipped: 0, bytes })
    }

    /// First byte, for writing. Whoever writes through it must have this allocation to itself.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        // SAFETY: no more is skipped than was asked for beyond the bytes.
        unsafe { self.ptr.as_ptr().add(self.skipped) }
    }

    /// Sets every byte.
    pub(crate) fn fill(&mut self, byte: u8) {
        // SAFETY: so many bytes follow, and they are ours alone.
        unsafe { self.as_mut_ptr().write_bytes(byte, self.bytes) };
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }
}

/// Cuts pieces from large allocations, so that small ones lie on huge pages too.
#[derive(Default)]
pub(crate) struct Slabs {
    slab: Option<Arc<Aligned>>,
    used: usize,
}

/// A part of a slab, or all of an allocation of its own. It is initialised by whoever asked for it.
pub(crate) struct Piece {
    slab: Arc<Aligned>,
    start: usize,
    bytes: usize,
}

impl Slabs {
    /// A piece that nobody else has, on a cache line. `what` names it in the error.
    pub(crate) fn piece(&mut self, bytes: usize, what: &str) -> Result<Piece, OpsError> {
        if bytes > SLAB_BYTES / 2 {
            let slab = Arc::new(Aligned::uninitialised(bytes, what)?);
            return Ok(Piece { slab, start: 0, bytes });
        }
        let start = self.used.next_multiple_of(CACHE_LINE_BYTES);
        if let Some(slab) = self.slab.as_ref().filter(|slab| start + bytes <= slab.len()) {
            self.used = start + bytes;
            return Ok(Piece { slab: Arc::clone(slab), start, bytes });
        }
        let slab = Arc::new(Aligned::uninitialised(SLAB_BYTES, what)?);
        (self.slab, self.used) = (Some(Arc::clone(&slab)), bytes);
        Ok(Piece { slab, start: 0, bytes })
    }
}

impl Piece {
    /// First byte. Whoever writes through it must be the only one to use the piece then.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        // SAFETY: the piece lies within the slab.
        unsafe { self.slab.ptr.as_ptr().add(self.start) }
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once.
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

/// What allocators align to anyway.
const MALLOC_ALIGN: usize = 16;

const CACHE_LINE_BYTES: usize = 64;
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Large beside a huge page, small beside a model.
const SLAB_BYTES: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_zero_and_aligned() {
        for bytes in [0, 1, 100, HUGE_PAGE_BYTES + 5] {
            let mut aligned = Aligned::zeroed(bytes, "a test").unwrap();
            assert!(aligned.as_mut_ptr().addr().is_multiple_of(CACHE_LINE_BYTES));
            assert_eq!(aligned.len(), bytes);
            // SAFETY: the allocation has `bytes` initialised bytes.
            let read = unsafe { std::slice::from_raw_parts(aligned.as_mut_ptr(), bytes) };
            assert!(read.iter().all(|&b| b == 0));
            let mut untouched = Aligned::untouched(bytes, "a test").unwrap();
            assert!(untouched.as_mut_ptr().addr().is_multiple_of(CACHE_LINE_BYTES));
            assert_eq!(untouched.len(), bytes);
            // SAFETY: as above.
            let read = unsafe { std::slice::from_raw_parts(untouched.as_mut_ptr(), bytes) };
            assert!(read.iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn an_impossible_size_is_an_error_with_the_number() {
        for refused in [Aligned::zeroed(usize::MAX, "a test"), Aligned::untouched(usize::MAX, "a test")] {
            let error = refused.err().unwrap().to_string();
            assert!(error.contains(&usize::MAX.to_string()), "{error}");
        }
    }

    #[test]
    fn pieces_are_apart_and_aligned() {
        let mut slabs = Slabs::default();
        let sizes = [1, 64, 100, SLAB_BYTES / 2, SLAB_BYTES / 2, 7, SLAB_BYTES, 3 * SLAB_BYTES, 9];
        let pieces: Vec<Piece> = sizes.iter().map(|&bytes| slabs.piece(bytes, "a test").unwrap()).collect();
        let mut ranges: Vec<_> = pieces.iter().map(|piece| (piece.as_ptr().addr(), piece.len())).collect();
        assert!(ranges.iter().all(|(start, _)| start.is_multiple_of(CACHE_LINE_BYTES)));
        assert_eq!(ranges.iter().map(|&(_, bytes)| bytes).collect::<Vec<_>>(), sizes);
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
    }
}
