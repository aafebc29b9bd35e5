//! Whatever is written is read again; whatever is damaged is found.

use super::*;
use crate::{
    Alignment, ExitCause, Grant, Grants, GroupState, GroupStep, Lattice, LatticeArgs, Patience, Policy,
    Prefill, Release, StepNote, settle,
};
use atom_base::StepNo;
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

fn state(lanes: usize, rows_max: u32, policy: Policy) -> GroupState {
    let args = LatticeArgs { rows_max, max_num_seqs: rows_max.min(6), ..LatticeArgs::default() };
    let patience = Patience { min: Duration::from_millis(2500), first: Duration::new(61, 7) };
    GroupState::new(Arc::new(Lattice::new(&args).unwrap()), lanes, false)
        .with_patience(patience)
        .with_policy(policy)
}

fn policy() -> impl Strategy<Value = Policy> {
    let bound = || proptest::option::of(1u32..1000);
    let alignment = ((50u32..1000, 1u32..30, 0u32..30, 1u32..30), (bound(), bound(), bound()));
    let alignment = alignment.prop_map(|((fill, hold, partial, stall), (high, low, queue))| Alignment {
        target_fill_per_mille: fill,
        hold_steps_max: hold,
        partial_hold_steps_max: partial,
        stall_steps: stall,
        kv_high_per_mille: high,
        kv_low_per_mille: low,
        queue_ms_max: queue,
    });
    (proptest::option::of(alignment), bound(), bound()).prop_map(|(alignment, step_ms_max, padding)| Policy {
        alignment,
        step_ms_max,
        padding_per_mille_max: padding,
    })
}

/// What a lane says of itself, beside the truth about step, state and signature.
type Said = (u32, u32, u32, u32, u16, u8);

fn said() -> impl Strategy<Value = Said> {
    let rows = || prop_oneof![Just(0u32), 1u32..8, any::<u32>()];
    (prop_oneof![Just(0u32), 0u32..4], rows(), rows(), 1u32..5000, 0u16..1000, 0u8..32)
}

/// A group that settles what lanes say, and its trace. `lies`: at this step the last lane has another
/// state, so that the lanes diverge.
fn traced(header: &TraceHeader, said: &[Vec<Said>], lies: usize) -> (Vec<u8>, Vec<TraceRecord>) {
    let mut out = Vec::new();
    let mut encoder = TraceEncoder::new(header, &mut out);
    let mut states = vec![header.state(); header.groups];
    let mut records = Vec::new();
    for (at, said) in said.iter().enumerate() {
        let group = at % header.groups;
        let state = &mut states[group];
        let lane =
            |(lane, &(decode_rows, prefill_rows, oldest_wait_ms, replay_us, kv, flags)): (usize, &Said)| {
                let facts = Facts {
                    step: state.next_step(),
                    state_hash: state.hash() ^ u64::from(at == lies && lane + 1 == header.lanes),
                    last_signature: 0xfeed,
                    decode_rows,
                    prefill_rows,
                    oldest_wait_ms,
                    replay_us,
                    kv_per_mille: kv,
                    ..Facts::default()
                };
                // Flags as on the wire: in the low half of the last word. None that would end the group.
                let mut words = facts.to_words();
                words[Facts::WORDS - 1] |= u64::from(flags & !5);
                Facts::from_words(words)
            };
        let facts: Vec<_> = said.iter().enumerate().map(lane).collect();
        let outcome = settle(state, &facts).map(|(next, step)| {
            *state = next;
            step
        });
        if at % 7 == 5 {
            encoder.gap(group, at as u64, &mut out);
            records.push(TraceRecord::Gap { group, steps: at as u64 });
        }
        if at % 11 == 10 {
            *state = header.state();
            encoder.epoch(group, at as u64, &mut out);
            records.push(TraceRecord::Epoch { group, epoch: at as u64 });
        }
        let at_us = (at as u64 * 1000).wrapping_sub(at as u64 % 3 * 700);
        encoder.step(group, at_us, &facts, &outcome, &mut out);
        let step_hash = TracedStep::step_hash_of(&facts, &outcome);
        let decision = Decision::of(&facts, &outcome);
        records.push(TraceRecord::Step(TracedStep { group, at_us, facts, decision, step_hash }));
    }
    encoder.end(&mut out);
    (out, records)
}

