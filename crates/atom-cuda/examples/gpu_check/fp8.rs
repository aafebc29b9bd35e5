//! Products with weights of FP8: rows that become codes, and what few and many of them make.

use crate::kit::Kit;
use crate::rows::Rows;
use atom_cuda::launch::linear_fp8::{self, Fp8Operands, Fp8Path, Fp8Product};
use atom_cuda::launch::linear_small::SmallOut;
use atom_cuda::launch::norm::{self, NormOf, NormWeight};
use atom_cuda::launch::quantise::{self, QuantisedShape};
use atom_cuda::{Address, AllChoices, Blas, CudaError, DeviceMem, Element, Fp8Blas, Fp8Form, SumOrder};
use atom_weights::{DType, nearest_e4m3, quant};

/// Real rows of each lane, and a lane's capacity.
const FEW: &[(&[u32], usize)] =
    &[(&[1], 1), (&[2], 2), (&[5], 8), (&[0], 4), (&[13], 16), (&[16], 16), (&[2, 0, 3, 1], 4)];
const MANY: &[(&[u32], usize)] = &[(&[17], 17), (&[30], 36), (&[128], 128), (&[250], 301)];
/// Outputs and inputs. The last tile, block and group of some are not whole.
const SHAPES: &[(usize, usize)] =
    &[(16, 16), (320, 192), (192, 320), (1024, 1040), (512, 4096), (4976, 256), (144, 12288)];

/// Sums of few rows are f32 throughout. Those of cuBLASLt come from the FP8 tensor cores of Hopper, which keep fewer bits
/// than f32 of what they add: 1.1e-4 was seen at all sizes.
const BOUND_FEW: f64 = 1e-5;
const BOUND_MANY: f64 = 3e-4;
/// Storing bf16 costs up to 2^-9 of each number.
const BOUND_BF16: f64 = 4e-3;
/// A code keeps 4 bits: an error of up to 2^-4 of a number, evenly spread, is 2.6% on average, and so is that of sums of
/// independent ones.
const BOUND_UNQUANTISED: f64 = 0.04;

/// Rows of a product that are compared: all of few.
const COMPARED: usize = 16;

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    if kit.device.properties().capability != (9, 0) {
        println!("  FP8 weights stay codes on compute capability 9.0 alone");
        return Ok(());
    }
    let mut products = Vec::new();
    for form in [Fp8Form::Channel, Fp8Form::Block] {
        for &(outputs, inputs) in SHAPES {
            for &extent in FEW {
                let rows = extent.0.len() * extent.1;
                for out in [SmallOut::Activations, SmallOut::F32, SmallOut::Residual, SmallOut::GatedSilu] {
                    products.push((Fp8Product { rows, inputs, outputs, form, out }, extent));
                }
            }
            for &extent in MANY {
                let rows = extent.0.len() * extent.1;
                for out in [SmallOut::Activations, SmallOut::F32, SmallOut::Residual, SmallOut::GatedSilu] {
                    let product = Fp8Product { rows, inputs, outputs, form, out };
                    if product.fuses() || matches!(out, SmallOut::Activations | SmallOut::F32) {
                        products.push((product, extent));
                    }
                }
            }
        }
    }
    let properties = kit.device.properties().clone();
    let programs: Vec<_> = products.iter().flat_map(|(product, _)| product.programs(&properties)).collect();
    kit.load(&programs)?;
    let blas = (
        Blas::new(&kit.cublaslt, &kit.device, SumOrder::Fastest, (None, &AllChoices::default()))?,
        Fp8Blas::default(),
    );
    for (product, (counts, capacity)) in products {
        let rows = Rows::new(kit, counts, capacity)?;
        multiply(kit, &blas, product, &rows)?;
    }
    for form in [Fp8Form::Channel, Fp8Form::Block] {
        for inputs in [16, 192, 4096, 12288, 16384, 28672] {
            codes(kit, form, inputs)?;
        }
    }
    Ok(())
}

