//! Meetings of rank threads inside a recording, through shared memory.
//!
//! Each communicator is a [`Window`]: a cell for every member, twice. A member writes its cell, arrives,
//! waits for all, and reads everybody's cells; the two sets take turns, so a cell is written again only
//! after all have arrived at the collective after next, and so have read it. Lengths travel with
//! the data: members that disagree get an error and not each other's garbage.

use crate::link::Link;
use atom_group::{Meeting, WaitError};
use atom_ops::{Collectives, Comm, OpsError, Recording};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

/// The shared memory of one communicator.
pub(crate) struct Window {
    pub(crate) meeting: Meeting,
    cells: [Box<[Cell]>; CELL_SETS],
}

/// What one member brings to one collective.
type Cell = RwLock<Brought>;

#[derive(Default)]
struct Brought {
    values: Vec<f32>,
    /// Of an all-to-all, how many of the values are for each member, in order; else empty.
    counts: Vec<usize>,
}

/// One rank's place in a window.
struct Membership {
    window: Arc<Window>,
    member: usize,
    round: AtomicU64,
    /// To members on other hosts.
    link: Option<Arc<Link>>,
}

/// One rank's side of both communicators.
pub(crate) struct SharedCollectives {
    lane: Membership,
    group: Membership,
    patience_us: AtomicU64,
}

/// Bytes that a rank keeps for what comes to the collectives of a recording. `hosts` share the group:
/// what ranks elsewhere bring is kept here too.
pub fn collective_bytes(recording: &Recording, hosts: usize) -> usize {
    let largest = |comm| {
        let of_comm = recording.collectives().iter().filter(|collective| collective.comm == comm);
        of_comm.map(|collective| collective.elements).max().unwrap_or(0)
    };
    CELL_SETS * size_of::<f32>() * (largest(Comm::Lane) + hosts * largest(Comm::Group))
}

impl Window {
    pub(crate) fn new(members: usize, spins: u32) -> Self {
        let cells = || (0..members).map(|_| Cell::default()).collect();
        Self { meeting: Meeting::new(members, spins), cells: [cells(), cells()] }
    }

    fn cells(&self, round: u64) -> &[Cell] {
        &self.cells[round as usize % CELL_SETS]
    }

    /// What a member on another host brings.
    pub(crate) fn deliver(
        &self,
        member: usize,
        round: u64,
        values: impl Iterator<Item = f32>,
        counts: impl Iterator<Item = usize>,
    ) {
        {
            let mut cell = write(&self.cells(round)[member]);
            let Brought { values: kept, counts: kept_counts } = &mut *cell;
            kept.clear();
            kept.extend(values);
            kept_counts.clear();
            kept_counts.extend(counts);
        }
        self.meeting.arrive(member, round);
    }
}

impl SharedCollectives {
    /// `lane` and `group` with this rank's member number in each; members of the group that are on other
    /// hosts are reached by `link`.
    pub(crate) fn new(
        lane: (Arc<Window>, usize),
        group: (Arc<Window>, usize),
        link: Option<Arc<Link>>,
    ) -> Self {
        let join = |(window, member), link| Membership { window, member, round: AtomicU64::new(0), link };
        Self { lane: join(lane, None), group: join(group, link), patience_us: AtomicU64::new(0) }
    }

    /// Reserves room for the largest collective, so that steps allocate nothing.
    pub(crate) fn reserve(&self, comm: Comm, elements: usize) {
        let membership = self.membership(comm);
        for cells in &membership.window.cells {
            for (member, cell) in cells.iter().enumerate() {
                // Cells of members on other hosts are written here too.
                if member == membership.member || membership.link.is_some() {
                    let mut cell = write(cell);
                    cell.values.reserve(elements);
                    cell.counts.reserve(cells.len());
                }
            }
        }
    }

    /// How long the collectives of the next step wait.
    pub(crate) fn set_patience(&self, patience: Duration) {
        self.patience_us.store(patience.as_micros().min(u128::from(u64::MAX)) as u64, Ordering::Relaxed);
    }

    fn membership(&self, comm: Comm) -> &Membership {
        match comm {
            Comm::Lane => &self.lane,
            Comm::Group => &self.group,
        }
    }

