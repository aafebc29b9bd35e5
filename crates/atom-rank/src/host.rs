//! The process side: starts the ranks, takes requests, answers questions, stops everything.

use crate::link::Link;
use crate::mail::Mail;
use crate::outbox::{Each, EventSink, StepSink};
use crate::probe::Probe;
use crate::recent::StepRecord;
use crate::shared::HostShared;
use crate::starter::{MakeBackend, Starter};
use crate::stats::{Health, LaneStats};
use crate::supervisor::{RankThread, RankThreads, Report, Supervisor};
use crate::wish::Wish;
use atom_base::{LaneId, Mesh, RequestId, Seat};
use atom_engine::{
    Balancer, EngineError, EngineLimits, LoadBalance, Placement, Refusal, Request, SchedulerConfig,
};
use atom_group::{Bucket, GroupState, Lattice, Letter, Patience, Policy};
use atom_model::{ExpertLayout, Model, ModelError};
use atom_ops::{Backend, KvDType, OpsError, Recording, Reserve, StepShape};
use atom_weights::Checkpoint;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// What a host runs.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Ranks, lanes, groups.
    pub mesh: Mesh,
    /// How experts are spread over the ranks of a group.
    pub experts: ExpertLayout,
    /// Connections to the other hosts that the lanes are dealt to; none if all are here.
    pub link: Option<Arc<Link>>,
    /// Legal step shapes.
    pub lattice: Arc<Lattice>,
    /// Every lane's scheduler.
    pub scheduler: SchedulerConfig,
    /// Element type of the KV cache.
    pub kv_dtype: KvDType,
    /// Requests that may wait in a lane.
    pub queue_max: usize,
    /// How requests are dealt to lanes.
    pub load_balance: LoadBalance,
    /// Times that a group that lost a rank may form again with a new one.
    pub rank_restarts_max: u32,
    /// Record every bucket before serving.
    pub record_all: bool,
    /// Steps that may be in flight when the next one is planned: 0, or 1 where a device computes beside the
    /// rank's thread.
    pub depth: usize,
    /// Keep no recording: every step makes its own, by the same code.
    pub enforce_eager: bool,
    /// A step that is no replay fails its rank, whatever the cause.
    pub fail_on_eager: bool,
    /// Threads that compute masks for requests with a grammar, for all lanes together.
    pub mask_threads: usize,
    /// How long a step waits for such a mask before its request fails; never longer than half of the step's
    /// own deadline.
    pub mask_wait: Duration,
    /// Make recordings that can count the different experts of a step, for [`Host::count_experts`].
    pub count_experts: bool,
    /// Fill what nothing may read with NaN, see [`Reserve::poison`].
    pub poison: bool,
    /// Looks before a waiting rank sleeps; 0 where ranks outnumber cores.
    pub spins: u32,
    /// Deadlines of steps.
    pub patience: Patience,
    /// What a group may decide otherwise than to run everything at once.
    pub policy: Policy,
    /// Write what every group's lanes say and decide in each step to this file.
    pub step_trace: Option<PathBuf>,
}

impl HostConfig {
    /// Steps that may be in flight when the next one is planned. A recording that is made for one step
    /// can't be given up while it runs.
    pub(crate) fn steps_ahead(&self) -> usize {
        if self.enforce_eager { 0 } else { self.depth }
    }

    /// The step shape that a bucket stands for.
    pub fn shape(&self, bucket: &Bucket) -> StepShape {
        StepShape { rows: bucket.rows(), out_rows: bucket.out_rows(), lanes: self.mesh.lanes_per_group() }
    }

    /// What the rank at `seat`, with its share of the model, will ask of its backend: for plans too.
    pub fn reserve(&self, model: &Model, seat: &Seat) -> Reserve {
        let scheduler = &self.scheduler;
        Reserve {
            top: self.shape(&self.lattice.top()),
            layers: model.config().layers,
            attention: Arc::clone(model.attention()),
            page_size: scheduler.page_size,
            pages: scheduler.pages,
            pages_per_sequence: scheduler.max_model_len.div_ceil(scheduler.page_size),
            kv_dtype: self.kv_dtype,
            slots: scheduler.max_num_seqs + 1,
            vocab: model.config().vocab_size,
            // A step that is planned ahead begins with tokens that every rank must know.
            samples: seat.rank_in_lane == 0 || self.steps_ahead() > 0,
            poison: self.poison,
        }
    }

