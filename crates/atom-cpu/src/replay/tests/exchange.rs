//! Lanes that hold experts apart, and meet for every row's choices.

use super::*;
use crate::matmul::tests::random_tensor;
use crate::replay::tests::meeting::{Meeting, Meetings};
use atom_ops::{ExpertRows, ExpertSpec, RouteSpec};

const EXPERTS: usize = 8;
const HIDDEN: usize = 64;
const WIDTH: usize = 32;
/// Capacity of a lane.
const ROWS: usize = 6;

/// How lanes get each other's rows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Exchange {
    /// Rows to the experts, outputs back.
    Dispatch,
    /// All rows to all lanes, weighted sums back.
    Gather,
}

/// What a world is made of.
struct World {
    /// Lane `l` holds `owners[l] .. owners[l + 1]`.
    owners: Vec<usize>,
    exchange: Exchange,
    top_k: usize,
    /// All rows have the same logits.
    one_expert: bool,
    activations: Activations,
    threads: usize,
}

/// What a lane ends with.
struct Outcome {
    out: Vec<Vec<f32>>,
    counts: ExpertRows,
    /// Routes of all lanes and the rows that came here.
    seen: Option<[Vec<Vec<f32>>; 2]>,
}

fn tensors() -> Vec<[Tensor; 2]> {
    let dtypes = [DType::Q4_0, DType::Q8_0, DType::BF16, DType::Q4_1];
    let expert = |e: usize| {
        let (dtype, seed) = (dtypes[e % 4], 7 * e as u64);
        [random_tensor(dtype, 2 * WIDTH, HIDDEN, seed), random_tensor(dtype, HIDDEN, WIDTH, seed + 1)]
    };
    (0..EXPERTS).map(expert).collect()
}

impl World {
    fn lanes(&self) -> usize {
        self.owners.len() - 1
    }

    /// A step of one lane, whose row `i` is token `first + i`.
    fn lane(
        &self,
        (lane, first): (usize, usize),
        rows: usize,
        granted: &[u32],
        meeting: &Meeting<'_>,
    ) -> Outcome {
        let held = self.owners[lane]..self.owners[lane + 1];
        let mut backend = CpuBackend::new(options(self.threads, Isa::detect(), self.activations)).unwrap();
        let tensors = &tensors()[held.clone()];
        let slices = |i: usize| tensors.iter().map(|e| vec![whole(&e[i])]).collect::<Vec<_>>();
        let weights = (backend.load_experts(&slices(0)).unwrap(), backend.load_experts(&slices(1)).unwrap());
        let tokens = 3 * ROWS;
        let x = table(&mut backend, &noise(1, tokens, HIDDEN));
        let logits = noise(2, if self.one_expert { 1 } else { tokens }, EXPERTS);
        let logits: Vec<_> = logits.iter().cycle().take(tokens).cloned().collect();
        let logits = table(&mut backend, &logits);
        let shape = StepShape { rows: ROWS, out_rows: 1, lanes: self.lanes() };
        backend.reserve(&reserve(shape)).unwrap();
        let mut ops = Ops::new(shape);
        let (x_rows, logit_rows) = (ops.buffer(Extent::Rows, HIDDEN), ops.buffer(Extent::Rows, EXPERTS));
        let routes = ops.buffer(Extent::Rows, 2 * self.top_k);
        let out = ops.buffer(Extent::Rows, HIDDEN);
        let route = RouteSpec {
            experts: EXPERTS,
            top_k: self.top_k,
            is_sigmoid: true,
            groups: 1,
            groups_kept: 1,
            normalise: true,
            scale: 2.5,
        };
        ops.embed(x, x_rows);
        ops.embed(logits, logit_rows);
        ops.route(logit_rows, None, &Arc::new(route), routes);
        let extent = if self.lanes() == 1 { Extent::Rows } else { Extent::GroupRows };
        let spec =
            Arc::new(ExpertSpec { top_k: self.top_k, first: held.start, held: held.len(), width: WIDTH });
        let places = spec.choices_per_row();
        let (inner, gated) = (ops.buffer(extent, places * 2 * WIDTH), ops.buffer(extent, places * WIDTH));
        let mut seen = None;
        if self.lanes() == 1 {
            ops.expert_sums((x_rows, routes), weights, &spec, (inner, gated), out);
        } else {
            let (all_x, all_routes) = (ops.buffer(extent, HIDDEN), ops.buffer(extent, 2 * self.top_k));
            ops.gather_rows(routes, all_routes);
            seen = Some([all_routes, all_x]);
            if self.exchange == Exchange::Dispatch {
                let owners: Arc<[usize]> = self.owners.clone().into();
                let y = ops.buffer(extent, places * HIDDEN);
                ops.dispatch_rows(x_rows, all_routes, &owners, all_x);
                ops.expert_outputs((all_x, all_routes), weights, &spec, (inner, gated), y);
                ops.combine_rows(y, all_routes, &owners, out);
            } else {
                let sums = ops.buffer(extent, HIDDEN);
                ops.gather_rows(x_rows, all_x);
                ops.expert_sums((all_x, all_routes), weights, &spec, (inner, gated), sums);
                ops.scatter_sum(sums, out);
            }
        }
        let recorded = record(&mut backend, ops);
        let tokens: Vec<u32> = (0..rows as u32).map(|row| first as u32 + row).collect();
        step(&mut backend, &recorded, &tokens, (granted, lane), meeting).unwrap();
        Outcome {
            out: read(&mut backend, &recorded, out),
            counts: backend.expert_rows(),
            seen: seen.map(|seen| seen.map(|buf| read(&mut backend, &recorded, buf))),
        }
    }

