//! Prompts from a seed: the same for the same seed, different for every request.

use crate::words::WORDS;
use atom_base::rng::philox;

/// Makes the prompts of one bench.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompts {
    pub(crate) seed: u64,
    /// Words at the beginning that all prompts have in common.
    pub(crate) shared_words: usize,
}

/// Words of one call of the generator: one byte picks one of 256.
const WORDS_PER_BLOCK: usize = 16;
/// Generator streams, so that no prompt repeats the prefix.
const OWN: u32 = 0;
const SHARED: u32 = 1;
const LENGTHS: u32 = 2;

impl Prompts {
    /// Prompt number `index`, of `words` words. A shorter one is the beginning of a longer one.
    pub(crate) fn text(&self, index: u64, words: usize) -> String {
        let shared = self.shared_words.min(words);
        let mut text = String::with_capacity(words * 7);
        self.append(&mut text, SHARED, 0, shared);
        self.append(&mut text, OWN, index, words - shared);
        text
    }

    /// A number in `1 ..= max`, the same for the same index and `draw`.
    pub(crate) fn length(&self, index: u64, draw: u32, max: usize) -> usize {
        let word = self.block(LENGTHS, index, draw)[0];
        // Scaling has a bias of max / 2^32: nothing here notices.
        1 + ((u64::from(word) * max as u64) >> 32) as usize
    }

    fn append(&self, text: &mut String, stream: u32, index: u64, words: usize) {
        for number in 0..words {
            let block = self.block(stream, index, (number / WORDS_PER_BLOCK) as u32);
            let byte = block[number % WORDS_PER_BLOCK / 4].to_le_bytes()[number % 4];
            if !text.is_empty() {
                text.push(' ');
            }
            text.push_str(WORDS[usize::from(byte)]);
        }
    }

    fn block(&self, stream: u32, index: u64, number: u32) -> [u32; 4] {
        let counter = [number, index as u32, (index >> 32) as u32, stream];
        philox(counter, [self.seed as u32, (self.seed >> 32) as u32])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn prompts_are_repeatable_distinct_and_as_long_as_asked() {
        let prompts = Prompts { seed: 7, shared_words: 0 };
        let mut beginnings = BTreeSet::new();
        for index in 0..500 {
            let text = prompts.text(index, 40);
            assert_eq!(text.split(' ').count(), 40);
            assert_eq!(text, prompts.text(index, 40));
            assert!(text.starts_with(&prompts.text(index, 17)));
            beginnings.insert(text.split(' ').take(8).collect::<Vec<_>>().join(" "));
        }
        assert_eq!(beginnings.len(), 500, "some begin alike");
        assert_ne!(prompts.text(0, 40), Prompts { seed: 8, shared_words: 0 }.text(0, 40));
    }

    #[test]
    fn a_shared_prefix_is_all_that_prompts_share() {
        let prompts = Prompts { seed: 7, shared_words: 20 };
        let split = |index| {
            let text = prompts.text(index, 30);
            let words: Vec<String> = text.split(' ').map(Into::into).collect();
            (words[..20].to_vec(), words[20..].to_vec())
        };
        let ((prefix_a, own_a), (prefix_b, own_b)) = (split(1), split(2));
        assert_eq!(prefix_a, prefix_b);
        assert_ne!(own_a, own_b);
        assert_eq!(prompts.text(1, 5), prompts.text(2, 5));
    }

    #[test]
    fn lengths_cover_their_range() {
        let prompts = Prompts { seed: 1, shared_words: 0 };
        let seen: BTreeSet<usize> = (0..200).map(|index| prompts.length(index, 0, 5)).collect();
        assert_eq!(seen, (1..=5).collect());
    }
}
