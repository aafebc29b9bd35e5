//! The experts of a layer: which kernels run is decided by the shape, once, when a bucket is recorded.

mod combine;
mod fp8;
mod maps;

use self::combine::COMBINE_NORM_MAX;
pub use self::maps::ExpertsMaps;
use self::maps::Workspace;
use crate::compile::Program;
use crate::device::Properties;
use crate::element::Element;
use crate::error::CudaError;
use crate::fp8::Fp8Form;
use crate::kernels::Queue;
use crate::launch::norm::NormWeight;
use crate::memory::Address;
use crate::module::{Arg, Launch};
use crate::order::SumOrder;

/// What is known of an [`atom_ops::Op::Experts`] when it is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsShape {
    /// Blocks of rows: 1 for [`atom_ops::Extent::Rows`], the group's lanes for `GroupRows`.
    pub lanes: usize,
    /// Rows of a block.
    pub lane_rows: usize,
    /// Experts that a row chose.
    pub top_k: usize,
    /// Number of the first expert held here.
    pub first: usize,
    /// Experts held here.
    pub held: usize,
    /// Inputs of gate and up, outputs of down.
    pub hidden: usize,
    /// Columns of gate and of up, inputs of down.
    pub width: usize,
    /// Type of x and gated, and of weights that are not FP8.
    pub element: Element,
    /// How weights are scaled if they are FP8; x and gated are bf16 then, and hidden and width multiples of 16 (for blocks:
    /// of 128).
    pub fp8: Option<Fp8Form>,
}

/// The kernels that run a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertsPath {
    /// A warp for each dot product: f32, and sizes that are no multiples of 8.
    Simple,
    /// Two launches, each block sorts the choices for itself.
    Few {
        /// Of the rings of the first and the second product.
        depths: [usize; 2],
    },
    /// Weights stream through tiles of up to `8 * row_tiles` choices: any GPU.
    Small {
        /// Tiles of the tensor cores' 8 rows.
        row_tiles: usize,
        /// Of the rings.
        depth: usize,
    },
    /// Grouped products on compute capability 9.0.
    Grouped {
        /// Blocks that share their weights: 2 where products are the time, 1 where reading the weights is.
        cluster: usize,
    },
    /// As `Grouped`, of FP8 weights and for any number of rows.
    Fp8 {
        /// As there.
        cluster: usize,
    },
}

/// A shape with its kernels.
#[derive(Clone, Copy, Debug)]
pub struct Experts {
    shape: ExpertsShape,
    path: ExpertsPath,
}

/// Arrays of one layer. Types are the shape's where none is named.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsArrays {
    /// `u32[lanes]`: real rows of each block.
    pub real_rows: Address,
    /// `[rows, hidden]`
    pub x: Address,
    /// `f32[rows, 2 top_k]`
    pub routes: Address,
    /// `[held, 2 width, hidden]`
    pub gate_up: Address,
    /// `[held, hidden, width]`
    pub down: Address,
    /// f32 scales of gate_up and of down, of each expert as [`Fp8Form::scales`] says; not read if weights are not FP8.
    pub scales: [Address; 2],
    /// Scratch, `[rows, top_k * width]`
    pub gated: Address,
    /// Scratch, [`Experts::workspace_bytes`]; layers may share it.
    pub workspace: Address,
    /// `[rows, hidden]` if it sums, else `[rows, top_k * hidden]`, of `out_element`
    pub out: Address,
    /// The shape's, or f32.
    pub out_element: Element,
    /// Whether outputs are weighted and added.
    pub sums: bool,
    /// What becomes of the sums.
    pub then: ExpertsThen,
}

/// What becomes of a row's weighted sum.
#[derive(Clone, Copy, Debug)]
pub enum ExpertsThen {
    /// It is written.
    Write,
    /// It is added to the f32 residual that `out` is, and the norm of the new residual is written, bf16 `[rows, hidden]`.
    /// For paths that do so, see [`Experts::norms`].
    AddNorm(NormWeight, Address),
}

impl ExpertsShape {
    /// Row capacity.
    pub fn rows(&self) -> usize {
        self.lanes * self.lane_rows
    }

    /// Choices at full capacity.
    pub fn choices(&self) -> usize {
        self.rows() * self.top_k
    }
}

