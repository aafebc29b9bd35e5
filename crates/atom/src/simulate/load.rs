//! `atom sim load`: flags to a load, and its report.

use crate::args::{LoadBalanceArg, parse_padding, parse_step_ms};
use crate::launch::load_balance;
use crate::output::say;
use anyhow::{Context, Result};
use atom_engine::SchedulerConfig;
use atom_group::{Alignment, Lattice, LatticeArgs, Policy};
use atom_sim::{Length, LoadArgs, Shape, Source, StepCost, run_load};
use clap::Args;
use std::path::{Path, PathBuf};

/// A group in virtual time. The alignment knobs are the environment variables of `atom serve`
/// (ATOM_ENABLE_PREFILL_DELAYER, ATOM_PREFILL_DELAYER_*), and the other flags have its names.
#[derive(Args, Debug)]
pub(crate) struct LoadFlags {
    /// Lanes of the group, from 1 to 1024.
    #[arg(long, default_value_t = 8)]
    lanes: usize,

    /// Requests a second, at random times (Poisson).
    #[arg(long, value_name = "PER_SECOND", default_value_t = 4.0, conflicts_with_all = ["concurrency", "requests"])]
    rate: f64,

    /// Users who ask again as soon as they are answered, in place of --rate.
    #[arg(long, value_name = "USERS", conflicts_with = "requests")]
    concurrency: Option<usize>,

    /// A file of requests in place of --rate: lines of arrival in seconds, prompt tokens, output tokens.
    #[arg(long, value_name = "FILE")]
    requests: Option<PathBuf>,

    /// Prompt tokens, or a range of which every length is as likely.
    #[arg(long, value_name = "TOKENS", default_value = "512..2048")]
    prompt: Length,

    /// Tokens to generate, or a range.
    #[arg(long, value_name = "TOKENS", default_value = "64..256")]
    output: Length,

    /// Prompts begin in one of so many ways; 0: all differ.
    #[arg(long, value_name = "N", default_value_t = 0)]
    prefixes: usize,

    /// Tokens that prompts which begin alike share.
    #[arg(long, value_name = "TOKENS", default_value_t = 256)]
    prefix_tokens: usize,

    /// Requests come for so long.
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,

    /// What happens before is not counted in rates and times [default: a tenth of --seconds].
    #[arg(long, value_name = "SECONDS")]
    warm_up: Option<f64>,

    /// Of everything that is drawn: equal seeds give equal reports.
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// What steps cost: a file that `atom sim calibrate` wrote [default: round numbers for accelerators].
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,

    /// Changes one parameter of the cost, for example --cost row_us=25. May be repeated.
    #[arg(long, value_name = "NAME=VALUE")]
    cost: Vec<String>,

    /// Record buckets when they are first worth it, as accelerators do, and not all before the start.
    #[arg(long)]
    record_on_demand: bool,

    /// Milliseconds that a recording takes.
    #[arg(long, value_name = "MS", default_value_t = 100.0)]
    record_ms: f64,

    /// Rows of the largest step of a lane.
    #[arg(long, value_name = "ROWS", default_value_t = 2048)]
    max_num_batched_tokens: u32,

    /// Requests that run at once in a lane.
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_num_seqs: u32,

    /// Tokens of prompt and answer together.
    #[arg(long, value_name = "TOKENS", default_value_t = 16384)]
    max_model_len: usize,

    /// Row counts of buckets above max-num-seqs [default: a dense set].
    #[arg(long, value_name = "ROWS,ROWS,..", default_value = "", hide_default_value = true)]
    token_graph_sizes: String,

    /// Positions of the KV cache of a lane.
    #[arg(long, value_name = "TOKENS", default_value_t = 65536)]
    cache_tokens: usize,

    /// Positions in a page of the KV cache.
    #[arg(long, value_name = "TOKENS", default_value_t = 64)]
    block_size: usize,

    /// Compute every prompt anew.
    #[arg(long)]
    no_enable_prefix_caching: bool,

