//! What the sampling kernels read and write, as the bytes that travel: rows, loads of slots, results.
//!
//! The layouts are those of `kernels/sample.cuh` and `kernels/sample_load.cu`. Nothing here allocates in a step.

use atom_base::limits::{LOGIT_BIAS_MAX, TOP_LOGPROBS_MAX};
use atom_base::{OutRow, SamplingParams, ScoredToken, SlotId, SlotLoad, TokenId, TopLogprobs};
use std::sync::Arc;

/// Bytes of a row's record.
pub const ROW_BYTES: usize = 80;
/// Bytes of a row's result.
pub const RESULT_BYTES: usize = 12 + 4 + 8 * TOP_LOGPROBS_MAX;
/// Bytes of one entry of a bias table.
pub const BIAS_BYTES: usize = 8;
/// Bytes of a record that fills a bias table.
pub const BIAS_LOAD_BYTES: usize = 16;
/// Bytes of a record that fills a slot's history.
pub const SEEN_LOAD_BYTES: usize = 32;

/// The record of an out row of a model with `vocab` tokens.
pub fn row_bytes(out: &OutRow, vocab: usize) -> [u8; ROW_BYTES] {
    let params = &*out.params;
    let scores = out.target.is_some();
    let truncates_min_p = !scores && params.min_p > 0.0;
    let min_p_log =
        if truncates_min_p { f64::from(params.temperature) * f64::from(params.min_p).ln() } else { 0.0 };
    let asked = if scores { Some(params.prompt_logprobs.unwrap_or(0)) } else { params.logprobs };
    let biases = if scores { 0 } else { params.logit_bias.len() };
    let flag = |is: bool, flag: u32| if is { flag } else { 0 };
    let flags = flag(scores, SCORES_TARGET)
        | flag(!scores && params.has_penalties(), PENALISES)
        | flag(biases > 0, BIASES)
        | flag(asked.is_some(), REPORTS)
        | flag(truncates_min_p, TRUNCATES_MIN_P)
        | flag(out.mask.is_some(), MASKED);
    // All tokens are as many as no limit.
    let top_k = if (params.top_k as usize) < vocab { params.top_k } else { 0 };
    let mut record = Record { bytes: [0; ROW_BYTES], at: 0 };
    record.put(out.slot.0.to_le_bytes());
    record.put(out.position.to_le_bytes());
    record.put(flags.to_le_bytes());
    record.put(out.target.unwrap_or(0).to_le_bytes());
    record.put(params.temperature.to_le_bytes());
    record.put(params.top_p.to_le_bytes());
    record.put(min_p_log.to_le_bytes());
    record.put(top_k.to_le_bytes());
    record.put(u32::from(asked.unwrap_or(0)).to_le_bytes());
    record.put(params.choice.to_le_bytes());
    record.put((biases as u32).to_le_bytes());
    record.put(params.seed.to_le_bytes());
    record.put(params.repetition_penalty.to_le_bytes());
    record.put(params.frequency_penalty.to_le_bytes());
    record.put(params.presence_penalty.to_le_bytes());
    record.bytes
}

/// The result of a row, from [`RESULT_BYTES`] bytes.
pub fn result(bytes: &[u8]) -> ScoredToken {
    assert_eq!(bytes.len(), RESULT_BYTES, "one result");
    let token = word(bytes, 0);
    if token == TokenId::MAX {
        return ScoredToken::NOT_A_NUMBER;
    }
    let mut top = TopLogprobs::EMPTY;
    for i in 0..word(bytes, 2) as usize {
        let logprob = f32::from_bits(word(bytes, 4 + TOP_LOGPROBS_MAX + i));
        // Less likely than anything are only tokens that a mask forbids.
        if logprob > f32::NEG_INFINITY {
            top.push(word(bytes, 4 + i), logprob);
        }
    }
    ScoredToken { token, logprob: f32::from_bits(word(bytes, 1)), top }
}

/// Loads of histories, cut into parts of bounded size: one launch of `sample_load_seen` each, in order.
pub struct SeenParts<'a> {
    loads: &'a [SlotLoad],
    /// Tokens of the first load that earlier parts had.
    done: usize,
}

/// How much of its room a part takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Records.
    pub loads: usize,
    /// Tokens, or entries of bias tables.
    pub items: usize,
}

impl<'a> SeenParts<'a> {
    /// All of `loads`.
    pub fn new(loads: &'a [SlotLoad]) -> Self {
        Self { loads, done: 0 }
    }

    /// True if nothing is left.
    pub fn is_done(&self) -> bool {
        self.loads.is_empty()
    }

