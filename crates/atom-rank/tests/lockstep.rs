//! All ranks of a group replay one bucket in every step, whatever each of them has to do: the case that
//! the group's rule was made for, and the one that it left open, on mixtures with every exchange.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_base::{LaneId, SamplingParams, TokenId};
use atom_engine::Request;
use atom_group::{Alignment, Policy};
use atom_model::{ExchangeChoice, ExpertLayout};
use atom_ops::Backend;
use atom_rank::{EagerCause, Host};
use common::hooked::Hooked;
use common::trace::{Replayed, Trace, Tracer};
use common::{Setup, ask, mesh, request, rest, send, tiny};
use std::sync::{Arc, Mutex};

const LANES: usize = 4;

/// DTP4 and DEP4, both exchanges.
fn layouts() -> [ExpertLayout; 3] {
    [(false, ExchangeChoice::Auto), (true, ExchangeChoice::Dispatch), (true, ExchangeChoice::Gather)]
        .map(|(expert_parallel, exchange)| ExpertLayout { expert_parallel, exchange })
}

/// With prefills of several lanes coalesced, with that switched off as users do it, and as if there were no
/// policy at all.
fn policies() -> [Policy; 3] {
    let off = |name: &str| (name == "ATOM_ENABLE_PREFILL_DELAYER").then(|| "0".to_owned());
    [
        Policy { alignment: Some(Alignment::default()), ..Policy::default() },
        Policy { alignment: Alignment::parse(off).unwrap(), ..Policy::default() },
        Policy::NONE,
    ]
}

fn setup(experts: ExpertLayout, policy: Policy) -> Setup {
    Setup { mesh: mesh(LANES as u16, 1, true), experts, policy, rows_max: 64, ..Setup::default() }
}

fn start(setup: &Setup) -> (Host, Trace) {
    let trace: Trace = Arc::new(Mutex::new(vec![Vec::new(); setup.mesh.ranks()]));
    let (cpu, log) = (setup.cpu(), Arc::clone(&trace));
    let backend = move |seat: &atom_base::Seat| {
        let hooks =
            Tracer { rank: usize::from(seat.rank.0), trace: Arc::clone(&log), recordings: Vec::new() };
        Ok(Box::new(Hooked::new(cpu(seat)?, hooks)) as Box<dyn Backend>)
    };
    (setup.start_with(&tiny("qwen3_moe"), backend), trace)
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|i| atom_base::rng::philox([i, 0, 0, 0], [seed, 0])[0] % 500).collect()
}

fn on(lane: u16, request: Request) -> Request {
    Request { lane: Some(LaneId(lane)), ..request }
}

fn penalised(seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 0.8,
        frequency_penalty: 0.4,
        repetition_penalty: 1.2,
        seed,
        logprobs: Some(2),
        ..SamplingParams::default()
    }
}

/// Steps as all ranks saw them: `steps[i][rank]`. Ends the host first, so that every log is complete.
fn steps(host: Host, trace: &Trace) -> Vec<Vec<Replayed>> {
    host.shutdown().unwrap();
    let logs = trace.lock().unwrap();
    let count = logs[0].len();
    assert!(logs.iter().all(|log| log.len() == count), "every rank takes every step");
    (0..count).map(|step| logs.iter().map(|log| log[step].clone()).collect()).collect()
}

/// Waits until so many requests wait in a host that is paused; a minute is a failure, not a hang.
fn all_wait(host: &Host, count: usize) {
    let start = std::time::Instant::now();
    while host.stats().iter().map(|stats| stats.counters.waiting).sum::<usize>() < count {
        assert!(start.elapsed().as_secs() < 60, "{:?}", host.stats());
        std::thread::yield_now();
    }
}

/// The promise itself: one bucket, one list of operators, one view of the grants.
fn assert_lockstep(steps: &[Vec<Replayed>]) {
    for (index, ranks) in steps.iter().enumerate() {
        for (rank, replayed) in ranks.iter().enumerate() {
            let first = &ranks[0];
            assert_eq!(replayed.shape, first.shape, "step {index}: rank {rank} replays another bucket");
            assert_eq!(replayed.ops, first.ops, "step {index}: rank {rank} runs other operators");
            assert_eq!(replayed.granted, first.granted, "step {index}: rank {rank} sees other grants");
            assert!(replayed.rows <= replayed.granted[rank] as usize, "step {index}: rank {rank}");
            if replayed.rows == 0 {
                assert_eq!(replayed.experts.chosen, 0, "step {index}: padding of rank {rank} was routed");
            }
        }
        let largest = ranks.iter().map(|r| r.rows).max().unwrap();
        assert!(ranks[0].shape.rows >= largest, "step {index}");
    }
}

