//! Checks a recording against what is loaded and reserved.

mod check;
mod seen;

pub(crate) use seen::ExpertsSeen;

use crate::backend::Activations;
use crate::phase::{Step, phases};
use crate::quantise::BLOCK;
use crate::sizes::{Place, Sizes, lay_out};
use crate::weights::Loaded;
use atom_base::{TokenId, slot_of_last};
use atom_ops::{Op, OpsError, Recording, Reserve, StepInputs, StepShape, Weight};
use check::Check;

/// A recording that fits: its phases, and where its buffers lie.
pub(crate) struct Recorded {
    /// What it was recorded for.
    pub(crate) shape: StepShape,
    /// One per buffer.
    pub(crate) places: Vec<Place>,
    /// In order.
    pub(crate) steps: Vec<Step>,
    /// What it needs.
    pub(crate) sizes: Sizes,
    /// Which experts rows chose, a bit for each, behind every router; empty if it was not made to count them.
    pub(crate) seen: ExpertsSeen,
    /// Rows of the smallest table.
    tokens: usize,
}

/// Checks every operator and cuts the recording into phases.
pub(crate) fn record(
    recording: &Recording,
    reserve: &Reserve,
    weights: &[Loaded],
    activations: Activations,
) -> Result<Recorded, OpsError> {
    let shape = recording.shape();
    let top = reserve.top;
    if shape.rows > top.rows || shape.out_rows > top.out_rows || shape.lanes != top.lanes {
        return Err(OpsError::Memory(format!("a recording of {shape:?} does not fit the reserved {top:?}")));
    }
    let check = Check { buffers: recording.buffers(), reserve, weights };
    for (index, op) in recording.ops().iter().enumerate() {
        check.op(op).map_err(|what| OpsError::Weights(format!("operator {index}, {}: {what}", op.name())))?;
    }
    let quantises = |weight: Weight| check.is_quantised(weight);
    let capacities = recording.collectives().iter().map(|collective| collective.elements);
    let steps = phases(recording.ops(), quantises, |buf| check.spec(buf).extent, capacities);
    let sizes = Sizes::of(recording, activations, |weight| check.is_quantised(weight));
    let tables = recording.ops().iter().filter_map(|op| match op {
        Op::Embed { table, .. } => Some(*table),
        _ => None,
    });
    let rows = tables.filter_map(|table| match &weights[table.0 as usize] {
        Loaded::Table(table) => Some(table.rows()),
        _ => None,
    });
    let tokens = rows.min().unwrap_or(usize::MAX);
    let seen = ExpertsSeen::new(recording);
    Ok(Recorded { shape, places: lay_out(recording).0, steps, sizes, seen, tokens })
}

impl Recorded {
    /// Panics if a step isn't one of this recording: a bug of whoever made the plan.
    pub(crate) fn assert_fits(&self, inputs: &StepInputs<'_>) {
        let (rows, shape) = (inputs.tokens.len(), self.shape);
        assert!(rows <= shape.rows, "{rows} rows in a recording of {}", shape.rows);
        assert!(inputs.out.len() <= shape.out_rows, "{} out rows, not {}", inputs.out.len(), shape.out_rows);
        assert!(inputs.positions.len() == rows && inputs.cache_rows.len() == rows, "arrays of {rows} rows");
        assert!(inputs.out.iter().all(|out| (out.row as usize) < rows), "out rows are among {rows} rows");
        assert_eq!(inputs.group_rows.len(), shape.lanes, "lanes of the group");
        assert!(inputs.group_rows.iter().all(|&n| n as usize <= shape.rows), "rows of the group's lanes");
        // A lane may run fewer rows than it was granted: somebody gave way while the plan was made.
        let granted = inputs.group_rows[inputs.lane] as usize;
        assert!(rows <= granted, "{rows} rows in lane {}, which was granted {granted}", inputs.lane);
        let known = |&token: &TokenId| slot_of_last(token).is_some() || (token as usize) < self.tokens;
        assert!(inputs.tokens.iter().all(known), "tokens are below {}", self.tokens);
    }
}

const _: () = assert!(BLOCK == 32, "a scale per 32 codes, as ggml's blocks have it");
