use super::*;
use crate::aligned::{Aligned, Slabs};
use crate::backend::Activations;
use crate::pool::Pool;
use atom_base::rng::uniform;
use atom_ops::Slice;
use atom_weights::Tensor;
use std::sync::Arc;

pub(crate) const DTYPES: [DType; 11] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

/// A tensor of random bits that mean numbers of about 1.
pub(crate) fn random_tensor(dtype: DType, rows: usize, cols: usize, seed: u64) -> Tensor {
    let mut count = 0;
    let mut draw = || {
        count += 1;
        uniform(seed, 0, count, 0) * 2.0 - 1.0
    };
    let mut bytes = Vec::new();
    for _ in 0..rows * cols / dtype.block_elements() {
        let start = bytes.len();
        let scales = match dtype {
            DType::F32 => {
                bytes.extend(draw().to_le_bytes());
                continue;
            }
            DType::F8_E4M3 => unreachable!("has scales"),
            DType::F16 => 1,
            DType::BF16 => {
                bytes.extend(bf16::from_f32(draw()).to_le_bytes());
                continue;
            }
            DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => 1,
            DType::Q4_1 | DType::Q5_1 => 2,
            DType::Q4_K | DType::Q5_K | DType::Q6_K => 0,
        };
        for _ in 0..scales {
            bytes.extend(f16::from_f32(draw()).to_le_bytes());
        }
        for _ in 2 * scales..dtype.block_bytes() {
            // All 256 values, -128 among them.
            bytes.push(((draw() + 1.0) * 128.0) as u8);
        }
        let halves: &[usize] = match dtype {
            DType::Q4_K | DType::Q5_K => &[0, 2],
            DType::Q6_K => &[208],
            _ => &[],
        };
        for at in halves {
            // Scales are up to 63, or 128.
            let half = f16::from_f32(draw() / 64.0);
            bytes[start + at..start + at + 2].copy_from_slice(&half.to_le_bytes());
        }
    }
    let len = bytes.len();
    Tensor::new(dtype, vec![rows, cols], Arc::new(bytes), 0, len)
}

/// Element `col` of a row's bytes, as the format defines it.
pub(crate) fn element(dtype: DType, row: &[u8], col: usize) -> f64 {
    let half = |at: usize| f64::from(f16::from_le_bytes([row[at], row[at + 1]]));
    let block = col / dtype.block_elements() * dtype.block_bytes();
    let nibble = |codes: usize| {
        let byte = row[block + codes + col % 16];
        f64::from(if col % 32 < 16 { byte & 15 } else { byte >> 4 })
    };
    let fifth = |bits: usize| f64::from(row[block + bits + col % 32 / 8] >> (col % 8) & 1) * 16.0;
    // In super-blocks of 256: the block of 32, and the 6 bits of a scale and a minimum for each.
    let b = col % 256 / 32;
    let packed = |at: usize| row[block + 4 + at];
    let scale = || match b {
        0..4 => packed(b) & 63,
        _ => packed(b + 4) & 15 | packed(b - 4) >> 6 << 4,
    };
    let minimum = || match b {
        0..4 => packed(b + 4) & 63,
        _ => packed(b + 4) >> 4 | packed(b) >> 6 << 4,
    };
    let with_minimum = |code: u8| {
        half(block) * f64::from(scale()) * f64::from(code) - half(block + 2) * f64::from(minimum())
    };
    let long_nibble = |codes: usize| row[block + codes + b / 2 * 32 + col % 32] >> (b % 2 * 4) & 15;
    match dtype {
        DType::F32 => f64::from(f32::from_le_bytes(row[col * 4..][..4].try_into().unwrap())),
        DType::F8_E4M3 => unreachable!("has scales"),
        DType::F16 => half(col * 2),
        DType::BF16 => f64::from(bf16::from_le_bytes([row[col * 2], row[col * 2 + 1]])),
        DType::Q8_0 => half(block) * f64::from(row[block + 2 + col % 32] as i8),
        DType::Q4_0 => half(block) * (nibble(2) - 8.0),
        DType::Q4_1 => half(block) * nibble(4) + half(block + 2),
        DType::Q5_0 => half(block) * (nibble(6) + fifth(2) - 16.0),
        DType::Q5_1 => half(block) * (nibble(8) + fifth(4)) + half(block + 2),
        DType::Q4_K => with_minimum(long_nibble(16)),
        DType::Q5_K => with_minimum(long_nibble(48) | (row[block + 16 + col % 32] >> b & 1) << 4),
        DType::Q6_K => {
            let nibble = row[block + b / 4 * 64 + b % 2 * 32 + col % 32] >> (b % 4 / 2 * 4) & 15;
            let upper = row[block + 128 + b / 4 * 32 + col % 32] >> (b % 4 * 2) & 3;
            let scale = row[block + 192 + col % 256 / 16] as i8;
            half(block + 208) * f64::from(scale) * (f64::from(nibble | upper << 4) - 32.0)
        }
    }
}

