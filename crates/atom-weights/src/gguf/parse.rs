//! Reading a GGUF file. Every number in it is taken for hostile: a count is compared with the bytes
//! that are left before it is believed, and nothing is allocated that the file's size does not cover.

use super::names::tensor_type;
use super::value::{Kind, Texts, Value};
use crate::error::WeightsError;
use crate::tensor::{DType, countable_elements};
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

pub(super) struct Parsed {
    pub(super) version: u32,
    pub(super) values: BTreeMap<String, Value>,
    pub(super) tensors: Vec<TensorRecord>,
}

/// A line of the tensor table, with everything about it checked.
pub(crate) struct TensorRecord {
    /// ggml's name.
    pub(crate) name: String,
    /// `Err` holds the name of a type that can't be read.
    pub(crate) dtype: Result<DType, String>,
    /// Slowest first: the file's order is undone.
    pub(crate) shape: Vec<usize>,
    /// From the start of the file.
    pub(crate) start: usize,
    /// Bytes; 0 where the type can't be read.
    pub(crate) len: usize,
}

/// Parses the whole header of a file that begins with [`MAGIC`].
pub(super) fn parse(bytes: &[u8], origin: &Path) -> Result<Parsed, WeightsError> {
    let mut cursor = Cursor { bytes, at: 0, origin };
    let version = version(&mut cursor)?;
    let tensor_count = cursor.u64("the number of tensors")?;
    let value_count = cursor.u64("the number of metadata keys")?;
    let tensor_count = cursor.count("tensors", tensor_count, TENSOR_BYTES_MIN, TENSORS_MAX)?;
    let value_count = cursor.count("metadata keys", value_count, VALUE_BYTES_MIN, KEYS_MAX)?;

    let mut values = BTreeMap::new();
    for _ in 0..value_count {
        let key = cursor.text("a metadata key", KEY_BYTES_MAX)?;
        let value = value(&mut cursor, &key)?;
        if values.contains_key(&key) {
            return Err(cursor.damaged(format!("metadata key {key:?} appears twice")));
        }
        values.insert(key, value);
    }
    let alignment = alignment(&cursor, &values)?;
    let tensors = tensors(&mut cursor, tensor_count, alignment)?;
    Ok(Parsed { version, values, tensors })
}

fn version(cursor: &mut Cursor<'_>) -> Result<u32, WeightsError> {
    cursor.take(MAGIC.len() as u64, "the magic number")?;
    let version = cursor.u32("the version")?;
    let supported = "versions 2 and 3, little-endian, are";
    match version {
        2 | 3 => Ok(version),
        _ if matches!(version.swap_bytes(), 1..=3) => {
            Err(WeightsError::unsupported(cursor.origin, "big-endian GGUF", supported))
        }
        _ => Err(WeightsError::unsupported(cursor.origin, format!("GGUF version {version}"), supported)),
    }
}

