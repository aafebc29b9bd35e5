//! Rows go to the lanes of their experts, and outputs of experts back to the lanes of their rows.
//!
//! Everybody has everybody's routes, so each side knows what comes from whom: rows of a lane in ascending
//! order, and of a row its choices in ascending order. What a lane needs of its own goes the same way.

use super::Replay;
use crate::choices::{chose, held};
use crate::matmul::add_weighted;
use crate::phase::RowExchange;
use crate::pool::Worker;
use crate::shared::{Rows, share};
use atom_ops::{Comm, OpsError};
use std::sync::PoisonError;

/// The gathered routes of a step.
#[derive(Clone, Copy)]
struct Routed<'a> {
    /// `[group rows, 2 * top_k]`
    routes: Rows<'a>,
    owners: &'a [usize],
    /// Granted to each lane.
    group_rows: &'a [u32],
    /// Distance of lanes in buffers of group rows.
    stride: usize,
}

impl<'a> Routed<'a> {
    fn top_k(&self) -> usize {
        self.routes.width() / 2
    }

    /// Expert numbers of row `row` of lane `lane`.
    ///
    /// # Safety
    /// Nobody writes the routes meanwhile, here and below.
    unsafe fn numbers(&self, lane: usize, row: usize) -> &'a [f32] {
        // SAFETY: the caller's promise.
        unsafe { &self.routes.row(lane * self.stride + row)[..self.top_k()] }
    }

    /// Rows of lane `from` that chose an expert of lane `holder`, counted in their lane.
    ///
    /// # Safety
    /// As above.
    unsafe fn rows(self, from: usize, holder: usize) -> impl Iterator<Item = usize> + use<'a> {
        let experts = self.owners[holder]..self.owners[holder + 1];
        // SAFETY: the caller's promise.
        let goes = move |row: &usize| unsafe { chose(self.numbers(from, *row), &experts) };
        (0..self.group_rows[from] as usize).filter(goes)
    }

    /// Slots of the choices that rows of lane `from` made among the experts of lane `holder`, who keeps
    /// `places` slots for a row: see [`crate::choices`].
    ///
    /// # Safety
    /// As above.
    unsafe fn slots(
        self,
        from: usize,
        holder: usize,
        places: usize,
    ) -> impl Iterator<Item = usize> + use<'a> {
        let experts = self.owners[holder]..self.owners[holder + 1];
        (0..self.group_rows[from] as usize).flat_map(move |row| {
            let first = (from * self.stride + row) * places;
            // SAFETY: the caller's promise.
            let numbers = unsafe { self.numbers(from, row) };
            (first..).zip(held(numbers, &experts)).map(|(slot, _)| slot)
        })
    }

    /// Choices that rows of lane `from` made among the experts of lane `holder`: `row * top_k + place`,
    /// rows counted in their lane.
    ///
    /// # Safety
    /// As above.
    unsafe fn choices(self, from: usize, holder: usize) -> impl Iterator<Item = usize> + use<'a> {
        let experts = self.owners[holder]..self.owners[holder + 1];
        (0..self.group_rows[from] as usize).flat_map(move |row| {
            // SAFETY: the caller's promise.
            let numbers = unsafe { self.numbers(from, row) };
            held(numbers, &experts).map(move |(place, _)| row * self.top_k() + place)
        })
    }
}

