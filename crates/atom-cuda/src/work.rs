//! The work list of attention: what a step's spans become on the device.
//!
//! Grids are fixed when a step is recorded; what they do comes from two arrays of the step, 16-byte aligned, with
//! their counts in the header:
//! * `tiles`  `[WorkSpec::room().tiles, 4]` u32 for `attend_tiles.cu`, count in `header[TILES]`;
//! * `pieces` `[WorkSpec::room().pieces, 8]` u32 for `attend_split.cu`, count in `header[ITEMS]`.
//!
//! Spans of many rows are cut into tiles, spans of few rows into *items* whose rows share what is read of the
//! cache, and items into *pieces* so that all blocks have about as much to read. A piece is a run of splits, and
//! splits are ranges of absolute positions, so neither cut changes a bit of the result (see the kernels).
//!
//! Layers with a sliding window have lists of their own, from a [`WorkSpec`] with that window. A list made for a
//! wider window is right too, only less even.

use atom_base::Span;

/// What lists are made for; fixed when attention is reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkSpec {
    /// Query heads of a kv head.
    pub group: u32,
    /// Kv heads of this rank.
    pub kv_heads: u32,
    /// Positions that a row sees at most, its own included; 0 if all.
    pub window: u32,
    /// Spans of more rows become tiles, others pieces. 0 makes tiles of all (one order of sums for all rows),
    /// `u32::MAX` pieces of all (devices without the kernel for tiles).
    pub piece_rows_max: u32,
    /// Blocks of the kernel for pieces that are resident at once.
    pub blocks: u32,
    /// Slots for the sums of pieces that are not a whole item.
    pub slots: u32,
}

/// Entries that lists have room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkRoom {
    /// Of 4 words.
    pub tiles: usize,
    /// Of 8 words.
    pub pieces: usize,
}

/// Entries of a step's lists, for the header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkCounts {
    /// `header[TILES]`
    pub tiles: u32,
    /// `header[ITEMS]`
    pub pieces: u32,
}

/// `first_row, rows, start, slot`, see `Tile` in attend_tiles.cu.
pub type Tile = [u32; 4];

/// `first_row, rows, start, slot, from, to, partial, place`, see `Piece` in attend_split.cu.
pub type Piece = [u32; 8];

/// Makes the lists of steps. Allocates when it is made, and never again.
pub struct WorkCutter {
    spec: WorkSpec,
    rows: usize,
    /// Spans of many rows, most work first.
    wide: Vec<Span>,
    /// Items, longest first.
    items: Vec<Item>,
    /// Positions that each share of the blocks has got so far.
    loads: Vec<u64>,
}

/// A few rows of a span.
#[derive(Clone, Copy)]
struct Item {
    slot: u32,
    first_row: u32,
    rows: u32,
    start: u32,
    /// Where the first split that it sees begins.
    from: u32,
}

/// `partial` of a piece that is a whole item.
const WHOLE: u32 = u32::MAX;

/// Rows of the products of `attend_tiles`.
const TILE_HEADS: u32 = 128;

/// Rows of the products of `attend_split`.
const ITEM_HEADS: u32 = 16;

/// An item is not cut for a few positions more than its share: of this part of the share.
const SLACK: u64 = 16;

/// Pieces of an item share a word with their number.
const PIECES_MAX: u32 = 0xffff;

impl WorkSpec {
    /// Rows of a tile.
    pub fn tile_rows(&self) -> u32 {
        assert!(self.group <= TILE_HEADS, "{} query heads of a kv head don't fit a tile", self.group);
        TILE_HEADS / self.group
    }

    /// Rows of an item.
    pub fn item_rows(&self) -> u32 {
        (ITEM_HEADS / self.group).max(1)
    }

    /// Units of each piece: what one block does at a time.
    pub fn units(&self) -> u32 {
        self.kv_heads * self.group.div_ceil(ITEM_HEADS)
    }

    /// Room for any step of up to `rows` rows.
    pub fn room(&self, rows: usize) -> WorkRoom {
        let (most, narrow) = (rows as u64, u64::from(self.piece_rows_max));
        // Spans that become tiles are of narrow + 1 rows or more; each leaves at most one tile not full.
        let spans = most / (narrow + 1);
        let tiles = if spans == 0 { 0 } else { (most - spans) / u64::from(self.tile_rows()) + spans };
        let items = if narrow == 0 { 0 } else { most };
        let cut = if items == 0 { 0 } else { u64::from(self.slots) };
        WorkRoom { tiles: tiles as usize, pieces: (items + cut) as usize }
    }
}

impl WorkCutter {
    /// For steps of up to `rows` rows.
    pub fn new(spec: WorkSpec, rows: usize) -> Self {
        assert!(spec.group > 0 && spec.kv_heads > 0 && spec.blocks > 0, "{spec:?}");
        let shares = (spec.blocks / spec.units()).max(1);
        Self {
            spec,
            rows,
            wide: Vec::with_capacity(rows),
            items: Vec::with_capacity(rows),
            loads: vec![0; shares as usize],
        }
    }

    /// Fills the lists of one step; they have [`WorkSpec::room`] for it.
    pub fn cut(&mut self, spans: &[Span], tiles: &mut [Tile], pieces: &mut [Piece]) -> WorkCounts {
        let rows: usize = spans.iter().map(|span| span.rows as usize).sum();
        assert!(rows <= self.rows, "{rows} rows of a step where {} were reserved", self.rows);
        self.sort(spans);
        WorkCounts { tiles: self.cut_tiles(tiles), pieces: self.cut_pieces(pieces) }
    }

