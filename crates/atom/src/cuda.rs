//! Which device computes, and what of a GPU's memory goes where.

use crate::args::{DTypeArg, Device, EngineArgs};
use crate::source::cache_home;
use crate::step_bench::{Observed, Workshop};
use anyhow::{Context, Result, bail, ensure};
use atom_base::{Mesh, Seat};
use atom_cuda::{CudaBackend, Element, Gpu, GpuOptions, Plan, Search, Sizer, Sizes, SumOrder};
use atom_group::Lattice;
use atom_model::{ExpertLayout, Model};
use atom_ops::{Backend, KvDType, OpsError, Reserve, StepShape};
use atom_weights::Checkpoint;
use std::sync::{Arc, Mutex};

/// Opens the GPU if one is asked for, or if there is one and nothing says that the CPU is meant.
pub(crate) fn choose(args: &EngineArgs) -> Result<Option<Gpu>> {
    let search = Search::from_env(|name| std::env::var_os(name));
    let wanted = match args.device {
        Device::Cpu => false,
        Device::Cuda => true,
        Device::Auto => {
            args.cpu_flag().is_none()
                && Gpu::is_there(&search).context("looking for a GPU (--device cpu leaves it alone)")?
        }
    };
    if !wanted {
        ensure!(args.dtype == DTypeArg::Auto, "--dtype is for --device cuda: a CPU computes in f32");
        ensure!(
            args.gpu_memory_utilization.is_none(),
            "--gpu-memory-utilization is for --device cuda; --kv-cache-memory sizes the cache of a CPU"
        );
        return Ok(None);
    }
    if let Some(flag) = args.cpu_flag() {
        bail!("{flag} is for --device cpu");
    }
    let cache = cache_home(&|name| std::env::var_os(name)).map(|home| home.join("kernels"));
    let options = GpuOptions { search, ordinal: 0, cache };
    refuse_groups(args)?;
    let gpu = Gpu::open(&options).context("opening the GPU")?;
    Ok(Some(gpu))
}

/// One rank on one GPU is what is built.
fn refuse_groups(args: &EngineArgs) -> Result<()> {
    let ranks = u32::from(args.tensor_parallel_size) * u32::from(args.data_parallel_size);
    ensure!(
        ranks == 1 && args.nodes == 1,
        "several GPUs are not built yet: one process serves one GPU; leave out -tp, -dp and --nodes"
    );
    ensure!(
        args.rank_restarts_max.unwrap_or(0) == 0,
        "--rank-restarts-max: a GPU that failed takes its process along; restart the process"
    );
    Ok(())
}

/// How a GPU computes. bf16, as f32 and f16 checkpoints of real size are served by others too.
pub(crate) fn element(args: &EngineArgs) -> Element {
    match args.dtype {
        DTypeArg::Float32 => Element::F32,
        DTypeArg::Auto | DTypeArg::Bfloat16 => Element::BF16,
    }
}

/// Sums in one order for all steps, or the fastest for each.
pub(crate) fn order(args: &EngineArgs) -> SumOrder {
    if args.deterministic { SumOrder::Fixed } else { SumOrder::Fastest }
}

/// How keys and values are stored, unless something else is asked for: as they are computed.
pub(crate) fn own_kv_dtype(element: Element) -> KvDType {
    match element {
        Element::F32 => KvDType::F32,
        Element::BF16 => KvDType::BF16,
    }
}

/// What a plan is made for.
pub(crate) struct Wanted<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) mesh: &'a Mesh,
    pub(crate) experts: ExpertLayout,
    pub(crate) lattice: &'a Lattice,
    pub(crate) element: Element,
    pub(crate) kv_dtype: KvDType,
    pub(crate) order: SumOrder,
    pub(crate) page_size: usize,
    pub(crate) max_model_len: usize,
    pub(crate) max_num_seqs: usize,
    /// Recordings can count the experts of a step.
    pub(crate) count_experts: bool,
    pub(crate) poison: bool,
    /// Pages that requests can use at the most.
    pub(crate) pages_useful: usize,
    /// `--kv-cache-memory`
    pub(crate) cache_bytes: Option<u64>,
    pub(crate) utilization: Option<f64>,
}

