use super::*;
use crate::elementwise::tests::{noise, supported};
use atom_base::{SlotId, Span};
use atom_ops::{PageTables, Rotary, StepShape};
use atom_weights::{DType, quant};
use std::collections::BTreeMap;
use std::sync::Barrier;

/// A model's attention, and how it is run.
#[derive(Clone, Copy, Debug)]
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
        let &Self { q_heads, kv_heads, head_dim, .. } = self;
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
        let (mut attention, entries) = self.reserve(sequences, longest, rows_max);
        let mut lengths = vec![0; sequences];
        let mut outputs = Outputs::new();
        for step in steps {
            self.step(&mut attention, &entries, stride, step, &mut lengths, &mut outputs, &|_, _, _| {});
        }
        outputs
    }

    fn reserved(&self, sequences: usize, longest: usize, rows: usize) -> Reserve {
        let stride = longest.div_ceil(self.page_size);
        Reserve {
            top: StepShape { rows, out_rows: 1, lanes: 1 },
            layers: 2,
            attention: Arc::new(self.spec()),
            page_size: self.page_size,
            pages: 1 + sequences * stride,
            pages_per_sequence: stride,
            kv_dtype: self.dtype,
            slots: 1 + sequences,
            vocab: 1,
            samples: false,
            poison: true,
        }
    }

    /// Attention whose pages are all poisoned, and page tables for the sequences. Slot 0 and page 0
    /// belong to nobody.
    fn reserve(&self, sequences: usize, longest: usize, rows: usize) -> (Attention, Vec<u32>) {
        let reserve = self.reserved(sequences, longest, rows);
        let mut attention = Attention::new(self.isa, self.workers, &reserve).unwrap();
        (0..reserve.pages).for_each(|page| attention.poison_page(page));
        // Neighbours in a sequence are no neighbours in memory.
        let (stride, leased) = (reserve.pages_per_sequence, reserve.pages as u32 - 1);
        let order = (0..leased).step_by(2).chain((1..leased).step_by(2)).map(|page| 1 + page);
        (attention, std::iter::repeat_n(0, stride).chain(order).collect())
    }

    #[allow(clippy::too_many_arguments)]
    fn step(
        &self,
        attention: &mut Attention,
        entries: &[u32],
        stride: usize,
        step: &Step,
        lengths: &mut [usize],
        outputs: &mut Outputs,
        change: &dyn Fn(usize, usize, &mut [f32]),
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
        let mut qkv = Vec::new();
        for &(sequence, position) in &places {
            let mut row = self.row(sequence, position);
            change(sequence, position, &mut row);
            qkv.extend(row);
        }
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

    /// The output of a position in f64; from an e4m3 cache, what its codes stand for.
    fn exact(&self, sequence: usize, position: usize) -> Vec<f64> {
        let (head_dim, group) = (self.head_dim, self.q_heads / self.kv_heads);
        let mut rows: Vec<Vec<f64>> = (0..=position).map(|p| self.exact_row(sequence, p)).collect();
        if self.dtype == KvDType::E4M3 {
            for x in rows.iter_mut().flat_map(|row| &mut row[self.q_heads * head_dim..]) {
                *x = f64::from(stored(*x as f32));
            }
        }
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
                let (a, b) = if self.pairs { (2 * i, 2 * i + 1) } else { (i, i + self.rotated / 2) };
                let (sin, cos) = (position as f64 * f64::from(frequency)).sin_cos();
                let magnitude = f64::from(spec.rotary.magnitude);
                (x[a], x[b]) = ((x[a] * cos - x[b] * sin) * magnitude, (x[b] * cos + x[a] * sin) * magnitude);
            }
        }
        row
    }
}

/// What an e4m3 cache makes of a number.
fn stored(x: f32) -> f32 {
    quant::dequantize_bytes(DType::F8_E4M3, &quant::quantize(DType::F8_E4M3, &[x]))[0]
}

fn assert_same_bits(what: &str, got: &Outputs, expected: &Outputs) {
    for (place, got) in got {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(got), bits(&expected[place]), "{what}: (sequence, position) {place:?}");
    }
}

