//! Mixture-of-experts layers: how many experts, how wide, and how a token's are chosen.

use super::{ModelConfig, WIDTH_MAX};
use crate::error::WeightsError;
use std::path::Path;

/// The mixture-of-experts layers of a model. A layer's output for one token is
/// `sum over the chosen e of w_e * down_e(silu(gate_e x) * up_e x)`, plus the shared expert's.
///
/// The router's logits become scores; the `top_k` experts of the largest scores are chosen, and the
/// scores of the chosen (never the bias) make the weights.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Experts of each layer.
    pub experts: usize,
    /// Experts that a token is sent to.
    pub top_k: usize,
    /// Width of one expert's MLP.
    pub expert_width: usize,
    /// Width of the expert that every token passes besides, added with weight 1; 0 without one.
    pub shared_width: usize,
    /// `[layers]`: the layer is a plain MLP of `intermediate_size`.
    pub dense_layers: Vec<bool>,
    /// What turns the router's logits into scores.
    pub scoring: Scoring,
    /// A bias for each expert is added to the scores for the choice, not to the weights.
    pub selection_bias: bool,
    /// Experts lie in this many groups of equal size, in order; 1 is a plain top-k.
    pub groups: usize,
    /// Only experts of this many groups can be chosen: those with the largest sums of their two best
    /// (biased) scores.
    pub groups_kept: usize,
    /// The weights of the chosen are divided by their sum.
    pub normalise: bool,
    /// Multiplies the weights, after the division.
    pub scale: f32,
}

/// What turns a token's router logits into scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scoring {
    /// Over all experts, before the choice.
    Softmax,
    /// Of each expert apart.
    Sigmoid,
}

impl ModelConfig {
    /// Whether a layer's MLP is a plain one of `intermediate_size`; always, in a model without experts.
    /// Panics if there is no such layer.
    pub fn is_dense(&self, layer: usize) -> bool {
        assert!(layer < self.layers, "layer {layer} of {}", self.layers);
        self.moe.as_ref().is_none_or(|moe| moe.dense_layers[layer])
    }
}

impl MoeConfig {
    /// The checks that tie several numbers together; single numbers were bounded when they were read.
    pub(super) fn check(&self, origin: &Path, keys: &MoeKeyNames<'_>) -> Result<(), WeightsError> {
        let wrong = |key: &str, problem: String| Err(WeightsError::config(origin, key, problem));
        let Self { experts, top_k, groups, groups_kept, .. } = *self;
        let sparse_layers = self.dense_layers.iter().filter(|dense| !**dense).count();
        if experts * sparse_layers > ALL_EXPERTS_MAX {
            let problem = format!(
                "is {experts}; times {sparse_layers} layers it passes the bound of {ALL_EXPERTS_MAX}"
            );
            return wrong(keys.experts, problem);
        }
        if top_k > experts {
            return wrong(keys.top_k, format!("is {top_k}, more than {} = {experts}", keys.experts));
        }
        if !experts.is_multiple_of(groups) {
            let problem = format!("is {groups}, which does not divide {} = {experts}", keys.experts);
            return wrong(keys.groups, problem);
        }
        if groups_kept > groups {
            let problem = format!("is {groups_kept}, more than {} = {groups}", keys.groups);
            return wrong(keys.groups_kept, problem);
        }
        let group = experts / groups;
        if groups > 1 && group < 2 {
            let problem = format!(
                "is {groups}, so each group of {} = {experts} has one expert; a group is rated by its best two",
                keys.experts
            );
            return wrong(keys.groups, problem);
        }
        if groups > 1 && self.scoring == Scoring::Softmax {
            let problem = format!("is {groups}; groups of experts are supported with sigmoid scores only");
            return wrong(keys.groups, problem);
        }
        if top_k > groups_kept * group {
            let problem = format!(
                "is {top_k}, but the {groups_kept} kept groups of {group} have {} experts",
                groups_kept * group
            );
            return wrong(keys.top_k, problem);
        }
        Ok(())
    }
}

/// How the file at hand spells the keys that [`MoeConfig::check`] may complain of.
pub(super) struct MoeKeyNames<'a> {
    pub(super) experts: &'a str,
    pub(super) top_k: &'a str,
    pub(super) groups: &'a str,
    pub(super) groups_kept: &'a str,
}

/// Experts of one layer; the largest published count is 512.
pub(super) const EXPERTS_MAX: usize = 1 << 12;
/// Experts of all layers together, each of which has three tensors; the largest published models have
/// about 2^15.
const ALL_EXPERTS_MAX: usize = 1 << 17;
/// Published factors reach 16.
pub(super) const SCALE_MAX: f32 = 1e6;
// The router's matrix and one layer's experts are counted in usize.
const _: () = assert!((WIDTH_MAX * 2).checked_mul(WIDTH_MAX).is_some() && EXPERTS_MAX <= WIDTH_MAX);
