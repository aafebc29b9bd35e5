//! The paged key/value cache of one rank.
//!
//! Keys lie transposed within a page, so that sixteen positions of one element are a vector and a
//! score needs no sum across lanes. Values lie as they come, a position's elements together.

use crate::elementwise::e4m3::E4M3;
use crate::elementwise::lanes::{LANES, Lanes};
use atom_ops::{KvDType, OpsError, Reserve};
use half::{bf16, f16};
use std::alloc::Layout;

/// Blocks `[layer, kv head, page]`, each `[head_dim, page_size]` keys, then `[page_size, padded]`
/// values, where `padded` is head_dim rounded up to whole vectors.
///
/// Interior mutability without locks: between two barriers a position of a layer is either written by
/// one worker or read by any number of them. [`write`](Self::write) and [`block`](Self::block) leave
/// that to their callers.
pub(crate) struct KvCache {
    memory: Memory,
    dtype: KvDType,
    pages: usize,
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    padded: usize,
    page_size: usize,
}

/// An element type of the cache.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// What poisoned memory holds.
    const NAN: Self;

    /// Sixteen elements as f32; exact.
    fn widen<S: Lanes>(s: S, from: &[Self; LANES]) -> S::F;

    /// Sixteen elements rounded to nearest, ties to even. What is too large becomes infinite, or the largest number where
    /// nothing is.
    fn narrow<S: Lanes>(s: S, v: S::F) -> [Self; LANES];
}

/// Zeroed bytes that the system hands out when they are first touched.
struct Memory {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: plain bytes with one owner; who may touch them when is the contract of `KvCache`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl KvCache {
    /// Reserves `layers * pages` pages. All zero; pages cost memory once they are written.
    pub(crate) fn new(reserve: &Reserve) -> Result<Self, OpsError> {
        let &Reserve { layers, pages, page_size, kv_dtype: dtype, .. } = reserve;
        let (kv_heads, head_dim) = (reserve.attention.kv_heads, reserve.attention.head_dim);
        if page_size == 0 || !page_size.is_multiple_of(LANES) {
            return Err(OpsError::Device(format!(
                "the CPU cache stores {LANES} positions as one vector: a page of {page_size} positions does not \
                 fit; use a block size of 16, 32 or 64"
            )));
        }
        let padded = head_dim.next_multiple_of(LANES);
        let bytes = [layers, kv_heads, pages, page_size, head_dim + padded, dtype.bytes()]
            .into_iter()
            .try_fold(1usize, usize::checked_mul)
            .filter(|&bytes| bytes <= isize::MAX as usize - LANES);
        let memory = bytes.and_then(Memory::new).ok_or_else(|| {
            OpsError::Memory(format!(
                "no room for a cache of {pages} pages of {page_size} positions ({layers} layers, {kv_heads} heads \
                 of {head_dim}, {dtype:?}); use fewer pages"
            ))
        })?;
        Ok(Self { memory, dtype, pages, layers, kv_heads, head_dim, padded, page_size })
    }

    /// Element type.
    pub(crate) fn dtype(&self) -> KvDType {
        self.dtype
    }

    /// Elements of a key.
    pub(crate) fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Positions of a page.
    pub(crate) fn page_size(&self) -> usize {
        self.page_size
    }

    /// Elements from one position's values to the next: head_dim in whole vectors.
    pub(crate) fn padded(&self) -> usize {
        self.padded
    }

    /// The keys of a page, and behind them its values; see the type's layout. In bounds for
    /// `page_size * (head_dim + padded)` elements.
    pub(crate) fn block<T: Element>(&self, layer: usize, head: usize, page: usize) -> *mut T {
        assert_eq!(size_of::<T>(), self.dtype.bytes(), "the cache holds {:?}", self.dtype);
        assert!(
            layer < self.layers && head < self.kv_heads && page < self.pages,
            "page {page} of {}, layer {layer}, head {head}",
            self.pages
        );
        let block = (layer * self.kv_heads + head) * self.pages + page;
        let start = block * self.block_elements() * size_of::<T>();
        // SAFETY: the block lies within the allocation, whose size is the product of the bounds above.
        unsafe { self.memory.start.add(start).cast() }
    }

