//! Experts whose weights are FP8 codes: inputs of both products are quantised when they are there.

use super::{
    Experts, ExpertsArrays, ExpertsMaps, ExpertsPath, ExpertsShape, FEW_CHOICES, FEW_EACH, int, out_suffix,
};
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

impl ExpertsPath {
    /// For FP8 on compute capability 9.0, where alone weights stay codes.
    pub(super) fn choose_fp8(shape: &ExpertsShape, room: usize) -> Self {
        if let Some(depths) = few_depths(shape, room) {
            return Self::Fp8Few { depths };
        }
        let is_read = shape.choices() <= GROUPED_READ * shape.held;
        Self::Fp8Grouped { cluster: if is_read { 1 } else { 2 } }
    }
}

impl Experts {
    /// What must be loaded beside the plan's program.
    pub(super) fn fp8_programs(&self) -> Vec<Program> {
        let (form, [x, gated]) = (self.form(), self.quantised());
        let mut programs = vec![x.program(), gated.program()];
        match self.path {
            ExpertsPath::Fp8Few { depths } => programs.extend(depths.map(|depth| few_program(form, depth))),
            ExpertsPath::Fp8Grouped { cluster } => programs.push(grouped_program(form, cluster)),
            _ => unreachable!("{:?} is not of FP8", self.path),
        }
        programs
    }

    /// Shapes of the quantised inputs of the first and of the second product.
    pub(super) fn quantised(&self) -> [QuantisedShape; 2] {
        let (s, form) = (&self.shape, self.form());
        [
            QuantisedShape { rows: s.rows(), inputs: s.hidden, form },
            QuantisedShape { rows: s.choices(), inputs: s.width, form },
        ]
    }

    pub(super) unsafe fn fp8_few(
        &self,
        queue: &Queue<'_>,
        a: &ExpertsArrays,
        depths: [usize; 2],
    ) -> Result<(), CudaError> {
        let (s, form, w) = (&self.shape, self.form(), self.workspace().at(a.workspace));
        let [x, gated] = self.inputs(a);
        let [who0, who1, who2, who3, who4, who5] = self.choosers(a);
        let launch = |bytes: usize| Launch::new(queue.processors(), 256).shared(bytes as u32).overlapping();
        let [gate, down] = few_shared(s, depths).map(launch);
        let (counts, tiles, slots): (Arg<'_>, Arg<'_>, Arg<'_>) =
            (w.counts.into(), w.tiles.into(), w.slots.into());
        let gate_args = [
            x.codes.into(),
            x.scales.into(),
            a.gate_up.into(),
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
            gated.codes.into(),
            gated.scales.into(),
            a.routes.into(),
            a.down.into(),
            a.scales[1].into(),
            a.out.into(),
            counts,
            tiles,
            slots,
            who0,
            who1,
            who2,
            who3,
            who4,
            who5,
            int(s.hidden),
            int(s.width),
            i32::from(a.sums).into(),
        ];
        // SAFETY: the caller's.
        unsafe {
            self.plan(queue, a, 8, 8)?;
            self.quantise_x(queue, a, x)?;
            queue.launch_of(&few_program(form, depths[0]), "experts_fp8_few_gate", gate, &gate_args)?;
            self.quantise_gated(queue, a, w.counts, gated)?;
            let name = format!("experts_fp8_few_down_{}", out_suffix(a.out_element));
            queue.launch_of(&few_program(form, depths[1]), &name, down, &down_args)
        }
    }

    pub(super) unsafe fn fp8_grouped(
        &self,
        queue: &Queue<'_>,
        a: &ExpertsArrays,
        maps: &ExpertsMaps,
        cluster: usize,
    ) -> Result<(), CudaError> {
        let (s, w) = (&self.shape, self.workspace().at(a.workspace));
        assert!(a.sums || a.out_element == Element::BF16, "single outputs of grouped products are bf16");
        let [x, gated] = self.inputs(a);
        let blocks = queue.processors() / cluster as u32 * cluster as u32;
        let launch = Launch::new(blocks, 384).shared(grouped_shared(self.form(), cluster)).overlapping();
        let program = grouped_program(self.form(), cluster);
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
            self.plan(queue, a, grouped_tile(cluster), 16)?;
            self.quantise_x(queue, a, x)?;
            queue.launch_of(&program, "experts_fp8_gemm_gate", launch, &gate_args)?;
            self.quantise_gated(queue, a, w.counts, gated)?;
            queue.launch_of(&program, "experts_fp8_gemm_down", launch, &down_args)?;
            if a.sums { self.combine(queue, a, y, Element::BF16) } else { Ok(()) }
        }
    }

    unsafe fn quantise_x(
        &self,
        queue: &Queue<'_>,
        a: &ExpertsArrays,
        to: Quantised,
    ) -> Result<(), CudaError> {
        let (s, [shape, _]) = (&self.shape, self.quantised());
        let real = RowExtent { counts: a.real_rows, lanes: s.lanes, lane_rows: s.lane_rows };
        // SAFETY: the caller's.
        unsafe { quantise::rows(queue, &shape, a.x, to, real) }
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
    /// For arrays of FP8 `experts`, see [`ExpertsPath::Fp8Grouped`].
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

fn few_program(form: Fp8Form, depth: usize) -> Program {
    Program::with("experts_fp8_few", &[blocks(form), &format!("DEPTH={depth}")])
}

fn grouped_program(form: Fp8Form, cluster: usize) -> Program {
    Program::with("experts_fp8_gemm", &[blocks(form), &format!("CLUSTER={cluster}")])
}

/// Choices of a tile of `experts_fp8_gemm.cu`.
pub(super) fn grouped_tile(cluster: usize) -> usize {
    if cluster == 2 { 256 } else { 64 }
}

/// Dynamic shared memory of `experts_fp8_gemm.cu`: stages, their scales, outputs on their way, barriers.
pub(super) fn grouped_shared(form: Fp8Form, cluster: usize) -> u32 {
    let (stages, share) = if cluster == 2 { (4, 128) } else { (5, 64) };
    let scales = if form == Fp8Form::Block { 4 * share } else { 0 };
    stages * ((256 + share) * 128 + scales + 16) + 18_432
}

/// Dynamic shared memory of the two kernels in `experts_fp8_few.cu`.
pub(super) fn few_shared(shape: &ExpertsShape, depths: [usize; 2]) -> [usize; 2] {
    let inputs = 8 * (shape.hidden.next_multiple_of(128) + 64);
    [depths[0] * 17_408 + 8192 + inputs, depths[1] * 25_600 + 64 * shape.choices() + 8192]
}

/// Depths of the rings in `experts_fp8_few.cu`, if a shape is for it.
fn few_depths(shape: &ExpertsShape, room: usize) -> Option<[usize; 2]> {
    let is_read_once = shape.rows() <= 8 || shape.choices() <= FEW_EACH * shape.held;
    if shape.choices() > FEW_CHOICES || !is_read_once {
        return None;
    }
    let depth = |i: usize| (3..=FEW_DEPTH).rev().find(|&depth| few_shared(shape, [depth; 2])[i] <= room);
    Some([depth(0)?, depth(1)?])
}

/// As in experts.rs.
const FEW_DEPTH: usize = 6;

/// Up to so many choices an expert, the time of grouped products is that of reading weights.
const GROUPED_READ: usize = 64;
