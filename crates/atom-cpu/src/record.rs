//! Checks a recording against what is loaded and reserved, and lays out its buffers.

use crate::backend::Activations;
use crate::phase::{Step, phases};
use crate::quantise::BLOCK;
use crate::weights::{Loaded, Matrix};
use atom_base::TokenId;
use atom_ops::{
    AttentionSpec, Buf, BufSpec, Comm, Extent, Op, OpsError, Recording, Reserve, StepInputs, StepShape,
    Weight,
};

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
        check.op(op).map_err(|what| OpsError::Weights(format!("operator {index}, {}: {what}", name(op))))?;
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
        members: shape.lanes,
        tokens: usize::MAX,
    };
    for op in recording.ops() {
        recorded.make_room(op, &check, &quantises);
    }
    Ok(recorded)
}

impl Recorded {
    fn make_room(&mut self, op: &Op, check: &Check<'_>, quantises: &impl Fn(Weight) -> bool) {
        match op {
            Op::Linear { x, weight, .. } if quantises(*weight) => {
                self.codes = self.codes.max(self.planes * check.spec(*x).capacity(&self.shape));
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

struct Check<'a> {
    buffers: &'a [BufSpec],
    reserve: &'a Reserve,
    weights: &'a [Loaded],
}

impl Check<'_> {
    fn op(&self, op: &Op) -> Result<(), String> {
        match *op {
            Op::Embed { table, out } => {
                self.extent(out, Extent::Rows)?;
                self.table(table, self.spec(out).width)
            }
            Op::Norm { x, weight, out, .. } => {
                apart(&[x, out])?;
                self.vector(weight, self.spec(x).width)
            }
            Op::AddNorm { residual, x, weight, out, .. } => {
                apart(&[residual, x, out])?;
                self.vector(weight, self.spec(x).width)
            }
            Op::Linear { x, weight, bias, out } => self.linear(x, weight, bias, out),
            Op::RotateAndCache { qkv, layer, qk_norm, ref spec } => {
                self.attention(layer, spec)?;
                self.extent(qkv, Extent::Rows)?;
                qk_norm.map_or(Ok(()), |(q, k, _)| {
                    self.vector(q, spec.head_dim).and_then(|()| self.vector(k, spec.head_dim))
                })
            }
            Op::Attend { qkv, layer, ref spec, out } => {
                self.attention(layer, spec)?;
                apart(&[qkv, out])?;
                self.extent(qkv, Extent::Rows).and_then(|()| self.extent(out, Extent::Rows))
            }
            Op::GatedSilu { gate_up, out } => {
                apart(&[gate_up, out])?;
                self.extent(out, self.spec(gate_up).extent)
            }
            Op::AllReduce { x, comm } => match (comm, self.spec(x).extent) {
                (Comm::Group, Extent::Rows | Extent::OutRows) => {
                    Err("lanes have different rows; only group rows can be summed over the group".into())
                }
                _ => Ok(()),
            },
            Op::PickRows { x, .. } => self.extent(x, Extent::Rows),
            Op::GatherColumns { x, ref widths, out } => {
                self.extent(x, Extent::OutRows)?;
                self.extent(out, Extent::OutRows)?;
                let width = self.spec(x).width;
                if widths.contains(&width) {
                    Ok(())
                } else {
                    Err(format!("{width} columns are not among {widths:?}"))
                }
            }
            Op::GatherRows { .. } | Op::ScatterSum { .. } => Ok(()),
            Op::Sample { logits } => equal("logits of a row", self.spec(logits).width, self.reserve.vocab),
        }
    }

    fn linear(&self, x: Buf, weight: Weight, bias: Option<Weight>, out: Buf) -> Result<(), String> {
        apart(&[x, out])?;
        let matrix = self.matrix(weight)?;
        equal("inputs", matrix.inputs, self.spec(x).width)?;
        equal("outputs", matrix.outputs, self.spec(out).width)?;
        bias.map_or(Ok(()), |bias| self.vector(bias, matrix.outputs))
    }

    fn attention(&self, layer: usize, spec: &AttentionSpec) -> Result<(), String> {
        if layer >= self.reserve.layers {
            return Err(format!("layer {layer} of a cache of {}", self.reserve.layers));
        }
        if *spec != *self.reserve.attention {
            return Err("its heads are not those that the cache was reserved for".into());
        }
        Ok(())
    }

    fn spec(&self, buf: Buf) -> BufSpec {
        self.buffers[usize::from(buf.0)]
    }

    fn extent(&self, buf: Buf, extent: Extent) -> Result<(), String> {
        let found = self.spec(buf).extent;
        if found == extent { Ok(()) } else { Err(format!("{buf:?} has {found:?}, not {extent:?}")) }
    }

    fn weight(&self, weight: Weight) -> Result<&Loaded, String> {
        self.weights.get(weight.0 as usize).ok_or_else(|| format!("{weight:?} was never loaded"))
    }

    fn matrix(&self, weight: Weight) -> Result<&Matrix, String> {
        match self.weight(weight)? {
            Loaded::Matrix(matrix) => Ok(matrix),
            Loaded::Vector(_) | Loaded::Table(_) => Err(format!("{weight:?} is no matrix")),
        }
    }

    fn vector(&self, weight: Weight, len: usize) -> Result<(), String> {
        match self.weight(weight)? {
            Loaded::Vector(vector) => equal("elements of a vector", vector.len(), len),
            Loaded::Matrix(_) | Loaded::Table(_) => Err(format!("{weight:?} is no vector")),
        }
    }

    fn table(&self, weight: Weight, width: usize) -> Result<(), String> {
        match self.weight(weight)? {
            Loaded::Table(table) => equal("columns of a table", table.cols(), width),
            Loaded::Matrix(_) | Loaded::Vector(_) => Err(format!("{weight:?} is no table")),
        }
    }

    fn is_quantised(&self, weight: Weight) -> bool {
        self.matrix(weight).is_ok_and(Matrix::is_quantised)
    }
}

/// Operators don't work in place: workers hold references to whole rows of both sides.
fn apart(bufs: &[Buf]) -> Result<(), String> {
    for (i, buf) in bufs.iter().enumerate() {
        if bufs[..i].contains(buf) {
            return Err(format!("{buf:?} is both read and written"));
        }
    }
    Ok(())
}

fn equal(what: &str, found: usize, expected: usize) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{found} {what}, not {expected}")) }
}

fn name(op: &Op) -> &'static str {
    match op {
        Op::Embed { .. } => "embed",
        Op::Norm { .. } => "norm",
        Op::AddNorm { .. } => "add and norm",
        Op::Linear { .. } => "linear",
        Op::RotateAndCache { .. } => "rotate and cache",
        Op::Attend { .. } => "attend",
        Op::GatedSilu { .. } => "gated SiLU",
        Op::AllReduce { .. } => "all-reduce",
        Op::GatherRows { .. } => "gather rows",
        Op::ScatterSum { .. } => "scatter and sum",
        Op::PickRows { .. } => "pick rows",
        Op::GatherColumns { .. } => "gather columns",
        Op::Sample { .. } => "sample",
    }
}

/// Floats of a cache line: buffers start on one.
const LINE: usize = 16;

const _: () = assert!(BLOCK == 32, "a scale per 32 codes, as ggml's blocks have it");
