//! GGUF, the single-file format of ggml: a table of typed metadata, a table of tensors, and their
//! bytes. Versions 2 and 3, little-endian. Source: the format's specification in ggml's repository.

mod names;
mod parse;
mod value;
pub mod write;

pub(crate) use names::hugging_face_name;
pub(crate) use parse::TensorRecord;

use crate::error::WeightsError;
use crate::map::map;
use crate::tensor::Owner;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use value::Value;

/// A parsed GGUF file. Every count, length and offset in it was checked against the file's size.
///
/// Metadata is owned; tensors stay in the file. The accessors give `None` for a key that is not there
/// and an error for one that has another type, so that a misspelt file is not taken for a silent one.
pub struct Gguf {
    origin: PathBuf,
    owner: Owner,
    version: u32,
    values: BTreeMap<String, Value>,
    tensors: Vec<TensorRecord>,
}

impl Gguf {
    /// Maps and parses a file.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        Self::parse(map(path)?, path)
    }

    /// Parses a file that is in memory. `origin` is for messages.
    pub fn from_bytes(bytes: Vec<u8>, origin: &Path) -> Result<Self, WeightsError> {
        Self::parse(Arc::new(bytes), origin)
    }

    fn parse(owner: Owner, origin: &Path) -> Result<Self, WeightsError> {
        if !(*owner).as_ref().starts_with(parse::MAGIC) {
            let found = "it is a file that does not begin with the letters GGUF".to_owned();
            return Err(WeightsError::NoCheckpoint { path: origin.to_owned(), found });
        }
        let parse::Parsed { version, values, tensors } = parse::parse((*owner).as_ref(), origin)?;
        Ok(Self { origin: origin.to_owned(), owner, version, values, tensors })
    }

    /// The file, for messages.
    pub fn origin(&self) -> &Path {
        &self.origin
    }

    /// Version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// All keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    /// Whether there is such a key, of any type.
    pub fn contains_key(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// A string.
    pub fn string(&self, key: &str) -> Result<Option<&str>, WeightsError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A whole number of any integer type that fits.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, WeightsError> {
        self.typed(key, "a whole number of 32 bits", |value| value.as_integer()?.try_into().ok())
    }

    /// A whole number of any integer type that fits.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, WeightsError> {
        self.typed(key, "a whole number", |value| value.as_integer()?.try_into().ok())
    }

    /// A truth value.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, WeightsError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// A floating-point number of either width, rounded to f32.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, WeightsError> {
        self.typed(key, "a floating-point number", |value| value.as_float().map(|v| v as f32))
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>, WeightsError> {
        self.typed(key, "an array of strings", Value::as_strings)
    }

    /// An array of whole numbers, of any integer type whose values fit.
    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>, WeightsError> {
        self.typed(key, "an array of whole numbers of 32 bits", Value::as_i32s)
    }

    /// An array of floating-point numbers of either width, rounded to f32.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, WeightsError> {
        self.typed(key, "an array of floating-point numbers", Value::as_f32s)
    }

    pub(crate) fn tensors(&self) -> &[TensorRecord] {
        &self.tensors
    }

    /// The mapped file that the tensors' offsets count from.
    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, WeightsError> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        match read(value) {
            Some(found) => Ok(Some(found)),
            None => {
                let problem = format!("is {}; {expected} is needed", value.describe());
                Err(WeightsError::config(&self.origin, key, problem))
            }
        }
    }
}

impl fmt::Debug for Gguf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (keys, tensors) = (self.values.len(), self.tensors.len());
        write!(f, "Gguf(v{} {}, {keys} keys, {tensors} tensors)", self.version, self.origin.display())
    }
}

/// The token that begins a text.
pub(crate) const BOS_KEY: &str = "tokenizer.ggml.bos_token_id";
/// The tokens that end a text, a turn, and a message that expects a tool's answer.
pub(crate) const EOS_KEYS: [&str; 3] =
    ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

#[cfg(test)]
mod tests;
