//! Ranks that meet inside their graphs: the layouts of the CPU's tests against the same references, lanes that have
//! different things to do, a member that does not come. Each rank has a GPU of its own where there are enough; else all
//! share one.

use crate::common::hooked::{Hooked, Hooks};
use crate::common::{Answer, Pending, Setup, ask, expert_parallel, goldens, mesh, request, rest, send, tiny};
use crate::{backend, gpus, start, start_in, start_on};
use atom_base::rng::philox;
use atom_base::{LaneId, SamplingParams, Seat, TokenId};
use atom_cuda::{Element, SumOrder};
use atom_engine::{EngineError, Event, Request};
use atom_group::Patience;
use atom_model::{ExchangeChoice, ExpertLayout};
use atom_ops::{Backend, KvDType, OpsError, StepInputs};
use atom_rank::Host;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A mesh with its experts, and what it is called.
struct Layout {
    name: &'static str,
    tp: u16,
    dp: u16,
    dp_attention: bool,
    experts: ExpertLayout,
}

const fn layout(
    name: &'static str,
    (tp, dp, dp_attention): (u16, u16, bool),
    experts: ExpertLayout,
) -> Layout {
    Layout { name, tp, dp, dp_attention, experts }
}

const SLICES: ExpertLayout = ExpertLayout { expert_parallel: false, exchange: ExchangeChoice::Auto };
const SPREAD: ExpertLayout = ExpertLayout { expert_parallel: true, exchange: ExchangeChoice::Dispatch };
const GATHERED: ExpertLayout = ExpertLayout { expert_parallel: true, exchange: ExchangeChoice::Gather };

const TP2: Layout = layout("TP2", (2, 1, false), SLICES);
const DTP2: Layout = layout("DTP2", (2, 1, true), SLICES);
const DEP2: Layout = layout("DEP2", (2, 1, true), SPREAD);
const DEP2_GATHERED: Layout = layout("DEP2 by gather", (2, 1, true), GATHERED);
const DP2: Layout = layout("DP2", (1, 2, false), SLICES);
const DTP4: Layout = layout("DTP4", (4, 1, true), SLICES);
const DEP4: Layout = layout("DEP4", (4, 1, true), SPREAD);

impl Layout {
    fn setup(&self) -> Setup {
        let mesh = mesh(self.tp, self.dp, self.dp_attention);
        // Ranks that share a GPU take turns.
        let patience = Patience { min: Duration::from_secs(20), first: Duration::from_secs(60) };
        Setup { mesh, experts: self.experts, depth: 1, patience, ..Setup::default() }
    }
}

/// All mixtures in both kinds of groups, dense models under each, three ranks whose shares are uneven.
pub(crate) fn agree_with_references() {
    let check = |name: &str, layout: &Layout| {
        goldens::check(name, &start(&layout.setup(), &tiny(name), Element::F32));
        println!("  {name}, {}: agrees with its reference", layout.name);
    };
    for name in goldens::MIXTURES {
        for layout in [&DTP2, &DEP2] {
            check(name, layout);
        }
    }
    check("qwen3_moe", &DEP2_GATHERED);
    check("qwen3_moe", &DTP4);
    check("glm4_moe", &DEP4);
    check("mixtral", &layout("DEP3", (3, 1, true), SPREAD));
    check("minimax_m2", &TP2);
    check("glm4_moe", &layout("TP2, EP2", (2, 1, false), expert_parallel()));
    check("minimax_m2", &layout("TP4", (4, 1, false), SLICES));
    check("llama_bias", &TP2);
    check("llama_tied", &layout("TP3", (3, 1, false), SLICES));
    check("qwen3", &layout("TP2, twice", (2, 2, false), SLICES));
    check("llama", &DTP2);
    check("llama_bias", &layout("DTP3", (3, 1, true), SLICES));
    check("qwen3", &DP2);
}

