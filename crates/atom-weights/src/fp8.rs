//! FP8 weights: codes in one tensor, what they are multiplied by in another.
//!
//! Codes are e4m3 as the Open Compute Project defines it ("8-bit floating point specification", 2023). A weight
//! `X.weight` has its scales in `X.weight_scale_inv` or `X.weight_scale`; whatever the name says, a number is
//! `code * scale`. Which weights share a scale is the same for the whole checkpoint, and config.json says it.
//! Which matrices are quantised is read off their types, so lists of modules that are not add nothing.
//!
//! Scales of activations ([`UNUSED`]) are left alone: activations stay as they are, or are scaled by what is in their rows,
//! either of which is more exact than the model was made for.

use crate::checkpoint::{Entries, Entry};
use crate::tensor::{DType, Tensor};
use half::{bf16, f16};
use std::fmt;
use thiserror::Error;

/// Which weights of a matrix share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8Scales {
    /// All: a scalar, or a vector of one.
    Tensor,
    /// Those of an output: `[outputs, 1]`, or `[outputs]`.
    Channel,
    /// Those of a block: `[outputs / rows, inputs / cols]`, rounded up.
    Block {
        /// Outputs of a block.
        rows: usize,
        /// Inputs of a block.
        cols: usize,
    },
}

/// Why FP8 codes can't be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Fp8Problem {
    /// Nothing says how they are scaled.
    #[error("but config.json has no quantization_config that says how FP8 weights are scaled")]
    NoScheme,
    /// A vector, or a stack of matrices.
    #[error("which is supported for matrices only")]
    NotAMatrix,
    /// No scales.
    #[error(
        "and neither {} nor {} is there, one of which must hold {scales}: shape {expected:?}",
        .names[0], .names[1]
    )]
    Missing {
        /// Looked for.
        names: [String; 2],
        /// What is expected.
        scales: Fp8Scales,
        /// Of the scales.
        expected: Vec<usize>,
    },
    /// Scales under both names.
    #[error("and both {} and {} are there, of which only one can be right", .0[0], .0[1])]
    Both(
        /// Found.
        [String; 2],
    ),
    /// Scales of another shape.
    #[error("and {name} has shape {found:?}, but {scales} of it have shape {expected:?}")]
    Shape {
        /// The scales.
        name: String,
        /// Their shape.
        found: Vec<usize>,
        /// What the configuration says.
        scales: Fp8Scales,
        /// The shape that follows.
        expected: Vec<usize>,
    },
    /// Scales of a type that they don't come in.
    #[error("and {name} as {found}; scales are F32, F16 or BF16")]
    Type {
        /// The scales.
        name: String,
        /// Their type.
        found: String,
    },
}

/// What the codes of one matrix are multiplied by.
#[derive(Clone)]
pub(crate) struct Scales {
    /// Row by row; F32, F16 or BF16.
    values: Tensor,
    /// Rows and columns that share a scale.
    block: [usize; 2],
    /// Blocks that a row meets.
    across: usize,
    /// The row of the matrix that is row 0 of a view.
    first_row: usize,
}

impl Fp8Scales {
    /// The shapes that scales of a matrix may have, the usual one first.
    fn shapes(self, rows: usize, cols: usize) -> Vec<Vec<usize>> {
        match self {
            Self::Tensor => vec![vec![], vec![1]],
            Self::Channel => vec![vec![rows, 1], vec![rows]],
            Self::Block { rows: high, cols: wide } => vec![vec![rows.div_ceil(high), cols.div_ceil(wide)]],
        }
    }

    /// The usual shape of scales of a matrix.
    pub(crate) fn shape(self, rows: usize, cols: usize) -> Vec<usize> {
        self.shapes(rows, cols).remove(0)
    }

    /// Never of no height or width, though a matrix may have none.
    fn block(self, rows: usize, cols: usize) -> [usize; 2] {
        let sides = match self {
            Self::Tensor => [rows, cols],
            Self::Channel => [1, cols],
            Self::Block { rows, cols } => [rows, cols],
        };
        sides.map(|side| side.max(1))
    }
}

impl fmt::Display for Fp8Scales {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor => f.write_str("scales for whole tensors"),
            Self::Channel => f.write_str("scales for channels"),
            Self::Block { rows, cols } => write!(f, "scales for blocks of {rows} x {cols}"),
        }
    }
}

impl Scales {
    pub(crate) fn new(form: Fp8Scales, values: Tensor, shape: &[usize]) -> Self {
        let &[rows, cols] = shape else { panic!("FP8 codes of shape {shape:?} are no matrix") };
        assert!(form.shapes(rows, cols).contains(&values.shape), "{values:?} are no {form} of {shape:?}");
        assert!(is_scale(values.dtype), "{values:?} as scales");
        let block = form.block(rows, cols);
        Self { values, block, across: cols.div_ceil(block[1]), first_row: 0 }
    }

    pub(crate) fn values(&self) -> &Tensor {
        &self.values
    }

    /// See [`Tensor::scale_block`].
    pub(crate) fn block(&self) -> ([usize; 2], usize) {
        (self.block, self.first_row)
    }

    /// Those of the rows from `row` on.
    pub(crate) fn starting_at_row(&self, row: usize) -> Self {
        Self { first_row: self.first_row + row, ..self.clone() }
    }