/// All records, and how it ended.
fn read(bytes: &[u8]) -> (Vec<TraceRecord>, Result<TraceEnd, TraceError>) {
    let mut records = Vec::new();
    let mut reader = match TraceReader::new(bytes) {
        Ok(reader) => reader,
        Err(error) => return (records, Err(error)),
    };
    loop {
        match reader.read() {
            Ok(Some(record)) => records.push(record),
            Ok(None) => return (records, Ok(reader.end().expect("it has come to the end"))),
            Err(error) => return (records, Err(error)),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_sequence_survives(
        policy in policy(), lanes in 1usize..5, groups in 1usize..4, rows_max in 1u32..200,
        said in proptest::collection::vec(proptest::collection::vec(said(), 4), 0..60), lies in 0usize..120,
    ) {
        let header = TraceHeader::of(&state(lanes, rows_max, policy), groups);
        prop_assert_eq!(header.state().hash(), header.start_hash);
        let said: Vec<_> = said.into_iter().map(|said| said[..lanes].to_vec()).collect();
        let (bytes, records) = traced(&header, &said, lies);
        let reader = TraceReader::new(&bytes).unwrap();
        prop_assert_eq!(reader.header(), &header);
        let (got, end) = read(&bytes);
        prop_assert_eq!(got, records);
        prop_assert_eq!(end, Ok(TraceEnd::Closed));
    }

    #[test]
    fn any_facts_survive(lanes in proptest::collection::vec(proptest::array::uniform6(any::<u64>()), 3..40)) {
        let header = TraceHeader::of(&state(3, 8, Policy::default()), 1);
        let mut out = Vec::new();
        let mut encoder = TraceEncoder::new(&header, &mut out);
        let facts: Vec<Vec<Facts>> =
            lanes.chunks_exact(3).map(|l| l.iter().map(|&words| Facts::from_words(words)).collect()).collect();
        for (at, facts) in facts.iter().enumerate() {
            encoder.step(0, (at as u64).wrapping_mul(u64::MAX / 3), facts, &Ok(GroupStep::Park), &mut out);
        }
        let (got, end) = read(&out);
        let got: Vec<_> = got.into_iter().map(|record| match record {
            TraceRecord::Step(step) => step.facts,
            TraceRecord::Gap { .. } | TraceRecord::Epoch { .. } => Vec::new(),
        }).collect();
        prop_assert_eq!(got, facts);
        prop_assert_eq!(end, Ok(TraceEnd::Cut { offset: out.len(), bytes: 0 }));
    }

    /// Random bytes with right frames around them: what checksums can't find must still be an error.
    #[test]
    fn hostile_payloads_are_errors_or_records_and_no_panic(
        payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..60), 0..6), kind in 0u8..5,
    ) {
        let header = TraceHeader::of(&state(2, 8, Policy::default()), 2);
        let mut out = Vec::new();
        let mut encoder = TraceEncoder::new(&header, &mut out);
        for payload in &payloads {
            put_frame(&mut out, &mut encoder.chain, |out| {
                out.push(kind);
                out.extend_from_slice(payload);
            });
        }
        let (records, end) = read(&out);
        prop_assert!(records.len() == payloads.len() || end.is_err() || kind == END);
        // The same for the header.
        let mut out = b"atomstep\x01\0".to_vec();
        payloads.iter().for_each(|payload| put_frame(&mut out, &mut 0, |out| out.extend_from_slice(payload)));
        prop_assert!(read(&out).0.len() < payloads.len().max(1));
    }
}

/// A trace of all that there is: records, holds, gaps, a divergence.
fn sample() -> (Vec<u8>, Vec<TraceRecord>) {
    let policy = Policy { alignment: Some(Alignment::default()), step_ms_max: Some(30), ..Policy::default() };
    let header = TraceHeader::of(&state(2, 40, policy), 2);
    let step = |at: usize| vec![(2, at as u32 % 3 * 40, 1, 900, 10, 0), (at as u32 % 2, 0, 0, 950, 12, 16)];
    let said: Vec<_> = (0..40).map(step).collect();
    traced(&header, &said, 39)
}

