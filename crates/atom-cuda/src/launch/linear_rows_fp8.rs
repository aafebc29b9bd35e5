//! Products with weights of FP8 for more rows than [`super::linear_fp8`]'s smallest kernel is for and fewer than fill the tensor
//! cores. Compute capability 9.0. See kernels/linear_rows_fp8.cu.

use crate::compile::Program;
use crate::device::{Device, Properties};
use crate::error::CudaError;
use crate::fp8::Fp8Form;
use crate::kernels::Queue;
use crate::launch::linear_fp8::{Fp8Operands, Fp8Product};
use crate::launch::linear_small::SmallOut;
use crate::launch::rows::{RowExtent, bytes, halves};
use crate::memory::Address;
use crate::module::{Launch, TensorMap, Tiling};
use crate::{MapElement, MapSwizzle};

/// How a product is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fp8Cut {
    /// Blocks that share a tile of weights: 1 or 2.
    cluster: usize,
    /// Rows of a block.
    each: usize,
    /// Stages of the ring.
    stages: usize,
    /// Bytes of scales beside the ring.
    scales: usize,
}

impl Fp8Cut {
    /// The cut of a product of up to 128 rows.
    pub(crate) fn new(product: &Fp8Product, properties: &Properties) -> Self {
        let tiles = product.outputs.div_ceil(TILE);
        let cluster = if product.rows > EACH_MAX || tiles < properties.processors as usize { 2 } else { 1 };
        let each = product.rows.div_ceil(cluster).next_power_of_two().max(8);
        let scales = match product.form {
            Fp8Form::Channel => 0,
            Fp8Form::Block => 4 * product.form.groups(product.inputs) * (each + 2),
        };
        let stages = SHARED_BYTES.saturating_sub(ALIGN + scales) / stage_bytes(each);
        assert!(stages >= STAGES_MIN && each <= EACH_MAX, "{product:?}");
        Self { cluster, each, stages, scales }
    }

    /// What must be loaded for it.
    pub(crate) fn program(&self, product: &Fp8Product) -> Program {
        let Self { cluster, each, stages, .. } = *self;
        let out = product.out.define();
        let groups = usize::from(product.form == Fp8Form::Block);
        let defines =
            [("CLUSTER", cluster), ("EACH", each), ("STAGES", stages), ("GROUPS", groups), ("OUT", out)];
        let defines = defines.map(|(name, value)| format!("{name}={value}"));
        Program { source: "linear_rows_fp8", defines: defines.to_vec() }
    }

    fn maps(
        &self,
        device: &Device,
        product: &Fp8Product,
        operands: &Fp8Operands,
    ) -> Result<[TensorMap; 2], CudaError> {
        let map = |address: Address, sizes: &[u64], strides: &[u64], tile: &[u32]| {
            let element = MapElement::CU_TENSOR_MAP_DATA_TYPE_UINT8;
            let swizzle = MapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B;
            TensorMap::new(device, &Tiling { address, element, sizes, strides, tile, swizzle })
        };
        let [inputs, outputs, rows] = [product.inputs, product.outputs, product.rows].map(|size| size as u64);
        let (all, share) = (inputs * outputs, (TILE / self.cluster) as u32);
        let weight = if product.out == SmallOut::GatedSilu {
            // 8 gate rows, then their 8 up rows, and so on.
            let (sizes, strides) = ([inputs, 8, 2, outputs / 16, 1], [inputs, all / 2, 8 * inputs, all]);
            map(operands.weight, &sizes, &strides, &[128, 8, 2, share / 16, 1])?
        } else {
            map(operands.weight, &[inputs, outputs, 1], &[inputs, all], &[128, share, 1])?
        };
        Ok([weight, map(operands.x.codes, &[inputs, rows], &[inputs], &[128, self.each as u32])?])
    }
}

/// Whether the kernel can do a product, whatever its rows: scales must leave room for a ring, and a tile has one scale of
/// blocks for its gate rows and one for its up rows, so none may lie in two blocks.
pub(crate) fn takes(product: &Fp8Product) -> bool {
    let is_cut = product.out == SmallOut::GatedSilu && !(product.outputs / 2).is_multiple_of(TILE / 2);
    product.form == Fp8Form::Channel || (product.inputs <= INPUTS_MAX && !is_cut)
}

