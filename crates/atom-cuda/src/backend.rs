//! [`CudaBackend`]: one rank on one GPU.

mod attention;
mod operators;

pub(crate) use attention::Attention;
pub use operators::{OperatorTime, StepTimes};

use crate::blas::Blas;
use crate::blas_fp8::Fp8Blas;
use crate::compile::Program;
use crate::device::Stream;
use crate::error::CudaError;
use crate::fuse::{Fused, FusedFp8, Step, fuse};
use crate::gpu::Gpu;
use crate::kernels::Queue;
use crate::landing::{Landing, Pace, TURNS, turn};
use crate::launch::experts::Experts;
use crate::launch::rope::CacheLayer;
use crate::masks::Masks;
use crate::meetings::Meetings;
use crate::memory::{Address, DeviceMem, Pinned};
use crate::peers::{Members, Place};
use crate::plan::{
    COUNTS_BYTES, Plan, attend_few, attend_heads, attend_kernels, check_kv, check_model, experts_shape,
    letters_offset, work,
};
use crate::product_kernel::ProductKernel;
use crate::record::{Capture, Recorded};
use crate::sampler::Sampler;
use crate::staging::Staging;
use crate::wait;
use crate::weights::{Carrier, Delivery, Shelf};
use atom_base::{ScoredToken, TokenId, slot_of_last};
use atom_ops::{
    Backend, Collectives, Comm, ExpertRows, LoadWeights, OpsError, Recording, Reserve, Slice, StepInputs,
    Weight,
};
use atom_weights::Tensor;
use std::collections::VecDeque;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// One rank on a GPU. Everything that steps touch is taken by `reserve`, as planned.
pub struct CudaBackend {
    // Fields are dropped in order: graphs before what they work on.
    recordings: Vec<Option<Recorded>>,
    paces: Vec<Pace>,
    reserved: Option<Reserved>,
    fp8_blas: Fp8Blas,
    blas: Blas,
    weights: DeviceMem,
    shelf: Shelf,
    carrier: Option<Carrier>,
    stream: Stream,
    plan: Plan,
    expert_rows: ExpertRows,
    /// Free bytes before anything of it was taken.
    free_at_start: u64,
    /// It was said what the driver took.
    is_measured: bool,
    /// Steps count the different experts that their rows choose, where they can.
    counts_experts: bool,
    place: Place,
    /// Whose calls the driver takes for this GPU.
    bound: Option<ThreadId>,
    gpu: Gpu,
}

/// What steps work in.
pub(crate) struct Reserved {
    pub(crate) reserve: Reserve,
    pub(crate) room: DeviceMem,
    pub(crate) quantised: DeviceMem,
    pub(crate) staging: DeviceMem,
    pub(crate) tables: DeviceMem,
    pub(crate) frequencies: DeviceMem,
    pub(crate) sampler: Option<Sampler>,
    pub(crate) attention: Attention,
    pub(crate) experts: DeviceMem,
    /// How many different experts the rows of a step choose; 0 between steps.
    counts: Option<DeviceMem>,
    cache: DeviceMem,  // [layers][keys, values][pages, kv_heads, page_size, head_dim]
    page_bytes: usize, // of one layer's keys
    host: Staging,
    pub(crate) landing: Landing,
    pub(crate) meetings: Meetings,
    /// This rank's lane among those of its group.
    pub(crate) lane: usize,
    /// Steps that were launched and not finished, the oldest first.
    flights: VecDeque<Flight>,
    /// When the last step ended.
    landed: Instant,
    masks: Masks,
}

/// A step in flight.
struct Flight {
    sequence: u32,
    recording: usize,
    launched: Instant,
    /// How long it may take once the one before it has ended.
    patience: Duration,
    sampled: usize,
    expert_rows: ExpertRows,
    counts_experts: bool,
}

impl CudaBackend {
    /// Takes the room for weights. `place` is among whom it computes.
    pub fn new(mut gpu: Gpu, plan: &Plan, place: Place) -> Result<Self, OpsError> {
        gpu.device.bind()?;
        wait::sleep_exactly();
        let (free, _) = gpu.device.memory()?;
        gpu.load(&BASE_PROGRAMS.map(Program::plain))?;
        let stays = crate::fp8::stays(plan.sizes.element, plan.sizes.order, gpu.device.properties());
        Ok(Self {
            recordings: Vec::new(),
            paces: Vec::new(),
            reserved: None,
            fp8_blas: Fp8Blas::default(),
            blas: Blas::new(
                &gpu.cublaslt,
                &gpu.device,
                plan.sizes.order,
                (gpu.cache.as_deref(), place.choices()),
            )?,
            weights: DeviceMem::new(&gpu.device, plan.sizes.weights)?,
            shelf: Shelf::new(plan.sizes.element, stays),
            carrier: Some(Carrier::new(&gpu.device)?),
            stream: gpu.device.stream()?,
            plan: *plan,
            expert_rows: ExpertRows::default(),
            free_at_start: free,
            is_measured: false,
            counts_experts: false,
            place,
            bound: Some(std::thread::current().id()),
            gpu,
        })
    }

