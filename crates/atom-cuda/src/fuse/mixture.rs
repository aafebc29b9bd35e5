//! What kernels of mixtures take in: the router all that stands between attention and experts, the experts' last kernel the
//! addition to the residual and the norm behind it.

use super::{Step, is_left_alone, only_reader};
use crate::buffers::{Use, elements, uses};
use crate::compile::Program;
use crate::device::Properties;
use crate::element::Element;
use crate::fp8::Fp8Form;
use crate::launch::experts::Experts;
use crate::launch::norm::NORM_WIDTH_MAX;
use crate::launch::router_few;
use crate::plan::experts_shape;
use atom_ops::{Buf, Extent, Op, Recording, RouteSpec, Weight};

/// See [`router_few::router_few`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Routed<'a> {
    pub(crate) residual: Buf,
    /// What is added to it first.
    pub(crate) added: Option<Buf>,
    pub(crate) norm: (Weight, f32),
    pub(crate) normed: Buf,
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Weight>,
    pub(crate) spec: &'a RouteSpec,
    pub(crate) out: Buf,
}

/// An [`Op::Experts`] whose sums are added to `residual`, with the norm behind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AddedExperts<'a> {
    pub(crate) op: &'a Op,
    pub(crate) residual: Buf,
    /// Of the new residual: its weights, and what it makes.
    pub(crate) norm: (Weight, f32, Buf),
}

impl Routed<'_> {
    /// What must be loaded for it.
    pub(crate) fn program(&self, recording: &Recording) -> Program {
        router_few::program(recording.buffers()[usize::from(self.residual.0)].width)
    }

    pub(super) fn uses(&self) -> Use {
        let reads = std::iter::once(self.residual).chain(self.added).collect();
        Use { reads, makes: vec![self.normed, self.out], scratches: Vec::new() }
    }
}

impl AddedExperts<'_> {
    pub(super) fn uses(&self) -> Use {
        let Use { mut reads, scratches, .. } = uses(self.op);
        reads.push(self.residual);
        Use { reads, makes: vec![self.norm.2], scratches }
    }
}

/// A recording's mixtures on such a GPU.
pub(super) struct Mixtures<'a, 'p> {
    pub(super) recording: &'a Recording,
    pub(super) element: Element,
    /// Which matrices are FP8.
    pub(super) codes: &'p dyn Fn(Weight) -> Option<Fp8Form>,
    pub(super) properties: &'p Properties,
}

impl<'a> Mixtures<'a, '_> {
    /// Experts whose choices are combined by a kernel of its own take in the addition and the norm behind them, if nobody
    /// else wants their sums. (Where rows are few the second product could add as well, and the next one norm: a layer of
    /// one row took 42.5 us so, 41.9 with a kernel that adds and norms.)
    pub(super) fn add_experts(&self, steps: &mut [Option<Step<'a>>]) {
        for index in 0..steps.len() {
            let Some(Step::Op(op @ &Op::Experts { sums: true, out: sum, .. })) = steps[index] else {
                continue;
            };
            let Some(reader) = only_reader(steps, index, sum) else { continue };
            let Some(Step::Op(&Op::AddNorm { residual, x, weight, eps, out })) = steps[reader] else {
                continue;
            };
            let Some(shape) = experts_shape(self.recording, op, self.element, self.codes) else { continue };
            if x != sum || self.element != Element::BF16 || !is_left_alone(steps, index, reader, residual) {
                continue;
            }
            if Experts::new(shape, self.properties).norms() && is_left_alone(steps, index, reader, out) {
                let norm = (weight, eps, out);
                steps[index] = Some(Step::Experts(AddedExperts { op, residual, norm }));
                steps[reader] = None;
            }
        }
    }

    /// A norm, the router's product and its choice become one step, where they follow each other.
    pub(super) fn join_routers(&self, steps: &mut [Option<Step<'a>>]) {
        for index in 0..steps.len() {
            let Some((routed, [product, choice])) = self.routed(steps, index) else { continue };
            steps[index] = Some(Step::Router(routed));
            steps[product] = None;
            steps[choice] = None;
        }
    }

    fn routed(&self, steps: &[Option<Step<'a>>], index: usize) -> Option<(Routed<'a>, [usize; 2])> {
        let (residual, added, norm, normed) = match steps[index]? {
            Step::Op(&Op::Norm { x, weight, eps, out }) | Step::Norm { x, weight, eps, out } => {
                (x, None, (weight, eps), out)
            }
            Step::Op(&Op::AddNorm { residual, x, weight, eps, out }) => {
                (residual, Some(x), (weight, eps), out)
            }
            _ => return None,
        };
        let mut behind = (index + 1..steps.len()).filter(|&at| steps[at].is_some());
        let (product, choice) = (behind.next()?, behind.next()?);
        let (x, weight, logits) = match steps[product]? {
            Step::Op(&Op::Linear { x, weight, bias: None, out }) => (x, weight, out),
            Step::Product(fused) if fused.bias.is_none() && fused.norm.is_none() => {
                (fused.x, fused.weight, fused.out)
            }
            _ => return None,
        };
        let Step::Op(Op::Route { logits: scores, bias, spec, out }) = steps[choice]? else { return None };
        let elements = elements(self.recording, self.element);
        let element = |buf: Buf| elements[usize::from(buf.0)];
        let buffer = self.recording.buffers()[usize::from(residual.0)];
        let rows = buffer.capacity_rows(&self.recording.shape());
        let fits = x == normed
            && *scores == logits
            && only_reader(steps, product, logits) == Some(choice)
            && buffer.extent == Extent::Rows
            && element(residual) == Element::F32
            && element(normed) == Element::BF16
            && buffer.width <= NORM_WIDTH_MAX
            && router_few::is_for(spec, rows, buffer.width, self.properties);
        let (bias, spec, out) = (*bias, spec.as_ref(), *out);
        let routed = Routed { residual, added, norm, normed, weight, bias, spec, out };
        fits.then_some((routed, [product, choice]))
    }
}

#[cfg(test)]
mod tests;
