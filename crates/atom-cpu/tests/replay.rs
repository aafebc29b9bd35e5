//! Whole recordings through the public interface.

mod support;

use atom_base::TokenId;
use atom_cpu::{Activations, CpuBackend, CpuOptions, Isa, WeightShare};
use atom_ops::{Backend, Comm, Extent, KvDType, LoadWeights, Ops, OpsError, Reserve, StepShape, Weight};
use atom_weights::{DType, Tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use support::{
    Arrays, Decoder, HIDDEN, LAYERS, Meeting, Meetings, Rows, VOCAB, attention, bits, logprobs, options,
    random, reserve, sets, whole,
};

const TOP: StepShape = StepShape { rows: 24, out_rows: 4, lanes: 1 };

fn text(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|i| (seed + i * i * 7 + i) % VOCAB as u32).collect()
}

fn rows(slot: u32, start: usize, tokens: &[TokenId]) -> Rows {
    Rows { slot, start, tokens: tokens.to_vec() }
}

#[test]
fn a_decoder_gives_the_log_probabilities_of_its_formulas() {
    let tokens = text(3, 11);
    for (activations, bound) in [
        (Activations::F32, 2e-5),
        (Activations::Int16, 2e-3),
        (Activations::Bf16, 3e-2),
        (Activations::Int8, 0.1),
    ] {
        let decoder = Decoder::suiting(activations);
        let expected = decoder.logprobs(&tokens);
        let options = CpuOptions { activations, ..options(2) };
        let mut loaded = decoder.load(options, &reserve(TOP)).unwrap();
        let recording = loaded.record(16, 1);
        let result = &loaded.step(recording, &[rows(1, 0, &tokens)])[0];
        let worst =
            logprobs(result).iter().zip(expected).map(|(&a, b)| (f64::from(a) - b).abs()).fold(0.0, f64::max);
        assert!(worst < bound, "{activations:?}: off by {worst}");
        assert!(!logprobs(result).iter().any(|l| l.is_nan()));
    }
}

/// Invariant 10 on one rank, with everything poisoned that a step does not write.
#[test]
fn a_row_has_the_same_bits_in_any_company_bucket_chunk_thread_count_and_instruction_set() {
    let tokens = text(5, 19);
    for activations in [Activations::Int8, Activations::Int16, Activations::Bf16, Activations::F32] {
        let decoder = Decoder::suiting(activations);
        let mut expected = None;
        let mut check = |result: &atom_base::ScoredToken, what: &str| {
            assert_eq!(bits(result), *expected.get_or_insert(bits(result)), "{activations:?}, {what}");
        };
        for isa in sets() {
            for threads in [1, 2, 3] {
                let options = CpuOptions { isa: Some(isa), activations, ..options(threads) };
                let mut loaded = decoder.load(options, &reserve(TOP)).unwrap();
                let (exact, top) = (loaded.record(19, 1), loaded.record(24, 4));
                check(&loaded.step(exact, &[rows(1, 0, &tokens)])[0], "alone, at once");
                check(&loaded.step(top, &[rows(2, 0, &tokens)])[0], "in a larger bucket");
                // In chunks, beside others: token by token at the end.
                loaded.step(top, &[rows(0, 0, &text(1, 9)), rows(3, 0, &tokens[..6])]);
                loaded.step(top, &[rows(3, 6, &tokens[6..18]), rows(0, 9, &text(2, 3)), rows(1, 13, &[4])]);
                let last =
                    loaded.step(top, &[rows(1, 14, &[7]), rows(0, 12, &[1]), rows(3, 18, &tokens[18..])]);
                check(&last[2], "in chunks, in company");
            }
        }
    }
}

#[test]
fn a_step_without_rows_is_a_step() {
    let decoder = Decoder::new();
    let mut loaded = decoder.load(options(2), &reserve(TOP)).unwrap();
    let recording = loaded.record(4, 2);
    assert!(loaded.step(recording, &[]).is_empty());
    let tokens = text(1, 4);
    let expected = bits(&loaded.step(recording, &[rows(1, 0, &tokens)])[0]);
    assert!(loaded.step(recording, &[]).is_empty());
    assert_eq!(bits(&loaded.step(recording, &[rows(1, 3, &tokens[3..])])[0]), expected);
}

