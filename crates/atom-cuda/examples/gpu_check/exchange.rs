//! Collectives: ranks are threads with a stream each, here all on one GPU.
//!
//! Whatever lasts or waits for a GPU (memory, programs, captures) is made before any rank launches: a kernel that waits for another
//! rank would be waited for.

mod trial;

use self::trial::{KINDS, Side, Spec, Trial};
use crate::kit::Kit;
use atom_cuda::launch::exchange::Meeting;
use atom_cuda::{
    Absence, Address, CudaError, Device, DeviceMem, Distress, Graph, Kernels, Queue, Stream, Window,
};
use atom_ops::Comm;
use std::time::Duration;

/// Ranks that meet, and the rounds that are next.
struct Ring {
    ranks: Vec<Rank>,
    rounds: [u32; 2],
    blocks_max: u32,
}

struct Rank {
    device: Device,
    stream: Stream,
    kernels: Kernels,
    windows: [Window; 2],
    distress: Distress,
    header: DeviceMem,
    graph: Option<Graph>,
    /// Filled to lose time.
    ballast: DeviceMem,
}

/// How the kernels of a run come to their streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Launches,
    /// Captured once, and replayed.
    Graphs,
}

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    // A member alone comes first: it loads every kernel before one waits for another.
    for members in 1..=4 {
        each_kind(kit, members)?;
    }
    many_rows(kit)?;
    for members in 2..=4 {
        mixed(kit, members)?;
        captured(kit, members)?;
    }
    absent(kit)?;
    aborted(kit)
}

/// Every kind in every type, narrow and wide, with rows from none to all.
fn each_kind(kit: &mut Kit, members: usize) -> Result<(), CudaError> {
    use atom_cuda::Element::{BF16, F32};
    for elements in [(F32, F32), (F32, BF16), (BF16, F32), (BF16, BF16)] {
        let mut specs = Vec::new();
        for width in [64, 4, 20, 37, 576, 1, 4096] {
            for (kind, lane_rows) in KINDS.into_iter().zip([1, 5, 33].into_iter().cycle()) {
                specs.push(Spec { elements, ..Spec::random(kit, kind, members, (lane_rows, width)) });
            }
        }
        let mut ring = Ring::new(kit, members, &specs)?;
        ring.run(kit, "each kind", &specs, By::Launches, 3)?;
    }
    Ok(())
}

/// More pieces than a grid has threads.
fn many_rows(kit: &mut Kit) -> Result<(), CudaError> {
    let specs: Vec<Spec> = KINDS.map(|kind| Spec::random(kit, kind, 4, (300, 2048 + 40))).into();
    let mut ring = Ring::new(kit, 4, &specs)?;
    ring.blocks_max = 3;
    ring.run(kit, "many rows", &specs, By::Launches, 2)
}

fn random_specs(kit: &mut Kit, members: usize, count: usize) -> Vec<Spec> {
    let one = |kit: &mut Kit| {
        let (kind, width) = (KINDS[kit.below(KINDS.len())], [64, 100, 129, 512, 1024][kit.below(5)]);
        let lane_rows = 1 + kit.below(20);
        Spec::random(kit, kind, members, (lane_rows, width))
    };
    (0..count).map(|_| one(kit)).collect()
}

/// 200 rounds behind each other, over the end of what a round is counted by.
fn mixed(kit: &mut Kit, members: usize) -> Result<(), CudaError> {
    let specs = random_specs(kit, members, 200);
    let mut ring = Ring::new(kit, members, &specs)?;
    ring.rounds = [u32::MAX - 40, u32::MAX - 150];
    ring.run(kit, "200 rounds", &specs, By::Launches, 2)
}

fn captured(kit: &mut Kit, members: usize) -> Result<(), CudaError> {
    let specs = random_specs(kit, members, 40);
    let mut ring = Ring::new(kit, members, &specs)?;
    ring.rounds = [1, u32::MAX - 100];
    ring.run(kit, "graphs", &specs, By::Graphs, 6)
}

/// A member that doesn't launch is named by the others, which wait for it once.
fn absent(kit: &mut Kit) -> Result<(), CudaError> {
    let specs = random_specs(kit, 3, 40);
    let mut ring = Ring::new(kit, 3, &specs)?;
    let sides = ring.sides(&specs)?;
    ring.begin(300)?;
    let (indices, limit) = (indices(&specs), Duration::from_secs(8));
    for me in [0, 2] {
        let rank = &ring.ranks[me];
        rank.device.bind()?;
        for ((spec, side), &index) in specs.iter().zip(&sides[me]).zip(&indices) {
            spec.launch(&rank.queue(), &rank.meeting(spec.comm, index, ring.blocks_max), side)?;
        }
    }
    for me in [0, 2] {
        let rank = &ring.ranks[me];
        rank.device.bind()?;
        // All of 40 waits would take half as long again.
        rank.stream.wait_within("collectives without a member", limit)?;
        let expected = Absence { comm: specs[0].comm, index: 0, member: 1, aborted: false };
        let found = rank.distress.taken();
        kit.check("who doesn't come is named", found == Some(expected), &format!("member {me}: {found:?}"));
    }
    ring.end(&specs);
    ring.recover()?;
    ring.run(kit, "after an absence", &specs, By::Launches, 2)
}

