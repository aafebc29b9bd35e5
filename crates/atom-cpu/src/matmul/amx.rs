//! Products of bf16 weights and rounded activations by the tiles of AMX: 16 rows by 16 outputs by 32 inputs in
//! one instruction.
//!
//! `tdpbf16ps` adds the products of even inputs in one chain and those of odd ones in another, then both to
//! the tile (Intel SDM): the order of [`super::rounded`], so rows have the same bits here and there. Panels of
//! bf16 in pairs are tiles as they lie.
//!
//! Written as assembly, since the compiler has no stable name for these instructions. It never touches the
//! tile registers itself, so they keep what they hold from one block of assembly to the next.

use super::{CHUNK_ROWS, Form, Operands, Product, SUM_TILES, TILED_ROWS_MIN, tile_bytes};
use crate::elementwise::lanes::LANES;
use crate::isa::Isa;
use crate::round::{TILE, TILE_ELEMENTS, TILE_ROWS, copy_row_to_tiles};
use half::bf16;
use std::arch::asm;
use std::ops::Range;

/// Rows of activations as tiles.
#[derive(Clone, Copy)]
pub(super) struct Source {
    /// `[rows / 16, inputs / 32, 16, 32]`; behind the last row are numbers of no meaning.
    tiles: *const bf16,
}

/// Sums of a tile.
type Sums = [[f32; LANES]; TILE_ROWS];

impl Source {
    /// Rows `rows` of a product, if they are to be multiplied by tiles: as they lie, or gathered in scratch.
    ///
    /// # Safety
    /// As for [`super::multiply`].
    pub(super) unsafe fn of(isa: Isa, operands: &Operands<'_>, rows: &Range<usize>) -> Option<Self> {
        let codes = operands.codes.filter(|_| isa == Isa::Amx)?;
        let inputs = operands.x.width();
        match codes.form {
            Form::Integers => None,
            Form::Tiles => {
                assert!(rows.start.is_multiple_of(TILE_ROWS), "rows {rows:?} cut a tile");
                let first: *const bf16 = codes.codes.start().cast_const().cast();
                // SAFETY: whoever made the tiles had room for these rows.
                Some(Self { tiles: unsafe { first.add(rows.start * inputs) } })
            }
            Form::Rounded if rows.len() < TILED_ROWS_MIN || !inputs.is_multiple_of(TILE_ELEMENTS) => None,
            Form::Rounded => {
                let scratch = Scratch::of(operands);
                assert!(rows.len() <= CHUNK_ROWS, "{} rows in a chunk", rows.len());
                for (i, row) in rows.clone().enumerate() {
                    // SAFETY: nobody writes the row by the caller's promise; scratch is this worker's own and
                    // has room for a chunk.
                    unsafe {
                        let bytes = codes.codes.row(codes.rows.at(row));
                        let (_, x, _) = bytes.align_to::<f32>();
                        let tiles = scratch.gathered.add(i / TILE_ROWS * TILE_ROWS * inputs);
                        copy_row_to_tiles(x, i % TILE_ROWS, tiles);
                    }
                }
                Some(Self { tiles: scratch.gathered })
            }
        }
    }
}

/// What a worker works in.
struct Scratch {
    /// Rows as tiles, a chunk of them.
    gathered: *mut bf16,
    /// `[SUM_TILES]`
    sums: *mut Sums,
}

impl Scratch {
    fn of(operands: &Operands<'_>) -> Self {
        let (scratch, inputs) = (operands.scratch, operands.x.width());
        assert!(scratch.width() >= tile_bytes(inputs), "scratch for {inputs} inputs");
        let gathered = scratch.start();
        let bytes = size_of::<bf16>() * CHUNK_ROWS.next_multiple_of(TILE_ROWS) * inputs;
        // It starts on a cache line, and whole tiles keep what follows on one.
        Self { gathered: gathered.cast(), sums: gathered.wrapping_add(bytes).cast() }
    }
}

