//! Writes GGUF files: to convert a checkpoint, and to make the files that tests read.
//!
//! [`GgufWriter`] takes metadata and tensors one by one; [`from_checkpoint`] does so for a whole model.
//! It writes what it is told, also what no reader should accept ([`GgufWriter::value`],
//! [`GgufWriter::tensor_of_type`], [`GgufWriter::alignment`]): readers are tested with that.

mod model;

pub use model::from_checkpoint;

use super::names::type_number;
use super::value::Kind;
use crate::tensor::DType;

/// A GGUF file in the making, little-endian. Methods chain.
#[derive(Clone, Debug)]
pub struct GgufWriter {
    version: u32,
    alignment: usize,
    values: Vec<u8>,
    value_count: u64,
    tensors: Vec<u8>,
    tensor_count: u64,
    data: Vec<u8>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self::new()
    }
}

impl GgufWriter {
    /// An empty file of version 3, tensors aligned to 32 bytes.
    pub fn new() -> Self {
        Self {
            version: 3,
            alignment: 32,
            values: Vec::new(),
            value_count: 0,
            tensors: Vec::new(),
            tensor_count: 0,
            data: Vec::new(),
        }
    }

    /// Another version number in the header. Versions 2 and 3 differ in nothing else.
    pub fn version(&mut self, version: u32) -> &mut Self {
        self.version = version;
        self
    }

    /// Another alignment of tensors, written as `general.alignment`. Call it before the first tensor.
    pub fn alignment(&mut self, alignment: u32) -> &mut Self {
        assert_eq!(self.tensor_count, 0, "the alignment comes before the tensors");
        self.alignment = alignment as usize;
        self.u32("general.alignment", alignment)
    }

    /// A string.
    pub fn string(&mut self, key: &str, value: &str) -> &mut Self {
        self.value(key, Kind::Text as u32, &text(value))
    }

    /// A u32, the usual type of counts and token ids.
    pub fn u32(&mut self, key: &str, value: u32) -> &mut Self {
        self.value(key, Kind::U32 as u32, &value.to_le_bytes())
    }

    /// An f32.
    pub fn f32(&mut self, key: &str, value: f32) -> &mut Self {
        self.value(key, Kind::F32 as u32, &value.to_le_bytes())
    }

    /// A truth value.
    pub fn bool(&mut self, key: &str, value: bool) -> &mut Self {
        self.value(key, Kind::Bool as u32, &[value.into()])
    }

    /// An array of strings: tokens, merges.
    pub fn strings<S: AsRef<str>>(&mut self, key: &str, values: &[S]) -> &mut Self {
        let elements = values.iter().flat_map(|value| text(value.as_ref()));
        self.array(key, Kind::Text, values.len(), elements)
    }

    /// An array of i32: token types.
    pub fn i32s(&mut self, key: &str, values: &[i32]) -> &mut Self {
        self.array(key, Kind::I32, values.len(), values.iter().flat_map(|value| value.to_le_bytes()))
    }

    /// An array of f32: token scores.
    pub fn f32s(&mut self, key: &str, values: &[f32]) -> &mut Self {
        self.array(key, Kind::F32, values.len(), values.iter().flat_map(|value| value.to_le_bytes()))
    }

    /// A value of any type number and any bytes, also of types that don't exist.
    pub fn value(&mut self, key: &str, type_number: u32, bytes: &[u8]) -> &mut Self {
        self.values.extend(text(key));
        self.values.extend(type_number.to_le_bytes());
        self.values.extend(bytes);
        self.value_count += 1;
        self
    }

    /// A tensor. `shape` is slowest first, as everywhere in this crate; `bytes` are its rows.
    /// Panics if they don't fit each other.
    pub fn tensor(&mut self, name: &str, dtype: DType, shape: &[usize], bytes: &[u8]) -> &mut Self {
        let (inner, outer) = shape.split_last().map_or((1, &[][..]), |(inner, outer)| (*inner, outer));
        assert!(
            inner.is_multiple_of(dtype.block_elements()),
            "{name}: rows of {inner} cut a {dtype:?} block"
        );
        let expected = outer.iter().product::<usize>() * dtype.row_bytes(inner);
        assert_eq!(bytes.len(), expected, "{name}: {dtype:?} {shape:?} takes {expected} bytes");
        let sizes: Vec<u64> = shape.iter().rev().map(|&size| size as u64).collect();
        self.tensor_of_type(name, type_number(dtype), &sizes, bytes)
    }

    /// A tensor of any type number, with its sizes in the file's own order (fastest first) and any
    /// bytes, also of types and sizes that don't exist.
    pub fn tensor_of_type(&mut self, name: &str, type_number: u32, sizes: &[u64], bytes: &[u8]) -> &mut Self {
        let offset = self.data.len() as u64;
        self.tensor_at(name, type_number, sizes, offset);
        self.data.extend(bytes);
        pad(&mut self.data, self.alignment);
        self
    }

    /// A line of the tensor table that points anywhere: `offset` counts from the data section.
    pub fn tensor_at(&mut self, name: &str, type_number: u32, sizes: &[u64], offset: u64) -> &mut Self {
        self.tensors.extend(text(name));
        self.tensors.extend((sizes.len() as u32).to_le_bytes());
        self.tensors.extend(sizes.iter().flat_map(|size| size.to_le_bytes()));
        self.tensors.extend(type_number.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self.tensor_count += 1;
        self
    }

    /// The whole file.
    pub fn finish(&self) -> Vec<u8> {
        self.finish_claiming(self.tensor_count, self.value_count)
    }

    /// The whole file, with these counts in its header instead of the true ones.
    pub fn finish_claiming(&self, tensor_count: u64, value_count: u64) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(tensor_count.to_le_bytes());
        file.extend(value_count.to_le_bytes());
        file.extend(&self.values);
        file.extend(&self.tensors);
        pad(&mut file, self.alignment);
        file.extend(&self.data);
        file
    }

    fn array(
        &mut self,
        key: &str,
        kind: Kind,
        count: usize,
        elements: impl Iterator<Item = u8>,
    ) -> &mut Self {
        let mut bytes = (kind as u32).to_le_bytes().to_vec();
        bytes.extend((count as u64).to_le_bytes());
        bytes.extend(elements);
        self.value(key, Kind::Array as u32, &bytes)
    }
}

fn text(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

/// Alignments that no file may have (0, say) pad nothing.
fn pad(bytes: &mut Vec<u8>, alignment: usize) {
    if alignment != 0 {
        bytes.resize(bytes.len().next_multiple_of(alignment), 0);
    }
}
