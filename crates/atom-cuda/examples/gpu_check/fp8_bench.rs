//! How long products of Qwen3-8B's shapes take with weights of FP8 and of bf16: inputs in, outputs out, weights not in the
//! cache.

use crate::kit::Kit;
use atom_cuda::launch::linear_fp8::{self, Fp8Operands, Fp8Path, Fp8Product};
use atom_cuda::launch::linear_small::{self, RowsNorms, SmallOperands, SmallOut, SmallProduct};
use atom_cuda::launch::norm::{self, NormWeight};
use atom_cuda::launch::quantise;
use atom_cuda::launch::rows::{self, RowExtent};
use atom_cuda::{
    Address, AllChoices, Blas, CudaError, DeviceMem, Element, Fp8Blas, Fp8Form, Graph, Product, SumOrder,
};
use std::time::Instant;

const SHAPES: &[(&str, usize, usize)] =
    &[("qkv", 6144, 4096), ("o", 4096, 4096), ("gate, up", 24576, 4096), ("down", 4096, 12288)];
const ROWS: &[usize] = &[1, 8, 16, 32, 64, 128, 256, 1024, 8192];
/// Weights of all repetitions together, several times the cache.
const WEIGHTS_BYTES: usize = 1 << 30;

const NOISE_BYTES: usize = 64 << 20;

pub(crate) fn bench(kit: &mut Kit) -> Result<(), CudaError> {
    let blas = (
        Blas::new(&kit.cublaslt, &kit.device, SumOrder::Fastest, (None, &AllChoices::default()))?,
        Fp8Blas::default(),
    );
    let weights = DeviceMem::new(&kit.device, WEIGHTS_BYTES)?;
    // Random numbers, without which tensor cores draw less and run faster. Without the bit they are small in either type.
    let noise: Vec<u8> =
        (0..NOISE_BYTES / 8).flat_map(|_| (kit.word() & 0xbfbf_bfbf_bfbf_bfbf).to_le_bytes()).collect();
    for offset in (0..WEIGHTS_BYTES).step_by(NOISE_BYTES) {
        weights.write(&kit.stream, offset, &noise)?;
    }
    println!(
        "us a layer: its four products, with norms, activation and additions, and the quantising of FP8's inputs:"
    );
    for rows in [1, 8, 16, 32, 128] {
        let bf16 = if rows <= 16 { layer_of_bf16(kit, &weights, rows)? } else { f64::NAN };
        let [channel, block] =
            [Fp8Form::Channel, Fp8Form::Block].map(|form| layer(kit, &blas, &weights, rows, form));
        println!("  {rows:>3} rows: bf16 {bf16:.1}, channels {:.1}, blocks {:.1}", channel?, block?);
    }
    println!("us a product, with the quantising of its inputs where weights are FP8:");
    for &(name, outputs, inputs) in SHAPES {
        for &rows in ROWS {
            let bf16 = plain(kit, &blas.0, &weights, (rows, inputs, outputs))?;
            let [channel, block] = [Fp8Form::Channel, Fp8Form::Block].map(|form| {
                let product = Fp8Product { rows, inputs, outputs, form, out: SmallOut::Activations };
                codes(kit, &blas, &weights, product)
            });
            let (channel, block) = (channel?, block?);
            println!(
                "  {name:<8} {outputs:>5} x {inputs:<5} {rows:>4} rows: bf16 {bf16:>7.1}, channels {:>7.1} + {:.1}, \
                 blocks {:>7.1} + {:.1}",
                channel.1, channel.0, block.1, block.0
            );
        }
    }
    Ok(())
}

/// What the products of a layer make.
const LAYER: [SmallOut; 4] =
    [SmallOut::Activations, SmallOut::Residual, SmallOut::GatedSilu, SmallOut::Residual];