    /// Kernels and copies of a recording.
    pub fn nodes(&self, recording: usize) -> usize {
        self.recordings[recording].as_ref().map_or(0, |recorded| recorded.graph.nodes())
    }

    /// Makes the GPU this thread's. An error if it has failed before: nothing more is asked of it.
    fn bind(&mut self) -> Result<(), CudaError> {
        self.gpu.device.check_usable()?;
        let thread = std::thread::current().id();
        if self.bound != Some(thread) {
            self.gpu.device.bind()?;
            wait::sleep_exactly();
            self.bound = Some(thread);
        }
        Ok(())
    }

    /// Bytes that the driver took by itself: of all that is gone since the start, what nobody asked for.
    fn driver_bytes(&self) -> Result<u64, CudaError> {
        let (now, _) = self.gpu.device.memory()?;
        Ok(self.free_at_start.saturating_sub(now).saturating_sub(self.plan.asked() as u64))
    }

    /// Says once what that was: behind the first step, when code and graphs are there.
    fn say_driver_bytes(&mut self) -> Result<(), CudaError> {
        // Of a GPU that ranks share nobody knows whose it is.
        if std::mem::replace(&mut self.is_measured, true) || self.gpu.sharers() > 1 {
            return Ok(());
        }
        let taken = self.driver_bytes()?;
        let graphs: Vec<usize> = self.recordings.iter().flatten().map(|r| r.graph.nodes()).collect();
        let (count, nodes) = (graphs.len(), graphs.iter().sum::<usize>());
        tracing::info!(
            "the driver took {} MiB of GPU memory for code and {count} recordings of {nodes} nodes; {} MiB were kept for it",
            taken >> 20,
            self.plan.sizes.driver >> 20
        );
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
        let members = self.place.members();
        assert_eq!(reserve.top.lanes, members.group, "lanes of the group");
        if let Some(carrier) = self.carrier.take() {
            carrier.finish()?;
        }
        self.shelf.close();
        for (reason, count) in self.shelf.expanded() {
            tracing::warn!("{count} FP8 matrices are expanded to {:?}: {reason}", self.shelf.element());
        }
        let reserved = Reserved::new(&self.stream, &self.plan, reserve, &self.place)?;
        let mut programs = reserved.attention.kernels.programs();
        programs.extend(reserved.attention.few.map(|few| few.program()));
        programs.extend((members != Members::ALONE).then(|| Program::plain("exchange")));
        self.gpu.load(&programs)?;
        self.reserved = Some(reserved);
        let taken = self.driver_bytes()?;
        tracing::debug!("the driver took {} MiB of GPU memory before the first recording", taken >> 20);
        Ok(())
    }

    fn record(&mut self, recording: Recording) -> Result<usize, OpsError> {
        self.bind()?;
        let reserved = self.reserved.as_mut().ok_or_else(|| early("record"))?;
        reserved.meetings.connect(&self.stream, &self.place)?;
        let reserved = &*reserved;
        let (element, properties) = (self.shelf.element(), self.gpu.device.properties());
        let order = self.plan.sizes.order;
        let codes = |weight| self.shelf.codes(weight);
        let shapes = recording.ops().iter().filter_map(|op| experts_shape(&recording, op, element, codes));
        let mut programs: Vec<Program> =
            shapes.flat_map(|shape| Experts::in_order(shape, order, properties).programs()).collect();
        let few = reserved.attention.few.as_ref();
        let steps = fuse(&recording, element, order, codes, properties, few);
        for step in &steps {
            match step {
                Step::Product(Fused { product, .. }) => {
                    let kernel = ProductKernel::choose(product, order, properties);
                    programs.extend(kernel.map(|kernel| kernel.program(product, properties)));
                }
                Step::Fp8(FusedFp8 { product, .. }) => programs.extend(product.programs(properties)),
                Step::Router(routed) => programs.push(routed.program(&recording)),
                Step::Op(_) | Step::Norm { .. } | Step::Attend(_) | Step::Experts(_) => {}
            }
        }
        programs.sort();
        programs.dedup();
        self.gpu.load(&programs)?;
        let capture = Capture {
            queue: Queue { kernels: &self.gpu.kernels, stream: &self.stream },
            blas: &self.blas,
            fp8_blas: &self.fp8_blas,
            shelf: &self.shelf,
            weights: self.weights.address(),
            weights_bytes: self.weights.bytes(),
            reserved,
        };
        let recorded = capture.record(&recording, &steps)?;
        if let Some(free) = self.recordings.iter().position(Option::is_none) {
            (self.recordings[free], self.paces[free]) = (Some(recorded), Pace::default());
            return Ok(free);
        }
        self.recordings.push(Some(recorded));
        self.paces.push(Pace::default());
        Ok(self.recordings.len() - 1)
    }

