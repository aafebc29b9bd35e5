//! What each move leads to. What comes next for a lane is said by the machines and by `settle`.

use super::group::Deed;
use super::lane::{At, Brought, LANES_MAX, Lane, Mail, Nap, Why};
use super::world::{Move, Rules, World};
use super::{Broken, Plant};
use atom_group::machine::{self, Bell, Calls, End, Visit, Wait};
use atom_group::{Grant, WaitError};
use std::time::Duration;

impl Rules<'_> {
    /// Makes a move.
    pub(super) fn make_move(&mut self, world: &mut World, what: Move) -> Result<(), Broken> {
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

    fn perform(&self, it: &mut Lane, deed: Deed, grant: Grant) -> Result<At, Broken> {
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
