//! The group of one epoch as the search sees it: where it begins, when it rests, and its moves in words.

use super::lane::{At, LANES_MAX, Lane, Why};
use super::world::{Move, Rules, Shared, World};
use super::{Broken, Setup, search};
use std::collections::BTreeSet;

impl search::Universe for Rules<'_> {
    type Lane = Lane;
    type Shared = Shared;
    type Move = Move;

    fn setup(&self) -> &Setup {
        self.setup
    }

    fn start(&self) -> World {
        self.first_world()
    }

    fn moves(&self, world: &World, out: &mut Vec<Move>) {
        self.all_moves(world, out);
    }

    fn make(&mut self, world: &mut World, what: Move) -> Result<(), Broken> {
        self.make_move(world, what)
    }

    fn check_rest(&self, world: &World) -> Result<(), Broken> {
        let mut inside = Vec::new();
        self.inside(world, &mut inside);
        if !inside.is_empty() {
            return Ok(());
        }
        let lanes = self.lanes(world);
        let left = lanes.iter().any(|l| matches!(l.at, At::Gone(why) if !matches!(why, Why::Died { .. })));
        for lane in lanes {
            let waits = match lane.at {
                At::Gone(_) => continue,
                // Said again here in other words than those that the lane itself goes by.
                At::Rest(_) => {
                    let left_behind = lanes.iter().any(|peer| peer.seat > lane.seat);
                    left_behind || lane.has_mail() || world.shared.exit || world.shared.closed
                }
                _ => return Err(Broken::Deadlock),
            };
            let rests = lane.told.pause && world.shared.paused;
            match () {
                () if waits => return Err(Broken::LostWakeUp),
                () if left => return Err(Broken::Rule("a lane sleeps and its group has ended")),
                () if lane.has_work() && !rests => return Err(Broken::Rule("a lane sleeps over its work")),
                () => {}
            }
        }
        Ok(())
    }

    fn describe(&self, world: &World, names: &[usize; LANES_MAX], what: Move) -> String {
        let name = |lane: u8| names[usize::from(lane)];
        match what {
            Move::Lane(lane) => {
                let it = &world.lanes[usize::from(lane)];
                format!("lane {} (step {}): {:?}", name(lane), it.mine.step, it.at)
            }
            Move::Submit { lane, kind } => {
                let (prompt, tokens) = self.setup.kinds[usize::from(kind)];
                format!("a request of {prompt} prompt rows and {tokens} tokens comes to lane {}", name(lane))
            }
            Move::Abort(lane) => format!("the oldest request of lane {} is aborted", name(lane)),
            Move::Preempt(lane) => format!("a request of lane {} gives way", name(lane)),
            Move::TimeOut(lane) => format!("lane {} is past its deadline", name(lane)),
            Move::Break(lane) => format!("lane {} can't go on", name(lane)),
            Move::Die(lane) => format!("lane {} stops without a word", name(lane)),
            Move::Ring => format!("outside: {:?}", world.shared.bell),
            Move::Pause | Move::Resume | Move::Exit | Move::Close => format!("outside: {what:?}"),
        }
    }

    fn place(&self, lane: &Lane) -> String {
        format!("{:?}", lane.at)
    }

    fn saw(&self) -> BTreeSet<&'static str> {
        self.group.saw.clone()
    }
}
