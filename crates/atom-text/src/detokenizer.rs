//! One continuation's tokens to text, as they come.

use crate::Tokenizer;
use atom_base::TokenId;
use std::sync::Arc;

/// Turns tokens into text deltas. The deltas and the rest from [`finish`](Self::finish) concatenate to
/// [`Tokenizer::decode`] of all tokens, and every delta is whole characters.
///
/// A token costs its own bytes, however long the text before it. At most three bytes are held back: the
/// beginning of a character whose other bytes are still to come.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// Special tokens that give text although others are skipped; a handful.
    shown: Vec<TokenId>,
    /// Bytes that may become a character: empty, or a proper prefix of a well-formed sequence.
    held: Vec<u8>,
    delta: String,
}

impl Detokenizer {
    /// A detokenizer for one continuation. With `skip_special`, special tokens give no text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, shown: Vec::new(), held: Vec::new(), delta: String::new() }
    }

    /// Shows the special tokens with these texts although others are skipped: the markers of tool calls and
    /// reasoning ([`Dialect::markers`](crate::Dialect::markers)). A text that is no token of this vocabulary
    /// is written with ordinary tokens, which are shown anyway.
    pub fn showing(mut self, texts: &[&str]) -> Self {
        self.shown.extend(texts.iter().filter_map(|text| self.tokenizer.id_of(text)));
        self
    }

    /// The text that is sure after one more token; often empty.
    pub fn push(&mut self, token: TokenId) -> &str {
        self.delta.clear();
        let skip_special = self.skip_special && !self.shown.contains(&token);
        let bytes = self.tokenizer.pieces.decoded(token, skip_special);
        append_lossy(&mut self.held, bytes, &mut self.delta);
        &self.delta
    }

    /// The text that was held back: U+FFFD if the continuation ended within a character.
    pub fn finish(&mut self) -> &str {
        self.delta.clear();
        if !self.held.is_empty() {
            self.held.clear();
            self.delta.push(char::REPLACEMENT_CHARACTER);
        }
        &self.delta
    }
}

/// Appends `bytes` to `out` as `String::from_utf8_lossy` would have them after what came before, of which
/// `held` is the unfinished end.
fn append_lossy(held: &mut Vec<u8>, bytes: &[u8], out: &mut String) {
    held.extend_from_slice(bytes);
    let mut rest = held.as_slice();
    loop {
        match std::str::from_utf8(rest) {
            Ok(text) => {
                out.push_str(text);
                rest = &[];
                break;
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                out.push_str(std::str::from_utf8(valid).expect("checked up to here just now"));
                rest = after;
                match error.error_len() {
                    Some(ill_formed) => {
                        out.push(char::REPLACEMENT_CHARACTER);
                        rest = &rest[ill_formed..];
                    }
                    None => break,
                }
            }
        }
    }
    let kept = held.len() - rest.len();
    held.drain(..kept);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Draws, byte_tokenizer};

    fn stream(tokenizer: &Arc<Tokenizer>, tokens: &[TokenId], skip_special: bool) -> String {
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip_special);
        let mut text = String::new();
        for &token in tokens {
            let delta = detokenizer.push(token).to_owned();
            assert!(detokenizer.held.len() <= 3, "{:?} held", detokenizer.held);
            text.push_str(&delta);
        }
        text + detokenizer.finish()
    }

    #[test]
    fn deltas_concatenate_to_the_whole_decode_for_any_tokens() {
        let tokenizer = Arc::new(byte_tokenizer());
        let mut draws = Draws::new(11);
        for _ in 0..2_000 {
            let tokens: Vec<TokenId> =
                (0..draws.below(24)).map(|_| draws.below(tokenizer.vocab_size() + 3) as TokenId).collect();
            for skip_special in [false, true] {
                assert_eq!(
                    stream(&tokenizer, &tokens, skip_special),
                    tokenizer.decode(&tokens, skip_special),
                    "{tokens:?}"
                );
            }
        }
    }

    #[test]
    fn any_bytes_in_any_pieces_read_like_one_lossy_decode() {
        let mut draws = Draws::new(12);
        // Bytes around every boundary of the encoding, so that nearly right sequences are common.
        let edges =
            [0x00, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc2, 0xdf, 0xe0, 0xed, 0xef, 0xf0, 0xf4, 0xf5];
        for _ in 0..20_000 {
            let bytes: Vec<u8> = (0..draws.below(12)).map(|_| edges[draws.below(edges.len())]).collect();
            let (mut held, mut text, mut at) = (Vec::new(), String::new(), 0);
            while at < bytes.len() {
                let end = bytes.len().min(at + 1 + draws.below(4));
                append_lossy(&mut held, &bytes[at..end], &mut text);
                at = end;
            }
            if !held.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
            assert_eq!(text, String::from_utf8_lossy(&bytes), "{bytes:x?}");
        }
    }

    #[test]
    fn a_character_split_over_tokens_comes_out_with_its_last_byte() {
        let tokenizer = Arc::new(byte_tokenizer());
        let mut detokenizer = Detokenizer::new(tokenizer, true);
        let deltas: Vec<String> =
            "a🦀".bytes().map(|byte| detokenizer.push(TokenId::from(byte)).to_owned()).collect();
        assert_eq!(deltas, ["a", "", "", "", "🦀"]);
        assert_eq!(detokenizer.finish(), "");
    }

    #[test]
    fn a_skipped_special_token_within_a_character_leaves_it_whole() {
        let tokenizer = Arc::new(byte_tokenizer());
        let special = tokenizer.id_of("<|end|>").unwrap();
        let tokens = [0xC3, special, 0xA9];
        assert_eq!(stream(&tokenizer, &tokens, true), "é");
        assert_eq!(stream(&tokenizer, &tokens, false), "\u{FFFD}<|end|>\u{FFFD}");
    }

    #[test]
    fn chosen_special_tokens_are_shown_and_others_skipped() {
        let tokenizer = Arc::new(byte_tokenizer());
        let [begin, end] = ["<|begin|>", "<|end|>"].map(|text| tokenizer.id_of(text).unwrap());
        let mut detokenizer = Detokenizer::new(tokenizer, true).showing(&["<|begin|>", "<|no token|>"]);
        let text: String =
            [begin, 0x61, end].iter().map(|&token| detokenizer.push(token).to_owned()).collect();
        assert_eq!(text, "<|begin|>a");
    }

    #[test]
    fn a_continuation_that_ends_within_a_character_says_so_once() {
        let tokenizer = Arc::new(byte_tokenizer());
        let mut detokenizer = Detokenizer::new(tokenizer, true);
        assert_eq!(detokenizer.push(0xF0), "");
        assert_eq!(detokenizer.push(0x9F), "");
        assert_eq!(detokenizer.finish(), "\u{FFFD}");
        assert_eq!(detokenizer.finish(), "");
    }
}
