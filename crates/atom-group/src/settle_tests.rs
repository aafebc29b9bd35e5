//! What the group decides, by example and by property. Without policy: the bucket, recordings, ends.

use super::*;
use crate::testing::{SIGNATURE, World, check, granted, lattice};
use crate::{Alignment, GroupState, Lattice, LatticeArgs, Patience, Policy};
use atom_base::{StepNo, limits::LANES_MAX};
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

fn ready(lanes: usize, rows_max: u32) -> World {
    World::ready(lanes, rows_max, Policy::NONE)
}

/// The seed's rule: the bucket holds the group's largest count, and it is everybody's.
#[test]
fn every_prefilling_rank_replays_the_groups_bucket() {
    let mut world = ready(4, 2048);
    for (wants, bucket) in [
        ([2048, 256, 256, 256], 2048),
        ([256, 2048, 0, 0], 2048),
        ([0, 0, 0, 2048], 2048),
        ([1, 100, 700, 1100], 1152),
        ([1100, 700, 100, 1], 1152),
        ([256, 256, 256, 256], 256),
        ([9000, 1, 0, 0], 2048),
        ([u32::MAX, u32::MAX, 0, 3], 2048),
    ] {
        let wants = wants.map(|prefill| (0, prefill));
        let (found, grants, _) = world.replayed(&wants);
        assert_eq!(found.rows(), bucket, "{wants:?}");
        for (grant, (_, prefill)) in grants.iter().zip(wants) {
            assert_eq!(grant.prefill_rows, prefill.min(2048), "above the top work is cut, never eager");
        }
    }
    assert_eq!(world.step(&[(0, 0); 4]), GroupStep::Park);
}

#[test]
fn every_bucket_holds_exactly_up_to_its_edge() {
    let mut world = ready(2, 2048);
    let edges: Vec<u32> = world.state.lattice.buckets().iter().map(|b| b.rows() as u32).collect();
    for (at, &edge) in edges.iter().enumerate() {
        let above = edges.get(at + 1).copied().unwrap_or(edge);
        let below = if at > 0 && edges[at - 1] == edge - 1 { edge - 1 } else { edge };
        for (rows, bucket) in [(edge - 1, below), (edge, edge), (edge + 1, above)] {
            if rows > 0 {
                assert_eq!(world.bucket(&[(0, 1), (0, rows)]), bucket as usize, "{rows} rows");
            }
        }
    }
}

/// The seed's open case: a decoding lane beside a prefilling one replays the same recording.
#[test]
fn decode_rows_ride_the_prefill_bucket() {
    let mut world = ready(3, 2048);
    let (bucket, grants, note) = world.replayed(&[(7, 0), (0, 1000), (3, 40)]);
    assert_eq!((bucket.rows(), note), (1024, StepNote::default()));
    let grant = |decode_rows, prefill_rows| Grant { decode_rows, prefill_rows };
    assert_eq!(grants, [grant(7, 0), grant(0, 1000), grant(3, 40)]);
}

/// (vllm#21637) One lane of four has a request: the others replay its bucket and run nothing.
#[test]
fn b_07_idle_lanes_beside_a_busy_one_are_granted_nothing() {
    let mut world =
        World::ready(4, 512, Policy { alignment: Some(Alignment::default()), ..Policy::default() });
    for busy in 0..4 {
        for _ in 0..500 {
            let mut wants = [(0, 0); 4];
            wants[busy] = (1, 0);
            let (bucket, grants, _) = world.replayed(&wants);
            assert_eq!(bucket.rows(), 1);
            for (lane, grant) in grants.iter().enumerate() {
                assert_eq!(grant.rows(), u32::from(lane == busy));
            }
        }
    }
}

/// (vllm#43547) Ten thousand steps with a lane that has no row: nobody gets out of step.
#[test]
fn b_08_a_lane_without_rows_stays_in_step() {
    let mut world = ready(3, 64);
    let first = world.state.next_step().0;
    for _ in 0..10_000 {
        world.replayed(&[(2, 0), (0, 0), (1, 3)]);
    }
    assert_eq!(world.state.next_step().0, first + 10_000);
}

