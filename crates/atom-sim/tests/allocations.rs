//! Invariant 12 for what runs on every step: deciding and scheduling allocate nothing.

#![allow(clippy::unwrap_used, reason = "the exemption for tests stops at their helper functions")]

mod common;

use atom_base::{RequestId, SamplingParams, ScoredToken, TokenId};
use atom_engine::{Event, Events, Plan, Scheduler, SchedulerConfig};
use atom_group::{Alignment, Facts, GroupState, GroupStep, Lattice, LatticeArgs, Policy, settle};
use common::{config, request};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

/// More steps than any of these tests needs.
const STEPS_MAX: usize = 10_000;

/// Counts what the calling thread allocates.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is passed on to the system's allocator unchanged; counting is a thread-local
// without destructor, so it neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps `GlobalAlloc::alloc`'s contract, which is `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` or `realloc` above, and so from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as for `dealloc`, and the caller keeps `realloc`'s contract.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

fn counted<T>(what: impl FnOnce() -> T) -> (T, u64) {
    let before = ALLOCATIONS.get();
    let value = what();
    (value, ALLOCATIONS.get() - before)
}

/// Events in a vector with room.
struct Sink(Vec<(RequestId, Event)>);

impl Events for Sink {
    fn emit(&mut self, request: RequestId, event: Event) {
        assert!(self.0.len() < self.0.capacity(), "the sink must not be what allocates");
        self.0.push((request, event));
    }
}

/// One lane that decides and schedules, with a source of tokens in place of a device.
struct Steps {
    scheduler: Scheduler,
    state: GroupState,
    plan: Plan,
    results: Vec<ScoredToken>,
    events: Sink,
    next_token: TokenId,
}

impl Steps {
    fn new(config: SchedulerConfig) -> Self {
        let args = LatticeArgs {
            rows_max: config.rows_max as u32,
            max_num_seqs: config.max_num_seqs as u32,
            ..LatticeArgs::default()
        };
        let lattice = Arc::new(Lattice::new(&args).unwrap());
        let alignment = Some(Alignment::default());
        let policy = Policy { alignment, step_ms_max: Some(10), ..Policy::default() };
        let pages = config.max_model_len.div_ceil(config.page_size);
        Self {
            plan: Plan::with_capacity(config.rows_max, config.max_num_seqs, pages),
            results: Vec::with_capacity(config.max_num_seqs),
            events: Sink(Vec::with_capacity(4096)),
            state: GroupState::new(lattice, 1, true).with_policy(policy),
            scheduler: Scheduler::new(config),
            next_token: 0,
        }
    }

    /// A step as a rank takes it. Returns its allocations and whether rows were computed.
    fn step(&mut self) -> (u64, usize) {
        self.events.0.clear();
        let ((facts, step), deciding) = counted(|| {
            let want = self.scheduler.want(0).facts();
            let facts =
                Facts { step: self.state.next_step(), state_hash: self.state.hash(), replay_us: 9, ..want };
            let (state, step) = settle(&self.state, &[facts]).unwrap();
            self.state = state;
            (facts, step)
        });
        let GroupStep::Step { grants, .. } = step else { return (deciding, 0) };
        let ((), committing) = counted(|| self.scheduler.commit(grants.of(&facts), &mut self.plan));
        self.results.clear();
        for _ in &self.plan.out {
            // Never the same text twice, so that every page is new to the prefix cache.
            self.next_token = (self.next_token + 1) % 1_000_000;
            self.results.push(ScoredToken::bare(self.next_token));
        }
        let ((), applying) = counted(|| self.scheduler.apply(&self.plan, &self.results, &mut self.events));
        (deciding + committing + applying, self.plan.rows())
    }

    /// Steps until all are decoding.
    fn warm_up(&mut self, decoding: u32) {
        for _ in 0..STEPS_MAX {
            if self.scheduler.want(0).decode_rows == decoding {
                return;
            }
            self.step();
        }
        panic!("{decoding} requests never decode together: {:?}", self.scheduler.counters());
    }

    fn finish(&mut self) {
        for _ in 0..STEPS_MAX {
            if self.scheduler.is_idle() {
                return;
            }
            self.step();
        }
        panic!("never idle: {:?}", self.scheduler.counters());
    }
}

