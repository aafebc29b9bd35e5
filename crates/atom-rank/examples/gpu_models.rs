//! Whole models on a GPU: the golden models in f32 against their references, padding that can't be seen, the same
//! tokens as on the CPU, the same bits where sums have a fixed order, and what a steady step asks of the driver.
//!
//! `gpu_models [CHECK ..]`; `ATOM_TESTS_DATA` says where tests-data lies. Ends in `N passed, N failed`.
#![allow(clippy::unwrap_used, reason = "a failed check is a panic that is counted")]

#[path = "gpu_models/bits.rs"]
mod bits;
#[path = "../tests/common/mod.rs"]
mod common;
#[path = "gpu_models/faults.rs"]
mod faults;
#[path = "gpu_models/fp8_cache.rs"]
mod fp8_cache;
#[path = "gpu_models/grammars.rs"]
mod grammars;
#[path = "gpu_models/groups.rs"]
mod groups;

use atom_base::{SamplingParams, Seat};
use atom_cuda::{
    CudaBackend, Element, Gpu, GpuOptions, Peers, Place, Plan, Properties, Search, Sizer, SumOrder,
};
use atom_model::Model;
use atom_ops::{Backend, KvDType, OpsError};
use atom_rank::{Host, HostError};
use atom_weights::Checkpoint;
use common::{Setup, ask, fp8, goldens, greedy, request, rest, tiny};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Instant;

const CHECKS: &[(&str, fn())] = &[
    ("goldens", goldens_in_f32),
    ("bf16", bf16_is_near_and_poison_is_not_seen),
    ("fp8_cache", fp8_cache::is_that_of_the_cpu),
    ("fp8_bits", fp8_cache::bits_stay_and_bf16_is_near),
    ("fp8", fp8_is_near_what_its_weights_mean),
    ("sampling", sampled_tokens_are_those_of_the_cpu),
    ("deterministic", bits::of_golden_models_are_the_same_in_a_fixed_order),
    ("shapes", bits::of_larger_shapes_are_the_same_in_a_fixed_order),
    ("otherwise", bits::differ_where_they_may),
    ("calls", a_steady_step_is_one_launch),
    ("experts", different_experts_are_those_of_the_cpu),
    ("grammars", grammars::grammars),
    ("groups", groups::agree_with_references),
    ("groups_bf16", groups::in_bf16_are_near),
    ("groups_load", groups::keep_step_under_load),
    ("groups_calls", groups::steady_steps_are_one_launch_a_rank),
    ("groups_faults", groups::name_who_does_not_come),
    ("faults", faults::faults),
];