#[test]
fn attention_matches_f64() {
    let base = Setup::default();
    let shapes = [
        Setup { q_heads: 1, kv_heads: 1, head_dim: 8, rotated: 8, ..base },
        Setup { q_heads: 9, kv_heads: 3, head_dim: 64, rotated: 64, pairs: true, ..base },
        Setup { q_heads: 8, kv_heads: 8, head_dim: 32, rotated: 12, qk_norm: true, ..base },
        Setup { q_heads: 7, kv_heads: 1, head_dim: 24, rotated: 24, pairs: true, qk_norm: true, ..base },
        Setup { q_heads: 10, kv_heads: 2, head_dim: 128, rotated: 64, page_size: 32, ..base },
        Setup { q_heads: 24, kv_heads: 2, head_dim: 256, rotated: 256, page_size: 64, ..base },
    ];
    for shape in shapes {
        // e4m3 is compared with the same codes, so its bound is that of f32.
        for (dtype, tolerance) in
            [(KvDType::F32, 2e-6), (KvDType::F16, 1e-3), (KvDType::BF16, 8e-3), (KvDType::E4M3, 2e-6)]
        {
            let setup = Setup { dtype, ..shape };
            let outputs = setup.run(&[vec![(0, 37)], vec![(0, 250)], vec![(0, 1)]]);
            assert_eq!(outputs.len(), 288);
            for position in [0, 1, 15, 16, 36, 37, 255, 256, 287] {
                let exact = setup.exact(0, position);
                for (got, exact) in outputs[&(0, position)].iter().zip(exact) {
                    let error = (f64::from(*got) - exact).abs();
                    assert!(error < tolerance, "{setup:?} at {position}: {got} instead of {exact}");
                }
            }
        }
    }
}

/// Schedules that compute the same rows in different company.
fn schedules() -> Vec<(&'static str, Vec<Step>)> {
    let mut single = vec![vec![(0, 530)]];
    single.extend((0..3).map(|_| vec![(0, 1)]));
    let mut chunks: Vec<Step> = [1, 15, 16, 17, 200, 7, 256, 18].map(|rows| vec![(0, rows)]).to_vec();
    chunks.extend((0..3).map(|_| vec![(0, 1)]));
    let together = vec![
        vec![(1, 40), (0, 255), (2, 3)],
        vec![(2, 1), (1, 1), (0, 2)],
        vec![(0, 273), (1, 300)],
        vec![(2, 1), (0, 1), (1, 1)],
        vec![(0, 1), (1, 1)],
        vec![(1, 5), (0, 1), (2, 90)],
    ];
    vec![("alone", single), ("in chunks", chunks), ("among others", together)]
}

#[test]
fn bits_depend_on_nothing_but_the_sequence() {
    for dtype in [KvDType::F32, KvDType::F16, KvDType::BF16, KvDType::E4M3] {
        let base = Setup { dtype, qk_norm: true, isa: Isa::Portable, ..Setup::default() };
        let expected = base.run(&schedules()[2].1);
        for (i, isa) in supported().enumerate() {
            for (j, (what, steps)) in schedules().into_iter().enumerate() {
                // Every set meets every count of workers and every page size, and so does every schedule.
                let (workers, page_size) = [(1, 16), (3, 64), (8, 32)][(i + j) % 3];
                let setup = Setup { isa, workers, page_size, ..base };
                assert_same_bits(&format!("{what}, {setup:?}"), &setup.run(&steps), &expected);
            }
        }
    }
}

#[test]
fn a_cut_decode_gives_the_bits_of_one_worker() {
    let steps = [vec![(0, 900)], vec![(0, 1)], vec![(0, 1)]];
    for isa in supported() {
        let one = Setup { isa, dtype: KvDType::F16, ..Setup::default() };
        let expected = one.run(&steps);
        for workers in [2, 5] {
            let setup = Setup { workers, ..one };
            let mut plan = Plan::new(900, 3, 2, workers, 10_000);
            plan.cut(&[Span { slot: SlotId(1), first_row: 0, rows: 1, start: 900 }]);
            assert_eq!(plan.tiles().len(), 4, "four partitions are cut apart for {workers} workers");
            assert_same_bits(&format!("{setup:?}"), &setup.run(&steps), &expected);
        }
    }
}

#[test]
fn a_row_of_nan_stays_in_its_sequence() {
    // Huge values overflow halves to infinity; e4m3 has none, but NaN.
    for (dtype, factor) in [(KvDType::F16, 1e6), (KvDType::E4M3, f32::NAN)] {
        spoil_a_row(dtype, factor);
    }
}

fn spoil_a_row(dtype: KvDType, factor: f32) {
    let setup = Setup { dtype, ..Setup::default() };
    let steps = [vec![(0, 30), (1, 30)], vec![(1, 1), (0, 1)]];
    let clean = setup.run(&steps);
    assert!(clean.values().flatten().all(|x| x.is_finite()), "poisoned memory was read");
    // From position 20 on, and not before, the sequence breaks.
    let (mut attention, entries) = setup.reserve(2, 31, 60);
    let mut broken = Outputs::new();
    let mut lengths = [0, 0];
    for step in &steps {
        setup.step(
            &mut attention,
            &entries,
            2,
            step,
            &mut lengths,
            &mut broken,
            &|sequence, position, row| {
                if (sequence, position) == (1, 20) {
                    row.iter_mut().for_each(|x| *x *= factor);
                }
            },
        );
    }
    for ((sequence, position), out) in &broken {
        let (sequence, position) = (*sequence, *position);
        if sequence == 0 || position < 20 {
            assert_eq!(*out, clean[&(sequence, position)], "sequence {sequence}, position {position}");
        } else {
            assert!(out.iter().any(|x| !x.is_finite()), "position {position} does not show it");
        }
    }
}

