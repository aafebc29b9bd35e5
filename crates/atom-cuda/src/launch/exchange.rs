//! Collectives of ranks of one process by peer memory, and what room each needs.
//!
//! A collective is one kernel on every member; it ends when all members' have begun. So members launch the same ones in the
//! same order, with the same sizes, and all of them must find room on their GPUs at the same time: `blocks_max` of a
//! [`Meeting`] is small where ranks share a GPU. Until all have come, nothing else of a member's stream runs. Calls of the
//! driver that wait for a GPU (loading, allocating and freeing) don't belong between the launches of members that
//! share it.

use crate::element::Element;
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::route::TOP_K_MAX;
use crate::launch::rows::{RowExtent, bytes, halves};
use crate::memory::Address;
use crate::module::{Arg, Launch};
use crate::window::{BLOCKS_MAX, Circle, MEMBERS_MAX};

/// Where and as whose a collective takes place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meeting {
    /// This rank's place.
    pub circle: Circle,
    /// The step's.
    pub header: Address,
    /// Of this rank's [`crate::Distress`].
    pub distress: Address,
    /// Number of the collective among those of its recording and its communicator, from 0.
    pub index: u32,
    /// Most blocks: the same on every member.
    pub blocks_max: u32,
}

/// Which experts the rows of all lanes chose, and who holds them.
#[derive(Clone, Copy, Debug)]
pub struct Choosing<'a> {
    /// f32 `[group rows, 2 top_k]`, gathered; see [`atom_ops::Op::Route`].
    pub routes: Address,
    /// Choices of a row.
    pub top_k: usize,
    /// Lane `l` holds experts `owners[l] .. owners[l + 1]`, from 0. `[lanes + 1]`
    pub owners: &'a [usize],
}

impl Meeting {
    /// `Meeting` of kernels/exchange.cuh.
    fn words(&self) -> [u32; 14] {
        let Circle { window, members, me, set_bytes, .. } = self.circle;
        let [window_low, window_high] = halves(window);
        let [header_low, header_high] = halves(self.header);
        let [distress_low, distress_high] = halves(self.distress);
        let [set_low, set_high] = halves(Address(set_bytes as u64));
        let (flags, sets) = (self.circle.flags_at() as u32, self.circle.sets_at() as u32);
        let round_word = self.circle.round_word() as u32;
        [
            window_low,
            window_high,
            header_low,
            header_high,
            distress_low,
            distress_high,
            set_low,
            set_high,
            flags,
            sets,
            members as u32,
            me as u32,
            round_word,
            self.index,
        ]
    }

    /// A thread for every piece of `rows`, up to the most blocks; `needed` bytes must be there.
    fn launch(&self, (rows, width, element): (usize, usize, Element), needed: usize) -> Launch {
        let Circle { set_bytes, members, .. } = self.circle;
        assert!(needed <= set_bytes, "a collective that needs {needed} bytes of sets that have {set_bytes}");
        // Kernels number pieces by 32 bits, and go on from one by all threads of a grid.
        let pieces = rows * row_bytes(width, element) / PIECE;
        assert!(members * pieces <= PIECES_MAX, "{rows} rows of {width} {element:?} for {members} members");
        Launch::new(blocks(pieces, self.blocks_max), THREADS as u32).overlapping()
    }

    fn check_lanes(&self, granted: &RowExtent) {
        let Circle { members, .. } = self.circle;
        assert!(granted.lanes == members, "rows of {} lanes among {members}", granted.lanes);
    }
}

/// Blocks for so many pieces, of sizes that are the same on all members.
fn blocks(pieces: usize, blocks_max: u32) -> u32 {
    let most = (blocks_max as usize).clamp(1, BLOCKS_MAX);
    pieces.div_ceil(THREADS).clamp(1, most) as u32
}

/// Bytes of a row in a window.
fn row_bytes(width: usize, element: Element) -> usize {
    (width * element.bytes()).next_multiple_of(PIECE)
}