/// In bf16 a layout is as near to f32 as one rank must be, poison is not seen, and spread experts give the bits of one rank.
pub(crate) fn in_bf16_are_near() {
    let scoring = SamplingParams { prompt_logprobs: Some(4), logprobs: Some(4), ..SamplingParams::greedy() };
    let all = |host: &Host| -> Vec<Answer> {
        (11..17).map(|seed| ask(host, request(&prompt(seed, 83), 24, scoring.clone()))).collect()
    };
    for name in ["qwen3_moe", "glm4_moe", "minimax_m2", "llama"] {
        let exact = all(&start(&Setup::default(), &tiny(name), Element::F32));
        let alone = layout("one rank", (1, 1, false), SLICES);
        let layouts: &[&Layout] = if name == "llama" {
            &[&alone, &TP2, &DTP2]
        } else {
            &[&alone, &TP2, &DTP2, &DEP2, &DEP2_GATHERED]
        };
        let mut one_rank = Vec::new();
        for layout in layouts {
            let answer = |poison| {
                let setup = Setup { poison, kv_dtype: KvDType::BF16, ..layout.setup() };
                all(&start_in(SumOrder::Fixed, &setup, &tiny(name), Element::BF16))
            };
            let plain = answer(false);
            let bits = |answers: &[Answer]| answers.iter().map(Answer::bits).collect::<Vec<_>>();
            assert_eq!(bits(&plain), bits(&answer(true)), "{name}, {}: poison was seen", layout.name);
            match layout.name {
                "one rank" => one_rank = bits(&plain),
                "DEP2" => {
                    assert_eq!(bits(&plain), one_rank, "{name}: spread experts have the bits of one rank")
                }
                _ => {}
            }
            let pairs =
                exact.iter().zip(&plain).flat_map(|(exact, plain)| exact.prompt.iter().zip(&plain.prompt));
            let mut differences: Vec<f32> = pairs.map(|(a, b)| (a.logprob - b.logprob).abs()).collect();
            assert_eq!(differences.len(), 6 * 82);
            differences.sort_by(f32::total_cmp);
            let (mean, median) =
                (differences.iter().sum::<f32>() / differences.len() as f32, differences[6 * 41]);
            println!(
                "  {name}, {}: bf16 log-probabilities differ from f32 by {mean:.4} on average, {median:.4} in the median",
                layout.name
            );
            assert!(median < 0.1 && mean < 0.2, "{name}: {differences:?}");
        }
    }
}

/// Random load with aborts on lanes that are full, empty and in between: answers are those that a request has alone, and
/// every step of every lane is a replay.
pub(crate) fn keep_step_under_load() {
    for layout in [&DEP2, &DTP2, &TP2, &DEP4] {
        let setup = Setup { rows_max: 48, max_num_seqs: 8, pages: 120, max_model_len: 256, ..layout.setup() };
        let host = start_in(SumOrder::Fixed, &setup, &tiny("qwen3_moe"), Element::F32);
        let begin = Instant::now();
        let alone: Vec<Vec<TokenId>> =
            (0..RECIPES).map(|recipe| ask(&host, of(recipe, None)).ids()).collect();
        assert!(alone.iter().all(|ids| !ids.is_empty()), "answers that are none");
        let lanes = setup.mesh.lanes() as u16;
        let (mut right, mut aborted) = (0_u32, 0_u32);
        let mut open: Vec<(u32, Pending)> = Vec::new();
        for number in 0..REQUESTS {
            let [a, b, c, _] = philox([number, 7, 0, 0], [5, 0]);
            let recipe = a % RECIPES;
            // Lane 0 gets most of them; of the others some are idle for long.
            let lane = if b % 3 > 0 { 0 } else { (b / 3) as u16 % lanes };
            let pending = send(&host, of(recipe, Some(lane)));
            open.push((recipe, pending));
            if open.len() > CONCURRENCY {
                let (recipe, pending) = open.swap_remove(c as usize % CONCURRENCY);
                if c % 5 == 0 {
                    host.abort(pending.id);
                    aborted += 1;
                } else {
                    assert_eq!(
                        pending.wait().ids(),
                        alone[recipe as usize],
                        "{}, recipe {recipe}",
                        layout.name
                    );
                    right += 1;
                }
            }
        }
        for (recipe, pending) in open {
            assert_eq!(pending.wait().ids(), alone[recipe as usize], "{}, recipe {recipe}", layout.name);
            right += 1;
        }
        rest(&host);
        let stats = host.stats();
        let replays: Vec<u64> = stats.iter().map(|lane| lane.replays).collect();
        assert!(stats.iter().all(|lane| lane.eager_steps.total() == 0 && lane.counters.pages_held == 0));
        assert!(replays.iter().all(|&n| n == replays[0] && n > 0), "{replays:?}");
        println!(
            "  {}: {right} answers right, {aborted} aborted, {} steps, all replays, {:.1} s",
            layout.name,
            replays[0],
            begin.elapsed().as_secs_f64()
        );
        assert!(right > 0 && aborted > 0);
        assert_eq!(host.shutdown(), Ok(()));
    }
}

/// One request of a recipe.
fn of(recipe: u32, lane: Option<u16>) -> Request {
    let [length, answer, ..] = philox([recipe, 0, 0, 0], [9, 0]);
    let params = match recipe % 3 {
        0 => SamplingParams::greedy(),
        1 => SamplingParams { temperature: 0.8, seed: recipe.into(), ..SamplingParams::default() },
        _ => {
            SamplingParams { temperature: 0.7, top_p: 0.9, seed: recipe.into(), ..SamplingParams::default() }
        }
    };
    let request = request(&prompt(recipe, 1 + length as usize % 150), 1 + answer % 60, params);
    Request { lane: lane.map(LaneId), ..request }
}

