//! Products with weights of e4m3 codes: by a kernel of our own for few rows, bound by the reading of weights, else by
//! cuBLASLt. See kernels/linear_small_fp8.cu and kernels/fp8_finish.cu.

use crate::compile::Program;
use crate::device::Properties;
use crate::error::CudaError;
use crate::fp8::Fp8Form;
use crate::kernels::Queue;
use crate::launch::linear_rows_fp8::{self, Fp8Cut};
use crate::launch::linear_small::{SMALL_ROWS_MAX, SmallOut};
use crate::launch::quantise::{Quantised, QuantisedShape};
use crate::launch::rows::{RowExtent, bytes, halves};
use crate::memory::Address;
use crate::module::Launch;

/// A product `x W^T + bias` of quantised rows with weights of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Product {
    /// Rows of x at capacity.
    pub rows: usize,
    /// Columns of x and W; a multiple of 16.
    pub inputs: usize,
    /// Rows of W; a multiple of 16.
    pub outputs: usize,
    /// Scales of W.
    pub form: Fp8Form,
    /// What becomes of the sums. Many rows give activations or f32 only.
    pub out: SmallOut,
}

/// Who computes a [`Fp8Product`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Path {
    /// A kernel of our own, with what stands behind it.
    Few,
    /// Another, for more rows.
    Rows,
    /// cuBLASLt without scales, whose sums a kernel scales, with what stands behind it.
    Finished,
    /// cuBLASLt with scales.
    Scaled,
}

/// Where the operands of a [`Fp8Product`] are.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Operands {
    /// `u8[outputs, inputs]`
    pub weight: Address,
    /// See [`Fp8Form`].
    pub weight_scales: Address,
    /// f32 `[outputs]`, or null.
    pub bias: Address,
    /// See [`QuantisedShape`].
    pub x: Quantised,
    /// See [`SmallOut`].
    pub out: Address,
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

impl Fp8Product {
    /// Who computes it. cuBLASLt 13.1 has one kernel for scales of rows and outputs, which is slow where rows are few (H200,
    /// the four products of a layer of Qwen3-8B: 119 us at 32 rows, 102 at 128, 112 at 256; without scales 68, 73, 96; with
    /// quantising, norms and finish 81 at 32 rows and 97 at 128).
    pub fn path(&self) -> Fp8Path {
        match (self.rows, self.form) {
            (..=FEW_ROWS_MAX, _) => Fp8Path::Few,
            (..=ROWS_ROWS_MAX, _) if linear_rows_fp8::takes(self) => Fp8Path::Rows,
            (..=SMALL_ROWS_MAX, _) => Fp8Path::Few,
            (..=FINISHED_ROWS_MAX, Fp8Form::Channel) => Fp8Path::Finished,
            _ => Fp8Path::Scaled,
        }
    }

    /// Whether it is done by a kernel of our own.
    pub fn is_ours(&self) -> bool {
        matches!(self.path(), Fp8Path::Few | Fp8Path::Rows)
    }

    /// Whether an activation or an addition behind it can be taken in.
    pub fn fuses(&self) -> bool {
        self.path() != Fp8Path::Scaled
    }

    /// Bytes of scratch: codes and scales of x, and f32 sums where those are finished by a kernel.
    pub fn scratch_bytes(&self) -> usize {
        let sums = if self.path() == Fp8Path::Finished { 4 * self.rows * self.outputs } else { 0 };
        self.sums_offset() + sums
    }

    /// Where sums are in the scratch.
    pub(crate) fn sums_offset(&self) -> usize {
        self.quantised().bytes().next_multiple_of(256)
    }

    /// The shape of x.
    pub fn quantised(&self) -> QuantisedShape {
        QuantisedShape { rows: self.rows, inputs: self.inputs, form: self.form }
    }

