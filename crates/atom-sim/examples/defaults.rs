//! Compares policies and balancing rules on groups of 4, 8, 64 and 1,024 lanes: the tables of
//! `docs/simulator.md`.
//!
//! `cargo run --release -p atom-sim --example defaults [LANES,LANES,..] [CALIBRATION SECONDS]`; choices run side
//! by side on all cores. CALIBRATION is a file that `atom sim calibrate --out` wrote; a slow machine needs more
//! SECONDS of load for a thousand requests to end.
//!
//! Two loads, both with prompts of 256 to 2,048 tokens and answers of 32 to 256: 32 users a lane who ask
//! again as soon as they are answered, which gives the throughput; and an open load of 70% of what the
//! shipped defaults finished there, which gives the times. Every row changes one thing of the defaults.

use atom_engine::{LoadBalance, SchedulerConfig};
use atom_group::{Alignment, GROUP_STEP_MS_MAX, LatticeArgs, Policy};
use atom_sim::{Length, LoadArgs, LoadError, LoadReport, Shape, Source, StepCost, run_load};
use std::error::Error;
use std::sync::Mutex;

/// A row of the table.
struct Choice {
    name: String,
    policy: Policy,
    balance: LoadBalance,
}

fn main() -> Result<(), Box<dyn Error>> {
    let asked = std::env::args().nth(1);
    let asked: Result<Vec<usize>, _> =
        asked.as_deref().unwrap_or("4,8,64,1024").split(',').map(str::parse).collect();
    let cost = match std::env::args().nth(2) {
        Some(path) => std::fs::read_to_string(path)?.parse()?,
        None => StepCost::default(),
    };
    let seconds = std::env::args().nth(3).map(|seconds| seconds.parse()).transpose()?;
    for lanes in asked? {
        // The largest groups are even from one moment to the next, and slow to simulate.
        let seconds = seconds.unwrap_or(if lanes > 64 { 8.0 } else { 40.0 });
        let setting = Setting { lanes, cost, seconds };
        println!("\n{lanes} lanes");
        println!(
            "| choice | tokens/s | padding | lanes that prefill together | first token p50, p99 ms | next token p50, p99 ms |"
        );
        println!("|---|---|---|---|---|---|");
        let defaults = choices().swap_remove(0);
        let rate = OPEN_SHARE * setting.closed(&defaults)?.requests_per_second();
        for line in side_by_side(choices(), |choice| {
            let open = setting.run(Source::Open { rate, shape: shape() }, &choice)?;
            Ok(format!("| {} | {} |", choice.name, row(&setting.closed(&choice)?, &open)))
        })? {
            println!("{line}");
        }
    }
    Ok(())
}

/// What all rows of a table share.
#[derive(Clone, Copy)]
struct Setting {
    lanes: usize,
    cost: StepCost,
    seconds: f64,
}

impl Setting {
    fn closed(self, choice: &Choice) -> Result<LoadReport, LoadError> {
        self.run(Source::Closed { concurrency: USERS * self.lanes, shape: shape() }, choice)
    }

    fn run(self, source: Source, choice: &Choice) -> Result<LoadReport, LoadError> {
        run_load(&args(self, source, choice))
    }
}

/// What `run` makes of each choice, in their order, on as many threads as there are cores.
fn side_by_side(
    choices: Vec<Choice>,
    run: impl Fn(Choice) -> Result<String, LoadError> + Sync,
) -> Result<Vec<String>, LoadError> {
    let count = choices.len();
    let queue = Mutex::new(choices.into_iter().enumerate());
    let done = Mutex::new(vec![None; count]);
    let take = || queue.lock().expect("nobody panics with it").next();
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((at, choice)) = take() {
                    let line = run(choice);
                    done.lock().expect("nobody panics with it")[at] = Some(line);
                }
            });
        }
    });
    let done = done.into_inner().expect("nobody panics with it");
    done.into_iter().map(|line| line.expect("every choice was taken")).collect()
}

fn row(closed: &LoadReport, open: &LoadReport) -> String {
    let ms = |histogram: &hdrhistogram::Histogram<u64>| {
        let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1000.0;
        format!("{:.0}, {:.0}", at(0.5), at(0.99))
    };
    format!(
        "{:.0} | {:.0}% | {:.0}% | {} | {}",
        closed.tokens_per_second(),
        100.0 * closed.padding_share(),
        100.0 * closed.alignment_share(),
        ms(&open.first_token_us),
        ms(&open.next_token_us)
    )
}

/// The defaults, and then one change each.
fn choices() -> Vec<Choice> {
    let step_ms_max = Some(GROUP_STEP_MS_MAX);
    let default = Policy { alignment: Some(Alignment::default()), step_ms_max, ..Policy::default() };
    let aligned = |alignment| Policy { alignment: Some(alignment), ..default };
    let mut policies = vec![
        ("defaults".to_owned(), default),
        ("no alignment".to_owned(), Policy { alignment: None, ..default }),
    ];
    for hold_steps_max in [2, 4, 16, 30] {
        let name = format!("holds of up to {hold_steps_max} steps");
        policies.push((name, aligned(Alignment { hold_steps_max, ..Alignment::default() })));
    }
    for target_fill_per_mille in [300, 1000] {
        let name = format!("until {}% are filled", target_fill_per_mille / 10);
        policies.push((name, aligned(Alignment { target_fill_per_mille, ..Alignment::default() })));
    }
    for padding in [None, Some(0), Some(125), Some(500)] {
        let name = padding.map_or("padding unbounded".to_owned(), |p: u32| {
            format!("padding up to {:.1}%", f64::from(p) / 10.0)
        });
        policies.push((name, Policy { padding_per_mille_max: padding, ..default }));
    }
    policies.push(("steps of any length".to_owned(), Policy { step_ms_max: None, ..default }));
    for ms in [20, 30, 100, 200] {
        policies.push((format!("steps of up to {ms} ms"), Policy { step_ms_max: Some(ms), ..default }));
    }
    let choice = |(name, policy)| Choice { name, policy, balance: LoadBalance::Work };
    let balances = [
        ("dealt in turn", LoadBalance::RoundRobin),
        ("dealt by requests", LoadBalance::LeastRequests),
        ("dealt by tokens", LoadBalance::LeastTokens),
    ];
    let dealt = balances.map(|(name, balance)| Choice { name: name.to_owned(), policy: default, balance });
    policies.into_iter().map(choice).chain(dealt).collect()
}

fn shape() -> Shape {
    Shape { prompt: Length(256..=2048), output: Length(32..=256), prefixes: 0, prefix_tokens: 0 }
}

fn args(setting: Setting, source: Source, choice: &Choice) -> LoadArgs {
    let Setting { lanes, cost, seconds } = setting;
    LoadArgs {
        lanes,
        cost,
        record_us: 100_000,
        record_all: true,
        lattice: LatticeArgs { rows_max: 2048, max_num_seqs: 64, ..LatticeArgs::default() },
        scheduler: SchedulerConfig {
            pages: 2049,
            page_size: 64,
            max_num_seqs: 64,
            rows_max: 2048,
            max_model_len: 4096,
            prefix_cache: false,
            eos: Box::default(),
        },
        queue_max: 1024,
        policy: choice.policy,
        balance: choice.balance,
        source,
        seconds,
        warm_up_seconds: seconds * if lanes > 64 { 0.5 } else { 0.25 },
        seed: 1,
    }
}

/// A lane's users in the closed load.
const USERS: usize = 32;
/// The open load, of what the closed one finished.
const OPEN_SHARE: f64 = 0.7;
