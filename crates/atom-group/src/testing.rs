//! A group whose lanes all tell the truth, for this crate's tests.

use crate::*;
use std::sync::Arc;

pub(crate) const SIGNATURE: u64 = 0xfeed;

/// Says what lanes want, settles for every one of them apart, and insists that they agree.
pub(crate) struct World {
    pub(crate) state: GroupState,
    /// A second lane's copy, which has seen the same facts and nothing else.
    twin: GroupState,
    last: Option<Bucket>,
    /// µs of a replay: for every one, and for each row of its bucket.
    pub(crate) cost: (u32, u32),
}

impl World {
    pub(crate) fn of(lattice: Lattice, lanes: usize, record_all: bool, policy: Policy) -> Self {
        let state = GroupState::new(Arc::new(lattice), lanes, record_all).with_policy(policy);
        Self { twin: state.clone(), state, last: None, cost: (1000, 0) }
    }

    pub(crate) fn new(lanes: usize, rows_max: u32, record_all: bool, policy: Policy) -> Self {
        Self::of(lattice(rows_max, rows_max.min(64), None), lanes, record_all, policy)
    }

    /// A world past its start-up recordings, all of them.
    pub(crate) fn ready(lanes: usize, rows_max: u32, policy: Policy) -> Self {
        Self::new(lanes, rows_max, true, policy).started()
    }

    pub(crate) fn started(mut self) -> Self {
        while !matches!(self.step(&vec![(0, 0); self.state.lanes]), GroupStep::Park) {}
        self
    }

    pub(crate) fn facts(&self, wants: &[(u32, u32)]) -> Vec<Facts> {
        let (step_us, row_us) = self.cost;
        let fact = |&(decode_rows, prefill_rows): &(u32, u32)| Facts {
            step: self.state.next_step(),
            state_hash: self.state.hash(),
            last_signature: SIGNATURE,
            decode_rows,
            prefill_rows,
            replay_us: self.last.map_or(0, |bucket| step_us + row_us * bucket.rows() as u32),
            ..Facts::default()
        };
        wants.iter().map(fact).collect()
    }

    pub(crate) fn settle(&mut self, facts: &[Facts]) -> GroupStep {
        let (state, step) = settle(&self.state, facts).unwrap();
        let (twin, its_step) = settle(&self.twin, facts).unwrap();
        assert_eq!((twin.hash(), its_step), (state.hash(), step), "equal facts, equal steps");
        (self.state, self.twin) = (state, twin);
        self.last = match step {
            GroupStep::Step { bucket, .. } => Some(bucket),
            _ => None,
        };
        step
    }

    pub(crate) fn step(&mut self, wants: &[(u32, u32)]) -> GroupStep {
        let facts = self.facts(wants);
        self.settle(&facts)
    }

    pub(crate) fn bucket(&mut self, wants: &[(u32, u32)]) -> usize {
        self.replayed(wants).0.rows()
    }

    pub(crate) fn replayed(&mut self, wants: &[(u32, u32)]) -> (Bucket, Vec<Grant>, StepNote) {
        match self.step(wants) {
            GroupStep::Step { bucket, grants, note } => (bucket, grants.as_slice().to_vec(), note),
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) fn lattice(rows_max: u32, max_num_seqs: u32, sizes: Option<Vec<u32>>) -> Lattice {
    Lattice::new(&LatticeArgs { rows_max, max_num_seqs, sizes, ..LatticeArgs::default() }).unwrap()
}

/// What must hold of every step, whatever the policy and whatever lanes want.
pub(crate) fn check(wants: &[(u32, u32)], bucket: Bucket, grants: &[Grant]) {
    assert_eq!(grants.len(), wants.len());
    for (&(decode, prefill), grant) in wants.iter().zip(grants) {
        assert_eq!(grant.decode_rows, decode, "decode rows always ride: {wants:?} {grants:?}");
        assert!(grant.prefill_rows <= prefill, "more than wanted: {wants:?} {grants:?}");
        assert!(grant.rows() as usize <= bucket.rows(), "{bucket:?} does not hold {grant:?}");
    }
    assert!(grants.iter().any(|g| g.rows() > 0), "nothing granted: {wants:?}");
}
