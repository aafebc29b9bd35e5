//! What a recording must fit: buffers, weights and the reserve.

use crate::weights::{Experts, Loaded, Matrix};
use atom_ops::{AttentionSpec, Buf, BufSpec, Comm, ExpertSpec, Extent, Op, Reserve, RouteSpec, Weight};

/// What operators are checked against.
pub(super) struct Check<'a> {
    pub(super) buffers: &'a [BufSpec],
    pub(super) reserve: &'a Reserve,
    pub(super) weights: &'a [Loaded],
}

impl Check<'_> {
    /// What is wrong with an operator, with the numbers.
    pub(super) fn op(&self, op: &Op) -> Result<(), String> {
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
            Op::SquareSums { qkv, ref spec, out } => {
                apart(&[qkv, out])?;
                self.heads(qkv, spec)
            }
            Op::ScaleHeads { qkv, ref spec, sums, weights: (q, k), elements, .. } => {
                apart(&[qkv, sums])?;
                self.heads(qkv, spec)?;
                self.vector(q, spec.q_heads * spec.head_dim)?;
                self.vector(k, spec.kv_heads * spec.head_dim)?;
                if elements.0 == 0 || elements.1 == 0 {
                    return Err(format!("a mean over {elements:?} elements"));
                }
                Ok(())
            }
            Op::Add { x, out } => apart(&[x, out]),
            Op::Route { logits, bias, ref spec, out } => {
                apart(&[logits, out])?;
                self.extent(logits, Extent::Rows)?;
                route(spec)?;
                equal("logits of a row", self.spec(logits).width, spec.experts)?;
                equal("numbers and weights of a row", self.spec(out).width, 2 * spec.top_k)?;
                bias.map_or(Ok(()), |bias| self.vector(bias, spec.experts))
            }
            Op::Experts { x, routes, gate_up, down, ref spec, inner, gated, out, .. } => {
                apart(&[x, routes, inner, gated, out])?;
                self.experts((x, routes, out), gate_up, down, spec)
            }
            Op::DispatchRows { x, routes, ref owners, out } => {
                apart(&[x, routes, out])?;
                self.owners(owners)
            }
            Op::CombineRows { y, routes, ref owners, out } => {
                apart(&[y, routes, out])?;
                self.owners(owners)
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

    fn heads(&self, qkv: Buf, spec: &AttentionSpec) -> Result<(), String> {
        let width = (spec.q_heads + 2 * spec.kv_heads) * spec.head_dim;
        equal("elements of q, k and v", self.spec(qkv).width, width)
    }

    fn experts(
        &self,
        (x, routes, out): (Buf, Buf, Buf),
        gate_up: Weight,
        down: Weight,
        spec: &ExpertSpec,
    ) -> Result<(), String> {
        let (gate_up, down) = (self.experts_weight(gate_up)?, self.experts_weight(down)?);
        let hidden = self.spec(x).width;
        equal("experts with gate and up", gate_up.matrices.len(), spec.held)?;
        equal("experts with down", down.matrices.len(), spec.held)?;
        equal("inputs of gate and up", gate_up.inputs(), hidden)?;
        equal("outputs of gate and up", gate_up.outputs(), 2 * spec.width)?;
        equal("inputs of down", down.inputs(), spec.width)?;
        equal("outputs of down", down.outputs(), hidden)?;
        let extent = self.spec(x).extent;
        self.extent(routes, extent)?;
        self.extent(out, extent)?;
        if extent == Extent::OutRows {
            return Err(format!("{x:?} has {extent:?}, whose choices nobody makes"));
        }
        below_exact("experts", spec.first + spec.held)
    }

    fn owners(&self, owners: &[usize]) -> Result<(), String> {
        equal("edges of the lanes' experts", owners.len(), self.reserve.top.lanes + 1)?;
        if owners[0] != 0 || !owners.is_sorted() {
            return Err(format!("experts {owners:?} of the lanes are not one behind the other from 0"));
        }
        below_exact("experts", owners[owners.len() - 1])
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

    /// Shape of a buffer.
    pub(super) fn spec(&self, buf: Buf) -> BufSpec {
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
            _ => Err(format!("{weight:?} is no matrix")),
        }
    }

    fn experts_weight(&self, weight: Weight) -> Result<&Experts, String> {
        match self.weight(weight)? {
            Loaded::Experts(experts) => Ok(experts),
            _ => Err(format!("{weight:?} is no layer's experts")),
        }
    }

    fn vector(&self, weight: Weight, len: usize) -> Result<(), String> {
        match self.weight(weight)? {
            Loaded::Vector(vector) => equal("elements of a vector", vector.len(), len),
            _ => Err(format!("{weight:?} is no vector")),
        }
    }

    fn table(&self, weight: Weight, width: usize) -> Result<(), String> {
        match self.weight(weight)? {
            Loaded::Table(table) => equal("columns of a table", table.cols(), width),
            _ => Err(format!("{weight:?} is no table")),
        }
    }

    /// True if some of the weight can be multiplied with quantised activations.
    pub(super) fn is_quantised(&self, weight: Weight) -> bool {
        match self.weight(weight) {
            Ok(Loaded::Matrix(matrix)) => matrix.is_quantised,
            Ok(Loaded::Experts(experts)) => experts.is_quantised(),
            _ => false,
        }
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

fn route(spec: &RouteSpec) -> Result<(), String> {
    let RouteSpec { experts, top_k, groups, groups_kept, .. } = *spec;
    if groups == 0 || !experts.is_multiple_of(groups) {
        return Err(format!("{experts} experts in {groups} groups"));
    }
    if groups_kept == 0 || groups_kept > groups {
        return Err(format!("{groups_kept} of {groups} groups are kept"));
    }
    let left = experts / groups * groups_kept;
    if top_k == 0 || top_k > left {
        return Err(format!("{top_k} experts to choose of {left}"));
    }
    below_exact("experts", experts)
}

/// Expert numbers are f32 in buffers.
fn below_exact(what: &str, count: usize) -> Result<(), String> {
    const EXACT: usize = 1 << f32::MANTISSA_DIGITS;
    if count <= EXACT { Ok(()) } else { Err(format!("{count} {what}; f32 counts to {EXACT}")) }
}
