//! Experts with weights of FP8, by every path that can run a shape: each product against the same quantised inputs in f64,
//! and the whole against inputs that were never quantised.

use crate::experts::{Case, Choice, case, compare, held, routes_and_rows, sums_of};
use crate::fp8::quantised;
use crate::kit::Kit;
use atom_cuda::launch::experts::{
    Experts, ExpertsArrays, ExpertsMaps, ExpertsPath, ExpertsShape, ExpertsThen,
};
use atom_cuda::{CudaError, DeviceMem, Element, Fp8Form};
use atom_weights::{DType, quant};

/// Storing bf16 costs up to 2^-9 of each number: gated values once, outputs of many rows twice.
const BOUND_GATED: f64 = 3e-3;
const BOUND_OUT: f64 = 4e-3;
/// Inputs are rounded to 4 bits twice, 2.6% on average each; the product of gate and up sees the first one twice.
const BOUND_UNQUANTISED: f64 = 0.08;

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    if kit.device.properties().capability != (9, 0) {
        println!("  FP8 experts stay codes on compute capability 9.0 alone");
        return Ok(());
    }
    let cases = [
        (case([1, 1, 2, 0, 4, 256, 128], &[1], 4, Choice::Any), true),
        (case([1, 8, 2, 0, 4, 128, 128], &[0], 4, Choice::Any), true),
        (case([1, 4, 2, 0, 8, 80, 48], &[3], 8, Choice::Some), false),
        (case([1, 16, 4, 4, 5, 1152, 256], &[9], 16, Choice::Any), true),
        (case([3, 20, 3, 3, 6, 208, 112], &[20, 0, 7], 12, Choice::Some), false),
        (case([1, 33, 2, 2, 3, 1040, 272], &[33], 8, Choice::One), false),
        (case([2, 7, 5, 40, 128, 256, 128], &[7, 3], 200, Choice::Any), true),
        (case([1, 50, 10, 0, 16, 384, 128], &[50], 16, Choice::Any), true),
        (case([1, 300, 8, 8, 16, 112, 64], &[257], 32, Choice::One), false),
        (case([1, 301, 4, 8, 16, 128, 128], &[300], 32, Choice::One), true),
        (case([2, 400, 2, 2, 2, 256, 128], &[313, 400], 6, Choice::One), true),
    ];
    for (case, has_blocks) in &cases {
        run_all(kit, case, Fp8Form::Channel)?;
        if *has_blocks {
            run_all(kit, case, Fp8Form::Block)?;
        }
    }
    Ok(())
}

/// Codes of all experts with their scales, and what they mean.
struct Stack {
    values: Vec<f32>,
    codes: DeviceMem,
    scales: DeviceMem,
}

impl Stack {
    fn new(
        kit: &mut Kit,
        held: usize,
        outputs: usize,
        inputs: usize,
        form: Fp8Form,
    ) -> Result<Self, CudaError> {
        let count = held * outputs * inputs;
        let mut codes = Vec::with_capacity(count + 8);
        while codes.len() < count {
            codes.extend(kit.word().to_le_bytes().map(|code| if code & 0x7f == 0x7f { 0x08 } else { code }));
        }
        codes.truncate(count);
        // Codes are 130 on average, so outputs are near 1.
        let size = 1.0 / (130.0 * (inputs as f32).sqrt());
        let each = form.scales(outputs, inputs);
        let scales: Vec<f32> =
            (0..held * each).map(|_| size * (0.5 + kit.below(1000) as f32 / 1000.0)).collect();
        let mut values = quant::dequantize_bytes(DType::F8_E4M3, &codes);
        for (index, value) in values.iter_mut().enumerate() {
            let (row, input) = (index / inputs, index % inputs);
            let (expert, output) = (row / outputs, row % outputs);
            *value *= match form {
                Fp8Form::Channel => scales[row],
                Fp8Form::Block => {
                    scales[expert * each + output / 128 * Fp8Form::stride(inputs) + input / 128]
                }
            };
        }
        Ok(Self { values, codes: kit.upload_bytes(&codes)?, scales: kit.upload(&scales, Element::F32)? })
    }
}

/// What all paths of a case share.
struct Scene {
    shape: ExpertsShape,
    x: Vec<f32>,
    routes: Vec<f32>,
    is_real: Vec<bool>,
    /// Slots in sorted order, with the expert of each.
    positions: Vec<(usize, usize)>,
    gate_up: Stack,
    down: Stack,
    /// `[positions, width]` of quantised x.
    gated: Vec<f64>,
    /// `[rows, top_k, hidden]` of nothing quantised.
    unquantised: Vec<f64>,
}

fn run_all(kit: &mut Kit, case: &Case, form: Fp8Form) -> Result<(), CudaError> {
    let scene = Scene::new(kit, case, form)?;
    [1, 2].into_iter().try_for_each(|cluster| scene.run(kit, case, cluster))
}

fn dot(weights: &[f32], x: &[f64]) -> f64 {
    weights.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()
}

fn exact(row: &[f32]) -> Vec<f64> {
    row.iter().map(|&x| f64::from(x)).collect()
}

