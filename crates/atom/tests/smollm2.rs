//! A real model against references that transformers computed in f32 on the dequantised weights.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

#[path = "../../atom-rank/tests/common/mod.rs"]
mod common;
#[path = "common/model.rs"]
mod model;
#[allow(dead_code, reason = "the binary's own module; only the tokenizer is used here")]
#[path = "../src/text.rs"]
mod text;

use atom_base::{SamplingParams, TokenId};
use atom_cpu::Activations;
use atom_engine::{Allowance, Grammar, Metered, Spent, TokenConstraint};
use atom_ops::KvDType;
use atom_rank::Host;
use atom_text::{GrammarSource, GrammarVocabulary};
use atom_weights::Checkpoint;
use common::{Answer, Setup, ask, golden, ids, mesh, request, send};
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Two logits closer than this may change places.
const MARGIN: f64 = 0.15;

fn checkpoint() -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(model::smollm2()).unwrap())
}

fn setup(activations: Activations) -> Setup {
    let exact = activations == Activations::F32;
    Setup {
        rows_max: 256,
        max_num_seqs: 256,
        pages: 600,
        max_model_len: 8192,
        threads: 2,
        kv_dtype: if exact { KvDType::F32 } else { KvDType::F16 },
        activations,
        poison: false,
        ..Setup::default()
    }
}

fn read(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden("smollm2").join(name)).unwrap()).unwrap()
}

fn shakespeare() -> Vec<TokenId> {
    let bytes = std::fs::read(golden("smollm2").join("shakespeare.ids.u16")).unwrap();
    bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]).into()).collect()
}

/// Log-probabilities of the prompt's own tokens, with alternatives.
fn score(host: &Host, prompt: &[TokenId], top: u8) -> Answer {
    ask(host, request(prompt, 0, SamplingParams { prompt_logprobs: Some(top), ..SamplingParams::greedy() }))
}

#[test]
fn teacher_forced_argmax_agrees_wherever_the_margin_is_clear() {
    // Not with 8-bit activations: they flip a margin of 0.22 here.
    for activations in [Activations::Int16, Activations::F32] {
        let host = setup(activations).start(&checkpoint());
        let margin = if activations == Activations::F32 { 0.01 } else { MARGIN };
        for prompt in read("greedy.json")["prompts"].as_array().unwrap() {
            let (start, greedy) = (ids(&prompt["ids"]), ids(&prompt["greedy"]));
            let answer = score(&host, &[start.clone(), greedy.clone()].concat(), 2);
            for (i, expected) in greedy.iter().enumerate() {
                let found = answer.prompt[start.len() + i - 1].top.as_slice()[0].0;
                let clear = prompt["margins"][i].as_f64().unwrap() > margin;
                assert!(found == *expected || !clear, "{} token {i}: {found} for {expected}", prompt["name"]);
            }
        }
    }
}

/// The protocol is in the golden folder's README: 33 chunks of 512, the last 255 tokens of each scored.
fn perplexity(activations: Activations) -> f64 {
    let host = setup(activations).start(&checkpoint());
    let text = shakespeare();
    let chunks: Vec<_> = text.chunks_exact(512).collect();
    let mut nll = 0.0;
    for chunk in &chunks {
        let answer = score(&host, chunk, 0);
        nll -= answer.prompt[256..].iter().map(|t| f64::from(t.logprob)).sum::<f64>();
    }
    (nll / (chunks.len() * 255) as f64).exp()
}

#[test]
fn perplexity_with_8_bit_activations_is_within_0_3() {
    let found = perplexity(Activations::Int8);
    let expected = read("perplexity.json")["perplexity"].as_f64().unwrap();
    println!("perplexity {found:.4}, reference {expected:.4}");
    assert!((found - expected).abs() < 0.3, "{found} for {expected}");
}

#[test]
fn perplexity_with_16_bit_activations_is_within_0_02() {
    let found = perplexity(Activations::Int16);
    let expected = read("perplexity.json")["perplexity"].as_f64().unwrap();
    println!("perplexity {found:.4}, reference {expected:.4}");
    assert!((found - expected).abs() < 0.02, "{found} for {expected}");
}

#[test]
fn perplexity_with_f32_activations_is_within_0_02() {
    let found = perplexity(Activations::F32);
    let expected = read("perplexity.json")["perplexity"].as_f64().unwrap();
    println!("perplexity {found:.4}, reference {expected:.4}");
    assert!((found - expected).abs() < 0.02, "{found} for {expected}");
}