impl Replay<'_> {
    fn routed<'a>(&'a self, exchange: &'a RowExchange) -> Routed<'a> {
        Routed {
            routes: self.buffer(exchange.routes),
            owners: &exchange.owners,
            group_rows: self.inputs.group_rows,
            stride: self.recorded.shape.rows,
        }
    }

    /// # Safety
    /// As for `phase`, here and below.
    pub(super) unsafe fn pack_rows(&self, exchange: &RowExchange, worker: &Worker<'_>) {
        let (routed, me) = (self.routed(exchange), self.inputs.lane);
        let lanes = 0..self.inputs.group_rows.len();
        // SAFETY: routes and x are written by nobody in this phase; a row of scratch is one worker's.
        unsafe {
            if exchange.combines {
                let y = self.buffer(exchange.x);
                let places = y.width() / self.place(exchange.out).width;
                let from = lanes.flat_map(|lane| routed.slots(lane, me, places));
                self.pack(y.split(places), from, worker);
            } else {
                self.pack(self.buffer(exchange.x), lanes.flat_map(|lane| routed.rows(me, lane)), worker);
            }
        }
    }

    /// Copies the rows of `x` at `from` one behind the other; workers take turns.
    ///
    /// # Safety
    /// As above.
    unsafe fn pack(&self, x: Rows<'_>, from: impl Iterator<Item = usize>, worker: &Worker<'_>) {
        // SAFETY: passed on.
        unsafe {
            let [sent, _] = self.view.exchanged(self.recorded, x.width());
            for (to, from) in from.enumerate().filter(|(to, _)| to % worker.count == worker.index) {
                sent.row_mut(to).copy_from_slice(x.row(from));
            }
        }
    }

    /// # Safety
    /// As above; only worker 0 calls it.
    pub(super) unsafe fn exchange_rows(&self, exchange: &RowExchange) -> Result<(), OpsError> {
        let (routed, me) = (self.routed(exchange), self.inputs.lane);
        let lanes = self.inputs.group_rows.len();
        let width = self.place(exchange.out).width;
        let mut counts = self.view.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.clear();
        // SAFETY: the other workers wait at the next meeting.
        unsafe {
            if exchange.combines {
                counts.extend((0..lanes).map(|lane| width * routed.choices(lane, me).count()));
                counts.extend((0..lanes).map(|lane| width * routed.choices(me, lane).count()));
                self.note_where_choices_come(routed);
            } else {
                counts.extend((0..lanes).map(|lane| width * routed.rows(me, lane).count()));
                counts.extend((0..lanes).map(|lane| width * routed.rows(lane, me).count()));
            }
            let (counts, due) = counts.split_at(lanes);
            let [sent, received] = self.view.exchanged(self.recorded, width);
            let mine = sent.slice(0..counts.iter().sum::<usize>() / width);
            let out = received.slice_mut(0..due.iter().sum::<usize>() / width);
            self.collectives.all_to_all(Comm::Group, exchange.capacity, mine, counts, due, out)
        }
    }

    /// For each choice of this lane's rows, the received row that is its output.
    ///
    /// # Safety
    /// As above.
    unsafe fn note_where_choices_come(&self, routed: Routed<'_>) {
        // SAFETY: passed on; no expert is computed between this phase and the next.
        unsafe {
            let places = self.view.choices(self.recorded).slots_mut();
            places[..self.granted() * routed.top_k()].fill(NOWHERE);
            let lanes = 0..routed.group_rows.len();
            let choices = lanes.flat_map(|lane| routed.choices(self.inputs.lane, lane));
            for (received, choice) in choices.enumerate() {
                places[choice] = received as u32;
            }
        }
    }

    /// # Safety
    /// As above.
    pub(super) unsafe fn place_rows(&self, exchange: &RowExchange, worker: &Worker<'_>) {
        let (routed, me) = (self.routed(exchange), self.inputs.lane);
        let lanes = 0..self.inputs.group_rows.len();
        // SAFETY: a row of `out` is one worker's; the phase before received them.
        unsafe {
            let out = self.buffer(exchange.out);
            let [_, received] = self.view.exchanged(self.recorded, out.width());
            let rows =
                lanes.flat_map(|lane| routed.rows(lane, me).map(move |row| lane * routed.stride + row));
            for (from, to) in rows.enumerate().filter(|(from, _)| from % worker.count == worker.index) {
                out.row_mut(to).copy_from_slice(received.row(from));
            }
        }
    }

    /// # Safety
    /// As above.
    pub(super) unsafe fn sum_choices(&self, exchange: &RowExchange, worker: &Worker<'_>) {
        let (routed, me) = (self.routed(exchange), self.inputs.lane);
        let top_k = routed.top_k();
        // SAFETY: these rows are this worker's; the phase before received what is summed.
        unsafe {
            let out = self.buffer(exchange.out);
            let places = self.view.choices(self.recorded).slots();
            let [_, received] = self.view.exchanged(self.recorded, out.width());
            for row in share(self.rows(exchange.out), worker.index, worker.count) {
                let (sum, route) = (out.row_mut(row), routed.routes.row(me * routed.stride + row));
                sum.fill(0.0);
                for (place, weight) in route[top_k..].iter().enumerate() {
                    let from = places[row * top_k + place];
                    if from != NOWHERE {
                        add_weighted(sum, *weight, received.row(from as usize));
                    }
                }
            }
        }
    }
}

/// Of a choice that nobody holds the expert of.
const NOWHERE: u32 = u32::MAX;
