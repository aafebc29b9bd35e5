//! Rank threads: where the scheduler's plans meet devices, in lockstep.
//!
//! [`Host`] starts one thread per rank and one supervisor. The first rank of a lane runs the lane's
//! loop (`lane.rs`): want, exchange, settle, commit, replay, apply. The lane's other ranks follow its
//! orders (`follower.rs`). Ranks meet inside a recording through shared memory (`collectives.rs`).
//!
//! * [`Host::submit`] takes requests from any thread; events come back through the sink given with them;
//! * [`Host::health`], [`Host::stats`] and [`Host::steps_after`] can be read at any time;
//! * masks of requests with a grammar are computed on threads of their own, beside the steps (`masks.rs`);
//! * a rank that fails, panics or is past its deadline ends its group's epoch: every wait of it returns,
//!   requests of a lost lane get an error, and the group forms again with a new rank in that seat, as
//!   often as it may (`supervisor.rs`). After that it ends: every request is answered, health says why.
//!
//! This crate must never know HTTP, text, or how a device computes.

#![forbid(unsafe_code)]

mod board;
mod collectives;
mod device;
mod follower;
mod host;
mod lane;
mod link;
mod mail;
mod masks;
mod outbox;
mod probe;
mod profile;
mod recent;
mod shared;
mod shares;
mod starter;
mod stats;
mod step_trace;
mod supervisor;
mod wish;

pub use atom_engine::LoadBalance;
pub use collectives::collective_bytes;
pub use host::{Host, HostConfig, HostError, Progress};
pub use link::{Link, LinkArgs, LinkError, SILENCE_MAX};
pub use outbox::{EventSink, StepSink};
pub use probe::{Probe, Stage};
pub use recent::StepRecord;
pub use shares::PaddingShares;
pub use stats::{EagerCause, EagerSteps, Health, LaneHealth, LaneStats};
