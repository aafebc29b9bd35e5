//! The group protocol: what lanes tell each other once per step, and what they conclude from it.
//!
//! Every step of a group begins with one [`Exchange`] of [`Facts`]. Then every lane computes
//! [`settle`] on the same inputs and so gets the same [`GroupStep`]: the bucket that all replay and
//! the rows that each lane may run. A [`Bucket`] can't be had in any other way, and no function that
//! picks one takes a lane's own row count:
//!
//! ```
//! # use atom_group::*;
//! let lattice = Lattice::new(&LatticeArgs { rows_max: 64, max_num_seqs: 8, ..LatticeArgs::default() })?;
//! let facts = [Facts { decode_rows: 3, ..Facts::default() }, Facts { prefill_rows: 40, ..Facts::default() }];
//! let bucket = lattice.holding(GroupRows::of(&facts, lattice.top()));
//! assert_eq!(bucket.rows(), 40);
//! # Ok::<(), LatticeError>(())
//! ```
//!
//! The same with a count of one's own is a type error:
//!
//! ```compile_fail,E0308
//! # use atom_group::*;
//! let lattice = Lattice::new(&LatticeArgs { rows_max: 64, max_num_seqs: 8, ..LatticeArgs::default() })?;
//! let my_rows: u32 = 3;
//! let bucket = lattice.holding(my_rows);
//! # Ok::<(), LatticeError>(())
//! ```
//!
//! * [`Lattice`], [`Bucket`]: the legal sizes, checked at start;
//! * [`Facts`], [`GroupState`], [`settle`]: the decision, pure;
//! * [`Policy`]: what may be held back, cut or capped, and [`StepNote`]: what was;
//! * [`Epochs`]: what becomes of a group that lost a rank; [`Watch`] and [`Act`]: what its supervisor does
//!   about it, in which order; [`Life`]: what the ranks' threads do; [`Letter`], [`Addressee`]: the way of mail;
//! * [`Meeting`], [`Exchange`]: how threads of one host wait for each other, with a deadline, and park;
//! * [`machine`]: in which order they do it, for them and for whoever explores all orders;
//! * [`TraceEncoder`], [`TraceReader`]: everybody's facts and what followed, kept, to be settled again.
//!
//! This crate knows nothing of models, devices, requests or pages.

#![forbid(unsafe_code)]

mod epoch;
mod exchange;
mod facts;
mod hold;
mod lattice;
mod life;
pub mod machine;
mod meeting;
mod pace;
mod policy;
mod settle;
mod shape;
mod state;
mod sync;
#[cfg(test)]
mod testing;
mod trace;
mod watch;

pub use epoch::{EndCause, Epochs, Loss, Verdict};
pub use exchange::{Activity, Exchange, ExchangeError, Sighting};
pub use facts::{Facts, FactsFlags};
pub use hold::{Prefill, Release};
pub use lattice::{BUCKETS_MAX, Bucket, GroupRows, Lattice, LatticeArgs, LatticeError};
pub use life::{Addressee, Letter, Life, RunEnd, Tale};
pub use meeting::{Meeting, WaitError};
pub use policy::{
    Alignment, GROUP_STEP_MS_MAX, HOLD_STEPS_MAX, Policy, PolicyError, STARVED_STEPS_MAX, STEP_FIXED_ROWS,
};
pub use settle::{ExitCause, Grant, Grants, GroupStep, StepNote, settle};
pub use state::{Divergence, GroupState, Patience};
pub use trace::{
    Decision, Difference, Outcome, TraceEncoder, TraceEnd, TraceError, TraceHeader, TraceReader, TraceRecord,
    TracedStep,
};
pub use watch::{Act, Watch};