/// The host ends a wait.
fn aborted(kit: &mut Kit) -> Result<(), CudaError> {
    let specs = random_specs(kit, 2, 40);
    let mut ring = Ring::new(kit, 2, &specs)?;
    let sides = ring.sides(&specs)?;
    for early in [false, true] {
        ring.begin(60_000)?;
        let (rank, indices) = (&ring.ranks[1], indices(&specs));
        rank.device.bind()?;
        if early {
            rank.distress.abort();
        }
        for ((spec, side), &index) in specs.iter().zip(&sides[1]).zip(&indices) {
            spec.launch(&rank.queue(), &rank.meeting(spec.comm, index, ring.blocks_max), side)?;
        }
        if !early {
            rank.distress.abort();
        }
        rank.stream.wait_within("collectives that the host gave up", Duration::from_secs(20))?;
        let expected = Absence { comm: specs[0].comm, index: 0, member: 0, aborted: true };
        let found = rank.distress.taken();
        kit.check("the host ends a wait", found == Some(expected), &format!("{found:?}"));
        ring.end(&specs);
        ring.recover()?;
    }
    ring.run(kit, "after an abort", &specs, By::Launches, 1)
}

/// Numbers of collectives, each among those of its communicator.
fn indices(specs: &[Spec]) -> Vec<u32> {
    let mut next = [0; 2];
    let mut number = |spec: &Spec| {
        next[spec.comm as usize] += 1;
        next[spec.comm as usize] - 1
    };
    specs.iter().map(&mut number).collect()
}

impl Ring {
    /// All is well again, and who had given up may speak.
    fn recover(&self) -> Result<(), CudaError> {
        self.ranks.iter().try_for_each(|rank| {
            rank.device.bind()?;
            rank.distress.clear();
            rank.windows.iter().try_for_each(|window| window.forgive(&rank.stream))
        })
    }

    /// Members with windows for all of `specs`.
    fn new(kit: &Kit, members: usize, specs: &[Spec]) -> Result<Self, CudaError> {
        let set_bytes = specs.iter().map(Spec::set_bytes).max().unwrap_or(0);
        let rank = |me| Rank::new(&kit.device, &kit.kernels, (members, me), set_bytes);
        let ranks = (0..members).map(rank).collect::<Result<Vec<_>, _>>()?;
        for comm in [Comm::Lane, Comm::Group] {
            let windows: Vec<Address> =
                ranks.iter().map(|rank| rank.windows[comm as usize].address()).collect();
            for rank in &ranks {
                rank.device.bind()?;
                rank.windows[comm as usize].connect(&rank.stream, &windows)?;
            }
        }
        // Half of the GPU stays free for what loses time.
        let blocks_max = kit.device.properties().processors / (2 * members as u32);
        Ok(Self { ranks, rounds: [1, 1000], blocks_max: blocks_max.max(1) })
    }

    /// Arrays of every member for every spec.
    fn sides(&self, specs: &[Spec]) -> Result<Vec<Vec<Side>>, CudaError> {
        let of_rank = |(me, rank): (usize, &Rank)| {
            rank.device.bind()?;
            specs.iter().map(|spec| Side::new(&rank.device, spec, me)).collect()
        };
        self.ranks.iter().enumerate().map(of_rank).collect()
    }

    /// Headers of a step with the rounds that are next, and windows in which nothing is left.
    fn begin(&self, patience_ms: u32) -> Result<(), CudaError> {
        let mut words = [u32::MAX; 16];
        words[8..11].copy_from_slice(&[patience_ms, self.rounds[0], self.rounds[1]]);
        let header: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        for rank in &self.ranks {
            rank.device.bind()?;
            rank.windows.iter().try_for_each(|window| window.poison(&rank.stream))?;
            rank.header.write(&rank.stream, 0, &header)?;
        }
        Ok(())
    }

    /// The rounds of the next step.
    fn end(&mut self, specs: &[Spec]) {
        for spec in specs {
            let next = &mut self.rounds[spec.comm as usize];
            *next = next.wrapping_add(1);
        }
    }

