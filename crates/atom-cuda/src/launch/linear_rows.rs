//! Products for fewer rows than fill the tensor cores, of large matrices or more rows than [`super::linear_small`] is for;
//! with what stands behind them fused in, and norms between them shared. Compute capability 9.0.

use crate::compile::Program;
use crate::device::{Device, Properties};
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::linear_small::{RowsNorms, SmallOperands, SmallOut, SmallProduct};
use crate::launch::rows::{RowExtent, bytes, halves};
use crate::memory::Address;
use crate::module::{Launch, TensorMap, Tiling};
use crate::order::SumOrder;
use crate::{MapElement, MapSwizzle};

/// How a product is cut: see kernels/linear_rows.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowsCut {
    /// Blocks that share a tile of weights and have a part of the rows each: 1 or 2.
    pub cluster: usize,
    /// Parts of the inputs, each summed by a block of its own: 1, or 2 in a cluster of 1.
    pub parts: usize,
    /// Rows of a block, a multiple of 8 up to 64.
    pub each: usize,
    /// Stages of the ring.
    pub stages: usize,
}

/// More rows than this are for cuBLASLt.
pub const ROWS_MAX: usize = 128;

impl RowsCut {
    /// The cut of a product; `None` if the kernel can't do it on such a GPU.
    pub fn new(product: &SmallProduct, order: SumOrder, properties: &Properties) -> Option<Self> {
        let whole = if product.out == SmallOut::GatedSilu { 16 } else { 1 };
        let takes = properties.capability == (9, 0)
            && (1..=ROWS_MAX).contains(&product.rows)
            && product.inputs > 0
            && product.inputs.is_multiple_of(8)
            && product.outputs.is_multiple_of(whole)
            && !product.norms;
        let (tiles, processors) = (product.outputs.div_ceil(TILE), properties.processors as usize);
        // Two blocks to a tile pay where half of the multiprocessors would be idle: each has half of the inputs, or, where
        // sums have one order, half of the rows, if it has some to share. (H200, down of Qwen3-8B in a step of one row: 29.8
        // us by one block to a tile, 25.0 by halves of the inputs.)
        let leaves_half_idle = 2 * tiles <= processors && product.inputs > PAIR_INPUTS;
        let fits = product.rows <= EACH_MAX;
        let has_parts =
            order == SumOrder::Fastest && leaves_half_idle && fits && product.out != SmallOut::GatedSilu;
        let is_pair = !fits || (product.rows > PAIR_ROWS && leaves_half_idle && !has_parts);
        let (cluster, parts) = (if is_pair { 2 } else { 1 }, if has_parts { 2 } else { 1 });
        let each = product.rows.div_ceil(cluster).next_power_of_two().max(8);
        // A block that has a multiprocessor for itself wants all of its memory; where tiles outnumber multiprocessors, the
        // next ones start while others end.
        let blocks = if tiles * cluster * parts <= processors { 1 } else { 3 };
        let cut = Self { parts, ..Self::with(cluster, each, blocks) };
        let steps = product.inputs.div_ceil(64 * parts);
        takes.then_some(Self { stages: cut.stages.min(steps.max(STAGES_MIN)), ..cut })
    }

    /// Without parts, with as many stages as let so many blocks fit on a multiprocessor.
    pub fn with(cluster: usize, each: usize, blocks: usize) -> Self {
        Self { cluster, parts: 1, each, stages: (SHARED_BYTES / blocks - ALIGN - BESIDE) / stage_bytes(each) }
    }

    /// What must be loaded for it.
    pub fn program(&self, out: SmallOut) -> Program {
        let Self { cluster, parts, each, stages } = *self;
        let out = out.define();
        let defines =
            [("CLUSTER", cluster), ("PARTS", parts), ("EACH", each), ("STAGES", stages), ("OUT", out)];
        let defines = defines.map(|(name, value)| format!("{name}={value}"));
        Program { source: "linear_rows", defines: defines.to_vec() }
    }

    fn maps(
        &self,
        device: &Device,
        product: &SmallProduct,
        operands: &SmallOperands,
    ) -> Result<[TensorMap; 2], CudaError> {
        let map = |address: Address, sizes: &[u64], strides: &[u64], tile: &[u32]| {
            let element = MapElement::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
            let swizzle = MapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B;
            TensorMap::new(device, &Tiling { address, element, sizes, strides, tile, swizzle })
        };
        let [inputs, outputs, rows] = [product.inputs, product.outputs, product.rows].map(|size| size as u64);
        let (row, all, share) = (2 * inputs, 2 * inputs * outputs, (TILE / self.cluster) as u32);
        let weight = if product.out == SmallOut::GatedSilu {
            // 8 gate rows, then their 8 up rows, and so on.
            let (sizes, strides) = ([inputs, 8, 2, outputs / 16, 1], [row, all / 2, 8 * row, all]);
            map(operands.weight, &sizes, &strides, &[64, 8, 2, share / 16, 1])?
        } else {
            map(operands.weight, &[inputs, outputs, 1], &[row, all], &[64, share, 1])?
        };
        Ok([weight, map(operands.x, &[inputs, rows], &[row], &[64, self.each as u32])?])
    }
}