#[test]
fn a_prompt_of_4000_tokens_agrees_with_the_reference() {
    let text = &shakespeare()[..4000];
    for (activations, bound) in
        [(Activations::Int8, 0.5), (Activations::Int16, 0.02), (Activations::F32, 0.01)]
    {
        let host = setup(activations).start(&checkpoint());
        for position in read("context.json")["positions"].as_array().unwrap() {
            let at = position["position"].as_u64().unwrap() as usize;
            let sampling = SamplingParams { logprobs: Some(20), ..SamplingParams::greedy() };
            let answer = ask(&host, request(&text[..=at], 1, sampling));
            let norm = position["log_sum_exp"].as_f64().unwrap();
            let top = answer.tokens[0].top.as_slice();
            for (id, logit) in
                ids(&position["top_ids"]).iter().zip(position["top_logits"].as_array().unwrap())
            {
                let expected = logit.as_f64().unwrap() - norm;
                let found = top.iter().find(|(token, _)| token == id).map(|(_, logprob)| f64::from(*logprob));
                let near = found.is_some_and(|found| (found - expected).abs() < bound);
                assert!(near, "position {at} token {id}: {found:?} for {expected}, {activations:?}");
            }
        }
    }
}

#[test]
fn tokenizer_ids_agree_on_every_text() {
    let text = text::Text::load(&checkpoint(), None).unwrap();
    let cases = read("tokenizer_cases.json");
    let cases = cases["texts"].as_array().unwrap();
    assert!(cases.len() >= 200);
    for case in cases {
        let words = case["text"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        assert_eq!(text.tokenizer.encode(words, false).unwrap(), expected, "{words:?}");
        assert_eq!(text.tokenizer.decode(&expected, false), words);
    }
}

/// Split by heads and columns, or by rows and columns: the sums differ in their last bits only.
#[test]
fn every_layout_continues_as_one_rank_does() {
    let prompt = ids(&read("greedy.json")["prompts"][1]["ids"]);
    let continue_with = |mesh| {
        let host = Setup { mesh, threads: 1, ..setup(Activations::F32) }.start(&checkpoint());
        let lanes: Vec<_> =
            (0..3).map(|_| send(&host, request(&prompt, 24, SamplingParams::greedy()))).collect();
        lanes.into_iter().map(|p| p.wait().ids()).collect::<Vec<_>>()
    };
    let expected = vec![ids(&read("greedy.json")["prompts"][1]["greedy"])[..24].to_vec(); 3];
    for (tp, dp, dp_attention) in [(1, 1, false), (3, 1, false), (1, 2, false), (2, 1, true), (3, 1, true)] {
        assert_eq!(continue_with(mesh(tp, dp, dp_attention)), expected, "-tp {tp} -dp {dp} {dp_attention}");
    }
}

#[test]
fn a_repeated_prompt_of_1000_tokens_is_not_computed_again() {
    let host = setup(Activations::Int16).start(&checkpoint());
    let prompt = &shakespeare()[..1000];
    let rows = |host: &Host| host.stats()[0].counters.rows;
    let first = ask(&host, request(prompt, 4, SamplingParams::greedy()));
    let after_first = rows(&host);
    let second = ask(&host, request(prompt, 4, SamplingParams::greedy()));
    assert_eq!(
        (first.cached_tokens, second.cached_tokens),
        (0, 992),
        "62 pages of 16: all but the last rows"
    );
    assert_eq!((after_first, rows(&host) - after_first), (1003, 11));
    assert_eq!(first.bits(), second.bits());
}

/// The next of a sequence of numbers that look drawn.
fn draw(state: &mut u64, below: usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize % below
}

/// Conversations as agents send them: every turn the whole of it, now and then changed in its middle.
#[test]
fn tokens_of_growing_conversations_are_the_same_from_the_cache() {
    let text = text::Text::load(&checkpoint(), None).unwrap();
    let cache = atom_text::TokenCache::new(text.tokenizer.clone(), 256 << 10);
    let words = [
        "the",
        " the",
        " answer",
        "'s",
        " 42",
        "7",
        "\n",
        "\n\n",
        "  ",
        "\t",
        " é",
        "日本語",
        "🦀",
        "<|im_end|>",
        "<|im_start|>",
        "<|im_",
        "start|>",
        "<|endoftext|>",
        " fn main() {",
        "}",
        ".",
        "...",
        " \u{301}",
        "<",
        "|>",
    ];
    let mut state = 7;
    for _ in 0..12 {
        let mut messages = Vec::new();
        for turn in 0..12 {
            let role = if turn % 2 == 0 { "user" } else { "assistant" };
            let content: String =
                (0..draw(&mut state, 150)).map(|_| words[draw(&mut state, words.len())]).collect();
            messages.push(serde_json::json!({"role": role, "content": content}));
            if draw(&mut state, 6) == 0 {
                let at = draw(&mut state, messages.len());
                messages[at]["content"] = words[draw(&mut state, words.len())].into();
            }
            let rendered = text.template.render(&atom_text::TemplateInput {
                messages: &Value::Array(messages.clone()),
                tools: None,
                add_generation_prompt: turn % 2 == 0,
                kwargs: None,
                now_unix_s: 0,
            });
            let rendered = rendered.unwrap();
            let cached = cache.encode(&rendered, false).unwrap();
            assert_eq!(cached, text.tokenizer.encode(&rendered, false).unwrap(), "{rendered:?}");
        }
    }
    let counts = cache.counts();
    assert!(counts.hit_bytes > 2 * counts.miss_bytes && counts.bytes <= 256 << 10, "{counts:?}");
}

/// A person as a schema: what the figures of docs/structured_output.md were measured with (`--nocapture`).
fn person() -> Value {
    serde_json::json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "email": {"type": "string", "format": "email"},
            "tags": {"type": "array", "items": {"enum": ["new", "old", "blue"]}, "maxItems": 3},
            "address": {
                "type": "object",
                "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
                "required": ["street", "city"],
                "additionalProperties": false,
            },
        },
        "required": ["name", "age", "email", "tags", "address"],
        "additionalProperties": false,
    })
}

