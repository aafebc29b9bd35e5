use super::*;
use atom_base::SlotId;

const SPEC: WorkSpec =
    WorkSpec { group: 4, kv_heads: 8, window: 0, piece_rows_max: 8, blocks: 264, slots: 256 };

struct Lists {
    tiles: Vec<Tile>,
    pieces: Vec<Piece>,
}

/// `(start, rows)` of each sequence.
fn spans(sequences: &[(u32, u32)]) -> Vec<Span> {
    let mut first_row = 0;
    let span = |(i, &(start, rows)): (usize, &(u32, u32))| {
        let span = Span { slot: SlotId(i as u32 + 1), first_row, rows, start };
        first_row += rows;
        span
    };
    sequences.iter().enumerate().map(span).collect()
}

fn lists(spec: WorkSpec, spans: &[Span]) -> Lists {
    let rows = spans.iter().map(|span| span.rows as usize).sum();
    let room = spec.room(rows);
    let (mut tiles, mut pieces) = (vec![[0; 4]; room.tiles], vec![[0; 8]; room.pieces]);
    let counts = WorkCutter::new(spec, rows).cut(spans, &mut tiles, &mut pieces);
    tiles.truncate(counts.tiles as usize);
    pieces.truncate(counts.pieces as usize);
    Lists { tiles, pieces }
}

/// Every row lies in one tile or in the pieces of one item; those see each position from the window's on once.
fn check(spec: WorkSpec, spans: &[Span]) -> Lists {
    let made = lists(spec, spans);
    let mut rows: Vec<u32> = Vec::new();
    for &[first_row, count, start, slot] in &made.tiles {
        let span = spans.iter().find(|span| span.slot.0 == slot).expect("a span of this step");
        assert!(span.rows > spec.piece_rows_max && count <= spec.tile_rows() && count > 0);
        assert_eq!(start - span.start, first_row - span.first_row);
        rows.extend(first_row..first_row + count);
    }
    let mut slots_used = vec![false; spec.slots as usize];
    for first in made.pieces.iter().filter(|piece| piece[7] & 0xffff == 0) {
        let &[first_row, count, start, slot, from, _, partial, place] = first;
        let span = spans.iter().find(|span| span.slot.0 == slot).expect("a span of this step");
        assert!(span.rows <= spec.piece_rows_max && count <= spec.item_rows() && count > 0);
        assert_eq!(start - span.start, first_row - span.first_row);
        rows.extend(first_row..first_row + count);
        let mut mine: Vec<&Piece> = made.pieces.iter().filter(|piece| piece[0] == first_row).collect();
        mine.sort_by_key(|piece| piece[7] & 0xffff);
        assert_eq!(mine.len() as u32, place >> 16);
        assert_eq!(mine.len() > 1, partial != WHOLE);
        let seen = if spec.window == 0 { 0 } else { (start + 1).saturating_sub(spec.window) };
        assert_eq!(from, split_begin(seen));
        for (number, piece) in mine.iter().enumerate() {
            assert_eq!(piece[..4], first[..4]);
            assert_eq!(piece[6..], [partial, place | number as u32]);
            assert_eq!(split_begin(piece[5]), piece[5], "a piece ends where a split ends");
            if number > 0 {
                assert_eq!(piece[4], mine[number - 1][5], "no gap");
                assert_eq!(piece[5], split_end(piece[4]), "only the first is a run");
            }
            if partial != WHOLE {
                let used = &mut slots_used[partial as usize + number];
                assert!(!std::mem::replace(used, true), "slot {} twice", partial as usize + number);
            }
        }
        let last = mine[mine.len() - 1];
        assert!(last[4] < start + count && last[5] >= start + count, "the last piece holds the item's end");
    }
    rows.sort_unstable();
    let wanted: Vec<u32> = spans.iter().flat_map(|s| s.first_row..s.first_row + s.rows).collect();
    assert_eq!(rows, wanted);
    made
}

#[test]
fn every_row_is_in_one_place() {
    let edges = [1, 2, 3, 4, 5, 8, 9, 31, 32, 33, 64, 127, 128, 129];
    let starts = [0, 1, 255, 256, 4095, 16_383, 16_384, 16_385, 65_535, 65_536, 100_000];
    let mut state = 7_u64;
    let mut next = |end: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % end
    };
    for round in 0..400 {
        let sequences: Vec<(u32, u32)> =
            (0..next(20)).map(|_| (starts[next(starts.len())], edges[next(edges.len())])).collect();
        let spec = WorkSpec {
            group: [1, 2, 3, 4, 7, 16, 20, 32, 128][next(9)],
            kv_heads: [1, 2, 8][next(3)],
            window: [0, 1, 100, 256, 5000][next(5)],
            piece_rows_max: [0, 1, 8, u32::MAX][round % 4],
            blocks: [1, 4, 132, 264][next(4)],
            slots: [0, 1, 2, 7, 1000][next(5)],
        };
        check(spec, &spans(&sequences));
    }
}

