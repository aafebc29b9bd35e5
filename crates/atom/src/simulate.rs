//! `atom sim`: seeded worlds of lanes over the scheduler and protocol that ship.

use crate::args::SimArgs;
use crate::output::say;
use anyhow::{Result, ensure};
use atom_sim::{CostModel, WorldArgs, WorldOptions};

/// Runs the seeds and prints what happened; an error if a rule was broken anywhere.
pub(crate) fn run(args: &SimArgs) -> Result<()> {
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
