//! `atom sim`: seeded worlds of lanes over the scheduler and protocol that ship.

use crate::args::SimArgs;
use anyhow::Result;

/// Runs the seeds and prints what happened; a broken rule panics and names its seed.
pub(crate) fn run(args: &SimArgs) -> Result<()> {
    let options = atom_sim::WorldOptions { lanes: args.lanes, ..atom_sim::WorldOptions::default() };
    print!("{}", atom_sim::run_seeds(args.seed..args.seed + args.seeds, &options));
    Ok(())
}
