//! Explores small groups and prints how many worlds they have: `explore [--lanes N] [--supervised] [--deep]`.

use atom_sim::explore::{deep, small};
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let (mut lanes, mut is_deep, mut is_supervised) = (None, false, false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--deep" => is_deep = true,
            "--supervised" => is_supervised = true,
            "--lanes" => match args.next().and_then(|n| n.parse().ok()).filter(|n| (1..=4).contains(n)) {
                Some(n) => lanes = Some(n),
                None => return usage(),
            },
            _ => return usage(),
        }
    }
    let setups: Vec<_> = match (is_deep, lanes) {
        (true, Some(lanes)) => deep(lanes),
        (true, None) => (1..=4).flat_map(deep).collect(),
        (false, _) => small().into_iter().filter(|s| lanes.is_none_or(|n| n == s.lanes)).collect(),
    };
    for setup in setups.into_iter().filter(|setup| setup.restarts_max.is_some() || !is_supervised) {
        let start = Instant::now();
        match setup.explore() {
            Ok(explored) => println!("{explored} {:>8.1} s", start.elapsed().as_secs_f64()),
            Err(violation) => {
                eprintln!("{violation}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

fn usage() -> ExitCode {
    eprintln!("usage: explore [--lanes 1..4] [--supervised] [--deep]");
    ExitCode::FAILURE
}
