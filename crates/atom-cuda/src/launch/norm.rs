//! RMS norms: of rows, and over all heads of q and of k.

use crate::element::Element;
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::rows::{RowExtent, bytes};
use crate::memory::Address;
use crate::module::Launch;

/// A norm's `[width]` f32 weights.
#[derive(Clone, Copy, Debug)]
pub struct NormWeight {
    /// First of them.
    pub weight: Address,
    /// How many: the width of a row, at most [`NORM_WIDTH_MAX`].
    pub width: usize,
    /// Added to the mean square.
    pub eps: f32,
}

/// Widest row of a norm: 1024 threads hold 16 elements each.
pub const NORM_WIDTH_MAX: usize = 16 * 1024;

/// q and k of a fused row, for norms over all heads.
#[derive(Clone, Copy, Debug)]
pub struct HeadWidths {
    /// Elements of q.
    pub q: usize,
    /// Elements of k, which follow.
    pub k: usize,
    /// Elements of a whole row.
    pub row: usize,
}

/// What `x` of [`norm`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOf {
    /// The residual stream, f32.
    Residual,
    /// Activations, of the same type as the output.
    Activations,
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`, `[rows, width]`; `out` is of `element`.
///
/// # Safety
/// Both have the rows of `extent`; `x` is of the type that `of` says.
pub unsafe fn norm(
    queue: &Queue<'_>,
    element: Element,
    (x, of): (Address, NormOf),
    norm: NormWeight,
    out: Address,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let name = match (element, of) {
        (Element::F32, _) => "norm_f32",
        (Element::BF16, NormOf::Residual) => "norm_bf16_res32",
        (Element::BF16, NormOf::Activations) => "norm_bf16",
    };
    let launch = launch(queue, norm.width, &extent);
    let words = extent.words();
    let args = [
        x.into(),
        norm.weight.into(),
        norm.eps.into(),
        (norm.width as u32).into(),
        out.into(),
        bytes(&words),
    ];
    // SAFETY: the caller's.
    unsafe { queue.launch("norm", name, launch, &args) }
}

/// `residual += x; out = norm(residual)`. The residual is f32, `x` and `out` are of `element`.
///
/// # Safety
/// All have the rows of `extent`.
pub unsafe fn add_norm(
    queue: &Queue<'_>,
    element: Element,
    (residual, x): (Address, Address),
    norm: NormWeight,
    out: Address,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let name = match element {
        Element::F32 => "add_norm_f32",
        Element::BF16 => "add_norm_bf16_res32",
    };
    let launch = launch(queue, norm.width, &extent);
    let words = extent.words();
    let args = [
        residual.into(),
        x.into(),
        norm.weight.into(),
        norm.eps.into(),
        (norm.width as u32).into(),
        out.into(),
        bytes(&words),
    ];
    // SAFETY: the caller's.
    unsafe { queue.launch("norm", name, launch, &args) }
}

/// `out[r] = [sum of squares of q, of k]`, f32.
///
/// # Safety
/// `qkv` (of `element`) and `out` have the rows of `extent`.
pub unsafe fn square_sums(
    queue: &Queue<'_>,
    element: Element,
    qkv: Address,
    widths: HeadWidths,
    out: Address,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let launch = Launch::new(extent.capacity() as u32, HEAD_THREADS).overlapping();
    let words = extent.words();
    let [q, k, row] = widths.words();
    let args = [qkv.into(), q.into(), k.into(), row.into(), out.into(), bytes(&words)];
    // SAFETY: the caller's.
    unsafe { queue.launch("norm", &format!("square_sums_{}", element.suffix()), launch, &args) }
}

/// `q *= weight / sqrt(sum / elements + eps)`, and k alike: what [`square_sums`] found, summed over ranks.
///
/// # Safety
/// As for [`square_sums`]; the weights have `widths.q` and `widths.k` elements, f32.
pub unsafe fn scale_heads(
    queue: &Queue<'_>,
    element: Element,
    (qkv, sums): (Address, Address),
    (q_weight, k_weight, eps): (Address, Address, f32),
    widths: HeadWidths,
    (q_elements, k_elements): (usize, usize),
    extent: RowExtent,
) -> Result<(), CudaError> {
    let launch = Launch::new(extent.capacity() as u32, HEAD_THREADS).overlapping();
    let words = extent.words();
    let [q, k, row] = widths.words();
    let args = [
        qkv.into(),
        sums.into(),
        q_weight.into(),
        k_weight.into(),
        q.into(),
        k.into(),
        row.into(),
        (q_elements as u32).into(),
        (k_elements as u32).into(),
        eps.into(),
        bytes(&words),
    ];
    // SAFETY: the caller's.
    unsafe { queue.launch("norm", &format!("scale_heads_{}", element.suffix()), launch, &args) }
}

impl HeadWidths {
    fn words(self) -> [u32; 3] {
        [self.q as u32, self.k as u32, self.row as u32]
    }
}

/// Threads come from the width alone, and with them the order of sums. Blocks that go over many rows read the
/// weights once.
fn launch(queue: &Queue<'_>, width: usize, extent: &RowExtent) -> Launch {
    assert!(width <= NORM_WIDTH_MAX, "a norm over {width} elements");
    let threads = width.div_ceil(16).next_multiple_of(32).max(32);
    let blocks = queue.processors() as usize * (THREADS_RESIDENT / threads).clamp(1, BLOCKS_MAX);
    Launch::new(extent.capacity().min(blocks) as u32, threads as u32).overlapping()
}

const HEAD_THREADS: u32 = 256;

/// Threads that a multiprocessor holds of these kernels, which have 64 registers.
const THREADS_RESIDENT: usize = 1024;

/// Blocks that a multiprocessor holds at the most.
const BLOCKS_MAX: usize = 16;
