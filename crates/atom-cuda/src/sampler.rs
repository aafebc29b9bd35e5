//! The end of a step on the GPU: what slots keep, and the three kernels that choose tokens.

use crate::device::Stream;
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::memory::{Address, DeviceMem, Pinned};
use crate::module::{Arg, Launch};
use crate::plan::{LOADS_MAX, LOADS_ROOM, Sampling, TOKEN_BLOCK, load_items_bytes};
use crate::sample_rows::{BIAS_LOAD_BYTES, BiasTables, RESULT_BYTES, SEEN_LOAD_BYTES, SeenParts};
use atom_base::limits::LOGIT_BIAS_MAX;
use atom_base::{OutRow, ScoredToken, SlotLoad};
use atom_ops::Reserve;

/// Per-slot state and scratch of the sampling kernels.
pub(crate) struct Sampler {
    vocab: usize,
    seen: DeviceMem,
    biased: DeviceMem,
    biases: DeviceMem,
    keys: DeviceMem,
    masses: DeviceMem,
    peaks: DeviceMem,
    pub(crate) last_tokens: DeviceMem,
    pub(crate) results: DeviceMem,
    host_results: Pinned,
    loads: DeviceMem,
    host_loads: Pinned,
    items_bytes: usize,
    tables: BiasTables,
    /// Loads whose slots nobody asked penalties of yet. `[slots]`
    pending: Vec<Option<SlotLoad>>,
    due: Vec<SlotLoad>,
}

/// Where a capture finds what it samples.
pub(crate) struct Rows {
    pub(crate) header: Address,
    pub(crate) logits: Address,
    pub(crate) records: Address,
    pub(crate) out_rows: usize,
}

impl Sampler {
    pub(crate) fn new(stream: &Stream, reserve: &Reserve, sizes: &Sampling) -> Result<Self, CudaError> {
        let device = stream.device();
        let room = |bytes| DeviceMem::new(device, bytes);
        let sampler = Self {
            vocab: reserve.vocab,
            seen: room(sizes.seen)?,
            biased: room(sizes.biased)?,
            biases: room(sizes.biases)?,
            keys: room(sizes.keys)?,
            masses: room(sizes.masses)?,
            peaks: room(sizes.peaks)?,
            last_tokens: room(sizes.last_tokens)?,
            results: room(reserve.top.out_rows * RESULT_BYTES)?,
            host_results: Pinned::new(device, reserve.top.out_rows * RESULT_BYTES)?,
            loads: room(sizes.loads)?,
            host_loads: Pinned::new(device, sizes.loads)?,
            items_bytes: load_items_bytes(reserve),
            tables: BiasTables::new(reserve.slots),
            pending: vec![None; reserve.slots],
            due: Vec::with_capacity(reserve.slots),
        };
        for (memory, value) in [(&sampler.seen, 0), (&sampler.biased, 0), (&sampler.last_tokens, 0)] {
            memory.fill(stream, 0, memory.bytes(), value)?;
        }
        Ok(sampler)
    }

    /// Brings what slots need that the device has not got: histories and biases, when a request with penalties or
    /// biases comes. Nothing in a steady step.
    pub(crate) fn load(
        &mut self,
        queue: &Queue<'_>,
        loads: &[SlotLoad],
        out: &[OutRow],
    ) -> Result<(), CudaError> {
        for load in loads {
            self.pending[load.slot.0 as usize] = Some(load.clone());
        }
        self.due.clear();
        for row in out.iter().filter(|row| row.target.is_none() && row.params.has_penalties()) {
            self.due.extend(self.pending[row.slot.0 as usize].take());
        }
        let due = std::mem::take(&mut self.due);
        let mut parts = SeenParts::new(&due);
        loop {
            let (records, items) = self.host_loads[COUNT_ROOM..].split_at_mut(LOADS_ROOM - COUNT_ROOM);
            let records = &mut records[..LOADS_MAX * SEEN_LOAD_BYTES];
            let Some(part) = parts.next_part(records, &mut items[..self.items_bytes]) else { break };
            self.send(queue.stream, part.loads)?;
            let blocks = self.vocab.div_ceil(TOKEN_BLOCK) * TOKEN_BLOCK;
            let launch = Launch::new(blocks.div_ceil(4096) as u32, 256).by(part.loads as u32, 1);
            let [count, records, items] = self.places();
            let args = [records, count, items, self.seen.address().into(), Arg::Uint(self.vocab as u32)];
            // SAFETY: the arrays are those that the kernel's file describes; they live as long as this.
            unsafe { queue.launch("sample_load", "sample_load_seen", launch, &args) }?;
            // The next part is written where this one lies.
            queue.stream.wait()?;
        }
        self.due = due;
        self.load_biases(queue, out)
    }

