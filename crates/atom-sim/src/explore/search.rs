//! The search: breadth first, so that the first violation found has the shortest way to it.

use super::lane::LANES_MAX;
use super::{Broken, Explored, Setup, Violation};
use std::collections::{BTreeSet, HashSet};
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// Everything there is at one moment: what belongs to each lane, and what is no lane's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct World<L, S> {
    pub(super) lanes: [L; LANES_MAX],
    pub(super) shared: S,
}

/// What is explored: where it begins, what may happen, and what must hold.
pub(super) trait Universe {
    /// All that belongs to a lane, and so takes part when lanes change places.
    type Lane: Copy + PartialEq + Hash;
    type Shared: Copy + Hash;
    type Move: Copy;

    fn setup(&self) -> &Setup;

    fn start(&self) -> World<Self::Lane, Self::Shared>;

    /// All moves that can be made.
    fn moves(&self, world: &World<Self::Lane, Self::Shared>, out: &mut Vec<Self::Move>);

    fn make(&mut self, world: &mut World<Self::Lane, Self::Shared>, what: Self::Move) -> Result<(), Broken>;

    /// If nothing happens any more unless somebody outside acts: is that as it should be?
    fn check_rest(&self, world: &World<Self::Lane, Self::Shared>) -> Result<(), Broken>;

    /// A move in words, with lanes by their names.
    fn describe(
        &self,
        world: &World<Self::Lane, Self::Shared>,
        names: &[usize; LANES_MAX],
        what: Self::Move,
    ) -> String;

    /// Where a lane is.
    fn place(&self, lane: &Self::Lane) -> String;

    /// What was come by.
    fn saw(&self) -> BTreeSet<&'static str>;
}

/// Visits every world that can be come to. `Err`: a rule was broken; how, on the shortest way.
pub(super) fn explore<R: Universe>(mut rules: R) -> Result<Explored, Box<Violation>> {
    let start = rules.start();
    let explored = Explored::new(rules.setup());
    let lanes = rules.setup().lanes;
    let mut search = Search { seen: HashSet::default(), ways: Vec::new(), explored };
    let prints = start.lanes.map(|lane| print(&lane));
    search.add(lanes, &start, &prints, (u32::MAX, None));
    let mut level = vec![(0, start, prints)];
    let mut moves = Vec::new();
    while !level.is_empty() {
        let mut next = Vec::new();
        for (at, world, prints) in level.drain(..) {
            moves.clear();
            rules.moves(&world, &mut moves);
            if let Err(broken) = rules.check_rest(&world) {
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
                sort(lanes, &mut then, &mut prints);
                if let Some(place) = search.add(lanes, &then, &prints, (at, Some(what))) {
                    next.push((place, then, prints));
                }
            }
        }
        search.explored.depth += usize::from(!next.is_empty());
        level = next;
    }
    search.explored.saw = rules.saw();
    Ok(search.explored)
}

/// Fingerprints of all lanes.
type Prints = [u128; LANES_MAX];

struct Search<M> {
    seen: HashSet<u128, BuildHasherDefault<Ready>>,
    /// Of each world: from which it was first come to, and how.
    ways: Vec<(u32, Option<M>)>,
    explored: Explored,
}

impl<M: Copy> Search<M> {
    /// The place of a world that was not seen before.
    fn add<L, S: Hash>(
        &mut self,
        lanes: usize,
        world: &World<L, S>,
        prints: &Prints,
        way: (u32, Option<M>),
    ) -> Option<u32> {
        let mut print = Print::new();
        prints[..lanes].hash(&mut print);
        world.shared.hash(&mut print);
        if !self.seen.insert(print.whole()) {
            return None;
        }
        self.ways.push(way);
        self.explored.worlds += 1;
        Some(self.ways.len() as u32 - 1)
    }

    /// Walks the shortest way again, with lanes named by where they began.
    fn violation<R: Universe<Move = M>>(
        &self,
        rules: &mut R,
        (at, last): (u32, Option<M>),
        broken: Broken,
    ) -> Box<Violation> {
        let (name, lanes) = (rules.setup().name.clone(), rules.setup().lanes);
        let mut moves: Vec<M> = last.into_iter().collect();
        let mut at = at as usize;
        while let (before, Some(what)) = self.ways[at] {
            moves.push(what);
            at = before as usize;
        }
        moves.reverse();
        let mut world = rules.start();
        let mut names: [usize; LANES_MAX] = std::array::from_fn(|lane| lane);
        let mut trace = Vec::new();
        for what in moves {
            trace.push(rules.describe(&world, &names, what));
            if rules.make(&mut world, what).is_err() {
                break;
            }
            let mut prints = world.lanes.map(|lane| print(&lane));
            let order = sort(lanes, &mut world, &mut prints);
            names = std::array::from_fn(|to| names[order[to]]);
        }
        let ends = (0..lanes).map(|name| {
            let at = names.iter().position(|n| *n == name).expect("every lane has a name");
            format!("lane {name}: {}", rules.place(&world.lanes[at]))
        });
        Box::new(Violation { setup: name, broken, trace, end: ends.collect() })
    }
}

/// Puts lanes into an order that depends on nothing but what they are: groups that differ in the names
/// of their lanes only are the same. Returns where each lane was.
fn sort<L: Copy, S>(lanes: usize, world: &mut World<L, S>, prints: &mut Prints) -> [usize; LANES_MAX] {
    let mut order: [usize; LANES_MAX] = std::array::from_fn(|lane| lane);
    if !prints[..lanes].is_sorted() {
        order[..lanes].sort_by_key(|lane| prints[*lane]);
        (world.lanes, *prints) = (order.map(|from| world.lanes[from]), order.map(|from| prints[from]));
    }
    order
}

fn print(lane: &impl Hash) -> u128 {
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