impl Experts {
    /// Chooses kernels by what was measured on an H200 (132 multiprocessors, 4.28 TB/s).
    pub fn new(shape: ExpertsShape, gpu: &Properties) -> Self {
        Self { shape, path: ExpertsPath::choose(&shape, gpu) }
    }

    /// The same for sums in this order. Fixed: kernels whose sums are the same for any number of rows; grouped products
    /// are in either size of clusters, and the others by one program for all.
    pub fn in_order(shape: ExpertsShape, order: SumOrder, gpu: &Properties) -> Self {
        let path = match order {
            SumOrder::Fastest => ExpertsPath::choose(&shape, gpu),
            SumOrder::Fixed => ExpertsPath::choose_of_many(&shape, gpu),
        };
        Self { shape, path }
    }

    /// The kernels of `path`, whether they are the best or not.
    pub fn by(shape: ExpertsShape, path: ExpertsPath) -> Self {
        Self { shape, path }
    }

    /// What was chosen.
    pub fn path(&self) -> ExpertsPath {
        self.path
    }

    /// Whether it can do [`ExpertsThen::AddNorm`].
    pub fn norms(&self) -> bool {
        let is_combined = matches!(self.path, ExpertsPath::Small { .. } | ExpertsPath::Grouped { .. });
        is_combined && self.shape.hidden <= COMBINE_NORM_MAX
    }

    /// What must be loaded.
    pub fn programs(&self) -> Vec<Program> {
        match self.path {
            ExpertsPath::Simple => vec![Program::plain("experts_simple")],
            ExpertsPath::Few { depths } => depths.map(few_program).to_vec(),
            ExpertsPath::Small { row_tiles, depth } => {
                vec![Program::plain("experts_plan"), small_program(row_tiles, depth)]
            }
            ExpertsPath::Grouped { cluster } => {
                vec![Program::plain("experts_plan"), grouped_program(cluster)]
            }
            ExpertsPath::Fp8 { .. } => {
                let mut programs = self.fp8_programs();
                programs.push(Program::plain("experts_plan"));
                programs
            }
        }
    }