    /// Brings `parts`, one behind the other, waits for all, and returns everybody's cells. `counts` says
    /// how many of the values are for whom, if not all are for everybody.
    fn meet<'a>(
        &self,
        comm: Comm,
        capacity: usize,
        parts: impl Iterator<Item = &'a [f32]>,
        counts: &[usize],
    ) -> Result<&[Cell], OpsError> {
        let Membership { window, member, round, link } = self.membership(comm);
        let number = round.load(Ordering::Relaxed) + 1;
        round.store(number, Ordering::Relaxed);
        let cells = window.cells(number);
        {
            let mut cell = write(&cells[*member]);
            cell.values.clear();
            cell.counts.clear();
            cell.counts.extend_from_slice(counts);
            parts.for_each(|part| cell.values.extend_from_slice(part));
            let brought = cell.values.len();
            assert!(brought <= capacity, "{brought} elements in a collective recorded for {capacity}");
            if let Some(link) = link {
                let sent = link.send_cell(*member, number, &cell.values, &cell.counts);
                sent.map_err(|error| OpsError::Collective(error.to_string()))?;
            }
        }
        window.meeting.arrive(*member, number);
        window.meeting.wait_all(number, self.patience()).map_err(|e| explain(window, comm, number, e))?;
        Ok(cells)
    }
}

impl Collectives for SharedCollectives {
    fn patience(&self) -> Duration {
        Duration::from_micros(self.patience_us.load(Ordering::Relaxed))
    }

    fn member(&self, comm: Comm) -> usize {
        self.membership(comm).member
    }

    fn members(&self, comm: Comm) -> usize {
        self.membership(comm).window.cells[0].len()
    }

    fn all_reduce(&self, comm: Comm, capacity: usize, x: &mut [f32]) -> Result<(), OpsError> {
        let cells = self.meet(comm, capacity, std::iter::once(&*x), &[])?;
        for (member, cell) in cells.iter().enumerate() {
            let cell = read(cell);
            expect_length(comm, member, cell.values.len(), x.len())?;
            add(x, &cell.values, member == 0);
        }
        Ok(())
    }

    fn all_gather(
        &self,
        comm: Comm,
        capacity: usize,
        mine: &[f32],
        counts: &[usize],
        stride: usize,
        out: &mut [f32],
    ) -> Result<(), OpsError> {
        let cells = self.meet(comm, capacity, std::iter::once(mine), &[])?;
        for (member, (cell, &count)) in cells.iter().zip(counts).enumerate() {
            let cell = read(cell);
            expect_length(comm, member, cell.values.len(), count)?;
            out[member * stride..member * stride + count].copy_from_slice(&cell.values);
        }
        Ok(())
    }

    fn reduce_scatter(
        &self,
        comm: Comm,
        capacity: usize,
        x: &[f32],
        counts: &[usize],
        stride: usize,
        mine: &mut [f32],
    ) -> Result<(), OpsError> {
        let me = self.member(comm);
        expect_length(comm, me, mine.len(), counts[me])?;
        // Only what is real travels: the rows of each lane, packed.
        let real =
            counts.iter().enumerate().map(|(member, &count)| &x[member * stride..member * stride + count]);
        let cells = self.meet(comm, capacity, real, &[])?;
        let (start, total) = (counts[..me].iter().sum::<usize>(), counts.iter().sum());
        for (member, cell) in cells.iter().enumerate() {
            let cell = read(cell);
            expect_length(comm, member, cell.values.len(), total)?;
            add(mine, &cell.values[start..start + counts[me]], member == 0);
        }
        Ok(())
    }

    fn all_to_all(
        &self,
        comm: Comm,
        capacity: usize,
        mine: &[f32],
        counts: &[usize],
        due: &[usize],
        out: &mut [f32],
    ) -> Result<(), OpsError> {
        let (me, total) = (self.member(comm), counts.iter().sum());
        expect_length(comm, me, mine.len(), total)?;
        expect_length(comm, me, out.len(), due.iter().sum())?;
        let cells = self.meet(comm, capacity, std::iter::once(mine), counts)?;
        let mut left = out;
        for (member, (cell, &due)) in cells.iter().zip(due).enumerate() {
            let cell = read(cell);
            // A member that came for another collective brings no counts.
            expect_length(comm, member, cell.counts.len(), counts.len())?;
            expect_length(comm, member, cell.counts[me], due)?;
            let start: usize = cell.counts[..me].iter().sum();
            let (part, rest) = left.split_at_mut(due);
            part.copy_from_slice(&cell.values[start..start + due]);
            left = rest;
        }
        Ok(())
    }
}

/// In member order on every member: the first one's values, then the others' added one by one.
fn add(sum: &mut [f32], values: &[f32], first: bool) {
    if first {
        sum.copy_from_slice(values);
    } else {
        sum.iter_mut().zip(values).for_each(|(s, v)| *s += v);
    }
}

fn expect_length(comm: Comm, member: usize, found: usize, expected: usize) -> Result<(), OpsError> {
    if found == expected {
        return Ok(());
    }
    Err(OpsError::Collective(format!(
        "member {member} of the {comm:?} communicator brought {found} elements, {expected} were due; ranks have diverged"
    )))
}

fn explain(window: &Window, comm: Comm, number: u64, error: WaitError) -> OpsError {
    let missing: Vec<_> =
        (0..window.meeting.seats()).filter(|&m| window.meeting.number(m) < number).collect();
    OpsError::Collective(format!(
        "collective {number} of the {comm:?} communicator: {error}; missing members {missing:?}"
    ))
}

