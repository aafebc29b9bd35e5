//! A tiny decoder on the backend, the same in f64, and collectives between threads.
#![allow(dead_code, unused_imports, unreachable_pub, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "tests")]

mod meeting;
mod reference;

pub use meeting::{Meeting, Meetings};

use atom_base::rng::uniform;
use atom_base::{OutRow, SamplingParams, ScoredToken, SlotId, Span, TokenId};
use atom_cpu::{Activations, CpuBackend, CpuOptions, Isa, WeightShare};
use atom_ops::{
    AttentionSpec, Backend, Buf, Collectives, Extent, KvDType, LoadWeights, Ops, OpsError, PageTables,
    Recording, Reserve, Rotary, Slice, StepInputs, StepShape, Weight,
};
use atom_weights::{DType, Tensor};
use half::{bf16, f16};
use std::sync::Arc;

pub const HIDDEN: usize = 64;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const DIM: usize = 16;
pub const MLP: usize = 96;
/// Few enough for all log-probabilities to be reported.
pub const VOCAB: usize = 20;
pub const LAYERS: usize = 2;
pub const EPS: f32 = 1e-5;
pub const PAGE: usize = 16;
pub const SLOTS: usize = 4;
pub const STRIDE: usize = 2;

/// Tensors of the decoder, in several formats.
pub struct Decoder {
    pub table: Tensor,
    pub layers: Vec<Layer>,
    pub norm: Tensor,
    pub head: Tensor,
}

pub struct Layer {
    pub norms: [Tensor; 2],
    pub qkv: [Tensor; 3],
    pub bias: Tensor,
    pub o: Tensor,
    pub gate_up: [Tensor; 2],
    pub down: Tensor,
}

/// The decoder on a backend.
pub struct Loaded {
    pub backend: CpuBackend,
    weights: Handles,
}

struct Handles {
    table: Weight,
    layers: Vec<[Weight; 7]>,
    norm: Weight,
    head: Weight,
}

/// Rows of one sequence in a step.
#[derive(Clone)]
pub struct Rows {
    pub slot: u32,
    pub start: usize,
    pub tokens: Vec<TokenId>,
}

pub fn random(dtype: DType, rows: usize, cols: usize, seed: u64) -> Tensor {
    let mut count = 0;
    let mut draw = || {
        count += 1;
        uniform(seed, 1, count, 0) * 2.0 - 1.0
    };
    // Sums of products keep the size of what is multiplied.
    let size = (3.0 / cols as f32).sqrt();
    let mut bytes = Vec::new();
    for _ in 0..rows * cols / dtype.block_elements() {
        match dtype {
            DType::F32 => bytes.extend((draw() * size).to_le_bytes()),
            DType::F8_E4M3 | DType::Q5_0 | DType::Q5_1 | DType::Q4_K | DType::Q5_K | DType::Q6_K => {
                unreachable!("not drawn")
            }
            DType::F16 => bytes.extend(f16::from_f32(draw() * size).to_le_bytes()),
            DType::BF16 => bytes.extend(bf16::from_f32(draw() * size).to_le_bytes()),
            DType::Q8_0 => bytes.extend(f16::from_f32(draw() * size / 127.0).to_le_bytes()),
            DType::Q4_0 => bytes.extend(f16::from_f32(draw() * size / 8.0).to_le_bytes()),
            DType::Q4_1 => {
                let step = draw() * size / 8.0;
                bytes.extend(f16::from_f32(step).to_le_bytes());
                bytes.extend(f16::from_f32(-7.5 * step).to_le_bytes());
            }
        }
        while !bytes.len().is_multiple_of(dtype.block_bytes()) {
            bytes.push(((draw() + 1.0) * 128.0) as u8);
        }
    }
    let len = bytes.len();
    Tensor::new(dtype, vec![rows, cols], Arc::new(bytes), 0, len)
}

pub fn whole(tensor: &Tensor) -> Slice {
    Slice { rows: 0..tensor.rows(), cols: 0..tensor.cols(), tensor: tensor.clone() }
}

pub fn options(threads: usize) -> CpuOptions {
    CpuOptions {
        threads,
        isa: None,
        activations: Activations::Int8,
        share: Arc::new(WeightShare::new()),
        cores: Vec::new(),
    }
}

pub fn attention() -> Arc<AttentionSpec> {
    let frequencies = (0..DIM / 2).map(|i| 100f32.powf(-(i as f32) / (DIM / 2) as f32)).collect();
    Arc::new(AttentionSpec {
        q_heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: DIM,
        scale: 0.25,
        rotary: Rotary { frequencies, dim: DIM, pairs: false, magnitude: 1.0 },
    })
}

