//! Sampling: every token as the CPU chooses it.

mod reference;

use crate::kit::Kit;
use atom_base::{MaskCell, OutRow, SamplingParams, ScoredToken, SlotId, SlotLoad, TokenId};
use atom_cuda::launch::sample::{self, SampleMemory, SampleStep};
use atom_cuda::sample_rows::{self as rows, BiasTables, SeenParts};
use atom_cuda::{CudaError, DeviceMem, Element, Gate};
use reference::History;
use std::sync::Arc;
use std::time::Instant;

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    for (vocab, out_rows, steps) in [
        (1, 9, 2),
        (2, 9, 2),
        (257, 36, 3),
        (1000, 36, 3),
        (4099, 36, 2),
        (49_152, 18, 2),
        (151_936, 12, 2),
        (151_937, 9, 1),
        (262_208, 9, 1),
    ] {
        lane(kit, vocab, out_rows, steps)?;
    }
    a_search_between_two_neighbouring_logits_ends(kit)?;
    what_is_no_number(kit)?;
    masks_that_do_not_come(kit)?;
    draws_follow_the_probabilities(kit)
}

/// Sampling's memory and what a test keeps beside it.
struct Lane {
    vocab: usize,
    out_rows: usize,
    at: SampleMemory,
    memory: DeviceMem,
    results: DeviceMem,
    last_token: DeviceMem,
    tables: BiasTables,
    gate: Gate,
    sequence: u32,
    /// Of the step that was launched last.
    arrays: Vec<DeviceMem>,
}

impl Lane {
    fn new(kit: &Kit, vocab: usize, out_rows: usize) -> Result<Self, CudaError> {
        let slots = out_rows + 1;
        let at = SampleMemory::new(vocab, out_rows, slots);
        let memory = DeviceMem::new(&kit.device, at.bytes())?;
        memory.fill(&kit.stream, 0, memory.bytes(), 0xff)?;
        let results = DeviceMem::new(&kit.device, out_rows * rows::RESULT_BYTES)?;
        let last_token = kit.upload_words(&vec![UNTOLD; slots])?;
        let (tables, gate) = (BiasTables::new(slots), Gate::new(&kit.device, vocab, out_rows)?);
        // Numbers of steps have 31 bits; what follows the last is tried too.
        let sequence = (1 << 31) - 3;
        Ok(Self {
            vocab,
            out_rows,
            at,
            memory,
            results,
            last_token,
            tables,
            gate,
            sequence,
            arrays: Vec::new(),
        })
    }

    /// Fills histories, in parts of little room.
    fn load(&self, kit: &Kit, loads: &[SlotLoad]) -> Result<(), CudaError> {
        let (mut records, mut tokens) = (vec![0; 5 * rows::SEEN_LOAD_BYTES], vec![0; 4 * 1000]);
        let mut parts = SeenParts::new(loads);
        while let Some(part) = parts.next_part(&mut records, &mut tokens) {
            let (records, tokens) = (kit.upload_bytes(&records)?, kit.upload_bytes(&tokens)?);
            let count = kit.upload_words(&[part.loads as u32])?;
            let loads = (records.address(), count.address(), 5);
            // SAFETY: the arrays are what the part says, and live until the stream has passed them.
            unsafe {
                sample::load_seen(&kit.queue(), &self.at, self.memory.address(), loads, tokens.address())?
            };
            kit.stream.wait()?;
        }
        Ok(())
    }

    /// A step whose last row is not real, with NaN in it. Masks come before the launch and behind it.
    fn step(&mut self, kit: &Kit, out: &[OutRow], logits: &[f32]) -> Result<Vec<ScoredToken>, CudaError> {
        self.sequence = if self.sequence == u32::MAX >> 1 { 2 } else { self.sequence + 1 };
        (0..out.len()).for_each(|row| self.gate.close(self.sequence, row));
        self.open(out, 0);
        self.launch(kit, out, logits, PATIENCE_MS)?;
        self.open(out, 1);
        self.results(kit, out)
    }

    /// Hands on the masks of every second row.
    fn open(&mut self, out: &[OutRow], first: usize) {
        for (row, out) in out.iter().enumerate().skip(first).step_by(2) {
            if let Some(cell) = &out.mask {
                cell.set_deadline(Instant::now());
                cell.wait(|mask| self.gate.open(self.sequence, row, Some(mask))).expect("it was filled");
            }
        }
    }

