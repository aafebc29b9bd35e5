//! A recording as the workers walk it: operators cut into phases, with a barrier where it is needed.

use atom_ops::{AttentionSpec, Buf, Comm, ExpertSpec, Extent, Op, RouteSpec, Weight};
use std::sync::Arc;

/// A phase, and whether the workers meet before it.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// What is done.
    pub(crate) phase: Phase,
    /// All must have finished the phase before. False when a worker needs only what it wrote itself.
    pub(crate) meets: bool,
}

/// What all workers do at once, each its share. See [`Op`] for what most of them compute.
#[derive(Clone, Debug)]
pub(crate) enum Phase {
    Embed {
        table: Weight,
        out: Buf,
    },
    Norm {
        x: Buf,
        weight: Weight,
        eps: f32,
        out: Buf,
    },
    AddNorm {
        residual: Buf,
        x: Buf,
        weight: Weight,
        eps: f32,
        out: Buf,
    },
    /// The rows of `x` as bytes with scales, for the products that follow.
    Quantise {
        x: Buf,
    },
    Multiply {
        x: Buf,
        weight: Weight,
        bias: Option<Weight>,
        out: Buf,
        quantised: bool,
    },
    RotateAndCache {
        qkv: Buf,
        layer: usize,
        qk_norm: Option<(Weight, Weight, f32)>,
    },
    Attend {
        qkv: Buf,
        layer: usize,
        heads: usize,
        out: Buf,
    },
    GatedSilu {
        gate_up: Buf,
        out: Buf,
    },
    SquareSums {
        qkv: Buf,
        /// Elements of q and of k.
        widths: (usize, usize),
        out: Buf,
    },
    ScaleHeads {
        qkv: Buf,
        sums: Buf,
        weights: (Weight, Weight),
        elements: (usize, usize),
        eps: f32,
    },
    Add {
        x: Buf,
        out: Buf,
    },
    Route {
        logits: Buf,
        bias: Option<Weight>,
        spec: Arc<RouteSpec>,
        out: Buf,
        /// How many there are before it.
        number: usize,
    },
    /// Worker 0 lists the choices by expert; all quantise the rows that chose somebody held here.
    GroupChoices(Arc<ExpertLayer>),
    /// Into `inner`, a row for each choice.
    GateAndUp(Arc<ExpertLayer>),
    /// From `inner` to `gated`, and its codes.
    GateChoices(Arc<ExpertLayer>),
    /// Into `out`.
    Down(Arc<ExpertLayer>),
    /// What goes to each lane, one behind the other, into scratch.
    PackRows(Arc<RowExchange>),
    /// Worker 0 alone.
    ExchangeRows(Arc<RowExchange>),
    /// What came from each lane to where it belongs.
    PlaceRows(Arc<RowExchange>),
    /// The weighted sums of what came back.
    SumChoices(Arc<RowExchange>),
    /// Worker 0 alone, as in the other collectives.
    AllReduce {
        x: Buf,
        comm: Comm,
        capacity: usize,
    },
    GatherRows {
        x: Buf,
        out: Buf,
        capacity: usize,
    },
    ScatterSum {
        x: Buf,
        out: Buf,
        capacity: usize,
    },
    PickRows {
        x: Buf,
        out: Buf,
    },
    /// Every rank's columns, one rank behind the other, into scratch.
    GatherShards {
        x: Buf,
        widths: Vec<usize>,
        capacity: usize,
    },
    /// From scratch to where they belong.
    PlaceColumns {
        widths: Vec<usize>,
        capacity: usize,
        out: Buf,
    },
    Sample {
        logits: Buf,
    },
}

/// [`Op::Experts`] in its phases.
#[derive(Clone, Debug)]
pub(crate) struct ExpertLayer {
    pub(crate) x: Buf,
    pub(crate) routes: Buf,
    pub(crate) gate_up: Weight,
    pub(crate) down: Weight,
    pub(crate) spec: Arc<ExpertSpec>,
    pub(crate) inner: Buf,
    pub(crate) gated: Buf,
    pub(crate) sums: bool,
    pub(crate) out: Buf,
    /// `x` is wanted quantised.
    pub(crate) x_quantised: bool,
    /// `gated` is wanted quantised.
    pub(crate) gated_quantised: bool,
}

/// [`Op::DispatchRows`] or [`Op::CombineRows`] in its phases.
#[derive(Clone, Debug)]
pub(crate) struct RowExchange {
    pub(crate) x: Buf,
    pub(crate) routes: Buf,
    pub(crate) owners: Arc<[usize]>,
    pub(crate) out: Buf,
    /// Of the collective.
    pub(crate) capacity: usize,
    /// Outputs of experts go back to the lanes of their rows; else rows go to the lanes of their experts.
    pub(crate) combines: bool,
}

