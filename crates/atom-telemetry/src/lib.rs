//! What operators see of a running server: log lines and Prometheus metrics.
//!
//! * [`init_logging`] installs the process's one subscriber: single lines on standard error, filtered
//!   by a directive such as `info` or `atom_serve=debug,warn`.
//! * [`ServeMetrics`] are the counters and histograms of the HTTP side, in the text format that
//!   Prometheus scrapes, named as vLLM names its own but with the prefix `atom_`, so that a dashboard
//!   moves over by a search and replace.
//! * [`Exposition`] writes further lines in the same format for whoever owns plain atomics: the engine
//!   keeps its counters itself, and they are read when somebody scrapes.
//!
//! Labels have few values and none comes from a client: a model's name, a path or a user id never
//! becomes a label, since each new value is a series that lives as long as the process.
//!
//! Nothing here knows HTTP, the engine or a model.

#![forbid(unsafe_code)]

mod exposition;
mod logging;
mod serve;

pub use exposition::{Exposition, Kind, Series};
pub use logging::{LogError, init_logging};
pub use serve::{CONTENT_TYPE, Endpoint, InFlight, Outcome, ServeMetrics};
