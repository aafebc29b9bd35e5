//! Who may do what next, and what the supervisor, submitters and calamities do.

use super::{At, Case, Deed, Mail, Move, News, Place, Rules, Standing, Thread, Words, World, place_of};
use crate::explore::{Broken, Plant};
use atom_group::machine::behind;
use atom_group::{Act, Addressee, EndCause, Letter, Life, Loss, RunEnd};

impl Rules<'_> {
    /// A move that commutes with all others that can be made before it: other orders lead to the same.
    ///
    /// Nobody sees a thread that was started before it says something, and mail that is addressed to an epoch
    /// is for nobody before that is published. While nothing can happen to a thread any more, nobody sees
    /// that it loads, parks or has computed something that ends no request.
    pub(super) fn alone(&self, world: &World) -> Option<Move> {
        if matches!(world.shared.act, Act::Replace | Act::OpenMail { .. }) {
            return Some(Move::Act);
        }
        let budget = &world.shared.budget;
        if budget.errors + budget.divergences + budget.silences > 0 {
            return None;
        }
        for (at, place) in self.places(world).iter().enumerate() {
            for (number, thread) in place.threads.iter().enumerate() {
                let unseen = match thread.at {
                    At::Load | At::Perform(Deed::Park | Deed::Record(_), _) => true,
                    At::Perform(Deed::Replay(_), rows) => !self.ends_a_request(thread, rows),
                    _ => false,
                };
                if unseen && !thread.silent {
                    return Some(Move::Thread(at as u8, number as u8));
                }
            }
        }
        None
    }

    /// Moves that somebody is bound to make, sooner or later.
    pub(super) fn inside(&self, world: &World, out: &mut Vec<Move>) {
        let hub = &world.shared;
        for (at, place) in self.places(world).iter().enumerate() {
            let at = at as u8;
            for (number, thread) in place.threads.iter().enumerate() {
                let number = number as u8;
                if self.may_go_on(world, place, thread) {
                    out.push(Move::Thread(at, number));
                }
                if self.may_time_out(world, thread) {
                    out.push(Move::TimeOut(at, number));
                }
                if thread.news[0] != News::None && hub.act == Act::Rest {
                    out.push(Move::Hear(at, number));
                }
            }
            if self.is_late(world, place) && hub.act == Act::Rest {
                out.push(Move::Look(at));
            }
            for (number, case) in place.cases.iter().enumerate() {
                if case.is_under_way() {
                    out.push(Move::Letter(at, number as u8));
                }
            }
        }
        if hub.act != Act::Rest {
            out.push(Move::Act);
        }
    }

    /// What may happen, or not.
    pub(super) fn outside(&self, world: &World, out: &mut Vec<Move>) {
        let hub = &world.shared;
        let budget = &hub.budget;
        for (at, place) in self.places(world).iter().enumerate() {
            let at = at as u8;
            if budget.requests > 0 && !hub.exit && place.cases.iter().any(|case| case.letter.is_none()) {
                out.push(Move::Submit(at));
            }
            for (number, thread) in place.threads.iter().enumerate() {
                let number = number as u8;
                let works = !thread.silent && matches!(thread.at, At::Load | At::Round | At::Perform(..));
                // Who computes in a step may find out that it diverged; who loads may not.
                let computes = works && thread.at != At::Load;
                let waits = !thread.silent && matches!(thread.at, At::Await | At::Wait);
                let all = [
                    (budget.errors > 0 && works, Move::Fail(at, number, Loss::Ended)),
                    (budget.divergences > 0 && computes, Move::Fail(at, number, Loss::Diverged)),
                    (budget.silences > 0 && (works || waits), Move::Silence(at, number)),
                    (thread.silent, Move::Wake(at, number)),
                ];
                out.extend(all.into_iter().filter(|(may, _)| *may).map(|(_, what)| what));
            }
        }
        let sending = self.places(world).iter().any(|p| p.cases.iter().any(Case::is_under_way));
        if budget.exits > 0 && !sending {
            out.push(Move::Exit);
        }
        if budget.closes > 0 && hub.act == Act::Rest && !hub.watch.is_ended() {
            out.push(Move::End);
        }
    }

    pub(super) fn make_move(&mut self, world: &mut World, what: Move) -> Result<(), Broken> {
        match what {
            Move::Thread(at, number) => self.go_on(world, usize::from(at), usize::from(number))?,
            Move::TimeOut(at, number) => self.time_out(world, usize::from(at), usize::from(number)),
            Move::Fail(at, number, loss) => self.fail(world, (at, number), loss),
            Move::Silence(at, number) => {
                world.shared.budget.silences -= 1;
                world.shared.slow = true;
                let thread = &mut world.lanes[usize::from(at)].threads[usize::from(number)];
                (thread.struck, thread.silent) = (true, true);
            }
            Move::Wake(at, number) => {
                let thread = &mut world.lanes[usize::from(at)].threads[usize::from(number)];
                thread.silent = false;
                if !thread.holds_seat {
                    self.saw.insert("a ghost wakes");
                }
            }
            Move::Hear(at, number) => self.hear(world, usize::from(at), usize::from(number)),
            Move::Look(at) => self.look(world, usize::from(at)),
            Move::Act => self.act(world)?,
            Move::Submit(at) => {
                world.shared.budget.requests -= 1;
                let cases = &mut world.lanes[usize::from(at)].cases;
                let case = cases.iter().position(|case| case.letter.is_none()).expect("a case is free");
                cases[case].letter = Some(Letter::LookRed);
                self.letter(world, usize::from(at), case as u8);
            }
            Move::Letter(at, case) => self.letter(world, usize::from(at), case),
            Move::Exit => {
                world.shared.budget.exits -= 1;
                world.shared.exit = true;
            }
            Move::End => {
                world.shared.budget.closes -= 1;
                world.shared.act = world.shared.watch.end();
            }
        }
        self.check(world)?;
        self.tidy(world);
        Ok(())
    }

    fn fail(&mut self, world: &mut World, (at, number): (u8, u8), loss: Loss) {
        let budget = &mut world.shared.budget;
        match loss {
            Loss::Diverged => budget.divergences -= 1,
            Loss::Ended | Loss::Stuck => budget.errors -= 1,
        }
        let thread = &mut world.lanes[usize::from(at)].threads[usize::from(number)];
        thread.struck = true;
        if thread.at == At::Load {
            thread.tell(News::NotLoaded);
            self.live(thread, Life::Over);
        } else {
            world.shared.diverged |= loss == Loss::Diverged && thread.holds_seat;
            let life = Life::ran(thread.epoch.into(), RunEnd::Lost(loss), thread.holds_seat);
            self.live(thread, life);
        }
    }

    fn hear(&mut self, world: &mut World, at: usize, number: usize) {
        let thread = &mut world.lanes[at].threads[number];
        let (news, holds_seat) = (thread.heard(), thread.holds_seat);
        let watch = &mut world.shared.watch;
        match news {
            News::None => unreachable!("there is something to hear"),
            News::Loaded => {
                if watch.loaded() {
                    world.shared.act = watch.complete();
                }
            }
            News::NotLoaded => {
                watch.gone(true);
                world.shared.act = watch.end();
            }
            News::Alone(epoch) => {
                if watch.heeds(epoch.into()) || self.setup.plant == Some(Plant::EveryComplaintCounts) {
                    self.lose_missing(world, at);
                }
            }
            News::Lost(loss) => {
                world.lanes[at].lost = holds_seat;
                let act = watch.lost(holds_seat, loss, world.shared.exit);
                self.note(world, act, loss);
            }
            News::Left => watch.gone(holds_seat),
        }
    }

    /// True if the supervisor finds the holder of a place past a deadline. A parked thread has none.
    fn is_late(&self, world: &World, place: &Place) -> bool {
        let (hub, holder) = (&world.shared, place.holder());
        let late = match holder.at {
            At::Gone | At::Park => false,
            At::Load => hub.watch.is_forming(),
            At::Await => hub.standing == Standing::Formed && hub.formed > holder.epoch,
            At::Round | At::Wait | At::Perform(..) => !hub.watch.is_forming(),
        };
        late && holder.silent && !hub.watch.is_ended()
    }

    fn look(&mut self, world: &mut World, at: usize) {
        if world.shared.watch.is_forming() {
            world.shared.act = world.shared.watch.end();
        } else {
            self.lose_missing(world, at);
        }
    }

    /// Whoever is behind in the exchange is lost, or if nobody is, the one that can't go on.
    fn lose_missing(&mut self, world: &mut World, at: usize) {
        let epoch = place_of(world.shared.formed);
        let missing = behind(0..self.setup.lanes, |lane| world.lanes[lane].words[epoch].seat.into());
        let missing = if missing.is_empty() { vec![at] } else { missing };
        missing.into_iter().for_each(|lane| world.lanes[lane].lost = true);
        let act = world.shared.watch.lose(Loss::Stuck, world.shared.exit);
        self.note(world, act, Loss::Stuck);
    }

    fn note(&mut self, world: &mut World, act: Act, loss: Loss) {
        let hub = &mut world.shared;
        if act == (Act::TakeSeats { end: None }) {
            self.saw.insert("a loss while it forms");
        }
        if world.lanes[..self.setup.lanes].iter().filter(|place| place.lost).count() > 1 {
            self.saw.insert("two lost at once");
        }
        (hub.act, hub.loss) = (act, Some(loss));
        if act == Act::Rest {
            self.rest(world);
        }
    }

    fn act(&mut self, world: &mut World) -> Result<(), Broken> {
        let act = world.shared.act;
        self.carry_out(world, act)?;
        let answers_first = self.setup.plant == Some(Plant::AnswersBeforeRed);
        world.shared.act = match act {
            Act::TakeSeats { end: Some(_) } if answers_first => Act::FailAll,
            Act::FailAll if answers_first => Act::TurnRed,
            Act::CloseForGood if answers_first => Act::Rest,
            act => act.after(),
        };
        if world.shared.act == Act::Rest {
            self.rest(world);
        }
        Ok(())
    }

    fn rest(&self, world: &mut World) {
        world.shared.loss = None;
        world.lanes.iter_mut().for_each(|place| place.lost = false);
    }

    fn carry_out(&mut self, world: &mut World, act: Act) -> Result<(), Broken> {
        let (hub, places) = (&mut world.shared, &mut world.lanes[..self.setup.lanes]);
        let lost = |places: &[Place]| (0..places.len()).filter(|&at| places[at].lost).collect::<Vec<_>>();
        match act {
            Act::Rest => {}
            Act::Close { .. } => {
                hub.standing = Standing::Forming;
                if self.setup.plant != Some(Plant::WaitsStayOpen) {
                    hub.closed[place_of(hub.formed)] = true;
                }
                (hub.step, hub.deed, hub.state) = (0, Deed::Nothing, 0);
            }
            Act::ShutMail => places.iter_mut().for_each(|place| place.to = Addressee::NOBODY),
            Act::TakeSeats { end } => {
                for at in lost(places) {
                    let thread = &mut places[at].threads[usize::from(places[at].holder)];
                    if !thread.struck && !hub.slow {
                        return Err(Broken::Rule("a sound lane was given up"));
                    }
                    hub.watch.take_seat(thread.holds_seat, hub.loss.expect("seats are taken after a loss"));
                    thread.holds_seat = self.setup.plant == Some(Plant::SeatsKept);
                }
                self.note_end(u32::from(hub.formed), end)?;
            }
            Act::FailLost => {
                for at in lost(places) {
                    places[at].answer_all();
                    places[at].mail.fill(Mail::None);
                }
            }
            Act::Replace => {
                for at in lost(places) {
                    let place = &mut places[at];
                    let free = place.threads.iter().position(|t| t.is_gone() && t.news[0] == News::None);
                    let free = free.expect("no more threads than epochs");
                    place.threads[free] = Thread { at: At::Load, holds_seat: true, ..Thread::default() };
                    place.holder = free as u8;
                    hub.watch.spawned();
                }
            }
            Act::OpenMail { epoch } => places.iter_mut().for_each(|place| place.to = Addressee::of(epoch)),
            Act::Publish { epoch } => {
                self.saw.insert("formed again");
                (hub.standing, hub.formed, hub.step) = (Standing::Formed, epoch as u8, 0);
                let fresh = self.fresh();
                places.iter_mut().for_each(|place| place.words[place_of(epoch as u8)] = fresh);
            }
            Act::TurnRed => hub.red = true,
            Act::CloseForGood => {
                hub.standing = Standing::Ended;
                hub.closed[place_of(hub.formed)] = true;
                (hub.step, hub.deed, hub.state) = (0, Deed::Nothing, 0);
            }
            Act::FailAll => places.iter_mut().for_each(Place::answer_all),
        }
        Ok(())
    }

    /// A group that ends has a reason to.
    fn note_end(&mut self, formed: u32, end: Option<EndCause>) -> Result<(), Broken> {
        let what = match end {
            None => return Ok(()),
            Some(EndCause::Spent { .. }) if formed != self.restarts_max + 1 => {
                return Err(Broken::Rule("a group ends before it has formed again as often as it may"));
            }
            Some(EndCause::Spent { .. }) => "spent",
            Some(EndCause::Diverged) => "diverged",
            Some(EndCause::Stopping) => "lost while stopping",
        };
        self.saw.insert(what);
        Ok(())
    }

    fn letter(&mut self, world: &mut World, at: usize, number: u8) {
        let (hub, place) = (&world.shared, &mut world.lanes[at]);
        let case = &mut place.cases[usize::from(number)];
        let letter = case.letter.expect("a letter is under way");
        let looks_once = self.setup.plant == Some(Plant::LooksOnce);
        let outcome = match letter {
            Letter::LookRed => hub.red,
            Letter::LookRedAgain => hub.red && !looks_once,
            Letter::Register => {
                case.open = true;
                true
            }
            Letter::Put => {
                place.put(Mail::Submit(number));
                true
            }
            Letter::LookOpen => case.open || looks_once,
            Letter::Withdraw => {
                self.saw.insert("a letter is withdrawn");
                std::mem::take(&mut case.open)
            }
            Letter::Void { .. } => {
                self.saw.insert("a letter to nobody");
                place.put(Mail::Abort(number));
                true
            }
            Letter::Sent | Letter::Refused => unreachable!("it has come to its end"),
        };
        place.cases[usize::from(number)].letter = Some(letter.after(outcome));
    }

    /// Forgets what nobody can come by any more, so that worlds that differ in that only are one.
    fn tidy(&self, world: &mut World) {
        for epoch in 1..=world.shared.formed {
            let visited = |place: &Place| place.threads.iter().any(|thread| thread.is_in(epoch));
            if world.shared.is_closed(epoch) && !self.places(world).iter().any(visited) {
                let forget = |place: &mut Place| place.words[place_of(epoch)] = Words::default();
                world.lanes.iter_mut().for_each(forget);
            }
        }
        for place in &mut world.lanes {
            for case in 0..place.cases.len() {
                let known = |t: &Thread| t.work[case].tokens > 0;
                let mailed =
                    |mail: &Mail| matches!(mail, Mail::Submit(c) | Mail::Abort(c) if usize::from(*c) == case);
                let done = place.cases[case].is_as_it_should_be();
                if done && !place.threads.iter().any(known) && !place.mail.iter().any(mailed) {
                    place.cases[case] = Case::default();
                }
            }
        }
    }
}

impl Case {
    fn is_under_way(&self) -> bool {
        !matches!(self.letter, None | Some(Letter::Sent | Letter::Refused))
    }

    /// Answered once, or refused and not answered.
    pub(super) fn is_as_it_should_be(&self) -> bool {
        match self.letter {
            Some(Letter::Sent) => !self.open && self.answers == 1,
            Some(Letter::Refused) => !self.open && self.answers == 0,
            _ => false,
        }
    }
}
