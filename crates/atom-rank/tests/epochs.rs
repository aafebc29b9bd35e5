//! A group that loses a rank forms again with a new one: the others' requests go on as if nothing had
//! happened, those of a lost lane get an error that says what did.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_base::{FinishReason, LaneId, SamplingParams, Seat, TokenId};
use atom_engine::{EngineError, Event, Refusal, Request};
use atom_group::Patience;
use atom_ops::{Backend, OpsError, Recording, StepInputs};
use atom_rank::Host;
use common::hooked::{Hooked, Hooks};
use common::{Pending, Setup, ask, expert_parallel, mesh, request, rest, send, tiny};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How a rank misbehaves, and when.
#[derive(Clone)]
enum Fault {
    Panic,
    Error,
    /// Says that it is there and waits for the word to go on.
    Wait(Arc<Gate>),
    /// In the recording after the first ones of the start.
    Recording,
    /// The rank in its place can't load.
    Replacement,
}

/// Where a rank waits: it says that it is there, and hears when to go on.
struct Gate {
    arrived: Mutex<Sender<()>>,
    word: Mutex<Receiver<()>>,
}

struct Faulty {
    fault: Fault,
    replays_left: usize,
    is_done: bool,
}

impl Hooks for Faulty {
    fn before_record(&mut self, recording: &Recording) -> Result<(), OpsError> {
        // The start records the largest bucket and small ones; 24 comes later.
        match self.fault {
            Fault::Recording if recording.shape().rows == 24 => Err(OpsError::Device("injected".into())),
            _ => Ok(()),
        }
    }

    fn before_replay(&mut self, _: usize, _: &StepInputs<'_>) -> Result<(), OpsError> {
        if self.replays_left > 0 {
            self.replays_left -= 1;
            return Ok(());
        }
        if std::mem::replace(&mut self.is_done, true) {
            return Ok(());
        }
        match &self.fault {
            Fault::Panic => panic!("injected"),
            Fault::Error | Fault::Replacement => return Err(OpsError::Device("injected".into())),
            Fault::Recording => {}
            Fault::Wait(gate) => {
                gate.arrived.lock().unwrap().send(()).unwrap();
                // An error means that the test is over.
                let _ = gate.word.lock().unwrap().recv();
            }
        }
        Ok(())
    }
}

/// Every rank at `ranks` is faulty the first `times` that it is made.
fn start(setup: &Setup, ranks: &'static [u16], times: usize, fault: Fault) -> Host {
    let (cpu, made) = (setup.cpu(), Arc::new(AtomicUsize::new(0)));
    let backend = move |seat: &Seat| {
        let inner = cpu(seat)?;
        if !ranks.contains(&seat.rank.0) {
            return Ok(inner);
        }
        let before = made.fetch_add(1, Ordering::SeqCst);
        if before >= times * ranks.len() {
            return match fault {
                Fault::Replacement => Err(OpsError::Memory("injected: no room for a new rank".into())),
                _ => Ok(inner),
            };
        }
        let hooks = Faulty { fault: fault.clone(), replays_left: 20, is_done: false };
        Ok(Box::new(Hooked::new(inner, hooks)) as Box<dyn Backend>)
    };
    setup.start_with(&tiny("qwen3_moe"), backend)
}

fn prompt(seed: u32) -> Vec<TokenId> {
    (0..40).map(|i| atom_base::rng::philox([i, 0, 0, 0], [seed, 0])[0] % 500).collect()
}

fn sampled(seed: u32) -> Request {
    let sampling = SamplingParams {
        temperature: 0.9,
        repetition_penalty: 1.1,
        seed: seed.into(),
        ..SamplingParams::default()
    };
    request(&prompt(seed), 60, sampling)
}

fn on(lane: u16, request: Request) -> Request {
    Request { lane: Some(LaneId(lane)), ..request }
}

/// Two requests for each of `lanes`, numbered from 10 times the lane.
fn send_all(host: &Host, lanes: u16) -> Vec<(u16, u32, Pending)> {
    let one = |lane: u16, i: u32| {
        let seed = u32::from(lane) * 10 + i;
        (lane, seed, send(host, on(lane, sampled(seed))))
    };
    (0..lanes).flat_map(|lane| [one(lane, 0), one(lane, 1)]).collect()
}

/// What a group that lost nobody answers.
fn undisturbed(setup: &Setup, lane: u16, seed: u32) -> Vec<TokenId> {
    ask(&setup.start(&tiny("qwen3_moe")), on(lane, sampled(seed))).ids()
}

fn dep(lanes: u16) -> Setup {
    Setup { mesh: mesh(lanes, 1, true), experts: expert_parallel(), rank_restarts_max: 3, ..Setup::default() }
}

