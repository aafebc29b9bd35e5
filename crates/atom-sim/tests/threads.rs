//! Real threads over the real exchange: steps, parking, work from outside, and a lane that dies.

#![allow(clippy::unwrap_used, reason = "the exemption for tests stops at their helper functions")]

mod common;

use atom_base::{RequestId, SamplingParams, StepNo};
use atom_engine::Request;
use atom_group::{
    Activity, Exchange, ExchangeError, ExitCause, Facts, FactsFlags, GroupState, GroupStep, Lattice,
    LatticeArgs,
};
use atom_sim::{Ending, Lane, Member};
use common::{MODEL, config, request};
use std::collections::VecDeque;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

const LANES: usize = 3;
/// No healthy lane of a loaded machine takes this long; a hang ends in an error, not in a timeout of
/// whoever runs the tests.
const PATIENCE: Duration = Duration::from_secs(30);

fn members() -> Vec<Member> {
    let config = config(41, 2, 4, 16);
    let args = LatticeArgs { rows_max: 16, max_num_seqs: 4, ..LatticeArgs::default() };
    let state = GroupState::new(Arc::new(Lattice::new(&args).unwrap()), LANES, false);
    (0..LANES).map(|place| Member::new(place, Lane::new(config.clone(), MODEL), state.clone())).collect()
}

/// What reaches a lane from outside.
#[derive(Default)]
struct Inbox {
    requests: Mutex<VecDeque<Request>>,
    leave: AtomicBool,
    pause: AtomicBool,
}

/// A lane that finds something wrong must not leave the others parked.
struct CloseOnPanic<'a>(&'a Exchange);

impl Drop for CloseOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.close();
        }
    }
}

/// A lane's loop, as a rank runs it. Reports requests that ended.
fn run(
    member: &mut Member,
    place: usize,
    exchange: &Exchange,
    inbox: &Inbox,
    ended: &mpsc::Sender<RequestId>,
) -> Result<(ExitCause, usize), ExchangeError> {
    let _guard = CloseOnPanic(exchange);
    let (mut parks, mut told) = (0, 0);
    let mut all = [Facts::default(); LANES];
    loop {
        for request in inbox.requests.lock().unwrap().drain(..) {
            member.lane.submit(request, 0).unwrap();
        }
        if inbox.leave.load(Ordering::SeqCst) {
            member.raise(FactsFlags::EXIT);
        }
        let paused = inbox.pause.load(Ordering::SeqCst);
        if paused {
            member.raise(FactsFlags::PAUSE)
        } else {
            member.lower(FactsFlags::PAUSE)
        }
        let facts = member.facts(0);
        exchange.exchange(place, &facts, PATIENCE, &mut all)?;
        let step = member.settle(&all).unwrap();
        exchange.note(place, facts.step, Activity::Replaying);
        member.perform(&step, false).unwrap();
        for account in member.lane.ledger().accounts().filter(|a| a.ended.is_some()).skip(told) {
            told += 1;
            ended.send(account.request.id).unwrap();
        }
        match step {
            GroupStep::Exit(cause) => return Ok((cause, parks)),
            GroupStep::Park => {
                parks += 1;
                let left_before = member.flags().has(FactsFlags::EXIT);
                exchange.park(place, member.state().next_step(), || {
                    !inbox.requests.lock().unwrap().is_empty()
                        || inbox.leave.load(Ordering::SeqCst) != left_before
                        || inbox.pause.load(Ordering::SeqCst) != paused
                })?;
            }
            GroupStep::Record(_) | GroupStep::Step { .. } => {}
        }
    }
}

