//! A group as one value: its lanes and all that they share, and every move that can be made next.

use super::group::{Deed, Group};
use super::lane::{At, LANES_MAX, Lane, Mail, Nap, Why};
use super::{Plant, Setup};
use atom_group::machine::{self, Bell, Calls, Wait};

/// Everything there is at one moment.
pub(super) type World = super::search::World<Lane, Shared>;

/// What is no lane's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shared {
    pub(super) exit: bool,
    pub(super) paused: bool,
    pub(super) closed: bool,
    /// What the last outsider that wrote something still has to do.
    pub(super) bell: Bell,
    pub(super) budget: Budget,
    /// What the first lane to conclude found for this step.
    pub(super) step: u8,
    pub(super) deed: Deed,
    pub(super) state: u16,
}

/// What may still happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Requests that arrive, at any lane at any moment.
    pub requests: u8,
    /// Requests that are aborted.
    pub aborts: u8,
    /// Requests that give way because a cache is full.
    pub preemptions: u8,
    /// Pauses; each may end at any moment, or not at all.
    pub pauses: u8,
    /// Wishes that the group end.
    pub exits: u8,
    /// Lanes that say that they can't go on.
    pub faults: u8,
    /// Lanes that stop without a word.
    pub deaths: u8,
    /// Times that a supervisor closes the group for reasons of its own.
    pub closes: u8,
    /// With a supervisor: threads that end with an error.
    pub errors: u8,
    /// With a supervisor: lanes that say that the group has diverged.
    pub divergences: u8,
    /// With a supervisor: threads that hang, until they go on or for ever.
    pub silences: u8,
}

/// One move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// A lane does what comes next.
    Lane(u8),
    /// A lane has slept for too long.
    TimeOut(u8),
    /// An outsider goes on ringing.
    Ring,
    Submit {
        lane: u8,
        kind: u8,
    },
    Abort(u8),
    Preempt(u8),
    Pause,
    Resume,
    Exit,
    Break(u8),
    Die(u8),
    Close,
}

/// Moves of one world, with the rules of its setup.
pub(super) struct Rules<'a> {
    pub(super) setup: &'a Setup,
    pub(super) group: Group,
}

impl<'a> Rules<'a> {
    pub(super) fn new(setup: &'a Setup) -> Self {
        let group = Group::new(setup.lanes, setup.policy, setup.replay_us, !setup.from_start);
        Self { setup, group }
    }

    pub(super) fn first_world(&self) -> World {
        let (state, signature) = self.group.start;
        let step = self.group.step(state);
        let shared = Shared {
            exit: false,
            paused: false,
            closed: false,
            bell: Bell::Over,
            budget: self.setup.budget,
            step,
            deed: Deed::Nothing,
            state,
        };
        World { lanes: [Lane { at: self.first(), ..Lane::new(state, step, signature) }; LANES_MAX], shared }
    }
}

