//! Tokens that a grammar forbids.

/// Takes every token whose bit is not set out of the choice.
pub(super) fn forbid(mask: &[u32], logits: &mut [f32]) {
    assert!(mask.len() * BITS >= logits.len(), "a mask of {} words for {} tokens", mask.len(), logits.len());
    for (logits, &word) in logits.chunks_mut(BITS).zip(mask) {
        match word {
            0 => logits.fill(f32::NEG_INFINITY),
            u32::MAX => {}
            _ => {
                for (i, logit) in logits.iter_mut().enumerate() {
                    if word >> i & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

const BITS: usize = u32::BITS as usize;
