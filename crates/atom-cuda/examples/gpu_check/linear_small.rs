//! Products for few rows, by both kernels.

use crate::kit::Kit;
use crate::rows::{Rows, bound};
use atom_cuda::launch::linear_rows::{self, RowsCut};
use atom_cuda::launch::linear_small::{self, SmallOperands, SmallOut, SmallProduct};
use atom_cuda::{Address, CudaError, Element};

/// Real rows of each lane, and a lane's capacity.
const EXTENTS: &[(&[u32], usize)] =
    &[(&[1], 1), (&[1], 2), (&[5], 8), (&[0], 4), (&[13], 16), (&[2, 0, 3, 1], 4)];

/// Outputs and inputs.
const SHAPES: &[(usize, usize)] =
    &[(16, 8), (112, 576), (1024, 1000), (6144, 256), (1024, 2560), (272, 4096), (4976, 512)];

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    let outs = [SmallOut::Activations, SmallOut::F32, SmallOut::Residual, SmallOut::GatedSilu];
    let mut cases = Vec::new();
    for &(counts, capacity) in EXTENTS {
        let rows = counts.len() * capacity;
        for &(outputs, inputs) in SHAPES {
            for out in outs {
                cases.extend(
                    [false, true]
                        .map(|norms| (SmallProduct { rows, inputs, outputs, norms, out }, counts, capacity)),
                );
            }
        }
    }
    let odd = [1, 3, 20, 4099].map(|outputs| {
        let product = SmallProduct { rows: 12, inputs: 64, outputs, norms: false, out: SmallOut::F32 };
        (product, &[9][..], 12)
    });
    cases.extend(odd);
    let properties = kit.device.properties().clone();
    for (product, ..) in &cases {
        assert!(product.is_possible(&properties), "{product:?}");
    }
    let programs: Vec<_> = cases.iter().map(|(product, ..)| product.program(&properties)).collect();
    kit.load(&programs)?;
    for (product, counts, capacity) in cases {
        let rows = Rows::new(kit, counts, capacity)?;
        one(kit, product, &rows, None)?;
    }
    Ok(())
}

/// The kernel for more rows, in both cuts.
pub(crate) fn checks_of_rows(kit: &mut Kit) -> Result<(), CudaError> {
    if kit.device.properties().capability != (9, 0) {
        return Ok(());
    }
    let outs = [SmallOut::Activations, SmallOut::F32, SmallOut::Residual, SmallOut::GatedSilu];
    let extents: [(&[u32], usize); 6] =
        [(&[1], 1), (&[13], 16), (&[2, 0, 3, 1], 4), (&[31], 32), (&[40], 64), (&[127], 128)];
    let mut cases = Vec::new();
    for (counts, capacity) in extents {
        let rows = counts.len() * capacity;
        for (&(outputs, inputs), out) in SHAPES.iter().flat_map(|shape| outs.map(|out| (shape, out))) {
            let product = SmallProduct { rows, inputs, outputs, norms: false, out };
            let whole = |cluster: usize| rows.div_ceil(cluster).next_power_of_two().max(8);
            let cuts = [1, 2].map(|cluster| RowsCut::with(cluster, whole(cluster), 2));
            cases.extend(
                cuts.into_iter().filter(|cut| cut.each <= 64).map(|cut| (product, counts, capacity, cut)),
            );
        }
    }
    for outputs in [1, 3, 20, 4099] {
        let product = SmallProduct { rows: 12, inputs: 72, outputs, norms: false, out: SmallOut::F32 };
        cases.push((product, &[9], 12, RowsCut::with(2, 8, 1)));
    }
    let programs: Vec<_> = cases.iter().map(|(product, .., cut)| cut.program(product.out)).collect();
    kit.load(&programs)?;
    for (product, counts, capacity, cut) in cases {
        let rows = Rows::new(kit, counts, capacity)?;
        one(kit, product, &rows, Some(cut))?;
    }
    Ok(())
}

