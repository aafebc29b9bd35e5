//! What one lane runs in one step, as arrays; filled in place, so that a step allocates nothing.

use atom_base::{OutRow, PageId, RequestId, SlotId, SlotLoad, Span, TableEntry, TokenId};

/// The rows of a step with everything that a backend needs to compute them.
#[derive(Debug, Default)]
pub struct Plan {
    /// `[rows]`
    pub tokens: Vec<TokenId>,
    /// Absolute positions. `[rows]`
    pub positions: Vec<u32>,
    /// Where k and v go: `page * page_size + offset`. `[rows]`
    pub cache_rows: Vec<u32>,
    /// Which rows belong to which sequence; they cover all rows, in order.
    pub spans: Vec<Span>,
    /// Whose each span is. `[spans]`
    pub owners: Vec<RequestId>,
    /// Rows with logits. `[out rows]`
    pub out: Vec<OutRow>,
    /// Penalty state to fill before the step.
    pub slot_loads: Vec<SlotLoad>,
    /// Page-table entries that are new since the step before.
    pub table_entries: Vec<TableEntry>,
    /// How many of the rows, the first ones, are the next token of somebody who decodes.
    pub decode_rows: usize,
}

impl Plan {
    /// An empty plan with room for the largest step.
    pub fn with_capacity(rows: usize, seqs: usize, pages_per_sequence: usize) -> Self {
        Self {
            tokens: Vec::with_capacity(rows),
            positions: Vec::with_capacity(rows),
            cache_rows: Vec::with_capacity(rows),
            spans: Vec::with_capacity(seqs),
            owners: Vec::with_capacity(seqs),
            out: Vec::with_capacity(rows),
            slot_loads: Vec::with_capacity(seqs),
            table_entries: Vec::with_capacity(seqs + pages_per_sequence),
            decode_rows: 0,
        }
    }

    /// Forgets the last step, keeps the room.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.cache_rows.clear();
        self.spans.clear();
        self.owners.clear();
        self.out.clear();
        self.slot_loads.clear();
        self.table_entries.clear();
        self.decode_rows = 0;
    }

    /// True if a row's token is held to a grammar: the row behind it can't be planned before this one is
    /// known.
    pub fn has_masks(&self) -> bool {
        self.out.iter().any(|row| row.mask.is_some())
    }

    /// Real rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    pub(crate) fn push_row(&mut self, token: TokenId, position: u32, page: PageId, page_size: usize) {
        assert_ne!(page, PageId::SINK, "real rows never write to the Sink");
        self.tokens.push(token);
        self.positions.push(position);
        self.cache_rows.push(page.0 * page_size as u32 + position % page_size as u32);
    }

    pub(crate) fn push_span(&mut self, owner: RequestId, slot: SlotId, rows: usize, start: u32) {
        let first_row = (self.rows() - rows) as u32;
        self.spans.push(Span { slot, first_row, rows: rows as u32, start });
        self.owners.push(owner);
    }
}