    /// Device memory that is used while the operator runs.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace().end
    }

    /// Queues it. `maps` are needed by [`ExpertsPath::Grouped`] and [`ExpertsPath::Fp8`].
    ///
    /// # Safety
    /// The arrays have the shape's sizes and live until the stream (each replay of a captured one) is done; the
    /// programs are loaded, and the maps are of the same arrays.
    pub unsafe fn launch(
        &self,
        queue: &Queue<'_>,
        arrays: &ExpertsArrays,
        maps: Option<&ExpertsMaps>,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe {
            match self.path {
                ExpertsPath::Simple => self.simple(queue, arrays),
                ExpertsPath::Few { depths } => self.few(queue, arrays, depths),
                ExpertsPath::Small { row_tiles, depth } => self.small(queue, arrays, row_tiles, depth),
                ExpertsPath::Grouped { cluster } => {
                    let maps = maps.expect("whoever records grouped products made their maps");
                    self.grouped(queue, arrays, maps, cluster)
                }
                ExpertsPath::Fp8 { cluster } => {
                    let maps = maps.expect("whoever records grouped products made their maps");
                    self.fp8(queue, arrays, maps, cluster)
                }
            }
        }
    }

    unsafe fn simple(&self, queue: &Queue<'_>, a: &ExpertsArrays) -> Result<(), CudaError> {
        let s = &self.shape;
        let [who0, who1, who2, who3, who4, who5] = self.choosers(a);
        let (hidden, width) = (int(s.hidden), int(s.width));
        let gate = Launch::new(s.choices() as u32, 256).by(s.width.div_ceil(8) as u32, 1);
        let down = Launch::new(s.rows() as u32, 256).by(s.hidden.div_ceil(8) as u32, 1);
        let gate_args = [
            a.x.into(),
            a.routes.into(),
            a.gate_up.into(),
            a.gated.into(),
            who0,
            who1,
            who2,
            who3,
            who4,
            who5,
            hidden,
            width,
        ];
        let down_args = [
            a.gated.into(),
            a.routes.into(),
            a.down.into(),
            a.out.into(),
            who0,
            who1,
            who2,
            who3,
            who4,
            who5,
            hidden,
            width,
            i32::from(a.sums).into(),
        ];
        let element = s.element.suffix();
        let out32 = if a.out_element == s.element { "" } else { "_out32" };
        // SAFETY: the caller's.
        unsafe {
            queue.launch("experts_simple", &format!("experts_simple_gate_{element}"), gate, &gate_args)?;
            queue.launch("experts_simple", &format!("experts_simple_down_{element}{out32}"), down, &down_args)
        }
    }

    unsafe fn few(&self, queue: &Queue<'_>, a: &ExpertsArrays, depths: [usize; 2]) -> Result<(), CudaError> {
        let s = &self.shape;
        let [who0, who1, who2, who3, who4, who5] = self.choosers(a);
        let (hidden, width) = (int(s.hidden), int(s.width));
        let launch = |bytes: usize| Launch::new(queue.processors(), 256).shared(bytes as u32).overlapping();
        let gate_args = [
            a.x.into(),
            a.routes.into(),
            a.gate_up.into(),
            a.gated.into(),
            who0,
            who1,
            who2,
            who3,
            who4,
            who5,
            hidden,
            width,
        ];
        let down_args = [
            a.gated.into(),
            a.routes.into(),
            a.down.into(),
            a.out.into(),
            who0,
            who1,
            who2,
            who3,
            who4,
            who5,
            hidden,
            width,
            i32::from(a.sums).into(),
        ];
        let [gate, down] = few_shared(s, depths).map(launch);
        // SAFETY: the caller's.
        unsafe {
            queue.launch_of(&few_program(depths[0]), "experts_few_gate_bf16", gate, &gate_args)?;
            let name = format!("experts_few_down_{}", out_suffix(a.out_element));
            queue.launch_of(&few_program(depths[1]), &name, down, &down_args)
        }
    }

    unsafe fn small(
        &self,
        queue: &Queue<'_>,
        a: &ExpertsArrays,
        row_tiles: usize,
        depth: usize,
    ) -> Result<(), CudaError> {
        let (s, w) = (&self.shape, self.workspace().at(a.workspace));
        let program = small_program(row_tiles, depth);
        let launch = |inputs: usize| {
            let bytes = stream_shared(row_tiles, depth, inputs) as u32;
            Launch::new(queue.processors(), 256).shared(bytes).overlapping()
        };
        let (hidden, width) = (int(s.hidden), int(s.width));
        let (counts, tiles, slots) = (w.counts.into(), w.tiles.into(), w.slots.into());
        // Sums are made of f32; without them the second product's outputs are what is asked for.
        let (y, y_element) = if a.sums { (w.y, Element::F32) } else { (a.out, a.out_element) };
        let gate_args =
            [a.x.into(), a.gate_up.into(), a.gated.into(), counts, tiles, slots, hidden, width, int(s.top_k)];
        let down_args = [a.gated.into(), a.down.into(), y.into(), counts, tiles, slots, hidden, width];
        // SAFETY: the caller's.
        unsafe {
            self.plan(queue, a, 8 * row_tiles, 8)?;
            queue.launch_of(&program, "experts_small_gate_bf16", launch(s.hidden), &gate_args)?;
            let name = format!("experts_small_down_{}", out_suffix(y_element));
            queue.launch_of(&program, &name, launch(s.width), &down_args)?;
            if a.sums { self.combine(queue, a, y, Element::F32) } else { Ok(()) }
        }
    }

    unsafe fn grouped(
        &self,
        queue: &Queue<'_>,
        a: &ExpertsArrays,
        maps: &ExpertsMaps,
        cluster: usize,
    ) -> Result<(), CudaError> {
        let (s, w) = (&self.shape, self.workspace().at(a.workspace));
        assert!(a.sums || a.out_element == Element::BF16, "single outputs of grouped products are bf16");
        let blocks = queue.processors() / cluster as u32 * cluster as u32;
        let launch = Launch::new(blocks, 384).shared(grouped_shared(cluster)).overlapping();
        let program = grouped_program(cluster);
        let (hidden, width) = (int(s.hidden), int(s.width));
        let (counts, tiles, slots) = (w.counts.into(), w.tiles.into(), w.slots.into());
        let y = if a.sums { w.y } else { a.out };
        let gate_args = [
            (&maps.gate_up).into(),
            a.x.into(),
            a.gated.into(),
            counts,
            tiles,
            slots,
            hidden,
            width,
            int(s.top_k),
        ];
        let down_args =
            [(&maps.down).into(), (&maps.gated).into(), y.into(), counts, tiles, slots, hidden, width];
        // SAFETY: the caller's.
        unsafe {
            self.plan(queue, a, grouped_tile(cluster), 16)?;
            queue.launch_of(&program, "experts_gemm_gate_bf16", launch, &gate_args)?;
            queue.launch_of(&program, "experts_gemm_down_bf16", launch, &down_args)?;
            if a.sums { self.combine(queue, a, y, Element::BF16) } else { Ok(()) }
        }
    }

    /// Choices sorted by expert, and tiles of them.
    unsafe fn plan(
        &self,
        queue: &Queue<'_>,
        a: &ExpertsArrays,
        tile_rows: usize,
        granule: usize,
    ) -> Result<(), CudaError> {
        let (s, w) = (&self.shape, self.workspace().at(a.workspace));
        let [who0, who1, who2, who3, who4, who5] = self.choosers(a);
        let blocks = s.rows().div_ceil(PLAN_ROWS) as u32;
        let launch = |bytes: usize| Launch::new(blocks, 256).shared((bytes * s.held) as u32).overlapping();
        let (routes, histogram): (Arg<'_>, Arg<'_>) = (a.routes.into(), w.histogram.into());
        let place_args = [
            routes,
            histogram,
            w.counts.into(),
            w.tiles.into(),
            w.slots.into(),
            who0,
            who1,
            who2,
            who3,
            who4,
            who5,
            int(tile_rows),
            int(granule),
        ];
        // SAFETY: the caller's.
        unsafe {
            if blocks > 1 {
                let args = [routes, histogram, who0, who1, who2, who3, who4, who5];
                queue.launch("experts_plan", "experts_count", launch(32), &args)?;
            }
            queue.launch("experts_plan", "experts_place", launch(36), &place_args)
        }
    }

    /// Parameters of `Choosers` in the kernels.
    fn choosers(&self, a: &ExpertsArrays) -> [Arg<'static>; 6] {
        let s = &self.shape;
        [a.real_rows.into(), int(s.lanes), int(s.lane_rows), int(s.top_k), int(s.first), int(s.held)]
    }

    fn workspace(&self) -> Workspace<usize> {
        let (s, choices) = (&self.shape, self.shape.choices());
        let (tile_rows, y_bytes) = match self.path {
            ExpertsPath::Simple | ExpertsPath::Few { .. } => {
                return Workspace::default();
            }
            ExpertsPath::Small { row_tiles, .. } => (8 * row_tiles, 4),
            ExpertsPath::Grouped { cluster } => (grouped_tile(cluster), 2),
            ExpertsPath::Fp8 { cluster } => (fp8::tile(cluster), 2),
        };
        let quantised = s.fp8.map_or([0; 2], |_| self.quantised().map(|shape| shape.bytes()));
        let mut end = 0;
        let mut place = |bytes: usize| {
            let start = end;
            end = (end + bytes).next_multiple_of(128);
            start
        };
        Workspace {
            counts: place(8),
            tiles: place(16 * (s.held.min(choices) + choices / tile_rows)),
            slots: place(4 * choices),
            histogram: place(4 * s.rows().div_ceil(PLAN_ROWS) * s.held),
            y: place(y_bytes * choices * s.hidden),
            x: place(quantised[0]),
            gated: place(quantised[1]),
            end,
        }
    }
}

