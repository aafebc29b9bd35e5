//! Device memory by which ranks of one process meet inside kernels, and words by which host and kernels tell each other
//! that a meeting failed.

use crate::device::{Device, Stream};
use crate::error::CudaError;
use crate::mapped::Mapped;
use crate::memory::{Address, DeviceMem};
use atom_ops::Comm;
use std::sync::atomic::Ordering;

/// One rank's memory for one communicator: what the others write, and where they are. kernels/exchange.cuh says how
/// it is used.
///
/// Rounds of a communicator never come again and never go back: a step's header has the first one, and the next step's
/// lies behind all that this one's recording has, whether they were reached or not.
pub struct Window {
    memory: DeviceMem,
    circle: Circle,
}

/// A rank's place in a communicator, for launchers. Those of all members differ in `window` and `me` only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Circle {
    /// This rank's [`Window`].
    pub window: Address,
    /// Who meets: which word of a step's header has the first round.
    pub comm: Comm,
    /// How many.
    pub members: usize,
    /// This rank's number among them.
    pub me: usize,
    /// Bytes of each of the two sets.
    pub set_bytes: usize,
}

impl Window {
    /// Most members of a communicator.
    pub const MEMBERS_MAX: usize = MEMBERS_MAX;

    /// Takes the memory, for collectives that need so many bytes at the most (see [`crate::launch::exchange`]), and waits
    /// until it is ready for the others' words.
    ///
    /// # Panics
    /// If there are more than [`Self::MEMBERS_MAX`] members, or `me` is none of them.
    pub fn new(
        stream: &Stream,
        comm: Comm,
        (members, me): (usize, usize),
        set_bytes: usize,
    ) -> Result<Self, CudaError> {
        assert!(me < members && members <= MEMBERS_MAX, "member {me} of {members}");
        let set_bytes = set_bytes.next_multiple_of(LINE);
        let memory = DeviceMem::new(stream.device(), Self::bytes(members, set_bytes))?;
        let circle = Circle { window: memory.address(), comm, members, me, set_bytes };
        // No round is near this number for long enough to be taken for it: see `wait_for` in kernels/exchange.cuh.
        memory.fill(stream, 0, circle.sets_at(), NEVER)?;
        stream.wait()?;
        Ok(Self { memory, circle })
    }

    /// Bytes of device memory that it takes.
    pub fn bytes(members: usize, set_bytes: usize) -> usize {
        sets_at(members) + SETS * set_bytes.next_multiple_of(LINE)
    }

    /// What the other members need to know.
    pub fn address(&self) -> Address {
        self.memory.address()
    }

    /// For launchers.
    pub fn circle(&self) -> Circle {
        self.circle
    }

    /// Tells the kernels of this rank where all members' windows are, in the order of members. After that they may be launched:
    /// here, and on all members once all are connected. Every window must outlive the others' kernels.
    pub fn connect(&self, stream: &Stream, windows: &[Address]) -> Result<(), CudaError> {
        let Circle { members, me, window, .. } = self.circle;
        assert!(windows.len() == members && windows[me] == window, "the windows of {members} members");
        let table: Vec<u8> = windows.iter().flat_map(|address| address.0.to_le_bytes()).collect();
        self.memory.write(stream, TABLE, &table)
    }

    /// For checks: this rank, which had given up, may speak again. None of its kernels may be on its way.
    pub fn forgive(&self, stream: &Stream) -> Result<(), CudaError> {
        self.memory.fill(stream, GAVE_UP, size_of::<u32>(), NEVER)?;
        stream.wait()
    }

    /// For checks: queues NaN for both sets, since what is not brought hereafter must not matter. Nobody may be about to write there.
    pub fn poison(&self, stream: &Stream) -> Result<(), CudaError> {
        let start = self.circle.sets_at();
        self.memory.fill(stream, start, self.memory.bytes() - start, 0xff)
    }
}

impl Circle {
    /// Where the sets begin, in bytes from the start of a window.
    pub(crate) fn sets_at(&self) -> usize {
        sets_at(self.members)
    }

    /// Where the flags begin, likewise.
    pub(crate) fn flags_at(&self) -> usize {
        flags_at(self.members)
    }

    /// The word of a step's header that has the first round.
    pub(crate) fn round_word(&self) -> usize {
        match self.comm {
            Comm::Lane => LANE_ROUND,
            Comm::Group => GROUP_ROUND,
        }
    }
}

