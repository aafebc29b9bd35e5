//! Products for few rows, bound by the reading of weights; with what stands around them fused in.

use crate::compile::Program;
use crate::device::Properties;
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::rows::{RowExtent, bytes, halves};
use crate::memory::Address;
use crate::module::Launch;

/// A product `x W^T + bias` of bf16 weights, and what stands around it. See kernels/linear_small.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SmallProduct {
    /// Rows of x at capacity; `linear_small` takes up to [`SMALL_ROWS_MAX`].
    pub rows: usize,
    /// Columns of x and W; a multiple of 8.
    pub inputs: usize,
    /// Rows of W.
    pub outputs: usize,
    /// Whether x is the f32 residual and its RMS norm comes first; else x is bf16.
    pub norms: bool,
    /// What becomes of the sums.
    pub out: SmallOut,
}

/// What a [`SmallProduct`] makes of its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SmallOut {
    /// bf16 `[rows, outputs]`.
    Activations,
    /// f32 `[rows, outputs]`: logits.
    F32,
    /// Added to an f32 residual, `[rows, outputs]`.
    Residual,
    /// W is gate rows, then up rows: `silu(gate) * up`, bf16 `[rows, outputs / 2]`. `outputs` is a multiple of 16.
    GatedSilu,
}

impl SmallOut {
    /// OUT of the kernels that finish products so.
    pub(crate) fn define(self) -> usize {
        match self {
            Self::Activations => 0,
            Self::F32 => 1,
            Self::Residual => 2,
            Self::GatedSilu => 3,
        }
    }
}

/// Where the operands of a [`SmallProduct`] are.
#[derive(Clone, Copy, Debug)]
pub struct SmallOperands {
    /// bf16 `[outputs, inputs]`.
    pub weight: Address,
    /// f32 `[outputs]`, or null.
    pub bias: Address,
    /// f32 `[inputs]`, and what is added to the mean square; for products that norm.
    pub norm: (Address, f32),
    /// `[rows, inputs]`: f32 if the product norms, else bf16.
    pub x: Address,
    /// See [`SmallOut`].
    pub out: Address,
    /// Of the norms in front of and behind a product of [`super::linear_rows`]: see [`RowsNorms`].
    pub norms: RowsNorms,
}

/// What `linear_rows` makes of the norms around it: nothing, where addresses are null.
#[derive(Clone, Copy, Debug)]
pub struct RowsNorms {
    /// f32 `[rows, ceil(inputs / 64)]`: sums of squares of the residual that x is, times the norm's weights; with what is
    /// added to the mean square.
    pub squares: (Address, f32),
    /// f32 `[outputs]`: weights of the norm behind an addition to the residual.
    pub next_weight: Address,
    /// bf16 `[rows, outputs]`: the new residual times these.
    pub next: Address,
    /// f32 `[rows, ceil(outputs / 64)]`: its sums of squares.
    pub next_squares: Address,
}

impl RowsNorms {
    /// No norms.
    pub const NONE: Self = Self {
        squares: (Address::NULL, 0.0),
        next_weight: Address::NULL,
        next: Address::NULL,
        next_squares: Address::NULL,
    };

    /// Whether there are none.
    pub fn are_none(&self) -> bool {
        self.squares.0 == Address::NULL && self.next == Address::NULL
    }
}

/// How a block is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    rows_max: usize,
    /// Tiles of 8 outputs that are summed together.
    run: usize,
    warps: usize,
    ring_kb: usize,
}

/// More rows than this are for cuBLASLt, whose tiles read x less often.
pub const SMALL_ROWS_MAX: usize = 16;

/// Up to so many rows the kernel beats cuBLASLt at every size that was measured, or is within 2% of it.
const ROWS_ALWAYS: usize = 8;

/// Above 8 rows, products of more bytes that take nothing in are for cuBLASLt (H200, 16 rows: 32 MB 11.7 us here and
/// 13.4 there, 50 MB 15.9 and 16.0, 128 MB 37.5 and 34.5).
const PLAIN_BYTES_MAX: usize = 50 << 20;

