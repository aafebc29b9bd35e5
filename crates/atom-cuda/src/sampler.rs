//! The end of a step on the GPU: what slots keep, and the kernels that choose tokens.

use crate::device::Stream;
use crate::error::CudaError;
use crate::gate::Gate;
use crate::kernels::Queue;
use crate::landing::TURNS;
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
    /// Of histories and of biases, for each turn.
    host_loads: [[Pinned; 2]; TURNS],
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
        let pinned = || Pinned::new(device, sizes.loads);
        let sampler = Self {
            at,
            memory: DeviceMem::new(device, at.bytes())?,
            last_tokens: DeviceMem::new(device, 4 * reserve.slots)?,
            results: DeviceMem::new(device, reserve.top.out_rows * RESULT_BYTES)?,
            gate: Gate::new(device, reserve.vocab, reserve.top.out_rows)?,
            loads: DeviceMem::new(device, sizes.loads)?,
            host_loads: [[pinned()?, pinned()?], [pinned()?, pinned()?]],
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
    /// biases comes. Nothing in a steady step. One part of each is queued in front of the step; where there are more,
    /// the next one waits at most `patience` for the last and for the steps in flight.
    pub(crate) fn load(
        &mut self,
        queue: &Queue<'_>,
        (loads, out): (&[SlotLoad], &[OutRow]),
        turn: usize,
        patience: Duration,
    ) -> Result<(), CudaError> {
        for load in loads {
            self.pending[load.slot.0 as usize] = Some(load.clone());
        }
        self.due.clear();
        for row in out.iter().filter(|row| row.target.is_none() && row.params.has_penalties()) {
            self.due.extend(self.pending[row.slot.0 as usize].take());
        }
        let Self { at, loads: room, tables, items_bytes, .. } = self;
        let [seen, biases] = &mut self.host_loads[turn];
        let memory = self.memory.address();
        let (mut parts, mut sent) = (SeenParts::new(&self.due), 0);
        while !parts.is_done() {
            free(queue.stream, sent, patience)?;
            let (records, items) = split(seen, LOADS_MAX * SEEN_LOAD_BYTES, *items_bytes);
            let Some(part) = parts.next_part(records, items) else { break };
            let (records, items) = send(queue.stream, room, seen, part)?;
            // SAFETY: the arrays are those of the part, and live as long as this.
            unsafe { sample::load_seen(queue, at, memory, records, items) }?;
            sent += 1;
        }
        sent = 0;
        for out in out.chunks(LOADS_MAX).filter(|out| !out.is_empty()) {
            if !tables.lacks(out) {
                continue;
            }
            free(queue.stream, sent, patience)?;
            let (records, items) = split(biases, LOADS_MAX * BIAS_LOAD_BYTES, *items_bytes);
            let Some(part) = tables.update(out, records, items) else { continue };
            let (records, items) = send(queue.stream, room, biases, part)?;
            // SAFETY: as above.
            unsafe { sample::load_biases(queue, at, memory, records, items) }?;
            sent += 1;
        }
        Ok(())
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

/// Before a buffer is written again in the same step. The step before in its turn has ended.
fn free(stream: &Stream, sent: usize, patience: Duration) -> Result<(), CudaError> {
    if sent == 0 {
        return Ok(());
    }
    stream.wait_within("loads of slots and the steps before them", patience)
}

/// Room for records, and for what they name.
fn split(host: &mut Pinned, records_bytes: usize, items_bytes: usize) -> (&mut [u8], &mut [u8]) {
    let (records, items) = host[COUNT_ROOM..].split_at_mut(LOADS_ROOM - COUNT_ROOM);
    (&mut records[..records_bytes], &mut items[..items_bytes])
}

/// Queues the copy of a part: records with their count and how many there are, and items. All of the room travels: these
/// are no steady steps.
fn send(
    stream: &Stream,
    room: &DeviceMem,
    host: &mut Pinned,
    part: Part,
) -> Result<((Address, Address, usize), Address), CudaError> {
    host[..4].copy_from_slice(&(part.loads as u32).to_le_bytes());
    // SAFETY: the buffer is not touched before the step has ended, or `free` has waited.
    unsafe { room.upload(stream, 0, host) }?;
    let start = room.address();
    Ok(((start.plus(COUNT_ROOM), start, part.loads), start.plus(LOADS_ROOM)))
}

/// The number of loads comes first.
const COUNT_ROOM: usize = 128;
