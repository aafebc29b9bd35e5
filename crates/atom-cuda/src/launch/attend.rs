//! Paged attention: tiles for spans of many rows, pieces for spans of few, and a plain kernel for the rest.

use crate::compile::Program;
use crate::device::{Device, Properties};
use crate::element::{Element, KvElement};
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::rope::CacheLayer;
use crate::memory::Address;
use crate::module::{Launch, TensorMap, Tiling};
use crate::work::WorkSpec;
use cudarc::driver::sys::CUtensorMapDataType as MapElement;
use cudarc::driver::sys::CUtensorMapSwizzle as MapSwizzle;

/// Heads of a layer's attention on this rank, and what a row sees.
#[derive(Clone, Copy, Debug)]
pub struct AttendHeads {
    /// Query heads.
    pub q: usize,
    /// Kv heads; divides `q`.
    pub kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Factor on scores.
    pub scale: f32,
    /// Positions that a row sees, its own included; 0 if all up to its own.
    pub window: usize,
    /// `[q]` f32: a score of each head that takes part in the softmax and has no value. NULL if there are none.
    pub sinks: Address,
}

/// A step's rows, u32 each but the header.
#[derive(Clone, Copy, Debug)]
pub struct AttendStep {
    /// See `Header` in the prelude.
    pub header: Address,
    /// `[rows]`
    pub positions: Address,
    /// `[rows]`
    pub row_slots: Address,
    /// `[slots, table_stride]`
    pub tables: Address,
    /// Pages of the longest sequence.
    pub table_stride: usize,
    /// Rows of the bucket.
    pub rows: usize,
    /// `[rows, (q + 2 kv) * head_dim]`
    pub qkv: Address,
    /// `[rows, q * head_dim]`
    pub out: Address,
}

/// The kernels that a GPU has for some heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendKernels {
    /// `WIDTH` of attend_tiles.cu.
    tiles: Option<u32>,
    /// attend_split.cu.
    split: Option<Split>,
    cache: KvElement,
    group: u32,
    kv: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Split {
    width: u32,
    cache: KvElement,
    /// `SMALL_SHARED`
    is_small: bool,
    /// Blocks that are resident at once.
    blocks: u32,
}

/// Room that the kernels for lists keep between and during launches. Layers share it, for they run one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendScratch {
    /// First byte, a multiple of 16. `AttendKernels::scratch_bytes` of it.
    pub start: Address,
    /// Slots for sums of pieces: of the work list's `WorkSpec`.
    pub slots: u32,
}

/// Tiles of one layer's cache and one buffer of queries, for the copy engine.
pub struct TileMaps {
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
    granule: u32,
}

impl AttendKernels {
    /// For activations of `element` and a cache of `cache`.
    pub fn new(properties: &Properties, element: Element, cache: KvElement, heads: &AttendHeads) -> Self {
        let group = heads.q / heads.kv;
        assert!(group * heads.kv == heads.q && group > 0, "{heads:?}");
        // Sixteen bytes of a key or value go together.
        let together = 16 / cache.bytes(element);
        let is_fast = element == Element::BF16 && heads.head_dim.is_multiple_of(together);
        let width = |widths: &[u32]| {
            widths.iter().copied().find(|&width| is_fast && heads.head_dim <= width as usize)
        };
        let split = |width| {
            let mut split =
                Split { width, cache, is_small: properties.shared_bytes_max < SHARED_BYTES_LARGE, blocks: 0 };
            // A multiprocessor has what a block may have, and a little more that the driver takes from each.
            let fit = properties.shared_bytes_max / (split.shared_bytes() + SHARED_BYTES_DRIVER);
            split.blocks = properties.processors * fit.clamp(1, 2);
            split
        };
        Self {
            tiles: width(&[64, 96, 128, 256])
                .filter(|_| properties.capability == (9, 0) && group <= TILE_HEADS as usize),
            split: width(&[64, 128, 256]).map(split),
            cache,
            group: group as u32,
            kv: heads.kv as u32,
        }
    }

