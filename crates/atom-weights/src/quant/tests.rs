use super::*;

/// Exact in f32, from -4 to 4.
fn values(count: usize) -> Vec<f32> {
    let mut state = 7_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as i32 - (1 << 23)) as f32 / (1 << 21) as f32
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes made by ggml's Python package from the same 64 values.
#[test]
fn quantisers_give_ggmls_bytes() {
    let row = values(64);
    assert_eq!(
        hex(&quantize_q8_0(&row)),
        "ce27bb6d1e708a5ddc8b8f7f7c08f30d1c4949ebf95cdcfb954158dbac7e9df4f599\
         04289e1f46961b6dc417dad00336cfa95f20e17ffcaec16b16feadefae813142a50b"
    );
    assert_eq!(
        hex(&quantize_q4_0(&row)),
        "beb73c918621af82fa4f2fa0d007e99796e3f83762fa8c314aff94893675380bb5c32e9a"
    );
    assert_eq!(
        hex(&quantize_q4_1(&row)),
        "fa3736c3c36e79de507d15b0d05f2ff81678791c3e38f8c362f97c3149ee94793575380ba5b22d89"
    );
}

#[test]
fn blocks_decode_as_the_formulas_say() {
    let half = |value: f32| f16::from_f32(value).to_le_bytes();
    let nibbles: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
    let stored = |i: usize| if i < 16 { i as f32 } else { (31 - i) as f32 };

    let q8: Vec<u8> = half(0.5).into_iter().chain((0..32).map(|i| (i * 8 - 128) as u8)).collect();
    let expected: Vec<f32> = (0..32).map(|i| 0.5 * (i * 8 - 128) as f32).collect();
    assert_eq!(dequantize_bytes(DType::Q8_0, &q8), expected);

    let q4_0: Vec<u8> = half(-0.25).into_iter().chain(nibbles.clone()).collect();
    let expected: Vec<f32> = (0..32).map(|i| -0.25 * (stored(i) - 8.0)).collect();
    assert_eq!(dequantize_bytes(DType::Q4_0, &q4_0), expected);

    let q4_1: Vec<u8> = half(0.125).into_iter().chain(half(-3.0)).chain(nibbles).collect();
    let expected: Vec<f32> = (0..32).map(|i| 0.125 * stored(i) - 3.0).collect();
    assert_eq!(dequantize_bytes(DType::Q4_1, &q4_1), expected);
}

/// Half a step, and what rounding the scale to f16 (2^-11) adds to the largest element.
#[test]
fn a_round_trip_errs_by_half_a_step_at_most() {
    let row = values(32 * 64);
    for (dtype, steps) in [
        (DType::F32, f32::INFINITY),
        (DType::F16, 4096.0),
        (DType::BF16, 512.0),
        (DType::Q8_0, 254.0),
        (DType::Q4_1, 30.0),
        // One end of the range is cut by up to a whole step: 16 levels, zero among them.
        (DType::Q4_0, 8.0),
    ] {
        let bytes = quantize(dtype, &row);
        assert_eq!(bytes.len(), dtype.row_bytes(row.len()));
        let back = dequantize_bytes(dtype, &bytes);
        for (block, back) in row.chunks(32).zip(back.chunks(32)) {
            let largest = block.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            let range = if dtype == DType::Q4_1 { 2.0 * largest } else { largest };
            let bound = if steps.is_finite() { range / steps + largest / 1024.0 } else { 0.0 };
            for (a, b) in block.iter().zip(back) {
                assert!((a - b).abs() <= bound, "{dtype:?}: {a} became {b}, bound {bound}");
            }
        }
    }
}

#[test]
fn blocks_of_equal_values_survive() {
    for dtype in [DType::Q8_0, DType::Q4_0, DType::Q4_1] {
        for value in [0.0, 1.0, -2.0] {
            let back = dequantize_bytes(dtype, &quantize(dtype, &[value; 32]));
            assert!(
                back.iter().all(|&b| (b - value).abs() <= value.abs() / 1024.0),
                "{dtype:?} {value}: {back:?}"
            );
        }
    }
}

#[test]
#[should_panic(expected = "33 values are no whole Q4_1 blocks")]
fn a_row_that_cuts_a_block_is_a_bug_of_the_caller() {
    quantize_q4_1(&[0.0; 33]);
}