    fn forget(&mut self, recording: usize) {
        self.recordings[recording] = None;
    }

    fn launch(
        &mut self,
        recording: usize,
        inputs: &StepInputs<'_>,
        collectives: &dyn Collectives,
    ) -> Result<(), OpsError> {
        self.bind()?;
        self.blas.report();
        let reserved = self.reserved.as_mut().ok_or_else(|| early("launch"))?;
        let recorded = self.recordings[recording].as_ref().expect("it was not given up");
        assert!(reserved.flights.len() < TURNS, "{TURNS} steps are in flight");
        reserved.assert_fits(recorded, inputs);
        let queue = Queue { kernels: &self.gpu.kernels, stream: &self.stream };
        let (patience, counts) = (collectives.patience(), self.counts_experts);
        let launched = reserved.launch(&queue, (recording, recorded), inputs, (patience, counts));
        launched.map_err(|error| self.gpu.device.fail(error).into())
    }

    fn finish(&mut self, results: &mut [ScoredToken]) -> Result<(), OpsError> {
        self.bind()?;
        let reserved = self.reserved.as_mut().ok_or_else(|| early("finish"))?;
        let flight = reserved.flights.pop_front().expect("a step is in flight");
        let mut begun = flight.launched.max(reserved.landed);
        let waited = match &mut reserved.sampler {
            Some(Sampler { gate, .. }) => reserved.masks.bring(gate, flight.sequence),
            None => false,
        };
        if waited {
            begun = Instant::now();
        }
        let pace = &mut self.paces[flight.recording];
        let landed = reserved.landing.wait(&self.stream, flight.sequence, (*pace, begun), flight.patience);
        reserved.meetings.check(&self.stream, landed)?;
        reserved.landed = Instant::now();
        // What waited for masks says nothing of how long it takes.
        if !waited {
            *pace = pace.with(reserved.landed - begun);
        }
        reserved.landing.read(flight.sequence, &mut results[..flight.sampled]);
        reserved.masks.mark_missing(flight.sequence, results);
        self.expert_rows = flight.expert_rows;
        if flight.counts_experts {
            self.expert_rows.distinct = reserved.landing.count(flight.sequence);
        }
        self.say_driver_bytes().map_err(|error| self.gpu.device.fail(error).into())
    }

    fn abandon(&mut self) {
        // Of a GPU that failed nothing is waited for.
        if self.bind().is_err() {
            return;
        }
        let Some(reserved) = &mut self.reserved else { return };
        if reserved.flights.is_empty() {
            return;
        }
        let mut limit = Duration::ZERO;
        while let Some(flight) = reserved.flights.pop_front() {
            if let Some(Sampler { gate, .. }) = &mut reserved.sampler {
                reserved.masks.deny(gate, flight.sequence);
            }
            limit += flight.patience;
        }
        // Nobody comes to what was given up.
        reserved.meetings.abort();
        // A device that fails here refuses the next step, which says so.
        if let Err(error) = self.stream.wait_within("steps that are given up", limit) {
            tracing::error!("{error}");
        }
    }

    fn heeds_masks(&self) -> bool {
        true
    }

    fn count_experts(&mut self, counts: bool) {
        self.counts_experts = counts;
    }

    fn expert_rows(&self) -> ExpertRows {
        self.expert_rows
    }
}

impl Drop for CudaBackend {
    /// What a step in flight works on is given back only when it has ended.
    fn drop(&mut self) {
        self.abandon();
    }
}

impl Reserved {
    /// Queues a step.
    fn launch(
        &mut self,
        queue: &Queue<'_>,
        (recording, recorded): (usize, &Recorded),
        inputs: &StepInputs<'_>,
        (patience, counts): (Duration, bool),
    ) -> Result<(), CudaError> {
        let sequence = self.landing.begin();
        self.host.take_turn(turn(sequence));
        if self.reserve.poison {
            self.poison(queue.stream, inputs)?;
        }
        let rounds = self.meetings.begin(recorded.collectives);
        let used = self.host.fill(&recorded.layout, &self.reserve, inputs, (sequence, patience), rounds);
        if let Some(sampler) = &mut self.sampler {
            let patience = self.flights.iter().map(|flight| flight.patience).sum::<Duration>() + patience;
            sampler.load(queue, (inputs.slot_loads, inputs.out), turn(sequence), patience)?;
            self.masks.expect(&sampler.gate, sequence, inputs.out);
        }
        // SAFETY: this half of the staging buffer is not touched before the step was waited for.
        unsafe { self.staging.upload(queue.stream, 0, &self.host.bytes()[..used]) }?;
        let counting = recorded.counting.as_ref().filter(|_| counts);
        counting.unwrap_or(&recorded.graph).launch(queue.stream)?;
        let rows = inputs.tokens.len() as u64;
        let (chosen, computed) = recorded.choices;
        self.flights.push_back(Flight {
            sequence,
            recording,
            launched: Instant::now(),
            patience,
            sampled: if self.sampler.is_some() { inputs.out.len() } else { 0 },
            expert_rows: ExpertRows {
                chosen: rows * chosen as u64,
                computed: rows * computed as u64,
                distinct: 0,
            },
            counts_experts: counting.is_some(),
        });
        Ok(())
    }

