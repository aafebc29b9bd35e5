//! `atom replay`: a step trace settled again, compared and drawn.

use crate::args::ReplayArgs;
use crate::output::say;
use anyhow::{Context, Result, bail, ensure};
use atom_sim::{Replayed, TraceEnding};

/// Prints the timeline; an error if the trace is damaged or a step is settled otherwise by this build.
pub(crate) fn run(args: &ReplayArgs) -> Result<()> {
    let to = args.to.unwrap_or(u64::MAX);
    ensure!(args.from <= to, "--from {} is after --to {to}: no step is shown", args.from);
    let trace = std::fs::read(&args.file).with_context(|| format!("reading {}", args.file.display()))?;
    let replayed =
        Replayed::new(&trace, &(args.from..=to)).with_context(|| args.file.display().to_string())?;
    say(&replayed)?;
    if let Some(path) = &args.svg {
        std::fs::write(path, replayed.svg()?)
            .with_context(|| format!("--svg: writing {}", path.display()))?;
    }
    if let Some(mismatch) = replayed.mismatch {
        return Err(mismatch.into());
    }
    if let TraceEnding::Damaged(error) = replayed.ending {
        bail!("{}: {error}", args.file.display());
    }
    Ok(())
}
