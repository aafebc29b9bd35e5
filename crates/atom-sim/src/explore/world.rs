//! A group as one value: its lanes and all that they share. Every move that can be made next, and what
//! each leads to.

use super::group::{Deed, Group};
use super::lane::{At, Brought, LANES_MAX, Lane, Mail, Nap, Why};
use super::{Broken, Plant, Setup};
use atom_group::WaitError;
use atom_group::machine::{self, Bell, Calls, End, Visit, Wait};
use std::time::Duration;

/// Everything there is at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub(super) lanes: [Lane; LANES_MAX],
    pub(super) shared: Shared,
}

/// What is no lane's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shared {
    pub(super) exit: bool,
    pub(super) paused: bool,
    pub(super) closed: bool,
    /// What the last outsider that wrote something still has to do.
    pub(super) bell: Bell,
    budget: Budget,
    /// What the first lane to conclude found for this step.
    step: u8,
    deed: Deed,
    state: u16,
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

impl World {
    pub(super) fn new(setup: &Setup, group: &Group) -> Self {
        let (state, signature) = group.start;
        let step = group.step(state);
        let shared = Shared {
            exit: false,
            paused: false,
            closed: false,
            bell: Bell::Over,
            budget: setup.budget,
            step,
            deed: Deed::Nothing,
            state,
        };
        Self { lanes: [Lane::new(state, step, signature); LANES_MAX], shared }
    }
}