    fn launch(
        &mut self,
        kit: &Kit,
        out: &[OutRow],
        logits: &[f32],
        patience_ms: u32,
    ) -> Result<(), CudaError> {
        self.arrays.clear();
        let (mut records, mut entries) = (vec![0; 16 * self.out_rows], vec![0; 8 * 1024 * self.out_rows]);
        if let Some(part) = self.tables.update(out, &mut records, &mut entries) {
            let (records, entries) = (kit.upload_bytes(&records)?, kit.upload_bytes(&entries)?);
            let count = kit.upload_words(&[part.loads as u32])?;
            let loads = (records.address(), count.address(), self.out_rows);
            // SAFETY: as above.
            unsafe {
                sample::load_biases(&kit.queue(), &self.at, self.memory.address(), loads, entries.address())?
            };
            kit.stream.wait()?;
        }
        let mut padded = vec![f32::NAN; self.out_rows * self.vocab];
        padded[..logits.len()].copy_from_slice(logits);
        let logits = kit.upload(&padded, Element::F32)?;
        let mut records: Vec<u8> = out.iter().flat_map(|row| rows::row_bytes(row, self.vocab)).collect();
        records.resize(self.out_rows * rows::ROW_BYTES, 0xff);
        let records = kit.upload_bytes(&records)?;
        let header = kit.header(&[(1, out.len() as u32), (7, self.sequence), (8, patience_ms)])?;
        self.results.fill(&kit.stream, 0, self.results.bytes(), 0xff)?;
        let step = SampleStep {
            header: header.address(),
            logits: logits.address(),
            rows: records.address(),
            results: self.results.address(),
            last_token: self.last_token.address(),
            gate: self.gate.at(),
        };
        // SAFETY: all arrays have the lane's sizes and live until the results are read.
        unsafe { sample::sample(&kit.queue(), &self.at, self.memory.address(), &step, self.out_rows)? };
        // They live until the next step: to give one back would wait for this one, and it for its masks.
        self.arrays = vec![logits, records, header];
        Ok(())
    }

    fn results(&self, kit: &Kit, out: &[OutRow]) -> Result<Vec<ScoredToken>, CudaError> {
        let bytes = kit.download_bytes(&self.results)?;
        Ok(bytes.chunks(rows::RESULT_BYTES).take(out.len()).map(rows::result).collect())
    }
}

/// Rows with all kinds of parameters over all kinds of logits, for some steps with one history.
fn lane(kit: &mut Kit, vocab: usize, out_rows: usize, steps: usize) -> Result<(), CudaError> {
    let mut lane = Lane::new(kit, vocab, out_rows)?;
    let real = out_rows - 1;
    let mut histories: Vec<History> = Vec::new();
    let mut loads = Vec::new();
    for slot in 1..=real as u32 {
        let (prompt, generated) = (kit.below(2500), kit.below(60));
        let prompt: Arc<[TokenId]> = (0..prompt).map(|_| kit.below(vocab) as TokenId).collect();
        let generated: Arc<[TokenId]> = (0..generated).map(|_| kit.below(vocab.min(50)) as TokenId).collect();
        let mut history = vec![(0, false); vocab];
        prompt.iter().for_each(|&token| history[token as usize].1 = true);
        generated.iter().for_each(|&token| history[token as usize].0 += 1);
        histories.push(history);
        loads.push(SlotLoad { slot: SlotId(slot), prompt, generated });
    }
    lane.load(kit, &loads)?;
    let mut last = vec![UNTOLD; out_rows + 1];
    for step in 0..steps {
        let out: Vec<OutRow> = (0..real).map(|i| row(kit, i, vocab)).collect();
        let logits: Vec<f32> = (0..real).flat_map(|i| logits(kit, i, vocab)).collect();
        let found = lane.step(kit, &out, &logits)?;
        for (i, (row, found)) in out.iter().zip(&found).enumerate() {
            let expected = reference::sample(&logits[i * vocab..][..vocab], row, &mut histories[i]);
            if row.target.is_none() {
                last[row.slot.0 as usize] = if expected.is_not_a_number() { 0 } else { expected.token };
            }
            same(kit, &format!("{vocab} tokens, step {step}, row {i}, {row:?}"), found, &expected);
        }
        let found = kit.download_words(&lane.last_token)?;
        kit.equal(&format!("last tokens, {vocab} tokens, step {step}"), &found, &last);
        let bytes = kit.download_bytes(&lane.results)?;
        let behind = &bytes[real * rows::RESULT_BYTES..];
        kit.check("nothing behind the real rows", behind.iter().all(|&b| b == 0xff), "written");
    }
    Ok(())
}