    /// A rank's recording of a bucket.
    pub fn recording(&self, model: &Model, seat: &Seat, bucket: &Bucket) -> Recording {
        let recording = model.record(self.shape(bucket));
        if self.counts_experts(seat) { recording.counting_experts() } else { recording }
    }

    /// All ranks of a lane have the same rows.
    pub(crate) fn counts_experts(&self, seat: &Seat) -> bool {
        self.count_experts && seat.rank_in_lane == 0
    }

    /// What all lanes of a group begin an epoch with.
    pub fn first_state(&self) -> GroupState {
        GroupState::new(Arc::clone(&self.lattice), self.mesh.lanes_per_group(), self.record_all)
            .with_patience(self.patience)
            .with_policy(self.policy)
    }
}

/// A running mesh of ranks.
pub struct Host {
    shared: Arc<HostShared>,
    limits: EngineLimits,
    queue_max: usize,
    ranks: RankThreads,
    link: Option<Arc<Link>>,
    /// The supervisor watches: groups form, and end, by its word.
    is_supervised: AtomicBool,
    /// Supervisor and delivery: they end when the ranks have.
    others: Mutex<Vec<JoinHandle<()>>>,
    /// They end with the mask that they compute.
    mask_threads: Mutex<Vec<JoinHandle<()>>>,
    balancer: Mutex<Balancer>,
    /// Writes the step trace; ends when it is closed.
    tracing: Mutex<Option<JoinHandle<()>>>,
}

/// Why a host did not start.
#[derive(Debug, Error)]
pub enum HostError {
    /// A rank could not load or reserve.
    #[error("rank {rank}: {source}")]
    Rank {
        /// Which rank.
        rank: u16,
        /// What happened.
        source: StartError,
    },
    /// The operating system refused a thread.
    #[error("can't start a rank's thread: {0}")]
    Thread(std::io::Error),
    /// The file of the step trace can't be made.
    #[error("--step-trace: can't write {}: {source}", path.display())]
    StepTrace {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// Ranks loaded but the group ended before it was ready.
    #[error("the group ended while starting: {0}")]
    Ended(String),
}

/// Why a rank did not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// Loading its share of the model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Making or reserving its device.
    #[error(transparent)]
    Backend(#[from] OpsError),
    /// A bug: the thread panicked while starting.
    #[error("panicked while starting: {0}")]
    Panic(String),
}

/// Called with (rank, layers done, layers) while ranks load.
pub type Progress = dyn Fn(usize, usize, usize) + Sync + Send;

impl Host {
    /// Starts every rank and returns when all are loaded and the start-up recordings are made.
    pub fn start(
        config: &HostConfig,
        checkpoint: &Arc<Checkpoint>,
        backend: impl Fn(&Seat) -> Result<Box<dyn Backend>, OpsError> + Send + Sync + 'static,
        progress: Arc<Progress>,
    ) -> Result<Self, HostError> {
        Self::start_with(config, checkpoint, Box::new(backend), progress, None)
    }

    /// The same for a test, which sees every rank come to every stage of its steps, and may spoil it.
    pub fn start_probed(
        config: &HostConfig,
        checkpoint: &Arc<Checkpoint>,
        backend: impl Fn(&Seat) -> Result<Box<dyn Backend>, OpsError> + Send + Sync + 'static,
        progress: Arc<Progress>,
        probe: Arc<dyn Probe>,
    ) -> Result<Self, HostError> {
        Self::start_with(config, checkpoint, Box::new(backend), progress, Some(probe))
    }