impl ExpertsPath {
    fn choose(shape: &ExpertsShape, gpu: &Properties) -> Self {
        if shape.fp8.is_some() || !Self::has_tensor_cores(shape) {
            return Self::choose_of_many(shape, gpu);
        }
        let room = gpu.shared_bytes_max as usize;
        few_depths(shape, room)
            .map_or_else(|| Self::choose_of_many(shape, gpu), |depths| Self::Few { depths })
    }

    /// The best that take any number of rows.
    fn choose_of_many(shape: &ExpertsShape, gpu: &Properties) -> Self {
        if shape.fp8.is_some() {
            return Self::Fp8 { cluster: fp8::cluster(shape) };
        }
        if !Self::has_tensor_cores(shape) {
            return Self::Simple;
        }
        if gpu.capability == (9, 0) {
            let is_read = shape.choices() <= GROUPED_READ * shape.held;
            return Self::Grouped { cluster: if is_read { 1 } else { 2 } };
        }
        let (room, inputs) = (gpu.shared_bytes_max as usize, shape.hidden.max(shape.width));
        let fits = |(row_tiles, depth): &(usize, usize)| stream_shared(*row_tiles, *depth, inputs) <= room;
        match [(4, 4), (2, 8), (2, 4), (1, 8), (1, 4), (1, 3)].into_iter().find(fits) {
            Some((row_tiles, depth)) => Self::Small { row_tiles, depth },
            None => Self::Simple,
        }
    }