/// A grammar as the engine takes it.
struct Whole(atom_text::Grammar);

struct Document(atom_text::Constraint);

impl Grammar for Whole {
    fn start(&self) -> Result<Box<dyn TokenConstraint>, String> {
        Ok(Box::new(Document(self.0.start())))
    }
}

impl TokenConstraint for Document {
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
        self.0.mask(allowed)
    }

    fn advance(&mut self, token: TokenId) -> Result<(), String> {
        self.0.advance(token)
    }
}

/// Documents at random through the masks of the whole vocabulary.
#[test]
fn masks_over_the_models_vocabulary_lead_to_documents_of_the_schema() {
    let text = text::Text::load(&checkpoint(), None).unwrap();
    let tokenizer = &text.tokenizer;
    let start = Instant::now();
    let vocabulary = GrammarVocabulary::new(tokenizer, &[]).unwrap();
    let made = start.elapsed();
    let start = Instant::now();
    let grammar = Whole(vocabulary.compile(&GrammarSource::JsonSchema(person())).unwrap());
    let compiled = start.elapsed();
    // As requests are held, of whom one wrote all of these documents.
    let clock = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
    let grammar = Metered::new(Arc::new(grammar), Allowance::OF_A_REQUEST, clock);
    let mut mask = vec![0u32; tokenizer.vocab_size().div_ceil(32)];
    let (mut times, mut ended) = (Vec::new(), 0);
    for document in 0..40 {
        let (mut constraint, mut tokens) = (grammar.start().unwrap(), Vec::new());
        while tokens.len() < 300 {
            let start = Instant::now();
            mask.fill(0);
            constraint.mask(&mut mask).unwrap();
            times.push(start.elapsed());
            let allowed: Vec<TokenId> =
                (0..mask.len() as u32 * 32).filter(|t| mask[*t as usize / 32] >> (t % 32) & 1 == 1).collect();
            let draw = atom_base::rng::philox([tokens.len() as u32, document, 0, 0], [7, 0])[0];
            // What closes a string or a list comes first, every second time: documents come to an end.
            let closes = |t: &&TokenId| {
                draw.is_multiple_of(2)
                    && matches!(tokenizer.token_bytes(**t), Some(b"\"" | b"}" | b"]" | b"@" | b"\",") | None)
            };
            let token = *allowed.iter().find(closes).unwrap_or(&allowed[draw as usize / 2 % allowed.len()]);
            constraint.advance(token).unwrap();
            if tokenizer.end_tokens().contains(&token) {
                let written = tokenizer.decode(&tokens, false);
                let value: Value =
                    serde_json::from_str(&written).unwrap_or_else(|e| panic!("{e}: {written}"));
                assert!(
                    value["age"].as_u64().unwrap() <= 130 && value["address"]["city"].is_string(),
                    "{value}"
                );
                ended += 1;
                break;
            }
            tokens.push(token);
        }
    }
    assert!(ended > 0, "no document came to its end");
    let Spent { time, masks } = grammar.spent();
    let tenth = Allowance { each: Allowance::OF_A_REQUEST.each / 10, beside: Allowance::OF_A_REQUEST.beside };
    assert_eq!(tenth.verdict(Spent { time, masks }), Ok(()), "an honest grammar comes near its allowance");
    times.sort();
    let mean = times.iter().sum::<std::time::Duration>() / times.len() as u32;
    let at = |share: usize| times[times.len() * share / 1000];
    println!(
        "vocabulary {made:?}, compiled {compiled:?}; {} masks of {} tokens: mean {mean:?}, median {:?}, p99 {:?}, \
         most {:?}; {ended} documents",
        times.len(),
        tokenizer.vocab_size(),
        at(500),
        at(990),
        times[times.len() - 1],
    );
}