impl Product<'_> {
    /// The outputs of `panels` of pairs in `rows`, whose activations are `source`.
    ///
    /// # Safety
    /// As for [`Product::run`], on a processor with AMX.
    pub(super) unsafe fn tiled_pairs(&self, source: Source, panels: Range<usize>, rows: Range<usize>) {
        let inputs = self.weights.inputs;
        let sums = Scratch::of(self.operands).sums;
        // SAFETY: as there.
        unsafe {
            configure();
            for panel in panels.clone().step_by(2) {
                let wide = (panels.end - panel).min(2);
                let w = [0, wide - 1].map(|p| self.weights.panel(panel + p).cast::<bf16>());
                for (pair, first) in rows.clone().step_by(2 * TILE_ROWS).enumerate() {
                    let count = (rows.end - first).min(2 * TILE_ROWS);
                    let tall = count.div_ceil(TILE_ROWS);
                    let x = [0, tall - 1].map(|t| source.tiles.add((2 * pair + t) * TILE_ROWS * inputs));
                    match (tall, wide) {
                        (1, 1) => pair_sums::<1, 1>(x, w, inputs, sums),
                        (1, _) => pair_sums::<1, 2>(x, w, inputs, sums),
                        (_, 1) => pair_sums::<2, 1>(x, w, inputs, sums),
                        _ => pair_sums::<2, 2>(x, w, inputs, sums),
                    }
                    for r in 0..tall {
                        let count = TILE_ROWS.min(count - r * TILE_ROWS);
                        for p in 0..wide {
                            let sums = &mut *sums.add(2 * r + p);
                            let sums = sums[..count].as_flattened_mut();
                            self.put(sums, 1, first + r * TILE_ROWS, panel + p, 1);
                        }
                    }
                }
            }
            release();
        }
    }
}

/// The sums of `R` tiles of rows and `P` panels over all inputs; those of tile `r` and panel `p` go to place
/// `2 * r + p`.
///
/// # Safety
/// Tiles are configured; `x` and `w` are `inputs` wide; `to` has four places.
unsafe fn pair_sums<const R: usize, const P: usize>(
    x: [*const bf16; 2],
    w: [*const bf16; 2],
    inputs: usize,
    to: *mut Sums,
) {
    // SAFETY: the caller's promise, here and below.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack));
        for at in (0..inputs * TILE_ROWS).step_by(TILE) {
            asm!(
                "tileloadd tmm4, [{x} + {stride}]",
                "tileloadd tmm6, [{w} + {stride}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                x = in(reg) x[0].add(at), w = in(reg) w[0].add(at), stride = in(reg) STRIDE,
                options(nostack, preserves_flags),
            );
            if P == 2 {
                asm!(
                    "tileloadd tmm7, [{w} + {stride}]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    w = in(reg) w[1].add(at), stride = in(reg) STRIDE,
                    options(nostack, preserves_flags),
                );
            }
            if R == 2 {
                asm!(
                    "tileloadd tmm5, [{x} + {stride}]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    x = in(reg) x[1].add(at), stride = in(reg) STRIDE,
                    options(nostack, preserves_flags),
                );
                if P == 2 {
                    asm!("tdpbf16ps tmm3, tmm5, tmm7", options(nostack, preserves_flags));
                }
            }
        }
        asm!(
            "tilestored [{a} + {stride}], tmm0",
            "tilestored [{b} + {stride}], tmm1",
            "tilestored [{c} + {stride}], tmm2",
            "tilestored [{d} + {stride}], tmm3",
            a = in(reg) to, b = in(reg) to.add(1), c = in(reg) to.add(2), d = in(reg) to.add(3),
            stride = in(reg) STRIDE,
            options(nostack, preserves_flags),
        );
    }
}

/// Makes all eight tiles of this thread 16 rows of 64 bytes.
///
/// # Safety
/// The processor has AMX, and the system allows it.
unsafe fn configure() {
    /// Palette 1; widths of tiles in bytes from byte 16, rows from byte 48 (Intel SDM, LDTILECFG).
    #[repr(align(64))]
    struct Config {
        bytes: [u8; 64],
    }
    static CONFIG: Config = {
        let mut bytes = [0; 64];
        bytes[0] = 1;
        let mut tile = 0;
        while tile < 8 {
            bytes[16 + 2 * tile] = STRIDE as u8;
            bytes[48 + tile] = TILE_ROWS as u8;
            tile += 1;
        }
        Config { bytes }
    };
    // SAFETY: the caller's promise.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIG.bytes, options(nostack, preserves_flags)) };
}

/// Gives the tiles up, so that switching threads needn't save them.
///
/// # Safety
/// As for [`configure`].
unsafe fn release() {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
}

/// Bytes from one row of a tile to the next, everywhere.
const STRIDE: usize = TILE_ELEMENTS * size_of::<bf16>();

const _: () = assert!(STRIDE == LANES * size_of::<f32>() && STRIDE == 64 && SUM_TILES == 4);
