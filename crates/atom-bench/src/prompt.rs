//! Prompts from a seed: the same for the same seed, different for every request.

use crate::words::WORDS;
use atom_base::rng::philox;

/// Makes the prompts of one bench.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompts {
    pub(crate) seed: u64,
    pub(crate) kind: PromptKind,
    /// Words or ids at the beginning that all prompts have in common.
    pub(crate) shared: usize,
}

/// What prompts are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptKind {
    /// Common words: text for the server's tokenizer.
    Words,
    /// Token ids below this number, each as likely as any other.
    Ids {
        /// Entries of the server's vocabulary, 1 or more.
        vocabulary: u32,
    },
}

/// A prompt as it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// Words of one call of the generator: one byte picks one of 256.
const WORDS_PER_BLOCK: usize = 16;
/// Ids of one call.
const IDS_PER_BLOCK: usize = 4;
/// Generator streams, so that no prompt repeats the prefix.
const OWN: u32 = 0;
const SHARED: u32 = 1;
const LENGTHS: u32 = 2;

impl Prompts {
    /// Prompt number `index`, of so many words or ids. A shorter one is the beginning of a longer one.
    pub(crate) fn prompt(&self, index: u64, length: usize) -> Prompt {
        match self.kind {
            PromptKind::Words => Prompt::Text(self.text(index, length)),
            PromptKind::Ids { vocabulary } => {
                let shared = self.shared.min(length);
                let common = (0..shared).map(|place| self.id(SHARED, 0, place, vocabulary));
                let own = (0..length - shared).map(|place| self.id(OWN, index, place, vocabulary));
                Prompt::Ids(common.chain(own).collect())
            }
        }
    }

    fn id(&self, stream: u32, index: u64, place: usize, vocabulary: u32) -> u32 {
        let word = self.block(stream, index, (place / IDS_PER_BLOCK) as u32)[place % IDS_PER_BLOCK];
        // Scaling has a bias of vocabulary / 2^32, a thousandth at the most in published ones.
        ((u64::from(word) * u64::from(vocabulary)) >> 32) as u32
    }

    fn text(&self, index: u64, words: usize) -> String {
        let shared = self.shared.min(words);
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

    fn words(seed: u64, shared: usize) -> Prompts {
        Prompts { seed, kind: PromptKind::Words, shared }
    }

    fn ids(seed: u64, shared: usize, index: u64, length: usize) -> Vec<u32> {
        let prompts = Prompts { seed, kind: PromptKind::Ids { vocabulary: 1000 }, shared };
        let Prompt::Ids(ids) = prompts.prompt(index, length) else { panic!("ids were asked for") };
        ids
    }

    #[test]
    fn ids_are_each_prompts_own_and_cover_the_vocabulary() {
        let mut counts = vec![0; 1000];
        let mut beginnings = BTreeSet::new();
        for index in 0..500 {
            let prompt = ids(7, 0, index, 100);
            assert_eq!(prompt, ids(7, 0, index, 100));
            assert_eq!(prompt[..17], ids(7, 0, index, 17));
            prompt.iter().for_each(|&id| counts[id as usize] += 1);
            beginnings.insert(prompt[..4].to_vec());
        }
        assert_eq!(beginnings.len(), 500, "some begin alike");
        // 50 of each on average, with a standard deviation of 7; the draws are the same on every machine.
        assert!(counts.iter().all(|count| (15..=90).contains(count)), "{counts:?}");
        assert_ne!(ids(7, 0, 0, 40), ids(8, 0, 0, 40));
        let (a, b) = (ids(7, 20, 1, 30), ids(7, 20, 2, 30));
        assert!(a[..20] == b[..20] && a[20..] != b[20..]);
        assert_eq!(ids(7, 20, 1, 5), ids(7, 20, 2, 5));
    }

    #[test]
    fn prompts_are_repeatable_distinct_and_as_long_as_asked() {
        let prompts = words(7, 0);
        let mut beginnings = BTreeSet::new();
        for index in 0..500 {
            let text = prompts.text(index, 40);
            assert_eq!(text.split(' ').count(), 40);
            assert_eq!(text, prompts.text(index, 40));
            assert!(text.starts_with(&prompts.text(index, 17)));
            beginnings.insert(text.split(' ').take(8).collect::<Vec<_>>().join(" "));
        }
        assert_eq!(beginnings.len(), 500, "some begin alike");
        assert_ne!(prompts.text(0, 40), words(8, 0).text(0, 40));
    }

    #[test]
    fn a_shared_prefix_is_all_that_prompts_share() {
        let prompts = words(7, 20);
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
        let prompts = words(1, 0);
        let seen: BTreeSet<usize> = (0..200).map(|index| prompts.length(index, 0, 5)).collect();
        assert_eq!(seen, (1..=5).collect());
    }
}
