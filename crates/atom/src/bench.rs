//! `atom bench`: wiring of the load client, and of what measures the step loop.

use crate::args::{BenchArgs, BenchCommand};
use crate::step_bench;
use anyhow::Result;
use clap::ArgMatches;

/// Runs it to its end; an error if any request failed. `given` is where the flags come from.
pub(crate) fn run(args: BenchArgs, given: &ArgMatches) -> Result<()> {
    match args.what {
        BenchCommand::Serve(bench) => {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
            Ok(runtime.block_on(bench.run())?)
        }
        BenchCommand::Step(flags) => {
            step_bench::run(*flags, given.subcommand_matches("step").expect("it is the command"))
        }
    }
}
