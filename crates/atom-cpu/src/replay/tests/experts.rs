//! Experts against the plain operators bit by bit, and those against f64.

use super::*;
use crate::matmul::tests::{DTYPES, element, random_tensor};
use crate::replay::tests::meeting::Meeting;
use atom_ops::ExpertSpec;
use std::ops::Range;

const ROWS: usize = 33;
const EXPERTS: usize = 9;
const TOP_K: usize = 3;
const HELD: Range<usize> = 2..7;

/// A layer's tensors.
struct Layer {
    hidden: usize,
    width: usize,
    /// Gate, up, down of each expert.
    experts: Vec<[Tensor; 3]>,
}

/// What a row chose: expert and weight, in ascending order.
type Route = Vec<(usize, f32)>;

/// Which rows are read, and what they choose.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Pattern {
    Uniform,
    /// All rows to one expert held here, and two elsewhere.
    One,
    /// Nobody chose an expert held here; some chose none at all.
    Nobody,
}

impl Layer {
    /// On widths of whole blocks of `block`: plain formats on some that fill no panel.
    fn new(dtype_of: impl Fn(usize) -> [DType; 3], block: usize) -> Self {
        let (hidden, width) = match block {
            1 => (83, 37),
            32 => (96, 64),
            _ => (block, block),
        };
        let expert = |e: usize| {
            let ([gate, up, down], seed) = (dtype_of(e), 10 * e as u64);
            [
                random_tensor(gate, width, hidden, seed),
                random_tensor(up, width, hidden, seed + 1),
                random_tensor(down, hidden, width, seed + 2),
            ]
        };
        Self { hidden, width, experts: (0..EXPERTS).map(expert).collect() }
    }

    fn load(&self, backend: &mut CpuBackend, held: Range<usize>) -> (Weight, Weight) {
        let gate_up: Vec<_> =
            self.experts[held.clone()].iter().map(|e| e[..2].iter().map(whole).collect()).collect();
        let down: Vec<_> = self.experts[held].iter().map(|e| vec![whole(&e[2])]).collect();
        (backend.load_experts(&gate_up).unwrap(), backend.load_experts(&down).unwrap())
    }

    /// `y(row, expert)` by the plain operators, one expert at a time. `[EXPERTS][ROWS]`
    fn by_plain_operators(&self, x: &[Vec<f32>], activations: Activations) -> Vec<Vec<Vec<f32>>> {
        let mut backend = CpuBackend::new(options(1, Isa::Portable, activations)).unwrap();
        let x = table(&mut backend, x);
        let matrices: Vec<_> = (self.experts.iter())
            .map(|[gate, up, down]| {
                let gate_up = backend.load_matrix(&[whole(gate), whole(up)]).unwrap();
                (gate_up, backend.load_matrix(&[whole(down)]).unwrap())
            })
            .collect();
        let shape = StepShape { rows: ROWS, out_rows: 1, lanes: 1 };
        backend.reserve(&reserve(shape)).unwrap();
        let mut ops = Ops::new(shape);
        let mut rows = |width| ops.buffer(Extent::Rows, width);
        let (x_rows, gate_up_rows, gated) = (rows(self.hidden), rows(2 * self.width), rows(self.width));
        let ys: Vec<_> = matrices.iter().map(|_| rows(self.hidden)).collect();
        ops.embed(x, x_rows);
        for (&(gate_up, down), &y) in matrices.iter().zip(&ys) {
            ops.linear(x_rows, gate_up, None, gate_up_rows);
            ops.gated_silu(gate_up_rows, gated);
            ops.linear(gated, down, None, y);
        }
        let recorded = record(&mut backend, ops);
        let tokens: Vec<u32> = (0..ROWS as u32).collect();
        step(&mut backend, &recorded, &tokens, (&[ROWS as u32], 0), &Meeting::alone()).unwrap();
        ys.iter().map(|&y| read(&mut backend, &recorded, y)).collect()
    }

    /// `y(row, expert)` in f64.
    fn exact(&self, x: &[f32], expert: usize) -> Vec<f64> {
        let product = |tensor: &Tensor, x: &[f64]| -> Vec<f64> {
            let row = |o| (0..x.len()).map(|k| x[k] * element(tensor.dtype, tensor.row(o), k)).sum();
            (0..tensor.rows()).map(row).collect()
        };
        let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let [gate, up, down] = &self.experts[expert];
        let (gate, up) = (product(gate, &x), product(up, &x));
        let gated: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        product(down, &gated)
    }
}

