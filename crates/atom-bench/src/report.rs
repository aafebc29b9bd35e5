//! What came out: as a table for a person, as JSON for a program.

use crate::measure::{Spread, Tally};
use crate::options::Endpoint;
use serde::Serialize;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// The results of a bench.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The server.
    pub url: String,
    /// The model that was asked.
    pub model: String,
    /// `/v1/completions` or `/v1/chat/completions`.
    pub endpoint: &'static str,
    /// Tokens of a prompt, as asked for.
    pub input_tokens: usize,
    /// Tokens of an answer, as asked for.
    pub output_tokens: u32,
    /// Tokens that all prompts began with, as asked for.
    pub shared_prefix_tokens: usize,
    /// Whether the server was asked to go on past the end token.
    pub ignore_eos: bool,
    /// Of every request; soak chooses its own.
    pub temperature: f32,
    /// What the prompts were made from.
    pub seed: u64,
    /// One for each concurrency; one for a soak.
    pub levels: Vec<LevelReport>,
    /// What the checks of a soak found.
    pub soak: Option<SoakReport>,
    /// What a reader must know to trust the figures.
    pub notes: Vec<String>,
    /// The user stopped it before its end.
    pub interrupted: bool,
}

/// One level.
#[derive(Clone, Debug, Serialize)]
pub struct LevelReport {
    /// Requests in flight.
    pub concurrency: usize,
    /// Requests that got a whole answer (and, in a soak, the right one).
    pub completed: usize,
    /// Requests that did not.
    pub failed: usize,
    /// Requests of the level that were never sent, since it ended early.
    pub unsent: usize,
    /// Failures by kind.
    pub failures: Vec<FailureCount>,
    /// From the first request to the last answer.
    pub duration_s: f64,
    /// Answers a second.
    pub requests_per_s: f64,
    /// Tokens of answers a second.
    pub output_tokens_per_s: f64,
    /// Tokens of prompts and answers a second.
    pub total_tokens_per_s: f64,
    /// Of all prompts, as the server counted.
    pub prompt_tokens: u64,
    /// Of these, found in the server's prefix cache.
    pub cached_tokens: u64,
    /// Of all answers.
    pub output_tokens: u64,
    /// Time to the first token.
    pub ttft_ms: Option<Spread>,
    /// Time per token after the first.
    pub tpot_ms: Option<Spread>,
    /// Time between pieces of text.
    pub itl_ms: Option<Spread>,
    /// Time to the end.
    pub e2e_ms: Option<Spread>,
}

/// Failures of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FailureCount {
    /// The kind, in words.
    pub kind: String,
    /// How many.
    pub count: usize,
    /// What the first one said.
    pub first: String,
}

/// What a soak checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SoakReport {
    /// Different requests that were sent again and again.
    pub cases: usize,
    /// Answers that were compared with an earlier answer to the same request, and were equal.
    pub equal: usize,
}

impl LevelReport {
    pub(crate) fn new(concurrency: usize, tally: &Tally, unsent: usize, took: Duration) -> Self {
        // A level in which nothing was sent took no time and has no rates.
        let seconds = took.as_secs_f64();
        let rate = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let failures = tally.failures.iter().map(|(kind, (count, first))| FailureCount {
            kind: kind.to_string(),
            count: *count,
            first: first.clone(),
        });
        Self {
            concurrency,
            completed: tally.completed,
            failed: tally.failed(),
            unsent,
            failures: failures.collect(),
            duration_s: seconds,
            requests_per_s: rate(tally.completed as f64),
            output_tokens_per_s: rate(tally.output_tokens as f64),
            total_tokens_per_s: rate((tally.prompt_tokens + tally.output_tokens) as f64),
            prompt_tokens: tally.prompt_tokens,
            cached_tokens: tally.cached_tokens,
            output_tokens: tally.output_tokens,
            ttft_ms: tally.ttft.spread(),
            tpot_ms: tally.tpot.spread(),
            itl_ms: tally.itl.spread(),
            e2e_ms: tally.e2e.spread(),
        }
    }
}

impl Report {
    /// True when every request that was planned got its whole answer.
    pub fn is_clean(&self) -> bool {
        let levels_clean = self.levels.iter().all(|level| level.failed == 0 && level.unsent == 0);
        // A soak that compared nothing has checked nothing.
        let soak_clean = self.soak.is_none_or(|soak| soak.equal > 0);
        levels_clean && soak_clean && !self.interrupted && !self.levels.is_empty()
    }

