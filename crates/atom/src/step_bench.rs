//! `atom bench step`: how fast the step loop is, without HTTP and without text. The ranks are those of `atom serve`, in
//! this process: scheduler, lane loop, backend. Requests are random token ids, and what is measured is when their tokens
//! come, on this process's clock.

mod beside;
mod experts;
mod meter;
mod operators;
mod report;
mod scenarios;

pub(crate) use operators::{Observed, Workshop};
pub(crate) use scenarios::{Load, Part};

use crate::args::EngineArgs;
use crate::launch::{Ranks, launch_ranks};
use crate::output::say;
use anyhow::{Context, Result, ensure};
use atom_base::LaneId;
use atom_rank::StepRecord;
use beside::Beside;
use clap::{ArgMatches, Args};
use experts::{ExpertsRead, Mixture};
use meter::{Meter, Wave};
use operators::Operators;
use report::{Figure, Report, Steps, Unit};
use scenarios::Scenario;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Measure the step loop of a model in this process, without HTTP and without text.
///
/// Ranks are started as `atom serve` starts them, and get requests of random token ids of the whole
/// vocabulary, each its own. --load-dummy measures a shape without its weights; a tokenizer is not
/// needed. The table has medians with the first and the third quartile:
///
///   first token  from submitting a request that is alone to its token (--first)
///   next token   from step to step while a batch decodes, when all prompts are computed (--decode)
///   prefill      prompt tokens each second, from the first submission to the last token (--prefill)
///   load         tokens of answers each second, prompts included (--load)
///   beside       from token to token of streams in one lane while another one prefills (--beside)
///
/// Of a mixture it also says how many different experts the rows of a step choose, of each layer, and how
/// many that would be if every row chose evenly; a figure that is more than 5% away does not count. They
/// are counted in steps of the same kind that are not timed.
///
/// --max-num-seqs, if it isn't given, is raised to the most requests that a figure has. Examples:
///
///   atom bench step --model FOLDER --load-dummy --device cuda
///   atom bench step --model FOLDER --load-dummy --only decode --decode 1,8 --context 4096
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct StepBenchFlags {
    #[command(flatten)]
    engine: EngineArgs,

    /// Tokens of prompts whose first token is timed.
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', default_value = "128,1024")]
    first: Vec<usize>,

    /// Lanes that get such a prompt at the same time; the last of their tokens counts, and the figure's name says how many they
    /// are. Others are idle.
    #[arg(long, value_name = "N", default_value_t = 1)]
    first_lanes: usize,

    /// Requests that decode together.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,32,128,256")]
    decode: Vec<usize>,

    /// Tokens of prompts of --decode.
    #[arg(long, value_name = "TOKENS", default_value_t = 1024)]
    context: usize,

    /// Prompts that are computed together: REQUESTSxTOKENS.
    #[arg(long, value_name = "LOAD,..", value_delimiter = ',', default_value = "48x2048")]
    prefill: Vec<Load>,

    /// Requests that run to their end: REQUESTSxPROMPT+ANSWER.
    #[arg(long, value_name = "LOAD,..", value_delimiter = ',', default_value = "256x1024+256")]
    load: Vec<Load>,

    /// Requests that decode in lane 1, at --context, while lane 0 computes prompts: STREAMS+REQUESTSxTOKENS, such as
    /// 32+20x8192. Says how long the streams wait for their tokens meanwhile, and how fast the prompts are, and alone. For
    /// layouts of several lanes, whatever --only says. [default: none]
    #[arg(long, value_name = "LOAD,..", value_delimiter = ',')]
    beside: Vec<Beside>,

    /// Measure only these.
    #[arg(long, value_enum, value_name = "KIND,..", value_delimiter = ',')]
    only: Vec<Part>,

    /// Requests that decode in a step that is taken apart, at --context: what its operators take, and what share of a
    /// copy's speed they read weights, keys and values at. On a GPU only. [default: none is]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    operators: Vec<usize>,

    /// Steps of every batch of --decode that are timed.
    #[arg(long, value_name = "N", default_value_t = 100)]
    steps: usize,

    /// Times that the first token of each length is timed.
    #[arg(long, value_name = "N", default_value_t = 11)]
    first_repeats: usize,

    /// Times that each prefill is measured.
    #[arg(long, value_name = "N", default_value_t = 3)]
    prefill_repeats: usize,

    /// Times that each load is measured.
    #[arg(long, value_name = "N", default_value_t = 1)]
    load_repeats: usize,

    /// Write the figures to this file, too.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What figures are made with.
struct Bench<'a> {
    meter: Meter<'a>,
    mixture: Option<Mixture>,
    /// Of the largest step.
    rows_max: usize,
}