#[test]
fn far_positions_turn_by_the_exact_angle() {
    let frequencies: Vec<f32> = (0..64).map(|i| 10_000f32.powf(-i as f32 / 64.0)).collect();
    let rotary = Rotary { frequencies: frequencies.clone(), dim: 128, pairs: false, magnitude: 1.5 };
    let mut table = RotaryTable::new(&rotary, 131_072, 4);
    let positions = [0, 255, 256, 131_071];
    table.fill(&positions);
    for (row, position) in positions.into_iter().enumerate() {
        for isa in supported() {
            let mut head = noise(7, 128);
            let before = head.clone();
            dispatch(isa, Turn { table: &table, row, head: &mut head });
            for i in 0..64 {
                let (sin, cos) = (f64::from(position) * f64::from(frequencies[i])).sin_cos();
                let (x, y) = (f64::from(before[i]), f64::from(before[i + 64]));
                assert!((f64::from(head[i]) - (x * cos - y * sin) * 1.5).abs() < 4e-7, "{position} {i}");
                assert!((f64::from(head[i + 64]) - (y * cos + x * sin) * 1.5).abs() < 4e-7, "{position} {i}");
            }
        }
    }
}

struct Turn<'a> {
    table: &'a RotaryTable,
    row: usize,
    head: &'a mut [f32],
}

impl Kernel for Turn<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        self.table.rotate(s, self.row, self.head);
    }
}

#[test]
fn tiles_cover_every_pair_and_partition_once_within_what_is_reserved() {
    let draw = |i: u32, below: f32| (atom_base::rng::uniform(9, 0, i, 0) * below) as u32;
    for seed in 0..300u32 {
        let (workers, group, kv_heads) =
            (1 + seed as usize % 9, 1 + draw(seed, 13.0) as usize, 1 + draw(seed + 1, 9.0) as usize);
        let partials_max = [0, 500, 1 << 20][seed as usize % 3];
        let mut plan = Plan::new(512, group, kv_heads, workers, partials_max);
        let (mut spans, mut first_row) = (Vec::new(), 0);
        while first_row < 512 {
            let i = seed * 1000 + first_row;
            let rows = if draw(i, 2.0) == 0 { 1 } else { 1 + draw(i + 7, 90.0) }.min(512 - first_row);
            spans.push(Span { slot: SlotId(1), first_row, rows, start: draw(i + 13, 6000.0) });
            first_row += rows;
        }
        spans.truncate(1 + draw(seed + 5, 40.0) as usize);
        plan.cut(&spans);
        let mut covered = BTreeMap::new();
        let mut room = BTreeMap::new();
        for tile in plan.tiles() {
            assert!(tile.pairs.len() <= TILE && !tile.pairs.is_empty() && !tile.partitions.is_empty());
            for pair in tile.pairs.clone() {
                for partition in tile.partitions.clone() {
                    assert_eq!(covered.insert((tile.span, pair, partition), ()), None, "covered twice");
                }
            }
            if let Some(split) = tile.split {
                assert!(split.pending + kv_heads <= plan.pending_max());
                *room.entry(split.partials).or_insert(0) +=
                    tile.partitions.len() * kv_heads * tile.pairs.len();
            }
        }
        let mut end = 0;
        for (start, len) in room {
            assert!(start >= end, "partial sums of two tiles overlap");
            end = start + len;
        }
        assert!(end <= partials_max);
        for (index, span) in spans.iter().enumerate() {
            for pair in 0..span.rows as usize * group {
                let position = span.start as usize + pair / group;
                for partition in 0..=position / PARTITION {
                    assert!(covered.contains_key(&(index, pair, partition)), "span {index}, pair {pair}");
                }
            }
        }
    }
}

#[test]
fn a_page_that_cuts_a_vector_and_a_cache_that_fits_nowhere_are_refused_with_the_numbers() {
    let reserve = |page_size, pages| Reserve { page_size, pages, ..Setup::default().reserved(1, 1, 1) };
    let refused = |page_size, pages| Attention::new(Isa::Portable, 1, &reserve(page_size, pages)).err();
    let error = refused(24, 4).expect("24 is no multiple of 16").to_string();
    assert!(error.contains("24"), "{error}");
    assert!(refused(0, 4).is_some());
    let error = refused(16, usize::MAX / 64).expect("no such memory").to_string();
    assert!(error.contains(&(usize::MAX / 64).to_string()), "{error}");
}
