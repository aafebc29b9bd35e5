//! What a thread does: its life, and its steps as lanes of coarse setups take them.

use super::{At, Mail, News, Place, Rules, Standing, Thread, World, place_of};
use crate::explore::group::Deed;
use crate::explore::lane::{Brought, Request, compute, want};
use crate::explore::{Broken, Plant};
use atom_group::machine::{self, Calls, Visit};
use atom_group::{FactsFlags, Life, RunEnd, Tale, WaitError};
use std::time::Duration;

impl Rules<'_> {
    pub(super) fn may_go_on(&self, world: &World, place: &Place, thread: &Thread) -> bool {
        let hub = &world.shared;
        let may = match thread.at {
            At::Gone => false,
            At::Load | At::Round | At::Perform(..) => true,
            At::Await => match hub.standing {
                Standing::Forming => false,
                Standing::Formed => hub.formed > thread.epoch,
                Standing::Ended => true,
            },
            At::Wait | At::Park => hub.is_closed(thread.epoch) || self.holds(world, place, thread),
        };
        may && !thread.silent
    }

    /// Deadlines are so long that whoever comes late has come by then: only those are waited for in vain
    /// who are silent or gone.
    pub(super) fn may_time_out(&self, world: &World, thread: &Thread) -> bool {
        let epoch = thread.epoch;
        let member = |t: &Thread| t.is_in(epoch) || t.epoch < epoch && t.holds_seat;
        let comes = |t: &Thread| !t.silent && !t.is_gone() && member(t);
        thread.at == At::Wait
            && !thread.silent
            && !world.shared.is_closed(epoch)
            && self.seats(world, epoch).any(|seat| seat < thread.mine.step.into())
            && self.places(world).iter().all(|place| {
                let came = place.words[place_of(epoch)].seat >= thread.mine.step;
                came || !place.threads.iter().any(comes)
            })
    }

    /// What a waiting thread waits for.
    fn holds(&self, world: &World, place: &Place, thread: &Thread) -> bool {
        let mut seats = self.seats(world, thread.epoch);
        match thread.at {
            At::Wait => machine::everybody_came(seats, thread.mine.step.into()),
            _ => {
                let calls = Calls { mail: place.has_mail(), exit: world.shared.exit, pause: false };
                let told = if thread.told_exit { FactsFlags::EXIT } else { FactsFlags::default() };
                let next = u64::from(self.group.step(thread.state)) + 1;
                calls.wake(told) || machine::somebody_came(&mut seats, next)
            }
        }
    }

    pub(super) fn go_on(&mut self, world: &mut World, at: usize, number: usize) -> Result<(), Broken> {
        let (place, hub) = (&mut world.lanes[at], &world.shared);
        let thread = &mut place.threads[number];
        match thread.at {
            At::Gone => unreachable!("threads that are gone make no moves"),
            At::Load => {
                thread.tell(News::Loaded);
                self.live(thread, Life::Await { seen: 0 });
            }
            At::Await => {
                let next = (hub.standing == Standing::Formed).then_some(hub.formed.into());
                self.live(thread, Life::formed(next, thread.holds_seat));
            }
            At::Round => {
                self.begin(world, at, number);
                self.visit(world, at, number, Visit::Write)?;
            }
            At::Wait => {
                let end = self.end_of_wait(world, at, number);
                self.visit(world, at, number, Visit::Wait.after(end))?;
            }
            At::Park => match self.end_of_wait(world, at, number) {
                Ok(()) => world.lanes[at].threads[number].at = At::Round,
                Err(_) => self.leave(world, at, number, RunEnd::Alone),
            },
            At::Perform(deed, rows) => self.perform(world, at, number, (deed, rows))?,
        }
        Ok(())
    }

    pub(super) fn time_out(&mut self, world: &mut World, at: usize, number: usize) {
        let late = Visit::Wait.after(Err(WaitError::TimedOut(Duration::ZERO)));
        assert!(matches!(late, Visit::Over(Err(_))), "who is late leaves");
        self.leave(world, at, number, RunEnd::Alone);
    }

    /// Follows a thread's life to where it waits, runs or is gone.
    pub(super) fn live(&self, thread: &mut Thread, life: Life) {
        match life {
            Life::Await { seen } => {
                let Thread { holds_seat, struck, state, work, news, .. } = *thread;
                // What it knows of its group ends with the epoch.
                let state = if self.setup.plant == Some(Plant::StateKept) { state } else { 0 };
                let (at, epoch) = (At::Await, seen as u8);
                *thread = Thread { at, epoch, holds_seat, struck, state, work, news, ..Thread::default() };
            }
            Life::Run { epoch } => self.join(thread, epoch as u8),
            Life::Tell(tale) => {
                thread.tell(match tale {
                    Tale::Alone { epoch } => News::Alone(epoch as u8),
                    Tale::Lost { loss } => News::Lost(loss),
                    Tale::Left => News::Left,
                });
                self.live(thread, Life::told(tale));
            }
            Life::Over => {
                let Thread { holds_seat, struck, news, .. } = *thread;
                *thread = Thread { holds_seat, struck: struck && holds_seat, news, ..Thread::default() };
            }
        }
    }

    /// Begins an epoch with the first state of the group and all of its own requests.
    pub(super) fn join(&self, thread: &mut Thread, epoch: u8) {
        let (mut state, signature) = self.group.start;
        if self.setup.plant == Some(Plant::StateKept) && thread.epoch > 0 {
            state = thread.state;
        }
        let again = |request: Request| match request.tokens {
            0 => request,
            tokens => Request { prompt: self.setup.kinds[0].0, tokens, begun: false },
        };
        let (at, work) = (At::Round, thread.work.map(again));
        *thread = Thread { at, epoch, work, state, signature, ..*thread };
    }

    /// A run is over.
    fn leave(&self, world: &mut World, at: usize, number: usize, end: RunEnd) {
        let thread = &mut world.lanes[at].threads[number];
        self.live(thread, Life::ran(thread.epoch.into(), end, thread.holds_seat));
    }

    /// Reads whether it shall leave, takes its mail, and says what it wants.
    fn begin(&self, world: &mut World, at: usize, number: usize) {
        let place = &mut world.lanes[at];
        let thread = &mut place.threads[number];
        thread.told_exit = world.shared.exit;
        if place.to.is(thread.epoch.into()) || self.setup.plant == Some(Plant::MailForAnybody) {
            let (prompt, tokens) = self.setup.kinds[0];
            for mail in std::mem::take(&mut place.mail) {
                match mail {
                    Mail::None => {}
                    Mail::Submit(case) => {
                        thread.work[usize::from(case)] = Request { prompt, tokens, begun: false };
                    }
                    Mail::Abort(case) => thread.work[usize::from(case)] = Request::default(),
                }
            }
        }
        thread.mine = Brought {
            step: self.group.step(thread.state) + 1,
            exit: thread.told_exit,
            state: thread.state,
            signature: thread.signature,
            ..want(&thread.work)
        };
    }

    /// As in coarse setups: a wait ends when what it waits for holds, or it is closed.
    fn end_of_wait(&self, world: &World, at: usize, number: usize) -> machine::End {
        let place = &world.lanes[at];
        if self.holds(world, place, &place.threads[number]) { Ok(()) } else { Err(WaitError::Closed) }
    }

    /// Goes on with a visit, to where it waits or what follows from it.
    fn visit(&mut self, world: &mut World, at: usize, number: usize, from: Visit) -> Result<(), Broken> {
        let (thread, mut visit) = (world.lanes[at].threads[number], from);
        let (epoch, board) = (place_of(thread.epoch), machine::board(thread.mine.step.into()));
        loop {
            let mut outcome = Ok(());
            let words = &mut world.lanes[at].words[epoch];
            match visit {
                Visit::Write => words.boards[board] = thread.mine,
                Visit::Arrive => words.seat = thread.mine.step,
                Visit::Ring => {}
                Visit::Wait => {
                    world.lanes[at].threads[number].at = At::Wait;
                    return Ok(());
                }
                Visit::LookClosed if world.shared.is_closed(thread.epoch) => outcome = Err(WaitError::Closed),
                Visit::LookClosed => {}
                Visit::Read => self.conclude(world, at, number, board)?,
                Visit::Over(Ok(())) => return Ok(()),
                Visit::Over(Err(_)) => {
                    self.leave(world, at, number, RunEnd::Alone);
                    return Ok(());
                }
            }
            visit = visit.after(outcome);
        }
    }

    fn conclude(&mut self, world: &mut World, at: usize, number: usize, board: usize) -> Result<(), Broken> {
        let thread = world.lanes[at].threads[number];
        let mut all = world.lanes.map(|place| place.words[place_of(thread.epoch)].boards[board]);
        all[self.setup.lanes..].fill(Brought::default());
        let found = self.group.conclude(thread.state, &all)?;
        let hub = &mut world.shared;
        if hub.is_closed(thread.epoch) || thread.epoch != hub.formed {
            return Err(Broken::Rule("a step was taken in an epoch that is over"));
        }
        let step = thread.mine.step;
        if hub.step < step {
            (hub.step, hub.deed, hub.state) = (step, found.step, found.state);
        }
        if (hub.step, hub.deed, hub.state) != (step, found.step, found.state) {
            return Err(Broken::Rule("two lanes concluded different things from one exchange"));
        }
        if step > STEPS_MAX {
            return Err(Broken::Rule("the group steps and steps, and nobody's requests end"));
        }
        let grant = found.grants[at];
        let thread = &mut world.lanes[at].threads[number];
        (thread.state, thread.mine) = (found.state, Brought::default());
        thread.at = At::Perform(found.step, (grant.decode_rows as u8, grant.prefill_rows as u8));
        Ok(())
    }

    /// True if the last token of a request is among these rows.
    pub(super) fn ends_a_request(&self, thread: &Thread, rows: (u8, u8)) -> bool {
        let mut work = thread.work;
        compute(&mut work, rows);
        thread.work.iter().zip(work).any(|(before, after)| before.tokens > 0 && after.tokens == 0)
    }

    /// Does what was concluded. The epoch may be over by now: what a lane computes is its own.
    fn perform(
        &mut self,
        world: &mut World,
        at: usize,
        number: usize,
        (deed, rows): (Deed, (u8, u8)),
    ) -> Result<(), Broken> {
        let place = &mut world.lanes[at];
        let thread = &mut place.threads[number];
        thread.at = At::Round;
        match deed {
            Deed::Nothing | Deed::Fatal => unreachable!("no step of these setups is that"),
            Deed::Park => thread.at = At::Park,
            Deed::Leave if thread.has_work() => {
                return Err(Broken::Rule("a request that came before the wish to leave was left behind"));
            }
            Deed::Leave => self.leave(world, at, number, RunEnd::Left),
            Deed::Record(bucket) => thread.signature = bucket + 1,
            Deed::Replay(bucket) => {
                thread.signature = bucket + 1;
                let before = thread.work;
                compute(&mut thread.work, rows);
                let after = thread.work;
                for (case, (before, after)) in before.iter().zip(after).enumerate() {
                    if before.tokens > 0 && after.tokens == 0 {
                        place.threads[number].work[case] = Request::default();
                        place.answer(case as u8);
                    }
                }
            }
        }
        Ok(())
    }
}

/// No setup needs as many if everything ends.
const STEPS_MAX: u8 = 200;
