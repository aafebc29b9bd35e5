//! The search: breadth first, so that the first violation found has the shortest way to it.

use super::lane::{At, LANES_MAX, Lane, Why};
use super::world::{Move, Rules, World};
use super::{Broken, Explored, Setup, Violation};
use crate::explore::group::Group;
use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// Visits every world that a setup can come to. `Err`: a rule was broken; how, on the shortest way.
pub(super) fn explore(setup: &Setup) -> Result<Explored, Box<Violation>> {
    let group = Group::new(setup.lanes, setup.policy, setup.replay_us, !setup.from_start);
    let mut rules = Rules { setup, group };
    let mut start = World::new(setup, &rules.group);
    start.lanes.iter_mut().for_each(|lane| lane.at = rules.first());
    let mut search = Search { seen: HashSet::default(), ways: Vec::new(), explored: Explored::new(setup) };
    let prints = start.lanes.map(|lane| print(&lane));
    search.add(setup, &start, &prints, (u32::MAX, Move::Ring));
    let mut level = vec![(0, start, prints)];
    let mut moves = Vec::new();
    while !level.is_empty() {
        let mut next = Vec::new();
        for (at, world, prints) in level.drain(..) {
            rules.moves(&world, &mut moves);
            if let Err(broken) = check_rest(&rules, &world) {
                return Err(search.violation(&mut rules, (at, None), broken));
            }
            for &what in &moves {
                search.explored.moves += 1;
                let mut then = world;
                if let Err(broken) = rules.make(&mut then, what) {
                    return Err(search.violation(&mut rules, (at, Some(what)), broken));
                }
                let mut prints = std::array::from_fn(|lane| match then.lanes[lane] == world.lanes[lane] {
                    true => prints[lane],
                    false => print(&then.lanes[lane]),
                });
                sort(setup, &mut then, &mut prints);
                if let Some(place) = search.add(setup, &then, &prints, (at, what)) {
                    next.push((place, then, prints));
                }
            }
        }
        search.explored.depth += usize::from(!next.is_empty());
        level = next;
    }
    search.explored.saw = rules.group.saw;
    Ok(search.explored)
}

/// Fingerprints of all lanes.
type Prints = [u128; LANES_MAX];

struct Search {
    seen: HashSet<u128, BuildHasherDefault<Ready>>,
    /// Of each world: from which it was first come to, and how.
    ways: Vec<(u32, Move)>,
    explored: Explored,
}

impl Search {
    /// The place of a world that was not seen before.
    fn add(&mut self, setup: &Setup, world: &World, prints: &Prints, way: (u32, Move)) -> Option<u32> {
        let mut print = Print::new();
        prints[..setup.lanes].hash(&mut print);
        world.shared.hash(&mut print);
        if !self.seen.insert(print.whole()) {
            return None;
        }
        self.ways.push(way);
        self.explored.worlds += 1;
        Some(self.ways.len() as u32 - 1)
    }

    /// Walks the shortest way again, with lanes named by where they began.
    fn violation(
        &self,
        rules: &mut Rules,
        (at, last): (u32, Option<Move>),
        broken: Broken,
    ) -> Box<Violation> {
        let setup = rules.setup;
        let mut moves: Vec<Move> = last.into_iter().collect();
        let mut at = at as usize;
        while self.ways[at].0 != u32::MAX {
            moves.push(self.ways[at].1);
            at = self.ways[at].0 as usize;
        }
        moves.reverse();
        let mut world = World::new(setup, &rules.group);
        world.lanes.iter_mut().for_each(|lane| lane.at = rules.first());
        let mut names: [usize; LANES_MAX] = std::array::from_fn(|lane| lane);
        let mut trace = Vec::new();
        for what in moves {
            trace.push(describe(setup, &world, &names, what));
            if rules.make(&mut world, what).is_err() {
                break;
            }
            let mut prints = world.lanes.map(|lane| print(&lane));
            let order = sort(setup, &mut world, &mut prints);
            names = std::array::from_fn(|to| names[order[to]]);
        }
        let lanes = (0..setup.lanes).map(|name| {
            let at = names.iter().position(|n| *n == name).expect("every lane has a name");
            format!("lane {name}: {:?}", world.lanes[at].at)
        });
        Box::new(Violation { setup: setup.name.clone(), broken, trace, end: lanes.collect() })
    }
}

