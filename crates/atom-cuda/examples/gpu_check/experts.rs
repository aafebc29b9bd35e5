//! The experts of a layer, by every path that can run a shape.

use crate::kit::Kit;
use atom_cuda::launch::experts::{
    Experts, ExpertsArrays, ExpertsMaps, ExpertsPath, ExpertsShape, ExpertsThen,
};
use atom_cuda::launch::norm::NormWeight;
use atom_cuda::{Address, CudaError, Element};

/// How rows choose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Choice {
    /// All experts alike.
    Any,
    /// As above, and every row also the same one held here.
    One,
    /// Half of the rows nobody.
    Some,
}

/// A shape, the real rows of its lanes, all experts that there are, and how rows choose.
pub(crate) struct Case {
    pub(crate) shape: ExpertsShape,
    pub(crate) real: Vec<u32>,
    pub(crate) experts: usize,
    pub(crate) choice: Choice,
}

/// `[lanes, lane rows, top_k, first, held, hidden, width]`
pub(crate) fn case(sizes: [usize; 7], real: &[u32], experts: usize, choice: Choice) -> Case {
    let [lanes, lane_rows, top_k, first, held, hidden, width] = sizes;
    let element = Element::BF16;
    let shape = ExpertsShape { lanes, lane_rows, top_k, first, held, hidden, width, element, fp8: None };
    Case { shape, real: real.to_vec(), experts, choice }
}

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    let cases = [
        case([1, 1, 2, 0, 4, 64, 32], &[1], 4, Choice::Any),
        case([1, 8, 2, 0, 4, 64, 64], &[0], 4, Choice::Any),
        case([1, 4, 2, 0, 8, 72, 40], &[3], 8, Choice::Some),
        case([1, 16, 4, 4, 5, 136, 88], &[9], 16, Choice::Any),
        case([3, 20, 3, 3, 6, 200, 104], &[20, 0, 7], 12, Choice::Some),
        case([1, 33, 2, 2, 3, 1032, 264], &[33], 8, Choice::One),
        case([2, 7, 5, 40, 512, 264, 72], &[7, 3], 600, Choice::Any),
        case([1, 50, 10, 0, 16, 264, 128], &[50], 16, Choice::Any),
        case([1, 300, 8, 8, 16, 104, 56], &[257], 32, Choice::One),
        case([2, 600, 2, 2, 2, 200, 72], &[513, 600], 6, Choice::One),
        case([1, 9, 2, 0, 3, 37, 19], &[8], 3, Choice::Any),
        case([1, 1, 8, 0, 8, 2048, 264], &[1], 10, Choice::Any),
        case([1, 1, 5, 8, 16, 1032, 264], &[1], 32, Choice::Any),
        case([1, 1, 32, 0, 40, 520, 72], &[1], 40, Choice::Any),
        case([1, 1, 3, 4, 4, 136, 88], &[1], 64, Choice::Some),
        case([1, 1, 3, 0, 4, 136, 88], &[0], 4, Choice::Any),
    ];
    cases.iter().try_for_each(|case| check(kit, case))
}

fn check(kit: &mut Kit, case: &Case) -> Result<(), CudaError> {
    let few = |depth: usize| ExpertsPath::Few { depths: [depth; 2] };
    let small = |row_tiles, depth| ExpertsPath::Small { row_tiles, depth };
    let exact = inputs(kit, case, Element::F32);
    run(kit, case, &exact, ExpertsPath::Simple)?;
    let s = &case.shape;
    let mut paths = vec![ExpertsPath::Simple];
    if s.hidden.is_multiple_of(8) && s.width.is_multiple_of(8) {
        paths.extend([small(1, 4), small(2, 4)]);
        if s.rows() <= 64 && s.choices() <= 512 {
            paths.extend([few(4), few(6)]);
        }
        if kit.device.properties().capability == (9, 0) {
            paths.extend([1, 2].map(|cluster| ExpertsPath::Grouped { cluster }));
        }
    }
    let rounded = inputs(kit, case, Element::BF16);
    for path in paths {
        run(kit, case, &rounded, path)?;
        if Experts::by(case.shape, path).norms() {
            onto_residual(kit, case, &rounded, path)?;
        }
    }
    Ok(())
}

