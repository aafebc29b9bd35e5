//! Text to tokens and tokens to bytes.

use crate::pieces::{PieceKind, Pieces};
use crate::{TextError, TokenizerSource, folder, gguf};
use atom_base::TokenId;
use std::borrow::Cow;
use std::fmt;

/// The tokenizer of one checkpoint: byte-level BPE with the checkpoint's own way of cutting text.
///
/// Special tokens that are written out in a text, like `<|im_end|>`, are read as those tokens, in plain
/// completions too: a client that sends a rendered chat to `/v1/completions` relies on it. Whoever must
/// not let users write them has to strip them before.
pub struct Tokenizer {
    /// Without post-processor, truncation and padding: encodes text and nothing else.
    pub(crate) encoder: tokenizers::Tokenizer,
    pub(crate) pieces: Pieces,
    /// What `add_special` puts before and after a text.
    pub(crate) prefix: Vec<TokenId>,
    pub(crate) suffix: Vec<TokenId>,
    pub(crate) bos: Option<TokenId>,
    pub(crate) eos: Option<TokenId>,
    /// Sorted, without duplicates.
    pub(crate) end_tokens: Vec<TokenId>,
    /// `bos_token` and the like with their texts, for templates.
    pub(crate) special_texts: Vec<(&'static str, String)>,
}

impl Tokenizer {
    /// Reads a tokenizer. Errors name what the checkpoint has and what would be supported.
    pub fn load(source: &TokenizerSource) -> Result<Self, TextError> {
        match source {
            TokenizerSource::Gguf(vocabulary) => gguf::build(vocabulary),
            TokenizerSource::Folder(path) => folder::build(path),
        }
    }

    /// The tokens of a text.
    ///
    /// With `add_special`, the BOS (rarely an EOS) that the tokenizer itself puts around a text is added:
    /// right for a plain completion, wrong for a rendered chat template, which wrote its own.
    ///
    /// A byte for which the vocabulary has no token is dropped, as the reference implementation does:
    /// SmolLM2 lacks a few control characters and the first byte of planes that Unicode doesn't use yet.
    ///
    /// Fails on more than 262,144 blanks in a row.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, TextError> {
        let failed = |reason| TextError::Encode { bytes: text.len(), reason };
        let blanks = longest_blank_run(text);
        if blanks > BLANKS_MAX {
            return Err(failed(format!("it has {blanks} blanks in a row; at most {BLANKS_MAX} are read")));
        }
        let encoding = self.encoder.encode_fast(text, false).map_err(|error| failed(error.to_string()))?;
        let body = encoding.get_ids();
        if !add_special {
            return Ok(body.to_vec());
        }
        Ok([&self.prefix, body, &self.suffix].concat())
    }

    /// The text of a sequence of tokens. Bytes that are not UTF-8 become U+FFFD, one for each maximal
    /// ill-formed part; ids without a token become nothing. With `skip_special`, special tokens are left out.
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        let bytes: Vec<u8> =
            tokens.iter().flat_map(|&id| self.pieces.decoded(id, skip_special)).copied().collect();
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        }
    }

    /// The bytes of one token; `None` for an id without one. A token may be a part of a character.
    pub fn token_bytes(&self, token: TokenId) -> Option<&[u8]> {
        self.pieces.bytes(token)
    }

    /// One token as text, for people: a part of a character shows as U+FFFD, an id without a token as
    /// nothing.
    pub fn token_text(&self, token: TokenId) -> Cow<'_, str> {
        String::from_utf8_lossy(self.pieces.bytes(token).unwrap_or_default())
    }

    /// One token as the vocabulary writes it: special tokens as they read, others in its own alphabet
    /// (`Ġthe`). `None` for an id without one.
    pub fn written(&self, token: TokenId) -> Option<String> {
        self.encoder.id_to_token(token)
    }

    /// The id of the token that is written like this: special tokens as they read (`<|im_end|>`), others in
    /// the vocabulary's own alphabet (`Ġthe`).
    pub fn id_of(&self, token: &str) -> Option<TokenId> {
        self.encoder.token_to_id(token)
    }

    /// One more than the largest id. The model's logits may have more columns (padding), never fewer.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// True for tokens that `skip_special` leaves out of decoded text.
    pub fn is_special(&self, token: TokenId) -> bool {
        self.pieces.kind(token) == PieceKind::Special
    }

    /// The token that begins a text, if the checkpoint names one. Not every tokenizer puts it there.
    pub fn bos(&self) -> Option<TokenId> {
        self.bos
    }

    /// True if a text begins with [`bos`](Self::bos) when it is encoded with `add_special`.
    pub fn puts_bos(&self) -> bool {
        self.bos.is_some() && self.prefix.first().copied() == self.bos
    }

    /// The token that ends a text, if the checkpoint names one.
    pub fn eos(&self) -> Option<TokenId> {
        self.eos
    }

    /// All tokens that end a text or a turn as far as the tokenizer knows, in order of id. A folder's
    /// `generation_config.json` may name more.
    pub fn end_tokens(&self) -> &[TokenId] {
        &self.end_tokens
    }

    /// `bos_token`, `eos_token`, `unk_token` and `pad_token` with their texts, as far as known.
    pub fn special_texts(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.special_texts.iter().map(|(name, text)| (*name, text.as_str()))
    }

    /// Bytes of the longest token. A text longer than this times the context can't fit into it (unless the
    /// normalizer shrinks it), which is cheaper to know than its tokens.
    pub fn token_bytes_max(&self) -> usize {
        self.pieces.longest()
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("prefix", &self.prefix)
            .field("end_tokens", &self.end_tokens)
            .finish_non_exhaustive()
    }
}

/// White space characters in a row. Patterns that cut text look back from the end of such a run; the regular
/// expression engine gives up after a million steps, silently, and the rest of the text would be one piece.
const BLANKS_MAX: usize = 1 << 18;

fn longest_blank_run(text: &str) -> usize {
    let (mut longest, mut run) = (0, 0);
    for c in text.chars() {
        run = if c.is_whitespace() { run + 1 } else { 0 };
        longest = longest.max(run);
    }
    longest
}

/// Sorts and removes duplicates.
pub(crate) fn sorted_set(mut tokens: Vec<TokenId>) -> Vec<TokenId> {
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}

#[cfg(test)]
mod tests;
