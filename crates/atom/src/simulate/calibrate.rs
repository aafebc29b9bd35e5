//! `atom sim calibrate`: measures steps of ranks on this machine, fits the cost model to some of them and
//! says how well it predicts the others.

use super::measure::{Kind, Meter, Point, Seen};
use crate::args::EngineArgs;
use crate::launch::{launch_with, open};
use crate::output::say;
use anyhow::{Context, Result, ensure};
use atom_group::{Lattice, LatticeArgs, Policy};
use atom_sim::{Machine, Sample, Spread, StepCost, StepWork, fit};
use atom_weights::ModelConfig;
use clap::Args;
use std::fmt::Write as _;
use std::path::PathBuf;

/// Lanes of one rank each, as with `-tp N --enable-dp-attention`; -tp and -dp are set by --ranks.
#[derive(Args, Debug)]
pub(crate) struct CalibrateFlags {
    #[command(flatten)]
    engine: EngineArgs,

    /// Numbers of ranks to measure with.
    #[arg(long, value_delimiter = ',', value_name = "N,N,..", default_value = "1,2,4")]
    ranks: Vec<u16>,

    /// Threads of a rank.
    #[arg(long, value_name = "N", default_value_t = 1)]
    rank_threads: usize,

    /// Rounds: every point is measured once in each, and its median counts. A first round is not counted.
    #[arg(long, value_name = "N", default_value_t = 9)]
    rounds: usize,

