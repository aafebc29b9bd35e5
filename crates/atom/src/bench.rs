//! `atom bench`: wiring of the load client.

use crate::args::{BenchArgs, BenchCommand};
use anyhow::Result;

/// Runs it to its end; an error if any request failed.
pub(crate) fn run(args: BenchArgs) -> Result<()> {
    let BenchCommand::Serve(bench) = args.what;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    Ok(runtime.block_on(bench.run())?)
}
