//! Invariant 10 on a GPU: with sums in a fixed order a request has the same tokens and the same bits of log-probabilities
//! alone, among others, in other steps, warm, and after a preemption. Without it, what differs is told and nothing fails.

use crate::common::{Setup, ask, golden, request, send, tiny};
use crate::start_in;
use atom_base::rng::philox;
use atom_base::{SamplingParams, TokenId};
use atom_cuda::{Element, SumOrder};
use atom_engine::Request;
use atom_ops::KvDType;
use atom_weights::Checkpoint;
use std::sync::Arc;

/// Ids and the bits of their log-probabilities, of a prompt and of an answer.
type Bits = Vec<(TokenId, u32)>;

/// A model with a length of prompt.
struct Subject {
    name: String,
    checkpoint: Arc<Checkpoint>,
    element: Element,
    prompt_len: usize,
}

pub(crate) fn of_golden_models_are_the_same_in_a_fixed_order() {
    let bf16 = ["qwen3", "qwen3_moe", "glm4_moe", "llama_bias", "minimax_m2"];
    bf16.iter().for_each(|name| Subject::golden(name, Element::BF16).must_be_the_same());
    let f32 = ["qwen3", "qwen3_moe", "llama_bias"];
    f32.iter().for_each(|name| Subject::golden(name, Element::F32).must_be_the_same());
}

pub(crate) fn of_larger_shapes_are_the_same_in_a_fixed_order() {
    [Subject::dense(), Subject::mixture()].iter().for_each(Subject::must_be_the_same);
}

/// Information: how many of the same runs differ where each bucket has its fastest kernels.
pub(crate) fn differ_where_they_may() {
    for subject in [Subject::golden("qwen3", Element::BF16), Subject::dense(), Subject::mixture()] {
        let runs = subject.runs(SumOrder::Fastest);
        println!(
            "  {}: of {} runs without a fixed order these differ: {:?}",
            subject.name,
            runs.len(),
            differing(&runs)
        );
    }
}

fn differing<'a>(runs: &[(&'a str, bool)]) -> Vec<&'a str> {
    runs.iter().filter(|(_, same)| !same).map(|(what, _)| *what).collect()
}

impl Subject {
    fn must_be_the_same(&self) {
        let runs = self.runs(SumOrder::Fixed);
        let differ = differing(&runs);
        assert!(differ.is_empty(), "{}: other bits {differ:?}", self.name);
        println!("  {}: the same bits {} times over", self.name, runs.len());
    }

    fn golden(name: &str, element: Element) -> Self {
        Self { name: format!("{name} in {element:?}"), checkpoint: tiny(name), element, prompt_len: 45 }
    }

    /// The shape of SmolLM2-135M, fewer layers.
    fn dense() -> Self {
        let changes = serde_json::json!({
            "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
            "head_dim": 64, "num_hidden_layers": 4, "vocab_size": 49152,
        });
        Self::changed("llama", "a dense shape", &changes)
    }

    /// So many choices that large steps multiply experts in clusters, and small ones don't.
    fn mixture() -> Self {
        let changes = serde_json::json!({
            "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_experts_per_tok": 4,
        });
        Self::changed("qwen3_moe", "a mixture", &changes)
    }

    fn changed(of: &str, name: &str, changes: &serde_json::Value) -> Self {
        let text = std::fs::read_to_string(golden(of).join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        let checkpoint = Arc::new(Checkpoint::synthetic(&config.to_string(), 3).unwrap());
        Self { name: name.into(), checkpoint, element: Element::BF16, prompt_len: 150 }
    }

    fn setup(&self) -> Setup {
        let kv_dtype = if self.element == Element::BF16 { KvDType::BF16 } else { KvDType::F32 };
        Setup { kv_dtype, ..Setup::default() }
    }

    /// Ways to run the request, and whether its bits are those that it has alone.
    fn runs(&self, order: SumOrder) -> Vec<(&'static str, bool)> {
        let start = |setup: &Setup| start_in(order, setup, &self.checkpoint, self.element);
        let host = start(&self.setup());
        let cold = ask(&host, self.probe());
        let warm = ask(&host, self.probe());
        assert!(cold.cached_tokens == 0 && warm.cached_tokens > 0, "{}", self.name);
        let (alone, scores) = (cold.bits(), ask(&host, self.scored()).bits());
        let mut runs = vec![("warm", warm.bits() == alone)];

        let setup = Setup { max_num_seqs: 32, rows_max: 128, depth: 1, ..self.setup() };
        runs.push(("among 31 others", self.among(&start(&setup), 31, self.prompt_len / 2) == alone));
        for (what, rows_max, sizes, depth) in [
            ("chunks of 19 rows", 19, None, 0),
            ("chunks of 40 rows", 40, None, 1),
            ("steps of 64 or 200 rows", 256, Some(vec![64, 200]), 0),
        ] {
            let host = start(&Setup { rows_max, sizes, depth, ..self.setup() });
            let found = [self.scored(), self.probe()].map(|request| ask(&host, request).bits());
            runs.push((what, found == [scores.clone(), alone.clone()]));
        }

        // Pages for not quite three of five such requests.
        let each = (self.prompt_len + 30).div_ceil(16);
        let setup = Setup { pages: each * 14 / 5 + 1, max_model_len: 16 * (each + 3), ..self.setup() };
        let host = start(&setup);
        runs.push(("after a preemption", self.among(&host, 4, self.prompt_len - 5) == alone));
        assert!(host.stats()[0].counters.preempted > 0, "{}: nobody was preempted", self.name);
        runs
    }

    /// The request's bits with `count` others, some in front of it and some behind.
    fn among(&self, host: &atom_rank::Host, count: u32, len: usize) -> Bits {
        let other = |i: u32| {
            let len = if count > 8 { 3 + i as usize % len } else { len };
            send(host, request(&prompt(200 + i, len), 50, sampled(i.into())))
        };
        let before: Vec<_> = (0..count / 2).map(other).collect();
        let probe = send(host, self.probe());
        let behind: Vec<_> = (count / 2..count).map(other).collect();
        let bits = probe.wait().bits();
        before.into_iter().chain(behind).for_each(|other| assert_eq!(other.wait().tokens.len(), 50));
        bits
    }

    fn probe(&self) -> Request {
        request(&prompt(7, self.prompt_len), 30, sampled(42))
    }

    fn scored(&self) -> Request {
        let sampling =
            SamplingParams { prompt_logprobs: Some(2), logprobs: Some(2), ..SamplingParams::greedy() };
        request(&prompt(9, self.prompt_len), 8, sampling)
    }
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|i| philox([i, 0, 0, 0], [seed, 0])[0] % 500).collect()
}

fn sampled(seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 0.9,
        top_p: 0.95,
        frequency_penalty: 0.3,
        repetition_penalty: 1.1,
        seed,
        logprobs: Some(3),
        ..SamplingParams::default()
    }
}
