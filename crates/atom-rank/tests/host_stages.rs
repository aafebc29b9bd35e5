//! A group on two hosts, one of whose ranks fails at every stage of a step, in every way, or whose
//! connection is cut there: everybody is answered, on both hosts, and told by whom it was.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_base::{LaneId, RankId, SamplingParams, StepNo, TokenId};
use atom_engine::{EngineError, Request};
use atom_group::Patience;
use atom_ops::OpsError;
use atom_rank::{Host, Link, Probe, Stage};
use common::hosts::{Hosts, start_hosts};
use common::spoil::{Kind, STAGES, Spoil, Spoiler};
use common::{Answer, Setup, ask, expert_parallel, mesh, request, rest, send, tiny};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Of the second host, the third of all.
const RANK: u16 = 2;

fn setup() -> Setup {
    Setup { mesh: mesh(4, 1, true), experts: expert_parallel(), record_all: false, ..Setup::default() }
}

fn sampled(lane: u16, seed: u32) -> Request {
    let prompt: Vec<TokenId> =
        (0..40).map(|i| atom_base::rng::philox([i, 0, 0, 0], [seed, 0])[0] % 500).collect();
    let sampling = SamplingParams { temperature: 0.9, seed: seed.into(), ..SamplingParams::default() };
    Request { lane: Some(LaneId(lane)), ..request(&prompt, 100, sampling) }
}

/// Answers of one request a lane, all of which are there before `arm` and the first step of any of them.
fn answers(hosts: &[Host], arm: impl FnOnce()) -> Vec<Answer> {
    hosts[0].pause();
    hosts.iter().for_each(|host| {
        while !host.health().paused {
            std::thread::yield_now();
        }
    });
    let pending: Vec<_> =
        (0..4).map(|lane| send(&hosts[lane / 2], sampled(lane as u16 % 2, lane as u32))).collect();
    hosts.iter().for_each(rest);
    arm();
    hosts[0].resume();
    pending.into_iter().map(|pending| pending.wait()).collect()
}

fn reasons(answers: Vec<Answer>) -> Vec<String> {
    let reason = |answer: Answer| match answer.end {
        Some(Err(EngineError::Rank(why))) => why,
        end => panic!("{end:?}"),
    };
    answers.into_iter().map(reason).collect()
}

fn check(kind: Kind) {
    let expected: Vec<_> = {
        let alone = setup().start(&tiny("qwen3_moe"));
        (0..4).map(|lane: u32| ask(&alone, sampled(lane as u16, lane)).ids()).collect()
    };
    // Recordings are made at the start: see `stages.rs`.
    for stage in STAGES.into_iter().filter(|stage| *stage != Stage::Record) {
        let soon = Patience { min: Duration::from_millis(600), first: Duration::from_millis(1500) };
        let patience = if kind == Kind::Stuck { soon } else { Patience::default() };
        let spoiler = Arc::new(Spoiler::new(4, false));
        let one = |_, setup: Setup| setup.start_probed(&tiny("qwen3_moe"), Arc::clone(&spoiler));
        let Hosts { hosts, .. } = start_hosts(&Setup { patience, ..setup() }, 2, one);
        let spoil = Spoil { rank: RANK, stage, kind, passes: 12 };
        let answers = answers(&hosts, || spoiler.arm(Some(spoil)));
        let step = spoiler.spoiled()[0].step;
        let case = format!("{stage:?}, {kind:?}, step {step}");
        if kind == Kind::Slow {
            let found: Vec<_> = answers.iter().map(Answer::ids).collect();
            assert_eq!(found, expected, "{case}");
            assert!(hosts.iter().all(|host| host.health().fault.is_none()), "{case}");
            continue;
        }
        for why in reasons(answers) {
            assert!(why.contains(&format!("rank {RANK} ")), "{case}: {why}");
            let is_named = match kind {
                // Another host has seen its facts, and not what it did then.
                Kind::Stuck => why.contains("at step") && why.contains("did not come"),
                _ => why.contains(&format!("step {step}: ")) && why.contains("injected"),
            };
            assert!(is_named, "{case}: {why}");
        }
        assert!(hosts.into_iter().all(|host| host.shutdown().is_err()), "{case}");
        spoiler.release();
    }
}

#[test]
fn an_error_on_one_host_is_named_on_both() {
    check(Kind::Error);
}

#[test]
fn a_panic_on_one_host_is_named_on_both() {
    check(Kind::Panic);
}

#[test]
fn a_slow_thread_on_one_host_is_waited_for_on_both() {
    check(Kind::Slow);
}

#[test]
fn a_stuck_thread_on_one_host_is_named_on_both() {
    check(Kind::Stuck);
}

/// Cuts its host off, as the end of the process does, when a rank comes to a stage for the n-th time.
struct Cut {
    stage: Stage,
    passes: Mutex<Option<u32>>,
    link: Mutex<Option<Arc<Link>>>,
}

impl Probe for Cut {
    fn reach(&self, rank: RankId, _: StepNo, stage: Stage) -> Result<(), OpsError> {
        let mut passes = self.passes.lock().unwrap();
        let Some(left) = passes.as_mut().filter(|_| (rank.0, stage) == (RANK, self.stage)) else {
            return Ok(());
        };
        match left.checked_sub(1) {
            Some(fewer) => *left = fewer,
            None => {
                *passes = None;
                self.link.lock().unwrap().as_ref().unwrap().close();
            }
        }
        Ok(())
    }
}

#[test]
fn a_host_that_is_cut_off_at_any_stage_is_named_on_both() {
    for stage in STAGES.into_iter().filter(|stage| *stage != Stage::Record) {
        let cut = Arc::new(Cut { stage, passes: Mutex::default(), link: Mutex::default() });
        let one = |_, setup: Setup| setup.start_probed(&tiny("qwen3_moe"), Arc::clone(&cut));
        let Hosts { hosts, links } = start_hosts(&setup(), 2, one);
        *cut.link.lock().unwrap() = Some(Arc::clone(&links[1]));
        let answers = answers(&hosts, || *cut.passes.lock().unwrap() = Some(12));
        for (lane, why) in reasons(answers).into_iter().enumerate() {
            assert!(why.contains(&format!("host {}", 1 - lane / 2)), "{stage:?}, lane {lane}: {why}");
        }
        assert!(hosts.into_iter().all(|host| host.shutdown().is_err()), "{stage:?}");
    }
}
