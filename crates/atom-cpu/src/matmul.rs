//! The matrix product: `out[r][o] = sum over k of x[r][k] * w[o][k]`, then the bias.
//!
//! Each output element is one chain of float operations over k in ascending order (over blocks for
//! quantised activations), which depends on the width and the format only. So its bits don't depend on
//! how rows and outputs are cut into tiles, on threads, on neighbours or on the instruction set.

mod plain;
mod quantised;

use crate::elementwise::lanes::{LANES, Portable};
#[cfg(target_arch = "x86_64")]
use crate::elementwise::x86::{Avx2, Avx512};
use crate::isa::Isa;
use crate::pack::Packed;
use crate::quads::Quads;
use crate::quantise::BlockScale;
use crate::shared::{Rows, share};
use atom_weights::DType;
use half::{bf16, f16};
use plain::Plain;
use quantised::{Bytes, Exact, Nibbles, NibblesAndMinimum};
use std::ops::Range;
use std::sync::Arc;

/// One operand of a product: a tensor's slice and where its outputs go.
pub(crate) struct Part {
    /// The weights.
    pub(crate) weights: Arc<Packed>,
    /// First column of its outputs in the output rows.
    pub(crate) column: usize,
}

/// The activations and outputs of a product. Rows are counted densely; [`RowMap`] says where they lie.
pub(crate) struct Operands<'a> {
    /// `[.., inputs]`
    pub(crate) x: Rows<'a>,
    /// Where its rows lie.
    pub(crate) x_rows: RowMap<'a>,
    /// The same rows quantised; read only by quantised weights, if at all.
    pub(crate) codes: Option<Codes<'a>>,
    /// Added at the end. `[outputs]`
    pub(crate) bias: Option<&'a [f32]>,
    /// `[.., outputs]`
    pub(crate) out: Rows<'a>,
    /// Where its rows lie.
    pub(crate) out_rows: RowMap<'a>,
    /// If set, a row's outputs are multiplied with its weight and added to what is there, rounded after
    /// each; else they replace it. `[rows]`
    pub(crate) weights: Option<&'a [f32]>,
    /// Rows.
    pub(crate) rows: usize,
}

/// Quantised activations.
#[derive(Clone, Copy)]
pub(crate) struct Codes<'a> {
    /// `[.., planes * inputs]`
    pub(crate) codes: Rows<'a, i8>,
    /// `[.., planes * inputs / 32]`
    pub(crate) scales: Rows<'a, BlockScale>,
    /// Where the rows of both lie.
    pub(crate) rows: RowMap<'a>,
}

/// Position of the i-th real row in its buffer.
#[derive(Clone, Copy)]
pub(crate) enum RowMap<'a> {
    /// Row i.
    Dense,
    /// Row `first + i`.
    From(usize),
    /// As listed.
    Listed(&'a [u32]),
}

/// Everything a kernel needs for one part.
struct Product<'a> {
    weights: &'a Packed,
    column: usize,
    operands: &'a Operands<'a>,
}

/// How one format multiplies.
trait Kernel {
    /// Where a row's activations are.
    type Row: Copy;