impl Rules<'_> {
    pub(super) fn lanes<'w>(&self, world: &'w World) -> &'w [Lane] {
        &world.lanes[..self.setup.lanes]
    }

    /// All moves that can be made.
    pub(super) fn all_moves(&self, world: &World, out: &mut Vec<Move>) {
        if let Some(lane) = self.alone(world) {
            out.push(Move::Lane(lane));
            return;
        }
        self.outside(world, out);
        self.inside(world, out);
    }

    /// Moves that somebody is bound to make, sooner or later.
    pub(super) fn inside(&self, world: &World, out: &mut Vec<Move>) {
        for (lane, it) in self.lanes(world).iter().enumerate() {
            if self.enabled(world, it) {
                out.push(Move::Lane(lane as u8));
            }
            if self.may_time_out(world, it) {
                out.push(Move::TimeOut(lane as u8));
            }
        }
        match world.shared.bell {
            Bell::Over => {
                // A supervisor hears of lanes that end and sees those that are past their deadline. One
                // that dies parked is missed by nobody before somebody comes.
                let failed =
                    |l: &Lane| matches!(l.at, At::Gone(Why::Fatal | Why::Late | Why::Died { parked: false }));
                if !world.shared.closed && self.lanes(world).iter().any(failed) {
                    out.push(Move::Close);
                }
            }
            Bell::PassLock if !self.lock_is_free(world) => {}
            _ => out.push(Move::Ring),
        }
    }

    /// A lane whose next move nothing else could change or be changed by: all other orders lead to the
    /// same. It is the end of an exchange while nothing can close the group or touch the lane's requests.
    fn alone(&self, world: &World) -> Option<u8> {
        let Budget { closes, deaths, preemptions, .. } = world.shared.budget;
        let broken = self.lanes(world).iter().any(|l| l.broken || matches!(l.at, At::Gone(_)));
        if self.setup.fine || closes + deaths + preemptions > 0 || broken || world.shared.closed {
            return None;
        }
        let leaves = |l: &&Lane| matches!(l.at, At::Wait(_)) && self.enabled(world, l);
        let lane = self.lanes(world).iter().position(|l| leaves(&l))?;
        Some(lane as u8)
    }

    fn outside(&self, world: &World, out: &mut Vec<Move>) {
        let Shared { exit, paused, closed, bell, budget, .. } = world.shared;
        if bell != Bell::Over {
            return;
        }
        let lively = |l: &&(usize, &Lane)| !matches!(l.1.at, At::Gone(_));
        for (lane, it) in self.lanes(world).iter().enumerate().filter(|l| lively(&l)) {
            let at = lane as u8;
            if budget.requests > 0 && !exit && it.load() < 2 {
                out.extend((0..self.setup.kinds.len() as u8).map(|kind| Move::Submit { lane: at, kind }));
            }
            let aborting = it.mail.contains(&Mail::Abort);
            let all = [
                (budget.aborts > 0 && it.has_work() && !aborting, Move::Abort(at)),
                (budget.preemptions > 0 && it.clone().preempt(), Move::Preempt(at)),
                (budget.faults > 0 && !it.broken, Move::Break(at)),
                (budget.deaths > 0 && !it.holds_lock, Move::Die(at)),
            ];
            out.extend(all.into_iter().filter(|(may, _)| *may).map(|(_, what)| what));
        }
        let all = [
            (budget.pauses > 0 && !paused, Move::Pause),
            (paused, Move::Resume),
            (budget.exits > 0, Move::Exit),
            (budget.closes > 0 && !closed, Move::Close),
        ];
        out.extend(all.into_iter().filter(|(may, _)| *may).map(|(_, what)| what));
    }

    pub(super) fn lock_is_free(&self, world: &World) -> bool {
        !self.lanes(world).iter().any(|l| l.holds_lock)
    }

    fn calls(&self, world: &World, lane: &Lane) -> Calls {
        Calls { mail: lane.has_mail(), exit: world.shared.exit, pause: world.shared.paused }
    }

    pub(super) fn everybody_came(&self, world: &World, step: u8) -> bool {
        machine::everybody_came(self.lanes(world).iter().map(|l| l.seat.into()), step.into())
    }

    /// What the wait that a lane is in waits for.
    pub(super) fn holds(&self, world: &World, lane: &Lane) -> bool {
        match lane.at {
            At::Rest(_) if self.setup.plant == Some(Plant::SkipsWithoutRows) => lane.has_mail(),
            At::Rest(_) => {
                let seats = self.lanes(world).iter().map(|l| l.seat.into());
                let next = u64::from(self.group.step(lane.state)) + 1;
                self.calls(world, lane).wake(lane.told.flags()) || machine::somebody_came(seats, next)
            }
            _ => self.everybody_came(world, lane.mine.step),
        }
    }

    fn enabled(&self, world: &World, lane: &Lane) -> bool {
        match lane.at {
            At::Gone(_) => false,
            At::Wait(_) | At::Rest(_) if !self.setup.fine => self.holds(world, lane) || world.shared.closed,
            At::Wait(Wait::Lock) | At::Rest(Wait::Lock) | At::Ring(Bell::PassLock) => {
                self.lock_is_free(world)
            }
            At::Wait(Wait::Sleep) | At::Rest(Wait::Sleep) => match lane.nap {
                Nap::Awake => true,
                Nap::Asleep => false,
                Nap::Rung | Nap::Late => lane.holds_lock || self.lock_is_free(world),
            },
            _ => true,
        }
    }

    /// Deadlines are so long that only a lane that died is waited for in vain. Parked lanes have none.
    /// In fine setups whoever times out looks once more: the dead may have come and not rung.
    fn may_time_out(&self, world: &World, lane: &Lane) -> bool {
        let died = |l: &Lane| {
            matches!(l.at, At::Gone(Why::Died { .. })) && (self.setup.fine || l.seat < lane.mine.step)
        };
        matches!(lane.at, At::Wait(_))
            && self.lanes(world).iter().any(died)
            && (!self.setup.fine || lane.nap == Nap::Asleep)
    }
}
