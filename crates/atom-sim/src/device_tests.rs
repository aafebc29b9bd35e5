//! The device must notice: each case breaks one rule of a step that is right otherwise.

use super::*;
use atom_base::{SamplingParams, SlotId, SlotLoad};
use atom_group::{Lattice, LatticeArgs};
use std::sync::Arc;

const PAGE_SIZE: usize = 2;
const MODEL: FakeModel = FakeModel { vocab: 50, eos: 0, eos_per_mille: 0, nan_per_mille: 0 };

fn device() -> (FakeDevice, Bucket) {
    let config = SchedulerConfig {
        pages: 9,
        page_size: PAGE_SIZE,
        max_num_seqs: 3,
        rows_max: 8,
        max_model_len: 8,
        prefix_cache: true,
        eos: Box::new([0]),
    };
    let bucket =
        Lattice::new(&LatticeArgs { rows_max: 8, max_num_seqs: 3, ..LatticeArgs::default() }).unwrap().top();
    let mut device = FakeDevice::new(&config, MODEL);
    device.record(bucket, false);
    (device, bucket)
}

/// Appends a span that computes `tokens` from position `start` on; its table is `pages`, of which the
/// first `known` were told before. The last row has logits.
fn add(plan: &mut Plan, slot: u32, start: usize, tokens: &[TokenId], pages: &[u32], known: usize) {
    let (slot, first_row) = (SlotId(slot), plan.rows() as u32);
    for (i, &token) in tokens.iter().enumerate() {
        let position = start + i;
        plan.tokens.push(token);
        plan.positions.push(position as u32);
        plan.cache_rows.push(pages[position / PAGE_SIZE] * PAGE_SIZE as u32 + (position % PAGE_SIZE) as u32);
    }
    let entry = |index: usize| TableEntry { slot, index: index as u32, page: PageId(pages[index]) };
    plan.table_entries.extend((known..pages.len()).map(entry));
    plan.spans.push(Span { slot, first_row, rows: tokens.len() as u32, start: start as u32 });
    plan.owners.push(RequestId(slot.0.into()));
    plan.out.push(OutRow {
        row: plan.rows() as u32 - 1,
        slot,
        position: (start + tokens.len()) as u32,
        target: None,
        params: Arc::new(SamplingParams::greedy()),
        mask: None,
    });
}

/// Slot 1 computes three tokens, slot 2 two.
fn first_plan() -> Plan {
    let mut plan = Plan::default();
    add(&mut plan, 1, 0, &[10, 11, 12], &[3, 5], 0);
    add(&mut plan, 2, 0, &[20, 21], &[4], 0);
    plan
}

/// Slot 1 goes on by a token, slot 2 by two, slot 3 starts behind slot 1's first page.
fn second_plan() -> Plan {
    let mut plan = Plan::default();
    add(&mut plan, 1, 3, &[13], &[3, 5], 2);
    add(&mut plan, 2, 2, &[22, 23], &[4, 6], 1);
    add(&mut plan, 3, 2, &[30], &[3, 7], 0);
    plan
}

fn chosen(tokens: &[TokenId]) -> TokenId {
    MODEL.choose(Context::of(tokens), None, &SamplingParams::greedy()).token
}

#[test]
fn tokens_follow_from_what_is_read_back_through_the_tables() {
    let (mut device, bucket) = device();
    let mut results = Vec::new();
    device.replay(bucket, &first_plan(), &mut results).unwrap();
    let tokens = |results: &[ScoredToken]| results.iter().map(|r| r.token).collect::<Vec<_>>();
    assert_eq!(tokens(&results), [chosen(&[10, 11, 12]), chosen(&[20, 21])]);
    device.replay(bucket, &second_plan(), &mut results).unwrap();
    let expected = [chosen(&[10, 11, 12, 13]), chosen(&[20, 21, 22, 23]), chosen(&[10, 11, 30])];
    assert_eq!(tokens(&results), expected);
}

/// Replays the first plan, then the second with one thing wrong.
fn found(spoil: impl FnOnce(&mut Plan)) -> Broken {
    let (mut device, bucket) = device();
    let mut results = Vec::new();
    device.replay(bucket, &first_plan(), &mut results).unwrap();
    let mut plan = second_plan();
    spoil(&mut plan);
    device.replay(bucket, &plan, &mut results).unwrap_err()
}