/// Measures what was asked for; `given` is where the flags come from.
pub(crate) fn run(mut flags: StepBenchFlags, given: &ArgMatches) -> Result<()> {
    let started = Instant::now();
    let (scenarios, apart) = (flags.scenarios()?, flags.taken_apart());
    if let Some(path) = &flags.json {
        // Before the work, not after it: a path that can't be written is known now.
        let opened = std::fs::OpenOptions::new().create(true).append(true).open(path);
        opened.with_context(|| format!("--json: writing {}", path.display()))?;
    }
    ensure!(flags.engine.nodes == 1, "bench step measures the ranks of one process; leave out --nodes");
    if given.value_source("max_num_seqs") != Some(clap::parser::ValueSource::CommandLine) {
        let all = scenarios.iter().chain(&apart);
        let most = all.map(|scenario| scenario.requests(1).requests);
        let most = most.chain(flags.beside.iter().map(Beside::requests_of_a_lane)).max().unwrap_or(1);
        flags.engine.max_num_seqs = flags.engine.max_num_seqs.max(u32::try_from(most)?);
    }
    let workshop = (!apart.is_empty()).then(Arc::<Workshop>::default);
    let ranks = launch_ranks(&flags.engine, workshop.clone())?;
    let start_s = started.elapsed().as_secs_f64();
    let rows_max = ranks.layout.step_rows.last().map_or(1, |&rows| rows as usize);
    for scenario in scenarios.iter().chain(&apart) {
        scenario.check(ranks.host.limits(), ranks.layout.page_size, rows_max)?;
    }
    let lanes = ranks.host.limits().lanes;
    ensure!(
        (1..=lanes).contains(&flags.first_lanes),
        "--first-lanes {}: there are {lanes} lanes",
        flags.first_lanes
    );
    let meter = Meter::new(&ranks.host, flags.engine.seed.unwrap_or(0));
    let mut bench = Bench { meter, mixture: Mixture::of(ranks.checkpoint.config()), rows_max };
    // What is done for the first time on the way, like code that a library brings in, is done now.
    bench.warm(&scenarios)?;
    for beside in &flags.beside {
        bench.finished(Load { requests: 1, ..beside.prompts() })?;
    }
    let before = steps(&ranks);
    let mut figures = Vec::with_capacity(scenarios.len());
    for scenario in &scenarios {
        let mut figure = flags.figure(&mut bench, scenario).with_context(|| scenario.name())?;
        if let (Scenario::First { .. }, lanes @ 2..) = (scenario, flags.first_lanes) {
            figure.name = format!("{} on each of {lanes} lanes", figure.name);
        }
        tracing::info!("{}: {:.3}", figure.name, figure.median);
        figures.push(figure);
    }
    for beside in &flags.beside {
        let made =
            bench.beside(beside, flags.context, ranks.layout.page_size).with_context(|| beside.name())?;
        made.iter().for_each(|figure| tracing::info!("{}: {:.3}", figure.name, figure.median));
        figures.extend(made);
    }
    let steps = steps(&ranks).since(&before);
    let apart = apart.iter().map(|scenario| {
        let workshop = workshop.as_ref().expect("there is one if a step is taken apart");
        bench.take_apart(workshop, scenario).with_context(|| format!("--operators, {}", scenario.name()))
    });
    let report = Report {
        atom: env!("CARGO_PKG_VERSION"),
        operators: apart.collect::<Result<_>>()?,
        model: ranks.name,
        description: ranks.checkpoint.description(),
        device: ranks.layout.device,
        plan: ranks.plan,
        start_s,
        figures,
        steps,
    };
    say(&report)?;
    if let Some(path) = &flags.json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n").with_context(|| format!("--json: writing {}", path.display()))?;
    }
    ranks.host.shutdown().map_err(anyhow::Error::msg)
}

