//! Walks a recording: every worker runs every phase on its share of the real rows.

mod exchange;
mod experts;
mod heads;

use crate::attention::Attention;
use crate::elementwise::{add, add_norm, gated_silu, norm};
use crate::isa::Isa;
use crate::matmul::{Codes, Form, Operands, RowMap, form_of_rows, multiply};
use crate::phase::Phase;
use crate::pool::Worker;
use crate::record::{ExpertsSeen, Recorded};
use crate::room::View;
use crate::sample::Sampler;
use crate::shared::{Rows, share};
use crate::sizes::Place;
use crate::weights::{Loaded, Matrix};
use atom_base::{ScoredToken, TokenId, slot_of_last};
use atom_ops::{Buf, Collectives, Comm, Extent, OpsError, StepInputs, Weight};
use atom_weights::{Tensor, quant};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// One step, shared by all workers.
pub(crate) struct Replay<'a> {
    pub(crate) isa: Isa,
    pub(crate) recorded: &'a Recorded,
    pub(crate) weights: &'a [Loaded],
    pub(crate) view: View<'a>,
    pub(crate) attention: &'a Attention,
    pub(crate) sampler: Option<&'a Sampler>,
    pub(crate) inputs: &'a StepInputs<'a>,
    pub(crate) collectives: &'a dyn Collectives,
    pub(crate) results: Rows<'a, ScoredToken>,
    pub(crate) failure: Failure,
    /// Choices that this rank's rows made.
    pub(crate) chosen: AtomicU64,
    /// Choices that this rank computed its share of.
    pub(crate) computed: AtomicU64,
    /// Where the experts that rows choose are noted, if anybody wants to know.
    pub(crate) seen: Option<&'a ExpertsSeen>,
}

/// The first collective that failed. Workers go on to the next barrier and stop there together.
pub(crate) struct Failure {
    /// Phase in which it failed; none has this number until then.
    phase: AtomicUsize,
    error: Mutex<Option<OpsError>>,
}