impl Scene {
    fn new(kit: &mut Kit, case: &Case, form: Fp8Form) -> Result<Self, CudaError> {
        let shape = ExpertsShape { fp8: Some(form), ..case.shape };
        let (x, routes, is_real) = routes_and_rows(kit, case, Element::BF16);
        let gate_up = Stack::new(kit, shape.held, 2 * shape.width, shape.hidden, form)?;
        let down = Stack::new(kit, shape.held, shape.hidden, shape.width, form)?;
        let mut positions: Vec<(usize, usize)> = (0..shape.choices())
            .filter_map(|slot| held(&shape, &routes, &is_real, slot).map(|expert| (slot, expert)))
            .collect();
        positions.sort_by_key(|&(slot, expert)| (expert, slot));
        let mut scene = Self {
            shape,
            x,
            routes,
            is_real,
            positions,
            gate_up,
            down,
            gated: Vec::new(),
            unquantised: vec![f64::NAN; shape.choices() * shape.hidden],
        };
        for &(slot, expert) in &scene.positions {
            let x = &scene.x[slot / shape.top_k * shape.hidden..][..shape.hidden];
            scene.gated.extend(scene.gate(expert, &quantised(x, form).values));
            let y = scene.down(expert, &scene.gate(expert, &exact(x)));
            scene.unquantised[slot * shape.hidden..][..shape.hidden].copy_from_slice(&y);
        }
        Ok(scene)
    }

    fn gate(&self, expert: usize, x: &[f64]) -> Vec<f64> {
        let (width, hidden) = (self.shape.width, self.shape.hidden);
        let weights = &self.gate_up.values[expert * 2 * width * hidden..][..2 * width * hidden];
        let column = |index: usize| dot(&weights[index * hidden..][..hidden], x);
        (0..width)
            .map(|index| {
                let gate = column(index);
                gate / (1.0 + (-gate).exp()) * column(width + index)
            })
            .collect()
    }

    fn down(&self, expert: usize, gated: &[f64]) -> Vec<f64> {
        let (width, hidden) = (self.shape.width, self.shape.hidden);
        self.down.values[expert * hidden * width..][..hidden * width]
            .chunks(width)
            .map(|row| dot(row, gated))
            .collect()
    }

    fn run(&self, kit: &mut Kit, case: &Case, cluster: usize) -> Result<(), CudaError> {
        let (s, path) = (&self.shape, ExpertsPath::Fp8 { cluster });
        let experts = Experts::by(*s, path);
        kit.load(&experts.programs())?;
        let (x, routes) = (kit.upload(&self.x, Element::BF16)?, kit.upload(&self.routes, Element::F32)?);
        let real_rows = kit.upload_words(&case.real)?;
        let workspace = kit.poisoned(experts.workspace_bytes().div_ceil(4), Element::F32)?;
        for (sums, out_element) in [(true, Element::BF16), (true, Element::F32), (false, Element::BF16)] {
            let gated = kit.poisoned(s.choices() * s.width, Element::BF16)?;
            let width = if sums { s.hidden } else { s.top_k * s.hidden };
            let out = kit.poisoned(s.rows() * width, out_element)?;
            let arrays = ExpertsArrays {
                real_rows: real_rows.address(),
                x: x.address(),
                routes: routes.address(),
                gate_up: self.gate_up.codes.address(),
                down: self.down.codes.address(),
                scales: [self.gate_up.scales.address(), self.down.scales.address()],
                gated: gated.address(),
                workspace: workspace.address(),
                out: out.address(),
                out_element,
                sums,
                then: ExpertsThen::Write,
            };
            let maps = ExpertsMaps::fp8(&kit.device, &experts, &arrays, cluster)?;
            // SAFETY: the arrays have the shape's sizes and live until the output is read back.
            unsafe { experts.launch(&kit.queue(), &arrays, Some(&maps)) }?;
            let found = kit.download(&out, out_element)?;
            let gated = kit.download(&gated, Element::BF16)?;
            let name = format!("{path:?} to {out_element:?}, sums {sums}, {:?} {s:?}", case.choice);
            let (real, padding) = gated.split_at(self.positions.len() * s.width);
            kit.near(&format!("{name}, gated"), real, &self.gated, BOUND_GATED);
            kit.untouched(&name, padding, 0);
            compare(kit, &name, &found, &self.expected(sums, &self.outputs(real)), BOUND_OUT);
            let unquantised = self.expected(sums, &self.unquantised);
            compare(kit, &format!("{name}, unquantised"), &found, &unquantised, BOUND_UNQUANTISED);
        }
        Ok(())
    }

    /// `[rows, top_k, hidden]` of gated rows as they were found, quantised.
    fn outputs(&self, gated: &[f32]) -> Vec<f64> {
        let (s, form) = (&self.shape, self.shape.fp8.expect("all scenes are"));
        let mut outputs = vec![f64::NAN; s.choices() * s.hidden];
        for (&(slot, expert), gated) in self.positions.iter().zip(gated.chunks(s.width)) {
            let y = self.down(expert, &quantised(gated, form).values);
            outputs[slot * s.hidden..][..s.hidden].copy_from_slice(&y);
        }
        outputs
    }

    fn expected(&self, sums: bool, outputs: &[f64]) -> Vec<f64> {
        if sums { sums_of(&self.shape, &self.routes, &self.is_real, outputs) } else { outputs.to_vec() }
    }
}
