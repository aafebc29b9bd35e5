//! Three figures of a machine: what a step costs beside its replay, how much of steps is padding under a
//! mixed load, and what four ranks that share experts make of the load of one rank on the same cores.
//!
//! `cargo run --release -p atom-rank --example figures`
#![allow(clippy::unwrap_used, reason = "in what it shares with tests")]

#[path = "../tests/common/mod.rs"]
mod common;

use atom_base::SamplingParams;
use atom_engine::{Event, Request};
use atom_group::{Alignment, Policy};
use atom_rank::{Host, LaneStats};
use atom_weights::Checkpoint;
use common::{Setup, expert_parallel, mesh, request, rest, tiny};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

fn main() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{cores} cores; numbers are worth what else the machine does meanwhile");
    for lanes in [1, 2] {
        host_time(lanes);
    }
    for alignment in [None, Some(Alignment::default())] {
        padding(alignment);
    }
    shared_experts(cores);
}

/// Poison is for tests.
fn plain() -> Setup {
    Setup { poison: false, ..Setup::default() }
}

fn dep(lanes: u16) -> Setup {
    Setup { mesh: mesh(lanes, 1, true), experts: expert_parallel(), ..plain() }
}

/// Time of a step beside the replay, with 256 requests decoding in every lane.
fn host_time(lanes: u16) {
    const RUNNING: usize = 256;
    let base = if lanes == 1 { plain() } else { dep(lanes) };
    let setup = Setup { max_num_seqs: RUNNING as u32, rows_max: 512, pages: 8200, ..base };
    let host = setup.start(&tiny("qwen3_moe"));
    let requests = (0..RUNNING as u32 * u32::from(lanes)).map(|seed| made(seed, 8, 480));
    let (ends, _) = channel();
    requests.for_each(|request| submit(&host, request, &ends));
    wait_until(&host, |lane| lane.counters.generated_tokens >= 2 * RUNNING as u64);
    let (start, before) = (Instant::now(), host.stats());
    wait_until(&host, |lane| lane.replays >= before[0].replays + 400);
    let (wall, after) = (start.elapsed(), host.stats());
    assert!(after.iter().all(|lane| lane.counters.running == RUNNING), "all still run");
    let (before, after) = (before[0], after[0]);
    let steps = (after.replays - before.replays) as u32;
    let replay = (after.replay_time - before.replay_time) / steps;
    let exchange = (after.exchange_wait - before.exchange_wait) / steps;
    let rest = (wall / steps).saturating_sub(replay + exchange);
    println!(
        "host time with {RUNNING} running requests in each lane, lanes {lanes}: step {:?} = replay {replay:?} + exchange {exchange:?} \
         (waiting for other lanes included) + want, settle, commit, apply, post {rest:?}",
        wall / steps
    );
}

/// Prompts of 8 to 300 tokens and answers of 4 to 80, 64 at once over four lanes.
fn padding(alignment: Option<Alignment>) {
    let policy = Policy { alignment, ..Policy::default() };
    let setup = Setup { max_num_seqs: 32, rows_max: 256, pages: 1200, record_all: false, policy, ..dep(4) };
    let host = setup.start(&tiny("qwen3_moe"));
    let draw = |seed: u32, n: u32| atom_base::rng::philox([seed, 1, 0, 0], [2, 3])[0] % n;
    let mut requests = (0..1500).map(|i| made(i, 8 + draw(2 * i, 293), 4 + draw(2 * i + 1, 77)));
    let start = Instant::now();
    let (sender, ends) = channel();
    let mut open = 0;
    loop {
        let next: Vec<_> = requests.by_ref().take(64 - open).collect();
        open += next.len();
        next.into_iter().for_each(|request| submit(&host, request, &sender));
        if open == 0 {
            break;
        }
        let end = ends.recv().expect("a sender is here");
        assert!(matches!(end, Event::Finished(_)), "{end:?}");
        open -= 1;
    }
    let wall = start.elapsed();
    rest(&host);
    let stats = host.stats();
    let sum = |of: fn(&LaneStats) -> u64| stats.iter().map(of).sum::<u64>() as f64;
    let (real, padding) = (sum(|l| l.real_rows), sum(|l| l.padding_rows));
    let (replays, eager) = (sum(|l| l.replays), sum(|l| l.eager_steps.total()));
    println!(
        "mixed load, 4 lanes, alignment {}: {:.1}% of the rows of buckets are padding; {:.1}% of {} steps are replays, {} buckets \
         recorded; {:.1}% of {wall:.1?} in replays",
        if alignment.is_some() { "on" } else { "off" },
        100.0 * padding / (real + padding),
        100.0 * replays / (replays + eager),
        stats[0].replays + stats[0].eager_steps.total(),
        stats[0].recordings,
        100.0 * stats[0].replay_time.as_secs_f64() / wall.as_secs_f64(),
    );
}