/// In every second round the work finds all lanes parked; in the others it comes while they are on
/// their way to it.
#[test]
fn work_from_outside_wakes_a_parked_group_again_and_again() {
    const ROUNDS: u64 = 100;
    let exchange = Exchange::new(LANES, 10);
    let inboxes: [Inbox; LANES] = Default::default();
    let (ended, endings) = mpsc::channel();
    std::thread::scope(|scope| {
        let lane = |(place, mut member): (usize, Member)| {
            let (exchange, inbox, ended) = (&exchange, &inboxes[place], ended.clone());
            scope.spawn(move || {
                let exit = run(&mut member, place, exchange, inbox, &ended).unwrap();
                member.lane.check_baseline().unwrap();
                (exit, member.state().next_step(), member.state().hash())
            })
        };
        let lanes: Vec<_> = members().into_iter().enumerate().map(lane).collect();
        // The lanes have their own: if they end early, nobody waits here for requests.
        drop(ended);
        for id in 1..=ROUNDS {
            if id.is_multiple_of(2) {
                wait_until_parked(&exchange);
            }
            // Every tenth round two lanes get work at once.
            let also = id.is_multiple_of(10).then_some(id + 1001);
            for id in [id].into_iter().chain(also) {
                let request = request(id, 1 + id as usize % 30, 5, SamplingParams::greedy());
                inboxes[id as usize % LANES].requests.lock().unwrap().push_back(request);
                exchange.ring();
            }
            for _ in [id].into_iter().chain(also) {
                next_ending(&endings);
            }
        }
        for inbox in &inboxes {
            inbox.leave.store(true, Ordering::SeqCst);
            exchange.ring();
        }
        let exits: Vec<_> = lanes.into_iter().map(|lane| lane.join().unwrap()).collect();
        assert!(exits.iter().all(|exit| *exit == exits[0]), "{exits:?}");
        let ((cause, parks), step, _) = exits[0];
        assert_eq!(cause, ExitCause::Asked);
        // Five tokens are five steps at least.
        assert!(parks >= ROUNDS as usize / 2 && step > StepNo(5 * ROUNDS), "{parks} parks, {step} steps");
    });
}

fn wait_until_parked(exchange: &Exchange) {
    let start = Instant::now();
    while (0..LANES).any(|lane| exchange.sighting(lane).activity != Activity::Parked) {
        if start.elapsed() > PATIENCE {
            give_up("an idle group does not park");
        }
        std::thread::yield_now();
    }
}

/// Ends the whole program: threads that sleep for ever can't be joined. Past the captured output, so
/// that it is seen.
fn give_up(why: &str) -> ! {
    let _ = writeln!(std::io::stderr(), "watchdog: {why}");
    std::process::exit(101);
}

/// The next request that ends.
fn next_ending(endings: &mpsc::Receiver<RequestId>) -> RequestId {
    match endings.recv_timeout(2 * PATIENCE) {
        Ok(id) => id,
        Err(mpsc::RecvTimeoutError::Timeout) => give_up("requests don't end: a lost wake-up"),
        Err(mpsc::RecvTimeoutError::Disconnected) => panic!("lanes are gone with requests left"),
    }
}

/// (vllm#36594, #51476) Pause with work under way, requests to a paused group, resume, in every order:
/// a paused group sleeps, nothing is lost, and what came during the pause is answered after it.
#[test]
fn b_17_pause_and_resume_over_threads() {
    const ROUNDS: u64 = 50;
    let exchange = Exchange::new(LANES, 10);
    let inboxes: [Inbox; LANES] = Default::default();
    let (ended, endings) = mpsc::channel();
    let tell = |pause: bool, first: usize| {
        for lane in 0..LANES {
            inboxes[(first + lane) % LANES].pause.store(pause, Ordering::SeqCst);
            exchange.ring();
        }
    };
    let send = |id: u64, tokens: u32| {
        let request = request(id, 1 + id as usize % 30, tokens, SamplingParams::greedy());
        inboxes[id as usize % LANES].requests.lock().unwrap().push_back(request);
        exchange.ring();
    };
    std::thread::scope(|scope| {
        for (place, mut member) in members().into_iter().enumerate() {
            let (exchange, inbox, ended) = (&exchange, &inboxes[place], ended.clone());
            scope.spawn(move || {
                run(&mut member, place, exchange, inbox, &ended).unwrap();
                member.lane.check_baseline().unwrap();
            });
        }
        drop(ended);
        for round in 1..=ROUNDS {
            let (before, during) = (2 * round, 2 * round + 1);
            send(before, 40);
            tell(true, round as usize % LANES);
            send(during, 5);
            wait_until_parked(&exchange);
            tell(false, (round as usize + 1) % LANES);
            // The first may have ended before all lanes were paused.
            let mut both = [next_ending(&endings), next_ending(&endings)];
            both.sort_unstable();
            assert_eq!(both, [RequestId(before), RequestId(during)]);
        }
        // Paused lanes can be told to leave.
        tell(true, 0);
        inboxes.iter().for_each(|inbox| inbox.leave.store(true, Ordering::SeqCst));
        exchange.ring();
    });
}