    /// Whether spans of many rows go by tiles.
    pub fn has_tiles(&self) -> bool {
        self.tiles.is_some()
    }

    /// What is to be loaded.
    pub fn programs(&self) -> Vec<Program> {
        let mut programs = vec![Program::plain("attend_simple")];
        programs.extend(self.tiles.map(|width| tile_program(width, self.cache)));
        programs.extend(self.split.map(Split::program));
        programs
    }

    /// What work lists are made for; `None` if the plain kernel does everything. `one_order` sends all rows through
    /// tiles, whose sums depend on a row's position only; without a kernel for tiles, all go by pieces, which keep
    /// that too.
    pub fn work(&self, window: usize, one_order: bool) -> Option<WorkSpec> {
        let split = self.split?;
        let blocks = split.blocks;
        let units = self.kv * self.group.div_ceil(16);
        let piece_rows_max = match self.tiles {
            None => u32::MAX,
            Some(_) if one_order => 0,
            // What one item holds costs no more than one row.
            Some(_) => PIECE_ROWS_MAX.max(16 / self.group),
        };
        let slots = SLOTS_MIN + SLOT_ROUNDS * blocks.div_ceil(units);
        Some(WorkSpec {
            group: self.group,
            kv_heads: self.kv,
            window: window as u32,
            piece_rows_max,
            blocks,
            slots,
        })
    }

    /// Bytes of [`AttendScratch`] for these slots. All of them are 0 before the first launch.
    pub fn scratch_bytes(&self, slots: u32) -> usize {
        self.scratch(AttendScratch { start: Address(0), slots }).map_or(0, |places| places.end.0 as usize)
    }

    fn scratch(&self, scratch: AttendScratch) -> Option<Places> {
        let rows = scratch.slots as usize * (self.kv * self.group.div_ceil(16)) as usize;
        let counters = scratch.start;
        let arrivals = counters.plus(COUNTER_BYTES);
        let stats = arrivals.plus((rows * size_of::<u32>()).next_multiple_of(16));
        let sums = stats.plus(rows * 16 * 2 * size_of::<f32>());
        let end = sums.plus(rows * 16 * self.split?.width as usize * size_of::<f32>());
        Some(Places { counters, arrivals, stats, sums, end })
    }
}

struct Places {
    /// Two of the kernel for tiles, two of that for pieces.
    counters: Address,
    arrivals: Address,
    stats: Address,
    sums: Address,
    end: Address,
}

impl Split {
    fn program(self) -> Program {
        let width = format!("WIDTH={}", self.width);
        let small: &[&str] = if self.is_small { &["SMALL_SHARED"] } else { &[] };
        Program::with("attend_split", &[&[width.as_str()], small, cache_defines(self.cache)].concat())
    }

    /// As in the kernel, like the next two.
    fn warps(self) -> u32 {
        if self.is_small && self.width > 128 { 2 } else { 4 }
    }

    fn stages(self) -> u32 {
        match (self.width > 64, self.is_small) {
            (true, false) => 3,
            (true, true) => 2,
            (false, false) => 6,
            (false, true) => 4,
        }
    }

    fn shared_bytes(self) -> u32 {
        self.width * (self.warps() * self.stages() * 64 + 32) + 640
    }
}

fn tile_program(width: u32, cache: KvElement) -> Program {
    let width = format!("WIDTH={width}");
    Program::with("attend_tiles", &[&[width.as_str()], cache_defines(cache)].concat())
}

fn cache_defines(cache: KvElement) -> &'static [&'static str] {
    match cache {
        KvElement::Own => &[],
        KvElement::E4M3 => &["E4M3"],
    }
}

/// Positions that a tile reads at a time.
fn tile_keys(width: u32) -> u32 {
    if width > 128 { 64 } else { 128 }
}

/// As in the kernel.
fn tile_shared_bytes(width: u32, cache: KvElement) -> u32 {
    let (stages, incoming) = match (cache, width) {
        (KvElement::Own, ..=64) => (4, 0),
        (KvElement::Own, 65..=128) => (3, 0),
        (KvElement::Own, _) => (2, 0),
        (KvElement::E4M3, ..=64) => (3, 2),
        (KvElement::E4M3, 65..=128) => (2, 2),
        (KvElement::E4M3, _) => (2, 1),
    };
    1280 + width.next_multiple_of(64) * (256 + (4 * stages + 2 * incoming) * tile_keys(width))
}

