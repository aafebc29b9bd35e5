//! What to measure, checked.

use crate::prompt::PromptKind;
use crate::target::Target;
use std::time::Duration;

/// Everything a bench depends on.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// The server.
    pub target: Target,
    /// Sent as a bearer token.
    pub api_key: Option<String>,
    /// The model to ask for; none: the first that the server lists.
    pub model: Option<String>,
    /// Which API.
    pub endpoint: Endpoint,
    /// What prompts are made of.
    pub prompts: PromptKind,
    /// How long prompts and answers are.
    pub shape: Shape,
    /// Ask the server to go on past the model's end token.
    pub ignore_eos: bool,
    /// 0 is greedy.
    pub temperature: f32,
    /// Makes the prompts, and the requests' own seeds.
    pub seed: u64,
    /// Requests before the first level that are not counted.
    pub warmup: usize,
    /// Longest time for one request.
    pub timeout: Duration,
    /// How much at once, and for how long.
    pub load: Load,
}

/// Which of the two APIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Endpoint {
    /// `/v1/completions`: the prompt as it is.
    Completions,
    /// `/v1/chat/completions`: the prompt as a user's message.
    Chat,
}

/// Lengths in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Of a prompt, shared prefix included.
    pub input_tokens: usize,
    /// Of an answer (`max_tokens`).
    pub output_tokens: u32,
    /// Of the beginning that all prompts have in common.
    pub shared_prefix_tokens: usize,
}

/// How much at once, and for how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Load {
    /// One level after another, each with this many requests in flight.
    Levels {
        /// Requests in flight.
        concurrencies: Vec<usize>,
        /// Requests of each level; none: four for each in flight, 16 at least.
        requests: Option<usize>,
    },
    /// Random lengths up to those of the shape, each answer checked.
    Soak {
        /// Requests in flight.
        concurrency: usize,
        /// No request begins after this.
        duration: Duration,
    },
}

impl Endpoint {
    /// The path below the server's address.
    pub fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}