    /// Where to write the parameters, for `atom sim load --calibration` [default: only shown].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Medians of one point.
struct Measured {
    ranks: u16,
    point: Point,
    sample: Sample,
    count: usize,
    /// First and third quartile, µs.
    quartiles: (f64, f64),
}

/// Measures, fits, shows, writes.
pub(crate) fn run(flags: &CalibrateFlags) -> Result<()> {
    ensure!(flags.rounds > 0, "--rounds 0 measures nothing; use 1 or more");
    ensure!(flags.rank_threads > 0, "--rank-threads 0 leaves nobody to compute; use 1 or more");
    let machine = machine(flags)?;
    let (mut fitted, mut held_out) = (Vec::new(), Vec::new());
    for &ranks in &flags.ranks {
        let measured = measure(flags, ranks)?;
        let (fit, test): (Vec<_>, Vec<_>) = measured.into_iter().partition(|(is_fitted, _)| *is_fitted);
        fitted.extend(fit.into_iter().map(|(_, m)| m));
        held_out.extend(test.into_iter().map(|(_, m)| m));
    }
    let samples: Vec<_> = fitted.iter().map(|m| m.sample).collect();
    let cost = fit(machine, &samples);
    say(table("fitted", &fitted, &cost)?)?;
    say(table("predicted, not used for fitting", &held_out, &cost)?)?;
    say(format_args!("\n{cost}"))?;
    if let Some(path) = &flags.out {
        std::fs::write(path, cost.to_string()).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn machine(flags: &CalibrateFlags) -> Result<Machine> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (_, checkpoint) = open(&flags.engine, false)?;
    let config = checkpoint.config();
    let share = config.moe.as_ref().map_or(1.0, |moe| moe.top_k as f64 / moe.experts as f64);
    Ok(Machine {
        lanes_at_once: (cores / flags.rank_threads).max(1) as u64,
        expert_share: share,
        row_bytes: row_bytes(config),
        row_lanes: 0,
    })
}

/// A row of f32 to every other lane and one back, in each layer.
fn row_bytes(config: &ModelConfig) -> f64 {
    (2 * 4 * config.hidden_size * config.layers) as f64
}

/// Medians of all points; true for those to fit.
fn measure(flags: &CalibrateFlags, ranks: u16) -> Result<Vec<(bool, Measured)>> {
    let mut engine = flags.engine.clone();
    engine.tensor_parallel_size = ranks;
    engine.data_parallel_size = 1;
    engine.enable_dp_attention = ranks > 1;
    engine.threads = Some(usize::from(ranks) * flags.rank_threads);
    let rows_max = *engine.max_num_batched_tokens.get_or_insert(ROWS_MAX);
    ensure!(
        rows_max >= ROWS_MAX,
        "--max-num-batched-tokens {rows_max}: steps of {ROWS_MAX} rows are measured"
    );
    let lattice = Lattice::new(&LatticeArgs {
        rows_max,
        max_num_seqs: engine.max_num_seqs,
        sizes: Lattice::parse_sizes(&engine.token_graph_sizes)?,
        ..LatticeArgs::default()
    })?;
    // A prompt that is held or cut would be computed in other steps than those that are meant.
    let running = launch_with(&engine, Policy::NONE)?;
    let edges = lattice.buckets().iter().map(|bucket| bucket.rows()).collect();
    let mut meter = Meter::new(&running, edges, running.layout.page_size);
    let points: Vec<_> = points(usize::from(ranks)).collect();
    let order: Vec<_> = points.iter().map(|(_, point)| *point).collect();
    let mut seen: Vec<Vec<Seen>> = vec![Vec::new(); points.len()];
    for round in 0..=flags.rounds {
        let of_round = meter.round(&order)?;
        if round > 0 {
            seen.iter_mut().zip(of_round).for_each(|(all, some)| all.extend(some));
        }
        tracing::info!("{ranks} ranks: round {round} of {} done", flags.rounds);
    }
    drop(meter);
    running.host.shutdown().map_err(anyhow::Error::msg)?;
    let measured = points.into_iter().zip(seen).map(|((is_fitted, point), seen)| {
        let measured = median(ranks, point, seen);
        measured
            .with_context(|| format!("no step of {point:?} was seen alone; use more --rounds"))
            .map(|m| (is_fitted, m))
    });
    measured.collect()
}

/// What is measured with so many lanes: true for fitting. Rows, contexts and lanes of the others lie
/// between and beside those.
fn points(lanes: usize) -> impl Iterator<Item = (bool, Point)> {
    let all = [
        (true, Kind::Decode(3), 64, false),
        (true, Kind::Decode(15), 64, false),
        (true, Kind::Decode(15), 1500, false),
        (true, Kind::Decode(31), 600, false),
        (true, Kind::Decode(15), 64, true),
        (true, Kind::Prefill(31), 0, false),
        (true, Kind::Prefill(127), 0, false),
        (true, Kind::Prefill(255), 0, false),
        (true, Kind::Prefill(127), 1536, false),
        (true, Kind::Prefill(127), 0, true),
        (true, Kind::Prefill(255), 1024, true),
        (false, Kind::Decode(7), 300, false),
        (false, Kind::Decode(23), 1000, false),
        (false, Kind::Decode(19), 800, true),
        (false, Kind::Prefill(63), 0, false),
        (false, Kind::Prefill(191), 512, false),
        (false, Kind::Prefill(95), 1008, true),
    ];
    let point = move |(is_fitted, kind, context, is_alone)| {
        (is_fitted, Point { busy: if is_alone { 1 } else { lanes }, kind, context })
    };
    all.into_iter().filter(move |(is_fitted, .., is_alone)| lanes > 1 || !is_alone || !is_fitted).map(point)
}

/// The step of median time, with the mean of what such steps attended to.
fn median(ranks: u16, point: Point, mut seen: Vec<Seen>) -> Option<Measured> {
    seen.sort_by(|a, b| a.us.total_cmp(&b.us));
    let (count, at) = (seen.len(), |quarter: usize| seen.get(seen.len() * quarter / 4).map(|s| s.us));
    let (low, middle, high) = (at(1)?, at(2)?, at(3)?);
    let mean = |of: fn(&StepWork) -> Spread| {
        let sum = |part: fn(Spread) -> u64| seen.iter().map(|s| part(of(&s.work))).sum::<u64>();
        Spread { max: sum(|s| s.max) / count as u64, sum: sum(|s| s.sum) / count as u64 }
    };
    let work = StepWork { pairs: mean(|w| w.pairs), reads: mean(|w| w.reads), ..seen[0].work };
    Some(Measured { ranks, point, sample: Sample { work, us: middle }, count, quartiles: (low, high) })
}

fn table(title: &str, measured: &[Measured], cost: &StepCost) -> Result<String> {
    let mut text = format!("\n{title}\n");
    writeln!(
        text,
        "ranks  busy  step                      steps  measured ms (quartiles)     predicted ms   error"
    )?;
    let mut worst = 0.0_f64;
    for Measured { ranks, point, sample, count, quartiles: (low, high) } in measured {
        let Point { busy, kind, context } = point;
        let what = match kind {
            Kind::Decode(requests) => format!("{} decode at {context}", requests + 1),
            Kind::Prefill(rows) => format!("{rows} prompt rows at {context}"),
        };
        let predicted = cost.step_us(&sample.work);
        let error = predicted / sample.us - 1.0;
        worst = worst.max(error.abs());
        let ms = |us: f64| us / 1000.0;
        writeln!(
            text,
            "{ranks:>5}  {busy:>4}  {what:24} {count:>6}  {:>8.2} ({:>7.2} {:>7.2})  {:>12.2}  {:>+5.1}%",
            ms(sample.us),
            ms(*low),
            ms(*high),
            ms(predicted),
            100.0 * error
        )?;
    }
    writeln!(text, "largest error {:.1}%", 100.0 * worst)?;
    Ok(text)
}

/// Rows of the largest step that is measured, its metronome included.
const ROWS_MAX: u32 = 256;
