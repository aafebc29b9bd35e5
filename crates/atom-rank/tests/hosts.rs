//! Lanes of one group on several hosts, here hosts of one process that meet over loopback TCP: the same
//! bits as on one host, and an end for everybody, with a reason, when one of them is gone.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_base::{FinishReason, LaneId, SamplingParams, TokenId};
use atom_engine::{EngineError, Event, Refusal, Request};
use atom_model::{ExchangeChoice, ExpertLayout};
use atom_ops::{Backend, OpsError, StepInputs};
use atom_rank::{Host, Link, LinkArgs};
use common::hooked::{Hooked, Hooks};
use common::hosts::{Hosts, free_port, start_hosts};
use common::{Setup, ask, expert_parallel, mesh, request, rest, send, tiny};
use std::sync::Arc;
use std::time::Duration;

/// `fault` spoils the ranks of a host after so many replays.
fn start(setup: &Setup, nodes: usize, fault: Option<(usize, usize)>) -> Hosts {
    start_hosts(setup, nodes, |node, setup| {
        let cpu = setup.cpu();
        let backend = move |seat: &atom_base::Seat| {
            let inner = cpu(seat)?;
            Ok(match fault {
                Some((at, replays_left)) if at == node => {
                    Box::new(Hooked::new(inner, Failing { replays_left })) as Box<dyn Backend>
                }
                _ => inner,
            })
        };
        setup.start_with(&tiny("qwen3_moe"), backend)
    })
}

struct Failing {
    replays_left: usize,
}

impl Hooks for Failing {
    fn before_replay(&mut self, _: usize, _: &StepInputs<'_>) -> Result<(), OpsError> {
        self.replays_left =
            self.replays_left.checked_sub(1).ok_or_else(|| OpsError::Device("injected".into()))?;
        Ok(())
    }
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|i| atom_base::rng::philox([i, 0, 0, 0], [seed, 0])[0] % 500).collect()
}

fn sampled(lane: u16, seed: u32, len: usize, tokens: u32) -> Request {
    let sampling = SamplingParams {
        temperature: 0.9,
        repetition_penalty: 1.1,
        seed: seed.into(),
        logprobs: Some(2),
        ..SamplingParams::default()
    };
    Request { lane: Some(LaneId(lane)), ..request(&prompt(seed, len), tokens, sampling) }
}

fn dep(lanes: u16) -> Setup {
    Setup { mesh: mesh(lanes, 1, true), experts: expert_parallel(), ..Setup::default() }
}

#[test]
fn lanes_on_two_hosts_give_the_bits_of_one() {
    let exchanges = [
        ExpertLayout { expert_parallel: true, exchange: ExchangeChoice::Dispatch },
        ExpertLayout { expert_parallel: true, exchange: ExchangeChoice::Gather },
        ExpertLayout { expert_parallel: false, exchange: ExchangeChoice::Auto },
    ];
    for experts in exchanges {
        let setup = Setup { experts, ..dep(4) };
        let probes = [(0, 1, 30), (1, 2, 200), (2, 3, 7), (3, 4, 90)];
        let one = setup.start(&tiny("qwen3_moe"));
        let together: Vec<_> =
            probes.map(|(lane, seed, len)| send(&one, sampled(lane, seed, len, 20))).into();
        let expected: Vec<_> = together.into_iter().map(|p| p.wait().bits()).collect();
        let apart = start(&setup, 2, None);
        let pending: Vec<_> = probes
            .map(|(lane, seed, len)| {
                send(&apart.hosts[usize::from(lane / 2)], sampled(lane % 2, seed, len, 20))
            })
            .into();
        let found: Vec<_> = pending.into_iter().map(|p| p.wait().bits()).collect();
        assert_eq!(found, expected, "{experts:?}");
        for (node, host) in apart.hosts.iter().enumerate() {
            let lanes: Vec<_> = host.health().lanes.iter().map(|lane| lane.lane.0 as usize).collect();
            assert_eq!(lanes, [2 * node, 2 * node + 1]);
            assert_eq!(host.limits().lanes, 2);
        }
    }
}

