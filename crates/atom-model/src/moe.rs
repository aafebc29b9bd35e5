//! Mixture-of-experts layers (Shazeer et al. 2017; Fedus et al. 2022; DeepSeek-AI 2024 for sigmoid
//! scores with a selection bias and groups).
//!
//! ```text
//! s = softmax(Wr x) or sigmoid(Wr x)
//! chosen = the top_k experts by s + bias, among the best groups only
//! w = s[chosen] (/ their sum) * scale
//! y = sum over chosen e, ascending, of w[e] * mlp_e(x)   + shared mlp(x)
//! ```

use crate::ModelError;
use crate::exchange::{
    DispatchCombine, ExchangeBuffers, ExpertExchange, Experts, GatherScatter, Local, Routed, Widths,
};
use crate::loader::{Loader, Part, Piece};
use crate::mlp::{Mlp, MlpBuffers};
use crate::shard::{ExpertShare, ShardPlan};
use atom_ops::{Buf, ExpertSpec, Extent, Ops, RouteSpec, Weight};
use atom_weights::{ModelConfig, MoeConfig, Scoring};
use std::sync::Arc;

/// How rows reach experts when both ways are possible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExchangeChoice {
    /// Dispatch where experts are whole, gather where they are sliced.
    #[default]
    Auto,
    /// All rows to all ranks, sums back.
    Gather,
    /// Rows to the ranks of their experts, outputs back. Whole experts only.
    Dispatch,
}

/// What all mixture layers of a model share.
pub(crate) struct Mixture {
    route: Arc<RouteSpec>,
    exchange: Box<dyn ExpertExchange>,
}

/// Weights of one layer; shapes are this rank's share.
pub(crate) struct MoeLayer {
    router: Weight,       // [experts, hidden]
    bias: Option<Weight>, // [experts]
    experts: Experts,
    shared: Option<Mlp>,
}

/// Buffers that all layers share.
pub(crate) struct MoeBuffers {
    logits: Buf,
    routes: Buf,
    exchange: ExchangeBuffers,
    /// Of the shared expert, and its output.
    shared: Option<(MlpBuffers, Buf)>,
}

impl Mixture {
    pub(crate) fn new(config: &ModelConfig, moe: &MoeConfig, shard: &ShardPlan, share: &ExpertShare) -> Self {
        let spec = ExpertSpec {
            top_k: moe.top_k,
            first: share.experts.start,
            held: share.experts.len(),
            width: share.columns.len(),
        };
        let widths = Widths { hidden: config.hidden_size, spec: Arc::new(spec) };
        let exchange: Box<dyn ExpertExchange> = match (shard.group_lanes, &share.owners) {
            (1, _) => Box::new(Local(widths)),
            (_, None) => Box::new(GatherScatter(widths)),
            (_, Some(owners)) => Box::new(DispatchCombine { widths, owners: Arc::clone(owners) }),
        };
        let route = Arc::new(RouteSpec {
            experts: moe.experts,
            top_k: moe.top_k,
            is_sigmoid: moe.scoring == Scoring::Sigmoid,
            groups: moe.groups,
            groups_kept: moe.groups_kept,
            normalise: moe.normalise,
            scale: moe.scale,
        });
        Self { route, exchange }
    }

    pub(crate) fn buffers(&self, ops: &mut Ops, config: &ModelConfig, share: &ExpertShare) -> MoeBuffers {
        let hidden = config.hidden_size;
        MoeBuffers {
            logits: ops.buffer(Extent::Rows, self.route.experts),
            routes: ops.buffer(Extent::Rows, 2 * self.route.top_k),
            exchange: self.exchange.buffers(ops),
            shared: (!share.shared.is_empty()).then(|| {
                (MlpBuffers::new(ops, share.shared.len(), hidden, false), ops.buffer(Extent::Rows, hidden))
            }),
        }
    }
}

impl MoeLayer {
    pub(crate) fn load(
        loader: &mut Loader<'_>,
        layer: usize,
        moe: &MoeConfig,
        share: &ExpertShare,
    ) -> Result<Self, ModelError> {
        let name = |part: &str| format!("model.layers.{layer}.mlp.{part}");
        let router = loader.matrix(&[(name("gate.weight"), Part::All)])?;
        let bias = if moe.selection_bias {
            Some(loader.vector(&name("gate.e_score_correction_bias"))?)
        } else {
            None
        };
        let piece = |expert: usize, part: &str, which: Part| -> Piece {
            (name(&format!("experts.{expert}.{part}_proj.weight")), which)
        };
        let columns = &share.columns;
        let gate_up = |e| ["gate", "up"].map(|p| piece(e, p, Part::Rows(columns.clone()))).to_vec();
        let down = |e| vec![piece(e, "down", Part::Cols(columns.clone()))];
        let held = || share.experts.clone();
        let experts = Experts {
            gate_up: loader.experts(&held().map(gate_up).collect::<Vec<_>>())?,
            down: loader.experts(&held().map(down).collect::<Vec<_>>())?,
        };
        let shared = if share.shared.is_empty() {
            None
        } else {
            Some(Mlp::load(loader, &name("shared_experts"), &share.shared, false, false)?)
        };
        Ok(Self { router, bias, experts, shared })
    }

    /// `out =` this rank's share of the layer for `x`; the caller sums over the lane.
    pub(crate) fn record(&self, ops: &mut Ops, mixture: &Mixture, b: &MoeBuffers, x: Buf, out: Buf) {
        ops.linear(x, self.router, None, b.logits);
        ops.route(b.logits, self.bias, &mixture.route, b.routes);
        let rows = Routed { x, routes: b.routes };
        mixture.exchange.record(ops, &b.exchange, &self.experts, rows, out);
        if let (Some(mlp), Some((buffers, output))) = (&self.shared, &b.shared) {
            mlp.record(ops, buffers, x, *output);
            ops.add(*output, out);
        }
    }
}
