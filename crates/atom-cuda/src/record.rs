//! A recording becomes a graph: every operator's kernels, captured in order with the addresses that they work on.

use crate::backend::Reserved;
use crate::blas::{Blas, Product};
use crate::buffers::Places;
use crate::element::Element;
use crate::error::CudaError;
use crate::graph::Graph;
use crate::kernels::Queue;
use crate::launch::step;
use crate::layout::Layout;
use crate::memory::Address;
use crate::plan::limits;
use crate::sampler;
use crate::simple::{self, RealRows, residual_suffix};
use crate::weights::{Loaded, Shelf};
use atom_ops::{AttentionSpec, Buf, BufSpec, Extent, Op, OpsError, Recording, StepShape, Weight};

/// A graph, with what a replay must fit.
pub(crate) struct Recorded {
    pub(crate) graph: Graph,
    pub(crate) shape: StepShape,
    pub(crate) layout: Layout,
    pub(crate) layout_hash: u64,
    /// Experts that a row chooses, over all layers; and those of them that are computed here.
    pub(crate) choices: (usize, usize),
    /// Tokens are below this.
    pub(crate) tokens: usize,
}

/// Everything that operators are captured with.
pub(crate) struct Capture<'a> {
    pub(crate) queue: Queue<'a>,
    pub(crate) blas: &'a Blas,
    pub(crate) shelf: &'a Shelf,
    pub(crate) weights: Address,
    pub(crate) reserved: &'a Reserved,
}

/// One recording's own.
struct Scene<'a> {
    with: &'a Capture<'a>,
    recording: &'a Recording,
    places: Places,
    layout: Layout,
}

impl Capture<'_> {
    /// Checks everything, chooses algorithms, captures.
    pub(crate) fn record(&self, recording: &Recording) -> Result<Recorded, OpsError> {
        let reserve = &self.reserved.reserve;
        let (shape, top) = (recording.shape(), reserve.top);
        if shape.rows > top.rows || shape.out_rows > top.out_rows || shape.lanes != top.lanes {
            return Err(OpsError::Memory(format!("{shape:?} was recorded, {top:?} was reserved for")));
        }
        let places = Places::new(recording, self.shelf.element());
        if places.bytes > self.reserved.room.bytes() {
            return Err(OpsError::Memory(format!(
                "a recording of {} rows needs {} bytes of buffers, {} were planned",
                shape.rows,
                places.bytes,
                self.reserved.room.bytes()
            )));
        }
        let layout = Layout::new(&shape, &limits(reserve));
        assert!(layout.end <= self.reserved.staging.bytes(), "the plan has room for every layout");
        let scene = Scene { with: self, recording, places, layout };
        // Choosing may load code and takes its time: not within a capture. The same walk, products only.
        for op in recording.ops() {
            if let Op::Linear { x, weight, out, .. } = *op {
                self.blas.choose(scene.product(x, weight, out)?.0)?;
            }
        }
        let graph = Graph::capture(self.queue.stream, || {
            scene.begin()?;
            recording.ops().iter().try_for_each(|op| {
                scene.op(op).map_err(|error| match error {
                    OpsError::Weights(what) => OpsError::Weights(format!("{}: {what}", op.name())),
                    other => other,
                })
            })
        })?;
        let (mut choices, mut tokens) = ((0, 0), usize::MAX);
        for op in recording.ops() {
            match op {
                Op::Route { spec, .. } => choices.0 += spec.top_k,
                Op::Experts { spec, .. } => choices.1 += spec.top_k,
                Op::Embed { table, .. } => tokens = tokens.min(scene.table(*table)?.0),
                _ => {}
            }
        }
        Ok(Recorded { graph, shape, layout, layout_hash: layout.hash(), choices, tokens })
    }
}

