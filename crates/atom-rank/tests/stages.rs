//! Every stage of a step, spoiled in every way, in every kind of seat: everybody is answered, with its own
//! text or an error that names rank and step, and the group goes on.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_base::{LaneId, SamplingParams, TokenId};
use atom_engine::{EngineError, Request};
use atom_group::Patience;
use atom_rank::{Host, Stage};
use common::spoil::{Kind, STAGES, Spoil, Spoiled, Spoiler};
use common::{Setup, ask, expert_parallel, mesh, request, rest, send, tiny};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// A layout, and the rank in it that misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Place {
    /// One of three lanes that share experts.
    LaneOfThree,
    LaneAlone,
    /// The first of two ranks that split heads.
    Leader,
    /// The other one.
    Follower,
    /// One of three lanes that plan a step while the one before is in flight.
    AheadOfThree,
    /// The other one of two ranks that do so.
    FollowerAhead,
}

const PLACES: [Place; 6] = [
    Place::LaneOfThree,
    Place::LaneAlone,
    Place::Leader,
    Place::Follower,
    Place::AheadOfThree,
    Place::FollowerAhead,
];

impl Place {
    fn setup(self) -> Setup {
        let setup = Setup { rank_restarts_max: 3, record_all: false, ..Setup::default() };
        match self {
            Self::LaneOfThree => Setup { mesh: mesh(3, 1, true), experts: expert_parallel(), ..setup },
            Self::LaneAlone => setup,
            Self::Leader | Self::Follower => Setup { mesh: mesh(2, 1, false), ..setup },
            Self::AheadOfThree => Setup { depth: 1, ..Self::LaneOfThree.setup() },
            Self::FollowerAhead => Setup { depth: 1, ..Self::Follower.setup() },
        }
    }

    fn rank(self) -> u16 {
        match self {
            Self::LaneOfThree | Self::AheadOfThree | Self::Follower | Self::FollowerAhead => 1,
            Self::LaneAlone | Self::Leader => 0,
        }
    }

    /// The lane whose requests are lost with the rank.
    fn lost_lane(self) -> Option<u16> {
        match self {
            Self::LaneOfThree | Self::AheadOfThree => Some(1),
            Self::LaneAlone | Self::Leader => Some(0),
            Self::Follower | Self::FollowerAhead => None,
        }
    }

    fn stages(self) -> impl Iterator<Item = Stage> {
        let is_follower = matches!(self, Self::Follower | Self::FollowerAhead);
        STAGES.into_iter().filter(move |stage| !is_follower || *stage >= Stage::Commit)
    }

    fn spoiler(self) -> Arc<Spoiler> {
        let is_alone = !matches!(self, Self::LaneOfThree | Self::AheadOfThree);
        Arc::new(Spoiler::new(self.setup().mesh.ranks(), is_alone))
    }

    fn start(self, kind: Kind, spoiler: &Arc<Spoiler>) -> Host {
        // Only where somebody is stuck on purpose is it worth while to find out soon.
        let soon = Patience { min: Duration::from_millis(600), first: Duration::from_millis(1500) };
        let patience = if kind == Kind::Stuck { soon } else { Patience::default() };
        let setup = Setup { patience, ..self.setup() };
        setup.start_probed(&tiny("qwen3_moe"), Arc::clone(spoiler))
    }

    /// What is answered when nothing happens.
    fn undisturbed(self, lane: u16, seed: u32) -> Vec<TokenId> {
        type Hosts = HashMap<Place, (Host, HashMap<(u16, u32), Vec<TokenId>>)>;
        static HOSTS: OnceLock<Mutex<Hosts>> = OnceLock::new();
        let mut hosts = HOSTS.get_or_init(Mutex::default).lock().unwrap();
        let start = || (self.setup().start(&tiny("qwen3_moe")), HashMap::new());
        let (host, known) = hosts.entry(self).or_insert_with(start);
        known.entry((lane, seed)).or_insert_with(|| ask(host, sampled(lane, seed)).ids()).clone()
    }
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|i| atom_base::rng::philox([i, 0, 0, 0], [seed, 0])[0] % 500).collect()
}

fn sampled(lane: u16, seed: u32) -> Request {
    let sampling = SamplingParams {
        temperature: 0.9,
        repetition_penalty: 1.1,
        seed: seed.into(),
        ..SamplingParams::default()
    };
    Request { lane: Some(LaneId(lane)), ..request(&prompt(seed, 40), 120, sampling) }
}

