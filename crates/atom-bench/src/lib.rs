//! The load client: measures any server that speaks the OpenAI API, over HTTP and nothing else.
//!
//! [`run`] takes [`BenchOptions`] and gives a [`Report`]. Two loads exist. *Levels* keep a fixed
//! number of requests in flight, one level after another, and report latencies and throughput.
//! *Soak* does so for a given time with random lengths and checks every answer: the asked number
//! of tokens, and the same text each time the same request comes around.
//!
//! | word | meaning |
//! |---|---|
//! | TTFT | from sending a request to its first token |
//! | ITL | between one piece of text and the next, over all pieces of all requests |
//! | TPOT | (last token - first token) / (tokens - 1), one figure a request |
//! | E2E | from sending a request to the end of its answer |
//!
//! Every prompt is different and made from a seed, so a prefix cache helps only where
//! `--shared-prefix` asks for it. Tokens are counted by the server (`usage`); when it does not,
//! pieces of the stream are counted instead, and the report says so.
//!
//! [`ServeBench`] is the command line; a binary needs [`ServeBench::run`] only.
//!
//! This crate never links the engine: what it measures is what any client sees.

#![forbid(unsafe_code)]

mod args;
mod calibrate;
mod client;
mod error;
mod measure;
mod options;
mod prompt;
mod report;
mod run;
mod soak;
mod sse;
mod target;
mod words;

#[cfg(test)]
mod fake_server;
#[cfg(test)]
mod tests;

pub use args::ServeBench;
pub use error::BenchError;
pub use measure::Spread;
pub use options::{BenchOptions, Endpoint, Load, Shape};
pub use prompt::PromptKind;
pub use report::{FailureCount, LevelReport, Report, SoakReport};
pub use run::run;
pub use target::Target;
