//! What users see when ranks fail: every request is answered, health says why, nothing hangs.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_base::{FinishReason, RequestId, SamplingParams, Seat};
use atom_engine::{EngineError, Event, Refusal, Request};
use atom_group::Patience;
use atom_ops::{Backend, OpsError, StepInputs};
use atom_rank::{Host, HostError};
use common::hooked::{Hooked, Hooks};
use common::{Pending, Setup, ask, mesh, request, rest, send, tiny};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How a rank misbehaves, from its n-th replay on.
#[derive(Clone, Copy)]
enum Fault {
    Panic,
    Error,
    /// Stays in a replay until the test lets go.
    Hang(&'static Mutex<()>),
}

/// Misbehaves after so many replays.
struct Faulty {
    fault: Fault,
    replays_left: usize,
}

impl Hooks for Faulty {
    fn before_replay(&mut self, _: usize, _: &StepInputs<'_>) -> Result<(), OpsError> {
        if self.replays_left == 0 {
            match self.fault {
                Fault::Panic => panic!("injected"),
                Fault::Error => return Err(OpsError::Device("injected".into())),
                Fault::Hang(lock) => drop(lock.lock()),
            }
        }
        self.replays_left = self.replays_left.saturating_sub(1);
        Ok(())
    }
}

fn start(setup: &Setup, rank: u16, fault: Fault, after: usize) -> Result<Host, HostError> {
    let cpu = setup.cpu();
    let backend = move |seat: &Seat| {
        let inner = cpu(seat)?;
        Ok(match seat.rank.0 == rank {
            true => Box::new(Hooked::new(inner, Faulty { fault, replays_left: after })) as Box<dyn Backend>,
            false => inner,
        })
    };
    Host::start(&setup.config(), &tiny("llama"), backend, Arc::new(|_, _, _| {}))
}

/// Requests that have all been taken before the first of their steps.
fn send_together(host: &Host, count: usize) -> Vec<Pending> {
    host.pause();
    while !host.is_at_rest() {
        std::thread::yield_now();
    }
    let pending = (0..count).map(|_| send(host, long_request())).collect();
    host.resume();
    pending
}

fn long_request() -> atom_engine::Request {
    request(&[1, 2, 3, 4, 5], 400, SamplingParams::greedy())
}

#[test]
fn a_rank_that_fails_answers_everybody_and_turns_health_red() {
    for fault in [Fault::Panic, Fault::Error] {
        for setup in [
            Setup::default(),
            Setup { mesh: mesh(2, 1, false), ..Setup::default() },
            Setup { mesh: mesh(3, 1, true), ..Setup::default() },
        ] {
            let last = setup.mesh.ranks() as u16 - 1;
            let host = start(&setup, last, fault, 20).unwrap();
            let pending = send_together(&host, 24);
            for answer in pending.into_iter().map(|p| p.wait()) {
                let Some(Err(EngineError::Rank(reason))) = &answer.end else { panic!("{answer:?}") };
                assert!(!reason.is_empty());
            }
            let health = host.health();
            let named = health.fault.expect("health is red");
            assert!(named.contains("rank"), "{named}");
            let refused = host.submit(long_request(), Box::new(|_| {}));
            assert!(matches!(refused, Err(Refusal::Closed(_))), "{refused:?}");
            assert!(host.shutdown().is_err());
        }
    }
}

#[test]
fn a_rank_that_hangs_is_given_up_and_nobody_waits_for_it() {
    static LOCK: Mutex<()> = Mutex::new(());
    let patience = Patience { min: Duration::from_millis(200), first: Duration::from_millis(400) };
    for mesh in [mesh(1, 1, false), mesh(2, 1, false), mesh(2, 1, true)] {
        let held = LOCK.lock().unwrap();
        let setup = Setup { mesh, patience, ..Setup::default() };
        let host = start(&setup, mesh.ranks() as u16 - 1, Fault::Hang(&LOCK), 20).unwrap();
        let pending = send_together(&host, 4);
        for answer in pending.into_iter().map(|p| p.wait()) {
            assert!(matches!(answer.end, Some(Err(EngineError::Rank(_)))), "{answer:?}");
        }
        assert!(host.health().fault.is_some());
        assert!(host.shutdown().is_err(), "it returns while the rank still hangs");
        drop(held);
    }
}

#[test]
fn dropping_a_host_does_not_wait_for_answers() {
    let host = Setup { max_model_len: 400_000, pages: 25_002, ..Setup::default() }.start(&tiny("llama"));
    let endless = send(&host, request(&[1, 2, 3], 399_000, SamplingParams::greedy()));
    assert!(matches!(endless.next(), Event::Started { .. }));
    drop(host);
}

#[test]
fn lanes_that_share_no_collective_do_not_share_a_fate() {
    let setup = Setup { mesh: mesh(1, 2, false), ..Setup::default() };
    let host = start(&setup, 1, Fault::Panic, 5).unwrap();
    let lane = |lane| atom_engine::Request { lane: Some(atom_base::LaneId(lane)), ..long_request() };
    let (healthy, lost) = (send(&host, lane(0)), send(&host, lane(1)));
    assert!(matches!(lost.wait().end, Some(Err(EngineError::Rank(_)))));
    assert_eq!(healthy.wait().end, Some(Ok(FinishReason::Length)));
}

#[test]
fn a_layout_that_does_not_divide_is_refused_with_the_numbers() {
    let refused = |name: &str, tp| {
        let setup = Setup { mesh: mesh(tp, 1, false), ..Setup::default() };
        setup.try_start(&tiny(name)).err().expect("refused").to_string()
    };
    let text = refused("llama_tied", 2);
    assert!(
        text.contains("-tp 2") && text.contains("9 query heads") && text.contains("3 key/value heads"),
        "{text}"
    );
    assert!(text.contains("1, 3, 9"), "says what works: {text}");
    assert!(refused("llama", 3).contains("4 query heads"));
}

#[test]
fn an_abort_at_any_moment_frees_everything() {
    let host = Setup { max_num_seqs: 4, pages: 40, ..Setup::default() }.start(&tiny("llama"));
    for moment in 0..40u64 {
        let pending: Vec<_> = (0..8).map(|_| send(&host, long_request())).collect();
        // Let the first one get some tokens out, then go away without waiting.
        for _ in 0..moment {
            if !matches!(pending[0].next(), Event::Token(_) | Event::Started { .. }) {
                break;
            }
        }
        pending.iter().for_each(|p| host.abort(p.id));
        host.abort(RequestId(u64::MAX));
    }
    // A last request passes through the same lane after all aborts: they have been taken in by then.
    assert_eq!(ask(&host, request(&[9, 9, 9], 1, SamplingParams::greedy())).tokens.len(), 1);
    let counters = host.stats()[0].counters;
    assert_eq!((counters.running, counters.waiting, counters.pages_held), (0, 0, 0), "{counters:?}");
}

#[test]
fn an_idle_group_parks_and_wakes_together() {
    let host = Setup { mesh: mesh(3, 1, true), ..Setup::default() }.start(&tiny("llama"));
    let before = host.stats();
    for lane in [2u16, 0, 1] {
        let one = atom_engine::Request {
            lane: Some(atom_base::LaneId(lane)),
            ..request(&[5; 20], 3, SamplingParams::greedy())
        };
        assert_eq!(ask(&host, one).tokens.len(), 3);
    }
    rest(&host);
    let after = host.stats();
    // Every lane replayed every step, also those of which it had no row: 3 requests of 3 steps.
    for (b, a) in before.iter().zip(&after) {
        assert_eq!(a.replays - b.replays, 9);
        assert_eq!(a.counters.rows, 22);
    }
}

#[test]
fn a_delivering_thread_that_dies_answers_everybody_and_ends_the_host() {
    /// Panics with the sink that holds it, outside of what the sink itself does.
    struct Brittle;
    impl Drop for Brittle {
        fn drop(&mut self) {
            panic!("injected");
        }
    }
    let host = Setup::default().start(&tiny("llama"));
    host.pause();
    while !host.is_at_rest() {
        std::thread::yield_now();
    }
    let other = send(&host, request(&[1, 2, 3], 50, SamplingParams::greedy()));
    let brittle = Brittle;
    let sink = move |_: Event| {
        let _whole = &brittle;
    };
    let last = request(&[4, 5], 1, SamplingParams::greedy());
    host.submit(Request { id: RequestId(u64::MAX), ..last }, Box::new(sink)).unwrap();
    host.resume();
    let ended = other.wait();
    let Some(Err(EngineError::Rank(why))) = &ended.end else { panic!("{ended:?}") };
    assert!(why.contains("delivers events"), "{why}");
    assert!(host.health().fault.is_some_and(|fault| fault.contains("delivers events")));
    let late = host.submit(request(&[1], 1, SamplingParams::greedy()), Box::new(|_| {}));
    assert!(matches!(&late, Err(Refusal::Closed(why)) if why.contains("delivers events")), "{late:?}");
    assert!(host.shutdown().unwrap_err().contains("delivers events"));
}

#[test]
fn a_request_whose_sink_panicked_was_computed_to_its_end() {
    static LOCK: Mutex<()> = Mutex::new(());
    let held = LOCK.lock().unwrap();
    let host = start(&Setup::default(), 0, Fault::Hang(&LOCK), 20).unwrap();
    let before = host.stats()[0].replays;
    let sink = |event: Event| assert!(!matches!(event, Event::Token(_)), "injected");
    host.submit(Request { id: RequestId(u64::MAX), ..long_request() }, Box::new(sink)).unwrap();
    while host.open_requests() > 0 {
        std::thread::yield_now();
    }
    // Its lane was told of it before it was forgotten, and is still held.
    drop(held);
    assert_eq!(ask(&host, request(&[9, 9, 9], 1, SamplingParams::greedy())).tokens.len(), 1);
    rest(&host);
    let (replays, counters) = (host.stats()[0].replays - before, host.stats()[0].counters);
    assert!(replays < 100, "{replays} steps for a request of 400 tokens that nobody listens to");
    assert_eq!((counters.running, counters.waiting), (0, 0), "{counters:?}");
}
