//! The command line of `atom bench serve`.

use crate::error::BenchError;
use crate::options::{BenchOptions, Endpoint, Load, Shape};
use crate::prompt::PromptKind;
use crate::report::Report;
use crate::target::Target;
use std::path::PathBuf;
use std::time::Duration;

/// Measure a running server: any that speaks the OpenAI API over plain HTTP.
///
/// Requests are kept in flight in a closed loop: each of N connections sends its next request when
/// its last answer has ended. For every N of --concurrency the table shows throughput and the
/// mean, 50th, 90th and 99th percentile of
///
///   TTFT  time to the first token: queue and prefill,
///   TPOT  time per token after the first, one figure a request: decode,
///   ITL   time between pieces of text, over all of them: stalls show here,
///   E2E   time to the end of the answer.
///
/// Prompts are made of random words, all different, and the same for the same --seed. A server
/// with a prefix cache knows them when the bench is run twice: the line "of them cached" tells, and
/// another --seed makes new ones. Their length is tuned to --input-len with two small requests.
/// With --random-ids they are token ids instead, exactly --input-len of them.
///
/// Ends with an error when any request failed. Examples:
///
///   atom bench serve --url http://127.0.0.1:8000
///   atom bench serve --concurrency 1,4,16 --input-len 1000 --output-len 100 --json out.json
///   atom bench serve --duration 60s --concurrency 16        (soak: checks every answer)
#[derive(Clone, Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct ServeBench {
    /// Address of the server; /v1 at its end may be left out. No https
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,

    /// Model to ask for [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,

    /// Which API: the prompt as it is, or as a user's message
    #[arg(long, value_enum, default_value_t = Endpoint::Completions)]
    pub endpoint: Endpoint,

    /// Requests in flight: a number, or several to measure one after another
    #[arg(
        long,
        visible_alias = "max-concurrency",
        value_name = "N,..",
        value_delimiter = ',',
        default_value = "1,8,32"
    )]
    pub concurrency: Vec<usize>,

    /// Requests of each level [default: 4 for each in flight, 16 at least]
    #[arg(long, visible_alias = "num-prompts", value_name = "N", conflicts_with = "duration")]
    pub requests: Option<usize>,

    /// Tokens of a prompt, nearly
    #[arg(long, visible_alias = "random-input-len", value_name = "TOKENS", default_value_t = 256)]
    pub input_len: usize,

    /// Tokens of an answer (max_tokens)
    #[arg(long, visible_alias = "random-output-len", value_name = "TOKENS", default_value_t = 128)]
    pub output_len: u32,

    /// Send token ids instead of words, drawn from 0 to below SIZE: the server's vocabulary
    ///
    /// Each request has its own, so experts of a mixture are met as evenly as its router does, and
    /// nothing depends on a tokenizer. For --endpoint completions, of servers that take lists of ids.
    #[arg(long, value_name = "SIZE")]
    pub random_ids: Option<u32>,

    /// Begin all prompts with the same tokens, of --input-len: shows what a prefix cache gives
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub shared_prefix: usize,

    /// Ask the server to go on past the end token, so that all answers have --output-len tokens
    ///
    /// An extension that many servers know; one that doesn't may refuse the request.
    #[arg(long)]
    pub ignore_eos: bool,

    /// 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.0, conflicts_with = "duration")]
    pub temperature: f32,

    /// Makes the prompts
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Requests before the first level that are not counted
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub warmup: usize,

    /// Longest time for one request; beyond it counts as failed (10s, 5m ..)
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    pub timeout: Duration,

    /// Soak for this long (60s, 5m ..) instead of measuring levels
    ///
    /// A set of requests with random lengths up to --input-len and --output-len, half greedy and
    /// half sampled with a seed, is sent over and over. Each answer must have exactly the tokens
    /// asked for (ignore_eos is always sent) and the same text every time. --concurrency must be
    /// one number.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub duration: Option<Duration>,

    /// Write the results to a file, too
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Bearer token, for servers that want one
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
}

impl ServeBench {
    /// All that `atom bench serve` does; Ctrl-C ends it early, with what was measured until then.
    ///
    /// # Errors
    /// It could not run, or it ran and some request failed: [`BenchError::Unclean`].
    pub async fn run(self) -> Result<(), BenchError> {
        let interrupt = async {
            if tokio::signal::ctrl_c().await.is_err() {
                // Without the signal there is no early end; the bench goes on.
                std::future::pending::<()>().await;
            }
        };
        let report = self.execute(interrupt).await?;
        if report.is_clean() {
            return Ok(());
        }
        Err(BenchError::Unclean {
            failed: report.levels.iter().map(|level| level.failed).sum(),
            unsent: report.levels.iter().map(|level| level.unsent).sum(),
            interrupted: report.interrupted,
        })
    }

    /// Runs the bench until its end or until `stop` resolves: progress on stderr, the table on
    /// stdout, JSON where asked. Failed requests are in the report; see [`Report::is_clean`].
    pub async fn execute(self, stop: impl Future<Output = ()>) -> Result<Report, BenchError> {
        let json = self.json.clone();
        if let Some(path) = &json {
            // Before the work, not after it: a path that can't be written is known now.
            let opened = std::fs::OpenOptions::new().create(true).append(true).open(path);
            opened.map_err(|error| BenchError::Write { path: path.clone(), error })?;
        }
        let report = crate::run(self.into_options()?, |line| eprintln!("{line}"), stop).await?;
        print!("{report}");
        if let Some(path) = &json {
            report.write_json(path)?;
        }
        Ok(report)
    }

