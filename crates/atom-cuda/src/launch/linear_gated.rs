//! Gate and up with their activation for many rows, where arithmetic is the time: what stands between two large products
//! never goes through memory. Compute capability 9.0.

use crate::compile::Program;
use crate::device::{Device, Properties};
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::linear_small::{SmallOperands, SmallOut, SmallProduct};
use crate::launch::rows::{RowExtent, bytes};
use crate::memory::Address;
use crate::module::{Launch, TensorMap, Tiling};
use crate::{MapElement, MapSwizzle};

/// Whether the kernel can do a product on such a GPU: see kernels/linear_gated.cu.
pub fn is_possible(product: &SmallProduct, properties: &Properties) -> bool {
    properties.capability == (9, 0)
        && product.out == SmallOut::GatedSilu
        && product.rows > 0
        && product.inputs >= INPUTS_MIN
        && product.inputs.is_multiple_of(8)
        && product.outputs > 0
        && product.outputs.is_multiple_of(16)
        && !product.norms
}

/// What must be loaded for it.
pub fn program() -> Program {
    Program::plain("linear_gated")
}

/// The product. `extent` is that of x and of `out`, with [`SmallProduct::rows`] rows at the most.
///
/// # Safety
/// Operands have the shapes and types that the product says, and start on 16 bytes.
pub unsafe fn multiply(
    queue: &Queue<'_>,
    product: &SmallProduct,
    operands: &SmallOperands,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let properties = queue.stream.device().properties();
    assert!(is_possible(product, properties) && extent.capacity() <= product.rows, "{product:?}, {extent:?}");
    assert!(operands.norms.are_none(), "{product:?} shares no norm");
    let [weight, x] = maps(queue.stream.device(), product, operands)?;
    let blocks = properties.processors / CLUSTER * CLUSTER;
    let launch = Launch::new(blocks, 384).shared(SHARED_BYTES as u32).overlapping();
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
    unsafe { queue.launch_of(&program(), "linear_gated", launch, &args) }
}

fn maps(
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
    let (row, all) = (2 * inputs, 2 * inputs * outputs);
    // 8 gate rows, then their 8 up rows, and so on.
    let (sizes, strides) = ([inputs, 8, 2, outputs / 16, 1], [row, all / 2, 8 * row, all]);
    let weight = map(operands.weight, &sizes, &strides, &[64, 8, 2, COLUMNS / 8 / CLUSTER, 1])?;
    Ok([weight, map(operands.x, &[inputs, rows], &[row], &[64, ROWS])?])
}

/// Blocks that share a tile.
const CLUSTER: u32 = 2;
/// Rows of a block's part of a tile.
const ROWS: u32 = 128;
/// Columns of a tile.
const COLUMNS: u32 = 128;
/// With fewer the warpgroup in front would be a whole tile ahead.
const INPUTS_MIN: usize = 256;
/// Four stages of 64 inputs, of rows of x and of twice as many rows of weights as a tile has columns; outputs of eight warps;
/// barriers.
const SHARED_BYTES: usize =
    4 * 128 * (ROWS + 2 * COLUMNS) as usize + 8 * 16 * 2 * COLUMNS as usize + 2 * 4 * size_of::<u64>();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_fits_and_only_what_the_kernel_does_is_possible() {
        assert_eq!(SHARED_BYTES, 229_440, "as the launch contract says");
        let properties = |capability| {
            let (name, processors, shared_bytes_max) = ("a GPU".into(), 132, 232_448);
            Properties { name, capability, processors, shared_bytes_max, l2_bytes: 60 << 20 }
        };
        let hopper = properties((9, 0));
        assert!(SHARED_BYTES <= hopper.shared_bytes_max as usize);
        let product =
            SmallProduct { rows: 8192, inputs: 4096, outputs: 24576, norms: false, out: SmallOut::GatedSilu };
        assert!(is_possible(&product, &hopper));
        assert!(!is_possible(&product, &properties((8, 0))) && !is_possible(&product, &properties((10, 0))));
        for refused in [
            SmallProduct { norms: true, ..product },
            SmallProduct { out: SmallOut::Activations, ..product },
            SmallProduct { out: SmallOut::Residual, ..product },
            SmallProduct { inputs: 4100, ..product },
            SmallProduct { inputs: 248, ..product },
            SmallProduct { outputs: 24568, ..product },
            SmallProduct { outputs: 0, ..product },
            SmallProduct { rows: 0, ..product },
        ] {
            assert!(!is_possible(&refused, &hopper), "{refused:?}");
        }
    }
}