/// Quantised rows as the kernel should make them.
pub(crate) struct Expected {
    codes: Vec<u8>,
    /// Of each group of a row.
    scales: Vec<f32>,
    /// What the codes mean.
    pub(crate) values: Vec<f64>,
}

/// The rule, in f32 as the kernel has it.
pub(crate) fn quantised(row: &[f32], form: Fp8Form) -> Expected {
    let group = if form == Fp8Form::Block { 128 } else { row.len() };
    let mut expected = Expected { codes: Vec::new(), scales: Vec::new(), values: Vec::new() };
    for group in row.chunks(group) {
        let most = group.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0);
        let scale = f32::from_bits(most) / 448.0;
        let smallest = 2.0_f32.powi(-100);
        let scale = if most == 0 {
            1.0
        } else if scale < smallest {
            smallest
        } else {
            scale
        };
        let inverse = 1.0 / scale;
        let codes: Vec<u8> = group.iter().map(|x| nearest_e4m3(x * inverse)).collect();
        let numbers = quant::dequantize_bytes(DType::F8_E4M3, &codes);
        expected.values.extend(numbers.iter().map(|&x| f64::from(x) * f64::from(scale)));
        expected.codes.extend(codes);
        expected.scales.push(scale);
    }
    expected
}

/// Rows of all kinds, compared bit by bit; and the norm in front, which must change nothing.
fn codes(kit: &mut Kit, form: Fp8Form, inputs: usize) -> Result<(), CudaError> {
    let rows = Rows::new(kit, &[9], 11)?;
    let (mut x, _) = rows.fill(kit, inputs, 1.0, Element::BF16)?;
    for (row, x) in x.chunks_mut(inputs).enumerate() {
        match row {
            1 => x.fill(0.0),
            2 => x.iter_mut().for_each(|x| *x *= 1e37),
            3 => x.iter_mut().for_each(|x| *x *= 1e-38),
            4 => x[inputs / 2] = f32::NAN,
            5 => x[inputs - 1] = f32::NEG_INFINITY,
            6 => x[3] = 3000.0,
            7 => x.iter_mut().skip(inputs / 2).for_each(|x| *x = 0.0),
            _ => {}
        }
    }
    let x = Element::BF16.rounded(&x);
    let shape = QuantisedShape { rows: rows.extent.capacity(), inputs, form };
    kit.load(&[shape.program()])?;
    let memory = kit.upload(&x, Element::BF16)?;
    let found = quantise_on(kit, &shape, |kit, at| {
        // SAFETY: arrays have the sizes that the launcher wants and live until they are read back, here and below.
        unsafe { quantise::rows(&kit.queue(), &shape, memory.address(), at, rows.extent) }
    })?;
    let scale_at = |row: usize, group: usize| {
        (shape.at(Address(0)).scales.0 as usize) + 4 * (group * shape.stride() + row)
    };
    let (mut wrong_codes, mut wrong_scales) = (0, 0);
    for &row in &rows.real {
        let expected = quantised(&x[row * inputs..][..inputs], form);
        wrong_codes +=
            found[row * inputs..].iter().zip(&expected.codes).filter(|&(&a, &b)| !is_same(a, b)).count();
        for (group, scale) in expected.scales.iter().enumerate() {
            let bytes = &found[scale_at(row, group)..][..4];
            let found = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            wrong_scales +=
                usize::from(found.to_bits() != scale.to_bits() && !(found.is_nan() && scale.is_nan()));
        }
    }
    let name = format!("{shape:?}");
    kit.check(&name, wrong_codes + wrong_scales == 0, &format!("{wrong_codes} codes, {wrong_scales} scales"));
    let is_poison = found[rows.real.len() * inputs..shape.rows * inputs].iter().all(|&code| code == 0xff);
    kit.check(&format!("{name}, padding"), is_poison, "was written");
    if inputs > norm::NORM_WIDTH_MAX {
        return Ok(());
    }

    let (_, residual) = rows.fill(kit, inputs, 3.0, Element::F32)?;
    let weights = kit.random(inputs, 1.0);
    let weights = kit.upload(&weights, Element::F32)?;
    let weight = NormWeight { weight: weights.address(), width: inputs, eps: 1e-6 };
    let normed = kit.poisoned(shape.rows * inputs, Element::BF16)?;
    let of = (residual.address(), NormOf::Residual);
    // SAFETY: see above.
    unsafe { norm::norm(&kit.queue(), Element::BF16, of, weight, normed.address(), rows.extent) }?;
    let apart = quantise_on(kit, &shape, |kit, at| {
        // SAFETY: see above.
        unsafe { quantise::rows(&kit.queue(), &shape, normed.address(), at, rows.extent) }
    })?;
    let together = quantise_on(kit, &shape, |kit, at| {
        // SAFETY: see above.
        unsafe { quantise::normed_rows(&kit.queue(), &shape, residual.address(), weight, at, rows.extent) }
    })?;
    kit.check(&format!("{name} of norms"), apart == together, "differ from norms that are quantised later");
    Ok(())
}

