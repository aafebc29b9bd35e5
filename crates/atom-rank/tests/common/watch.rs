//! A backend that checks what every step is given, writes down what it did, and lets a test interfere.
#![allow(dead_code, unreachable_pub, reason = "each test file is a crate that uses its own part")]

use crate::common::Setup;
use crate::common::kept::Kept;
use atom_base::{LaneId, SamplingParams, ScoredToken, Seat, TokenId, slot_of_last};
use atom_engine::Request;
use atom_ops::{
    Backend, Collective, CollectiveKind, Collectives, Comm, ExpertRows, LoadWeights, OpsError, Recording,
    Reserve, Slice, StepInputs, StepShape, Weight,
};
use atom_rank::Host;
use atom_weights::{Checkpoint, Tensor};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// One replay of one rank.
#[derive(Clone, Debug)]
pub struct Step {
    pub shape: StepShape,
    /// Operators of the recording, in order.
    pub ops: Arc<Vec<&'static str>>,
    /// Collectives that the rank came to, in order.
    pub met: Vec<Collective>,
    /// Real rows.
    pub rows: usize,
    /// Rows of each sequence that has any.
    pub spans: Vec<usize>,
    /// What every lane was granted.
    pub granted: Vec<u32>,
    pub experts: ExpertRows,
}

/// What all ranks did, by rank.
pub type Log = Arc<Mutex<Vec<Vec<Step>>>>;