    fn start_with(
        config: &HostConfig,
        checkpoint: &Arc<Checkpoint>,
        backend: Box<MakeBackend>,
        progress: Arc<Progress>,
        probe: Option<Arc<dyn Probe>>,
    ) -> Result<Self, HostError> {
        let model = checkpoint.config();
        let scheduler = &config.scheduler;
        let shared = Arc::new(HostShared::new(config, model.vocab_size));
        let limits = EngineLimits {
            max_model_len: scheduler.max_model_len,
            cache_tokens: (scheduler.pages - 1) * scheduler.page_size,
            queue_max: config.queue_max,
            max_num_seqs: scheduler.max_num_seqs,
            vocab_size: model.vocab_size,
            lanes: shared.local.len(),
            grammars: false,
        };
        let file = shared.step_trace.as_ref().zip(config.step_trace.as_ref());
        let tracing = file.map(|(trace, path)| trace.write_to(path)).transpose()?;
        let (reports, reported) = mpsc::channel();
        let starter = Arc::new(Starter {
            config: config.clone(),
            checkpoint: Arc::clone(checkpoint),
            backend,
            shared: Arc::clone(&shared),
            progress,
            probe,
        });
        let ranks = RankThreads::default();
        let supervisor = Supervisor::start(starter, Arc::clone(&ranks), reports);
        let edges = config.lattice.buckets().iter().map(|bucket| bucket.rows()).collect();
        let page_size = scheduler.prefix_cache.then_some(scheduler.page_size);
        let full = scheduler.max_num_seqs + config.queue_max;
        let balancer = Balancer::new(config.load_balance, edges, page_size, full);
        let mut host = Self {
            shared,
            limits,
            queue_max: config.queue_max,
            ranks,
            link: config.link.clone(),
            is_supervised: AtomicBool::new(false),
            others: Mutex::default(),
            mask_threads: Mutex::default(),
            balancer: Mutex::new(balancer),
            tracing: Mutex::new(tracing),
        };
        let shared = Arc::clone(&host.shared);
        let deliver = move || {
            guard(&shared, "the thread that delivers events", || {
                shared.outbox.deliver(|id, lane| shared.leave(lane, Mail::Abort(id)));
            });
        };
        host.lock_others().push(spawn("deliver", deliver)?);
        for number in 0..config.mask_threads {
            let shared = Arc::clone(&host.shared);
            let thread = spawn(&format!("mask {number}"), move || {
                guard(&shared, "a thread that computes masks", || shared.masks.compute());
            })?;
            host.mask_threads.get_mut().unwrap_or_else(PoisonError::into_inner).push(thread);
        }
        let mut supervisor = supervisor.map_err(HostError::Thread)?;
        host.lock_others().extend(supervisor.listen().map_err(HostError::Thread)?);
        host.wait_loaded(&mut supervisor, &reported)?;
        host.limits.grammars = config.mask_threads > 0 && host.shared.heeds_masks.load(Ordering::SeqCst);
        host.lock_others().push(spawn("supervisor", move || supervisor.watch(&reported))?);
        host.is_supervised.store(true, Ordering::SeqCst);
        host.wait_ready()?;
        Ok(host)
    }

    /// What this host can serve.
    pub fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    /// Takes a request; its events go to `sink`, ending with exactly one terminal event.
    pub fn submit(&self, request: Request, sink: EventSink) -> Result<(), Refusal> {
        self.submit_by_step(request, Box::new(Each(sink)))
    }

    /// The same for a sink that takes what a step has for the request together.
    pub fn submit_by_step(&self, request: Request, sink: Box<dyn StepSink>) -> Result<(), Refusal> {
        let (id, mut lane) = (request.id, LaneId(0));
        let (mut request, mut sink) = (Some(request), Some(sink));
        let mut letter = Letter::LookRed;
        loop {
            let outcome = match letter {
                Letter::LookRed | Letter::LookRedAgain => self.shared.fault().is_some(),
                Letter::Register => {
                    let request = request.as_ref().expect("it is put later");
                    lane = self.register(request, sink.take().expect("it is registered once"))?;
                    true
                }
                Letter::Put => {
                    self.shared.leave(lane, Mail::Submit(request.take().expect("it is put once")));
                    true
                }
                Letter::LookOpen => self.shared.outbox.is_open(id),
                Letter::Withdraw => self.shared.outbox.unroute(id).is_some(),
                Letter::Void { .. } => {
                    self.shared.leave(lane, Mail::Abort(id));
                    true
                }
                Letter::Sent => return Ok(()),
                Letter::Refused => {
                    let fault = self.shared.fault().map_or("", String::as_str);
                    return Err(Refusal::Closed(format!("a rank failed: {fault}")));
                }
            };
            letter = letter.after(outcome);
        }
    }

    /// Ends a request that nobody listens to any more.
    pub fn abort(&self, id: RequestId) {
        if let Some(lane) = self.shared.outbox.unroute(id) {
            self.shared.leave(lane, Mail::Abort(id));
        }
    }

    /// Every lane's counters.
    pub fn stats(&self) -> Vec<LaneStats> {
        self.shared.local_lanes().map(|lane| lane.gauges.stats()).collect()
    }

    /// Of every lane of this host, its steps after number `seen[lane]`, as many as are kept: the last 256. A
    /// lane that `seen` has no number of is shown from the first.
    pub fn steps_after(&self, seen: &[u64]) -> Vec<StepRecord> {
        let mut steps = Vec::new();
        for (place, lane) in self.shared.local_lanes().enumerate() {
            if let Some(ring) = lane.recent.get() {
                let id = LaneId((self.shared.local.start + place) as u16);
                ring.after(seen.get(place).copied().unwrap_or(0), id, &mut steps);
            }
        }
        steps
    }