/// Whatever the sign of NaN.
fn is_same(a: u8, b: u8) -> bool {
    a == b || (a & b & 0x7f) == 0x7f
}

fn quantise_on(
    kit: &mut Kit,
    shape: &QuantisedShape,
    launch: impl FnOnce(&Kit, quantise::Quantised) -> Result<(), CudaError>,
) -> Result<Vec<u8>, CudaError> {
    let memory = DeviceMem::new(&kit.device, shape.bytes())?;
    memory.fill(&kit.stream, 0, memory.bytes(), 0xff)?;
    launch(kit, shape.at(memory.address()))?;
    kit.download_bytes(&memory)
}

/// Weights of any code but NaN, with scales; and what they mean.
struct Weights {
    values: Vec<f32>,
    codes: DeviceMem,
    scales: DeviceMem,
}

impl Weights {
    fn new(kit: &mut Kit, outputs: usize, inputs: usize, form: Fp8Form) -> Result<Self, CudaError> {
        let mut codes = Vec::with_capacity(outputs * inputs);
        while codes.len() < outputs * inputs {
            codes.extend(kit.word().to_le_bytes().map(|code| if code & 0x7f == 0x7f { 0x08 } else { code }));
        }
        codes.truncate(outputs * inputs);
        let scales: Vec<f32> =
            (0..form.scales(outputs, inputs)).map(|_| 1e-4 * (1 + kit.below(1000)) as f32).collect();
        let mut values = quant::dequantize_bytes(DType::F8_E4M3, &codes);
        for (index, value) in values.iter_mut().enumerate() {
            let (output, input) = (index / inputs, index % inputs);
            *value *= match form {
                Fp8Form::Channel => scales[output],
                Fp8Form::Block => scales[output / 128 * Fp8Form::stride(inputs) + input / 128],
            };
        }
        Ok(Self { values, codes: kit.upload_bytes(&codes)?, scales: kit.upload(&scales, Element::F32)? })
    }
}

