use super::*;
use crate::elementwise::tests::{noise, supported};
use atom_base::{SlotId, Span};
use atom_ops::{PageTables, Rotary, StepShape};
use std::collections::BTreeMap;
use std::sync::Barrier;

/// A model's attention, and how it is run.
#[derive(Clone)]
struct Setup {
    isa: Isa,
    workers: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rotated: usize,
    pairs: bool,
    qk_norm: bool,
    dtype: KvDType,
    page_size: usize,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            isa: Isa::detect(),
            workers: 1,
            q_heads: 6,
            kv_heads: 2,
            head_dim: 16,
            rotated: 16,
            pairs: false,
            qk_norm: false,
            dtype: KvDType::F32,
            page_size: 16,
        }
    }
}

/// One step: `(sequence, rows)` of each span.
type Step = Vec<(usize, usize)>;

/// Outputs by (sequence, position).
type Outputs = BTreeMap<(usize, usize), Vec<f32>>;

impl Setup {
    fn width(&self) -> usize {
        (self.q_heads + 2 * self.kv_heads) * self.head_dim
    }

    fn spec(&self) -> AttentionSpec {
        let half = self.rotated / 2;
        let frequencies = (0..half).map(|i| 10_000f32.powf(-(i as f32) / half as f32)).collect();
        let rotary = Rotary { frequencies, dim: self.rotated, pairs: self.pairs, magnitude: 1.25 };
        let AttentionSpec { q_heads, kv_heads, head_dim, .. } = AttentionSpec {
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: 0.0,
            rotary: rotary.clone(),
        };
        AttentionSpec { q_heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt(), rotary }
    }

    /// q, k and v of a position, the same however it comes to be computed.
    fn row(&self, sequence: usize, position: usize) -> Vec<f32> {
        let mut row = noise((sequence * 100_000 + position) as u64, self.width());
        // Sharp enough that single positions matter.
        row[..self.q_heads * self.head_dim].iter_mut().for_each(|q| *q *= 3.0);
        row
    }

    fn norms(&self) -> (Vec<f32>, Vec<f32>) {
        (noise(1 << 40, self.head_dim), noise(2 << 40, self.head_dim))
    }

    /// Runs steps with all memory poisoned before it is written.
    fn run(&self, steps: &[Step]) -> Outputs {
        let sequences = 1 + steps.iter().flatten().map(|&(sequence, _)| sequence).max().unwrap();
        let longest = (0..sequences)
            .map(|s| steps.iter().flatten().filter(|(of, _)| *of == s).map(|(_, rows)| rows).sum::<usize>())
            .max()
            .unwrap();
        let stride = longest.div_ceil(self.page_size);
        let rows_max = steps.iter().map(|step| step.iter().map(|(_, rows)| rows).sum()).max().unwrap();
        let pages = 1 + sequences * stride;
        let reserve = Reserve {
            top: StepShape { rows: rows_max, out_rows: 1, lanes: 1 },
            layers: 2,
            attention: Arc::new(self.spec()),
            page_size: self.page_size,
            pages,
            pages_per_sequence: stride,
            kv_dtype: self.dtype,
            slots: 1 + sequences,
            vocab: 1,
            samples: false,
            poison: true,
        };
        let mut attention = Attention::new(self.isa, self.workers, &reserve).unwrap();
        (0..pages).for_each(|page| attention.poison_page(page));
        // Pages in an order that is not the sequence's; slot 0 and page 0 belong to nobody.
        let mut entries = vec![0u32; (1 + sequences) * stride];
        for (i, entry) in entries[stride..].iter_mut().enumerate() {
            *entry = 1 + ((i * 7 + 3) % (sequences * stride)) as u32;
            assert!(!(sequences * stride).is_multiple_of(7), "7 must not divide the number of pages");
        }
        let mut lengths = vec![0; sequences];
        let mut outputs = Outputs::new();
        for step in steps {
            self.step(&mut attention, &entries, stride, step, &mut lengths, &mut outputs);
        }
        outputs
    }