    /// The report as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("strings and numbers always make JSON")
    }

    /// Writes [`to_json`](Self::to_json) to a file.
    pub fn write_json(&self, path: &Path) -> Result<(), crate::error::BenchError> {
        std::fs::write(path, self.to_json() + "\n")
            .map_err(|error| crate::error::BenchError::Write { path: path.into(), error })
    }

    fn rows(&self) -> Vec<(String, Vec<String>)> {
        let mut rows = Vec::new();
        let mut row = |name: &str, cell: &dyn Fn(&LevelReport) -> String| {
            rows.push((name.to_owned(), self.levels.iter().map(cell).collect::<Vec<_>>()));
        };
        row("concurrency", &|level| level.concurrency.to_string());
        row("requests completed", &|level| level.completed.to_string());
        row("requests failed", &|level| level.failed.to_string());
        if self.levels.iter().any(|level| level.unsent > 0) {
            row("requests not sent", &|level| level.unsent.to_string());
        }
        row("duration s", &|level| figure(level.duration_s));
        row("requests/s", &|level| figure(level.requests_per_s));
        row("output tokens/s", &|level| figure(level.output_tokens_per_s));
        row("total tokens/s", &|level| figure(level.total_tokens_per_s));
        let mean = |tokens: u64, level: &LevelReport| {
            if level.completed == 0 { "-".into() } else { figure(tokens as f64 / level.completed as f64) }
        };
        row("prompt tokens, mean", &|level| mean(level.prompt_tokens, level));
        row("  of them cached", &|level| mean(level.cached_tokens, level));
        row("output tokens, mean", &|level| mean(level.output_tokens, level));
        type Metric = fn(&LevelReport) -> Option<Spread>;
        let metrics: [(&str, Metric); 4] = [
            ("TTFT ms", |level| level.ttft_ms),
            ("TPOT ms", |level| level.tpot_ms),
            ("ITL ms", |level| level.itl_ms),
            ("E2E ms", |level| level.e2e_ms),
        ];
        for (name, metric) in metrics {
            type Part = fn(&Spread) -> f64;
            let parts: [(&str, Part); 4] =
                [("mean", |s| s.mean), ("p50", |s| s.p50), ("p90", |s| s.p90), ("p99", |s| s.p99)];
            for (part, of) in parts {
                let name = format!("{:9}{part}", if part == "mean" { name } else { "" });
                row(&name, &|level| metric(level).map_or_else(|| "-".into(), |spread| figure(of(&spread))));
            }
        }
        rows
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} at {}{}, seed {}", self.model, self.url, self.endpoint, self.seed)?;
        let up_to = if self.soak.is_some() { "up to " } else { "" };
        writeln!(
            f,
            "prompts of {up_to}{} tokens, answers of {up_to}{} tokens\n",
            self.input_tokens, self.output_tokens
        )?;
        let rows = self.rows();
        let name_width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let cell_width = rows.iter().flat_map(|(_, cells)| cells).map(String::len).max().unwrap_or(0).max(8);
        for (name, cells) in &rows {
            write!(f, "{name:name_width$}")?;
            for cell in cells {
                write!(f, "  {cell:>cell_width$}")?;
            }
            writeln!(f)?;
        }
        for level in &self.levels {
            for failure in &level.failures {
                writeln!(
                    f,
                    "\nfailed at concurrency {}: {} x {}; the first: {}",
                    level.concurrency, failure.count, failure.kind, failure.first
                )?;
            }
        }
        if let Some(soak) = self.soak {
            writeln!(
                f,
                "\nsoak: {} different requests, {} answers equal to an earlier one",
                soak.cases, soak.equal
            )?;
        }
        if self.interrupted {
            writeln!(f, "\ninterrupted: the figures are those until then")?;
        }
        for note in &self.notes {
            writeln!(f, "\nnote: {note}")?;
        }
        Ok(())
    }
}

impl Endpoint {
    /// How a request of this endpoint may end early, for a note.
    pub(crate) fn early_end_note(self, short: usize, asked_to_ignore: bool) -> String {
        let path = self.path();
        if asked_to_ignore {
            format!(
                "{short} answers of {path} ended before max_tokens although ignore_eos was sent; does the server know it?"
            )
        } else {
            format!(
                "{short} answers of {path} ended before max_tokens; --ignore-eos makes lengths equal where the server knows it"
            )
        }
    }
}

/// A number with about three digits.
fn figure(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 100.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}
