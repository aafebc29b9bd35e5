//! [`CudaBackend`]: one rank on one GPU.

use crate::blas::Blas;
use crate::compile::Program;
use crate::device::{Event, Stream};
use crate::error::CudaError;
use crate::fuse::{Step, fuse};
use crate::gpu::Gpu;
use crate::kernels::Queue;
use crate::launch::attend::{AttendHeads, AttendKernels};
use crate::launch::experts::{Experts, MEETING_BYTES};
use crate::launch::rope::CacheLayer;
use crate::memory::{Address, DeviceMem, Pinned};
use crate::plan::{Plan, attend_heads, check_kv, check_model, experts_shape, work};
use crate::record::{Capture, Recorded, not_built};
use crate::sampler::Sampler;
use crate::staging::Staging;
use crate::weights::{Carrier, Delivery, Shelf};
use crate::work::WorkSpec;
use atom_base::{ScoredToken, TokenId, slot_of_last};
use atom_ops::{
    Backend, Collectives, ExpertRows, LoadWeights, OpsError, Recording, Reserve, Slice, StepInputs, Weight,
};
use atom_weights::Tensor;
use std::collections::VecDeque;
use std::thread::ThreadId;

/// One rank on a GPU. Everything that steps touch is taken by `reserve`, as planned.
pub struct CudaBackend {
    // Fields are dropped in order: graphs before what they work on.
    recordings: Vec<Option<Recorded>>,
    reserved: Option<Reserved>,
    blas: Blas,
    weights: DeviceMem,
    shelf: Shelf,
    carrier: Option<Carrier>,
    stream: Stream,
    plan: Plan,
    expert_rows: ExpertRows,
    /// Whose calls the driver takes for this GPU.
    bound: Option<ThreadId>,
    gpu: Gpu,
}

/// What steps work in.
pub(crate) struct Reserved {
    pub(crate) reserve: Reserve,
    pub(crate) room: DeviceMem,
    pub(crate) staging: DeviceMem,
    pub(crate) tables: DeviceMem,
    pub(crate) frequencies: DeviceMem,
    pub(crate) sampler: Option<Sampler>,
    pub(crate) attention: Attention,
    pub(crate) experts: DeviceMem,
    cache: DeviceMem,  // [layers][keys, values][pages, kv_heads, page_size, head_dim]
    page_bytes: usize, // of one layer's keys
    host: Staging,
    /// Marked behind the steps of each turn.
    ends: [Event; FLIGHTS_MAX],
    /// Steps that were launched and not finished, the oldest first.
    flights: VecDeque<Flight>,
}

/// A step in flight.
struct Flight {
    turn: usize,
    sampled: usize,
    expert_rows: ExpertRows,
}

/// How this model's attention is computed.
pub(crate) struct Attention {
    pub(crate) heads: AttendHeads,
    pub(crate) kernels: AttendKernels,
    pub(crate) work: Option<WorkSpec>,
    pub(crate) scratch: DeviceMem,
}

impl CudaBackend {
    /// Takes the room for weights.
    pub fn new(mut gpu: Gpu, plan: &Plan) -> Result<Self, OpsError> {
        gpu.device.bind()?;
        gpu.load(&BASE_PROGRAMS.map(Program::plain))?;
        Ok(Self {
            recordings: Vec::new(),
            reserved: None,
            blas: Blas::new(&gpu.cublaslt, &gpu.device)?,
            weights: DeviceMem::new(&gpu.device, plan.sizes.weights)?,
            shelf: Shelf::new(plan.sizes.element),
            carrier: Some(Carrier::new(&gpu.device)?),
            stream: gpu.device.stream()?,
            plan: *plan,
            expert_rows: ExpertRows::default(),
            bound: Some(std::thread::current().id()),
            gpu,
        })
    }

    /// Kernels and copies of a recording.
    pub fn nodes(&self, recording: usize) -> usize {
        self.recordings[recording].as_ref().map_or(0, |recorded| recorded.graph.nodes())
    }

    fn bind(&mut self) -> Result<(), CudaError> {
        let thread = std::thread::current().id();
        if self.bound != Some(thread) {
            self.gpu.device.bind()?;
            self.bound = Some(thread);
        }
        Ok(())
    }

