//! Worlds whose traces are settled again, and traces that are damaged, short, or of something else.

#![allow(clippy::unwrap_used, reason = "the exemption for tests stops at their helper functions")]

#[path = "common/xml.rs"]
mod xml;

use atom_group::{
    Facts, GroupState, Lattice, LatticeArgs, Policy, TraceEncoder, TraceError, TraceHeader, TraceReader,
    TraceRecord, settle,
};
use atom_sim::{
    DrawingError, Gap, ReplayError, Replayed, Report, TraceEnding, World, WorldArgs, WorldOptions,
};
use std::sync::Arc;

fn world(seed: u64, lanes: usize, faults: bool) -> (Report, Vec<u8>) {
    let args = WorldArgs { lanes, faults, ..WorldArgs::default() };
    let (report, trace) = World::new(seed, &WorldOptions::new(args).unwrap()).run_traced();
    (report.unwrap(), trace)
}

fn replay(trace: &[u8]) -> Replayed {
    Replayed::new(trace, &(0..=u64::MAX)).unwrap()
}

#[test]
fn a_hundred_worlds_with_faults_replay_equal() {
    let (mut steps, mut held, mut calamities, mut bytes) = (0, 0, 0, 0);
    for seed in 0..100 {
        let (report, trace) = world(seed, 1 + seed as usize % 5, true);
        let replayed = replay(&trace);
        assert_eq!(
            (replayed.mismatch.as_ref(), &replayed.ending),
            (None, &TraceEnding::Closed),
            "seed {seed}"
        );
        let totals = &replayed.timelines[0].totals;
        let counts = report.counts;
        let seen = (totals.replays, totals.records, totals.parks, totals.held_steps);
        assert_eq!(seen, (counts.steps, counts.records, counts.parks, counts.held_steps), "seed {seed}");
        assert_eq!(totals.buckets, report.buckets, "seed {seed}");
        let runs: u64 = replayed.timelines[0].runs.iter().map(|run| run.steps).sum();
        assert_eq!(runs, replayed.equal_steps);
        xml::check(&replayed.svg().unwrap()).unwrap();
        assert!(replayed.to_string().contains(&format!("{runs} steps settled again, all equal")));
        steps += runs;
        held += counts.held_steps;
        calamities += counts.calamities;
        bytes += trace.len() as u64;
    }
    assert!(
        steps > 5000 && held > 100 && calamities > 5,
        "{steps} steps, {held} held, {calamities} calamities"
    );
    assert!(bytes / steps < 60, "{} bytes a step", bytes / steps);
}

#[test]
fn a_trace_changes_nothing_in_its_world() {
    let options = WorldOptions::new(WorldArgs::default()).unwrap();
    let (traced, again) = (World::new(7, &options).run_traced(), World::new(7, &options).run_traced());
    assert_eq!(traced.1, again.1);
    assert_eq!(traced.0.unwrap().trace, World::new(7, &options).run().unwrap().trace);
}

/// Where each frame's payload lies.
fn payloads(trace: &[u8]) -> Vec<std::ops::Range<usize>> {
    let (mut at, mut found) = (10, Vec::new());
    while at < trace.len() {
        let length = usize::from(u16::from_le_bytes([trace[at], trace[at + 1]]));
        found.push(at + 4..at + 4 + length);
        at += length + 8;
    }
    found
}