fn multiply(
    kit: &mut Kit,
    (blas, fp8_blas): &(Blas, Fp8Blas),
    product: Fp8Product,
    rows: &Rows,
) -> Result<(), CudaError> {
    let Fp8Product { inputs, outputs, form, out, .. } = product;
    let (shape, capacity) = (product.quantised(), rows.extent.capacity());
    let (x, x_memory) = rows.fill(kit, inputs, 2.0, Element::BF16)?;
    let weights = Weights::new(kit, outputs, inputs, form)?;
    let biases = kit.random(outputs, 1.0);
    let bias = kit.upload(&biases, Element::F32)?;
    let has_bias = product.fuses() && kit.below(2) == 0;
    let width = if out == SmallOut::GatedSilu { outputs / 2 } else { outputs };
    let out_element = match out {
        SmallOut::F32 | SmallOut::Residual => Element::F32,
        SmallOut::Activations | SmallOut::GatedSilu => Element::BF16,
    };
    let room_rows = if product.fuses() { capacity } else { shape.room_rows() };
    let (before, out_memory) = if out == SmallOut::Residual {
        rows.fill(kit, width, 1.0, Element::F32)?
    } else {
        (vec![0.0; capacity * width], kit.poisoned(room_rows * width, out_element)?)
    };
    let memory = DeviceMem::new(&kit.device, shape.bytes())?;
    memory.fill(&kit.stream, 0, memory.bytes(), 0xff)?;
    let unscaled = kit.poisoned(capacity * outputs, Element::F32)?;
    let operands = Fp8Operands {
        weight: weights.codes.address(),
        weight_scales: weights.scales.address(),
        bias: if has_bias { bias.address() } else { Address::NULL },
        x: shape.at(memory.address()),
        out: out_memory.address(),
    };
    // SAFETY: arrays have the sizes that the launchers want and live until they are read back.
    unsafe {
        quantise::rows(&kit.queue(), &shape, x_memory.address(), operands.x, rows.extent)?;
        match product.path() {
            Fp8Path::Few | Fp8Path::Rows => {
                linear_fp8::multiply_few(&kit.queue(), &product, operands, rows.extent)?
            }
            Fp8Path::Finished => {
                let sums = Fp8Operands { out: unscaled.address(), ..operands };
                fp8_blas.multiply(blas, &kit.stream, &product, &sums)?;
                linear_fp8::finish(&kit.queue(), &product, operands, unscaled.address(), rows.extent)?;
            }
            Fp8Path::Scaled => fp8_blas.multiply(blas, &kit.stream, &product, &operands)?,
        }
    }
    let found = kit.download(&out_memory, out_element)?;
    let is_unquantised_too = out != SmallOut::GatedSilu && inputs >= 192 && outputs <= 1024;
    let (mut expected, mut unquantised) = (Vec::new(), Vec::new());
    // Of many rows some are enough, the last among them.
    let step = rows.real.len().div_ceil(COMPARED);
    let compared: Vec<usize> = rows.real.iter().rev().step_by(step.max(1)).rev().copied().collect();
    for &row in &compared {
        let given = &x[row * inputs..][..inputs];
        let exact: Vec<f64> = given.iter().map(|&x| f64::from(x)).collect();
        let mut pairs = vec![(quantised(given, form).values, &mut expected)];
        if is_unquantised_too {
            pairs.push((exact, &mut unquantised));
        }
        for (x, into) in pairs {
            let dot = |w: &[f32]| x.iter().zip(w).map(|(x, &w)| x * f64::from(w)).sum::<f64>();
            let bias = |i: usize| if has_bias { f64::from(biases[i]) } else { 0.0 };
            let sums: Vec<f64> =
                weights.values.chunks(inputs).enumerate().map(|(i, w)| dot(w) + bias(i)).collect();
            if out == SmallOut::GatedSilu {
                let (gate, up) = sums.split_at(width);
                into.extend(gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u));
            } else {
                let before = &before[row * width..][..width];
                into.extend(sums.iter().zip(before).map(|(y, &b)| y + f64::from(b)));
            }
        }
    }
    let name = format!("{product:?}, bias {has_bias}");
    let sums = if product.path() == Fp8Path::Few { BOUND_FEW } else { BOUND_MANY };
    let bound = if out_element == Element::BF16 { BOUND_BF16 } else { sums };
    let real: Vec<f32> = compared.iter().flat_map(|row| found[row * width..][..width].to_vec()).collect();
    kit.near(&name, &real, &expected, bound);
    if product.fuses() {
        // cuBLASLt computes padding too, which nobody reads; kernels of ours write what is real.
        let others = (0..capacity).filter(|row| !rows.real.contains(row));
        let others: Vec<f32> = others.flat_map(|row| found[row * width..][..width].to_vec()).collect();
        kit.untouched(&format!("{name}, padding"), &others, 0);
    }
    if is_unquantised_too {
        kit.near(&format!("{name}, unquantised"), &real, &unquantised, BOUND_UNQUANTISED);
    }
    Ok(())
}
