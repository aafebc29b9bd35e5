//! A tensor as it lies in a file: element type, shape and bytes, cheap to clone, owner kept alive.

use crate::fp8::{Fp8Scales, Scales};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Whatever keeps a tensor's bytes alive: a mapped file, or a vector.
pub(crate) type Owner = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// How elements are stored. Quantised types are ggml's: blocks of 32 along the last dimension, or
/// super-blocks of 256 in the types with a K. Scales are multiplied and minima added in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32, little-endian.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of binary32.
    BF16,
    /// 34 bytes: f16 scale `d`, 32 x i8 `q`; value `d * q`.
    Q8_0,
    /// 18 bytes: f16 scale `d`, 16 bytes of nibbles; element `i` is the low nibble of byte `i` for
    /// `i < 16`, else the high nibble of byte `i - 16`; value `d * (q - 8)`.
    Q4_0,
    /// 20 bytes: f16 scale `d`, f16 offset `m`, 16 bytes of nibbles as in `Q4_0`; value `d * q + m`.
    Q4_1,
    /// 22 bytes: f16 scale `d`, 4 bytes whose bit `i`, of 32, is the fifth bit of code `i`, 16 bytes of
    /// nibbles as in `Q4_0`; value `d * (q - 16)`.
    Q5_0,
    /// 24 bytes: f16 scale `d`, f16 offset `m`, fifth bits and nibbles as in `Q5_0`; value `d * q + m`.
    Q5_1,
    /// 144 bytes for 256 elements: f16 `d`, f16 `dmin`, 12 bytes that hold a scale and a minimum of 6 bits
    /// for each 32 elements, 128 bytes of nibbles; value `d * scale * q - dmin * minimum`.
    #[allow(non_camel_case_types, reason = "as ggml calls it")]
    Q4_K,
    /// 176 bytes: as `Q4_K`, with 32 bytes of fifth bits before the nibbles.
    #[allow(non_camel_case_types, reason = "as ggml calls it")]
    Q5_K,
    /// 210 bytes for 256 elements: 128 bytes of nibbles, 64 bytes of upper pairs of bits, an i8 scale for
    /// each 16 elements, f16 `d`; value `d * scale * (q - 32)`.
    #[allow(non_camel_case_types, reason = "as ggml calls it")]
    Q6_K,
    /// OCP's 8-bit float: sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa, no infinities. A
    /// number is the code's value times the scale that [`Tensor::scaled`] attached.
    #[allow(non_camel_case_types, reason = "as safetensors calls it")]
    F8_E4M3,
}

/// A tensor of a checkpoint. Row-major, the last dimension contiguous (a weight matrix is
/// `[outputs, inputs]`, as PyTorch and safetensors have it; GGUF's reversed order is undone on reading).
#[derive(Clone)]
pub struct Tensor {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    start: usize,
    len: usize,
    recipe: Option<Recipe>,
    scales: Option<Arc<Scales>>,
}

/// How the elements of a synthetic tensor come about, for who can make them where they are needed. See
/// [`Checkpoint::synthetic`](crate::Checkpoint::synthetic) for the rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// Key of the generator.
    pub key: [u32; 2],
    /// Added to every element.
    pub offset: f64,
    /// Standard deviation.
    pub scale: f64,
    /// Index of the tensor's first element.
    pub first: u64,
}

/// Bytes that are made when somebody first asks for them.
struct Unmade<F> {
    make: F,
    bytes: OnceLock<Vec<u8>>,
}

impl<F: Fn() -> Vec<u8>> AsRef<[u8]> for Unmade<F> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.get_or_init(&self.make)
    }
}

impl DType {
    /// Elements in one block: 1 for plain types.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 | Self::F8_E4M3 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::F8_E4M3 => 1,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// Bytes of a row of `elements`, which must be a whole number of blocks.
    pub const fn row_bytes(self, elements: usize) -> usize {
        elements / self.block_elements() * self.block_bytes()
    }
}

impl Tensor {
    /// A view of `len` bytes at `start` of `owner`. Panics if they lie outside or don't fit the shape:
    /// readers check file offsets before they come here.
    pub fn new(
        dtype: DType,
        shape: Vec<usize>,
        owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
        start: usize,
        len: usize,
    ) -> Self {
        let total = (*owner).as_ref().len();
        assert!(start <= total && len <= total - start, "tensor bytes {start}+{len} outside of {total}");
        let inner = shape.last().copied().unwrap_or(1);
        assert!(
            inner.is_multiple_of(dtype.block_elements()),
            "rows of {inner} elements cut a {dtype:?} block"
        );
        let rows: usize = shape.iter().rev().skip(1).product();
        assert_eq!(len, rows * dtype.row_bytes(inner), "{dtype:?} {shape:?} does not take {len} bytes");
        Self { dtype, shape, owner, start, len, recipe: None, scales: None }
    }

