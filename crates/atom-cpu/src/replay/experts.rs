//! The experts of a layer: choices are listed by expert, and each expert's rows are multiplied with its
//! matrices alone.
//!
//! Every worker visits every expert that somebody chose and takes its share of the panels there, so all
//! are busy with one row as with thousands, however rows fall on experts. Sums over experts are made
//! where a worker writes its columns: in ascending order, since it visits experts in that order.

use super::Replay;
use crate::choices::{Chosen, chose};
use crate::elementwise::gated_silu;
use crate::matmul::{Codes, Form, Operands, RowMap, columns_of, multiply_panels, panels_of};
use crate::phase::ExpertLayer;
use crate::pool::Worker;
use crate::shared::{Rows, share};
use std::ops::Range;
use std::sync::atomic::Ordering;

impl Replay<'_> {
    /// # Safety
    /// As for `phase`, here and below.
    pub(super) unsafe fn group_choices(&self, layer: &ExpertLayer, worker: &Worker<'_>) {
        let (map, rows, held) = (self.map(layer.x), self.rows(layer.x), held(layer));
        // SAFETY: routes are written by nobody in this phase.
        unsafe {
            let (x, routes) = (self.buffer(layer.x), self.buffer(layer.routes));
            if worker.index == 0 {
                let choices = self.view.choices(self.recorded).group(routes, map, rows, &held);
                self.computed.fetch_add(choices as u64, Ordering::Relaxed);
            }
            if !layer.x_quantised {
                return;
            }
            // Codes lie as the rows of x do.
            let codes = self.mapped_codes(x, RowMap::Dense);
            for row in share(rows, worker.index, worker.count).map(|row| map.at(row)) {
                if chose(&routes.row(row)[..layer.spec.top_k], &held) {
                    codes.make(self.isa, x.row(row), row);
                }
            }
        }
    }

    /// # Safety
    /// As above.
    pub(super) unsafe fn gate_and_up(&self, layer: &ExpertLayer, worker: &Worker<'_>) {
        // SAFETY: the phase before listed the choices and quantised their rows.
        unsafe {
            let choices = self.view.choices(self.recorded);
            let x = self.buffer(layer.x);
            let out = self.buffer(layer.inner).split(layer.spec.choices_per_row());
            for (expert, matrix) in self.experts(layer.gate_up).iter().enumerate() {
                let Chosen { rows, first, .. } = choices.of(expert);
                if rows.is_empty() {
                    continue;
                }
                let map = RowMap::Listed(rows);
                let operands = Operands {
                    x,
                    x_rows: map,
                    codes: layer.x_quantised.then(|| self.mapped_codes(x, map)),
                    bias: None,
                    out,
                    out_rows: RowMap::From(first),
                    scratch: self.view.tiles(self.recorded, worker.index),
                    weights: None,
                    rows: rows.len(),
                };
                // Whoever gets a panel more gets it from another expert next time.
                let turn = (worker.index + expert) % worker.count;
                let panels = share(panels_of(&matrix.parts), turn, worker.count);
                multiply_panels(self.isa, &matrix.parts, &operands, panels);
            }
        }
    }

    /// # Safety
    /// As above.
    pub(super) unsafe fn gate_choices(&self, layer: &ExpertLayer, worker: &Worker<'_>) {
        let places = layer.spec.choices_per_row();
        // SAFETY: a row of scratch is one choice's, and a choice one worker's.
        unsafe {
            let choices = self.view.choices(self.recorded);
            let inner = self.buffer(layer.inner).split(places);
            let gated = self.buffer(layer.gated).split(places);
            let codes = self.mapped_codes(gated, RowMap::Dense);
            for index in share(choices.total(layer.spec.held), worker.index, worker.count) {
                let gated = gated.row_mut(index);
                gated_silu(self.isa, inner.row(index), gated.len(), gated);
                if layer.gated_quantised {
                    codes.make(self.isa, gated, index);
                }
            }
        }
    }

    /// # Safety
    /// As above.
    pub(super) unsafe fn down(&self, layer: &ExpertLayer, worker: &Worker<'_>) {
        let matrices = self.experts(layer.down);
        // All are cut into parts alike, so a worker has the same columns of every expert.
        let parts = &matrices[0].parts;
        let panels = share(panels_of(parts), worker.index, worker.count);
        let is_weighted = layer.sums;
        // SAFETY: the phase before made the gated rows and their codes; these columns are this worker's.
        unsafe {
            let choices = self.view.choices(self.recorded);
            let gated = self.buffer(layer.gated).split(layer.spec.choices_per_row());
            let out = self.buffer(layer.out);
            if is_weighted {
                let (map, columns) = (self.map(layer.out), columns_of(parts, panels.clone()));
                for row in 0..self.rows(layer.out) {
                    out.part_mut(map.at(row), columns.clone()).fill(0.0);
                }
            }
            let out = if is_weighted { out } else { out.split(layer.spec.choices_per_row()) };
            for (expert, matrix) in matrices.iter().enumerate() {
                let Chosen { rows, slots, first, weights } = choices.of(expert);
                if rows.is_empty() {
                    continue;
                }
                let map = RowMap::From(first);
                let operands = Operands {
                    x: gated,
                    x_rows: map,
                    codes: layer.gated_quantised.then(|| self.mapped_codes(gated, map)),
                    bias: None,
                    out,
                    out_rows: RowMap::Listed(if is_weighted { rows } else { slots }),
                    scratch: self.view.tiles(self.recorded, worker.index),
                    weights: is_weighted.then_some(weights),
                    rows: rows.len(),
                };
                multiply_panels(self.isa, &matrix.parts, &operands, panels.clone());
            }
        }
    }

    /// Codes that lie as the rows of `x` do.
    ///
    /// # Safety
    /// The recording quantises `x`.
    unsafe fn mapped_codes<'a>(&'a self, x: Rows<'_>, rows: RowMap<'a>) -> Codes<'a> {
        let form = if self.recorded.sizes.rounds() { Form::Rounded } else { Form::Integers };
        // SAFETY: the caller's promise.
        unsafe { self.codes(x, x.rows(), rows, form) }
    }
}

fn held(layer: &ExpertLayer) -> Range<usize> {
    layer.spec.first..layer.spec.first + layer.spec.held
}
