//! Where each array of a step lies in the one buffer that is uploaded, as a pure function of the step's shape.

use crate::work::{Piece, Tile, WorkSpec};
use atom_ops::StepShape;

/// What sizes depend on besides the shape: fixed at start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Slots of per-request state, the Sink included.
    pub slots: usize,
    /// Pages of the longest sequence: the stride of the page tables.
    pub pages_per_sequence: usize,
    /// What attention's work lists are made for; `None` if there are none.
    pub work: Option<WorkSpec>,
    /// Bytes of one out row's sampling record.
    pub sample_bytes: usize,
}

/// Byte offsets into the staging buffer, each a multiple of [`ALIGN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// `int[16]`, see `Header` in `kernels/prelude.cuh`.
    pub header: usize,
    /// `u32[rows]`
    pub tokens: usize,
    /// `u32[rows]`
    pub positions: usize,
    /// `u32[rows]`: page * page size + offset.
    pub cache_rows: usize,
    /// `u32[rows]`
    pub row_slots: usize,
    /// `u32[lanes]`
    pub group_rows: usize,
    /// `u32[out rows]`
    pub out_rows: usize,
    /// Attention's tiles of rows.
    pub tiles: usize,
    /// Attention's pieces of few rows.
    pub pieces: usize,
    /// How each out row is sampled.
    pub samples: usize,
    /// `u32[entries, 2]`: new entries of the page tables. Last, because only those that there are travel.
    pub updates: usize,
    /// All of it.
    pub end: usize,
}

impl Layout {
    /// For one shape.
    pub fn new(shape: &StepShape, limits: &Limits) -> Self {
        let mut end = 0;
        let mut place = |bytes: usize| {
            let start = end;
            end = (end + bytes).next_multiple_of(ALIGN);
            start
        };
        let rows = 4 * shape.rows;
        let work = limits.work.map(|work| work.room(shape.rows));
        Self {
            header: place(4 * HEADER_WORDS),
            tokens: place(rows),
            positions: place(rows),
            cache_rows: place(rows),
            row_slots: place(rows),
            group_rows: place(4 * shape.lanes),
            out_rows: place(4 * shape.out_rows),
            tiles: place(work.map_or(0, |room| room.tiles * size_of::<Tile>())),
            pieces: place(work.map_or(0, |room| room.pieces * size_of::<Piece>())),
            samples: place(limits.sample_bytes * shape.out_rows),
            // Every entry may be new in one step: all slots admitted with cached prefixes.
            updates: place(8 * limits.slots * limits.pages_per_sequence),
            end,
        }
    }

    /// Changes with any offset. A replay compares it with the one that was captured.
    pub fn hash(&self) -> u64 {
        let Self { header, tokens, positions, cache_rows, row_slots, group_rows, .. } = *self;
        let Self { out_rows, tiles, pieces, samples, updates, end, .. } = *self;
        let offsets = [
            header, tokens, positions, cache_rows, row_slots, group_rows, out_rows, tiles, pieces, samples,
            updates, end,
        ];
        // FNV-1a.
        offsets
            .iter()
            .flat_map(|offset| (*offset as u64).to_le_bytes())
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
            })
    }
}

/// Words of a step's header.
pub(crate) const HEADER_WORDS: usize = 16;

/// Kernels read 16 bytes at a time; lines of the cache are 128.
pub(crate) const ALIGN: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: WorkSpec =
        WorkSpec { group: 4, kv_heads: 2, window: 0, piece_rows_max: 8, blocks: 264, slots: 300 };
    const LIMITS: Limits = Limits { slots: 5, pages_per_sequence: 7, work: Some(WORK), sample_bytes: 80 };

    #[test]
    fn arrays_lie_apart_and_on_lines() {
        for rows in [1, 3, 33, 4096] {
            let shape = StepShape { rows, out_rows: rows.min(4), lanes: 2 };
            let l = Layout::new(&shape, &LIMITS);
            let room = WORK.room(rows);
            let places = [
                (l.header, 64),
                (l.tokens, 4 * rows),
                (l.positions, 4 * rows),
                (l.cache_rows, 4 * rows),
                (l.row_slots, 4 * rows),
                (l.group_rows, 8),
                (l.out_rows, 4 * shape.out_rows),
                (l.tiles, 16 * room.tiles),
                (l.pieces, 32 * room.pieces),
                (l.samples, 80 * shape.out_rows),
                (l.updates, 8 * 35),
            ];
            for pair in places.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
            }
            assert!(places.iter().all(|(start, _)| start.is_multiple_of(ALIGN)));
            assert!(l.updates + 8 * 35 <= l.end);
        }
    }

    #[test]
    fn the_hash_tells_layouts_apart() {
        let shape = |rows| StepShape { rows, out_rows: 4, lanes: 1 };
        let hash = |shape, limits: &Limits| Layout::new(&shape, limits).hash();
        assert_eq!(hash(shape(64), &LIMITS), hash(shape(64), &LIMITS));
        assert_ne!(hash(shape(64), &LIMITS), hash(shape(128), &LIMITS));
        assert_ne!(hash(shape(64), &LIMITS), hash(shape(64), &Limits { work: None, ..LIMITS }));
    }
}
