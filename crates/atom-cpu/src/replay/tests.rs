//! Operators through whole replays: inputs come from tables, row by row, and every buffer is read back.

mod exchange;
mod experts;
mod heads;
#[path = "../../tests/support/meeting.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests use all of it")]
mod meeting;
mod refused;

use crate::backend::{Activations, CpuBackend, CpuOptions};
use crate::isa::Isa;
use crate::weights::WeightShare;
use atom_base::rng::uniform;
use atom_base::{SlotId, Span};
use atom_ops::{
    AttentionSpec, Backend, Buf, BufSpec, Collectives, Extent, KvDType, LoadWeights, NO_EXPERT, Ops,
    OpsError, PageTables, Reserve, Rotary, Slice, StepInputs, StepShape, Weight,
};
use atom_weights::{DType, Tensor};
use std::sync::Arc;

/// A recording whose buffers can be read afterwards.
struct Recorded {
    number: usize,
    buffers: Vec<BufSpec>,
}

fn options(threads: usize, isa: Isa, activations: Activations) -> CpuOptions {
    CpuOptions {
        threads,
        isa: Some(isa),
        activations,
        share: Arc::new(WeightShare::new()),
        cores: Vec::new(),
    }
}

fn attention() -> Arc<AttentionSpec> {
    let rotary = Rotary { frequencies: vec![1.0; 8], dim: 16, pairs: false, magnitude: 1.0 };
    Arc::new(AttentionSpec { q_heads: 3, kv_heads: 1, head_dim: 16, scale: 0.25, rotary })
}

/// Everything that a step does not write is NaN.
fn reserve(top: StepShape) -> Reserve {
    Reserve {
        top,
        layers: 1,
        attention: attention(),
        page_size: 64,
        pages: 2,
        pages_per_sequence: 1,
        kv_dtype: KvDType::F32,
        slots: 2,
        vocab: 1,
        samples: false,
        poison: true,
    }
}

/// A table whose row `i` a token `i` looks up.
fn table(backend: &mut CpuBackend, rows: &[Vec<f32>]) -> Weight {
    let tensor = Tensor::from_f32(vec![rows.len(), rows[0].len()], rows.concat());
    backend.load_table(&tensor).unwrap()
}

fn whole(tensor: &Tensor) -> Slice {
    Slice { rows: 0..tensor.rows(), cols: 0..tensor.cols(), tensor: tensor.clone() }
}

/// Numbers in `-1 .. 1`.
fn noise(seed: u64, rows: usize, width: usize) -> Vec<Vec<f32>> {
    let at = |row: usize, col: usize| 2.0 * uniform(seed, row as u32, col as u32, 0) - 1.0;
    (0..rows).map(|row| (0..width).map(|col| at(row, col)).collect()).collect()
}

fn record(backend: &mut CpuBackend, ops: Ops) -> Recorded {
    let recording = ops.finish();
    let buffers = recording.buffers().to_vec();
    Recorded { number: backend.record(recording).unwrap(), buffers }
}

/// Replays with `tokens` as the rows of `lane`.
fn step(
    backend: &mut CpuBackend,
    recorded: &Recorded,
    tokens: &[u32],
    (group_rows, lane): (&[u32], usize),
    collectives: &dyn Collectives,
) -> Result<(), OpsError> {
    let positions: Vec<u32> = (0..tokens.len() as u32).collect();
    let cache_rows: Vec<u32> = positions.iter().map(|position| 64 + position).collect();
    let spans = [Span { slot: SlotId(1), first_row: 0, rows: tokens.len() as u32, start: 0 }];
    let inputs = StepInputs {
        tokens,
        positions: &positions,
        cache_rows: &cache_rows,
        spans: if tokens.is_empty() { &[] } else { &spans },
        out: &[],
        slot_loads: &[],
        tables: PageTables { entries: &[0, 1], stride: 1 },
        group_rows,
        lane,
    };
    backend.replay(recorded.number, &inputs, collectives, &mut [])
}

/// The rows of a buffer, padding included.
fn read(backend: &mut CpuBackend, recorded: &Recorded, buf: Buf) -> Vec<Vec<f32>> {
    let width = recorded.buffers[usize::from(buf.0)].width;
    backend.read(recorded.number, buf).chunks(width).map(<[f32]>::to_vec).collect()
}

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

fn is_untouched(row: &[f32]) -> bool {
    row.iter().all(|x| x.to_bits() == u32::MAX)
}

fn supported() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_supported())
}
