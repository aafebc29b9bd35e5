use super::*;
use crate::testing::{Draws, byte_tokenizer, byte_vocabulary};
use crate::{GgufVocabulary, TokenizerSource};
use tokenizers::Decoder;
use tokenizers::decoders::byte_level::ByteLevel;

const ALPHABET: [&str; 24] = [
    "t", "h", "e", " ", " the", "in", "g", "1", "2", "12", "é", "日", "🦀", "\n", "  ", "'", "'s", ".",
    "<|end|>", "<|en", "<tag é>", "\u{0}", "\u{301}", "½",
];

fn text(draws: &mut Draws) -> String {
    (0..draws.below(20)).map(|_| ALPHABET[draws.below(ALPHABET.len())]).collect()
}

#[test]
fn decoding_undoes_encoding() {
    for pre in ["gpt-2", "smollm", "llama-bpe", "default"] {
        let vocabulary = GgufVocabulary { pre: pre.into(), ..byte_vocabulary() };
        let tokenizer = Tokenizer::load(&TokenizerSource::Gguf(vocabulary)).unwrap();
        let mut draws = Draws::new(31);
        for _ in 0..500 {
            let text = text(&mut draws);
            let tokens = tokenizer.encode(&text, false).unwrap();
            assert_eq!(tokenizer.decode(&tokens, false), text, "{pre} {tokens:?}");
        }
    }
}

#[test]
fn decoding_agrees_with_the_reference_decoder_on_normal_tokens() {
    let tokenizer = byte_tokenizer();
    let normal =
        (0..tokenizer.vocab_size() as TokenId).filter(|&id| tokenizer.pieces.kind(id) == PieceKind::Normal);
    let normal: Vec<TokenId> = normal.collect();
    let mut draws = Draws::new(32);
    for _ in 0..2_000 {
        let tokens: Vec<TokenId> = (0..draws.below(12)).map(|_| normal[draws.below(normal.len())]).collect();
        let texts = tokens.iter().map(|&id| tokenizer.encoder.id_to_token(id).unwrap()).collect();
        assert_eq!(
            tokenizer.decode(&tokens, true),
            ByteLevel::default().decode(texts).unwrap(),
            "{tokens:?}"
        );
    }
}

/// Byte-pair encoding by its definition: merge the adjacent pair of lowest rank, leftmost first.
fn merge_by_definition(piece: &str, vocabulary: &GgufVocabulary) -> Vec<TokenId> {
    let mut parts: Vec<String> = piece.chars().map(String::from).collect();
    while let Some((_, at)) = parts
        .windows(2)
        .enumerate()
        .filter_map(|(at, pair)| {
            let line = pair.join(" ");
            vocabulary.merges.iter().position(|merge| *merge == line).map(|rank| (rank, at))
        })
        .min()
    {
        let right = parts.remove(at + 1);
        parts[at].push_str(&right);
    }
    let id = |part: &String| vocabulary.tokens.iter().position(|token| token == part).unwrap() as TokenId;
    parts.iter().map(id).collect()
}

#[test]
fn a_piece_is_merged_by_rank() {
    let (vocabulary, tokenizer) = (byte_vocabulary(), byte_tokenizer());
    let mut draws = Draws::new(33);
    let letters = ["t", "h", "e", "i", "n", "g"];
    for _ in 0..2_000 {
        let word: String = (0..1 + draws.below(10)).map(|_| letters[draws.below(6)]).collect();
        // A word after a blank is one piece, with the blank as Ġ.
        let expected = merge_by_definition(&format!("Ġ{word}"), &vocabulary);
        assert_eq!(tokenizer.encode(&format!(" {word}"), false).unwrap(), expected, "{word}");
    }
}

#[test]
fn tokens_show_their_bytes_and_their_text() {
    let tokenizer = byte_tokenizer();
    let the = tokenizer.id_of("Ġthe").unwrap();
    assert_eq!((tokenizer.token_bytes(the), &*tokenizer.token_text(the)), (Some(&b" the"[..]), " the"));
    assert_eq!((tokenizer.token_bytes(0xF0), &*tokenizer.token_text(0xF0)), (Some(&[0xF0][..]), "\u{FFFD}"));
    assert_eq!((tokenizer.token_bytes(99_999), &*tokenizer.token_text(99_999)), (None, ""));
    assert_eq!(tokenizer.id_of("no such token"), None);
    assert_eq!(tokenizer.token_bytes_max(), "<|begin|>".len());
    let texts: Vec<_> = tokenizer.special_texts().collect();
    assert_eq!(texts, [("bos_token", "<|begin|>"), ("eos_token", "<|end|>")]);
}

#[test]
fn ids_without_a_token_decode_to_nothing() {
    let tokenizer = byte_tokenizer();
    assert_eq!(tokenizer.decode(&[u32::MAX, 0x61, 268, 269, 0x62], false), "ab");
    assert_eq!(tokenizer.decode(&[], true), "");
}

#[test]
fn bytes_that_the_vocabulary_lacks_are_dropped_as_the_reference_does() {
    let mut vocabulary = byte_vocabulary();
    vocabulary.tokens[4] = "unreachable".into();
    let tokenizer = Tokenizer::load(&TokenizerSource::Gguf(vocabulary)).unwrap();
    assert_eq!(tokenizer.encode("a\u{4}b", false).unwrap(), [97, 98]);
}

#[test]
fn long_runs_of_blanks_are_cut_right_or_refused() {
    for pre in ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"] {
        let vocabulary = GgufVocabulary { pre: pre.into(), ..byte_vocabulary() };
        let tokenizer = Tokenizer::load(&TokenizerSource::Gguf(vocabulary)).unwrap();
        // The last blank belongs to the word, however many are before it.
        let text = " ".repeat(BLANKS_MAX) + "the";
        let tokens = tokenizer.encode(&text, false).unwrap();
        assert_eq!(tokens.last().copied(), tokenizer.id_of("Ġthe"), "{pre}");
        assert_eq!(tokenizer.decode(&tokens, false), text, "{pre}");
        let error = tokenizer.encode(&" ".repeat(BLANKS_MAX + 1), false).unwrap_err().to_string();
        assert!(error.contains("262145 blanks in a row; at most 262144"), "{error}");
    }
}
