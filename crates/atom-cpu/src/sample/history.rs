//! What each slot's request has said so far, for penalties.

use atom_base::{SamplingParams, SlotId, SlotLoad, TokenId};
use atom_ops::OpsError;
use std::sync::atomic::{AtomicU64, Ordering};

/// For each slot and token: was it in the prompt, and how often was it generated.
pub(super) struct History {
    vocab: usize,
    /// Four tokens a word, 16 bits each, so that the many that never came up are passed four at a time:
    /// the high bit is the prompt's, the others count, up to [`COUNT_MAX`]. `[slots, words]`. Atomic,
    /// since workers write rows of different slots; nothing is ordered by them.
    words: Box<[AtomicU64]>,
}

const TOKENS: usize = 4;
const BITS: usize = 16;
const IN_PROMPT: u16 = 1 << 15;

/// Beyond so many a frequency penalty of 0.01 has long moved a logit by 300.
const COUNT_MAX: u16 = IN_PROMPT - 1;

impl History {
    pub(super) fn new(slots: usize, vocab: usize) -> Result<Self, OpsError> {
        let words = slots * vocab.div_ceil(TOKENS);
        let mut room = Vec::new();
        room.try_reserve_exact(words).map_err(|_| {
            OpsError::Memory(format!(
                "no room for the penalties' token counts: {slots} slots of {vocab} tokens take {} bytes; lower \
                 --max-num-seqs",
                8 * words
            ))
        })?;
        room.resize_with(words, AtomicU64::default);
        Ok(Self { vocab, words: room.into() })
    }

    /// Forgets what the slot held, and takes a request's prompt and what it has generated so far.
    pub(super) fn load(&self, load: &SlotLoad) {
        self.slot(load.slot).iter().for_each(|word| word.store(0, Ordering::Relaxed));
        for &token in &*load.prompt {
            self.change(load.slot, token, |entry| entry | IN_PROMPT);
        }
        load.generated.iter().for_each(|&token| self.count(load.slot, token));
    }

    /// One more of `token`.
    pub(super) fn count(&self, slot: SlotId, token: TokenId) {
        self.change(slot, token, |entry| if entry & COUNT_MAX < COUNT_MAX { entry + 1 } else { entry });
    }

    /// Repetition, then frequency, then presence.
    pub(super) fn penalise(&self, slot: SlotId, params: &SamplingParams, logits: &mut [f32]) {
        for (logits, word) in logits.chunks_mut(TOKENS).zip(self.slot(slot)) {
            let word = word.load(Ordering::Relaxed);
            if word == 0 {
                continue;
            }
            for (i, logit) in logits.iter_mut().enumerate() {
                let entry = (word >> (i * BITS)) as u16;
                if entry != 0 {
                    *logit = penalised(*logit, entry & COUNT_MAX, params);
                }
            }
        }
    }

    fn change(&self, slot: SlotId, token: TokenId, change: impl Fn(u16) -> u16) {
        let (word, shift) = (token as usize / TOKENS, token as usize % TOKENS * BITS);
        let word = &self.slot(slot)[word];
        // A slot's rows are one worker's, so nothing comes between the two.
        let before = word.load(Ordering::Relaxed);
        let entry = (before >> shift) as u16;
        let others = before & !(u64::from(u16::MAX) << shift);
        word.store(others | u64::from(change(entry)) << shift, Ordering::Relaxed);
    }

    fn slot(&self, slot: SlotId) -> &[AtomicU64] {
        let words = self.vocab.div_ceil(TOKENS);
        &self.words[slot.0 as usize * words..][..words]
    }
}

/// The logit of a token that was in the prompt or has been generated `count` times.
fn penalised(logit: f32, count: u16, params: &SamplingParams) -> f32 {
    let repetition = params.repetition_penalty;
    let logit = if logit > 0.0 { logit / repetition } else { logit * repetition };
    if count == 0 {
        return logit;
    }
    logit - params.frequency_penalty * f32::from(count) - params.presence_penalty
}