/// One lane decodes with log-probabilities and penalties, one prefills in chunks, one has nothing, one
/// does both.
#[test]
fn decode_rows_ride_the_prefill_bucket_beside_prefilling_and_idle_lanes() {
    let alone = {
        let host = Setup::default().start(&tiny("qwen3_moe"));
        [1, 3].map(|seed| ask(&host, request(&prompt(seed, 9), 40, penalised(seed.into()))).ids())
    };
    for experts in layouts() {
        for policy in policies() {
            let (host, trace) = start(&setup(experts, policy));
            // All are there before the first step: short prompts are done with it, long ones take many.
            rest(&host);
            host.pause();
            let decoding = [(0, 1), (3, 3)].map(|(lane, seed): (u16, u32)| {
                send(&host, on(lane, request(&prompt(seed, 9), 40, penalised(seed.into()))))
            });
            let prefilling: Vec<_> = [(1, 11), (3, 12), (1, 13)]
                .map(|(lane, seed)| {
                    send(&host, on(lane, request(&prompt(seed, 400), 2, SamplingParams::greedy())))
                })
                .into();
            all_wait(&host, 5);
            host.resume();
            for (pending, alone) in decoding.into_iter().zip(&alone) {
                assert_eq!(pending.wait().ids(), *alone, "{experts:?} {policy:?}");
            }
            prefilling.into_iter().for_each(|p| assert_eq!(p.wait().tokens.len(), 2));
            let held: u64 = host.stats().iter().map(|stats| stats.held_steps).sum();
            assert!(
                held == 0 || policy.alignment.is_some(),
                "{experts:?} {policy:?}: {held} steps were held"
            );
            let steps = steps(host, &trace);
            assert_lockstep(&steps);
            let rides = |ranks: &&Vec<Replayed>| {
                ranks[0].decode_rows == 1 && ranks[0].rows == 1 && ranks[1].rows > 8 && ranks[2].rows == 0
            };
            let riding = steps.iter().filter(rides).count();
            assert!(
                riding > 0,
                "{experts:?} {policy:?}: a decoding lane beside a prefilling and an idle one"
            );
            let mixed = steps.iter().filter(|ranks| ranks[3].decode_rows > 0 && ranks[3].rows > 8).count();
            assert!(mixed > 0, "{experts:?} {policy:?}: decode rows and a prompt chunk in one lane");
        }
    }
}

#[test]
fn idle_lanes_route_no_row_and_hold_no_page() {
    for experts in layouts() {
        let (host, trace) = start(&setup(experts, Policy::default()));
        let pending = send(&host, on(2, request(&prompt(5, 100), 300, SamplingParams::greedy())));
        while host.stats()[2].counters.generated_tokens == 0 {
            std::thread::yield_now();
        }
        // In the middle of it: the busy lane holds pages, the others none.
        host.pause();
        rest(&host);
        for (lane, stats) in host.stats().iter().enumerate() {
            assert_eq!(stats.counters.pages_held > 0, lane == 2, "{experts:?}: pages of lane {lane}");
        }
        host.resume();
        pending.wait();
        rest(&host);
        for (lane, stats) in host.stats().iter().enumerate() {
            assert_eq!(stats.counters.rows > 0, lane == 2, "{experts:?}: rows of lane {lane}");
            assert_eq!(stats.counters.admitted, u64::from(lane == 2), "{experts:?}: leases of lane {lane}");
            assert_eq!(stats.counters.pages_held, 0, "{experts:?}: pages of lane {lane}");
            assert_eq!(stats.expert_rows_chosen > 0, lane == 2, "{experts:?}: routed rows of lane {lane}");
        }
        let steps = steps(host, &trace);
        assert_lockstep(&steps);
        let computed: u64 = steps.iter().flatten().map(|r| r.experts.computed).sum();
        let chosen: u64 = steps.iter().flatten().map(|r| r.experts.chosen).sum();
        // With whole experts every choice is computed once; with slices by every rank.
        let times = if experts.expert_parallel { 1 } else { LANES as u64 };
        assert_eq!(computed, times * chosen, "{experts:?}");
    }
}

/// B-07: one rank with a request and three idle ones, for long. B-28: all of it replays.
#[test]
fn b_07_b_28_one_busy_rank_of_four_replays_every_step() {
    let (host, trace) = start(&setup(layouts()[1], Policy::default()));
    let answer = ask(&host, on(1, request(&prompt(6, 3), 400, SamplingParams::greedy())));
    assert_eq!(answer.tokens.len(), 400);
    rest(&host);
    let replays: Vec<_> = host.stats().iter().map(|stats| stats.replays).collect();
    assert!(replays.iter().all(|&n| n == replays[0] && n >= 400), "{replays:?}");
    assert_lockstep(&steps(host, &trace));
}

