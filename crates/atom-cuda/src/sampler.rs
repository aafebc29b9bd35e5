//! The end of a step on the GPU: what slots keep, and the kernels that choose tokens.

use crate::device::Stream;
use crate::error::CudaError;
use crate::gate::Gate;
use crate::kernels::Queue;
use crate::launch::sample::{self, SampleMemory, SampleStep};
use crate::memory::{Address, DeviceMem, Pinned};
use crate::plan::{LOADS_MAX, LOADS_ROOM, Sizes, load_items_bytes, sample_memory};
use crate::sample_rows::{BIAS_LOAD_BYTES, BiasTables, Part, RESULT_BYTES, SEEN_LOAD_BYTES, SeenParts};
use atom_base::{OutRow, SlotLoad};
use atom_ops::Reserve;
use std::time::Duration;

/// Per-slot state and scratch of the sampling kernels.
pub(crate) struct Sampler {
    at: SampleMemory,
    memory: DeviceMem,
    last_tokens: DeviceMem,
    results: DeviceMem,
    pub(crate) gate: Gate,
    loads: DeviceMem,
    host_loads: Pinned,
    items_bytes: usize,
    tables: BiasTables,
    /// Loads whose slots nobody asked penalties of yet. `[slots]`
    pending: Vec<Option<SlotLoad>>,
    due: Vec<SlotLoad>,
}

impl Sampler {
    pub(crate) fn new(stream: &Stream, reserve: &Reserve, sizes: &Sizes) -> Result<Self, CudaError> {
        let device = stream.device();
        let at = sample_memory(reserve);
        let sampler = Self {
            at,
            memory: DeviceMem::new(device, at.bytes())?,
            last_tokens: DeviceMem::new(device, 4 * reserve.slots)?,
            results: DeviceMem::new(device, reserve.top.out_rows * RESULT_BYTES)?,
            gate: Gate::new(device, reserve.vocab, reserve.top.out_rows)?,
            loads: DeviceMem::new(device, sizes.loads)?,
            host_loads: Pinned::new(device, sizes.loads)?,
            items_bytes: load_items_bytes(reserve),
            tables: BiasTables::new(reserve.slots),
            pending: vec![None; reserve.slots],
            due: Vec::with_capacity(reserve.slots),
        };
        sampler.last_tokens.fill(stream, 0, sampler.last_tokens.bytes(), 0)?;
        Ok(sampler)
    }

    /// What each slot's request said last. `[slots]`
    pub(crate) fn last_tokens(&self) -> Address {
        self.last_tokens.address()
    }

    /// Brings what slots need that the device has not got: histories and biases, when a request with penalties or
    /// biases comes. Nothing in a steady step. Waits at most `patience` for the steps in flight.
    pub(crate) fn load(
        &mut self,
        queue: &Queue<'_>,
        loads: &[SlotLoad],
        out: &[OutRow],
        patience: Duration,
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
            let (records, items) = self.send(queue.stream, part)?;
            // SAFETY: the arrays are those of the part, and live as long as this.
            unsafe { sample::load_seen(queue, &self.at, self.memory.address(), records, items) }?;
            // The next part is written where this one lies.
            queue.stream.wait_within("a load of histories and the steps before it", patience)?;
        }
        self.due = due;
        for out in out.chunks(LOADS_MAX) {
            let (records, items) = self.host_loads[COUNT_ROOM..].split_at_mut(LOADS_ROOM - COUNT_ROOM);
            let records = &mut records[..LOADS_MAX * BIAS_LOAD_BYTES];
            let Some(part) = self.tables.update(out, records, &mut items[..self.items_bytes]) else {
                continue;
            };
            let (records, items) = self.send(queue.stream, part)?;
            // SAFETY: as above.
            unsafe { sample::load_biases(queue, &self.at, self.memory.address(), records, items) }?;
            queue.stream.wait_within("a load of biases and the steps before it", patience)?;
        }
        Ok(())
    }

    /// Queues the copy of a part: records with their count and how many there are, and items. All of the room
    /// travels: these are no steady steps. The caller waits before it writes again.
    fn send(
        &mut self,
        stream: &Stream,
        part: Part,
    ) -> Result<((Address, Address, usize), Address), CudaError> {
        self.host_loads[..4].copy_from_slice(&(part.loads as u32).to_le_bytes());
        // SAFETY: the buffer is not touched before the caller has waited.
        unsafe { self.loads.upload(stream, 0, &self.host_loads) }?;
        let start = self.loads.address();
        Ok(((start.plus(COUNT_ROOM), start, part.loads), start.plus(LOADS_ROOM)))
    }

    /// Captures the kernels for `out_rows` rows.
    ///
    /// # Safety
    /// As for [`sample::sample`].
    pub(crate) unsafe fn record(
        &self,
        queue: &Queue<'_>,
        (header, logits, rows): (Address, Address, Address),
        out_rows: usize,
    ) -> Result<(), CudaError> {
        let (results, last_token) = (self.results.address(), self.last_tokens());
        let step = SampleStep { header, logits, rows, results, last_token, gate: self.gate.at() };
        // SAFETY: the caller's.
        unsafe { sample::sample(queue, &self.at, self.memory.address(), &step, out_rows) }
    }

    /// Results of a step. `[out rows]`
    pub(crate) fn results(&self) -> Address {
        self.results.address()
    }
}

/// The number of loads comes first.
const COUNT_ROOM: usize = 128;