/// The MLP of a group of lanes with their own rows: gathered, multiplied, scattered, as one lane
/// would have computed it.
#[test]
fn lanes_with_uneven_rows_meet_in_the_mlp_and_get_their_own_rows_back() {
    let lanes = 3;
    let up = random(DType::Q4_1, 96, HIDDEN, 1);
    let down = random(DType::Q8_0, HIDDEN, 96, 2);
    let table = random(DType::F32, VOCAB, HIDDEN, 3);
    // The sum over lanes of a MLP that is split by its inner width.
    let run = |lane: usize,
               rows_of: [usize; 3],
               granted: [u32; 3],
               meeting: &Meeting<'_>|
     -> Vec<(TokenId, [u32; VOCAB])> {
        let mut backend = CpuBackend::new(options(2)).unwrap();
        let inner = lane * 32..(lane + 1) * 32;
        let mut slice = whole(&up);
        slice.rows = inner.clone();
        let up = backend.load_matrix(&[slice]).unwrap();
        let mut slice = whole(&down);
        slice.cols = inner;
        let down = backend.load_matrix(&[slice]).unwrap();
        let table_weight = backend.load_table(&table).unwrap();
        let head = backend.load_matrix(&[whole(&table)]).unwrap();
        let shape = StepShape { rows: 4, out_rows: 4, lanes };
        backend.reserve(&reserve(shape)).unwrap();
        let mut ops = Ops::new(shape);
        let (x, summed) = (ops.buffer(Extent::Rows, HIDDEN), ops.buffer(Extent::Rows, HIDDEN));
        let (all, inner) = (ops.buffer(Extent::GroupRows, HIDDEN), ops.buffer(Extent::GroupRows, 32));
        let result = ops.buffer(Extent::GroupRows, HIDDEN);
        let (picked, logits) = (ops.buffer(Extent::OutRows, HIDDEN), ops.buffer(Extent::OutRows, VOCAB));
        ops.embed(table_weight, x);
        ops.gather_rows(x, all);
        ops.linear(all, up, None, inner);
        ops.linear(inner, down, None, result);
        ops.scatter_sum(result, summed);
        ops.pick_rows(summed, picked);
        ops.linear(picked, head, None, logits);
        ops.sample(logits);
        let recording = backend.record(ops.finish()).unwrap();
        let mine: Vec<_> =
            (0..rows_of[lane]).map(|i| rows(i as u32, 0, &text(lane as u32 * 5 + i as u32, 1))).collect();
        let mut arrays = Arrays::new(&mine);
        arrays.group_rows = granted.to_vec();
        arrays.lane = lane;
        let mut results = vec![atom_base::ScoredToken::bare(0); mine.len()];
        backend.replay(recording, &arrays.inputs(), meeting, &mut results).unwrap();
        results.iter().map(bits).collect()
    };
    let together = |rows_of: [usize; 3], granted: [u32; 3]| -> Vec<Vec<_>> {
        let room = Meetings::new(lanes);
        std::thread::scope(|scope| {
            let lane = |lane| {
                let (room, run) = (&room, &run);
                scope.spawn(move || run(lane, rows_of, granted, &Meeting::new(lane, room)))
            };
            let threads: Vec<_> = (0..lanes).map(lane).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    };
    let full = together([4; 3], [4; 3]);
    for rows_of in [[1, 0, 3], [0, 0, 1], [0, 4, 0], [2, 2, 2], [0, 0, 0]] {
        // Exactly what was granted, or less of it.
        for granted in [rows_of.map(|n| n as u32), [3, 4, 4]] {
            for (lane, results) in together(rows_of, granted).into_iter().enumerate() {
                assert_eq!(results, full[lane][..rows_of[lane]], "lane {lane} of {rows_of:?}, {granted:?}");
            }
        }
    }
}

/// A lane of two ranks with uneven shares of the vocabulary, and a sum over both.
#[test]
fn ranks_of_a_lane_add_their_parts_and_gather_their_columns() {
    let widths = [13, 7];
    let body = random(DType::Q4_0, HIDDEN, HIDDEN, 1);
    let (table, head) = (random(DType::F32, VOCAB, HIDDEN, 2), random(DType::Q4_1, VOCAB, HIDDEN, 3));
    let run = |rank: Option<usize>, meeting: &Meeting<'_>| {
        let mut backend = CpuBackend::new(options(2)).unwrap();
        let (mut inputs, mut outputs) = (whole(&body), whole(&head));
        if let Some(rank) = rank {
            inputs.cols = [0..32, 32..64][rank].clone();
            outputs.rows = [0..13, 13..20][rank].clone();
        }
        let narrow = Tensor::from_f32(vec![VOCAB, inputs.cols.len()], columns(&table, inputs.cols.clone()));
        let table = backend.load_table(&narrow).unwrap();
        let (width, mine) = (inputs.cols.len(), outputs.rows.len());
        let (body, head) =
            (backend.load_matrix(&[inputs]).unwrap(), backend.load_matrix(&[outputs]).unwrap());
        let shape = StepShape { rows: 4, out_rows: 4, lanes: 1 };
        backend.reserve(&Reserve { samples: rank != Some(1), ..reserve(shape) }).unwrap();
        let mut ops = Ops::new(shape);
        let (x, sum) = (ops.buffer(Extent::Rows, width), ops.buffer(Extent::Rows, HIDDEN));
        let picked = ops.buffer(Extent::OutRows, HIDDEN);
        let (shard, logits) = (ops.buffer(Extent::OutRows, mine), ops.buffer(Extent::OutRows, VOCAB));
        ops.embed(table, x);
        ops.linear(x, body, None, sum);
        if rank.is_some() {
            ops.all_reduce(sum, Comm::Lane);
        }
        ops.pick_rows(sum, picked);
        ops.linear(picked, head, None, shard);
        if rank.is_some() {
            ops.gather_columns(shard, widths.to_vec(), logits);
        } else {
            ops.linear(picked, head, None, logits);
        }
        ops.sample(logits);
        let recording = backend.record(ops.finish()).unwrap();
        let arrays = Arrays::new(&[rows(0, 0, &text(1, 1)), rows(1, 0, &text(2, 2))]);
        let mut results = vec![atom_base::ScoredToken::bare(77); 2];
        backend.replay(recording, &arrays.inputs(), meeting, &mut results).unwrap();
        results
    };
    let whole_lane = run(None, &Meeting::alone());
    let room = Meetings::new(2);
    let (first, second) = std::thread::scope(|scope| {
        let second = scope.spawn(|| run(Some(1), &Meeting::new(1, &room)));
        (run(Some(0), &Meeting::new(0, &room)), second.join().unwrap())
    });
    // Only the leader samples.
    assert!(second.iter().all(|result| result.token == 77));
    for (result, whole) in first.iter().zip(&whole_lane) {
        assert_eq!(result.token, whole.token);
        for (a, b) in logprobs(result).iter().zip(logprobs(whole)) {
            assert!((a - b).abs() < 1e-5, "{a} in two ranks, {b} in one");
        }
    }
}

fn columns(table: &Tensor, cols: std::ops::Range<usize>) -> Vec<f32> {
    let row = |row| {
        table.row(row)[cols.start * 4..cols.end * 4].as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b))
    };
    (0..table.rows()).flat_map(row).collect()
}