impl Rules<'_> {
    fn lanes<'w>(&self, world: &'w World) -> &'w [Lane] {
        &world.lanes[..self.setup.lanes]
    }

    /// All moves that can be made. Empty: nothing happens any more, unless an outsider acts; see `may`.
    pub(super) fn moves(&self, world: &World, out: &mut Vec<Move>) {
        out.clear();
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

    fn lock_is_free(&self, world: &World) -> bool {
        !self.lanes(world).iter().any(|l| l.holds_lock)
    }

    fn calls(&self, world: &World, lane: &Lane) -> Calls {
        Calls { mail: lane.has_mail(), exit: world.shared.exit, pause: world.shared.paused }
    }

    fn everybody_came(&self, world: &World, step: u8) -> bool {
        machine::everybody_came(self.lanes(world).iter().map(|l| l.seat.into()), step.into())
    }

    /// What the wait that a lane is in waits for.
    fn holds(&self, world: &World, lane: &Lane) -> bool {
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

    /// Makes a move.
    pub(super) fn make(&mut self, world: &mut World, what: Move) -> Result<(), Broken> {
        let budget = &mut world.shared.budget;
        match what {
            Move::Lane(lane) => return self.advance(world, usize::from(lane)),
            Move::TimeOut(lane) if self.setup.fine => world.lanes[usize::from(lane)].nap = Nap::Late,
            Move::TimeOut(lane) => world.lanes[usize::from(lane)].at = At::Gone(Why::Late),
            Move::Ring => self.ring_from_outside(world),
            Move::Submit { lane, kind } => {
                budget.requests -= 1;
                let (prompt, tokens) = self.setup.kinds[usize::from(kind)];
                assert!(world.lanes[usize::from(lane)].put(Mail::Submit { prompt, tokens }), "room for mail");
            }
            Move::Abort(lane) => {
                budget.aborts -= 1;
                assert!(world.lanes[usize::from(lane)].put(Mail::Abort), "room for mail");
            }
            Move::Preempt(lane) => {
                budget.preemptions -= 1;
                world.lanes[usize::from(lane)].preempt();
            }
            Move::Pause => {
                budget.pauses -= 1;
                world.shared.paused = true;
            }
            Move::Resume => world.shared.paused = false,
            Move::Exit => {
                budget.exits -= 1;
                world.shared.exit = true;
            }
            Move::Break(lane) => {
                budget.faults -= 1;
                world.lanes[usize::from(lane)].broken = true;
            }
            Move::Die(lane) => {
                budget.deaths -= 1;
                let it = &mut world.lanes[usize::from(lane)];
                it.at = At::Gone(Why::Died { parked: matches!(it.at, At::Rest(_)) });
            }
            Move::Close => {
                budget.closes = budget.closes.saturating_sub(1);
                world.shared.closed = true;
            }
        }
        let silent =
            matches!(what, Move::Ring | Move::TimeOut(_) | Move::Preempt(_) | Move::Break(_) | Move::Die(_));
        if self.setup.fine && !silent {
            world.shared.bell = Bell::AnySleepers;
        }
        Ok(())
    }

    fn ring_from_outside(&self, world: &mut World) {
        let bell = world.shared.bell;
        let outcome = self.ring(world, bell);
        world.shared.bell = bell.after(outcome);
    }

    fn ring(&self, world: &mut World, bell: Bell) -> bool {
        match bell {
            Bell::AnySleepers if self.setup.plant == Some(Plant::NeverRings) => false,
            Bell::AnySleepers => self.lanes(world).iter().any(|l| l.enlisted),
            Bell::Notify => {
                for lane in world.lanes.iter_mut().filter(|l| l.nap == Nap::Asleep) {
                    lane.nap = Nap::Rung;
                }
                true
            }
            Bell::PassLock | Bell::Over => true,
        }
    }

    /// A lane's next operation; in coarse setups all up to where it waits or reads what outsiders write.
    fn advance(&mut self, world: &mut World, lane: usize) -> Result<(), Broken> {
        let it = &mut world.lanes[lane];
        match it.at {
            At::Ask => {
                it.told = Calls { mail: false, exit: world.shared.exit, pause: world.shared.paused };
                it.at =
                    if self.setup.plant == Some(Plant::MailBeforeCalls) { self.want(it) } else { At::Take };
                self.run_on(world, lane)
            }
            At::Take => {
                it.take_mail();
                it.at =
                    if self.setup.plant == Some(Plant::MailBeforeCalls) { At::Ask } else { self.want(it) };
                self.run_on(world, lane)
            }
            At::Visit(visit) => self.visit(world, lane, visit),
            At::Ring(bell) => {
                let outcome = self.ring(world, bell);
                world.lanes[lane].at = match bell.after(outcome) {
                    Bell::Over => self.enter(Visit::Ring.after(Ok(()))),
                    bell => At::Ring(bell),
                };
                Ok(())
            }
            At::Wait(wait) => match self.wait(world, lane, wait) {
                Wait::Over(end) => {
                    world.lanes[lane].at = self.enter(Visit::Wait.after(end));
                    self.run_on(world, lane)
                }
                wait => {
                    world.lanes[lane].at = At::Wait(wait);
                    Ok(())
                }
            },
            At::Rest(wait) => {
                world.lanes[lane].at = match self.wait(world, lane, wait) {
                    Wait::Over(Ok(())) => self.first(),
                    Wait::Over(Err(_)) => At::Gone(Why::Closed),
                    wait => At::Rest(wait),
                };
                Ok(())
            }
            At::Gone(_) => unreachable!("lanes that are gone make no moves"),
        }
    }

    pub(super) fn first(&self) -> At {
        if self.setup.plant == Some(Plant::MailBeforeCalls) { At::Take } else { At::Ask }
    }

    fn want(&self, it: &mut Lane) -> At {
        it.mine = it.facts(self.group.step(it.state) + 1);
        let without_rows = it.mine.decode + it.mine.prefill == 0 && !it.told.exit;
        if self.setup.plant == Some(Plant::SkipsWithoutRows) && without_rows {
            return At::Rest(Wait::new(0));
        }
        At::Visit(Visit::Write)
    }

    /// In coarse setups: what a lane does alone is one move with what came before.
    fn run_on(&mut self, world: &mut World, lane: usize) -> Result<(), Broken> {
        while let (At::Visit(visit), false) = (world.lanes[lane].at, self.setup.fine) {
            self.visit(world, lane, visit)?;
        }
        Ok(())
    }

    fn enter(&self, visit: Visit) -> At {
        match visit {
            Visit::Ring if self.setup.fine => At::Ring(Bell::AnySleepers),
            Visit::Wait => At::Wait(Wait::new(0)),
            Visit::Over(Err(WaitError::Closed)) => At::Gone(Why::Closed),
            Visit::Over(Err(WaitError::TimedOut(_))) => At::Gone(Why::Late),
            other => At::Visit(other),
        }
    }

    fn visit(&mut self, world: &mut World, lane: usize, visit: Visit) -> Result<(), Broken> {
        let board = match self.setup.plant {
            Some(Plant::OneBoard) => 0,
            _ => machine::board(world.lanes[lane].mine.step.into()),
        };
        let it = &mut world.lanes[lane];
        let mut outcome: End = Ok(());
        match visit {
            Visit::Write => it.boards[board] = it.mine,
            Visit::Arrive => it.seat = it.mine.step,
            Visit::LookClosed if world.shared.closed => outcome = Err(WaitError::Closed),
            Visit::Ring | Visit::LookClosed => {}
            Visit::Read => {
                let mut all = world.lanes.map(|l| l.boards[board]);
                all[self.setup.lanes..].fill(Brought::default());
                return self.conclude(world, lane, &all);
            }
            Visit::Wait | Visit::Over(_) => unreachable!("entered as something else"),
        }
        world.lanes[lane].at = self.enter(visit.after(outcome));
        Ok(())
    }

    fn wait(&self, world: &mut World, lane: usize, wait: Wait) -> Wait {
        let (holds, closed) = (self.holds(world, &world.lanes[lane]), world.shared.closed);
        if !self.setup.fine {
            return Wait::Over(if holds { Ok(()) } else { Err(WaitError::Closed) });
        }
        let late_counting = self.setup.plant == Some(Plant::LooksBeforeCounting);
        let it = &mut world.lanes[lane];
        let outcome = match wait {
            Wait::Glance { .. } | Wait::Look => holds,
            Wait::GlanceClosed { .. } | Wait::LookClosed => closed,
            Wait::Enlist => {
                it.enlisted = !late_counting;
                true
            }
            Wait::Lock => {
                it.holds_lock = true;
                true
            }
            Wait::Sleep if it.nap == Nap::Awake => {
                it.enlisted = true;
                (it.holds_lock, it.nap) = (false, Nap::Asleep);
                return wait;
            }
            // Out of its sleep it looks once more, late or not.
            Wait::Sleep if !it.holds_lock => {
                it.holds_lock = true;
                if it.nap == Nap::Rung {
                    it.nap = Nap::Awake;
                }
                false
            }
            Wait::Sleep => {
                it.nap = Nap::Awake;
                true
            }
            Wait::Unlock(_) => {
                it.holds_lock = false;
                true
            }
            Wait::Retire(_) => {
                (it.enlisted, it.nap) = (false, Nap::Awake);
                true
            }
            Wait::Over(_) => true,
        };
        wait.after(outcome, || WaitError::TimedOut(Duration::ZERO))
    }

    /// What follows from everybody's facts: the same for all lanes, or it is a fault.
    fn conclude(&mut self, world: &mut World, lane: usize, all: &[Brought; LANES_MAX]) -> Result<(), Broken> {
        let it = &world.lanes[lane];
        let found = self.group.conclude(it.state, all)?;
        let (step, state) = (it.mine.step, found.state);
        let mut deed = found.step;
        if self.setup.plant == Some(Plant::PausesAlone) && it.told.pause && matches!(deed, Deed::Replay(_)) {
            deed = Deed::Park;
        }
        let shared = &mut world.shared;
        if shared.step < step {
            (shared.step, shared.deed, shared.state) = (step, deed, state);
            for (at, lane) in world.lanes.iter_mut().enumerate() {
                let grant = found.grants[at];
                lane.granted = (grant.decode_rows as u8, grant.prefill_rows as u8);
                lane.blamed = found.blamed >> at & 1 == 1;
            }
        }
        let it = &world.lanes[lane];
        let grant = found.grants[lane];
        let same = (shared.step, shared.deed, shared.state) == (step, deed, state)
            && it.granted == (grant.decode_rows as u8, grant.prefill_rows as u8)
            && it.blamed == (found.blamed >> lane & 1 == 1);
        if !same {
            return Err(Broken::Rule("two lanes concluded different things from one exchange"));
        }
        if step > STEPS_MAX {
            return Err(Broken::Rule("the group steps and steps, and nobody's requests end"));
        }
        let at = self.perform(&mut world.lanes[lane], deed, grant)?;
        world.lanes[lane].at = at;
        world.lanes[lane].state = state;
        Ok(())
    }

    fn perform(&self, it: &mut Lane, deed: Deed, grant: atom_group::Grant) -> Result<At, Broken> {
        match deed {
            Deed::Nothing => unreachable!("no step is that"),
            Deed::Park => return Ok(At::Rest(Wait::new(0))),
            Deed::Leave if it.has_work() || it.load() > 0 => {
                return Err(Broken::Rule("a request that came before the wish to leave was left behind"));
            }
            Deed::Leave => return Ok(At::Gone(Why::Asked)),
            Deed::Fatal => return Ok(At::Gone(Why::Fatal)),
            Deed::Record(bucket) => it.signature = bucket + 1,
            Deed::Replay(bucket) => {
                it.signature = match self.setup.plant {
                    Some(Plant::OwnBucket) => {
                        self.group.place_holding(it.mine.decode.max(it.mine.prefill).into()) + 1
                    }
                    _ => bucket + 1,
                };
                it.run(grant);
                if it.unserved > self.setup.unserved_max() {
                    return Err(Broken::Rule("prompts were left without a row for too long"));
                }
            }
        }
        Ok(self.first())
    }
}

/// No setup needs as many if everything ends.
const STEPS_MAX: u8 = 200;
