//! How much memory the steps of a recording work in. Said once: the room is made by these numbers, and
//! whoever plans memory before anything is loaded reads the same.

use crate::backend::Activations;
use crate::choices::Choices;
use crate::matmul::tile_bytes;
use crate::quantise::{BLOCK, BlockScale};
use crate::{round, route};
use atom_ops::{Buf, BufSpec, Extent, LoadWeights, Op, OpsError, Recording, Slice, StepShape, Weight};
use atom_weights::Tensor;

/// Counts of what steps of a recording need, at the most.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sizes {
    /// Floats of all buffers but the next.
    pub(crate) floats: usize,
    /// Floats of buffers with rows of the whole group.
    pub(crate) group_floats: usize,
    /// Bytes of quantised or rounded activations.
    pub(crate) codes: usize,
    /// Bytes of each; 0 if there are none.
    pub(crate) code: usize,
    /// Bytes that a worker works in when it multiplies rounded ones.
    pub(crate) tiles: usize,
    /// Floats of gathered columns.
    pub(crate) gathered: usize,
    /// Floats of scratch that a router needs for a row.
    pub(crate) scores: usize,
    /// Choices of experts in one operator.
    pub(crate) choices: usize,
    /// Experts held here.
    pub(crate) held: usize,
    /// Floats that go to other lanes in one exchange of rows.
    pub(crate) sent: usize,
    /// Floats that come from them.
    pub(crate) received: usize,
    /// Members of the largest collective.
    pub(crate) members: usize,
}

/// The same in bytes, one for each allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RoomBytes {
    pub(crate) floats: usize,
    pub(crate) group_floats: usize,
    pub(crate) codes: usize,
    pub(crate) tiles: usize,
    pub(crate) scales: usize,
    pub(crate) gathered: usize,
    pub(crate) scores: usize,
    pub(crate) choices: usize,
    pub(crate) exchanged: usize,
}

/// A buffer in its arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// First float.
    pub(crate) offset: usize,
    /// Capacity.
    pub(crate) rows: usize,
    /// Elements of a row.
    pub(crate) width: usize,
    /// What its rows are; those of the group have an arena of their own.
    pub(crate) extent: Extent,
}

/// A rank that loads nothing and says what steps of its share of a model will work in: to refuse sizes
/// before weights are read.
pub struct Sketch {
    activations: Activations,
    threads: usize,
    /// For each weight, whether activations that meet it are quantised.
    quantised: Vec<bool>,
}

impl Sketch {
    /// Any number of rows will do: kernels stop at the real ones, and the ranks of a lane split heads and
    /// columns, the lanes of a group nothing; nobody splits the rows of a step.
    pub const ROWS_MULTIPLE_OF: u32 = 1;

    /// Of a rank with these options.
    pub fn new(threads: usize, activations: Activations) -> Self {
        Self { activations, threads, quantised: Vec::new() }
    }

    /// Bytes of buffers and scratch for steps of a recording over the weights that were shown here.
    pub fn step_bytes(&self, recording: &Recording) -> usize {
        let is_quantised = |weight: Weight| self.quantised[weight.0 as usize];
        Sizes::of(recording, self.activations, is_quantised).bytes(self.threads).total()
    }

    fn quantises(&self, slice: &Slice) -> bool {
        self.activations.quantise_for(slice.tensor.dtype)
    }

    fn keep(&mut self, is_quantised: bool) -> Weight {
        self.quantised.push(is_quantised);
        Weight(u32::try_from(self.quantised.len() - 1).expect("a model has thousands of weights"))
    }
}

/// Nothing is refused: what a backend can't load it says itself.
impl LoadWeights for Sketch {
    fn load_matrix(&mut self, parts: &[Slice]) -> Result<Weight, OpsError> {
        Ok(self.keep(parts.iter().any(|part| self.quantises(part))))
    }

    fn load_experts(&mut self, experts: &[Vec<Slice>]) -> Result<Weight, OpsError> {
        Ok(self.keep(experts.iter().flatten().any(|part| self.quantises(part))))
    }

    fn load_vector(&mut self, _: &[Slice]) -> Result<Weight, OpsError> {
        Ok(self.keep(false))
    }

    fn load_table(&mut self, _: &Tensor) -> Result<Weight, OpsError> {
        Ok(self.keep(false))
    }
}

impl Sizes {
    /// Activations are rounded, not quantised.
    pub(crate) fn rounds(&self) -> bool {
        self.code == round::BYTES
    }