    /// The activations of a dense row.
    ///
    /// # Safety
    /// The row is below `operands.rows`, and nobody writes it meanwhile.
    unsafe fn row(operands: &Operands<'_>, row: usize) -> Self::Row;

    /// Sums of `R` rows and `P` panels over all `blocks` of the weights' rows. Asks for the cache lines
    /// that are `ahead` bytes further on, unless that is 0.
    ///
    /// # Safety
    /// Rows and panels have that many blocks, and nobody writes the rows meanwhile.
    unsafe fn tile<S: Quads, const R: usize, const P: usize>(
        s: S,
        rows: [Self::Row; R],
        panels: [*const u8; P],
        blocks: usize,
        ahead: usize,
    ) -> [[S::F; P]; R];
}

/// Computes this worker's share of the product.
///
/// # Safety
/// `isa` is supported. All workers call it with equal arguments, between two barriers; meanwhile
/// nobody else touches `out` or writes `x`.
pub(crate) unsafe fn multiply(
    isa: Isa,
    parts: &[Part],
    operands: &Operands<'_>,
    worker: usize,
    workers: usize,
) {
    let panels = panels_of(parts);
    let chunks = operands.rows.div_ceil(CHUNK_ROWS);
    let units = share(chunks * panels, worker, workers);
    let mut unit = units.start;
    while unit < units.end {
        let (chunk, first) = (unit / panels, unit % panels);
        let last = panels.min(first + units.end - unit);
        let rows = share(operands.rows, chunk, chunks);
        // SAFETY: the caller's promise; this worker alone has these panels of these rows.
        unsafe { multiply_chunk(isa, parts, operands, first..last, rows) };
        unit += last - first;
    }
}

/// Computes the outputs of `panels`, counted over all parts, for all rows.
///
/// # Safety
/// `isa` is supported. Meanwhile nobody else touches these columns of `out`, and nobody writes `x`.
pub(crate) unsafe fn multiply_panels(
    isa: Isa,
    parts: &[Part],
    operands: &Operands<'_>,
    panels: Range<usize>,
) {
    let chunks = operands.rows.div_ceil(CHUNK_ROWS);
    for chunk in 0..chunks {
        let rows = share(operands.rows, chunk, chunks);
        // SAFETY: the caller's promise.
        unsafe { multiply_chunk(isa, parts, operands, panels.clone(), rows) };
    }
}

/// Panels of all parts.
pub(crate) fn panels_of(parts: &[Part]) -> usize {
    parts.iter().map(|part| part.weights.panels()).sum()
}

/// Columns of `panels`, counted over all parts.
pub(crate) fn columns_of(parts: &[Part], panels: Range<usize>) -> Range<usize> {
    let column = |panel: usize| {
        let mut offset = 0;
        for Part { weights, column } in parts {
            if panel < offset + weights.panels() {
                return column + (panel - offset) * LANES;
            }
            offset += weights.panels();
        }
        parts.last().map_or(0, |part| part.column + part.weights.outputs)
    };
    column(panels.start)..column(panels.end)
}

/// # Safety
/// As for [`multiply_panels`], for these rows.
unsafe fn multiply_chunk(
    isa: Isa,
    parts: &[Part],
    operands: &Operands<'_>,
    panels: Range<usize>,
    rows: Range<usize>,
) {
    let mut offset = 0;
    for Part { weights, column } in parts {
        let end = offset + weights.panels();
        let run = panels.start.max(offset)..panels.end.min(end);
        if !run.is_empty() {
            let product = Product { weights, column: *column, operands };
            // SAFETY: passed on.
            unsafe { product.run(isa, run.start - offset..run.end - offset, rows.clone()) };
        }
        offset = end;
    }
}

impl RowMap<'_> {
    /// Where dense row `row` lies.
    #[inline(always)]
    pub(crate) fn at(&self, row: usize) -> usize {
        match self {
            Self::Dense => row,
            Self::From(first) => first + row,
            Self::Listed(rows) => rows[row] as usize,
        }
    }
}

