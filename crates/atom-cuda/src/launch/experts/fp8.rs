//! Experts whose weights are FP8 codes: inputs of both products are quantised when they are there.

use super::{Experts, ExpertsArrays, ExpertsMaps, ExpertsPath, ExpertsShape, int};
use crate::compile::Program;
use crate::device::Device;
use crate::element::Element;
use crate::error::CudaError;
use crate::fp8::Fp8Form;
use crate::kernels::Queue;
use crate::launch::quantise::{self, Quantised, QuantisedShape};
use crate::launch::rows::RowExtent;
use crate::memory::Address;
use crate::module::{Arg, Launch, TensorMap, Tiling};
use crate::{MapElement, MapSwizzle};

impl Experts {
    /// What must be loaded beside the plan's program.
    pub(super) fn fp8_programs(&self) -> Vec<Program> {
        let (form, [x, gated]) = (self.form(), self.quantised());
        let ExpertsPath::Fp8 { cluster } = self.path else { unreachable!("{:?} is not of FP8", self.path) };
        vec![x.program(), gated.program(), program(form, cluster)]
    }

    /// Shapes of the quantised inputs of the first and of the second product.
    pub(super) fn quantised(&self) -> [QuantisedShape; 2] {
        let (s, form) = (&self.shape, self.form());
        [
            QuantisedShape { rows: s.rows(), inputs: s.hidden, form },
            QuantisedShape { rows: s.choices(), inputs: s.width, form },
        ]
    }