/// The product. `extent` is that of x and of `out`.
///
/// # Safety
/// As for [`super::linear_fp8::multiply_few`].
pub(crate) unsafe fn multiply(
    queue: &Queue<'_>,
    product: &Fp8Product,
    operands: &Fp8Operands,
    extent: RowExtent,
) -> Result<(), CudaError> {
    assert!(extent.capacity() <= product.rows, "{product:?} for {extent:?}");
    let device = queue.stream.device();
    let cut = Fp8Cut::new(product, device.properties());
    let [weight, x] = cut.maps(device, product, operands)?;
    let shared = ALIGN + cut.stages * stage_bytes(cut.each) + cut.scales;
    let blocks = cut.cluster * product.outputs.div_ceil(TILE);
    let launch = Launch::new(blocks as u32, 160).shared(shared as u32).overlapping();
    let ([a, b], [c, d]) = (halves(operands.weight_scales), halves(operands.x.scales));
    let strides = [Fp8Form::stride(product.inputs) as u32, product.quantised().stride() as u32];
    let scales = [a, b, c, d, strides[0], strides[1]];
    let words = extent.words();
    let args = [
        (&weight).into(),
        (&x).into(),
        bytes(&scales),
        operands.bias.into(),
        operands.out.into(),
        (product.inputs as u32).into(),
        (product.outputs as u32).into(),
        bytes(&words),
    ];
    // SAFETY: the caller's.
    unsafe { queue.launch_of(&cut.program(product), "linear_rows_fp8", launch, &args) }
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
/// Dynamic shared memory of a block, such that two fit on a multiprocessor.
const SHARED_BYTES: usize = 112 * 1024;
/// Fewer would wait for memory.
const STAGES_MIN: usize = 3;
/// Of products with scales of blocks: their groups of 64 rows leave 4 stages.
const INPUTS_MAX: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cut_holds_all_rows_and_two_blocks_fit() {
        let properties = Properties {
            name: "NVIDIA H200".into(),
            capability: (9, 0),
            processors: 132,
            shared_bytes_max: 232_448,
            l2_bytes: 60 << 20,
        };
        let outs = [SmallOut::Activations, SmallOut::F32, SmallOut::Residual, SmallOut::GatedSilu];
        for (rows, out) in (1..=128).flat_map(|rows| outs.map(|out| (rows, out))) {
            for (form, inputs) in
                [(Fp8Form::Channel, 32 << 10), (Fp8Form::Block, INPUTS_MAX), (Fp8Form::Block, 16)]
            {
                let product = Fp8Product { rows, inputs, outputs: 24576, form, out };
                assert!(takes(&product));
                let cut = Fp8Cut::new(&product, &properties);
                assert!(rows <= cut.cluster * cut.each, "{product:?} {cut:?}");
                let block = ALIGN + cut.stages * stage_bytes(cut.each) + cut.scales + SHARED_BESIDE;
                assert!(2 * block <= properties.shared_bytes_max as usize + SHARED_BESIDE, "{cut:?}");
                // Outputs pass through the ring.
                assert!(cut.each * (TILE + 4) * 4 <= cut.stages * stage_bytes(cut.each), "{cut:?}");
            }
        }
    }

    #[test]
    fn gate_and_up_rows_of_a_tile_lie_in_one_block_of_scales_each() {
        let product = |outputs, form, out| Fp8Product { rows: 16, inputs: 256, outputs, form, out };
        for (outputs, form, out, expected) in [
            (4976, Fp8Form::Block, SmallOut::GatedSilu, false),
            (4992, Fp8Form::Block, SmallOut::GatedSilu, true),
            (4976, Fp8Form::Channel, SmallOut::GatedSilu, true),
            (4976, Fp8Form::Block, SmallOut::Activations, true),
        ] {
            assert_eq!(takes(&product(outputs, form, out)), expected, "{outputs} {form:?} {out:?}");
        }
        let wide = Fp8Product { inputs: INPUTS_MAX + 16, ..product(512, Fp8Form::Block, SmallOut::F32) };
        assert!(!takes(&wide));
    }

    /// Barriers, and what the driver takes for each block.
    const SHARED_BESIDE: usize = 1024 + 512;
}