impl Scene<'_> {
    fn begin(&self) -> Result<(), OpsError> {
        let (updates, tables) = (self.staged(self.layout.updates), self.with.reserved.tables.address());
        // SAFETY: replays write as many entries as the header says, each within the tables.
        unsafe { step::update_tables(&self.with.queue, self.header(), updates, tables) }?;
        Ok(())
    }

    /// SAFETY of all launches here: buffers have room for the recording's shape (`Places`, checked against the room),
    /// weights have the shapes that are checked here, staging arrays come from the layout, and all of them live as
    /// long as the backend, which outlives its graphs.
    fn op(&self, op: &Op) -> Result<(), OpsError> {
        let queue = &self.with.queue;
        match *op {
            Op::Embed { table, out } => self.embed(table, out),
            Op::Norm { x, weight, eps, out } => {
                let width = self.spec(x).width;
                let inputs = [self.at(x), self.vector(weight, width)?];
                let name = format!("norm_{}", self.pair(x, out)?);
                // SAFETY: see above.
                unsafe { simple::norm(queue, &name, &inputs, (eps, width), self.at(out), &self.real(x)) }?;
                Ok(())
            }
            Op::AddNorm { residual, x, weight, eps, out } => {
                let width = self.spec(x).width;
                self.same_type(x, out)?;
                let inputs = [self.at(residual), self.at(x), self.vector(weight, width)?];
                let name = format!("add_norm_{}", residual_suffix(self.element(x)));
                // SAFETY: see above.
                unsafe { simple::norm(queue, &name, &inputs, (eps, width), self.at(out), &self.real(x)) }?;
                Ok(())
            }
            Op::Linear { x, weight, bias, out } => self.linear(x, weight, bias, out),
            Op::SquareSums { qkv, ref spec, out } => {
                self.heads(qkv, spec)?;
                let element = self.element(qkv);
                // SAFETY: see above.
                unsafe {
                    simple::square_sums(queue, element, self.at(qkv), spec, self.at(out), &self.real(qkv))
                }?;
                Ok(())
            }
            Op::ScaleHeads { qkv, ref spec, sums, weights: (q, k), elements, eps } => {
                self.heads(qkv, spec)?;
                let weights = (
                    self.vector(q, spec.q_heads * spec.head_dim)?,
                    self.vector(k, spec.kv_heads * spec.head_dim)?,
                );
                let (qkv_at, sums) = (self.at(qkv), self.at(sums));
                let op = simple::ScaleHeads { qkv: qkv_at, sums, weights, elements, eps, spec };
                // SAFETY: see above.
                unsafe { simple::scale_heads(queue, self.element(qkv), &op, &self.real(qkv)) }?;
                Ok(())
            }
            Op::RotateAndCache { qkv, layer, qk_norm, ref spec } => {
                self.rotate_and_cache(qkv, layer, qk_norm, spec)
            }
            Op::Attend { qkv, layer, ref spec, out } => self.attend(qkv, layer, spec, out),
            Op::GatedSilu { gate_up, out } => {
                self.same_type(gate_up, out)?;
                self.row_kernel("gated_silu", &[self.at(gate_up)], out)
            }
            Op::Add { x, out } => {
                self.same_type(x, out)?;
                self.row_kernel("add", &[self.at(x)], out)
            }
            Op::PickRows { x, out } => {
                self.same_type(x, out)?;
                self.row_kernel("pick_rows", &[self.at(x), self.staged(self.layout.out_rows)], out)
            }
            Op::Route { logits, bias, ref spec, out } => {
                let bias = bias.map_or(Ok(Address::NULL), |bias| self.vector(bias, spec.experts))?;
                let outs = (self.at(out), self.staged(self.layout.group_rows));
                // SAFETY: see above.
                unsafe { simple::route(queue, self.at(logits), bias, spec, outs, &self.real(logits)) }?;
                Ok(())
            }
            Op::Experts { .. } => self.experts(op),
            Op::Sample { logits } => self.sample(logits),
            Op::DispatchRows { .. }
            | Op::CombineRows { .. }
            | Op::AllReduce { .. }
            | Op::GatherRows { .. }
            | Op::ScatterSum { .. }
            | Op::GatherColumns { .. } => Err(not_built()),
        }
    }

    fn embed(&self, table: Weight, out: Buf) -> Result<(), OpsError> {
        let width = self.spec(out).width;
        let (_, cols, at) = self.table(table)?;
        equal("columns of a table", cols, width)?;
        let element = self.with.shelf.element();
        let name = match (element, self.element(out)) {
            (Element::BF16, Element::F32) => "embed_bf16_res32",
            (Element::BF16, Element::BF16) => "embed_bf16",
            (Element::F32, _) => "embed_f32",
        };
        let last_tokens = self.with.reserved.last_tokens();
        let inputs = [at, self.staged(self.layout.tokens), last_tokens];
        // SAFETY: see `op`.
        unsafe { simple::row_kernel(&self.with.queue, name, &inputs, width, self.at(out), &self.real(out)) }?;
        Ok(())
    }

    fn product(&self, x: Buf, weight: Weight, out: Buf) -> Result<(Product, Address), OpsError> {
        let Loaded::Matrix { outputs, inputs, at } = self.with.shelf.loaded(weight)? else {
            return Err(OpsError::Weights(format!("{weight:?} is no matrix")));
        };
        equal("inputs", inputs, self.spec(x).width)?;
        equal("outputs", outputs, self.spec(out).width)?;
        if self.element(x) != self.with.shelf.element() {
            return Err(OpsError::Weights(format!("{x:?} is not of the weights' type")));
        }
        let rows = self.spec(x).capacity_rows(&self.recording.shape());
        let (element, out) = (self.element(x), self.element(out));
        Ok((Product { rows, inputs, outputs, element, out, adds: false }, self.with.weights.plus(at)))
    }

    fn linear(&self, x: Buf, weight: Weight, bias: Option<Weight>, out: Buf) -> Result<(), OpsError> {
        let (product, weight) = self.product(x, weight, out)?;
        let stream = self.with.queue.stream;
        // SAFETY: see `op`.
        unsafe { self.with.blas.multiply(stream, product, self.at(x), weight, self.at(out)) }?;
        if let Some(bias) = bias {
            let (width, element) = (product.outputs, self.element(out));
            let (bias, real) = (self.vector(bias, width)?, self.real(out));
            // SAFETY: see `op`.
            unsafe { simple::add_bias(&self.with.queue, element, self.at(out), bias, width, &real) }?;
        }
        Ok(())
    }

    fn rotate_and_cache(
        &self,
        qkv: Buf,
        layer: usize,
        qk_norm: Option<(Weight, Weight, f32)>,
        spec: &AttentionSpec,
    ) -> Result<(), OpsError> {
        self.heads(qkv, spec)?;
        let norms = match qk_norm {
            None => None,
            Some((q, k, eps)) => Some((self.vector(q, spec.head_dim)?, self.vector(k, spec.head_dim)?, eps)),
        };
        let (keys, values) = self.with.reserved.cache(layer)?;
        let op = simple::Rotate {
            qkv: self.at(qkv),
            keys,
            values,
            positions: self.staged(self.layout.positions),
            cache_rows: self.staged(self.layout.cache_rows),
            frequencies: self.with.reserved.frequencies.address(),
            norms,
            page_size: self.with.reserved.reserve.page_size,
            spec,
        };
        // SAFETY: see `op`.
        unsafe { simple::rotate_and_cache(&self.with.queue, self.element(qkv), &op, &self.real(qkv)) }?;
        Ok(())
    }

    fn attend(&self, qkv: Buf, layer: usize, spec: &AttentionSpec, out: Buf) -> Result<(), OpsError> {
        self.heads(qkv, spec)?;
        self.same_type(qkv, out)?;
        let (keys, values) = self.with.reserved.cache(layer)?;
        let reserve = &self.with.reserved.reserve;
        let op = simple::Attend {
            header: self.header(),
            positions: self.staged(self.layout.positions),
            row_slots: self.staged(self.layout.row_slots),
            tables: self.with.reserved.tables.address(),
            table_stride: reserve.pages_per_sequence,
            qkv: self.at(qkv),
            keys,
            values,
            out: self.at(out),
            page_size: reserve.page_size,
            spec,
        };
        // SAFETY: see `op`.
        unsafe { simple::attend(&self.with.queue, self.element(qkv), &op, &self.real(qkv)) }?;
        Ok(())
    }

    fn experts(&self, op: &Op) -> Result<(), OpsError> {
        let &Op::Experts { x, routes, gate_up, down, ref spec, gated, sums, out, .. } = op else {
            unreachable!("called for experts");
        };
        let hidden = self.spec(x).width;
        self.same_type(x, out)?;
        let experts = |weight, wanted: (usize, usize)| match self.with.shelf.loaded(weight)? {
            Loaded::Experts { held, outputs, inputs, at } => {
                equal("experts", held, spec.held)?;
                equal("outputs of an expert", outputs, wanted.0)?;
                equal("inputs of an expert", inputs, wanted.1)?;
                Ok(self.with.weights.plus(at))
            }
            _ => Err(OpsError::Weights(format!("{weight:?} is no layer's experts"))),
        };
        let op = simple::Experts {
            x: self.at(x),
            routes: self.at(routes),
            gate_up: experts(gate_up, (2 * spec.width, hidden))?,
            down: experts(down, (hidden, spec.width))?,
            gated: self.at(gated),
            out: self.at(out),
            hidden,
            sums,
            spec,
        };
        // SAFETY: see `op`.
        unsafe { simple::experts(&self.with.queue, self.element(x), &op, &self.real(x)) }?;
        Ok(())
    }

    fn sample(&self, logits: Buf) -> Result<(), OpsError> {
        equal("logits of a row", self.spec(logits).width, self.with.reserved.reserve.vocab)?;
        let Some(sampler) = &self.with.reserved.sampler else { return Ok(()) };
        let rows = sampler::Rows {
            header: self.header(),
            logits: self.at(logits),
            records: self.staged(self.layout.samples),
            out_rows: self.recording.shape().out_rows,
        };
        Ok(sampler.record(&self.with.queue, &rows)?)
    }

    /// A kernel of the activations' type over the rows of `out`.
    fn row_kernel(&self, name: &str, inputs: &[Address], out: Buf) -> Result<(), OpsError> {
        let (width, real) = (self.spec(out).width, self.real(out));
        let name = format!("{name}_{}", self.element(out).suffix());
        // SAFETY: see `op`.
        unsafe { simple::row_kernel(&self.with.queue, &name, inputs, width, self.at(out), &real) }?;
        Ok(())
    }

    fn spec(&self, buf: Buf) -> BufSpec {
        self.recording.buffers()[usize::from(buf.0)]
    }

    fn at(&self, buf: Buf) -> Address {
        self.with.reserved.room.address().plus(self.places.places[usize::from(buf.0)].offset)
    }

    fn element(&self, buf: Buf) -> Element {
        self.places.places[usize::from(buf.0)].element
    }

    /// The name of a pair of types: an exact input and an output, or both alike.
    fn pair(&self, x: Buf, out: Buf) -> Result<&'static str, OpsError> {
        match (self.element(x), self.element(out)) {
            (Element::F32, Element::BF16) => Ok("bf16_res32"),
            (Element::F32, Element::F32) => Ok("f32"),
            (Element::BF16, Element::BF16) => Ok("bf16"),
            (Element::BF16, Element::F32) => {
                Err(OpsError::Weights(format!("{x:?} is rounded and {out:?} is not")))
            }
        }
    }

    fn same_type(&self, a: Buf, b: Buf) -> Result<(), OpsError> {
        if self.element(a) == self.element(b) {
            return Ok(());
        }
        Err(OpsError::Weights(format!("{a:?} and {b:?} are of different types")))
    }

    /// Which rows of a buffer are real in a step.
    fn real(&self, buf: Buf) -> RealRows {
        let shape = self.recording.shape();
        match self.spec(buf).extent {
            Extent::Rows => RealRows { counts: self.header(), lanes: 1, lane_rows: shape.rows },
            Extent::OutRows => {
                RealRows { counts: self.header().plus(4), lanes: 1, lane_rows: shape.out_rows }
            }
            Extent::GroupRows => RealRows {
                counts: self.staged(self.layout.group_rows),
                lanes: shape.lanes,
                lane_rows: shape.rows,
            },
        }
    }

    fn staged(&self, offset: usize) -> Address {
        self.with.reserved.staging.address().plus(offset)
    }

    fn header(&self) -> Address {
        self.staged(self.layout.header)
    }

    fn heads(&self, qkv: Buf, spec: &AttentionSpec) -> Result<(), OpsError> {
        if *spec != *self.with.reserved.reserve.attention {
            return Err(OpsError::Weights("its heads are not those that the cache was reserved for".into()));
        }
        let width = (spec.q_heads + 2 * spec.kv_heads) * spec.head_dim;
        equal("elements of q, k and v", self.spec(qkv).width, width)
    }

    fn vector(&self, weight: Weight, expected: usize) -> Result<Address, OpsError> {
        match self.with.shelf.loaded(weight)? {
            Loaded::Vector { len, at } => {
                equal("elements of a vector", len, expected)?;
                Ok(self.with.weights.plus(at))
            }
            _ => Err(OpsError::Weights(format!("{weight:?} is no vector"))),
        }
    }

    fn table(&self, weight: Weight) -> Result<(usize, usize, Address), OpsError> {
        match self.with.shelf.loaded(weight)? {
            Loaded::Table { rows, cols, at } => Ok((rows, cols, self.with.weights.plus(at))),
            _ => Err(OpsError::Weights(format!("{weight:?} is no table"))),
        }
    }
}

/// What a group of several GPUs would need.
pub(crate) fn not_built() -> OpsError {
    CudaError::Unsupported("several GPUs in one group are not built yet; start one rank on one GPU".into())
        .into()
}

fn equal(what: &str, found: usize, expected: usize) -> Result<(), OpsError> {
    if found == expected { Ok(()) } else { Err(OpsError::Weights(format!("{found} {what}, not {expected}"))) }
}
