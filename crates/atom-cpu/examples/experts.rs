//! Speed of a mixture-of-experts layer (hidden 2048, width 768, 128 experts, 8 a row, as in
//! Qwen3-30B-A3B) beside that of plain products that read the same bytes: the matrices of all experts
//! that somebody chose as one matrix, with as many rows as an expert has on average.
//!
//! `cargo run --release -p atom-cpu --example experts [threads [format]]`

use atom_base::{SlotId, Span, rng};
use atom_cpu::{Activations, CpuBackend, CpuOptions, WeightShare};
use atom_ops::{
    AttentionSpec, Backend, Collectives, Comm, ExpertSpec, Extent, KvDType, LoadWeights, Ops, OpsError,
    PageTables, Reserve, Rotary, Slice, StepInputs, StepShape, Weight,
};
use atom_weights::{DType, Tensor};
use std::sync::Arc;
use std::time::{Duration, Instant};

const HIDDEN: usize = 2048;
const WIDTH: usize = 768;
const EXPERTS: usize = 128;
const TOP_K: usize = 8;
const ROWS: [usize; 4] = [1, 8, 64, 512];
const ROWS_MAX: usize = 512;
/// Each pair of figures is the best of the runs that fit in this.
const PATIENCE: Duration = Duration::from_secs(4);

/// What is loaded.
struct Layer {
    gate_up: Weight,
    down: Weight,
    x: Weight,
    gated: Weight,
    routes: Weight,
    /// Bytes of both matrices of one expert.
    expert_bytes: usize,
    /// For each of [`ROWS`].
    plain: Vec<Plain>,
}

/// What the experts that somebody chose are as plain products.
struct Plain {
    gate_up: Weight,
    down: Weight,
    active: usize,
    rows: usize,
}

fn main() -> Result<(), OpsError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::args().nth(1).map_or(cores, |arg| arg.parse().expect("a number of threads"));
    let wanted = std::env::args().nth(2);
    println!("{threads} threads");
    println!("weights activations rows  experts: ms   GB/s  Gop/s   plain: ms   GB/s    ratio");
    for dtype in [DType::Q4_0, DType::BF16] {
        if wanted.as_ref().is_some_and(|wanted| *wanted != format!("{dtype:?}")) {
            continue;
        }
        let all = [Activations::Int8, Activations::Int16];
        let activations = if dtype == DType::BF16 { &[Activations::F32][..] } else { &all };
        activations.iter().try_for_each(|&activations| measure(dtype, activations, threads))?;
    }
    Ok(())
}

fn measure(dtype: DType, activations: Activations, threads: usize) -> Result<(), OpsError> {
    let share = Arc::new(WeightShare::new());
    let options = CpuOptions { threads, isa: None, activations, share, cores: Vec::new() };
    let mut backend = CpuBackend::new(options)?;
    let layer = load(&mut backend, dtype)?;
    backend.reserve(&reserve())?;
    for (rows, chosen) in ROWS.into_iter().zip(&layer.plain) {
        let recordings = [(record_experts(&layer, rows), rows), (record_plain(&layer, chosen), chosen.rows)];
        let [experts, plain] = best_of(&mut backend, recordings)?;
        let bytes = (layer.expert_bytes * chosen.active) as f64;
        let products = rows * TOP_K * 3 * HIDDEN * WIDTH;
        println!(
            "{:<7} {:<11} {rows:>4} {:>12.3} {:>6.2} {:>6.1} {:>11.3} {:>6.2} {:>8.2}",
            format!("{dtype:?}"),
            format!("{activations:?}"),
            experts * 1e3,
            bytes / experts / 1e9,
            2.0 * products as f64 / experts / 1e9,
            plain * 1e3,
            bytes / plain / 1e9,
            plain / experts
        );
    }
    Ok(())
}