/// Spoils one stage while every lane has work, and checks everybody's answer.
fn check(place: Place, stage: Stage, kind: Kind) {
    let case = format!("{place:?}, {stage:?}, {kind:?}");
    let spoiler = place.spoiler();
    let host = place.start(kind, &spoiler);
    let lanes = 0..place.setup().mesh.lanes() as u16;
    // All requests are there before the first step of any of them.
    host.pause();
    let pending: Vec<_> = lanes
        .clone()
        .flat_map(|lane| [(lane, 0), (lane, 1)])
        .map(|(lane, seed)| (lane, seed, send(&host, sampled(lane, seed))))
        .collect();
    rest(&host);
    let passes = if stage == Stage::Record { 0 } else { 12 };
    spoiler.arm(Some(Spoil { rank: place.rank(), stage, kind, passes }));
    host.resume();
    if stage == Stage::Record {
        // A prompt of 22 rows is worth a bucket of its own, some time after the last recording.
        let replays = || host.stats()[0].replays;
        let start = replays();
        while spoiler.spoiled().is_empty() && replays() < start + 70 {
            std::thread::yield_now();
        }
        let mut short = sampled(0, 99);
        short.prompt = prompt(99, 22).into();
        drop(send(&host, short));
    }
    spoiler.wait(1);
    if kind == Kind::Slow {
        spoiler.release();
    }
    let spoiled = spoiler.spoiled()[0];
    let is_lost = |lane| kind != Kind::Slow && place.lost_lane() == Some(lane);
    for (lane, seed, pending) in pending {
        let answer = pending.wait();
        match &answer.end {
            Some(Err(EngineError::Rank(why))) if is_lost(lane) => check_error(&case, spoiled, why),
            Some(Ok(_)) if !is_lost(lane) || stage == Stage::Record => {
                assert_eq!(answer.ids(), place.undisturbed(lane, seed), "{case}: lane {lane}");
            }
            end => panic!("{case}: lane {lane} got {end:?}"),
        }
    }
    // Where everybody was done before the stage came, nobody's answer says that the loss has been dealt with.
    let epoch = if kind == Kind::Slow { 1 } else { 2 };
    while host.stats().iter().any(|stats| stats.epoch < epoch) {
        std::thread::yield_now();
    }
    let goes_on = || {
        for lane in lanes.clone() {
            assert_eq!(ask(&host, sampled(lane, 2)).ids(), place.undisturbed(lane, 2), "{case}: lane {lane}");
        }
        rest(&host);
    };
    goes_on();
    // Whoever was stuck wakes in an epoch that is over, changes nothing, and ends.
    spoiler.release();
    // The test, the host, and every rank.
    let held_by = 2 + place.setup().mesh.ranks();
    while Arc::strong_count(&spoiler) > held_by {
        std::thread::yield_now();
    }
    for stats in host.stats() {
        assert_eq!(stats.epoch, epoch, "{case}");
        let counters = stats.counters;
        assert_eq!((counters.running, counters.waiting, counters.pages_held), (0, 0, 0), "{case}: {stats:?}");
    }
    goes_on();
    assert_eq!(spoiler.spoiled().len(), 1, "{case}");
    assert_eq!(host.shutdown(), Ok(()), "{case}");
}

fn check_error(case: &str, spoiled: Spoiled, why: &str) {
    let Spoiled { rank, step, kind, .. } = spoiled;
    assert!(why.contains(&format!("rank {rank} ")), "{case}: {why}");
    let is_named = match kind {
        Kind::Stuck => why.contains(&format!("at step {step}) did not come")),
        _ => why.contains(&format!("step {step}: ")) && why.contains("injected"),
    };
    assert!(is_named, "{case}, step {step}: {why}");
}

fn check_all(kind: Kind, places: &[Place]) {
    for &place in places {
        place.stages().for_each(|stage| check(place, stage, kind));
    }
}

#[test]
fn an_error_at_any_stage_costs_its_lane_and_nobody_else() {
    check_all(Kind::Error, &PLACES);
}

#[test]
fn a_panic_at_any_stage_costs_its_lane_and_nobody_else() {
    check_all(Kind::Panic, &PLACES);
}

#[test]
fn a_slow_thread_at_any_stage_is_waited_for() {
    check_all(Kind::Slow, &PLACES);
}

#[test]
fn a_stuck_lane_of_three_is_given_up_at_any_stage() {
    check_all(Kind::Stuck, &[Place::LaneOfThree]);
}

