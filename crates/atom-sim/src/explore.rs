//! Every interleaving of small groups: lanes, outsiders and a supervisor, in all orders.
//!
//! A [`Setup`] is a group of one to four lanes, each with a scheduler of two requests at the most, and a
//! [`Budget`] of what may happen to it at any moment. [`Setup::explore`] visits every world that it can
//! come to. What lanes do is not written here: [`atom_group::settle`] concludes, and the machines of
//! [`atom_group::machine`] say which operation comes next, as for the threads that ship.
//!
//! There are two grains. *Fine*: each atomic operation, each taking of the lock and each sleep is a move
//! of its own. *Coarse*: a lane's exchange is two moves, up to where it waits and from there on, and
//! waits end when what they wait for holds, which is what fine setups prove of them. Coarse setups have
//! more lanes, requests and calamities.
//!
//! In every world: all lanes conclude the same from an exchange; buckets hold all grants, decode rows are
//! granted whole, somebody gets a row, holds are within their bound; nobody is paused or ended alone.
//! Wherever nothing happens any more: nobody sleeps over mail, work or a peer's facts, nobody waits in an
//! exchange, and no request that came before the wish to leave is left. Steps are counted and bounded, so
//! every way ends, and so every request does.
//!
//! Two reductions: groups that differ in the names of their lanes are one (`group.rs` tries for every
//! step that names change nothing else), and the end of an exchange is not interleaved with anything
//! while nothing can close the group, since then it touches no word that others read or write before
//! that lane comes again.

mod epochs;
mod group;
mod lane;
mod moves;
mod rest;
mod search;
mod setups;
mod world;

pub use setups::{deep, planted, small};
pub use world::Budget;

use atom_group::{Divergence, Policy, STARVED_STEPS_MAX};
use std::collections::BTreeSet;
use std::fmt;
use thiserror::Error;

/// A small group and what may happen to it.
#[derive(Clone, Debug)]
pub struct Setup {
    /// For reports.
    pub name: String,
    /// One to four.
    pub lanes: usize,
    /// Every atomic operation is a move of its own.
    pub fine: bool,
    /// From before the start-up recordings.
    pub from_start: bool,
    /// What the group's steps are subject to.
    pub policy: Policy,
    /// How long a replay of a bucket with so many rows takes, µs.
    pub replay_us: fn(u32) -> u32,
    /// Requests that may arrive: prompt rows and tokens.
    pub kinds: Vec<(u8, u8)>,
    /// What may happen.
    pub budget: Budget,
    /// With a supervisor, and a group that may form again so often.
    pub restarts_max: Option<u32>,
    /// A fault that the exploration must find.
    pub plant: Option<Plant>,
}

/// Faults for the explorer to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    /// A lane without rows does not come to the exchange.
    SkipsWithoutRows,
    /// Nobody rings after having written.
    NeverRings,
    /// A sleeper looks first and is counted then.
    LooksBeforeCounting,
    /// Facts of all steps go on one board.
    OneBoard,
    /// A lane that is told to rest does so before all are.
    PausesAlone,
    /// A lane replays the bucket that holds its own rows.
    OwnBucket,
    /// A lane takes in its mail before it reads whether it shall leave.
    MailBeforeCalls,
    /// The waits of an epoch that is over are not ended.
    WaitsStayOpen,
    /// Whoever finds itself alone is a loss, also in an epoch that is over.
    EveryComplaintCounts,
    /// A lane begins an epoch with the group's state of the last.
    StateKept,
    /// Mail is taken by whoever comes.
    MailForAnybody,
    /// A thread that is given up keeps its seat.
    SeatsKept,
    /// A group that ends answers its requests first and turns red then.
    AnswersBeforeRed,
    /// Whoever brings a request does not look what became of the lane.
    LooksOnce,
}

/// What an exploration saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explored {
    /// The setup's.
    pub name: String,
    /// Worlds that differ.
    pub worlds: usize,
    /// Moves tried.
    pub moves: usize,
    /// Moves of the longest of all shortest ways.
    pub depth: usize,
    /// Kinds of steps that were concluded.
    pub saw: BTreeSet<&'static str>,
}

/// A rule that was broken.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum Broken {
    /// A lane waits in an exchange for ever.
    #[error("a lane waits in an exchange, and nobody will come")]
    Deadlock,
    /// A lane sleeps though what it waits for has come.
    #[error("a lane sleeps though what it waits for is there: a lost wake-up")]
    LostWakeUp,
    /// Lanes that should agree do not.
    #[error(transparent)]
    Diverged(Divergence),
    /// Another one.
    #[error("{0}")]
    Rule(&'static str),
}

/// A broken rule and the shortest way to it.
#[derive(Clone, Debug, Error)]
pub struct Violation {
    /// The setup's name.
    pub setup: String,
    /// The rule.
    pub broken: Broken,
    /// Every move, in order.
    pub trace: Vec<String>,
    /// Where every lane is then.
    pub end: Vec<String>,
}

impl Setup {
    /// Visits every world that it can come to.
    pub fn explore(&self) -> Result<Explored, Box<Violation>> {
        assert!((1..=lane::LANES_MAX).contains(&self.lanes), "{} lanes", self.lanes);
        match self.restarts_max {
            None => search::explore(world::Rules::new(self)),
            Some(restarts_max) => search::explore(epochs::Rules::new(self, restarts_max)),
        }
    }

    /// Steps for which a lane's prompts may have to do without a row.
    fn unserved_max(&self) -> u8 {
        let held = self.policy.alignment.map_or(0, |knobs| knobs.hold_steps_max);
        let starved = self.policy.step_ms_max.map_or(0, |_| STARVED_STEPS_MAX);
        (held + starved) as u8
    }
}

impl Explored {
    fn new(setup: &Setup) -> Self {
        Self { name: setup.name.clone(), worlds: 0, moves: 0, depth: 0, saw: BTreeSet::new() }
    }
}

impl fmt::Display for Explored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, worlds, moves, depth, .. } = self;
        write!(f, "{name:<46} {worlds:>10} worlds {moves:>11} moves {depth:>4} deep")
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}; the shortest way to it:", self.setup, self.broken)?;
        for (number, what) in self.trace.iter().enumerate() {
            writeln!(f, "  {:>3}. {what}", number + 1)?;
        }
        self.end.iter().try_for_each(|lane| writeln!(f, "  then {lane}"))
    }
}
