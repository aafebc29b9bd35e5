//! Tokens of texts that come again: agents send their whole conversation with every turn.
//!
//! A text is cut behind tokens that the tokenizer looks for before anything else, the `<|im_end|>` of a
//! rendered chat, and the tokens of each part are kept by the part's text. So a text that begins like an
//! earlier one, or has a message of it, costs what is new in it.
//!
//! The tokens are those of the whole text, for this reason. The tokenizer first scans a text for its added
//! tokens, leftmost first and of those the longest, and begins the scan anew behind each; what lies between
//! is normalised, cut and merged piece by piece, without a look at the neighbours. The scan here is the same
//! one, and cuts are made only where it found a token. Behind a cut, both begin anew. Before it, whatever the
//! whole text's scan chose lies within the part, and the part offers no other choice. Tokens that take their
//! surroundings into account (`lstrip`, `rstrip`, `single_word`) and ways of cutting that know where a piece
//! stands would break the argument: where there are any, either they are no places to cut, or nothing is.

use crate::{TextError, Tokenizer};
use aho_corasick::{AhoCorasick, MatchKind};
use atom_base::TokenId;
use lru::LruCache;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokenizers::{AddedToken, PreTokenizerWrapper};

/// A tokenizer that remembers. Shared by all threads that make tokens.
pub struct TokenCache {
    tokenizer: Arc<Tokenizer>,
    /// `None` where the tokenizer has no place to cut: only whole texts are kept then.
    cuts: Option<Cuts>,
    bytes_max: usize,
    kept: Mutex<Kept>,
}

/// What a [`TokenCache`] did and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCacheCounts {
    /// Parts of texts that were found.
    pub hits: u64,
    /// Parts that were made into tokens.
    pub misses: u64,
    /// Bytes of text in the parts that were found.
    pub hit_bytes: u64,
    /// Bytes of text in those that were not.
    pub miss_bytes: u64,
    /// Parts that are kept.
    pub parts: usize,
    /// Bytes that they take.
    pub bytes: usize,
}

/// Where a text may be cut.
struct Cuts {
    scan: AhoCorasick,
    /// `[patterns of the scan]`: behind this token.
    is_cut: Box<[bool]>,
}

struct Kept {
    parts: LruCache<Box<str>, Arc<[TokenId]>>,
    counts: TokenCacheCounts,
}

impl TokenCache {
    /// An empty cache that takes at most `bytes_max` bytes.
    pub fn new(tokenizer: Arc<Tokenizer>, bytes_max: usize) -> Self {
        let kept = Kept { parts: LruCache::unbounded(), counts: TokenCacheCounts::default() };
        Self { cuts: Cuts::of(&tokenizer), tokenizer, bytes_max, kept: Mutex::new(kept) }
    }

    /// What [`Tokenizer::encode`] gives, always.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, TextError> {
        let mut tokens = Vec::new();
        if add_special {
            tokens.extend_from_slice(&self.tokenizer.prefix);
        }
        for part in self.parts(text) {
            if self.append(part, &mut tokens).is_err() {
                // The error shall speak of the whole text.
                return self.tokenizer.encode(text, add_special);
            }
        }
        if add_special {
            tokens.extend_from_slice(&self.tokenizer.suffix);
        }
        Ok(tokens)
    }

    /// What was done and what is held.
    pub fn counts(&self) -> TokenCacheCounts {
        self.lock().counts
    }

    /// Parts that are worth keeping, cut from the front: what follows a part doesn't change it.
    fn parts<'a>(&self, text: &'a str) -> Vec<&'a str> {
        let (mut parts, mut start) = (Vec::new(), 0);
        if let Some(Cuts { scan, is_cut }) = &self.cuts {
            for found in scan.find_iter(text) {
                if is_cut[found.pattern()] && found.end() - start >= PART_BYTES_MIN {
                    parts.push(&text[start..found.end()]);
                    start = found.end();
                }
            }
        }
        if start < text.len() {
            parts.push(&text[start..]);
        }
        parts
    }

    fn append(&self, part: &str, out: &mut Vec<TokenId>) -> Result<(), TextError> {
        if part.len() < PART_BYTES_MIN {
            out.extend(self.tokenizer.encode(part, false)?);
            return Ok(());
        }
        if let Some(tokens) = self.lock().find(part) {
            out.extend_from_slice(&tokens);
            return Ok(());
        }
        // Two threads may come here with the same part; the second replaces what the first kept.
        let tokens: Arc<[TokenId]> = self.tokenizer.encode(part, false)?.into();
        out.extend_from_slice(&tokens);
        if size(part, &tokens) <= self.bytes_max / PART_OF_CACHE_MAX {
            self.lock().keep(part, tokens, self.bytes_max);
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for TokenCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenCache")
            .field("can_cut", &self.cuts.is_some())
            .field("counts", &self.counts())
            .finish_non_exhaustive()
    }
}