fn load(backend: &mut CpuBackend, dtype: DType) -> Result<Layer, OpsError> {
    let gate_up = tensor(dtype, EXPERTS * 2 * WIDTH, HIDDEN);
    let down = tensor(dtype, EXPERTS * HIDDEN, WIDTH);
    let slice = |tensor: &Tensor, outputs: usize, expert: usize| {
        let rows = expert * outputs..(expert + 1) * outputs;
        Slice { tensor: tensor.clone(), rows, cols: 0..tensor.cols() }
    };
    let gate_ups: Vec<_> = (0..EXPERTS).map(|expert| vec![slice(&gate_up, 2 * WIDTH, expert)]).collect();
    let downs: Vec<_> = (0..EXPERTS).map(|expert| vec![slice(&down, HIDDEN, expert)]).collect();
    let mut noise = |width| {
        let x = (0..ROWS_MAX * width).map(|i| rng::uniform(1, 0, i as u32, 0) - 0.5).collect();
        backend.load_table(&Tensor::from_f32(vec![ROWS_MAX, width], x))
    };
    let (x, gated) = (noise(HIDDEN)?, noise(WIDTH)?);
    let routes = routes();
    let (gate_up, down) = (backend.load_experts(&gate_ups)?, backend.load_experts(&downs)?);
    let expert_bytes = backend.matrix_bytes() / EXPERTS;
    let mut plain = Vec::new();
    for rows in ROWS {
        let chosen = |expert: &usize| {
            let mut choices = routes.chunks(2 * TOP_K).take(rows).flat_map(|route| &route[..TOP_K]);
            choices.any(|&number| number as usize == *expert)
        };
        let active: Vec<usize> = (0..EXPERTS).filter(chosen).collect();
        let concat = |experts: &[Vec<Slice>]| -> Vec<Slice> {
            active.iter().flat_map(|&expert| experts[expert].clone()).collect()
        };
        plain.push(Plain {
            gate_up: backend.load_matrix(&concat(&gate_ups))?,
            down: backend.load_matrix(&concat(&downs))?,
            active: active.len(),
            rows: (rows * TOP_K).div_ceil(active.len()),
        });
    }
    let routes = backend.load_table(&Tensor::from_f32(vec![ROWS_MAX, 2 * TOP_K], routes))?;
    Ok(Layer { gate_up, down, x, gated, routes, expert_bytes, plain })
}

/// Eight different experts for each row, all of them equally likely. `[ROWS_MAX, 2 * TOP_K]`
fn routes() -> Vec<f32> {
    let mut routes = Vec::new();
    for row in 0..ROWS_MAX as u32 {
        let mut experts: Vec<usize> = (0..EXPERTS).collect();
        let draw = |expert: usize| rng::uniform(2, row, expert as u32, 0);
        experts.sort_by(|&a, &b| draw(a).total_cmp(&draw(b)));
        experts.truncate(TOP_K);
        experts.sort_unstable();
        routes.extend(experts.iter().map(|&expert| expert as f32));
        routes.extend([1.0 / TOP_K as f32; TOP_K]);
    }
    routes
}

fn record_experts(layer: &Layer, rows: usize) -> atom_ops::Recording {
    let mut ops = Ops::new(StepShape { rows, out_rows: 1, lanes: 1 });
    let mut buffer = |width| ops.buffer(Extent::Rows, width);
    let (x, routes, out) = (buffer(HIDDEN), buffer(2 * TOP_K), buffer(HIDDEN));
    let scratch = (buffer(TOP_K * 2 * WIDTH), buffer(TOP_K * WIDTH));
    ops.embed(layer.x, x);
    ops.embed(layer.routes, routes);
    let spec = ExpertSpec { top_k: TOP_K, first: 0, held: EXPERTS, width: WIDTH };
    ops.expert_sums((x, routes), (layer.gate_up, layer.down), &Arc::new(spec), scratch, out);
    ops.finish()
}

fn record_plain(layer: &Layer, plain: &Plain) -> atom_ops::Recording {
    let mut ops = Ops::new(StepShape { rows: plain.rows, out_rows: 1, lanes: 1 });
    let mut buffer = |width| ops.buffer(Extent::Rows, width);
    let (x, gated) = (buffer(HIDDEN), buffer(WIDTH));
    let (gate_up, down) = (buffer(plain.active * 2 * WIDTH), buffer(plain.active * HIDDEN));
    ops.embed(layer.x, x);
    ops.embed(layer.gated, gated);
    ops.linear(x, plain.gate_up, None, gate_up);
    ops.linear(gated, plain.down, None, down);
    ops.finish()
}