    fn has_tensor_cores(shape: &ExpertsShape) -> bool {
        let is_even = shape.hidden.is_multiple_of(8) && shape.width.is_multiple_of(8);
        shape.element == Element::BF16 && is_even && shape.held <= HELD_MAX
    }
}

fn int(value: usize) -> Arg<'static> {
    i32::try_from(value).expect("sizes of a layer fit in an int").into()
}

fn out_suffix(element: Element) -> &'static str {
    match element {
        Element::BF16 => "bf16",
        Element::F32 => "out32",
    }
}

fn few_program(depth: usize) -> Program {
    Program::with("experts_few", &[&format!("DEPTH={depth}")])
}

fn small_program(row_tiles: usize, depth: usize) -> Program {
    Program::with("experts_small", &[&format!("ROW_TILES={row_tiles}"), &format!("DEPTH={depth}")])
}

fn grouped_program(cluster: usize) -> Program {
    Program::with("experts_gemm", &[&format!("CLUSTER={cluster}")])
}

/// Choices of a tile of `experts_gemm.cu`.
fn grouped_tile(cluster: usize) -> usize {
    if cluster == 2 { 320 } else { 64 }
}

/// Dynamic shared memory of `experts_gemm.cu`.
fn grouped_shared(cluster: usize) -> u32 {
    if cluster == 2 { 231_488 } else { 223_312 }
}

/// Dynamic shared memory of a streaming kernel, see `stream.cuh`.
fn stream_shared(row_tiles: usize, depth: usize, inputs: usize) -> usize {
    depth * 16384 + row_tiles * 8192 + 8 * row_tiles * stream_row(inputs)
}

/// One row of x in it.
fn stream_row(inputs: usize) -> usize {
    inputs.div_ceil(128) * 256 + 64
}

/// Dynamic shared memory of the two kernels in `experts_few.cu`.
fn few_shared(shape: &ExpertsShape, depths: [usize; 2]) -> [usize; 2] {
    let plan = 12288 + 16 * shape.held;
    let inputs = shape.rows().min(8) * stream_row(shape.hidden);
    [plan + depths[0] * 16384 + 8192 + inputs, plan + depths[1] * 24576 + 64 * shape.choices()]
}

/// Depths of the rings in `experts_few.cu`, if a shape is for it. (Rings so small that blocks of both kernels fit on a
/// multiprocessor were measured: 24.9 us for one row, against 24.5.)
fn few_depths(shape: &ExpertsShape, room: usize) -> Option<[usize; 2]> {
    let is_small = shape.rows() <= FEW_ROWS && shape.choices() <= FEW_CHOICES;
    let is_read_once = shape.rows() <= 8 || shape.choices() <= FEW_EACH * shape.held;
    if !is_small || !is_read_once {
        return None;
    }
    let depth = |i: usize| (3..=FEW_DEPTH).rev().find(|&depth| few_shared(shape, [depth; 2])[i] <= room);
    Some([depth(0)?, depth(1)?])
}

/// Rows of a block of `experts_plan.cu`.
const PLAN_ROWS: usize = 256;

/// Each of a block's 256 threads has up to four experts.
const HELD_MAX: usize = 1024;

/// Row capacities up to this are no slower by two launches than by grouped products: 287 and 294 us at 64 rows. Its kernels
/// can't have more.
const FEW_ROWS: usize = 64;

/// Choices an expert up to which few experts have more than a tile of 8.
const FEW_EACH: usize = 4;

/// Deeper rings are no faster.
const FEW_DEPTH: usize = 6;

/// Each of a block's 256 threads has up to two choices.
const FEW_CHOICES: usize = 512;

/// Up to so many choices an expert, the time of grouped products is that of reading weights: 386 us without and 394 us
/// with clusters at 64 of them, 523 and 467 us at 128.
const GROUPED_READ: usize = 64;

#[cfg(test)]
mod tests;