    fn load_biases(&mut self, queue: &Queue<'_>, out: &[OutRow]) -> Result<(), CudaError> {
        for out in out.chunks(LOADS_MAX) {
            let (records, items) = self.host_loads[COUNT_ROOM..].split_at_mut(LOADS_ROOM - COUNT_ROOM);
            let records = &mut records[..LOADS_MAX * BIAS_LOAD_BYTES];
            let Some(part) = self.tables.update(out, records, &mut items[..self.items_bytes]) else {
                continue;
            };
            self.send(queue.stream, part.loads)?;
            let [count, records, items] = self.places();
            let args = [
                records,
                count,
                items,
                self.biased.address().into(),
                self.biases.address().into(),
                Arg::Uint(self.vocab as u32),
                Arg::Uint(LOGIT_BIAS_MAX as u32),
            ];
            let launch = Launch::new(part.loads as u32, 256);
            // SAFETY: as above.
            unsafe { queue.launch("sample_load", "sample_load_biases", launch, &args) }?;
            queue.stream.wait()?;
        }
        Ok(())
    }

    /// All of the loads' room travels: these are no steady steps.
    fn send(&mut self, stream: &Stream, loads: usize) -> Result<(), CudaError> {
        self.host_loads[..4].copy_from_slice(&(loads as u32).to_le_bytes());
        // SAFETY: the buffer is not touched before the caller has waited.
        unsafe { self.loads.upload(stream, 0, &self.host_loads) }
    }

    fn places(&self) -> [Arg<'static>; 3] {
        let start = self.loads.address();
        [start, start.plus(COUNT_ROOM), start.plus(LOADS_ROOM)].map(Arg::from)
    }

    /// Captures the three kernels.
    pub(crate) fn record(&self, queue: &Queue<'_>, rows: &Rows) -> Result<(), CudaError> {
        let blocks = self.vocab.div_ceil(TOKEN_BLOCK);
        // About two blocks a multiprocessor for all rows together; any number gives the same bits.
        let splits = (2 * queue.processors() as usize).div_ceil(rows.out_rows.max(1)).clamp(1, blocks);
        let mut bytes = Vec::with_capacity(104);
        for address in [
            rows.logits,
            rows.records,
            rows.header,
            self.seen.address(),
            self.biased.address(),
            self.biases.address(),
            self.keys.address(),
            self.masses.address(),
            self.peaks.address(),
            self.results.address(),
            self.last_tokens.address(),
        ] {
            bytes.extend(address.0.to_le_bytes());
        }
        for word in [self.vocab as u32, splits as u32, LOGIT_BIAS_MAX as u32, 0] {
            bytes.extend(word.to_le_bytes());
        }
        let (args, out_rows) = ([Arg::Bytes(&bytes)], rows.out_rows as u32);
        let over_vocab = Launch::new(splits as u32, 128).by(out_rows, 1);
        // SAFETY: `bytes` is a SampleArgs of kernels/sample.cuh; what it points at lives as long as this.
        unsafe {
            queue.launch("sample", "sample_peaks", over_vocab, &args)?;
            queue.launch("sample", "sample_masses", over_vocab, &args)?;
            queue.launch("sample_finish", "sample_finish", Launch::new(out_rows, 512), &args)
        }
    }

    /// Queues the copy of the first `count` results to the host.
    pub(crate) fn fetch(&mut self, stream: &Stream, count: usize) -> Result<(), CudaError> {
        // SAFETY: the buffer is read after the stream has been waited for.
        unsafe { self.results.download(stream, 0, &mut self.host_results[..count * RESULT_BYTES]) }
    }

    /// What was fetched, once the stream was waited for.
    pub(crate) fn read(&self, results: &mut [ScoredToken]) {
        for (result, bytes) in results.iter_mut().zip(self.host_results.chunks_exact(RESULT_BYTES)) {
            *result = crate::sample_rows::result(bytes);
        }
    }
}

/// The number of loads comes first.
const COUNT_ROOM: usize = 128;