/// Cuts operators into phases. `quantises` says which weights want quantised activations; `extent`
/// gives a buffer's. Collectives take their capacities from `capacities`, in order.
pub(crate) fn phases(
    ops: &[Op],
    quantises: impl Fn(Weight) -> bool,
    extent: impl Fn(Buf) -> Extent,
    capacities: impl IntoIterator<Item = usize>,
) -> Vec<Step> {
    let mut cut = Cut { steps: Vec::new(), extent, codes_of: None };
    let mut capacities = capacities.into_iter();
    let mut capacity = || capacities.next().expect("the recorder counts every collective");
    let mut routers = 0;
    for op in ops {
        match *op {
            Op::Embed { table, out } => cut.push(Phase::Embed { table, out }),
            Op::Norm { x, weight, eps, out } => cut.push(Phase::Norm { x, weight, eps, out }),
            Op::AddNorm { residual, x, weight, eps, out } => {
                cut.push(Phase::AddNorm { residual, x, weight, eps, out });
            }
            Op::Linear { x, weight, bias, out } => {
                let quantised = quantises(weight);
                if quantised && cut.codes_of != Some(x) {
                    cut.push(Phase::Quantise { x });
                }
                cut.push(Phase::Multiply { x, weight, bias, out, quantised });
            }
            Op::RotateAndCache { qkv, layer, qk_norm, .. } => {
                cut.push(Phase::RotateAndCache { qkv, layer, qk_norm });
            }
            Op::Attend { qkv, layer, ref spec, out } => {
                let AttentionSpec { q_heads: heads, .. } = **spec;
                cut.push(Phase::Attend { qkv, layer, heads, out });
            }
            Op::GatedSilu { gate_up, out } => cut.push(Phase::GatedSilu { gate_up, out }),
            Op::SquareSums { qkv, ref spec, out } => {
                let widths = (spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim);
                cut.push(Phase::SquareSums { qkv, widths, out });
            }
            Op::ScaleHeads { qkv, sums, weights, elements, eps, .. } => {
                cut.push(Phase::ScaleHeads { qkv, sums, weights, elements, eps });
            }
            Op::Add { x, out } => cut.push(Phase::Add { x, out }),
            Op::Route { logits, bias, ref spec, out } => {
                cut.push(Phase::Route { logits, bias, spec: Arc::clone(spec), out, number: routers });
                routers += 1;
            }
            Op::Experts { x, routes, gate_up, down, ref spec, inner, gated, sums, out } => {
                let (x_quantised, gated_quantised) = (quantises(gate_up), quantises(down));
                let spec = Arc::clone(spec);
                cut.experts(ExpertLayer {
                    x,
                    routes,
                    gate_up,
                    down,
                    spec,
                    inner,
                    gated,
                    sums,
                    out,
                    x_quantised,
                    gated_quantised,
                });
            }
            Op::DispatchRows { x, routes, ref owners, out } => {
                let (capacity, owners) = (capacity(), Arc::clone(owners));
                cut.exchange(RowExchange { x, routes, owners, out, capacity, combines: false });
            }
            Op::CombineRows { y: x, routes, ref owners, out } => {
                let (capacity, owners) = (capacity(), Arc::clone(owners));
                cut.exchange(RowExchange { x, routes, owners, out, capacity, combines: true });
            }
            Op::AllReduce { x, comm } => cut.push(Phase::AllReduce { x, comm, capacity: capacity() }),
            Op::GatherRows { x, out } => cut.push(Phase::GatherRows { x, out, capacity: capacity() }),
            Op::ScatterSum { x, out } => cut.push(Phase::ScatterSum { x, out, capacity: capacity() }),
            Op::PickRows { x, out } => cut.push(Phase::PickRows { x, out }),
            Op::GatherColumns { x, ref widths, out } => {
                let capacity = capacity();
                cut.push(Phase::GatherShards { x, widths: widths.clone(), capacity });
                cut.push(Phase::PlaceColumns { widths: widths.clone(), capacity, out });
            }
            Op::Sample { logits } => cut.push(Phase::Sample { logits }),
        }
    }
    cut.steps
}

struct Cut<E> {
    steps: Vec<Step>,
    extent: E,
    /// The buffer whose rows the scratch of codes holds.
    codes_of: Option<Buf>,
}

