//! Loaded weights, and how ranks of one process share them.

use crate::aligned::Slabs;
use crate::backend::Activations;
use crate::matmul::Part;
use crate::pack::{Packed, check};
use crate::pool::Pool;
use atom_ops::{OpsError, Slice};
use atom_weights::{DType, Tensor, quant};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What ranks of one process have packed so far, so that ranks that need the same slice hold it once.
///
/// It keeps the tensors that it knows alive, for a slice is recognised by the address of its bytes.
/// Drop it, as each backend does in `reserve`, when all ranks have loaded.
#[derive(Default)]
pub struct WeightShare {
    slots: Mutex<HashMap<Key, Arc<Slot>>>,
    slabs: Mutex<Slabs>,
}

/// A weight of a backend.
pub(crate) enum Loaded {
    /// For a linear operator.
    Matrix(Matrix),
    /// For the experts of a layer.
    Experts(Experts),
    /// Norm weights and biases.
    Vector(Vec<f32>),
    /// Rows to look up, as they lie in the checkpoint.
    Table(Tensor),
}

/// Slices with the same inputs, whose outputs stand one behind the other.
pub(crate) struct Matrix {
    /// In order of outputs.
    pub(crate) parts: Vec<Part>,
    /// Width of x.
    pub(crate) inputs: usize,
    /// Width of the output.
    pub(crate) outputs: usize,
    /// Some of it wants activations quantised or rounded.
    pub(crate) is_quantised: bool,
}

/// The same matrix of every expert held here, one behind the other; all are cut into parts alike.
pub(crate) struct Experts {
    /// At least one.
    pub(crate) matrices: Vec<Matrix>,
}

#[derive(PartialEq, Eq, Hash)]
struct Key {
    address: usize,
    dtype: DType,
    tensor_cols: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    paired: bool,
}

/// Locked while the slice is being packed: the others wait for the result.
type Slot = Mutex<Option<Known>>;

struct Known {
    packed: Weak<Packed>,
    /// Keeps the address from being used for another tensor.
    _tensor: Tensor,
}

impl WeightShare {
    /// Nothing packed yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The packed slice: another rank's, or made now; bf16 in pairs if `paired` is set.
    fn packed(&self, slice: &Slice, paired: bool, pool: &mut Pool) -> Result<Arc<Packed>, OpsError> {
        let key = Key {
            address: slice.tensor.bytes().as_ptr().addr(),
            dtype: slice.tensor.dtype,
            tensor_cols: slice.tensor.cols(),
            rows: slice.rows.clone(),
            cols: slice.cols.clone(),
            paired,
        };
        let slot =
            Arc::clone(self.slots.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default());
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(packed) = slot.as_ref().and_then(|known| known.packed.upgrade()) {
            return Ok(packed);
        }
        let mut slabs = self.slabs.lock().unwrap_or_else(PoisonError::into_inner);
        let data = slabs.piece(Packed::bytes_of(slice, paired), "packed weights")?;
        drop(slabs);
        let packed = Arc::new(Packed::new(slice, paired, data, pool));
        *slot = Some(Known { packed: Arc::downgrade(&packed), _tensor: slice.tensor.clone() });
        Ok(packed)
    }
}

impl Matrix {
    /// Packs `parts`, or takes them from `share`.
    pub(crate) fn load(
        parts: &[Slice],
        activations: Activations,
        share: &WeightShare,
        pool: &mut Pool,
    ) -> Result<Self, OpsError> {
        let inputs = same_inputs(parts)?;
        let mut matrix =
            Self { parts: Vec::with_capacity(parts.len()), inputs, outputs: 0, is_quantised: false };
        for part in parts {
            if !activations.suits(part.tensor.dtype) {
                return Err(OpsError::Weights(format!(
                    "{:?} can't be multiplied with activations of bf16; --activations int16 is nearly exact",
                    part.tensor
                )));
            }
            let paired = activations.pairs(part.tensor.dtype);
            matrix.is_quantised |= activations.quantise_for(part.tensor.dtype);
            matrix.parts.push(Part { weights: share.packed(part, paired, pool)?, column: matrix.outputs });
            matrix.outputs += part.rows.len();
        }
        Ok(matrix)
    }

