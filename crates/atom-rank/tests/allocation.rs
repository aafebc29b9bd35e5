//! Invariant 12: a step allocates nothing, on any thread: scheduler, exchange, replay, sampling, events.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_base::SamplingParams;
use atom_engine::Event;
use atom_group::{TraceReader, TraceRecord};
use atom_model::{ExchangeChoice, ExpertLayout};
use common::{Setup, expert_parallel, mesh, request, tiny};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

/// Counts allocations of all threads while it is told to.
struct Counting;

static ON: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if ON.load(Ordering::Relaxed) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_thousand_steady_steps_allocate_nothing() {
    // One test function: the counter is the process's.
    let trace = std::env::temp_dir().join(format!("atom-allocation-{}.trace", std::process::id()));
    let traced = Some(trace.clone());
    let sliced = ExpertLayout::default();
    let gathered = ExpertLayout { exchange: ExchangeChoice::Gather, ..expert_parallel() };
    for (model, mesh, experts, step_trace) in [
        ("llama", mesh(1, 1, false), sliced, None),
        ("llama", mesh(2, 1, false), sliced, None),
        ("llama", mesh(2, 1, true), sliced, None),
        ("llama", mesh(1, 1, false), sliced, traced.clone()),
        ("llama", mesh(2, 1, true), sliced, traced),
        // Slices of experts, whole ones with either exchange, and norms over all heads.
        ("qwen3_moe", mesh(2, 1, true), sliced, None),
        ("qwen3_moe", mesh(2, 1, true), gathered, None),
        ("minimax_m2", mesh(2, 1, true), expert_parallel(), None),
    ] {
        let is_traced = step_trace.is_some();
        let setup = Setup {
            mesh,
            experts,
            max_model_len: 1200,
            pages: 1200,
            threads: 2,
            poison: false,
            step_trace,
            ..Setup::default()
        };
        let host = setup.start(&tiny(model));
        let (halfway, reached) = mpsc::sync_channel(1);
        let (end, ended) = mpsc::sync_channel(1);
        let mut tokens = 0;
        let sampling = SamplingParams {
            top_p: 0.9,
            frequency_penalty: 0.1,
            logprobs: Some(2),
            ..SamplingParams::default()
        };
        let sink = move |event| match event {
            Event::Token(_) => {
                tokens += 1;
                // The first steps may still fill lazily made thread-locals.
                if tokens == 50 {
                    ALLOCATIONS.store(0, Ordering::SeqCst);
                    ON.store(true, Ordering::SeqCst);
                } else if tokens == 1050 {
                    ON.store(false, Ordering::SeqCst);
                    halfway.try_send(ALLOCATIONS.load(Ordering::SeqCst)).expect("room for one");
                }
            }
            Event::Finished(_) | Event::Failed(_) => end.try_send(()).expect("room for one"),
            Event::Started { .. } | Event::PromptScored { .. } => {}
        };
        host.submit(request(&[1, 2, 3], 1100, sampling), Box::new(sink)).unwrap();
        let allocations =
            reached.recv_timeout(Duration::from_secs(60)).expect("1,050 tokens within a minute");
        ended.recv_timeout(Duration::from_secs(60)).expect("an end within a minute");
        assert_eq!(allocations, 0, "{model} {:?} {experts:?}, traced: {is_traced}", setup.mesh);
        host.shutdown().unwrap();
        if is_traced {
            // A trace that was not written allocates nothing either.
            let bytes = std::fs::read(&trace).unwrap();
            std::fs::remove_file(&trace).unwrap();
            let mut reader = TraceReader::new(&bytes).unwrap();
            let mut steps = 0;
            while let Some(record) = reader.read().unwrap() {
                assert!(matches!(record, TraceRecord::Step(_)), "{record:?}");
                steps += 1;
            }
            assert!(steps > 1100, "{steps} steps");
        }
    }
}