/// Every row of the step by the plain kernel.
///
/// # Safety
/// The step's arrays are as [`AttendHeads`] and [`AttendStep`] say, of `element`, and the cache as it says; positions up to each
/// row's own are in the cache and in the tables.
pub unsafe fn simple(
    queue: &Queue<'_>,
    element: Element,
    heads: &AttendHeads,
    step: &AttendStep,
    cache: &CacheLayer,
) -> Result<(), CudaError> {
    assert!(heads.head_dim <= SIMPLE_HEAD_DIM_MAX, "{heads:?}");
    let launch = Launch::new(step.rows as u32, 128).by(heads.q as u32, 1);
    let args = [
        step.header.into(),
        step.positions.into(),
        step.row_slots.into(),
        step.tables.into(),
        (step.table_stride as u32).into(),
        step.qkv.into(),
        (heads.row_width() as u32).into(),
        cache.keys.into(),
        cache.values.into(),
        step.out.into(),
        heads.sinks.into(),
        (heads.q as u32).into(),
        (heads.kv as u32).into(),
        (heads.head_dim as u32).into(),
        (cache.page_size as u32).into(),
        (heads.window as u32).into(),
        heads.scale.into(),
    ];
    // SAFETY: the caller's.
    unsafe {
        queue.launch(
            "attend_simple",
            &format!("attend_simple_{}", cache.element.suffix(element)),
            launch,
            &args,
        )
    }
}

/// The rows in the step's tiles.
///
/// # Safety
/// As [`simple`]; `kernels` has tiles, `list` is the list of tiles, `maps` was made of `step` and the layer's cache,
/// `scratch` was 0 before its first use and is used by one launch at a time.
pub unsafe fn tiles(
    queue: &Queue<'_>,
    kernels: &AttendKernels,
    heads: &AttendHeads,
    step: &AttendStep,
    (cache, maps): (&CacheLayer, &TileMaps),
    list: Address,
    scratch: AttendScratch,
) -> Result<(), CudaError> {
    let none = || CudaError::Unsupported(format!("tiles of {heads:?} on this GPU"));
    let (width, places) = kernels.tiles.zip(kernels.scratch(scratch)).ok_or_else(none)?;
    assert_eq!(cache.element, kernels.cache, "{heads:?}");
    let shared = tile_shared_bytes(width, kernels.cache);
    let launch = Launch::new(queue.processors(), 384).shared(shared).overlapping();
    let args = [
        (&maps.q).into(),
        (&maps.k).into(),
        (&maps.v).into(),
        step.header.into(),
        list.into(),
        step.tables.into(),
        (step.table_stride as u32).into(),
        step.out.into(),
        heads.sinks.into(),
        places.counters.into(),
        (heads.q as u32).into(),
        (heads.kv as u32).into(),
        (heads.head_dim as u32).into(),
        (cache.page_size as u32).into(),
        (heads.window as u32).into(),
        maps.granule.into(),
        heads.scale.into(),
    ];
    // SAFETY: the caller's.
    unsafe { queue.launch_of(&tile_program(width, kernels.cache), "attend_tiles_bf16", launch, &args) }
}

