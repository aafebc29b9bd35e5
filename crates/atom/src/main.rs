//! `atom`: a server for large language models. Wiring only: arguments and environment in, the other
//! crates put together, exit code out.

#![forbid(unsafe_code)]

mod access;
mod answer_format;
mod args;
mod bench;
mod chat;
mod choices;
mod cuda;
mod engine;
mod generate;
mod inspect;
mod kv_cache;
mod launch;
mod models;
mod output;
mod profile;
mod remote;
mod replay;
mod serve;
mod simulate;
mod source;
mod step_bench;
mod steps;
mod text;

use args::{Cli, Command};
use clap::{CommandFactory, FromArgMatches};
use std::process::ExitCode;

fn main() -> ExitCode {
    let given = Cli::command().get_matches_from(args::normalise(std::env::args_os()));
    let cli = Cli::from_arg_matches(&given).unwrap_or_else(|error| error.exit());
    if let Err(error) = atom_telemetry::init_logging(&cli.log) {
        return ExitCode::from(fail(&error.into()));
    }
    let outcome = match cli.command {
        Command::Serve(args) => serve::run(&args),
        Command::Chat(args) => chat::run(&args, given.subcommand_matches("chat").expect("it is the command")),
        Command::Generate(args) => generate::run(&args),
        Command::Pull(args) => models::pull(&args),
        Command::List(args) => models::list(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Bench(args) => {
            bench::run(args, given.subcommand_matches("bench").expect("it is the command"))
        }
        Command::Sim(args) => simulate::run(&args),
        Command::Replay(args) => replay::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // A GPU may hang, and then the driver would keep the process.
        Err(error) => atom_cuda::quit(fail(&error)),
    }
}

/// One line that says what and why. A cause that its effect has told already is left out.
fn fail(error: &anyhow::Error) -> u8 {
    // A server's words, or a file's, may be in it.
    eprintln!("atom: {}", output::visible(&in_one_line(error)));
    1
}

fn in_one_line(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    #[test]
    fn a_refusal_is_said_once() {
        let error = anyhow!("9 heads").context("rank 0: 9 heads").context("starting");
        assert_eq!(super::in_one_line(&error), "starting: rank 0: 9 heads");
    }
}