/// Bytes of a set for [`gather_rows`], [`scatter_sum`] and [`dispatch_rows`] of a group's rows, and for [`all_reduce`] with
/// the capacity of its extent as `rows`: `members` slots of as many.
pub fn rows_bytes(members: usize, rows: usize, width: usize, element: Element) -> usize {
    members * rows * row_bytes(width, element)
}

/// Bytes of a set for [`gather_columns`].
pub fn columns_bytes(out_rows: usize, widths: &[usize], element: Element) -> usize {
    rows_bytes(widths.len(), out_rows, widest(widths), element)
}

/// Bytes of a set for [`combine_rows`] of outputs of `element`: a slot for each choice of a lane's rows.
pub fn combine_bytes(lane_rows: usize, top_k: usize, width: usize, element: Element) -> usize {
    lane_rows * top_k * row_bytes(width, element)
}

/// See [`atom_ops::Op::GatherRows`]: `x` is `[rows, width]` of this lane, `out` has the rows of `granted`, which is the
/// group's.
///
/// # Safety
/// Arrays have these sizes, are of `element`, begin on 16 bytes, and don't overlap. All members are connected, alive, and
/// launch the same, see the module; their rounds are those of no earlier collective.
pub unsafe fn gather_rows(
    queue: &Queue<'_>,
    meeting: &Meeting,
    element: Element,
    x: Address,
    width: usize,
    out: Address,
    granted: RowExtent,
) -> Result<(), CudaError> {
    meeting.check_lanes(&granted);
    let needed = rows_bytes(granted.lanes, granted.lane_rows, width, element);
    let launch = meeting.launch((granted.lane_rows, width, element), needed);
    let (meeting, extent) = (meeting.words(), granted.words());
    let args = [bytes(&meeting), x.into(), int(width), out.into(), bytes(&extent)];
    // SAFETY: the caller's.
    unsafe { queue.launch(SOURCE, &format!("gather_rows_{}", element.suffix()), launch, &args) }
}

/// See [`atom_ops::Op::ScatterSum`]: `x` has the rows of `granted`, which is the group's, `out` is `[rows, width]` of this
/// lane. Elements are those of `x` and `out`; sums are of f32 and rounded once.
///
/// # Safety
/// As for [`gather_rows`].
pub unsafe fn scatter_sum(
    queue: &Queue<'_>,
    meeting: &Meeting,
    (element, sums): (Element, Element),
    x: Address,
    width: usize,
    out: Address,
    granted: RowExtent,
) -> Result<(), CudaError> {
    meeting.check_lanes(&granted);
    let needed = rows_bytes(granted.lanes, granted.lane_rows, width, element);
    let launch = meeting.launch((granted.lane_rows, width, element), needed);
    let (meeting, extent) = (meeting.words(), granted.words());
    let args = [bytes(&meeting), x.into(), int(width), out.into(), bytes(&extent)];
    let name = format!("scatter_sum_{}_{}", element.suffix(), sums.suffix());
    // SAFETY: the caller's.
    unsafe { queue.launch(SOURCE, &name, launch, &args) }
}

/// See [`atom_ops::Op::AllReduce`]: `x` has the rows of `extent`, whose counts are the same on every member. Sums are of f32
/// and rounded once.
///
/// # Safety
/// As for [`gather_rows`].
pub unsafe fn all_reduce(
    queue: &Queue<'_>,
    meeting: &Meeting,
    element: Element,
    x: Address,
    width: usize,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let needed = rows_bytes(meeting.circle.members, extent.capacity(), width, element);
    let launch = meeting.launch((extent.capacity(), width, element), needed);
    let (meeting, extent) = (meeting.words(), extent.words());
    let args = [bytes(&meeting), x.into(), int(width), bytes(&extent)];
    // SAFETY: the caller's.
    unsafe { queue.launch(SOURCE, &format!("all_reduce_{}", element.suffix()), launch, &args) }
}