/// The rows in the step's pieces.
///
/// # Safety
/// As [`tiles`], with the list of pieces, which was made for no more slots than `scratch` has.
pub unsafe fn split(
    queue: &Queue<'_>,
    kernels: &AttendKernels,
    heads: &AttendHeads,
    step: &AttendStep,
    cache: &CacheLayer,
    list: Address,
    scratch: AttendScratch,
) -> Result<(), CudaError> {
    let none = || CudaError::Unsupported(format!("pieces of {heads:?} on this GPU"));
    let (split, places) = kernels.split.zip(kernels.scratch(scratch)).ok_or_else(none)?;
    assert_eq!(cache.element, kernels.cache, "{heads:?}");
    let launch = Launch::new(split.blocks, 32 * split.warps()).shared(split.shared_bytes()).overlapping();
    let args = [
        step.header.into(),
        list.into(),
        step.tables.into(),
        (step.table_stride as u32).into(),
        step.qkv.into(),
        (heads.row_width() as u32).into(),
        cache.keys.into(),
        cache.values.into(),
        step.out.into(),
        heads.sinks.into(),
        places.sums.into(),
        places.stats.into(),
        places.arrivals.into(),
        places.counters.plus(COUNTER_BYTES / 2).into(),
        (heads.q as u32).into(),
        (heads.kv as u32).into(),
        (heads.head_dim as u32).into(),
        (cache.page_size as u32).into(),
        (heads.window as u32).into(),
        heads.scale.into(),
    ];
    // SAFETY: the caller's.
    unsafe { queue.launch_of(&split.program(), "attend_split_bf16", launch, &args) }
}

impl AttendHeads {
    /// Elements of a row of q, k and v.
    fn row_width(&self) -> usize {
        (self.q + 2 * self.kv) * self.head_dim
    }
}

impl TileMaps {
    /// For a cache of `pages` pages a layer.
    pub fn new(
        device: &Device,
        kernels: &AttendKernels,
        heads: &AttendHeads,
        step: &AttendStep,
        (cache, pages): (&CacheLayer, usize),
    ) -> Result<Self, CudaError> {
        let width =
            kernels.tiles.ok_or_else(|| CudaError::Unsupported(format!("tiles of {heads:?} on this GPU")))?;
        // Tiles are read in parts that lie in one page each.
        let granule = 1 << (cache.page_size as u32).trailing_zeros().min(tile_keys(width).trailing_zeros());
        let (dim, group) = (heads.head_dim as u64, kernels.group);
        let map = |address, element, sizes: &[u64], strides: &[u64], tile: &[u32], swizzle| {
            TensorMap::new(device, &Tiling { address, element, sizes, strides, tile, swizzle })
        };
        let (bf16, swizzled) =
            (MapElement::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, MapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B);
        let queries = [dim, (heads.q + 2 * heads.kv) as u64, step.rows as u64];
        let strides = [2 * dim, 2 * heads.row_width() as u64];
        let q = map(step.qkv, bf16, &queries, &strides, &[64, group, TILE_HEADS / group], swizzled)?;
        let positions = [dim, (pages * heads.kv * cache.page_size) as u64];
        let cached = |address| match cache.element {
            KvElement::Own => map(address, bf16, &positions, &[2 * dim], &[64, granule], swizzled),
            KvElement::E4M3 => map(
                address,
                MapElement::CU_TENSOR_MAP_DATA_TYPE_UINT8,
                &positions,
                &[dim],
                &[64, granule],
                MapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            ),
        };
        let (k, v) = (cached(cache.keys)?, cached(cache.values)?);
        Ok(Self { q, k, v, granule })
    }
}

/// Rows of a tile's products.
const TILE_HEADS: u32 = 128;

/// Shared memory of a block from which on a GPU counts as large; those of 99 and 163 KiB do not.
const SHARED_BYTES_LARGE: u32 = 210 << 10;

/// Shared memory of a block that the driver takes for itself.
const SHARED_BYTES_DRIVER: u32 = 1 << 10;

/// Spans of up to this many rows go by pieces: a decoding row, and rows to verify. Measured on an H200 (8 kv heads of
/// 128, groups of 4): one sequence at 8192 positions takes pieces 18 us for 1 row, 31 for 4 and 59 for 8, and tiles 105;
/// 64 sequences at 1024 positions 82, 91 and 147, and tiles 75.
const PIECE_ROWS_MAX: u32 = 4;

/// Slots for sums: enough for one very long sequence, and for a round or more of all blocks.
const SLOTS_MIN: u32 = 256;
const SLOT_ROUNDS: u32 = 4;

/// Counters of both kernels, apart.
const COUNTER_BYTES: usize = 256;