pub fn reserve(top: StepShape) -> Reserve {
    Reserve {
        top,
        layers: LAYERS,
        attention: attention(),
        page_size: PAGE,
        pages: 1 + SLOTS * STRIDE,
        pages_per_sequence: STRIDE,
        kv_dtype: KvDType::F32,
        slots: SLOTS,
        vocab: VOCAB,
        samples: true,
        poison: true,
    }
}

impl Decoder {
    /// Of weights of several types.
    pub fn new() -> Self {
        Self::suiting(Activations::F32)
    }

    /// The same, with bf16 in place of types that don't meet such activations.
    pub fn suiting(activations: Activations) -> Self {
        let random = |dtype, outputs, inputs, seed| {
            random(if activations.suits(dtype) { dtype } else { DType::BF16 }, outputs, inputs, seed)
        };
        let vector = |seed| {
            Tensor::from_f32(vec![HIDDEN], (0..HIDDEN as u32).map(|i| 0.5 + uniform(seed, 0, i, 0)).collect())
        };
        let layer = |l: u64| Layer {
            norms: [vector(10 * l), vector(10 * l + 1)],
            qkv: [
                random(DType::Q4_1, HEADS * DIM, HIDDEN, 10 * l + 2),
                random(DType::Q8_0, KV_HEADS * DIM, HIDDEN, 10 * l + 3),
                random(DType::BF16, KV_HEADS * DIM, HIDDEN, 10 * l + 4),
            ],
            bias: random(DType::F32, 1, (HEADS + 2 * KV_HEADS) * DIM, 10 * l + 5),
            o: random(DType::Q4_0, HIDDEN, HEADS * DIM, 10 * l + 6),
            gate_up: [
                random(DType::Q4_1, MLP, HIDDEN, 10 * l + 7),
                random(DType::F16, MLP, HIDDEN, 10 * l + 8),
            ],
            down: random(DType::Q4_1, HIDDEN, MLP, 10 * l + 9),
        };
        Self {
            table: random(DType::Q8_0, VOCAB, HIDDEN, 1001),
            layers: (1..=LAYERS as u64).map(layer).collect(),
            norm: vector(1002),
            head: random(DType::Q8_0, VOCAB, HIDDEN, 1003),
        }
    }

    /// Loads it and reserves for `top`.
    pub fn load(&self, options: CpuOptions, reserve: &Reserve) -> Result<Loaded, OpsError> {
        let mut backend = CpuBackend::new(options)?;
        let mut layers = Vec::new();
        for layer in &self.layers {
            layers.push([
                backend.load_vector(&[whole(&layer.norms[0])])?,
                backend.load_matrix(&layer.qkv.each_ref().map(whole))?,
                backend.load_vector(&[whole(&layer.bias)])?,
                backend.load_matrix(&[whole(&layer.o)])?,
                backend.load_vector(&[whole(&layer.norms[1])])?,
                backend.load_matrix(&layer.gate_up.each_ref().map(whole))?,
                backend.load_matrix(&[whole(&layer.down)])?,
            ]);
        }
        let weights = Handles {
            table: backend.load_table(&self.table)?,
            layers,
            norm: backend.load_vector(&[whole(&self.norm)])?,
            head: backend.load_matrix(&[whole(&self.head)])?,
        };
        backend.reserve(reserve)?;
        Ok(Loaded { backend, weights })
    }
}

impl Loaded {
    /// Records the whole pass for a shape of one lane.
    pub fn record(&mut self, rows: usize, out_rows: usize) -> usize {
        let recording = self.weights.recording(StepShape { rows, out_rows, lanes: 1 });
        self.backend.record(recording).unwrap()
    }

    /// Runs a step; the last row of each sequence has logits.
    pub fn step(&mut self, recording: usize, rows: &[Rows]) -> Vec<ScoredToken> {
        self.step_with(recording, rows, &Meeting::alone()).unwrap()
    }

    pub fn step_with(
        &mut self,
        recording: usize,
        rows: &[Rows],
        collectives: &dyn Collectives,
    ) -> Result<Vec<ScoredToken>, OpsError> {
        let arrays = Arrays::new(rows);
        let mut results = vec![ScoredToken::bare(u32::MAX); rows.len()];
        self.backend.replay(recording, &arrays.inputs(), collectives, &mut results)?;
        Ok(results)
    }
}