#[test]
fn nothing_to_do_is_nothing_in_the_lists() {
    let made = check(SPEC, &[]);
    assert!(made.tiles.is_empty() && made.pieces.is_empty());
    assert_eq!(SPEC.room(0), WorkRoom { tiles: 0, pieces: 0 });
    // No span of a bucket this small can become tiles, so its recording needs no kernel for them.
    assert_eq!(SPEC.room(8).tiles, 0);
    assert_eq!(WorkSpec { piece_rows_max: 0, ..SPEC }.room(8), WorkRoom { tiles: 8, pieces: 0 });
}

#[test]
fn decode_and_prefill_go_different_ways() {
    let made = check(SPEC, &spans(&[(1000, 1), (0, 100), (500, 8), (64, 9)]));
    let mut tiles = made.tiles;
    tiles.sort_unstable();
    assert_eq!(tiles, [[1, 32, 0, 2], [33, 32, 32, 2], [65, 32, 64, 2], [97, 4, 96, 2], [109, 9, 64, 4]]);
    assert!(made.pieces.iter().all(|piece| piece[3] == 1 || piece[3] == 3));
}

#[test]
fn tiles_of_a_span_are_longest_first_and_wide_spans_come_first() {
    let made = check(SPEC, &spans(&[(0, 64), (0, 96), (5000, 40)]));
    let order: Vec<(u32, u32)> = made.tiles.iter().map(|tile| (tile[3], tile[2])).collect();
    assert_eq!(order, [(3, 5032), (3, 5000), (2, 64), (2, 32), (2, 0), (1, 32), (1, 0)]);
}

/// How long blocks take that fetch pieces in order, over how long they would if all were equally busy.
fn unevenness(spec: WorkSpec, made: &Lists) -> f64 {
    let mut loads = vec![0_u64; spec.blocks as usize];
    let mut total = 0;
    for piece in &made.pieces {
        let length = u64::from(piece[5].min(piece[2] + piece[1]) - piece[4]);
        for _ in 0..spec.units() {
            let least = loads.iter_mut().min().expect("there are blocks");
            *least += length;
            total += length;
        }
    }
    let longest = *loads.iter().max().expect("there are blocks");
    longest as f64 * f64::from(spec.blocks) / total as f64
}

#[test]
fn blocks_are_equally_busy() {
    for (batch, context, bound) in [
        (32, 8192, 1.10),
        (33, 8192, 1.10),
        (40, 8192, 1.10),
        (48, 4096, 1.10),
        (65, 2048, 1.15),
        (100, 4096, 1.05),
    ] {
        let made = check(WorkSpec { slots: 2048, ..SPEC }, &spans(&vec![(context - 1, 1); batch]));
        let uneven = unevenness(SPEC, &made);
        assert!(uneven <= bound, "{batch} rows at {context}: {uneven}");
    }
    // Twice as many rows as shares, all alike: nothing is cut, nothing is to be added up.
    let made = check(SPEC, &spans(&[(1023, 1); 66]));
    assert!(made.pieces.len() == 66 && made.pieces.iter().all(|piece| piece[6] == WHOLE));
    // One long sequence is spread over all blocks.
    let made = check(SPEC, &spans(&[(131_071, 1)]));
    assert!(made.pieces.len() > 100 && made.pieces.len() < 128, "{}", made.pieces.len());
}

#[test]
fn few_slots_make_longer_runs_and_no_error() {
    for slots in 0..40 {
        let made = check(WorkSpec { slots, ..SPEC }, &spans(&[(8191, 1), (4095, 1), (300, 2)]));
        let cut = made.pieces.iter().filter(|piece| piece[6] != WHOLE).count();
        assert!(cut <= slots as usize);
    }
}

#[test]
fn lists_depend_on_the_step_only() {
    let (one, other) = (spans(&[(8191, 1), (77, 3), (0, 200)]), spans(&[(1, 1), (9000, 8)]));
    let room = SPEC.room(256);
    let mut cutter = WorkCutter::new(SPEC, 256);
    let reserved = (cutter.wide.as_ptr(), cutter.items.as_ptr(), cutter.loads.as_ptr());
    let mut cut = |spans: &[Span]| {
        let (mut tiles, mut pieces) = (vec![[0; 4]; room.tiles], vec![[0; 8]; room.pieces]);
        let counts = cutter.cut(spans, &mut tiles, &mut pieces);
        (counts, tiles, pieces)
    };
    let first = cut(&one);
    cut(&other);
    assert!(first == cut(&one));
    cut(&spans(&[(5, 1); 256]));
    assert_eq!(
        reserved,
        (cutter.wide.as_ptr(), cutter.items.as_ptr(), cutter.loads.as_ptr()),
        "no allocation"
    );
}

#[test]
#[should_panic(expected = "257 rows of a step where 256 were reserved")]
fn more_rows_than_reserved_are_a_bug() {
    let room = SPEC.room(256);
    let (mut tiles, mut pieces) = (vec![[0; 4]; room.tiles], vec![[0; 8]; room.pieces]);
    WorkCutter::new(SPEC, 256).cut(&spans(&[(0, 257)]), &mut tiles, &mut pieces);
}
