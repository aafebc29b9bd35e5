//! The bench itself: make ready, keep requests in flight, add up.

use crate::calibrate::Calibration;
use crate::client::{Call, Client, Job, Sample};
use crate::error::{BenchError, Failure, FailureKind};
use crate::measure::Tally;
use crate::options::{BenchOptions, Endpoint, Load, Shape};
use crate::prompt::{PromptKind, Prompts};
use crate::report::{LevelReport, Report};
use crate::soak::Soak;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Where requests come from, and what an answer must be.
pub(crate) trait Workload: Send + Sync + 'static {
    /// The next request; none ends the worker that asks.
    fn next(&self) -> Option<Job>;

    /// Whether a whole answer is also a right one.
    fn judge(&self, job: &Job, sample: &Sample) -> Result<(), Failure>;

    /// Requests that nobody asked for in the end.
    fn unsent(&self) -> usize;
}

/// A server that fails this often in a row, in one worker, is gone: that worker stops.
const FAILURES_IN_A_ROW_MAX: usize = 5;
/// Each request in flight of a level is followed by this many more.
const REQUESTS_PER_SEAT: usize = 4;
/// So that a level of one has percentiles at all.
const REQUESTS_MIN: usize = 16;

/// Measures a server.
///
/// `tell` hears what goes on, a line at a time. When `stop` resolves, requests in flight are
/// abandoned and counted as interrupted, and the report covers what was done until then.
///
/// # Errors
/// The server can't be reached, lists no model, or fails the first requests. Failures after that
/// are counted in the report; ask [`Report::is_clean`].
pub async fn run(
    options: BenchOptions,
    tell: impl Fn(&str),
    stop: impl Future<Output = ()>,
) -> Result<Report, BenchError> {
    check(&options)?;
    tokio::pin!(stop);
    let ready = tokio::select! {
        ready = Ready::make(&options, &tell) => ready?,
        () = &mut stop => return Err(BenchError::Interrupted),
    };
    let (stopper, stopped) = watch::channel(false);
    let measure = ready.measure(&options, &tell, stopped);
    tokio::pin!(measure);
    tokio::select! {
        report = &mut measure => return Ok(report),
        () = &mut stop => {}
    }
    stopper.send_replace(true);
    Ok(measure.await)
}

/// A server that answered its first requests.
struct Ready {
    call: Arc<Call>,
    prompts: Prompts,
    calibration: Calibration,
    notes: Vec<String>,
}

impl Ready {
    async fn make(options: &BenchOptions, tell: &impl Fn(&str)) -> Result<Self, BenchError> {
        let url = options.target.to_string();
        let failed = |while_doing| {
            let url = url.clone();
            move |failure: Failure| BenchError::NotServing { url, while_doing, why: failure.to_string() }
        };
        let mut call = Call {
            target: options.target.clone(),
            api_key: options.api_key.clone(),
            model: options.model.clone().unwrap_or_default(),
            endpoint: options.endpoint,
            ignore_eos: options.ignore_eos || matches!(options.load, Load::Soak { .. }),
            timeout: options.timeout,
        };
        if options.model.is_none() {
            let mut client = Client::new(Arc::new(call.clone()));
            call.model = client.first_model().await.map_err(failed("GET /v1/models"))?;
            tell(&format!("model: {} (the first that {url} lists)", call.model));
        }
        let call = Arc::new(call);
        let mut client = Client::new(Arc::clone(&call));
        let mut prompts = Prompts { seed: options.seed, kind: options.prompts, shared: 0 };
        let mut notes = Vec::new();
        let Shape { input_tokens, output_tokens, shared_prefix_tokens } = options.shape;
        let calibration = if let PromptKind::Ids { vocabulary } = options.prompts {
            let counted = Calibration::count_ids(&mut client, prompts, input_tokens).await;
            match counted.map_err(failed("the first request"))? {
                Some(count) if count != input_tokens as u64 => {
                    notes
                        .push(format!("the server counts {count} tokens where {input_tokens} ids were sent"));
                }
                _ => {}
            }
            tell(&format!("prompts of {input_tokens} token ids below {vocabulary}"));
            Calibration::IDS
        } else {
            let measured = Calibration::measure(&mut client, prompts, input_tokens);
            let calibration = measured.await.map_err(failed("the first request"))?.unwrap_or_else(|| {
                notes.push("the server counts no prompt tokens: a word is taken for a token".into());
                Calibration::ASSUMED
            });
            let words = calibration.words(input_tokens);
            tell(&format!("prompts of {words} words are about {input_tokens} tokens"));
            calibration
        };
        let words = calibration.words(input_tokens);
        prompts.shared = calibration.words_of_part(shared_prefix_tokens);
        for number in 0..options.warmup {
            let job = Job {
                number,
                prompt: prompts.prompt(number as u64, words),
                max_tokens: output_tokens,
                temperature: options.temperature,
                seed: None,
            };
            client.complete(&job).await.map_err(failed("a warm-up request"))?;
        }
        Ok(Self { call, prompts, calibration, notes })
    }