#[test]
fn a_trace_cut_anywhere_is_a_clean_prefix() {
    let (bytes, records) = sample();
    let mut whole = 0;
    for length in 0..bytes.len() {
        let (got, end) = read(&bytes[..length]);
        assert_eq!(got, records[..got.len()], "cut to {length} bytes");
        assert!(got.len() >= whole, "more bytes, fewer records");
        whole = got.len();
        match end {
            Ok(TraceEnd::Cut { offset, bytes }) => assert_eq!(offset + bytes, length),
            Err(TraceError::NoHeader { bytes }) => assert!(bytes == length && got.is_empty()),
            other => panic!("cut to {length} bytes: {other:?}"),
        }
    }
    assert_eq!(whole, records.len());
}

#[test]
fn every_changed_byte_is_found() {
    let (bytes, records) = sample();
    for at in 0..bytes.len() {
        for change in [1u8, 0x80, 0xff, 0x55] {
            let mut bytes = bytes.clone();
            bytes[at] ^= change;
            let (got, end) = read(&bytes);
            let error = end.expect_err("a changed byte");
            if let TraceError::Corrupt { offset, .. } = error {
                assert!(offset <= at, "byte {at} changed, found only at {offset}");
            }
            assert_eq!(got, records[..got.len()]);
        }
    }
}

#[test]
fn what_is_missing_twice_or_behind_the_end_is_found() {
    let (bytes, _) = sample();
    // Frames by their lengths.
    let mut frames = vec![10];
    while let Some(length) = bytes.get(frames[frames.len() - 1]..).and_then(|rest| rest.first_chunk()) {
        let next = frames[frames.len() - 1] + bytes::FRAME_BYTES + usize::from(u16::from_le_bytes(*length));
        frames.push(next);
    }
    let check = |bytes: Vec<u8>, what: &str| {
        let (_, end) = read(&bytes);
        assert!(matches!(end, Err(TraceError::Corrupt { .. })), "{what}: {end:?}");
    };
    let (third, fourth, fifth) = (frames[3], frames[4], frames[5]);
    check([&bytes[..third], &bytes[fourth..]].concat(), "a record that is missing");
    check([&bytes[..fourth], &bytes[third..]].concat(), "a record that is there twice");
    check(
        [&bytes[..third], &bytes[fourth..fifth], &bytes[third..fourth], &bytes[fifth..]].concat(),
        "two records that changed places",
    );
    check([&bytes[..], b"more"].concat(), "bytes behind the end");
}

#[test]
fn other_files_and_versions_are_refused_by_name() {
    assert_eq!(read(b"GGUF and so on").1, Err(TraceError::NotATrace));
    assert_eq!(read(b"").1, Err(TraceError::NoHeader { bytes: 0 }));
    assert_eq!(read(b"atomstep\x09\x01").1, Err(TraceError::Version { found: 0x109, known: VERSION }));
}

#[test]
fn the_first_difference_is_named_with_both_values() {
    let note = StepNote { prefill: Prefill::Held { steps: 2 }, ..StepNote::default() };
    let grants = |rows: [u32; 2]| rows.map(|decode_rows| Grant { decode_rows, prefill_rows: 0 }).to_vec();
    let replay = |bucket, rows, note| Decision::Replay { bucket, grants: grants(rows), note };
    let base = replay(3, [1, 2], note);
    let released = Prefill::Released { steps: 2, why: Release::Limit };
    let cases = [
        (Decision::Park, "decision"),
        (replay(4, [1, 5], note), "bucket, by its place in the lattice"),
        (replay(3, [1, 5], note), "grant of lane 1"),
        (replay(3, [1, 2], StepNote { prefill: released, ..note }), "note"),
    ];
    for (other, field) in cases {
        let difference = base.difference(&other).unwrap();
        assert_eq!(difference.field, field);
        assert_ne!(difference.recorded, difference.replayed);
        assert!(other.difference(&base).is_some());
    }
    assert_eq!(base.difference(&base), None);
}

