//! A tokenizer rebuilt from the metadata of a GGUF file.
//!
//! The file has the vocabulary and the merges, but of the way text is cut before BPE only a name
//! (`tokenizer.ggml.pre`). What each name means is written here, as the `tokenizer.json` of that family
//! publishes it; a name that isn't known is refused, since a wrong cut gives plausible, worse answers.

use crate::pieces::{PieceKind, Pieces, VOCAB_MAX};
use crate::tokenizer::sorted_set;
use crate::{GgufVocabulary, TextError, Tokenizer};
use atom_base::TokenId;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

/// How one family cuts text.
struct Cut {
    /// Values of `tokenizer.ggml.pre`.
    names: &'static [&'static str],
    /// Applied in order; each cuts the pieces of the one before.
    steps: &'static [Step],
    /// Text is brought to Unicode normal form C first.
    nfc: bool,
    /// A piece that is a token as it stands is taken without merging.
    whole_pieces: bool,
    /// A BOS is put in front where the file doesn't say.
    add_bos: bool,
}

enum Step {
    /// Every numeric character is a piece of its own.
    Digits,
    /// The pattern of GPT-2.
    Gpt2,
    /// Matches and what lies between them are pieces.
    Pattern(&'static str),
}

const CUTS: &[Cut] = &[
    Cut {
        names: &["smollm"],
        steps: &[Step::Digits, Step::Gpt2],
        nfc: false,
        whole_pieces: false,
        add_bos: false,
    },
    Cut { names: &["gpt-2"], steps: &[Step::Gpt2], nfc: false, whole_pieces: false, add_bos: false },
    Cut {
        names: &["llama-bpe", "llama3", "llama-v3"],
        steps: &[Step::Pattern(concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ))],
        nfc: false,
        whole_pieces: true,
        add_bos: true,
    },
    Cut {
        names: &["qwen2"],
        steps: &[Step::Pattern(concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ))],
        nfc: true,
        whole_pieces: false,
        add_bos: false,
    },
    // What GGUF converters write for families that they have no name for.
    Cut {
        names: &["default"],
        steps: &[
            Step::Pattern(r"[\p{P}\$\+<=>\^~\|]+"),
            Step::Pattern(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
            Step::Pattern(r"\p{N}+"),
            Step::Pattern("[0-9][0-9][0-9]"),
        ],
        nfc: false,
        whole_pieces: false,
        add_bos: false,
    },
];

/// Control tokens that end a turn in the families of `CUTS`. The file names one of them as its EOS and has
/// no place for the others, which models emit all the same.
const END_TEXTS: &[&str] = &["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"];

/// Builds the tokenizer.
pub(crate) fn build(vocabulary: &GgufVocabulary) -> Result<Tokenizer, TextError> {
    let cut = find_cut(vocabulary)?;
    let kinds = piece_kinds(vocabulary)?;
    check_ids(vocabulary)?;
    let pieces = Pieces::new(kinds.len(), |id| (vocabulary.tokens[id].as_str(), kinds[id]))?;
    let encoder = build_encoder(vocabulary, &kinds, cut)?;

    let add = |wanted: bool, token: Option<TokenId>| token.filter(|_| wanted).into_iter().collect();
    let known_ends = END_TEXTS
        .iter()
        .filter_map(|text| encoder.token_to_id(text))
        .filter(|&id| pieces.kind(id) == PieceKind::Special);
    let end_tokens = [vocabulary.eos, vocabulary.eot, vocabulary.eom].into_iter().flatten().chain(known_ends);
    let texts = [
        ("bos_token", vocabulary.bos),
        ("eos_token", vocabulary.eos),
        ("unk_token", vocabulary.unknown),
        ("pad_token", vocabulary.padding),
    ];
    Ok(Tokenizer {
        prefix: add(vocabulary.add_bos.unwrap_or(cut.add_bos), vocabulary.bos),
        suffix: add(vocabulary.add_eos.unwrap_or(false), vocabulary.eos),
        bos: vocabulary.bos,
        eos: vocabulary.eos,
        end_tokens: sorted_set(end_tokens.collect()),
        special_texts: texts
            .into_iter()
            .filter_map(|(name, id)| Some((name, vocabulary.tokens[id? as usize].clone())))
            .collect(),
        encoder,
        pieces,
    })
}

/// The cut that the file names, after checking that its algorithm is ours.
fn find_cut(vocabulary: &GgufVocabulary) -> Result<&'static Cut, TextError> {
    if vocabulary.model != "gpt2" {
        return Err(TextError::Unsupported {
            what: "model (tokenizer.ggml.model)",
            found: vocabulary.model.clone(),
            supported: "gpt2 (byte-level BPE)".into(),
        });
    }
    CUTS.iter().find(|cut| cut.names.contains(&vocabulary.pre.as_str())).ok_or_else(|| {
        TextError::Unsupported {
            what: "pre-tokenizer (tokenizer.ggml.pre)",
            found: vocabulary.pre.clone(),
            supported: CUTS.iter().flat_map(|cut| cut.names).copied().collect::<Vec<_>>().join(", "),
        }
    })
}