impl<E: Fn(Buf) -> Extent> Cut<E> {
    fn push(&mut self, phase: Phase) {
        let wrote = self.steps.last().and_then(|step| self.rows(step.phase.writes_own_rows()));
        let reads = self.rows(phase.reads_own_rows());
        // Rows are always shared out in the same way, so a worker that goes on with rows of the same
        // extent reads what it wrote. All phases since the last meeting are of that kind.
        let meets = !self.steps.is_empty() && (wrote.is_none() || wrote != reads);
        match phase {
            Phase::Quantise { x } => self.codes_of = Some(x),
            // These lay codes out in their own way.
            Phase::GroupChoices(ref layer) if layer.x_quantised => self.codes_of = None,
            Phase::GateChoices(ref layer) if layer.gated_quantised => self.codes_of = None,
            _ if self.codes_of.is_some_and(|buf| phase.writes(buf)) => self.codes_of = None,
            _ => {}
        }
        self.steps.push(Step { phase, meets });
    }

    fn experts(&mut self, layer: ExpertLayer) {
        let layer = Arc::new(layer);
        self.push(Phase::GroupChoices(Arc::clone(&layer)));
        self.push(Phase::GateAndUp(Arc::clone(&layer)));
        self.push(Phase::GateChoices(Arc::clone(&layer)));
        self.push(Phase::Down(layer));
    }

    fn exchange(&mut self, exchange: RowExchange) {
        let exchange = Arc::new(exchange);
        self.push(Phase::PackRows(Arc::clone(&exchange)));
        self.push(Phase::ExchangeRows(Arc::clone(&exchange)));
        self.push(if exchange.combines { Phase::SumChoices(exchange) } else { Phase::PlaceRows(exchange) });
    }

    fn rows(&self, buf: Option<Buf>) -> Option<Extent> {
        buf.map(&self.extent)
    }
}

impl Phase {
    /// Set if a worker reads only its share of rows: a buffer with that extent.
    fn reads_own_rows(&self) -> Option<Buf> {
        match *self {
            Self::PickRows { .. } | Self::PlaceColumns { .. } | Self::SumChoices(_) => None,
            Self::Sample { logits } => Some(logits),
            _ => self.writes_own_rows(),
        }
    }

    /// Set if a worker writes only its share of rows, whole.
    fn writes_own_rows(&self) -> Option<Buf> {
        match *self {
            Self::Embed { out, .. }
            | Self::Norm { out, .. }
            | Self::AddNorm { out, .. }
            | Self::GatedSilu { out, .. }
            | Self::SquareSums { out, .. }
            | Self::Add { out, .. }
            | Self::Route { out, .. }
            | Self::PickRows { out, .. }
            | Self::PlaceColumns { out, .. } => Some(out),
            Self::SumChoices(ref exchange) => Some(exchange.out),
            Self::Quantise { x } | Self::ScaleHeads { qkv: x, .. } => Some(x),
            Self::RotateAndCache { .. }
            | Self::Multiply { .. }
            | Self::Attend { .. }
            | Self::AllReduce { .. }
            | Self::GatherRows { .. }
            | Self::ScatterSum { .. }
            | Self::GatherShards { .. }
            | Self::GroupChoices(_)
            | Self::GateAndUp(_)
            | Self::GateChoices(_)
            | Self::Down(_)
            | Self::PackRows(_)
            | Self::ExchangeRows(_)
            | Self::PlaceRows(_)
            | Self::Sample { .. } => None,
        }
    }