impl Handles {
    fn recording(&self, shape: StepShape) -> Recording {
        let mut ops = Ops::new(shape);
        let mut rows = |width| ops.buffer(Extent::Rows, width);
        let [x, normed, projected] = [rows(HIDDEN), rows(HIDDEN), rows(HIDDEN)];
        let (qkv, attended) = (rows((HEADS + 2 * KV_HEADS) * DIM), rows(HEADS * DIM));
        let (gate_up, gated) = (rows(2 * MLP), rows(MLP));
        let (picked, logits) = (ops.buffer(Extent::OutRows, HIDDEN), ops.buffer(Extent::OutRows, VOCAB));
        let spec = attention();
        ops.embed(self.table, x);
        ops.norm(x, self.layers[0][0], EPS, normed);
        for (index, layer) in self.layers.iter().enumerate() {
            let [_, qkv_weight, qkv_bias, o, post_norm, gate_up_weight, down] = *layer;
            ops.linear(normed, qkv_weight, Some(qkv_bias), qkv);
            ops.rotate_and_cache(qkv, index, None, &spec);
            ops.attend(qkv, index, &spec, attended);
            ops.linear(attended, o, None, projected);
            ops.add_norm(x, projected, post_norm, EPS, normed);
            ops.linear(normed, gate_up_weight, None, gate_up);
            ops.gated_silu(gate_up, gated);
            ops.linear(gated, down, None, projected);
            let next = self.layers.get(index + 1).map_or(self.norm, |next| next[0]);
            ops.add_norm(x, projected, next, EPS, normed);
        }
        ops.pick_rows(normed, picked);
        ops.linear(picked, self.head, None, logits);
        ops.sample(logits);
        ops.finish()
    }
}

/// The arrays of a step of one lane.
pub struct Arrays {
    pub tokens: Vec<TokenId>,
    pub positions: Vec<u32>,
    pub cache_rows: Vec<u32>,
    pub spans: Vec<Span>,
    pub out: Vec<OutRow>,
    pub tables: Vec<u32>,
    pub group_rows: Vec<u32>,
    pub lane: usize,
}

impl Arrays {
    /// Slot `s` owns pages `1 + s * STRIDE ..`. Reports all log-probabilities of every last row.
    pub fn new(sequences: &[Rows]) -> Self {
        let params = Arc::new(SamplingParams { logprobs: Some(VOCAB as u8), ..SamplingParams::greedy() });
        let mut arrays = Self {
            tokens: Vec::new(),
            positions: Vec::new(),
            cache_rows: Vec::new(),
            spans: Vec::new(),
            out: Vec::new(),
            tables: (0..SLOTS * STRIDE).map(|i| 1 + i as u32).collect(),
            group_rows: Vec::new(),
            lane: 0,
        };
        for Rows { slot, start, tokens } in sequences {
            let (first_row, rows) = (arrays.tokens.len() as u32, tokens.len() as u32);
            arrays.spans.push(Span { slot: SlotId(*slot), first_row, rows, start: *start as u32 });
            for (i, &token) in tokens.iter().enumerate() {
                let position = start + i;
                let page = 1 + *slot as usize * STRIDE + position / PAGE;
                arrays.tokens.push(token);
                arrays.positions.push(position as u32);
                arrays.cache_rows.push((page * PAGE + position % PAGE) as u32);
            }
            let position = (start + tokens.len()) as u32;
            let (slot, params) = (SlotId(*slot), Arc::clone(&params));
            arrays.out.push(OutRow {
                row: first_row + rows - 1,
                slot,
                position,
                target: None,
                params,
                mask: None,
            });
        }
        arrays.group_rows = vec![arrays.tokens.len() as u32];
        arrays
    }

    pub fn inputs(&self) -> StepInputs<'_> {
        StepInputs {
            tokens: &self.tokens,
            positions: &self.positions,
            cache_rows: &self.cache_rows,
            spans: &self.spans,
            out: &self.out,
            slot_loads: &[],
            tables: PageTables { entries: &self.tables, stride: STRIDE },
            group_rows: &self.group_rows,
            lane: self.lane,
        }
    }
}

/// All log-probabilities of a result, by token.
pub fn logprobs(result: &ScoredToken) -> [f32; VOCAB] {
    let mut all = [f32::NAN; VOCAB];
    for &(token, logprob) in result.top.as_slice() {
        all[token as usize] = logprob;
    }
    all
}

pub fn bits(result: &ScoredToken) -> (TokenId, [u32; VOCAB]) {
    (result.token, logprobs(result).map(f32::to_bits))
}

/// Every set of kernels that runs here.
pub fn sets() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_supported())
}

pub fn buffers<const N: usize>(ops: &mut Ops, extent: Extent, width: usize) -> [Buf; N] {
    std::array::from_fn(|_| ops.buffer(extent, width))
}