    fn deliver(
        &mut self,
        what: &str,
        placed: Result<(Weight, Option<Delivery>), OpsError>,
    ) -> Result<Weight, OpsError> {
        self.bind()?;
        let (weight, delivery) = placed?;
        let carrier = self.carrier.as_mut().ok_or_else(|| {
            OpsError::Device(format!("{what} was loaded after reserve; load everything first"))
        })?;
        if let Some(delivery) = delivery {
            carrier.deliver(&self.gpu.kernels, &self.weights, &delivery)?;
        }
        Ok(weight)
    }
}

impl LoadWeights for CudaBackend {
    fn load_matrix(&mut self, parts: &[Slice]) -> Result<Weight, OpsError> {
        let placed = self.shelf.matrix(parts);
        self.deliver("a matrix", placed)
    }

    fn load_experts(&mut self, experts: &[Vec<Slice>]) -> Result<Weight, OpsError> {
        let placed = self.shelf.experts(experts);
        self.deliver("a layer's experts", placed)
    }

    fn load_vector(&mut self, parts: &[Slice]) -> Result<Weight, OpsError> {
        let placed = self.shelf.vector(parts);
        self.deliver("a vector", placed)
    }

    fn load_table(&mut self, table: &Tensor) -> Result<Weight, OpsError> {
        let placed = self.shelf.table(table);
        self.deliver("a table", placed)
    }
}

impl Backend for CudaBackend {
    fn reserve(&mut self, reserve: &Reserve) -> Result<(), OpsError> {
        self.bind()?;
        if self.reserved.is_some() {
            return Err(OpsError::Device("reserve was called a second time".into()));
        }
        if reserve.top.lanes != 1 {
            return Err(not_built());
        }
        if let Some(carrier) = self.carrier.take() {
            carrier.finish()?;
        }
        self.shelf.close();
        let reserved = Reserved::new(&self.stream, &self.plan, reserve)?;
        self.gpu.load(&reserved.attention.kernels.programs())?;
        self.reserved = Some(reserved);
        Ok(())
    }

    fn record(&mut self, recording: Recording) -> Result<usize, OpsError> {
        self.bind()?;
        let reserved = self.reserved.as_ref().ok_or_else(|| early("record"))?;
        let (element, properties) = (self.shelf.element(), self.gpu.device.properties());
        let shapes = recording.ops().iter().filter_map(|op| experts_shape(&recording, op, element));
        let mut programs: Vec<Program> =
            shapes.flat_map(|shape| Experts::new(shape, properties).programs()).collect();
        let steps = fuse(&recording, element, properties);
        programs.extend(steps.iter().filter_map(|step| match step {
            Step::Product(fused) => Some(fused.product.program(properties)),
            Step::Router(routed) => Some(routed.program(&recording)),
            _ => None,
        }));
        programs.sort();
        programs.dedup();
        self.gpu.load(&programs)?;
        let capture = Capture {
            queue: Queue { kernels: &self.gpu.kernels, stream: &self.stream },
            blas: &self.blas,
            shelf: &self.shelf,
            weights: self.weights.address(),
            reserved,
        };
        let recorded = capture.record(&recording, &steps)?;
        if let Some(free) = self.recordings.iter().position(Option::is_none) {
            self.recordings[free] = Some(recorded);
            return Ok(free);
        }
        self.recordings.push(Some(recorded));
        Ok(self.recordings.len() - 1)
    }

    fn forget(&mut self, recording: usize) {
        self.recordings[recording] = None;
    }

