//! How large steps may be: what time allows, what memory allows, and the sizes up to there.

use crate::args::EngineArgs;
use anyhow::{Context, Result, ensure};
use atom_base::{Mesh, Seat};
use atom_cpu::{Activations, Isa, Sketch};
use atom_group::{Lattice, LatticeArgs, LatticeError};
use atom_model::{ExpertLayout, Model};
use atom_ops::StepShape;
use atom_weights::{Checkpoint, DType};

/// What steps of the ranks of this process work in, by the recordings that they would make.
struct Workspace {
    ranks: Vec<(Model, Sketch)>,
    lanes: usize,
    hosts: usize,
    max_num_seqs: u32,
}

/// The legal sizes, refused with the numbers where they take too long or too much.
pub(crate) fn lattice(
    args: &EngineArgs,
    checkpoint: &Checkpoint,
    (mesh, experts): (&Mesh, ExpertLayout),
    threads_per_rank: usize,
) -> Result<Lattice> {
    let lane_threads = threads_per_rank * mesh.ranks_per_lane();
    let by_time = default_rows(args, checkpoint, lane_threads).max(args.max_num_seqs);
    let mut rows_max = args.max_num_batched_tokens.unwrap_or(by_time);
    let seconds = f64::from(rows_max) * row_seconds(args, checkpoint, lane_threads);
    ensure!(
        seconds <= STEP_SECONDS_MAX,
        "--max-num-batched-tokens {rows_max} makes steps of about {seconds:.0} s on {lane_threads} threads, and nobody \
         would get a token meanwhile; at most {STEP_SECONDS_MAX} s are allowed, here {} rows",
        (STEP_SECONDS_MAX / seconds * f64::from(rows_max)) as u32
    );
    let workspace = Workspace::sketch(args, checkpoint, (mesh, experts), threads_per_rank)?;
    let budget = args.workspace_memory.unwrap_or_else(default_workspace_bytes);
    let fits = workspace.rows_within(budget, rows_max.next_multiple_of(Sketch::ROWS_MULTIPLE_OF));
    if args.max_num_batched_tokens.is_none() {
        // Nobody asked for so many rows.
        rows_max = rows_max.min(fits).max(args.max_num_seqs);
    }
    let lattice = Lattice::new(&LatticeArgs {
        rows_max,
        max_num_seqs: args.max_num_seqs,
        sizes: Lattice::parse_sizes(&args.token_graph_sizes)?,
        multiple_of: Sketch::ROWS_MULTIPLE_OF,
        rows_workspace_max: Some(fits),
    });
    if let Err(LatticeError::Workspace { rows, .. }) = &lattice {
        let needed = mib(workspace.bytes(*rows));
        lattice.with_context(|| {
            format!(
                "the largest step takes {needed} on the {} ranks of this process, and --workspace-memory is {}",
                workspace.ranks.len(),
                mib(budget)
            )
        })
    } else {
        Ok(lattice?)
    }
}

/// The legal sizes of a GPU's steps. What they work in is planned with the rest of its memory.
pub(crate) fn gpu_lattice(args: &EngineArgs) -> Result<Lattice> {
    Ok(Lattice::new(&LatticeArgs {
        rows_max: args.max_num_batched_tokens.unwrap_or(GPU_ROWS.max(args.max_num_seqs)),
        max_num_seqs: args.max_num_seqs,
        sizes: Lattice::parse_sizes(&args.token_graph_sizes)?,
        ..LatticeArgs::default()
    })?)
}

impl Workspace {
    /// Lays out the share of every rank of this process and loads none of it.
    fn sketch(
        args: &EngineArgs,
        checkpoint: &Checkpoint,
        layout: (&Mesh, ExpertLayout),
        threads_per_rank: usize,
    ) -> Result<Self> {
        let (mesh, _) = layout;
        let activations = activations(args, checkpoint);
        let per_host = mesh.lanes() / args.nodes.clamp(1, mesh.lanes());
        let here = |seat: &Seat| usize::from(seat.lane.0) / per_host == args.node_rank;
        let rank = |seat: Seat| {
            let mut sketch = Sketch::new(threads_per_rank, activations);
            let model = Model::load(checkpoint, layout, &seat, &mut sketch, &|_, _| {})?;
            anyhow::Ok((model, sketch))
        };
        Ok(Self {
            ranks: mesh.seats().filter(here).map(rank).collect::<Result<_>>()?,
            lanes: mesh.lanes_per_group(),
            hosts: args.nodes,
            max_num_seqs: args.max_num_seqs,
        })
    }

    /// Bytes of all ranks here for steps of `rows` rows a lane, at the worst routing that there is.
    fn bytes(&self, rows: u32) -> u64 {
        let shape = StepShape {
            rows: rows as usize,
            out_rows: rows.min(self.max_num_seqs) as usize,
            lanes: self.lanes,
        };
        let of_rank = |(model, sketch): &(Model, Sketch)| {
            let recording = model.record(shape);
            (sketch.step_bytes(&recording) + atom_rank::collective_bytes(&recording, self.hosts)) as u64
        };
        self.ranks.iter().map(of_rank).sum()
    }

