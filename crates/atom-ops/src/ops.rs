//! The recorder: a model family describes its forward pass by calling these methods.

use crate::backend::Weight;
use crate::recording::{
    AttentionSpec, Buf, BufSpec, Collective, CollectiveKind, Comm, ExpertSpec, Extent, Op, Recording,
    RouteSpec, StepShape,
};
use std::sync::Arc;

/// Rotary table: everything a kernel needs, computed once in f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// Angle of pair `i` at position `p` is `p * frequencies[i]`. `[dim / 2]`
    pub frequencies: Vec<f32>,
    /// Rotated elements of each head; the rest pass through.
    pub dim: usize,
    /// Pairs are `(2i, 2i + 1)` if true, `(i, i + dim / 2)` if false.
    pub pairs: bool,
    /// Factor on cos and sin (YaRN's attention factor); 1 otherwise.
    pub magnitude: f32,
}

/// Records operators for one [`StepShape`]. Widths are checked on every call: a mismatch is a bug in
/// the model family and panics at start-up, before any request.
pub struct Ops {
    shape: StepShape,
    buffers: Vec<BufSpec>,
    ops: Vec<Op>,
    collectives: Vec<Collective>,
}

impl Ops {
    /// Starts a recording.
    pub fn new(shape: StepShape) -> Self {
        Self { shape, buffers: Vec::new(), ops: Vec::new(), collectives: Vec::new() }
    }

    /// Declares a buffer.
    pub fn buffer(&mut self, extent: Extent, width: usize) -> Buf {
        let id = u16::try_from(self.buffers.len()).expect("a model needs a dozen buffers");
        self.buffers.push(BufSpec { extent, width });
        Buf(id)
    }

    /// See [`Op::Embed`].
    pub fn embed(&mut self, table: Weight, out: Buf) {
        self.ops.push(Op::Embed { table, out });
    }

    /// See [`Op::Norm`].
    pub fn norm(&mut self, x: Buf, weight: Weight, eps: f32, out: Buf) {
        self.same(x, out);
        self.ops.push(Op::Norm { x, weight, eps, out });
    }

    /// See [`Op::AddNorm`].
    pub fn add_norm(&mut self, residual: Buf, x: Buf, weight: Weight, eps: f32, out: Buf) {
        self.same(residual, x);
        self.same(x, out);
        self.ops.push(Op::AddNorm { residual, x, weight, eps, out });
    }

    /// See [`Op::Linear`].
    pub fn linear(&mut self, x: Buf, weight: Weight, bias: Option<Weight>, out: Buf) {
        assert_eq!(self.spec(x).extent, self.spec(out).extent, "linear: {x:?} and {out:?} differ in rows");
        self.ops.push(Op::Linear { x, weight, bias, out });
    }

    /// See [`Op::RotateAndCache`].
    pub fn rotate_and_cache(
        &mut self,
        qkv: Buf,
        layer: usize,
        qk_norm: Option<(Weight, Weight, f32)>,
        spec: &Arc<AttentionSpec>,
    ) {
        assert_eq!(self.spec(qkv).width, (spec.q_heads + 2 * spec.kv_heads) * spec.head_dim, "width of qkv");
        self.ops.push(Op::RotateAndCache { qkv, layer, qk_norm, spec: Arc::clone(spec) });
    }

    /// See [`Op::Attend`].
    pub fn attend(&mut self, qkv: Buf, layer: usize, spec: &Arc<AttentionSpec>, out: Buf) {
        assert_eq!(self.spec(out).width, spec.q_heads * spec.head_dim, "width of the attention output");
        self.ops.push(Op::Attend { qkv, layer, spec: Arc::clone(spec), out });
    }

    /// See [`Op::GatedSilu`].
    pub fn gated_silu(&mut self, gate_up: Buf, out: Buf) {
        assert_eq!(self.spec(gate_up).width, 2 * self.spec(out).width, "gate_up holds gate and up");
        self.ops.push(Op::GatedSilu { gate_up, out });
    }

