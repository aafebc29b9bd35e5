//! A lane that is alone, and requests to it.

#![allow(dead_code, reason = "each test uses a part")]

pub(crate) mod group;

use atom_base::{RequestId, SamplingParams, StopParams, TokenId};
use atom_engine::{Request, SchedulerConfig};
use atom_group::{Bucket, Lattice, LatticeArgs};
use atom_sim::{FakeModel, Lane};
use std::sync::Arc;

/// Never ends by itself.
pub(crate) const MODEL: FakeModel = FakeModel { vocab: 40, eos: 39, eos_per_mille: 0, nan_per_mille: 0 };

/// Sizes of a small lane.
pub(crate) fn config(
    pages: usize,
    page_size: usize,
    max_num_seqs: usize,
    rows_max: usize,
) -> SchedulerConfig {
    SchedulerConfig {
        pages,
        page_size,
        max_num_seqs,
        rows_max,
        max_model_len: (pages - 1) * page_size,
        prefix_cache: true,
        eos: Box::new([MODEL.eos]),
    }
}

/// A lane and its largest bucket.
pub(crate) fn lane(config: SchedulerConfig) -> (Lane, Bucket) {
    let (rows_max, max_num_seqs) = (config.rows_max as u32, config.max_num_seqs as u32);
    let lattice = Lattice::new(&LatticeArgs { rows_max, max_num_seqs, ..LatticeArgs::default() }).unwrap();
    (Lane::new(config, MODEL), lattice.top())
}

/// `tokens` tokens that nobody else's prompt starts with, and as many of continuation as asked for.
pub(crate) fn request(id: u64, tokens: usize, max_tokens: u32, sampling: SamplingParams) -> Request {
    let prompt = (0..tokens).map(|i| ((id as usize * 7 + i * i) % 39) as TokenId);
    Request {
        id: RequestId(id),
        prompt: prompt.collect(),
        sampling: Arc::new(sampling),
        stop: StopParams { max_tokens, stop_token_ids: Box::default(), ignore_eos: true },
        lane: None,
        session: None,
        grammar: None,
    }
}

/// Samplings that keep state of their own between steps.
pub(crate) fn samplings() -> [SamplingParams; 3] {
    [
        SamplingParams::greedy(),
        SamplingParams { frequency_penalty: 0.5, logprobs: Some(2), ..SamplingParams::default() },
        SamplingParams { prompt_logprobs: Some(1), presence_penalty: 0.5, ..SamplingParams::default() },
    ]
}