fn one(kit: &mut Kit, product: SmallProduct, rows: &Rows, cut: Option<RowsCut>) -> Result<(), CudaError> {
    let SmallProduct { inputs, outputs, norms, out, .. } = product;
    let eps = 1e-6;
    let weights = Element::BF16.rounded(&kit.random(outputs * inputs, 1.0 / (inputs as f32).sqrt()));
    let (biases, norm_weights) = (kit.random(outputs, 1.0), kit.random(inputs, 1.0));
    let has_bias = kit.below(2) == 0;
    let x_element = if norms { Element::F32 } else { Element::BF16 };
    let (x, x_memory) = rows.fill(kit, inputs, 2.0, x_element)?;
    let width = if out == SmallOut::GatedSilu { outputs / 2 } else { outputs };
    let out_element = match out {
        SmallOut::F32 | SmallOut::Residual => Element::F32,
        SmallOut::Activations | SmallOut::GatedSilu => Element::BF16,
    };
    let (before, out_memory) = if out == SmallOut::Residual {
        rows.fill(kit, width, 1.0, Element::F32)?
    } else {
        (
            vec![0.0; rows.extent.capacity() * width],
            kit.poisoned(rows.extent.capacity() * width, out_element)?,
        )
    };
    let memory = (
        kit.upload(&weights, Element::BF16)?,
        kit.upload(&biases, Element::F32)?,
        kit.upload(&norm_weights, Element::F32)?,
    );
    let operands = SmallOperands {
        weight: memory.0.address(),
        bias: if has_bias { memory.1.address() } else { Address::NULL },
        norm: (memory.2.address(), eps),
        x: x_memory.address(),
        out: out_memory.address(),
    };
    // SAFETY: arrays have the sizes that the launcher wants and live until they are read back.
    unsafe {
        match cut {
            None => linear_small::multiply(&kit.queue(), &product, operands, rows.extent),
            Some(cut) => linear_rows::multiply(&kit.queue(), &product, cut, &operands, rows.extent),
        }
    }?;
    let found = kit.download(&out_memory, out_element)?;
    let mut expected = Vec::new();
    for &row in &rows.real {
        let given = &x[row * inputs..][..inputs];
        let mut x: Vec<f64> = given.iter().map(|&x| f64::from(x)).collect();
        if norms {
            // As the kernel takes it in: times the norm's weight, rounded to bf16, and divided by the root at the end.
            let root = (x.iter().map(|x| x * x).sum::<f64>() / inputs as f64 + f64::from(eps)).sqrt();
            let weighted: Vec<f32> = given.iter().zip(&norm_weights).map(|(x, w)| x * w).collect();
            x = Element::BF16.rounded(&weighted).iter().map(|&x| f64::from(x) / root).collect();
        }
        let dot = |w: &[f32]| x.iter().zip(w).map(|(x, &w)| x * f64::from(w)).sum::<f64>();
        let bias = |i: usize| if has_bias { f64::from(biases[i]) } else { 0.0 };
        let sums: Vec<f64> = weights.chunks(inputs).enumerate().map(|(i, w)| dot(w) + bias(i)).collect();
        if out == SmallOut::GatedSilu {
            let (gate, up) = sums.split_at(width);
            expected.extend(gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u));
        } else {
            let before = &before[row * width..][..width];
            expected.extend(sums.iter().zip(before).map(|(y, &b)| y + f64::from(b)));
        }
    }
    // Where `linear_rows` stands for two kernels, what the first would hand on is rounded. Sums of wgmma keep fewer bits
    // than those of mma: 4e-6 at 4,096 inputs, where cuBLASLt's have the same.
    let bound = match (cut, out) {
        (None, _) | (_, SmallOut::Activations) => bound(out_element),
        (_, SmallOut::F32) => 1e-5,
        (_, SmallOut::Residual | SmallOut::GatedSilu) => 8e-3,
    };
    rows.near(kit, &format!("{product:?}, {cut:?}, bias {has_bias}"), &found, &expected, bound);
    Ok(())
}
