//! Speed of attention, of what stands between the matrix products, and of sampling, on the shapes of
//! SmolLM2-135M: time for all layers of a step.
//!
//! `cargo run --release -p atom-cpu --example attention [threads [isa]]`

use atom_base::{OutRow, SamplingParams, ScoredToken, SlotId, SlotLoad, Span};
use atom_cpu::{Activations, CpuBackend, CpuOptions, Isa, WeightShare};
use atom_ops::{
    AttentionSpec, Backend, Collectives, Comm, Extent, KvDType, LoadWeights, Ops, OpsError, PageTables,
    Recording, Reserve, Rotary, Slice, StepInputs, StepShape, Weight,
};
use atom_weights::Tensor;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LAYERS: usize = 30;
const Q_HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const QKV: usize = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM;
const HIDDEN: usize = Q_HEADS * HEAD_DIM;
const MLP: usize = 1536;
const VOCAB: usize = 49_152;
const CONTEXT: usize = 4096;
const PAGE: usize = 16;
const ROWS: usize = 512;
/// Each figure is the best of the runs that fit in this.
const PATIENCE: Duration = Duration::from_millis(300);

fn main() -> Result<(), OpsError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::args().nth(1).map_or(cores, |arg| arg.parse().expect("a number of threads"));
    let wanted: Option<Isa> = std::env::args().nth(2).map(|arg| arg.parse()).transpose()?;
    println!("{threads} threads, {LAYERS} layers, milliseconds");
    for isa in [Isa::Avx512, Isa::Avx2] {
        if isa.is_supported() && wanted.is_none_or(|wanted| wanted == isa) {
            for dtype in [KvDType::F16, KvDType::BF16, KvDType::F32, KvDType::E4M3] {
                attention(threads, isa, dtype)?;
            }
            between(threads, isa)?;
            sampling(threads, isa)?;
        }
    }
    Ok(())
}

/// A backend with all it needs for one kind of measurement.
struct Bench {
    backend: CpuBackend,
    qkv: Weight,
    gate_up: Weight,
    logits: Weight,
    norm: Weight,
    tables: Vec<u32>,
}

/// Rows of one sequence from `start`, or one row of each of some sequences.
#[derive(Clone, Copy)]
struct Load {
    start: usize,
    rows: usize,
    sequences: usize,
}

fn attention(threads: usize, isa: Isa, dtype: KvDType) -> Result<(), OpsError> {
    let mut bench = Bench::new(threads, isa, dtype, 1)?;
    let rotate = bench.backend.record(bench.layers(ROWS, true, false))?;
    for start in (0..CONTEXT).step_by(ROWS) {
        bench.step(rotate, Load { start, rows: ROWS, sequences: 1 }, None, false)?;
    }
    let whole = Load { start: 0, rows: ROWS, sequences: 1 };
    let prefill = bench.time(|ops| ops.layers(ROWS, false, true), whole, None)?;
    let rotated = bench.time(|ops| ops.layers(ROWS, true, false), whole, None)?;
    let mut decode =
        |start| bench.time(|ops| ops.layers(1, true, true), Load { start, rows: 1, sequences: 1 }, None);
    let (near, far) = (decode(512)?, decode(CONTEXT - 1)?);
    println!(
        "{:<8} cache {:<5} prefill {ROWS}: {prefill:.2} (rotate and cache {rotated:.2}); decode at 512: \
         {near:.3}, at {CONTEXT}: {far:.3}",
        isa.to_string(),
        format!("{dtype:?}")
    );
    Ok(())
}

fn between(threads: usize, isa: Isa) -> Result<(), OpsError> {
    let mut bench = Bench::new(threads, isa, KvDType::F32, 1)?;
    let load = Load { start: 0, rows: ROWS, sequences: 1 };
    let norms = bench.time(|bench| bench.elementwise(false), load, None)?;
    let gated = bench.time(|bench| bench.elementwise(true), load, None)?;
    println!("{:<8} {ROWS} rows: norm {norms:.2}, gated silu {gated:.2}", isa.to_string());
    Ok(())
}

