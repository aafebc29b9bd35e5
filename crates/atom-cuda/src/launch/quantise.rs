//! Rows of activations as e4m3 codes with scales, for products with weights of FP8. See kernels/quantise.cu.

use crate::compile::Program;
use crate::error::CudaError;
use crate::fp8::{BLOCK, Fp8Form};
use crate::kernels::Queue;
use crate::launch::norm::NormWeight;
use crate::launch::rows::{RowExtent, bytes, halves};
use crate::memory::Address;
use crate::module::Launch;

/// The shape of quantised rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantisedShape {
    /// Rows at capacity.
    pub rows: usize,
    /// Elements of a row; a multiple of 16.
    pub inputs: usize,
    /// Of the weights that they meet: one scale for a row, or for each 128 elements of it.
    pub form: Fp8Form,
}

/// Where they are.
#[derive(Clone, Copy, Debug)]
pub struct Quantised {
    /// `u8[rows, inputs]`, for rows rounded up to a multiple of 4.
    pub codes: Address,
    /// `f32[rows]`, or `f32[groups, stride]`: rows lie side by side.
    pub scales: Address,
}

impl QuantisedShape {
    /// Rows that there is room for: cuBLASLt wants scales of groups by 4.
    pub fn room_rows(&self) -> usize {
        self.rows.next_multiple_of(4)
    }

    /// Scales from one group to the next; also the rows that cuBLASLt multiplies.
    pub fn stride(&self) -> usize {
        match self.form {
            Fp8Form::Channel => self.rows,
            Fp8Form::Block => self.room_rows(),
        }
    }

    /// Bytes of codes and scales.
    pub fn bytes(&self) -> usize {
        self.codes_bytes() + 4 * self.form.groups(self.inputs) * self.room_rows()
    }

    /// Codes and scales, one behind the other.
    pub fn at(&self, start: Address) -> Quantised {
        Quantised { codes: start, scales: start.plus(self.codes_bytes()) }
    }

    fn codes_bytes(&self) -> usize {
        (self.room_rows() * self.inputs).next_multiple_of(ALIGN)
    }

    /// What must be loaded for it.
    pub fn program(&self) -> Program {
        let groups = match self.form {
            Fp8Form::Channel => "GROUPS=0",
            Fp8Form::Block => "GROUPS=1",
        };
        Program::with("quantise", &[&format!("HELD={}", self.held()), groups])
    }

    /// Chunks of 8 that a thread holds: as many as it takes for blocks of few threads.
    fn held(&self) -> usize {
        let held = [2, 4].into_iter().find(|held| self.inputs <= 8 * held * SMALL_THREADS);
        held.unwrap_or(6)
    }

    fn launch(&self, queue: &Queue<'_>, held: usize) -> Launch {
        let threads = self.inputs.div_ceil(8 * held).next_multiple_of(32);
        assert!(threads <= 1024 && self.inputs.is_multiple_of(16), "{self:?}");
        let blocks = queue.processors() as usize * (THREADS_RESIDENT / threads).clamp(1, BLOCKS_MAX);
        Launch::new(self.rows.min(blocks) as u32, threads as u32).overlapping()
    }

    fn words(&self, at: Quantised, in_turn: bool) -> [u32; 6] {
        let ([codes_low, codes_high], [scales_low, scales_high]) = (halves(at.codes), halves(at.scales));
        [codes_low, codes_high, scales_low, scales_high, self.stride() as u32, u32::from(in_turn)]
    }
}

/// bf16 rows.
///
/// # Safety
/// `x` has the rows of `extent`; `out` has room for the shape.
pub unsafe fn rows(
    queue: &Queue<'_>,
    shape: &QuantisedShape,
    x: Address,
    out: Quantised,
    extent: RowExtent,
) -> Result<(), CudaError> {
    // SAFETY: the caller's.
    unsafe { rows_then(queue, shape, x, out, extent, false) }
}

/// The same; the next kernel starts only when those before this one are done, so that it may read what they made before
/// it waits for this one.
///
/// # Safety
/// As for [`rows`].
pub unsafe fn rows_in_turn(
    queue: &Queue<'_>,
    shape: &QuantisedShape,
    x: Address,
    out: Quantised,
    extent: RowExtent,
) -> Result<(), CudaError> {
    // SAFETY: the caller's.
    unsafe { rows_then(queue, shape, x, out, extent, true) }
}

unsafe fn rows_then(
    queue: &Queue<'_>,
    shape: &QuantisedShape,
    x: Address,
    out: Quantised,
    extent: RowExtent,
    in_turn: bool,
) -> Result<(), CudaError> {
    assert!(extent.capacity() <= shape.rows, "{shape:?} for {extent:?}");
    let (out, words) = (shape.words(out, in_turn), extent.words());
    let args = [x.into(), (shape.inputs as u32).into(), bytes(&out), bytes(&words)];
    // SAFETY: the caller's.
    unsafe { queue.launch_of(&shape.program(), "quantise_bf16", shape.launch(queue, shape.held()), &args) }
}

/// The norm of rows of the f32 residual, rounded to bf16 first.
///
/// # Safety
/// As for [`rows`]; `x` is f32.
pub unsafe fn normed_rows(
    queue: &Queue<'_>,
    shape: &QuantisedShape,
    x: Address,
    norm: NormWeight,
    out: Quantised,
    extent: RowExtent,
) -> Result<(), CudaError> {
    assert!(extent.capacity() <= shape.rows && norm.width == shape.inputs, "{shape:?} for {extent:?}");
    let (out, words) = (shape.words(out, false), extent.words());
    let args = [
        x.into(),
        norm.weight.into(),
        norm.eps.into(),
        (shape.inputs as u32).into(),
        bytes(&out),
        bytes(&words),
    ];
    // SAFETY: the caller's.
    unsafe { queue.launch_of(&shape.program(), "quantise_norm_bf16", shape.launch(queue, NORM_HELD), &args) }
}

/// As in norm.cu: sums of squares are then the same.
const NORM_HELD: usize = 2;
/// Such a block finds room beside two that multiply.
const SMALL_THREADS: usize = 256;
/// As in norm.rs.
const THREADS_RESIDENT: usize = 1024;
/// As in norm.rs.
const BLOCKS_MAX: usize = 16;
/// The copy engine and cuBLASLt want 16; lines are 128.
const ALIGN: usize = 2 * BLOCK;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_scales_lie_apart_and_have_room_for_rows_by_four() {
        for form in [Fp8Form::Channel, Fp8Form::Block] {
            for rows in [1, 3, 4, 17, 8192] {
                let shape = QuantisedShape { rows, inputs: 320, form };
                let at = shape.at(Address(1 << 20));
                assert!(at.scales.0 as usize >= (1 << 20) + shape.room_rows() * 320);
                let groups = if form == Fp8Form::Block { 3 } else { 1 };
                assert!(at.scales.0 as usize + 4 * groups * shape.stride() <= (1 << 20) + shape.bytes());
                assert!(shape.stride() >= rows);
            }
        }
    }
}
