//! What the group decides, by example and by property.

use super::*;
use crate::{Lattice, LatticeArgs, Patience, Policy};
use atom_base::StepNo;
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

const SIGNATURE: u64 = 0xfeed;

/// A group whose lanes all tell the truth; `facts` says what they want.
struct World {
    state: GroupState,
    signature: u64,
}

impl World {
    fn new(lanes: usize, rows_max: u32, record_all: bool) -> Self {
        let lattice =
            Lattice::new(&LatticeArgs { rows_max, max_num_seqs: rows_max.min(64), ..LatticeArgs::default() })
                .unwrap();
        Self {
            state: GroupState::new(Arc::new(lattice), lanes, record_all).with_policy(Policy::NONE),
            signature: SIGNATURE,
        }
    }

    /// A world past its start-up recordings.
    fn ready(lanes: usize, rows_max: u32) -> Self {
        let mut world = Self::new(lanes, rows_max, true);
        while !matches!(world.step(&vec![(0, 0); lanes]), GroupStep::Park) {}
        world
    }

    fn facts(&self, wants: &[(u32, u32)]) -> Vec<Facts> {
        let fact = |&(decode_rows, prefill_rows): &(u32, u32)| Facts {
            step: self.state.next_step(),
            state_hash: self.state.hash(),
            last_signature: self.signature,
            decode_rows,
            prefill_rows,
            replay_us: 1000,
            ..Facts::default()
        };
        wants.iter().map(fact).collect()
    }

    fn step(&mut self, wants: &[(u32, u32)]) -> GroupStep {
        let facts = self.facts(wants);
        let (state, step) = settle(&self.state, &facts).unwrap();
        self.state = state;
        step
    }

    fn bucket(&mut self, wants: &[(u32, u32)]) -> usize {
        match self.step(wants) {
            GroupStep::Step { bucket, .. } => bucket.rows(),
            other => panic!("{other:?}"),
        }
    }
}

/// The seed's rule: the bucket holds the group's largest count, and it is everybody's.
#[test]
fn every_prefilling_rank_replays_the_groups_bucket() {
    let mut world = World::ready(2, 2048);
    assert_eq!(world.bucket(&[(0, 2048), (0, 256)]), 2048);
    assert_eq!(world.bucket(&[(0, 0), (0, 2048)]), 2048, "an idle lane replays its peer's bucket");
    assert_eq!(world.bucket(&[(0, 256), (0, 256)]), 256);
    assert_eq!(world.bucket(&[(0, 9000), (0, 1)]), 2048, "above the top, work is cut and never eager");
    assert_eq!(world.step(&[(0, 0), (0, 0)]), GroupStep::Park);
}

/// The seed's open case: a decoding lane beside a prefilling one replays the same recording.
#[test]
fn decode_rows_ride_the_prefill_bucket() {
    let mut world = World::ready(3, 2048);
    let GroupStep::Step { bucket, grants, .. } = world.step(&[(7, 0), (0, 1000), (3, 40)]) else { panic!() };
    assert_eq!(bucket.rows(), 1024);
    let grant = |decode_rows, prefill_rows| Grant { decode_rows, prefill_rows };
    assert_eq!(grants.as_slice(), [grant(7, 0), grant(0, 1000), grant(3, 40)]);
}

#[test]
fn buckets_hold_exactly_up_to_their_edge() {
    let mut world = World::ready(1, 512);
    for (rows, bucket) in
        [(1, 1), (2, 2), (3, 4), (8, 8), (9, 12), (32, 32), (33, 40), (255, 256), (257, 288)]
    {
        assert_eq!(world.bucket(&[(0, rows)]), bucket, "{rows} rows");
    }
}

#[test]
fn prefill_is_cut_to_what_decode_leaves_of_the_top_bucket() {
    let mut world = World::ready(1, 128);
    let GroupStep::Step { bucket, grants, .. } = world.step(&[(60, 500)]) else { panic!() };
    assert_eq!((bucket.rows(), grants.as_slice()[0]), (128, Grant { decode_rows: 60, prefill_rows: 68 }));
}

#[test]
fn the_top_is_recorded_first_and_small_buckets_before_serving() {
    let mut world = World::new(2, 512, false);
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
    let mut world = World::new(1, 512, false);
    while !matches!(world.step(&[(0, 0)]), GroupStep::Park) {}
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
    let mut world = World::new(2, 64, true);
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
    let world = World::ready(3, 64);
    let mut facts = world.facts(&[(1, 0), (0, 0), (0, 0)]);
    facts[2].state_hash ^= 1;
    let divergence = settle(&world.state, &facts).unwrap_err();
    assert_eq!((divergence.what, divergence.lane), ("group state", 2));
    let mut facts = world.facts(&[(1, 0), (0, 0), (0, 0)]);
    facts[1].step = StepNo(1);
    assert_eq!(settle(&world.state, &facts).unwrap_err().what, "step");
}

#[test]
fn a_group_ends_when_all_ask_and_nobody_has_work() {
    let mut world = World::ready(2, 64);
    let mut facts = world.facts(&[(0, 0), (1, 0)]);
    for f in &mut facts {
        f.flags = FactsFlags::EXIT;
    }
    assert!(matches!(settle(&world.state, &facts).unwrap().1, GroupStep::Step { .. }));
    facts[1].decode_rows = 0;
    assert_eq!(settle(&world.state, &facts).unwrap().1, GroupStep::Exit(ExitCause::Asked));
    facts[0].flags = FactsFlags::FATAL;
    let (state, step) = settle(&world.state, &facts).unwrap();
    assert_eq!(step, GroupStep::Exit(ExitCause::Fatal { lane: 0 }));
    world.state = state;
}

#[test]
fn patience_follows_the_slowest_replay() {
    let mut world = World::ready(1, 64);
    world.bucket(&[(4, 0)]);
    assert_eq!(world.state.patience(), Patience::default().first, "a first replay");
    let mut facts = world.facts(&[(4, 0)]);
    facts[0].replay_us = 500_000;
    world.state = settle(&world.state, &facts).unwrap().0;
    assert_eq!(world.state.patience(), Duration::from_secs(10));
    world.bucket(&[(1, 0)]);
    world.bucket(&[(1, 0)]);
    assert_eq!(world.state.patience(), Duration::from_secs(10), "a small bucket may meet a long context too");
}

proptest! {
    /// Whatever lanes want: one bucket, it holds everybody's grant, and nobody is granted more than asked.
    #[test]
    fn a_step_holds_every_grant(wants in prop::collection::vec((0u32..70, 0u32..3000), 1..9)) {
        let mut world = World::ready(wants.len(), 512);
        match world.step(&wants) {
            GroupStep::Step { bucket, grants, .. } => {
                let largest = grants.as_slice().iter().map(|g| g.rows()).max().unwrap_or(0);
                prop_assert!(largest as usize <= bucket.rows());
                for (grant, want) in grants.as_slice().iter().zip(&wants) {
                    prop_assert_eq!(grant.decode_rows, want.0);
                    prop_assert_eq!(grant.prefill_rows, want.1.min(512 - want.0));
                }
            }
            GroupStep::Park => prop_assert!(wants.iter().all(|w| *w == (0, 0))),
            other => prop_assert!(false, "{:?}", other),
        }
    }
}
