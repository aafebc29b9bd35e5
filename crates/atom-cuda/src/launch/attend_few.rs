//! Norms of heads, rotary embedding, cache and attention of a step of few rows as one kernel. See
//! kernels/attend_few.cu.

use crate::compile::Program;
use crate::device::{Device, Properties};
use crate::element::Element;
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::attend::{AttendHeads, AttendStep};
use crate::launch::rope::{CacheLayer, HeadNorms, Heads, Places};
use crate::launch::rows::{bytes, halves};
use crate::memory::Address;
use crate::module::{Launch, TensorMap, Tiling};
use cudarc::driver::sys::CUtensorMapDataType as MapElement;
use cudarc::driver::sys::CUtensorMapSwizzle as MapSwizzle;

/// The kernel for some heads on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendFew {
    /// `WIDTH` of the kernel.
    width: u32,
    q: u32,
    kv: u32,
    /// Rows that a copy of the engine brings.
    granule: u32,
    /// One on each multiprocessor.
    blocks: u32,
    /// What a block may have such that one of a product of few rows fits beside it.
    shared_max: u32,
}

/// How the blocks share out a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Parts of a row of usual length, for each kv head.
    splits: u32,
    /// Of a long one.
    splits_max: u32,
    /// Threads that add up two columns of all parts.
    lanes: u32,
    /// Whether the sums of warps have room beside the ring.
    apart: bool,
}

/// A layer's keys and values, for the copy engine.
pub struct FewMaps {
    keys: TensorMap,
    values: TensorMap,
}

impl AttendFew {
    /// `None` where there is no such kernel: another GPU, another type than bf16 of activations or cache, heads or pages of odd
    /// sizes.
    pub fn new(
        properties: &Properties,
        element: Element,
        heads: &AttendHeads,
        page_size: usize,
    ) -> Option<Self> {
        let takes = properties.capability == (9, 0)
            && properties.shared_bytes_max >= SHARED_BYTES_LARGE
            && element == Element::BF16
            && heads.head_dim.is_multiple_of(8)
            && page_size.is_multiple_of(8);
        let width = [64, 128, 256].into_iter().find(|&width| takes && heads.head_dim <= width as usize)?;
        let half = (properties.shared_bytes_max + SHARED_BYTES_DRIVER) / 2;
        Some(Self {
            width,
            q: heads.q as u32,
            kv: heads.kv as u32,
            granule: 1 << page_size.trailing_zeros().min(STRETCH.trailing_zeros()),
            blocks: properties.processors,
            shared_max: half - SHARED_BYTES_DRIVER - SHARED_BYTES_FIXED,
        })
    }

    /// Whether steps of up to so many rows go this way.
    pub fn takes(&self, rows: usize) -> bool {
        rows <= ROWS_MAX && rows as u32 * self.units() <= self.blocks
    }

    /// What is to be loaded.
    pub fn program(&self) -> Program {
        Program::with("attend_few", &[&format!("WIDTH={}", self.width)])
    }

    /// Bytes of the letters. All of their bits are 1 before the first launch.
    pub fn letters_bytes(&self) -> usize {
        let parts = (1..=ROWS_MAX).filter(|&rows| self.takes(rows));
        let parts = parts.map(|rows| rows * (self.units() * self.cut(rows).splits_max) as usize).max();
        parts.unwrap_or(0) * self.heads() as usize * (self.width / 2) as usize * 16
    }

    /// Of a unit.
    fn heads(&self) -> u32 {
        (self.q / self.kv).min(UNIT_HEADS)
    }

    /// Of a row.
    fn units(&self) -> u32 {
        self.kv * (self.q / self.kv).div_ceil(UNIT_HEADS)
    }

    /// As in the kernel.
    fn warps(&self) -> u32 {
        if self.width > 128 { 4 } else { 8 }
    }