/// See [`atom_ops::Op::GatherColumns`]: `x` is `[rows, widths[me]]`, `out` `[rows, sum of widths]`, with the rows of `extent`,
/// which has one lane and the same count on every member.
///
/// # Safety
/// As for [`gather_rows`].
pub unsafe fn gather_columns(
    queue: &Queue<'_>,
    meeting: &Meeting,
    element: Element,
    x: Address,
    widths: &[usize],
    out: Address,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let Circle { members, .. } = meeting.circle;
    assert!(widths.len() == members && extent.lanes == 1, "{widths:?} of {members} members, {extent:?}");
    let needed = columns_bytes(extent.lane_rows, widths, element);
    let launch = meeting.launch((extent.lane_rows, widest(widths), element), needed);
    let mut edges = [0; MEMBERS_MAX + 1];
    for (member, width) in widths.iter().enumerate() {
        edges[member + 1] = edges[member] + *width as u32;
    }
    let slot_pieces = row_bytes(widest(widths), element) / PIECE;
    let (meeting, extent) = (meeting.words(), extent.words());
    let args = [bytes(&meeting), x.into(), bytes(&edges), int(slot_pieces), out.into(), bytes(&extent)];
    // SAFETY: the caller's.
    unsafe { queue.launch(SOURCE, &format!("gather_columns_{}", element.suffix()), launch, &args) }
}

/// See [`atom_ops::Op::DispatchRows`]: `x` is `[rows, width]` of this lane, `out` has the rows of `granted`, which is the
/// group's; rows of it that chose nobody held here are not written.
///
/// # Safety
/// As for [`gather_rows`]; the routes have the rows of `granted`.
pub unsafe fn dispatch_rows(
    queue: &Queue<'_>,
    meeting: &Meeting,
    element: Element,
    (x, width): (Address, usize),
    choosing: &Choosing<'_>,
    out: Address,
    granted: RowExtent,
) -> Result<(), CudaError> {
    meeting.check_lanes(&granted);
    let needed = rows_bytes(granted.lanes, granted.lane_rows, width, element);
    let launch = meeting.launch((granted.lane_rows, width, element), needed);
    let owners = meeting.owners(choosing);
    let (meeting, extent) = (meeting.words(), granted.words());
    let args = [
        bytes(&meeting),
        x.into(),
        int(width),
        choosing.routes.into(),
        int(choosing.top_k),
        bytes(&owners),
        out.into(),
        bytes(&extent),
    ];
    // SAFETY: the caller's.
    unsafe { queue.launch(SOURCE, &format!("dispatch_rows_{}", element.suffix()), launch, &args) }
}

/// See [`atom_ops::Op::CombineRows`]: `y` is `[group rows, top_k * width]`, with what experts held here made of a row in the
/// slots of its choices, as kernels of experts leave it; `out` is `[rows, width]` of this lane. Elements are
/// those of `y` and `out`. Sums are f32 from 0 by fused multiplications, in the order of choices, rounded once: those of a
/// rank that computes all experts one by one and rounds their outputs to the type of `y`.
///
/// # Safety
/// As for [`dispatch_rows`].
pub unsafe fn combine_rows(
    queue: &Queue<'_>,
    meeting: &Meeting,
    (element, sums): (Element, Element),
    (y, width): (Address, usize),
    choosing: &Choosing<'_>,
    out: Address,
    granted: RowExtent,
) -> Result<(), CudaError> {
    meeting.check_lanes(&granted);
    let needed = combine_bytes(granted.lane_rows, choosing.top_k, width, element);
    let launch = meeting.launch((granted.lane_rows, width, element), needed);
    let owners = meeting.owners(choosing);
    let (meeting, extent) = (meeting.words(), granted.words());
    let args = [
        bytes(&meeting),
        y.into(),
        int(width),
        choosing.routes.into(),
        int(choosing.top_k),
        bytes(&owners),
        out.into(),
        bytes(&extent),
    ];
    let name = format!("combine_rows_{}_{}", element.suffix(), sums.suffix());
    // SAFETY: the caller's.
    unsafe { queue.launch(SOURCE, &name, launch, &args) }
}