    /// See [`Op::SquareSums`].
    pub fn square_sums(&mut self, qkv: Buf, spec: &Arc<AttentionSpec>, out: Buf) {
        assert_eq!(self.spec(out), BufSpec { extent: self.spec(qkv).extent, width: 2 }, "sums of q and k");
        self.ops.push(Op::SquareSums { qkv, spec: Arc::clone(spec), out });
    }

    /// See [`Op::ScaleHeads`].
    pub fn scale_heads(
        &mut self,
        qkv: Buf,
        spec: &Arc<AttentionSpec>,
        sums: Buf,
        weights: (Weight, Weight),
        elements: (usize, usize),
        eps: f32,
    ) {
        assert_eq!(self.spec(sums), BufSpec { extent: self.spec(qkv).extent, width: 2 }, "sums of q and k");
        self.ops.push(Op::ScaleHeads { qkv, spec: Arc::clone(spec), sums, weights, elements, eps });
    }

    /// See [`Op::Add`].
    pub fn add(&mut self, x: Buf, out: Buf) {
        self.same(x, out);
        self.ops.push(Op::Add { x, out });
    }

    /// See [`Op::Route`].
    pub fn route(&mut self, logits: Buf, bias: Option<Weight>, spec: &Arc<RouteSpec>, out: Buf) {
        assert_eq!(self.spec(logits), BufSpec { extent: Extent::Rows, width: spec.experts }, "router logits");
        assert_eq!(self.spec(out), BufSpec { extent: Extent::Rows, width: 2 * spec.top_k }, "routes");
        self.ops.push(Op::Route { logits, bias, spec: Arc::clone(spec), out });
    }

    /// See [`Op::Experts`]: the weighted sum of each row's.
    pub fn expert_sums(
        &mut self,
        rows: (Buf, Buf),
        weights: (Weight, Weight),
        spec: &Arc<ExpertSpec>,
        scratch: (Buf, Buf),
        out: Buf,
    ) {
        self.experts(rows, weights, spec, scratch, true, out);
    }

    /// See [`Op::Experts`]: every output apart.
    pub fn expert_outputs(
        &mut self,
        rows: (Buf, Buf),
        weights: (Weight, Weight),
        spec: &Arc<ExpertSpec>,
        scratch: (Buf, Buf),
        out: Buf,
    ) {
        self.experts(rows, weights, spec, scratch, false, out);
    }

    fn experts(
        &mut self,
        (x, routes): (Buf, Buf),
        (gate_up, down): (Weight, Weight),
        spec: &Arc<ExpertSpec>,
        (inner, gated): (Buf, Buf),
        sums: bool,
        out: Buf,
    ) {
        let extent = self.spec(x).extent;
        let is = |buf: Buf, width: usize| self.spec(buf) == BufSpec { extent, width };
        assert!(is(routes, 2 * spec.top_k), "routes of {x:?}: {:?}", self.spec(routes));
        let places = spec.choices_per_row();
        assert!(is(inner, 2 * places * spec.width), "scratch of gate and up: {:?}", self.spec(inner));
        assert!(is(gated, places * spec.width), "scratch of their product: {:?}", self.spec(gated));
        let outputs = if sums { 1 } else { places };
        assert!(is(out, outputs * self.spec(x).width), "outputs of experts: {:?}", self.spec(out));
        let spec = Arc::clone(spec);
        self.ops.push(Op::Experts { x, routes, gate_up, down, spec, inner, gated, sums, out });
    }

    /// See [`Op::DispatchRows`]. At the worst every row goes to as many lanes as it has choices.
    pub fn dispatch_rows(&mut self, x: Buf, routes: Buf, owners: &Arc<[usize]>, out: Buf) {
        let (hidden, lanes) = (self.spec(x).width, self.shape.lanes);
        assert_eq!(owners.len(), lanes + 1, "an owner of experts for each lane");
        assert_eq!(self.spec(x).extent, Extent::Rows);
        assert_eq!(self.spec(routes).extent, Extent::GroupRows);
        assert_eq!(self.spec(out), BufSpec { extent: Extent::GroupRows, width: hidden });
        let copies = lanes.min(self.spec(routes).width / 2);
        self.meet(CollectiveKind::AllToAll, Comm::Group, copies * self.shape.rows * hidden);
        self.ops.push(Op::DispatchRows { x, routes, owners: Arc::clone(owners), out });
    }