    pub(super) unsafe fn fp8(
        &self,
        queue: &Queue<'_>,
        a: &ExpertsArrays,
        maps: &ExpertsMaps,
        cluster: usize,
    ) -> Result<(), CudaError> {
        let (s, w) = (&self.shape, self.workspace().at(a.workspace));
        assert!(a.sums || a.out_element == Element::BF16, "single outputs of grouped products are bf16");
        let [x, gated] = self.inputs(a);
        let blocks = if cluster == 2 { queue.processors() / 2 * 2 } else { 2 * queue.processors() };
        let launch = Launch::new(blocks, 128 + 128 * cluster as u32)
            .shared(shared(self.form(), cluster))
            .overlapping();
        let program = program(self.form(), cluster);
        let (counts, tiles, slots): (Arg<'_>, Arg<'_>, Arg<'_>) =
            (w.counts.into(), w.tiles.into(), w.slots.into());
        let y = if a.sums { w.y } else { a.out };
        let gate_args = [
            (&maps.gate_up).into(),
            x.codes.into(),
            x.scales.into(),
            a.scales[0].into(),
            a.gated.into(),
            counts,
            tiles,
            slots,
            int(s.hidden),
            int(s.width),
            int(s.rows()),
            int(s.top_k),
        ];
        let down_args = [
            (&maps.down).into(),
            (&maps.gated).into(),
            gated.scales.into(),
            a.scales[1].into(),
            y.into(),
            counts,
            tiles,
            slots,
            int(s.hidden),
            int(s.width),
            int(s.choices()),
        ];
        // SAFETY: the caller's.
        unsafe {
            self.plan(queue, a, tile(cluster), 16)?;
            self.quantise_x(queue, a, x)?;
            queue.launch_of(&program, "experts_fp8_gate", launch, &gate_args)?;
            self.quantise_gated(queue, a, w.counts, gated)?;
            queue.launch_of(&program, "experts_fp8_down", launch, &down_args)?;
            if a.sums { self.combine(queue, a, y, Element::BF16) } else { Ok(()) }
        }
    }

    /// The first product's kernel reads the plan, which is made before, while x is quantised.
    unsafe fn quantise_x(
        &self,
        queue: &Queue<'_>,
        a: &ExpertsArrays,
        to: Quantised,
    ) -> Result<(), CudaError> {
        let (s, [shape, _]) = (&self.shape, self.quantised());
        let real = RowExtent { counts: a.real_rows, lanes: s.lanes, lane_rows: s.lane_rows };
        // SAFETY: the caller's.
        unsafe { quantise::rows_in_turn(queue, &shape, a.x, to, real) }
    }

    /// Rows in sorted order, as many as the plan counted.
    unsafe fn quantise_gated(
        &self,
        queue: &Queue<'_>,
        a: &ExpertsArrays,
        counts: Address,
        to: Quantised,
    ) -> Result<(), CudaError> {
        let [_, shape] = self.quantised();
        // SAFETY: the caller's.
        unsafe { quantise::rows(queue, &shape, a.gated, to, RowExtent::rows(counts, shape.rows)) }
    }

    fn form(&self) -> Fp8Form {
        self.shape.fp8.expect("paths of FP8 are for shapes of FP8")
    }

    /// Where the quantised inputs of both products are.
    fn inputs(&self, a: &ExpertsArrays) -> [Quantised; 2] {
        let (w, [x, gated]) = (self.workspace().at(a.workspace), self.quantised());
        [x.at(w.x), gated.at(w.gated)]
    }
}

impl ExpertsMaps {
    /// For arrays of FP8 `experts`, see [`ExpertsPath::Fp8`].
    pub fn fp8(
        device: &Device,
        experts: &Experts,
        arrays: &ExpertsArrays,
        cluster: usize,
    ) -> Result<Self, CudaError> {
        let shape = &experts.shape;
        let [hidden, width] = [shape.hidden, shape.width].map(|size| size as u64);
        let [held, choices] = [shape.held, shape.choices()].map(|size| size as u64);
        let map = |address, sizes: &[u64], strides: &[u64], tile: &[u32]| {
            let element = MapElement::CU_TENSOR_MAP_DATA_TYPE_UINT8;
            let swizzle = MapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B;
            TensorMap::new(device, &Tiling { address, element, sizes, strides, tile, swizzle })
        };
        let [_, gated] = experts.inputs(arrays);
        Ok(Self {
            // 64 gate rows and their 64 up rows.
            gate_up: map(
                arrays.gate_up,
                &[hidden, width, 2, held],
                &[hidden, width * hidden, 2 * width * hidden],
                &[128, 64, 2, 1],
            )?,
            down: map(arrays.down, &[width, hidden, held], &[width, hidden * width], &[128, 128, 1])?,
            gated: map(gated.codes, &[width, choices], &[width], &[128, if cluster == 2 { 32 } else { 8 }])?,
        })
    }
}

fn blocks(form: Fp8Form) -> &'static str {
    match form {
        Fp8Form::Channel => "SCALE_BLOCKS=0",
        Fp8Form::Block => "SCALE_BLOCKS=1",
    }
}

fn program(form: Fp8Form, cluster: usize) -> Program {
    Program::with("experts_fp8", &[blocks(form), &format!("CLUSTER={cluster}")])
}

/// Blocks that share their weights: 2 where products are the time, 1 where reading the weights is.
pub(super) fn cluster(shape: &ExpertsShape) -> usize {
    if shape.choices() <= READ * shape.held { 1 } else { 2 }
}

/// Choices of a tile of `experts_fp8.cu`.
pub(super) fn tile(cluster: usize) -> usize {
    if cluster == 2 { 256 } else { 64 }
}

/// Dynamic shared memory of `experts_fp8.cu`: four stages with their scales and barriers, and outputs on their way. Two blocks
/// without clusters fit on a multiprocessor.
pub(super) fn shared(form: Fp8Form, cluster: usize) -> u32 {
    let (weights, choices) = (128 * cluster as u32, 64 * cluster as u32);
    let scales = if form == Fp8Form::Block { 4 * choices } else { 0 };
    4 * ((weights + choices) * 128 + scales + 16) + 9216 * cluster as u32
}

/// Up to so many choices an expert, the time is that of reading weights: 224 us without and 236 us with clusters at 64 of them,
/// see docs/performance/gpu-fp8-experts.md.
const READ: usize = 64;
