//! The matrix product: `out[r][o] = sum over k of x[r][k] * w[o][k]`, then the bias.
//!
//! Each output element is one chain of float operations over k in ascending order (over blocks for
//! quantised activations), which depends on the width and the format only. So its bits don't depend on
//! how rows and outputs are cut into tiles, on threads, on neighbours or on the instruction set.

#[cfg(target_arch = "x86_64")]
mod amx;
mod plain;
mod quantised;
mod rounded;

use crate::elementwise::lanes::{LANES, Portable};
#[cfg(target_arch = "x86_64")]
use crate::elementwise::x86::{Avx2, Avx512};
use crate::isa::Isa;
use crate::pack::Packed;
use crate::quads::Quads;
use crate::quantise::{BlockScale, quantise_row};
use crate::round::{TILE_ELEMENTS, TILE_ROWS, round_row, round_row_to_tiles};
use crate::shared::{Rows, share};
use atom_weights::DType;
use half::{bf16, f16};
use plain::Plain;
use quantised::{
    Bytes, Exact, FiveBits, FiveBitsAndMinimum, Nibbles, NibblesAndMinimum, SuperFiveBits, SuperNibbles,
    SuperSixBits,
};
use rounded::Pairs;
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
    /// The same rows quantised or rounded; read only by weights that want them so, if at all.
    pub(crate) codes: Option<Codes<'a>>,
    /// Added at the end. `[outputs]`
    pub(crate) bias: Option<&'a [f32]>,
    /// `[.., outputs]`
    pub(crate) out: Rows<'a>,
    /// Where its rows lie.
    pub(crate) out_rows: RowMap<'a>,
    /// What this worker works in; see [`tile_bytes`].
    pub(crate) scratch: Rows<'a, u8>,
    /// If set, a row's outputs are multiplied with its weight and added to what is there, rounded after
    /// each; else they replace it. `[rows]`
    pub(crate) weights: Option<&'a [f32]>,
    /// Rows.
    pub(crate) rows: usize,
}

/// Quantised or rounded activations.
#[derive(Clone, Copy)]
pub(crate) struct Codes<'a> {
    /// `[.., bytes of a row]`
    pub(crate) codes: Rows<'a, i8>,
    /// Of integers. `[.., planes * inputs / 32]`
    pub(crate) scales: Rows<'a, BlockScale>,
    /// Where the rows of both lie.
    pub(crate) rows: RowMap<'a>,
    /// What the bytes are.
    pub(crate) form: Form,
}

/// How activations lie in their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Planes of signed codes. `[planes * inputs]`
    Integers,
    /// f32 that are bf16 numbers. `[inputs]`
    Rounded,
    /// bf16, sixteen rows one behind the other, in tiles. `[rows / 16, inputs / 32, 16, 32]`
    Tiles,
}