#[test]
fn three_hosts_park_and_wake_together_and_leave_when_one_is_told_to() {
    let Hosts { hosts, .. } = start(&dep(3), 3, None);
    for round in 0..3 {
        for host in [2, 0, 1] {
            assert_eq!(ask(&hosts[host], sampled(0, round, 20, 3)).tokens.len(), 3);
            hosts.iter().for_each(rest);
        }
    }
    let replays: Vec<_> = hosts.iter().map(|host| host.stats()[0].replays).collect();
    assert!(replays.iter().all(|&n| n == replays[0]), "{replays:?}");
    // Long enough for supervisors to look around several times: lanes of other hosts are not theirs to judge.
    let running = send(&hosts[2], sampled(0, 9, 20, 480));
    assert!(matches!(running.next(), Event::Started { .. }));
    // One host is told to stop: all finish what they have, and nobody is lost.
    let mut hosts = hosts.into_iter();
    let first = hosts.next().unwrap();
    let stopping = std::thread::spawn(move || first.shutdown());
    let answer = running.wait();
    assert_eq!((answer.tokens.len(), answer.end), (480, Some(Ok(FinishReason::Length))));
    assert_eq!(stopping.join().unwrap(), Ok(()));
    for host in hosts {
        while !host.has_ended() {
            std::thread::yield_now();
        }
        let refused = host.submit(sampled(0, 9, 20, 2), Box::new(|_| {}));
        assert!(matches!(refused, Err(Refusal::Closed(_))), "{refused:?}");
        assert_eq!(host.shutdown(), Ok(()));
    }
}

/// As if the process of a host were killed: its connections end in the middle of whatever it does.
#[test]
fn a_host_that_is_cut_off_ends_the_group_with_its_name() {
    for tokens_before in [0, 1, 5, 40] {
        let Hosts { hosts, links } = start(&dep(4), 2, None);
        let pending: Vec<_> =
            (0..4).map(|i| send(&hosts[i / 2], sampled(i as u16 % 2, i as u32, 30, 400))).collect();
        for _ in 0..tokens_before {
            pending[0].next();
        }
        links[1].close();
        for (i, pending) in pending.into_iter().enumerate() {
            // A token or two may have been said in between; the end is an error on both sides.
            let end = loop {
                match pending.next() {
                    Event::Failed(error) => break error,
                    Event::Finished(reason) => panic!("request {i} finished: {reason:?}"),
                    _ => {}
                }
            };
            let EngineError::Rank(why) = end else { panic!("{end:?}") };
            assert!(why.contains(&format!("host {}", 1 - i / 2)), "{why}");
        }
        for host in hosts {
            let fault = host.health().fault.expect("health is red");
            assert!(fault.contains("is gone") || fault.contains("can't be reached"), "{fault}");
            assert!(host.shutdown().is_err());
        }
    }
}

#[test]
fn a_rank_that_fails_on_one_host_is_named_on_the_other() {
    let Hosts { hosts, .. } = start(&Setup { rank_restarts_max: 3, ..dep(4) }, 2, Some((1, 10)));
    let pending: Vec<_> =
        (0..4).map(|i| send(&hosts[i / 2], sampled(i as u16 % 2, i as u32, 30, 400))).collect();
    for (i, pending) in pending.into_iter().enumerate() {
        let Some(Err(EngineError::Rank(why))) = pending.wait().end else { panic!("request {i}") };
        assert!(why.contains("injected"), "{why}");
    }
    assert!(hosts.into_iter().all(|host| host.shutdown().is_err()));
}

/// B-23: ranks of one host are ready before those of another have begun to load.
#[test]
fn b_23_hosts_wait_for_each_other_without_a_deadline() {
    let (master, (loaded, gate)) = (free_port(), std::sync::mpsc::channel::<()>());
    let connect = move |node: usize| {
        let patience = Duration::from_secs(60);
        let args = LinkArgs { nodes: 2, node, master: master.clone(), fingerprint: 1, patience };
        Some(Arc::new(Link::connect(&args).unwrap()))
    };
    let (one, two) = (connect.clone(), connect);
    let first = std::thread::spawn(move || {
        let setup = Setup { link: one(0), ..dep(2) };
        // The last layer is loaded: what is left is to wait for the other host.
        let progress = move |_, done, layers| {
            if done == layers {
                let _ = loaded.send(());
            }
        };
        Host::start(&setup.config(), &tiny("qwen3_moe"), setup.cpu(), Arc::new(progress)).unwrap()
    });
    let second = std::thread::spawn(move || {
        let setup = Setup { link: two(1), ..dep(2) };
        let (cpu, gate) = (setup.cpu(), std::sync::Mutex::new(gate));
        setup.start_with(&tiny("qwen3_moe"), move |seat| {
            gate.lock().unwrap().recv().unwrap();
            cpu(seat)
        })
    });
    let hosts = [first.join().unwrap(), second.join().unwrap()];
    assert_eq!(ask(&hosts[0], sampled(0, 1, 20, 5)).tokens.len(), 5);
}

