//! Faults that engines of this kind had in public, as tests named after the numbers that they are filed
//! under here. Each says where it was reported and when it struck.
//!
//! Elsewhere: B-02, 07, 17, 20, 21, 42 beside this file; B-05, 06, 08, 14, 29, 30, 31, 34, 37, 40, 42, 57 in
//! `atom-group` and `atom-sim`, B-82 with the balancer and over HTTP, B-16 under shuttle in `atom-group`.
//! docs/lockstep.md has all of them with their tests.
//!
//! Not applicable as long as there is no such thing: speculation (B-12, 26, 27, 56, 75, 77, 78), grammar
//! (B-75), recurrent state (the model of B-11), rebalancing of experts (B-47 to B-51), prefill and decode on
//! different hosts (B-26, the transfer of B-35), a hierarchical cache (B-83), kernels of GPUs (B-41, 44, 60).
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;
#[path = "bug_log/faults.rs"]
mod faults;
#[path = "bug_log/group.rs"]
mod group;
#[path = "bug_log/numerics.rs"]
mod numerics;
#[path = "bug_log/scheduling.rs"]
mod scheduling;
#[path = "bug_log/start.rs"]
mod start;
#[path = "common/watch.rs"]
mod watch;

use atom_base::SamplingParams;
use atom_engine::Request;
use atom_model::{ExchangeChoice, ExpertLayout};
use common::{Answer, Setup, ask, mesh, request, send};
use watch::{on, penalised, prompt};

/// DTP, and DEP with both exchanges.
const LAYOUTS: [ExpertLayout; 3] = [
    ExpertLayout { expert_parallel: false, exchange: ExchangeChoice::Auto },
    ExpertLayout { expert_parallel: true, exchange: ExchangeChoice::Dispatch },
    ExpertLayout { expert_parallel: true, exchange: ExchangeChoice::Gather },
];
const DEP: ExpertLayout = LAYOUTS[1];

/// `-tp N --enable-dp-attention`.
fn lanes(lanes: u16, experts: ExpertLayout) -> Setup {
    Setup { mesh: mesh(lanes, 1, true), experts, ..Setup::default() }
}

fn greedy(tokens: &[u32], max_tokens: u32) -> Request {
    request(tokens, max_tokens, SamplingParams::greedy())
}

/// Requests of many lengths, the `i`-th for lane `i` of `lanes` in turn.
fn mixed(count: u32, lanes: u16, max_tokens: u32) -> Vec<Request> {
    let one = |i: u32| {
        let tokens = prompt(1000 + i, 3 + (i as usize * 37) % 120);
        on(i as u16 % lanes, request(&tokens, max_tokens, penalised(i.into())))
    };
    (0..count).map(one).collect()
}

/// The same request under another id: an id is used once.
fn again(request: &Request) -> Request {
    Request { id: greedy(&[0], 1).id, ..request.clone() }
}

/// All at once.
fn together(host: &atom_rank::Host, requests: &[Request]) -> Vec<Answer> {
    let pending: Vec<_> = requests.iter().map(|request| send(host, again(request))).collect();
    pending.into_iter().map(|pending| pending.wait()).collect()
}

/// One after the other.
fn alone(host: &atom_rank::Host, requests: &[Request]) -> Vec<Answer> {
    requests.iter().map(|request| ask(host, again(request))).collect()
}

fn bits(answers: &[Answer]) -> Vec<Vec<(u32, u32)>> {
    answers.iter().map(Answer::bits).collect()
}

/// Waits until what lanes count is so; a minute is a failure, not a hang.
fn wait_until(host: &atom_rank::Host, holds: impl Fn(&[atom_rank::LaneStats]) -> bool) {
    let start = std::time::Instant::now();
    while !holds(&host.stats()) {
        assert!(start.elapsed() < std::time::Duration::from_secs(60), "{:?}", host.stats());
        std::thread::yield_now();
    }
}
