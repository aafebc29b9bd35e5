//! The kernel sources of this crate, and what of them is loaded on a GPU.

use crate::compile::{Compiler, Program};
use crate::device::{Device, Stream};
use crate::error::CudaError;
use crate::module::{Arg, Kernel, Launch, Module};
use std::cell::RefCell;
use std::collections::HashMap;

/// A file of `kernels/`.
#[derive(Debug)]
pub struct Source {
    /// Its name without `.cu`.
    pub name: &'static str,
    /// What it says, without the prelude.
    pub text: &'static str,
    /// Lists of definitions that `cargo xtask kernels` compiles it with: all that a model may ask for where they
    /// are few, else one of each kind. An empty list compiles it as it is.
    pub variants: &'static [&'static [&'static str]],
}

/// Pasted in front of every source.
pub(crate) const PRELUDE: &str = include_str!("../kernels/prelude.cuh");

macro_rules! headers {
    ($( $name:literal )*) => {
        /// What sources may include, by name.
        pub(crate) const HEADERS: &[(&str, &str)] =
            &[$( ($name, include_str!(concat!("../kernels/", $name))), )*];
    };
}

headers! {
    "attend_split_bf16.cuh" "attend_split_e4m3.cuh" "attend_tiles_e4m3.cuh" "dependent.cuh" "e4m3.cuh"
    "exchange.cuh" "experts_choices.cuh" "hopper.cuh" "hopper_attend.cuh" "hopper_fp8.cuh" "route.cuh" "rows.cuh" "sample.cuh"
    "sample_search.cuh" "stream.cuh"
}

macro_rules! sources {
    ($( $name:literal $variants:expr; )*) => {
        /// All of them.
        pub const SOURCES: &[Source] = &[$(
            Source {
                name: $name,
                text: include_str!(concat!("../kernels/", $name, ".cu")),
                variants: $variants,
            },
        )*];
    };
}

sources! {
    "step" &[&[]];
    "step_end" &[&[]];
    "weights" &[&[]];
    "rows" &[&[]];
    "norm" &[&[]];
    "rope" &[&[]];
    "route" &[&[]];
    "router_few" &[&["PIECES=1"], &["PIECES=2"]];
    "linear_small" &[
        &["ROWS_MAX=1", "RUN=4", "WARPS=8", "RING_KB=111", "NORM=0", "OUT=0"],
        &["ROWS_MAX=2", "RUN=1", "WARPS=8", "RING_KB=111", "NORM=1", "OUT=1"],
        &["ROWS_MAX=8", "RUN=3", "WARPS=8", "RING_KB=106", "NORM=0", "OUT=2"],
        &["ROWS_MAX=16", "RUN=6", "WARPS=4", "RING_KB=60", "NORM=1", "OUT=3"],
    ];
    "linear_small_fp8" &[
        &["ROWS_MAX=1", "RUN=4", "WARPS=8", "RING_KB=111", "GROUPS=0", "OUT=0"],
        &["ROWS_MAX=2", "RUN=1", "WARPS=8", "RING_KB=111", "GROUPS=1", "OUT=1"],
        &["ROWS_MAX=8", "RUN=3", "WARPS=8", "RING_KB=106", "GROUPS=0", "OUT=2"],
        &["ROWS_MAX=16", "RUN=6", "WARPS=8", "RING_KB=88", "GROUPS=1", "OUT=3"],
    ];
    "linear_rows_fp8" &[
        &["CLUSTER=1", "EACH=16", "STAGES=11", "GROUPS=0", "OUT=0"],
        &["CLUSTER=2", "EACH=8", "STAGES=12", "GROUPS=1", "OUT=1"],
        &["CLUSTER=2", "EACH=32", "STAGES=8", "GROUPS=1", "OUT=2"],
        &["CLUSTER=1", "EACH=64", "STAGES=6", "GROUPS=0", "OUT=3"],
        &["CLUSTER=2", "EACH=64", "STAGES=5", "GROUPS=1", "OUT=3"],
    ];
    "fp8_finish" &[&["OUT=0"], &["OUT=1"], &["OUT=2"], &["OUT=3"]];
    "quantise" &[&["HELD=2", "GROUPS=0"], &["HELD=4", "GROUPS=1"], &["HELD=6", "GROUPS=0"]];
    "linear_rows" &[
        &["CLUSTER=1", "PARTS=1", "EACH=16", "STAGES=11", "OUT=0"],
        &["CLUSTER=2", "PARTS=1", "EACH=8", "STAGES=12", "OUT=1"],
        &["CLUSTER=1", "PARTS=2", "EACH=8", "STAGES=12", "OUT=2"],
        &["CLUSTER=2", "PARTS=1", "EACH=16", "STAGES=11", "OUT=2"],
        &["CLUSTER=1", "PARTS=2", "EACH=64", "STAGES=12", "OUT=0"],
        &["CLUSTER=1", "PARTS=1", "EACH=32", "STAGES=9", "OUT=3"],
        &["CLUSTER=2", "PARTS=1", "EACH=64", "STAGES=6", "OUT=3"],
    ];
    "linear_gated" &[&[]];
    "attend_simple" &[&[]];
    "attend_split" &[
        &["WIDTH=64"], &["WIDTH=128"], &["WIDTH=256"], &["WIDTH=128", "SMALL_SHARED"],
        &["WIDTH=64", "E4M3"], &["WIDTH=128", "E4M3"], &["WIDTH=256", "E4M3"], &["WIDTH=128", "SMALL_SHARED", "E4M3"],
    ];
    "attend_few" &[&["WIDTH=64"], &["WIDTH=128"], &["WIDTH=256"]];
    "attend_tiles" &[
        &["WIDTH=64"], &["WIDTH=96"], &["WIDTH=128"], &["WIDTH=256"],
        &["WIDTH=64", "E4M3"], &["WIDTH=96", "E4M3"], &["WIDTH=128", "E4M3"], &["WIDTH=256", "E4M3"],
    ];
    "experts_simple" &[&[]];
    "experts_plan" &[&[]];
    "experts_few" &[&["DEPTH=4"], &["DEPTH=6"]];
    "experts_small" &[&["ROW_TILES=1", "DEPTH=4"], &["ROW_TILES=2", "DEPTH=4"]];
    "experts_gemm" &[&["CLUSTER=1"], &["CLUSTER=2"]];
    "experts_fp8" &[
        &["SCALE_BLOCKS=0", "CLUSTER=1"],
        &["SCALE_BLOCKS=0", "CLUSTER=2"],
        &["SCALE_BLOCKS=1", "CLUSTER=1"],
        &["SCALE_BLOCKS=1", "CLUSTER=2"],
    ];
    "exchange" &[&[]];
    "sample" &[&[]];
    "sample_finish" &[&[]];
    "sample_load" &[&[]];
}

impl Source {
    /// The source of that name.
    pub fn named(name: &str) -> Result<&'static Self, CudaError> {
        let found = SOURCES.iter().find(|source| source.name == name);
        found.ok_or_else(|| CudaError::Unsupported(format!("no kernel source {name}")))
    }