#[test]
fn every_broken_rule_of_a_plan_is_found() {
    type Case = (&'static str, fn(&mut Plan));
    let cases: [Case; 14] = [
        ("TooLarge", |p| add(p, 1, 4, &[1, 2, 3, 4, 5, 6], &[3, 5, 8, 1, 2], 2)),
        ("TooLarge", |p| p.out.push(p.out[0].clone())),
        ("Malformed", |p| p.positions[0] += 1),
        ("Malformed", |p| p.spans[1].first_row += 1),
        ("Malformed", |p| p.spans[1].slot = SlotId(1)),
        ("Malformed", |p| p.out[1].row = 1),
        ("Malformed", |p| p.out[1].position += 1),
        ("WrongCacheRow", |p| p.cache_rows[0] = 0),
        ("SinkTabled", |p| p.table_entries[0].page = PageId::SINK),
        ("TableGap", |p| p.table_entries[0].index += 1),
        ("NoPage", |p| p.table_entries.retain(|e| e.page != PageId(6))),
        // Slot 3 takes slot 2's page for its own row.
        ("SharedPageWritten", |p| p.table_entries[2].page = PageId(4)),
        ("Unwritten", |p| p.table_entries[1].page = PageId(8)),
        ("NoHistory", |p| {
            let sampling = SamplingParams { presence_penalty: 1.0, ..SamplingParams::default() };
            p.out[0].params = Arc::new(sampling);
        }),
    ];
    for (expected, spoil) in cases {
        let broken = found(spoil);
        assert!(format!("{broken:?}").starts_with(expected), "expected {expected}, found {broken:?}");
    }
}

/// Same tokens, same place, same content: harmless today, and still against invariant 11.
#[test]
fn writing_into_a_shared_page_is_found_even_if_nothing_changes() {
    let (mut device, bucket) = device();
    let mut results = Vec::new();
    device.replay(bucket, &first_plan(), &mut results).unwrap();
    let mut plan = Plan::default();
    add(&mut plan, 1, 3, &[13], &[3, 5], 2);
    add(&mut plan, 3, 1, &[11, 30], &[3, 7], 0);
    let broken = device.replay(bucket, &plan, &mut results).unwrap_err();
    assert_eq!(broken, Broken::SharedPageWritten { owner: RequestId(3), page: PageId(3), users: 2 });
}

#[test]
fn an_overwritten_page_is_found_by_whoever_reads_it_next() {
    let (mut device, bucket) = device();
    let mut results = Vec::new();
    device.replay(bucket, &first_plan(), &mut results).unwrap();
    let mut thief = Plan::default();
    add(&mut thief, 3, 0, &[40], &[3], 0);
    device.replay(bucket, &thief, &mut results).unwrap();
    let mut plan = Plan::default();
    add(&mut plan, 1, 3, &[13], &[3, 5], 2);
    let broken = device.replay(bucket, &plan, &mut results).unwrap_err();
    assert!(matches!(broken, Broken::ForeignRow { owner: RequestId(1), position: 1, .. }), "{broken}");
}

#[test]
fn a_page_in_the_wrong_place_is_found() {
    let (mut device, bucket) = device();
    let mut results = Vec::new();
    device.replay(bucket, &first_plan(), &mut results).unwrap();
    let mut plan = Plan::default();
    add(&mut plan, 3, 4, &[30], &[4, 3, 7], 0);
    let broken = device.replay(bucket, &plan, &mut results).unwrap_err();
    assert!(matches!(broken, Broken::ForeignRow { owner: RequestId(3), position: 2, .. }), "{broken}");
}

/// The device can't know what the prefix should be; whoever compares tokens does.
#[test]
fn a_whole_prefix_of_somebody_else_gives_another_token() {
    let (mut device, bucket) = device();
    let mut results = Vec::new();
    device.replay(bucket, &first_plan(), &mut results).unwrap();
    let mut plan = Plan::default();
    add(&mut plan, 3, 2, &[30], &[4, 7], 0);
    device.replay(bucket, &plan, &mut results).unwrap();
    assert_eq!(results[0].token, chosen(&[20, 21, 30]));
    assert_ne!(results[0].token, chosen(&[10, 11, 30]));
}

#[test]
fn penalties_count_what_was_loaded_and_what_was_chosen_since() {
    let (mut device, bucket) = device();
    let mut results = Vec::new();
    let params = Arc::new(SamplingParams { presence_penalty: 1.0, ..SamplingParams::default() });
    let mut plan = first_plan();
    plan.out[0].params = Arc::clone(&params);
    let (prompt, generated) = (Arc::from([10, 11]), Arc::from([12]));
    plan.slot_loads.push(SlotLoad { slot: SlotId(1), prompt, generated });
    device.replay(bucket, &plan, &mut results).unwrap();
    let first = results[0].token;
    let expected = |tokens: &[TokenId]| {
        let history = History::of(&tokens[..2], &tokens[2..]);
        MODEL.choose(Context::of(tokens), Some(history), &params).token
    };
    assert_eq!(first, expected(&[10, 11, 12]));
    let mut plan = Plan::default();
    add(&mut plan, 1, 3, &[first], &[3, 5], 2);
    plan.out[0].params = Arc::clone(&params);
    device.replay(bucket, &plan, &mut results).unwrap();
    assert_eq!(results[0].token, expected(&[10, 11, 12, first]));
}

#[test]
fn a_bucket_without_recording_is_refused() {
    let (mut device, _) = device();
    let lattice =
        Lattice::new(&LatticeArgs { rows_max: 8, max_num_seqs: 3, ..LatticeArgs::default() }).unwrap();
    let broken = device.replay(lattice.buckets()[0], &Plan::default(), &mut Vec::new());
    assert_eq!(broken, Err(Broken::NoRecording { rows: 1 }));
}

#[test]
fn a_torn_step_writes_a_part_and_shows_the_peers_all() {
    let (mut device, bucket) = device();
    let whole = device.replay(bucket, &first_plan(), &mut Vec::new()).unwrap();
    let operations = device.executed().to_vec();
    let mut plan = Plan::default();
    add(&mut plan, 3, 0, &[40, 41], &[7], 0);
    assert_eq!(device.replay_torn(bucket, &plan), Ok(whole));
    assert_eq!(device.executed(), operations);
    let mut plan = Plan::default();
    add(&mut plan, 3, 2, &[42], &[7, 8], 1);
    let broken = device.replay(bucket, &plan, &mut Vec::new());
    assert_eq!(broken, Err(Broken::Unwritten { owner: RequestId(3), position: 1, page: PageId(7) }));
}