/// Inputs of runs, as kernels see them, and what must come of them.
struct Inputs {
    element: Element,
    x: Vec<f32>,
    routes: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
    is_real: Vec<bool>,
    /// `[rows, top_k, hidden]`
    outputs: Vec<f64>,
}

fn run(kit: &mut Kit, case: &Case, inputs: &Inputs, path: ExpertsPath) -> Result<(), CudaError> {
    let (element, outputs) = (inputs.element, &inputs.outputs);
    let shape = ExpertsShape { element, ..case.shape };
    let experts = Experts::by(shape, path);
    let (x, routes) = (kit.upload(&inputs.x, element)?, kit.upload(&inputs.routes, Element::F32)?);
    let (gate_up, down) = (kit.upload(&inputs.gate_up, element)?, kit.upload(&inputs.down, element)?);
    let real_rows = kit.upload_words(&case.real)?;
    let gated = kit.poisoned(shape.choices() * shape.width, element)?;
    let workspace = kit.poisoned(experts.workspace_bytes() / 4, Element::F32)?;
    for (sums, out_element) in [(true, element), (true, Element::F32), (false, element)] {
        let width = if sums { shape.hidden } else { shape.top_k * shape.hidden };
        let out = kit.poisoned(shape.rows() * width, out_element)?;
        let arrays = ExpertsArrays {
            real_rows: real_rows.address(),
            x: x.address(),
            routes: routes.address(),
            gate_up: gate_up.address(),
            down: down.address(),
            scales: [Address::NULL; 2],
            gated: gated.address(),
            workspace: workspace.address(),
            out: out.address(),
            out_element,
            sums,
            then: ExpertsThen::Write,
        };
        let maps = maps(kit, &shape, &arrays, path)?;
        // SAFETY: the arrays have the shape's sizes and live until the output is read back.
        unsafe { experts.launch(&kit.queue(), &arrays, maps.as_ref()) }?;
        let found = kit.download(&out, out_element)?;
        // Gated values are rounded once to bf16, and outputs, or what is summed, once more.
        let bound = if element == Element::F32 { 1e-5 } else { 8e-3 };
        let name =
            format!("{path:?} {element:?} to {out_element:?}, sums {sums}, {:?} {shape:?}", case.choice);
        let expected =
            if sums { sums_of(&shape, &inputs.routes, &inputs.is_real, outputs) } else { outputs.clone() };
        compare(kit, &name, &found, &expected, bound);
    }
    Ok(())
}

