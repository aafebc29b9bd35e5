//! Groups that lose ranks: threads, their supervisor, and whoever brings requests, in all orders.
//!
//! What follows a loss is not written here: [`atom_group::Watch`] decides, [`atom_group::Act`] says in which
//! order that is carried out, [`atom_group::Life`] what a thread does between epochs, [`atom_group::Letter`]
//! how a request reaches a lane that may be lost meanwhile. Each of their operations is a move; steps are
//! taken as in coarse setups, by `settle` and the machines of the exchange.
//!
//! A lane is a *place* with up to three threads: the one that holds the seat, and those that lost it and may
//! still run. Threads end with an error at any moment of a step, or fall silent and wake late or never.

mod moves;
mod rest;
mod steps;

use super::Setup;
use super::group::{Deed, Group};
use super::lane::{Brought, LANES_MAX, Request};
use super::world::Budget;
use atom_group::machine::BOARDS;
use atom_group::{Act, Addressee, Letter, Loss, Watch};
use std::collections::BTreeSet;

pub(super) type World = super::search::World<Place, Hub>;

/// Rules of a setup with a supervisor.
pub(super) struct Rules<'a> {
    setup: &'a Setup,
    restarts_max: u32,
    group: Group,
    saw: BTreeSet<&'static str>,
}

/// All that belongs to a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    threads: [Thread; THREADS],
    /// The thread whose seat this is by the supervisor's book.
    holder: u8,
    /// In the exchange of each epoch.
    words: [Words; EPOCHS],
    mail: [Mail; MAIL_MAX],
    to: Addressee,
    cases: [Case; CASES],
    /// Among the seats of the loss that is being dealt with.
    lost: bool,
}

/// What is no lane's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Hub {
    watch: Watch,
    /// What the supervisor does next about the loss that it deals with.
    act: Act,
    loss: Option<Loss>,
    standing: Standing,
    /// The last epoch that was published.
    formed: u8,
    closed: [bool; EPOCHS],
    red: bool,
    exit: bool,
    /// Lanes have said that they diverged.
    diverged: bool,
    /// Somebody was silent for a while: others may be given up who are sound but slow.
    slow: bool,
    /// What the first lane to conclude found for this step.
    step: u8,
    deed: Deed,
    state: u16,
    budget: Budget,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Standing {
    Forming,
    Formed,
    Ended,
}

/// A rank's thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Thread {
    at: At,
    /// The epoch that it is in, or was in last.
    epoch: u8,
    holds_seat: bool,
    silent: bool,
    /// Something happened to it that may cost it its seat.
    struck: bool,
    told_exit: bool,
    state: u16,
    signature: u8,
    mine: Brought,
    /// What its scheduler has of each case.
    work: [Request; CASES],
    /// What it has told the supervisor and was not heard yet, in order.
    news: [News; NEWS_MAX],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum At {
    #[default]
    Gone,
    Load,
    /// Waits for an epoch after its own.
    Await,
    /// Begins a step.
    Round,
    /// Waits in the exchange.
    Wait,
    /// Does what was concluded, with its decode and prompt rows.
    Perform(Deed, (u8, u8)),
    /// Parked.
    Park,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum News {
    #[default]
    None,
    Loaded,
    /// It could not be loaded.
    NotLoaded,
    Alone(u8),
    Lost(Loss),
    Left,
}

/// A lane's part of an exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Words {
    seat: u8,
    boards: [Brought; BOARDS],
}

/// Of a case of the same place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Mail {
    #[default]
    None,
    Submit(u8),
    Abort(u8),
}

/// A request, as its submitter and whoever answers know it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Case {
    letter: Option<Letter>,
    /// Answers have somewhere to go.
    open: bool,
    answers: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// A thread of a place does what comes next.
    Thread(u8, u8),
    /// A thread's deadline has passed.
    TimeOut(u8, u8),
    /// An error or a panic in a thread's own work.
    Fail(u8, u8, Loss),
    /// A thread hangs.
    Silence(u8, u8),
    /// It goes on.
    Wake(u8, u8),
    /// The supervisor hears of a thread.
    Hear(u8, u8),
    /// The supervisor finds a lane past its deadline.
    Look(u8),
    /// The supervisor does what comes next.
    Act,
    /// Somebody begins to submit to a lane.
    Submit(u8),
    /// It does what comes next.
    Letter(u8, u8),
    Exit,
    /// The supervisor ends the group for reasons of its own.
    End,
}