fn describe(setup: &Setup, world: &World, names: &[usize; LANES_MAX], what: Move) -> String {
    let name = |lane: u8| names[usize::from(lane)];
    match what {
        Move::Lane(lane) => {
            let it = &world.lanes[usize::from(lane)];
            format!("lane {} (step {}): {:?}", name(lane), it.mine.step, it.at)
        }
        Move::Submit { lane, kind } => {
            let (prompt, tokens) = setup.kinds[usize::from(kind)];
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

/// If nothing happens any more unless somebody outside acts: is that as it should be?
fn check_rest(rules: &Rules, world: &World) -> Result<(), Broken> {
    let mut inside = Vec::new();
    rules.inside(world, &mut inside);
    if !inside.is_empty() {
        return Ok(());
    }
    let lanes = &world.lanes[..rules.setup.lanes];
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

/// Puts lanes into an order that depends on nothing but what they are: groups that differ in the names
/// of their lanes only are the same. Returns where each lane was.
fn sort(setup: &Setup, world: &mut World, prints: &mut Prints) -> [usize; LANES_MAX] {
    let mut order: [usize; LANES_MAX] = std::array::from_fn(|lane| lane);
    if !prints[..setup.lanes].is_sorted() {
        order[..setup.lanes].sort_by_key(|lane| prints[*lane]);
        (world.lanes, *prints) = (order.map(|from| world.lanes[from]), order.map(|from| prints[from]));
    }
    order
}

fn print(lane: &Lane) -> u128 {
    let mut print = Print::new();
    lane.hash(&mut print);
    print.whole()
}

/// A fingerprint of 128 bits, for which worlds are told apart: among 10^8 of them, two that differ are
/// taken for one with a chance of 10^-23.
struct Print(u64, u64);

impl Print {
    fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f)
    }

    fn eat(&mut self, word: u64) {
        let (a, b) = (u128::from(self.0 ^ word) * A, u128::from(self.1 ^ word.rotate_left(32)) * B);
        self.0 = (a >> 64) as u64 ^ a as u64 ^ self.1;
        self.1 = (b >> 64) as u64 ^ b as u64 ^ word;
    }

    fn whole(mut self) -> u128 {
        self.eat(0);
        self.eat(0);
        u128::from(self.0) << 64 | u128::from(self.1)
    }
}

impl Hasher for Print {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.eat(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, word: u8) {
        self.eat(word.into());
    }

    fn write_u16(&mut self, word: u16) {
        self.eat(word.into());
    }

    fn write_u32(&mut self, word: u32) {
        self.eat(word.into());
    }

    fn write_u64(&mut self, word: u64) {
        self.eat(word);
    }

    fn write_u128(&mut self, word: u128) {
        self.eat(word as u64);
        self.eat((word >> 64) as u64);
    }

    fn write_usize(&mut self, word: usize) {
        self.eat(word as u64);
    }

    fn write_isize(&mut self, word: isize) {
        self.eat(word as u64);
    }
}

/// For keys that are hashes already.
#[derive(Default)]
struct Ready(u64);

impl Hasher for Ready {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        let mut low = [0; 8];
        low.copy_from_slice(&bytes[..8]);
        self.0 = u64::from_le_bytes(low);
    }

    fn write_u128(&mut self, word: u128) {
        self.0 = word as u64;
    }
}

/// Odd, with half of the bits set.
const A: u128 = 0xa076_1d64_78bd_642f;
const B: u128 = 0xe703_7ed1_a0b4_28db;