fn routes(pattern: Pattern) -> Vec<Route> {
    let route = |row: usize| -> Route {
        let draw = |i: usize| uniform(77, row as u32, i as u32, 0);
        let mut experts: Vec<usize> = match pattern {
            Pattern::Uniform => {
                let mut all: Vec<usize> = (0..EXPERTS).collect();
                all.sort_by(|&a, &b| draw(a).total_cmp(&draw(b)));
                all[..TOP_K].to_vec()
            }
            Pattern::One => vec![1, 4, 8],
            Pattern::Nobody if row % 4 == 3 => Vec::new(),
            Pattern::Nobody => vec![0, 1, 7 + row % 2],
        };
        experts.sort_unstable();
        experts.into_iter().map(|e| (e, draw(100 + e))).collect()
    };
    (0..ROWS).map(route).collect()
}

/// As buffers have it.
fn route_row(route: &Route) -> Vec<f32> {
    let number = |i: usize| route.get(i).map_or(NO_EXPERT, |choice| choice.0 as f32);
    let weight = |i: usize| route.get(i).map_or(0.0, |choice| choice.1);
    (0..TOP_K).map(number).chain((0..TOP_K).map(weight)).collect()
}

fn is_here(choice: &(usize, f32)) -> bool {
    HELD.contains(&choice.0)
}

/// The buffers of one recording.
struct Run {
    recorded: Recorded,
    out: Buf,
    weighted: bool,
}

fn record_experts(
    backend: &mut CpuBackend,
    layer: &Layer,
    (x, routes): (Weight, Weight),
    weights: (Weight, Weight),
    weighted: bool,
) -> Run {
    let mut ops = Ops::new(StepShape { rows: ROWS, out_rows: 1, lanes: 1 });
    let mut rows = |width| ops.buffer(Extent::Rows, width);
    let (x_rows, route_rows) = (rows(layer.hidden), rows(2 * TOP_K));
    let (inner, gated) = (rows(TOP_K * 2 * layer.width), rows(TOP_K * layer.width));
    let out = rows(if weighted { layer.hidden } else { TOP_K * layer.hidden });
    let spec = ExpertSpec { top_k: TOP_K, first: HELD.start, held: HELD.len(), width: layer.width };
    ops.embed(x, x_rows);
    ops.embed(routes, route_rows);
    let (spec, scratch) = (Arc::new(spec), (inner, gated));
    if weighted {
        ops.expert_sums((x_rows, route_rows), weights, &spec, scratch, out);
    } else {
        ops.expert_outputs((x_rows, route_rows), weights, &spec, scratch, out);
    }
    Run { recorded: record(backend, ops), out, weighted }
}

/// Checks the outputs of a step against `y[expert][row]`.
fn check_step(got: &[Vec<f32>], rows: usize, routes: &[Route], y: &[Vec<Vec<f32>>], run: &Run, what: &str) {
    let hidden = y[0][0].len();
    for (row, (got, route)) in got.iter().zip(routes).enumerate() {
        let what = format!("{what}, row {row}");
        if row >= rows {
            assert!(is_untouched(got), "{what}: padding was written");
        } else if run.weighted {
            let mut sum = vec![0.0f32; hidden];
            for &(expert, weight) in route.iter().filter(|choice| is_here(choice)) {
                sum.iter_mut().zip(&y[expert][row]).for_each(|(sum, y)| *sum += weight * y);
            }
            assert_eq!(bits(std::slice::from_ref(got)), bits(&[sum]), "{what}");
        } else {
            let here: Vec<_> = route.iter().filter(|choice| is_here(choice)).collect();
            for place in 0..TOP_K {
                let got = &got[place * hidden..][..hidden];
                match here.get(place) {
                    Some(&&(expert, _)) => {
                        assert_eq!(
                            bits(&[got.to_vec()]),
                            bits(std::slice::from_ref(&y[expert][row])),
                            "{what}, {expert}"
                        );
                    }
                    None => assert!(is_untouched(got), "{what}: place {place} was written"),
                }
            }
        }
    }
}