    /// Stores the key and value of one head at `row` = page * page_size + offset.
    ///
    /// # Safety
    /// No other thread reads or writes this row of this layer meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn write<S: Lanes, T: Element>(
        &self,
        s: S,
        layer: usize,
        head: usize,
        row: usize,
        key: &[f32],
        value: &[f32],
    ) {
        assert!(key.len() == self.head_dim && value.len() == self.head_dim);
        let offset = row % self.page_size;
        let keys = self.block::<T>(layer, head, row / self.page_size);
        for (chunk, key) in key.chunks(LANES).enumerate() {
            let narrow = T::narrow(s, s.read(key));
            for (i, &element) in narrow[..key.len()].iter().enumerate() {
                // SAFETY: element < head_dim and offset < page_size lie within the block's keys, and
                // nobody else is at this row by the caller's promise.
                unsafe { keys.add((chunk * LANES + i) * self.page_size + offset).write(element) };
            }
        }
        let first = self.page_size * self.head_dim + offset * self.padded;
        for (chunk, value) in value.chunks(LANES).enumerate() {
            let narrow = T::narrow(s, s.read(value));
            // SAFETY: whole vectors up to `padded` lie within the block's values; see above.
            unsafe { keys.add(first + chunk * LANES).cast::<[T; LANES]>().write_unaligned(narrow) };
        }
    }

    /// Fills a page of all layers with NaN: nothing may read it before it is written again.
    pub(crate) fn poison_page(&mut self, page: usize) {
        match self.dtype {
            KvDType::F32 => self.fill_page(page, f32::NAN),
            KvDType::F16 => self.fill_page(page, <f16 as Element>::NAN),
            KvDType::BF16 => self.fill_page(page, <bf16 as Element>::NAN),
            KvDType::E4M3 => self.fill_page(page, E4M3::NAN),
        }
    }

    fn fill_page<T: Element>(&mut self, page: usize, element: T) {
        for layer in 0..self.layers {
            for head in 0..self.kv_heads {
                let block = self.block::<T>(layer, head, page);
                // SAFETY: the block has this many elements, and `&mut self` keeps all others out.
                unsafe { std::slice::from_raw_parts_mut(block, self.block_elements()) }.fill(element);
            }
        }
    }

    fn block_elements(&self) -> usize {
        self.page_size * (self.head_dim + self.padded)
    }
}

impl Element for f32 {
    const NAN: Self = f32::NAN;

    #[inline(always)]
    fn widen<S: Lanes>(s: S, from: &[Self; LANES]) -> S::F {
        s.load(from)
    }

    #[inline(always)]
    fn narrow<S: Lanes>(s: S, v: S::F) -> [Self; LANES] {
        s.array(v)
    }
}

impl Element for f16 {
    const NAN: Self = f16::NAN;

    #[inline(always)]
    fn widen<S: Lanes>(s: S, from: &[Self; LANES]) -> S::F {
        s.load_f16(from)
    }

    #[inline(always)]
    fn narrow<S: Lanes>(s: S, v: S::F) -> [Self; LANES] {
        s.to_f16(v)
    }
}

impl Element for bf16 {
    const NAN: Self = bf16::NAN;

    #[inline(always)]
    fn widen<S: Lanes>(s: S, from: &[Self; LANES]) -> S::F {
        s.load_bf16(from)
    }

    #[inline(always)]
    fn narrow<S: Lanes>(s: S, v: S::F) -> [Self; LANES] {
        s.array(v).map(bf16::from_f32)
    }
}

impl Element for E4M3 {
    const NAN: Self = E4M3::NAN;

    #[inline(always)]
    fn widen<S: Lanes>(s: S, from: &[Self; LANES]) -> S::F {
        s.load_e4m3(from)
    }

    #[inline(always)]
    fn narrow<S: Lanes>(s: S, v: S::F) -> [Self; LANES] {
        let (from, mut to) = (s.array(v), [E4M3::ZERO; LANES]);
        for (to, from) in to.iter_mut().zip(from) {
            *to = E4M3::from_f32(from);
        }
        to
    }
}

impl Memory {
    fn new(bytes: usize) -> Option<Self> {
        // The alignment of malloc: a larger one would make the allocator zero, and so touch, all of it.
        let layout = Layout::from_size_align(bytes.max(1), LANES).ok()?;
        // SAFETY: the layout's size is not zero.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        (!start.is_null()).then_some(Self { start, layout })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and owned alone.
        unsafe { std::alloc::dealloc(self.start, self.layout) };
    }
}
