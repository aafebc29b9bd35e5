//! What policy promises to users, in virtual time: bounds of the time between tokens, of waiting, of
//! what waiting costs.

#![allow(clippy::unwrap_used, reason = "the exemption for tests stops at their helper functions")]

mod common;

use atom_base::RequestId;
use atom_group::{Alignment, Bucket, FactsFlags, GroupStep, Policy, Prefill, StepNote};
use atom_sim::Ending;
use common::group::{COST, Group, aligned, long};

/// Lane 1 decodes while lane 0 gets 20 prompts of 2000 tokens. Returns the longest time from one token
/// to the next, and that of the whole.
fn longest_gap_us(policy: Policy) -> (u64, u64, Group) {
    let mut group = Group::new(2, &long(512), policy);
    group.submit(1, 1, 4, 3000);
    while group.tokens(1, 1) < 3 {
        group.step();
    }
    (0..20).for_each(|i| group.submit(0, 100 + i, 2000, 1));
    let (mut longest, mut last, mut tokens, start) = (0, group.now_us, group.tokens(1, 1), group.now_us);
    while !group.members[0].lane.ledger().live().is_empty() {
        group.step();
        if group.tokens(1, 1) > tokens {
            longest = longest.max(group.now_us - last);
            (last, tokens) = (group.now_us, group.tokens(1, 1));
        }
    }
    let whole = group.now_us - start;
    (longest, whole, group)
}

/// (sglang PR#35017) Decode starved by the chunked prefill of a peer.
#[test]
fn b_30_the_time_between_tokens_is_bounded_while_a_peer_prefills() {
    for step_ms_max in [8, 12, 20, 40] {
        let policy = Policy { step_ms_max: Some(step_ms_max), ..Policy::default() };
        let (longest, _, group) = longest_gap_us(policy);
        let allowed = |b: &&Bucket| COST.of(**b, 0) <= u64::from(step_ms_max) * 1000;
        let allowed = group.lattice.buckets().iter().rev().find(allowed).unwrap();
        let bound = 2 * COST.of(*allowed, 0);
        assert!(
            longest <= bound,
            "{step_ms_max} ms: {longest} µs from one token to the next, {bound} allowed"
        );
        assert!(longest > 3000, "prompts had rows: {longest}");
    }
    let (longest, ..) = longest_gap_us(Policy::default());
    assert!(longest > 50_000, "without the bound it is stretched: {longest} µs");
}

/// With alignment too: a hold only ever makes steps shorter.
#[test]
fn b_30_with_alignment() {
    let alignment = Some(Alignment { hold_steps_max: 30, ..Alignment::default() });
    let (longest, whole, group) =
        longest_gap_us(Policy { alignment, step_ms_max: Some(12), ..Policy::default() });
    assert!(longest <= 24_000, "{longest} µs");
    let (_, without, _) = longest_gap_us(Policy { step_ms_max: Some(12), ..Policy::default() });
    assert!(group.held > 0 && whole * 100 <= without * 105, "{whole} µs, {without} without alignment");
}

/// Prompts for `shares` (of 10) to each lane, all decoding a little; returns µs to the end, and the group.
fn serve(policy: Policy, shares: &[usize], gap_us: u64) -> (u64, Group) {
    let mut group = Group::new(shares.len(), &long(256), policy);
    let mut lanes = shares.iter().enumerate().flat_map(|(lane, &share)| vec![lane; share]).cycle();
    let (mut id, mut next_us) = (0, 0);
    while id < 60 || group.unfinished() > 0 {
        while id < 60 && group.now_us >= next_us {
            id += 1;
            next_us += gap_us;
            let lane = lanes.next().unwrap();
            group.submit(lane, id, 150 + (id as usize * 37) % 700, 12);
        }
        if group.step() == GroupStep::Park {
            group.now_us = next_us;
        }
        assert!(group.steps < 100_000, "no end");
    }
    for member in &group.members {
        assert!(member.lane.ledger().accounts().all(|a| a.ended == Some(Ending::Length)));
        member.lane.check_baseline().unwrap();
    }
    (group.now_us, group)
}

/// (sglang#35241) A delayer that cost a third of the throughput, for ever, in some runs. On loads of any
/// skew and density alignment costs next to nothing; two runs are equal.
#[test]
fn b_29_alignment_costs_no_throughput() {
    for shares in [vec![10, 0], vec![8, 2], vec![5, 5], vec![7, 1, 1, 1], vec![3, 3, 2, 2]] {
        for gap_us in [0, 20_000, 60_000] {
            for hold_steps_max in [8, 30] {
                let policy = aligned(Alignment { hold_steps_max, ..Alignment::default() });
                let (with, group) = serve(policy, &shares, gap_us);
                let (without, _) = serve(Policy::default(), &shares, gap_us);
                assert!(
                    with * 100 <= without * 105,
                    "{shares:?} every {gap_us} µs: {with} µs in {} steps, {} held; {without} µs without",
                    group.steps,
                    group.held
                );
                let (again, twin) = serve(policy, &shares, gap_us);
                assert_eq!((again, twin.steps, twin.held), (with, group.steps, group.held));
            }
        }
    }
}

