//! Collectives between threads of a test: everyone posts, everyone reads.

use atom_ops::{Collectives, Comm, OpsError};
use std::sync::{Barrier, Mutex};

/// One member's side of the group's and the lane's communicator, which have the same members.
pub struct Meeting<'a> {
    pub member: usize,
    pub room: Option<&'a Meetings>,
    /// The call, counted from 0, that fails.
    pub fails_at: Option<usize>,
    /// Every call panics.
    pub panics: bool,
    pub calls: Mutex<Vec<&'static str>>,
}

/// Where the members meet.
pub struct Meetings {
    posts: Vec<Mutex<Vec<f32>>>,
    /// What of a post goes to whom, if it isn't the same for all.
    counts: Vec<Mutex<Vec<usize>>>,
    barrier: Barrier,
}

impl Meetings {
    pub fn new(members: usize) -> Self {
        Self {
            posts: (0..members).map(|_| Mutex::default()).collect(),
            counts: (0..members).map(|_| Mutex::default()).collect(),
            barrier: Barrier::new(members),
        }
    }
}

impl<'a> Meeting<'a> {
    pub fn alone() -> Self {
        Self { member: 0, room: None, fails_at: None, panics: false, calls: Mutex::default() }
    }

    pub fn new(member: usize, room: &'a Meetings) -> Self {
        Self { member, room: Some(room), fails_at: None, panics: false, calls: Mutex::default() }
    }

    /// Everyone's post, in member order.
    fn exchange(&self, call: &'static str, capacity: usize, mine: &[f32]) -> Result<Vec<Vec<f32>>, OpsError> {
        let mut calls = self.calls.lock().unwrap();
        calls.push(call);
        if self.panics {
            // Not by the macro, whose message would land in the test's output.
            std::panic::resume_unwind(Box::new(call));
        }
        if self.fails_at == Some(calls.len() - 1) {
            return Err(OpsError::Collective(format!("call {} was made to fail", calls.len() - 1)));
        }
        let Some(room) = self.room else { return Ok(vec![mine.to_vec()]) };
        assert!(call == "reduce_scatter" || mine.len() <= capacity, "{call}: {} of {capacity}", mine.len());
        *room.posts[self.member].lock().unwrap() = mine.to_vec();
        room.barrier.wait();
        let all = room.posts.iter().map(|post| post.lock().unwrap().clone()).collect();
        room.barrier.wait();
        Ok(all)
    }
}

impl Collectives for Meeting<'_> {
    fn member(&self, _comm: Comm) -> usize {
        self.member
    }

    fn members(&self, _comm: Comm) -> usize {
        self.room.map_or(1, |room| room.posts.len())
    }

    fn all_reduce(&self, _comm: Comm, capacity: usize, x: &mut [f32]) -> Result<(), OpsError> {
        let all = self.exchange("all_reduce", capacity, x)?;
        for (i, x) in x.iter_mut().enumerate() {
            *x = all.iter().map(|post| post[i]).sum();
        }
        Ok(())
    }

    fn all_gather(
        &self,
        _comm: Comm,
        capacity: usize,
        mine: &[f32],
        counts: &[usize],
        stride: usize,
        out: &mut [f32],
    ) -> Result<(), OpsError> {
        assert_eq!(mine.len(), counts[self.member]);
        for (member, post) in self.exchange("all_gather", capacity, mine)?.iter().enumerate() {
            assert_eq!(post.len(), counts[member]);
            out[member * stride..][..post.len()].copy_from_slice(post);
        }
        Ok(())
    }

    fn reduce_scatter(
        &self,
        _comm: Comm,
        capacity: usize,
        x: &[f32],
        counts: &[usize],
        stride: usize,
        mine: &mut [f32],
    ) -> Result<(), OpsError> {
        assert_eq!(mine.len(), counts[self.member]);
        let all = self.exchange("reduce_scatter", capacity, x)?;
        for (i, mine) in mine.iter_mut().enumerate() {
            *mine = all.iter().map(|post| post[self.member * stride + i]).sum();
        }
        Ok(())
    }

    fn all_to_all(
        &self,
        _comm: Comm,
        capacity: usize,
        mine: &[f32],
        counts: &[usize],
        due: &[usize],
        out: &mut [f32],
    ) -> Result<(), OpsError> {
        assert_eq!((mine.len(), out.len()), (counts.iter().sum(), due.iter().sum()));
        if let Some(room) = self.room {
            *room.counts[self.member].lock().unwrap() = counts.to_vec();
        }
        let all = self.exchange("all_to_all", capacity, mine)?;
        let mut left = out;
        for (member, post) in all.iter().enumerate() {
            let brought =
                self.room.map_or_else(|| counts.to_vec(), |room| room.counts[member].lock().unwrap().clone());
            assert_eq!(brought[self.member], due[member], "from {member} to {}", self.member);
            let start: usize = brought[..self.member].iter().sum();
            let (to, rest) = left.split_at_mut(due[member]);
            to.copy_from_slice(&post[start..start + due[member]]);
            left = rest;
        }
        if let Some(room) = self.room {
            // Nobody posts again before all have read.
            room.barrier.wait();
        }
        Ok(())
    }
}