    /// What must be loaded for it.
    pub fn programs(&self, properties: &Properties) -> Vec<Program> {
        let of_product = match self.path() {
            Fp8Path::Few => Some(self.program_of(self.shape_on(properties))),
            Fp8Path::Rows => Some(Fp8Cut::new(self, properties).program(self)),
            Fp8Path::Finished => Some(self.finish()),
            Fp8Path::Scaled => None,
        };
        [self.quantised().program()].into_iter().chain(of_product).collect()
    }

    fn out_define(&self) -> String {
        format!("OUT={}", self.out.define())
    }

    fn finish(&self) -> Program {
        Program { source: "fp8_finish", defines: vec![self.out_define()] }
    }

    fn program_of(&self, shape: Shape) -> Program {
        let Shape { rows_max, run, warps, ring_kb } = shape;
        let defines = [
            format!("ROWS_MAX={rows_max}"),
            format!("RUN={run}"),
            format!("WARPS={warps}"),
            format!("RING_KB={ring_kb}"),
            format!("GROUPS={}", u32::from(self.form == Fp8Form::Block)),
            self.out_define(),
        ];
        Program { source: "linear_small_fp8", defines: defines.to_vec() }
    }

    fn shape_on(&self, properties: &Properties) -> Shape {
        let shape = self.shape(properties.processors, properties.shared_bytes_max);
        shape.unwrap_or_else(|| panic!("no small product {self:?} on {properties:?}"))
    }