/// Checks every answer: an error that names the rank in `lost` lanes, the right text elsewhere.
fn check(setup: &Setup, host: &Host, pending: Vec<(u16, u32, Pending)>, lost: &[u16]) {
    for (lane, seed, pending) in pending {
        let answer = pending.wait();
        match &answer.end {
            Some(Err(EngineError::Rank(why))) if lost.contains(&lane) => {
                assert!(
                    why.contains(&format!("rank {lane}")) || why.contains(&format!("lane {lane}")),
                    "{why}"
                );
                assert!(why.contains("step"), "{why}");
            }
            Some(Ok(FinishReason::Length)) if !lost.contains(&lane) => {
                assert_eq!(answer.ids(), undisturbed(setup, lane, seed), "lane {lane} seed {seed}");
            }
            other => panic!("lane {lane}: {other:?}"),
        }
    }
    // The lost lane has a new rank by now, or will have: its mail waits for it.
    for lane in 0..setup.mesh.lanes() as u16 {
        let again = ask(host, on(lane, sampled(7)));
        assert_eq!(again.ids(), undisturbed(setup, lane, 7), "lane {lane} after the loss");
    }
    rest(host);
    let health = host.health();
    assert!(health.ready && health.fault.is_none() && health.forming.is_none(), "{health:?}");
    for stats in host.stats() {
        assert_eq!(
            stats.counters.running + stats.counters.waiting + stats.counters.pages_held,
            0,
            "{stats:?}"
        );
        // Losses may be noticed one after the other, the second when the group has formed again.
        assert!((2..2 + lost.len().max(1) as u64).contains(&stats.epoch), "{stats:?}");
    }
}

#[test]
fn a_lost_lane_is_replaced_and_the_others_go_on() {
    for fault in [Fault::Panic, Fault::Error] {
        let setup = dep(4);
        let host = start(&setup, &[2], 1, fault);
        let pending = send_all(&host, 4);
        check(&setup, &host, pending, &[2]);
        assert_eq!(host.shutdown(), Ok(()));
    }
}

#[test]
fn two_ranks_lost_in_one_step_are_both_replaced() {
    let setup = dep(3);
    let host = start(&setup, &[0, 2], 1, Fault::Panic);
    let pending = send_all(&host, 3);
    check(&setup, &host, pending, &[0, 2]);
    assert_eq!(host.shutdown(), Ok(()));
}

/// Not even the lane's own requests are lost: its first rank has them all.
#[test]
fn a_lost_follower_is_replaced_and_nothing_is_lost() {
    for fault in [Fault::Panic, Fault::Error] {
        let setup = Setup { mesh: mesh(2, 1, false), ..dep(1) };
        let host = start(&setup, &[1], 1, fault);
        let pending = send_all(&host, 1);
        check(&setup, &host, pending, &[]);
        assert_eq!(host.shutdown(), Ok(()));
    }
}