    async fn measure(
        mut self,
        options: &BenchOptions,
        tell: &impl Fn(&str),
        stopped: watch::Receiver<bool>,
    ) -> Report {
        let mut report = Report {
            url: options.target.to_string(),
            model: self.call.model.clone(),
            endpoint: options.endpoint.path(),
            input_tokens: options.shape.input_tokens,
            output_tokens: options.shape.output_tokens,
            shared_prefix_tokens: options.shape.shared_prefix_tokens,
            ignore_eos: self.call.ignore_eos,
            temperature: options.temperature,
            seed: options.seed,
            levels: Vec::new(),
            soak: None,
            notes: std::mem::take(&mut self.notes),
            interrupted: false,
        };
        match &options.load {
            Load::Levels { concurrencies, requests } => {
                for (number, &concurrency) in concurrencies.iter().enumerate() {
                    let requests = requests.unwrap_or((REQUESTS_PER_SEAT * concurrency).max(REQUESTS_MIN));
                    tell(&format!("concurrency {concurrency}: {requests} requests"));
                    let batch = Arc::new(self.batch(options, number, requests));
                    self.level(&mut report, batch, concurrency, tell, &stopped).await;
                    if *stopped.borrow() {
                        break;
                    }
                    if report.levels.last().is_some_and(|level| level.completed == 0) {
                        let left_out = concurrencies.len() - number - 1;
                        if left_out > 0 {
                            let note = format!("nothing succeeded: {left_out} further levels were left out");
                            report.notes.push(note);
                        }
                        break;
                    }
                }
            }
            Load::Soak { concurrency, duration } => {
                let seconds = duration.as_secs_f64();
                let soak = Arc::new(Soak::new(
                    self.prompts,
                    self.calibration,
                    options.shape,
                    *concurrency,
                    *duration,
                ));
                tell(&format!("soak: {} requests over and over for {seconds} s", soak.cases()));
                self.level(&mut report, Arc::clone(&soak), *concurrency, tell, &stopped).await;
                report.soak = Some(soak.report());
            }
        }
        report.interrupted = *stopped.borrow();
        report
    }

    /// The requests of a level: prompts that no other level has.
    fn batch(&self, options: &BenchOptions, level: usize, requests: usize) -> Batch {
        let words = self.calibration.words(options.shape.input_tokens);
        let jobs = (0..requests).map(|number| {
            // Level 0 of the numbering is the warm-up.
            let index = (level as u64 + 1) << 32 | number as u64;
            Job {
                number,
                prompt: self.prompts.prompt(index, words),
                max_tokens: options.shape.output_tokens,
                temperature: options.temperature,
                seed: (options.temperature > 0.0).then_some(index),
            }
        });
        Batch { jobs: jobs.collect(), next: AtomicUsize::new(0) }
    }

    async fn level(
        &self,
        report: &mut Report,
        workload: Arc<impl Workload>,
        concurrency: usize,
        tell: &impl Fn(&str),
        stopped: &watch::Receiver<bool>,
    ) {
        let (tally, took) = drive(&self.call, &workload, concurrency, stopped).await;
        let level = LevelReport::new(concurrency, &tally, workload.unsent(), took);
        tell(&format!(
            "concurrency {concurrency}: {} completed, {} failed in {:.1} s, {:.1} output tokens/s",
            level.completed, level.failed, level.duration_s, level.output_tokens_per_s
        ));
        if tally.uncounted > 0 {
            report.notes.push(format!(
                "concurrency {concurrency}: {} answers came without usage; pieces of text were counted as tokens",
                tally.uncounted
            ));
        }
        if tally.short > 0 {
            report.notes.push(self.call.endpoint.early_end_note(tally.short, self.call.ignore_eos));
        }
        report.levels.push(level);
    }
}

