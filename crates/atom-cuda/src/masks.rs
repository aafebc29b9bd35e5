//! Which rows of the steps on their way wait for a mask, and the masks on their way from cells to the gate.

use crate::gate::Gate;
use crate::landing::{TURNS, turn};
use atom_base::{MaskCell, OutRow, ScoredToken};
use std::sync::Arc;

/// Rows with masks of each turn's step. Room for all out rows is taken at start.
pub(crate) struct Masks {
    rows: [Vec<Masked>; TURNS],
}

/// An out row that chooses among the tokens of a mask.
struct Masked {
    row: usize,
    cell: Arc<MaskCell>,
    /// There was none by the deadline, or there can't be one.
    is_missing: bool,
}

impl Masks {
    pub(crate) fn new(out_rows: usize) -> Self {
        Self { rows: std::array::from_fn(|_| Vec::with_capacity(out_rows)) }
    }

    /// Before the launch of a step: its rows with masks wait from now on.
    pub(crate) fn expect(&mut self, gate: &Gate, sequence: u32, out: &[OutRow]) {
        let rows = &mut self.rows[turn(sequence)];
        rows.clear();
        for (row, out) in out.iter().enumerate() {
            if let Some(cell) = &out.mask {
                gate.close(sequence, row);
                rows.push(Masked { row, cell: Arc::clone(cell), is_missing: false });
            }
        }
    }

    /// Waits for the masks of a step and hands each on as it comes; each cell has a deadline. False if the step has none.
    pub(crate) fn bring(&mut self, gate: &mut Gate, sequence: u32) -> bool {
        let rows = &mut self.rows[turn(sequence)];
        for Masked { row, cell, is_missing } in rows.iter_mut() {
            if cell.wait(|mask| gate.open(sequence, *row, Some(mask))).is_none() {
                *is_missing = true;
                gate.open(sequence, *row, None);
            }
        }
        !rows.is_empty()
    }

    /// Lets a step that is given up go on without them.
    pub(crate) fn deny(&mut self, gate: &mut Gate, sequence: u32) {
        self.rows[turn(sequence)].drain(..).for_each(|masked| gate.open(sequence, masked.row, None));
    }

    /// Rows without their mask have chosen nothing, whatever the kernels say.
    pub(crate) fn mark_missing(&mut self, sequence: u32, results: &mut [ScoredToken]) {
        for masked in self.rows[turn(sequence)].drain(..).filter(|masked| masked.is_missing) {
            results[masked.row] = ScoredToken::NOT_CHOSEN;
        }
    }
}
