//! A recording becomes a graph: every operator's kernels, captured in order with the addresses that they work on.

use crate::backend::Reserved;
use crate::blas::{Blas, Operands, Product};
use crate::blas_fp8::Fp8Blas;
use crate::buffers::Places;
use crate::element::Element;
use crate::error::CudaError;
use crate::few_rows::FewRows;
use crate::fp8::Stored;
use crate::fuse::{AddedExperts, FewAttention, Fused, FusedFp8, Routed, Step};
use crate::graph::Graph;
use crate::kernels::Queue;
use crate::launch::attend::{self, AttendScratch, AttendStep, TileMaps};
use crate::launch::attend_few::{self, FewMaps};
use crate::launch::experts::{Experts, ExpertsArrays, ExpertsMaps, ExpertsPath, ExpertsThen};
use crate::launch::linear_fp8::{self, Fp8Operands, Fp8Path};
use crate::launch::linear_small::SmallOperands;
use crate::launch::norm::{self, HeadWidths, NORM_WIDTH_MAX, NormOf, NormWeight};
use crate::launch::quantise;
use crate::launch::rope::{self, HeadNorms, Heads, Places as RowPlaces};
use crate::launch::route::{self, EXPERTS_MAX, TOP_K_MAX};
use crate::launch::router_few::{self, RouterArrays};
use crate::launch::rows::{self, RowExtent};
use crate::launch::step;
use crate::layout::Layout;
use crate::memory::Address;
use crate::plan::{experts_shape, limits};
use crate::weights::{Loaded, Shelf};
use atom_ops::{AttentionSpec, Buf, BufSpec, Extent, Op, OpsError, Recording, RouteSpec, StepShape, Weight};

/// A graph, with what a replay must fit.
pub(crate) struct Recorded {
    pub(crate) graph: Graph,
    /// The same with experts counted, if it was made to.
    pub(crate) counting: Option<Graph>,
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
        let (mut choices, mut tokens) = ((0, 0), usize::MAX);
        for op in recording.ops() {
            match op {
                Op::Route { spec, .. } => choices.0 += spec.top_k,
                Op::Experts { spec, .. } => choices.1 += spec.top_k,
                Op::Embed { table, .. } => tokens = tokens.min(scene.table(*table)?.0),
                _ => {}
            }
        }
        Ok(Recorded { graph, counting, shape, layout, layout_hash: layout.hash(), choices, tokens })
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
            | Op::GatherColumns { .. } => return Err(not_built()),
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