    fn launch(
        &mut self,
        recording: usize,
        inputs: &StepInputs<'_>,
        _: &dyn Collectives,
    ) -> Result<(), OpsError> {
        self.bind()?;
        let reserved = self.reserved.as_mut().ok_or_else(|| early("launch"))?;
        let recorded = self.recordings[recording].as_ref().expect("it was not given up");
        assert!(reserved.flights.len() < FLIGHTS_MAX, "{FLIGHTS_MAX} steps are in flight");
        reserved.assert_fits(recorded, inputs);
        let turn = reserved.host.turn();
        if reserved.reserve.poison {
            reserved.poison(&self.stream, inputs)?;
        }
        let used = reserved.host.fill(&recorded.layout, &reserved.reserve, inputs);
        if let Some(sampler) = &mut reserved.sampler {
            let queue = Queue { kernels: &self.gpu.kernels, stream: &self.stream };
            sampler.load(&queue, inputs.slot_loads, inputs.out)?;
        }
        // SAFETY: this half of the staging buffer is not touched before the step was waited for.
        unsafe { reserved.staging.upload(&self.stream, 0, &reserved.host.bytes()[..used]) }?;
        recorded.graph.launch(&self.stream)?;
        let sampled = if reserved.sampler.is_some() { inputs.out.len() } else { 0 };
        if let Some(sampler) = &mut reserved.sampler {
            sampler.fetch(&self.stream, turn, sampled)?;
        }
        self.stream.mark(&reserved.ends[turn])?;
        let rows = inputs.tokens.len() as u64;
        let (chosen, computed) = recorded.choices;
        let expert_rows = ExpertRows { chosen: rows * chosen as u64, computed: rows * computed as u64 };
        reserved.flights.push_back(Flight { turn, sampled, expert_rows });
        Ok(())
    }

    fn finish(&mut self, results: &mut [ScoredToken]) -> Result<(), OpsError> {
        self.bind()?;
        let reserved = self.reserved.as_mut().ok_or_else(|| early("finish"))?;
        let flight = reserved.flights.pop_front().expect("a step is in flight");
        reserved.ends[flight.turn].wait()?;
        if let Some(sampler) = &reserved.sampler {
            sampler.read(flight.turn, &mut results[..flight.sampled]);
        }
        self.expert_rows = flight.expert_rows;
        Ok(())
    }

    fn abandon(&mut self) {
        let Some(reserved) = &mut self.reserved else { return };
        reserved.flights.clear();
        // A device that fails here fails the next step too, which says so.
        if let Err(error) = self.stream.wait() {
            tracing::warn!("waiting for steps that are given up: {error}");
        }
    }

    fn expert_rows(&self) -> ExpertRows {
        self.expert_rows
    }
}

impl Reserved {
    fn new(stream: &Stream, plan: &Plan, reserve: &Reserve) -> Result<Self, OpsError> {
        let (device, sizes) = (stream.device(), &plan.sizes);
        check_kv(reserve.kv_dtype, sizes.element)?;
        check_model(reserve)?;
        if reserve.pages > plan.pages {
            return Err(OpsError::Memory(format!(
                "{} pages of the cache were asked for, {} were planned",
                reserve.pages, plan.pages
            )));
        }
        let (free, _) = device.memory()?;
        let needed = plan.total() - sizes.weights - sizes.workspace;
        if needed as u64 > free {
            return Err(OpsError::Memory(format!(
                "{needed} bytes of GPU memory are needed beside the weights and {free} are free; lower \
                 --gpu-memory-utilization. {plan}"
            )));
        }
        let cache = DeviceMem::new(device, reserve.pages * sizes.page)?;
        let (heads, properties) = (attend_heads(reserve), device.properties());
        let attention = Attention {
            heads,
            kernels: AttendKernels::new(properties, sizes.element, &heads),
            work: work(reserve, properties, sizes.element),
            scratch: DeviceMem::new(device, sizes.attention)?,
        };
        // Counters start at 0, and every launch leaves them so.
        attention.scratch.fill(stream, 0, sizes.attention, 0)?;
        let experts = DeviceMem::new(device, sizes.experts)?;
        experts.fill(stream, 0, sizes.experts.min(MEETING_BYTES), 0)?;
        let frequencies: Vec<u8> =
            reserve.attention.rotary.frequencies.iter().flat_map(|f| f.to_le_bytes()).collect();
        let pinned = || Pinned::new(device, sizes.staging);
        let reserved = Self {
            room: DeviceMem::new(device, sizes.room)?,
            staging: DeviceMem::new(device, sizes.staging)?,
            tables: DeviceMem::new(device, sizes.tables)?,
            frequencies: DeviceMem::new(device, frequencies.len())?,
            sampler: if reserve.samples { Some(Sampler::new(stream, reserve, sizes)?) } else { None },
            host: Staging::new([pinned()?, pinned()?], reserve, attention.work),
            ends: [device.event()?, device.event()?],
            flights: VecDeque::with_capacity(FLIGHTS_MAX),
            attention,
            experts,
            cache,
            page_bytes: sizes.page / (2 * reserve.layers.max(1)),
            reserve: reserve.clone(),
        };
        reserved.frequencies.write(stream, 0, &frequencies)?;
        reserved.tables.fill(stream, 0, reserved.tables.bytes(), 0)?;
        // What a kernel might read of a page that nobody wrote: zeros, never NaN times zero.
        reserved.cache.fill(stream, 0, reserved.cache.bytes(), 0)?;
        stream.wait()?;
        Ok(reserved)
    }

