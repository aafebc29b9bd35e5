//! Products for few rows, by both kernels.

use crate::kit::Kit;
use crate::rows::{Rows, bound};
use atom_cuda::launch::linear_rows::{self, RowsCut};
use atom_cuda::launch::linear_small::{self, RowsNorms, SmallOperands, SmallOut, SmallProduct};
use atom_cuda::{Address, CudaError, DeviceMem, Element};

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

/// The kernel for more rows, in all kinds of cuts.
pub(crate) fn checks_of_rows(kit: &mut Kit) -> Result<(), CudaError> {
    if kit.device.properties().capability != (9, 0) {
        return Ok(());
    }
    let outs = [SmallOut::Activations, SmallOut::F32, SmallOut::Residual, SmallOut::GatedSilu];
    let extents: [(&[u32], usize); 7] =
        [(&[1], 1), (&[5], 8), (&[13], 16), (&[2, 0, 3, 1], 4), (&[31], 32), (&[40], 64), (&[127], 128)];
    let mut cases = Vec::new();
    for (counts, capacity) in extents {
        let rows = counts.len() * capacity;
        for (&(outputs, inputs), out) in SHAPES.iter().flat_map(|shape| outs.map(|out| (shape, out))) {
            let product = SmallProduct { rows, inputs, outputs, norms: false, out };
            let whole = |cluster: usize| rows.div_ceil(cluster).next_power_of_two().max(8);
            let [one, pair] = [1, 2].map(|cluster| RowsCut::with(cluster, whole(cluster), 2));
            let parts = (out != SmallOut::GatedSilu).then_some(RowsCut { parts: 2, ..one });
            let cuts = [one, pair].into_iter().chain(parts).filter(|cut| cut.each <= 64);
            cases.extend(cuts.map(|cut| (product, counts, capacity, cut)));
        }
    }
    for outputs in [1, 3, 20, 4099] {
        let product = SmallProduct { rows: 12, inputs: 72, outputs, norms: false, out: SmallOut::F32 };
        cases.push((product, &[9], 12, RowsCut::with(2, 8, 1)));
        cases.push((product, &[9], 12, RowsCut { parts: 2, ..RowsCut::with(1, 16, 1) }));
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
    let (biases, norm_weights) = (kit.random(outputs, 1.0), kit.random(inputs.max(outputs), 1.0));
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
    let around = Around::new(kit, &product, rows, cut.is_some())?;
    let operands = SmallOperands {
        weight: memory.0.address(),
        bias: if has_bias { memory.1.address() } else { Address::NULL },
        norm: (memory.2.address(), eps),
        x: x_memory.address(),
        out: out_memory.address(),
        norms: around.norms(&memory.2, eps),
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
        let scale = around.scale(row, inputs, eps);
        let bias = |i: usize| if has_bias { f64::from(biases[i]) } else { 0.0 };
        let sums: Vec<f64> =
            weights.chunks(inputs).enumerate().map(|(i, w)| dot(w) * scale + bias(i)).collect();
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
    around.check(kit, &format!("{product:?}, {cut:?}"), rows, &found, &norm_weights)
}

/// What `linear_rows` makes of the norms around it, at random: sums of squares in front, or none; the norm behind, or none.
struct Around {
    squares: Option<(Vec<f32>, DeviceMem)>,
    next: Option<(DeviceMem, DeviceMem)>,
    outputs: usize,
}

impl Around {
    fn new(kit: &mut Kit, product: &SmallProduct, rows: &Rows, is_rows: bool) -> Result<Self, CudaError> {
        let SmallProduct { inputs, outputs, out, .. } = *product;
        let (capacity, tiles) = (rows.extent.capacity(), inputs.div_ceil(64));
        let mut around = Self { squares: None, next: None, outputs };
        if is_rows && kit.below(2) == 0 {
            let squares: Vec<f32> = kit.random(capacity * tiles, 8.0).iter().map(|x| x * x).collect();
            let memory = kit.upload(&squares, Element::F32)?;
            around.squares = Some((squares, memory));
        }
        if is_rows && out == SmallOut::Residual && kit.below(2) == 0 {
            let sums = kit.poisoned(capacity * outputs.div_ceil(64), Element::F32)?;
            around.next = Some((kit.poisoned(capacity * outputs, Element::BF16)?, sums));
        }
        Ok(around)
    }

    fn norms(&self, weight: &DeviceMem, eps: f32) -> RowsNorms {
        let mut norms = RowsNorms::NONE;
        if let Some((_, memory)) = &self.squares {
            norms.squares = (memory.address(), eps);
        }
        if let Some((next, sums)) = &self.next {
            norms.next_weight = weight.address();
            (norms.next, norms.next_squares) = (next.address(), sums.address());
        }
        norms
    }

    /// What sums of a row are multiplied by.
    fn scale(&self, row: usize, inputs: usize, eps: f32) -> f64 {
        let Some((squares, _)) = &self.squares else { return 1.0 };
        let tiles = inputs.div_ceil(64);
        let sum: f64 = squares[row * tiles..][..tiles].iter().map(|&x| f64::from(x)).sum();
        1.0 / (sum / inputs as f64 + f64::from(eps)).sqrt()
    }

    /// `residual` is what was found.
    fn check(
        &self,
        kit: &mut Kit,
        name: &str,
        rows: &Rows,
        residual: &[f32],
        weights: &[f32],
    ) -> Result<(), CudaError> {
        let Some((next, sums)) = &self.next else { return Ok(()) };
        let (next, sums) = (kit.download(next, Element::BF16)?, kit.download(sums, Element::F32)?);
        let (mut weighted, mut squares) = (Vec::new(), Vec::new());
        for &row in &rows.real {
            let row = &residual[row * self.outputs..][..self.outputs];
            weighted.extend(row.iter().zip(weights).map(|(x, w)| f64::from(x * w)));
            squares
                .extend(row.chunks(64).map(|x| x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>()));
        }
        rows.near(kit, &format!("{name}, times the norm's weights"), &next, &weighted, bound(Element::BF16));
        rows.near(kit, &format!("{name}, squares"), &sums, &squares, bound(Element::F32));
        Ok(())
    }
}