    /// Writes the next part to `records` and `tokens`, both whole numbers of their items and not empty. `None` when
    /// nothing is left. A part names no slot twice.
    pub fn next_part(&mut self, records: &mut [u8], tokens: &mut [u8]) -> Option<Part> {
        let (loads_max, tokens_max) = (records.len() / SEEN_LOAD_BYTES, tokens.len() / 4);
        assert!(loads_max > 0 && tokens_max > 0, "room for a load and a token");
        let all = self.loads;
        let mut part = Part { loads: 0, items: 0 };
        while let Some(load) = self.loads.first() {
            let named = all[..part.loads].iter().any(|earlier| earlier.slot == load.slot);
            let (length, prompt) = (load.prompt.len() + load.generated.len(), load.prompt.len());
            let count = (length - self.done).min(tokens_max - part.items);
            // A load without tokens clears its slot all the same.
            if named || part.loads == loads_max || (count == 0 && length > 0) {
                break;
            }
            let end = self.done + count;
            let taken = [
                &load.prompt[self.done.min(prompt)..end.min(prompt)],
                &load.generated[self.done.max(prompt) - prompt..end.max(prompt) - prompt],
            ];
            let mut record = Record { bytes: [0; SEEN_LOAD_BYTES], at: 0 };
            for value in [
                load.slot.0,
                u32::from(self.done == 0),
                part.items as u32,
                taken[0].len() as u32,
                taken[1].len() as u32,
            ] {
                record.put(value.to_le_bytes());
            }
            records[part.loads * SEEN_LOAD_BYTES..][..SEEN_LOAD_BYTES].copy_from_slice(&record.bytes);
            let room = tokens[part.items * 4..].as_chunks_mut::<4>().0;
            for (place, token) in room.iter_mut().zip(taken.into_iter().flatten()) {
                *place = token.to_le_bytes();
            }
            (part.loads, part.items) = (part.loads + 1, part.items + count);
            if end < length {
                self.done = end;
                break;
            }
            (self.loads, self.done) = (&self.loads[1..], 0);
        }
        (part.loads > 0).then_some(part)
    }
}

/// Which parameters' biases each slot's table on the device holds: a table is filled when a request comes, not in
/// every step. A step whose rows all are new brings at most `out rows * LOGIT_BIAS_MAX` entries, 2 MiB for 256.
pub struct BiasTables {
    held: Vec<Option<Arc<SamplingParams>>>, // [slots]
    order: Vec<u64>,                        // [LOGIT_BIAS_MAX], scratch
}

impl BiasTables {
    /// All empty.
    pub fn new(slots: usize) -> Self {
        Self { held: vec![None; slots], order: Vec::with_capacity(LOGIT_BIAS_MAX) }
    }

    /// Whether a row of `out` needs a table that the device doesn't have.
    pub fn lacks(&self, out: &[OutRow]) -> bool {
        out.iter().any(|row| self.is_due(row))
    }

    fn is_due(&self, row: &OutRow) -> bool {
        // What is held lives, so an address is never another request's.
        let held = self.held[row.slot.0 as usize].as_ref();
        row.target.is_none()
            && !row.params.logit_bias.is_empty()
            && held.is_none_or(|held| !Arc::ptr_eq(held, &row.params))
    }

    /// Writes records and entries for the tables that `out` needs and the device doesn't have, for one launch of
    /// `sample_load_biases`. `None` when there are none.
    pub fn update(&mut self, out: &[OutRow], records: &mut [u8], entries: &mut [u8]) -> Option<Part> {
        let mut part = Part { loads: 0, items: 0 };
        for row in out {
            if !self.is_due(row) {
                continue;
            }
            self.held[row.slot.0 as usize] = Some(Arc::clone(&row.params));
            self.write(row.slot, &row.params.logit_bias, &mut part, records, entries);
        }
        (part.loads > 0).then_some(part)
    }

    /// Entries go by token, and of one token in the order in which they were listed: sums of floats depend on it.
    fn write(
        &mut self,
        slot: SlotId,
        biases: &[(TokenId, f32)],
        part: &mut Part,
        records: &mut [u8],
        entries: &mut [u8],
    ) {
        assert!(biases.len() <= LOGIT_BIAS_MAX, "validated");
        let mut record = Record { bytes: [0; BIAS_LOAD_BYTES], at: 0 };
        for value in [slot.0, part.items as u32, biases.len() as u32] {
            record.put(value.to_le_bytes());
        }
        records[part.loads * BIAS_LOAD_BYTES..][..BIAS_LOAD_BYTES].copy_from_slice(&record.bytes);
        self.order.clear();
        self.order
            .extend(biases.iter().zip(0u64..).map(|(&(token, _), place)| u64::from(token) << 32 | place));
        self.order.sort_unstable();
        let room = entries[part.items * BIAS_BYTES..].as_chunks_mut::<BIAS_BYTES>().0;
        assert!(room.len() >= biases.len(), "room for {LOGIT_BIAS_MAX} entries a row");
        for (place, &key) in room.iter_mut().zip(&self.order) {
            let (token, bias) = biases[(key & u64::from(u32::MAX)) as usize];
            place[..4].copy_from_slice(&token.to_le_bytes());
            place[4..].copy_from_slice(&bias.to_le_bytes());
        }
        (part.loads, part.items) = (part.loads + 1, part.items + biases.len());
    }
}

/// Fields one behind the other.
struct Record<const N: usize> {
    bytes: [u8; N],
    at: usize,
}

impl<const N: usize> Record<N> {
    fn put<const M: usize>(&mut self, field: [u8; M]) {
        self.bytes[self.at..][..M].copy_from_slice(&field);
        self.at += M;
    }
}

fn word(bytes: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(*bytes[index * 4..].first_chunk().expect("within the result"))
}

// `RowFlag` of kernels/sample.cuh.
const SCORES_TARGET: u32 = 1;
const PENALISES: u32 = 2;
const BIASES: u32 = 4;
const REPORTS: u32 = 8;
const TRUNCATES_MIN_P: u32 = 16;
const MASKED: u32 = 32;

#[cfg(test)]
mod tests;