impl SmallProduct {
    /// Whether the kernel can do it on such a GPU.
    pub fn is_possible(&self, properties: &Properties) -> bool {
        let whole = if self.out == SmallOut::GatedSilu { 16 } else { 1 };
        (1..=SMALL_ROWS_MAX).contains(&self.rows)
            && self.inputs > 0
            && self.inputs.is_multiple_of(8)
            && self.outputs.is_multiple_of(whole)
            && self.shape(properties.processors, properties.shared_bytes_max).is_some()
    }

    /// Whether it is faster here than by cuBLASLt, with what it takes in. (H200, layers of Qwen3-8B without rope and
    /// attention: 95, 98, 101, 117 us with 1, 4, 8, 16 rows, by cuBLASLt and kernels between 120, 121, 125, 121. With
    /// norms as kernels of their own 16 rows took 114 to 131.)
    pub fn pays(&self) -> bool {
        let takes_in = matches!(self.out, SmallOut::Residual | SmallOut::GatedSilu);
        self.rows <= ROWS_ALWAYS
            || self.norms
            || takes_in
            || 2 * self.inputs * self.outputs <= PLAIN_BYTES_MAX
    }

    /// What must be loaded for it. Panics if it isn't possible.
    pub fn program(&self, properties: &Properties) -> Program {
        self.program_of(self.shape_on(properties))
    }

    fn program_of(&self, shape: Shape) -> Program {
        let Shape { rows_max, run, warps, ring_kb } = shape;
        let out = self.out.define();
        let defines = [
            format!("ROWS_MAX={rows_max}"),
            format!("RUN={run}"),
            format!("WARPS={warps}"),
            format!("RING_KB={ring_kb}"),
            format!("NORM={}", u32::from(self.norms)),
            format!("OUT={out}"),
        ];
        Program { source: "linear_small", defines: defines.to_vec() }
    }

    fn shape_on(&self, properties: &Properties) -> Shape {
        let shape = self.shape(properties.processors, properties.shared_bytes_max);
        shape.unwrap_or_else(|| panic!("no small product {self:?} on {properties:?}"))
    }

    /// The cut with the fewest runs, then the fewest places for tiles that stay empty. (5,120 outputs of 2,048 inputs, one
    /// row on an H200: 8.9 us in five runs of one tile, 6.5 in two of three, 6.0 in one of six; with the norm 12.8 in
    /// five runs and 6.5 in one.)
    fn shape(&self, processors: u32, shared_max: u32) -> Option<Shape> {
        let rows_max = if self.rows > 8 { 16 } else { self.rows.next_power_of_two() };
        // 4 rows cost what 8 do, within the noise; one program less.
        let rows_max = if rows_max == 4 { 8 } else { rows_max };
        let per = self.per();
        let tiles = self.units().div_ceil(processors as usize) * per;
        [8, 4].iter().find_map(|&warps| {
            let runs = RUNS.iter().filter(|run| run.is_multiple_of(per)).filter_map(|&run| {
                let places = self.places(rows_max, run, warps);
                let ring_kb = ring_bytes(rows_max, run, warps, shared_max)? / 1024;
                (ring_kb * 64 / places >= 2).then_some(Shape { rows_max, run, warps, ring_kb })
            });
            runs.min_by_key(|shape| {
                let rounds = tiles.div_ceil(shape.run);
                (rounds, rounds * shape.run)
            })
        })
    }

    /// Tiles of a unit of output.
    fn per(&self) -> usize {
        if self.out == SmallOut::GatedSilu { 2 } else { 1 }
    }

    /// Units of output, which blocks share out.
    fn units(&self) -> usize {
        (self.outputs / self.per()).div_ceil(8)
    }

    /// 16-byte places that a step takes in the ring, PLACES of the kernel.
    fn places(&self, rows_max: usize, run: usize, warps: usize) -> usize {
        let (halves, half_rows) = halves_of(rows_max);
        let of_x = warps * halves * half_rows * 4 * if self.norms { 2 } else { 1 };
        run * 32 * warps + of_x + if self.norms { warps * 8 } else { 0 }
    }
}

/// Bytes that a ring may have such that two blocks fit on a multiprocessor: this one's weights stream while the kernel
/// in front still works.
fn ring_bytes(rows_max: usize, run: usize, warps: usize, shared_max: u32) -> Option<usize> {
    // A block may have all of a multiprocessor but what the driver takes for each block.
    let half = (shared_max as usize + SHARED_OF_DRIVER) / 2;
    half.checked_sub(sums_bytes(rows_max, run, warps) + SHARED_OF_DRIVER)
}