fn sampling(threads: usize, isa: Isa) -> Result<(), OpsError> {
    let base = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
    let kinds = [
        ("greedy", SamplingParams::greedy()),
        ("greedy with 5 logprobs", SamplingParams { logprobs: Some(5), ..SamplingParams::greedy() }),
        ("greedy with penalties", SamplingParams { repetition_penalty: 1.1, ..SamplingParams::greedy() }),
        ("temperature", base.clone()),
        ("top_p 0.9", SamplingParams { top_p: 0.9, ..base.clone() }),
        ("top_k 50", SamplingParams { top_k: 50, ..base.clone() }),
        ("min_p 0.05", SamplingParams { min_p: 0.05, ..base }),
    ];
    let rows = 32;
    let mut bench = Bench::new(threads, isa, KvDType::F32, rows)?;
    let load = Load { start: 0, rows: 1, sequences: rows };
    let empty = bench.time(|bench| bench.head(rows, false), load, None)?;
    print!("{:<8} sampling, microseconds a row of {VOCAB}:", isa.to_string());
    for (what, params) in kinds {
        let took = bench.time(|bench| bench.head(rows, true), load, Some(&Arc::new(params)))?;
        print!(" {what} {:.1};", (took - empty) * 1e3 / rows as f64);
    }
    println!();
    Ok(())
}

impl Bench {
    fn new(threads: usize, isa: Isa, kv_dtype: KvDType, sequences: usize) -> Result<Self, OpsError> {
        let share = Arc::new(WeightShare::new());
        let options =
            CpuOptions { threads, isa: Some(isa), activations: Activations::Int8, share, cores: Vec::new() };
        let mut backend = CpuBackend::new(options)?;
        let mut table = |width| backend.load_table(&Tensor::from_f32(vec![2, width], noise(2 * width)));
        let (qkv, gate_up, logits) = (table(QKV)?, table(2 * MLP)?, table(VOCAB)?);
        let tensor = Tensor::from_f32(vec![HIDDEN], vec![1.0; HIDDEN]);
        let norm = backend.load_vector(&[Slice { tensor, rows: 0..1, cols: 0..HIDDEN }])?;
        let stride = CONTEXT / PAGE;
        let frequencies = (0..HEAD_DIM / 2).map(|i| 1e5f32.powf(-(i as f32) / 32.0)).collect();
        let rotary = Rotary { frequencies, dim: HEAD_DIM, pairs: true, magnitude: 1.0 };
        let spec =
            AttentionSpec { q_heads: Q_HEADS, kv_heads: KV_HEADS, head_dim: HEAD_DIM, scale: 0.125, rotary };
        backend.reserve(&Reserve {
            top: StepShape { rows: ROWS, out_rows: sequences, lanes: 1 },
            layers: LAYERS,
            attention: Arc::new(spec),
            page_size: PAGE,
            pages: 1 + sequences * stride,
            pages_per_sequence: stride,
            kv_dtype,
            slots: 1 + sequences,
            vocab: VOCAB,
            samples: true,
            poison: false,
        })?;
        let tables = (0..stride).map(|_| 0).chain(1..=(sequences * stride) as u32).collect();
        Ok(Self { backend, qkv, gate_up, logits, norm, tables })
    }

    /// Attention of all layers, or parts of it.
    fn layers(&self, rows: usize, rotate: bool, attend: bool) -> Recording {
        let spec = AttentionSpec {
            q_heads: Q_HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            scale: 0.125,
            rotary: Rotary {
                frequencies: (0..HEAD_DIM / 2).map(|i| 1e5f32.powf(-(i as f32) / 32.0)).collect(),
                dim: HEAD_DIM,
                pairs: true,
                magnitude: 1.0,
            },
        };
        let spec = Arc::new(spec);
        let mut ops = Ops::new(StepShape { rows, out_rows: 0, lanes: 1 });
        let (qkv, out) = (ops.buffer(Extent::Rows, QKV), ops.buffer(Extent::Rows, HIDDEN));
        ops.embed(self.qkv, qkv);
        for layer in 0..LAYERS {
            if rotate {
                ops.rotate_and_cache(qkv, layer, None, &spec);
            }
            if attend {
                ops.attend(qkv, layer, &spec, out);
            }
        }
        ops.finish()
    }

    /// Two norms, or one gated activation, a layer.
    fn elementwise(&self, gated: bool) -> Recording {
        let mut ops = Ops::new(StepShape { rows: ROWS, out_rows: 0, lanes: 1 });
        let (gate_up, out) = (ops.buffer(Extent::Rows, 2 * MLP), ops.buffer(Extent::Rows, MLP));
        let [residual, x, normed] = [(); 3].map(|()| ops.buffer(Extent::Rows, HIDDEN));
        ops.embed(self.gate_up, gate_up);
        for _ in 0..LAYERS {
            if gated {
                ops.gated_silu(gate_up, out);
            } else {
                ops.add_norm(residual, x, self.norm, 1e-5, normed);
                ops.add_norm(residual, normed, self.norm, 1e-5, x);
            }
        }
        ops.finish()
    }

