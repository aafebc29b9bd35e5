//! What a step uploads, written into pinned memory by the layout.

use crate::layout::{HEADER_WORDS, Layout};
use crate::memory::Pinned;
use crate::peers::COMMS;
use crate::sample_rows::{ROW_BYTES, row_bytes};
use crate::work::{WorkCutter, WorkSpec};
use atom_ops::{Reserve, StepInputs};
use std::time::Duration;

/// The host's side of the staging buffer, and what the device's page tables hold.
pub(crate) struct Staging {
    /// In turns: a step in flight may still be read from the other one.
    pinned: [Pinned; 2],
    turn: usize,
    cutter: Option<WorkCutter>,
    tables: Vec<u32>, // [slots, pages of a sequence], as on the device
}

/// Places of the header that the host writes, see `Header` in `kernels/prelude.cuh`.
const ROWS: usize = 0;
const OUT_ROWS: usize = 1;
const SPANS: usize = 2;
const TILES: usize = 3;
const ITEMS: usize = 4;
const TABLE_ENTRIES: usize = 6;
const SEQUENCE: usize = 7;
const PATIENCE_MS: usize = 8;
const LANE_ROUND: usize = 9;
const GROUP_ROUND: usize = 10;

/// Kernels wait for masks so many times as long as the host waits for the step: a host that stood still for a while still
/// brings them in time. Only one that never comes back is outwaited.
const KERNELS_PATIENCE: u32 = 8;

impl Staging {
    pub(crate) fn new(pinned: [Pinned; 2], reserve: &Reserve, work: Option<WorkSpec>) -> Self {
        let cutter = work.map(|work| WorkCutter::new(work, reserve.top.rows));
        Self { pinned, turn: 0, cutter, tables: vec![0; reserve.slots * reserve.pages_per_sequence] }
    }

    /// What [`fill`](Self::fill) wrote last.
    pub(crate) fn bytes(&self) -> &Pinned {
        &self.pinned[self.turn]
    }

    /// Takes the buffer of a step's turn.
    pub(crate) fn take_turn(&mut self, turn: usize) {
        self.turn = turn;
    }

    /// What is not written hereafter must not matter.
    pub(crate) fn poison(&mut self) {
        self.pinned[self.turn].fill(0xff);
    }

    /// Writes a step, and returns how many bytes have to travel. Its first collectives have the numbers `rounds`.
    pub(crate) fn fill(
        &mut self,
        layout: &Layout,
        reserve: &Reserve,
        inputs: &StepInputs<'_>,
        (sequence, patience): (u32, Duration),
        rounds: [u32; COMMS],
    ) -> usize {
        let rows = inputs.tokens.len();
        let mut header = [0_u32; HEADER_WORDS];
        header[ROWS] = rows as u32;
        header[OUT_ROWS] = inputs.out.len() as u32;
        header[SPANS] = inputs.spans.len() as u32;
        let entries = self.update_tables(layout, reserve, inputs);
        header[TABLE_ENTRIES] = entries as u32;
        header[SEQUENCE] = sequence;
        let patience = patience.saturating_mul(KERNELS_PATIENCE);
        header[PATIENCE_MS] = patience.as_millis().min(u128::from(u32::MAX)) as u32;
        [header[LANE_ROUND], header[GROUP_ROUND]] = rounds;
        if let Some(cutter) = &mut self.cutter {
            let lists = &mut self.pinned[self.turn][layout.tiles..layout.samples];
            let (tiles, pieces) = lists.split_at_mut(layout.pieces - layout.tiles);
            let counts = cutter.cut(inputs.spans, words_of(tiles), words_of(pieces));
            (header[TILES], header[ITEMS]) = (counts.tiles, counts.pieces);
        }
        self.words(layout.header, header);
        self.words(layout.tokens, inputs.tokens.iter().copied());
        self.words(layout.positions, inputs.positions.iter().copied());
        self.words(layout.cache_rows, inputs.cache_rows.iter().copied());
        self.words(
            layout.row_slots,
            inputs.spans.iter().flat_map(|span| std::iter::repeat_n(span.slot.0, span.rows as usize)),
        );
        self.words(layout.group_rows, inputs.group_rows.iter().copied());
        self.words(layout.out_rows, inputs.out.iter().map(|out| out.row));
        if reserve.samples {
            let records = self.pinned[self.turn][layout.samples..].chunks_exact_mut(ROW_BYTES);
            for (record, out) in records.zip(inputs.out) {
                record.copy_from_slice(&row_bytes(out, reserve.vocab));
            }
        }
        layout.updates + 8 * entries
    }

    /// Entries of this step's sequences that the device does not have yet.
    fn update_tables(&mut self, layout: &Layout, reserve: &Reserve, inputs: &StepInputs<'_>) -> usize {
        let stride = reserve.pages_per_sequence;
        let mut entries = 0;
        for span in inputs.spans {
            let pages = (span.start + span.rows).div_ceil(reserve.page_size as u32) as usize;
            let first = span.slot.0 as usize * stride;
            let wanted = &inputs.tables.pages(span.slot)[..pages];
            let held = &mut self.tables[first..first + pages];
            if held == wanted {
                continue;
            }
            for (index, (held, &page)) in held.iter_mut().zip(wanted).enumerate() {
                if *held == page {
                    continue;
                }
                *held = page;
                let place = layout.updates + 8 * entries;
                let pinned = &mut self.pinned[self.turn];
                pinned[place..place + 4].copy_from_slice(&((first + index) as u32).to_le_bytes());
                pinned[place + 4..place + 8].copy_from_slice(&page.to_le_bytes());
                entries += 1;
            }
        }
        entries
    }

    fn words(&mut self, offset: usize, words: impl IntoIterator<Item = u32>) {
        for (place, word) in self.pinned[self.turn][offset..].as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
    }
}

/// Bytes of pinned memory as entries of `N` words.
fn words_of<const N: usize>(bytes: &mut [u8]) -> &mut [[u32; N]] {
    // SAFETY: any four bytes are a u32, and the middle part is aligned and within bounds.
    let (before, entries, _) = unsafe { bytes.align_to_mut::<[u32; N]>() };
    assert!(before.is_empty(), "arrays of a step start on a line");
    entries
}
