//! Load on a group without devices: the shipped scheduler, balancer and settling in virtual time, in
//! which steps take what a [`StepCost`](crate::StepCost) says.

mod args;
mod arrivals;
mod report;
mod requests;

pub use args::{Length, LoadArgs, LoadError, Recorded, Shape, Source};
pub use report::{LoadCounts, LoadReport};

use crate::cost::StepWork;
use arrivals::{Arrival, Arrivals};
use atom_base::{RequestId, SamplingParams, ScoredToken, StopParams};
use atom_engine::{Balancer, LaneLoad, Plan, Request, Scheduler};
use atom_group::{Bucket, Facts, Grants, GroupState, GroupStep, Lattice, StepNote, settle};
use requests::Requests;
use std::sync::Arc;

/// Runs the load until every request has ended. Equal arguments give equal reports.
pub fn run_load(args: &LoadArgs) -> Result<LoadReport, LoadError> {
    args.check()?;
    let mut group = Group::new(args)?;
    group.start();
    group.run();
    Ok(group.conclude())
}

/// Lanes in lockstep. They conclude alike from equal facts, so one state is everybody's.
struct Group<'a> {
    args: &'a LoadArgs,
    state: GroupState,
    lanes: Vec<Lane>,
    facts: Vec<Facts>, // [lanes]
    balancer: Balancer,
    arrivals: Arrivals,
    next: Option<Arrival>,
    requests: Requests,
    sampling: Arc<SamplingParams>,
    last_signature: u64,
    last_replay_us: u32,
    now_us: f64,
    report: LoadReport,
}

struct Lane {
    scheduler: Scheduler,
    plan: Plan,
}

impl<'a> Group<'a> {
    fn new(args: &'a LoadArgs) -> Result<Self, LoadError> {
        let lattice = Arc::new(Lattice::new(&args.lattice)?);
        let mut config = args.scheduler.clone();
        config.rows_max = args.lattice.rows_max as usize;
        config.max_num_seqs = args.lattice.max_num_seqs as usize;
        let table = config.max_model_len.div_ceil(config.page_size);
        let lane = |_| Lane {
            plan: Plan::with_capacity(config.rows_max, config.max_num_seqs, table),
            scheduler: Scheduler::new(config.clone()),
        };
        let edges = lattice.buckets().iter().map(|bucket| bucket.rows()).collect();
        let page_size = config.prefix_cache.then_some(config.page_size);
        let full = config.max_num_seqs + args.queue_max;
        let mut arrivals = Arrivals::new(args.source.clone(), args.seed, args.seconds * 1e6);
        Ok(Self {
            args,
            state: GroupState::new(lattice, args.lanes, args.record_all).with_policy(args.policy),
            lanes: (0..args.lanes).map(lane).collect(),
            facts: vec![Facts::default(); args.lanes],
            balancer: Balancer::new(args.balance, edges, page_size, full),
            next: arrivals.next(),
            arrivals,
            requests: Requests::new(args.lanes),
            sampling: Arc::default(),
            last_signature: 0,
            last_replay_us: 0,
            now_us: 0.0,
            report: LoadReport::new(args),
        })
    }

    /// Recordings that are made before anybody is served: the clock starts after them.
    fn start(&mut self) {
        while !matches!(self.settle(), GroupStep::Park) {}
        (self.now_us, self.last_replay_us) = (0.0, 0);
    }

    fn run(&mut self) {
        loop {
            self.deliver();
            match self.settle() {
                GroupStep::Exit(cause) => unreachable!("nobody asked to leave: {cause:?}"),
                GroupStep::Record(_) => {
                    self.now_us += self.args.record_us as f64;
                    self.report.counts.records += u64::from(self.report.counts_at(self.now_us));
                }
                GroupStep::Step { bucket, grants, note } => self.step(bucket, grants, note),
                GroupStep::Park => match &self.next {
                    Some(next) => self.now_us = self.now_us.max(next.at_us),
                    None => return,
                },
            }
        }
    }

    /// Places what has come.
    fn deliver(&mut self) {
        while let Some(arrival) = self.next.take_if(|arrival| arrival.at_us <= self.now_us) {
            self.next = self.arrivals.next();
            self.submit(arrival);
        }
    }