/// Tokens must be equal; log-probabilities to a unit in the last place, since logarithms of two libraries may differ.
fn same(kit: &mut Kit, name: &str, found: &ScoredToken, expected: &ScoredToken) {
    let near = |a: f32, b: f32| {
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()) || (a - b).abs() <= 1.2e-7 * b.abs()
    };
    let (top, wanted) = (found.top.as_slice(), expected.top.as_slice());
    let holds = found.token == expected.token
        && near(found.logprob, expected.logprob)
        && top.len() == wanted.len()
        && top.iter().zip(wanted).all(|(a, b)| a.0 == b.0 && near(a.1, b.1));
    kit.check(name, holds, &format!("{found:?}, not {expected:?}"));
}

fn pick<T: Copy>(kit: &mut Kit, from: &[T]) -> T {
    from[kit.below(from.len())]
}

/// A row of slot `i + 1` with any mixture of parameters.
fn row(kit: &mut Kit, i: usize, vocab: usize) -> OutRow {
    let mut params = SamplingParams {
        temperature: pick(kit, &[0.0, 1.0, 0.7, 1.3, 2.0, 0.3, 1e-3, 1e-40, 1e-6]),
        seed: kit.word(),
        choice: kit.below(5) as u32,
        ..SamplingParams::default()
    };
    let truncation = kit.below(9);
    if [1, 5, 7, 8].contains(&truncation) {
        params.top_p = pick(kit, &[0.9, 0.95, 0.5, 0.99, 0.9999, 1e-38, 0.1]);
    }
    if [2, 5, 6, 7].contains(&truncation) {
        let half = (vocab / 2).max(1) as u32;
        params.top_k =
            pick(kit, &[1, 2, 20, 50, 300, 1000, half, vocab as u32 - 1, vocab as u32, 5 * vocab as u32]);
    }
    if [3, 6, 7, 8].contains(&truncation) {
        params.min_p = pick(kit, &[0.05, 0.01, 1.0, 1e-6, 0.5, 1e-30]);
    }
    if kit.below(3) == 0 {
        params.logprobs = Some(pick(kit, &[0, 1, 5, 20]));
    }
    let target = (kit.below(8) == 0).then(|| kit.below(vocab) as TokenId);
    params.prompt_logprobs = target.map(|_| pick(kit, &[0, 3, 20]));
    if kit.below(3) == 0 {
        (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) = pick(
            kit,
            &[(1.3, 0.7, -0.4), (1.0, 0.5, 0.0), (0.8, 0.0, 1.5), (2.0, -2.0, 2.0), (1e-3, 0.0, 0.0)],
        );
    }
    if kit.below(4) == 0 {
        let count = pick(kit, &[1, 7, 300, 1024]);
        let biases = kit.random(count, 3.0);
        params.logit_bias = biases.into_iter().map(|bias| (kit.below(vocab) as TokenId, bias)).collect();
    }
    let position = kit.below(1 << 20) as u32;
    OutRow {
        row: i as u32,
        slot: SlotId(i as u32 + 1),
        position,
        target,
        params: Arc::new(params),
        mask: (kit.below(3) == 0).then(|| mask(kit, vocab)),
    }
}

/// One token, few, most or all of them.
fn mask(kit: &mut Kit, vocab: usize) -> Arc<MaskCell> {
    let kind = kit.below(5);
    let mut words: Vec<u32> = (0..vocab.div_ceil(32))
        .map(|_| match kind {
            0 | 1 => 0,
            2 => kit.word() as u32,
            3 => (kit.word() | kit.word() | kit.word()) as u32,
            _ => u32::MAX,
        })
        .collect();
    for _ in 0..[1, 9, 1, 1, 1][kind] {
        let token = kit.below(vocab);
        words[token / 32] |= 1 << (token % 32);
    }
    let cell = MaskCell::new();
    cell.fill(Ok(words.into()));
    Arc::new(cell)
}

