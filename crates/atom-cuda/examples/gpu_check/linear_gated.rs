//! Gate and up with their activation for many rows.

use crate::kit::Kit;
use crate::rows::Rows;
use atom_cuda::launch::linear_gated;
use atom_cuda::launch::linear_small::{RowsNorms, SmallOperands, SmallOut, SmallProduct};
use atom_cuda::launch::{rows, step};
use atom_cuda::{Address, AllChoices, Blas, CudaError, Element, Product, SumOrder};

/// Real rows of each lane, and a lane's capacity: less than a tile, more than a group of tiles, ends within tiles of either
/// block.
const EXTENTS: &[(&[u32], usize)] = &[
    (&[1], 1),
    (&[0], 300),
    (&[130], 300),
    (&[300], 300),
    (&[700], 703),
    (&[3, 0, 200], 200),
    (&[2200], 2311),
];

/// Outputs and inputs.
const SHAPES: &[(usize, usize)] = &[(16, 256), (272, 264), (1040, 520), (4112, 256), (512, 4096)];

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    if kit.device.properties().capability != (9, 0) {
        return Ok(());
    }
    let blas = Blas::new(&kit.cublaslt, &kit.device, SumOrder::Fixed, (None, &AllChoices::default()))?;
    for &(counts, capacity) in EXTENTS {
        for &(outputs, inputs) in SHAPES {
            let rows = counts.len() * capacity;
            let product = SmallProduct { rows, inputs, outputs, norms: false, out: SmallOut::GatedSilu };
            let rows = Rows::new(kit, counts, capacity)?;
            one(kit, &blas, product, &rows)?;
        }
    }
    Ok(())
}

/// Against a reference in f64, and bit for bit against cuBLASLt in a fixed order with the kernels behind it.
fn one(kit: &mut Kit, blas: &Blas, product: SmallProduct, rows: &Rows) -> Result<(), CudaError> {
    let SmallProduct { inputs, outputs, .. } = product;
    let (bf16, width, extent) = (Element::BF16, outputs / 2, rows.extent);
    let weights = bf16.rounded(&kit.random(outputs * inputs, 1.5 / (inputs as f32).sqrt()));
    let biases = kit.random(outputs, 1.0);
    let has_bias = kit.below(2) == 0;
    let (x, x_memory) = rows.fill(kit, inputs, 1.0, bf16)?;
    let (w_memory, bias_memory) = (kit.upload(&weights, bf16)?, kit.upload(&biases, Element::F32)?);
    let out_memory = kit.poisoned(extent.capacity() * width, bf16)?;
    let operands = SmallOperands {
        weight: w_memory.address(),
        bias: if has_bias { bias_memory.address() } else { Address::NULL },
        norm: (Address::NULL, 0.0),
        norms: RowsNorms::NONE,
        x: x_memory.address(),
        out: out_memory.address(),
    };
    // SAFETY: arrays have the sizes that the launchers want and live until they are read back.
    unsafe { linear_gated::multiply(&kit.queue(), &product, &operands, extent) }?;
    let found = kit.download(&out_memory, bf16)?;

    let name = format!("{product:?}, {} real rows, bias {has_bias}", rows.real.len());
    let mut expected = Vec::new();
    // All columns of some rows: the first, the last, one in 16.
    let some = |i: usize| i.is_multiple_of(16) || i + 1 == rows.real.len();
    let sampled: Vec<usize> = (0..rows.real.len()).filter(|&i| some(i)).map(|i| rows.real[i]).collect();
    for &row in &sampled {
        let x = &x[row * inputs..][..inputs];
        let dot = |w: &[f32]| x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum::<f64>();
        let bias = |i: usize| if has_bias { f64::from(biases[i]) } else { 0.0 };
        let sums: Vec<f64> = weights.chunks(inputs).enumerate().map(|(i, w)| dot(w) + bias(i)).collect();
        let (gate, up) = sums.split_at(width);
        expected.extend(gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u));
    }
    let of_sampled: Vec<f32> =
        sampled.iter().flat_map(|row| found[row * width..][..width].to_vec()).collect();
    // What two kernels would hand on is rounded.
    kit.near(&name, &of_sampled, &expected, 8e-3);

    let plain = Product { rows: extent.capacity(), inputs, outputs, element: bf16, out: bf16, adds: false };
    let between = kit.poisoned(extent.capacity() * outputs, bf16)?;
    let apart = kit.poisoned(extent.capacity() * width, bf16)?;
    // SAFETY: as above.
    unsafe {
        blas.multiply(&kit.stream, plain, x_memory.address(), w_memory.address(), between.address())?;
        if has_bias {
            let (at, bias) = (between.address(), bias_memory.address());
            step::add_bias(&kit.queue(), bf16, at, bias, outputs, extent)?;
        }
        rows::gated_silu(&kit.queue(), bf16, between.address(), width, apart.address(), extent)?;
    }
    // All rows: those that are not real are poison in both.
    let expected: Vec<u32> = kit.download(&apart, bf16)?.iter().map(|value| value.to_bits()).collect();
    let found: Vec<u32> = found.iter().map(|value| value.to_bits()).collect();
    kit.equal(&format!("bits of {name}"), &found, &expected);
    Ok(())
}