/// What each rank asks of the driver over a thousand steps of its lane.
pub(crate) fn steady_steps_are_one_launch_a_rank() {
    const STEPS: u64 = 1000;
    for layout in [&DEP2, &DTP2, &TP2] {
        let setup = Setup { poison: false, max_model_len: 2048, kv_dtype: KvDType::BF16, ..layout.setup() };
        let gpus = gpus(setup.mesh.ranks());
        let drivers: Vec<_> = gpus.iter().map(|gpu| Arc::clone(gpu.driver())).collect();
        let host = start_on(gpus, (Element::BF16, SumOrder::Fastest), &setup, &tiny("qwen3_moe")).unwrap();
        let lanes = setup.mesh.lanes() as u16;
        let all = |length: u32| {
            let sent = |lane| {
                send(
                    &host,
                    Request {
                        lane: Some(LaneId(lane)),
                        ..request(&[5, 6, 7], length, SamplingParams::greedy())
                    },
                )
            };
            let pending: Vec<Pending> = (0..lanes).map(sent).collect();
            pending.into_iter().for_each(|pending| drop(pending.wait()));
            rest(&host);
        };
        all(8);
        let calls = || drivers.iter().map(|driver| driver.counts()).collect::<Vec<_>>();
        let (before, steps) = (calls(), host.stats()[0].replays);
        all(STEPS as u32);
        let steps = host.stats()[0].replays - steps;
        for (rank, (before, after)) in before.iter().zip(calls()).enumerate() {
            let made = after.iter().zip(before).map(|(after, before)| (after.0, after.1 - before.1));
            let made: Vec<(&str, u64)> = made.filter(|(_, count)| *count > 0).collect();
            println!("  {}, rank {rank}, {steps} steps: {made:?}", layout.name);
            let count =
                |name: &str| made.iter().find(|(found, _)| *found == name).map_or(0, |(_, count)| *count);
            let rare = count("cuStreamQuery");
            assert_eq!((count("cuGraphLaunch"), count("cuMemcpyHtoDAsync_v2")), (steps, steps));
            assert_eq!(made.iter().map(|(_, count)| count).sum::<u64>(), 2 * steps + rare, "{made:?}");
            assert!(steps >= STEPS && rare <= steps / 10, "{made:?}");
        }
    }
}

/// A rank that fails, or stays away without a word, in the middle: the others wait no longer than a step may take, and everybody
/// is answered with its name.
pub(crate) fn name_who_does_not_come() {
    for (layout, away) in [(&DEP2, false), (&TP2, false), (&DEP2, true), (&TP2, true)] {
        let patience = Patience { min: Duration::from_secs(2), first: Duration::from_secs(60) };
        let setup = Setup { poison: false, patience, ..layout.setup() };
        let checkpoint = tiny("qwen3_moe");
        let inner = backend(gpus(2), (Element::F32, SumOrder::Fastest), &setup, &checkpoint);
        let steps = Arc::new(AtomicU64::new(0));
        let spoiled = move |seat: &Seat| {
            let after = if seat.rank.0 == 1 { LEAVES_AFTER } else { u64::MAX };
            let hooks = Leaves { after, away, steps: Arc::clone(&steps) };
            Ok(Box::new(Hooked::new(inner(seat)?, hooks)) as Box<dyn Backend>)
        };
        let host = setup.start_with(&checkpoint, spoiled);
        let begin = Instant::now();
        let pending = [0, 1].map(|token| send(&host, request(&[token, 7], 400, SamplingParams::greedy())));
        for pending in pending {
            let end = loop {
                match pending.next() {
                    Event::Failed(EngineError::Rank(text)) => break text,
                    Event::Failed(error) => panic!("{error}"),
                    Event::Finished(_) => panic!("it ended without rank 1"),
                    _ => {}
                }
            };
            println!("  {}: answered after {:.2} s: {end}", layout.name, begin.elapsed().as_secs_f64());
            assert!(end.contains("rank 1") || end.contains("lane 1"), "{end}");
        }
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        assert!(host.health().fault.is_some(), "health is red");
        assert!(host.shutdown().is_err());
    }
}

/// Takes part in so many steps and launches no more: it fails, or is away for longer than anybody waits.
struct Leaves {
    after: u64,
    away: bool,
    steps: Arc<AtomicU64>,
}

impl Hooks for Leaves {
    fn before_replay(&mut self, _: usize, _: &StepInputs<'_>) -> Result<(), OpsError> {
        if self.after == u64::MAX || self.steps.fetch_add(1, Ordering::SeqCst) < self.after {
            return Ok(());
        }
        let since = Instant::now();
        while self.away && since.elapsed() < AWAY {
            std::thread::park_timeout(AWAY);
        }
        Err(OpsError::Device("made to fail".into()))
    }
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|i| philox([i, 0, 0, 0], [seed, 0])[0] % 500).collect()
}

/// Kinds of requests, and how many are sent and are open at a time.
const RECIPES: u32 = 24;
const REQUESTS: u32 = 600;
const CONCURRENCY: usize = 128;
/// How long a rank is away.
const AWAY: Duration = Duration::from_secs(8);
/// Steps before a rank fails.
const LEAVES_AFTER: u64 = 50;
