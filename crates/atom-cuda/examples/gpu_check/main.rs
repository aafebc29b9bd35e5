//! Checks of every kernel on a GPU against references on the CPU, with fresh random inputs.
//!
//! `gpu_check [FAMILY ..]` runs all families or those named (`fp8_bench` and `experts_bench`, which check nothing and print
//! times, only if they are named); `ATOM_CHECK_SEED` repeats a run. Ends in `N passed, N failed`.

mod attend;
mod attend_few;
mod blas;
mod exchange;
mod experts;
mod experts_bench;
mod experts_fp8;
mod fp8;
mod fp8_bench;
mod kit;
mod linear_gated;
mod linear_small;
mod norm;
mod rope;
mod route;
mod router_few;
mod rows;
mod sample;
mod step;

use kit::Kit;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

type Checks = fn(&mut Kit) -> Result<(), atom_cuda::CudaError>;

const FAMILIES: &[(&str, Checks)] = &[
    ("step", step::checks),
    ("blas", blas::checks),
    ("linear_small", linear_small::checks),
    ("fp8", fp8::checks),
    ("linear_rows", linear_small::checks_of_rows),
    ("linear_gated", linear_gated::checks),
    ("rows", rows::checks),
    ("norm", norm::checks),
    ("rope", rope::checks),
    ("route", route::checks),
    ("router_few", router_few::checks),
    ("attend", attend::checks),
    ("attend_few", attend_few::checks),
    ("experts", experts::checks),
    ("experts_fp8", experts_fp8::checks),
    ("sample", sample::checks),
    ("exchange", exchange::checks),
];

const BENCHES: &[(&str, Checks)] =
    &[("fp8_bench", fp8_bench::bench), ("experts_bench", experts_bench::bench)];

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    if let Some(unknown) =
        wanted.iter().find(|name| FAMILIES.iter().chain(BENCHES).all(|(known, _)| known != name))
    {
        eprintln!(
            "no family {unknown}; there are {:?}",
            FAMILIES.iter().chain(BENCHES).map(|(name, _)| name).collect::<Vec<_>>()
        );
        return ExitCode::FAILURE;
    }
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64);
    let seed = std::env::var("ATOM_CHECK_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(clock);
    let search = atom_cuda::Search::from_env(|name| std::env::var_os(name));
    let mut kit = match Kit::open(&search, seed) {
        Ok(kit) => kit,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    for (name, checks) in FAMILIES {
        if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
            kit.family(name, *checks);
        }
    }
    for (name, bench) in BENCHES {
        if wanted.iter().any(|wanted| wanted == name) {
            kit.family(name, *bench);
        }
    }
    let (passed, failed) = kit.score();
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
