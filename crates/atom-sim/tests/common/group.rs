//! A whole group in virtual time: the real schedulers and the real settling.

use super::{MODEL, config, request};
use atom_base::{RequestId, SamplingParams};
use atom_engine::SchedulerConfig;
use atom_group::{Alignment, Facts, GroupState, GroupStep, Lattice, LatticeArgs, Policy, Prefill};
use atom_sim::{CostModel, Lane, Member};
use std::sync::Arc;

pub(crate) const COST: CostModel = CostModel { step_us: 2000, row_us: 100, pair_ns: 10 };

/// Members in lock step with a clock.
pub(crate) struct Group {
    pub(crate) members: Vec<Member>,
    pub(crate) lattice: Arc<Lattice>,
    pub(crate) now_us: u64,
    pub(crate) steps: u64,
    pub(crate) held: u64,
}

impl Group {
    /// A group that has recorded every bucket.
    pub(crate) fn new(lanes: usize, config: &SchedulerConfig, policy: Policy) -> Self {
        let args = LatticeArgs {
            rows_max: config.rows_max as u32,
            max_num_seqs: config.max_num_seqs as u32,
            ..LatticeArgs::default()
        };
        let lattice = Arc::new(Lattice::new(&args).unwrap());
        let state = GroupState::new(Arc::clone(&lattice), lanes, true).with_policy(policy);
        let member = |place| Member::new(place, Lane::new(config.clone(), MODEL), state.clone());
        let mut group =
            Self { members: (0..lanes).map(member).collect(), lattice, now_us: 0, steps: 0, held: 0 };
        while group.step() != GroupStep::Park {}
        group.now_us = 0;
        group
    }

    pub(crate) fn submit(&mut self, lane: usize, id: u64, prompt: usize, max_tokens: u32) {
        let now_ms = self.now_us / 1000;
        let request = request(id, prompt, max_tokens, SamplingParams::greedy());
        self.members[lane].lane.submit(request, now_ms).unwrap();
    }

    pub(crate) fn facts(&self) -> Vec<Facts> {
        self.members.iter().map(|m| m.facts(self.now_us / 1000)).collect()
    }

    pub(crate) fn step(&mut self) -> GroupStep {
        let facts = self.facts();
        self.settled(&facts)
    }

    pub(crate) fn settled(&mut self, facts: &[Facts]) -> GroupStep {
        let steps: Vec<_> = self.members.iter_mut().map(|m| m.settle(facts).unwrap()).collect();
        assert!(steps.iter().all(|step| *step == steps[0]));
        self.members.iter_mut().for_each(|m| m.plan(&steps[0]).unwrap());
        if let GroupStep::Step { bucket, note, .. } = steps[0] {
            let pairs = self.members.iter().map(|m| CostModel::pairs(m.lane.plan())).max();
            let cost_us = COST.of(bucket, pairs.unwrap());
            self.now_us += cost_us;
            self.steps += 1;
            self.held += u64::from(matches!(note.prefill, Prefill::Held { .. }));
            self.members.iter_mut().for_each(|m| m.took(cost_us as u32));
        }
        self.members.iter_mut().for_each(|m| m.execute(&steps[0], false).unwrap());
        steps[0]
    }

    pub(crate) fn tokens(&self, lane: usize, id: u64) -> usize {
        self.members[lane].lane.ledger().account(RequestId(id)).map_or(0, |a| a.tokens)
    }

    pub(crate) fn prefills(&self, lane: usize) -> bool {
        self.members[lane].lane.plan().spans.iter().any(|span| span.rows > 1)
    }

    pub(crate) fn unfinished(&self) -> usize {
        self.members.iter().map(|m| m.lane.ledger().live().len()).sum()
    }
}

pub(crate) fn long(rows_max: usize) -> SchedulerConfig {
    // Nothing is shared, so that every prompt is computed.
    SchedulerConfig { prefix_cache: false, ..config(1025, 16, 8, rows_max) }
}

pub(crate) fn aligned(alignment: Alignment) -> Policy {
    Policy { alignment: Some(alignment), ..Policy::default() }
}
