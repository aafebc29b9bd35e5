//! A tokenizer read from a folder: `tokenizer.json`, and what `tokenizer_config.json` adds to it.

use crate::pieces::{PieceKind, Pieces, VOCAB_MAX};
use crate::{TextError, Tokenizer};
use atom_base::TokenId;
use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::fmt;
use std::fs;
use std::path::Path;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{AddedToken, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

/// Bytes of one file of a tokenizer. The largest published `tokenizer.json` has 33 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Names of special tokens that templates may print.
const SPECIAL_NAMES: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

/// Reads the tokenizer of a folder.
pub(crate) fn build(folder: &Path) -> Result<Tokenizer, TextError> {
    let path = folder.join("tokenizer.json");
    let text = read_text(&path)?.ok_or_else(|| TextError::NoTokenizer { folder: folder.to_path_buf() })?;
    let malformed =
        |error: serde_json::Error| TextError::Read { path: path.clone(), reason: error.to_string() };
    check_kind(&serde_json::from_str(&text).map_err(malformed)?)?;
    let file: TokenizerFile = serde_json::from_str(&text).map_err(malformed)?;
    let pieces = pieces(&file)?;
    let mut encoder = build_encoder(file)?;
    let (mut prefix, mut suffix) = affixes(&encoder)?;
    encoder.with_post_processor(None::<PostProcessorWrapper>);

    let config = read_json(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    let map = read_json(&folder.join("special_tokens_map.json"))?.unwrap_or_default();
    let text_of = |name| token_text(&config[name]).or_else(|| token_text(&map[name]));
    let special_texts: Vec<_> =
        SPECIAL_NAMES.into_iter().filter_map(|name| Some((name, text_of(name)?))).collect();
    let id_of = |name| encoder.token_to_id(&text_of(name)?);
    let (bos, eos) = (id_of("bos_token"), id_of("eos_token"));
    apply_switch(&config, "add_bos_token", bos, &mut prefix)?;
    apply_switch(&config, "add_eos_token", eos, &mut suffix)?;
    let end_tokens = eos.into_iter().collect();
    Ok(Tokenizer { encoder, pieces, prefix, suffix, bos, eos, end_tokens, special_texts })
}

/// A JSON file; `None` where there is no such file.
pub(crate) fn read_json(path: &Path) -> Result<Option<Value>, TextError> {
    let failed = |reason: String| TextError::Read { path: path.to_path_buf(), reason };
    match read_text(path)? {
        None => Ok(None),
        Some(text) => serde_json::from_str(&text).map(Some).map_err(|error| failed(error.to_string())),
    }
}

/// A text file of bounded length; `None` where there is no such file.
pub(crate) fn read_text(path: &Path) -> Result<Option<String>, TextError> {
    let failed = |reason: String| TextError::Read { path: path.to_path_buf(), reason };
    let bytes = match fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error.to_string())),
    };
    if bytes > FILE_BYTES_MAX {
        return Err(failed(format!("it has {bytes} bytes; at most {FILE_BYTES_MAX} are read")));
    }
    fs::read_to_string(path).map(Some).map_err(|error| failed(error.to_string()))
}

/// What decides whether the file is of a kind that is supported. Read first, since the vocabulary of
/// other kinds has another shape.
#[derive(Deserialize)]
struct FileKind {
    model: ModelKind,
    #[serde(default)]
    decoder: Value,
}

#[derive(Deserialize)]
struct ModelKind {
    /// Missing in files from before 2020, which are BPE when they have merges.
    #[serde(rename = "type")]
    name: Option<String>,
    merges: Option<de::IgnoredAny>,
}

/// `tokenizer.json`, without `truncation` and `padding`: a server neither cuts nor pads a prompt behind
/// the client's back. `dropout` is left out too, which is for training.
#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<AddedEntry>,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    post_processor: Option<PostProcessorWrapper>,
    model: ModelFile,
}

#[derive(Deserialize)]
struct AddedEntry {
    id: TokenId,
    #[serde(flatten)]
    token: AddedToken,
}

