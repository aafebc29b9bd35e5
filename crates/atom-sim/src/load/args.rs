//! What load is simulated, on what group. Parsed once.

use crate::cost::StepCost;
use atom_base::limits::LANES_MAX;
use atom_engine::{LoadBalance, SchedulerConfig};
use atom_group::{LatticeArgs, LatticeError, Policy};
use std::ops::RangeInclusive;
use std::str::FromStr;
use thiserror::Error;

/// What a user asks for.
#[derive(Clone, Debug)]
pub struct LoadArgs {
    /// Lanes of the group.
    pub lanes: usize,
    /// What a step costs.
    pub cost: StepCost,
    /// µs that a recording takes.
    pub record_us: u64,
    /// Record every bucket before serving.
    pub record_all: bool,
    /// Legal step shapes.
    pub lattice: LatticeArgs,
    /// Every lane's scheduler; its bounds of rows and requests are those of `lattice`.
    pub scheduler: SchedulerConfig,
    /// Requests that may wait in a lane.
    pub queue_max: usize,
    /// What the group may hold back, cut or cap.
    pub policy: Policy,
    /// How requests are dealt to lanes.
    pub balance: LoadBalance,
    /// When requests come, and how long they are.
    pub source: Source,
    /// Requests come for so long.
    pub seconds: f64,
    /// What happens before is not counted in rates and times.
    pub warm_up_seconds: f64,
    /// Of everything that is drawn.
    pub seed: u64,
}

/// Where requests come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// They come when they come: in the mean `rate` a second, apart by exponentially distributed times.
    Open {
        /// Requests a second.
        rate: f64,
        /// How long they are.
        shape: Shape,
    },
    /// So many users, each of whom asks again once answered.
    Closed {
        /// Users.
        concurrency: usize,
        /// How long requests are.
        shape: Shape,
    },
    /// As written down.
    Recorded(Vec<Recorded>),
}

/// How long requests are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Prompt tokens, shared ones included.
    pub prompt: Length,
    /// Tokens to generate.
    pub output: Length,
    /// Prompts begin alike in so many ways; 0: all differ.
    pub prefixes: usize,
    /// Tokens that prompts of one prefix share.
    pub prefix_tokens: usize,
}

/// Every number of the range is as likely.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Length(pub RangeInclusive<usize>);

/// A line of a recorded load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recorded {
    /// Arrival, seconds since the start.
    pub at_seconds: f64,
    /// Prompt tokens.
    pub prompt: usize,
    /// Tokens to generate.
    pub output: usize,
}

/// A load that can't be: the user's fault.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum LoadError {
    /// No lanes, or more than a group may have.
    #[error("--lanes {0}: a group has from 1 to {max} lanes", max = LANES_MAX)]
    Lanes(usize),
    /// Step shapes that can't be.
    #[error(transparent)]
    Lattice(#[from] LatticeError),
    /// Not `N` or `N..M`.
    #[error("{0:?}: expected a length such as 512, or a range such as 128..1024, of 1 token or more")]
    Length(String),
    /// A number that makes no sense here.
    #[error("{what} {got}: expected {expected}")]
    Number {
        /// The flag.
        what: &'static str,
        /// What it was.
        got: f64,
        /// What it may be.
        expected: &'static str,
    },
    /// A line of a recorded load.
    #[error(
        "line {line} of the load, {text:?}: expected arrival in seconds, prompt tokens and output tokens (1 or more \
         each), apart by spaces or commas, in order of arrival"
    )]
    Recorded {
        /// Counted from 1.
        line: usize,
        /// What was there.
        text: String,
    },
    /// A request that no lane could ever run.
    #[error(
        "requests of up to {tokens} tokens don't fit: a lane's cache holds {cache}, and a request may have {model_len}"
    )]
    NeverFits {
        /// Prompt and output together.
        tokens: usize,
        /// Positions of a lane's cache.
        cache: usize,
        /// `--max-model-len`.
        model_len: usize,
    },
}

impl FromStr for Length {
    type Err = LoadError;

    fn from_str(text: &str) -> Result<Self, LoadError> {
        let number = |part: &str| part.trim().parse::<usize>().ok();
        let range = match text.split_once("..") {
            Some((from, to)) => number(from).zip(number(to)).map(|(from, to)| from..=to),
            None => number(text).map(|length| length..=length),
        };
        let valid = range.filter(|range| *range.start() > 0 && !range.is_empty());
        valid.map(Self).ok_or_else(|| LoadError::Length(text.to_owned()))
    }
}

impl Source {
    /// Reads a recorded load: a line for each request, comments from `#`.
    pub fn parse_recorded(text: &str) -> Result<Self, LoadError> {
        let mut requests: Vec<Recorded> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let fields = line.split_once('#').map_or(line, |(line, _)| line);
            let mut fields = fields.split([',', ' ', '\t']).filter(|field| !field.is_empty()).peekable();
            if fields.peek().is_none() {
                continue;
            }
            let last = requests.last().map_or(0.0, |r| r.at_seconds);
            let at =
                fields.next().and_then(|f| f.parse().ok()).filter(|at: &f64| *at >= last && at.is_finite());
            let mut length =
                || fields.next().and_then(|f| f.parse().ok()).filter(|&tokens: &usize| tokens > 0);
            let request = at.zip(length()).zip(length()).filter(|_| fields.next().is_none());
            let ((at_seconds, prompt), output) = request
                .ok_or_else(|| LoadError::Recorded { line: index + 1, text: line.trim().to_owned() })?;
            requests.push(Recorded { at_seconds, prompt, output });
        }
        Ok(Self::Recorded(requests))
    }

    /// Tokens of the longest request.
    fn tokens_max(&self) -> usize {
        match self {
            Self::Open { shape, .. } | Self::Closed { shape, .. } => {
                shape.prompt.0.end() + shape.output.0.end()
            }
            Self::Recorded(requests) => requests.iter().map(|r| r.prompt + r.output).max().unwrap_or(0),
        }
    }
}

impl LoadArgs {
    pub(crate) fn check(&self) -> Result<(), LoadError> {
        if !(1..=LANES_MAX).contains(&self.lanes) {
            return Err(LoadError::Lanes(self.lanes));
        }
        let number = |what, got, ok, expected| {
            if ok { Ok(()) } else { Err(LoadError::Number { what, got, expected }) }
        };
        let (seconds, warm_up) = (self.seconds, self.warm_up_seconds);
        let is_time = seconds.is_finite() && seconds > 0.0 && seconds <= SECONDS_MAX;
        number("--seconds", seconds, is_time, "more than 0, and 1,000,000 at the most")?;
        let is_before = (0.0..seconds).contains(&warm_up);
        number("--warm-up", warm_up, is_before, "0 or more, and less than --seconds")?;
        match &self.source {
            &Source::Open { rate, .. } => {
                number("--rate", rate, rate > 0.0 && rate.is_finite(), "more than 0 requests a second")?;
            }
            &Source::Closed { concurrency, .. } => {
                number("--concurrency", concurrency as f64, concurrency > 0, "1 user or more")?;
            }
            Source::Recorded(_) => {}
        }
        let (tokens, cache) =
            (self.source.tokens_max(), (self.scheduler.pages - 1) * self.scheduler.page_size);
        let model_len = self.scheduler.max_model_len;
        if tokens > cache || tokens > model_len {
            return Err(LoadError::NeverFits { tokens, cache, model_len });
        }
        Ok(())
    }
}

/// Eleven days: beyond that µs would still fit, but nobody waits.
const SECONDS_MAX: f64 = 1e6;
