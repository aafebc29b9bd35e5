//! Where the kernels of experts find weights and scratch.

use super::{ExpertsArrays, ExpertsShape};
use crate::device::Device;
use crate::error::CudaError;
use crate::memory::Address;
use crate::module::{TensorMap, Tiling};
use crate::{MapElement, MapSwizzle};

/// Tensor maps of one layer: made once, since weights and scratch stay where they are.
#[derive(Clone, Copy)]
pub struct ExpertsMaps {
    pub(super) gate_up: TensorMap,
    pub(super) down: TensorMap,
    pub(super) gated: TensorMap,
}

impl ExpertsMaps {
    /// For arrays of `shape` and products of this `cluster`, see [`ExpertsPath::Grouped`].
    pub fn new(
        device: &Device,
        shape: &ExpertsShape,
        arrays: &ExpertsArrays,
        cluster: usize,
    ) -> Result<Self, CudaError> {
        let [hidden, width] = [shape.hidden, shape.width].map(|size| size as u64);
        let [held, choices] = [shape.held, shape.choices()].map(|size| size as u64);
        let map = |address, sizes: &[u64], strides: &[u64], tile: &[u32]| {
            let element = MapElement::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
            let swizzle = MapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B;
            TensorMap::new(device, &Tiling { address, element, sizes, strides, tile, swizzle })
        };
        Ok(Self {
            // 8 gate rows, then their 8 up rows, and so on.
            gate_up: map(
                arrays.gate_up,
                &[hidden, 8, 2, width / 8, held],
                &[2 * hidden, 2 * width * hidden, 16 * hidden, 4 * width * hidden],
                &[64, 8, 2, 8, 1],
            )?,
            down: map(arrays.down, &[width, hidden, held], &[2 * width, 2 * hidden * width], &[64, 128, 1])?,
            gated: map(
                arrays.gated,
                &[width, choices],
                &[2 * width],
                &[64, if cluster == 2 { 32 } else { 8 }],
            )?,
        })
    }
}

/// Where the parts of the workspace lie.
#[derive(Default)]
pub(super) struct Workspace<Place> {
    pub(super) counts: Place,
    pub(super) tiles: Place,
    pub(super) slots: Place,
    pub(super) histogram: Place,
    pub(super) y: Place,
    /// Quantised x and gated rows of FP8 weights.
    pub(super) x: Place,
    pub(super) gated: Place,
    pub(super) end: Place,
}

impl Workspace<usize> {
    pub(super) fn at(self, start: Address) -> Workspace<Address> {
        let at = |offset: usize| start.plus(offset);
        let Self { counts, tiles, slots, histogram, y, x, gated, end } = self;
        Workspace {
            counts: at(counts),
            tiles: at(tiles),
            slots: at(slots),
            histogram: at(histogram),
            y: at(y),
            x: at(x),
            gated: at(gated),
            end: at(end),
        }
    }
}