#[derive(Deserialize)]
struct ModelFile {
    vocab: Vocab,
    merges: Vec<Merge>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
}

/// A merge: `["left", "right"]`, or `"left right"` in the older notation.
enum Merge {
    Pair(String, String),
    Line(String),
}

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MergeVisitor)
    }
}

/// Takes a merge as it comes. Trying one notation after the other would make an error text for each of
/// several hundred thousand lines.
struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = Merge;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a merge: two tokens in a list, or in a string with a space between")
    }

    fn visit_str<E: de::Error>(self, line: &str) -> Result<Merge, E> {
        Ok(Merge::Line(line.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Merge, A::Error> {
        match (parts.next_element()?, parts.next_element()?, parts.next_element::<de::IgnoredAny>()?) {
            (Some(left), Some(right), None) => Ok(Merge::Pair(left, right)),
            (left, right, _) => {
                let count = usize::from(left.is_some()) + usize::from(right.is_some());
                Err(de::Error::invalid_length(if count == 2 { 3 } else { count }, &self))
            }
        }
    }
}

/// Refuses what isn't byte-level BPE. `Tokenizer` decodes token by token, and that is only right there.
fn check_kind(file: &FileKind) -> Result<(), TextError> {
    let name = file.model.name.as_deref();
    if name != Some("BPE") && !(name.is_none() && file.model.merges.is_some()) {
        return Err(TextError::Unsupported {
            what: "model",
            found: name.unwrap_or("none").to_owned(),
            supported: "BPE".into(),
        });
    }
    let decoders = match file.decoder["type"].as_str() {
        Some("Sequence") => file.decoder["decoders"].as_array().map_or(&[][..], Vec::as_slice),
        _ => std::slice::from_ref(&file.decoder),
    };
    let names: Vec<&str> = decoders.iter().map(|d| d["type"].as_str().unwrap_or("none")).collect();
    let is_known = |name: &&str| ["ByteLevel", "Fuse"].contains(name);
    if !names.contains(&"ByteLevel") || !names.iter().all(is_known) {
        return Err(TextError::Unsupported {
            what: "decoder",
            found: names.join(" + "),
            supported: "ByteLevel (byte-level BPE)".into(),
        });
    }
    Ok(())
}

fn pieces(file: &TokenizerFile) -> Result<Pieces, TextError> {
    let vocab = &file.model.vocab;
    let last = vocab.values().copied().chain(file.added_tokens.iter().map(|entry| entry.id)).max();
    let size = last.map_or(0, |id| id as usize + 1);
    if size > VOCAB_MAX {
        return Err(damaged(format!("its largest id is {}; {VOCAB_MAX} tokens are possible", size - 1)));
    }
    let mut entries = vec![("", PieceKind::Absent); size];
    for (text, &id) in vocab {
        entries[id as usize] = (text, PieceKind::Normal);
    }
    for AddedEntry { id, token } in &file.added_tokens {
        let kind = if token.special { PieceKind::Special } else { PieceKind::Added };
        entries[*id as usize] = (&token.content, kind);
    }
    Pieces::new(size, |id| entries[id])
}

fn build_encoder(file: TokenizerFile) -> Result<tokenizers::Tokenizer, TextError> {
    let library = |error: tokenizers::Error| damaged(error.to_string());
    let TokenizerFile { added_tokens, normalizer, pre_tokenizer, post_processor, model } = file;
    let mut vocab = model.vocab;
    // The library numbers added tokens by their place in the list unless the vocabulary has them.
    for AddedEntry { id, token } in &added_tokens {
        vocab.entry(token.content.clone()).or_insert(*id);
    }
    let merges = split_merges(model.merges, &vocab)?;
    let mut builder = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .fuse_unk(model.fuse_unk.unwrap_or(false))
        .byte_fallback(model.byte_fallback.unwrap_or(false))
        .ignore_merges(model.ignore_merges.unwrap_or(false));
    // An empty prefix or suffix changes nothing, and costs a copy of every character.
    if let Some(prefix) = model.continuing_subword_prefix.filter(|prefix| !prefix.is_empty()) {
        builder = builder.continuing_subword_prefix(prefix);
    }
    if let Some(suffix) = model.end_of_word_suffix.filter(|suffix| !suffix.is_empty()) {
        builder = builder.end_of_word_suffix(suffix);
    }
    if let Some(unknown) = model.unk_token {
        builder = builder.unk_token(unknown);
    }
    let mut encoder = tokenizers::Tokenizer::new(builder.build().map_err(library)?);
    encoder.with_normalizer(normalizer).map_err(library)?;
    encoder.with_pre_tokenizer(pre_tokenizer);
    encoder.with_post_processor(post_processor);
    encoder.add_tokens(added_tokens.iter().map(|entry| entry.token.clone())).map_err(library)?;
    for AddedEntry { id, token } in added_tokens.iter().filter(|entry| !entry.token.content.is_empty()) {
        let got = encoder.token_to_id(&token.content);
        if got != Some(*id) {
            let (text, got) = (&token.content, got.map_or("none".to_owned(), |got| got.to_string()));
            return Err(damaged(format!(
                "added token {text:?} has id {id}, and the vocabulary gives it {got}"
            )));
        }
    }
    Ok(encoder)
}

/// Merges as pairs. The builder that takes them looks up the parts and the result; here only what it
/// doesn't look at is checked.
fn split_merges(merges: Vec<Merge>, vocab: &Vocab) -> Result<Vec<(String, String)>, TextError> {
    let longest = vocab.keys().map(String::len).max().unwrap_or(0);
    let mut pairs = Vec::with_capacity(merges.len());
    for (rank, merge) in merges.into_iter().enumerate() {
        let (left, right) = match merge {
            Merge::Pair(left, right) => (left, right),
            Merge::Line(line) if line.starts_with("#version") => continue,
            Merge::Line(line) => match line.split_once(' ') {
                Some((left, right)) if !right.contains(' ') => (left.to_owned(), right.to_owned()),
                _ => return Err(damaged(format!("merge {rank} is {line:?}; it must be two tokens"))),
            },
        };
        if left.len() + right.len() > longest {
            return Err(damaged(format!("merge {rank} ({left:?} {right:?}) makes a token longer than any")));
        }
        pairs.push((left, right));
    }
    Ok(pairs)
}

/// What the post-processor puts before and after a text.
fn affixes(encoder: &tokenizers::Tokenizer) -> Result<(Vec<TokenId>, Vec<TokenId>), TextError> {
    let encode = |add_special| {
        let encoding = encoder.encode_fast("a", add_special).map_err(|error| damaged(error.to_string()))?;
        Ok::<_, TextError>(encoding.get_ids().to_vec())
    };
    let (bare, full) = (encode(false)?, encode(true)?);
    if bare.is_empty() {
        return Err(damaged("it has no token for the letter a".into()));
    }
    let Some(at) = full.windows(bare.len()).position(|window| window == bare) else {
        return Err(damaged(format!("its post-processor turns {bare:?} into {full:?}")));
    };
    Ok((full[..at].to_vec(), full[at + bare.len()..].to_vec()))
}

/// A special token of `tokenizer_config.json`: its text, or an object with its text as `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// `add_bos_token` and `add_eos_token` overrule the post-processor, in both directions.
fn apply_switch(
    config: &Value,
    name: &str,
    token: Option<TokenId>,
    affix: &mut Vec<TokenId>,
) -> Result<(), TextError> {
    match (config[name].as_bool(), token) {
        (Some(true), None) => {
            Err(damaged(format!("tokenizer_config.json has {name}: true and does not name that token")))
        }
        (Some(true), Some(token)) if !affix.contains(&token) => {
            affix.push(token);
            Ok(())
        }
        (Some(false), Some(token)) => {
            affix.retain(|&other| other != token);
            Ok(())
        }
        _ => Ok(()),
    }
}

fn damaged(reason: String) -> TextError {
    TextError::Vocabulary { reason }
}

#[cfg(test)]
mod tests;
