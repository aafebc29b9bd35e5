//! Hands a rank's slices of the checkpoint to its backend.

use crate::ModelError;
use crate::shard::ShardPlan;
use atom_ops::{LoadWeights, OpsError, Slice, Weight};
use atom_weights::{Checkpoint, ModelConfig, Tensor};
use std::ops::Range;

/// What loading a layer needs.
pub(crate) struct Loader<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) shard: &'a ShardPlan,
    pub(crate) config: &'a ModelConfig,
    pub(crate) backend: &'a mut dyn LoadWeights,
}

/// A tensor, and which part of it a rank takes.
pub(crate) type Piece = (String, Part);

/// Which part of a tensor a rank takes.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    All,
    Rows(Range<usize>),
    Cols(Range<usize>),
}

impl Loader<'_> {
    /// One matrix; the outputs of several pieces stand one behind the other.
    pub(crate) fn matrix(&mut self, pieces: &[Piece]) -> Result<Weight, ModelError> {
        let slices = self.slices(pieces)?;
        self.backend.load_matrix(&slices).map_err(|source| refused(&pieces[0].0, source))
    }

    /// The matrices of all experts that a rank holds.
    pub(crate) fn experts(&mut self, experts: &[Vec<Piece>]) -> Result<Weight, ModelError> {
        let slices = experts.iter().map(|pieces| self.slices(pieces)).collect::<Result<Vec<_>, _>>()?;
        self.backend.load_experts(&slices).map_err(|source| refused(&experts[0][0].0, source))
    }

    /// One vector, of several pieces.
    pub(crate) fn vectors(&mut self, pieces: &[Piece]) -> Result<Weight, ModelError> {
        let slices = self.slices(pieces)?;
        self.backend.load_vector(&slices).map_err(|source| refused(&pieces[0].0, source))
    }

    /// A whole vector.
    pub(crate) fn vector(&mut self, name: &str) -> Result<Weight, ModelError> {
        self.vectors(&[(name.to_owned(), Part::All)])
    }

    /// A whole table.
    pub(crate) fn table(&mut self, name: &str) -> Result<Weight, ModelError> {
        let tensor = self.checkpoint.tensor(name)?;
        self.backend.load_table(&tensor).map_err(|source| refused(name, source))
    }

    fn slices(&self, pieces: &[Piece]) -> Result<Vec<Slice>, ModelError> {
        let slice = |(name, part): &Piece| Ok(slice(self.checkpoint.tensor(name)?, part));
        pieces.iter().map(slice).collect()
    }
}

/// A vector's elements are its one row's columns; `Part::Rows` of a vector means elements.
fn slice(tensor: Tensor, part: &Part) -> Slice {
    let (rows, cols) = (tensor.rows(), tensor.cols());
    let vector = tensor.shape.len() == 1;
    match part {
        Part::All => Slice { tensor, rows: 0..rows, cols: 0..cols },
        Part::Rows(range) if vector => Slice { tensor, rows: 0..1, cols: range.clone() },
        Part::Rows(range) => Slice { tensor, rows: range.clone(), cols: 0..cols },
        Part::Cols(range) => Slice { tensor, rows: 0..rows, cols: range.clone() },
    }
}

fn refused(tensor: &str, source: OpsError) -> ModelError {
    ModelError::Backend { tensor: tensor.to_owned(), source }
}