    /// Keys and values of a layer.
    pub(crate) fn cache(&self, layer: usize) -> Result<CacheLayer, OpsError> {
        if layer >= self.reserve.layers {
            return Err(OpsError::Weights(format!("layer {layer} of a cache of {}", self.reserve.layers)));
        }
        let half = self.reserve.pages * self.page_bytes;
        let keys = self.cache.address().plus(2 * layer * half);
        Ok(CacheLayer { keys, values: keys.plus(half), page_size: self.reserve.page_size })
    }

    pub(crate) fn last_tokens(&self) -> Address {
        self.sampler.as_ref().map_or(Address::NULL, |sampler| sampler.last_tokens())
    }

    /// NaN in all that no result may depend on: padding, the Sink, fresh pages.
    fn poison(&mut self, stream: &Stream, inputs: &StepInputs<'_>) -> Result<(), CudaError> {
        self.host.poison();
        self.room.fill(stream, 0, self.room.bytes(), 0xff)?;
        let page_size = self.reserve.page_size;
        // The first row of a page comes when it is fresh: what it held is nobody's.
        let fresh = inputs.cache_rows.iter().filter(|&&row| (row as usize).is_multiple_of(page_size));
        for page in fresh.map(|&row| row as usize / page_size).chain([0]) {
            for half in 0..2 * self.reserve.layers {
                let offset = (half * self.reserve.pages + page) * self.page_bytes;
                self.cache.fill(stream, offset, self.page_bytes, 0xff)?;
            }
        }
        Ok(())
    }

    /// Panics if a step isn't one of this recording: a bug of whoever made the plan.
    fn assert_fits(&self, recorded: &Recorded, inputs: &StepInputs<'_>) {
        let (rows, shape, reserve) = (inputs.tokens.len(), recorded.shape, &self.reserve);
        assert_eq!(recorded.layout.hash(), recorded.layout_hash, "the layout that was captured");
        assert!(rows <= shape.rows, "{rows} rows in a recording of {}", shape.rows);
        assert!(inputs.out.len() <= shape.out_rows, "{} out rows, not {}", inputs.out.len(), shape.out_rows);
        assert!(inputs.positions.len() == rows && inputs.cache_rows.len() == rows, "arrays of {rows} rows");
        assert!(inputs.out.iter().all(|out| (out.row as usize) < rows), "out rows are among {rows} rows");
        assert_eq!(inputs.group_rows.len(), shape.lanes, "lanes of the group");
        let granted = inputs.group_rows[inputs.lane] as usize;
        assert!(rows <= granted && granted <= shape.rows, "{rows} rows of {granted} granted");
        let known = |&token: &TokenId| match slot_of_last(token) {
            Some(slot) => reserve.samples && (slot.0 as usize) < reserve.slots,
            None => (token as usize) < recorded.tokens,
        };
        assert!(inputs.tokens.iter().all(known), "tokens are in the table");
        let cache_rows = reserve.pages * reserve.page_size;
        assert!(inputs.cache_rows.iter().all(|&row| (row as usize) < cache_rows), "rows of the cache");
        let spans: usize = inputs.spans.iter().map(|span| span.rows as usize).sum();
        assert_eq!(spans, rows, "spans cover all rows");
        assert!(inputs.spans.iter().all(|span| (span.slot.0 as usize) < reserve.slots), "slots");
    }
}

/// Steps at once: each has a buffer of its own on the host.
const FLIGHTS_MAX: usize = 2;

/// What every model needs.
const BASE_PROGRAMS: [&str; 9] =
    ["step", "weights", "rows", "norm", "rope", "route", "sample", "sample_finish", "sample_load"];

fn early(what: &str) -> OpsError {
    OpsError::Device(format!("{what} was called before reserve"))
}