impl StepBenchFlags {
    fn scenarios(&self) -> Result<Vec<Scenario>> {
        let counts = [
            ("--steps", self.steps),
            ("--context", self.context),
            ("--first-repeats", self.first_repeats),
            ("--prefill-repeats", self.prefill_repeats),
            ("--load-repeats", self.load_repeats),
        ];
        for (flag, count) in counts {
            ensure!(count > 0, "{flag} 0 measures nothing; use 1 or more");
        }
        let lists = [("--first", &self.first), ("--decode", &self.decode), ("--operators", &self.operators)];
        for (flag, list) in lists {
            ensure!(!list.contains(&0), "{flag} 0 measures nothing; use 1 or more");
        }
        let is_asked = |part| self.only.is_empty() || self.only.contains(&part);
        let mut scenarios = Vec::new();
        if is_asked(Part::First) {
            scenarios.extend(self.first.iter().map(|&prompt| Scenario::First { prompt }));
        }
        if is_asked(Part::Decode) {
            let (context, steps) = (self.context, self.steps);
            scenarios.extend(self.decode.iter().map(|&batch| Scenario::Decode { batch, context, steps }));
        }
        if is_asked(Part::Prefill) {
            for &load in &self.prefill {
                ensure!(
                    load.answer == 1,
                    "--prefill {}x{}+{}: prompts only; answers are measured by --load",
                    load.requests,
                    load.prompt,
                    load.answer
                );
                scenarios.push(Scenario::Prefill(load));
            }
        }
        if is_asked(Part::Load) {
            scenarios.extend(self.load.iter().map(|&load| Scenario::Load(load)));
        }
        Ok(scenarios)
    }

    /// Steps that are taken apart.
    fn taken_apart(&self) -> Vec<Scenario> {
        let decode = |&batch| Scenario::Decode { batch, context: self.context, steps: 1 };
        self.operators.iter().map(decode).collect()
    }

    fn figure(&self, bench: &mut Bench<'_>, scenario: &Scenario) -> Result<Figure> {
        let load = scenario.requests(bench.rows_max);
        let (unit, seen) = match *scenario {
            Scenario::First { prompt } => {
                let seen = (0..self.first_repeats)
                    .map(|_| bench.first_ms(prompt, self.first_lanes))
                    .collect::<Result<_>>()?;
                (Unit::Milliseconds, seen)
            }
            Scenario::Decode { steps, .. } => {
                let (seen, experts) = bench.decode(load, steps)?;
                let ms = seen.windows(2).map(|pair| (pair[1].at_us - pair[0].at_us) as f64 / 1e3).collect();
                let figure = Figure::new(scenario.name(), Unit::Milliseconds, ms);
                return Ok(Figure { experts, ..figure });
            }
            Scenario::Prefill(Load { requests, prompt, .. }) => {
                let rate = |wave: &Wave| (requests * prompt) as f64 / wave.whole().as_secs_f64();
                let once = |_| bench.finished(load).map(|wave| rate(&wave));
                (Unit::TokensEachSecond, (0..self.prefill_repeats).map(once).collect::<Result<_>>()?)
            }
            Scenario::Load(load) => {
                let rate = |wave: &Wave| wave.tokens() as f64 / wave.whole().as_secs_f64();
                let once = |_| bench.finished(load).map(|wave| rate(&wave));
                (Unit::TokensEachSecond, (0..self.load_repeats).map(once).collect::<Result<_>>()?)
            }
        };
        let experts =
            bench.experts(Load { answer: load.answer.min(COUNTED_ANSWER), ..load }, |steps| steps)?;
        Ok(Figure { experts, ..Figure::new(scenario.name(), unit, seen) })
    }
}

