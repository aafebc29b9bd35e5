//! Which device computes, and what of a GPU's memory goes where.

use crate::args::{DTypeArg, Device, EngineArgs};
use crate::source::cache_home;
use crate::step_bench::{Observed, Workshop};
use anyhow::{Context, Result, bail, ensure};
use atom_base::{Mesh, Seat};
use atom_cuda::{CudaBackend, Element, Gpu, GpuOptions, Peers, Place, Plan, Search, Sizer, Sizes, SumOrder};
use atom_model::Model;
use atom_ops::{Backend, KvDType, OpsError};
use atom_rank::HostConfig;
use atom_weights::Checkpoint;
use std::fmt;
use std::sync::{Arc, Mutex};

/// A GPU for every rank, in their order.
pub(crate) struct Gpus(Vec<Gpu>);

/// Opens GPUs if they are asked for, or if there is one and nothing says that the CPU is meant.
pub(crate) fn choose(args: &EngineArgs, mesh: &Mesh) -> Result<Option<Gpus>> {
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
        ensure!(args.gpus.is_empty(), "--gpus is for --device cuda, and a CPU computes here");
        return Ok(None);
    }
    if let Some(flag) = args.cpu_flag() {
        bail!("{flag} is for --device cpu");
    }
    ensure!(
        args.nodes == 1,
        "--nodes {}: GPUs of several hosts in one group are not built yet; --device cpu has it",
        args.nodes
    );
    ensure!(
        args.rank_restarts_max.unwrap_or(0) == 0,
        "--rank-restarts-max: a GPU that failed takes its process along; restart the process"
    );
    ensure!(
        args.gpus.is_empty() || args.gpus.len() == mesh.ranks(),
        "--gpus names {} GPUs for {} ranks; name one for each, in their order",
        args.gpus.len(),
        mesh.ranks()
    );
    let there = Gpu::count(&search).context("opening the GPU")?;
    ensure!(
        !args.gpus.is_empty() || mesh.ranks() <= there.max(1),
        "{} ranks want a GPU each and the driver sees {there}; use fewer ranks, or --device cpu, or let ranks share GPUs \
         by naming one for each: --gpus 0,0",
        mesh.ranks()
    );
    let all: Vec<usize> = if args.gpus.is_empty() { (0..mesh.ranks()).collect() } else { args.gpus.clone() };
    let cache = cache_home(&|name| std::env::var_os(name)).map(|home| home.join("kernels"));
    let open = |&ordinal: &usize| {
        let sharers = all.iter().filter(|&&other| other == ordinal).count() as u32;
        let options = GpuOptions { search: search.clone(), ordinal, sharers, cache: cache.clone() };
        Gpu::open(&options).with_context(|| format!("opening GPU {ordinal}"))
    };
    let gpus: Vec<Gpu> = all.iter().map(open).collect::<Result<_>>()?;
    ensure!(
        !args.enforce_eager || gpus.iter().all(|gpu| gpu.sharers() == 1),
        "--enforce-eager makes a graph anew for each step, which waits for a GPU that another rank shares; give each rank a GPU"
    );
    // Known before weights are read.
    for (gpu, seat) in gpus.iter().zip(mesh.seats()) {
        let meets = |other: &Seat| other.group == seat.group;
        gpus.iter()
            .zip(mesh.seats())
            .filter(|(_, other)| meets(other))
            .try_for_each(|(other, _)| gpu.reach(other))?;
    }
    Ok(Some(Gpus(gpus)))
}

impl fmt::Display for Gpus {
    /// One name if all are of one kind.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names: Vec<&str> = self.0.iter().map(|gpu| gpu.device().properties().name.as_str()).collect();
        let ranks = names.len();
        let is_shared = self.0.iter().any(|gpu| gpu.sharers() > 1);
        names.dedup();
        match (ranks, is_shared) {
            (1, _) => {}
            (_, false) => write!(f, "{ranks} x ")?,
            (_, true) => write!(f, "{ranks} ranks, some of which share a GPU, on ")?,
        }
        f.write_str(&names.join(", "))
    }
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

/// How much room there shall be for keys and values.
pub(crate) struct Wanted {
    /// Pages that requests can use at the most.
    pub(crate) pages_useful: usize,
    /// `--kv-cache-memory`, of all ranks.
    pub(crate) cache_bytes: Option<u64>,
    pub(crate) utilization: Option<f64>,
}