impl Product<'_> {
    /// # Safety
    /// As for [`multiply`]; the outputs of `panels` in `rows` belong to the caller.
    unsafe fn run(&self, isa: Isa, panels: Range<usize>, rows: Range<usize>) {
        let exact = self.operands.codes.is_none();
        // SAFETY: passed on.
        unsafe {
            match (self.weights.dtype, exact) {
                (DType::F32, _) => self.enter::<Plain<f32>>(isa, panels, rows),
                (DType::F8_E4M3, _) => unreachable!("FP8 is held as f32"),
                (DType::F16, _) => self.enter::<Plain<f16>>(isa, panels, rows),
                (DType::BF16, _) => self.enter::<Plain<bf16>>(isa, panels, rows),
                (DType::Q8_0, false) => self.enter::<Bytes>(isa, panels, rows),
                (DType::Q4_0, false) => self.enter::<Nibbles>(isa, panels, rows),
                (DType::Q4_1, false) => self.enter::<NibblesAndMinimum>(isa, panels, rows),
                (DType::Q8_0, true) => self.enter::<Exact<Bytes>>(isa, panels, rows),
                (DType::Q4_0, true) => self.enter::<Exact<Nibbles>>(isa, panels, rows),
                (DType::Q4_1, true) => self.enter::<Exact<NibblesAndMinimum>>(isa, panels, rows),
            }
        }
    }

    /// # Safety
    /// As for [`Self::run`].
    unsafe fn enter<K: Kernel>(&self, isa: Isa, panels: Range<usize>, rows: Range<usize>) {
        // SAFETY: passed on; `isa` is supported.
        unsafe {
            match isa {
                Isa::Portable => self.panels::<Portable, K>(Portable, panels, rows),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => self.enter_avx2::<K>(panels, rows),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => self.enter_avx512::<K>(panels, rows),
                #[cfg(not(target_arch = "x86_64"))]
                Isa::Avx2 | Isa::Avx512 => unreachable!("{isa} is refused on this processor"),
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn enter_avx2<K: Kernel>(&self, panels: Range<usize>, rows: Range<usize>) {
        // SAFETY: passed on.
        unsafe { self.panels::<Avx2, K>(Avx2::new(), panels, rows) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn enter_avx512<K: Kernel>(&self, panels: Range<usize>, rows: Range<usize>) {
        // SAFETY: passed on.
        unsafe { self.panels::<Avx512, K>(Avx512::new(), panels, rows) }
    }

    /// # Safety
    /// As for [`Self::run`].
    #[inline(always)]
    unsafe fn panels<S: Quads, K: Kernel>(&self, s: S, panels: Range<usize>, rows: Range<usize>) {
        let mut panel = panels.start;
        while panel < panels.end {
            let left = panels.end - panel;
            // SAFETY: passed on; rows and panels are within the ranges.
            unsafe {
                if const { S::WIDE == 4 } && rows.len() == 1 && left >= 4 {
                    self.tile::<S, K, 1, 4>(s, rows.start, panel, 4, true);
                    panel += 4;
                } else {
                    self.rows::<S, K>(s, rows.clone(), panel, left.min(2));
                    panel += 2;
                }
            }
        }
    }

    /// All rows of two panels, or of one. Few heights of tiles, since each is code of its own.
    ///
    /// # Safety
    /// As for [`Self::run`].
    #[inline(always)]
    unsafe fn rows<S: Quads, K: Kernel>(&self, s: S, rows: Range<usize>, panel: usize, panels: usize) {
        let mut row = rows.start;
        while row < rows.end {
            let (left, first) = (rows.end - row, row == rows.start);
            // SAFETY: passed on; the rows are within `rows`.
            row += unsafe {
                if const { S::ROWS >= 6 } && left >= 6 {
                    self.tile::<S, K, 6, 2>(s, row, panel, panels, first)
                } else if const { S::ROWS >= 4 } && left >= 4 {
                    self.tile::<S, K, 4, 2>(s, row, panel, panels, first)
                } else if const { S::ROWS >= 2 } && left >= 2 {
                    self.tile::<S, K, 2, 2>(s, row, panel, panels, first)
                } else {
                    self.tile::<S, K, 1, 2>(s, row, panel, panels, first)
                }
            };
        }
    }

    /// `R` rows of `P` panels, of which `panels` are wanted; the last one stands in for the others.
    /// The `first` tile of these panels also fetches the next ones. Returns `R`.
    ///
    /// # Safety
    /// As for [`Self::run`].
    #[inline(always)]
    unsafe fn tile<S: Quads, K: Kernel, const R: usize, const P: usize>(
        &self,
        s: S,
        row: usize,
        panel: usize,
        panels: usize,
        first: bool,
    ) -> usize {
        let mut starts = [std::ptr::null(); P];
        for (p, start) in starts.iter_mut().enumerate() {
            *start = self.weights.panel(panel + p.min(panels - 1));
        }
        // SAFETY: rows are below `operands.rows`; nobody writes them by the contract of `multiply`.
        let mut rows = [unsafe { K::row(self.operands, row) }; R];
        for (r, at) in rows.iter_mut().enumerate().skip(1) {
            // SAFETY: as above.
            *at = unsafe { K::row(self.operands, row + r) };
        }
        let ahead = if first { P * self.weights.panel_bytes() } else { 0 };
        // SAFETY: rows and panels are as wide as the weights.
        let sums = unsafe { K::tile::<S, R, P>(s, rows, starts, self.weights.blocks(), ahead) };
        let mut stored = [[[0.0; LANES]; P]; R];
        for (r, sums) in sums.iter().enumerate() {
            for (p, &sum) in sums.iter().enumerate() {
                s.store(sum, &mut stored[r][p]);
            }
        }
        // SAFETY: these outputs belong to the caller.
        unsafe { self.put(stored.as_flattened_mut().as_flattened_mut(), P, row, panel, panels) };
        R
    }

    /// Adds the bias to the sums of a tile, rows of `width` panels, and writes those of `panels`
    /// without padding.
    ///
    /// # Safety
    /// As for [`Self::run`].
    #[inline(never)]
    unsafe fn put(&self, sums: &mut [f32], width: usize, row: usize, panel: usize, panels: usize) {
        let first = panel * LANES;
        let columns = self.column + first..self.column + self.weights.outputs.min(first + panels * LANES);
        for (r, sums) in sums.chunks_exact_mut(width * LANES).enumerate() {
            let sums = &mut sums[..columns.len()];
            if let Some(bias) = self.operands.bias {
                for (sum, bias) in sums.iter_mut().zip(&bias[columns.clone()]) {
                    *sum += bias;
                }
            }
            // SAFETY: this worker alone has these columns of the row.
            let out =
                unsafe { self.operands.out.part_mut(self.operands.out_rows.at(row + r), columns.clone()) };
            match self.operands.weights {
                None => out.copy_from_slice(sums),
                Some(weights) => add_weighted(out, weights[row + r], sums),
            }
        }
    }
}

/// `out += weight * y`, rounded after the product and after the sum.
#[inline(always)]
pub(crate) fn add_weighted(out: &mut [f32], weight: f32, y: &[f32]) {
    for (out, y) in out.iter_mut().zip(y) {
        *out += weight * y;
    }
}

/// Rows that are multiplied with all weights before the next ones: their activations stay in the
/// second-level cache (128 rows of 1536 bytes are 192 KiB).
const CHUNK_ROWS: usize = 128;

#[cfg(test)]
pub(crate) mod tests;
