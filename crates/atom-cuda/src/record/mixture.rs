//! Routers and experts.

use super::{Scene, equal};
use crate::element::Element;
use crate::fp8::Stored;
use crate::fuse::{AddedExperts, Routed};
use crate::launch::experts::{Experts, ExpertsArrays, ExpertsMaps, ExpertsPath, ExpertsThen};
use crate::launch::route::{self, EXPERTS_MAX, TOP_K_MAX};
use crate::launch::router_few::{self, RouterArrays};
use crate::memory::Address;
use crate::plan::experts_shape;
use crate::weights::Loaded;
use atom_ops::{Buf, Op, OpsError, RouteSpec, Weight};

impl Scene<'_> {
    pub(super) fn route(
        &self,
        logits: Buf,
        bias: Option<Weight>,
        spec: &RouteSpec,
        out: Buf,
    ) -> Result<(), OpsError> {
        if spec.experts > EXPERTS_MAX || spec.top_k > TOP_K_MAX {
            return Err(OpsError::Weights(format!(
                "{} of {} experts a row; a GPU chooses at most {TOP_K_MAX} of {EXPERTS_MAX}",
                spec.top_k, spec.experts
            )));
        }
        let bias = bias.map_or(Ok(Address::NULL), |bias| self.vector(bias, spec.experts))?;
        let (scores, granted) = ((self.at(logits), bias), self.granted());
        // SAFETY: see `op`.
        unsafe { route::route(&self.with.queue, spec, scores, self.at(out), granted, self.real(logits)) }?;
        if let Some(counts) = self.counts {
            // SAFETY: see `op`.
            unsafe { route::count_experts(&self.with.queue, spec, self.at(out), self.real(out), counts) }?;
        }
        Ok(())
    }

    pub(super) fn router(&self, routed: &Routed<'_>) -> Result<(), OpsError> {
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
            granted: self.granted(),
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
    pub(super) fn experts(&self, op: &Op, added: Option<&AddedExperts<'_>>) -> Result<(), OpsError> {
        let &Op::Experts { x, routes, gate_up, down, ref spec, gated, sums, out, .. } = op else {
            unreachable!("called for experts");
        };
        let hidden = self.spec(x).width;
        // What is not complete yet stays exact.
        if added.is_none() && self.element(out) != Element::F32 {
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
            Some(&AddedExperts { residual, norm: (weight, eps, normed), .. }) => {
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
}