    /// Lanes that take every step together, from the first lane of the mesh on.
    pub fn lanes_per_group(&self) -> usize {
        self.shared.mesh.lanes_per_group()
    }

    /// How the host is, without asking any rank.
    pub fn health(&self) -> Health {
        self.shared.health()
    }

    /// Begins to record what the steps of this host's lanes take. False if that goes on already.
    pub fn start_profile(&self) -> bool {
        self.shared.profile.start()
    }

    /// Ends that: the newest steps, oldest first, and how many older ones there was no room for. `None` if
    /// none was begun.
    pub fn stop_profile(&self) -> Option<(Vec<StepRecord>, u64)> {
        self.shared.profile.stop()
    }

    /// From some step on, each record of a step says how many different experts its rows chose, or no longer does.
    /// Without [`HostConfig::count_experts`] there is nothing to count with, and this changes nothing.
    pub fn count_experts(&self, counts: bool) {
        self.shared.counts_experts.store(counts, Ordering::SeqCst);
    }

    /// This host and the others of its group refuse new requests from now on; those that run go on.
    pub fn drain(&self) {
        self.wish(|wish| wish.draining = true);
    }

    /// Every group stops after the step it is in, once all of its lanes have seen the wish, those of other
    /// hosts too; requests keep what they have and wait, new ones are taken and wait too.
    pub fn pause(&self) {
        self.wish(|wish| wish.paused = true);
    }

    /// Ends a [`pause`](Self::pause), whichever host it was asked of.
    pub fn resume(&self) {
        self.wish(|wish| wish.paused = false);
    }

    /// True when a pause is complete: no lane computes, here or on another host of the group.
    pub fn is_at_rest(&self) -> bool {
        self.shared.rests_under().is_some_and(|number| self.shared.wishes.others_rest(number))
    }

    fn wish(&self, change: impl FnOnce(&mut Wish)) {
        let wish = self.shared.wishes.make(change);
        if let Some(link) = &self.link {
            // A host that can't be reached ends the group by the thread that reads from it.
            let _ = link.send_wish(&wish);
        }
        self.shared.ring();
    }

    /// True once every rank has ended: all hosts of the group were told to stop, or one of them was.
    pub fn has_ended(&self) -> bool {
        self.lock_ranks().iter().all(|thread| thread.handle.is_finished())
    }

    /// Requests that were taken and have not ended.
    pub fn open_requests(&self) -> usize {
        self.shared.outbox.open()
    }

    /// Ends all groups once their requests are done, and joins the threads. A rank that is stuck is left
    /// behind once its group was given up; the returned fault says so. Requests that nobody will compute
    /// any more get an error.
    pub fn shutdown(self) -> Result<(), String> {
        self.stop();
        self.shared.fault().map_or(Ok(()), |fault| Err(fault.clone()))
    }

    fn stop(&self) {
        // Other hosts hear of it in the facts of this one's lanes.
        self.shared.wishes.draining.store(true, Ordering::SeqCst);
        if !self.is_supervised.load(Ordering::SeqCst) {
            // The start failed half way: nobody will form the groups that ranks wait for.
            self.shared.groups.iter().for_each(|group| group.end("the host could not start"));
        }
        for group in &self.shared.groups {
            group.exit.store(true, Ordering::SeqCst);
            group.ring();
        }
        let mut left_behind = false;
        // A group that forms again meanwhile has new threads at the end of the list.
        loop {
            // Not locked while waiting: the supervisor adds a thread for a rank that is replaced.
            let Some(thread) = self.lock_ranks().pop() else { break };
            let group = &self.shared.groups[usize::from(thread.group)];
            let mut given_up = None;
            while !thread.handle.is_finished() {
                if thread.tenure.is_over() || group.is_ended() {
                    let since = *given_up.get_or_insert_with(Instant::now);
                    if since.elapsed() > GIVE_UP_AFTER {
                        left_behind |= !thread.tenure.is_over();
                        break;
                    }
                }
                std::thread::park_timeout(STOP_LOOK_EVERY);
            }
            if thread.handle.is_finished() {
                // A panic was reported to the supervisor already.
                let _ = thread.handle.join();
            }
        }
        self.shared.outbox.close();
        self.end_masks();
        if let Some(link) = &self.link {
            link.say_farewell("it was stopped");
            link.close();
        }
        let others = std::mem::take(&mut *self.lock_others());
        // The supervisor waits for every rank: if one is stuck, it is left behind too.
        others.into_iter().filter(|_| !left_behind).for_each(|thread| drop(thread.join()));
        if let Some(trace) = &self.shared.step_trace {
            trace.close();
        }
        let tracing = self.tracing.lock().unwrap_or_else(PoisonError::into_inner).take();
        tracing.into_iter().for_each(|thread| drop(thread.join()));
    }