    /// A step of all lanes.
    fn step(&self, rows: &[usize], granted: &[u32]) -> Vec<Outcome> {
        let room = Meetings::new(self.lanes());
        std::thread::scope(|scope| {
            let run = |lane| {
                let room = &room;
                scope.spawn(move || {
                    self.lane((lane, lane * ROWS), rows[lane], granted, &Meeting::new(lane, room))
                })
            };
            let threads: Vec<_> = (0..self.lanes()).map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

/// The rows of three lanes on one rank with all experts.
fn on_one_rank(top_k: usize, one_expert: bool, activations: Activations) -> Vec<Vec<f32>> {
    let owners = vec![0, EXPERTS];
    let world = World { owners, exchange: Exchange::Gather, top_k, one_expert, activations, threads: 1 };
    let lane = |lane: usize| world.lane((0, lane * ROWS), ROWS, &[ROWS as u32], &Meeting::alone()).out;
    (0..3).flat_map(lane).collect()
}

/// Which rows of `routes` chose an expert of `held`.
fn chose(route: &[f32], held: std::ops::Range<usize>) -> bool {
    route[..route.len() / 2].iter().any(|&number| number >= 0.0 && held.contains(&(number as usize)))
}

const COMPANIES: [[usize; 3]; 5] = [[6, 6, 6], [1, 0, 5], [0, 0, 2], [4, 1, 0], [0, 0, 0]];

#[test]
fn lanes_with_experts_apart_compute_what_one_rank_computes() {
    let exchanges = [(Exchange::Dispatch, 3), (Exchange::Gather, 3), (Exchange::Dispatch, 1)];
    for one_expert in [false, true] {
        for activations in [Activations::Int16, Activations::F32] {
            for (exchange, top_k) in exchanges {
                let expected = on_one_rank(top_k, one_expert, activations);
                for owners in [vec![0, 3, 8], vec![0, 1, 6, 8]] {
                    for threads in [1, 2] {
                        let owners = owners.clone();
                        let world = World { owners, exchange, top_k, one_expert, activations, threads };
                        for rows in COMPANIES {
                            check(&world, &rows[..world.lanes()], &expected);
                        }
                    }
                }
            }
        }
    }
}

fn check(world: &World, rows: &[usize], expected: &[Vec<f32>]) {
    let exactly: Vec<u32> = rows.iter().map(|&n| n as u32).collect();
    let more: Vec<u32> = rows.iter().map(|&n| (n as u32 + 2).min(ROWS as u32)).collect();
    for granted in [exactly, more] {
        let what = format!("{:?} {:?}, {rows:?} of {granted:?}", world.exchange, world.owners);
        let outcomes = world.step(rows, &granted);
        let mut computed = 0;
        for (lane, outcome) in outcomes.iter().enumerate() {
            for row in 0..rows[lane] {
                let (got, want) = (&outcome.out[row], &expected[lane * ROWS + row]);
                if world.exchange == Exchange::Dispatch {
                    assert_eq!(
                        bits(std::slice::from_ref(got)),
                        bits(std::slice::from_ref(want)),
                        "{what}: row {row} of lane {lane}"
                    );
                } else {
                    // Sums of lanes are added, so in another order.
                    let size = want.iter().fold(0.0, |size: f32, x| size.max(x.abs()));
                    let close = |(got, want): (&f32, &f32)| (got - want).abs() <= 1e-5 * size;
                    assert!(got.iter().zip(want).all(close), "{what}: row {row} of lane {lane}");
                }
            }
            if world.exchange == Exchange::Dispatch {
                assert!(outcome.out[rows[lane]..].iter().all(|row| is_untouched(row)), "{what}: padding");
                let [routes, x] = outcome.seen.as_ref().expect("there are other lanes");
                let held = world.owners[lane]..world.owners[lane + 1];
                for (row, (route, x)) in routes.iter().zip(x).enumerate() {
                    let (from, i) = (row / ROWS, row % ROWS);
                    let comes = i < granted[from] as usize && chose(route, held.clone());
                    assert_ne!(is_untouched(x), comes, "{what}: row {i} of lane {from} on lane {lane}");
                }
            }
            assert_eq!(outcome.counts.chosen, (rows[lane] * world.top_k) as u64, "{what}");
            computed += outcome.counts.computed;
        }
        assert_eq!(computed, (rows.iter().sum::<usize>() * world.top_k) as u64, "{what}: each choice once");
    }
}
