//! The plain data of one step that the scheduler writes and a backend reads.

use crate::ids::{SlotId, TokenId};
use crate::mask::MaskCell;
use crate::sampling::SamplingParams;
use std::sync::Arc;

/// Consecutive rows of one sequence in a step: one row in decode, many in a prefill chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The sequence's device state, and its row in the page tables.
    pub slot: SlotId,
    /// First row of the span in the step.
    pub first_row: u32,
    /// Rows of the span.
    pub rows: u32,
    /// Absolute position of the first row; row `i` of the span sits at `start + i`.
    pub start: u32,
}

/// Stands for a row's token where only the device knows it yet: the last one that it sampled in `slot`.
/// A step that is planned while the one before still runs begins with it.
pub fn last_of(slot: SlotId) -> TokenId {
    LAST | slot.0
}

/// The slot whose last token is meant, if `token` is made by [`last_of`].
pub fn slot_of_last(token: TokenId) -> Option<SlotId> {
    (token & LAST != 0).then_some(SlotId(token & !LAST))
}

/// No vocabulary and no number of slots comes near it.
const LAST: TokenId = 1 << 31;

/// A row whose logits are needed.
#[derive(Clone, Debug)]
pub struct OutRow {
    /// The row in the step.
    pub row: u32,
    /// Whose penalties and history apply.
    pub slot: SlotId,
    /// Absolute position of the token that is chosen or scored: the row's position + 1.
    pub position: u32,
    /// `Some`: report the log-probability of this (prompt) token instead of sampling one.
    pub target: Option<TokenId>,
    /// How to sample and what to report.
    pub params: Arc<SamplingParams>,
    /// `Some`: only tokens of this mask may be chosen. It may come while the step runs.
    pub mask: Option<Arc<MaskCell>>,
}

/// (Re)fills the penalty state of a slot: on admission and after a preemption.
#[derive(Clone, Debug)]
pub struct SlotLoad {
    /// The slot to fill; what it held is forgotten.
    pub slot: SlotId,
    /// The request's prompt.
    pub prompt: Arc<[TokenId]>,
    /// What has been generated so far: empty but after a preemption.
    pub generated: Arc<[TokenId]>,
}

/// A new entry of a page table: the `index`-th page of the sequence in `slot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableEntry {
    /// Which table.
    pub slot: SlotId,
    /// Which page of the sequence: position / page size.
    pub index: u32,
    /// The page of the KV cache.
    pub page: crate::ids::PageId,
}
