//! What several test modules need: draws that are the same in every run, and a small tokenizer.

use crate::pieces::char_of;
use crate::{GgufVocabulary, Tokenizer, TokenizerSource};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A stream of draws.
pub(crate) struct Draws {
    seed: u64,
    at: u32,
}

impl Draws {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, at: 0 }
    }

    /// A number in `0 .. end`; 0 when that is empty.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.at += 1;
        (atom_base::rng::uniform(self.seed, 0, self.at, 0) * end as f32) as usize
    }
}

/// A vocabulary whose ids below 256 are the bytes, followed by a few merged, special and odd tokens.
pub(crate) fn byte_vocabulary() -> GgufVocabulary {
    let mut tokens: Vec<String> =
        (0..=255).map(|byte| char::from_u32(char_of(byte)).unwrap().to_string()).collect();
    let merges = ["t h", "th e", "Ġ the", "Ã ©", "Ġ Ġ", "i n", "in g", "ð Ł", "1 2"];
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let mut token_types = vec![1; tokens.len()];
    for (text, kind) in [("<|end|>", 3), ("<|begin|>", 3), ("<tag é>", 4), ("[PAD1]", 5)] {
        tokens.push(text.into());
        token_types.push(kind);
    }
    let id = |text: &str| tokens.iter().position(|token| token == text).map(|at| at as u32);
    GgufVocabulary {
        model: "gpt2".into(),
        pre: "gpt-2".into(),
        bos: id("<|begin|>"),
        eos: id("<|end|>"),
        merges: merges.map(String::from).to_vec(),
        token_types,
        tokens,
        ..Default::default()
    }
}

pub(crate) fn byte_tokenizer() -> Tokenizer {
    Tokenizer::load(&TokenizerSource::Gguf(byte_vocabulary())).unwrap()
}

/// A folder that is removed with its contents.
pub(crate) struct TempFolder(PathBuf);

impl TempFolder {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("atom-text-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn write(&self, name: &str, contents: &str) {
        std::fs::write(self.0.join(name), contents).unwrap();
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