impl Codes<'_> {
    /// Makes them of the activations `x` of row `row`.
    ///
    /// # Safety
    /// `isa` is supported, and nobody else touches this row of either. Codes have room for as many rows as
    /// come; for tiles, eight at the least.
    pub(crate) unsafe fn make(&self, isa: Isa, x: &[f32], row: usize) {
        // SAFETY: the caller's promise. A row of f32 begins where an f32 may.
        unsafe {
            match self.form {
                Form::Integers => quantise_row(isa, x, self.codes.row_mut(row), self.scales.row_mut(row)),
                Form::Rounded => {
                    let (before, to, _) = self.codes.row_mut(row).align_to_mut::<f32>();
                    assert!(before.is_empty(), "rows of f32");
                    round_row(isa, x, to);
                }
                Form::Tiles => {
                    let tiles: *mut bf16 = self.codes.start().cast();
                    let tiles = tiles.add(row / TILE_ROWS * TILE_ROWS * x.len());
                    round_row_to_tiles(isa, x, row % TILE_ROWS, tiles);
                }
            }
        }
    }
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
    /// Set if rounded rows are multiplied by tiles.
    #[cfg(target_arch = "x86_64")]
    source: Option<amx::Source>,
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
    let (panels, chunks) = (panels_of(parts), Chunks::of(operands));
    let units = share(chunks.count() * panels, worker, workers);
    let mut unit = units.start;
    while unit < units.end {
        let (chunk, first) = (unit / panels, unit % panels);
        let last = panels.min(first + units.end - unit);
        let rows = chunks.rows(chunk);
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
    let chunks = Chunks::of(operands);
    for chunk in 0..chunks.count() {
        // SAFETY: the caller's promise.
        unsafe { multiply_chunk(isa, parts, operands, panels.clone(), chunks.rows(chunk)) };
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
    // SAFETY: passed on.
    #[cfg(target_arch = "x86_64")]
    let source = unsafe { amx::Source::of(isa, operands, &rows) };
    for Part { weights, column } in parts {
        let end = offset + weights.panels();
        let run = panels.start.max(offset)..panels.end.min(end);
        if !run.is_empty() {
            let product = Product {
                weights,
                column: *column,
                operands,
                #[cfg(target_arch = "x86_64")]
                source,
            };
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
        let form = self.operands.codes.map(|codes| codes.form);
        // SAFETY: passed on.
        unsafe {
            match (self.weights.dtype, form) {
                (DType::F32, _) => self.enter::<Plain<f32>>(isa, panels, rows),
                (DType::F8_E4M3, _) => unreachable!("FP8 is held as f32"),
                (DType::F16, _) => self.enter::<Plain<f16>>(isa, panels, rows),
                (DType::BF16, _) if self.weights.paired => self.pairs(isa, panels, rows),
                (DType::BF16, _) => self.enter::<Plain<bf16>>(isa, panels, rows),
                (DType::Q8_0, Some(Form::Integers)) => self.enter::<Bytes>(isa, panels, rows),
                (DType::Q4_0, Some(Form::Integers)) => self.enter::<Nibbles>(isa, panels, rows),
                (DType::Q4_1, Some(Form::Integers)) => self.enter::<NibblesAndMinimum>(isa, panels, rows),
                (DType::Q5_0, Some(Form::Integers)) => self.enter::<FiveBits>(isa, panels, rows),
                (DType::Q5_1, Some(Form::Integers)) => self.enter::<FiveBitsAndMinimum>(isa, panels, rows),
                (DType::Q4_K, Some(Form::Integers)) => self.enter::<SuperNibbles>(isa, panels, rows),
                (DType::Q5_K, Some(Form::Integers)) => self.enter::<SuperFiveBits>(isa, panels, rows),
                (DType::Q6_K, Some(Form::Integers)) => self.enter::<SuperSixBits>(isa, panels, rows),
                (dtype, Some(_)) => unreachable!("{dtype:?} is refused where activations are rounded"),
                (DType::Q8_0, None) => self.enter::<Exact<Bytes>>(isa, panels, rows),
                (DType::Q4_0, None) => self.enter::<Exact<Nibbles>>(isa, panels, rows),
                (DType::Q4_1, None) => self.enter::<Exact<NibblesAndMinimum>>(isa, panels, rows),
                (DType::Q5_0, None) => self.enter::<Exact<FiveBits>>(isa, panels, rows),
                (DType::Q5_1, None) => self.enter::<Exact<FiveBitsAndMinimum>>(isa, panels, rows),
                (DType::Q4_K, None) => self.enter::<Exact<SuperNibbles>>(isa, panels, rows),
                (DType::Q5_K, None) => self.enter::<Exact<SuperFiveBits>>(isa, panels, rows),
                (DType::Q6_K, None) => self.enter::<Exact<SuperSixBits>>(isa, panels, rows),
            }
        }
    }

    /// bf16 weights and rounded activations.
    ///
    /// # Safety
    /// As for [`Self::run`].
    unsafe fn pairs(&self, isa: Isa, panels: Range<usize>, rows: Range<usize>) {
        // SAFETY: passed on; tiles are multiplied only where there is AMX.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if let Some(source) = self.source {
                return self.tiled_pairs(source, panels, rows);
            }
            self.enter::<Pairs>(isa, panels, rows);
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
                Isa::Avx512 | Isa::Amx => self.enter_avx512::<K>(panels, rows),
                #[cfg(not(target_arch = "x86_64"))]
                Isa::Avx2 | Isa::Avx512 | Isa::Amx => unreachable!("{isa} is refused on this processor"),
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
                } else if const { S::PANELS == 1 } && rows.len() > 1 {
                    self.rows::<S, K, 1>(s, rows.clone(), panel, 1);
                    panel += 1;
                } else {
                    self.rows::<S, K, 2>(s, rows.clone(), panel, left.min(2));
                    panel += 2;
                }
            }
        }
    }

    /// All rows of `P` panels. Few heights of tiles, since each is code of its own.
    ///
    /// # Safety
    /// As for [`Self::run`].
    #[inline(always)]
    unsafe fn rows<S: Quads, K: Kernel, const P: usize>(
        &self,
        s: S,
        rows: Range<usize>,
        panel: usize,
        panels: usize,
    ) {
        let mut row = rows.start;
        while row < rows.end {
            let (left, first) = (rows.end - row, row == rows.start);
            // SAFETY: passed on; the rows are within `rows`.
            row += unsafe {
                if const { S::ROWS >= 6 } && left >= 6 {
                    self.tile::<S, K, 6, P>(s, row, panel, panels, first)
                } else if const { S::ROWS >= 4 } && left >= 4 {
                    self.tile::<S, K, 4, P>(s, row, panel, panels, first)
                } else if const { S::ROWS >= 2 } && left >= 2 {
                    self.tile::<S, K, 2, P>(s, row, panel, panels, first)
                } else {
                    self.tile::<S, K, 1, P>(s, row, panel, panels, first)
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

/// How rows are cut: those of a chunk are multiplied with all weights before the next ones.
#[derive(Clone, Copy)]
struct Chunks {
    rows: usize,
    chunk: usize,
}

impl Chunks {
    fn of(operands: &Operands<'_>) -> Self {
        let rows = operands.rows;
        let chunk = match operands.codes {
            Some(Codes { form: Form::Tiles, .. }) => {
                // As many as stay in the second-level cache.
                let most = (TILED_BYTES / (size_of::<bf16>() * operands.x.width())).max(TILE_ROWS);
                rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(TILE_ROWS)
            }
            _ => rows.div_ceil(rows.div_ceil(CHUNK_ROWS).max(1)),
        };
        Self { rows, chunk: chunk.max(1) }
    }

    fn count(self) -> usize {
        self.rows.div_ceil(self.chunk)
    }

    fn rows(self, chunk: usize) -> Range<usize> {
        chunk * self.chunk..self.rows.min((chunk + 1) * self.chunk)
    }
}

/// What rows of a product with a matrix become before it.
pub(crate) fn form_of_rows(isa: Isa, rows: usize, inputs: usize) -> Form {
    if isa == Isa::Amx && rows >= TILED_ROWS_MIN && inputs.is_multiple_of(TILE_ELEMENTS) {
        Form::Tiles
    } else {
        Form::Rounded
    }
}

/// Bytes that a worker works in for products of rounded activations with matrices of so many inputs: gathered
/// rows and sums.
pub(crate) fn tile_bytes(inputs: usize) -> usize {
    let gathered = size_of::<bf16>() * CHUNK_ROWS.next_multiple_of(TILE_ROWS) * inputs;
    gathered.next_multiple_of(64) + SUM_TILES * size_of::<[[f32; LANES]; TILE_ROWS]>()
}

/// Rows that are multiplied with all weights before the next ones: their activations stay in the
/// second-level cache (128 rows of 1536 bytes are 192 KiB).
const CHUNK_ROWS: usize = 128;

/// The same for rows in tiles.
const TILED_BYTES: usize = 512 << 10;

/// Fewer rows are multiplied with the vectors of AVX-512.
const TILED_ROWS_MIN: usize = 8;

/// Tiles of sums: two of rows, two panels.
const SUM_TILES: usize = 4;

#[cfg(test)]
pub(crate) mod tests;