fn layer(
    kit: &mut Kit,
    (blas, fp8_blas): &(Blas, Fp8Blas),
    weights: &DeviceMem,
    rows: usize,
    form: Fp8Form,
) -> Result<f64, CudaError> {
    let products: Vec<Fp8Product> = std::iter::zip(SHAPES, LAYER)
        .map(|(&(_, outputs, inputs), out)| {
            let product = Fp8Product { rows, inputs, outputs, form, out };
            let plain = Fp8Product { out: SmallOut::Activations, ..product };
            if product.fuses() { product } else { plain }
        })
        .collect();
    let properties = kit.device.properties().clone();
    for product in &products {
        kit.load(&product.programs(&properties))?;
        if !product.is_ours() {
            fp8_blas.choose(blas, product)?;
        }
    }
    let scratch =
        zeros(kit, products.iter().map(|product| product.scratch_bytes() + (64 << 20)).max().unwrap_or(0))?;
    let scales = zeros(kit, 1 << 20)?;
    let [x, gated, residual, out] =
        [16384, 2 * 16384, 4 * 4096, 2 * 24576].map(|width| zeros(kit, (rows + 4) * width));
    let (x, gated, residual, out) = (x?, gated?, residual?, out?);
    let norm = NormWeight { weight: scales.address(), width: 4096, eps: 1e-6 };
    let header = kit.header(&[(0, rows as u32)])?;
    let extent = RowExtent::rows(header.address(), rows);
    let bytes = SHAPES.iter().map(|(_, outputs, inputs)| outputs * inputs).sum();
    timed(kit, bytes, |kit, offset| {
        let mut offset = offset;
        for (index, product) in products.iter().enumerate() {
            let (shape, queue) = (product.quantised(), kit.queue());
            let out = match product.out {
                SmallOut::Residual => residual.address(),
                SmallOut::GatedSilu => gated.address(),
                SmallOut::Activations | SmallOut::F32 => out.address(),
            };
            let operands = Fp8Operands {
                weight: weights.address().plus(offset),
                weight_scales: scales.address(),
                bias: Address::NULL,
                x: shape.at(scratch.address()),
                out,
            };
            offset += product.inputs * product.outputs;
            let sums = scratch.address().plus(scratch.bytes() - (64 << 20));
            // SAFETY: arrays have the sizes that the launchers want and outlive the graph.
            unsafe {
                match index {
                    0 | 2 => {
                        quantise::normed_rows(&queue, &shape, residual.address(), norm, operands.x, extent)?
                    }
                    1 => quantise::rows(&queue, &shape, x.address(), operands.x, extent)?,
                    _ => quantise::rows(&queue, &shape, gated.address(), operands.x, extent)?,
                }
                match product.path() {
                    Fp8Path::Few | Fp8Path::Rows => {
                        linear_fp8::multiply_few(&queue, product, operands, extent)?
                    }
                    Fp8Path::Finished => {
                        let unscaled = Fp8Operands { out: sums, ..operands };
                        fp8_blas.multiply(blas, &kit.stream, product, &unscaled)?;
                        linear_fp8::finish(&queue, product, operands, sums, extent)?;
                    }
                    Fp8Path::Scaled => {
                        fp8_blas.multiply(blas, &kit.stream, product, &operands)?;
                        match index {
                            2 => {
                                rows::gated_silu(&queue, Element::BF16, out, 12288, gated.address(), extent)?
                            }
                            1 | 3 => {
                                let sum = (residual.address(), out);
                                norm::add_norm(&queue, Element::BF16, sum, norm, x.address(), extent)?;
                            }
                            _ => {}
                        }
                    }
                }
            }
        }
        Ok(())
    })
}

fn layer_of_bf16(kit: &mut Kit, weights: &DeviceMem, rows: usize) -> Result<f64, CudaError> {
    let products: Vec<SmallProduct> = std::iter::zip(SHAPES, LAYER)
        .enumerate()
        .map(|(index, (&(_, outputs, inputs), out))| SmallProduct {
            rows,
            inputs,
            outputs,
            norms: index % 2 == 0,
            out,
        })
        .collect();
    let properties = kit.device.properties().clone();
    kit.load(&products.iter().map(|product| product.program(&properties)).collect::<Vec<_>>())?;
    let norm = zeros(kit, 4 * 4096)?;
    let [x, gated, residual, out] =
        [16384, 2 * 16384, 4 * 4096, 2 * 24576].map(|width| zeros(kit, rows * width));
    let (x, gated, residual, out) = (x?, gated?, residual?, out?);
    let header = kit.header(&[(0, rows as u32)])?;
    let extent = RowExtent::rows(header.address(), rows);
    let bytes: usize = SHAPES.iter().map(|(_, outputs, inputs)| 2 * outputs * inputs).sum();
    timed(kit, bytes, |kit, offset| {
        let mut offset = offset;
        let places = [(&residual, &out), (&x, &residual), (&residual, &gated), (&gated, &residual)];
        for (product, (x, out)) in std::iter::zip(&products, places) {
            let operands = SmallOperands {
                weight: weights.address().plus(offset),
                bias: Address::NULL,
                norm: (norm.address(), 1e-6),
                x: x.address(),
                out: out.address(),
                norms: RowsNorms::NONE,
            };
            offset += 2 * product.inputs * product.outputs;
            // SAFETY: as above.
            unsafe { linear_small::multiply(&kit.queue(), product, operands, extent) }?;
        }
        Ok(())
    })
}