/// A poisoned lock means that its writer panicked; the group is closed then, and the data is not used.
fn read(cell: &Cell) -> RwLockReadGuard<'_, Brought> {
    cell.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(cell: &Cell) -> RwLockWriteGuard<'_, Brought> {
    cell.write().unwrap_or_else(PoisonError::into_inner)
}

/// One is read while the other is written.
const CELL_SETS: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    const MEMBERS: usize = 3;

    /// Runs `body` on three threads, each with its side of one group communicator.
    fn together<T: Send>(body: impl Fn(usize, &SharedCollectives) -> T + Sync) -> Vec<T> {
        let group = Arc::new(Window::new(MEMBERS, 10));
        std::thread::scope(|scope| {
            let run = |member| {
                let lane = (Arc::new(Window::new(1, 10)), 0);
                let side = SharedCollectives::new(lane, (Arc::clone(&group), member), None);
                side.set_patience(Duration::from_secs(60));
                let body = &body;
                scope.spawn(move || body(member, &side))
            };
            let threads: Vec<_> = (0..MEMBERS).map(run).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn sums_are_the_same_bits_everywhere_and_in_member_order() {
        let values = [1e8f32, 1.0, -1e8];
        let sums = together(|member, side| {
            let mut x = [values[member]; 5];
            for _ in 0..100 {
                x = [values[member]; 5];
                side.all_reduce(Comm::Group, 5, &mut x).unwrap();
            }
            x
        });
        assert_eq!(sums, [[(1e8f32 + 1.0) - 1e8; 5]; MEMBERS]);
    }

    #[test]
    fn rows_of_uneven_members_are_gathered_and_scattered_back() {
        let counts = [2, 0, 3];
        let results = together(|member, side| {
            let mine: Vec<f32> = (0..counts[member]).map(|i| (10 * member + i) as f32).collect();
            let mut all = [f32::NAN; MEMBERS * 4];
            side.all_gather(Comm::Group, 4, &mine, &counts, 4, &mut all).unwrap();
            let mut back = vec![f32::NAN; counts[member]];
            side.reduce_scatter(Comm::Group, MEMBERS * 4, &all, &counts, 4, &mut back).unwrap();
            (mine, back)
        });
        for (mine, back) in results {
            let tripled: Vec<f32> = mine.iter().map(|v| v * 3.0).collect();
            assert_eq!(back, tripled);
        }
    }

    #[test]
    fn everybody_gets_what_the_others_have_for_it() {
        // Member m has m + 2 * to values for `to`: uneven, and none from 0 to 0.
        let count = |from: usize, to: usize| from + 2 * to;
        let results = together(|me, side| {
            let mine: Vec<f32> = (0..MEMBERS)
                .flat_map(|to| (0..count(me, to)).map(move |i| (100 * me + 10 * to + i) as f32))
                .collect();
            let (counts, due) = ([0, 1, 2].map(|to| count(me, to)), [0, 1, 2].map(|from| count(from, me)));
            let mut out = vec![f32::NAN; due.iter().sum()];
            side.all_to_all(Comm::Group, 18, &mine, &counts, &due, &mut out).unwrap();
            out
        });
        for (me, out) in results.iter().enumerate() {
            let expected: Vec<f32> = (0..MEMBERS)
                .flat_map(|from| (0..count(from, me)).map(move |i| (100 * from + 10 * me + i) as f32))
                .collect();
            assert_eq!(*out, expected, "member {me}");
        }
    }

    #[test]
    fn members_that_disagree_about_what_is_due_get_an_error() {
        let results = together(|me, side| {
            let due = [1, 1, 1 + usize::from(me == 1)];
            let mut out = vec![0.0; due.iter().sum()];
            side.all_to_all(Comm::Group, 3, &[0.0; 3], &[1, 1, 1], &due, &mut out)
        });
        let error = results[1].as_ref().unwrap_err().to_string();
        assert!(error.contains("member 2") && error.contains("diverged"), "{error}");
    }

    #[test]
    fn members_that_disagree_about_a_length_get_an_error() {
        let results =
            together(|member, side| side.all_reduce(Comm::Group, 8, &mut vec![0.0; 4 + member % 2]));
        assert!(
            results.iter().all(|r| matches!(r, Err(OpsError::Collective(text)) if text.contains("diverged")))
        );
    }

    #[test]
    fn a_member_that_never_comes_is_named() {
        let results = together(|member, side| {
            side.set_patience(Duration::from_millis(20));
            if member == 1 { Ok(()) } else { side.all_reduce(Comm::Group, 1, &mut [0.0]) }
        });
        let error = results[0].as_ref().unwrap_err().to_string();
        assert!(error.contains("missing members [1]"), "{error}");
    }
}