    /// Its programs, as `cargo xtask kernels` compiles them.
    pub fn programs(&'static self) -> impl Iterator<Item = Program> {
        self.variants.iter().map(|defines| Program::with(self.name, defines))
    }
}

/// Programs on a GPU. Clones share what is loaded; each is for one thread.
#[derive(Clone)]
pub struct Kernels {
    device: Device,
    modules: HashMap<Program, Module>,
    found: RefCell<HashMap<(Program, String), Kernel>>,
}

impl Kernels {
    /// None yet.
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), modules: HashMap::new(), found: RefCell::default() }
    }

    /// Compiles and loads those of `programs` that are not there yet. Returns how many NVRTC had to compile.
    pub fn load(
        &mut self,
        compiler: &Compiler<'_>,
        programs: &[Program],
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<usize, CudaError> {
        let mut missing: Vec<Program> =
            programs.iter().filter(|program| !self.modules.contains_key(program)).cloned().collect();
        missing.sort();
        missing.dedup();
        let mut new = 0;
        for compiled in compiler.compile(&missing, progress)? {
            let module = Module::load(&self.device, &compiled.program.to_string(), &compiled.cubin)?;
            new += usize::from(compiled.is_new);
            self.modules.insert(compiled.program, module);
        }
        Ok(new)
    }

    /// Whether a program is loaded.
    pub fn has(&self, program: &Program) -> bool {
        self.modules.contains_key(program)
    }

    /// A kernel of a loaded program.
    pub fn kernel(&self, program: &Program, name: &str) -> Result<Kernel, CudaError> {
        let key = (program.clone(), name.to_owned());
        if let Some(kernel) = self.found.borrow().get(&key) {
            return Ok(kernel.clone());
        }
        let module = self.modules.get(program).ok_or_else(|| {
            CudaError::Unsupported(format!("{program} was not loaded, so it has no kernel {name}"))
        })?;
        let kernel = module.kernel(name)?;
        self.found.borrow_mut().insert(key, kernel.clone());
        Ok(kernel)
    }
}

/// Where launchers put their kernels: a stream, with the kernels that they may ask for.
#[derive(Clone, Copy)]
pub struct Queue<'a> {
    /// What is loaded.
    pub kernels: &'a Kernels,
    /// Where it goes.
    pub stream: &'a Stream,
}

impl Queue<'_> {
    /// Multiprocessors of the GPU: grids are made from it and from capacities, never from a step's real rows.
    pub fn processors(&self) -> u32 {
        self.stream.device().properties().processors
    }

    /// Launches kernel `name` of a source without definitions.
    ///
    /// # Safety
    /// See [`Kernel::launch`].
    pub unsafe fn launch(
        &self,
        source: &'static str,
        name: &str,
        launch: Launch,
        args: &[Arg<'_>],
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.launch_of(&Program::plain(source), name, launch, args) }
    }

    /// The same of a program with definitions.
    ///
    /// # Safety
    /// See [`Kernel::launch`].
    pub unsafe fn launch_of(
        &self,
        program: &Program,
        name: &str,
        launch: Launch,
        args: &[Arg<'_>],
    ) -> Result<(), CudaError> {
        let kernel = self.kernels.kernel(program, name)?;
        // SAFETY: the caller's.
        unsafe { kernel.launch(self.stream, launch, args) }
    }
}