    /// The most rows, up to `most`, whose steps work in `budget` bytes; 0 if there are none.
    fn rows_within(&self, budget: u64, most: u32) -> u32 {
        if self.bytes(most) <= budget {
            return most;
        }
        let (mut fits, mut exceeds) = (0, most);
        while exceeds - fits > 1 {
            let rows = fits + (exceeds - fits) / 2;
            if self.bytes(rows) <= budget { fits = rows } else { exceeds = rows }
        }
        fits
    }
}

/// Bytes that the system says are free, if it does.
pub(crate) fn free_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
}

fn default_workspace_bytes() -> u64 {
    free_bytes().map_or(WORKSPACE_BYTES_MIN, |free| free / 4)
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Rows that a step computes in [`STEP_SECONDS`]; a multiple of 32.
fn default_rows(args: &EngineArgs, checkpoint: &Checkpoint, threads: usize) -> u32 {
    let rows = STEP_SECONDS / row_seconds(args, checkpoint, threads);
    (rows as u32 / 32 * 32).clamp(32, 512)
}

/// What a row of a large step takes, by the speed measured for the kernels of these weights.
fn row_seconds(args: &EngineArgs, checkpoint: &Checkpoint, threads: usize) -> f64 {
    let weights = weight_type(checkpoint);
    let (is_block_type, has_amx) = (weights.block_elements() > 1, args.isa_used() == Isa::Amx);
    let rate = match activations(args, checkpoint) {
        Activations::Int8 if is_block_type => INT8_WEIGHTS_PER_SECOND,
        Activations::Int16 if is_block_type => INT16_WEIGHTS_PER_SECOND,
        Activations::Bf16 if has_amx && weights == DType::BF16 => AMX_WEIGHTS_PER_SECOND,
        _ => FLOAT_WEIGHTS_PER_SECOND,
    };
    active_parameters(checkpoint) as f64 / (rate * threads as f64)
}

/// Parameters that one row meets: all but the experts that it doesn't choose.
fn active_parameters(checkpoint: &Checkpoint) -> u64 {
    let config = checkpoint.config();
    let Some(moe) = &config.moe else { return checkpoint.parameters() };
    let layers = moe.dense_layers.iter().filter(|&&dense| !dense).count();
    let expert = 3 * config.hidden_size * moe.expert_width;
    checkpoint.parameters() - (layers * (moe.experts - moe.top_k) * expert) as u64
}

/// What weights are multiplied with on a CPU.
pub(crate) fn activations(args: &EngineArgs, checkpoint: &Checkpoint) -> Activations {
    args.activations().unwrap_or_else(|| {
        let usual = Activations::of(args.isa_used(), weight_type(checkpoint));
        // A file of several types may have some that can't be met in this way.
        let types = checkpoint.names().filter(|_| checkpoint.gguf().is_some());
        let mut types = types.filter_map(|name| checkpoint.tensor(name).ok()).map(|tensor| tensor.dtype);
        if types.all(|dtype| usual.suits(dtype)) { usual } else { Activations::default() }
    })
}

/// The type that most weights have.
fn weight_type(checkpoint: &Checkpoint) -> DType {
    checkpoint.tensor(TYPICAL_MATRIX).map_or(DType::F32, |tensor| tensor.dtype)
}

/// A matrix that every family has, in the type that its weights have.
pub(crate) const TYPICAL_MATRIX: &str = "model.layers.0.self_attn.o_proj.weight";
/// A step should keep a decoding neighbour waiting for less than half a second.
const STEP_SECONDS: f64 = 0.4;
/// A longer step would be taken for a stuck one: the first replay of a bucket may last a minute.
const STEP_SECONDS_MAX: f64 = 20.0;
/// Weights that one thread multiplies in a second in prefill, products of integers; three quarters of what was
/// measured with SmolLM2-135M Q4_1 and AVX-512, to leave room for slower machines.
const INT8_WEIGHTS_PER_SECOND: f64 = 80e9;
/// The same with two planes of activations.
const INT16_WEIGHTS_PER_SECOND: f64 = 50e9;
/// The same of bf16 by the tiles of AMX.
const AMX_WEIGHTS_PER_SECOND: f64 = 190e9;
/// The same for products of f32.
const FLOAT_WEIGHTS_PER_SECOND: f64 = 32e9;
/// Rows of a GPU's largest step: more than that no longer makes products faster.
const GPU_ROWS: u32 = 8192;
/// Where the system does not say what is free.
const WORKSPACE_BYTES_MIN: u64 = 512 << 20;

#[cfg(test)]
#[path = "steps_tests.rs"]
mod tests;
