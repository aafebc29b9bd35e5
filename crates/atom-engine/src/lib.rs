//! Requests, scheduler, pages, prefix cache and plans.
#![forbid(unsafe_code)]

mod request;

pub use request::{EngineError, EngineLimits, Event, Refusal, Request};