    /// A tensor whose bytes `make` gives, if they are ever asked for, and which the recipe describes.
    pub(crate) fn unmade(
        dtype: DType,
        shape: Vec<usize>,
        recipe: Recipe,
        make: impl Fn() -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        let rows: usize = shape.iter().rev().skip(1).product();
        let len = rows * dtype.row_bytes(shape.last().copied().unwrap_or(1));
        let owner = Arc::new(Unmade { make, bytes: OnceLock::new() });
        Self { dtype, shape, owner, start: 0, len, recipe: Some(recipe), scales: None }
    }

    /// FP8 codes with what they are multiplied by. Panics unless this is a matrix of codes and `values` has a
    /// shape that `form` has for it: readers check files before they come here.
    pub fn scaled(self, form: Fp8Scales, values: Tensor) -> Self {
        assert_eq!(self.dtype, DType::F8_E4M3, "only codes have scales");
        let scales = Some(Arc::new(Scales::new(form, values, &self.shape)));
        Self { scales, ..self }
    }

    /// The numbers that FP8 codes are multiplied by, as they are stored; `None` for other types.
    pub fn scales(&self) -> Option<&Tensor> {
        self.scales.as_ref().map(|scales| scales.values())
    }

    /// The scale of columns from `col` on in a row of FP8 codes, and the column where the next one begins.
    /// Panics for other types.
    pub fn scale_at(&self, row: usize, col: usize) -> (f32, usize) {
        self.scales.as_ref().expect("readers give no codes without scales").at(row, col)
    }

    /// Rows and columns of FP8 codes that share a scale, and the row of such blocks that row 0 is: a view of rows may
    /// begin within one. `None` for other types.
    pub fn scale_block(&self) -> Option<([usize; 2], usize)> {
        self.scales.as_ref().map(|scales| scales.block())
    }

    /// What describes the elements, if they were not read but made up. A device that follows it need not ask for
    /// [`Self::bytes`].
    pub fn recipe(&self) -> Option<Recipe> {
        self.recipe
    }

    /// Equal for views of the same bytes, as long as one of them lives.
    pub fn identity(&self) -> (usize, usize) {
        (Arc::as_ptr(&self.owner).cast::<()>() as usize, self.start)
    }

    /// How many bytes there are, without making them.
    pub fn byte_len(&self) -> usize {
        self.len
    }

    /// A tensor of f32 values made in memory.
    pub fn from_f32(shape: Vec<usize>, values: Vec<f32>) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let len = bytes.len();
        Self::new(DType::F32, shape, Arc::new(bytes), 0, len)
    }

    /// The raw bytes. They need not be aligned for the element type: files promise no alignment.
    pub fn bytes(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.start..self.start + self.len]
    }

    /// Rows: the product of all dimensions but the last. 1 for a vector.
    pub fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// Elements of one row: the last dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// A view of a range of rows as a matrix, whatever the shape; no byte is moved. Panics if there are
    /// not that many.
    pub(crate) fn rows_view(&self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows(), "rows {rows:?} of {}", self.rows());
        let row_bytes = self.dtype.row_bytes(self.cols());
        let (start, len) = (self.start + rows.start * row_bytes, rows.len() * row_bytes);
        let first = (rows.start * self.cols()) as u64;
        let recipe = self.recipe.map(|recipe| Recipe { first: recipe.first + first, ..recipe });
        let shape = vec![rows.len(), self.cols()];
        let scales = self.scales.as_ref().map(|scales| Arc::new(scales.starting_at_row(rows.start)));
        Self { dtype: self.dtype, shape, owner: Arc::clone(&self.owner), start, len, recipe, scales }
    }

    /// The bytes of one row.
    pub fn row(&self, row: usize) -> &[u8] {
        let bytes = self.dtype.row_bytes(self.cols());
        &self.bytes()[row * bytes..(row + 1) * bytes]
    }
}

/// Elements of a shape that a file states. `None` if they, or a part of the dimensions without a zero
/// among them, can't be counted: products of any of them are then safe to take.
pub(crate) fn countable_elements(shape: &[usize]) -> Option<usize> {
    let bound = shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size.max(1)))?;
    Some(if shape.contains(&0) { 0 } else { bound })
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?} {:?}", self.dtype, self.shape)?;
        match self.scales() {
            Some(scales) => write!(f, " with scales {:?} {:?})", scales.dtype, scales.shape),
            None => f.write_str(")"),
        }
    }
}
