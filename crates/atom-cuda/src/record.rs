//! A recording becomes a graph: every operator's kernels, captured in order with the addresses that they work on.

mod attention;
pub(crate) mod exchange;
mod mixture;
mod products;

use crate::backend::Reserved;
use crate::blas::{Blas, Operands};
use crate::blas_fp8::Fp8Blas;
use crate::buffers::Places;
use crate::element::Element;
use crate::fuse::{FusedFp8, Step};
use crate::graph::Graph;
use crate::kernels::Queue;
use crate::launch::norm::{self, HeadWidths, NORM_WIDTH_MAX, NormOf, NormWeight};
use crate::launch::rows::{self, RowExtent};
use crate::launch::step;
use crate::layout::Layout;
use crate::memory::Address;
use crate::peers::COMMS;
use crate::plan::limits;
use crate::weights::{Loaded, Shelf};
use atom_ops::{AttentionSpec, Buf, BufSpec, Comm, Extent, Op, OpsError, Recording, StepShape, Weight};
use std::cell::Cell;

/// A graph, with what a replay must fit.
pub(crate) struct Recorded {
    pub(crate) graph: Graph,
    /// The same with experts counted, if it was made to.
    pub(crate) counting: Option<Graph>,
    pub(crate) shape: StepShape,
    pub(crate) layout: Layout,
    pub(crate) layout_hash: u64,
    /// Experts that a row chooses, over all layers; and those of them that are computed here, 0 in a group.
    pub(crate) choices: (usize, usize),
    /// Tokens are below this.
    pub(crate) tokens: usize,
    /// How many, by communicator.
    pub(crate) collectives: [u32; COMMS],
}

/// Everything that operators are captured with.
pub(crate) struct Capture<'a> {
    pub(crate) queue: Queue<'a>,
    pub(crate) blas: &'a Blas,
    pub(crate) fp8_blas: &'a Fp8Blas,
    pub(crate) shelf: &'a Shelf,
    pub(crate) weights: Address,
    pub(crate) weights_bytes: usize,
    pub(crate) reserved: &'a Reserved,
}

/// One recording's own.
struct Scene<'a> {
    with: &'a Capture<'a>,
    recording: &'a Recording,
    places: Places,
    layout: Layout,
    /// Where routers count different experts, if they do.
    counts: Option<Address>,
    /// Collectives so far, by communicator.
    met: Cell<[u32; COMMS]>,
}

impl Capture<'_> {
    /// Checks everything, chooses algorithms, captures.
    pub(crate) fn record(&self, recording: &Recording, steps: &[Step<'_>]) -> Result<Recorded, OpsError> {
        let reserve = &self.reserved.reserve;
        let (shape, top) = (recording.shape(), reserve.top);
        if shape.rows > top.rows || shape.out_rows > top.out_rows || shape.lanes != top.lanes {
            return Err(OpsError::Memory(format!("{shape:?} was recorded, {top:?} was reserved for")));
        }
        let mut scene = self.scene(recording, steps);
        if scene.places.bytes > self.reserved.room.bytes() {
            return Err(OpsError::Memory(format!(
                "a recording of {} rows needs {} bytes of buffers, {} were planned",
                shape.rows,
                scene.places.bytes,
                self.reserved.room.bytes()
            )));
        }
        let layout = scene.layout;
        assert!(layout.end <= self.reserved.staging.bytes(), "the plan has room for every layout");
        // Choosing may load code and takes its time: not within a capture. The same walk, products only.
        let mut products = Vec::new();
        for step in steps {
            match *step {
                Step::Op(&Op::Linear { x, weight, out, .. }) => {
                    products.push(scene.product(x, weight, out)?.0);
                }
                Step::Fp8(FusedFp8 { ref product, .. }) if !product.is_ours() => {
                    self.fp8_blas.choose(self.blas, product)?;
                }
                _ => {}
            }
        }
        let (weights, room) = ((self.weights, self.weights_bytes), &self.reserved.room);
        self.blas.choose_by_time(&products, &Operands { stream: self.queue.stream, weights, room })?;
        let graph = scene.capture(steps, true)?;
        let counting = if recording.counts_experts() {
            scene.counts = Some(self.reserved.counts()?);
            Some(scene.capture(steps, true)?)
        } else {
            None
        };
        let (mut choices, mut experts, mut tokens) = ((0, 0), 0, usize::MAX);
        for op in recording.ops() {
            match op {
                Op::Route { spec, .. } => {
                    choices.0 += spec.top_k;
                    experts = spec.experts;
                }
                // Where some experts are elsewhere, or rows of others come, the host doesn't know what is computed here.
                Op::Experts { x, spec, .. }
                    if scene.spec(*x).extent == Extent::Rows && spec.held == experts =>
                {
                    choices.1 += spec.top_k;
                }
                Op::Embed { table, .. } => tokens = tokens.min(scene.table(*table)?.0),
                _ => {}
            }
        }
        let of =
            |comm| recording.collectives().iter().filter(|collective| collective.comm == comm).count() as u32;
        let collectives = [of(Comm::Lane), of(Comm::Group)];
        assert_eq!(scene.met.get(), collectives, "kernels that meet, and collectives of the signature");
        let layout_hash = layout.hash();
        Ok(Recorded { graph, counting, shape, layout, layout_hash, choices, tokens, collectives })
    }
}

