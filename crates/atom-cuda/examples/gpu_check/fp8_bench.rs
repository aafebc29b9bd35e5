//! How long products of Qwen3-8B's shapes take with weights of FP8 and of bf16: inputs in, outputs out, weights not in the
//! cache.

use crate::kit::Kit;
use atom_cuda::launch::linear_fp8::{self, Fp8Operands, Fp8Path, Fp8Product};
use atom_cuda::launch::linear_small::{self, SmallOperands, SmallOut, SmallProduct};
use atom_cuda::launch::quantise;
use atom_cuda::launch::rows::RowExtent;
use atom_cuda::{Address, Blas, CudaError, DeviceMem, Element, Fp8Blas, Fp8Form, Graph, Product};
use std::time::Instant;

const SHAPES: &[(&str, usize, usize)] =
    &[("qkv", 6144, 4096), ("o", 4096, 4096), ("gate, up", 24576, 4096), ("down", 4096, 12288)];
const ROWS: &[usize] = &[1, 8, 16, 32, 64, 128, 256, 1024, 8192];
/// Weights of all repetitions together, several times the cache.
const WEIGHTS_BYTES: usize = 1 << 30;

const NOISE_BYTES: usize = 64 << 20;

pub(crate) fn bench(kit: &mut Kit) -> Result<(), CudaError> {
    let blas = (Blas::new(&kit.cublaslt, &kit.device)?, Fp8Blas::default());
    let weights = DeviceMem::new(&kit.device, WEIGHTS_BYTES)?;
    // Random numbers, without which tensor cores draw less and run faster. Without the bit they are small in either type.
    let noise: Vec<u8> =
        (0..NOISE_BYTES / 8).flat_map(|_| (kit.word() & 0xbfbf_bfbf_bfbf_bfbf).to_le_bytes()).collect();
    for offset in (0..WEIGHTS_BYTES).step_by(NOISE_BYTES) {
        weights.write(&kit.stream, offset, &noise)?;
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
                let operands = SmallOperands { weight, bias: Address::NULL, norm, x, out: out.address() };
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
    if product.path() != Fp8Path::Few {
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
                    Fp8Path::Few => linear_fp8::multiply_few(&kit.queue(), &product, operands, extent),
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
