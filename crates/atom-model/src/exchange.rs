//! How rows reach the experts of a mixture and come home.
//!
//! * [`Local`]: the ranks that hold the experts have the rows already.
//! * [`GatherScatter`]: every rank gets the rows of all lanes, computes what it holds, and each lane
//!   gets the sum over ranks. Works for slices of experts and for whole ones.
//! * [`DispatchCombine`]: a row goes only to the lanes that hold its experts; their outputs come back one
//!   by one and are summed at home. Needs whole experts; sums the same numbers in the same order as a
//!   single rank does.
//!
//! Every exchange declares its collectives for a shape, before anything is recorded: capacities are the
//! worst case, so no routing can overflow them and no row is ever dropped.

use atom_ops::{Buf, Collective, CollectiveKind, Comm, ExpertSpec, Extent, Ops, StepShape, Weight};
use std::fmt::Debug;
use std::sync::Arc;

/// One way for rows to meet experts.
pub trait ExpertExchange: Debug + Send {
    /// The collectives of one layer, in order, with the elements that each member brings at the most.
    fn collectives(&self, shape: &StepShape) -> Vec<Collective>;

    /// Declares the buffers that all layers share.
    fn buffers(&self, ops: &mut Ops) -> ExchangeBuffers;

    /// `out =` what the experts make of `x`, as far as the ranks that meet here hold them.
    fn record(&self, ops: &mut Ops, b: &ExchangeBuffers, experts: &Experts, rows: Routed, out: Buf);
}

/// Widths that every exchange needs.
#[derive(Clone, Debug)]
pub struct Widths {
    /// Elements of a row.
    pub hidden: usize,
    /// What this rank holds.
    pub spec: Arc<ExpertSpec>,
}

/// Rows with their choices.
#[derive(Clone, Copy, Debug)]
pub struct Routed {
    /// `[rows, hidden]`
    pub x: Buf,
    /// `[rows, 2 top_k]`
    pub routes: Buf,
}

/// Weights of the experts that this rank holds.
#[derive(Clone, Copy, Debug)]
pub struct Experts {
    /// `[2 width, hidden]` each
    pub gate_up: Weight,
    /// `[hidden, width]` each
    pub down: Weight,
}

/// Buffers of an exchange.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeBuffers {
    inner: Buf,
    gated: Buf,
    /// Rows of all lanes, their routes, and what experts make of them.
    group: Option<(Routed, Buf)>,
}

/// See the module.
#[derive(Debug)]
pub struct Local(pub Widths);

/// See the module.
#[derive(Debug)]
pub struct GatherScatter(pub Widths);

/// See the module.
#[derive(Debug)]
pub struct DispatchCombine {
    /// Sizes of one layer.
    pub widths: Widths,
    /// Lane `l` holds experts `owners[l] .. owners[l + 1]`.
    pub owners: Arc<[usize]>,
}

impl ExpertExchange for Local {
    fn collectives(&self, _: &StepShape) -> Vec<Collective> {
        Vec::new()
    }

    fn buffers(&self, ops: &mut Ops) -> ExchangeBuffers {
        let (inner, gated) = self.0.scratch(ops, Extent::Rows);
        ExchangeBuffers { inner, gated, group: None }
    }

    fn record(&self, ops: &mut Ops, b: &ExchangeBuffers, experts: &Experts, rows: Routed, out: Buf) {
        self.0.sums(ops, b, experts, rows, out);
    }
}

impl ExpertExchange for GatherScatter {
    fn collectives(&self, shape: &StepShape) -> Vec<Collective> {
        let Widths { hidden, spec } = &self.0;
        let meet = |kind, elements| Collective { kind, comm: Comm::Group, elements };
        vec![
            meet(CollectiveKind::AllGather, shape.rows * 2 * spec.top_k),
            meet(CollectiveKind::AllGather, shape.rows * hidden),
            meet(CollectiveKind::ReduceScatter, shape.lanes * shape.rows * hidden),
        ]
    }

    fn buffers(&self, ops: &mut Ops) -> ExchangeBuffers {
        self.0.group_buffers(ops, self.0.hidden)
    }

    fn record(&self, ops: &mut Ops, b: &ExchangeBuffers, experts: &Experts, rows: Routed, out: Buf) {
        let (group, sums) = b.group.expect("declared by this exchange");
        ops.gather_rows(rows.routes, group.routes);
        ops.gather_rows(rows.x, group.x);
        self.0.sums(ops, b, experts, group, sums);
        ops.scatter_sum(sums, out);
    }
}

impl ExpertExchange for DispatchCombine {
    fn collectives(&self, shape: &StepShape) -> Vec<Collective> {
        let Widths { hidden, spec } = &self.widths;
        let held = self.owners.windows(2).map(|edge| edge[1] - edge[0]).max().expect("a group has lanes");
        let meet = |kind, elements| Collective { kind, comm: Comm::Group, elements };
        let copies = spec.top_k.min(shape.lanes);
        let outputs = shape.lanes * shape.rows * spec.top_k.min(held);
        vec![
            meet(CollectiveKind::AllGather, shape.rows * 2 * spec.top_k),
            meet(CollectiveKind::AllToAll, copies * shape.rows * hidden),
            meet(CollectiveKind::AllToAll, outputs * hidden),
        ]
    }

    fn buffers(&self, ops: &mut Ops) -> ExchangeBuffers {
        self.widths.group_buffers(ops, self.widths.spec.choices_per_row() * self.widths.hidden)
    }

    fn record(&self, ops: &mut Ops, b: &ExchangeBuffers, experts: &Experts, rows: Routed, out: Buf) {
        let (group, outputs) = b.group.expect("declared by this exchange");
        ops.gather_rows(rows.routes, group.routes);
        ops.dispatch_rows(rows.x, group.routes, &self.owners, group.x);
        self.widths.outputs(ops, b, experts, group, outputs);
        ops.combine_rows(outputs, group.routes, &self.owners, out);
    }
}

impl Widths {
    fn sums(&self, ops: &mut Ops, b: &ExchangeBuffers, experts: &Experts, rows: Routed, out: Buf) {
        let Experts { gate_up, down } = *experts;
        ops.expert_sums((rows.x, rows.routes), (gate_up, down), &self.spec, (b.inner, b.gated), out);
    }

    fn outputs(&self, ops: &mut Ops, b: &ExchangeBuffers, experts: &Experts, rows: Routed, out: Buf) {
        let Experts { gate_up, down } = *experts;
        ops.expert_outputs((rows.x, rows.routes), (gate_up, down), &self.spec, (b.inner, b.gated), out);
    }

    fn scratch(&self, ops: &mut Ops, extent: Extent) -> (Buf, Buf) {
        let width = self.spec.choices_per_row() * self.spec.width;
        (ops.buffer(extent, 2 * width), ops.buffer(extent, width))
    }

    fn group_buffers(&self, ops: &mut Ops, out_width: usize) -> ExchangeBuffers {
        let extent = Extent::GroupRows;
        let (inner, gated) = self.scratch(ops, extent);
        let group =
            Routed { x: ops.buffer(extent, self.hidden), routes: ops.buffer(extent, 2 * self.spec.top_k) };
        ExchangeBuffers { inner, gated, group: Some((group, ops.buffer(extent, out_width))) }
    }
}
