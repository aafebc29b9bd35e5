//! `atom sim`: seeded worlds of lanes over the scheduler and protocol that ship, load on such lanes in
//! virtual time, and what steps cost there.

mod calibrate;
mod load;
mod measure;

pub(crate) use calibrate::CalibrateFlags;
pub(crate) use load::LoadFlags;

use crate::args::{SimArgs, SimCommand};
use crate::output::say;
use anyhow::{Result, ensure};
use atom_sim::{CostModel, WorldArgs, WorldOptions};

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
    let report = atom_sim::run_seeds(seeds, &options);
    say(&report)?;
    ensure!(report.failures.is_empty(), "{} worlds broke a rule", report.failures.len());
    Ok(())
}