/// Nobody waits for it: the supervisor looks.
#[test]
fn a_stuck_lane_that_is_alone_is_given_up_at_any_stage() {
    check_all(Kind::Stuck, &[Place::LaneAlone]);
}

#[test]
fn a_stuck_first_rank_of_a_lane_is_given_up_at_any_stage() {
    check_all(Kind::Stuck, &[Place::Leader]);
}

#[test]
fn a_stuck_follower_of_a_lane_is_given_up_at_any_stage() {
    check_all(Kind::Stuck, &[Place::Follower]);
}

#[test]
fn a_stuck_lane_that_is_ahead_is_given_up_at_any_stage() {
    check_all(Kind::Stuck, &[Place::AheadOfThree]);
}

#[test]
fn a_stuck_follower_that_is_ahead_is_given_up_at_any_stage() {
    check_all(Kind::Stuck, &[Place::FollowerAhead]);
}

/// A lane that parked has no deadline; from the moment that it is called it has one.
#[test]
fn a_lane_that_is_stuck_when_it_wakes_is_given_up() {
    let place = Place::LaneAlone;
    let spoiler = place.spoiler();
    let host = place.start(Kind::Stuck, &spoiler);
    assert_eq!(ask(&host, sampled(0, 2)).ids(), place.undisturbed(0, 2));
    rest(&host);
    spoiler.arm(Some(Spoil { rank: 0, stage: Stage::Want, kind: Kind::Stuck, passes: 0 }));
    let answer = send(&host, sampled(0, 0)).wait();
    let Some(Err(EngineError::Rank(why))) = &answer.end else { panic!("{answer:?}") };
    check_error("woken", spoiler.spoiled()[0], why);
    assert_eq!(ask(&host, sampled(0, 1)).ids(), place.undisturbed(0, 1));
    spoiler.release();
    assert_eq!(host.shutdown(), Ok(()));
}

/// The recordings of the start are steps as well: a host starts with the rank that takes the lost one's seat.
#[test]
fn a_rank_that_is_lost_in_the_first_recordings_is_replaced() {
    for place in PLACES {
        for kind in [Kind::Error, Kind::Panic, Kind::Stuck] {
            let spoiler = place.spoiler();
            spoiler.arm(Some(Spoil { rank: place.rank(), stage: Stage::Record, kind, passes: 2 }));
            let host = place.start(kind, &spoiler);
            assert_eq!(ask(&host, sampled(0, 2)).ids(), place.undisturbed(0, 2), "{place:?} {kind:?}");
            assert!(host.stats().iter().all(|stats| stats.epoch == 2), "{place:?} {kind:?}");
            spoiler.release();
            assert_eq!(host.shutdown(), Ok(()));
        }
    }
}

/// A rank that was stuck in the last order of all held up the end of its process.
#[test]
fn a_rank_that_fails_while_the_group_ends_holds_nobody_up() {
    for place in PLACES {
        for kind in [Kind::Error, Kind::Panic, Kind::Stuck, Kind::Slow] {
            leave(place, kind);
        }
    }
}

/// One case of these by itself, which finds a missing deadline in a second or two.
#[test]
fn a_follower_that_is_stuck_in_the_last_order_is_given_up() {
    leave(Place::Follower, Kind::Stuck);
}

/// Ends a host whose rank misbehaves on its way out.
fn leave(place: Place, kind: Kind) {
    let spoiler = place.spoiler();
    let host = place.start(kind, &spoiler);
    for lane in 0..place.setup().mesh.lanes() as u16 {
        let answer = ask(&host, sampled(lane, 0)).ids();
        assert_eq!(answer, place.undisturbed(lane, 0), "{place:?} {kind:?}");
    }
    spoiler.arm(Some(Spoil { rank: place.rank(), stage: Stage::Leave, kind, passes: 0 }));
    let releasing = (kind == Kind::Slow).then(|| {
        let spoiler = Arc::clone(&spoiler);
        std::thread::spawn(move || {
            spoiler.wait(1);
            spoiler.release();
        })
    });
    let ended = host.shutdown();
    let spoiled = spoiler.spoiled()[0];
    match ended {
        Ok(()) => assert_eq!(kind, Kind::Slow),
        Err(why) => {
            assert_ne!(kind, Kind::Slow, "{place:?}: {why}");
            check_error(&format!("{place:?}, leaving, {kind:?}"), spoiled, &why);
        }
    }
    spoiler.release();
    releasing.into_iter().for_each(|thread| thread.join().unwrap());
}