#[test]
fn after_a_failed_collective_the_step_ends_with_its_error_and_the_next_one_runs() {
    let mut backend = CpuBackend::new(options(3)).unwrap();
    let table = random(DType::F32, VOCAB, HIDDEN, 3);
    let (table_weight, head) =
        (backend.load_table(&table).unwrap(), backend.load_matrix(&[whole(&table)]).unwrap());
    let shape = StepShape { rows: 4, out_rows: 4, lanes: 1 };
    backend.reserve(&reserve(shape)).unwrap();
    let mut ops = Ops::new(shape);
    let (x, picked) = (ops.buffer(Extent::Rows, HIDDEN), ops.buffer(Extent::OutRows, HIDDEN));
    let logits = ops.buffer(Extent::OutRows, VOCAB);
    ops.embed(table_weight, x);
    ops.all_reduce(x, Comm::Lane);
    ops.all_reduce(x, Comm::Lane);
    ops.pick_rows(x, picked);
    ops.linear(picked, head, None, logits);
    ops.sample(logits);
    let recording = backend.record(ops.finish()).unwrap();
    let arrays = Arrays::new(&[rows(0, 0, &[1, 2, 3])]);
    let mut results = [atom_base::ScoredToken::bare(77)];
    for fails_at in [Some(0), Some(1), None] {
        let meeting = Meeting { fails_at, ..Meeting::alone() };
        let outcome = backend.replay(recording, &arrays.inputs(), &meeting, &mut results);
        let calls = meeting.calls.lock().unwrap().len();
        match fails_at {
            Some(call) => {
                assert!(
                    matches!(outcome, Err(OpsError::Collective(text)) if text.contains(&format!("call {call}")))
                );
                assert_eq!((calls, results[0].token), (call + 1, 77), "nothing runs after the failure");
            }
            None => {
                outcome.unwrap();
                assert_eq!(calls, 2);
                assert_ne!(results[0].token, 77);
            }
        }
    }
}

