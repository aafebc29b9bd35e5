//! Random load on four ranks that share experts, with aborts, preemption, pauses and ranks that are slow, or fail or
//! get stuck and are replaced, for as long as wanted. Every answer is compared with that of the same request alone.
//!
//! `cargo run --release -p atom-rank --example soak -- --minutes 30 [--seed 1]`
#![allow(clippy::unwrap_used, reason = "in what it shares with tests")]

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/common/soak.rs"]
mod soak;

use std::time::{Duration, Instant};

fn main() -> Result<(), String> {
    let (mut minutes, mut seed) = (30_u64, 1_u32);
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or_else(|| format!("{flag} needs a number"))?;
        let not = |error| format!("{flag} {value}: {error}");
        match flag.as_str() {
            "--minutes" => minutes = value.parse().map_err(not)?,
            "--seed" => seed = value.parse().map_err(not)?,
            _ => return Err(format!("{flag} is not known; there are --minutes and --seed")),
        }
    }
    let (start, mut lines) = (Instant::now(), 0);
    let totals = soak::soak(seed, |totals| {
        let passed = start.elapsed().as_secs() / 60;
        if passed > lines {
            lines = passed;
            println!("minute {passed}: {totals:?}");
        }
        start.elapsed() < Duration::from_secs(60 * minutes)
    });
    println!("after {:.0?}: {totals:?}", start.elapsed());
    Ok(())
}
