use super::*;
use crate::aligned::Slabs;
use crate::pool::Pool;
use crate::quantise::quantise_row;
use atom_base::rng::uniform;
use atom_ops::Slice;
use atom_weights::Tensor;
use std::sync::Arc;

pub(crate) const DTYPES: [DType; 6] =
    [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q4_1];

/// A tensor of random bits that mean numbers of about 1.
pub(crate) fn random_tensor(dtype: DType, rows: usize, cols: usize, seed: u64) -> Tensor {
    let mut count = 0;
    let mut draw = || {
        count += 1;
        uniform(seed, 0, count, 0) * 2.0 - 1.0
    };
    let mut bytes = Vec::new();
    for _ in 0..rows * cols / dtype.block_elements() {
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
            DType::Q8_0 | DType::Q4_0 => 1,
            DType::Q4_1 => 2,
        };
        for _ in 0..scales {
            bytes.extend(f16::from_f32(draw()).to_le_bytes());
        }
        for _ in 2 * scales..dtype.block_bytes() {
            // All 256 values, -128 among them.
            bytes.push(((draw() + 1.0) * 128.0) as u8);
        }
    }
    let len = bytes.len();
    Tensor::new(dtype, vec![rows, cols], Arc::new(bytes), 0, len)
}

/// Element `col` of a row's bytes, as the format defines it.
pub(crate) fn element(dtype: DType, row: &[u8], col: usize) -> f64 {
    let half = |at: usize| f64::from(f16::from_le_bytes([row[at], row[at + 1]]));
    let block = col / 32 * dtype.block_bytes();
    let nibble = |codes: usize| {
        let byte = row[block + codes + col % 16];
        f64::from(if col % 32 < 16 { byte & 15 } else { byte >> 4 })
    };
    match dtype {
        DType::F32 => f64::from(f32::from_le_bytes(row[col * 4..][..4].try_into().unwrap())),
        DType::F8_E4M3 => unreachable!("has scales"),
        DType::F16 => half(col * 2),
        DType::BF16 => f64::from(bf16::from_le_bytes([row[col * 2], row[col * 2 + 1]])),
        DType::Q8_0 => half(block) * f64::from(row[block + 2 + col % 32] as i8),
        DType::Q4_0 => half(block) * (nibble(2) - 8.0),
        DType::Q4_1 => half(block) * nibble(4) + half(block + 2),
    }
}

/// A product's operands in plain vectors.
struct Case {
    parts: Vec<Slice>,
    rows: usize,
    /// Rows of x and out are listed with gaps between them.
    listed: bool,
    bias: bool,
    /// Planes of codes of a row; f32 if there are none.
    planes: usize,
}

struct Made {
    x: Vec<f32>,
    map: Vec<u32>,
    bias: Vec<f32>,
    codes: Vec<i8>,
    scales: Vec<BlockScale>,
}

impl Case {
    fn inputs(&self) -> usize {
        self.parts[0].cols.len()
    }

    fn outputs(&self) -> usize {
        self.parts.iter().map(|part| part.rows.len()).sum()
    }

    fn quantised(&self) -> bool {
        self.planes > 0 && self.parts.iter().any(|part| part.tensor.dtype.block_elements() > 1)
    }

    fn make(&self) -> Made {
        let (inputs, gap) = (self.inputs(), if self.listed { 3 } else { 1 });
        let map: Vec<u32> = (0..self.rows as u32).map(|row| row * gap).collect();
        let mut x = vec![f32::NAN; self.rows * gap as usize * inputs];
        let width = self.planes * inputs;
        let (mut codes, mut scales) =
            (vec![0; self.rows * width], vec![BlockScale::default(); self.rows * width / 32]);
        for row in 0..self.rows {
            let at = map[row] as usize * inputs;
            for k in 0..inputs {
                // The same row has the same content in every case.
                x[at + k] = 2.0 * uniform(11, row as u32, k as u32, 0) - 1.0;
            }
            if self.quantised() {
                let (codes, scales) = (&mut codes[row * width..], &mut scales[row * width / 32..]);
                let (codes, scales) = (&mut codes[..width], &mut scales[..width / 32]);
                quantise_row(Isa::Portable, &x[at..at + inputs], codes, scales);
            }
        }
        let bias = (0..self.outputs() as u32).map(|o| uniform(5, 0, o, 0)).collect();
        Made { x, map, bias, codes, scales }
    }