/// Tokens a second of one rank with all cores, and of four ranks with as many, in turns.
fn shared_experts(cores: usize) {
    let checkpoint = Arc::new(medium());
    let base = Setup { rows_max: 128, pages: 400, prefix_cache: false, ..plain() };
    let one = Setup { max_num_seqs: 32, threads: cores, ..base.clone() }.start(&checkpoint);
    let four = Setup {
        mesh: mesh(4, 1, true),
        experts: expert_parallel(),
        max_num_seqs: 8,
        threads: cores.div_ceil(4),
        ..base
    }
    .start(&checkpoint);
    let (mut ratios, mut of_one, mut of_four) = (Vec::new(), Vec::new(), Vec::new());
    // The first round warms up.
    for round in 0..6 {
        let [a, b] = [&one, &four].map(|host| tokens_per_second(host, round));
        if round > 0 {
            ratios.push(b / a);
            of_one.push(a);
            of_four.push(b);
        }
    }
    let step = |host: &Host| host.stats()[0].replay_time / host.stats()[0].replays as u32;
    println!(
        "32 requests of 64 + 32 tokens: one rank {:.0} tokens/s (steps of {:.1?}), four ranks with shared experts {:.0} \
         (steps of {:.1?}); ratio {:.3}, medians of 5 rounds in turns",
        median(of_one),
        step(&one),
        median(of_four),
        step(&four),
        median(ratios),
    );
}

fn tokens_per_second(host: &Host, round: u32) -> f64 {
    let before = Instant::now();
    let (sender, ends) = channel();
    (0..32).for_each(|i| submit(host, made(1000 * round + i, 64, 32), &sender));
    ends.iter().take(32).for_each(|event| assert!(matches!(event, Event::Finished(_)), "{event:?}"));
    32.0 * 32.0 / before.elapsed().as_secs_f64()
}

/// A mixture whose steps take a rank some tens of milliseconds.
fn medium() -> Checkpoint {
    let text = std::fs::read_to_string(common::golden("qwen3_moe").join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let sizes = [
        ("hidden_size", 512),
        ("intermediate_size", 1024),
        ("moe_intermediate_size", 256),
        ("num_local_experts", 32),
        ("num_experts_per_tok", 4),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 64),
        ("num_hidden_layers", 8),
    ];
    for (name, size) in sizes {
        config[name] = size.into();
    }
    Checkpoint::synthetic(&config.to_string(), 1).unwrap()
}

/// A greedy request with a prompt that depends on `seed`.
fn made(seed: u32, prompt: u32, tokens: u32) -> Request {
    let token = |at| atom_base::rng::philox([at, 0, 0, 0], [seed, 0])[0] % 500;
    request(&(0..prompt).map(token).collect::<Vec<_>>(), tokens, SamplingParams::greedy())
}

/// Its last event comes out of the channel.
fn submit(host: &Host, request: Request, ends: &Sender<Event>) {
    let ends = ends.clone();
    let sink = move |event| {
        if matches!(event, Event::Finished(_) | Event::Failed(_)) {
            // Whoever is not interested has hung up.
            let _ = ends.send(event);
        }
    };
    host.submit(request, Box::new(sink)).expect("there is room");
}

fn wait_until(host: &Host, holds: impl Fn(&LaneStats) -> bool) {
    while !host.stats().iter().all(&holds) {
        std::thread::sleep(Duration::from_micros(500));
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