/// The format is the same as when its version was set, whatever `settle` decides today.
#[test]
fn the_format_of_this_version_has_not_changed() {
    let lattice = Arc::new(Lattice::of_sizes(&[1, 4, 30], 4));
    let state = GroupState::new(Arc::clone(&lattice), 2, true).with_policy(Policy::NONE);
    let header = TraceHeader { start_hash: 5, ..TraceHeader::of(&state, 2) };
    let lane = |decode_rows| Facts {
        step: StepNo(1),
        state_hash: 9,
        decode_rows,
        prefill_rows: 300,
        ..Facts::default()
    };
    let facts = [lane(3), lane(0)];
    let cap = lattice.buckets()[2];
    let note = StepNote {
        prefill: Prefill::Released { steps: 3, why: Release::Stalled },
        time_cut_rows: 500,
        edge_cut_rows: 1,
    };
    let differ = Divergence { step: StepNo(3), what: "step", lane: 1, theirs: 2, own_lane: 0, ours: 3 };
    let outcomes = [
        Ok(GroupStep::Park),
        Ok(GroupStep::Record(cap)),
        Ok(GroupStep::Step { bucket: cap, grants: Grants::new(cap, false), note }),
        Ok(GroupStep::Step { bucket: cap, grants: Grants::new(cap, true), note: StepNote::default() }),
        Ok(GroupStep::Exit(ExitCause::Fatal { lane: 1 })),
        Ok(GroupStep::Exit(ExitCause::Asked)),
        Err(differ),
    ];
    let mut bytes = Vec::new();
    let mut encoder = TraceEncoder::new(&header, &mut bytes);
    for (at, outcome) in outcomes.iter().enumerate() {
        encoder.step(at % 2, 100 * at as u64, &facts, outcome, &mut bytes);
    }
    encoder.gap(1, 1000, &mut bytes);
    encoder.epoch(1, 2, &mut bytes);
    encoder.end(&mut bytes);
    let (records, end) = read(&bytes);
    assert_eq!(end, Ok(TraceEnd::Closed));
    for (record, outcome) in records.iter().zip(&outcomes) {
        let TraceRecord::Step(step) = record else { panic!("{record:?}") };
        assert_eq!(step.decision, Decision::of(&facts, outcome));
        assert_eq!(step.step_hash, TracedStep::step_hash_of(&facts, outcome));
    }
    let hash = bytes.iter().fold(0u64, |hash, &byte| hash.rotate_left(9).wrapping_mul(5) ^ u64::from(byte));
    assert_eq!((bytes.len(), hash), (349, 17335408123860439989), "set a new VERSION, then these numbers");
}

#[test]
fn a_steady_step_takes_few_bytes() {
    for (lanes, most) in [(1, 40), (4, 52), (64, 300)] {
        let header = TraceHeader::of(&state(lanes, 8, Policy::default()), 1);
        let mut out = Vec::new();
        let mut encoder = TraceEncoder::new(&header, &mut out);
        let mut group = header.state();
        let mut last = 0;
        for at in 0..100u64 {
            let lane = |lane: u64| Facts {
                step: StepNo(at + 1),
                state_hash: group.hash(),
                last_signature: 7,
                decode_rows: 3,
                replay_us: (9_000 + (at * 31 + lane * 17) % 100) as u32,
                ..Facts::default()
            };
            let facts: Vec<_> = (0..lanes as u64).map(lane).collect();
            let (next, step) = settle(&group, &facts).unwrap();
            group = next;
            last = out.len();
            encoder.step(0, at * 9_100, &facts, &Ok(step), &mut out);
        }
        assert!(out.len() - last <= most, "{lanes} lanes: {} bytes a step", out.len() - last);
    }
}

/// Everything as large as it can be fits into what callers keep free.
#[test]
fn the_longest_record_is_within_its_bound() {
    let lanes = atom_base::limits::RANKS_MAX;
    let header = TraceHeader::of(&state(lanes, 16_384, Policy::default()), 64);
    let mut out = Vec::new();
    let mut encoder = TraceEncoder::new(&header, &mut out);
    assert!(out.len() < TraceEncoder::RECORD_BYTES_MAX);
    let facts: Vec<_> = (0..lanes as u64)
        .map(|lane| Facts::from_words([u64::MAX - lane, lane, lane, u64::MAX, u64::MAX, u64::MAX]))
        .collect();
    let mut world = header.state();
    // A state whose next step is a replay with a listed grant.
    let step = loop {
        let truth = Facts {
            step: world.next_step(),
            state_hash: world.hash(),
            last_signature: 1,
            ..Facts::default()
        };
        let facts = vec![Facts { prefill_rows: 20_000, ..truth }; lanes];
        let (next, step) = settle(&world, &facts).unwrap();
        world = next;
        if matches!(step, GroupStep::Step { .. }) {
            break step;
        }
    };
    let start = out.len();
    encoder.step(63, u64::MAX / 2, &facts, &Ok(step), &mut out);
    let bytes = out.len() - start;
    assert!(bytes > 3000 && bytes < TraceEncoder::RECORD_BYTES_MAX, "{bytes} bytes");
}
