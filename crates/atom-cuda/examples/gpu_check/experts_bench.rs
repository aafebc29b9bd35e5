//! How long a layer of Qwen3-30B-A3B's experts takes, plan, quantising and sums included, with random routes.

use crate::experts::{Choice, case, routes_and_rows};
use crate::kit::Kit;
use atom_cuda::launch::experts::{
    Experts, ExpertsArrays, ExpertsMaps, ExpertsPath, ExpertsShape, ExpertsThen,
};
use atom_cuda::{CudaError, DeviceMem, Element, Fp8Form, Graph};
use atom_weights::nearest_e4m3;
use std::time::Instant;

const ROWS: &[usize] = &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];
const FORMS: [Option<Fp8Form>; 3] = [None, Some(Fp8Form::Channel), Some(Fp8Form::Block)];
/// Launches of a graph, and graphs of which the fastest counts.
const LAUNCHES: usize = 10;
const GRAPHS: usize = 5;
/// Numbers that weights repeat.
const NORMAL: usize = 4 << 20;

pub(crate) fn bench(kit: &mut Kit) -> Result<(), CudaError> {
    let [top_k, held, hidden, width] = [8, 128, 2048, 768];
    // Normal numbers in either type: products of other bits draw more or less and run at other clocks.
    let normal = kit.random(NORMAL, 1.0);
    let plain = Element::BF16.encode(&normal);
    let codes: Vec<u8> = normal.iter().map(|x| nearest_e4m3(x * 90.0)).collect();
    let [plain, codes] = [(plain, 2), (codes, 1)].map(|(pattern, bytes)| {
        let weights = DeviceMem::new(&kit.device, bytes * held * 3 * width * hidden)?;
        for offset in (0..weights.bytes()).step_by(pattern.len()) {
            weights.write(&kit.stream, offset, &pattern[..pattern.len().min(weights.bytes() - offset)])?;
        }
        Ok::<_, CudaError>(weights)
    });
    let (plain, codes) = (plain?, codes?);
    let scales = kit.upload(&vec![1e-4; held * 2 * width], Element::F32)?;
    for &rows in ROWS {
        let case = case([1, rows, top_k, 0, held, hidden, width], &[rows as u32], held, Choice::Any);
        let (x, routes, _) = routes_and_rows(kit, &case, Element::BF16);
        let chosen: std::collections::BTreeSet<u32> =
            routes.chunks(2 * top_k).flat_map(|route| route[..top_k].iter().map(|&e| e as u32)).collect();
        let flops = 2 * rows * top_k * 3 * width * hidden;
        let mut line = format!("  {rows:>4} rows, {:>3} experts:", chosen.len());
        let (x, routes) = (kit.upload(&x, Element::BF16)?, kit.upload(&routes, Element::F32)?);
        for fp8 in FORMS.into_iter().take(if kit.device.properties().capability == (9, 0) { 3 } else { 1 }) {
            let shape = ExpertsShape { fp8, ..case.shape };
            let weights = if fp8.is_some() { &codes } else { &plain };
            let us = layer(kit, shape, [&x, &routes, weights, &scales])?;
            let bytes = chosen.len() * 3 * width * hidden * if fp8.is_some() { 1 } else { 2 };
            let form = fp8.map_or("bf16".to_owned(), |form| format!("{form:?}"));
            line += &format!(
                "  {form} {us:.1} us, {:.2} TB/s, {:.0} TFLOP/s",
                bytes as f64 / us * 1e-6,
                flops as f64 / us * 1e-6
            );
        }
        println!("{line}");
    }
    Ok(())
}

/// Microseconds of a layer; weights are read from memory, since they are several times the cache.
fn layer(
    kit: &mut Kit,
    shape: ExpertsShape,
    [x, routes, weights, scales]: [&DeviceMem; 4],
) -> Result<f64, CudaError> {
    let experts = Experts::new(shape, &kit.device.properties().clone());
    kit.load(&experts.programs())?;
    let real_rows = kit.upload_words(&[shape.rows() as u32])?;
    let gated = DeviceMem::new(&kit.device, 2 * shape.choices() * shape.width)?;
    let workspace = DeviceMem::new(&kit.device, experts.workspace_bytes().max(1))?;
    let out = DeviceMem::new(&kit.device, 2 * shape.rows() * shape.hidden)?;
    let each = if shape.fp8.is_some() { 1 } else { 2 };
    let arrays = ExpertsArrays {
        real_rows: real_rows.address(),
        x: x.address(),
        routes: routes.address(),
        gate_up: weights.address(),
        down: weights.address().plus(each * shape.held * 2 * shape.width * shape.hidden),
        scales: [scales.address(); 2],
        gated: gated.address(),
        workspace: workspace.address(),
        out: out.address(),
        out_element: Element::BF16,
        sums: true,
        then: ExpertsThen::Write,
    };
    let maps = match experts.path() {
        ExpertsPath::Grouped { cluster } => Some(ExpertsMaps::new(&kit.device, &shape, &arrays, cluster)?),
        ExpertsPath::Fp8 { cluster } => Some(ExpertsMaps::fp8(&kit.device, &experts, &arrays, cluster)?),
        _ => None,
    };
    let graph = Graph::capture(&kit.stream, || {
        // SAFETY: the arrays have the shape's sizes and outlive the graph.
        (0..LAUNCHES).try_for_each(|_| unsafe { experts.launch(&kit.queue(), &arrays, maps.as_ref()) })
    })?;
    let mut best = f64::MAX;
    for _ in 0..GRAPHS {
        let start = Instant::now();
        graph.launch(&kit.stream)?;
        kit.stream.wait()?;
        best = best.min(start.elapsed().as_secs_f64() * 1e6 / LAUNCHES as f64);
    }
    Ok(best)
}