/// Steep, flat, tied, masked and shifted rows in turn.
fn logits(kit: &mut Kit, kind: usize, vocab: usize) -> Vec<f32> {
    let scale = [3.0, 2.0, 0.3, 2.0, 1.0, 60.0, 3.0, 3.0, 1.0][kind % 9];
    let mut logits = kit.random(vocab, scale);
    for (token, logit) in logits.iter_mut().enumerate() {
        match kind % 9 {
            1 if kit.below(vocab) < 8 => *logit += 12.0,
            3 => *logit = (*logit * 2.0).round() / 2.0,
            4 => *logit = [0.0, -0.0][token % 2],
            6 if kit.below(10) < 7 => *logit = f32::NEG_INFINITY,
            7 => *logit += 1000.0,
            8 => *logit = 10.0 - 1.5 * (1.0 + kit.below(vocab) as f32).ln(),
            _ => {}
        }
    }
    if logits.iter().all(|l| l.is_infinite()) {
        logits[0] = -3.0;
    }
    logits
}

/// Two floats next to each other, each the logit of more tokens than the kernels list: a search that halved a range of
/// keys by rounding down never got from two keys to one.
fn a_search_between_two_neighbouring_logits_ends(kit: &mut Kit) -> Result<(), CudaError> {
    let vocab = 40_000;
    let mut lane = Lane::new(kit, vocab, 7)?;
    let logits: Vec<f32> =
        (0..6 * vocab).map(|_| if kit.below(2) == 0 { 1.0 } else { 1.0_f32.next_up() }).collect();
    let limits = [(0, 0.3), (0, 0.9), (5000, 1.0), (30_000, 1.0), (30_000, 0.9), (12_000, 0.2)];
    let out: Vec<OutRow> = (0_u32..)
        .zip(limits)
        .map(|(i, (top_k, top_p))| {
            let params = SamplingParams { top_k, top_p, seed: kit.word(), ..SamplingParams::default() };
            let params = SamplingParams { logprobs: (i % 2 == 0).then_some(20), ..params };
            OutRow {
                row: i,
                slot: SlotId(i + 1),
                position: i,
                target: None,
                params: Arc::new(params),
                mask: None,
            }
        })
        .collect();
    let found = lane.step(kit, &out, &logits)?;
    for ((row, found), logits) in out.iter().zip(&found).zip(logits.chunks(vocab)) {
        let expected = reference::sample(logits, row, &mut Vec::new());
        same(kit, &format!("two logits, {row:?}"), found, &expected);
    }
    Ok(())
}

fn what_is_no_number(kit: &mut Kit) -> Result<(), CudaError> {
    for vocab in [5, 600, 5001] {
        let mut lane = Lane::new(kit, vocab, 7)?;
        let mut logits = kit.random(6 * vocab, 1.0);
        logits[0] = f32::NAN;
        logits[2 * vocab - 1] = -f32::NAN;
        logits[2 * vocab + 2] = f32::INFINITY;
        logits[3 * vocab..5 * vocab].fill(f32::NEG_INFINITY);
        logits[4 * vocab + 3] = -50.0;
        let base = SamplingParams { top_p: 0.5, logprobs: Some(2), ..SamplingParams::default() };
        for params in [SamplingParams::greedy(), base] {
            let params = Arc::new(params);
            let out = |i: u32| OutRow {
                row: i,
                slot: SlotId(i + 1),
                position: 3,
                target: None,
                params: Arc::clone(&params),
                mask: None,
            };
            let out: Vec<OutRow> = (0..6).map(out).collect();
            let found = lane.step(kit, &out, &logits)?;
            let numbers: Vec<bool> = found.iter().map(|f| !f.is_not_a_number()).collect();
            kit.check(
                "rows that are no numbers",
                numbers == [false, false, false, false, true, true],
                &format!("{found:?}"),
            );
            kit.check("the only token left", found[4].token == 3, &format!("{:?}", found[4]));
            let last = kit.download_words(&lane.last_token)?;
            kit.check(
                "the next step can look up what was not chosen",
                last[1..5] == [0; 4],
                &format!("{last:?}"),
            );
        }
    }
    Ok(())
}