/// What it is for: prompts that come a little apart are computed in the same steps.
#[test]
fn alignment_saves_steps_of_large_buckets() {
    let prefill_steps = |policy| {
        let mut group = Group::new(4, &long(256), policy);
        (0..4).for_each(|lane| group.submit(lane, lane as u64 + 1, 4, 2000));
        let (mut count, mut id) = (0, 100);
        for step in 0..400 {
            // A prompt for each lane, each a step after the one before.
            if step % 20 < 4 {
                id += 1;
                group.submit(step % 20, id, 500, 1);
            }
            group.step();
            count += usize::from((0..4).any(|lane| group.prefills(lane)));
        }
        count
    };
    let (with, without) = (prefill_steps(aligned(Alignment::default())), prefill_steps(Policy::default()));
    assert!(with * 10 <= without * 7, "{with} steps with prompts, {without} without alignment");
}

/// Both lanes get a prompt of four chunks two steps after the one before is done, now and then of five.
/// Returns steps in which one lane prefilled alone, and the longest run of steps in which somebody had
/// prompts and they did not run together.
fn skewed(policy: Policy) -> (usize, usize) {
    let mut group = Group::new(2, &long(256), policy);
    (0..2).for_each(|lane| group.submit(lane, lane as u64 + 1, 4, 2000));
    let (mut id, mut rest) = (100, [0, 0]);
    let (mut alone, mut apart, mut longest) = (0, 0, 0);
    for step in 0..600 {
        for (lane, rest) in rest.iter_mut().enumerate() {
            let is_free = group.members[lane].lane.ledger().live().len() == 1;
            *rest = if is_free { *rest + 1 } else { 0 };
            if *rest == 2 {
                id += 1;
                let extra = if lane == 0 && step % 50 > 45 { 255 } else { 0 };
                group.submit(lane, id, 4 * 255 + extra, 1);
            }
        }
        let wants = group.facts().iter().any(|f| f.prefill_rows > 0);
        group.step();
        let both = (0..2).filter(|&lane| group.prefills(lane)).count();
        alone += usize::from(both == 1);
        apart = if both == 2 || !wants { 0 } else { apart + 1 };
        longest = longest.max(apart);
    }
    (alone, longest)
}

/// (sglang#35241) The other half: whatever puts lanes one chunk apart, they are together again within
/// three steps.
#[test]
fn b_29_lanes_that_are_a_chunk_apart_meet_within_three_steps() {
    let (alone, longest) = skewed(aligned(Alignment::default()));
    assert!(longest <= 3, "{longest} steps until they met");
    let (alone_without, _) = skewed(Policy::default());
    assert!(alone * 5 <= alone_without, "{alone} steps of one lane alone, {alone_without} without alignment");
}

/// (tokenspeed PR#786) Everybody's requests are aborted between what was wanted and what is planned:
/// the step has no row in any lane, and is a step like others.
#[test]
fn b_40_a_step_without_any_row() {
    let mut group = Group::new(3, &long(64), Policy::default());
    for round in 0..50u64 {
        for lane in 0..3 {
            group.submit(lane, round * 3 + lane as u64 + 1, 20, 5);
        }
        group.step();
        let facts = group.facts();
        for lane in 0..3 {
            assert!(group.members[lane].lane.abort(RequestId(round * 3 + lane as u64 + 1)).unwrap());
        }
        assert!(matches!(group.settled(&facts), GroupStep::Step { .. }));
        assert!(group.members.iter().all(|m| m.lane.plan().rows() == 0));
        assert_eq!(group.step(), GroupStep::Park);
    }
}

/// (vllm#36594, PR#38761) Pause and resume with work in every lane: nothing runs, nothing is lost.
#[test]
fn b_17_a_pause_with_work_loses_nothing() {
    let mut group = Group::new(3, &long(64), aligned(Alignment::default()));
    (0..6).for_each(|i| group.submit(i as usize % 3, i + 1, 30, 300));
    for pause in 0..20u64 {
        (0..4).for_each(|_| assert!(matches!(group.step(), GroupStep::Step { .. })));
        for lane in 0..3 {
            assert!(matches!(group.step(), GroupStep::Step { .. }), "not before all ask");
            group.members[lane].raise(FactsFlags::PAUSE);
        }
        group.submit(1, 100 + pause, 10, 3);
        let (now_us, steps) = (group.now_us, group.steps);
        (0..5).for_each(|_| assert_eq!(group.step(), GroupStep::Park));
        assert_eq!((group.now_us, group.steps), (now_us, steps), "nothing runs");
        group.members[pause as usize % 3].lower(FactsFlags::PAUSE);
        assert!(matches!(group.step(), GroupStep::Step { .. }));
        group.members.iter_mut().for_each(|m| m.lower(FactsFlags::PAUSE));
    }
    while group.unfinished() > 0 {
        group.step();
    }
    let all = group.members.iter().flat_map(|m| m.lane.ledger().accounts());
    assert!(all.filter(|a| a.ended == Some(Ending::Length)).count() == 26);
}

#[test]
fn notes_say_what_was_put_off() {
    let mut group = Group::new(2, &long(512), Policy { step_ms_max: Some(12), ..Policy::default() });
    group.submit(0, 1, 1, 500);
    (0..10).for_each(|_| {
        group.step();
    });
    group.submit(1, 2, 2000, 1);
    let (mut put_off, mut edge) = (0, 0);
    while !group.members[1].lane.ledger().live().is_empty() {
        let said = group.facts()[1];
        let GroupStep::Step { grants, note, .. } = group.step() else { panic!() };
        let StepNote { prefill, time_cut_rows, edge_cut_rows } = note;
        assert_eq!(prefill, Prefill::Free);
        assert_eq!(said.prefill_rows - grants.of(&said).prefill_rows, time_cut_rows + edge_cut_rows);
        (put_off, edge) = (put_off + time_cut_rows, edge + edge_cut_rows);
    }
    assert!(put_off > 2000 && edge == 0, "{put_off} {edge}");
}
