//! What the protocol costs: ns of a `settle` by lanes, then CPU time and wall time of exchange and
//! settle for each lane of a group of threads.
//!
//! `cargo run --release -p atom-group --example settle`
//!
//! CPU time is the first number of `/proc/thread-self/schedstat` (ns on a core), so threads that
//! sleep cost nothing; elsewhere than on Linux only wall time is told.

use atom_base::limits::LANES_MAX;
use atom_group::{
    Alignment, Exchange, Facts, GroupState, GroupStep, Lattice, LatticeArgs, LatticeError, Policy, settle,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn main() -> Result<(), LatticeError> {
    let lattice = Lattice::new(&LatticeArgs { rows_max: 2048, max_num_seqs: 256, ..LatticeArgs::default() })?;
    let lattice = Arc::new(lattice);
    let all = Policy { alignment: Some(Alignment::default()), step_ms_max: Some(50), ..Policy::default() };
    println!("{:>6} {:>22} {:>22}", "lanes", "settle, default policy", "settle, every policy");
    for lanes in [1, 8, 64, LANES_MAX] {
        let [default, every] = [Policy::default(), all].map(|policy| settle_ns(&lattice, lanes, policy));
        println!("{lanes:>6} {default:>19.0} ns {every:>19.0} ns");
    }
    println!();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{cores} cores; a lane that waits sleeps at once, or looks {SPINS} times before");
    println!(
        "{:>6} {:>22} {:>22} {:>22}",
        "lanes", "CPU of a lane's step", "wall of a step", "wall, looking first"
    );
    for lanes in [1, 2, 4, 8, 16] {
        let (cpu, wall) = exchange_us(&lattice, lanes, 0);
        // Lanes that look while others have no core only stand in their way.
        let looking = if lanes <= cores {
            format!("{:.2} µs", exchange_us(&lattice, lanes, SPINS).1)
        } else {
            "more lanes than cores".to_owned()
        };
        let cpu = cpu.map_or("not known here".to_owned(), |us| format!("{us:.2} µs"));
        println!("{lanes:>6} {cpu:>22} {wall:>19.2} µs {looking:>22}");
    }
    Ok(())
}

/// Lanes that decode, each a little more than its neighbour, and every fourth with a prompt.
fn wants(lane: usize, step: u64) -> (u32, u32) {
    let decode_rows = 20 + (lane as u32 * 7 + step as u32) % 17;
    (decode_rows, if lane.is_multiple_of(4) { 700 } else { 0 })
}

fn fact(state: &GroupState, lane: usize) -> Facts {
    let (decode_rows, prefill_rows) = wants(lane, state.next_step().0);
    Facts {
        step: state.next_step(),
        state_hash: state.hash(),
        last_signature: SIGNATURE,
        decode_rows,
        prefill_rows,
        replay_us: 1000,
        kv_per_mille: 500,
        ..Facts::default()
    }
}

/// Median ns of a settle past the start-up recordings.
fn settle_ns(lattice: &Arc<Lattice>, lanes: usize, policy: Policy) -> f64 {
    let mut state = GroupState::new(Arc::clone(lattice), lanes, true).with_policy(policy);
    let mut facts = vec![Facts::default(); lanes];
    let steps = (SETTLED_LANES / lanes).clamp(500, 20_000);
    let mut times = Vec::with_capacity(steps);
    while times.len() < steps {
        // Lanes are equal, so one hash is everybody's.
        let first = fact(&state, 0);
        for (lane, f) in facts.iter_mut().enumerate() {
            let (decode_rows, prefill_rows) = wants(lane, first.step.0);
            *f = Facts { decode_rows, prefill_rows, ..first };
        }
        let start = Instant::now();
        let (next, step) = settle(&state, &facts).expect("lanes agree");
        let took = start.elapsed();
        state = next;
        if matches!(step, GroupStep::Step { .. }) {
            times.push(took.as_nanos() as f64);
        }
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Mean µs of CPU time and of wall time that a lane's exchange and settle take.
fn exchange_us(lattice: &Arc<Lattice>, lanes: usize, spins: u32) -> (Option<f64>, f64) {
    let exchange = Exchange::new(lanes, spins);
    let state = GroupState::new(Arc::clone(lattice), lanes, true);
    let run = |lane: usize| {
        let (mut state, mut facts) = (state.clone(), vec![Facts::default(); lanes]);
        let (mut before, mut start) = (None, Instant::now());
        for step in 0..WARM_STEPS + STEPS {
            if step == WARM_STEPS {
                (before, start) = (cpu_ns(), Instant::now());
            }
            let mine = fact(&state, lane);
            exchange.exchange(lane, &mine, PATIENCE, &mut facts).expect("everybody comes");
            state = settle(&state, &facts).expect("lanes agree").0;
        }
        let wall = start.elapsed();
        (before.zip(cpu_ns()).map(|(before, after)| after - before), wall)
    };
    let times: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..lanes).map(|lane| scope.spawn(move || run(lane))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no lane panics")).collect()
    });
    let of_step = |ns: f64| ns / f64::from(STEPS) / lanes as f64 / 1000.0;
    let cpu = times.iter().map(|(cpu, _)| *cpu).sum::<Option<u64>>();
    (cpu.map(|ns| of_step(ns as f64)), of_step(times.iter().map(|(_, wall)| wall.as_nanos() as f64).sum()))
}

/// ns that this thread has been on a core.
fn cpu_ns() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split_whitespace().next()?.parse().ok()
}

const SIGNATURE: u64 = 7;
/// As `atom` has them for ranks that have a core each.
const SPINS: u32 = 2000;
/// Lanes times steps that a size is timed for.
const SETTLED_LANES: usize = 2_000_000;
/// Recordings, and whatever else is slow at first.
const WARM_STEPS: u32 = 200;
const STEPS: u32 = 20_000;
const PATIENCE: Duration = Duration::from_secs(60);