    fn cut(&self, rows: usize) -> Cut {
        let splits = self.blocks / (rows as u32 * self.units());
        let needed = RING_BYTES + self.width * (2 * UNIT_HEADS + 4 * rows as u32);
        let sums = self.warps() * self.heads() * self.width.min(PASS) * 4;
        assert!(splits > 0 && needed.max(sums) <= self.shared_max, "{rows} rows for {self:?}");
        Cut {
            splits,
            splits_max: splits.max(SPLITS_LONG),
            lanes: splits.next_power_of_two().min(32),
            apart: needed + sums <= self.shared_max,
        }
    }
}

impl FewMaps {
    /// For a cache of `pages` pages a layer.
    pub fn new(
        device: &Device,
        few: &AttendFew,
        heads: &AttendHeads,
        (cache, pages): (&CacheLayer, usize),
    ) -> Result<Self, CudaError> {
        let sizes = [heads.head_dim as u64, (pages * heads.kv * cache.page_size) as u64];
        let map = |address| {
            TensorMap::new(
                device,
                &Tiling {
                    address,
                    element: MapElement::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                    sizes: &sizes,
                    strides: &[2 * sizes[0]],
                    tile: &[64, few.granule],
                    swizzle: MapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                },
            )
        };
        Ok(Self { keys: map(cache.keys)?, values: map(cache.values)? })
    }
}

/// The rows of a step, each with those of its span before it; q, k and v in `step.qkv` are as the products left them.
///
/// # Safety
/// As for [`super::rope::rotate_and_cache`] and [`super::attend::simple`] of the same step; `few` takes its rows, `maps` was
/// made of `cache`, the rows of a slot follow each other, nobody else's cache rows are read by a row of the step; `letters`
/// have [`AttendFew::letters_bytes`], all bits 1 before the first launch, and are used by one launch at a time.
pub unsafe fn attend_few(
    queue: &Queue<'_>,
    few: &AttendFew,
    (heads, norms, attend): (&Heads, Option<HeadNorms>, &AttendHeads),
    (step, places): (&AttendStep, Places),
    (cache, maps): (&CacheLayer, &FewMaps),
    letters: Address,
) -> Result<(), CudaError> {
    let cut = few.cut(step.rows);
    let norms = norms.unwrap_or(HeadNorms { q: Address::NULL, k: Address::NULL, eps: 0.0 });
    let addresses = [
        step.header,
        places.positions,
        places.cache_rows,
        step.row_slots,
        step.tables,
        step.qkv,
        cache.keys,
        cache.values,
        step.out,
        attend.sinks,
        heads.frequencies,
        norms.q,
        norms.k,
        letters,
    ];
    let mut words = [0; 46];
    for (words, address) in words.chunks_exact_mut(2).zip(addresses) {
        words.copy_from_slice(&halves(address));
    }
    words[28..45].copy_from_slice(&[
        step.table_stride as u32,
        few.q,
        few.kv,
        heads.head_dim as u32,
        heads.dim as u32,
        u32::from(heads.pairs),
        cache.page_size as u32,
        few.granule,
        attend.window as u32,
        norms.eps.to_bits(),
        heads.magnitude.to_bits(),
        attend.scale.to_bits(),
        step.rows as u32,
        cut.splits,
        cut.splits_max,
        cut.lanes,
        u32::from(cut.apart),
    ]);
    let launch = Launch::new(few.blocks, 32 * few.warps()).shared(few.shared_max).overlapping();
    let args = [(&maps.keys).into(), (&maps.values).into(), bytes(&words)];
    // SAFETY: the caller's.
    unsafe { queue.launch_of(&few.program(), "attend_few_bf16", launch, &args) }
}

/// Query heads of a kv head that are worked on together.
const UNIT_HEADS: u32 = 16;

/// Positions of a stage.
const STRETCH: u32 = 32;

/// Columns of the sums of warps that lie in shared memory at a time.
const PASS: u32 = 128;

/// The stages of a block's ring: as many as make this, whatever the width.
const RING_BYTES: u32 = 64 << 10;

