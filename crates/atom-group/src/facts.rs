//! What one lane tells the others, once per step: fixed size, no pointer, no wall-clock time.

use atom_base::StepNo;

/// The summary of one lane's want. Times are durations by the lane's own clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Facts {
    /// The step these facts are for.
    pub step: StepNo,
    /// Hash of the lane's [`crate::GroupState`] before this step: equal on all lanes, or they diverged.
    pub state_hash: u64,
    /// Signature of the recording that was made or replayed in the step before.
    pub last_signature: u64,
    /// Requests that would decode one token each.
    pub decode_rows: u32,
    /// Prompt positions that could be computed now.
    pub prefill_rows: u32,
    /// Age of the oldest waiting request.
    pub oldest_wait_ms: u32,
    /// How long the last replay took, or the one before it: see [`FactsFlags::AHEAD`].
    pub replay_us: u32,
    /// Share of the KV cache that requests hold, in thousandths.
    pub kv_per_mille: u16,
    /// See [`FactsFlags`].
    pub flags: FactsFlags,
}

/// Bits that one lane raises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FactsFlags(u32);

impl FactsFlags {
    /// The lane wants to leave: it has no work and is told to stop.
    pub const EXIT: Self = Self(1);
    /// The lane's part of the step before failed; its requests were answered, it goes on.
    pub const FAULT: Self = Self(2);
    /// The lane can't go on; the group must end.
    pub const FATAL: Self = Self(4);
    /// The lane is asked to rest. The group rests, with its work, once every lane says so.
    pub const PAUSE: Self = Self(8);
    /// A prompt is computed in part: its pages are held, and nobody reads them yet.
    pub const PARTIAL: Self = Self(16);
    /// The last replay is still in flight; `replay_us` is of the one before.
    pub const AHEAD: Self = Self(32);

    /// Both sets of bits.
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// These bits without `other`'s.
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// True if all of `other`'s bits are set.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl Facts {
    /// Words on the wire: 48 bytes.
    pub(crate) const WORDS: usize = 6;

    /// Bytes between hosts.
    pub const BYTES: usize = 8 * Self::WORDS;

    /// As they travel between hosts: words, little-endian.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(self.to_words()) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The reverse.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        Self::from_words(std::array::from_fn(|i| u64::from_le_bytes(words[i])))
    }

    pub(crate) fn to_words(self) -> [u64; Self::WORDS] {
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        [
            self.step.0,
            self.state_hash,
            self.last_signature,
            pair(self.decode_rows, self.prefill_rows),
            pair(self.oldest_wait_ms, self.replay_us),
            pair(self.kv_per_mille.into(), self.flags.0),
        ]
    }

    pub(crate) fn from_words(words: [u64; Self::WORDS]) -> Self {
        let [step, state_hash, last_signature, rows, times, kv_flags] = words;
        Self {
            step: StepNo(step),
            state_hash,
            last_signature,
            decode_rows: (rows >> 32) as u32,
            prefill_rows: rows as u32,
            oldest_wait_ms: (times >> 32) as u32,
            replay_us: times as u32,
            kv_per_mille: (kv_flags >> 32) as u16,
            flags: FactsFlags(kv_flags as u32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn facts_survive_the_wire(a: u64, b: u64, c: u64, rows: (u32, u32), times: (u32, u32), kv: u16, flags in 0u32..64) {
            let facts = Facts {
                step: StepNo(a), state_hash: b, last_signature: c, decode_rows: rows.0, prefill_rows: rows.1,
                oldest_wait_ms: times.0, replay_us: times.1, kv_per_mille: kv,
                flags: FactsFlags(flags),
            };
            prop_assert_eq!(Facts::from_words(facts.to_words()), facts);
            prop_assert_eq!(Facts::from_bytes(&facts.to_bytes()), facts);
        }
    }
}
