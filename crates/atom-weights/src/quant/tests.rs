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
    assert_eq!(
        hex(&quantize_q5_0(&row)),
        "beb3d11176f679321c425f14d58f5e50b00fc21e1dd7f833b6cce6b0c4f4096383ee38036bea60076a855c14"
    );
    assert_eq!(
        hex(&quantize_q5_1(&row)),
        "b83336c32eee890986cde3bda0eb1a70a1af4ff02dd1d2281b34f8c3b6cc62b0c3f3f85383dd28f25bda60065a854b13"
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

/// Blocks of all bits; of the halves among them, one bit of the exponent is cleared so that they are finite.
fn blocks(dtype: DType, count: usize, halves: &[usize]) -> Vec<u8> {
    let mut state = 11_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let mut bytes: Vec<u8> = std::iter::repeat_with(next).take(count * dtype.block_bytes()).collect();
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        halves.iter().for_each(|at| block[at + 1] &= 0xbf);
    }
    bytes
}

/// FNV-1a of the elements' bytes.
fn digest(values: &[f32]) -> u64 {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// What ggml's Python package makes of the same blocks, by `tools/golden/make_blocks.py`: the last three
/// elements of the first block, and a digest of all.
#[test]
#[allow(clippy::excessive_precision, reason = "as they were printed")]
fn blocks_of_all_bits_decode_to_ggmls_floats() {
    for (dtype, halves, last, all) in [
        (
            DType::Q4_0,
            &[0][..],
            [0.00019037723541259766, -0.00019037723541259766, -9.518861770629883e-05],
            0x7ace_8e32_6ca1_cdd2,
        ),
        (
            DType::Q4_1,
            &[0, 2],
            [0.00156325101852417, 0.0018488168716430664, 0.001468062400817871],
            0xe8c8_895e_11ba_57a2,
        ),
        (
            DType::Q5_0,
            &[0],
            [-0.0009518861770629883, 0.00019037723541259766, 0.0010470747947692871],
            0xa6d6_2c47_5706_1bdf,
        ),
        (
            DType::Q5_1,
            &[0, 2],
            [0.0034670233726501465, 0.002039194107055664, 0.0024199485778808594],
            0x355e_9615_96dd_3b9a,
        ),
        (
            DType::Q8_0,
            &[0],
            [-0.006663203239440918, -0.0008566975593566895, 0.001142263412475586],
            0x1eab_5460_02fd_a8ee,
        ),
        (
            DType::Q4_K,
            &[0, 2],
            [-0.0027594566345214844, 0.010947704315185547, 0.007520914077758789],
            0x5ec5_5d7c_87d8_2467,
        ),
        (
            DType::Q5_K,
            &[0, 2],
            [0.004094123840332031, -0.016466617584228516, 0.06577634811401367],
            0x0bf0_79b4_0411_fef2,
        ),
        (
            DType::Q6_K,
            &[208],
            [0.10088539123535156, 0.1457233428955078, 0.05604743957519531],
            0x6f22_647d_0239_46f3,
        ),
    ] {
        let values = dequantize_bytes(dtype, &blocks(dtype, 64, halves));
        let end = dtype.block_elements();
        assert_eq!(values[end - 3..end], last, "{dtype:?}");
        assert_eq!(digest(&values), all, "{dtype:?}");
    }
}

#[test]
fn super_blocks_are_written_as_they_are_read() {
    for (dtype, halves) in [(DType::Q4_K, &[0, 2][..]), (DType::Q5_K, &[0, 2]), (DType::Q6_K, &[208])] {
        for block in blocks(dtype, 16, halves).chunks_exact(dtype.block_bytes()) {
            let mut written = vec![7];
            SuperBlock::read(dtype, block).write(dtype, &mut written);
            assert_eq!(&written[1..], block, "{dtype:?}");
        }
    }
}

/// Half a step of the widest block, half a 63rd (a 127th) that each scale and minimum is off, for every code,
/// and the rounding of the halves.
#[test]
fn super_blocks_err_by_what_codes_and_scales_lose() {
    let mut row = values(256 * 16);
    for (i, value) in row.iter_mut().enumerate() {
        // Blocks of different size side by side, some of them far from zero.
        *value = *value * [0.1, 1.0, 0.5, 2.0][i / 32 % 4] + [0.0, 0.0, 3.0, -3.0][i / 32 % 4];
    }
    row[..256].fill(0.0);
    for (dtype, steps) in [(DType::Q4_K, 15.0), (DType::Q5_K, 31.0), (DType::Q6_K, 32.0)] {
        let back = dequantize_bytes(dtype, &quantize(dtype, &row));
        assert!(back[..256].iter().all(|&v| v == 0.0), "{dtype:?}");
        for (block, back) in row.chunks(256).zip(back.chunks(256)) {
            let largest = block.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            let span = if dtype == DType::Q6_K { largest } else { 2.0 * largest };
            let bound = span / steps / 2.0 + span / 100.0 + largest / 512.0;
            for (a, b) in block.iter().zip(back) {
                assert!((a - b).abs() <= bound, "{dtype:?}: {a} became {b}, bound {bound}");
            }
        }
    }
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
        (DType::Q5_1, 62.0),
        (DType::Q5_0, 16.0),
    ] {
        let bytes = quantize(dtype, &row);
        assert_eq!(bytes.len(), dtype.row_bytes(row.len()));
        let back = dequantize_bytes(dtype, &bytes);
        for (block, back) in row.chunks(32).zip(back.chunks(32)) {
            let largest = block.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            let range = if matches!(dtype, DType::Q4_1 | DType::Q5_1) { 2.0 * largest } else { largest };
            let bound = if steps.is_finite() { range / steps + largest / 1024.0 } else { 0.0 };
            for (a, b) in block.iter().zip(back) {
                assert!((a - b).abs() <= bound, "{dtype:?}: {a} became {b}, bound {bound}");
            }
        }
    }
}

#[test]
fn blocks_of_equal_values_survive() {
    for dtype in [DType::Q8_0, DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1] {
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
fn super_blocks_of_equal_values_survive() {
    for dtype in [DType::Q4_K, DType::Q5_K, DType::Q6_K] {
        for value in [0.0, 1.0, -2.0] {
            let back = dequantize_bytes(dtype, &quantize(dtype, &[value; 256]));
            assert!(
                back.iter().all(|&b| (b - value).abs() <= value.abs() / 512.0),
                "{dtype:?} {value}: {back:?}"
            );
        }
    }
}

#[test]
#[should_panic(expected = "32 values are no whole Q4_K blocks")]
fn a_row_that_cuts_a_super_block_is_a_bug_of_the_caller() {
    quantize(DType::Q4_K, &[0.0; 32]);
}

#[test]
#[should_panic(expected = "33 values are no whole Q4_1 blocks")]
fn a_row_that_cuts_a_block_is_a_bug_of_the_caller() {
    quantize_q4_1(&[0.0; 33]);
}
