//! Row-wise copies and sums, and what all row-wise kernels share.

use crate::element::Element;
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::memory::Address;
use crate::module::{Arg, Launch};

/// Which rows of a buffer are real: of each lane's `lane_rows` the first that `counts` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowExtent {
    /// `[lanes]` u32, in device memory.
    pub counts: Address,
    /// Lanes of the buffer: 1 unless it holds the rows of a group.
    pub lanes: usize,
    /// Capacity of a lane.
    pub lane_rows: usize,
}

impl RowExtent {
    /// Rows of this lane's step.
    pub fn rows(header: Address, capacity: usize) -> Self {
        Self { counts: header, lanes: 1, lane_rows: capacity }
    }

    /// Rows with logits.
    pub fn out_rows(header: Address, capacity: usize) -> Self {
        Self { counts: header.plus(HEADER_OUT_ROWS * size_of::<u32>()), lanes: 1, lane_rows: capacity }
    }

    /// Rows of all lanes; `granted` is the step's `[lanes]` array of rows granted to each.
    pub fn group(granted: Address, lanes: usize, lane_rows: usize) -> Self {
        Self { counts: granted, lanes, lane_rows }
    }

    /// Rows at capacity.
    pub fn capacity(&self) -> usize {
        self.lanes * self.lane_rows
    }

    /// As kernels get it.
    pub(crate) fn words(self) -> [u32; 4] {
        let [low, high] = halves(self.counts);
        [low, high, self.lanes as u32, self.lane_rows as u32]
    }
}

/// A struct for a kernel, made of words: its fields are 4 bytes, or addresses.
pub(crate) fn bytes<const WORDS: usize>(words: &[u32; WORDS]) -> Arg<'_> {
    // SAFETY: any u32 is four bytes, and the borrow goes on.
    Arg::Bytes(unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), WORDS * size_of::<u32>()) })
}

/// An address in two words of such a struct.
pub(crate) fn halves(address: Address) -> [u32; 2] {
    [address.0 as u32, (address.0 >> 32) as u32]
}

/// Grid for a thread per chunk: few rows are cut in pieces, many fill the GPU by themselves.
fn launch(extent: &RowExtent, width: usize) -> Launch {
    let chunks = width.div_ceil(CHUNK);
    // Rounds of a block over a row without a last round of few threads.
    let rounds = chunks.div_ceil(THREADS);
    let threads = chunks.div_ceil(rounds).next_multiple_of(32);
    let pieces = if extent.capacity() > ROWS_FEW { 1 } else { rounds };
    Launch::new(extent.capacity() as u32, threads as u32).by(pieces as u32, 1).overlapping()
}

/// `out[r] = table[token[r]]`; tokens with bit 31 are `last_tokens[the other bits]`. `out` is f32.
///
/// # Safety
/// `table` is `[vocab, width]` of `element`; `tokens` and `last_tokens` lead to its rows; `out` has the rows of
/// `extent`.
pub unsafe fn embed(
    queue: &Queue<'_>,
    element: Element,
    (table, tokens, last_tokens): (Address, Address, Address),
    width: usize,
    out: Address,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let name = match element {
        Element::F32 => "embed_f32",
        Element::BF16 => "embed_bf16_res32",
    };
    let launch = launch(&extent, width);
    let words = extent.words();
    let args =
        [table.into(), tokens.into(), last_tokens.into(), (width as u32).into(), out.into(), bytes(&words)];
    // SAFETY: the caller's.
    unsafe { queue.launch("rows", name, launch, &args) }
}

/// `out = silu(gate) * up`. `gate_up` is `[rows, 2 width]`, `out` is `[rows, width]`.
///
/// # Safety
/// Both have the rows of `extent`, of `element`.
pub unsafe fn gated_silu(
    queue: &Queue<'_>,
    element: Element,
    gate_up: Address,
    width: usize,
    out: Address,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let launch = launch(&extent, width);
    let words = extent.words();
    let args = [gate_up.into(), (width as u32).into(), out.into(), bytes(&words)];
    // SAFETY: the caller's.
    unsafe { queue.launch("rows", &format!("gated_silu_{}", element.suffix()), launch, &args) }
}

/// `out += x`, both `[rows, width]`.
///
/// # Safety
/// Both have the rows of `extent`, of `element`.
pub unsafe fn add(
    queue: &Queue<'_>,
    element: Element,
    x: Address,
    width: usize,
    out: Address,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let launch = launch(&extent, width);
    let words = extent.words();
    let args = [x.into(), (width as u32).into(), out.into(), bytes(&words)];
    // SAFETY: the caller's.
    unsafe { queue.launch("rows", &format!("add_{}", element.suffix()), launch, &args) }
}

/// `out[i] = x[out_rows[i]]`; `extent` is that of `out`.
///
/// # Safety
/// `out_rows` has as many entries as `extent` has real rows, each a row of `x`; both are of `element`.
pub unsafe fn pick_rows(
    queue: &Queue<'_>,
    element: Element,
    x: Address,
    out_rows: Address,
    width: usize,
    out: Address,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let launch = launch(&extent, width);
    let words = extent.words();
    let args = [x.into(), out_rows.into(), (width as u32).into(), out.into(), bytes(&words)];
    // SAFETY: the caller's.
    unsafe { queue.launch("rows", &format!("pick_rows_{}", element.suffix()), launch, &args) }
}

/// `out = x`, from `element` to the other one. Both are `[rows, width]`.
///
/// # Safety
/// Both have the rows of `extent`.
pub unsafe fn convert(
    queue: &Queue<'_>,
    element: Element,
    x: Address,
    width: usize,
    out: Address,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let name = match element {
        Element::F32 => "convert_f32_to_bf16",
        Element::BF16 => "convert_bf16_to_f32",
    };
    let launch = launch(&extent, width);
    let words = extent.words();
    let args = [x.into(), (width as u32).into(), out.into(), bytes(&words)];
    // SAFETY: the caller's.
    unsafe { queue.launch("rows", name, launch, &args) }
}

/// Place of OUT_ROWS in a step's header.
const HEADER_OUT_ROWS: usize = 1;

/// Elements that a thread reads at once, `CHUNK` of rows.cuh.
const CHUNK: usize = 8;

/// Threads of a block at the most.
const THREADS: usize = 256;

/// Up to so many rows are cut in pieces: more fill the GPU whole, and one block a row is faster there.
const ROWS_FEW: usize = 512;
