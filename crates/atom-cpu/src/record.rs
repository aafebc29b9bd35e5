//! Checks a recording against what is loaded and reserved, and lays out its buffers.

mod check;

use crate::backend::Activations;
use crate::phase::{Step, phases};
use crate::quantise::BLOCK;
use crate::route;
use crate::weights::Loaded;
use atom_base::TokenId;
use atom_ops::{BufSpec, Extent, Op, OpsError, Recording, Reserve, StepInputs, StepShape, Weight};
use check::Check;

/// A recording that fits: its phases, and where its buffers lie.
pub(crate) struct Recorded {
    /// What it was recorded for.
    pub(crate) shape: StepShape,
    /// One per buffer.
    pub(crate) places: Vec<Place>,
    /// In order.
    pub(crate) steps: Vec<Step>,
    /// Floats of all buffers.
    pub(crate) floats: usize,
    /// Bytes of quantised activations, at the most.
    pub(crate) codes: usize,
    /// Planes of codes of a row: 1 or 2, 0 if there are none.
    pub(crate) planes: usize,
    /// Floats of gathered columns, at the most.
    pub(crate) gathered: usize,
    /// Floats of scratch that a router needs for a row, at the most.
    pub(crate) scores: usize,
    /// Choices of experts in one operator, at the most.
    pub(crate) choices: usize,
    /// Experts held here, at the most.
    pub(crate) held: usize,
    /// Floats that go to other lanes in one exchange of rows, at the most.
    pub(crate) sent: usize,
    /// Floats that come from them.
    pub(crate) received: usize,
    /// Members of the largest collective.
    pub(crate) members: usize,
    /// Rows of the smallest table.
    tokens: usize,
}

/// A buffer in the arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// First float.
    pub(crate) offset: usize,
    /// Capacity.
    pub(crate) rows: usize,
    /// Elements of a row.
    pub(crate) width: usize,
    /// What its rows are.
    pub(crate) extent: Extent,
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
    let quantises = |weight: Weight| activations.planes() > 0 && check.is_quantised(weight);
    let capacities = recording.collectives().iter().map(|collective| collective.elements);
    let steps = phases(recording.ops(), quantises, |buf| check.spec(buf).extent, capacities);
    let mut floats = 0;
    let place = |spec: &BufSpec| {
        let rows = spec.capacity_rows(&shape);
        let offset = floats;
        floats += (rows * spec.width).next_multiple_of(LINE);
        Place { offset, rows, width: spec.width, extent: spec.extent }
    };
    let places = recording.buffers().iter().map(place).collect();
    let mut recorded = Recorded {
        shape,
        places,
        steps,
        floats,
        codes: 0,
        planes: activations.planes(),
        gathered: 0,
        scores: 0,
        choices: 0,
        held: 0,
        sent: 0,
        received: 0,
        members: shape.lanes,
        tokens: usize::MAX,
    };
    let mut capacities = recording.collectives().iter().map(|collective| collective.elements);
    for op in recording.ops() {
        let capacity = op_meets(op).then(|| capacities.next().expect("the recorder counts every collective"));
        recorded.make_room(op, capacity, &check, &quantises);
    }
    Ok(recorded)
}

impl Recorded {
    /// `capacity` is that of the operator's collective.
    fn make_room(
        &mut self,
        op: &Op,
        capacity: Option<usize>,
        check: &Check<'_>,
        quantises: &impl Fn(Weight) -> bool,
    ) {
        let shape = self.shape;
        let codes = |buf| self.planes * check.spec(buf).capacity(&shape);
        match op {
            Op::Linear { x, weight, .. } if quantises(*weight) => {
                self.codes = self.codes.max(codes(*x));
            }
            Op::Route { spec, .. } => self.scores = self.scores.max(route::scratch_len(spec)),
            Op::Experts { x, gate_up, down, spec, gated, .. } => {
                let x_codes = if quantises(*gate_up) { codes(*x) } else { 0 };
                let gated_codes = if quantises(*down) { codes(*gated) } else { 0 };
                self.codes = self.codes.max(x_codes).max(gated_codes);
                self.choices = self.choices.max(check.spec(*x).capacity_rows(&shape) * spec.top_k);
                self.held = self.held.max(spec.held);
            }
            Op::DispatchRows { out, .. } => {
                self.exchanges(capacity, check.spec(*out).capacity(&shape));
            }
            Op::CombineRows { routes, out, .. } => {
                let choices = shape.rows * check.spec(*routes).width / 2;
                self.choices = self.choices.max(choices);
                self.exchanges(capacity, choices * check.spec(*out).width);
            }
            Op::GatherColumns { widths, .. } => {
                let widest = widths.iter().copied().max().unwrap_or(0);
                self.gathered = self.gathered.max(widths.len() * widest * self.shape.out_rows);
                self.members = self.members.max(widths.len());
            }
            Op::Embed { table, .. } => {
                if let Loaded::Table(table) = &check.weights[table.0 as usize] {
                    self.tokens = self.tokens.min(table.rows());
                }
            }
            _ => {}
        }
    }

    fn exchanges(&mut self, sent: Option<usize>, received: usize) {
        self.sent = self.sent.max(sent.expect("exchanges of rows are collectives"));
        self.received = self.received.max(received);
    }

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
        let known = |&token: &TokenId| (token as usize) < self.tokens;
        assert!(inputs.tokens.iter().all(known), "tokens are below {}", self.tokens);
    }
}

/// True if the recorder counts the operator among the collectives.
fn op_meets(op: &Op) -> bool {
    matches!(
        op,
        Op::AllReduce { .. }
            | Op::GatherRows { .. }
            | Op::ScatterSum { .. }
            | Op::GatherColumns { .. }
            | Op::DispatchRows { .. }
            | Op::CombineRows { .. }
    )
}

/// Floats of a cache line: buffers start on one.
const LINE: usize = 16;

const _: () = assert!(BLOCK == 32, "a scale per 32 codes, as ggml's blocks have it");