/// (vllm PR#35376) An idle lane changed the kind of graph that everybody ran.
#[test]
fn b_14_an_idle_lane_changes_nothing() {
    for rows in 1..=512 {
        let alone = ready(1, 512).bucket(&[(rows.min(64), rows - rows.min(64))]);
        let mut world = ready(3, 512);
        assert_eq!(world.bucket(&[(0, 0), (rows.min(64), rows - rows.min(64)), (0, 0)]), alone);
    }
}

/// (sglang#5527) 16 lanes of 32 requests never ran a graph: a sum was compared with a lane's limit.
#[test]
fn b_28_every_step_of_many_lanes_is_a_replay() {
    let lattice = lattice(512, 32, None);
    let mut world = World::of(lattice, 16, true, Policy::default()).started();
    for _ in 0..1000 {
        let (bucket, grants, _) = world.replayed(&[(32, 0); 16]);
        assert_eq!(bucket.rows(), 32);
        assert!(grants.iter().all(|g| g.rows() == 32));
    }
}

/// (tokenspeed PR#786) No rows at all, in any lane, between steps with rows: nothing special.
#[test]
fn b_40_no_rows_in_any_lane() {
    let mut world = ready(3, 64);
    for _ in 0..100 {
        assert_eq!(world.bucket(&[(1, 0), (0, 9), (0, 0)]), 12);
        assert_eq!(world.step(&[(0, 0); 3]), GroupStep::Park);
    }
    assert_eq!(world.state.lattice.holding(GroupRows::of(&[], world.state.top())).rows(), 1);
}

#[test]
fn prefill_is_cut_to_what_decode_leaves_of_the_top_bucket() {
    let (bucket, grants, _) = ready(1, 128).replayed(&[(60, 500)]);
    assert_eq!((bucket.rows(), grants[0]), (128, Grant { decode_rows: 60, prefill_rows: 68 }));
}