    /// True if the content of `buf` changes.
    fn writes(&self, buf: Buf) -> bool {
        match *self {
            Self::Embed { out, .. }
            | Self::Norm { out, .. }
            | Self::Multiply { out, .. }
            | Self::Attend { out, .. }
            | Self::GatedSilu { out, .. }
            | Self::SquareSums { out, .. }
            | Self::Add { out, .. }
            | Self::Route { out, .. }
            | Self::GatherRows { out, .. }
            | Self::ScatterSum { out, .. }
            | Self::PickRows { out, .. }
            | Self::PlaceColumns { out, .. } => out == buf,
            Self::AddNorm { residual, out, .. } => residual == buf || out == buf,
            Self::RotateAndCache { qkv: x, .. }
            | Self::ScaleHeads { qkv: x, .. }
            | Self::AllReduce { x, .. }
            | Self::Sample { logits: x } => x == buf,
            Self::GateAndUp(ref layer) => layer.inner == buf,
            Self::GateChoices(ref layer) => layer.gated == buf,
            Self::Down(ref layer) => layer.out == buf,
            Self::PlaceRows(ref exchange) | Self::SumChoices(ref exchange) => exchange.out == buf,
            Self::Quantise { .. }
            | Self::GatherShards { .. }
            | Self::GroupChoices(_)
            | Self::PackRows(_)
            | Self::ExchangeRows(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIDDEN: Buf = Buf(0);
    const NORMED: Buf = Buf(1);
    const WIDE: Buf = Buf(2);
    const PICKED: Buf = Buf(3);
    const LOGITS: Buf = Buf(4);

    fn cut(ops: &[Op]) -> Vec<(String, bool)> {
        let extent = |buf| if buf == PICKED || buf == LOGITS { Extent::OutRows } else { Extent::Rows };
        let steps = phases(ops, |weight| weight == Weight(1), extent, []);
        let name = |phase| format!("{phase:?}").split([' ', '(']).next().expect("a name").to_string();
        steps.into_iter().map(|step| (name(step.phase), step.meets)).collect()
    }

    fn linear(x: Buf, out: Buf, weight: u32) -> Op {
        Op::Linear { x, weight: Weight(weight), bias: None, out }
    }

    fn norm(x: Buf, out: Buf) -> Op {
        Op::Norm { x, weight: Weight(0), eps: 0.0, out }
    }

    #[test]
    fn workers_meet_unless_they_go_on_with_their_own_rows() {
        let steps = cut(&[
            Op::Embed { table: Weight(0), out: HIDDEN },
            norm(HIDDEN, NORMED),
            linear(NORMED, WIDE, 1),
            Op::GatedSilu { gate_up: WIDE, out: NORMED },
            linear(NORMED, HIDDEN, 0),
            Op::PickRows { x: HIDDEN, out: PICKED },
            norm(PICKED, PICKED),
            linear(PICKED, LOGITS, 1),
            Op::Sample { logits: LOGITS },
        ]);
        let expected = [
            ("Embed", false),
            ("Norm", false),
            ("Quantise", false),
            ("Multiply", true),
            ("GatedSilu", true),
            ("Multiply", true),
            ("PickRows", true),
            ("Norm", false),
            ("Quantise", false),
            ("Multiply", true),
            ("Sample", true),
        ];
        assert_eq!(steps, expected.map(|(name, meets)| (name.to_string(), meets)));
    }

    #[test]
    fn activations_are_quantised_once_and_again_after_they_changed() {
        let count = |ops: &[Op]| cut(ops).iter().filter(|(name, _)| name == "Quantise").count();
        let (q, k) = (linear(NORMED, WIDE, 1), linear(NORMED, HIDDEN, 1));
        assert_eq!(count(&[q.clone(), k.clone()]), 1);
        assert_eq!(count(&[q.clone(), norm(HIDDEN, NORMED), k.clone()]), 2);
        assert_eq!(count(&[q.clone(), linear(HIDDEN, WIDE, 1), k.clone()]), 3);
        let add = Op::AddNorm { residual: NORMED, x: HIDDEN, weight: Weight(0), eps: 0.0, out: HIDDEN };
        assert_eq!(count(&[q, add, k]), 2);
        assert_eq!(count(&[linear(NORMED, WIDE, 0)]), 0);
    }

    fn expert_layer(x: Buf, routes: Buf, gate_up: u32, down: u32) -> Op {
        let spec = Arc::new(ExpertSpec { top_k: 2, first: 0, held: 4, width: 8 });
        let (gate_up, down) = (Weight(gate_up), Weight(down));
        let (inner, gated) = (Buf(10), Buf(11));
        Op::Experts { x, routes, gate_up, down, spec, inner, gated, sums: true, out: HIDDEN }
    }

    #[test]
    fn workers_meet_around_choices_and_between_the_products_of_experts() {
        let spec = Arc::new(RouteSpec {
            experts: 4,
            top_k: 2,
            is_sigmoid: false,
            groups: 1,
            groups_kept: 1,
            normalise: true,
            scale: 1.0,
        });
        let steps = cut(&[
            linear(NORMED, LOGITS, 0),
            Op::Route { logits: WIDE, bias: None, spec, out: Buf(12) },
            expert_layer(NORMED, Buf(12), 1, 0),
            Op::Add { x: NORMED, out: HIDDEN },
            norm(HIDDEN, NORMED),
        ]);
        let expected = [
            ("Multiply", false),
            ("Route", true),
            ("GroupChoices", true),
            ("GateAndUp", true),
            ("GateChoices", true),
            ("Down", true),
            ("Add", true),
            ("Norm", false),
        ];
        assert_eq!(steps, expected.map(|(name, meets)| (name.to_string(), meets)));
    }

    #[test]
    fn activations_are_quantised_again_after_experts_had_theirs() {
        let count = |ops: &[Op]| cut(ops).iter().filter(|(name, _)| name == "Quantise").count();
        let linear = linear(NORMED, WIDE, 1);
        for (gate_up, down, expected) in [(0, 0, 1), (1, 0, 2), (0, 1, 2), (1, 1, 2)] {
            let layer = expert_layer(NORMED, Buf(12), gate_up, down);
            assert_eq!(count(&[linear.clone(), layer, linear.clone()]), expected, "{gate_up} {down}");
        }
    }
}
