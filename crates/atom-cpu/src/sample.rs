//! The end of a step: from a row of logits to a token and its log-probability.
//!
//! In this order: of a row with a mask, tokens that it forbids are as if the model had never heard of
//! them; log-probabilities are taken of the model's own logits; then repetition, frequency and presence
//! penalties; `logit_bias`; temperature (0 takes the largest, of equals the lowest id); `min_p`, `top_k`,
//! `top_p`, each on what the one before it left; and one draw, keyed by (seed, choice, position).
//!
//! A token's weight `e^((logit - largest) / temperature)` becomes a whole number of 2^-40, so that sums
//! of weights are exact: no order, no instruction set and no neighbour can change which token a draw
//! falls on. A row's result depends on that row, its parameters and its slot's history only.

mod choose;
mod history;
mod keys;
mod mask;
mod passes;
mod score;

use crate::isa::Isa;
use atom_base::{OutRow, ScoredToken, SlotId, SlotLoad, TokenId};
use atom_ops::{OpsError, Reserve};
use history::History;
use keys::Key;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// Per-slot history and per-worker scratch, all of it reserved before the first step.
pub(crate) struct Sampler {
    isa: Isa,
    history: History,
    last: Box<[AtomicU32]>,         // [slots], sampled last
    scratch: Box<[Mutex<Scratch>]>, // [workers]
}

/// What one worker needs for one row.
struct Scratch {
    raw: Vec<f32>,    // [vocab], logits before anything is changed
    keys: Vec<Key>,   // [vocab], tokens that are still in play
    masses: Vec<u64>, // [vocab / BLOCK], weight of each block of tokens
}

impl Sampler {
    /// Room for every slot and `workers` rows at a time.
    pub(crate) fn new(isa: Isa, workers: usize, reserve: &Reserve) -> Result<Self, OpsError> {
        let vocab = reserve.vocab;
        let scratch = || {
            let mut scratch = Scratch { raw: Vec::new(), keys: Vec::new(), masses: Vec::new() };
            scratch.raw.try_reserve_exact(vocab)?;
            scratch.keys.try_reserve_exact(vocab)?;
            scratch.masses.try_reserve_exact(vocab.div_ceil(passes::BLOCK))?;
            Ok(Mutex::new(scratch))
        };
        let no_room = |_: std::collections::TryReserveError| {
            OpsError::Memory(format!("no room to sample from {vocab} tokens in {workers} threads"))
        };
        Ok(Self {
            isa,
            history: History::new(reserve.slots, vocab)?,
            last: (0..reserve.slots).map(|_| AtomicU32::new(0)).collect(),
            scratch: (0..workers).map(|_| scratch()).collect::<Result<_, _>>().map_err(no_room)?,
        })
    }

    /// Fills slots whose request is new or comes back.
    pub(crate) fn load(&mut self, loads: &[SlotLoad]) {
        loads.iter().for_each(|load| self.history.load(load));
    }

    /// The token that was sampled last in a slot.
    pub(crate) fn last(&self, slot: SlotId) -> TokenId {
        // The step in between met in the pool's barriers.
        self.last[slot.0 as usize].load(Ordering::Relaxed)
    }

    /// Chooses or scores one row's token; [`ScoredToken::NOT_A_NUMBER`] if a logit is NaN or the largest
    /// one infinite, [`ScoredToken::NOT_CHOSEN`] if the row's mask does not come by its deadline. `logits`
    /// may be overwritten. Two rows of one step that sample never share a slot.
    pub(crate) fn sample(&self, worker: usize, out: &OutRow, logits: &mut [f32]) -> ScoredToken {
        let isa = self.isa;
        let params = &*out.params;
        let Some(mut peak) = passes::peak(isa, logits) else { return ScoredToken::NOT_A_NUMBER };
        if let Some(cell) = &out.mask {
            // Waited for here, where everything else of the step is done.
            if cell.wait(|mask| mask::forbid(mask, logits)).is_none() {
                return ScoredToken::NOT_CHOSEN;
            }
            let Some(allowed) = passes::peak(isa, logits) else { return ScoredToken::NOT_A_NUMBER };
            peak = allowed;
        }
        let scratch = &mut *self.scratch[worker].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(target) = out.target {
            let top = params.prompt_logprobs.unwrap_or(0);
            return score::score(isa, logits, peak, target, top, &mut scratch.keys);
        }
        let changes = params.has_penalties() || !params.logit_bias.is_empty();
        if changes && params.logprobs.is_some() {
            scratch.raw.clear();
            scratch.raw.extend_from_slice(logits);
        }
        if params.has_penalties() {
            self.history.penalise(out.slot, params, logits);
        }
        for &(token, bias) in &params.logit_bias {
            logits[token as usize] += bias;
        }
        let changed = if changes { passes::peak(isa, logits) } else { Some(peak) };
        let Some(changed) = changed else { return ScoredToken::NOT_A_NUMBER };
        let token = if params.temperature == 0.0 {
            changed.token
        } else {
            choose::choose(isa, logits, changed, params, out.position, scratch)
        };
        self.last[out.slot.0 as usize].store(token, Ordering::Relaxed);
        if params.has_penalties() {
            self.history.count(out.slot, token);
        }
        let raw = if changes { &scratch.raw } else { &*logits };
        match params.logprobs {
            Some(top) => score::score(isa, raw, peak, token, top, &mut scratch.keys),
            None => ScoredToken::bare(token),
        }
    }
}

#[cfg(test)]
mod tests;