    /// Requests that may wait in a lane; more are refused.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_waiting: usize,

    /// As for `atom serve`.
    #[arg(long, value_enum, default_value_t = LoadBalanceArg::Work)]
    dp_load_balance: LoadBalanceArg,

    /// As for `atom serve`.
    #[arg(long, value_name = "MS", value_parser = parse_step_ms)]
    step_ms_max: Option<u32>,

    /// As for `atom serve`. 1 switches it off.
    #[arg(long, value_name = "SHARE", value_parser = parse_padding_or_off)]
    padding_max: Option<u32>,
}

/// Runs the load and prints the report.
pub(crate) fn run(flags: &LoadFlags) -> Result<()> {
    let args = flags.load()?;
    say(run_load(&args)?)
}

impl LoadFlags {
    fn load(&self) -> Result<LoadArgs> {
        let lattice = LatticeArgs {
            rows_max: self.max_num_batched_tokens,
            max_num_seqs: self.max_num_seqs,
            sizes: Lattice::parse_sizes(&self.token_graph_sizes)?,
            ..LatticeArgs::default()
        };
        anyhow::ensure!(self.block_size > 0, "--block-size 0: a page has one position or more");
        let valid = self.record_ms.is_finite() && self.record_ms >= 0.0;
        anyhow::ensure!(valid, "--record-ms {}: expected 0 or more", self.record_ms);
        Ok(LoadArgs {
            lanes: self.lanes,
            cost: self.step_cost()?,
            record_us: (self.record_ms * 1000.0) as u64,
            record_all: !self.record_on_demand,
            lattice,
            scheduler: SchedulerConfig {
                pages: self.cache_tokens / self.block_size + 1,
                page_size: self.block_size,
                max_num_seqs: self.max_num_seqs as usize,
                rows_max: self.max_num_batched_tokens as usize,
                max_model_len: self.max_model_len,
                prefix_cache: !self.no_enable_prefix_caching,
                eos: Box::default(),
            },
            queue_max: self.max_waiting,
            policy: self.policy()?,
            balance: load_balance(self.dp_load_balance),
            source: self.source()?,
            seconds: self.seconds,
            warm_up_seconds: self.warm_up.unwrap_or(self.seconds / 10.0),
            seed: self.seed,
        })
    }

    fn policy(&self) -> Result<Policy> {
        let padding_per_mille_max = match self.padding_max {
            None => Policy::default().padding_per_mille_max,
            Some(PADDING_OFF) => None,
            some => some,
        };
        let alignment = Alignment::parse(|name| std::env::var(name).ok())?;
        let step_ms_max = Policy::step_ms_max_of(self.step_ms_max, self.lanes);
        Ok(Policy { alignment, step_ms_max, padding_per_mille_max })
    }

    fn source(&self) -> Result<Source> {
        if let Some(path) = &self.requests {
            return Source::parse_recorded(&read(path)?).with_context(|| path.display().to_string());
        }
        let shape = Shape {
            prompt: self.prompt.clone(),
            output: self.output.clone(),
            prefixes: self.prefixes,
            prefix_tokens: self.prefix_tokens,
        };
        Ok(match self.concurrency {
            Some(concurrency) => Source::Closed { concurrency, shape },
            None => Source::Open { rate: self.rate, shape },
        })
    }

    fn step_cost(&self) -> Result<StepCost> {
        let cost = match &self.calibration {
            Some(path) => read(path)?.parse().with_context(|| path.display().to_string())?,
            None => StepCost::default(),
        };
        Ok(self.cost.iter().try_fold(cost, |cost, line| cost.with(line))?)
    }
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// In thousandths; 1000 is off.
fn parse_padding_or_off(text: &str) -> Result<u32, atom_group::PolicyError> {
    if text.trim() == "1" { Ok(PADDING_OFF) } else { parse_padding(text) }
}

/// No bound: all of a bucket may be padding.
const PADDING_OFF: u32 = 1000;
