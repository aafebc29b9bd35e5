//! Cuts: to a bucket's edge, and to a step's time; and rests.

use super::*;
use crate::testing::{World, check, lattice};
use crate::{Alignment, Facts, FactsFlags, GroupStep, Policy};
use proptest::prelude::*;

/// µs of a step, and of each row of its bucket.
const COST: (u32, u32) = (2000, 100);

fn time_us(bucket: Bucket) -> u32 {
    COST.0 + COST.1 * bucket.rows() as u32
}

fn paced(lattice: crate::Lattice, lanes: usize, record_all: bool, step_ms_max: u32) -> World {
    let policy = Policy { step_ms_max: Some(step_ms_max), ..Policy::NONE };
    let mut world = World::of(lattice, lanes, record_all, policy);
    world.cost = COST;
    world.started()
}

/// (sglang PR#31487) 3208 tokens replayed the graph of 8192: 2.55 times the work. Every count of rows,
/// until it is done.
#[test]
fn b_05_padding_is_bounded_or_the_step_is_cut() {
    for sizes in [None, Some(vec![8192]), Some(vec![1024, 3000, 8192]), Some(vec![256, 512])] {
        let mut world = World::of(lattice(8192, 256, sizes), 2, true, Policy::default()).started();
        for rows in (1..=8192).step_by(7).chain([3208]) {
            let (mut left, mut replayed, mut steps) = (rows, 0, 0u64);
            while left > 0 {
                let (bucket, grants, note) = world.replayed(&[(0, left), (0, 0)]);
                check(&[(0, left), (0, 0)], bucket, &grants);
                let granted = grants[0].prefill_rows;
                assert_eq!(note.edge_cut_rows, left - granted);
                assert!(note.edge_cut_rows == 0 || granted as usize == bucket.rows(), "cut to the edge");
                left -= granted;
                replayed += bucket.rows() as u64;
                steps += 1;
            }
            // A quarter of padding, or less than what one more step costs.
            let bound = (u64::from(rows) * 4 / 3).max(u64::from(rows + STEP_FIXED_ROWS));
            assert!(replayed <= bound, "{rows} rows: {replayed} in {steps} steps");
        }
    }
}

#[test]
fn b_05_by_name() {
    let mut world = World::of(lattice(8192, 256, Some(vec![8192])), 1, true, Policy::default()).started();
    let (bucket, _, note) = world.replayed(&[(0, 3208)]);
    assert_eq!((bucket.rows(), note.edge_cut_rows), (256, 3208 - 256));
    // Where the pieces would cost more than the padding, there is one step.
    let mut world = World::of(lattice(2048, 8, Some(vec![2048])), 1, true, Policy::default()).started();
    assert_eq!(world.bucket(&[(0, 1100)]), 2048);
    // Without a bound nothing is cut.
    let mut world = World::of(lattice(8192, 256, Some(vec![8192])), 1, true, Policy::NONE).started();
    assert_eq!(world.bucket(&[(0, 3208)]), 8192);
}

#[test]
fn cuts_leave_decode_rows_and_everybodys_prompts_a_row() {
    let sizes = Some(vec![8192]);
    let mut world = World::of(lattice(8192, 256, sizes), 3, true, Policy::default()).started();
    let (bucket, grants, _) = world.replayed(&[(20, 3000), (256, 0), (0, 100)]);
    assert_eq!(bucket.rows(), 256);
    assert_eq!(
        grants.iter().map(|g| (g.decode_rows, g.prefill_rows)).collect::<Vec<_>>(),
        [(20, 236), (256, 0), (0, 100)]
    );
    // An edge of 256 would leave the second lane's prompts nothing.
    assert_eq!(world.bucket(&[(0, 3000), (256, 10), (0, 100)]), 8192);
}

