//! Collectives, and what room they need in windows.

use super::{Scene, equal};
use crate::buffers::elements;
use crate::element::Element;
use crate::launch::exchange::{self, Choosing, Meeting};
use crate::launch::rows::RowExtent;
use crate::peers::{Members, index};
use atom_ops::{Buf, Comm, Op, OpsError, Recording};

impl Scene<'_> {
    /// SAFETY of all launches here: as for `op`; besides, all members record and replay the same list, so their collectives
    /// are the same ones in the same order, and a step's header has rounds that no earlier step had.
    pub(super) fn exchange(&self, op: &Op) -> Result<(), OpsError> {
        let queue = &self.with.queue;
        match *op {
            Op::AllReduce { x, comm } => {
                let (meeting, element) = (self.meeting(comm)?, self.element(x));
                let (width, extent) = (self.spec(x).width, self.real(x));
                // SAFETY: see above.
                unsafe { exchange::all_reduce(queue, &meeting, element, self.at(x), width, extent) }?;
            }
            Op::GatherRows { x, out } => {
                self.same_type(x, out)?;
                let (meeting, element) = (self.meeting(Comm::Group)?, self.element(x));
                let (width, granted) = (self.spec(x).width, self.real(out));
                let (x, out) = (self.at(x), self.at(out));
                // SAFETY: see above.
                unsafe { exchange::gather_rows(queue, &meeting, element, x, width, out, granted) }?;
            }
            Op::ScatterSum { x, out } => {
                let (meeting, elements) = (self.meeting(Comm::Group)?, (self.element(x), self.element(out)));
                let (width, granted) = (self.spec(x).width, self.real(x));
                let (x, out) = (self.at(x), self.at(out));
                // SAFETY: see above.
                unsafe { exchange::scatter_sum(queue, &meeting, elements, x, width, out, granted) }?;
            }
            Op::GatherColumns { x, ref widths, out } => {
                self.same_type(x, out)?;
                let (meeting, element) = (self.meeting(Comm::Lane)?, self.element(x));
                equal("columns", self.spec(out).width, widths.iter().sum())?;
                equal("columns of this rank", self.spec(x).width, widths[meeting.circle.me])?;
                let extent = self.real(x);
                let (x, out) = (self.at(x), self.at(out));
                // SAFETY: see above.
                unsafe { exchange::gather_columns(queue, &meeting, element, x, widths, out, extent) }?;
            }
            Op::DispatchRows { x, routes, ref owners, out } => {
                self.same_type(x, out)?;
                let (meeting, element) = (self.meeting(Comm::Group)?, self.element(x));
                let (choosing, granted) = self.choosing(routes, owners);
                let (x, out) = ((self.at(x), self.spec(x).width), self.at(out));
                // SAFETY: see above.
                unsafe { exchange::dispatch_rows(queue, &meeting, element, x, &choosing, out, granted) }?;
            }
            Op::CombineRows { y, routes, ref owners, out } => {
                let (meeting, elements) = (self.meeting(Comm::Group)?, (self.element(y), self.element(out)));
                let ((choosing, granted), width) = (self.choosing(routes, owners), self.spec(out).width);
                let (y, out) = ((self.at(y), width), self.at(out));
                // SAFETY: see above.
                unsafe { exchange::combine_rows(queue, &meeting, elements, y, &choosing, out, granted) }?;
            }
            _ => unreachable!("called for collectives"),
        }
        Ok(())
    }

    /// The next collective of a communicator.
    fn meeting(&self, comm: Comm) -> Result<Meeting, OpsError> {
        let mut met = self.met.get();
        let number = met[index(comm)];
        met[index(comm)] += 1;
        self.met.set(met);
        self.with.reserved.meetings.meeting(comm, number, self.header())
    }

    fn choosing<'a>(&self, routes: Buf, owners: &'a [usize]) -> (Choosing<'a>, RowExtent) {
        let top_k = self.spec(routes).width / 2;
        (Choosing { routes: self.at(routes), top_k, owners }, self.real(routes))
    }
}

/// Bytes of a set that the collectives of a recording need, by communicator. `element` is the type of activations.
pub(crate) fn set_bytes(recording: &Recording, members: Members, element: Element) -> Vec<(Comm, usize)> {
    let (elements, shape) = (elements(recording, element), recording.shape());
    let of = |buf: Buf| (recording.buffers()[usize::from(buf.0)], elements[usize::from(buf.0)]);
    let rows = |comm, buf: Buf, rows: usize| {
        let (spec, element) = of(buf);
        (comm, exchange::rows_bytes(members.of(comm), rows, spec.width, element))
    };
    let needed = recording.ops().iter().filter_map(|op| match *op {
        Op::AllReduce { x, comm } => Some(rows(comm, x, of(x).0.capacity_rows(&shape))),
        Op::GatherRows { x, .. } | Op::DispatchRows { x, .. } | Op::ScatterSum { x, .. } => {
            Some(rows(Comm::Group, x, shape.rows))
        }
        Op::GatherColumns { x, ref widths, .. } => {
            Some((Comm::Lane, exchange::columns_bytes(shape.out_rows, widths, of(x).1)))
        }
        Op::CombineRows { y, routes, out, .. } => {
            let top_k = of(routes).0.width / 2;
            Some((Comm::Group, exchange::combine_bytes(shape.rows, top_k, of(out).0.width, of(y).1)))
        }
        _ => None,
    });
    needed.collect()
}