    /// The cut with the fewest places for tiles that stay empty, then the fewest runs.
    fn shape(&self, processors: u32, shared_max: u32) -> Option<Shape> {
        let rows_max = if self.rows > 8 { 16 } else { self.rows.next_power_of_two() };
        // 4 rows cost what 8 do; one program less.
        let rows_max = if rows_max == 4 { 8 } else { rows_max };
        let per = self.per();
        let tiles = self.units().div_ceil(processors as usize) * per;
        [8, 4].iter().find_map(|&warps| {
            let runs = RUNS.iter().filter(|run| run.is_multiple_of(per)).filter_map(|&run| {
                let half = (shared_max as usize + SHARED_OF_DRIVER - SHARED_OF_QUANTISING) / 2;
                let ring_kb = half.checked_sub(sums_bytes(rows_max, run, warps) + SHARED_OF_DRIVER)? / 1024;
                let is_deep = ring_kb * 64 / self.places(rows_max, run, warps) >= 2;
                is_deep.then_some(Shape { rows_max, run, warps, ring_kb })
            });
            runs.min_by_key(|shape| {
                let rounds = tiles.div_ceil(shape.run);
                (rounds * shape.run, rounds)
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
        let of_scales = if self.form == Fp8Form::Block { warps * 8 } else { 0 };
        run * 32 * warps + warps * rows_max * 4 + of_scales
    }
}

/// Bytes of shared memory beside the ring.
fn sums_bytes(rows_max: usize, run: usize, warps: usize) -> usize {
    warps * run * rows_max * 8 * 4
}

/// The product by a kernel of our own: [`Fp8Path::Few`] or [`Fp8Path::Rows`]. `extent` is that of x and of `out`.
///
/// # Safety
/// Operands have the shapes and types that the product says, and start on 16 bytes.
pub unsafe fn multiply_few(
    queue: &Queue<'_>,
    product: &Fp8Product,
    operands: Fp8Operands,
    extent: RowExtent,
) -> Result<(), CudaError> {
    if product.path() == Fp8Path::Rows {
        // SAFETY: the caller's.
        return unsafe { linear_rows_fp8::multiply(queue, product, &operands, extent) };
    }
    assert!(
        product.path() == Fp8Path::Few && extent.capacity() <= product.rows,
        "{product:?} for {extent:?}"
    );
    let properties = queue.stream.device().properties();
    let shape = product.shape_on(properties);
    let Fp8Operands { weight, weight_scales, bias, x, out } = operands;
    let (units, blocks) = (product.units(), properties.processors as usize);
    let mut linear = [0; 14];
    for (words, address) in linear.chunks_exact_mut(2).zip([weight, weight_scales, x.scales, bias]) {
        words.copy_from_slice(&halves(address));
    }
    linear[8..].copy_from_slice(&[
        product.inputs as u32,
        product.outputs as u32,
        Fp8Form::stride(product.inputs) as u32,
        product.quantised().stride() as u32,
        (units / blocks) as u32,
        (units % blocks) as u32,
    ]);
    let launch = Launch::new(properties.processors, 32 * shape.warps as u32)
        .shared(1024 * shape.ring_kb as u32)
        .overlapping();
    let words = extent.words();
    let args = [bytes(&linear), x.codes.into(), out.into(), bytes(&words)];
    // SAFETY: the caller's.
    unsafe { queue.launch_of(&product.program_of(shape), "linear_small_fp8", launch, &args) }
}

/// What cuBLASLt left to do of a product: see [`Fp8Path::Finished`]. `sums` is f32 `[rows, outputs]`.
///
/// # Safety
/// As for [`multiply_few`].
pub unsafe fn finish(
    queue: &Queue<'_>,
    product: &Fp8Product,
    operands: Fp8Operands,
    sums: Address,
    extent: RowExtent,
) -> Result<(), CudaError> {
    assert!(extent.capacity() <= product.rows, "{product:?} for {extent:?}");
    let mut finish = [0; 10];
    let addresses = [sums, operands.weight_scales, operands.x.scales, operands.bias];
    for (words, address) in finish.chunks_exact_mut(2).zip(addresses) {
        words.copy_from_slice(&halves(address));
    }
    finish[8] = product.outputs as u32;
    let chunks = product.outputs / product.per() / 8;
    let pieces = chunks.div_ceil(FINISH_THREADS as usize) as u32;
    let launch = Launch::new(extent.capacity() as u32, FINISH_THREADS).by(pieces, 1).overlapping();
    let words = extent.words();
    let args = [bytes(&finish), operands.out.into(), bytes(&words)];
    // SAFETY: the caller's.
    unsafe { queue.launch_of(&product.finish(), "fp8_finish", launch, &args) }
}

const FINISH_THREADS: u32 = 128;

/// Up to so many rows the kernel whose threads read their own weights, beyond that the copy engine and wgmma.
const FEW_ROWS_MAX: usize = 8;
/// Up to so many rows these.
const ROWS_ROWS_MAX: usize = 64;
/// See [`Fp8Product::path`].
const FINISHED_ROWS_MAX: usize = 128;

/// Shared memory that two blocks leave to one that quantises the next rows.
const SHARED_OF_QUANTISING: usize = 4096;

/// Tiles that a block may sum together. 8 would take more registers than leave room for a third block that quantises.
const RUNS: &[usize] = &[1, 2, 3, 4, 6];

/// Bytes of shared memory that the driver takes for each block, compute capability 8.0 to 12.0.
const SHARED_OF_DRIVER: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_product_of_few_rows_has_a_cut_and_two_blocks_of_it_fit() {
        let shared_max = 232_448;
        for rows in 1..=SMALL_ROWS_MAX {
            for outputs in [16, 128, 1024, 4096, 6144, 12288, 24576, 151_936] {
                for form in [Fp8Form::Channel, Fp8Form::Block] {
                    for out in [SmallOut::Activations, SmallOut::F32, SmallOut::Residual, SmallOut::GatedSilu]
                    {
                        let product = Fp8Product { rows, inputs: 4096, outputs, form, out };
                        let shape = product.shape(132, shared_max);
                        let shape = shape.unwrap_or_else(|| panic!("{product:?}"));
                        let Shape { rows_max, run, warps, ring_kb } = shape;
                        assert!(rows <= rows_max);
                        assert!(ring_kb * 64 / product.places(rows_max, run, warps) >= 2, "{shape:?}");
                        let block = ring_kb * 1024 + sums_bytes(rows_max, run, warps) + SHARED_OF_DRIVER;
                        let two = 2 * block + SHARED_OF_QUANTISING;
                        assert!(two <= shared_max as usize + SHARED_OF_DRIVER, "{shape:?}");
                    }
                }
            }
        }
    }
}