/// Counts everything that each rank will take, by loading its share of the model into a backend that only counts; the rest
/// of what it may take becomes pages, as many on each rank. `config` has no pages yet.
pub(crate) fn plan(
    gpus: &Gpus,
    (checkpoint, config): (&Checkpoint, &HostConfig),
    (element, order): (Element, SumOrder),
    wanted: &Wanted,
) -> Result<Vec<Plan>> {
    let utilization = wanted.utilization.unwrap_or(UTILIZATION);
    ensure!(
        utilization > 0.0 && utilization <= 1.0,
        "--gpu-memory-utilization {utilization} is no share of the memory; use 0.9 for nine tenths"
    );
    let ranks = config.mesh.ranks() as u64;
    let mut plans = Vec::new();
    let mut pages = wanted.pages_useful;
    let mut budgets = Vec::new();
    for (gpu, seat) in gpus.0.iter().zip(config.mesh.seats()) {
        let sizes = sizes(gpu, (checkpoint, config), (element, order), &seat)?;
        gpu.device().bind()?;
        let budget = gpu.budget(utilization)?;
        let within = sizes.pages_within(budget).with_context(|| match gpu.sharers() {
            1 => format!("planning rank {}", seat.rank.0),
            sharers => {
                format!("planning rank {}, one of {sharers} that share a GPU and so its memory", seat.rank.0)
            }
        })?;
        if let Some(bytes) = wanted.cache_bytes {
            let asked = (bytes / ranks / sizes.page as u64) as usize;
            ensure!(
                asked >= 2,
                "--kv-cache-memory holds {asked} pages of {} bytes for each of {ranks} ranks; it needs at least 2",
                sizes.page
            );
            ensure!(
                asked <= within,
                "--kv-cache-memory asks for {asked} pages of {} bytes on each rank and {within} are left of the {budget} \
                 bytes that --gpu-memory-utilization {utilization} allows",
                sizes.page
            );
            pages = pages.min(asked);
        }
        pages = pages.min(within);
        plans.push(Plan { sizes, pages });
        budgets.push(budget);
    }
    plans.iter_mut().for_each(|plan| plan.pages = pages);
    if order == SumOrder::Fixed {
        tracing::info!(
            "--deterministic: one order of sums for steps of all sizes; norms in front of products are kernels of their own, \
             and each next token takes longer (docs/cuda.md has figures)"
        );
    }
    for (rank, (plan, budget)) in plans.iter().zip(&budgets).enumerate() {
        // Ranks whose shares are alike have one line.
        if rank > 0 && (plan, budget) == (&plans[rank - 1], &budgets[rank - 1]) {
            continue;
        }
        let whose = if ranks > 1 { format!(", from rank {rank} on") } else { String::new() };
        tracing::info!(
            "GPU memory{whose}, {} MiB of {} MiB allowed: {plan}",
            plan.total() >> 20,
            budget >> 20
        );
    }
    Ok(plans)
}

fn sizes(
    gpu: &Gpu,
    (checkpoint, config): (&Checkpoint, &HostConfig),
    (element, order): (Element, SumOrder),
    seat: &Seat,
) -> Result<Sizes> {
    let members = Place::new(&Arc::default(), &config.mesh, seat).members();
    let sizer = Sizer::new(element, gpu.device().properties()).with_order(order);
    let mut sizer = sizer.meeting(members);
    let layout = (&config.mesh, config.experts);
    let model = Model::load(checkpoint, layout, seat, &mut sizer, &|_, _| {})?;
    let reserve = config.reserve(&model, seat);
    for bucket in config.lattice.buckets() {
        sizer.add(&config.recording(&model, seat, bucket), &reserve)?;
    }
    Ok(sizer.sizes(&reserve))
}

/// Gives each rank its GPU. A rank can be asked to take steps apart if there is a workshop.
pub(crate) fn backend(
    gpus: Gpus,
    plans: Vec<Plan>,
    mesh: Mesh,
    workshop: Option<Arc<Workshop>>,
) -> impl Fn(&Seat) -> Result<Box<dyn Backend>, OpsError> + Send + Sync + 'static {
    let gpus: Mutex<Vec<Option<Gpu>>> = Mutex::new(gpus.0.into_iter().map(Some).collect());
    let peers = Arc::new(Peers::default());
    move |seat| {
        let rank = usize::from(seat.rank.0);
        let gpu = gpus.lock().unwrap_or_else(std::sync::PoisonError::into_inner)[rank].take();
        let gpu = gpu.ok_or_else(|| OpsError::Device("the GPU was given to a rank before".into()))?;
        let backend = CudaBackend::new(gpu, &plans[rank], Place::new(&peers, &mesh, seat))?;
        Ok(match &workshop {
            None => Box::new(backend) as Box<dyn Backend>,
            Some(workshop) => Box::new(Observed::new(backend, Arc::clone(workshop))),
        })
    }
}

/// As vLLM's default.
const UTILIZATION: f64 = 0.9;