    /// The scale of columns from `col` on, and the column where the next one begins.
    pub(crate) fn at(&self, row: usize, col: usize) -> (f32, usize) {
        let [rows, cols] = self.block;
        let index = (self.first_row + row) / rows * self.across + col / cols;
        (self.number(index), (col / cols + 1) * cols)
    }

    fn number(&self, index: usize) -> f32 {
        let bytes = self.values.dtype.block_bytes();
        let at = &self.values.bytes()[index * bytes..][..bytes];
        match (self.values.dtype, at) {
            (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (DType::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            (dtype, _) => unreachable!("scales of {dtype:?}"),
        }
    }
}

/// Gives every matrix of codes its scales, which are no tensors of their own any more, and takes out scales that
/// nobody uses. Says how many the latter were.
pub(crate) fn pair(mut entries: Entries, scheme: Option<Fp8Scales>) -> (Entries, usize) {
    let Some(scheme) = scheme else { return (entries, 0) };
    let of_codes = |(name, entry): (&String, &Entry)| match entry {
        Entry::Codes(codes, _) => Some((name.clone(), codes.clone())),
        _ => None,
    };
    let codes: Vec<_> = entries.iter().filter_map(of_codes).collect();
    for (name, codes) in codes {
        let entry = match scales_of(&name, &codes, scheme, &entries) {
            Err(problem) => Entry::Codes(codes, problem),
            Ok((scales, values)) => {
                entries.remove(&scales);
                Entry::Readable(codes.scaled(scheme, values))
            }
        };
        entries.insert(name, entry);
    }
    let before = entries.len();
    entries.retain(|name, _| !UNUSED.iter().any(|end| name.ends_with(end)));
    let unused = before - entries.len();
    (entries, unused)
}

/// The name and the numbers of a matrix's scales.
fn scales_of(
    name: &str,
    codes: &Tensor,
    scheme: Fp8Scales,
    entries: &Entries,
) -> Result<(String, Tensor), Fp8Problem> {
    let &[rows, cols] = &codes.shape[..] else { return Err(Fp8Problem::NotAMatrix) };
    let names = SCALES.map(|end| format!("{name}{end}"));
    let shapes = scheme.shapes(rows, cols);
    let expected = shapes[0].clone();
    let (scales, entry) = match [entries.get(&names[0]), entries.get(&names[1])] {
        [Some(entry), None] => (names[0].clone(), entry),
        [None, Some(entry)] => (names[1].clone(), entry),
        [Some(_), Some(_)] => return Err(Fp8Problem::Both(names)),
        [None, None] => return Err(Fp8Problem::Missing { names, scales: scheme, expected }),
    };
    let found = match entry {
        Entry::Readable(values) if is_scale(values.dtype) && shapes.contains(&values.shape) => {
            return Ok((scales, values.clone()));
        }
        Entry::Readable(values) if is_scale(values.dtype) => {
            let found = values.shape.clone();
            return Err(Fp8Problem::Shape { name: scales, found, scales: scheme, expected });
        }
        Entry::Readable(values) | Entry::Codes(values, _) => format!("{:?}", values.dtype),
        Entry::Unreadable { type_name, .. } => type_name.clone(),
    };
    Err(Fp8Problem::Type { name: scales, found })
}

fn is_scale(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// The nearest code, ties to the even one; beyond the largest value, that one.
pub fn nearest(value: f32) -> u8 {
    let sign = u8::from(value.is_sign_negative()) << 7;
    if value.is_nan() {
        return sign | NAN;
    }
    let magnitude = value.abs();
    // The first code whose value is not below; values grow with their codes.
    let above = (0..NAN).find(|&code| VALUES[usize::from(code)] >= magnitude).unwrap_or(NAN - 1);
    let Some(below) = above.checked_sub(1) else { return sign };
    // Exact in f64: the halfway point has one bit more than the values.
    let [low, high] = [below, above].map(|code| f64::from(VALUES[usize::from(code)]));
    let middle = low.midpoint(high);
    let code = match f64::from(magnitude).total_cmp(&middle) {
        std::cmp::Ordering::Less => below,
        std::cmp::Ordering::Greater => above,
        std::cmp::Ordering::Equal => below + below % 2,
    };
    sign | code
}

/// The numbers that codes stand for.
pub(crate) static VALUES: [f32; 256] = values();

const fn values() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = (code as u32 >> 3 & 15, code as u32 & 7);
        let magnitude = if code as u8 & NAN == NAN {
            f32::NAN
        } else if exponent == 0 {
            // 2^-6 * mantissa / 8
            mantissa as f32 / 512.0
        } else {
            // An f32 has the same mantissa in its upper bits, and a bias of 127 instead of 7.
            f32::from_bits((exponent + 120) << 23 | mantissa << 20)
        };
        values[code] = if code < 128 { magnitude } else { -magnitude };
        code += 1;
    }
    values
}

/// All ones, whatever the sign.
const NAN: u8 = 0x7f;
/// What a weight's name gets for its scales.
const SCALES: [&str; 2] = ["_scale_inv", "_scale"];
/// Scales of activations, and of the keys and values of an FP8 cache, by which checkpoints of static quantisation
/// carry them.
const UNUSED: [&str; 9] = [
    ".input_scale",
    ".input_scale_inv",
    ".input_scale_ub",
    ".activation_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
];

#[cfg(test)]
mod tests;