fn plain(
    kit: &mut Kit,
    blas: &Blas,
    weights: &DeviceMem,
    (rows, inputs, outputs): (usize, usize, usize),
) -> Result<f64, CudaError> {
    let (x, out) =
        (weights.address().plus(WEIGHTS_BYTES - 2 * rows * inputs), zeros(kit, 2 * rows * outputs)?);
    let header = kit.header(&[(0, rows as u32)])?;
    let small = SmallProduct { rows, inputs, outputs, norms: false, out: SmallOut::Activations };
    let is_small = small.is_possible(kit.device.properties()) && small.pays();
    let product = Product { rows, inputs, outputs, element: Element::BF16, out: Element::BF16, adds: false };
    if is_small {
        kit.load(&[small.program(&kit.device.properties().clone())])?;
    } else {
        blas.choose(product)?;
    }
    timed(kit, 2 * inputs * outputs, |kit, offset| {
        let weight = weights.address().plus(offset);
        // SAFETY: arrays have the sizes that the launchers want and outlive the graph.
        unsafe {
            if is_small {
                let norm = (Address::NULL, 0.0);
                let operands = SmallOperands {
                    weight,
                    bias: Address::NULL,
                    norm,
                    x,
                    out: out.address(),
                    norms: RowsNorms::NONE,
                };
                linear_small::multiply(
                    &kit.queue(),
                    &small,
                    operands,
                    RowExtent::rows(header.address(), rows),
                )
            } else {
                blas.multiply(&kit.stream, product, x, weight, out.address())
            }
        }
    })
}

/// Of the quantising, and of the product behind it.
fn codes(
    kit: &mut Kit,
    (blas, fp8_blas): &(Blas, Fp8Blas),
    weights: &DeviceMem,
    product: Fp8Product,
) -> Result<(f64, f64), CudaError> {
    let Fp8Product { rows, inputs, outputs, form, .. } = product;
    let shape = product.quantised();
    let x = weights.address().plus(WEIGHTS_BYTES - 2 * rows * inputs);
    let out = zeros(kit, 2 * shape.room_rows() * outputs)?;
    let (memory, scales) = (zeros(kit, shape.bytes())?, zeros(kit, 4 * form.scales(outputs, inputs))?);
    let header = kit.header(&[(0, rows as u32)])?;
    let extent = RowExtent::rows(header.address(), rows);
    kit.load(&product.programs(&kit.device.properties().clone()))?;
    if !product.is_ours() {
        fp8_blas.choose(blas, &product)?;
    }
    let unscaled = zeros(kit, 4 * rows.min(1024) * outputs)?;
    let time = |quantises: bool| {
        timed(kit, inputs * outputs, |kit, offset| {
            let operands = Fp8Operands {
                weight: weights.address().plus(offset),
                weight_scales: scales.address(),
                bias: Address::NULL,
                x: shape.at(memory.address()),
                out: out.address(),
            };
            // SAFETY: as above.
            unsafe {
                if quantises {
                    quantise::rows(&kit.queue(), &shape, x, operands.x, extent)?;
                }
                match product.path() {
                    Fp8Path::Few | Fp8Path::Rows => {
                        linear_fp8::multiply_few(&kit.queue(), &product, operands, extent)
                    }
                    Fp8Path::Finished => {
                        let sums = Fp8Operands { out: unscaled.address(), ..operands };
                        fp8_blas.multiply(blas, &kit.stream, &product, &sums)?;
                        linear_fp8::finish(&kit.queue(), &product, operands, unscaled.address(), extent)
                    }
                    Fp8Path::Scaled => fp8_blas.multiply(blas, &kit.stream, &product, &operands),
                }
            }
        })
    };
    // The first gives codes to those that come without.
    let (both, alone) = (time(true)?, time(false)?);
    Ok((both - alone, alone))
}

fn zeros(kit: &Kit, bytes: usize) -> Result<DeviceMem, CudaError> {
    let memory = DeviceMem::new(&kit.device, bytes)?;
    memory.fill(&kit.stream, 0, bytes, 0)?;
    Ok(memory)
}

/// Microseconds of one, from graphs of many over weights at several offsets.
fn timed(
    kit: &Kit,
    bytes: usize,
    launch: impl Fn(&Kit, usize) -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    let copies = WEIGHTS_BYTES / bytes;
    let graph = Graph::capture(&kit.stream, || (0..copies).try_for_each(|i| launch(kit, i * bytes)))?;
    graph.launch(&kit.stream)?;
    kit.stream.wait()?;
    let best = (0..3).map(|_| -> Result<f64, CudaError> {
        let start = Instant::now();
        graph.launch(&kit.stream)?;
        kit.stream.wait()?;
        Ok(start.elapsed().as_secs_f64() * 1e6 / copies as f64)
    });
    best.collect::<Result<Vec<_>, _>>().map(|times| times.into_iter().fold(f64::MAX, f64::min))
}