/// Bytes of shared memory beside the ring.
fn sums_bytes(rows_max: usize, run: usize, warps: usize) -> usize {
    let (halves, half_rows) = halves_of(rows_max);
    warps * run * halves * half_rows * 8 * 4 + warps * halves * 8 * 4
}

fn halves_of(rows_max: usize) -> (usize, usize) {
    if rows_max > 8 { (2, 8) } else { (1, rows_max) }
}

/// The product. `extent` is that of x and of `out`, with [`SmallProduct::rows`] rows at the most.
///
/// # Safety
/// Operands have the shapes and types that the product says, and start on 16 bytes.
pub unsafe fn multiply(
    queue: &Queue<'_>,
    product: &SmallProduct,
    operands: SmallOperands,
    extent: RowExtent,
) -> Result<(), CudaError> {
    assert!(extent.capacity() <= product.rows, "{product:?} for {extent:?}");
    assert!(operands.norms.are_none(), "{product:?} shares no norm");
    let properties = queue.stream.device().properties();
    let shape = product.shape_on(properties);
    let SmallOperands { weight, bias, norm, x, out, .. } = operands;
    let (units, blocks) = (product.units(), properties.processors as usize);
    let mut linear = [0; 12];
    for (words, address) in linear.chunks_exact_mut(2).zip([weight, bias, norm.0]) {
        words.copy_from_slice(&halves(address));
    }
    linear[6..11].copy_from_slice(&[
        product.inputs as u32,
        product.outputs as u32,
        norm.1.to_bits(),
        (units / blocks) as u32,
        (units % blocks) as u32,
    ]);
    let launch = Launch::new(properties.processors, 32 * shape.warps as u32)
        .shared(1024 * shape.ring_kb as u32)
        .overlapping();
    let words = extent.words();
    let args = [bytes(&linear), x.into(), out.into(), bytes(&words)];
    // SAFETY: the caller's.
    unsafe { queue.launch_of(&product.program_of(shape), "linear_small", launch, &args) }
}

/// Tiles that a block may sum together.
const RUNS: &[usize] = &[1, 2, 3, 4, 6, 8];

/// Bytes of shared memory that the driver takes for each block, compute capability 8.0 to 12.0.
const SHARED_OF_DRIVER: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn product(rows: usize, outputs: usize, norms: bool, out: SmallOut) -> SmallProduct {
        SmallProduct { rows, inputs: 4096, outputs, norms, out }
    }

    #[test]
    fn every_product_of_few_rows_has_a_cut_and_two_blocks_of_it_fit() {
        // Shared memory of a block: H200, A100, L40 and RTX 6000.
        for (shared_max, processors) in [(232_448, 132), (166_912, 108), (101_376, 142)] {
            for rows in 1..=SMALL_ROWS_MAX {
                for outputs in [16, 128, 1024, 4096, 6144, 12288, 24576, 151_936] {
                    for norms in [false, true] {
                        for out in
                            [SmallOut::Activations, SmallOut::F32, SmallOut::Residual, SmallOut::GatedSilu]
                        {
                            let product = product(rows, outputs, norms, out);
                            let shape = product.shape(processors, shared_max);
                            let shape = shape.unwrap_or_else(|| panic!("{product:?} with {shared_max}"));
                            let Shape { rows_max, run, warps, ring_kb } = shape;
                            assert!(rows <= rows_max);
                            assert!(ring_kb * 64 / product.places(rows_max, run, warps) >= 2, "{shape:?}");
                            let block = ring_kb * 1024 + sums_bytes(rows_max, run, warps) + SHARED_OF_DRIVER;
                            assert!(2 * block <= shared_max as usize + SHARED_OF_DRIVER, "{shape:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_block_sums_all_its_tiles_at_once_if_it_can() {
        let run = |outputs| {
            product(1, outputs, false, SmallOut::Activations).shape(132, 232_448).expect("possible").run
        };
        assert_eq!([1024, 2048, 3072, 4096, 5120, 6144, 7168].map(run), [1, 2, 3, 4, 6, 6, 8]);
    }
}
