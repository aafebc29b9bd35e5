//! Requests, scheduler, pages, prefix cache and plans: what one lane runs next, as plain data.
//!
//! * [`Request`] comes in, [`Event`]s go out; [`EngineLimits::check`] refuses what can never run;
//! * [`Scheduler`]: `want` (no side effect), `commit` (allocates exactly what the group granted, fills a
//!   [`Plan`]), `apply` (takes in what the step computed);
//! * [`Grammar`] and [`TokenConstraint`]: what a request may be held to; [`MaskWork`] is handed out for others
//!   to compute, and [`Metered`] bounds what they take;
//! * [`Balancer`]: which lane a request goes to;
//! * [`Pages`] and [`Lease`]: ownership of the KV cache, and the prefix cache.
//!
//! This crate never sees a pointer, a device, a socket or a clock: time comes in as a number.

#![forbid(unsafe_code)]

mod allowance;
mod balance;
mod constraint;
mod pages;
mod plan;
mod request;
mod scheduler;
mod sequence;

pub use allowance::{Allowance, Metered, Overdrawn, Spent};
pub use balance::{Balancer, LaneLoad, LoadBalance, Placement};
pub use constraint::{Grammar, GrammarRef, MaskWork, TokenConstraint};
pub use pages::{Lease, Pages, Prefix};
pub use plan::Plan;
pub use request::{EngineError, EngineLimits, Event, Refusal, Request};
pub use scheduler::{Counters, Events, Scheduler, SchedulerConfig, Want};