/// The product. `extent` is that of x and of `out`, with [`SmallProduct::rows`] rows.
///
/// # Safety
/// Operands have the shapes and types that the product says, and start on 16 bytes.
pub unsafe fn multiply(
    queue: &Queue<'_>,
    product: &SmallProduct,
    cut: RowsCut,
    operands: &SmallOperands,
    extent: RowExtent,
) -> Result<(), CudaError> {
    assert!(
        extent.capacity() <= product.rows && product.rows <= cut.cluster * cut.each,
        "{product:?}, {cut:?}"
    );
    assert!(!product.norms, "{product:?}");
    let [weight, x] = cut.maps(queue.stream.device(), product, operands)?;
    let shared = ALIGN + cut.stages * stage_bytes(cut.each);
    let blocks = cut.cluster * cut.parts * product.outputs.div_ceil(TILE);
    let launch = Launch::new(blocks as u32, 160).shared(shared as u32).overlapping();
    let words = extent.words();
    let RowsNorms { squares: (squares, eps), next_weight, next, next_squares } = operands.norms;
    assert!(
        next == Address::NULL || product.out == SmallOut::Residual,
        "{product:?} has no residual to norm"
    );
    let are_apart = next == Address::NULL || squares != next_squares;
    assert!(are_apart, "{product:?}: blocks would overwrite sums of squares that others still read");
    let mut norms = [0; 10];
    for (words, address) in norms.chunks_exact_mut(2).zip([squares, next_weight, next, next_squares]) {
        words.copy_from_slice(&halves(address));
    }
    norms[8..].copy_from_slice(&[product.inputs.div_ceil(SQUARES_OF) as u32, eps.to_bits()]);
    let args = [
        (&weight).into(),
        (&x).into(),
        operands.bias.into(),
        operands.out.into(),
        (product.inputs as u32).into(),
        (product.outputs as u32).into(),
        bytes(&words),
        bytes(&norms),
    ];
    // SAFETY: the caller's.
    unsafe { queue.launch_of(&cut.program(product.out), "linear_rows", launch, &args) }
}

fn stage_bytes(each: usize) -> usize {
    128 * (TILE + each)
}

/// Bytes of the sums of squares of rows of `width` elements.
pub fn squares_bytes(rows: usize, width: usize) -> usize {
    rows * width.div_ceil(SQUARES_OF) * size_of::<f32>()
}

/// Columns of a sum of squares.
const SQUARES_OF: usize = 64;
/// Weight rows of a tile.
const TILE: usize = 64;
/// Rows of a block at the most.
const EACH_MAX: usize = 64;
/// Stages start on as many bytes.
const ALIGN: usize = 1024;
/// Shared memory of a multiprocessor of compute capability 9.0.
const SHARED_BYTES: usize = 228 * 1024;
/// Barriers, and what the driver takes for each block.
const BESIDE: usize = 1024 + 512;
/// Outputs of a block pass through two stages at the least.
const STAGES_MIN: usize = 2;
/// Up to so many rows a block alone is as fast as a pair. (H200, 4096 x 4096: 16 rows 11.2 us alone and 11.3 in pairs, 32 rows
/// 12.3 and 11.7; 6144 x 4096, 32 rows: 15.1 and 15.6.)
const PAIR_ROWS: usize = 16;
/// And with so few inputs. (4096 x 1024, 32 rows: 4.4 us alone, 4.6 to 5.2 in pairs.)
const PAIR_INPUTS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cut_holds_all_rows_and_its_blocks_fit() {
        let properties = Properties {
            name: "NVIDIA H200".into(),
            capability: (9, 0),
            processors: 132,
            shared_bytes_max: 232_448,
            l2_bytes: 60 << 20,
        };
        let outs = [SmallOut::Activations, SmallOut::F32, SmallOut::Residual, SmallOut::GatedSilu];
        let orders = [SumOrder::Fastest, SumOrder::Fixed];
        let cases = (1..=ROWS_MAX).flat_map(|rows| outs.map(|out| (rows, out)));
        for ((rows, out), order) in cases.flat_map(|case| orders.map(|order| (case, order))) {
            for outputs in [16, 4096, 6144, 24576, 151_936] {
                let product = SmallProduct { rows, inputs: 4096, outputs, norms: false, out };
                let cut = RowsCut::new(&product, order, &properties).expect("possible");
                assert!(rows <= cut.cluster * cut.each && cut.each <= EACH_MAX, "{product:?} {cut:?}");
                let is_whole = cut.cluster == 1 && order == SumOrder::Fastest && out != SmallOut::GatedSilu;
                assert!(cut.parts == 1 || is_whole, "{product:?} {cut:?} {order:?}");
                let blocks = if outputs > 64 * 132 { 3 } else { 1 };
                let block = ALIGN + cut.stages * stage_bytes(cut.each) + BESIDE;
                assert!(blocks * block <= SHARED_BYTES, "{product:?} {cut:?}");
                assert!(block <= properties.shared_bytes_max as usize + 1024, "{product:?} {cut:?}");
                // Outputs pass through the ring.
                assert!(cut.each * (TILE + 4) * 4 <= cut.stages * stage_bytes(cut.each), "{cut:?}");
            }
            let norms = SmallProduct { rows, inputs: 4096, outputs: 4096, norms: true, out };
            assert_eq!(RowsCut::new(&norms, order, &properties), None);
        }
        let few = |order, outputs| {
            let product = SmallProduct { rows: 32, inputs: 4096, outputs, norms: false, out: SmallOut::F32 };
            let cut = RowsCut::new(&product, order, &properties).expect("possible");
            (cut.cluster, cut.parts)
        };
        let outputs = [1024, 4096, 6144, 24576];
        let found = outputs.map(|outputs| few(SumOrder::Fixed, outputs));
        assert_eq!(found, [(2, 1), (2, 1), (1, 1), (1, 1)]);
        let found = outputs.map(|outputs| few(SumOrder::Fastest, outputs));
        assert_eq!(found, [(1, 2), (1, 2), (1, 1), (1, 1)]);
    }
}
