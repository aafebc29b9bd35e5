//! How long prompts wait for other lanes', by example and by bound.

use super::*;
use crate::testing::{World, check};
use crate::{GroupStep, Policy, StepNote};
use proptest::prelude::*;

fn aligned(alignment: Alignment) -> Policy {
    Policy { alignment: Some(alignment), ..Policy::NONE }
}

fn ready(lanes: usize, alignment: Alignment) -> World {
    World::ready(lanes, 512, aligned(alignment))
}

/// Steps that prompts wait, and why no longer, with the same facts in each step.
fn waits(world: &mut World, wants: &[(u32, u32)], tell: impl Fn(&mut [Facts])) -> (u8, Release) {
    loop {
        let mut facts = world.facts(wants);
        tell(&mut facts);
        let GroupStep::Step { bucket, grants, note } = world.settle(&facts) else { panic!() };
        check(wants, bucket, grants.as_slice());
        match note.prefill {
            Prefill::Held { .. } => {
                assert!(grants.as_slice().iter().all(|g| g.prefill_rows == 0));
                let decode = wants.iter().map(|w| w.0).max().unwrap() as usize;
                assert!(bucket.rows() < decode + 4, "decode stays in its bucket: {bucket:?}");
            }
            Prefill::Released { steps, why } => {
                assert!(
                    grants.as_slice().iter().zip(wants).all(|(g, w)| g.prefill_rows == w.1.min(512 - w.0))
                );
                return (steps, why);
            }
            Prefill::Free => panic!("{note:?}"),
        }
    }
}

const ALL: Alignment = Alignment {
    target_fill_per_mille: 700,
    hold_steps_max: 20,
    partial_hold_steps_max: 5,
    stall_steps: 3,
    kv_high_per_mille: Some(900),
    kv_low_per_mille: Some(100),
    queue_ms_max: Some(500),
};

#[test]
fn each_reason_ends_a_hold_when_its_time_has_come() {
    let normal = |f: &mut [Facts]| f.iter_mut().for_each(|f| f.kv_per_mille = 500);
    let told = |tell: fn(&mut Facts)| {
        move |f: &mut [Facts]| {
            normal(f);
            tell(&mut f[1]);
        }
    };
    // Lane 0 decodes, lane 1 has prompts, lane 2 has none.
    let lone = [(3, 0), (0, 300), (0, 0)];
    let check = |expected, wants: &[(u32, u32)], tell: &dyn Fn(&mut [Facts])| {
        assert_eq!(waits(&mut ready(3, ALL), wants, tell), expected, "{wants:?}");
    };
    check((20, Release::Limit), &lone, &normal);
    check((5, Release::Partial), &lone, &told(|f| f.flags = FactsFlags::PARTIAL));
    check((0, Release::Cache), &lone, &told(|f| f.kv_per_mille = 900));
    check((0, Release::Cache), &lone, &told(|f| f.kv_per_mille = 99));
    check((20, Release::Limit), &lone, &told(|f| f.kv_per_mille = 100));
    check((0, Release::Queue), &lone, &told(|f| f.oldest_wait_ms = 500));
    check((20, Release::Limit), &lone, &told(|f| f.oldest_wait_ms = 499));
    check((0, Release::NobodyDecodes), &[(0, 0), (0, 300), (0, 0)], &normal);
    // All have prompts: 70% of what fits beside decode rows is enough.
    check((0, Release::Filled), &[(12, 350), (12, 350), (12, 350)], &normal);
    check((3, Release::Stalled), &[(12, 349), (12, 350), (12, 350)], &normal);
    // Who has no prompts has no say about its cache or its queue.
    let idle_is_full = |f: &mut [Facts]| {
        normal(f);
        (f[0].kv_per_mille, f[0].oldest_wait_ms, f[0].flags) = (1000, 9999, FactsFlags::PARTIAL);
    };
    check((20, Release::Limit), &lone, &idle_is_full);
}

#[test]
fn a_group_of_one_lane_and_a_group_without_alignment_never_hold() {
    let mut alone = ready(1, ALL);
    let mut without = World::ready(3, 512, Policy::NONE);
    for _ in 0..50 {
        assert_eq!(alone.replayed(&[(3, 100)]).2, StepNote::default());
        assert_eq!(without.replayed(&[(3, 0), (0, 100), (0, 0)]).2, StepNote::default());
    }
}

/// Rows that keep coming are waited for, until they are enough.
#[test]
fn prompts_that_fill_up_are_waited_for() {
    let mut world = ready(2, Alignment { kv_low_per_mille: None, ..ALL });
    for rows in [100, 150, 200, 250, 300] {
        let note = world.replayed(&[(12, rows), (12, rows)]).2;
        assert!(matches!(note.prefill, Prefill::Held { .. }), "{rows}: {note:?}");
    }
    let note = world.replayed(&[(12, 350), (12, 350)]).2;
    assert_eq!(note.prefill, Prefill::Released { steps: 5, why: Release::Filled });
}