/// Changes a byte of a payload, and all checksums so that they are right again.
fn forge(trace: &[u8], at: usize, change: u8) -> Vec<u8> {
    let mut trace = trace.to_vec();
    trace[at] ^= change;
    let mut chain = 0u32;
    for payload in payloads(&trace) {
        let framed = &trace[payload.start - 4..payload.end];
        chain = framed
            .iter()
            .fold(chain ^ 0x811c_9dc5, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        trace[payload.end..payload.end + 4].copy_from_slice(&chain.to_le_bytes());
    }
    trace
}

#[test]
fn a_changed_byte_in_the_hash_of_a_decision_is_found() {
    let (_, trace) = world(3, 3, false);
    let payloads = payloads(&trace);
    assert_eq!(forge(&trace, payloads[5].start, 0), trace, "checksums as documented");
    // The first payload is the header, the last the end; each step's last 8 bytes are the hash.
    for at in [1, payloads.len() / 2, payloads.len() - 2] {
        for byte in 1..=8 {
            let replayed = replay(&forge(&trace, payloads[at].end - byte, 0x10));
            let mismatch = replayed.mismatch.as_ref().expect("a changed hash");
            assert_eq!((mismatch.step, replayed.equal_steps), (at as u64, at as u64 - 1));
            assert_eq!(mismatch.difference.field, "the hash of the decision");
            assert!(replayed.to_string().contains(&format!("then step {at} of group 0 differs in the hash")));
            assert_eq!(replayed.ending, TraceEnding::Unread);
        }
    }
}

/// A trace of which any byte was forged replays otherwise, or can't be read, or shows other times.
#[test]
fn no_forged_byte_of_a_step_makes_the_replay_panic() {
    let (_, trace) = world(11, 2, false);
    let payloads = payloads(&trace);
    let mut mismatches = 0;
    for payload in payloads.iter().step_by(9) {
        for at in payload.clone() {
            for change in [1, 0x40, 0xff] {
                if let Ok(replayed) = Replayed::new(&forge(&trace, at, change), &(0..=u64::MAX)) {
                    mismatches += u64::from(replayed.mismatch.is_some());
                    xml::check(&replayed.svg().unwrap()).unwrap();
                    assert!(replayed.to_string().contains("trace  "));
                }
            }
        }
    }
    assert!(mismatches > 500, "{mismatches}");
}

#[test]
fn a_damaged_trace_replays_up_to_the_damage() {
    let (_, mut trace) = world(3, 2, false);
    let payloads = payloads(&trace);
    let at = payloads[8].start + 1;
    trace[at] ^= 1;
    let replayed = replay(&trace);
    let offset = payloads[8].start - 4;
    let error = TraceError::Corrupt { offset, what: "the checksum of a record" };
    assert_eq!((replayed.equal_steps, replayed.ending), (7, TraceEnding::Damaged(error)));
}

#[test]
fn a_trace_of_a_killed_writer_replays_to_its_last_whole_record() {
    let (_, trace) = world(3, 2, false);
    let payloads = payloads(&trace);
    let end = payloads[20].end;
    let replayed = replay(&trace[..end]);
    let offset = payloads[20].start - 4;
    assert_eq!(replayed.ending, TraceEnding::Cut { offset, bytes: end - offset });
    assert_eq!((replayed.equal_steps, &replayed.mismatch), (19, &None));
    assert!(replayed.to_string().contains(&format!("cut at byte {offset}")));
}

/// Two groups that say what they are told to.
struct Groups {
    states: Vec<GroupState>,
    encoder: TraceEncoder,
    trace: Vec<u8>,
}

impl Groups {
    fn new(groups: usize, policy: Policy) -> Self {
        let lattice = LatticeArgs { rows_max: 16, max_num_seqs: 4, ..LatticeArgs::default() };
        let lattice = Arc::new(Lattice::new(&lattice).unwrap());
        let state = GroupState::new(lattice, 2, false).with_policy(policy);
        let mut trace = Vec::new();
        let encoder = TraceEncoder::new(&TraceHeader::of(&state, groups), &mut trace);
        Self { states: vec![state; groups], encoder, trace }
    }

    /// `keep`: write it down, too.
    fn step(&mut self, group: usize, wants: [(u32, u32); 2], keep: bool) {
        let state = &mut self.states[group];
        let lane = |at: usize| Facts {
            step: state.next_step(),
            state_hash: state.hash(),
            last_signature: 5,
            decode_rows: wants[at].0,
            prefill_rows: wants[at].1,
            replay_us: 1500 - 500 * at as u32,
            ..Facts::default()
        };
        let facts = [lane(0), lane(1)];
        let at_us = 2000 * state.next_step().0;
        let (next, step) = settle(state, &facts).unwrap();
        *state = next;
        if keep {
            self.encoder.step(group, at_us, &facts, &Ok(step), &mut self.trace);
        }
    }

    fn finish(self) -> Vec<u8> {
        let Self { encoder, mut trace, .. } = self;
        encoder.end(&mut trace);
        trace
    }
}

#[test]
fn a_group_with_a_gap_replays_up_to_it_and_others_go_on() {
    let mut groups = Groups::new(2, Policy::default());
    for at in 0..60 {
        let kept = !(20..30).contains(&at);
        if at == 30 {
            groups.encoder.gap(0, 10, &mut groups.trace);
        }
        groups.step(0, [(1, at), (0, 2)], kept);
        groups.step(1, [(2, 0), (1, at % 3)], true);
    }
    let replayed = replay(&groups.finish());
    let gap = Gap { after_step: 20, lost_steps: 10, unchecked_steps: 30 };
    assert_eq!((&replayed.timelines[0].gaps[..], &replayed.timelines[1].gaps[..]), (&[gap][..], &[][..]));
    assert_eq!(
        (replayed.equal_steps, &replayed.mismatch, &replayed.ending),
        (80, &None, &TraceEnding::Closed)
    );
    assert!(replayed.to_string().contains("10 steps are missing after step 20"));
}

/// A new epoch starts from a state that everybody knows: the replay goes on, gap or not.
#[test]
fn a_new_epoch_ends_a_gap() {
    let mut groups = Groups::new(1, Policy::default());
    let first = groups.states[0].clone();
    for at in 0..40 {
        if at == 12 {
            groups.encoder.gap(0, 3, &mut groups.trace);
        }
        if at == 20 {
            groups.states[0] = first.clone();
            groups.encoder.epoch(0, 2, &mut groups.trace);
        }
        groups.step(0, [(1, at), (0, 2)], !(9..12).contains(&at));
    }
    let replayed = replay(&groups.finish());
    let timeline = &replayed.timelines[0];
    assert_eq!(timeline.gaps, [Gap { after_step: 9, lost_steps: 3, unchecked_steps: 8 }]);
    assert_eq!((replayed.equal_steps, &replayed.mismatch), (29, &None));
    let second: Vec<_> = timeline.runs.iter().filter(|run| run.epoch == 2).collect();
    assert_eq!((second[0].first, second[second.len() - 1].last()), (21, 40));
    assert!(replayed.to_string().contains("epoch 2: the group has formed again"));
    xml::check(&replayed.svg().unwrap()).unwrap();
}

/// Steps that are missing without a word are no gap but a difference.
#[test]
fn a_step_that_is_missing_without_a_gap_is_found() {
    let mut groups = Groups::new(1, Policy::default());
    for at in 0..30 {
        groups.step(0, [(1, 3), (0, 2)], at != 20);
    }
    let replayed = replay(&groups.finish());
    let mismatch = replayed.mismatch.unwrap();
    assert_eq!((mismatch.step, replayed.equal_steps), (21, 20));
    assert!(mismatch.difference.replayed.contains("Diverged"), "{mismatch}");
}

fn scene() -> Vec<u8> {
    let mut groups = Groups::new(1, Policy::NONE);
    for _ in 0..6 {
        groups.step(0, [(0, 0), (0, 0)], true);
    }
    groups.step(0, [(0, 30), (0, 0)], true);
    groups.step(0, [(0, 14), (0, 0)], true);
    groups.step(0, [(1, 0), (0, 9)], true);
    for _ in 0..40 {
        groups.step(0, [(1, 0), (1, 0)], true);
    }
    groups.step(0, [(0, 0), (0, 0)], true);
    groups.finish()
}

#[test]
fn the_text_has_a_line_for_each_run_of_equal_steps() {
    let expected = "\
group 0 of 1: 2 lanes, 6 step sizes up to 16 rows
  step    rows  lanes: decode+prompt rows granted/wanted  padding  replay ms
     1      16  record
     2       8  record
     3       4  record
     4       2  record
     5       1  record
     6          park
     7      16  0+16/30  -                                  50.0%  1.50 (-0.50)
     8      16  0+14  -                                     56.2%  1.50 (-0.50)
     9      16  1  0+9                                      68.8%  1.50 (-0.50)
10..49       1  2 x 1                                        0.0%  1.50 (-0.50)
    50          park
steps     50: 43 replays (86.0%), 5 records, 2 parks
rows      120 granted, 31.8% padding
policy    0 steps held prompts; 0 rows cut for time, 0 to an edge
time      0.086 s in steps, 75.0% of it in replays; lanes were 0.021 s faster than the slowest
buckets   1 rows 40 (93.0%), 16 rows 3 (7.0%)
trace     whole, and closed by its writer
replay    50 steps settled again, all equal
";
    assert_eq!(replay(&scene()).to_string(), expected);
}

#[test]
fn only_the_steps_that_are_asked_for_are_shown_and_all_are_compared() {
    let all = replay(&scene());
    let some = Replayed::new(&scene(), &(8..=20)).unwrap();
    assert_eq!(some.equal_steps, all.equal_steps);
    let runs = &some.timelines[0].runs;
    assert_eq!((runs[0].first, runs[runs.len() - 1].last()), (8, 20));
    assert_eq!(some.timelines[0].totals.replays, 13);
    let none = Replayed::new(&scene(), &(1000..=2000)).unwrap();
    assert!(none.timelines[0].runs.is_empty() && none.svg().is_ok());
}

#[test]
fn the_picture_shows_each_kind_of_row() {
    let picture = replay(&scene()).svg().unwrap();
    xml::check(&picture).unwrap();
    for text in
        ["steps 10 to 49: 1 rows\nlane 1: 1 decode+prompt rows, 0 padding", "lane 1: idle, 16 padding"]
    {
        assert!(picture.contains(text), "{text} is not in\n{picture}");
    }
    let run_height = |fill: &str| picture.matches(fill).count();
    for fill in ["#2b6cb0", "#dd7a1f", "#d9dde3", "#eef0f3", "#805ad5", "#68a085"] {
        assert!(run_height(fill) > 1, "{fill} is only in the legend");
    }
}

#[test]
fn a_picture_of_too_many_steps_is_refused() {
    let mut groups = Groups::new(1, Policy::NONE);
    (0..20_010).for_each(|_| groups.step(0, [(1, 0), (1, 0)], true));
    let trace = groups.finish();
    assert_eq!(replay(&trace).svg(), Err(DrawingError::TooWide { steps: 20_010 }));
    assert!(Replayed::new(&trace, &(11..=20_010)).unwrap().svg().is_ok());
}

#[test]
fn a_trace_of_another_build_or_of_nothing_is_refused() {
    let lattice = LatticeArgs { rows_max: 16, max_num_seqs: 4, ..LatticeArgs::default() };
    let state = GroupState::new(Arc::new(Lattice::new(&lattice).unwrap()), 2, false);
    let header = TraceHeader { start_hash: 1, ..TraceHeader::of(&state, 1) };
    let mut trace = Vec::new();
    TraceEncoder::new(&header, &mut trace).end(&mut trace);
    let refused = Replayed::new(&trace, &(0..=u64::MAX)).unwrap_err();
    assert_eq!(refused, ReplayError::OtherStart { recorded: 1, rebuilt: state.hash() });
    let refused = Replayed::new(b"%PDF-1.4", &(0..=u64::MAX)).unwrap_err();
    assert_eq!(refused, ReplayError::Trace(TraceError::NotATrace));
}

/// What is in a trace is what the lanes said, to the word.
#[test]
fn the_header_and_the_facts_are_those_of_the_world() {
    let (report, trace) = world(5, 3, false);
    let mut reader = TraceReader::new(&trace).unwrap();
    assert_eq!((reader.header().lanes, reader.header().groups), (3, 1));
    let (mut at, mut rows) = (0, 0);
    while let Some(TraceRecord::Step(step)) = reader.read().unwrap() {
        at += 1;
        assert!(step.facts.iter().all(|facts| facts.step.0 == at), "step {at}");
        rows += step.facts.iter().map(|f| u64::from(f.decode_rows)).sum::<u64>();
    }
    let counts = report.counts;
    assert!(at > counts.steps && rows > counts.generated_tokens / 2, "{at} steps, {rows} rows");
}