    fn sort(&mut self, spans: &[Span]) {
        self.wide.clear();
        self.items.clear();
        for span in spans.iter().filter(|span| span.rows > 0) {
            if span.rows > self.spec.piece_rows_max {
                self.wide.push(*span);
                continue;
            }
            for offset in (0..span.rows).step_by(self.spec.item_rows() as usize) {
                let start = span.start + offset;
                let first =
                    if self.spec.window == 0 { 0 } else { (start + 1).saturating_sub(self.spec.window) };
                self.items.push(Item {
                    slot: span.slot.0,
                    first_row: span.first_row + offset,
                    rows: (span.rows - offset).min(self.spec.item_rows()),
                    start,
                    from: split_begin(first),
                });
            }
        }
        let work = |span: &Span| u64::from(span.rows) * (2 * u64::from(span.start) + u64::from(span.rows));
        // Ties go by row, so that a list depends on the step only.
        self.wide.sort_unstable_by_key(|span| (std::cmp::Reverse(work(span)), span.first_row));
        self.items.sort_unstable_by_key(|item| (std::cmp::Reverse(item.end() - item.from), item.first_row));
    }

    /// Longest first within a span: the last tiles of a step are short, so blocks end together.
    fn cut_tiles(&self, tiles: &mut [Tile]) -> u32 {
        let mut count = 0;
        for span in &self.wide {
            let height = self.spec.tile_rows();
            for offset in (0..span.rows).step_by(height as usize).rev() {
                let rows = (span.rows - offset).min(height);
                tiles[count] = [span.first_row + offset, rows, span.start + offset, span.slot.0];
                count += 1;
            }
        }
        count as u32
    }

    fn cut_pieces(&mut self, pieces: &mut [Piece]) -> u32 {
        let total: u64 = self.items.iter().map(|item| u64::from(item.end() - item.from)).sum();
        let share = total * u64::from(self.spec.units()) / u64::from(self.spec.blocks);
        self.loads.fill(0);
        let (shares, mut slots, mut count) = (self.loads.len(), 0, 0);
        for (i, item) in self.items.iter().enumerate() {
            // There and back again: whoever got the longest of one round gets the shortest of the next.
            let (round, place) = (i / shares, i % shares);
            let load = &mut self.loads[if round % 2 == 0 { place } else { shares - 1 - place }];
            let run = item.run(share.saturating_sub(*load), self.spec.slots - slots);
            *load += u64::from(run.end - item.from);
            let cut = &mut pieces[count..];
            let partial = if run.pieces > 1 { slots } else { WHOLE };
            let edges = (run.pieces << 16, partial);
            cut[0] = item.piece(item.from, run.end, edges.1, edges.0);
            let mut from = run.end;
            for number in 1..run.pieces {
                cut[number as usize] = item.piece(from, split_end(from), edges.1, edges.0 | number);
                from = split_end(from);
            }
            slots += if run.pieces > 1 { run.pieces } else { 0 };
            count += run.pieces as usize;
        }
        let length = |piece: &Piece| piece[5].min(piece[2] + piece[1]) - piece[4];
        pieces[..count].sort_unstable_by_key(|piece| (std::cmp::Reverse(length(piece)), piece[0], piece[4]));
        count as u32
    }
}

/// The first piece of an item ends at `end`; the rest are single splits.
struct Run {
    end: u32,
    pieces: u32,
}

impl Item {
    /// Behind the last position that it sees.
    fn end(&self) -> u32 {
        self.start + self.rows
    }

    fn piece(&self, from: u32, to: u32, partial: u32, place: u32) -> Piece {
        [self.first_row, self.rows, self.start, self.slot, from, to, partial, place]
    }

    /// As many splits at the front as fit `room` positions, at least one, and more if `slots` are too few for the
    /// rest.
    fn run(&self, room: u64, slots: u32) -> Run {
        let last = split_end(self.end() - 1);
        let whole = Run { end: last, pieces: 1 };
        let fits = |end: u32, room: u64| u64::from(end.min(self.end()) - self.from) <= room;
        if fits(last, room + room / SLACK) {
            return whole;
        }
        let (mut end, mut pieces) = (split_end(self.from), 1 + splits_between(split_end(self.from), last));
        while end < last && (pieces > slots.min(PIECES_MAX) || fits(split_end(end), room)) {
            (end, pieces) = (split_end(end), pieces - 1);
        }
        if end == last { whole } else { Run { end, pieces } }
    }
}

/// Positions of the split that holds `position`: part of the numbers' definition, see attend_split.cu. Wider far
/// out, so that the parts of a long sequence that are to be added up stay few.
fn split_width(position: u32) -> u32 {
    match position {
        0..16384 => 256,
        16384..65536 => 1024,
        _ => 4096,
    }
}

fn split_begin(position: u32) -> u32 {
    position - position % split_width(position)
}

fn split_end(position: u32) -> u32 {
    split_begin(position) + split_width(position)
}

/// Splits from one end of a split to another.
fn splits_between(mut from: u32, to: u32) -> u32 {
    let mut count = 0;
    while from < to {
        (from, count) = (split_end(from), count + 1);
    }
    count
}

#[cfg(test)]
mod tests;