/// A width of about `inputs` that cuts no block; odd for plain types.
pub(crate) fn width(dtype: DType, inputs: usize) -> usize {
    match dtype.block_elements() {
        1 => inputs - 5,
        block => inputs.next_multiple_of(block),
    }
}

const ACTIVATIONS: [Activations; 4] =
    [Activations::F32, Activations::Int8, Activations::Int16, Activations::Bf16];

/// A product's operands in plain vectors.
struct Case {
    parts: Vec<Slice>,
    rows: usize,
    /// Rows of x and out are listed with gaps between them.
    listed: bool,
    bias: bool,
    /// What rows are made into; they stay as they are if it is f32.
    activations: Activations,
}

struct Made {
    x: Vec<f32>,
    map: Vec<u32>,
    bias: Vec<f32>,
    codes: Vec<u64>,
    scales: Vec<BlockScale>,
}

impl Made {
    fn codes<'a>(
        codes: &'a mut [u64],
        scales: &'a mut [BlockScale],
        rows: usize,
        width: usize,
        form: Form,
    ) -> Codes<'a> {
        assert!(codes.len() * 8 >= rows * width);
        // SAFETY: room for these bytes, by the assert; borrowed for as long.
        let codes = unsafe { Rows::from_raw(codes.as_mut_ptr().cast(), rows, width) };
        Codes { codes, scales: Rows::new(scales, (width / 32).max(1)), rows: RowMap::Dense, form }
    }
}

impl Case {
    fn inputs(&self) -> usize {
        self.parts[0].cols.len()
    }

    fn outputs(&self) -> usize {
        self.parts.iter().map(|part| part.rows.len()).sum()
    }

    fn quantised(&self) -> bool {
        self.parts.iter().any(|part| self.activations.quantise_for(part.tensor.dtype))
    }

    /// Bytes of a row's codes.
    fn width(&self) -> usize {
        self.activations.bytes() * self.inputs()
    }

    fn form(&self, isa: Isa) -> Form {
        match self.activations {
            // Rows that are listed are an expert's.
            Activations::Bf16 if self.listed => Form::Rounded,
            Activations::Bf16 => form_of_rows(isa, self.rows, self.inputs()),
            _ => Form::Integers,
        }
    }

    fn make(&self, isa: Isa) -> Made {
        let (inputs, gap) = (self.inputs(), if self.listed { 3 } else { 1 });
        let map: Vec<u32> = (0..self.rows as u32).map(|row| row * gap).collect();
        let mut x = vec![f32::NAN; self.rows * gap as usize * inputs];
        let width = self.width();
        // As the room has it: floats begin where they may.
        let mut codes = vec![0u64; (self.rows * width).div_ceil(8)];
        let mut scales = vec![BlockScale::default(); self.rows * (width / 32)];
        for (row, &at) in map.iter().enumerate() {
            let at = at as usize * inputs;
            for k in 0..inputs {
                // The same row has the same content in every case.
                x[at + k] = 2.0 * uniform(11, row as u32, k as u32, 0) - 1.0;
            }
        }
        if self.quantised() {
            let made = Made::codes(&mut codes, &mut scales, self.rows, width, self.form(isa));
            for (row, &at) in map.iter().enumerate() {
                // SAFETY: one thread; the set is supported.
                unsafe { made.make(isa, &x[at as usize * inputs..][..inputs], row) };
            }
        }
        let bias = (0..self.outputs() as u32).map(|o| uniform(5, 0, o, 0)).collect();
        Made { x, map, bias, codes, scales }
    }

