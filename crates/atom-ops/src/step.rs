//! The arrays of one step, as a backend reads them.

use atom_base::{OutRow, SlotLoad, Span, TokenId};

/// Borrowed views of a Plan. `rows` = `tokens.len()` is the real row count; kernels stop there.
#[derive(Clone, Copy, Debug)]
pub struct StepInputs<'a> {
    /// A token, or the last one of its slot: see [`atom_base::last_of`]. `[rows]`
    pub tokens: &'a [TokenId],
    /// Absolute position of each row. `[rows]`
    pub positions: &'a [u32],
    /// Where each row's k and v go: `page * page_size + offset`. `[rows]`
    pub cache_rows: &'a [u32],
    /// Which rows belong together, in row order; they cover `0 .. rows`.
    pub spans: &'a [Span],
    /// Rows with logits. `[out rows]`
    pub out: &'a [OutRow],
    /// Penalty state to fill before the step.
    pub slot_loads: &'a [SlotLoad],
    /// Page tables of all slots.
    pub tables: PageTables<'a>,
    /// Rows granted to every lane of the group in this step. This lane may run fewer. `[lanes]`
    pub group_rows: &'a [u32],
    /// This lane's place among them.
    pub lane: usize,
}

/// `entries[slot * stride + index]` is the page that holds positions `index * page_size ..` of the
/// sequence in `slot`.
#[derive(Clone, Copy, Debug)]
pub struct PageTables<'a> {
    /// `[slots, stride]`
    pub entries: &'a [u32],
    /// Pages of the longest sequence.
    pub stride: usize,
}

impl PageTables<'_> {
    /// The pages of the sequence in `slot`.
    pub fn pages(&self, slot: atom_base::SlotId) -> &[u32] {
        let start = slot.0 as usize * self.stride;
        &self.entries[start..start + self.stride]
    }
}