/// (sglang PR#20134) A delayer that held for ever. One lane has prompts at all times and its peers never
/// do: after a few holds in vain there are none, but for a step now and then to see whether it pays.
#[test]
fn b_31_waiting_in_vain_is_given_up() {
    let mut world = ready(4, Alignment { hold_steps_max: 30, kv_low_per_mille: None, ..ALL });
    let wants = [(3, 300), (1, 0), (2, 0), (0, 0)];
    let lengths: Vec<u8> = (0..8).map(|_| waits(&mut world, &wants, |_| ()).0).collect();
    assert_eq!(lengths, [30, 15, 7, 3, 1, 0, 0, 0]);
    let held = (0..1000).filter(|_| matches!(world.replayed(&wants).2.prefill, Prefill::Held { .. })).count();
    assert!((1..=65).contains(&held), "{held} of 1000 steps");
    // Once prompts come together, holds are long again.
    for _ in 0..6 {
        assert_eq!(waits(&mut world, &[(3, 500); 4], |_| ()), (0, Release::Filled));
    }
    assert_eq!(waits(&mut world, &wants, |_| ()), (30, Release::Limit));
}

/// (sglang#35241) A delayer locked into a mixed state: lanes whose prompts are one chunk apart stay so.
/// Both have endless prompts of four chunks, and one decode step between a prompt and the next.
#[test]
fn b_29_a_skew_of_one_chunk_is_gone_within_three_steps() {
    let mut world = ready(2, Alignment::default());
    let (mut left, mut gap) = ([4u32, 5], [0u32, 0]);
    let mut last_apart = 0;
    for step in 1..=400 {
        let wants: Vec<_> = (0..2).map(|l| (12, if gap[l] == 0 { left[l] * 500 } else { 0 })).collect();
        let mut facts = world.facts(&wants);
        for (f, left) in facts.iter_mut().zip(left) {
            f.flags = if (1..4).contains(&left) { FactsFlags::PARTIAL } else { FactsFlags::default() };
        }
        let GroupStep::Step { grants, .. } = world.settle(&facts) else { panic!() };
        let ran: Vec<_> = grants.as_slice().iter().map(|g| g.prefill_rows > 0).collect();
        if ran[0] != ran[1] {
            last_apart = step;
        }
        for lane in 0..2 {
            gap[lane] = gap[lane].saturating_sub(1);
            if ran[lane] {
                left[lane] -= 1;
            }
            if left[lane] == 0 {
                (left[lane], gap[lane]) = (4, 1);
            }
        }
        // Every now and then one lane gets a chunk ahead.
        if step % 50 == 0 {
            assert!(last_apart <= step - 50 + 3, "apart in step {last_apart}");
            left[(step / 50) % 2] += 1;
        }
    }
}

#[test]
fn a_rest_ends_a_hold() {
    let mut world = ready(2, ALL);
    let wants = [(3, 0), (0, 300)];
    let tell =
        |facts: &mut [Facts], flags| facts.iter_mut().for_each(|f| (f.kv_per_mille, f.flags) = (500, flags));
    let mut facts = world.facts(&wants);
    tell(&mut facts, FactsFlags::default());
    assert!(matches!(
        world.settle(&facts),
        GroupStep::Step { note: StepNote { prefill: Prefill::Held { steps: 1 }, .. }, .. }
    ));
    let mut facts = world.facts(&wants);
    tell(&mut facts, FactsFlags::PAUSE);
    assert_eq!(world.settle(&facts), GroupStep::Park);
    let (steps, _) = waits(&mut world, &wants, |f| tell(f, FactsFlags::default()));
    assert_eq!(steps, 20, "a new hold, with nothing of the old");
}

fn knobs() -> impl Strategy<Value = Alignment> {
    let share = prop::option::of(0u32..=1000);
    (50u32..=1000, 0u32..100, 0u32..100, 0u32..100, share.clone(), share, prop::option::of(1u32..2000))
        .prop_map(
            |(
                target_fill_per_mille,
                hold,
                partial,
                stall,
                kv_high_per_mille,
                kv_low_per_mille,
                queue_ms_max,
            )| Alignment {
                target_fill_per_mille,
                hold_steps_max: hold,
                partial_hold_steps_max: partial,
                stall_steps: stall,
                kv_high_per_mille,
                kv_low_per_mille,
                queue_ms_max,
            },
        )
}

proptest! {
    /// Whatever the knobs, out of their ranges too, and whatever lanes say.
    #[test]
    fn b_31_no_hold_is_longer_than_thirty_steps_or_without_decode(
        knobs in knobs(),
        steps in prop::collection::vec(
            prop::collection::vec((0u32..4, prop::sample::select(vec![0u32, 0, 9, 600]), 0u16..=1000, 0u32..2000, any::<bool>()), 3),
            1..150,
        ),
    ) {
        let mut world = ready(3, knobs);
        let mut held = 0;
        for lanes in steps {
            let wants: Vec<_> = lanes.iter().map(|l| (l.0, l.1)).collect();
            let mut facts = world.facts(&wants);
            for (f, lane) in facts.iter_mut().zip(&lanes) {
                (f.kv_per_mille, f.oldest_wait_ms) = (lane.2, lane.3);
                f.flags = if lane.4 { FactsFlags::PARTIAL } else { FactsFlags::default() };
            }
            let GroupStep::Step { bucket, grants, note } = world.settle(&facts) else { continue };
            check(&wants, bucket, grants.as_slice());
            let is_held = matches!(note.prefill, Prefill::Held { .. });
            held = if is_held { held + 1 } else { 0 };
            prop_assert!(held <= HOLD_STEPS_MAX);
            prop_assert!(!is_held || wants.iter().any(|w| w.0 > 0));
            prop_assert!(is_held || wants.iter().zip(grants.as_slice()).all(|(w, g)| w.1 == 0 || g.prefill_rows > 0));
        }
    }
}