fn value(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, WeightsError> {
    let kind = cursor.kind(key)?;
    match kind {
        Kind::Text => Ok(Value::Text(cursor.text(key, usize::MAX)?)),
        Kind::Array => array(cursor, key),
        _ => {
            let bytes = cursor.take(kind.bytes().expect("neither string nor array") as u64, key)?;
            Value::scalar(kind, bytes)
                .ok_or_else(|| cursor.damaged(format!("metadata key {key:?} is a bool of {}", bytes[0])))
        }
    }
}

fn array(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, WeightsError> {
    let kind = cursor.kind(key)?;
    let count = cursor.u64(key)?;
    let what = format!("elements of {key:?}");
    match (kind, kind.bytes()) {
        (_, Some(size)) => {
            let count = cursor.count(&what, count, size, usize::MAX)?;
            let bytes = cursor.take((count * size) as u64, &what)?;
            if kind == Kind::Bool
                && let Some(bad) = bytes.iter().find(|byte| **byte > 1)
            {
                return Err(cursor.damaged(format!("metadata key {key:?} holds a bool of {bad}")));
            }
            Ok(Value::Numbers(kind, bytes.into()))
        }
        (Kind::Text, None) => {
            let count = cursor.count(&what, count, LENGTH_BYTES, usize::MAX)?;
            let mut texts = Texts::default();
            for _ in 0..count {
                texts.push(&cursor.text(key, usize::MAX)?);
            }
            Ok(Value::Texts(texts))
        }
        (_, None) => {
            let what = format!("an array of arrays (metadata key {key:?})");
            Err(WeightsError::unsupported(cursor.origin, what, "arrays of numbers and of strings are"))
        }
    }
}

fn alignment(cursor: &Cursor<'_>, values: &BTreeMap<String, Value>) -> Result<usize, WeightsError> {
    const KEY: &str = "general.alignment";
    let Some(value) = values.get(KEY) else { return Ok(ALIGNMENT_DEFAULT) };
    let alignment = value.as_integer().and_then(|n| usize::try_from(n).ok());
    alignment.filter(|n| n.is_power_of_two() && *n <= ALIGNMENT_MAX).ok_or_else(|| {
        let problem = format!("is {}; a power of two up to {ALIGNMENT_MAX} is needed", value.describe());
        WeightsError::config(cursor.origin, KEY, problem)
    })
}

fn tensors(
    cursor: &mut Cursor<'_>,
    count: usize,
    alignment: usize,
) -> Result<Vec<TensorRecord>, WeightsError> {
    let mut records = Vec::with_capacity(count);
    for _ in 0..count {
        records.push(record(cursor, alignment)?);
    }
    let mut seen = HashSet::with_capacity(count);
    if let Some(twice) = records.iter().find(|record| !seen.insert(record.name.as_str())) {
        return Err(cursor.damaged(format!("tensor {} appears twice", twice.name)));
    }
    // Until here `start` counts from the data section, whose place is known only now.
    let data = cursor.at.next_multiple_of(alignment).min(cursor.bytes.len());
    let available = cursor.bytes.len() - data;
    for record in &mut records {
        if record.start > available || record.len > available - record.start {
            return Err(cursor.damaged(format!(
                "tensor {} lies at bytes {} + {} of a data section of {available} bytes",
                record.name, record.start, record.len
            )));
        }
        record.start += data;
    }
    Ok(records)
}

fn record(cursor: &mut Cursor<'_>, alignment: usize) -> Result<TensorRecord, WeightsError> {
    let name = cursor.text("a tensor's name", KEY_BYTES_MAX)?;
    let dimensions = cursor.u32(&name)?;
    if dimensions > DIMENSIONS_MAX {
        let problem =
            format!("tensor {name} has {dimensions} dimensions; at most {DIMENSIONS_MAX} are possible");
        return Err(cursor.damaged(problem));
    }
    let mut sizes = (0..dimensions).map(|_| cursor.u64(&name)).collect::<Result<Vec<u64>, _>>()?;
    sizes.reverse();
    let number = cursor.u32(&name)?;
    let offset = cursor.u64(&name)?;

    let shape: Option<Vec<usize>> = sizes.iter().map(|&size| usize::try_from(size).ok()).collect();
    let shape = shape.and_then(|shape| Some((countable_elements(&shape)?, shape)));
    let Some((elements, shape)) = shape else {
        return Err(cursor.damaged(format!("tensor {name} has the impossible shape {sizes:?}")));
    };
    let dtype = match tensor_type(number) {
        Some((_, Some(dtype))) => Ok(dtype),
        Some((type_name, None)) => Err(type_name.to_owned()),
        None => Err(format!("type {number}")),
    };
    let len = match dtype {
        Ok(dtype) => {
            let inner = shape.last().copied().unwrap_or(1);
            let block = dtype.block_elements();
            if !inner.is_multiple_of(block) {
                let problem =
                    format!("tensor {name} is {dtype:?}, but its rows of {inner} are no multiple of {block}");
                return Err(cursor.damaged(problem));
            }
            // Rows are whole blocks, so elements are too.
            (elements / block).checked_mul(dtype.block_bytes())
        }
        Err(_) => Some(0),
    };
    let (Some(len), Ok(start)) = (len, usize::try_from(offset)) else {
        return Err(cursor.damaged(format!("tensor {name} of shape {shape:?} at {offset} passes any file")));
    };
    if !start.is_multiple_of(alignment) {
        let problem =
            format!("tensor {name} lies at offset {start}, no multiple of general.alignment = {alignment}");
        return Err(cursor.damaged(problem));
    }
    Ok(TensorRecord { name, dtype, shape, start, len })
}

/// Reads front to back; every read is checked against what is left.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    origin: &'a Path,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8], WeightsError> {
        let rest = &self.bytes[self.at..];
        let taken = usize::try_from(count).ok().and_then(|count| rest.get(..count));
        let taken = taken.ok_or_else(|| {
            let (left, at) = (rest.len(), self.at);
            self.damaged(format!("{what} takes {count} bytes at offset {at}, where {left} are left"))
        })?;
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], WeightsError> {
        Ok(self.take(N as u64, what)?.try_into().expect("take gives what was asked for"))
    }

    fn u32(&mut self, what: &str) -> Result<u32, WeightsError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, WeightsError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A length and that many bytes of UTF-8, copied: text is never read from the mapping again.
    fn text(&mut self, what: &str, max: usize) -> Result<String, WeightsError> {
        let len = self.u64(what)?;
        if len > max as u64 {
            return Err(self.damaged(format!("{what} of {len} bytes passes the bound of {max}")));
        }
        let bytes = self.take(len, what)?.to_vec();
        String::from_utf8(bytes).map_err(|error| {
            let valid = error.utf8_error().valid_up_to();
            self.damaged(format!("{what} is not valid UTF-8 after {valid} of {len} bytes"))
        })
    }

    fn kind(&mut self, key: &str) -> Result<Kind, WeightsError> {
        let number = self.u32(key)?;
        Kind::from_number(number)
            .ok_or_else(|| self.damaged(format!("metadata key {key:?} has the unknown type {number}")))
    }

    /// Believes a count of things of at least `size` bytes each only if that many can follow.
    fn count(&self, what: &str, count: u64, size: usize, max: usize) -> Result<usize, WeightsError> {
        let left = self.bytes.len() - self.at;
        let possible = (left / size).min(max);
        if count > possible as u64 {
            let problem = format!("it claims {count} {what}, but {left} bytes are left, room for {possible}");
            return Err(self.damaged(problem));
        }
        Ok(count as usize)
    }

    fn damaged(&self, problem: impl Into<String>) -> WeightsError {
        WeightsError::damaged(self.origin, problem)
    }
}

/// How every file begins.
pub(super) const MAGIC: &[u8] = b"GGUF";
/// A string's length.
const LENGTH_BYTES: usize = 8;
/// An empty key, its type, a value of one byte.
const VALUE_BYTES_MIN: usize = LENGTH_BYTES + 4 + 1;
/// An empty name, no dimensions, type and offset.
const TENSOR_BYTES_MIN: usize = LENGTH_BYTES + 4 + 4 + 8;
/// Published files have some dozens; an entry takes several times its size in the file.
const KEYS_MAX: usize = 1 << 16;
/// Published files have some thousands.
const TENSORS_MAX: usize = 1 << 20;
/// The format's bound for keys; names of tensors are shorter.
const KEY_BYTES_MAX: usize = (1 << 16) - 1;
/// The format's bound.
const DIMENSIONS_MAX: u32 = 4;
/// Where the file does not say.
const ALIGNMENT_DEFAULT: usize = 32;
/// Larger than any page.
const ALIGNMENT_MAX: usize = 1 << 20;