/// A row whose mask the host can't give, or never gives, chooses nothing; others do, and so do later steps.
fn masks_that_do_not_come(kit: &mut Kit) -> Result<(), CudaError> {
    for vocab in [5, 5001] {
        let mut lane = Lane::new(kit, vocab, 6)?;
        let logits = kit.random(5 * vocab, 1.0);
        let mut out: Vec<OutRow> = (0..5).map(|i| row(kit, i, vocab)).collect();
        for (i, row) in out.iter_mut().enumerate() {
            (row.target, row.mask) = (None, (i < 3).then(|| mask(kit, vocab)));
            row.params = Arc::new(SamplingParams::greedy());
        }
        for (step, patience_ms) in [(0, 30), (1, 30), (2, PATIENCE_MS)] {
            lane.sequence = step + 1;
            lane.launch(kit, &out, &logits, patience_ms)?;
            lane.open(&out[..1], 0);
            lane.gate.open(lane.sequence, 1, None);
            if step == 2 {
                lane.open(&out[..3], 0);
            }
            let found = lane.results(kit, &out)?;
            for (i, (row, found)) in out.iter().zip(&found).enumerate() {
                let comes = i != 1 && (i != 2 || step == 2);
                let expected = if comes {
                    reference::sample(&logits[i * vocab..][..vocab], row, &mut Vec::new())
                } else {
                    ScoredToken::NOT_A_NUMBER
                };
                same(
                    kit,
                    &format!("{vocab} tokens, step {step}, row {i} of masks that don't come"),
                    found,
                    &expected,
                );
            }
        }
    }
    Ok(())
}

/// Against probabilities in f64.
fn draws_follow_the_probabilities(kit: &mut Kit) -> Result<(), CudaError> {
    let (vocab, draws) = (12, 20_000);
    let logits = kit.random(vocab, 2.0);
    let all: Vec<f32> = (0..draws).flat_map(|_| logits.iter().copied()).collect();
    let peak = logits.iter().copied().fold(f32::MIN, f32::max);
    for (temperature, top_p) in [(1.0, 1.0), (2.0, 0.9)] {
        let params =
            Arc::new(SamplingParams { temperature, top_p, seed: kit.word(), ..SamplingParams::default() });
        let out = |i: u32| OutRow {
            row: i,
            slot: SlotId(i + 1),
            position: i,
            target: None,
            params: Arc::clone(&params),
            mask: None,
        };
        let out: Vec<OutRow> = (0..draws).map(out).collect();
        let mut lane = Lane::new(kit, vocab, draws as usize + 1)?;
        let mut counts = vec![0_u32; vocab];
        lane.step(kit, &out, &all)?.iter().for_each(|f| counts[f.token as usize] += 1);
        let weight = |&l: &f32| (f64::from(l - peak) / f64::from(temperature)).exp();
        let mut order: Vec<(usize, f64)> = logits.iter().map(weight).enumerate().collect();
        order.sort_by(|a, b| b.1.total_cmp(&a.1));
        let (all, mut sum) = (order.iter().map(|o| o.1).sum::<f64>(), 0.0);
        let kept = order
            .iter()
            .position(|o| {
                sum += o.1;
                sum >= f64::from(top_p) * all * (1.0 - 1e-12)
            })
            .expect("all reach it")
            + 1;
        let expected = |i: usize| order[i].1 / sum * f64::from(draws);
        let chi_square: f64 = (0..kept)
            .filter(|&i| expected(i) > 5.0)
            .map(|i| (f64::from(counts[order[i].0]) - expected(i)).powi(2) / expected(i))
            .sum();
        let foreign: u32 = order[kept..].iter().map(|o| counts[o.0]).sum();
        // 11 degrees of freedom at the most: a fair sampler exceeds 50 once in two million runs.
        kit.check(
            "draws follow the probabilities",
            chi_square < 50.0 && foreign == 0,
            &format!("chi-square {chi_square}, {counts:?}"),
        );
    }
    Ok(())
}

/// What no row has written.
const UNTOLD: u32 = 0xdead_beef;
/// Far more than a host needs to bring a mask.
const PATIENCE_MS: u32 = 10_000;