    /// `[rows, outputs]`, by `workers` workers one after the other, over a poisoned output.
    fn product(&self, isa: Isa, workers: usize, pool: &mut Pool) -> Vec<f32> {
        let Made { mut x, map, bias, mut codes, mut scales } = self.make(isa);
        let mut column = 0;
        let mut parts = Vec::new();
        for part in &self.parts {
            let paired = self.activations.pairs(part.tensor.dtype);
            let data = Slabs::default().piece(Packed::bytes_of(part, paired), "a test").unwrap();
            let weights = Arc::new(Packed::new(part, paired, data, pool));
            parts.push(Part { weights, column });
            column += part.rows.len();
        }
        let mut out = vec![f32::NAN; x.len() / self.inputs() * column];
        let mut scratch = Aligned::zeroed(tile_bytes(self.inputs()), "a test").unwrap();
        // SAFETY: all bytes of it, borrowed for as long.
        let scratch = unsafe { Rows::from_raw(scratch.as_mut_ptr(), 1, scratch.len()) };
        let operands = Operands {
            x: Rows::new(&mut x, self.inputs()),
            x_rows: if self.listed { RowMap::Listed(&map) } else { RowMap::Dense },
            codes: self
                .quantised()
                .then(|| Made::codes(&mut codes, &mut scales, self.rows, self.width(), self.form(isa))),
            bias: self.bias.then_some(&bias),
            out: Rows::new(&mut out, column),
            out_rows: if self.listed { RowMap::Listed(&map) } else { RowMap::Dense },
            scratch,
            weights: None,
            rows: self.rows,
        };
        for worker in 0..workers {
            // SAFETY: the set is supported; one thread.
            unsafe { multiply(isa, &parts, &operands, worker, workers) };
        }
        let gap = if self.listed { 3 } else { 1 };
        let rows = out.chunks(column).enumerate();
        for (_, row) in rows.clone().filter(|(row, _)| row % gap != 0) {
            assert!(row.iter().all(|y| y.is_nan()), "a row that isn't listed was written");
        }
        rows.filter(|(row, _)| row % gap == 0).flat_map(|(_, row)| row.to_vec()).collect()
    }

    /// `(value, sum of magnitudes)` of every output, in f64.
    fn reference(&self) -> Vec<(f64, f64)> {
        let Made { x, map, bias, codes, scales } = self.make(Isa::Portable);
        let (inputs, planes) = (self.inputs(), self.activations.bytes());
        let mut reference = Vec::new();
        for row in 0..self.rows {
            let mut output = 0;
            for part in &self.parts {
                let dtype = part.tensor.dtype;
                for o in part.rows.clone() {
                    let start = if self.bias { f64::from(bias[output]) } else { 0.0 };
                    let (mut sum, mut size) = (start, start.abs());
                    for k in 0..inputs {
                        let plain = x[map[row] as usize * inputs + k];
                        let x = if !self.activations.quantise_for(dtype) {
                            f64::from(plain)
                        } else if self.activations == Activations::Bf16 {
                            bf16::from_f32(plain).to_f64()
                        } else {
                            let byte = |at: usize| codes[at / 8].to_le_bytes()[at % 8] as i8;
                            let plane = |plane| (row * planes + plane) * inputs + k;
                            let at = (0..planes).map(plane);
                            at.map(|at| f64::from(byte(at)) * f64::from(scales[at / 32].step)).sum()
                        };
                        let product = x * element(dtype, part.tensor.row(o), part.cols.start + k);
                        (sum, size) = (sum + product, size + product.abs());
                    }
                    reference.push((sum, size));
                    output += 1;
                }
            }
        }
        reference
    }

    fn check(&self, pool: &mut Pool) -> Vec<f32> {
        let dtypes: Vec<_> = self.parts.iter().map(|part| &part.tensor).collect();
        let what = format!("{dtypes:?}, {} rows, {:?}", self.rows, self.activations);
        let product = self.product(Isa::Portable, 1, pool);
        for (i, (&got, (want, size))) in product.iter().zip(self.reference()).enumerate() {
            assert!(
                (f64::from(got) - want).abs() <= 2e-6 * size + 1e-30,
                "{what}: output {i} is {got}, not {want}"
            );
        }
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            for workers in [1, 2, 3] {
                assert_bits(
                    &self.product(isa, workers, pool),
                    &product,
                    &format!("{what}, {isa}, {workers} workers"),
                );
            }
        }
        product
    }
}