/// A peer's panic must end the step on every worker and come out on the rank's thread.
#[test]
fn a_panic_within_a_step_reaches_the_caller_and_leaves_no_worker_behind() {
    let mut backend = CpuBackend::new(options(3)).unwrap();
    let table = random(DType::F32, VOCAB, HIDDEN, 3);
    let table = backend.load_table(&table).unwrap();
    backend.reserve(&reserve(TOP)).unwrap();
    let mut ops = Ops::new(TOP);
    let [x] = support::buffers(&mut ops, Extent::Rows, HIDDEN);
    ops.embed(table, x);
    ops.all_reduce(x, Comm::Lane);
    ops.embed(table, x);
    let recording = backend.record(ops.finish()).unwrap();
    let mut arrays = Arrays::new(&[rows(0, 0, &[1, 2, 3])]);
    arrays.out.clear();
    for panics in [true, false, true] {
        let meeting = Meeting { panics, ..Meeting::alone() };
        let step = AssertUnwindSafe(|| backend.replay(recording, &arrays.inputs(), &meeting, &mut []));
        assert_eq!(catch_unwind(step).is_err(), panics);
    }
}

/// What is recorded, and what the error says.
type Refused<'a> = (&'a dyn Fn(&mut Ops), &'a str);

#[test]
fn recordings_that_do_not_fit_are_refused_with_the_numbers() {
    let decoder = Decoder::new();
    let mut loaded = decoder.load(options(1), &reserve(TOP)).unwrap();
    let backend = &mut loaded.backend;
    let mut refused = |record: &dyn Fn(&mut Ops)| {
        let mut ops = Ops::new(TOP);
        record(&mut ops);
        backend.record(ops.finish()).unwrap_err().to_string()
    };
    let spec = attention();
    let (table, norm, qkv) = (Weight(LAYERS as u32 * 7), Weight(0), Weight(1));
    let checks: [Refused<'_>; 9] = [
        (
            &|ops| {
                let [x] = support::buffers(ops, Extent::Rows, HIDDEN + 1);
                ops.embed(table, x)
            },
            "64 columns of a table, not 65",
        ),
        (
            &|ops| {
                let [x] = support::buffers(ops, Extent::Rows, HIDDEN);
                ops.embed(qkv, x)
            },
            "is no table",
        ),
        (
            &|ops| {
                let [x, y] = support::buffers(ops, Extent::Rows, 32);
                ops.norm(x, norm, 0.0, y)
            },
            "64 elements of a vector, not 32",
        ),
        (
            &|ops| {
                let [x] = support::buffers(ops, Extent::Rows, HIDDEN);
                ops.norm(x, norm, 0.0, x)
            },
            "both read and written",
        ),
        (
            &|ops| {
                let [x, y] = support::buffers(ops, Extent::Rows, HIDDEN);
                ops.linear(x, qkv, None, y)
            },
            "128 outputs, not 64",
        ),
        (
            &|ops| {
                let [x, y] = support::buffers(ops, Extent::Rows, 128);
                ops.linear(x, qkv, None, y)
            },
            "64 inputs, not 128",
        ),
        (
            &|ops| {
                let [x, y] = support::buffers(ops, Extent::Rows, HIDDEN);
                ops.linear(x, Weight(99), None, y)
            },
            "never loaded",
        ),
        (
            &|ops| {
                let [x] = support::buffers(ops, Extent::Rows, 128);
                ops.rotate_and_cache(x, LAYERS, None, &spec)
            },
            "layer 2 of a cache of 2",
        ),
        (
            &|ops| {
                let [x] = support::buffers(ops, Extent::OutRows, 32);
                ops.sample(x)
            },
            "32 logits of a row, not 20",
        ),
    ];
    for (record, expected) in checks {
        let error = refused(record);
        assert!(error.contains(expected), "{error:?} should say {expected:?}");
    }
    let large = Ops::new(StepShape { rows: 25, ..TOP }).finish();
    assert!(backend.record(large).unwrap_err().to_string().contains("rows: 25"));
}