/// The same onto a residual: what is there must stay, and nothing else comes to it.
fn onto_residual(kit: &mut Kit, case: &Case, inputs: &Inputs, path: ExpertsPath) -> Result<(), CudaError> {
    let element = inputs.element;
    let shape = ExpertsShape { element, ..case.shape };
    let experts = Experts::by(shape, path);
    let (x, routes) = (kit.upload(&inputs.x, element)?, kit.upload(&inputs.routes, Element::F32)?);
    let (gate_up, down) = (kit.upload(&inputs.gate_up, element)?, kit.upload(&inputs.down, element)?);
    let real_rows = kit.upload_words(&case.real)?;
    let gated = kit.poisoned(shape.choices() * shape.width, element)?;
    let workspace = kit.poisoned(experts.workspace_bytes() / 4, Element::F32)?;
    let before = kit.random(shape.rows() * shape.hidden, 1.0);
    let (residual, normed) = (kit.upload(&before, Element::F32)?, kit.poisoned(before.len(), element)?);
    let scales = kit.random(shape.hidden, 1.0);
    let norm_weight = kit.upload(&scales, Element::F32)?;
    let norm = NormWeight { weight: norm_weight.address(), width: shape.hidden, eps: 1e-6 };
    let arrays = ExpertsArrays {
        real_rows: real_rows.address(),
        x: x.address(),
        routes: routes.address(),
        gate_up: gate_up.address(),
        down: down.address(),
        scales: [Address::NULL; 2],
        gated: gated.address(),
        workspace: workspace.address(),
        out: residual.address(),
        out_element: Element::F32,
        sums: true,
        then: ExpertsThen::AddNorm(norm, normed.address()),
    };
    let maps = maps(kit, &shape, &arrays, path)?;
    // SAFETY: as in `run`.
    unsafe { experts.launch(&kit.queue(), &arrays, maps.as_ref()) }?;
    let name = format!("{path:?} onto a residual, {:?} {shape:?}", case.choice);
    let sums = sums_of(&shape, &inputs.routes, &inputs.is_real, &inputs.outputs);
    let after: Vec<f64> = sums.iter().zip(&before).map(|(sum, &x)| f64::from(x) + sum).collect();
    let found = kit.download(&residual, Element::F32)?;
    let kept = (0..after.len()).filter(|&i| after[i].is_nan()).all(|i| found[i] == before[i]);
    kit.check(&name, kept, "a residual of padding was changed");
    let is_asked = |i: &usize| !after[*i].is_nan();
    let (real, expected): (Vec<f32>, Vec<f64>) =
        (0..after.len()).filter(is_asked).map(|i| (found[i], after[i])).unzip();
    kit.near(&name, &real, &expected, 8e-3);
    let row = |row: &[f64]| {
        let root = 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64 + 1e-6).sqrt();
        row.iter().zip(&scales).map(|(x, &scale)| x * root * f64::from(scale)).collect::<Vec<_>>()
    };
    let expected: Vec<f64> = after.chunks(shape.hidden).flat_map(row).collect();
    compare(kit, &format!("norm of {name}"), &kit.download(&normed, element)?, &expected, 8e-3);
    Ok(())
}

fn maps(
    kit: &Kit,
    shape: &ExpertsShape,
    arrays: &ExpertsArrays,
    path: ExpertsPath,
) -> Result<Option<ExpertsMaps>, CudaError> {
    match path {
        ExpertsPath::Grouped { cluster } => Ok(Some(ExpertsMaps::new(&kit.device, shape, arrays, cluster)?)),
        _ => Ok(None),
    }
}

fn inputs(kit: &mut Kit, case: &Case, element: Element) -> Inputs {
    let (x, routes, is_real) = routes_and_rows(kit, case, element);
    let s = &case.shape;
    let scale = |inputs: usize| 1.0 / (inputs as f32).sqrt();
    let gate_up = element.rounded(&kit.random(s.held * 2 * s.width * s.hidden, scale(s.hidden)));
    let down = element.rounded(&kit.random(s.held * s.hidden * s.width, scale(s.width)));
    let mut inputs = Inputs { element, x, routes, gate_up, down, is_real, outputs: Vec::new() };
    inputs.outputs = reference(&ExpertsShape { element, ..*s }, &inputs);
    inputs
}

/// `x`, routes, and which rows are real. What nobody may read is NaN.
pub(crate) fn routes_and_rows(
    kit: &mut Kit,
    case: &Case,
    element: Element,
) -> (Vec<f32>, Vec<f32>, Vec<bool>) {
    let s = &case.shape;
    let mut routes = vec![f32::NAN; s.rows() * 2 * s.top_k];
    let mut x = element.rounded(&kit.random(s.rows() * s.hidden, 1.0));
    let is_real: Vec<bool> =
        (0..s.rows()).map(|row| row % s.lane_rows < case.real[row / s.lane_rows] as usize).collect();
    for row in 0..s.rows() {
        let mut chosen = Vec::new();
        if case.choice == Choice::One {
            chosen.push(s.first + s.held / 2);
        }
        while chosen.len() < s.top_k {
            let expert = kit.below(case.experts);
            if !chosen.contains(&expert) {
                chosen.push(expert);
            }
        }
        chosen.sort_unstable();
        let is_nobodys = case.choice == Choice::Some && kit.below(2) == 0;
        let is_ours = |expert: &usize| (s.first..s.first + s.held).contains(expert);
        if !is_real[row] || is_nobodys || !chosen.iter().any(is_ours) {
            x[row * s.hidden..][..s.hidden].fill(f32::NAN);
        }
        if is_real[row] {
            let route = &mut routes[row * 2 * s.top_k..][..2 * s.top_k];
            for (place, &expert) in chosen.iter().enumerate() {
                route[place] = if is_nobodys { atom_ops::NO_EXPERT } else { expert as f32 };
                route[s.top_k + place] = 0.05 + kit.below(1000) as f32 / 1000.0;
            }
        }
    }
    (x, routes, is_real)
}

