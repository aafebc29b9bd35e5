//! Where the world's randomness comes from: a counter-based stream, keyed by the seed.

use atom_base::rng::philox;
use std::ops::RangeInclusive;

/// A stream of random numbers. Equal seed and stream, equal numbers.
#[derive(Clone, Debug)]
pub(crate) struct Dice {
    key: [u32; 2],
    stream: u32,
    draws: u64,
}

impl Dice {
    pub(crate) fn new(seed: u64, stream: u32) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32], stream, draws: 0 }
    }

    pub(crate) fn word(&mut self) -> u64 {
        let words = philox([self.draws as u32, (self.draws >> 32) as u32, self.stream, 0], self.key);
        self.draws += 1;
        u64::from(words[0]) << 32 | u64::from(words[1])
    }

    /// A number in `0 .. end`. The bias of the modulus does not matter here.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.word() % end as u64) as usize
    }

    /// A number in the range, both ends included. An empty range gives its start.
    pub(crate) fn within(&mut self, range: RangeInclusive<usize>) -> usize {
        let (from, to) = range.into_inner();
        from + self.below(to.saturating_sub(from) + 1)
    }

    pub(crate) fn chance(&mut self, per_mille: u32) -> bool {
        self.below(1000) < per_mille as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}