/// A size that is not recorded yet: the next above wastes much, so prompts are cut to one below until
/// the recording is made, which is sooner than for a saving of decode rows alone.
#[test]
fn an_unrecorded_size_is_cut_or_recorded_rather_than_padded() {
    let mut world = World::of(lattice(2048, 256, Some(vec![512])), 1, false, Policy::default()).started();
    let mut seen = Vec::new();
    for _ in 0..200 {
        match world.step(&[(1, 599)]) {
            GroupStep::Record(bucket) => seen.push(bucket.rows()),
            GroupStep::Step { bucket, note, .. } if seen.is_empty() => {
                assert_eq!((bucket.rows(), note.edge_cut_rows), (2048, 0))
            }
            GroupStep::Step { bucket, note, .. } => {
                assert_eq!((bucket.rows(), note.edge_cut_rows), (512, 88))
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(seen, [512], "the one that is cut to, and not the one that pads");
}

#[test]
fn steps_are_capped_only_while_somebody_decodes() {
    // 2 + 0.1 ms a row: 480 rows are 50 ms.
    let mut world = paced(lattice(2048, 64, None), 2, true, 50);
    assert_eq!(world.bucket(&[(0, 2048), (0, 100)]), 2048);
    let mut last = (0, 0);
    for _ in 0..60 {
        let (bucket, _, note) = world.replayed(&[(0, 2048), (4, 0)]);
        assert!(time_us(bucket) <= 50_000, "{bucket:?}");
        last = (bucket.rows(), note.time_cut_rows);
    }
    // 480 would just fit, which can't be told from 448 without trying it.
    assert_eq!(last, (448, 2048 - 448), "what the bound allows is found");
    assert_eq!(world.bucket(&[(0, 2048), (0, 100)]), 2048);
}

/// Sizes are tried from below, so that none is too slow on the way, and recorded as they turn out to pay.
#[test]
fn a_cap_is_approached_from_below_with_few_recordings() {
    let mut world = paced(lattice(2048, 8, None), 2, false, 50);
    let (mut records, mut last) = (Vec::new(), 0);
    for _ in 0..300 {
        match world.step(&[(0, 2048), (4, 0)]) {
            GroupStep::Record(bucket) => records.push(bucket.rows()),
            GroupStep::Step { bucket, .. } => {
                assert!(time_us(bucket) <= 50_000, "{bucket:?}");
                last = bucket.rows();
            }
            other => panic!("{other:?}"),
        }
    }
    assert!((1..=5).contains(&records.len()) && last >= 256, "{records:?}, then {last}");
}

/// (sglang PR#35017, the other side) Decode fills the bucket that the bound allows: prompts get a row
/// all the same, rarely, in the next recorded bucket.
#[test]
fn prompts_are_not_starved_by_the_bound_of_time() {
    for record_all in [true, false] {
        for alignment in [None, Some(Alignment { hold_steps_max: 30, ..Alignment::default() })] {
            let policy = Policy { alignment, step_ms_max: Some(1), ..Policy::NONE };
            let mut world = World::of(lattice(256, 64, None), 2, record_all, policy);
            world.cost = COST;
            let mut world = world.started();
            let (mut without, mut longest, mut lifted) = (0, 0, 0);
            for _ in 0..1000 {
                let wants = [(8, 200), (8, 0)];
                without += 1;
                if let GroupStep::Step { bucket, grants, .. } = world.step(&wants) {
                    check(&wants, bucket, grants.as_slice());
                    assert!(bucket.rows() <= 12, "{bucket:?}");
                    if grants.as_slice()[0].prefill_rows > 0 {
                        (longest, without, lifted) = (longest.max(without), 0, lifted + 1);
                    }
                }
            }
            let bound = STARVED_STEPS_MAX + 1 + if record_all { 0 } else { RECORD_SPACING_STEPS };
            assert!(longest <= bound + 30, "{longest} steps");
            assert!((20..=1000 / STARVED_STEPS_MAX).contains(&lifted), "{lifted} of 1000 steps");
        }
    }
}

/// A hiccup in one replay of one size must not keep it away for good.
#[test]
fn a_size_that_was_slow_once_is_tried_again() {
    let mut world = paced(lattice(2048, 64, None), 2, true, 50);
    let wants = [(0, 2048), (4, 0)];
    (0..60).for_each(|_| {
        world.step(&wants);
    });
    assert_eq!(world.bucket(&wants), 448);
    let mut facts = world.facts(&wants);
    facts[1].replay_us = 900_000;
    world.settle(&facts);
    assert_eq!(world.bucket(&wants), 416, "now it is avoided");
    let back = (0..400).position(|_| world.bucket(&wants) == 448);
    assert!(back.is_some_and(|steps| steps <= 300), "{back:?}");
}

/// What lanes say while they rest, or are asked to.
fn rest(world: &mut World, wants: &[(u32, u32)], flags: &[FactsFlags]) -> GroupStep {
    let mut facts = world.facts(wants);
    for (f, flags) in facts.iter_mut().zip(flags) {
        f.flags = *flags;
    }
    world.settle(&facts)
}

const RUN: FactsFlags = FactsFlags::PARTIAL;
const PAUSE: FactsFlags = FactsFlags::PAUSE;

/// (vllm#36594) A request that came to another rank re-armed a paused engine in the middle of an
/// operation on it: the group rests, the request waits.
#[test]
fn b_17_work_that_comes_during_a_pause_waits() {
    let mut world = World::ready(3, 64, Policy::default());
    assert_eq!(rest(&mut world, &[(0, 0); 3], &[PAUSE; 3]), GroupStep::Park);
    for _ in 0..20 {
        assert_eq!(rest(&mut world, &[(0, 0), (0, 9), (2, 0)], &[PAUSE; 3]), GroupStep::Park);
    }
    assert!(matches!(rest(&mut world, &[(0, 0), (0, 9), (2, 0)], &[RUN; 3]), GroupStep::Step { .. }));
}

/// (vllm PR#38761) A pause that each rank answered for itself: some ran a dummy, others did not.
#[test]
fn b_19_a_pause_is_everybodys_or_nobodys() {
    let mut world = World::ready(3, 64, Policy::default());
    let wants = [(1, 0), (0, 9), (0, 0)];
    for some in [[PAUSE, RUN, RUN], [RUN, PAUSE, PAUSE], [PAUSE, PAUSE, RUN]] {
        let GroupStep::Step { bucket, grants, .. } = rest(&mut world, &wants, &some) else {
            panic!("{some:?}")
        };
        check(&wants, bucket, grants.as_slice());
        assert_eq!(grants.as_slice()[1].prefill_rows, 9, "those who asked go on with the others");
    }
    assert_eq!(rest(&mut world, &wants, &[PAUSE; 3]), GroupStep::Park);
}

/// (vllm PR#52957) 32 dummy passes for each pause.
#[test]
fn b_21_a_paused_idle_group_runs_no_step() {
    let mut world = World::new(2, 64, true, Policy::default());
    assert_eq!(rest(&mut world, &[(0, 0); 2], &[PAUSE; 2]), GroupStep::Park, "nor a recording");
    let mut world = world.started();
    for flags in [[PAUSE, RUN], [PAUSE; 2], [RUN, PAUSE], [RUN; 2], [PAUSE; 2]] {
        assert_eq!(rest(&mut world, &[(0, 0); 2], &flags), GroupStep::Park);
    }
}

#[test]
fn a_paused_group_that_is_told_to_leave_works_off_what_it_has() {
    let mut world = World::ready(2, 64, Policy::default());
    let both = PAUSE.with(FactsFlags::EXIT);
    let wants = [(1, 0), (0, 0)];
    assert_eq!(rest(&mut world, &wants, &[both, PAUSE]), GroupStep::Park);
    assert!(matches!(rest(&mut world, &wants, &[both; 2]), GroupStep::Step { .. }));
    assert!(matches!(rest(&mut world, &[(0, 0); 2], &[both; 2]), GroupStep::Exit(_)));
    assert!(matches!(rest(&mut world, &wants, &[PAUSE, FactsFlags::FATAL]), GroupStep::Exit(_)));
}

fn policies() -> impl Strategy<Value = Policy> {
    let alignment = prop::option::of((1u32..=30, 0u32..=30).prop_map(|(hold, partial)| Alignment {
        hold_steps_max: hold,
        partial_hold_steps_max: partial,
        ..Alignment::default()
    }));
    (alignment, prop::option::of(1u32..40), prop::option::of(0u32..999)).prop_map(
        |(alignment, step_ms_max, padding_per_mille_max)| Policy {
            alignment,
            step_ms_max,
            padding_per_mille_max,
        },
    )
}

type Told = Vec<(u32, u32, u16, u8)>;

fn told(lanes: usize) -> impl Strategy<Value = Told> {
    let prefill = prop_oneof![Just(0u32), 1u32..40, 1u32..3000];
    prop::collection::vec((0u32..=16, prefill, 0u16..=1000, 0u8..16), lanes)
}

fn tell(facts: &mut [Facts], told: &Told) {
    for (f, lane) in facts.iter_mut().zip(told) {
        f.kv_per_mille = lane.2;
        if lane.3 & 1 > 0 {
            f.flags = f.flags.with(FactsFlags::PARTIAL);
        }
        if lane.3 & 14 == 0 {
            f.flags = f.flags.with(FactsFlags::PAUSE);
        }
        // Devices differ, and from step to step.
        f.replay_us += u32::from(lane.3) * 37;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// (TensorRT-LLM PR#14020) A collective was guarded by what one rank could fit. Whatever lanes say of
    /// caches, times, pauses: they take the same steps (`World` settles for two of them apart), decode
    /// rows ride, nobody gets more than asked, and something runs.
    #[test]
    fn b_34_whatever_lanes_say_they_do_the_same_and_decode_rides(
        policy in policies(),
        record_all: bool,
        sizes in prop::option::of(prop::collection::vec(17u32..=512, 1..4)),
        steps in prop::collection::vec(told(4), 1..120),
    ) {
        let mut world = World::of(lattice(512, 16, sizes), 4, record_all, policy);
        world.cost = COST;
        let mut world = world.started();
        for lanes in steps {
            let wants: Vec<_> = lanes.iter().map(|l| (l.0, l.1)).collect();
            let mut facts = world.facts(&wants);
            tell(&mut facts, &lanes);
            let paused = facts.iter().all(|f| f.flags.has(FactsFlags::PAUSE));
            let idle = wants.iter().all(|w| *w == (0, 0));
            match world.settle(&facts) {
                GroupStep::Step { bucket, grants, .. } => check(&wants, bucket, grants.as_slice()),
                GroupStep::Record(bucket) => prop_assert!(!world.state.has_recorded(bucket)),
                GroupStep::Park => prop_assert!(paused || idle),
                other => prop_assert!(false, "{:?}", other),
            }
        }
        // (vllm#51476) "Engines running" stayed true for good after some order of pause, request, abort
        // and resume. Nothing is predicted here: without rows the group parks, whatever was before.
        prop_assert_eq!(world.step(&[(0, 0); 4]), GroupStep::Park);
    }

    #[test]
    fn b_20_a_group_without_rows_parks_whatever_was_before(
        steps in prop::collection::vec((told(2), 0u8..4), 1..60),
    ) {
        let mut world = World::ready(2, 512, Policy { alignment: Some(Alignment::default()), ..Policy::default() });
        for (lanes, pause) in steps {
            let wants: Vec<_> = lanes.iter().map(|l| (l.0, l.1)).collect();
            let flags = [0, 1].map(|lane| if pause >> lane & 1 > 0 { PAUSE } else { RUN });
            rest(&mut world, &wants, &flags);
            // Everything is aborted, in any state of the pause.
            prop_assert_eq!(rest(&mut world, &[(0, 0); 2], &flags), GroupStep::Park);
        }
    }

    /// Prompts always get on: with a hold, a bound of time and a bound of padding at once.
    #[test]
    fn prompts_always_get_on(policy in policies(), wants in prop::collection::vec((0u32..=16, 0u32..600), 1..5)) {
        let mut world = World::of(lattice(512, 16, None), wants.len(), true, policy);
        world.cost = COST;
        let mut world = world.started();
        let mut without = vec![0u32; wants.len()];
        for _ in 0..200 {
            let GroupStep::Step { grants, .. } = world.step(&wants) else { continue };
            for ((without, want), grant) in without.iter_mut().zip(&wants).zip(grants.as_slice()) {
                *without = if want.1 > 0 && grant.prefill_rows == 0 { *without + 1 } else { 0 };
                prop_assert!(*without <= 30 + 1 + STARVED_STEPS_MAX, "{:?}", want);
            }
        }
    }
}