    /// See [`Op::CombineRows`]. At the worst every choice of every lane's rows was computed by one lane.
    pub fn combine_rows(&mut self, y: Buf, routes: Buf, owners: &Arc<[usize]>, out: Buf) {
        let (hidden, top_k) = (self.spec(out).width, self.spec(routes).width / 2);
        assert_eq!(self.spec(out).extent, Extent::Rows);
        assert_eq!(self.spec(routes).extent, Extent::GroupRows);
        let places = self.spec(y).width / hidden;
        assert_eq!(self.spec(y), BufSpec { extent: Extent::GroupRows, width: places * hidden });
        assert!((1..=top_k).contains(&places), "{places} places for {top_k} choices");
        let held = owners.windows(2).map(|edge| edge[1] - edge[0]).max().expect("a group has lanes");
        let rows = self.shape.lanes * self.shape.rows * top_k.min(held);
        self.meet(CollectiveKind::AllToAll, Comm::Group, rows * hidden);
        self.ops.push(Op::CombineRows { y, routes, owners: Arc::clone(owners), out });
    }

    /// See [`Op::AllReduce`].
    pub fn all_reduce(&mut self, x: Buf, comm: Comm) {
        self.meet(CollectiveKind::AllReduce, comm, self.spec(x).capacity(&self.shape));
        self.ops.push(Op::AllReduce { x, comm });
    }

    /// See [`Op::GatherRows`].
    pub fn gather_rows(&mut self, x: Buf, out: Buf) {
        assert_eq!(self.spec(x).extent, Extent::Rows);
        assert_eq!(self.spec(out), BufSpec { extent: Extent::GroupRows, width: self.spec(x).width });
        self.meet(CollectiveKind::AllGather, Comm::Group, self.spec(x).capacity(&self.shape));
        self.ops.push(Op::GatherRows { x, out });
    }

    /// See [`Op::ScatterSum`].
    pub fn scatter_sum(&mut self, x: Buf, out: Buf) {
        assert_eq!(self.spec(out).extent, Extent::Rows);
        assert_eq!(self.spec(x), BufSpec { extent: Extent::GroupRows, width: self.spec(out).width });
        self.meet(CollectiveKind::ReduceScatter, Comm::Group, self.spec(x).capacity(&self.shape));
        self.ops.push(Op::ScatterSum { x, out });
    }

    /// See [`Op::PickRows`].
    pub fn pick_rows(&mut self, x: Buf, out: Buf) {
        assert_eq!(self.spec(out), BufSpec { extent: Extent::OutRows, width: self.spec(x).width });
        self.ops.push(Op::PickRows { x, out });
    }

    /// See [`Op::GatherColumns`].
    pub fn gather_columns(&mut self, x: Buf, widths: Vec<usize>, out: Buf) {
        assert_eq!(self.spec(out).width, widths.iter().sum::<usize>(), "columns of all ranks");
        let widest = widths.iter().copied().max().expect("a lane has ranks");
        self.meet(CollectiveKind::AllGather, Comm::Lane, widest * self.shape.out_rows);
        self.ops.push(Op::GatherColumns { x, widths, out });
    }

    /// See [`Op::Sample`].
    pub fn sample(&mut self, logits: Buf) {
        assert_eq!(self.spec(logits).extent, Extent::OutRows);
        self.ops.push(Op::Sample { logits });
    }

    /// Ends the recording.
    pub fn finish(self) -> Recording {
        let Self { shape, buffers, ops, collectives } = self;
        Recording { shape, buffers, ops, collectives, counts_experts: false }
    }

    fn spec(&self, buf: Buf) -> BufSpec {
        self.buffers[usize::from(buf.0)]
    }

    fn same(&self, a: Buf, b: Buf) {
        assert_eq!(self.spec(a), self.spec(b), "{a:?} and {b:?} differ in shape");
    }

    fn meet(&mut self, kind: CollectiveKind, comm: Comm, elements: usize) {
        self.collectives.push(Collective { kind, comm, elements });
    }
}
