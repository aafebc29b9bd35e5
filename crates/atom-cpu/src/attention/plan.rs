//! What the workers of a step's attention do, cut before its first layer and used by all of them.

use super::{BUNDLE, PARTITION, TILE};
use atom_base::Span;
use std::ops::Range;

/// Some (row, head) pairs of one span over some partitions of its positions, for each kv head.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tile {
    /// Index of the span.
    pub(crate) span: usize,
    /// Pair `p` is row `p / group` of the span and query head `p % group` of the kv head.
    pub(crate) pairs: Range<usize>,
    /// Partitions that this tile covers.
    pub(crate) partitions: Range<usize>,
    /// Set if other tiles cover the rest of the partitions.
    pub(crate) split: Option<Split>,
}

/// Where the tiles of the same pairs meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Split {
    /// Tiles that share the pairs.
    pub(crate) pieces: usize,
    /// First of their counters of finished pieces, one for each kv head.
    pub(crate) pending: usize,
    /// First of their partial results, `[partitions, kv heads, pairs]`.
    pub(crate) partials: usize,
}

/// The tiles of a step, likely the costliest first. No tile's cut changes a bit: each pair is computed
/// alone, and partitions are merged in order wherever they were computed.
pub(crate) struct Plan {
    tiles: Vec<Tile>,
    group: usize,
    kv_heads: usize,
    workers: usize,
    pending_max: usize,
    partials_max: usize,
}

impl Plan {
    /// Room for steps of `rows` rows; `group` query heads share each of `kv_heads`.
    pub(crate) fn new(
        rows: usize,
        group: usize,
        kv_heads: usize,
        workers: usize,
        partials_max: usize,
    ) -> Self {
        // A whole tile has at least BUNDLE pairs or ends its span; cut tiles cost at least a unit.
        let tiles_max = rows * group.div_ceil(BUNDLE) + 2 * UNITS_PER_WORKER * workers;
        let pending_max = UNITS_PER_WORKER * workers + kv_heads;
        Self { tiles: Vec::with_capacity(tiles_max), group, kv_heads, workers, pending_max, partials_max }
    }

    /// The step's tiles.
    pub(crate) fn tiles(&self) -> &[Tile] {
        &self.tiles
    }

    /// Counters that splits may need.
    pub(crate) fn pending_max(&self) -> usize {
        self.pending_max
    }

    /// Cuts a step. Allocates nothing.
    pub(crate) fn cut(&mut self, spans: &[Span]) {
        self.tiles.clear();
        let pairs: usize = spans.iter().map(|span| span.rows as usize * self.group).sum();
        let cost = |span: &Span| {
            let (start, rows) = (span.start as usize, span.rows as usize);
            rows * self.group * (start + rows.div_ceil(2))
        };
        let units = UNITS_PER_WORKER * self.workers;
        let unit_cost = spans.iter().map(cost).sum::<usize>() * self.kv_heads / units;
        let width = (pairs * self.kv_heads / units).next_multiple_of(BUNDLE).clamp(BUNDLE, TILE);
        let (mut pending, mut partials) = (0, 0);
        for (index, span) in spans.iter().enumerate() {
            let pairs = span.rows as usize * self.group;
            // Later rows see more positions: start with them.
            for first in (0..pairs).step_by(width).rev() {
                let pairs = first..(first + width).min(pairs);
                let last = span.start as usize + (pairs.end - 1) / self.group;
                let partitions = last / PARTITION + 1;
                let wanted = pairs.len() * (last + 1) / unit_cost.max(1);
                let pieces = if self.workers == 1 { 1 } else { wanted.clamp(1, partitions) };
                let room = partitions * self.kv_heads * pairs.len();
                let fits = self.tiles.len() + pieces <= self.tiles.capacity()
                    && pending + self.kv_heads <= self.pending_max
                    && partials + room <= self.partials_max;
                let whole = Tile { span: index, pairs, partitions: 0..partitions, split: None };
                if pieces == 1 || !fits {
                    self.push(whole);
                    continue;
                }
                let split = Some(Split { pieces, pending, partials });
                for piece in 0..pieces {
                    let partitions = crate::shared::share(partitions, piece, pieces);
                    self.push(Tile { partitions, split, ..whole.clone() });
                }
                pending += self.kv_heads;
                partials += room;
            }
        }
    }

    fn push(&mut self, tile: Tile) {
        assert!(self.tiles.len() < self.tiles.capacity(), "more tiles than rows were reserved");
        self.tiles.push(tile);
    }
}

/// Units of work that a step is cut into for each worker, so that the last ones to finish wait little.
pub(super) const UNITS_PER_WORKER: usize = 8;
