//! A rank's meetings with others inside recordings: its windows, how their rounds are numbered, and what is said when
//! somebody does not come.

use crate::device::Stream;
use crate::error::CudaError;
use crate::launch::exchange::Meeting;
use crate::memory::Address;
use crate::peers::{COMMS, Place, Windows, index};
use crate::wait;
use crate::window::{Absence, Distress, Window};
use atom_ops::{Comm, OpsError};
use std::sync::Arc;
use std::time::Duration;

/// Of one rank; empty if it meets nobody.
pub(crate) struct Meetings {
    windows: Windows,
    distress: Option<Distress>,
    /// Rounds before the next step.
    rounds: [u32; COMMS],
    /// Most blocks of a collective: as many as find room beside what else runs. The same on all members, since a rank has
    /// others in one communicator at most. 0 before all have told where they are.
    blocks_max: u32,
}

impl Meetings {
    /// Takes windows whose sets have so many bytes, and tells the others of them.
    pub(crate) fn new(stream: &Stream, place: &Place, sets: &[usize; COMMS]) -> Result<Self, CudaError> {
        let mut windows = [None, None];
        for comm in [Comm::Lane, Comm::Group] {
            let members = place.members().of(comm);
            if members > 1 {
                let window = Window::new(stream, comm, (members, place.me(comm)), sets[index(comm)])?;
                windows[index(comm)] = Some(Arc::new(window));
            }
        }
        place.post(stream.device(), &windows);
        let meets = windows.iter().any(Option::is_some);
        let distress = if meets { Some(Distress::new(stream.device())?) } else { None };
        Ok(Self { windows, distress, rounds: [0; COMMS], blocks_max: 0 })
    }

    /// Once, when all have loaded.
    pub(crate) fn connect(&mut self, stream: &Stream, place: &Place) -> Result<(), CudaError> {
        if self.distress.is_some() && self.blocks_max == 0 {
            let processors = place.connect(stream, &self.windows)?;
            self.blocks_max = (processors / 2).max(1);
        }
        Ok(())
    }

    /// What a launcher needs for a collective with this number among those of the recording and `comm`.
    pub(crate) fn meeting(&self, comm: Comm, number: u32, header: Address) -> Result<Meeting, OpsError> {
        let (Some(window), Some(distress)) = (&self.windows[index(comm)], &self.distress) else {
            return Err(OpsError::Collective(format!(
                "a recording meets others of its {comm:?}, where nobody else is"
            )));
        };
        let (circle, distress) = (window.circle(), distress.address());
        Ok(Meeting { circle, header, distress, index: number, blocks_max: self.blocks_max })
    }

    /// First rounds of a step that has so many collectives. All members count alike, since all replay the same.
    pub(crate) fn begin(&mut self, collectives: [u32; COMMS]) -> [u32; COMMS] {
        let first = self.rounds;
        for (round, count) in self.rounds.iter_mut().zip(collectives) {
            *round = round.wrapping_add(count);
        }
        first
    }

    /// What the end of a step means: if a kernel waited for a member in vain, that is what is said. A step that is late is
    /// told to go on first, so that nothing of this process holds the GPU.
    pub(crate) fn check(&self, stream: &Stream, landed: Result<(), CudaError>) -> Result<(), OpsError> {
        if let Some(distress) = &self.distress {
            if landed.is_err() {
                distress.abort();
                let limits = (Duration::ZERO, ABORTED_WITHIN);
                let gone = wait::until("a step that was told to go on", limits, |_| stream.is_done());
                // What is said below says more; but nothing is given back to a GPU that still runs.
                let _ = gone.map_err(|error| stream.device().fail(error));
            }
            if let Some(absence) = distress.taken() {
                return Err(explain(&absence));
            }
        }
        landed.map_err(|error| stream.device().fail(error).into())
    }

    /// Whoever waits for others goes on at once.
    pub(crate) fn abort(&self) {
        self.distress.iter().for_each(Distress::abort);
    }
}

fn explain(&Absence { comm, index, member, aborted }: &Absence) -> OpsError {
    let when = if aborted {
        "had not come when the step was given up: it was waited for in"
    } else {
        "did not come to"
    };
    let who = match comm {
        Comm::Lane => "rank",
        Comm::Group => "lane",
    };
    OpsError::Collective(format!("{who} {member} of the {comm:?} {when} collective {index} of the step"))
}

/// A kernel that waits looks at the host's word many times in a millisecond.
const ABORTED_WITHIN: Duration = Duration::from_secs(1);
