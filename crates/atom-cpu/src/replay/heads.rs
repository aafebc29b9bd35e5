//! Norms over all heads of q and of k, and routers: a worker's own rows.

use super::Replay;
use crate::elementwise::{inverse_root, scale_row_in_place, square_sum};
use crate::pool::Worker;
use crate::route::route;
use crate::shared::share;
use atom_ops::{Buf, NO_EXPERT, RouteSpec, Weight};
use std::sync::atomic::Ordering;

impl Replay<'_> {
    /// # Safety
    /// As for `phase`, here and below.
    pub(super) unsafe fn square_sums(
        &self,
        qkv: Buf,
        (q_width, k_width): (usize, usize),
        out: Buf,
        worker: &Worker<'_>,
    ) {
        for row in self.runs(out, worker).flatten() {
            // SAFETY: these rows are this worker's; the two buffers are apart.
            let (heads, sums) = unsafe { (self.buffer(qkv).row(row), self.buffer(out).row_mut(row)) };
            let (q, rest) = heads.split_at(q_width);
            sums.copy_from_slice(&[square_sum(self.isa, q), square_sum(self.isa, &rest[..k_width])]);
        }
    }

    /// # Safety
    /// As above.
    pub(super) unsafe fn scale_heads(
        &self,
        qkv: Buf,
        sums: Buf,
        (q_weight, k_weight): (Weight, Weight),
        (q_elements, k_elements): (usize, usize),
        eps: f32,
        worker: &Worker<'_>,
    ) {
        let (q_weight, k_weight) = (self.vector(q_weight), self.vector(k_weight));
        for row in self.runs(qkv, worker).flatten() {
            // SAFETY: as above.
            let (heads, sums) = unsafe { (self.buffer(qkv).row_mut(row), self.buffer(sums).row(row)) };
            let (q, rest) = heads.split_at_mut(q_weight.len());
            scale_row_in_place(self.isa, q, inverse_root(sums[0], q_elements, eps), q_weight);
            let k = &mut rest[..k_weight.len()];
            scale_row_in_place(self.isa, k, inverse_root(sums[1], k_elements, eps), k_weight);
        }
    }

    /// # Safety
    /// As above.
    pub(super) unsafe fn route(
        &self,
        (logits, bias): (Buf, Option<Weight>),
        spec: &RouteSpec,
        out: Buf,
        number: usize,
        worker: &Worker<'_>,
    ) {
        let rows = self.rows(logits);
        let bias = bias.map(|bias| self.vector(bias));
        // SAFETY: as above; the scratch is this worker's.
        unsafe {
            let (logits, out) = (self.buffer(logits), self.buffer(out));
            let scratch = self.view.scores(self.recorded).row_mut(worker.index);
            for row in share(rows, worker.index, worker.count) {
                route(self.isa, spec, logits.row(row), bias, scratch, out.row_mut(row));
                if let Some(seen) = self.seen {
                    seen.add(number, &out.row(row)[..spec.top_k]);
                }
            }
            if worker.index == 0 {
                for row in rows..self.granted() {
                    let (numbers, weights) = out.row_mut(row).split_at_mut(spec.top_k);
                    numbers.fill(NO_EXPERT);
                    weights.fill(0.0);
                }
                self.chosen.fetch_add((rows * spec.top_k) as u64, Ordering::Relaxed);
            }
        }
    }
}