impl Kept {
    fn find(&mut self, part: &str) -> Option<Arc<[TokenId]>> {
        let found = self.parts.get(part).cloned();
        let bytes = part.len() as u64;
        match &found {
            Some(_) => {
                self.counts.hits += 1;
                self.counts.hit_bytes += bytes;
            }
            None => {
                self.counts.misses += 1;
                self.counts.miss_bytes += bytes;
            }
        }
        found
    }

    fn keep(&mut self, part: &str, tokens: Arc<[TokenId]>, bytes_max: usize) {
        self.counts.bytes += size(part, &tokens);
        if let Some((part, tokens)) = self.parts.push(part.into(), tokens) {
            self.counts.bytes -= size(&part, &tokens);
        }
        while self.counts.bytes > bytes_max {
            let (part, tokens) = self.parts.pop_lru().expect("what takes bytes is in there");
            self.counts.bytes -= size(&part, &tokens);
        }
        self.counts.parts = self.parts.len();
    }
}

impl Cuts {
    /// `None` if no place is provably one to cut.
    fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let encoder = &tokenizer.encoder;
        if !encoder.get_pre_tokenizer().is_none_or(knows_no_place) {
            return None;
        }
        let added = encoder.get_added_vocabulary().get_added_tokens_decoder();
        // Those that are looked for in the text as it stands; others come later, piece by piece.
        let scanned: Vec<&AddedToken> =
            added.values().filter(|token| !token.normalized && !token.content.is_empty()).collect();
        // Whether such a token counts depends on the character before it, which may be behind a cut.
        if scanned.iter().any(|token| token.single_word) || !scanned.iter().any(|token| is_cut(token)) {
            return None;
        }
        let scan = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(scanned.iter().map(|token| &token.content))
            // Some hundred short patterns can't be too many.
            .ok()?;
        Some(Self { scan, is_cut: scanned.iter().map(|token| is_cut(token)).collect() })
    }
}

/// Ends where its text ends, whatever follows; and no run of blanks, which has a bound, goes across.
fn is_cut(token: &AddedToken) -> bool {
    let has_edge = |c: Option<char>| c.is_some_and(|c| !c.is_whitespace());
    !token.lstrip
        && !token.rstrip
        && has_edge(token.content.chars().next())
        && has_edge(token.content.chars().next_back())
}

/// The pieces of a text are cut each for itself, wherever they stand in it.
fn knows_no_place(step: &PreTokenizerWrapper) -> bool {
    match step {
        PreTokenizerWrapper::ByteLevel(_)
        | PreTokenizerWrapper::Split(_)
        | PreTokenizerWrapper::Digits(_)
        | PreTokenizerWrapper::Punctuation(_) => true,
        PreTokenizerWrapper::Sequence(steps) => steps.as_ref().iter().all(knows_no_place),
        _ => false,
    }
}

/// Bytes that a part takes, with its place in the table and in the order of use.
fn size(part: &str, tokens: &[TokenId]) -> usize {
    part.len() + size_of_val(tokens) + PART_OVERHEAD_BYTES
}

/// Shorter parts are tokenised in the time that it takes to look for them, and would fill the table.
const PART_BYTES_MIN: usize = 128;
/// A part may take one in so many bytes of the cache: one huge text must not push everything else out.
const PART_OF_CACHE_MAX: usize = 4;
/// Two allocations, an entry of the table, two links.
const PART_OVERHEAD_BYTES: usize = 128;

#[cfg(test)]
mod tests;
