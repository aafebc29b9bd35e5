//! The bytes of every token.
//!
//! A byte-level vocabulary writes each byte as one printable character (Radford et al., "Language models
//! are unsupervised multitask learners", 2019): bytes that are printable in Latin-1 stand for themselves,
//! the other 68 become U+0100 and up, in order. Tokens added on top of that vocabulary are plain text.

use crate::TextError;
use atom_base::TokenId;

/// The bytes of all tokens in one allocation, looked up by id.
#[derive(Debug)]
pub(crate) struct Pieces {
    bytes: Box<[u8]>,
    /// `[vocab + 1]`: token `i` is `bytes[starts[i] .. starts[i + 1]]`.
    starts: Box<[u32]>,
    kinds: Box<[PieceKind]>,
}

/// What a token is, as far as decoding cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PieceKind {
    /// Made by BPE: its text is in the byte alphabet.
    Normal,
    /// Matched in the text before BPE: its text stands for itself.
    Added,
    /// Like `Added`, and left out of decoded text when special tokens are skipped.
    Special,
    /// An id without a token: padding of the embedding table. Decodes to nothing.
    Absent,
}

/// Ids of one vocabulary. The largest published one has 262,144; a larger claim is a damaged file, and
/// would size tables by it.
pub(crate) const VOCAB_MAX: usize = 1 << 20;

impl Pieces {
    /// Lays out the tokens. `entry(id)` gives the text and the kind of each id below `vocab`.
    pub(crate) fn new<'a>(
        vocab: usize,
        mut entry: impl FnMut(usize) -> (&'a str, PieceKind),
    ) -> Result<Self, TextError> {
        if vocab == 0 || vocab > VOCAB_MAX {
            return Err(damaged(format!("it has {vocab} tokens; 1 to {VOCAB_MAX} are possible")));
        }
        let (mut bytes, mut starts, mut kinds) = (Vec::new(), vec![0], Vec::with_capacity(vocab));
        for id in 0..vocab {
            let (text, kind) = entry(id);
            match kind {
                PieceKind::Normal => append_byte_level(text, &mut bytes),
                PieceKind::Added | PieceKind::Special => bytes.extend_from_slice(text.as_bytes()),
                PieceKind::Absent => {}
            }
            kinds.push(kind);
            let end = u32::try_from(bytes.len())
                .map_err(|_| damaged(format!("its first {id} tokens are longer than 4 GiB")))?;
            starts.push(end);
        }
        Ok(Self { bytes: bytes.into(), starts: starts.into(), kinds: kinds.into() })
    }

    pub(crate) fn len(&self) -> usize {
        self.kinds.len()
    }

    pub(crate) fn kind(&self, id: TokenId) -> PieceKind {
        self.kinds.get(id as usize).copied().unwrap_or(PieceKind::Absent)
    }

    /// The bytes of a token; `None` for an id without one.
    pub(crate) fn bytes(&self, id: TokenId) -> Option<&[u8]> {
        let at = id as usize;
        (self.kind(id) != PieceKind::Absent)
            .then(|| &self.bytes[self.starts[at] as usize..self.starts[at + 1] as usize])
    }

    /// The bytes of a token as decoding sees them: nothing for absent ids and skipped special tokens.
    pub(crate) fn decoded(&self, id: TokenId, skip_special: bool) -> &[u8] {
        if skip_special && self.kind(id) == PieceKind::Special {
            return &[];
        }
        self.bytes(id).unwrap_or_default()
    }

    /// Bytes of the longest token.
    pub(crate) fn longest(&self) -> usize {
        self.starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0)
    }
}

/// Appends the bytes that a token of a byte-level vocabulary stands for. A token with a character outside
/// the alphabet stands for itself, as the reference decoder has it.
fn append_byte_level(text: &str, out: &mut Vec<u8>) {
    let start = out.len();
    for c in text.chars() {
        match byte_of(c) {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                out.extend_from_slice(text.as_bytes());
                return;
            }
        }
    }
}

/// The byte that a character of the alphabet stands for.
fn byte_of(c: char) -> Option<u8> {
    BYTES.get(c as usize).copied().flatten()
}

/// The character that stands for a byte.
pub(crate) const fn char_of(byte: u8) -> u32 {
    if is_printable(byte) {
        return byte as u32;
    }
    let (mut shifted, mut below) = (256, 0);
    while below < byte {
        if !is_printable(below) {
            shifted += 1;
        }
        below += 1;
    }
    shifted
}

const fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// 256 plus the 68 bytes that are not printable in Latin-1.
const ALPHABET_END: usize = 324;

/// The inverse of `char_of`, by code point.
const BYTES: [Option<u8>; ALPHABET_END] = {
    let mut table = [None; ALPHABET_END];
    let mut byte = 0;
    while byte < 256 {
        table[char_of(byte as u8) as usize] = Some(byte as u8);
        byte += 1;
    }
    table
};

fn damaged(reason: String) -> TextError {
    TextError::Vocabulary { reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    #[test]
    fn the_alphabet_is_the_one_of_byte_level_tokenizers() {
        let ours: HashSet<char> = (0..=255).map(|b| char::from_u32(char_of(b)).unwrap()).collect();
        assert_eq!(ours, ByteLevel::alphabet().into_iter().collect());
        assert_eq!(char_of(b' '), 'Ġ' as u32);
        assert_eq!(char_of(b'\n'), 'Ċ' as u32);
        assert!((0..=255).all(|b| byte_of(char::from_u32(char_of(b)).unwrap()) == Some(b)));
        assert_eq!(byte_of('\u{144}'), None);
        assert_eq!(byte_of(' '), None);
    }

    #[test]
    fn normal_tokens_are_bytes_and_added_tokens_are_text() {
        let tokens = [
            ("Ġé", PieceKind::Normal),
            ("<é>", PieceKind::Special),
            ("｜", PieceKind::Normal),
            ("x", PieceKind::Absent),
            (" ", PieceKind::Added),
        ];
        let pieces = Pieces::new(tokens.len(), |id| tokens[id]).unwrap();
        assert_eq!(pieces.bytes(0), Some(&b"\x20\xe9"[..]));
        assert_eq!(pieces.bytes(1), Some("<é>".as_bytes()));
        assert_eq!(pieces.bytes(2), Some("｜".as_bytes()));
        assert_eq!(pieces.bytes(3), None);
        assert_eq!(pieces.bytes(4), Some(&b" "[..]));
        assert_eq!(pieces.bytes(5), None);
        assert_eq!((pieces.decoded(1, true), pieces.decoded(4, true)), (&b""[..], &b" "[..]));
        assert_eq!(pieces.longest(), 4);
    }

    #[test]
    fn an_empty_or_absurd_vocabulary_is_refused() {
        for vocab in [0, VOCAB_MAX + 1] {
            let error = Pieces::new(vocab, |_| ("", PieceKind::Normal)).unwrap_err();
            assert!(error.to_string().contains(&vocab.to_string()), "{error}");
        }
    }
}