/// Where in a rank's life a test interferes.
pub enum Moment<'a> {
    /// Before the backend has it; it may be exchanged for another one.
    Record(&'a mut Recording),
    Replay(&'a StepInputs<'a>),
    Results(&'a StepInputs<'a>, &'a mut [ScoredToken]),
}

/// What a test does there. A panic or an error in it is one of the rank.
pub type Twist = Box<dyn FnMut(Moment<'_>) -> Result<(), OpsError> + Send>;

/// A rank that is watched.
pub struct Watch {
    inner: Box<dyn Backend>,
    rank: usize,
    log: Log,
    bytes: Arc<Mutex<Vec<usize>>>,
    twist: Twist,
    reserve: Option<Reserve>,
    recordings: Vec<Recorded>,
    /// With the collectives that each came to.
    flights: VecDeque<(Kept, Vec<Collective>)>,
}

struct Recorded {
    shape: StepShape,
    ops: Arc<Vec<&'static str>>,
    collectives: Vec<Collective>,
}

/// A host whose ranks are all watched.
pub struct Watched {
    pub host: Host,
    pub log: Log,
    /// Bytes of expert matrices that each rank loaded.
    pub expert_bytes: Arc<Mutex<Vec<usize>>>,
}

/// Nothing.
pub fn leave_alone() -> Twist {
    Box::new(|_| Ok(()))
}

/// Starts a host with `twist(rank)` in every rank.
pub fn watched(
    setup: &Setup,
    checkpoint: &Arc<Checkpoint>,
    twist: impl Fn(u16) -> Twist + Send + Sync + 'static,
) -> Watched {
    let ranks = setup.mesh.ranks();
    let log: Log = Arc::new(Mutex::new(vec![Vec::new(); ranks]));
    let expert_bytes = Arc::new(Mutex::new(vec![0; ranks]));
    let (cpu, logs, bytes) = (setup.cpu(), Arc::clone(&log), Arc::clone(&expert_bytes));
    let backend = move |seat: &Seat| {
        Ok(Box::new(Watch {
            inner: cpu(seat)?,
            rank: seat.rank.0.into(),
            log: Arc::clone(&logs),
            bytes: Arc::clone(&bytes),
            twist: twist(seat.rank.0),
            reserve: None,
            recordings: Vec::new(),
            flights: VecDeque::new(),
        }) as Box<dyn Backend>)
    };
    Watched { host: setup.start_with(checkpoint, backend), log, expert_bytes }
}

impl Watched {
    /// Steps as all ranks saw them, `steps[i][rank]`, once the host has ended and every log is complete.
    /// Fails unless all ranks were in lockstep.
    pub fn steps(self) -> Vec<Vec<Step>> {
        self.host.shutdown().unwrap();
        let logs = self.log.lock().unwrap();
        let count = logs[0].len();
        assert!(logs.iter().all(|log| log.len() == count), "every rank takes every step");
        let steps: Vec<Vec<_>> =
            (0..count).map(|step| logs.iter().map(|log| log[step].clone()).collect()).collect();
        assert_lockstep(&steps);
        steps
    }
}

/// One bucket, one list of operators, one list of collectives, one view of the grants.
pub fn assert_lockstep(steps: &[Vec<Step>]) {
    for (index, ranks) in steps.iter().enumerate() {
        let first = &ranks[0];
        for (rank, step) in ranks.iter().enumerate() {
            assert_eq!(step.shape, first.shape, "step {index}: rank {rank} replays another bucket");
            assert_eq!(step.ops, first.ops, "step {index}: rank {rank} runs other operators");
            assert_eq!(step.met, first.met, "step {index}: rank {rank} came to other collectives");
            assert_eq!(step.granted, first.granted, "step {index}: rank {rank} sees other grants");
            if step.rows == 0 {
                assert_eq!(step.experts.chosen, 0, "step {index}: padding of rank {rank} was routed");
            }
        }
        assert!(ranks.iter().any(|step| step.rows > 0), "step {index}: nobody had a row");
    }
}

impl LoadWeights for Watch {
    fn load_matrix(&mut self, parts: &[Slice]) -> Result<Weight, OpsError> {
        self.inner.load_matrix(parts)
    }

    fn load_experts(&mut self, experts: &[Vec<Slice>]) -> Result<Weight, OpsError> {
        let bytes = |slice: &Slice| slice.rows.len() * slice.tensor.dtype.row_bytes(slice.cols.len());
        self.bytes.lock().unwrap()[self.rank] += experts.iter().flatten().map(bytes).sum::<usize>();
        self.inner.load_experts(experts)
    }

    fn load_vector(&mut self, parts: &[Slice]) -> Result<Weight, OpsError> {
        self.inner.load_vector(parts)
    }

    fn load_table(&mut self, table: &Tensor) -> Result<Weight, OpsError> {
        self.inner.load_table(table)
    }
}

impl Backend for Watch {
    fn reserve(&mut self, reserve: &Reserve) -> Result<(), OpsError> {
        self.reserve = Some(reserve.clone());
        self.inner.reserve(reserve)
    }

    fn record(&mut self, mut recording: Recording) -> Result<usize, OpsError> {
        (self.twist)(Moment::Record(&mut recording))?;
        self.recordings.push(Recorded {
            shape: recording.shape(),
            ops: Arc::new(recording.ops().iter().map(|op| op.name()).collect()),
            collectives: recording.collectives().to_vec(),
        });
        let number = self.inner.record(recording)?;
        assert_eq!(number + 1, self.recordings.len(), "recordings are numbered as they come");
        Ok(number)
    }

    fn forget(&mut self, _: usize) {
        panic!("a watched rank keeps its recordings");
    }

    fn launch(
        &mut self,
        recording: usize,
        inputs: &StepInputs<'_>,
        collectives: &dyn Collectives,
    ) -> Result<(), OpsError> {
        check_inputs(self.recordings[recording].shape, self.reserve.as_ref().expect("reserved"), inputs);
        (self.twist)(Moment::Replay(inputs))?;
        let met = Met { inner: collectives, list: Mutex::default() };
        self.inner.launch(recording, inputs, &met)?;
        self.flights.push_back((Kept::of(recording, inputs), met.list.into_inner().unwrap()));
        Ok(())
    }

    fn finish(&mut self, results: &mut [ScoredToken]) -> Result<(), OpsError> {
        let (kept, met) = self.flights.pop_front().expect("a step is in flight");
        let (recorded, inputs) = (&self.recordings[kept.recording], kept.inputs());
        assert_eq!(results.len(), inputs.out.len());
        self.inner.finish(results)?;
        (self.twist)(Moment::Results(&inputs, results))?;
        assert_eq!(met, recorded.collectives, "what was met is what was signed");
        self.log.lock().unwrap()[self.rank].push(Step {
            shape: recorded.shape,
            ops: Arc::clone(&recorded.ops),
            met,
            rows: inputs.tokens.len(),
            spans: inputs.spans.iter().map(|span| span.rows as usize).collect(),
            granted: inputs.group_rows.to_vec(),
            experts: self.inner.expert_rows(),
        });
        Ok(())
    }

    fn abandon(&mut self) {
        self.flights.clear();
        self.inner.abandon();
    }

    fn heeds_masks(&self) -> bool {
        self.inner.heeds_masks()
    }

    fn count_experts(&mut self, counts: bool) {
        self.inner.count_experts(counts);
    }

    fn expert_rows(&self) -> ExpertRows {
        self.inner.expert_rows()
    }
}

/// What holds of the inputs of every step, also of one without rows.
fn check_inputs(shape: StepShape, reserve: &Reserve, inputs: &StepInputs<'_>) {
    let StepInputs { tokens, positions, cache_rows, spans, out, slot_loads, tables, group_rows, lane } =
        *inputs;
    let rows = tokens.len();
    assert_eq!((positions.len(), cache_rows.len()), (rows, rows));
    assert_eq!(group_rows.len(), shape.lanes);
    assert!(group_rows.iter().all(|&granted| granted as usize <= shape.rows), "{group_rows:?} in {shape:?}");
    assert!(rows <= group_rows[lane] as usize && out.len() <= shape.out_rows, "{rows} rows in {shape:?}");
    let is_slot = |slot: atom_base::SlotId| (1..reserve.slots).contains(&(slot.0 as usize));
    let is_token = |&token: &TokenId| match slot_of_last(token) {
        Some(slot) => is_slot(slot),
        None => (token as usize) < reserve.vocab,
    };
    assert!(tokens.iter().all(is_token));
    assert!(slot_loads.iter().all(|load| is_slot(load.slot)), "the Sink has no state");
    let page_of = |position: u32| position as usize / reserve.page_size;
    let mut next = 0;
    for (index, span) in spans.iter().enumerate() {
        assert!(is_slot(span.slot) && span.rows > 0 && span.first_row == next, "{span:?} after row {next}");
        assert!(spans[..index].iter().all(|other| other.slot != span.slot), "{span:?} comes twice");
        next += span.rows;
        let pages = tables.pages(span.slot);
        for i in 0..span.rows {
            let (row, position) = ((span.first_row + i) as usize, span.start + i);
            assert_eq!(positions[row], position);
            let page = pages[page_of(position)] as usize;
            assert!((1..reserve.pages).contains(&page), "{span:?} writes page {page}");
            let place = page * reserve.page_size + position as usize % reserve.page_size;
            assert_eq!(cache_rows[row] as usize, place, "{span:?} writes elsewhere than it reads");
        }
        // What it writes nobody else reads.
        let end = span.start + span.rows - 1;
        let written = &pages[page_of(span.start)..=page_of(end)];
        for other in spans.iter().filter(|other| other.slot != span.slot) {
            let read = &tables.pages(other.slot)[..=page_of(other.start + other.rows - 1)];
            assert!(written.iter().all(|page| !read.contains(page)), "{span:?} writes into {other:?}");
        }
    }
    assert_eq!(next as usize, rows, "spans cover all rows");
    assert!(out.is_sorted_by(|a, b| a.row < b.row), "rows with logits in order, once");
    for row in out {
        assert_eq!(row.position, positions[row.row as usize] + 1);
        let within =
            |span: &&atom_base::Span| (span.first_row..span.first_row + span.rows).contains(&row.row);
        assert_eq!(spans.iter().find(within).map(|span| span.slot), Some(row.slot));
    }
}

/// Collectives that are written down as a rank comes to them.
struct Met<'a> {
    inner: &'a dyn Collectives,
    list: Mutex<Vec<Collective>>,
}

impl Met<'_> {
    fn note(&self, kind: CollectiveKind, comm: Comm, elements: usize) {
        self.list.lock().unwrap().push(Collective { kind, comm, elements });
    }
}