fn flags_at(members: usize) -> usize {
    TABLE + (members * size_of::<Address>()).next_multiple_of(LINE)
}

fn sets_at(members: usize) -> usize {
    flags_at(members) + members * BLOCKS_MAX * LINE
}

/// Words of a rank in the host's memory, for all of its communicators: by them the host ends the waits of its kernels, and
/// these say that they gave up. Whoever gave up goes on at once, with anything, and so do all later kernels, until
/// [`clear`](Self::clear): a step that ended so has no results.
pub struct Distress {
    memory: Mapped,
}

// SAFETY: all that is done with the memory is loads and stores of atomic words.
unsafe impl Sync for Distress {}

/// Why kernels of a rank went on without another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absence {
    /// Of which communicator.
    pub comm: Comm,
    /// Number of the collective, as its launcher got it.
    pub index: u32,
    /// Who had not come. There may be others.
    pub member: usize,
    /// The host ended the wait; else the step's patience did.
    pub aborted: bool,
}

impl Distress {
    /// All is well.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        Ok(Self { memory: Mapped::new(device, LINE)? })
    }

    /// For launchers.
    pub fn address(&self) -> Address {
        self.memory.address()
    }

    /// Ends the wait of the kernel that waits now, within microseconds, and of those that come.
    pub fn abort(&self) {
        self.store(ABORT, 1);
    }

    /// What a kernel said when it gave up: the first one since [`clear`](Self::clear).
    pub fn taken(&self) -> Option<Absence> {
        let why = self.load(WHY);
        if why == 0 {
            return None;
        }
        let comm = if self.load(OF) as usize == LANE_ROUND { Comm::Lane } else { Comm::Group };
        let member = self.load(MISSING) as usize - 1;
        Some(Absence { comm, index: self.load(INDEX), member, aborted: why == BY_HOST })
    }

    /// For checks: all is well again, see [`Window::forgive`] too. No kernel of the rank's collectives may be on its way.
    pub fn clear(&self) {
        [ABORT, WHY, INDEX, MISSING, OF].iter().for_each(|&word| self.store(word, 0));
    }

    fn load(&self, word: usize) -> u32 {
        self.memory.word(word * size_of::<u32>()).load(Ordering::Acquire)
    }

    fn store(&self, word: usize, value: u32) {
        self.memory.word(word * size_of::<u32>()).store(value, Ordering::Release);
    }
}

/// [`Window::MEMBERS_MAX`]
pub(crate) const MEMBERS_MAX: usize = 64;
/// Most blocks of a collective: each has a flag for every member.
pub(crate) const BLOCKS_MAX: usize = 128;

/// One is read while the other is written.
const SETS: usize = 2;
/// A line of a cache, and the first one of a window, which is its owner's.
const LINE: usize = 128;
/// Where a window says in which round its rank gave up.
const GAVE_UP: usize = 0;
/// Where a window's table begins.
const TABLE: usize = LINE;
/// Fills flags that nobody has stored.
const NEVER: u8 = 0x80;

/// Places of a step's header, see `Header` in kernels/prelude.cuh.
const LANE_ROUND: usize = 9;
const GROUP_ROUND: usize = 10;

/// Words of `Distress` in kernels/exchange.cuh.
const ABORT: usize = 0;
const WHY: usize = 1;
const INDEX: usize = 2;
const MISSING: usize = 3;
const OF: usize = 4;
/// A value of `Why` there.
const BY_HOST: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_windows_parts_lie_apart_and_on_lines() {
        for members in [1, 2, 16, 17, 64] {
            let (flags, sets) = (flags_at(members), sets_at(members));
            assert!(TABLE + 8 * members <= flags && flags + members * BLOCKS_MAX * LINE <= sets);
            assert!(flags.is_multiple_of(LINE) && sets.is_multiple_of(LINE), "{members}");
            for set_bytes in [0, 1, 128, 1000] {
                let bytes = Window::bytes(members, set_bytes);
                assert!(bytes >= sets + SETS * set_bytes && bytes < sets + SETS * (set_bytes + LINE));
            }
        }
        assert_eq!(Window::bytes(8, 1 << 20), 128 + 128 + (8 * 128 * 128) + (2 << 20));
    }
}
