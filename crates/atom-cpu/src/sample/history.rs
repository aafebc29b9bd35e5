//! What each slot's request has said so far, for penalties.

use atom_base::{SamplingParams, SlotId, SlotLoad, TokenId};
use atom_ops::OpsError;
use std::sync::atomic::{AtomicU16, Ordering};

/// For each slot and token: was it in the prompt, and how often was it generated.
pub(crate) struct History {
    vocab: usize,
    /// The high bit is the prompt's, the others count, up to [`COUNT_MAX`]. `[slots, vocab]`. Atomic, since
    /// workers write rows of different slots; nothing is ordered by them.
    words: Box<[AtomicU16]>,
}

const IN_PROMPT: u16 = 1 << 15;
const COUNT_MAX: u16 = IN_PROMPT - 1;

impl History {
    pub(crate) fn new(slots: usize, vocab: usize) -> Result<Self, OpsError> {
        let words = slots * vocab;
        let mut room = Vec::new();
        room.try_reserve_exact(words).map_err(|_| {
            OpsError::Memory(format!(
                "no room for the penalties' token counts: {slots} slots of {vocab} tokens take {} bytes; lower --max-num-seqs",
                2 * words
            ))
        })?;
        room.resize_with(words, AtomicU16::default);
        Ok(Self { vocab, words: room.into() })
    }

    pub(crate) fn load(&self, load: &SlotLoad) {
        self.slot(load.slot).iter().for_each(|word| word.store(0, Ordering::Relaxed));
        for &token in &*load.prompt {
            self.slot(load.slot)[token as usize].store(IN_PROMPT, Ordering::Relaxed);
        }
        load.generated.iter().for_each(|&token| self.count(load.slot, token));
    }

    /// One more of `token`.
    pub(crate) fn count(&self, slot: SlotId, token: TokenId) {
        let word = &self.slot(slot)[token as usize];
        let before = word.load(Ordering::Relaxed);
        if before & COUNT_MAX < COUNT_MAX {
            word.store(before + 1, Ordering::Relaxed);
        }
    }

    /// Repetition, then frequency, then presence.
    pub(crate) fn penalise(&self, slot: SlotId, params: &SamplingParams, logits: &mut [f32]) {
        for (logit, word) in logits.iter_mut().zip(self.slot(slot)) {
            let word = word.load(Ordering::Relaxed);
            if word == 0 {
                continue;
            }
            *logit = if *logit > 0.0 {
                *logit / params.repetition_penalty
            } else {
                *logit * params.repetition_penalty
            };
            let count = word & COUNT_MAX;
            if count > 0 {
                *logit -= params.frequency_penalty * f32::from(count);
                *logit -= params.presence_penalty;
            }
        }
    }

    fn slot(&self, slot: SlotId) -> &[AtomicU16] {
        let start = slot.0 as usize * self.vocab;
        &self.words[start..start + self.vocab]
    }
}
