//! Speed of the matrix kernels on the shapes of SmolLM2-135M: bytes of weights read per second at one
//! row, operations per second at 128 rows, for every format and instruction set. Super-blocks of 256 need
//! other widths: 768 beside 1536, say. Formats are left out that a width doesn't fit.
//!
//! `cargo run --release -p atom-cpu --example cpu_kernels [threads [isa [hidden [format ..]]]]`

use atom_base::{SlotId, Span};
use atom_cpu::{Activations, CpuBackend, CpuOptions, Isa, WeightShare};
use atom_ops::{
    AttentionSpec, Backend, Collectives, Comm, Extent, KvDType, LoadWeights, Ops, OpsError, PageTables,
    Reserve, Rotary, Slice, StepInputs, StepShape, Weight,
};
use atom_weights::{DType, Tensor};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Unless another width is given.
const HIDDEN: usize = 576;
const MLP: usize = 1536;
const FORMATS: [DType; 11] = [
    DType::Q4_K,
    DType::Q4_1,
    DType::Q4_0,
    DType::Q5_K,
    DType::Q5_1,
    DType::Q5_0,
    DType::Q6_K,
    DType::Q8_0,
    DType::BF16,
    DType::F16,
    DType::F32,
];
const LAYERS: usize = 30;
const ROWS: usize = 128;
/// Each figure is the best of the runs that fit in this.
const PATIENCE: Duration = Duration::from_millis(300);

fn main() -> Result<(), OpsError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::args().nth(1).map_or(cores, |arg| arg.parse().expect("a number of threads"));
    let wanted: Option<Isa> = std::env::args().nth(2).map(|arg| arg.parse()).transpose()?;
    let hidden = std::env::args().nth(3).map_or(HIDDEN, |arg| arg.parse().expect("a width"));
    let named: Vec<String> = std::env::args().skip(4).collect();
    println!(
        "{threads} threads; widths {hidden} and {MLP}; one row: {LAYERS} layers; {ROWS} rows: one layer"
    );
    println!("weights activations isa        1 row: ms   GB/s   {ROWS} rows: ms  Gop/s");
    for dtype in FORMATS {
        let fits = [hidden, MLP].iter().all(|width| width.is_multiple_of(dtype.block_elements()));
        if !fits || !named.is_empty() && !named.contains(&format!("{dtype:?}")) {
            continue;
        }
        for activations in [Activations::Int8, Activations::Int16, Activations::Bf16, Activations::F32] {
            let rounds = activations == Activations::Bf16 && activations.suits(dtype);
            let quantises = activations != Activations::Bf16 && dtype.block_elements() > 1;
            if activations != Activations::F32 && !rounds && !quantises {
                continue;
            }
            for isa in Isa::ALL.into_iter().rev() {
                // AMX has something of its own for rounded activations alone.
                let is_same = isa == Isa::Amx && activations != Activations::Bf16;
                if is_same || !isa.is_supported() || wanted.is_some_and(|wanted| wanted != isa) {
                    continue;
                }
                measure(dtype, activations, isa, threads, &layer(hidden))?;
            }
        }
    }
    Ok(())
}

/// Outputs and inputs: q, k and v; attention output; gate and up; down.
type Layer = [(usize, usize); 4];

fn layer(hidden: usize) -> Layer {
    [(hidden * 5 / 3, hidden), (hidden, hidden), (2 * MLP, hidden), (hidden, MLP)]
}

fn measure(
    dtype: DType,
    activations: Activations,
    isa: Isa,
    threads: usize,
    layer: &Layer,
) -> Result<(), OpsError> {
    let mut backend = CpuBackend::new(CpuOptions {
        threads,
        isa: Some(isa),
        activations,
        share: Arc::new(WeightShare::new()),
        cores: Vec::new(),
    })?;
    let tables = [layer[0].1, MLP].map(|width| backend.load_table(&tensor(DType::F32, 1, width)));
    let [narrow, wide] = tables;
    let (narrow, wide) = (narrow?, wide?);
    let mut weights = Vec::new();
    for (outputs, inputs) in layer.repeat(LAYERS) {
        let tensor = tensor(dtype, outputs, inputs);
        weights.push(backend.load_matrix(&[Slice { tensor, rows: 0..outputs, cols: 0..inputs }])?);
    }
    backend.reserve(&reserve())?;
    let mut best_of = |rows: usize, weights: &[Weight]| -> Result<f64, OpsError> {
        let recording = backend.record(recording(rows, narrow, wide, weights, layer))?;
        let begin = Instant::now();
        let mut best = Duration::MAX;
        while best == Duration::MAX || begin.elapsed() < PATIENCE {
            let start = Instant::now();
            replay(&mut backend, recording, rows)?;
            best = best.min(start.elapsed());
        }
        Ok(best.as_secs_f64())
    };
    let (one, many) = (best_of(1, &weights)?, best_of(ROWS, &weights[..layer.len()])?);
    let bytes = backend.matrix_bytes() as f64;
    let products: usize = layer.iter().map(|(outputs, inputs)| outputs * inputs * ROWS).sum();
    println!(
        "{:<7} {:<11} {:<8} {:>12.3} {:>6.2} {:>14.3} {:>6.1}",
        format!("{dtype:?}"),
        format!("{activations:?}"),
        isa.to_string(),
        one * 1e3,
        bytes / one / 1e9,
        many * 1e3,
        2.0 * products as f64 / many / 1e9
    );
    Ok(())
}

fn recording(
    rows: usize,
    narrow: Weight,
    wide: Weight,
    weights: &[Weight],
    layer: &Layer,
) -> atom_ops::Recording {
    let hidden = layer[0].1;
    let mut ops = Ops::new(StepShape { rows, out_rows: rows, lanes: 1 });
    let x_narrow = ops.buffer(Extent::Rows, hidden);
    let x_wide = ops.buffer(Extent::Rows, MLP);
    let outs = layer.map(|(outputs, _)| ops.buffer(Extent::Rows, outputs));
    ops.embed(narrow, x_narrow);
    ops.embed(wide, x_wide);
    for (i, &weight) in weights.iter().enumerate() {
        let (_, inputs) = layer[i % layer.len()];
        let x = if inputs == hidden { x_narrow } else { x_wide };
        ops.linear(x, weight, None, outs[i % layer.len()]);
    }
    ops.finish()
}

fn replay(backend: &mut CpuBackend, recording: usize, rows: usize) -> Result<(), OpsError> {
    let positions: Vec<u32> = (0..rows as u32).collect();
    let inputs = StepInputs {
        tokens: &vec![0; rows],
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
        top: StepShape { rows: ROWS, out_rows: ROWS, lanes: 1 },
        layers: 1,
        attention: Arc::new(AttentionSpec { q_heads: 1, kv_heads: 1, head_dim: 16, scale: 0.25, rotary }),
        page_size: ROWS,
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
            _ => {
                let at = bytes.len() % dtype.block_bytes();
                bytes.push(if halves(dtype).iter().any(|half| at == half + 1) { 0x21 } else { code });
            }
        }
    }
    let len = bytes.len();
    Tensor::new(dtype, vec![rows, cols], Arc::new(bytes), 0, len)
}

/// Where a block has halves.
fn halves(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q6_K => &[208],
        _ => &[0],
    }
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