    /// `is_quantised` says of a matrix, or of a layer's experts, whether any of it wants activations quantised
    /// or rounded.
    pub(crate) fn of(
        recording: &Recording,
        activations: Activations,
        is_quantised: impl Fn(Weight) -> bool,
    ) -> Self {
        let (_, floats, group_floats) = lay_out(recording);
        let (shape, code) = (recording.shape(), activations.bytes());
        let mut sizes = Self { floats, group_floats, code, members: shape.lanes, ..Self::default() };
        let mut capacities = recording.collectives().iter().map(|collective| collective.elements);
        for op in recording.ops() {
            let capacity =
                op_meets(op).then(|| capacities.next().expect("the recorder counts every collective"));
            sizes.make_room(op, capacity, recording, &is_quantised);
        }
        sizes
    }

    /// `capacity` is that of the operator's collective.
    fn make_room(
        &mut self,
        op: &Op,
        capacity: Option<usize>,
        recording: &Recording,
        quantises: &impl Fn(Weight) -> bool,
    ) {
        let shape: StepShape = recording.shape();
        let spec = |buf: Buf| recording.buffers()[usize::from(buf.0)];
        let codes = |code: usize, buf| code * spec(buf).capacity(&shape);
        match op {
            Op::Linear { x, weight, .. } if quantises(*weight) => {
                self.codes = self.codes.max(codes(self.code, *x));
                self.makes_tiles(spec(*x).width);
            }
            Op::Route { spec, .. } => self.scores = self.scores.max(route::scratch_len(spec)),
            Op::Experts { x, gate_up, down, spec: experts, gated, .. } => {
                let x_codes = if quantises(*gate_up) { codes(self.code, *x) } else { 0 };
                let gated_codes = if quantises(*down) { codes(self.code, *gated) } else { 0 };
                self.codes = self.codes.max(x_codes).max(gated_codes);
                if x_codes + gated_codes > 0 {
                    self.makes_tiles(spec(*x).width.max(experts.width));
                }
                let rows = spec(*x).capacity_rows(&shape);
                self.choices = self.choices.max(rows * experts.choices_per_row());
                self.held = self.held.max(experts.held);
            }
            Op::DispatchRows { out, .. } => self.exchanges(capacity, spec(*out).capacity(&shape)),
            Op::CombineRows { routes, out, .. } => {
                let choices = shape.rows * spec(*routes).width / 2;
                self.choices = self.choices.max(choices);
                self.exchanges(capacity, choices * spec(*out).width);
            }
            Op::GatherColumns { widths, .. } => {
                let widest = widths.iter().copied().max().unwrap_or(0);
                self.gathered = self.gathered.max(widths.len() * widest * shape.out_rows);
                self.members = self.members.max(widths.len());
            }
            _ => {}
        }
    }

    fn makes_tiles(&mut self, inputs: usize) {
        if self.rounds() {
            self.tiles = self.tiles.max(tile_bytes(inputs).next_multiple_of(PAGE));
        }
    }

    fn exchanges(&mut self, sent: Option<usize>, received: usize) {
        self.sent = self.sent.max(sent.expect("exchanges of rows are collectives"));
        self.received = self.received.max(received);
    }

    /// For a rank with so many threads.
    pub(crate) fn bytes(&self, threads: usize) -> RoomBytes {
        RoomBytes {
            floats: self.floats * size_of::<f32>(),
            group_floats: self.group_floats * size_of::<f32>(),
            codes: self.codes,
            tiles: threads * self.tiles,
            scales: self.codes / BLOCK * size_of::<BlockScale>(),
            gathered: self.gathered * size_of::<f32>(),
            scores: threads * self.scores * size_of::<f32>(),
            choices: Choices::words(self.choices, self.held) * size_of::<u32>(),
            exchanged: (self.sent + self.received) * size_of::<f32>(),
        }
    }
}

impl RoomBytes {
    pub(crate) fn total(&self) -> usize {
        let Self { floats, group_floats, codes, tiles, scales, gathered, scores, choices, exchanged } = *self;
        floats + group_floats + codes + tiles + scales + gathered + scores + choices + exchanged
    }
}

/// Where the buffers of a recording lie, and the floats of both arenas.
pub(crate) fn lay_out(recording: &Recording) -> (Vec<Place>, usize, usize) {
    let (shape, mut floats, mut group_floats) = (recording.shape(), 0, 0);
    let place = |spec: &BufSpec| {
        let end = if spec.extent == Extent::GroupRows { &mut group_floats } else { &mut floats };
        let offset = *end;
        *end += spec.capacity(&shape).next_multiple_of(LINE);
        Place { offset, rows: spec.capacity_rows(&shape), width: spec.width, extent: spec.extent }
    };
    let places = recording.buffers().iter().map(place).collect();
    (places, floats, group_floats)
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

/// Scratch of workers is apart by pages.
const PAGE: usize = 4096;