/// Shared memory of the kernel beside what it is launched with, at most.
const SHARED_BYTES_FIXED: u32 = 2 << 10;

/// Shared memory of a block from which on two of 110 KiB fit on a multiprocessor.
const SHARED_BYTES_LARGE: u32 = 220 << 10;

/// Shared memory of a block that the driver takes for itself.
const SHARED_BYTES_DRIVER: u32 = 1 << 10;

/// Parts that a long row has at least, however many rows there are: it shall not keep a few blocks alone. More of them cost
/// rows that are all long: a block takes about 3 us from one part to the next.
const SPLITS_LONG: u32 = 8;

/// More rows than this go by pieces and tiles: with so many, and one of 4,096 positions or more among them, nobody has measured
/// which is faster.
const ROWS_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn few(
        capability: (i32, i32),
        (q, kv, head_dim): (usize, usize, usize),
        page: usize,
    ) -> Option<AttendFew> {
        let properties = Properties {
            name: String::new(),
            capability,
            processors: 132,
            shared_bytes_max: 232_448,
            l2_bytes: 0,
        };
        let heads = AttendHeads { q, kv, head_dim, scale: 1.0, window: 0, sinks: Address::NULL };
        AttendFew::new(&properties, Element::BF16, &heads, page)
    }

    #[test]
    fn heads_and_pages_that_the_copy_engine_can_bring_are_taken() {
        let takes = |heads, page| few((9, 0), heads, page).map(|few| (few.width, few.granule));
        assert_eq!(takes((32, 8, 128), 64), Some((128, 32)));
        assert_eq!(takes((32, 8, 80), 48), Some((128, 16)));
        assert_eq!(takes((4, 2, 256), 8), Some((256, 8)));
        assert_eq!(takes((32, 8, 128), 12), None);
        assert_eq!(takes((32, 8, 100), 64), None);
        assert_eq!(takes((32, 8, 264), 64), None);
        assert_eq!(few((8, 0), (32, 8, 128), 64), None);
        assert_eq!(few((10, 0), (32, 8, 128), 64), None);
    }

    #[test]
    fn blocks_are_shared_out_by_the_bucket() {
        let splits = |heads, rows| {
            few((9, 0), heads, 64).filter(|few| few.takes(rows)).map(|few| few.cut(rows).splits)
        };
        assert_eq!([1, 2, 4, 8].map(|rows| splits((32, 8, 128), rows)), [16, 8, 4, 2].map(Some));
        assert_eq!(splits((32, 4, 128), 1), Some(33));
        assert_eq!(splits((20, 1, 64), 1), Some(66), "two units of one kv head");
        assert_eq!(splits((32, 8, 128), ROWS_MAX + 1), None);
        assert_eq!(splits((32, 4, 128), 8), Some(4));
        assert_eq!(splits((40, 20, 128), 7), None, "more units than blocks");
    }

    #[test]
    fn every_bucket_that_is_taken_fits_beside_a_product() {
        for heads in [(16, 8, 128), (32, 2, 128), (64, 1, 256), (16, 1, 64), (9, 3, 64), (128, 1, 16)] {
            let few = few((9, 0), heads, 16).expect("taken");
            for rows in (1..=64).filter(|&rows| few.takes(rows)) {
                let cut = few.cut(rows);
                assert!(cut.lanes >= cut.splits.min(32) && cut.lanes.is_power_of_two());
                assert!(cut.splits * few.units() * rows as u32 <= few.blocks);
                let letters = rows * (cut.splits_max * few.units() * few.heads() * few.width * 8) as usize;
                assert!(letters <= few.letters_bytes() && few.letters_bytes() <= 32 << 20, "{few:?}");
            }
            assert!(2 * (few.shared_max + SHARED_BYTES_FIXED + SHARED_BYTES_DRIVER) <= 232_448 + 1024);
        }
    }
}