impl Replay<'_> {
    /// Runs the whole recording as one worker. After a collective failed, the rest is skipped.
    pub(crate) fn walk(&self, worker: &Worker<'_>) {
        for (index, step) in self.recorded.steps.iter().enumerate() {
            if step.meets {
                worker.meet();
                // Only phases before this meeting: a later failure must not part the workers.
                if self.failure.is_before(index) {
                    return;
                }
            }
            // SAFETY: the recording fits the weights and the room (`record`, `fit`), the step fits the
            // recording (`assert_fits`), and phases that touch each other's rows are apart by a
            // meeting (`phases`).
            let done = unsafe { self.phase(&step.phase, worker) };
            if let Err(error) = done {
                self.failure.set(index, error);
            }
        }
    }

    /// # Safety
    /// All workers call it with the same phase, and nothing else runs that touches the same rows.
    unsafe fn phase(&self, phase: &Phase, worker: &Worker<'_>) -> Result<(), OpsError> {
        // SAFETY: passed on; each function touches this worker's share only.
        unsafe {
            match *phase {
                Phase::Embed { table, out } => self.embed(self.table(table), out, worker),
                Phase::Norm { x, weight, eps, out } => self.norm(x, weight, eps, out, worker),
                Phase::AddNorm { residual, x, weight, eps, out } => {
                    self.add_norm(residual, x, weight, eps, out, worker);
                }
                Phase::Quantise { x } => self.quantise(x, worker),
                Phase::Multiply { x, weight, bias, out, quantised } => {
                    self.multiply(x, self.matrix(weight), bias, out, quantised, worker);
                }
                Phase::RotateAndCache { qkv, layer, qk_norm } => {
                    let qk_norm = qk_norm.map(|(q, k, eps)| (self.vector(q), self.vector(k), eps));
                    self.attention.rotate_and_cache(
                        worker.index,
                        self.inputs,
                        layer,
                        self.buffer(qkv),
                        qk_norm,
                    );
                }
                Phase::Attend { qkv, layer, heads, out } => {
                    let out = self.buffer(out).split(heads);
                    self.attention.attend(worker.index, self.inputs, layer, self.buffer(qkv), out);
                }
                Phase::GatedSilu { gate_up, out } => self.gated_silu(gate_up, out, worker),
                Phase::SquareSums { qkv, widths, out } => self.square_sums(qkv, widths, out, worker),
                Phase::ScaleHeads { qkv, sums, weights, elements, eps } => {
                    self.scale_heads(qkv, sums, weights, elements, eps, worker);
                }
                Phase::Add { x, out } => self.add(x, out, worker),
                Phase::Route { logits, bias, ref spec, out, number } => {
                    self.route((logits, bias), spec, out, number, worker);
                }
                Phase::GroupChoices(ref layer) => self.group_choices(layer, worker),
                Phase::GateAndUp(ref layer) => self.gate_and_up(layer, worker),
                Phase::GateChoices(ref layer) => self.gate_choices(layer, worker),
                Phase::Down(ref layer) => self.down(layer, worker),
                Phase::PackRows(ref exchange) => self.pack_rows(exchange, worker),
                Phase::PlaceRows(ref exchange) => self.place_rows(exchange, worker),
                Phase::SumChoices(ref exchange) => self.sum_choices(exchange, worker),
                Phase::ExchangeRows(ref exchange) => {
                    if worker.index == 0 {
                        return self.exchange_rows(exchange);
                    }
                }
                Phase::PickRows { x, out } => self.pick_rows(x, out, worker),
                Phase::PlaceColumns { ref widths, capacity, out } => {
                    self.place_columns(widths, capacity, out, worker);
                }
                Phase::Sample { logits } => self.sample(logits, worker),
                Phase::AllReduce { .. }
                | Phase::GatherRows { .. }
                | Phase::ScatterSum { .. }
                | Phase::GatherShards { .. } => {
                    if worker.index == 0 {
                        return self.collective(phase);
                    }
                }
            }
        }
        Ok(())
    }

    unsafe fn embed(&self, table: &Tensor, out: Buf, worker: &Worker<'_>) {
        // SAFETY: as for `phase`, here and below: these rows are this worker's.
        unsafe {
            let out = self.buffer(out);
            for row in share(self.inputs.tokens.len(), worker.index, worker.count) {
                let token = self.token(row) as usize;
                quant::expand_row(table, token, 0..table.cols(), out.row_mut(row));
            }
        }
    }

    /// A row's token, also where the step before sampled it.
    fn token(&self, row: usize) -> TokenId {
        let token = self.inputs.tokens[row];
        match (slot_of_last(token), self.sampler) {
            (None, _) => token,
            (Some(slot), Some(sampler)) => sampler.last(slot),
            (Some(slot), None) => unreachable!("the last token of slot {slot}, on a rank that samples none"),
        }
    }

    unsafe fn norm(&self, x: Buf, weight: Weight, eps: f32, out: Buf, worker: &Worker<'_>) {
        for rows in self.runs(x, worker) {
            // SAFETY: as for `phase`; x and out are apart.
            unsafe {
                let (x, out) = (self.buffer(x).slice(rows.clone()), self.buffer(out).slice_mut(rows));
                norm(self.isa, x, self.vector(weight), eps, out);
            }
        }
    }

    unsafe fn add_norm(
        &self,
        residual: Buf,
        x: Buf,
        weight: Weight,
        eps: f32,
        out: Buf,
        worker: &Worker<'_>,
    ) {
        for rows in self.runs(x, worker) {
            // SAFETY: as for `phase`; the three are apart.
            unsafe {
                let residual = self.buffer(residual).slice_mut(rows.clone());
                let (x, out) = (self.buffer(x).slice(rows.clone()), self.buffer(out).slice_mut(rows));
                add_norm(self.isa, residual, x, self.vector(weight), eps, out);
            }
        }
    }

    unsafe fn quantise(&self, x: Buf, worker: &Worker<'_>) {
        let rows = self.rows(x);
        // SAFETY: as for `phase`; the recording quantises this buffer.
        unsafe {
            let (x, map) = (self.buffer(x), self.map(x));
            let codes = self.codes(x, rows, RowMap::Dense, self.form(rows, x.width()));
            for row in share(rows, worker.index, worker.count) {
                codes.make(self.isa, x.row(map.at(row)), row);
            }
        }
    }

    unsafe fn multiply(
        &self,
        x: Buf,
        matrix: &Matrix,
        bias: Option<Weight>,
        out: Buf,
        quantised: bool,
        worker: &Worker<'_>,
    ) {
        let rows = self.rows(x);
        // SAFETY: as for `phase`; if codes are wanted, the phase before made them of this buffer.
        unsafe {
            let (map, x, out) = (self.map(x), self.buffer(x), self.buffer(out));
            let codes = quantised.then(|| self.codes(x, rows, RowMap::Dense, self.form(rows, x.width())));
            let bias = bias.map(|bias| self.vector(bias));
            let scratch = self.view.tiles(self.recorded, worker.index);
            let operands =
                Operands { x, x_rows: map, codes, bias, out, out_rows: map, scratch, weights: None, rows };
            multiply(self.isa, &matrix.parts, &operands, worker.index, worker.count);
        }
    }

    unsafe fn gated_silu(&self, gate_up: Buf, out: Buf, worker: &Worker<'_>) {
        for rows in self.runs(out, worker) {
            // SAFETY: as for `phase`; the two are apart.
            unsafe {
                let out = self.buffer(out);
                let gate_up = self.buffer(gate_up).slice(rows.clone());
                gated_silu(self.isa, gate_up, out.width(), out.slice_mut(rows));
            }
        }
    }

    unsafe fn add(&self, x: Buf, out: Buf, worker: &Worker<'_>) {
        for rows in self.runs(out, worker) {
            // SAFETY: as for `phase`; the two are apart.
            unsafe { add(self.buffer(x).slice(rows.clone()), self.buffer(out).slice_mut(rows)) };
        }
    }

    unsafe fn pick_rows(&self, x: Buf, out: Buf, worker: &Worker<'_>) {
        for row in share(self.inputs.out.len(), worker.index, worker.count) {
            // SAFETY: as for `phase`.
            unsafe {
                let from = self.buffer(x).row(self.inputs.out[row].row as usize);
                self.buffer(out).row_mut(row).copy_from_slice(from);
            }
        }
    }

    unsafe fn place_columns(&self, widths: &[usize], capacity: usize, out: Buf, worker: &Worker<'_>) {
        for row in share(self.inputs.out.len(), worker.index, worker.count) {
            // SAFETY: as for `phase`; the phase before gathered the columns.
            unsafe {
                let gathered = self.view.gathered(widths.len(), capacity);
                let mut out = self.buffer(out).row_mut(row);
                for (member, &width) in widths.iter().enumerate() {
                    let (to, rest) = out.split_at_mut(width);
                    to.copy_from_slice(&gathered.row(member)[row * width..][..width]);
                    out = rest;
                }
            }
        }
    }

    unsafe fn sample(&self, logits: Buf, worker: &Worker<'_>) {
        let Some(sampler) = self.sampler else { return };
        for index in share(self.inputs.out.len(), worker.index, worker.count) {
            // SAFETY: as for `phase`; the phase before wrote the logits.
            let (row, result) = unsafe { (self.buffer(logits).row_mut(index), self.results.row_mut(index)) };
            result[0] = sampler.sample(worker.index, &self.inputs.out[index], row);
        }
    }

    /// # Safety
    /// As for `phase`; only worker 0 calls it.
    unsafe fn collective(&self, phase: &Phase) -> Result<(), OpsError> {
        let shape = self.recorded.shape;
        let mut counts = self.view.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.clear();
        let lanes = self.inputs.group_rows.iter().map(|&rows| rows as usize);
        // SAFETY: as for `phase`: the other workers wait at the next meeting.
        unsafe {
            match *phase {
                Phase::AllReduce { x, comm, capacity } => {
                    let end = self.end(x);
                    self.collectives.all_reduce(comm, capacity, self.buffer(x).slice_mut(0..end))
                }
                Phase::GatherRows { x, out, capacity } => {
                    let (x, out) = (self.buffer(x), self.buffer(out));
                    counts.extend(lanes.map(|rows| rows * x.width()));
                    let (mine, all) = (x.slice(0..self.granted()), out.slice_mut(0..out.rows()));
                    let stride = shape.rows * x.width();
                    self.collectives.all_gather(Comm::Group, capacity, mine, &counts, stride, all)
                }
                Phase::ScatterSum { x, out, capacity } => {
                    let (x, out) = (self.buffer(x), self.buffer(out));
                    counts.extend(lanes.map(|rows| rows * x.width()));
                    let (all, mine) = (x.slice(0..x.rows()), out.slice_mut(0..self.granted()));
                    let stride = shape.rows * x.width();
                    self.collectives.reduce_scatter(Comm::Group, capacity, all, &counts, stride, mine)
                }
                Phase::GatherShards { x, ref widths, capacity } => {
                    let rows = self.inputs.out.len();
                    counts.extend(widths.iter().map(|width| rows * width));
                    let gathered = self.view.gathered(widths.len(), capacity);
                    let (mine, all) = (self.buffer(x).slice(0..rows), gathered.slice_mut(0..widths.len()));
                    self.collectives.all_gather(Comm::Lane, capacity, mine, &counts, capacity, all)
                }
                _ => unreachable!("{phase:?} is no collective"),
            }
        }
    }

    /// What rows that all are multiplied with one matrix become before.
    fn form(&self, rows: usize, inputs: usize) -> Form {
        if self.recorded.sizes.rounds() { form_of_rows(self.isa, rows, inputs) } else { Form::Integers }
    }

    /// The codes of `rows` rows as wide as those of `x`.
    ///
    /// # Safety
    /// The recording quantises `x`, or its like with as many rows.
    unsafe fn codes<'b>(&'b self, x: Rows<'_>, rows: usize, map: RowMap<'b>, form: Form) -> Codes<'b> {
        // SAFETY: the caller's promise.
        let (codes, scales) = unsafe { self.view.codes(rows, self.recorded.sizes.code * x.width()) };
        Codes { codes, scales, rows: map, form }
    }

    fn place(&self, buf: Buf) -> &Place {
        &self.recorded.places[usize::from(buf.0)]
    }

    fn buffer(&self, buf: Buf) -> Rows<'_> {
        // SAFETY: the view was made for this recording.
        unsafe { self.view.buffer(self.place(buf)) }
    }

    /// Rows that this lane brings to the group: all that it was granted, since peers count on them. What
    /// it doesn't run is padding, and nobody reads what becomes of that.
    fn granted(&self) -> usize {
        self.inputs.group_rows[self.inputs.lane] as usize
    }

    /// Real rows of a buffer.
    fn rows(&self, buf: Buf) -> usize {
        match self.place(buf).extent {
            Extent::Rows => self.inputs.tokens.len(),
            Extent::OutRows => self.inputs.out.len(),
            Extent::GroupRows => self.view.group_map.len(),
        }
    }

    /// Where they lie.
    fn map(&self, buf: Buf) -> RowMap<'_> {
        match self.place(buf).extent {
            Extent::Rows | Extent::OutRows => RowMap::Dense,
            Extent::GroupRows => RowMap::Listed(self.view.group_map),
        }
    }

    /// One past the last real row.
    fn end(&self, buf: Buf) -> usize {
        self.rows(buf).checked_sub(1).map_or(0, |last| self.map(buf).at(last) + 1)
    }

    /// This worker's share of a buffer's real rows, as ranges of the buffer.
    fn runs(&self, buf: Buf, worker: &Worker<'_>) -> impl Iterator<Item = Range<usize>> {
        let rows = self.rows(buf);
        let mut left = share(rows, worker.index, worker.count);
        let map = self.map(buf);
        std::iter::from_fn(move || {
            let first = left.next()?;
            let start = map.at(first);
            let mut end = start + 1;
            while !left.is_empty() && map.at(left.start) == end {
                left.start += 1;
                end += 1;
            }
            Some(start..end)
        })
    }

    fn matrix(&self, weight: Weight) -> &Matrix {
        match &self.weights[weight.0 as usize] {
            Loaded::Matrix(matrix) => matrix,
            _ => unreachable!("checked when it was recorded"),
        }
    }

    fn experts(&self, weight: Weight) -> &[Matrix] {
        match &self.weights[weight.0 as usize] {
            Loaded::Experts(experts) => &experts.matrices,
            _ => unreachable!("checked when it was recorded"),
        }
    }

    fn vector(&self, weight: Weight) -> &[f32] {
        match &self.weights[weight.0 as usize] {
            Loaded::Vector(vector) => vector,
            _ => unreachable!("checked when it was recorded"),
        }
    }

    fn table(&self, weight: Weight) -> &Tensor {
        match &self.weights[weight.0 as usize] {
            Loaded::Table(table) => table,
            _ => unreachable!("checked when it was recorded"),
        }
    }
}

impl Failure {
    /// Nothing failed yet.
    pub(crate) fn none() -> Self {
        Self { phase: AtomicUsize::new(usize::MAX), error: Mutex::new(None) }
    }

    /// What failed, if anything.
    pub(crate) fn into_result(self) -> Result<(), OpsError> {
        self.error.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Relaxed: the meeting orders it.
    fn is_before(&self, phase: usize) -> bool {
        self.phase.load(Ordering::Relaxed) < phase
    }

    fn set(&self, phase: usize, error: OpsError) {
        *self.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.phase.store(phase, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