/// See attend_simple.cu.
const SIMPLE_HEAD_DIM_MAX: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    fn kernels(capability: (i32, i32), shared: u32, element: Element, head_dim: usize) -> AttendKernels {
        kernels_of(capability, shared, (element, KvElement::Own), head_dim)
    }

    fn kernels_of(
        capability: (i32, i32),
        shared: u32,
        (element, cache): (Element, KvElement),
        head_dim: usize,
    ) -> AttendKernels {
        let properties = Properties {
            name: String::new(),
            capability,
            processors: 132,
            shared_bytes_max: shared,
            l2_bytes: 0,
        };
        let heads = AttendHeads { q: 32, kv: 8, head_dim, scale: 1.0, window: 0, sinks: Address::NULL };
        AttendKernels::new(&properties, element, cache, &heads)
    }

    #[test]
    fn kernels_fit_the_gpu_and_the_heads() {
        let programs = |kernels: AttendKernels| {
            kernels.programs().iter().skip(1).map(ToString::to_string).collect::<Vec<_>>()
        };
        let h200 = |element, head_dim| programs(kernels((9, 0), 232_448, element, head_dim));
        assert_eq!(h200(Element::BF16, 128), ["attend_tiles -DWIDTH=128", "attend_split -DWIDTH=128"]);
        assert_eq!(h200(Element::BF16, 80), ["attend_tiles -DWIDTH=96", "attend_split -DWIDTH=128"]);
        assert!(h200(Element::F32, 128).is_empty() && h200(Element::BF16, 264).is_empty());
        assert!(h200(Element::BF16, 100).is_empty());
        let ada = programs(kernels((8, 9), 101_376, Element::BF16, 64));
        assert_eq!(ada, ["attend_split -DWIDTH=64 -DSMALL_SHARED"]);
        let codes = |capability, shared, element, head_dim| {
            programs(kernels_of(capability, shared, (element, KvElement::E4M3), head_dim))
        };
        assert_eq!(
            codes((9, 0), 232_448, Element::BF16, 80),
            ["attend_tiles -DWIDTH=96 -DE4M3", "attend_split -DWIDTH=128 -DE4M3"]
        );
        assert_eq!(
            codes((8, 9), 101_376, Element::BF16, 64),
            ["attend_split -DWIDTH=64 -DSMALL_SHARED -DE4M3"]
        );
        assert!(codes((9, 0), 232_448, Element::BF16, 72).is_empty(), "72 bytes are no sixteens");
        assert!(codes((9, 0), 232_448, Element::F32, 128).is_empty());
    }

    #[test]
    fn shared_memory_fits() {
        const SHARED_BYTES_H200: u32 = 227 << 10;
        for cache in [KvElement::Own, KvElement::E4M3] {
            assert!([64, 96, 128, 256].iter().all(|&w| tile_shared_bytes(w, cache) <= SHARED_BYTES_H200));
            for width in [64, 128, 256] {
                let split = |is_small| Split { width, cache, is_small, blocks: 0 }.shared_bytes();
                assert!(split(false) <= SHARED_BYTES_H200 && split(true) <= 99 << 10);
            }
        }
    }

    #[test]
    fn all_rows_go_one_way_if_bits_must_not_depend_on_chunks() {
        let h200 = kernels((9, 0), 232_448, Element::BF16, 128);
        assert_eq!(h200.work(0, true).map(|work| work.piece_rows_max), Some(0));
        assert_eq!(h200.work(0, false).map(|work| work.piece_rows_max), Some(PIECE_ROWS_MAX));
        assert_eq!(h200.work(0, false).map(|work| work.blocks), Some(264));
        assert_eq!(
            kernels((9, 0), 232_448, Element::BF16, 256).work(0, false).map(|work| work.blocks),
            Some(132)
        );
        let a100 = kernels((8, 0), 166_912, Element::BF16, 128);
        assert_eq!(a100.work(0, false).map(|work| work.piece_rows_max), Some(u32::MAX));
        assert_eq!(kernels((9, 0), 232_448, Element::F32, 64).work(0, false), None);
    }
}