    fn head(&self, rows: usize, sample: bool) -> Recording {
        let mut ops = Ops::new(StepShape { rows, out_rows: rows, lanes: 1 });
        let (x, logits) = (ops.buffer(Extent::Rows, VOCAB), ops.buffer(Extent::OutRows, VOCAB));
        ops.embed(self.logits, x);
        ops.pick_rows(x, logits);
        if sample {
            ops.sample(logits);
        }
        ops.finish()
    }

    /// Best time of a recording, in milliseconds.
    fn time(
        &mut self,
        record: impl Fn(&Self) -> Recording,
        load: Load,
        params: Option<&Arc<SamplingParams>>,
    ) -> Result<f64, OpsError> {
        let recording = record(self);
        let recording = self.backend.record(recording)?;
        self.step(recording, load, params, true)?;
        let begin = Instant::now();
        let mut best = Duration::MAX;
        while best == Duration::MAX || begin.elapsed() < PATIENCE {
            best = best.min(self.step(recording, load, params, false)?);
        }
        Ok(best.as_secs_f64() * 1e3)
    }

    fn step(
        &mut self,
        recording: usize,
        load: Load,
        params: Option<&Arc<SamplingParams>>,
        admit: bool,
    ) -> Result<Duration, OpsError> {
        let Load { start, rows, sequences } = load;
        let tables = PageTables { entries: &self.tables, stride: CONTEXT / PAGE };
        let places = (0..sequences).flat_map(|s| (start..start + rows).map(move |position| (s, position)));
        let (mut positions, mut cache_rows) = (Vec::new(), Vec::new());
        for (sequence, position) in places {
            let page = tables.pages(SlotId(1 + sequence as u32))[position / PAGE];
            positions.push(position as u32);
            cache_rows.push(page * PAGE as u32 + (position % PAGE) as u32);
        }
        let span = |s: usize| {
            let slot = SlotId(1 + s as u32);
            Span { slot, first_row: (s * rows) as u32, rows: rows as u32, start: start as u32 }
        };
        let spans: Vec<Span> = (0..sequences).map(span).collect();
        let row = |(s, params): (usize, &Arc<SamplingParams>)| {
            let (row, slot) = (s as u32, SlotId(1 + s as u32));
            OutRow { row, slot, position: 1, target: None, params: Arc::clone(params), mask: None }
        };
        let out: Vec<OutRow> = (0..sequences).zip(params.into_iter().cycle()).map(row).collect();
        let prompt: Arc<[u32]> = (0..500).collect();
        let slot_load = |out: &OutRow| {
            let (prompt, generated) = (Arc::clone(&prompt), Arc::from([]));
            SlotLoad { slot: out.slot, prompt, generated }
        };
        let slot_loads: Vec<SlotLoad> = out.iter().filter(|_| admit).map(slot_load).collect();
        let inputs = StepInputs {
            tokens: &vec![0; rows * sequences],
            positions: &positions,
            cache_rows: &cache_rows,
            spans: &spans,
            out: &out,
            slot_loads: &slot_loads,
            tables,
            group_rows: &[(rows * sequences) as u32],
            lane: 0,
        };
        let mut results = vec![ScoredToken::bare(0); out.len()];
        let begin = Instant::now();
        self.backend.replay(recording, &inputs, &Alone, &mut results)?;
        Ok(begin.elapsed())
    }
}

/// About normal, with a few that stand out as a model's logits do.
fn noise(len: usize) -> Vec<f32> {
    let uniform = |i: usize, draw| atom_base::rng::uniform(7, 0, i as u32, draw);
    let normal = |i| (0..4).map(|draw| uniform(i, draw)).sum::<f32>() * 3.4 - 6.8;
    (0..len).map(|i| normal(i) + if i % 1201 == 7 { uniform(i, 4) * 9.0 } else { 0.0 }).collect()
}

/// One rank meets nobody.
struct Alone;

impl Collectives for Alone {
    fn member(&self, _: Comm) -> usize {
        0
    }

    fn members(&self, _: Comm) -> usize {
        1
    }

    fn all_reduce(&self, _: Comm, _: usize, _: &mut [f32]) -> Result<(), OpsError> {
        Ok(())
    }

    fn all_gather(
        &self,
        _: Comm,
        _: usize,
        mine: &[f32],
        _: &[usize],
        _: usize,
        out: &mut [f32],
    ) -> Result<(), OpsError> {
        out[..mine.len()].copy_from_slice(mine);
        Ok(())
    }

    fn reduce_scatter(
        &self,
        _: Comm,
        _: usize,
        x: &[f32],
        _: &[usize],
        _: usize,
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
