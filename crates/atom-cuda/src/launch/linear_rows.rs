//! Products for more rows than [`super::linear_small`] is for and fewer than fill the tensor cores; with what stands behind
//! them fused in. Compute capability 9.0.

use crate::compile::Program;
use crate::device::{Device, Properties};
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::linear_small::{SmallOperands, SmallOut, SmallProduct};
use crate::launch::rows::{RowExtent, bytes};
use crate::memory::Address;
use crate::module::{Launch, TensorMap, Tiling};
use crate::{MapElement, MapSwizzle};

/// How a product is cut: see kernels/linear_rows.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowsCut {
    /// Blocks that share a tile of weights: 1 or 2.
    pub cluster: usize,
    /// Rows of a block, a multiple of 8 up to 64.
    pub each: usize,
    /// Stages of the ring.
    pub stages: usize,
}

/// More rows than this are for cuBLASLt.
pub const ROWS_MAX: usize = 128;

impl RowsCut {
    /// The cut of a product; `None` if the kernel can't do it on such a GPU.
    pub fn new(product: &SmallProduct, properties: &Properties) -> Option<Self> {
        let whole = if product.out == SmallOut::GatedSilu { 16 } else { 1 };
        let takes = properties.capability == (9, 0)
            && (1..=ROWS_MAX).contains(&product.rows)
            && product.inputs > 0
            && product.inputs.is_multiple_of(8)
            && product.outputs.is_multiple_of(whole)
            && !product.norms;
        let (tiles, processors) = (product.outputs.div_ceil(TILE), properties.processors as usize);
        // Pairs of blocks pay where half of the multiprocessors would be idle and a block has rows to share.
        let leaves_half_idle = 2 * tiles <= processors && product.inputs > PAIR_INPUTS;
        let is_pair = product.rows > EACH_MAX || (product.rows > PAIR_ROWS && leaves_half_idle);
        let cluster = if is_pair { 2 } else { 1 };
        let each = product.rows.div_ceil(cluster).next_power_of_two().max(8);
        // A block that has a multiprocessor for itself wants all of its memory; where tiles outnumber multiprocessors, the
        // next ones start while others end.
        let blocks = if tiles * cluster <= processors { 1 } else { 3 };
        let cut = Self::with(cluster, each, blocks);
        let steps = product.inputs.div_ceil(64);
        takes.then_some(Self { stages: cut.stages.min(steps.max(STAGES_MIN)), ..cut })
    }

    /// With as many stages as let so many blocks fit on a multiprocessor.
    pub fn with(cluster: usize, each: usize, blocks: usize) -> Self {
        Self { cluster, each, stages: (SHARED_BYTES / blocks - ALIGN - BESIDE) / stage_bytes(each) }
    }

    /// What must be loaded for it.
    pub fn program(&self, out: SmallOut) -> Program {
        let Self { cluster, each, stages } = *self;
        let out = out.define();
        let defines = [("CLUSTER", cluster), ("EACH", each), ("STAGES", stages), ("OUT", out)];
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
    let blocks = cut.cluster * product.outputs.div_ceil(TILE);
    let launch = Launch::new(blocks as u32, 160).shared(shared as u32).overlapping();
    let words = extent.words();
    let args = [
        (&weight).into(),
        (&x).into(),
        operands.bias.into(),
        operands.out.into(),
        (product.inputs as u32).into(),
        (product.outputs as u32).into(),
        bytes(&words),
    ];
    // SAFETY: the caller's.
    unsafe { queue.launch_of(&cut.program(product.out), "linear_rows", launch, &args) }
}

fn stage_bytes(each: usize) -> usize {
    128 * (TILE + each)
}

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
        for (rows, out) in (1..=ROWS_MAX).flat_map(|rows| outs.map(|out| (rows, out))) {
            for outputs in [16, 4096, 6144, 24576, 151_936] {
                let product = SmallProduct { rows, inputs: 4096, outputs, norms: false, out };
                let cut = RowsCut::new(&product, &properties).expect("possible");
                assert!(rows <= cut.cluster * cut.each && cut.each <= EACH_MAX, "{product:?} {cut:?}");
                let blocks = if outputs > 64 * 132 { 3 } else { 1 };
                let block = ALIGN + cut.stages * stage_bytes(cut.each) + BESIDE;
                assert!(blocks * block <= SHARED_BYTES, "{product:?} {cut:?}");
                assert!(block <= properties.shared_bytes_max as usize + 1024, "{product:?} {cut:?}");
                // Outputs pass through the ring.
                assert!(cut.each * (TILE + 4) * 4 <= cut.stages * stage_bytes(cut.each), "{cut:?}");
            }
            let norms = SmallProduct { rows, inputs: 4096, outputs: 4096, norms: true, out };
            assert_eq!(RowsCut::new(&norms, &properties), None);
        }
        let few = |outputs| {
            let product = SmallProduct { rows: 32, inputs: 4096, outputs, norms: false, out: SmallOut::F32 };
            RowsCut::new(&product, &properties).expect("possible").cluster
        };
        assert_eq!([1024, 4096, 6144, 24576].map(few), [2, 2, 1, 1]);
    }
}