impl Capture<'_> {
    fn scene<'a>(&'a self, recording: &'a Recording, steps: &[Step<'_>]) -> Scene<'a> {
        let properties = self.queue.stream.device().properties();
        let limits = limits(&self.reserved.reserve, properties, self.shelf.element(), self.blas.order());
        let places = Places::new(recording, steps, self.shelf.element());
        Scene {
            with: self,
            recording,
            places,
            layout: Layout::new(&recording.shape(), &limits),
            counts: None,
            met: Cell::default(),
        }
    }

    /// A graph of the first `count` steps only, of a recording that was kept.
    pub(crate) fn first_steps(
        &self,
        recording: &Recording,
        steps: &[Step<'_>],
        count: usize,
    ) -> Result<Graph, OpsError> {
        self.scene(recording, steps).capture(&steps[..count], count == steps.len())
    }
}

impl Scene<'_> {
    /// `ends`: the host is told when all of it is done.
    fn capture(&self, steps: &[Step<'_>], ends: bool) -> Result<Graph, OpsError> {
        self.met.set([0; COMMS]);
        Graph::capture(self.with.queue.stream, || {
            self.begin()?;
            steps.iter().try_for_each(|step| {
                self.step(step).map_err(|error| match error {
                    OpsError::Weights(what) => OpsError::Weights(format!("{}: {what}", step.name())),
                    other => other,
                })
            })?;
            if ends { self.end() } else { Ok(()) }
        })
    }

    fn begin(&self) -> Result<(), OpsError> {
        let (updates, tables) = (self.staged(self.layout.updates), self.with.reserved.tables.address());
        // SAFETY: replays write as many entries as the header says, each within the tables.
        unsafe { step::update_tables(&self.with.queue, self.header(), updates, tables) }?;
        Ok(())
    }

    fn end(&self) -> Result<(), OpsError> {
        let reserved = self.with.reserved;
        let results = reserved.sampler.as_ref().map_or(Address::NULL, |sampler| sampler.results());
        // SAFETY: results are for the reserve's out rows, as the landing is; kernels of sampling come before.
        unsafe { reserved.landing.record(&self.with.queue, self.header(), results, self.counts) }?;
        Ok(())
    }

    fn step(&self, step: &Step<'_>) -> Result<(), OpsError> {
        match *step {
            Step::Op(op) => self.op(op),
            Step::Norm { x, weight, eps, out } => self.norm_rows(x, weight, eps, out),
            Step::Product(ref fused) => self.fused(fused),
            Step::Fp8(ref fused) => self.fp8(fused),
            Step::Attend(ref fused) => self.attend_few(fused),
            Step::Router(ref routed) => self.router(routed),
            Step::Experts(ref added) => self.experts(added.op, Some(added)),
        }
    }

    /// SAFETY of all launches here: buffers have room for the recording's shape (`Places`, checked against the room),
    /// weights have the shapes that are checked here, staging arrays come from the layout, and all of them live as
    /// long as the backend, which outlives its graphs.
    fn op(&self, op: &Op) -> Result<(), OpsError> {
        let queue = &self.with.queue;
        match *op {
            Op::Embed { table, out } => self.embed(table, out)?,
            Op::Norm { x, weight, eps, out } => self.norm_rows(x, weight, eps, out)?,
            Op::AddNorm { residual, x, weight, eps, out } => {
                self.same_type(x, out)?;
                let (sum, norm) = ((self.at(residual), self.at(x)), self.norm(x, weight, eps)?);
                // SAFETY: see above.
                unsafe { norm::add_norm(queue, self.element(x), sum, norm, self.at(out), self.real(x)) }?;
            }
            Op::Linear { x, weight, bias, out } => self.linear(x, weight, bias, out)?,
            Op::SquareSums { qkv, ref spec, out } => {
                let (element, widths) = (self.element(qkv), self.heads(qkv, spec)?);
                // SAFETY: see above.
                unsafe {
                    norm::square_sums(queue, element, self.at(qkv), widths, self.at(out), self.real(qkv))
                }?;
            }
            Op::ScaleHeads { qkv, ref spec, sums, weights: (q, k), elements, eps } => {
                let widths = self.heads(qkv, spec)?;
                let weights = (self.vector(q, widths.q)?, self.vector(k, widths.k)?, eps);
                let (element, at) = (self.element(qkv), (self.at(qkv), self.at(sums)));
                // SAFETY: see above.
                unsafe { norm::scale_heads(queue, element, at, weights, widths, elements, self.real(qkv)) }?;
            }
            Op::RotateAndCache { qkv, layer, qk_norm, ref spec } => {
                self.rotate_and_cache(qkv, layer, qk_norm, spec)?;
            }
            Op::Attend { qkv, layer, ref spec, out } => self.attend(qkv, layer, spec, out)?,
            Op::GatedSilu { gate_up, out } => {
                self.same_type(gate_up, out)?;
                let (element, width) = (self.element(out), self.spec(out).width);
                // SAFETY: see above.
                unsafe {
                    rows::gated_silu(queue, element, self.at(gate_up), width, self.at(out), self.real(out))
                }?;
            }
            Op::Add { x, out } => {
                self.same_type(x, out)?;
                let (element, width) = (self.element(out), self.spec(out).width);
                // SAFETY: see above.
                unsafe { rows::add(queue, element, self.at(x), width, self.at(out), self.real(out)) }?;
            }
            Op::PickRows { x, out } => {
                self.same_type(x, out)?;
                let (element, width) = (self.element(out), self.spec(out).width);
                let picked = self.staged(self.layout.out_rows);
                // SAFETY: see above.
                unsafe {
                    rows::pick_rows(queue, element, self.at(x), picked, width, self.at(out), self.real(out))
                }?;
            }
            Op::Route { logits, bias, ref spec, out } => self.route(logits, bias, spec, out)?,
            Op::Experts { .. } => self.experts(op, None)?,
            Op::Sample { logits } => self.sample(logits)?,
            Op::DispatchRows { .. }
            | Op::CombineRows { .. }
            | Op::AllReduce { .. }
            | Op::GatherRows { .. }
            | Op::ScatterSum { .. }
            | Op::GatherColumns { .. } => self.exchange(op)?,
        }
        Ok(())
    }

    fn embed(&self, table: Weight, out: Buf) -> Result<(), OpsError> {
        let width = self.spec(out).width;
        let (_, cols, at) = self.table(table)?;
        equal("columns of a table", cols, width)?;
        if self.element(out) != Element::F32 {
            return Err(OpsError::Weights(format!("{out:?} is no residual stream")));
        }
        let inputs = (at, self.staged(self.layout.tokens), self.with.reserved.last_tokens());
        let element = self.with.shelf.element();
        // SAFETY: see `op`.
        unsafe { rows::embed(&self.with.queue, element, inputs, width, self.at(out), self.real(out)) }?;
        Ok(())
    }

    fn norm_rows(&self, x: Buf, weight: Weight, eps: f32, out: Buf) -> Result<(), OpsError> {
        let of = match (self.element(x), self.element(out)) {
            (Element::F32, _) => NormOf::Residual,
            (Element::BF16, Element::BF16) => NormOf::Activations,
            (Element::BF16, Element::F32) => {
                return Err(OpsError::Weights(format!("{x:?} is rounded and {out:?} is not")));
            }
        };
        let (element, norm) = (self.element(out), self.norm(x, weight, eps)?);
        let (queue, out, real) = (&self.with.queue, self.at(out), self.real(x));
        // SAFETY: see `op`.
        unsafe { norm::norm(queue, element, (self.at(x), of), norm, out, real) }?;
        Ok(())
    }

    fn sample(&self, logits: Buf) -> Result<(), OpsError> {
        equal("logits of a row", self.spec(logits).width, self.with.reserved.reserve.vocab)?;
        let Some(sampler) = &self.with.reserved.sampler else { return Ok(()) };
        let rows = (self.header(), self.at(logits), self.staged(self.layout.samples));
        // SAFETY: see `op`; replays load slots first.
        unsafe { sampler.record(&self.with.queue, rows, self.recording.shape().out_rows) }?;
        Ok(())
    }

    fn norm(&self, x: Buf, weight: Weight, eps: f32) -> Result<NormWeight, OpsError> {
        let width = self.spec(x).width;
        if width > NORM_WIDTH_MAX {
            return Err(OpsError::Weights(format!(
                "rows of {width} elements; {NORM_WIDTH_MAX} are the most"
            )));
        }
        Ok(NormWeight { weight: self.vector(weight, width)?, width, eps })
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

    fn same_type(&self, a: Buf, b: Buf) -> Result<(), OpsError> {
        if self.element(a) == self.element(b) {
            return Ok(());
        }
        Err(OpsError::Weights(format!("{a:?} and {b:?} are of different types")))
    }

    /// Which rows of a buffer are real in a step.
    fn real(&self, buf: Buf) -> RowExtent {
        let shape = self.recording.shape();
        match self.spec(buf).extent {
            Extent::Rows => RowExtent::rows(self.header(), shape.rows),
            Extent::OutRows => RowExtent::out_rows(self.header(), shape.out_rows),
            Extent::GroupRows => {
                RowExtent::group(self.staged(self.layout.group_rows), shape.lanes, shape.rows)
            }
        }
    }

    fn staged(&self, offset: usize) -> Address {
        self.with.reserved.staging.address().plus(offset)
    }

    /// Rows granted to this lane.
    fn granted(&self) -> Address {
        self.staged(self.layout.group_rows).plus(self.with.reserved.lane * size_of::<u32>())
    }

    fn header(&self) -> Address {
        self.staged(self.layout.header)
    }

    fn heads(&self, qkv: Buf, spec: &AttentionSpec) -> Result<HeadWidths, OpsError> {
        if *spec != *self.with.reserved.reserve.attention {
            return Err(OpsError::Weights("its heads are not those that the cache was reserved for".into()));
        }
        let (q, k) = (spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let widths = HeadWidths { q, k, row: q + 2 * k };
        equal("elements of q, k and v", self.spec(qkv).width, widths.row)?;
        Ok(widths)
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

fn equal(what: &str, found: usize, expected: usize) -> Result<(), OpsError> {
    if found == expected { Ok(()) } else { Err(OpsError::Weights(format!("{found} {what}, not {expected}"))) }
}