/// What each token is, from the file's token types.
fn piece_kinds(vocabulary: &GgufVocabulary) -> Result<Vec<PieceKind>, TextError> {
    let (tokens, types) = (vocabulary.tokens.len(), vocabulary.token_types.len());
    if tokens > VOCAB_MAX {
        return Err(damaged(format!("it has {tokens} tokens; 1 to {VOCAB_MAX} are possible")));
    }
    if types == 0 {
        return Ok(vec![PieceKind::Normal; tokens]);
    }
    if types != tokens {
        return Err(damaged(format!("it has {tokens} tokens and {types} token types")));
    }
    let kind = |(id, &kind): (usize, &i32)| match kind {
        1 | 6 => Ok(PieceKind::Normal),
        2 | 3 => Ok(PieceKind::Special),
        4 => Ok(PieceKind::Added),
        5 => Ok(PieceKind::Absent),
        other => Err(damaged(format!("token {id} has type {other}; 1 to 6 are known"))),
    };
    vocabulary.token_types.iter().enumerate().map(kind).collect()
}

fn check_ids(vocabulary: &GgufVocabulary) -> Result<(), TextError> {
    let named = [
        ("bos_token_id", vocabulary.bos),
        ("eos_token_id", vocabulary.eos),
        ("eot_token_id", vocabulary.eot),
        ("eom_token_id", vocabulary.eom),
        ("unknown_token_id", vocabulary.unknown),
        ("padding_token_id", vocabulary.padding),
    ];
    let tokens = vocabulary.tokens.len();
    for (name, id) in named {
        if let Some(id) = id.filter(|&id| id as usize >= tokens) {
            return Err(damaged(format!("tokenizer.ggml.{name} is {id}, and there are {tokens} tokens")));
        }
    }
    if vocabulary.add_bos == Some(true) && vocabulary.bos.is_none() {
        return Err(damaged("tokenizer.ggml.add_bos_token is true, and there is no bos_token_id".into()));
    }
    Ok(())
}

fn build_encoder(
    vocabulary: &GgufVocabulary,
    kinds: &[PieceKind],
    cut: &Cut,
) -> Result<tokenizers::Tokenizer, TextError> {
    let library = |error: tokenizers::Error| damaged(error.to_string());
    // From the last id to the first: of two tokens with the same text, the first is the one to encode to.
    let known: Vocab = (0..kinds.len())
        .rev()
        .filter(|&id| kinds[id] != PieceKind::Absent)
        .map(|id| (vocabulary.tokens[id].clone(), id as TokenId))
        .collect();
    let merges = split_merges(vocabulary)?;
    let model = BPE::builder()
        .vocab_and_merges(known, merges)
        .ignore_merges(cut.whole_pieces)
        .build()
        .map_err(library)?;
    let mut encoder = tokenizers::Tokenizer::new(model);
    if cut.nfc {
        encoder.with_normalizer(Some(NFC)).map_err(library)?;
    }
    encoder.with_pre_tokenizer(Some(pre_tokenizer(cut.steps).map_err(library)?));
    let added = (0..kinds.len()).filter_map(|id| match kinds[id] {
        PieceKind::Added => Some(AddedToken::from(vocabulary.tokens[id].clone(), false).normalized(false)),
        PieceKind::Special => Some(AddedToken::from(vocabulary.tokens[id].clone(), true)),
        PieceKind::Normal | PieceKind::Absent => None,
    });
    encoder.add_tokens(added).map_err(library)?;
    Ok(encoder)
}

fn pre_tokenizer(steps: &[Step]) -> tokenizers::Result<Sequence> {
    let mut parts = Vec::new();
    let mut uses_gpt2 = false;
    for step in steps {
        match step {
            Step::Digits => parts.push(Digits::new(true).into()),
            Step::Gpt2 => uses_gpt2 = true,
            Step::Pattern(pattern) => {
                let pattern = SplitPattern::Regex((*pattern).into());
                parts.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into());
            }
        }
    }
    // Always last: it turns bytes into the alphabet.
    parts.push(ByteLevel::new(false, true, uses_gpt2).into());
    Ok(Sequence::new(parts))
}

/// Merges as pairs. The builder that takes them looks up the parts and the result; here only what it
/// doesn't look at is checked.
fn split_merges(vocabulary: &GgufVocabulary) -> Result<Vec<(String, String)>, TextError> {
    let longest = vocabulary.tokens.iter().map(String::len).max().unwrap_or(0);
    let split = |(rank, merge): (usize, &String)| match merge.split_once(' ') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
            if merge.len() > longest + 1 {
                return Err(damaged(format!("merge {rank} ({merge:?}) makes a token longer than any")));
            }
            Ok((left.to_owned(), right.to_owned()))
        }
        _ => Err(damaged(format!("merge {rank} is {merge:?}; it must be two tokens with one space between"))),
    };
    vocabulary.merges.iter().enumerate().map(split).collect()
}

fn damaged(reason: String) -> TextError {
    TextError::Vocabulary { reason }
}

#[cfg(test)]
mod tests;
