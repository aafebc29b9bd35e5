use super::*;

fn row(params: SamplingParams) -> OutRow {
    OutRow { row: 3, slot: SlotId(9), position: 77, target: None, params: Arc::new(params), mask: None }
}

fn words(bytes: &[u8]) -> Vec<u32> {
    (0..bytes.len() / 4).map(|i| word(bytes, i)).collect()
}

#[test]
fn a_row_has_its_fields_where_the_kernels_read_them() {
    let params = SamplingParams {
        temperature: 0.5,
        top_p: 0.25,
        top_k: 40,
        min_p: 0.125,
        seed: 0x0123_4567_89ab_cdef,
        choice: 6,
        presence_penalty: -1.5,
        frequency_penalty: 0.75,
        repetition_penalty: 1.25,
        logit_bias: Box::new([(5, 1.0), (6, 2.0)]),
        logprobs: Some(4),
        prompt_logprobs: Some(20),
    };
    let got = words(&row_bytes(&row(params), 1000));
    let floor = (0.5 * 0.125_f64.ln()).to_bits();
    let f = f32::to_bits;
    let expected = [
        9,
        77,
        2 | 4 | 8 | 16,
        0,
        f(0.5),
        f(0.25),
        floor as u32,
        (floor >> 32) as u32,
        40,
        4,
        6,
        2,
        0x89ab_cdef,
        0x0123_4567,
        f(1.25),
        f(0.75),
        f(-1.5),
        0,
        0,
        0,
    ];
    assert_eq!(got, expected);
}

#[test]
fn a_target_is_scored_without_anything_that_chooses() {
    let params = SamplingParams {
        repetition_penalty: 1.5,
        min_p: 0.1,
        logit_bias: Box::new([(1, 1.0)]),
        prompt_logprobs: Some(3),
        logprobs: Some(7),
        ..SamplingParams::default()
    };
    let got = words(&row_bytes(&OutRow { target: Some(42), ..row(params) }, 1000));
    assert_eq!((got[2], got[3], got[9], got[11]), (SCORES_TARGET | REPORTS, 42, 3, 0));
}

#[test]
fn limits_that_limit_nothing_are_off() {
    for (top_k, expected) in [(0, 0), (1, 1), (999, 999), (1000, 0), (5000, 0)] {
        let got = words(&row_bytes(&row(SamplingParams { top_k, ..SamplingParams::default() }), 1000));
        assert_eq!((got[8], got[2]), (expected, 0), "top_k {top_k}");
    }
}

#[test]
fn results_come_back() {
    let mut bytes = [0xa5; RESULT_BYTES];
    let mut set = |index: usize, value: u32| bytes[index * 4..][..4].copy_from_slice(&value.to_le_bytes());
    set(0, 11);
    set(1, (-0.5_f32).to_bits());
    set(2, 2);
    for (i, (token, logprob)) in [(11, -0.5_f32), (7, -1.5)].into_iter().enumerate() {
        set(4 + i, token);
        set(24 + i, logprob.to_bits());
    }
    let got = result(&bytes);
    assert_eq!((got.token, got.logprob, got.top.as_slice()), (11, -0.5, &[(11, -0.5), (7, -1.5)][..]));
    bytes[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(result(&bytes).is_not_a_number());
}

/// Slot histories after all parts, as lists of tokens in the prompt and generated.
fn replayed(loads: &[SlotLoad], loads_max: usize, tokens_max: usize) -> Vec<(Vec<u32>, Vec<u32>)> {
    let mut slots = vec![(vec![99], vec![99]); 4];
    let (mut records, mut tokens) = (vec![0; loads_max * SEEN_LOAD_BYTES], vec![0; tokens_max * 4]);
    let mut parts = SeenParts::new(loads);
    while let Some(part) = parts.next_part(&mut records, &mut tokens) {
        let (records, tokens) = (words(&records), words(&tokens));
        let mut named = Vec::new();
        for load in records.chunks(8).take(part.loads) {
            let [slot, clears, first, prompt, generated, ..] = *load else { unreachable!() };
            assert!(!named.contains(&slot), "a part names slot {slot} twice");
            named.push(slot);
            let of = &mut slots[slot as usize];
            if clears == 1 {
                *of = (Vec::new(), Vec::new());
            }
            let (first, prompt) = (first as usize, prompt as usize);
            assert!(first + prompt + generated as usize <= part.items);
            of.0.extend(&tokens[first..][..prompt]);
            of.1.extend(&tokens[first + prompt..][..generated as usize]);
        }
    }
    slots
}

#[test]
fn histories_are_cut_into_parts_and_nothing_is_lost() {
    let load = |slot, prompt: std::ops::Range<u32>, generated: std::ops::Range<u32>| SlotLoad {
        slot: SlotId(slot),
        prompt: prompt.collect(),
        generated: generated.collect(),
    };
    // Slot 1 is named again: what the first load brought is forgotten.
    let loads = [load(1, 90..95, 0..3), load(2, 0..10, 20..27), load(3, 0..0, 0..0), load(1, 5..6, 0..0)];
    let list = |range: std::ops::Range<u32>| range.collect::<Vec<_>>();
    let expected = [
        (vec![99], vec![99]),
        (list(5..6), Vec::new()),
        (list(0..10), list(20..27)),
        (Vec::new(), Vec::new()),
    ];
    for loads_max in 1..6 {
        for tokens_max in 1..40 {
            assert_eq!(replayed(&loads, loads_max, tokens_max), expected, "{loads_max} {tokens_max}");
        }
    }
    assert_eq!(SeenParts::new(&[]).next_part(&mut [0; 32], &mut [0; 4]), None);
}

#[test]
fn bias_tables_travel_once_sorted_by_token() {
    let biased =
        |list: &[(TokenId, f32)]| SamplingParams { logit_bias: list.into(), ..SamplingParams::default() };
    let first = OutRow { slot: SlotId(1), ..row(biased(&[(7, 1.0), (3, 2.0), (7, 3.0)])) };
    let plain = OutRow { slot: SlotId(2), ..row(SamplingParams::default()) };
    let other = OutRow { slot: SlotId(3), ..row(biased(&[(1, 4.0)])) };
    let mut tables = BiasTables::new(4);
    let (mut records, mut entries) = ([0; 4 * BIAS_LOAD_BYTES], [0; 8 * BIAS_BYTES]);
    let rows = [first, plain, other];
    let part = tables.update(&rows, &mut records, &mut entries);
    assert_eq!(part, Some(Part { loads: 2, items: 4 }));
    assert_eq!(words(&records)[..8], [1, 0, 3, 0, 3, 3, 1, 0]);
    let f = f32::to_bits;
    assert_eq!(words(&entries)[..8], [3, f(2.0), 7, f(1.0), 7, f(3.0), 1, f(4.0)]);
    assert_eq!(tables.update(&rows, &mut records, &mut entries), None, "the device has them");
    // Another request in slot 1, and one that only scores.
    let next = OutRow { slot: SlotId(1), ..row(biased(&[(2, 5.0)])) };
    let scored = OutRow { slot: SlotId(2), target: Some(1), ..row(biased(&[(2, 5.0)])) };
    assert_eq!(tables.update(&[next, scored], &mut records, &mut entries), Some(Part { loads: 1, items: 1 }));
    assert_eq!(words(&records)[..3], [1, 0, 1]);
}