/// The expert held here of each slot.
pub(crate) fn held(shape: &ExpertsShape, routes: &[f32], is_real: &[bool], slot: usize) -> Option<usize> {
    let (row, place) = (slot / shape.top_k, slot % shape.top_k);
    let number = routes[row * 2 * shape.top_k + place];
    let local = number - shape.first as f32;
    (is_real[row] && local >= 0.0 && local < shape.held as f32).then_some(local as usize)
}

fn dot(a: &[f32], b: impl Iterator<Item = f64>) -> f64 {
    a.iter().zip(b).map(|(&a, b)| f64::from(a) * b).sum()
}

/// `[rows, top_k, hidden]`: NaN at places that nobody may write.
fn reference(shape: &ExpertsShape, inputs: &Inputs) -> Vec<f64> {
    let (hidden, width) = (shape.hidden, shape.width);
    let mut outputs = vec![f64::NAN; shape.choices() * hidden];
    for (slot, output) in outputs.chunks_mut(hidden).enumerate() {
        let Some(expert) = held(shape, &inputs.routes, &inputs.is_real, slot) else { continue };
        let x = &inputs.x[slot / shape.top_k * hidden..][..hidden];
        let gate_up = &inputs.gate_up[expert * 2 * width * hidden..][..2 * width * hidden];
        let column =
            |index: usize| dot(&gate_up[index * hidden..][..hidden], x.iter().map(|&x| f64::from(x)));
        let gated: Vec<f64> = (0..width)
            .map(|index| {
                let gate = column(index);
                gate / (1.0 + (-gate).exp()) * column(width + index)
            })
            .collect();
        let down = &inputs.down[expert * hidden * width..][..hidden * width];
        for (output, row) in output.iter_mut().zip(down.chunks(width)) {
            *output = dot(row, gated.iter().copied());
        }
    }
    outputs
}

/// `[rows, hidden]`: NaN in rows that are padding.
pub(crate) fn sums_of(shape: &ExpertsShape, routes: &[f32], is_real: &[bool], outputs: &[f64]) -> Vec<f64> {
    let mut sums = Vec::with_capacity(shape.rows() * shape.hidden);
    for row in 0..shape.rows() {
        let start = if is_real[row] { 0.0 } else { f64::NAN };
        let mut sum = vec![start; shape.hidden];
        for place in 0..shape.top_k {
            let slot = row * shape.top_k + place;
            if held(shape, routes, is_real, slot).is_none() {
                continue;
            }
            let weight = f64::from(routes[row * 2 * shape.top_k + shape.top_k + place]);
            let output = &outputs[slot * shape.hidden..][..shape.hidden];
            sum.iter_mut().zip(output).for_each(|(sum, y)| *sum += weight * y);
        }
        sums.extend(sum);
    }
    sums
}

/// Near where something must be, and untouched elsewhere.
pub(crate) fn compare(kit: &mut Kit, name: &str, found: &[f32], expected: &[f64], bound: f64) {
    let stray = found.iter().zip(expected).filter(|(f, e)| e.is_nan() && !f.is_nan()).count();
    kit.check(name, stray == 0, &format!("{stray} numbers that nobody asked for"));
    let asked = |i: &usize| !expected[*i].is_nan();
    let (found, expected): (Vec<f32>, Vec<f64>) =
        (0..expected.len()).filter(asked).map(|i| (found[i], expected[i])).unzip();
    kit.near(name, &found, &expected, bound);
}
