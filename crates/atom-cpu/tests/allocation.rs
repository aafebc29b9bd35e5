//! Invariant 12: a step allocates nothing. Alone in its process, since it counts for all threads.

mod support;

use atom_base::SamplingParams;
use atom_cpu::Activations;
use atom_ops::{Backend, StepShape};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use support::{Arrays, Decoder, Meeting, Rows};

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
    let decoder = Decoder::new();
    for activations in [Activations::Int8, Activations::F32] {
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
