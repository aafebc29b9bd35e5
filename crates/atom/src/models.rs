//! `atom pull` and `atom list`.

use crate::args::{PullArgs, SourceArgs};
use crate::output::say;
use crate::source::{self, Progress, ResolvedModel, SourceOptions, Table};
use anyhow::Result;

/// Fetches and verifies.
pub(crate) fn pull(args: &PullArgs) -> Result<()> {
    let model = source::pull(&args.model, &options(&args.source)?)?;
    say(format_args!("{}\n", model.path.display()))
}

/// Prints the catalog and the cache.
pub(crate) fn list(args: &SourceArgs) -> Result<()> {
    say(Table(&source::list(&options(args)?)))
}

/// What the user typed, on this machine.
pub(crate) fn resolve(model: &str, args: &SourceArgs) -> Result<ResolvedModel> {
    Ok(source::resolve(model, &options(args)?)?)
}

fn options(args: &SourceArgs) -> Result<SourceOptions> {
    Ok(SourceOptions::from_env(args.offline, Progress::stderr(), |name| std::env::var_os(name))?)
}
