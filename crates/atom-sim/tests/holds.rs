//! How long prompts may be held, with the real schedulers: whatever the knobs say, the load, the lanes.

#![allow(clippy::unwrap_used, reason = "the exemption for tests stops at their helper functions")]

mod common;

use atom_base::RequestId;
use atom_base::rng::philox;
use atom_group::{Alignment, GroupStep, HOLD_STEPS_MAX, PolicyError, Prefill};
use common::group::{Group, aligned, long};

/// What one group did.
#[derive(Default)]
struct Holds {
    /// Steps in succession in which prompts were held.
    longest: u32,
    /// The same by the group's own count.
    longest_said: u32,
    /// Steps in succession in which a lane had prompts and got no row of them.
    longest_wait: u32,
    /// Steps in which prompts were held.
    held: u64,
}

/// Random load on so many lanes. Somebody decodes nearly always; prompts are short or take many chunks, come
/// alone or to many lanes at once, and some of those who wait are aborted.
fn serve(lanes: usize, seed: u32, alignment: Alignment) -> Holds {
    let mut group = Group::new(lanes, &long(128), aligned(alignment));
    let (mut holds, mut run, mut waits) = (Holds::default(), 0, vec![0; lanes]);
    let mut lane_of = Vec::new();
    for step in 0..600u32 {
        let [coin, place, length, kind] = philox([step, 0, 0, 0], [seed, lanes as u32]);
        let busy = if step / 100 % 2 == 0 { 8 } else { 40 };
        let many = if kind % 13 == 0 { lanes } else { 1 };
        for nth in (0..many).take_while(|_| coin % busy == 0 || step == 0) {
            let (lane, prompt) = ((place as usize + nth) % lanes, [5, 40, 120, 600][length as usize % 4]);
            lane_of.push(lane);
            group.submit(lane, lane_of.len() as u64, prompt + kind as usize % 50, 1 + kind % 90);
        }
        if coin % 37 == 1 && !lane_of.is_empty() {
            let gone = place as usize % lane_of.len();
            group.members[lane_of[gone]].lane.abort(RequestId(gone as u64 + 1)).unwrap();
        }
        let facts = group.facts();
        let GroupStep::Step { grants, note, .. } = group.settled(&facts) else {
            (run, waits) = (0, vec![0; lanes]);
            continue;
        };
        if let Prefill::Held { steps } = note.prefill {
            run += 1;
            holds.held += 1;
            holds.longest_said = holds.longest_said.max(steps.into());
        } else {
            run = 0;
        }
        for (wait, said) in waits.iter_mut().zip(&facts) {
            let is_put_off = said.prefill_rows > 0 && grants.of(said).prefill_rows == 0;
            *wait = if is_put_off { *wait + 1 } else { 0 };
        }
        holds.longest = holds.longest.max(run);
        holds.longest_wait = holds.longest_wait.max(waits.iter().copied().max().unwrap());
    }
    holds
}

/// Over all lanes and seeds: the longest hold, and how many steps were held.
fn longest(alignment: Alignment) -> (u32, u64) {
    let (mut longest, mut held) = (0, 0);
    for lanes in [2, 3, 4, 7, 16, 64] {
        for seed in 0..if lanes > 8 { 2 } else { 8 } {
            let holds = serve(lanes, seed, alignment);
            assert_eq!(holds.longest, holds.longest_said, "{lanes} lanes, seed {seed}");
            // Nothing else puts prompts off while nobody bounds the time of steps.
            assert!(holds.longest_wait <= holds.longest, "{lanes} lanes, seed {seed}");
            (longest, held) = (longest.max(holds.longest), held + holds.held);
        }
    }
    (longest, held)
}

/// Every knob as far as it goes in favour of waiting.
fn patient(steps: u32) -> Alignment {
    Alignment {
        target_fill_per_mille: 1000,
        hold_steps_max: steps,
        partial_hold_steps_max: steps,
        stall_steps: steps,
        kv_high_per_mille: None,
        kv_low_per_mille: None,
        queue_ms_max: None,
    }
}

#[test]
fn a_hold_lasts_30_steps_at_the_most_with_the_largest_knobs() {
    assert_eq!(HOLD_STEPS_MAX, 30, "what is promised");
    let (longest, held) = longest(patient(HOLD_STEPS_MAX));
    assert!(held > 1000, "{held} steps were held");
    assert_eq!(longest, HOLD_STEPS_MAX, "the bound is met and kept");
}

#[test]
fn a_hold_lasts_8_steps_at_the_most_by_default() {
    let default = Alignment::default();
    let (longest, held) = longest(default);
    assert!(held > 500, "{held} steps were held");
    assert_eq!((longest, default.hold_steps_max), (8, 8));
}

#[test]
fn a_knob_beyond_the_bound_is_refused_and_where_nobody_reads_it_is_cut() {
    for name in [
        "ATOM_PREFILL_DELAYER_TTFT_MAX_TICKS",
        "ATOM_PREFILL_DELAYER_PARTIAL_MAX_TICKS",
        "ATOM_PREFILL_DELAYER_STALL_TICKS",
    ] {
        let set = |ticks: &str| Alignment::parse(|asked| (asked == name).then(|| ticks.to_owned()));
        assert!(set("30").unwrap().is_some(), "{name}");
        for beyond in ["31", "200", "4294967296"] {
            let error = set(beyond).unwrap_err();
            assert!(matches!(&error, PolicyError::Knob { name: named, .. } if *named == name), "{error}");
            assert!(error.to_string().contains("to 30"), "{error}");
        }
    }
    // A policy that was made by hand is bounded all the same.
    assert_eq!(longest(patient(10_000)).0, HOLD_STEPS_MAX);
}
