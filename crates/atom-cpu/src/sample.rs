//! The end of a step: from a row of logits to a token and its log-probability.
//!
//! The order is vLLM's: log-probabilities are those of the model, before anything is changed; then
//! `logit_bias`, repetition, frequency and presence penalties, temperature, `min_p`, `top_k`, `top_p`,
//! and one draw. A row's result depends on that row, its parameters and its slot's history only: sums
//! run in a fixed order, and the draw is keyed by (seed, choice, position).

mod choose;
mod history;
mod score;

use crate::isa::Isa;
use atom_base::{OutRow, ScoredToken, SlotLoad};
use atom_ops::{OpsError, Reserve};
use choose::Candidate;
use history::History;
use std::sync::{Mutex, PoisonError};

/// Per-slot history and per-worker scratch, all of it reserved before the first step.
pub(crate) struct Sampler {
    isa: Isa,
    history: History,
    scratch: Box<[Mutex<Scratch>]>, // [workers]
}

/// What one worker needs for one row.
struct Scratch {
    raw: Vec<f32>,              // [vocab], logits before anything is changed
    candidates: Vec<Candidate>, // [vocab]
}

impl Sampler {
    /// Room for every slot and `workers` rows at a time.
    pub(crate) fn new(isa: Isa, workers: usize, reserve: &Reserve) -> Result<Self, OpsError> {
        let scratch = || {
            let mut scratch = Scratch { raw: Vec::new(), candidates: Vec::new() };
            scratch.raw.try_reserve_exact(reserve.vocab)?;
            scratch.candidates.try_reserve_exact(reserve.vocab)?;
            Ok(Mutex::new(scratch))
        };
        let no_room = |_: std::collections::TryReserveError| {
            OpsError::Memory(format!("no room to sample from {} tokens in {workers} threads", reserve.vocab))
        };
        Ok(Self {
            isa,
            history: History::new(reserve.slots, reserve.vocab)?,
            scratch: (0..workers).map(|_| scratch()).collect::<Result<_, _>>().map_err(no_room)?,
        })
    }

    /// Fills slots whose request is new or comes back.
    pub(crate) fn load(&mut self, loads: &[SlotLoad]) {
        loads.iter().for_each(|load| self.history.load(load));
    }

    /// Chooses or scores one row's token. `logits` is overwritten. Two rows of one step that sample
    /// never share a slot.
    pub(crate) fn sample(&self, worker: usize, out: &OutRow, logits: &mut [f32]) -> ScoredToken {
        let Some(most) = score::largest(self.isa, logits) else { return ScoredToken::NOT_A_NUMBER };
        let params = &*out.params;
        if let Some(target) = out.target {
            let top = params.prompt_logprobs.unwrap_or(0);
            return score::score(self.isa, logits, most, target, top);
        }
        let scratch = &mut *self.scratch[worker].lock().unwrap_or_else(PoisonError::into_inner);
        if params.logprobs.is_some() {
            scratch.raw.clear();
            scratch.raw.extend_from_slice(logits);
        }
        let mut changed = false;
        for &(token, bias) in &params.logit_bias {
            logits[token as usize] += bias;
            changed = true;
        }
        if params.has_penalties() {
            self.history.penalise(out.slot, params, logits);
            changed = true;
        }
        let changed_most = if changed { score::largest(self.isa, logits) } else { Some(most) };
        let Some(changed_most) = changed_most else { return ScoredToken::NOT_A_NUMBER };
        let token = if params.temperature == 0.0 {
            score::first_at(logits, changed_most)
        } else {
            choose::choose(self.isa, logits, changed_most, params, out.position, &mut scratch.candidates)
        };
        if params.has_penalties() {
            self.history.count(out.slot, token);
        }
        match params.logprobs {
            Some(top) => score::score(self.isa, &scratch.raw, most, token, top),
            None => ScoredToken::bare(token),
        }
    }
}

#[cfg(test)]
mod tests;