    fn new(stream: &Stream, plan: &Plan, reserve: &Reserve, place: &Place) -> Result<Self, OpsError> {
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
            kernels: attend_kernels(reserve, properties, sizes.element),
            work: work(reserve, properties, sizes.element, sizes.order),
            few: attend_few(reserve, properties, sizes.element, sizes.order),
            scratch: DeviceMem::new(device, sizes.attention)?,
            letters_offset: letters_offset(reserve, properties, sizes.element, sizes.order),
        };
        attention.clear(stream)?;
        let frequencies: Vec<u8> =
            reserve.attention.rotary.frequencies.iter().flat_map(|f| f.to_le_bytes()).collect();
        let pinned = || Pinned::new(device, sizes.staging);
        let reserved = Self {
            room: DeviceMem::new(device, sizes.room)?,
            quantised: DeviceMem::new(device, sizes.quantised)?,
            staging: DeviceMem::new(device, sizes.staging)?,
            tables: DeviceMem::new(device, sizes.tables)?,
            frequencies: DeviceMem::new(device, frequencies.len())?,
            sampler: if reserve.samples { Some(Sampler::new(stream, reserve, sizes)?) } else { None },
            host: Staging::new([pinned()?, pinned()?], reserve, attention.work),
            landing: Landing::new(device, reserve.top.out_rows)?,
            meetings: Meetings::new(stream, place, &sizes.sets)?,
            lane: place.me(Comm::Group),
            flights: VecDeque::with_capacity(TURNS),
            landed: Instant::now(),
            masks: Masks::new(reserve.top.out_rows),
            attention,
            experts: DeviceMem::new(device, sizes.experts)?,
            counts: if sizes.counts > 0 { Some(zeros(stream, COUNTS_BYTES)?) } else { None },
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

    /// Where experts are counted.
    pub(crate) fn counts(&self) -> Result<Address, OpsError> {
        let counts = self.counts.as_ref().map(DeviceMem::address);
        counts.ok_or_else(|| {
            OpsError::Memory("a recording counts experts and none was planned that does".into())
        })
    }

    /// Keys and values of a layer.
    pub(crate) fn cache(&self, layer: usize) -> Result<CacheLayer, OpsError> {
        if layer >= self.reserve.layers {
            return Err(OpsError::Weights(format!("layer {layer} of a cache of {}", self.reserve.layers)));
        }
        let half = self.reserve.pages * self.page_bytes;
        let keys = self.cache.address().plus(2 * layer * half);
        let (page_size, element) = (self.reserve.page_size, self.reserve.kv_dtype.into());
        Ok(CacheLayer { keys, values: keys.plus(half), page_size, element })
    }

    pub(crate) fn last_tokens(&self) -> Address {
        self.sampler.as_ref().map_or(Address::NULL, |sampler| sampler.last_tokens())
    }

    /// NaN in all that no result may depend on: padding, the Sink, fresh pages.
    fn poison(&mut self, stream: &Stream, inputs: &StepInputs<'_>) -> Result<(), CudaError> {
        self.host.poison();
        self.room.fill(stream, 0, self.room.bytes(), 0xff)?;
        self.quantised.fill(stream, 0, self.quantised.bytes(), 0xff)?;
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
        assert_eq!(inputs.lane, self.lane, "this rank's lane");
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

/// What every model needs.
const BASE_PROGRAMS: [&str; 10] = [
    "step",
    "step_end",
    "weights",
    "rows",
    "norm",
    "rope",
    "route",
    "sample",
    "sample_finish",
    "sample_load",
];

fn zeros(stream: &Stream, bytes: usize) -> Result<DeviceMem, CudaError> {
    let memory = DeviceMem::new(stream.device(), bytes)?;
    memory.fill(stream, 0, bytes, 0)?;
    Ok(memory)
}

fn early(what: &str) -> OpsError {
    OpsError::Device(format!("{what} was called before reserve"))
}