/// Everybody busy, work all at once.
#[test]
fn threads_under_load_give_the_right_answers() {
    let exchange = Exchange::new(LANES, 10);
    let inboxes: [Inbox; LANES] = Default::default();
    let (ended, endings) = mpsc::channel();
    for id in 1..=60 {
        // Lane 0 gets most of it, lane 2 nothing.
        let place = usize::from(id % 4 == 0);
        let request = request(id, 3 + id as usize % 40, 12, SamplingParams::greedy());
        inboxes[place].requests.lock().unwrap().push_back(request);
    }
    inboxes.iter().for_each(|inbox| inbox.leave.store(true, Ordering::SeqCst));
    std::thread::scope(|scope| {
        for (place, mut member) in members().into_iter().enumerate() {
            let (exchange, inbox, ended) = (&exchange, &inboxes[place], ended.clone());
            scope.spawn(move || {
                run(&mut member, place, exchange, inbox, &ended).unwrap();
                member.lane.check_baseline().unwrap();
                let right = |a: &atom_sim::Account| a.ended == Some(Ending::Length) && a.tokens == 12;
                assert!(member.lane.ledger().accounts().all(right));
            });
        }
        drop(ended);
        let mut all: Vec<_> = (0..60).map(|_| next_ending(&endings)).collect();
        all.sort_unstable();
        assert_eq!(all, (1..=60).map(RequestId).collect::<Vec<_>>());
    });
}

/// Its thread returns without a word. The others leave the exchange with its name.
#[test]
fn a_lane_that_dies_is_named_by_all_others() {
    const DEAD: usize = 1;
    const LAST_STEP: u64 = 40;
    let exchange = Exchange::new(LANES, 10);
    let lane = |place: usize, mut member: Member| {
        let mut all = [Facts::default(); LANES];
        let work = request(1, 10, 60, SamplingParams::greedy());
        member.lane.submit(work, 0).unwrap();
        loop {
            let facts = member.facts(0);
            assert!(facts.step.0 <= LAST_STEP + 1, "lane {place} goes on without lane {DEAD}");
            if place == DEAD && facts.step.0 > LAST_STEP {
                return None;
            }
            // Short only for the exchange that cannot succeed: a slow machine must not look like death.
            let short = facts.step.0 > LAST_STEP;
            let patience = if short { Duration::from_millis(100) } else { PATIENCE };
            if let Err(error) = exchange.exchange(place, &facts, patience, &mut all) {
                member.lane.fail("the group lost a lane").unwrap();
                member.lane.check_baseline().unwrap();
                return Some((facts.step, error));
            }
            let step = member.settle(&all).unwrap();
            exchange.note(place, facts.step, Activity::Replaying);
            member.perform(&step, false).unwrap();
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = members()
            .into_iter()
            .enumerate()
            .map(|(place, member)| scope.spawn(move || (place, lane(place, member))))
            .collect();
        for thread in threads {
            let (place, outcome) = thread.join().unwrap();
            if place == DEAD {
                assert_eq!(outcome, None);
                continue;
            }
            let (at, error) = outcome.unwrap();
            assert_eq!(at, StepNo(LAST_STEP + 1));
            let ExchangeError::Late { step, waited, missing } = &error else { panic!("{error}") };
            assert_eq!(*step, at);
            assert!(*waited >= Duration::from_millis(100), "{waited:?}");
            let dead = missing.iter().find(|sighting| sighting.lane == DEAD).expect("named");
            assert_eq!((dead.step, dead.activity), (StepNo(LAST_STEP), Activity::Replaying));
            assert!(error.to_string().contains("lane 1 (last seen replaying at step 40)"), "{error}");
        }
    });
}
