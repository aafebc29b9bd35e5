use super::*;
use crate::quant::{dequantize, expand_row, quantize};
use std::path::Path;
use std::sync::Arc;

/// Bits of the f32 that each code stands for, computed from the specification by another program.
fn reference() -> Vec<u32> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden/e4m3.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn codes(shape: [usize; 2], bytes: Vec<u8>) -> Tensor {
    let len = bytes.len();
    Tensor::new(DType::F8_E4M3, shape.to_vec(), Arc::new(bytes), 0, len)
}

fn numbers(dtype: DType, shape: Vec<usize>, values: &[f32]) -> Tensor {
    let bytes = quantize(dtype, values);
    let len = bytes.len();
    Tensor::new(dtype, shape, Arc::new(bytes), 0, len)
}

#[test]
fn every_code_stands_for_the_number_of_the_specification() {
    let reference = reference();
    assert_eq!(reference.len(), 256);
    let one = numbers(DType::F32, vec![], &[1.0]);
    let expanded = dequantize(&codes([1, 256], (0..=255).collect()).scaled(Fp8Scales::Tensor, one));
    for (code, (&bits, found)) in reference.iter().zip(expanded).enumerate() {
        let expected = f32::from_bits(bits);
        if expected.is_nan() {
            assert!(found.is_nan() && code & 0x7f == 0x7f, "code {code:#x}");
        } else {
            assert_eq!(found.to_bits(), bits, "code {code:#x}");
        }
    }
}

#[test]
fn the_nearest_code_of_a_number_is_found() {
    let reference: Vec<f32> = reference().into_iter().map(f32::from_bits).collect();
    for code in (0..=255_u8).filter(|code| code & 0x7f != 0x7f) {
        assert_eq!(nearest(reference[usize::from(code)]), code);
    }
    // Between neighbours: just below, at and just above the middle, on both sides of zero.
    for low in 0..0x7e_u8 {
        let [a, b] = [low, low + 1].map(|code| reference[usize::from(code)]);
        let middle = a.midpoint(b);
        assert_eq!(nearest(middle.next_down()), low);
        assert_eq!(nearest(middle.next_up()), low + 1);
        let even = if low % 2 == 0 { low } else { low + 1 };
        assert_eq!((nearest(middle), nearest(-middle)), (even, even | 0x80));
    }
    assert_eq!([449.0, 1e9, f32::INFINITY, -1e9].map(nearest), [0x7e, 0x7e, 0x7e, 0xfe]);
    assert_eq!(nearest(f32::NAN) & 0x7f, 0x7f);
}

/// Rows and columns that end within a block, and parts of a row that begin and end within one.
#[test]
fn numbers_are_codes_times_the_scale_of_their_place() {
    let (rows, cols) = (7, 11);
    let bytes: Vec<u8> = (0..rows * cols).map(|i| (i * 37 % 0x7f) as u8).collect();
    let block = Fp8Scales::Block { rows: 3, cols: 4 };
    for (form, shape, place) in [
        (Fp8Scales::Tensor, vec![], (|_, _| 0) as fn(usize, usize) -> usize),
        (Fp8Scales::Tensor, vec![1], |_, _| 0),
        (Fp8Scales::Channel, vec![7, 1], |row, _| row),
        (Fp8Scales::Channel, vec![7], |row, _| row),
        (block, vec![3, 3], |row, col| row / 3 * 3 + col / 4),
    ] {
        let count: usize = shape.iter().product();
        let scales: Vec<f32> = (0..count).map(|i| 0.5 + i as f32).collect();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let values = numbers(dtype, shape.clone(), &scales);
            let tensor = codes([rows, cols], bytes.clone()).scaled(form, values);
            let expected = |row: usize, col: usize| {
                VALUES[usize::from(bytes[row * cols + col])] * scales[place(row, col)]
            };
            let whole: Vec<f32> = (0..rows * cols).map(|i| expected(i / cols, i % cols)).collect();
            assert_eq!(dequantize(&tensor), whole, "{form} {dtype:?}");
            let view = tensor.rows_view(4..7);
            assert_eq!(dequantize(&view), whole[4 * cols..], "{form} {dtype:?}");
            for (start, end) in [(0, 1), (3, 9), (5, 7), (4, 8), (10, 11)] {
                let mut part = vec![0.0; end - start];
                expand_row(&tensor, 5, start..end, &mut part);
                assert_eq!(part, whole[5 * cols + start..5 * cols + end], "{form} {start}..{end}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "no scales for blocks of 2 x 4")]
fn scales_of_another_shape_are_the_callers_slip() {
    let block = Fp8Scales::Block { rows: 2, cols: 4 };
    let _ = codes([7, 11], vec![0; 77]).scaled(block, numbers(DType::F32, vec![3, 3], &[1.0; 9]));
}