#[test]
fn the_counter_counts() {
    assert_eq!(counted(|| vec![1u8; 100]).1, 1);
    assert_eq!(counted(|| 1 + 1).1, 0);
}

#[test]
fn a_thousand_decode_steps_allocate_nothing() {
    let samplings = common::samplings();
    let mut steps = Steps::new(config(8 * 300 + 1, 4, 8, 64));
    for id in 0..8 {
        let sampling = samplings[id as usize % samplings.len()].clone();
        steps.scheduler.submit(request(id, 30, 1100, sampling), 0, &mut steps.events);
    }
    steps.warm_up(8);
    for step in 0..1000 {
        assert_eq!(steps.step(), (0, 8), "allocations and rows of step {step}");
    }
}

/// A cache that is full of old pages: each new page is one that somebody left behind, and the table of
/// contents forgets and learns all the time. Sizes on both sides of the table's own.
#[test]
fn decode_steps_over_a_full_prefix_cache_allocate_nothing() {
    for pages in [448, 449, 500, 897, 1000] {
        let mut steps = Steps::new(config(pages, 1, 4, 64));
        let most = pages - 1;
        // Fills the cache with pages that nobody holds.
        steps.scheduler.submit(request(1, most - 1, 1, SamplingParams::greedy()), 0, &mut steps.events);
        steps.finish();
        for round in 0..6 {
            let id = 10 + round;
            let generated = (most - 2) as u32;
            steps.scheduler.submit(request(id, 2, generated, SamplingParams::greedy()), 0, &mut steps.events);
            steps.warm_up(1);
            for step in 0..generated - 1 {
                assert_eq!(steps.step(), (0, 1), "{pages} pages, round {round}, step {step}");
            }
            assert!(steps.scheduler.is_idle());
            assert_eq!(steps.scheduler.counters().pages_held, 0);
        }
    }
}

/// Giving way is part of a step; only being admitted again may allocate.
#[test]
fn giving_way_allocates_nothing() {
    let mut steps = Steps::new(config(65, 1, 8, 64));
    // One after the other, so that the queue has never been long.
    for id in 0..8 {
        steps.scheduler.submit(request(id, 1, 50, SamplingParams::greedy()), 0, &mut steps.events);
        steps.warm_up(id as u32 + 1);
    }
    let mut gave_way = 0;
    for step in 0.. {
        assert!(step < STEPS_MAX, "{:?}", steps.scheduler.counters());
        if steps.scheduler.is_idle() {
            break;
        }
        let before = steps.scheduler.counters();
        let (allocations, _) = steps.step();
        let after = steps.scheduler.counters();
        if after.admitted == before.admitted {
            assert_eq!(allocations, 0, "{after:?}");
            gave_way += after.preempted - before.preempted;
        }
    }
    assert!(gave_way >= 5, "{gave_way}");
}

/// A group of any size is settled without memory: grants are a rule and no list.
#[test]
fn settling_for_1024_lanes_allocates_nothing() {
    let args = LatticeArgs { rows_max: 512, max_num_seqs: 64, ..LatticeArgs::default() };
    let lattice = Arc::new(Lattice::new(&args).unwrap());
    let policy = Policy { alignment: Some(Alignment::default()), step_ms_max: Some(20), ..Policy::default() };
    let mut state = GroupState::new(lattice, 1024, true).with_policy(policy);
    let mut facts = vec![Facts::default(); 1024];
    let mut steps = 0;
    while steps < 100 {
        for (lane, f) in facts.iter_mut().enumerate() {
            let (decode_rows, prefill_rows) = (lane as u32 % 30, if lane % 3 == 0 { lane as u32 } else { 0 });
            let (step, state_hash) = (state.next_step(), state.hash());
            *f = Facts { step, state_hash, decode_rows, prefill_rows, replay_us: 900, ..Facts::default() };
        }
        let (settled, allocations) = counted(|| settle(&state, &facts));
        let (next, step) = settled.unwrap();
        assert_eq!(allocations, 0, "{step:?}");
        state = next;
        steps += usize::from(matches!(step, GroupStep::Step { .. }));
    }
}