/// Seconds of the fastest run of each; they take turns, so that a busy machine slows both.
fn best_of<const N: usize>(
    backend: &mut CpuBackend,
    recordings: [(atom_ops::Recording, usize); N],
) -> Result<[f64; N], OpsError> {
    let mut numbers = Vec::new();
    for (recording, rows) in recordings {
        numbers.push((backend.record(recording)?, rows));
    }
    let (begin, mut best) = (Instant::now(), [f64::INFINITY; N]);
    while best[0].is_infinite() || begin.elapsed() < PATIENCE {
        for (best, &(recording, rows)) in best.iter_mut().zip(&numbers) {
            let start = Instant::now();
            replay(backend, recording, rows)?;
            *best = best.min(start.elapsed().as_secs_f64());
        }
    }
    Ok(best)
}

fn replay(backend: &mut CpuBackend, recording: usize, rows: usize) -> Result<(), OpsError> {
    let positions: Vec<u32> = (0..rows as u32).collect();
    let inputs = StepInputs {
        tokens: &positions,
        positions: &positions,
        cache_rows: &positions,
        spans: &[Span { slot: SlotId(1), first_row: 0, rows: rows as u32, start: 0 }],
        out: &[],
        slot_loads: &[],
        tables: PageTables { entries: &[0; 2], stride: 1 },
        group_rows: &[rows as u32],
        lane: 0,
    };
    backend.replay(recording, &inputs, &Alone, &mut [])
}

fn reserve() -> Reserve {
    let rotary = Rotary { frequencies: vec![1.0; 8], dim: 16, pairs: false, magnitude: 1.0 };
    Reserve {
        top: StepShape { rows: ROWS_MAX, out_rows: 1, lanes: 1 },
        layers: 1,
        attention: Arc::new(AttentionSpec { q_heads: 1, kv_heads: 1, head_dim: 16, scale: 0.25, rotary }),
        page_size: ROWS_MAX,
        pages: 2,
        pages_per_sequence: 1,
        kv_dtype: KvDType::F32,
        slots: 2,
        vocab: 1,
        samples: false,
        poison: false,
    }
}

/// Scales and plain elements of about 0.01 with codes of all values.
fn tensor(dtype: DType, rows: usize, cols: usize) -> Tensor {
    let mut state = 1u64;
    let mut bytes = Vec::with_capacity(rows * dtype.row_bytes(cols));
    while bytes.len() < bytes.capacity() {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let code = (state >> 40) as u8;
        let plain = f32::from(code) * 1e-4 - 0.01;
        match dtype {
            DType::F32 => bytes.extend(plain.to_le_bytes()),
            DType::F16 => bytes.extend([code, 0x21]),
            DType::BF16 => bytes.extend([code, 0x3c]),
            DType::F8_E4M3 => unreachable!("held as f32"),
            DType::Q8_0 | DType::Q4_0 | DType::Q4_1 => {
                let half_scales = if dtype == DType::Q4_1 { 2 } else { 1 };
                let at = bytes.len() % dtype.block_bytes();
                bytes.push(if at >= 2 * half_scales || at.is_multiple_of(2) { code } else { 0x21 });
            }
            DType::Q5_0 | DType::Q5_1 | DType::Q4_K | DType::Q5_K | DType::Q6_K => {
                unreachable!("not measured")
            }
        }
    }
    let len = bytes.len();
    Tensor::new(dtype, vec![rows, cols], Arc::new(bytes), 0, len)
}

/// A rank without peers.
struct Alone;

impl Collectives for Alone {
    fn member(&self, _comm: Comm) -> usize {
        0
    }

    fn members(&self, _comm: Comm) -> usize {
        1
    }

    fn all_reduce(&self, _comm: Comm, _capacity: usize, _x: &mut [f32]) -> Result<(), OpsError> {
        Ok(())
    }

    fn all_gather(
        &self,
        _comm: Comm,
        _capacity: usize,
        mine: &[f32],
        _counts: &[usize],
        _stride: usize,
        out: &mut [f32],
    ) -> Result<(), OpsError> {
        out[..mine.len()].copy_from_slice(mine);
        Ok(())
    }

    fn reduce_scatter(
        &self,
        _comm: Comm,
        _capacity: usize,
        x: &[f32],
        _counts: &[usize],
        _stride: usize,
        mine: &mut [f32],
    ) -> Result<(), OpsError> {
        mine.copy_from_slice(&x[..mine.len()]);
        Ok(())
    }

    fn all_to_all(
        &self,
        _comm: Comm,
        _capacity: usize,
        mine: &[f32],
        _counts: &[usize],
        _due: &[usize],
        out: &mut [f32],
    ) -> Result<(), OpsError> {
        out.copy_from_slice(mine);
        Ok(())
    }
}
