//! A seeded world: N lanes, faults, a virtual clock and a cost model, around the scheduler, the
//! settling and the exchange that ship.
//!
//! Nothing of what is under simulation is copied or patched: [`atom_engine::Scheduler`] plans,
//! [`atom_group::settle`] decides. What is simulated is the rest.
//!
//! * [`FakeModel`]: the next token is a hash of all tokens before it, so a request alone has one right
//!   [`Answer`];
//! * [`FakeDevice`]: page tables and a KV cache as a rank keeps them. The hash is read back through
//!   them, and each read, write and overlap is checked, so a fault in pages, tables, prefix cache,
//!   chunks or preemption becomes a [`Broken`] or a wrong token;
//! * [`Lane`]: a scheduler over such a device, with a [`Ledger`] that compares each event with the
//!   right answer, and checks of order, grants and counters around each call;
//! * [`Member`]: a lane with its copy of the group's state;
//! * [`World`]: members in lock step, disturbed by a script drawn from the seed: uneven load, aborts,
//!   preemptions, late lanes, lane faults, and the calamities that end a group;
//! * [`run_seeds`]: many worlds and one [`Report`]. A failing seed says how to repeat it;
//! * [`explore`]: small groups in every order of events that there is;
//! * [`Replayed`]: a step trace, of a world or of a server, settled again, compared and drawn.
//!
//!
//! Beside the worlds, which look for faults, there is load, which looks for time:
//!
//! * [`run_load`]: requests on a group of up to 1,024 lanes, dealt by the shipped balancer, and a
//!   [`LoadReport`] of throughput, waiting, padding and alignment;
//! * [`StepCost`]: what a step takes there, and [`fit`]: its parameters from measured steps.
//!
//! ```
//! use atom_sim::{WorldArgs, WorldOptions, run_seeds};
//! let options = WorldOptions::new(WorldArgs { lanes: 2, requests: 8, ..WorldArgs::default() })?;
//! let report = run_seeds(0..3, &options);
//! assert!(report.failures.is_empty(), "{report}");
//! # Ok::<(), atom_sim::ArgsError>(())
//! ```
//!
//! This crate never waits, reads no clock and starts no thread: equal seeds give equal worlds.

#![forbid(unsafe_code)]

mod broken;
mod cost;
mod device;
mod dice;
mod drawing;
pub mod explore;
mod lane;
mod ledger;
mod load;
mod member;
mod model;
mod options;
mod replay;
mod report;
mod script;
mod svg;
mod tape;
mod timeline;
mod world;

pub use broken::Broken;
pub use cost::{CostError, Machine, Sample, Spread, StepCost, StepWork, TERMS, fit, pairs, reads};
pub use device::{FakeDevice, Operation};
pub use drawing::DrawingError;
pub use lane::Lane;
pub use ledger::{Account, Ledger};
pub use load::{Length, LoadArgs, LoadCounts, LoadError, LoadReport, Recorded, Shape, Source, run_load};
pub use member::Member;
pub use model::{Answer, Context, Ending, FakeModel};
pub use options::{ArgsError, CostModel, WorldArgs, WorldOptions, parse_seeds};
pub use replay::{Gap, Mismatch, ReplayError, Replayed, Run, Timeline, Totals, TraceEnding};
pub use report::{Counts, Failure, Report, run_seeds};
pub use world::World;