/// All patterns, row counts, threads and sets, weighted and not, against the plain operators.
fn check(layer: &Layer, activations: Activations, what: &str) {
    let x = noise(5, ROWS, layer.hidden);
    let y = layer.by_plain_operators(&x, activations);
    let tolerance = match activations {
        Activations::F32 => 1e-5,
        Activations::Int16 => 2e-3,
        Activations::Int8 => 0.2,
        Activations::Bf16 => 3e-2,
    };
    for row in 0..3 {
        for (expert, y) in y.iter().enumerate() {
            let exact = layer.exact(&x[row], expert);
            let size = exact.iter().fold(0.0, |size: f64, y| size.max(y.abs()));
            for (&got, want) in y[row].iter().zip(exact) {
                assert!(
                    (f64::from(got) - want).abs() < tolerance * size,
                    "{what}: {got}, not {want} of {size}"
                );
            }
        }
    }
    for isa in supported() {
        for threads in [1, 3] {
            let what = format!("{what}, {isa}, {threads} threads");
            let mut backend = CpuBackend::new(options(threads, isa, activations)).unwrap();
            let weights = layer.load(&mut backend, HELD);
            let mut inputs = Vec::new();
            for pattern in [Pattern::Uniform, Pattern::One, Pattern::Nobody] {
                let routes = routes(pattern);
                let read = |route: &Route| route.iter().any(is_here);
                // Rows that chose nobody here are not read.
                let x = (x.iter().zip(&routes))
                    .map(|(x, route)| if read(route) { x.clone() } else { vec![f32::NAN; x.len()] });
                let x = table(&mut backend, &x.collect::<Vec<_>>());
                let rows = table(&mut backend, &routes.iter().map(route_row).collect::<Vec<_>>());
                inputs.push((pattern, routes, x, rows));
            }
            backend.reserve(&reserve(StepShape { rows: ROWS, out_rows: 1, lanes: 1 })).unwrap();
            for (pattern, routes, x, route_table) in inputs {
                for weighted in [true, false] {
                    let run = record_experts(&mut backend, layer, (x, route_table), weights, weighted);
                    for rows in [1, 2, 7, ROWS] {
                        let what = format!("{what}, {pattern:?}, weighted {weighted}, {rows} rows");
                        let tokens: Vec<u32> = (0..rows as u32).collect();
                        let group = (&[rows as u32][..], 0);
                        step(&mut backend, &run.recorded, &tokens, group, &Meeting::alone()).unwrap();
                        let got = read(&mut backend, &run.recorded, run.out);
                        check_step(&got, rows, &routes, &y, &run, &what);
                        let here = |route: &Route| route.iter().filter(|choice| is_here(choice)).count();
                        let computed = routes[..rows].iter().map(here).sum::<usize>() as u64;
                        assert_eq!(backend.expert_rows().computed, computed, "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn experts_have_the_bits_of_plain_operators_in_every_format_company_and_set() {
    for dtype in DTYPES {
        let is_quantised = dtype.block_elements() > 1;
        let layer = Layer::new(|_| [dtype; 3], dtype.block_elements());
        check(&layer, Activations::F32, &format!("{dtype:?}"));
        if is_quantised {
            check(&layer, Activations::Int16, &format!("{dtype:?}, two planes"));
            check(&layer, Activations::Int8, &format!("{dtype:?}, one plane"));
        }
        // Of bf16 weights both: widths that tiles fit, and others.
        if dtype == DType::BF16 {
            check(&layer, Activations::Bf16, "rounded");
            check(&Layer::new(|_| [dtype; 3], 32), Activations::Bf16, "rounded, in tiles");
        }
    }
}

#[test]
fn experts_of_a_layer_may_differ_in_format() {
    let of = |expert: usize| {
        let at = |i: usize| DTYPES[(expert + i) % DTYPES.len()];
        [at(0), at(2), at(3)]
    };
    check(&Layer::new(of, 256), Activations::Int16, "mixed");
    let rounded: Vec<_> = DTYPES.into_iter().filter(|&dtype| Activations::Bf16.suits(dtype)).collect();
    let of = |expert: usize| [0, 1, 2].map(|i| rounded[(expert + i) % rounded.len()]);
    check(&Layer::new(of, 32), Activations::Bf16, "mixed, rounded");
}

/// More rows of one expert than are multiplied at a time.
#[test]
fn thousands_of_rows_on_one_expert_are_those_rows_alone() {
    let layer = Layer::new(|_| [DType::Q4_0, DType::Q8_0, DType::Q4_1], 32);
    let (rows, top_k) = (1000, 2);
    let x = noise(6, 7, layer.hidden);
    let mut backend = CpuBackend::new(options(3, Isa::detect(), Activations::Int8)).unwrap();
    let weights = layer.load(&mut backend, 0..2);
    let (x, routes) = (table(&mut backend, &x), table(&mut backend, &vec![vec![1.0, 5.0, 0.5, 0.5]; 7]));
    let shape = StepShape { rows, out_rows: 1, lanes: 1 };
    // Room in the cache for so many rows.
    backend.reserve(&Reserve { page_size: 1024, ..reserve(shape) }).unwrap();
    let mut ops = Ops::new(shape);
    let mut buffer = |width| ops.buffer(Extent::Rows, width);
    let (x_rows, route_rows) = (buffer(layer.hidden), buffer(2 * top_k));
    let (inner, gated) = (buffer(top_k * 2 * layer.width), buffer(top_k * layer.width));
    let out = buffer(layer.hidden);
    let spec = ExpertSpec { top_k, first: 0, held: 2, width: layer.width };
    ops.embed(x, x_rows);
    ops.embed(routes, route_rows);
    ops.expert_sums((x_rows, route_rows), weights, &Arc::new(spec), (inner, gated), out);
    let recorded = record(&mut backend, ops);
    let mut outputs = |count: usize| {
        let tokens: Vec<u32> = (0..count as u32).map(|row| row % 7).collect();
        step(&mut backend, &recorded, &tokens, (&[count as u32], 0), &Meeting::alone()).unwrap();
        bits(&read(&mut backend, &recorded, out)[..count])
    };
    let few = outputs(7);
    for (row, got) in outputs(rows).iter().enumerate() {
        assert_eq!(*got, few[row % 7], "row {row}");
    }
}

#[test]
fn layers_whose_experts_differ_or_are_none_are_refused_with_the_numbers() {
    let mut backend = CpuBackend::new(options(1, Isa::detect(), Activations::Int8)).unwrap();
    let tensor = |rows, cols| vec![whole(&random_tensor(DType::F32, rows, cols, 1))];
    let mut refused = |experts: &[Vec<Slice>]| backend.load_experts(experts).unwrap_err().to_string();
    assert!(refused(&[]).contains("without experts"));
    assert!(
        refused(&[tensor(4, 8), tensor(4, 8), tensor(5, 8)])
            .contains("expert 2 has 8 inputs and outputs [5]")
    );
    assert!(refused(&[tensor(4, 8), tensor(4, 9)]).contains("expert 1 has 9 inputs"));
    let split = [tensor(2, 8), tensor(2, 8)].concat();
    assert!(refused(&[tensor(4, 8), split]).contains("[2, 2]"));
    assert!(refused(&[Vec::new()]).contains("no slices"));
}

/// Two ranks of a process that hold the same experts, and one that holds some of them.
#[test]
fn equal_experts_are_held_once_and_all_are_counted() {
    let share = Arc::new(WeightShare::new());
    let layer = Layer::new(|_| [DType::Q4_0; 3], 32);
    let rank = |held: Range<usize>| {
        let options =
            CpuOptions { share: Arc::clone(&share), ..options(1, Isa::detect(), Activations::Int8) };
        let mut backend = CpuBackend::new(options).unwrap();
        layer.load(&mut backend, held);
        backend
    };
    let (first, second, part) = (rank(0..EXPERTS), rank(0..EXPERTS), rank(3..5));
    let panels = |backend: &CpuBackend| backend.panels();
    assert_eq!(panels(&first), panels(&second));
    assert!(panels(&part).iter().all(|panel| panels(&first).contains(panel)));
    assert_eq!(first.matrix_bytes() % EXPERTS, 0);
    assert_eq!(part.matrix_bytes(), first.matrix_bytes() / EXPERTS * 2);
}