impl Bench<'_> {
    /// Milliseconds until each of so many lanes has the first token of a prompt, with which it is alone.
    fn first_ms(&mut self, prompt: usize, lanes: usize) -> Result<f64> {
        let mut wave = self.meter.alone(prompt, lanes)?;
        wave.hear_all()?;
        self.meter.settle()?;
        Ok(wave.whole().as_secs_f64() * 1e3)
    }

    /// `steps + 1` steps of the first lane, one after the other, in which all requests of a wave decode; and the experts
    /// that some steps after them read.
    fn decode(&mut self, load: Load, steps: usize) -> Result<(Vec<StepRecord>, Option<ExpertsRead>)> {
        let host = self.meter.host();
        ensure!(host.start_profile(), "somebody else records a profile");
        let mut wave = self.meter.together(load, None)?;
        wave.hear(|tracks| tracks.iter().all(|track| !track.times.is_empty()))?;
        let mut until = wave.tracks[0].times.len() + steps + STEPS_DROPPED + STEPS_LATE;
        wave.hear(|tracks| tracks[0].times.len() >= until || tracks[0].has_ended)?;
        if self.mixture.is_some() {
            host.count_experts(true);
            until = wave.tracks[0].times.len() + STEPS_COUNTED;
            wave.hear(|tracks| tracks[0].times.len() >= until || tracks[0].has_ended)?;
            host.count_experts(false);
        }
        let (seen, _) = host.stop_profile().context("a profile was begun")?;
        self.meter.end(wave)?;
        let seen = decoding(seen);
        let mut experts = self.mixture.and_then(|mixture| mixture.read(&seen));
        if experts.is_none() {
            // A model so small that its requests had ended before anybody asked.
            experts = self.experts(load, decoding)?;
        }
        let timed = seen.into_iter().filter(|step| step.distinct_experts == 0);
        // The first may have been planned before the last prompt was computed.
        let timed: Vec<StepRecord> = timed.skip(STEPS_DROPPED).take(steps + 1).collect();
        let is_whole =
            timed.len() == steps + 1 && timed.windows(2).all(|pair| pair[0].step.0 + 1 == pair[1].step.0);
        ensure!(
            is_whole,
            "{} of {} steps in a row had all of the {} requests: the KV cache is too small for them",
            timed.len(),
            steps + 1,
            load.requests
        );
        Ok((timed, experts))
    }

    /// A step in which all requests of a batch decode, taken apart.
    fn take_apart(&mut self, workshop: &Workshop, scenario: &Scenario) -> Result<Operators> {
        let load = scenario.requests(self.rows_max);
        let experts_read = self.mixture.map_or(0.0, |mixture| mixture.expected(load.requests as u32));
        workshop.ask(load.requests, experts_read);
        let mut wave = self.meter.together(load, None)?;
        wave.hear(|tracks| tracks.iter().all(|track| !track.times.is_empty()))?;
        let start = Instant::now();
        let times = loop {
            if let Some(times) = workshop.take() {
                break times?;
            }
            ensure!(start.elapsed() < SILENCE_MAX, "no step came in which all {} decode", load.requests);
            self.meter.look()?;
        };
        self.meter.end(wave)?;
        Ok(Operators::new((load.requests, load.prompt), times))
    }

    /// A wave that ran to its end.
    fn finished(&mut self, load: Load) -> Result<Wave> {
        let mut wave = self.meter.together(load, None)?;
        wave.hear_all()?;
        self.meter.settle()?;
        Ok(wave)
    }

    /// The experts that those steps of a wave read that are `meant`, of a mixture.
    fn experts(
        &mut self,
        load: Load,
        meant: impl Fn(Vec<StepRecord>) -> Vec<StepRecord>,
    ) -> Result<Option<ExpertsRead>> {
        let Some(mixture) = self.mixture else { return Ok(None) };
        let host = self.meter.host();
        ensure!(host.start_profile(), "somebody else records a profile");
        host.count_experts(true);
        self.finished(load)?;
        host.count_experts(false);
        let (seen, _) = host.stop_profile().context("a profile was begun")?;
        Ok(mixture.read(&meant(seen)))
    }

    /// Computes one prompt of every length, and some tokens behind it.
    fn warm(&mut self, scenarios: &[Scenario]) -> Result<()> {
        for scenario in scenarios {
            let Load { prompt, answer, .. } = scenario.requests(self.rows_max);
            self.finished(Load { requests: 1, prompt, answer: answer.min(WARM_TOKENS) })?;
        }
        Ok(())
    }
}

/// Steps of the first lane in which nobody computes a prompt and as many decode as in any of them.
fn decoding(mut steps: Vec<StepRecord>) -> Vec<StepRecord> {
    steps.retain(|step| step.lane == LaneId(0));
    let full = steps.iter().map(|step| step.decode_rows).max().unwrap_or(0);
    steps.retain(|step| step.decode_rows == full && step.prefill_rows == 0);
    steps
}

/// Of all lanes since start.
fn steps(ranks: &Ranks) -> Steps {
    let mut steps = Steps::default();
    for lane in ranks.host.stats() {
        steps.replays += lane.replays;
        steps.eager += lane.eager_steps.total();
        steps.rows += lane.real_rows;
        steps.padding_rows += lane.padding_rows;
        steps.preempted += lane.counters.preempted;
    }
    steps
}

impl Steps {
    fn since(self, before: &Self) -> Self {
        Self {
            replays: self.replays - before.replays,
            eager: self.eager - before.eager,
            rows: self.rows - before.rows,
            padding_rows: self.padding_rows - before.padding_rows,
            preempted: self.preempted - before.preempted,
        }
    }
}

/// Until a step is taken apart.
const SILENCE_MAX: Duration = Duration::from_secs(120);
/// Steps of a batch that are not timed, at its beginning.
const STEPS_DROPPED: usize = 2;
/// More of them at its end: tokens come from another thread than the records of steps.
const STEPS_LATE: usize = 4;
/// Steps of a batch that count experts, after those that are timed.
const STEPS_COUNTED: usize = 8;
/// Tokens of answers of a load that counts experts: its later steps are as those.
const COUNTED_ANSWER: usize = 16;
/// Tokens behind each prompt that warms up.
const WARM_TOKENS: usize = 8;