    /// Bytes that one product reads.
    pub(crate) fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.weights.bytes()).sum()
    }

    /// Outputs of each part.
    fn part_outputs(&self) -> impl Iterator<Item = usize> {
        self.parts.iter().map(|part| part.weights.outputs)
    }
}

impl Experts {
    /// Packs the slices of every expert, or takes them from `share`.
    pub(crate) fn load(
        experts: &[Vec<Slice>],
        activations: Activations,
        share: &WeightShare,
        pool: &mut Pool,
    ) -> Result<Self, OpsError> {
        let mut matrices: Vec<Matrix> = Vec::with_capacity(experts.len());
        for (expert, parts) in experts.iter().enumerate() {
            let matrix = Matrix::load(parts, activations, share, pool)?;
            if let Some(first) = matrices.first()
                && (first.inputs != matrix.inputs || !first.part_outputs().eq(matrix.part_outputs()))
            {
                return Err(OpsError::Weights(format!(
                    "expert {expert} has {} inputs and outputs {:?}, the first one {} and {:?}; all must be alike",
                    matrix.inputs,
                    matrix.part_outputs().collect::<Vec<_>>(),
                    first.inputs,
                    first.part_outputs().collect::<Vec<_>>(),
                )));
            }
            matrices.push(matrix);
        }
        if matrices.is_empty() {
            return Err(OpsError::Weights(
                "a rank without experts; use at most as many lanes as experts".into(),
            ));
        }
        Ok(Self { matrices })
    }

    /// Width of x.
    pub(crate) fn inputs(&self) -> usize {
        self.matrices[0].inputs
    }

    /// Width of the output.
    pub(crate) fn outputs(&self) -> usize {
        self.matrices[0].outputs
    }

    /// True if some of them want activations quantised or rounded.
    pub(crate) fn is_quantised(&self) -> bool {
        self.matrices.iter().any(|matrix| matrix.is_quantised)
    }
}

fn same_inputs(parts: &[Slice]) -> Result<usize, OpsError> {
    let Some(first) = parts.first() else {
        return Err(OpsError::Weights("a matrix of no slices".into()));
    };
    for part in parts {
        check(part)?;
        if part.cols.len() != first.cols.len() {
            return Err(OpsError::Weights(format!(
                "one matrix of slices with {} and {} inputs ({:?}, {:?})",
                first.cols.len(),
                part.cols.len(),
                first.tensor,
                part.tensor
            )));
        }
    }
    Ok(first.cols.len())
}

/// The elements of all slices, row by row, as f32.
pub(crate) fn load_vector(parts: &[Slice]) -> Result<Vec<f32>, OpsError> {
    let mut vector = Vec::new();
    for part in parts {
        check(part)?;
        for row in 0..part.rows.len() {
            let start = vector.len();
            vector.resize(start + part.cols.len(), 0.0);
            quant::expand_row(&part.tensor, part.rows.start + row, part.cols.clone(), &mut vector[start..]);
        }
    }
    Ok(vector)
}