#[test]
fn a_lane_that_shares_nothing_is_replaced_alone() {
    let setup = Setup { mesh: mesh(1, 2, false), experts: Default::default(), ..dep(1) };
    let host = start(&setup, &[1], 1, Fault::Panic);
    let pending = send_all(&host, 2);
    for (lane, seed, pending) in pending {
        let answer = pending.wait();
        match lane {
            0 => assert_eq!(answer.ids(), undisturbed(&setup, 0, seed)),
            _ => assert!(matches!(answer.end, Some(Err(EngineError::Rank(_)))), "{answer:?}"),
        }
    }
    assert_eq!(ask(&host, on(1, sampled(7))).ids(), undisturbed(&setup, 1, 7));
    assert_eq!(host.stats().iter().map(|stats| stats.epoch).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(host.shutdown(), Ok(()));
}

fn gate() -> (Fault, Receiver<()>, Sender<()>) {
    let (arrived, at_gate) = channel();
    let (go, word) = channel();
    (Fault::Wait(Arc::new(Gate { arrived: Mutex::new(arrived), word: Mutex::new(word) })), at_gate, go)
}

#[test]
fn a_slow_rank_holds_everybody_up_and_loses_nothing() {
    let setup = dep(3);
    let (fault, at_gate, go) = gate();
    let host = start(&setup, &[1], 1, fault);
    let pending = send_all(&host, 3);
    at_gate.recv().unwrap();
    go.send(()).unwrap();
    for (lane, seed, pending) in pending {
        assert_eq!(pending.wait().ids(), undisturbed(&setup, lane, seed));
    }
    assert!(host.stats().iter().all(|stats| stats.epoch == 1));
}

/// Its thread can't be ended; its seat can be given to another. When it wakes it finds that out.
#[test]
fn a_stuck_rank_loses_its_seat_and_comes_back_to_nothing() {
    for setup in [dep(3), Setup { mesh: mesh(1, 1, false), experts: Default::default(), ..dep(1) }] {
        let patience = Patience { min: Duration::from_millis(300), first: Duration::from_millis(900) };
        let setup = Setup { patience, ..setup };
        let last = setup.mesh.ranks() as u16 - 1;
        let (fault, _at_gate, go) = gate();
        let host = start(&setup, if last == 0 { &[0] } else { &[2] }, 1, fault);
        let pending = send_all(&host, setup.mesh.lanes() as u16);
        check(&setup, &host, pending, &[last]);
        // It goes on, in an epoch that is over.
        go.send(()).unwrap();
        assert_eq!(ask(&host, on(last, sampled(8))).ids(), undisturbed(&setup, last, 8));
        assert_eq!(host.shutdown(), Ok(()));
    }
}

#[test]
fn a_rank_that_fails_while_recording_is_replaced() {
    let setup = Setup { record_all: false, ..dep(2) };
    let host = start(&setup, &[1], 1, Fault::Recording);
    // Prompts of 20 to 24 rows, again and again, until that bucket is worth a recording.
    let answers: Vec<_> = (0..120u32)
        .map(|i| ask(&host, on(0, request(&prompt(i)[..22], 1, SamplingParams::greedy()))))
        .collect();
    assert!(answers.iter().all(|answer| answer.tokens.len() == 1));
    assert!(host.stats().iter().all(|stats| stats.epoch == 2), "{:?}", host.stats());
}

#[test]
fn a_group_that_keeps_losing_ranks_ends_and_answers_everybody() {
    let setup = Setup { rank_restarts_max: 2, ..dep(3) };
    let host = start(&setup, &[1], usize::MAX / 4, Fault::Error);
    let mut ends = Vec::new();
    for _ in 0..3 {
        // Lane 0's own requests outlive two losses, not the third.
        ends.extend(send_all(&host, 1).into_iter().map(|(.., pending)| pending));
        if let Err(refusal) = host.submit(on(1, sampled(3)), Box::new(|_| {})) {
            assert!(matches!(refusal, Refusal::Closed(_)), "{refusal:?}");
        }
        ends.extend(send_all(&host, 1).into_iter().map(|(.., pending)| pending));
        if host.health().fault.is_some() {
            break;
        }
    }
    let ends: Vec<_> = ends.into_iter().map(|pending| pending.wait().end.unwrap()).collect();
    let fault = host.health().fault.expect("it can't go on");
    assert!(fault.contains("rank 1") && fault.contains("formed again as often as it may (2)"), "{fault}");
    assert!(ends.iter().any(|end| matches!(end, Err(EngineError::Rank(_)))), "{ends:?}");
    assert!(host.shutdown().is_err());
}

/// Ranks that a closed group wakes were taken for further losses, and the supervisor lost count.
#[test]
fn a_group_that_ends_while_some_compute_is_counted_once() {
    for _ in 0..5 {
        let setup = Setup { rank_restarts_max: 0, ..dep(8) };
        let host = start(&setup, &[3], 1, Fault::Panic);
        for (_, _, pending) in send_all(&host, 8) {
            assert!(matches!(pending.wait().end, Some(Err(EngineError::Rank(_)))));
        }
        assert!(host.shutdown().is_err());
    }
}

#[test]
fn a_rank_that_can_not_be_replaced_ends_the_group() {
    let setup = dep(2);
    let host = start(&setup, &[1], 1, Fault::Replacement);
    for (_, _, pending) in send_all(&host, 2) {
        assert!(matches!(pending.wait().end, Some(Err(EngineError::Rank(_)))));
    }
    let fault = host.health().fault.expect("it can't go on");
    assert!(fault.contains("no room for a new rank"), "{fault}");
    assert!(host.shutdown().is_err());
}

/// B-17, B-20: requests during a pause wait, and the pause ends when it is told to.
#[test]
fn b_17_b_20_a_paused_group_takes_requests_and_computes_none() {
    let setup = dep(3);
    let host = setup.start(&tiny("qwen3_moe"));
    let running = send(&host, on(0, sampled(1)));
    assert!(matches!(running.next(), Event::Started { .. }));
    host.pause();
    rest(&host);
    let replays = host.stats()[0].replays;
    let queued = send(&host, on(1, sampled(2)));
    // An order on another lane while the group rests: it is taken, and nothing is computed.
    let aborted = send(&host, on(2, sampled(3)));
    host.abort(aborted.id);
    assert_eq!(host.stats()[0].replays, replays);
    host.resume();
    let mut tokens = running.wait().ids();
    assert_eq!(tokens, undisturbed(&setup, 0, 1));
    tokens = queued.wait().ids();
    assert_eq!(tokens, undisturbed(&setup, 1, 2));
    // B-21: pausing an idle group executes no forward.
    let replays = host.stats()[0].replays;
    host.pause();
    rest(&host);
    host.resume();
    assert_eq!(host.stats()[0].replays, replays);
    assert_eq!(ask(&host, on(2, sampled(4))).ids(), undisturbed(&setup, 2, 4));
}