/// Counts everything that the rank will take, by loading the model into a backend that only counts; the rest of what
/// it may take becomes pages.
pub(crate) fn plan(gpu: &Gpu, wanted: &Wanted<'_>) -> Result<Plan> {
    let utilization = wanted.utilization.unwrap_or(UTILIZATION);
    ensure!(
        utilization > 0.0 && utilization <= 1.0,
        "--gpu-memory-utilization {utilization} is no share of the memory; use 0.9 for nine tenths"
    );
    let sizes = sizes(gpu, wanted)?;
    let budget = gpu.budget(utilization)?;
    let within = sizes.pages_within(budget)?;
    let asked = wanted.cache_bytes.map_or(wanted.pages_useful, |bytes| (bytes / sizes.page as u64) as usize);
    ensure!(asked >= 2, "--kv-cache-memory holds {asked} pages of {} bytes; it needs at least 2", sizes.page);
    ensure!(
        wanted.cache_bytes.is_none() || asked <= within,
        "--kv-cache-memory asks for {asked} pages of {} bytes and {within} are left of the {budget} bytes that \
         --gpu-memory-utilization {utilization} allows",
        sizes.page
    );
    let plan = Plan { sizes, pages: asked.min(within).min(wanted.pages_useful) };
    if wanted.order == SumOrder::Fixed {
        tracing::info!(
            "--deterministic: one order of sums for steps of all sizes; norms in front of products are kernels of their own, \
             and each next token takes longer (docs/cuda.md has figures)"
        );
    }
    tracing::info!("GPU memory, {} MiB of {} MiB allowed: {plan}", plan.total() >> 20, budget >> 20);
    Ok(plan)
}

fn sizes(gpu: &Gpu, wanted: &Wanted<'_>) -> Result<Sizes> {
    let mut sizer = Sizer::new(wanted.element, gpu.device().properties()).with_order(wanted.order);
    let seat = wanted.mesh.seats().next().context("a mesh has ranks")?;
    let layout = (wanted.mesh, wanted.experts);
    let model = Model::load(wanted.checkpoint, layout, &seat, &mut sizer, &|_, _| {})?;
    let shape = |rows, out_rows| StepShape { rows, out_rows, lanes: 1 };
    let top = wanted.lattice.top();
    let reserve = Reserve {
        top: shape(top.rows(), top.out_rows()),
        layers: model.config().layers,
        attention: Arc::clone(model.attention()),
        page_size: wanted.page_size,
        pages: 0,
        pages_per_sequence: wanted.max_model_len.div_ceil(wanted.page_size),
        kv_dtype: wanted.kv_dtype,
        slots: wanted.max_num_seqs + 1,
        vocab: model.config().vocab_size,
        samples: true,
        poison: wanted.poison,
    };
    for bucket in wanted.lattice.buckets() {
        let recording = model.record(shape(bucket.rows(), bucket.out_rows()));
        let recording = if wanted.count_experts { recording.counting_experts() } else { recording };
        sizer.add(&recording, &reserve)?;
    }
    Ok(sizer.sizes(&reserve))
}

/// Gives the GPU to the one rank that there is, which can be asked to take steps apart if there is a workshop.
pub(crate) fn backend(
    gpu: Gpu,
    plan: Plan,
    workshop: Option<Arc<Workshop>>,
) -> impl Fn(&Seat) -> Result<Box<dyn Backend>, OpsError> + Send + Sync + 'static {
    let gpu = Mutex::new(Some(gpu));
    move |_| {
        let gpu = gpu.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        let gpu = gpu.ok_or_else(|| OpsError::Device("the GPU was given to a rank before".into()))?;
        let backend = CudaBackend::new(gpu, &plan)?;
        Ok(match &workshop {
            None => Box::new(backend) as Box<dyn Backend>,
            Some(workshop) => Box::new(Observed::new(backend, Arc::clone(workshop))),
        })
    }
}

/// As vLLM's default.
const UTILIZATION: f64 = 0.9;