/// Checks that a tensor can be a table.
pub(crate) fn check_table(table: &Tensor) -> Result<(), OpsError> {
    check(&Slice { tensor: table.clone(), rows: 0..table.rows(), cols: 0..table.cols() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use atom_weights::Fp8Scales;

    fn tensor() -> Tensor {
        Tensor::from_f32(vec![40, 8], (0..320).map(|i| i as f32).collect())
    }

    fn slice(tensor: &Tensor, rows: Range<usize>) -> Slice {
        Slice { tensor: tensor.clone(), rows, cols: 0..8 }
    }

    #[test]
    fn equal_slices_are_held_once_and_only_as_long_as_a_rank_has_them() {
        let (share, mut pool, tensor) = (WeightShare::new(), Pool::new(1, &[]).unwrap(), tensor());
        let first = share.packed(&slice(&tensor, 0..40), false, &mut pool).unwrap();
        let second = share.packed(&slice(&tensor, 0..40), false, &mut pool).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        let part = share.packed(&slice(&tensor, 0..20), false, &mut pool).unwrap();
        assert!(!Arc::ptr_eq(&first, &part));
        let gone = Arc::downgrade(&first);
        drop((first, second));
        assert!(gone.upgrade().is_none());
        assert_eq!(share.packed(&slice(&tensor, 0..40), false, &mut pool).unwrap().outputs, 40);
    }

    #[test]
    fn a_tensor_at_the_address_of_an_earlier_one_is_not_taken_for_it() {
        let (share, mut pool) = (WeightShare::new(), Pool::new(1, &[]).unwrap());
        let mut addresses = std::collections::HashSet::new();
        for _ in 0..20 {
            let tensor = tensor();
            assert!(addresses.insert(tensor.bytes().as_ptr()), "the share keeps what it knows alive");
            share.packed(&slice(&tensor, 0..40), false, &mut pool).unwrap();
        }
    }

    /// Slices that begin and end within blocks of scales, and rows of a table.
    #[test]
    fn fp8_is_packed_as_the_numbers_that_it_stands_for() {
        let (rows, cols) = (50, 40);
        let codes: Vec<u8> = (0..rows * cols).map(|i| (i * 31 % 0x7f) as u8 | ((i % 2) << 7) as u8).collect();
        let scales = (0..7 * 3).map(|i| 0.01 + i as f32).collect();
        let fp8 = Tensor::new(DType::F8_E4M3, vec![rows, cols], Arc::new(codes), 0, rows * cols)
            .scaled(Fp8Scales::Block { rows: 8, cols: 16 }, Tensor::from_f32(vec![7, 3], scales));
        let plain = Tensor::from_f32(vec![rows, cols], quant::dequantize(&fp8));
        let (share, mut pool) = (WeightShare::new(), Pool::new(2, &[]).unwrap());
        for (rows, cols) in [(0..50, 0..40), (5..43, 7..31), (49..50, 15..16)] {
            let mut bytes = |tensor: &Tensor| {
                let slice = Slice { tensor: tensor.clone(), rows: rows.clone(), cols: cols.clone() };
                let packed = share.packed(&slice, false, &mut pool).unwrap();
                assert_eq!(
                    (packed.dtype, packed.outputs, packed.inputs),
                    (DType::F32, rows.len(), cols.len())
                );
                let start = packed.panel(0);
                // SAFETY: panels stand one behind the other, and all of them are the piece.
                unsafe { std::slice::from_raw_parts(start, packed.bytes()) }.to_vec()
            };
            assert!(bytes(&fp8) == bytes(&plain), "{rows:?} {cols:?}");
            let mut row = vec![0.0; cols.len()];
            quant::expand_row(&fp8, rows.start, cols.clone(), &mut row);
            assert_eq!(row, quant::dequantize(&plain)[rows.start * 40..][cols.clone()]);
        }
    }

    #[test]
    fn weights_that_rounded_activations_do_not_meet_are_refused_with_their_type() {
        let bytes = vec![0; DType::Q4_K.row_bytes(256)];
        let len = bytes.len();
        let tensor = Tensor::new(DType::Q4_K, vec![1, 256], Arc::new(bytes), 0, len);
        let parts = [Slice { rows: 0..1, cols: 0..256, tensor }];
        let (share, mut pool) = (WeightShare::new(), Pool::new(1, &[]).unwrap());
        let mut load = |activations| Matrix::load(&parts, activations, &share, &mut pool);
        let refused = load(Activations::Bf16).err().unwrap().to_string();
        assert!(refused.contains("Q4_K") && refused.contains("int16"), "{refused}");
        assert!(load(Activations::Int16).unwrap().is_quantised);
    }

    #[test]
    fn vectors_are_slices_one_behind_the_other() {
        let tensor = tensor();
        let part = |rows, cols| Slice { tensor: tensor.clone(), rows, cols };
        let vector = load_vector(&[part(0..1, 2..4), part(1..3, 7..8)]).unwrap();
        assert_eq!(vector, [2.0, 3.0, 15.0, 23.0]);
        assert!(load_vector(&[part(0..1, 2..9)]).unwrap_err().to_string().contains("2..9"));
    }
}