#[test]
fn the_top_is_recorded_first_and_small_buckets_before_serving() {
    let mut world = World::new(2, 512, false, Policy::NONE);
    let mut recorded = Vec::new();
    loop {
        match world.step(&[(1, 0), (0, 0)]) {
            GroupStep::Record(bucket) => recorded.push(bucket.rows()),
            GroupStep::Step { .. } => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(recorded, [512, 8, 4, 2, 1]);
    assert!(world.state.ready());
}

#[test]
fn an_unrecorded_bucket_is_replaced_by_the_next_above_and_recorded_when_it_pays() {
    let mut world = World::new(1, 512, false, Policy::NONE).started();
    let mut steps = 0;
    let recorded = loop {
        match world.step(&[(0, 100)]) {
            GroupStep::Step { bucket, .. } => assert_eq!(bucket.rows(), 512),
            GroupStep::Record(bucket) => break bucket.rows(),
            other => panic!("{other:?}"),
        }
        steps += 1;
        assert!(steps < 100, "never recorded");
    };
    assert_eq!(recorded, 104);
    assert!(steps >= 40, "{steps} steps after start-up");
    assert_eq!(world.bucket(&[(0, 100)]), 104);
}

#[test]
fn a_wrong_signature_is_refused_before_the_first_replay() {
    let mut world = World::new(2, 64, true, Policy::NONE);
    assert!(matches!(world.step(&[(0, 0), (0, 0)]), GroupStep::Record(_)));
    let mut facts = world.facts(&[(1, 0), (0, 0)]);
    facts[1].last_signature = 0xbad;
    let divergence = settle(&world.state, &facts).unwrap_err();
    assert_eq!(
        (divergence.what, divergence.lane, divergence.theirs, divergence.ours),
        ("recording signature", 1, 0xbad, SIGNATURE)
    );
}

#[test]
fn lanes_that_diverged_are_named_with_both_values() {
    let world = ready(3, 64);
    let mut facts = world.facts(&[(1, 0), (0, 0), (0, 0)]);
    facts[2].state_hash ^= 1;
    let divergence = settle(&world.state, &facts).unwrap_err();
    assert_eq!((divergence.what, divergence.lane), ("group state", 2));
    let mut facts = world.facts(&[(1, 0), (0, 0), (0, 0)]);
    facts[1].step = StepNo(1);
    assert_eq!(settle(&world.state, &facts).unwrap_err().what, "step");
}

/// Lanes that were started differently must not take a single step together.
#[test]
fn b_37_a_lane_with_another_lattice_policy_or_patience_is_found_at_the_first_exchange() {
    let state = |lattice, lanes, record_all| GroupState::new(Arc::new(lattice), lanes, record_all);
    let base = || state(lattice(64, 8, None), 2, true);
    let patience = Patience { min: Duration::from_secs(3), ..Patience::default() };
    let aligned = Policy { alignment: Some(Alignment::default()), ..Policy::default() };
    let others = [
        ("lanes", state(lattice(64, 8, None), 3, true)),
        ("record_all", state(lattice(64, 8, None), 2, false)),
        ("rows", state(lattice(65, 8, None), 2, true)),
        ("seqs", state(lattice(64, 9, None), 2, true)),
        ("sizes", state(lattice(64, 8, Some(vec![50])), 2, true)),
        ("patience", base().with_patience(patience)),
        ("no policy", base().with_policy(Policy::NONE)),
        ("alignment", base().with_policy(aligned)),
        ("step time", base().with_policy(Policy { step_ms_max: Some(9), ..Policy::default() })),
        ("padding", base().with_policy(Policy { padding_per_mille_max: Some(9), ..Policy::default() })),
    ];
    assert_eq!(base().hash(), base().with_policy(Policy::default()).hash());
    for (what, other) in others {
        assert_ne!(base().hash(), other.hash(), "{what}");
        let facts = [base().hash(), other.hash()].map(|state_hash| Facts {
            step: StepNo(1),
            state_hash,
            ..Facts::default()
        });
        assert_eq!(settle(&base(), &facts).unwrap_err().lane, 1, "{what}");
    }
}

/// All that a later step depends on is in the hash: a lane that knows otherwise is found before it acts.
#[test]
fn what_was_learnt_is_part_of_the_hash() {
    let world = World::ready(2, 64, Policy { alignment: Some(Alignment::default()), ..Policy::default() });
    let facts = world.facts(&[(1, 0), (0, 9)]);
    type Change = fn(&mut GroupState, &[Facts]);
    let changes: [(&str, Change); 7] = [
        ("hold", |s, facts| {
            s.hold.decide(&Alignment::default(), facts, 64);
        }),
        ("slowest", |s, _| s.pace.observe(s.top(), 7, 64, StepNo(1))),
        ("starved", |s, _| s.starved_steps += 1),
        ("spacing", |s, _| s.steps_since_record += 1),
        ("step", |s, _| s.step.0 += 1),
        ("last", |s, _| s.last = Last::Replayed(s.top(), 3)),
        ("before", |s, _| s.before = Some((s.top(), 3))),
    ];
    for (what, change) in changes {
        let mut other = world.state.clone();
        change(&mut other, &facts);
        assert_ne!(other.hash(), world.state.hash(), "{what}");
    }
    let mut measured = world.state.clone();
    (0..2).for_each(|_| measured.pace.observe(measured.top(), 7, 64, StepNo(1)));
    let mut other = measured.clone();
    other.pace.observe(other.top(), 7, 64, StepNo(2));
    assert_ne!(other.hash(), measured.hash(), "when it was measured");
}

#[test]
fn a_group_ends_when_all_ask_and_nobody_has_work() {
    let world = ready(2, 64);
    let mut facts = world.facts(&[(0, 0), (1, 0)]);
    for f in &mut facts {
        f.flags = FactsFlags::EXIT;
    }
    assert!(matches!(settle(&world.state, &facts).unwrap().1, GroupStep::Step { .. }));
    facts[1].decode_rows = 0;
    assert_eq!(settle(&world.state, &facts).unwrap().1, GroupStep::Exit(ExitCause::Asked));
    facts[0].flags = FactsFlags::FATAL;
    let step = settle(&world.state, &facts).unwrap().1;
    assert_eq!(step, GroupStep::Exit(ExitCause::Fatal { lane: 0 }));
}

#[test]
fn patience_follows_the_slowest_replay() {
    let mut world = ready(1, 64);
    world.bucket(&[(4, 0)]);
    assert_eq!(world.state.patience(), Patience::default().first, "a first replay");
    world.cost = (500_000, 0);
    world.bucket(&[(4, 0)]);
    assert_eq!(world.state.patience(), Duration::from_secs(10));
    world.cost = (1000, 0);
    world.bucket(&[(1, 0)]);
    world.bucket(&[(1, 0)]);
    assert_eq!(world.state.patience(), Duration::from_secs(10), "a small bucket may meet a long context too");
}

proptest! {
    /// Whatever lanes want: one bucket, it holds everybody's grant, and nobody is granted more than asked.
    #[test]
    fn a_step_holds_every_grant(wants in prop::collection::vec((0u32..64, 0u32..3000), 1..9)) {
        let mut world = ready(wants.len(), 512);
        match world.step(&wants) {
            GroupStep::Step { bucket, grants, .. } => {
                let grants = granted(&grants, &wants);
                check(&wants, bucket, &grants);
                for (grant, want) in grants.iter().zip(&wants) {
                    prop_assert_eq!(grant.prefill_rows, want.1.min(512 - want.0));
                }
            }
            GroupStep::Park => prop_assert!(wants.iter().all(|w| *w == (0, 0))),
            other => prop_assert!(false, "{:?}", other),
        }
    }

    /// (vllm PR#25906) A dummy run was dispatched with its own count. Here who a lane is makes no
    /// difference: the bucket is that of the group, in whatever order its lanes come. That no count of
    /// one's own can be used is in the types: see the crate's documentation.
    #[test]
    fn b_06_the_bucket_is_a_function_of_the_group(wants in prop::collection::vec((0u32..64, 1u32..3000), 2..9)) {
        let (mut world, mut turned) = (ready(wants.len(), 512), ready(wants.len(), 512));
        let mut others = wants.clone();
        others.rotate_left(1);
        prop_assert_eq!(world.bucket(&wants), turned.bucket(&others));
        others.sort_unstable();
        prop_assert_eq!(world.bucket(&wants), turned.bucket(&others));
    }

    /// (ATOM PR#2006) Buffers for a lane's own budget were fed everybody's rows. Here what fits is
    /// checked against the largest bucket, and no step of any lane is larger.
    #[test]
    fn b_42_no_step_needs_more_workspace_than_was_planned(
        rows_max in 64u32..5000,
        workspace in 1u32..6000,
        multiple_of in 1u32..9,
        wants in prop::collection::vec((0u32..64, 0u32..9000), 1..9),
    ) {
        let args = LatticeArgs {
            rows_max, max_num_seqs: 64, multiple_of, rows_workspace_max: Some(workspace), ..LatticeArgs::default()
        };
        match Lattice::new(&args) {
            Ok(lattice) => {
                let mut world = World::of(lattice, wants.len(), true, Policy::default()).started();
                if let GroupStep::Step { bucket, grants, .. } = world.step(&wants) {
                    prop_assert!(bucket.rows() <= workspace as usize);
                    prop_assert!(granted(&grants, &wants).iter().all(|g| g.rows() as usize <= bucket.rows()));
                }
            }
            Err(error) => prop_assert!(rows_max.next_multiple_of(multiple_of) > workspace, "{}", error),
        }
    }
}

/// Nothing is kept for each lane, so the largest group is as exact as a small one.
#[test]
fn a_group_of_1024_lanes_grants_each_its_own() {
    let mut world = ready(LANES_MAX, 512);
    let wants: Vec<_> = (0..LANES_MAX as u32).map(|l| (l % 30, if l % 3 == 0 { 7 * l } else { 0 })).collect();
    let (bucket, grants, _) = world.replayed(&wants);
    check(&wants, bucket, &grants);
    assert_eq!(bucket.rows(), 512);
    for (lane, (grant, want)) in grants.iter().zip(&wants).enumerate() {
        assert_eq!(grant.prefill_rows, want.1.min(512 - want.0), "lane {lane}");
    }
}

#[test]
#[should_panic(expected = "1025 lanes; a group has at most 1024")]
fn more_lanes_than_facts_are_scanned_for_are_refused() {
    World::new(LANES_MAX + 1, 64, false, Policy::NONE);
}