    /// A thread that is stuck in somebody's grammar is left behind.
    fn end_masks(&self) {
        self.shared.masks.close();
        let threads = std::mem::take(&mut *self.mask_threads.lock().unwrap_or_else(PoisonError::into_inner));
        let since = Instant::now();
        for thread in threads {
            while !thread.is_finished() && since.elapsed() < GIVE_UP_AFTER {
                std::thread::park_timeout(STOP_LOOK_EVERY);
            }
            if thread.is_finished() {
                drop(thread.join());
            }
        }
    }

    /// Chooses a lane for a request and registers where its events go.
    fn register(&self, request: &Request, sink: Box<dyn StepSink>) -> Result<LaneId, Refusal> {
        let leaves = || self.shared.groups.iter().any(|group| group.exit.load(Ordering::SeqCst));
        if self.shared.wishes.draining.load(Ordering::SeqCst) || leaves() {
            return Err(Refusal::Closed("it is shutting down".into()));
        }
        self.limits.check(request)?;
        let placed = self.shared.outbox.route(request.id, request.prompt.len(), sink, |loads| {
            let mut balancer = self.balancer.lock().unwrap_or_else(PoisonError::into_inner);
            let full = self.limits.max_num_seqs + self.queue_max;
            // Lanes of other hosts have servers of their own.
            let local = self.shared.local.clone();
            let placement =
                balancer.place(&loads[local.clone()], &request.prompt, request.lane, request.session);
            placement
                .map(|placed| Placement { lane: LaneId(placed.lane.0 + local.start as u16), ..placed })
                .filter(|placed| loads[usize::from(placed.lane.0)].requests < full)
                .ok_or(Refusal::QueueFull { waiting: self.queue_max })
        })?;
        // Looked at last: whoever was there when it closed has been told.
        if self.shared.outbox.is_closed() && self.shared.outbox.unroute(request.id).is_some() {
            let why = self.shared.fault().map_or("it was shut down", String::as_str);
            return Err(Refusal::Closed(why.into()));
        }
        Ok(placed)
    }

    fn lock_ranks(&self) -> MutexGuard<'_, Vec<RankThread>> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_others(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_loaded(
        &self,
        supervisor: &mut Supervisor,
        reported: &mpsc::Receiver<Report>,
    ) -> Result<(), HostError> {
        while supervisor.is_loading() {
            let report = reported.recv().expect("the supervisor has a sender");
            if let Some((rank, source)) = supervisor.take_first(report) {
                return Err(HostError::Rank { rank, source });
            }
        }
        Ok(())
    }

    fn wait_ready(&self) -> Result<(), HostError> {
        loop {
            if self.shared.is_ready() {
                return Ok(());
            }
            if let Some(fault) = self.shared.fault() {
                return Err(HostError::Ended(fault.clone()));
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}

impl Drop for Host {
    /// Whoever drops a host listens to no answer any more; [`Host::shutdown`] lets requests finish.
    fn drop(&mut self) {
        for (id, lane) in self.shared.outbox.unroute_all() {
            self.shared.lane(lane).1.mailbox.put(Mail::Abort(id));
        }
        self.stop();
    }
}

/// How often a stopping host looks whether a rank has ended.
const STOP_LOOK_EVERY: Duration = Duration::from_millis(1);
/// What a rank has after its group was closed; every wait of the group returns at once.
const GIVE_UP_AFTER: Duration = Duration::from_secs(2);

/// Runs a thread's work. One that panics, which is a bug of ours, ends the host with an error for everybody: work
/// would wait for it for ever.
fn guard(shared: &HostShared, name: &str, work: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        let reason = format!("{name} panicked, which is a bug");
        shared.set_fault(&reason);
        shared.outbox.give_up(&EngineError::Rank(reason));
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, HostError> {
    std::thread::Builder::new().name(name.into()).spawn(body).map_err(HostError::Thread)
}