    fn product(&self, x: Buf, weight: Weight, out: Buf) -> Result<(Product, Address), OpsError> {
        let Loaded::Matrix { outputs, inputs, at, stored: Stored::Plain } = self.with.shelf.loaded(weight)?
        else {
            return Err(OpsError::Weights(format!("{weight:?} is no matrix of plain numbers")));
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
            unsafe { step::add_bias(&self.with.queue, element, self.at(out), bias, width, real) }?;
        }
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

    fn fused(&self, fused: &Fused) -> Result<(), OpsError> {
        let &Fused { x, norm, weight, bias, out, ref product } = fused;
        let Loaded::Matrix { outputs, inputs, at, stored: Stored::Plain } = self.with.shelf.loaded(weight)?
        else {
            return Err(OpsError::Weights(format!("{weight:?} is no matrix of plain numbers")));
        };
        equal("inputs", inputs, product.inputs)?;
        equal("outputs", outputs, product.outputs)?;
        let properties = self.with.queue.stream.device().properties();
        let kernel = FewRows::choose(product, self.with.blas.order(), properties)
            .expect("what no kernel takes is not fused");
        let norm = match norm {
            None => (Address::NULL, 0.0),
            Some((weight, eps)) => (self.vector(weight, inputs)?, eps),
        };
        let operands = SmallOperands {
            weight: self.with.weights.plus(at),
            bias: bias.map_or(Ok(Address::NULL), |bias| self.vector(bias, outputs))?,
            norm,
            x: self.at(x),
            out: self.at(out),
        };
        // SAFETY: see `op`.
        unsafe { kernel.multiply(&self.with.queue, product, operands, self.real(x)) }?;
        Ok(())
    }

    /// Inputs become codes, by a norm if there is one, and are multiplied with the weights'.
    fn fp8(&self, fused: &FusedFp8) -> Result<(), OpsError> {
        let &FusedFp8 { x, norm, weight, bias, out, ref product } = fused;
        let Loaded::Matrix { outputs, inputs, at, stored: Stored::Fp8 { form, scales } } =
            self.with.shelf.loaded(weight)?
        else {
            return Err(OpsError::Weights(format!("{weight:?} is no matrix of FP8")));
        };
        equal("inputs", inputs, product.inputs)?;
        equal("outputs", outputs, product.outputs)?;
        assert_eq!(form, product.form, "the form that the step was made for");
        let wanted = if norm.is_some() { Element::F32 } else { Element::BF16 };
        if self.element(x) != wanted {
            return Err(OpsError::Weights(format!("{x:?} is not {wanted:?}, which is quantised")));
        }
        let (queue, shape, real) = (&self.with.queue, product.quantised(), self.real(x));
        let quantised = shape.at(self.with.reserved.quantised.address());
        // SAFETY: see `op`; the plan has room for the largest product's codes.
        unsafe {
            match norm {
                None => quantise::rows(queue, &shape, self.at(x), quantised, real),
                Some((weight, eps)) => {
                    let norm = self.norm(x, weight, eps)?;
                    quantise::normed_rows(queue, &shape, self.at(x), norm, quantised, real)
                }
            }
        }?;
        let operands = Fp8Operands {
            weight: self.with.weights.plus(at),
            weight_scales: self.with.weights.plus(scales),
            bias: bias.map_or(Ok(Address::NULL), |bias| self.vector(bias, outputs))?,
            x: quantised,
            out: self.at(out),
        };
        let (fp8_blas, stream) = (self.with.fp8_blas, queue.stream);
        match product.path() {
            Fp8Path::Few | Fp8Path::Rows => {
                // SAFETY: see `op`.
                unsafe { linear_fp8::multiply_few(queue, product, operands, real) }?
            }
            Fp8Path::Finished => {
                let sums = self.with.reserved.quantised.address().plus(product.sums_offset());
                let unscaled = Fp8Operands { out: sums, ..operands };
                // SAFETY: see `op`; the plan has room for the sums.
                unsafe {
                    fp8_blas.multiply(self.with.blas, stream, product, &unscaled)?;
                    linear_fp8::finish(queue, product, operands, sums, real)?;
                }
            }
            Fp8Path::Scaled => {
                // SAFETY: see `op`; buffers and codes have room for rows by 4.
                unsafe { fp8_blas.multiply(self.with.blas, stream, product, &operands) }?;
                if bias.is_some() {
                    let (element, at) = (self.element(out), operands.out);
                    // SAFETY: see `op`.
                    unsafe { step::add_bias(queue, element, at, operands.bias, outputs, self.real(out)) }?;
                }
            }
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
        let (heads, norms, places) = self.turning(qk_norm, spec)?;
        let cache = self.with.reserved.cache(layer)?;
        let (queue, element, heads) = (&self.with.queue, self.element(qkv), (&heads, norms));
        // SAFETY: see `op`.
        unsafe {
            rope::rotate_and_cache(queue, element, self.at(qkv), cache, heads, places, self.real(qkv))
        }?;
        Ok(())
    }

    /// How heads are normed and turned, and for which rows.
    fn turning(
        &self,
        qk_norm: Option<(Weight, Weight, f32)>,
        spec: &AttentionSpec,
    ) -> Result<(Heads, Option<HeadNorms>, RowPlaces), OpsError> {
        let norms = match qk_norm {
            None => None,
            Some((q, k, eps)) => {
                let (q, k) = (self.vector(q, spec.head_dim)?, self.vector(k, spec.head_dim)?);
                Some(HeadNorms { q, k, eps })
            }
        };
        let heads = Heads {
            q: spec.q_heads,
            kv: spec.kv_heads,
            head_dim: spec.head_dim,
            dim: spec.rotary.dim,
            pairs: spec.rotary.pairs,
            magnitude: spec.rotary.magnitude,
            frequencies: self.with.reserved.frequencies.address(),
        };
        let places = RowPlaces {
            positions: self.staged(self.layout.positions),
            cache_rows: self.staged(self.layout.cache_rows),
        };
        Ok((heads, norms, places))
    }

    fn attend_step(&self, qkv: Buf, out: Buf) -> AttendStep {
        let reserved = self.with.reserved;
        AttendStep {
            header: self.header(),
            positions: self.staged(self.layout.positions),
            row_slots: self.staged(self.layout.row_slots),
            tables: reserved.tables.address(),
            table_stride: reserved.reserve.pages_per_sequence,
            rows: self.recording.shape().rows,
            qkv: self.at(qkv),
            out: self.at(out),
        }
    }

    /// The whole of a layer's attention in a step of few rows.
    fn attend_few(&self, fused: &FewAttention<'_>) -> Result<(), OpsError> {
        let &FewAttention { qkv, layer, qk_norm, spec, out } = fused;
        self.heads(qkv, spec)?;
        self.same_type(qkv, out)?;
        let (queue, reserved) = (&self.with.queue, self.with.reserved);
        let attention = &reserved.attention;
        let few = attention.few.as_ref().expect("steps were fused for it");
        let (heads, norms, places) = self.turning(qk_norm, spec)?;
        let cache = reserved.cache(layer)?;
        let pages = (&cache, reserved.reserve.pages);
        let maps = FewMaps::new(queue.stream.device(), few, &attention.heads, pages)?;
        let (heads, step) = ((&heads, norms, &attention.heads), (&self.attend_step(qkv, out), places));
        // SAFETY: see `op`; a plan's rows of a slot are one span, and pages that others may read are full before.
        unsafe { attend_few::attend_few(queue, few, heads, step, (&cache, &maps), attention.letters()) }?;
        Ok(())
    }

    /// Rows of long spans by tiles and others by pieces, as the step's lists say; an empty list ends at once.
    fn attend(&self, qkv: Buf, layer: usize, spec: &AttentionSpec, out: Buf) -> Result<(), OpsError> {
        self.heads(qkv, spec)?;
        self.same_type(qkv, out)?;
        let (queue, reserved) = (&self.with.queue, self.with.reserved);
        let (reserve, attention) = (&reserved.reserve, &reserved.attention);
        let (heads, cache) = (&attention.heads, reserved.cache(layer)?);
        let step = self.attend_step(qkv, out);
        let Some(work) = attention.work else {
            // SAFETY: see `op`.
            unsafe { attend::simple(queue, self.element(qkv), heads, &step, &cache) }?;
            return Ok(());
        };
        let scratch = AttendScratch { start: attention.scratch.address(), slots: work.slots };
        if attention.kernels.has_tiles() && work.room(step.rows).tiles > 0 {
            let maps = TileMaps::new(
                queue.stream.device(),
                &attention.kernels,
                heads,
                &step,
                (&cache, reserve.pages),
            )?;
            let (list, maps) = (self.staged(self.layout.tiles), (&cache, &maps));
            // SAFETY: see `op`.
            unsafe { attend::tiles(queue, &attention.kernels, heads, &step, maps, list, scratch) }?;
        }
        if work.room(step.rows).pieces == 0 {
            return Ok(());
        }
        let list = self.staged(self.layout.pieces);
        // SAFETY: see `op`.
        unsafe { attend::split(queue, &attention.kernels, heads, &step, &cache, list, scratch) }?;
        Ok(())
    }

    fn route(&self, logits: Buf, bias: Option<Weight>, spec: &RouteSpec, out: Buf) -> Result<(), OpsError> {
        if spec.experts > EXPERTS_MAX || spec.top_k > TOP_K_MAX {
            return Err(OpsError::Weights(format!(
                "{} of {} experts a row; a GPU chooses at most {TOP_K_MAX} of {EXPERTS_MAX}",
                spec.top_k, spec.experts
            )));
        }
        let bias = bias.map_or(Ok(Address::NULL), |bias| self.vector(bias, spec.experts))?;
        let (scores, granted) = ((self.at(logits), bias), self.staged(self.layout.group_rows));
        // SAFETY: see `op`.
        unsafe { route::route(&self.with.queue, spec, scores, self.at(out), granted, self.real(logits)) }?;
        if let Some(counts) = self.counts {
            // SAFETY: see `op`.
            unsafe { route::count_experts(&self.with.queue, spec, self.at(out), self.real(out), counts) }?;
        }
        Ok(())
    }

    fn router(&self, routed: &Routed<'_>) -> Result<(), OpsError> {
        let &Routed { residual, added, norm: (norm, eps), normed, weight, bias, spec, out } = routed;
        let Loaded::Matrix { outputs, inputs, at, stored: Stored::Plain } = self.with.shelf.loaded(weight)?
        else {
            return Err(OpsError::Weights(format!("{weight:?} is no matrix of plain elements")));
        };
        equal("inputs", inputs, self.spec(residual).width)?;
        equal("outputs", outputs, spec.experts)?;
        let norm = self.norm(residual, norm, eps)?;
        let arrays = RouterArrays {
            residual: self.at(residual),
            added: added.map_or(Address::NULL, |added| self.at(added)),
            normed: self.at(normed),
            weight: self.with.weights.plus(at),
            bias: bias.map_or(Ok(Address::NULL), |bias| self.vector(bias, spec.experts))?,
            routes: self.at(out),
            granted: self.staged(self.layout.group_rows),
        };
        // SAFETY: see `op`.
        unsafe { router_few::router_few(&self.with.queue, spec, norm, arrays, self.real(residual)) }?;
        if let Some(counts) = self.counts {
            // SAFETY: see `op`.
            unsafe { route::count_experts(&self.with.queue, spec, arrays.routes, self.real(out), counts) }?;
        }
        Ok(())
    }

    /// With `added`, sums go to the residual.
    fn experts(&self, op: &Op, added: Option<&AddedExperts<'_>>) -> Result<(), OpsError> {
        let &Op::Experts { x, routes, gate_up, down, ref spec, gated, sums, out, .. } = op else {
            unreachable!("called for experts");
        };
        let hidden = self.spec(x).width;
        if added.is_none() {
            self.same_type(x, out)?;
        }
        let codes = |weight| self.with.shelf.codes(weight);
        let shape = experts_shape(self.recording, op, self.element(x), codes).expect("called for experts");
        let weights = self.with.weights;
        let experts = |weight, wanted: (usize, usize)| match self.with.shelf.loaded(weight)? {
            Loaded::Experts { held, outputs, inputs, at, stored } => {
                equal("experts", held, spec.held)?;
                equal("outputs of an expert", outputs, wanted.0)?;
                equal("inputs of an expert", inputs, wanted.1)?;
                match (stored, shape.fp8) {
                    (Stored::Plain, None) => Ok((weights.plus(at), Address::NULL)),
                    (Stored::Fp8 { form, scales }, Some(wanted)) if form == wanted => {
                        Ok((weights.plus(at), weights.plus(scales)))
                    }
                    (found, wanted) => Err(OpsError::Weights(format!(
                        "a layer's gate and up are {wanted:?} and its down is {found:?}; a GPU takes both in FP8 with \
                         scales of one form, or neither"
                    ))),
                }
            }
            _ => Err(OpsError::Weights(format!("{weight:?} is no layer's experts"))),
        };
        let (gate_up, gate_up_scales) = experts(gate_up, (2 * spec.width, hidden))?;
        let (down, down_scales) = experts(down, (hidden, spec.width))?;
        let (out, then) = match added {
            None => (out, ExpertsThen::Write),
            Some(&AddedExperts { residual, norm: None, .. }) => (residual, ExpertsThen::Add),
            Some(&AddedExperts { residual, norm: Some((weight, eps, normed)), .. }) => {
                self.same_type(x, normed)?;
                (residual, ExpertsThen::AddNorm(self.norm(residual, weight, eps)?, self.at(normed)))
            }
        };
        let real = self.real(x);
        let arrays = ExpertsArrays {
            real_rows: real.counts,
            x: self.at(x),
            routes: self.at(routes),
            gate_up,
            down,
            scales: [gate_up_scales, down_scales],
            gated: self.at(gated),
            workspace: self.with.reserved.experts.address(),
            out: self.at(out),
            out_element: self.element(out),
            sums,
            then,
        };
        let (queue, device) = (&self.with.queue, self.with.queue.stream.device());
        let kernels = Experts::in_order(shape, self.with.blas.order(), device.properties());
        let maps = match kernels.path() {
            ExpertsPath::Grouped { cluster } => Some(ExpertsMaps::new(device, &shape, &arrays, cluster)?),
            ExpertsPath::Fp8 { cluster } => Some(ExpertsMaps::fp8(device, &kernels, &arrays, cluster)?),
            _ => None,
        };
        // SAFETY: see `op`.
        unsafe { kernels.launch(queue, &arrays, maps.as_ref()) }?;
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

/// What a group of several GPUs would need.
pub(crate) fn not_built() -> OpsError {
    CudaError::Unsupported("several GPUs in one group are not built yet; start one rank on one GPU".into())
        .into()
}

fn equal(what: &str, found: usize, expected: usize) -> Result<(), OpsError> {
    if found == expected { Ok(()) } else { Err(OpsError::Weights(format!("{found} {what}, not {expected}"))) }
}