    /// `[rows, outputs]`, by `workers` workers one after the other, over a poisoned output.
    fn product(&self, isa: Isa, workers: usize, pool: &mut Pool) -> Vec<f32> {
        let Made { mut x, map, bias, mut codes, mut scales } = self.make();
        let mut column = 0;
        let mut parts = Vec::new();
        for part in &self.parts {
            let data = Slabs::default().piece(Packed::bytes_of(part), "a test").unwrap();
            let weights = Arc::new(Packed::new(part, data, pool));
            parts.push(Part { weights, column });
            column += part.rows.len();
        }
        let mut out = vec![f32::NAN; x.len() / self.inputs() * column];
        let operands = Operands {
            x: Rows::new(&mut x, self.inputs()),
            x_rows: if self.listed { RowMap::Listed(&map) } else { RowMap::Dense },
            codes: self.quantised().then(|| Codes {
                codes: Rows::new(&mut codes, self.planes * self.inputs()),
                scales: Rows::new(&mut scales, self.planes * self.inputs() / 32),
                rows: RowMap::Dense,
            }),
            bias: self.bias.then_some(&bias),
            out: Rows::new(&mut out, column),
            out_rows: if self.listed { RowMap::Listed(&map) } else { RowMap::Dense },
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
        let Made { x, map, bias, codes, scales } = self.make();
        let inputs = self.inputs();
        let mut reference = Vec::new();
        for row in 0..self.rows {
            let mut output = 0;
            for part in &self.parts {
                let dtype = part.tensor.dtype;
                for o in part.rows.clone() {
                    let start = if self.bias { f64::from(bias[output]) } else { 0.0 };
                    let (mut sum, mut size) = (start, start.abs());
                    for k in 0..inputs {
                        let x = if self.planes > 0 && dtype.block_elements() > 1 {
                            let plane = |plane| (row * self.planes + plane) * inputs + k;
                            let at = (0..self.planes).map(plane);
                            at.map(|at| f64::from(codes[at]) * f64::from(scales[at / 32].step)).sum()
                        } else {
                            f64::from(x[map[row] as usize * inputs + k])
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
        let what = format!("{dtypes:?}, {} rows, {} planes", self.rows, self.planes);
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
        for planes in [0, 1, 2] {
            if planes > 0 && dtype.block_elements() == 1 {
                continue;
            }
            for (outputs, inputs) in [(1, 32), (16, 64), (83, 608), (130, 96)] {
                let inputs = if dtype.block_elements() == 1 { inputs - 5 } else { inputs };
                let tensor = random_tensor(dtype, outputs, inputs, d as u64);
                let alone = |rows| Case {
                    parts: vec![whole(tensor.clone())],
                    rows,
                    listed: false,
                    bias: false,
                    planes,
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

#[test]
fn a_few_hundred_rows_are_multiplied_chunk_by_chunk() {
    let mut pool = Pool::new(1, &[]).unwrap();
    let tensor = random_tensor(DType::Q4_1, 20, 64, 1);
    let case = |rows| Case { parts: vec![whole(tensor.clone())], rows, listed: false, bias: true, planes: 1 };
    let few = case(CHUNK_ROWS).check(&mut pool);
    for rows in [CHUNK_ROWS + 1, 3 * CHUNK_ROWS - 1] {
        for workers in [1, 2, 7] {
            let many = case(rows).product(Isa::detect(), workers, &mut pool);
            assert!(many.iter().all(|y| !y.is_nan()));
            assert_bits(&many[..few.len()], &few, "chunks");
        }
    }
}

/// A fused projection: parts of different formats, sliced on both sides, with a bias, rows apart.
#[test]
fn slices_of_several_tensors_stand_side_by_side() {
    let mut pool = Pool::new(3, &[]).unwrap();
    for planes in [0, 1, 2] {
        let part = |dtype, rows, cols| Slice { tensor: random_tensor(dtype, 40, 224, 9), rows, cols };
        let parts = vec![
            part(DType::Q4_1, 3..40, 32..192),
            part(DType::F32, 0..1, 31..191),
            part(DType::Q8_0, 7..24, 64..224),
            part(DType::BF16, 8..40, 3..163),
            part(DType::Q4_0, 39..40, 0..160),
            part(DType::F16, 1..34, 64..224),
        ];
        for rows in [0, 1, 4] {
            Case { parts: parts.clone(), rows, listed: true, bias: true, planes }.check(&mut pool);
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