    fn step(
        &self,
        attention: &mut Attention,
        entries: &[u32],
        stride: usize,
        step: &Step,
        lengths: &mut [usize],
        outputs: &mut Outputs,
    ) {
        let tables = PageTables { entries, stride };
        let (mut spans, mut places) = (Vec::new(), Vec::new());
        for &(sequence, rows) in step {
            let start = lengths[sequence];
            lengths[sequence] += rows;
            let slot = SlotId(1 + sequence as u32);
            spans.push(Span { slot, first_row: places.len() as u32, rows: rows as u32, start: start as u32 });
            places.extend((start..start + rows).map(|position| (sequence, position)));
        }
        let positions: Vec<u32> = places.iter().map(|&(_, position)| position as u32).collect();
        let cache_row = |&(sequence, position): &(usize, usize)| {
            let page = tables.pages(SlotId(1 + sequence as u32))[position / self.page_size] as usize;
            (page * self.page_size + position % self.page_size) as u32
        };
        let cache_rows: Vec<u32> = places.iter().map(cache_row).collect();
        let inputs = StepInputs {
            tokens: &[],
            positions: &positions,
            cache_rows: &cache_rows,
            spans: &spans,
            out: &[],
            slot_loads: &[],
            tables,
            group_rows: &[],
            lane: 0,
        };
        attention.begin_step(&inputs);
        let mut qkv: Vec<f32> = places.iter().flat_map(|&(s, p)| self.row(s, p)).collect();
        let mut out = vec![f32::NAN; places.len() * self.q_heads * self.head_dim];
        self.work(attention, &inputs, &mut qkv, &mut out);
        for (place, out) in places.iter().zip(out.chunks(self.q_heads * self.head_dim)) {
            outputs.insert(*place, out.to_vec());
        }
    }

    /// All workers, each on a thread of its own, through the second of two layers.
    fn work(&self, attention: &Attention, inputs: &StepInputs<'_>, qkv: &mut [f32], out: &mut [f32]) {
        let (q_norm, k_norm) = self.norms();
        let norms = self.qk_norm.then_some((&q_norm[..], &k_norm[..], 1e-5));
        let (qkv, out) = (Rows::new(qkv, self.width()), Rows::new(out, self.head_dim));
        let barrier = Barrier::new(self.workers);
        std::thread::scope(|scope| {
            for worker in 0..self.workers {
                let barrier = &barrier;
                scope.spawn(move || {
                    // SAFETY: all workers meet at the barrier between the two; cache rows are distinct.
                    unsafe {
                        attention.rotate_and_cache(worker, inputs, 1, qkv, norms);
                        barrier.wait();
                        attention.attend(worker, inputs, 1, qkv, out);
                    }
                });
            }
        });
    }

    /// The output of a position in f64.
    fn exact(&self, sequence: usize, position: usize) -> Vec<f64> {
        let (head_dim, group) = (self.head_dim, self.q_heads / self.kv_heads);
        let rows: Vec<Vec<f64>> = (0..=position).map(|p| self.exact_row(sequence, p)).collect();
        let part = |position: usize, head: usize| &rows[position][head * head_dim..][..head_dim];
        let mut out = Vec::new();
        for head in 0..self.q_heads {
            let (key, value) = (self.q_heads + head / group, self.q_heads + self.kv_heads + head / group);
            let score = |p: usize| -> f64 {
                let dot: f64 = part(position, head).iter().zip(part(p, key)).map(|(q, k)| q * k).sum();
                dot / (head_dim as f64).sqrt()
            };
            let scores: Vec<f64> = (0..=position).map(score).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let total: f64 = weights.iter().sum();
            for i in 0..head_dim {
                let sum: f64 = weights.iter().enumerate().map(|(p, w)| w * part(p, value)[i]).sum();
                out.push(sum / total);
            }
        }
        out
    }

    fn exact_row(&self, sequence: usize, position: usize) -> Vec<f64> {
        let mut row: Vec<f64> = self.row(sequence, position).into_iter().map(f64::from).collect();
        let (q_norm, k_norm) = self.norms();
        let spec = self.spec();
        for (head, x) in row.chunks_mut(self.head_dim).enumerate().take(self.q_heads + self.kv_heads) {
            if self.qk_norm {
                let weight = if head < self.q_heads { &q_norm } else { &k_norm };
                let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
                x.iter_mut().zip(weight).for_each(|(x, &w)| *x *= f64::from(w) / (mean + 1e-5).sqrt());
            }
            for (i, &frequency) in spec.rotary.frequencies.iter().enumerate() {
                let (a, b) =
                    if self.pairs { (2 * i, 2 * i + 1) } else { (i, i + self.rotated / 2) };
                let (sin, cos) = (position as f64 * f64::from(frequency)).sin_cos();
                let (x, y) = (x_at(x, a), x_at(x, b));
                let magnitude = f64::from(spec.rotary.magnitude);
                let (turned_x, turned_y) = ((x * cos - y * sin) * magnitude, (y * cos + x * sin) * magnitude);
                (row_set(&mut *x_mut(x, 0.0)), ()) ;
                let _ = (turned_x, turned_y);
            }
        }
        row
    }
}