/// A list of requests, each sent once.
struct Batch {
    jobs: Vec<Job>,
    next: AtomicUsize,
}

impl Workload for Batch {
    fn next(&self) -> Option<Job> {
        // Relaxed: the counter alone is shared.
        self.jobs.get(self.next.fetch_add(1, Ordering::Relaxed)).cloned()
    }

    fn judge(&self, _job: &Job, _sample: &Sample) -> Result<(), Failure> {
        Ok(())
    }

    fn unsent(&self) -> usize {
        self.jobs.len().saturating_sub(self.next.load(Ordering::Relaxed))
    }
}

/// Keeps `concurrency` requests in flight until the workload has no more, each on a connection of
/// its own.
async fn drive(
    call: &Arc<Call>,
    workload: &Arc<impl Workload>,
    concurrency: usize,
    stopped: &watch::Receiver<bool>,
) -> (Tally, Duration) {
    let started = Instant::now();
    let mut workers = JoinSet::new();
    for _ in 0..concurrency {
        workers.spawn(work(Client::new(Arc::clone(call)), Arc::clone(workload), stopped.clone()));
    }
    let mut total = Tally::new();
    while let Some(worker) = workers.join_next().await {
        total.merge(worker.expect("a worker neither panics nor is aborted"));
    }
    (total, started.elapsed())
}

async fn work(mut client: Client, workload: Arc<impl Workload>, mut stopped: watch::Receiver<bool>) -> Tally {
    let mut tally = Tally::new();
    let mut failures_in_a_row = 0;
    while failures_in_a_row < FAILURES_IN_A_ROW_MAX
        && !*stopped.borrow()
        && let Some(job) = workload.next()
    {
        let answer = tokio::select! {
            answer = client.complete(&job) => answer,
            _ = stopped.wait_for(|&stopped| stopped) => {
                Err(Failure::new(FailureKind::Interrupted, "stopped by the user"))
            }
        };
        match answer.and_then(|sample| workload.judge(&job, &sample).map(|()| sample)) {
            Ok(sample) => {
                failures_in_a_row = 0;
                tally.add(&sample, job.max_tokens);
            }
            Err(failure) => {
                failures_in_a_row += 1;
                tally.fail(failure);
            }
        }
    }
    tally
}

fn check(options: &BenchOptions) -> Result<(), BenchError> {
    let refuse = |why: String| Err(BenchError::Options(why));
    let Shape { input_tokens, output_tokens, shared_prefix_tokens } = options.shape;
    if input_tokens == 0 || output_tokens == 0 {
        return refuse(format!(
            "--input-len {input_tokens} and --output-len {output_tokens}: both must be 1 or more"
        ));
    }
    if shared_prefix_tokens > input_tokens {
        return refuse(format!(
            "--shared-prefix {shared_prefix_tokens} is longer than --input-len {input_tokens}, of which it is a part"
        ));
    }
    if let PromptKind::Ids { vocabulary } = options.prompts {
        if options.endpoint == Endpoint::Chat {
            return refuse("--random-ids is for --endpoint completions: messages are text".into());
        }
        if vocabulary == 0 {
            return refuse("--random-ids 0: a vocabulary has 1 token or more".into());
        }
    }
    if !(0.0..=2.0).contains(&options.temperature) {
        return refuse(format!("--temperature {} must be from 0 to 2", options.temperature));
    }
    match &options.load {
        Load::Levels { concurrencies, requests } => {
            if concurrencies.is_empty() || concurrencies.contains(&0) || *requests == Some(0) {
                return refuse("--concurrency and --requests must be 1 or more".into());
            }
        }
        Load::Soak { concurrency, duration } => {
            if *concurrency == 0 || duration.is_zero() {
                return refuse("a soak needs a --concurrency and a --duration above 0".into());
            }
        }
    }
    Ok(())
}