impl<'a> Rules<'a> {
    /// For a setup whose group may form again so often.
    pub(super) fn new(setup: &'a Setup, restarts_max: u32) -> Self {
        assert!((restarts_max as usize) < EPOCHS, "{restarts_max} restarts");
        let group = Group::new(setup.lanes, setup.policy, setup.replay_us, !setup.from_start);
        Self { setup, restarts_max, group, saw: BTreeSet::new() }
    }

    /// All have loaded and joined the first epoch: how they got there is how they come to the next.
    fn first_world(&self) -> World {
        let mut watch = Watch::new(self.restarts_max, 0);
        for _ in 0..self.setup.lanes {
            watch.spawned();
        }
        for _ in 0..self.setup.lanes {
            watch.loaded();
        }
        let mut first = watch.complete();
        while first != Act::Rest {
            first = first.after();
        }
        let mut place = Place {
            threads: [Thread::default(); THREADS],
            holder: 0,
            words: [Words::default(); EPOCHS],
            mail: [Mail::None; MAIL_MAX],
            to: Addressee::of(1),
            cases: [Case::default(); CASES],
            lost: false,
        };
        place.threads[0] = Thread { holds_seat: true, ..Thread::default() };
        self.join(&mut place.threads[0], 1);
        place.words[0] = self.fresh();
        let hub = Hub {
            watch,
            act: Act::Rest,
            loss: None,
            standing: Standing::Formed,
            formed: 1,
            closed: [false; EPOCHS],
            red: false,
            exit: false,
            diverged: false,
            slow: false,
            step: 0,
            deed: Deed::Nothing,
            state: 0,
            budget: self.setup.budget,
        };
        World { lanes: [place; LANES_MAX], shared: hub }
    }

    /// A lane's words in an exchange that nobody has come to.
    fn fresh(&self) -> Words {
        let seat = self.group.step(self.group.start.0);
        Words { seat, boards: [Brought { step: seat, ..Brought::default() }; BOARDS] }
    }

    fn places<'w>(&self, world: &'w World) -> &'w [Place] {
        &world.lanes[..self.setup.lanes]
    }

    /// The numbers of all seats in an epoch.
    fn seats<'w>(&self, world: &'w World, epoch: u8) -> impl Iterator<Item = u64> + use<'w> {
        let at = place_of(epoch);
        world.lanes[..self.setup.lanes].iter().map(move |place| place.words[at].seat.into())
    }
}

impl Hub {
    fn is_closed(&self, epoch: u8) -> bool {
        self.closed[place_of(epoch)]
    }
}

impl Place {
    fn has_mail(&self) -> bool {
        self.mail[0] != Mail::None
    }

    fn put(&mut self, mail: Mail) {
        let free = self.mail.iter_mut().find(|slot| **slot == Mail::None);
        *free.expect("a case has two letters at most") = mail;
    }

    /// Somebody, or nobody, listens to this answer.
    fn answer(&mut self, case: u8) {
        let case = &mut self.cases[usize::from(case)];
        case.answers += u8::from(std::mem::take(&mut case.open));
    }

    fn answer_all(&mut self) {
        (0..CASES as u8).for_each(|case| self.answer(case));
    }

    fn holder(&self) -> &Thread {
        &self.threads[usize::from(self.holder)]
    }
}

impl Thread {
    fn has_work(&self) -> bool {
        self.work.iter().any(|request| request.tokens > 0)
    }

    fn is_gone(&self) -> bool {
        self.at == At::Gone
    }

    /// In a step, or parked before one.
    fn is_in(&self, epoch: u8) -> bool {
        self.epoch == epoch && !matches!(self.at, At::Gone | At::Load | At::Await)
    }

    fn tell(&mut self, news: News) {
        let free = self.news.iter_mut().find(|slot| **slot == News::None);
        *free.expect("one of each epoch") = news;
    }

    fn heard(&mut self) -> News {
        let first = self.news[0];
        self.news.rotate_left(1);
        self.news[NEWS_MAX - 1] = News::None;
        first
    }
}

fn place_of(epoch: u8) -> usize {
    usize::from(epoch) - 1
}

/// The first, and two restarts.
const EPOCHS: usize = 3;
/// A place has one thread more than it is lost.
const THREADS: usize = EPOCHS;
/// Requests of a place at once.
const CASES: usize = 2;
/// Each with its abort.
const MAIL_MAX: usize = 2 * CASES;
/// One for each epoch, and the last.
const NEWS_MAX: usize = EPOCHS + 1;