    /// The door and the balancer, as a host has them.
    fn submit(&mut self, arrival: Arrival) {
        let Arrival { at_us, prompt, output } = arrival;
        let full = self.args.lattice.max_num_seqs as usize + self.args.queue_max;
        let loads = self.requests.loads();
        let has_room = |load: &LaneLoad| load.requests < full;
        let placed = self.balancer.place(loads, &prompt, None, None);
        let Some(placement) = placed.filter(|p| has_room(&loads[usize::from(p.lane.0)])) else {
            return self.requests.refuse();
        };
        let id = RequestId(self.requests.open(at_us, prompt.len(), output, placement));
        let stop = StopParams { max_tokens: output as u32, stop_token_ids: Box::default(), ignore_eos: true };
        let sampling = Arc::clone(&self.sampling);
        let request = Request { id, prompt, sampling, stop, lane: None, session: None, grammar: None };
        let lane = &mut self.lanes[usize::from(placement.lane.0)];
        lane.scheduler.submit(request, (at_us / 1000.0) as u64, &mut self.requests);
    }

    fn settle(&mut self) -> GroupStep {
        let now_ms = (self.now_us / 1000.0) as u64;
        let (step, state_hash) = (self.state.next_step(), self.state.hash());
        for (facts, lane) in self.facts.iter_mut().zip(&self.lanes) {
            *facts = Facts {
                step,
                state_hash,
                last_signature: self.last_signature,
                replay_us: self.last_replay_us,
                ..lane.scheduler.want(now_ms).facts()
            };
        }
        let (state, step) = settle(&self.state, &self.facts).expect("equal lanes don't diverge");
        self.state = state;
        if let GroupStep::Record(bucket) | GroupStep::Step { bucket, .. } = step {
            self.last_signature = 1 + bucket.index() as u64;
        }
        step
    }

    fn step(&mut self, bucket: Bucket, grants: Grants, note: StepNote) {
        let mut work = StepWork::new(self.lanes.len(), bucket.rows());
        let mut prefilling = 0;
        for (lane, facts) in self.lanes.iter_mut().zip(&self.facts) {
            let grant = grants.of(facts);
            lane.scheduler.commit(grant, &mut lane.plan);
            work.add(&lane.plan);
            prefilling += u64::from(lane.plan.rows() > grant.decode_rows as usize);
        }
        let us = self.args.cost.step_us(&work).max(STEP_US_MIN);
        self.now_us += us;
        self.last_replay_us = us.clamp(1.0, f64::from(u32::MAX)) as u32;
        let counts = self.report.counts_at(self.now_us);
        self.requests.begin_step(self.now_us);
        for lane in &mut self.lanes {
            let results = self.requests.results(lane.plan.out.len());
            lane.scheduler.apply(&lane.plan, &results, &mut self.requests);
            self.requests.take_back(results);
        }
        self.requests.tell(&mut self.report);
        if counts {
            self.report.count(&work, us, prefilling, note);
        }
        for _ in 0..self.requests.ended_in_step() {
            if let Some(arrival) = self.arrivals.after_one_ended(self.now_us) {
                self.submit(arrival);
            }
        }
    }

    /// Everybody ended, and was given what was asked for.
    fn conclude(mut self) -> LoadReport {
        let counters = || self.lanes.iter().map(|lane| lane.scheduler.counters());
        assert!(self.lanes.iter().all(|lane| lane.scheduler.is_idle()), "a group with work parks");
        let generated: u64 = counters().map(|c| c.generated_tokens).sum();
        let counts = &mut self.report.counts;
        counts.preemptions = counters().map(|c| c.preempted).sum();
        counts.cached_tokens = counters().map(|c| c.cached_tokens).sum();
        self.requests.conclude(counts);
        assert_eq!(
            counts.generated_tokens, generated,
            "tokens that were generated and not told, or told twice"
        );
        self.report
    }
}

/// A step that costs nothing would let no time pass.
const STEP_US_MIN: f64 = 1.0;

/// A token that no prompt begins with, and no other step gave.
fn token(count: u64) -> ScoredToken {
    ScoredToken::bare((count % TOKENS) as u32 + (1 << 24))
}

/// Tokens of prompts are below 2^24, those of answers above.
const TOKENS: u64 = 1 << 30;