/// B-02: prompts of 5 and 250 tokens in one step of two ranks, then one of them idle.
#[test]
fn b_02_short_and_long_prompts_in_one_step_give_the_answers_of_a_single_rank() {
    let prompts = [prompt(21, 5), prompt(22, 250)];
    let single = Setup { rows_max: 256, ..Setup::default() }.start(&tiny("qwen3_moe"));
    let greedy = |host: &Host, lane, tokens: &[TokenId]| {
        send(host, Request { lane, ..request(tokens, 12, SamplingParams::greedy()) })
    };
    let alone: Vec<_> = prompts.iter().map(|p| greedy(&single, None, p).wait().ids()).collect();
    for experts in layouts() {
        let setup = Setup { mesh: mesh(2, 1, true), experts, rows_max: 256, ..Setup::default() };
        let (host, trace) = start(&setup);
        let both: Vec<_> =
            prompts.iter().zip(0..).map(|(prompt, lane)| greedy(&host, Some(LaneId(lane)), prompt)).collect();
        let together: Vec<_> = both.into_iter().map(|pending| pending.wait().ids()).collect();
        assert_eq!(together, alone, "{experts:?}");
        assert_eq!(greedy(&host, Some(LaneId(0)), &prompts[1]).wait().ids(), alone[1], "{experts:?}");
        assert_lockstep(&steps(host, &trace));
    }
}

/// B-94, B-95 in a group: an answer does not depend on who else is there.
#[test]
fn an_answer_has_the_same_bits_whatever_the_other_lanes_do() {
    let probe = || on(1, request(&prompt(31, 45), 30, penalised(4)));
    for experts in layouts() {
        let setup = setup(experts, Policy::default());
        let alone = ask(&start(&setup).0, probe());
        let (host, _) = start(&setup);
        let others: Vec<_> = (0..40)
            .map(|i| {
                let length = 3 + (i as usize * 37) % 200;
                send(&host, on(i as u16 % 4, request(&prompt(100 + i, length), 20, penalised(i.into()))))
            })
            .collect();
        let among = ask(&host, probe());
        others.into_iter().for_each(|o| assert_eq!(o.wait().tokens.len(), 20));
        assert_eq!(among.bits(), alone.bits(), "{experts:?}");
    }
}

/// Outputs of experts are weighted and added at home in the order of experts, as a single rank does it.
#[test]
fn dispatched_experts_give_the_bits_of_one_rank() {
    for name in ["qwen3_moe", "glm4_moe", "minimax_m2"] {
        let probe = || request(&prompt(51, 45), 30, penalised(4));
        let alone = ask(&Setup::default().start(&tiny(name)), probe());
        for lanes in [2, 4, 8] {
            let setup = Setup { mesh: mesh(lanes, 1, true), experts: layouts()[1], ..Setup::default() };
            let answer = ask(&setup.start(&tiny(name)), on(lanes - 1, probe()));
            assert_eq!(answer.bits(), alone.bits(), "{name} on {lanes} ranks");
        }
    }
}

/// `--enforce-eager`: the same bits by the same code, and every step of it counted.
#[test]
fn eager_steps_give_the_same_bits_and_are_counted() {
    let probe = || on(1, request(&prompt(41, 45), 30, penalised(4)));
    let setup = setup(layouts()[1], Policy::default());
    let recorded = start(&setup).0;
    let replayed = ask(&recorded, probe());
    let (host, trace) = start(&Setup { enforce_eager: true, ..setup });
    assert_eq!(ask(&host, probe()).bits(), replayed.bits());
    rest(&host);
    rest(&recorded);
    for (eager, recorded) in host.stats().iter().zip(recorded.stats()) {
        assert_eq!((eager.replays, recorded.eager_steps.total()), (0, 0));
        assert_eq!(eager.eager_steps.by(EagerCause::EnforceEager), recorded.replays);
        assert_eq!(eager.eager_steps.total(), recorded.replays);
    }
    assert_lockstep(&steps(host, &trace));
}

/// The binary refuses the two flags together, so the host is asked for what can't be asked for there. A cause
/// that is new needs a case here: the match has no other arm.
#[test]
fn an_eager_step_is_an_error_where_it_is_not_allowed() {
    for cause in EagerCause::ALL {
        for mesh in [mesh(1, 1, false), mesh(2, 1, true)] {
            let setup = match cause {
                EagerCause::EnforceEager => Setup { mesh, enforce_eager: true, ..Setup::default() },
            };
            let host = Setup { fail_on_eager: true, ..setup }.start(&tiny("qwen3_moe"));
            let answer = ask(&host, request(&[1, 2, 3], 4, SamplingParams::greedy()));
            let Some(Err(atom_engine::EngineError::Rank(why))) = answer.end else { panic!("{answer:?}") };
            assert!(why.contains("--fail-on-eager") && why.contains(cause.name()), "{why}");
            assert!(host.health().fault.is_some() && answer.tokens.is_empty());
            assert!(host.stats().iter().all(|lane| lane.eager_steps.total() == 0), "refused before it ran");
        }
    }
}
