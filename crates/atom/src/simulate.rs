//! `atom sim`: seeded worlds of lanes over the scheduler and protocol that ship, load on such lanes in
//! virtual time, and what steps cost there.

mod calibrate;
mod load;
mod measure;

pub(crate) use calibrate::CalibrateFlags;
pub(crate) use load::LoadFlags;

use crate::args::{SimArgs, SimCommand};
use crate::output::say;
use anyhow::{Context, Result, ensure};
use atom_sim::{CostModel, World, WorldArgs, WorldOptions};
use std::path::Path;

/// Runs what was asked for and prints what happened.
pub(crate) fn run(args: &SimArgs) -> Result<()> {
    match &args.command {
        None => worlds(args),
        Some(SimCommand::Load(flags)) => load::run(flags),
        Some(SimCommand::Calibrate(flags)) => calibrate::run(flags),
    }
}

/// Runs the seeds; an error if a rule was broken anywhere.
fn worlds(args: &SimArgs) -> Result<()> {
    let seeds = atom_sim::parse_seeds(&args.seeds)?;
    let options = WorldOptions::new(WorldArgs {
        lanes: args.lanes,
        requests: args.requests,
        faults: !args.no_faults,
        cost: CostModel::default(),
    })?;
    if let Some(path) = &args.step_trace {
        ensure!(
            seeds.end - seeds.start == 1,
            "--step-trace keeps the steps of one world, and --seeds {} are {}; name one seed",
            args.seeds,
            seeds.end - seeds.start
        );
        return traced(seeds.start, &options, path);
    }
    let report = atom_sim::run_seeds(seeds, &options);
    say(&report)?;
    ensure!(report.failures.is_empty(), "{} worlds broke a rule", report.failures.len());
    Ok(())
}

/// Runs one world and writes its steps, also those of a world that breaks a rule.
fn traced(seed: u64, options: &WorldOptions, path: &Path) -> Result<()> {
    let (outcome, trace) = World::new(seed, options).run_traced();
    std::fs::write(path, trace).with_context(|| format!("--step-trace: writing {}", path.display()))?;
    say(outcome?)
}