    /// Runs all of `specs` behind each other, `plays` times with new inputs, and compares every member's results.
    fn run(
        &mut self,
        kit: &mut Kit,
        what: &str,
        specs: &[Spec],
        by: By,
        plays: usize,
    ) -> Result<(), CudaError> {
        let sides = self.sides(specs)?;
        if by == By::Graphs {
            self.capture(specs, &sides)?;
        }
        for _ in 0..plays {
            let trials: Vec<Trial> = specs.iter().map(|spec| Trial::random(kit, spec)).collect();
            for (me, (rank, sides)) in self.ranks.iter().zip(&sides).enumerate() {
                rank.device.bind()?;
                for ((spec, side), trial) in specs.iter().zip(sides).zip(&trials) {
                    side.fill(&rank.stream, spec, trial, me)?;
                }
            }
            self.begin(20_000)?;
            self.play(kit, specs, &sides)?;
            self.end(specs);
            for (me, (rank, sides)) in self.ranks.iter().zip(&sides).enumerate() {
                let taken = rank.distress.taken();
                kit.check(what, taken.is_none(), &format!("member {me} of {}: {taken:?}", self.ranks.len()));
                rank.device.bind()?;
                for ((spec, side), trial) in specs.iter().zip(sides).zip(&trials) {
                    let difference = side.difference(&rank.stream, spec, trial, me)?;
                    let detail =
                        difference.as_ref().map_or(String::new(), |found| format!("{found}; {spec:?}"));
                    kit.check(what, difference.is_none(), &detail);
                }
            }
        }
        self.ranks.iter_mut().for_each(|rank| rank.graph = None);
        kit.device.bind()
    }

    fn capture(&mut self, specs: &[Spec], sides: &[Vec<Side>]) -> Result<(), CudaError> {
        let (indices, blocks_max) = (indices(specs), self.blocks_max);
        for (rank, sides) in self.ranks.iter_mut().zip(sides) {
            rank.device.bind()?;
            let graph = Graph::capture::<CudaError>(&rank.stream, || {
                specs.iter().zip(sides).zip(&indices).try_for_each(|((spec, side), &index)| {
                    spec.launch(&rank.queue(), &rank.meeting(spec.comm, index, blocks_max), side)
                })
            })?;
            rank.graph = Some(graph);
            rank.stream.wait()?;
        }
        Ok(())
    }

    /// Every rank on its thread, each as late as chance has it: in front of a graph, or of any kernel.
    fn play(&mut self, kit: &mut Kit, specs: &[Spec], sides: &[Vec<Side>]) -> Result<(), CudaError> {
        let (indices, blocks_max) = (&indices(specs), self.blocks_max);
        let delays =
            |kit: &mut Kit| specs.iter().map(|_| kit.below(40).saturating_sub(30)).collect::<Vec<_>>();
        let delays: Vec<Vec<usize>> = self.ranks.iter().map(|_| delays(kit)).collect();
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for ((rank, sides), delays) in self.ranks.iter_mut().zip(sides).zip(delays) {
                threads.push(scope.spawn(move || {
                    let rank: &Rank = rank;
                    rank.device.bind()?;
                    if let Some(graph) = &rank.graph {
                        rank.lose_time(10 * delays[0])?;
                        graph.launch(&rank.stream)?;
                        return rank.stream.wait();
                    }
                    for (((spec, side), &index), delay) in specs.iter().zip(sides).zip(indices).zip(delays) {
                        rank.lose_time(delay)?;
                        spec.launch(&rank.queue(), &rank.meeting(spec.comm, index, blocks_max), side)?;
                    }
                    rank.stream.wait()
                }));
            }
            threads.into_iter().try_for_each(|thread| thread.join().expect("launching does not panic"))
        })
    }
}

impl Rank {
    fn new(
        device: &Device,
        kernels: &Kernels,
        (members, me): (usize, usize),
        set_bytes: usize,
    ) -> Result<Self, CudaError> {
        device.bind()?;
        let stream = device.stream()?;
        let window = |comm| Window::new(&stream, comm, (members, me), set_bytes);
        let windows = [window(Comm::Lane)?, window(Comm::Group)?];
        let (header, ballast) = (DeviceMem::new(device, 64)?, DeviceMem::new(device, BALLAST_BYTES)?);
        let distress = Distress::new(device)?;
        Ok(Self {
            device: device.clone(),
            kernels: kernels.clone(),
            windows,
            distress,
            graph: None,
            header,
            ballast,
            stream,
        })
    }

    fn queue(&self) -> Queue<'_> {
        Queue { kernels: &self.kernels, stream: &self.stream }
    }

    fn meeting(&self, comm: Comm, index: u32, blocks_max: u32) -> Meeting {
        let (circle, header) = (self.windows[comm as usize].circle(), self.header.address());
        Meeting { circle, header, distress: self.distress.address(), index, blocks_max }
    }

    fn lose_time(&self, times: usize) -> Result<(), CudaError> {
        (0..times).try_for_each(|_| self.ballast.fill(&self.stream, 0, BALLAST_BYTES, 0))
    }
}

/// Some 20 µs of an H200's memory.
const BALLAST_BYTES: usize = 64 << 20;