fn assert_bits(a: &[f32], b: &[f32], what: &str) {
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(a), bits(b), "{what}");
}

fn whole(tensor: Tensor) -> Slice {
    Slice { rows: 0..tensor.rows(), cols: 0..tensor.cols(), tensor }
}

/// Each format, set and number of workers against f64 and against each other; each row against the
/// same row alone.
#[test]
fn products_are_right_and_have_the_same_bits_in_every_company() {
    let mut pool = Pool::new(2, &[]).unwrap();
    for (d, dtype) in DTYPES.into_iter().enumerate() {
        for activations in ACTIVATIONS {
            let is_same = activations != Activations::F32 && !activations.quantise_for(dtype);
            if is_same || !activations.suits(dtype) {
                continue;
            }
            for (outputs, inputs) in [(1, 32), (16, 64), (83, 608), (130, 96)] {
                let inputs = width(dtype, inputs);
                let tensor = random_tensor(dtype, outputs, inputs, d as u64);
                let alone = |rows| Case {
                    parts: vec![whole(tensor.clone())],
                    rows,
                    listed: false,
                    bias: false,
                    activations,
                };
                let all = alone(5).check(&mut pool);
                for rows in [1, 2, 3] {
                    let some = alone(rows).product(Isa::detect(), 1, &mut pool);
                    assert_bits(&some, &all[..rows * outputs], "fewer rows");
                }
                for rows in [17, 64] {
                    let more = alone(rows).product(Isa::detect(), 3, &mut pool);
                    assert_bits(&more[..all.len()], &all, "more rows");
                }
            }
        }
    }
}

/// Codes of all bits in both planes at their ends, so that sums of pairs are as large as they get.
#[test]
fn the_largest_codes_do_not_overflow() {
    let mut pool = Pool::new(1, &[]).unwrap();
    for dtype in DTYPES.into_iter().filter(|dtype| dtype.block_elements() > 1) {
        let mut bytes = vec![0xff; dtype.block_bytes()];
        let halves: &[usize] = match dtype {
            DType::Q6_K => &[208],
            DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
            _ => &[0],
        };
        for at in halves {
            bytes[*at..at + 2].copy_from_slice(&f16::from_f32(0.5).to_le_bytes());
        }
        if dtype == DType::Q8_0 {
            bytes[2..].fill(0x80);
        }
        let inputs = dtype.block_elements();
        let len = bytes.len();
        let tensor = Tensor::new(dtype, vec![1, inputs], Arc::new(bytes), 0, len);
        for x in [127.0, -127.0] {
            let want: f64 = (0..inputs).map(|k| x * element(dtype, tensor.row(0), k)).sum();
            let slice = whole(tensor.clone());
            let data = Slabs::default().piece(Packed::bytes_of(&slice, false), "a test").unwrap();
            let weights = Arc::new(Packed::new(&slice, false, data, &mut pool));
            let mut xs = vec![x as f32; 5 * inputs];
            let (mut codes, mut scales) = (vec![0; 5 * inputs], vec![BlockScale::default(); 5 * inputs / 32]);
            quantise_row(Isa::Portable, &xs, &mut codes, &mut scales);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
                let mut out = vec![f32::NAN; 5];
                let operands = Operands {
                    x: Rows::new(&mut xs, inputs),
                    x_rows: RowMap::Dense,
                    codes: Some(Codes {
                        codes: Rows::new(&mut codes, inputs),
                        scales: Rows::new(&mut scales, inputs / 32),
                        rows: RowMap::Dense,
                        form: Form::Integers,
                    }),
                    bias: None,
                    out: Rows::new(&mut out, 1),
                    out_rows: RowMap::Dense,
                    // SAFETY: no byte of it is there to be used.
                    scratch: unsafe { Rows::from_raw(std::ptr::dangling_mut(), 1, 0) },
                    weights: None,
                    rows: 5,
                };
                let parts = [Part { weights: Arc::clone(&weights), column: 0 }];
                // SAFETY: the set is supported; one thread.
                unsafe { multiply(isa, &parts, &operands, 0, 1) };
                for y in out {
                    assert!(
                        (f64::from(y) - want).abs() <= 1e-5 * want.abs(),
                        "{dtype:?} {isa}: {y}, not {want}"
                    );
                }
            }
        }
    }
}