    /// The options, parsed.
    pub fn into_options(self) -> Result<BenchOptions, BenchError> {
        let load = match self.duration {
            None => Load::Levels { concurrencies: self.concurrency, requests: self.requests },
            Some(duration) => match self.concurrency.as_slice() {
                &[concurrency] => Load::Soak { concurrency, duration },
                several => {
                    return Err(BenchError::Options(format!(
                        "--duration (soak) takes one --concurrency, not {}: for example --concurrency 16",
                        several.len()
                    )));
                }
            },
        };
        Ok(BenchOptions {
            target: Target::parse(&self.url)?,
            api_key: self.api_key.filter(|key| !key.is_empty()),
            model: self.model,
            endpoint: self.endpoint,
            prompts: self.random_ids.map_or(PromptKind::Words, |vocabulary| PromptKind::Ids { vocabulary }),
            shape: Shape {
                input_tokens: self.input_len,
                output_tokens: self.output_len,
                shared_prefix_tokens: self.shared_prefix,
            },
            ignore_eos: self.ignore_eos,
            temperature: self.temperature,
            seed: self.seed,
            warmup: self.warmup,
            timeout: self.timeout,
            load,
        })
    }
}

/// `90`, `90s`, `1500ms`, `5m`, `1h`: at most [`DURATION_MAX`].
fn parse_duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let seconds_per_unit = match unit {
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err("write a number with ms, s, m or h, such as 60s".into()),
    };
    let number: f64 =
        number.parse().map_err(|_| "write a number with ms, s, m or h, such as 60s".to_owned())?;
    let duration =
        Duration::try_from_secs_f64(number * seconds_per_unit).map_err(|error| error.to_string())?;
    if duration.is_zero() || duration > DURATION_MAX {
        return Err(format!("must be above 0 and at most {} h", DURATION_MAX.as_secs() / 3600));
    }
    Ok(duration)
}

/// A month: nobody waits for longer, and clocks can add it.
const DURATION_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_server::{Answer, FakeServer, right};
    use clap::Parser;

    #[derive(clap::Parser)]
    struct Program {
        #[command(flatten)]
        bench: ServeBench,
    }

    fn parse(args: &str) -> Result<BenchOptions, String> {
        let args = ["bench"].into_iter().chain(args.split_whitespace());
        let program = Program::try_parse_from(args).map_err(|error| error.to_string())?;
        program.bench.into_options().map_err(|error| error.to_string())
    }

    #[test]
    fn arguments_become_options() {
        let options = parse("--url http://h:1 --concurrency 2,4 --requests 9 --input-len 7").unwrap();
        assert_eq!(options.load, Load::Levels { concurrencies: vec![2, 4], requests: Some(9) });
        assert_eq!(options.shape, Shape { input_tokens: 7, output_tokens: 128, shared_prefix_tokens: 0 });
        let options = parse("--duration 1.5m --concurrency 16").unwrap();
        assert_eq!(options.load, Load::Soak { concurrency: 16, duration: Duration::from_secs(90) });
        let options = parse("--random-ids 151936").unwrap();
        assert_eq!(options.prompts, PromptKind::Ids { vocabulary: 151_936 });
        let options = parse("--max-concurrency 3 --num-prompts 5 --random-output-len 6").unwrap();
        assert_eq!(options.load, Load::Levels { concurrencies: vec![3], requests: Some(5) });
    }

    #[test]
    fn contradictions_are_refused() {
        for (args, part) in [
            ("--duration 60s", "one --concurrency, not 3"),
            ("--duration 60s --concurrency 2 --requests 4", "cannot be used with"),
            ("--duration 0s --concurrency 2", "above 0"),
            ("--duration 9999h --concurrency 2", "at most 720 h"),
            ("--timeout 5x", "such as 60s"),
            ("--timeout=-5s", "such as 60s"),
            ("--url https://h", "https is not spoken"),
            ("--endpoint edits", "completions"),
            ("--concurrency x", "invalid"),
        ] {
            let message = parse(args).unwrap_err();
            assert!(message.contains(part), "{args}: {message}");
        }
    }

    #[test]
    fn durations_are_read_in_their_units() {
        for (text, ms) in
            [("90", 90_000), ("90s", 90_000), ("1500ms", 1500), ("0.5m", 30_000), ("1h", 3_600_000)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)));
        }
    }

    #[tokio::test]
    async fn a_command_writes_its_file_and_ends_with_an_error_when_requests_failed() {
        let command = |url: &str, file: &std::path::Path| {
            let args = format!("bench --url {url} --concurrency 2 --requests 8 --json {}", file.display());
            Program::try_parse_from(args.split(' ')).unwrap().bench
        };
        let file = std::env::temp_dir().join(format!("atom-bench-{}.json", std::process::id()));
        let server = FakeServer::start(|_, body| Answer::Whole(right(body))).await;
        command(&server.url, &file).run().await.unwrap();
        let written: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(written["levels"][0]["completed"], 8);

        let server = FakeServer::start(|number, body| match number {
            // After two that calibrate and two that warm up.
            7 => Answer::Status(500, "no"),
            _ => Answer::Whole(right(body)),
        })
        .await;
        let error = command(&server.url, &file).run().await.unwrap_err();
        assert_eq!(error.to_string(), "1 requests failed and 0 were not sent");
        let written: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(written["levels"][0]["failures"][0]["kind"], "HTTP 500");
        std::fs::remove_file(&file).unwrap();

        let nowhere = command(&server.url, std::path::Path::new("/no/such/folder/x.json"));
        assert!(nowhere.run().await.unwrap_err().to_string().contains("/no/such/folder/x.json"));
    }
}
