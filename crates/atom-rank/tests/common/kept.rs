//! What a step was launched with, for those who look at it when it has ended.

use atom_base::{OutRow, SlotLoad, Span, TokenId};
use atom_ops::{PageTables, StepInputs};

/// The arrays of [`StepInputs`], kept.
pub struct Kept {
    pub recording: usize,
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
    cache_rows: Vec<u32>,
    spans: Vec<Span>,
    out: Vec<OutRow>,
    slot_loads: Vec<SlotLoad>,
    tables: Vec<u32>,
    stride: usize,
    group_rows: Vec<u32>,
    lane: usize,
}

impl Kept {
    pub fn of(recording: usize, inputs: &StepInputs<'_>) -> Self {
        Self {
            recording,
            tokens: inputs.tokens.to_vec(),
            positions: inputs.positions.to_vec(),
            cache_rows: inputs.cache_rows.to_vec(),
            spans: inputs.spans.to_vec(),
            out: inputs.out.to_vec(),
            slot_loads: inputs.slot_loads.to_vec(),
            tables: inputs.tables.entries.to_vec(),
            stride: inputs.tables.stride,
            group_rows: inputs.group_rows.to_vec(),
            lane: inputs.lane,
        }
    }

    pub fn inputs(&self) -> StepInputs<'_> {
        StepInputs {
            tokens: &self.tokens,
            positions: &self.positions,
            cache_rows: &self.cache_rows,
            spans: &self.spans,
            out: &self.out,
            slot_loads: &self.slot_loads,
            tables: PageTables { entries: &self.tables, stride: self.stride },
            group_rows: &self.group_rows,
            lane: self.lane,
        }
    }
}
