//! Products of cuBLASLt.

use crate::kit::Kit;
use atom_cuda::launch::linear_rows::{self, RowsCut};
use atom_cuda::launch::linear_small::{RowsNorms, SmallOperands, SmallOut, SmallProduct};
use atom_cuda::launch::rows::RowExtent;
use atom_cuda::{Address, AllChoices, Blas, CudaError, DeviceMem, Element, Product, SumOrder};

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    let blas = Blas::new(&kit.cublaslt, &kit.device, SumOrder::Fastest, (None, &AllChoices::default()))?;
    let shapes = [(1, 64, 48), (3, 1024, 3072), (17, 96, 512), (129, 768, 40)];
    for (rows, inputs, outputs) in shapes {
        let types =
            [(Element::F32, Element::F32), (Element::BF16, Element::BF16), (Element::BF16, Element::F32)];
        for (element, out_element) in types {
            let x = element.rounded(&kit.random(rows * inputs, 1.0));
            let w = element.rounded(&kit.random(outputs * inputs, 0.1));
            let mut expected = Vec::new();
            for row in x.chunks(inputs) {
                expected.extend(
                    w.chunks(inputs)
                        .map(|w| row.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum::<f64>()),
                );
            }
            let product = Product { rows, inputs, outputs, element, out: out_element, adds: false };
            let (x, w) = (kit.upload(&x, element)?, kit.upload(&w, element)?);
            let out = kit.poisoned(rows * outputs, out_element)?;
            // SAFETY: the arrays have the product's sizes and live until they are read back.
            unsafe { blas.multiply(&kit.stream, product, x.address(), w.address(), out.address()) }?;
            let found = kit.download(&out, out_element)?;
            let bound = if out_element == Element::F32 { 1e-5 } else { 4e-3 };
            kit.near(&format!("{product:?}"), &found, &expected, bound);
        }
    }
    fixed_order(kit)
}

/// With sums in a fixed order a row has the same bits whatever the number of rows. Operands are such that all sums are 0,
/// so outputs are nothing but what rounding leaves: any other order of additions shows.
fn fixed_order(kit: &mut Kit) -> Result<(), CudaError> {
    let blas = Blas::new(&kit.cublaslt, &kit.device, SumOrder::Fixed, (None, &AllChoices::default()))?;
    let (bf16, f32) = (Element::BF16, Element::F32);
    for (inputs, outputs, element, out_element) in [
        (4096, 6144, bf16, bf16),
        (12288, 4096, bf16, bf16),
        (2048, 128, bf16, f32),
        (1024, 6144, bf16, f32),
        (576, 960, bf16, bf16),
        (64, 96, bf16, bf16),
        (96, 64, bf16, f32),
        (576, 960, f32, f32),
        (64, 512, f32, f32),
    ] {
        let half = |kit: &mut Kit, rows: usize, sign: f32| -> Vec<f32> {
            let values = kit.random(rows * inputs / 2, 1.0);
            let twice =
                |row: &[f32]| row.iter().copied().chain(row.iter().map(|v| sign * v)).collect::<Vec<_>>();
            values.chunks(inputs / 2).flat_map(twice).collect()
        };
        let w = half(kit, outputs, 1.0);
        let x = half(kit, FIXED_DISTINCT, -1.0).repeat(FIXED_ROWS_MAX.div_ceil(FIXED_DISTINCT));
        let (x, w) = (kit.upload(&x, element)?, kit.upload(&w, element)?);
        let mut first: Option<Vec<u32>> = None;
        for &rows in FIXED_ROWS {
            let product = Product { rows, inputs, outputs, element, out: out_element, adds: false };
            let out = kit.poisoned(rows * outputs, out_element)?;
            // SAFETY: the arrays have at least the product's sizes and live until they are read back.
            unsafe { blas.multiply(&kit.stream, product, x.address(), w.address(), out.address()) }?;
            let found = kit.download(&out, out_element)?;
            let found: Vec<u32> = found.iter().map(|value| value.to_bits()).collect();
            let expected = first.get_or_insert_with(|| found.clone());
            let differ = (0..found.len()).filter(|&i| found[i] != expected[i % expected.len()]).count();
            let noise = found.iter().filter(|&&bits| f32::from_bits(bits) != 0.0).count();
            kit.check(
                &format!("bits of {product:?}"),
                differ == 0 && noise > 0,
                &format!(
                    "{differ} of {} differ from those of {FIXED_DISTINCT} rows, {noise} are not 0",
                    found.len()
                ),
            );
        }
        if element == bf16 && kit.device.properties().capability == (9, 0) {
            let expected = first.expect("there are rows");
            let cuts = [
                (1, 1, 8),
                (8, 1, 8),
                (7, 2, 8),
                (16, 1, 16),
                (16, 2, 8),
                (24, 1, 32),
                (64, 1, 64),
                (128, 2, 64),
            ];
            for (rows, cluster, each) in cuts {
                let cut = RowsCut::with(cluster, each, 1);
                let found = few_rows(kit, (rows, inputs, outputs), out_element, cut, (&x, &w))?;
                let differ = (0..found.len()).filter(|&i| found[i] != expected[i % expected.len()]).count();
                let name = format!("bits of {rows} rows, {inputs} x {outputs}, by {cut:?}");
                kit.check(&name, differ == 0, &format!("{differ} of {} differ from cuBLASLt's", found.len()));
            }
        }
    }
    Ok(())
}

/// The bits of a product by the kernel for few rows.
fn few_rows(
    kit: &mut Kit,
    (rows, inputs, outputs): (usize, usize, usize),
    out_element: Element,
    cut: RowsCut,
    (x, w): (&DeviceMem, &DeviceMem),
) -> Result<Vec<u32>, CudaError> {
    let out = if out_element == Element::F32 { SmallOut::F32 } else { SmallOut::Activations };
    let product = SmallProduct { rows, inputs, outputs, norms: false, out };
    kit.load(&[cut.program(out)])?;
    let header = kit.header(&[(0, rows as u32)])?;
    let memory = kit.poisoned(rows * outputs, out_element)?;
    let operands = SmallOperands {
        weight: w.address(),
        bias: Address::NULL,
        norm: (Address::NULL, 0.0),
        x: x.address(),
        out: memory.address(),
        norms: RowsNorms::NONE,
    };
    let extent = RowExtent::rows(header.address(), rows);
    // SAFETY: the arrays have at least the product's sizes and live until they are read back.
    unsafe { linear_rows::multiply(&kit.queue(), &product, cut, &operands, extent) }?;
    Ok(kit.download(&memory, out_element)?.iter().map(|value| value.to_bits()).collect())
}

/// Rows of the products.
const FIXED_ROWS: &[usize] =
    &[FIXED_DISTINCT, 1, 2, 3, 4, 8, 12, 16, 17, 24, 32, 48, 64, 72, 128, 200, 256, 1024, FIXED_ROWS_MAX];

/// Rows that are not copies of others: odd, so that copies lie at all places of a tile.
const FIXED_DISTINCT: usize = 7;

/// Rows of the largest product; more are much alike.
const FIXED_ROWS_MAX: usize = 2048;
