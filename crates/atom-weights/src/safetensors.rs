//! safetensors files: eight bytes of length, a JSON header, and the tensors' bytes.

use crate::checkpoint::Entry;
use crate::error::WeightsError;
use crate::fp8::Fp8Problem;
use crate::tensor::{DType, Owner, Tensor, countable_elements};
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The tensors of one file, in the header's order. Ranges are checked against the file and the shape.
pub(crate) fn read(owner: &Owner, origin: &Path) -> Result<Vec<(String, Entry)>, WeightsError> {
    let damaged = |problem: String| WeightsError::damaged(origin, problem);
    let bytes = (**owner).as_ref();
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(damaged(format!("it has {} bytes, not even the header's length", bytes.len())));
    };
    let length = u64::from_le_bytes(*length);
    if length > rest.len().min(HEADER_BYTES_MAX) as u64 {
        let left = rest.len();
        return Err(damaged(format!(
            "its header claims {length} bytes, of which {left} are there (and {HEADER_BYTES_MAX} are allowed)"
        )));
    }
    // Copied, so that what is checked can't change below us.
    let header = rest[..length as usize].to_vec();
    let Header(lines) = serde_json::from_slice(&header)
        .map_err(|source| damaged(format!("its header does not parse: {source}")))?;
    let data = 8 + header.len();
    lines
        .into_iter()
        .map(|(name, line)| Ok((name.clone(), entry(owner, data, &name, line).map_err(damaged)?)))
        .collect()
}

/// `Err` is what is wrong with the line.
fn entry(owner: &Owner, data: usize, name: &str, line: Line) -> Result<Entry, String> {
    let Line { dtype, shape, data_offsets: [begin, end] } = line;
    let available = (**owner).as_ref().len() - data;
    if begin > end || end > available as u64 {
        return Err(format!("tensor {name} claims bytes {begin} to {end} of {available}"));
    }
    // Both are at most `available`, a usize.
    let (begin, len) = (begin as usize, (end - begin) as usize);
    let Some(elements) = countable_elements(&shape) else {
        return Err(format!("tensor {name} has the impossible shape {shape:?}"));
    };
    let Some(dtype) = known(&dtype) else {
        return Ok(Entry::Unreadable { type_name: dtype, shape });
    };
    if elements.checked_mul(dtype.block_bytes()) != Some(len) {
        return Err(format!("tensor {name} of {dtype:?} {shape:?} can't take the {len} bytes it claims"));
    }
    let tensor = Tensor::new(dtype, shape, Arc::clone(owner), data + begin, len);
    Ok(match dtype {
        DType::F8_E4M3 => Entry::Codes(tensor, Fp8Problem::NoScheme),
        _ => Entry::Readable(tensor),
    })
}

fn known(name: &str) -> Option<DType> {
    match name {
        "F32" => Some(DType::F32),
        "F16" => Some(DType::F16),
        "BF16" => Some(DType::BF16),
        "F8_E4M3" => Some(DType::F8_E4M3),
        _ => None,
    }
}

/// The header's tensors. Unlike a map it keeps, and so finds, a name that is there twice.
struct Header(Vec<(String, Line)>);

#[derive(serde::Deserialize)]
struct Line {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut lines = Vec::new();
        let mut seen = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(format_args!("tensor {name} appears twice")));
            }
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else {
                lines.push((name, map.next_value()?));
            }
        }
        Ok(Header(lines))
    }
}

/// Headers of published files stay below 10 MB. Parsed, one takes a few times its size.
const HEADER_BYTES_MAX: usize = 64 << 20;