impl Collectives for Met<'_> {
    fn member(&self, comm: Comm) -> usize {
        self.inner.member(comm)
    }

    fn members(&self, comm: Comm) -> usize {
        self.inner.members(comm)
    }

    fn all_reduce(&self, comm: Comm, capacity: usize, x: &mut [f32]) -> Result<(), OpsError> {
        self.note(CollectiveKind::AllReduce, comm, capacity);
        self.inner.all_reduce(comm, capacity, x)
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
        self.note(CollectiveKind::AllGather, comm, capacity);
        self.inner.all_gather(comm, capacity, mine, counts, stride, out)
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
        self.note(CollectiveKind::ReduceScatter, comm, capacity);
        self.inner.reduce_scatter(comm, capacity, x, counts, stride, mine)
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
        self.note(CollectiveKind::AllToAll, comm, capacity);
        self.inner.all_to_all(comm, capacity, mine, counts, due, out)
    }
}

/// `len` tokens that depend on `seed` only; vocabularies of the tiny models have 512.
pub fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|i| atom_base::rng::philox([i, 0, 0, 0], [seed, 0])[0] % 500).collect()
}

/// Sampling that uses all state a request has.
pub fn penalised(seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 0.8,
        frequency_penalty: 0.4,
        repetition_penalty: 1.2,
        seed,
        logprobs: Some(2),
        ..SamplingParams::default()
    }
}

pub fn on(lane: u16, request: Request) -> Request {
    Request { lane: Some(LaneId(lane)), ..request }
}