/// A process that died while another one still loaded was missed only when the group met.
#[test]
fn a_host_that_dies_while_another_loads_ends_the_start_by_name() {
    let master = free_port();
    let connect = move |node: usize| {
        let patience = Duration::from_secs(60);
        let args = LinkArgs { nodes: 2, node, master: master.clone(), fingerprint: 1, patience };
        Arc::new(Link::connect(&args).unwrap())
    };
    let (loads, loading) = std::sync::mpsc::channel();
    let (open, gate) = std::sync::mpsc::channel::<()>();
    let first = connect.clone();
    let first = std::thread::spawn(move || {
        let setup = Setup { link: Some(first(0)), ..dep(2) };
        let (cpu, gate) = (setup.cpu(), std::sync::Mutex::new(gate));
        let backend = move |seat: &atom_base::Seat| {
            loads.send(()).unwrap();
            // Opened by the end of the test.
            let _ = gate.lock().unwrap().recv();
            cpu(seat)
        };
        Host::start(&setup.config(), &tiny("qwen3_moe"), backend, Arc::new(|_, _, _| {})).err()
    });
    let second = connect(1);
    loading.recv().unwrap();
    second.close();
    let error = first.join().unwrap().expect("it can't start").to_string();
    assert!(error.contains("host 1 ") && error.contains("is gone"), "{error}");
    drop(open);
}

/// Whichever host is asked, all of them rest, and go on.
#[test]
fn a_pause_of_one_host_is_the_groups() {
    let setup = dep(4);
    let alone = setup.start(&tiny("qwen3_moe"));
    let expected: Vec<_> = (0..4).map(|i| ask(&alone, sampled(i as u16, i, 30, 100)).ids()).collect();
    let Hosts { hosts, .. } = start(&setup, 2, None);
    for (asked, other) in [(0, 1), (1, 0)] {
        let mut pending: Vec<_> =
            (0..3).map(|i| send(&hosts[i / 2], sampled(i as u16 % 2, i as u32, 30, 100))).collect();
        assert!(matches!(pending[0].next(), Event::Started { .. }));
        hosts[asked].pause();
        until(|| hosts[asked].is_at_rest());
        let health = hosts[other].health();
        let is_parked = |lane: &atom_rank::LaneHealth| lane.activity == atom_group::Activity::Parked;
        assert!(health.paused && health.lanes.iter().all(is_parked), "{health:?}");
        let replays = || hosts.iter().map(|host| host.stats()[0].replays).collect::<Vec<_>>();
        let before = replays();
        // What comes now is taken, and waits.
        pending.push(send(&hosts[1], sampled(1, 3, 30, 100)));
        until(|| hosts[other].is_at_rest());
        hosts.iter().for_each(rest);
        assert_eq!(replays(), before);
        assert!(hosts.iter().all(|host| host.open_requests() > 0));
        hosts[other].resume();
        for (pending, expected) in pending.into_iter().zip(&expected) {
            let answer = pending.wait();
            assert_eq!(answer.ids(), *expected, "{asked}");
        }
        hosts.iter().for_each(rest);
        assert!(hosts.iter().all(|host| !host.health().paused && !host.is_at_rest()));
    }
}

/// A paused group that one host is told to leave works off what all of its hosts have taken.
#[test]
fn a_drain_and_an_exit_of_one_host_are_the_groups() {
    let Hosts { hosts, .. } = start(&dep(2), 2, None);
    hosts[0].pause();
    until(|| hosts[0].is_at_rest());
    let pending = [0, 1].map(|host: usize| send(&hosts[host], sampled(0, host as u32, 20, 40)));
    hosts[1].drain();
    until(|| hosts.iter().all(|host| host.health().draining));
    for host in &hosts {
        let refused = host.submit(sampled(0, 9, 20, 2), Box::new(|_| {}));
        assert!(matches!(refused, Err(Refusal::Closed(_))), "{refused:?}");
    }
    let mut hosts = hosts.into_iter();
    let (first, second) = (hosts.next().unwrap(), hosts.next().unwrap());
    let stopping = std::thread::spawn(move || first.shutdown());
    for pending in pending {
        let answer = pending.wait();
        assert_eq!((answer.tokens.len(), answer.end), (40, Some(Ok(FinishReason::Length))));
    }
    assert_eq!(stopping.join().unwrap(), Ok(()));
    until(|| second.has_ended());
    assert_eq!(second.shutdown(), Ok(()));
}

/// Looks again and again; fails after a minute.
fn until(holds: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "it never came about");
        std::thread::yield_now();
    }
}
