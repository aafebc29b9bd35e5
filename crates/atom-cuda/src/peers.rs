//! Ranks of one process that meet inside recordings: where each finds the others' windows.

use crate::choices::AllChoices;
use crate::device::{Device, Stream};
use crate::error::CudaError;
use crate::window::Window;
use atom_base::{Mesh, Seat};
use atom_ops::Comm;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What ranks of one process tell each other when they have loaded.
#[derive(Default)]
pub struct Peers {
    posts: Mutex<Vec<Option<Post>>>, // [ranks]
    posted: Condvar,
    choices: AllChoices,
}

/// A rank's windows. They stay until the last rank is gone: a peer may still be writing.
#[derive(Clone)]
struct Post {
    device: Device,
    windows: Windows,
}

/// A window of a rank for each communicator that has others in it.
pub(crate) type Windows = [Option<Arc<Window>>; COMMS];

/// A rank's place among those that it meets.
#[derive(Clone)]
pub struct Place {
    peers: Arc<Peers>,
    rank: usize,
    circles: [Circle; COMMS],
}

/// Who meets in a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Circle {
    /// Numbers of ranks, in order of members.
    ranks: Vec<usize>,
    me: usize,
}

/// How many ranks meet in each communicator of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Members {
    /// Ranks of its lane.
    pub lane: usize,
    /// Lanes of its group.
    pub group: usize,
}

impl Place {
    /// Of the rank at `seat`; all ranks of the mesh have the same `peers`.
    pub fn new(peers: &Arc<Peers>, mesh: &Mesh, seat: &Seat) -> Self {
        let others = |meets: &dyn Fn(&Seat) -> bool| {
            let ranks: Vec<Seat> = mesh.seats().filter(meets).collect();
            let me = ranks.iter().position(|other| other.rank == seat.rank).expect("a rank meets itself");
            Circle { ranks: ranks.iter().map(|other| usize::from(other.rank.0)).collect(), me }
        };
        let lane = others(&|other| other.lane == seat.lane);
        // Ranks at the same place of their lanes, each with its lane's rows.
        let group = others(&|other| other.group == seat.group && other.rank_in_lane == seat.rank_in_lane);
        Self { peers: Arc::clone(peers), rank: usize::from(seat.rank.0), circles: [lane, group] }
    }

    /// Of a rank that meets nobody.
    pub fn alone() -> Self {
        let seat = Mesh::SINGLE.seats().next().expect("a mesh has ranks");
        Self::new(&Arc::default(), &Mesh::SINGLE, &seat)
    }

    /// Which algorithms products got: the same for all.
    pub(crate) fn choices(&self) -> &AllChoices {
        &self.peers.choices
    }

    /// See [`Members`].
    pub fn members(&self) -> Members {
        let [lane, group] = [0, 1].map(|comm: usize| self.circles[comm].ranks.len());
        Members { lane, group }
    }

    /// This rank's number in a communicator.
    pub(crate) fn me(&self, comm: Comm) -> usize {
        self.circles[index(comm)].me
    }

    /// Says where this rank's windows are.
    pub(crate) fn post(&self, device: &Device, windows: &Windows) {
        let mut posts = self.peers.posts.lock().unwrap_or_else(PoisonError::into_inner);
        if posts.len() <= self.rank {
            posts.resize(self.rank + 1, None);
        }
        posts[self.rank] = Some(Post { device: device.clone(), windows: windows.clone() });
        self.peers.posted.notify_all();
    }

    /// Waits until all have said where theirs are, and lets this rank's GPU write there. Returns the fewest multiprocessors
    /// that one of them may count on.
    pub(crate) fn connect(&self, stream: &Stream, windows: &Windows) -> Result<u32, CudaError> {
        let mut processors = stream.device().properties().processors;
        for (comm, window) in windows.iter().enumerate() {
            let Some(window) = window else { continue };
            let mut addresses = Vec::new();
            for &rank in &self.circles[comm].ranks {
                let post = self.wait_for(rank)?;
                stream.device().reach(&post.device)?;
                let (mine, theirs) = (stream.device().properties(), post.device.properties());
                if comm == index(Comm::Lane)
                    && (&mine.name, mine.processors) != (&theirs.name, theirs.processors)
                {
                    return Err(CudaError::Unsupported(format!(
                        "ranks of a lane compute the same rows and must add them in one order, so on GPUs of one kind: this one has \
                         {}, {} multiprocessors, rank {rank} has {}, {}",
                        mine.name, mine.processors, theirs.name, theirs.processors
                    )));
                }
                processors = processors.min(theirs.processors);
                let set_bytes = window.circle().set_bytes;
                let theirs =
                    post.windows[comm].as_ref().filter(|theirs| theirs.circle().set_bytes == set_bytes);
                let theirs = theirs.ok_or_else(|| {
                    CudaError::Unsupported(format!(
                        "rank {rank} has no window of {set_bytes} bytes a set, as this one has"
                    ))
                })?;
                addresses.push(theirs.address());
            }
            window.connect(stream, &addresses)?;
        }
        Ok(processors)
    }

    fn wait_for(&self, rank: usize) -> Result<Post, CudaError> {
        let end = Instant::now() + POST_WITHIN;
        let mut posts = self.peers.posts.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(post) = posts.get(rank).cloned().flatten() {
                return Ok(post);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(CudaError::Unsupported(format!(
                    "rank {rank} did not say within {POST_WITHIN:?} where its memory is"
                )));
            }
            let waited = self.peers.posted.wait_timeout(posts, left);
            posts = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Members {
    /// Of a rank that meets nobody.
    pub const ALONE: Self = Self { lane: 1, group: 1 };

    /// In one communicator.
    pub fn of(&self, comm: Comm) -> usize {
        match comm {
            Comm::Lane => self.lane,
            Comm::Group => self.group,
        }
    }
}

/// Communicators by number.
pub(crate) const COMMS: usize = 2;

/// A communicator's number.
pub(crate) fn index(comm: Comm) -> usize {
    match comm {
        Comm::Lane => 0,
        Comm::Group => 1,
    }
}

/// Ranks record only when all have loaded.
const POST_WITHIN: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;
    use atom_base::MeshArgs;

    fn circles(tp: u16, dp: u16, dp_attention: bool) -> Vec<[(Vec<usize>, usize); COMMS]> {
        let mesh = Mesh::new(MeshArgs { tp, dp, dp_attention }).unwrap();
        let peers = Arc::default();
        let of = |seat| Place::new(&peers, &mesh, &seat).circles.map(|c| (c.ranks, c.me));
        mesh.seats().map(of).collect()
    }

    #[test]
    fn ranks_meet_those_of_their_lane_and_their_group() {
        // TP 2, twice.
        let found = circles(2, 2, false);
        assert_eq!(found[0], [(vec![0, 1], 0), (vec![0], 0)]);
        assert_eq!(found[3], [(vec![2, 3], 1), (vec![3], 0)]);
        // DTP 2, twice: one group of four lanes.
        let found = circles(2, 2, true);
        assert_eq!(found[2], [(vec![2], 0), (vec![0, 1, 2, 3], 2)]);
        assert_eq!(Place::alone().members(), Members::ALONE);
    }
}
