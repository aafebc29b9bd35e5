//! What must hold, always and at rest; and the world as the search sees it.

use super::{At, Hub, Move, Place, Rules, Standing, Thread, World};
use crate::explore::lane::LANES_MAX;
use crate::explore::{Broken, Setup, search};
use std::collections::BTreeSet;

impl search::Universe for Rules<'_> {
    type Lane = Place;
    type Shared = Hub;
    type Move = Move;

    fn setup(&self) -> &Setup {
        self.setup
    }

    fn start(&self) -> World {
        self.first_world()
    }

    fn moves(&self, world: &World, out: &mut Vec<Move>) {
        if let Some(alone) = self.alone(world) {
            return out.push(alone);
        }
        self.inside(world, out);
        self.outside(world, out);
    }

    fn make(&mut self, world: &mut World, what: Move) -> Result<(), Broken> {
        self.make_move(world, what)
    }

    fn check_rest(&self, world: &World) -> Result<(), Broken> {
        let mut inside = Vec::new();
        self.inside(world, &mut inside);
        if inside.is_empty() { self.check_end(world) } else { Ok(()) }
    }

    fn describe(&self, world: &World, names: &[usize; LANES_MAX], what: Move) -> String {
        let name = |at: u8| names[usize::from(at)];
        let thread = |at: u8, number: u8| {
            let it = &world.lanes[usize::from(at)].threads[usize::from(number)];
            let ghost = if it.holds_seat { "" } else { ", without its seat" };
            format!("lane {} thread {number} (epoch {}{ghost}): {:?}", name(at), it.epoch, it.at)
        };
        match what {
            Move::Thread(at, number) => thread(at, number),
            Move::TimeOut(at, number) => format!("{} is past its deadline", thread(at, number)),
            Move::Fail(at, number, loss) => format!("{} fails: {loss:?}", thread(at, number)),
            Move::Silence(at, number) => format!("{} hangs", thread(at, number)),
            Move::Wake(at, number) => format!("{} goes on", thread(at, number)),
            Move::Hear(at, number) => {
                let news = world.lanes[usize::from(at)].threads[usize::from(number)].news[0];
                format!("supervisor hears of lane {} thread {number}: {news:?}", name(at))
            }
            Move::Look(at) => format!("supervisor finds lane {} late", name(at)),
            Move::Act => format!("supervisor: {:?}", world.shared.act),
            Move::Submit(at) => format!("a request for lane {}", name(at)),
            Move::Letter(at, case) => {
                let letter = world.lanes[usize::from(at)].cases[usize::from(case)].letter;
                format!("request {case} of lane {}: {:?}", name(at), letter.expect("it is under way"))
            }
            Move::Exit | Move::End => format!("outside: {what:?}"),
        }
    }

    fn place(&self, place: &Place) -> String {
        let threads = place.threads.iter().filter(|thread| !thread.is_gone());
        let threads: Vec<_> = threads
            .map(|t| format!("{:?} in epoch {}{}", t.at, t.epoch, if t.holds_seat { "" } else { " (ghost)" }))
            .collect();
        format!("{threads:?}, mail {:?}, requests {:?}", place.mail, place.cases)
    }

    fn saw(&self) -> BTreeSet<&'static str> {
        self.saw.union(&self.group.saw).copied().collect()
    }
}

impl Rules<'_> {
    /// What must hold at every moment.
    pub(super) fn check(&self, world: &World) -> Result<(), Broken> {
        let rule = |holds: bool, what| if holds { Ok(()) } else { Err(Broken::Rule(what)) };
        rule(
            world.shared.watch.epoch() <= u64::from(self.restarts_max) + 1,
            "a group forms again more often than it may",
        )?;
        for place in self.places(world) {
            let seated = |epoch: u8| place.threads.iter().filter(|thread| thread.is_in(epoch)).count();
            rule((1..=world.shared.formed).all(|epoch| seated(epoch) <= 1), "two threads in one seat")?;
            rule(place.cases.iter().all(|case| case.answers <= 1), "a request was answered twice")?;
        }
        Ok(())
    }

    /// What must hold where nothing moves any more.
    fn check_end(&self, world: &World) -> Result<(), Broken> {
        let hub = &world.shared;
        let rule = |holds: bool, what| if holds { Ok(()) } else { Err(Broken::Rule(what)) };
        let ended = hub.standing == Standing::Ended;
        rule(hub.watch.is_ended() == ended && hub.red == ended, "an end that not everybody knows of")?;
        rule(ended || !hub.diverged, "lanes that diverged go on")?;
        rule(hub.standing != Standing::Forming, "a group forms and forms")?;
        let holders = || self.places(world).iter().map(Place::holder);
        for place in self.places(world) {
            let done = |case: &super::Case| case.letter.is_none() || case.is_as_it_should_be();
            rule(place.cases.iter().all(done), "a request was never answered, or refused and answered")?;
            for thread in &place.threads {
                self.check_thread(hub, place, thread)?;
            }
        }
        // Whoever hangs in a group that has ended is left behind by whoever stops the host.
        let left = holders().filter(|t| t.holds_seat && !t.is_gone()).count();
        rule(hub.watch.holders() == left, "the supervisor has lost count of the threads")?;
        rule(left == 0 || !ended || holders().any(|t| t.silent), "a thread stays in a group that has ended")?;
        let together = holders().all(|t| t.is_in(hub.formed)) || holders().all(Thread::is_gone);
        rule(ended || together, "lanes rest in different epochs")
    }

    fn check_thread(&self, hub: &Hub, place: &Place, thread: &Thread) -> Result<(), Broken> {
        match thread.at {
            At::Gone => Ok(()),
            _ if thread.silent => match !thread.holds_seat || hub.standing == Standing::Ended {
                true => Ok(()),
                false => Err(Broken::Rule("a thread hangs, and the supervisor does not find it")),
            },
            At::Park if thread.has_work() => Err(Broken::Rule("a lane sleeps over its work")),
            At::Park if place.has_mail() || hub.exit => Err(Broken::LostWakeUp),
            At::Park if thread.epoch == hub.formed && hub.standing == Standing::Formed => Ok(()),
            _ => Err(Broken::Deadlock),
        }
    }
}