impl Meeting {
    /// `Edges` of the kernels.
    fn owners(&self, choosing: &Choosing<'_>) -> [u32; MEMBERS_MAX + 1] {
        let (members, owners) = (self.circle.members, choosing.owners);
        let is_whole = owners.len() == members + 1 && owners[0] == 0 && owners.is_sorted();
        assert!(is_whole && choosing.top_k <= TOP_K_MAX, "{choosing:?} of {members} members");
        let mut edges = [0; MEMBERS_MAX + 1];
        edges.iter_mut().zip(owners).for_each(|(edge, owner)| *edge = *owner as u32);
        edges
    }
}

fn widest(widths: &[usize]) -> usize {
    widths.iter().copied().max().unwrap_or(0)
}

fn int<'a>(value: usize) -> Arg<'a> {
    (value as u32).into()
}

/// The file of kernels.
const SOURCE: &str = "exchange";

/// `EXCHANGE_THREADS` of the kernels.
const THREADS: usize = 512;

/// What rows in a window consist of, in bytes.
const PIECE: usize = 16;

/// What 32 bits can number, with room for the steps of a grid behind the last one.
const PIECES_MAX: usize = 1 << 31;

#[cfg(test)]
mod tests {
    use super::*;
    use atom_ops::Comm;

    #[test]
    fn grids_are_of_sizes_that_all_members_share() {
        assert_eq!([0, 1, 512, 513, 1 << 20].map(|pieces| blocks(pieces, 66)), [1, 1, 1, 2, 66]);
        assert_eq!([0, 1, 66, 1000].map(|most| blocks(1 << 20, most)), [1, 1, 66, 128]);
        let circle =
            Circle { window: Address(1 << 40), comm: Comm::Group, members: 4, me: 0, set_bytes: 1 << 20 };
        let launch = |me, header| {
            let circle = Circle { window: Address(header), me, ..circle };
            let meeting =
                Meeting { circle, header: Address(header), distress: Address(8), index: 3, blocks_max: 33 };
            meeting.launch((8, 4096, Element::BF16), 4 * 8 * 8192).grid
        };
        assert!((0..4).all(|me| launch(me, 1 << me) == [8, 1, 1]));
    }

    #[test]
    fn rows_in_windows_begin_on_pieces() {
        let widths = [1, 3, 4, 5, 8, 9, 4096];
        assert_eq!(widths.map(|width| row_bytes(width, Element::F32)), [16, 16, 16, 32, 32, 48, 16384]);
        assert_eq!(widths.map(|width| row_bytes(width, Element::BF16)), [16, 16, 16, 16, 16, 32, 8192]);
        assert_eq!(rows_bytes(3, 10, 9, Element::BF16), 3 * 10 * 32);
        assert_eq!(columns_bytes(10, &[4, 9, 0], Element::F32), 3 * 10 * 48);
        assert_eq!(combine_bytes(10, 6, 4, Element::F32), 10 * 6 * 16);
    }

    #[test]
    fn a_meetings_words_are_those_of_the_kernels() {
        let circle = Circle {
            window: Address(0x1_0000_0002),
            comm: Comm::Lane,
            members: 3,
            me: 2,
            set_bytes: 0x3_0000_0080,
        };
        let meeting =
            Meeting { circle, header: Address(4), distress: Address(5 << 32), index: 6, blocks_max: 7 };
        let (flags, sets) = (circle.flags_at() as u32, circle.sets_at() as u32);
        assert_eq!(meeting.words(), [2, 1, 4, 0, 0, 5, 0x80, 3, flags, sets, 3, 2, 9, 6]);
        let meeting = Meeting { circle: Circle { comm: Comm::Group, ..circle }, ..meeting };
        assert_eq!(meeting.words()[12], 10);
    }

    #[test]
    #[should_panic(expected = "needs 262144 bytes of sets that have 262016")]
    fn a_collective_larger_than_its_window_is_no_launch() {
        let circle =
            Circle { window: Address(128), comm: Comm::Group, members: 4, me: 0, set_bytes: 262_016 };
        let meeting = Meeting { circle, header: Address(128), distress: Address(8), index: 0, blocks_max: 1 };
        let _ = meeting.launch((8, 4096, Element::BF16), 262_144);
    }
}