fn main() -> ExitCode {
    if let Some(code) = faults::run_as_child() {
        return code;
    }
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let (mut passed, mut failed) = (0, 0);
    for (name, check) in CHECKS {
        if !wanted.is_empty() && !wanted.iter().any(|wanted| wanted == name) {
            continue;
        }
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(check));
        let verdict = if outcome.is_ok() { "passed" } else { "FAILED" };
        *(if outcome.is_ok() { &mut passed } else { &mut failed }) += 1;
        println!("{name}: {verdict} in {:.1} s", start.elapsed().as_secs_f64());
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn goldens_in_f32() {
    for name in goldens::MODELS.iter().chain(goldens::MIXTURES) {
        let host = start(&Setup::default(), &tiny(name), Element::F32);
        goldens::check(name, &host);
        println!("  {name} agrees with its reference");
    }
    for (rows_max, page_size) in [(16, 16), (17, 32), (301, 64)] {
        let setup = Setup { rows_max, page_size, ..Setup::default() };
        let host = start(&setup, &tiny("qwen2"), Element::F32);
        goldens::check("qwen2", &host);
    }
}

/// What `--poison-padding` fills with NaN must change no bit; bf16 must stay near f32.
fn bf16_is_near_and_poison_is_not_seen() {
    for name in goldens::MODELS.iter().chain(goldens::MIXTURES) {
        let prompt: Vec<u32> = (0..83).map(|i| (i * 37 + 11) % 512).collect();
        let scoring =
            SamplingParams { prompt_logprobs: Some(4), logprobs: Some(4), ..SamplingParams::greedy() };
        let answer = |order, poison| {
            let setup = Setup { poison, kv_dtype: KvDType::BF16, ..Setup::default() };
            let host = start_in(order, &setup, &tiny(name), Element::BF16);
            ask(&host, request(&prompt, 24, scoring.clone()))
        };
        let [fixed, plain] = [SumOrder::Fixed, SumOrder::Fastest].map(|order| {
            let plain = answer(order, false);
            assert_eq!(plain.bits(), answer(order, true).bits(), "{name}, {order:?}: poison was seen");
            plain
        });
        let host = start(&Setup::default(), &tiny(name), Element::F32);
        let exact = ask(&host, request(&prompt, 0, scoring));
        let means = [plain, fixed].map(|rounded| {
            let mut differences: Vec<f32> = exact
                .prompt
                .iter()
                .zip(&rounded.prompt)
                .map(|(a, b)| (a.logprob - b.logprob).abs())
                .collect();
            let mean = differences.iter().sum::<f32>() / differences.len() as f32;
            differences.sort_by(f32::total_cmp);
            // Logits have a standard deviation of about 3; bf16 keeps 8 bits, so each rounding is worth some 1e-2. Where
            // rounding tips a router, a whole expert is another one: a few tokens of a mixture, far off.
            let median = differences[differences.len() / 2];
            assert!(median < 0.1 && mean < 0.2, "{name}: {differences:?}");
            mean
        });
        println!("  {name}: bf16 log-probabilities of a prompt differ from f32 by {means:.4?} on average");
    }
}

/// FP8 checkpoints: in f32 they are what their weights mean; else weights stay codes where kernels take them, and inputs of
/// their products become codes. Padding is not seen there either, and buckets of few rows and of many agree.
fn fp8_is_near_what_its_weights_mean() {
    for form in ["tensor", "channel", "block"] {
        for model in ["qwen3_fp8", "qwen3_moe_fp8"] {
            let name = format!("{model}_{form}");
            let checkpoint = fp8::checkpoint(&name);
            let prompt: Vec<u32> = (0..83).map(|i| (i * 37 + 11) % 504).collect();
            let scoring =
                SamplingParams { prompt_logprobs: Some(4), logprobs: Some(4), ..SamplingParams::greedy() };
            let host = start(&Setup::default(), &checkpoint, Element::F32);
            goldens::check(&name, &host);
            let exact = ask(&host, request(&prompt, 0, scoring.clone()));
            drop(host);
            for rows_max in [16, 301] {
                let bits = |poison: bool| {
                    let setup = Setup { poison, rows_max, kv_dtype: KvDType::BF16, ..Setup::default() };
                    let host = start(&setup, &checkpoint, Element::BF16);
                    ask(&host, request(&prompt, 24, scoring.clone()))
                };
                let (plain, poisoned) = (bits(false), bits(true));
                assert_eq!(plain.bits(), poisoned.bits(), "{name}: poison was seen");
                let differences: Vec<f32> = exact
                    .prompt
                    .iter()
                    .zip(&plain.prompt)
                    .map(|(a, b)| (a.logprob - b.logprob).abs())
                    .collect();
                let mean = differences.iter().sum::<f32>() / differences.len() as f32;
                println!(
                    "  {name}, steps of {rows_max} rows: log-probabilities differ from f32 by {mean:.4} on average"
                );
                // A code has 4 bits: an input of a product is off by 2.6% on average, and so is what the product gives.
                // Seven products stand between a token and its logits, whose standard deviation is about 3: 0.2, which
                // normalisation halves or doubles.
                assert!(mean < 0.4, "{name}: {differences:?}");
            }
        }
    }
}

/// Philox and exact sums of weights: the same draws, where the logits are near enough. Greedy with penalties and
/// biases too.
fn sampled_tokens_are_those_of_the_cpu() {
    let checkpoint = tiny("qwen3");
    let setup = Setup::default();
    let gpu = start(&setup, &checkpoint, Element::F32);
    let cpu = setup.start(&checkpoint);
    let prompt: Vec<u32> = (0..40).map(|i| (i * 53 + 7) % 512).collect();
    let base = SamplingParams { temperature: 0.8, seed: 5, ..SamplingParams::default() };
    let cases = [
        SamplingParams { ..base.clone() },
        SamplingParams { top_p: 0.9, ..base.clone() },
        SamplingParams { top_k: 20, min_p: 0.05, ..base.clone() },
        SamplingParams {
            repetition_penalty: 1.3,
            frequency_penalty: 0.5,
            presence_penalty: 0.3,
            ..base.clone()
        },
        SamplingParams { logit_bias: Box::new([(3, 8.0), (400, -100.0)]), ..base },
        SamplingParams { repetition_penalty: 1.5, ..SamplingParams::greedy() },
    ];
    for (i, params) in cases.into_iter().enumerate() {
        let tokens = |host: &Host| ask(host, request(&prompt, 40, params.clone())).ids();
        assert_eq!(tokens(&gpu), tokens(&cpu), "case {i}");
    }
}

/// Counts of calls over 1,000 decode steps: of the driver, and of cuBLASLt, which would launch by itself.
fn a_steady_step_is_one_launch() {
    const STEPS: u64 = 1000;
    let setup = Setup { poison: false, depth: 1, max_model_len: 2048, ..Setup::default() };
    for element in [Element::F32, Element::BF16] {
        let setup = Setup { kv_dtype: element_of_cache(element), ..setup.clone() };
        let gpu = the_gpu();
        let (driver, cublaslt) = (Arc::clone(gpu.driver()), Arc::clone(gpu.cublaslt()));
        let calls = || [driver.counts(), cublaslt.counts()].concat();
        let host = start_on(vec![gpu], (element, SumOrder::Fastest), &setup, &tiny("qwen3_moe")).unwrap();
        greedy(&host, &[1, 2, 3], 8);
        let before = calls();
        // The first token comes with the prompt's step.
        greedy(&host, &[5, 6, 7], STEPS as u32);
        let made: Vec<(&str, u64)> =
            calls().iter().zip(&before).map(|(after, before)| (after.0, after.1 - before.1)).collect();
        println!("  calls over {STEPS} steps in {element:?}:");
        for (name, count) in made.iter().filter(|(_, count)| *count > 0) {
            println!("    {name:<24} {count:>6}");
        }
        let none: Vec<&str> = made.iter().filter(|(_, count)| *count == 0).map(|(name, _)| *name).collect();
        println!("    none of the other {}: {}", none.len(), none.join(", "));
        let count = |name: &str| made.iter().find(|(n, _)| *n == name).unwrap().1;
        assert_eq!(count("cuGraphLaunch"), STEPS);
        assert_eq!(count("cuMemcpyHtoDAsync_v2"), STEPS);
        // Asked only of a step that takes longer than it should.
        let rare = count("cuStreamQuery");
        assert!(rare <= STEPS / 100, "{rare} questions after failures");
        let all: u64 = made.iter().map(|(_, count)| count).sum();
        assert_eq!(all, 2 * STEPS + rare, "a copy up and a launch each, and nothing else: {made:?}");
    }
}

fn element_of_cache(element: Element) -> KvDType {
    match element {
        Element::F32 => KvDType::F32,
        Element::BF16 => KvDType::BF16,
    }
}

/// Step by step, of prompts and of answers; and none while nobody asks.
fn different_experts_are_those_of_the_cpu() {
    let checkpoint = tiny("qwen3_moe");
    let setup = Setup { count_experts: true, ..Setup::default() };
    let prompt: Vec<u32> = (0..100).map(|i| (i * 41 + 3) % 512).collect();
    let counted = |host: &Host, counts: bool| {
        host.count_experts(counts);
        assert!(host.start_profile());
        greedy(host, &prompt, 30);
        rest(host);
        let (steps, _) = host.stop_profile().unwrap();
        steps.iter().map(|step| (step.prefill_rows, step.distinct_experts)).collect::<Vec<_>>()
    };
    let gpu = start(&setup, &checkpoint, Element::F32);
    let cpu = setup.start(&checkpoint);
    let found = counted(&gpu, true);
    assert!(found.iter().all(|(_, distinct)| *distinct > 0), "{found:?}");
    assert_eq!(found, counted(&cpu, true));
    // The prompt is in the cache by now, and computed again from its last page on.
    assert!(counted(&gpu, false).iter().all(|(_, distinct)| *distinct == 0));
}

/// A GPU for each rank; where there are fewer, all share the first.
fn gpus(ranks: usize) -> Vec<Gpu> {
    let search = Search::from_env(|name| std::env::var_os(name));
    let is_shared = Gpu::count(&search).unwrap() < ranks;
    let open = |rank| {
        let options = GpuOptions {
            search: search.clone(),
            ordinal: if is_shared { 0 } else { rank },
            sharers: if is_shared { ranks as u32 } else { 1 },
            cache: Some(std::env::temp_dir().join("atom-gpu-models-kernels")),
        };
        Gpu::open(&options).unwrap_or_else(|error| panic!("{error}"))
    };
    (0..ranks).map(open).collect()
}

fn the_gpu() -> Gpu {
    gpus(1).remove(0)
}

fn start(setup: &Setup, checkpoint: &Arc<Checkpoint>, element: Element) -> Host {
    start_in(SumOrder::Fastest, setup, checkpoint, element)
}

fn start_in(order: SumOrder, setup: &Setup, checkpoint: &Arc<Checkpoint>, element: Element) -> Host {
    start_on(gpus(setup.mesh.ranks()), (element, order), setup, checkpoint).unwrap()
}

fn start_on(
    gpus: Vec<Gpu>,
    numbers: (Element, SumOrder),
    setup: &Setup,
    checkpoint: &Arc<Checkpoint>,
) -> Result<Host, HostError> {
    Host::start(
        &setup.config(),
        checkpoint,
        backend(gpus, numbers, setup, checkpoint),
        Arc::new(|_, _, _| {}),
    )
}

/// Gives each rank its GPU.
fn backend(
    gpus: Vec<Gpu>,
    numbers: (Element, SumOrder),
    setup: &Setup,
    checkpoint: &Arc<Checkpoint>,
) -> impl Fn(&Seat) -> Result<Box<dyn Backend>, OpsError> + Send + Sync + 'static {
    let mesh = setup.mesh;
    let plans: Vec<Plan> = gpus
        .iter()
        .zip(mesh.seats())
        .map(|(gpu, seat)| plan(setup, checkpoint, numbers, gpu.device().properties(), &seat))
        .collect();
    let gpus: Mutex<Vec<Option<Gpu>>> = Mutex::new(gpus.into_iter().map(Some).collect());
    let peers = Arc::new(Peers::default());
    move |seat: &Seat| {
        let rank = usize::from(seat.rank.0);
        let gpu = gpus.lock().unwrap()[rank].take();
        let gpu = gpu.ok_or_else(|| OpsError::Device("the rank has its GPU".into()))?;
        Ok(Box::new(CudaBackend::new(gpu, &plans[rank], Place::new(&peers, &mesh, seat))?)
            as Box<dyn Backend>)
    }
}

/// As `atom` plans it: everything is counted before anything is taken.
fn plan(
    setup: &Setup,
    checkpoint: &Arc<Checkpoint>,
    (element, order): (Element, SumOrder),
    properties: &Properties,
    seat: &Seat,
) -> Plan {
    let config = setup.config();
    let members = Place::new(&Arc::default(), &config.mesh, seat).members();
    let mut sizer = Sizer::new(element, properties).with_order(order).meeting(members);
    let layout = (&config.mesh, config.experts);
    let model = Model::load(checkpoint, layout, seat, &mut sizer, &|_, _| {}).unwrap();
    let reserve = config.reserve(&model, seat);
    for bucket in config.lattice.buckets() {
        sizer.add(&config.recording(&model, seat, bucket), &reserve).unwrap();
    }
    Plan { sizes: sizer.sizes(&reserve), pages: setup.pages }
}