#[test]
fn calls_in_the_wrong_order_are_errors() {
    let mut backend = CpuBackend::new(options(1)).unwrap();
    assert!(backend.record(Ops::new(TOP).finish()).unwrap_err().to_string().contains("before reserve"));
    backend.reserve(&reserve(TOP)).unwrap();
    assert!(backend.reserve(&reserve(TOP)).unwrap_err().to_string().contains("second time"));
    let late = backend.load_matrix(&[whole(&random(DType::F32, 4, 4, 1))]);
    assert!(late.unwrap_err().to_string().contains("after reserve"));
}

#[test]
fn matrices_that_do_not_go_together_are_refused_with_the_numbers() {
    let mut backend = CpuBackend::new(options(1)).unwrap();
    let mut refused = |parts: &[_]| backend.load_matrix(parts).unwrap_err().to_string();
    let (narrow, wide) = (random(DType::F32, 4, 32, 1), random(DType::Q8_0, 4, 64, 1));
    assert!(refused(&[]).contains("no slices"));
    assert!(refused(&[whole(&narrow), whole(&wide)]).contains("32 and 64 inputs"));
    let mut cut = whole(&wide);
    cut.cols = 0..40;
    assert!(refused(&[cut]).contains("0..40 cut a block of 32"));
}

#[test]
fn what_is_quantised_and_what_is_stored_may_be_any_of_the_kinds() {
    let decoder = Decoder::new();
    let tokens = text(9, 9);
    let expected = decoder.logprobs(&tokens);
    for (kv_dtype, bound) in
        [(KvDType::F32, 2e-5), (KvDType::F16, 0.01), (KvDType::BF16, 0.05), (KvDType::E4M3, 1.0)]
    {
        let options = CpuOptions { activations: Activations::F32, ..options(2) };
        let mut loaded = decoder.load(options, &Reserve { kv_dtype, ..reserve(TOP) }).unwrap();
        let recording = loaded.record(16, 1);
        let result = &loaded.step(recording, &[rows(1, 0, &tokens)])[0];
        let worst =
            logprobs(result).iter().zip(expected).map(|(&a, b)| (f64::from(a) - b).abs()).fold(0.0, f64::max);
        assert!(worst < bound, "{kv_dtype:?}: off by {worst}");
    }
}

#[test]
fn an_instruction_set_that_the_processor_lacks_is_refused() {
    for isa in Isa::ALL {
        let backend = CpuBackend::new(CpuOptions { isa: Some(isa), ..options(1) });
        assert_eq!(backend.is_ok(), isa.is_supported());
        if let Ok(backend) = backend {
            assert_eq!(backend.isa(), isa);
        }
    }
}

/// Two ranks of one process, each with all of the weights.
#[test]
fn ranks_share_packed_weights_and_each_can_go_first() {
    let decoder = Decoder::new();
    let share = Arc::new(WeightShare::new());
    let load = || {
        let options = CpuOptions { share: Arc::clone(&share), ..options(1) };
        decoder.load(options, &reserve(TOP)).unwrap()
    };
    let (mut first, mut second) = (load(), load());
    let (one, two) = (first.record(16, 1), second.record(16, 1));
    let tokens = text(4, 8);
    let expected = bits(&first.step(one, &[rows(1, 0, &tokens)])[0]);
    drop(first);
    assert_eq!(bits(&second.step(two, &[rows(1, 0, &tokens)])[0]), expected);
}
