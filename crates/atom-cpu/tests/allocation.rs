//! Invariant 12: a step allocates nothing. Alone in its process, since it counts for all threads.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use atom_base::SamplingParams;
use atom_cpu::{Activations, CpuBackend};
use atom_ops::{
    Backend, Collectives, Comm, ExpertRows, ExpertSpec, Extent, LoadWeights, Ops, OpsError, RouteSpec,
    StepShape,
};
use atom_weights::DType;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use support::{Arrays, Decoder, HIDDEN, Meeting, Rows, VOCAB, random, whole};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_step_allocates_nothing_on_any_thread() {
    a_decoder();
    for activations in [Activations::Int16, Activations::Bf16, Activations::F32] {
        experts_behind_an_exchange(activations);
    }
}

fn a_decoder() {
    for activations in [Activations::Int8, Activations::Bf16, Activations::F32] {
        let decoder = Decoder::suiting(activations);
        let top = StepShape { rows: 24, out_rows: 4, lanes: 1 };
        let options = atom_cpu::CpuOptions { activations, ..support::options(3) };
        let mut loaded = decoder.load(options, &support::reserve(top)).unwrap();
        let recordings = [loaded.record(8, 2), loaded.record(24, 4)];
        let sampling = SamplingParams {
            temperature: 0.8,
            top_p: 0.9,
            top_k: 10,
            min_p: 0.01,
            presence_penalty: 0.5,
            logprobs: Some(5),
            ..SamplingParams::default()
        };
        for params in [SamplingParams::greedy(), sampling] {
            let sequence = |slot: u32, start| Rows { slot, start, tokens: vec![1, 2, 3, 4] };
            let mut arrays = Arrays::new(&[sequence(1, 0), sequence(2, 0)]);
            let params = Arc::new(params);
            arrays.out.iter_mut().for_each(|out| out.params = Arc::clone(&params));
            let (inputs, meeting) = (arrays.inputs(), Meeting::alone());
            let mut results = [atom_base::ScoredToken::bare(0); 2];
            for recording in recordings {
                let before = ALLOCATIONS.load(Ordering::Relaxed);
                loaded.backend.replay(recording, &inputs, &meeting, &mut results).unwrap();
                assert_ne!(before, 0, "loading was counted");
                assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before, "{activations:?}, {params:?}");
            }
        }
    }
}

/// Router, dispatch, experts and combine of a group of one lane.
fn experts_behind_an_exchange(activations: Activations) {
    const EXPERTS: usize = 6;
    const TOP_K: usize = 2;
    const WIDTH: usize = 32;
    let mut backend = CpuBackend::new(atom_cpu::CpuOptions { activations, ..support::options(3) }).unwrap();
    let table = backend.load_table(&random(DType::F32, VOCAB, HIDDEN, 1)).unwrap();
    let router = backend.load_matrix(&[whole(&random(DType::F32, EXPERTS, HIDDEN, 2))]).unwrap();
    let mut experts = |outputs, inputs| {
        let dtype = if activations.suits(DType::Q4_0) { DType::Q4_0 } else { DType::BF16 };
        let expert = |seed| vec![whole(&random(dtype, outputs, inputs, seed))];
        backend.load_experts(&(3..3 + EXPERTS as u64).map(expert).collect::<Vec<_>>()).unwrap()
    };
    let weights = (experts(2 * WIDTH, HIDDEN), experts(HIDDEN, WIDTH));
    let shape = StepShape { rows: 8, out_rows: 2, lanes: 1 };
    backend.reserve(&support::reserve(shape)).unwrap();
    let mut ops = Ops::new(shape);
    let [x, out] = support::buffers(&mut ops, Extent::Rows, HIDDEN);
    let (logits, routes) = (ops.buffer(Extent::Rows, EXPERTS), ops.buffer(Extent::Rows, 2 * TOP_K));
    let mut group = |width| ops.buffer(Extent::GroupRows, width);
    let (all_routes, all_x, y) = (group(2 * TOP_K), group(HIDDEN), group(TOP_K * HIDDEN));
    let scratch = (group(TOP_K * 2 * WIDTH), group(TOP_K * WIDTH));
    let route = RouteSpec {
        experts: EXPERTS,
        top_k: TOP_K,
        is_sigmoid: false,
        groups: 3,
        groups_kept: 2,
        normalise: true,
        scale: 1.0,
    };
    let (owners, spec) =
        (Arc::from([0, EXPERTS]), ExpertSpec { top_k: TOP_K, first: 0, held: EXPERTS, width: WIDTH });
    ops.embed(table, x);
    ops.linear(x, router, None, logits);
    ops.route(logits, None, &Arc::new(route), routes);
    ops.gather_rows(routes, all_routes);
    ops.dispatch_rows(x, all_routes, &owners, all_x);
    ops.expert_outputs((all_x, all_routes), weights, &Arc::new(spec), scratch, y);
    ops.combine_rows(y, all_routes, &owners, out);
    ops.add(x, out);
    let recording = backend.record(ops.finish()).unwrap();
    let arrays = Arrays::new(&[Rows { slot: 1, start: 0, tokens: vec![1, 2, 3, 4, 5] }]);
    let (inputs, mut results) = (arrays.inputs(), [atom_base::ScoredToken::bare(0)]);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    backend.replay(recording, &inputs, &Alone, &mut results).unwrap();
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before, "experts, {activations:?}");
    assert_eq!(backend.expert_rows(), ExpertRows { chosen: 10, computed: 10, distinct: 0 });
}

/// A lane without peers that allocates nothing either.
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
        _: Comm,
        _: usize,
        mine: &[f32],
        _: &[usize],
        _: &[usize],
        out: &mut [f32],
    ) -> Result<(), OpsError> {
        out.copy_from_slice(mine);
        Ok(())
    }
}