/// With f32 activations, weights in blocks are multiplied as the floats that they stand for.
#[test]
fn exact_products_have_the_bits_of_dequantised_weights() {
    let mut pool = Pool::new(1, &[]).unwrap();
    for dtype in DTYPES {
        let tensor = random_tensor(dtype, 33, width(dtype, 512), 3);
        let plain = Tensor::from_f32(tensor.shape.clone(), atom_weights::quant::dequantize(&tensor));
        let activations = Activations::F32;
        let case =
            |tensor| Case { parts: vec![whole(tensor)], rows: 3, listed: false, bias: false, activations };
        let (blocks, plain) = (case(tensor), case(plain));
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            let want = plain.product(isa, 1, &mut pool);
            assert_bits(&blocks.product(isa, 1, &mut pool), &want, &format!("{dtype:?} {isa}"));
        }
    }
}

#[test]
fn a_few_hundred_rows_are_multiplied_chunk_by_chunk() {
    let mut pool = Pool::new(1, &[]).unwrap();
    for activations in ACTIVATIONS {
        let dtype = if activations.suits(DType::Q4_1) { DType::Q4_1 } else { DType::BF16 };
        let tensor = random_tensor(dtype, 20, 64, 1);
        let case =
            |rows| Case { parts: vec![whole(tensor.clone())], rows, listed: false, bias: true, activations };
        let few = case(CHUNK_ROWS).check(&mut pool);
        for rows in [CHUNK_ROWS + 1, 3 * CHUNK_ROWS - 1] {
            for workers in [1, 2, 7] {
                let many = case(rows).product(Isa::detect(), workers, &mut pool);
                assert!(many.iter().all(|y| !y.is_nan()));
                assert_bits(&many[..few.len()], &few, "chunks");
            }
        }
    }
}

/// A fused projection: parts of different formats, sliced on both sides, with a bias, rows apart.
#[test]
fn slices_of_several_tensors_stand_side_by_side() {
    let mut pool = Pool::new(3, &[]).unwrap();
    for activations in ACTIVATIONS {
        let part = |dtype: DType, rows, cols: Range<usize>| {
            let tensor = random_tensor(dtype, 40, if dtype.block_elements() == 256 { 768 } else { 416 }, 9);
            Slice { tensor, rows, cols }
        };
        let parts = vec![
            part(DType::Q4_1, 3..40, 32..288),
            part(DType::F32, 0..1, 31..287),
            part(DType::Q8_0, 7..24, 64..320),
            part(DType::BF16, 8..40, 3..259),
            part(DType::Q4_0, 39..40, 0..256),
            part(DType::F16, 1..34, 64..320),
            part(DType::Q6_K, 1..34, 512..768),
            part(DType::Q5_0, 2..19, 160..416),
            part(DType::Q4_K, 0..17, 256..512),
            part(DType::Q5_1, 5..7, 32..288),
            part(DType::Q5_K, 39..40, 0..256),
        ];
        let parts: Vec<_> = parts.into_iter().filter(|part| activations.suits(part.tensor.dtype)).collect();
        for rows in [0, 1, 4, 21] {
            for listed in [true, false] {
                Case { parts: parts.clone(), rows, listed, bias: true, activations }.check(&mut pool);
            }
        }
    }
}

#[test]
fn slices_that_cut_a_block_or_leave_the_tensor_are_refused_with_the_numbers() {
    let tensor = random_tensor(DType::Q8_0, 8, 96, 0);
    let refused = |rows, cols| {
        crate::pack::check(&Slice { tensor: tensor.clone(), rows, cols }).unwrap_err().to_string()
    };
    assert!(refused(0..8, 16..96).contains("16..96"));
    assert!(refused(0..8, 0..95).contains("multiples of 32"));
    assert!(refused(0..9, 0..96).contains("0..9"));
    assert!(refused(3..3, 0..96).contains("3..3"));
    assert!(refused(0..8, 32..128).contains("32..128"));
    assert!(refused(0..8, 96..96).contains("96..96"));
    assert!(crate::pack::check(&Slice { tensor: tensor.clone(), rows: 2..5, cols: 32..64 }).is_ok());
}
