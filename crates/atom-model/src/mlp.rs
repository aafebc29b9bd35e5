//! The gated MLP: `Wdown (silu(Wgate x) * Wup x)`, whole, split over a lane, or split over a group.

use crate::ModelError;
use crate::loader::{Loader, Part};
use atom_ops::{Buf, Extent, Ops, Weight};
use std::ops::Range;

/// Weights of one MLP; shapes are this rank's share.
pub(crate) struct Mlp {
    gate_up: Weight,              // [2 * width, hidden]
    gate_up_bias: Option<Weight>, // [2 * width]
    down: Weight,                 // [hidden, width]
    down_bias: Option<Weight>,    // [hidden]
}

/// Buffers that all layers share.
pub(crate) struct MlpBuffers {
    gate_up: Buf,
    gated: Buf,
    /// Where the rows of all lanes lie before and after, if the MLP is split over the group.
    grouped: Option<(Buf, Buf)>,
}

impl Mlp {
    /// Loads columns `columns` of the MLP called `name`. `adds_bias` is true on one rank of those whose
    /// results are added.
    pub(crate) fn load(
        loader: &mut Loader<'_>,
        name: &str,
        columns: &Range<usize>,
        bias: bool,
        adds_bias: bool,
    ) -> Result<Self, ModelError> {
        let gate_up = |kind: &str| {
            ["gate", "up"].map(|p| (format!("{name}.{p}_proj.{kind}"), Part::Rows(columns.clone())))
        };
        Ok(Self {
            gate_up: loader.matrix(&gate_up("weight"))?,
            gate_up_bias: if bias { Some(loader.vectors(&gate_up("bias"))?) } else { None },
            down: loader.matrix(&[(format!("{name}.down_proj.weight"), Part::Cols(columns.clone()))])?,
            down_bias: if bias && adds_bias {
                Some(loader.vector(&format!("{name}.down_proj.bias"))?)
            } else {
                None
            },
        })
    }

    /// `out =` this rank's share of the MLP of `x`. Split over a group, every lane computes its columns
    /// for the rows of all, and the sums come home; else the caller sums over the lane.
    pub(crate) fn record(&self, ops: &mut Ops, buffers: &MlpBuffers, x: Buf, out: Buf) {
        let &MlpBuffers { gate_up, gated, grouped } = buffers;
        let (input, output) = grouped.unwrap_or((x, out));
        if grouped.is_some() {
            ops.gather_rows(x, input);
        }
        ops.linear(input, self.gate_up, self.gate_up_bias, gate_up);
        ops.gated_silu(gate_up, gated);
        ops.linear(gated, self.down, self.down_bias, output);
        if grouped.is_some() {
            ops.scatter_sum(output, out);
        }
    }
}

impl MlpBuffers {
    /// For `width` columns; `hidden` is the width of the rows.
    pub(crate) fn new(ops: &mut Ops, width: usize, hidden: usize, is_grouped: bool) -> Self {
        let extent = if is_grouped { Extent::GroupRows } else { Extent::Rows };
        Self {
            gate_up: ops.buffer(extent, 2 * width),
            gated: ops.buffer(extent, width),
            grouped: is_grouped.then(|| (ops.buffer(extent, hidden), ops.buffer(extent, hidden))),
        }
    }
}
