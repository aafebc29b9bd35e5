//! The process side: starts the ranks, takes requests, answers questions, stops everything.

use crate::balance::{Balancer, LoadBalance};
use crate::board::Board;
use crate::collectives::{SharedCollectives, Window};
use crate::device::Device;
use crate::follower::Follower;
use crate::lane::Lane;
use crate::mail::{Mail, Mailbox};
use crate::outbox::{EventSink, Outbox};
use crate::stats::{Gauges, Health, LaneHealth, LaneStats};
use crate::supervisor::{self, Ended};
use atom_base::{LaneId, Mesh, RequestId, Seat};
use atom_engine::{EngineError, EngineLimits, Plan, Refusal, Request, Scheduler, SchedulerConfig};
use atom_group::{Exchange, Facts, GroupState, Lattice, Meeting, Patience, Policy};
use atom_model::{ExpertLayout, Model, ModelError};
use atom_ops::{Backend, KvDType, OpsError, Reserve, StepShape};
use atom_weights::Checkpoint;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
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
    /// Record every bucket before serving.
    pub record_all: bool,
    /// Fill what nothing may read with NaN, see [`Reserve::poison`].
    pub poison: bool,
    /// Looks before a waiting rank sleeps; 0 where ranks outnumber cores.
    pub spins: u32,
    /// Deadlines of steps.
    pub patience: Patience,
    /// What a group may decide otherwise than to run everything at once.
    pub policy: Policy,
}

/// A running mesh of ranks.
pub struct Host {
    shared: Arc<HostShared>,
    limits: EngineLimits,
    queue_max: usize,
    threads: Mutex<Threads>,
    balancer: Mutex<Balancer>,
}

/// What [`Host::stop`] waits for.
#[derive(Default)]
struct Threads {
    ranks: Vec<(u16, JoinHandle<()>)>, // with the number of their group
    others: Vec<JoinHandle<()>>,       // supervisor and delivery: they end when the ranks have
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

/// What all threads of the host share.
pub(crate) struct HostShared {
    pub(crate) mesh: Mesh,
    pub(crate) epoch: Instant,
    pub(crate) groups: Vec<Arc<GroupShared>>,
    pub(crate) outbox: Arc<Outbox>,
    /// Where ranks wait for each other before the first step: loading has no deadline.
    loaded: Meeting,
    fault: OnceLock<String>,
    draining: AtomicBool,
    /// Every lane asks its group to rest.
    pub(crate) paused: Arc<AtomicBool>,
}

/// What the lanes of a group share.
pub(crate) struct GroupShared {
    pub(crate) exchange: Exchange,
    pub(crate) window: Arc<Window>,
    pub(crate) lanes: Vec<LaneShared>,
    pub(crate) exit: AtomicBool,
    /// See [`HostShared::paused`].
    pub(crate) paused: Arc<AtomicBool>,
}

/// What the ranks of a lane share with each other and the outside.
pub(crate) struct LaneShared {
    pub(crate) mailbox: Mailbox,
    pub(crate) board: Board,
    pub(crate) window: Arc<Window>,
    pub(crate) gauges: Gauges,
}

impl Host {
    /// Starts every rank and returns when all are loaded and the start-up recordings are made.
    pub fn start(
        config: &HostConfig,
        checkpoint: &Arc<Checkpoint>,
        backend: impl Fn(&Seat) -> Result<Box<dyn Backend>, OpsError> + Send + Sync + 'static,
        progress: Arc<Progress>,
    ) -> Result<Self, HostError> {
        let model = checkpoint.config();
        let scheduler = &config.scheduler;
        let limits = EngineLimits {
            max_model_len: scheduler.max_model_len,
            cache_tokens: (scheduler.pages - 1) * scheduler.page_size,
            queue_max: config.queue_max,
            max_num_seqs: scheduler.max_num_seqs,
            vocab_size: model.vocab_size,
            lanes: config.mesh.lanes(),
        };
        let shared = Arc::new(HostShared::new(config));
        let (ended_tx, ended_rx) = mpsc::channel();
        let (loaded_tx, loaded_rx) = mpsc::channel();
        let starter = Arc::new(Starter {
            config: config.clone(),
            checkpoint: Arc::clone(checkpoint),
            backend: Box::new(backend),
            shared: Arc::clone(&shared),
            progress,
        });
        let mut threads = Threads::default();
        for seat in config.mesh.seats() {
            let (starter, loaded, ended) = (Arc::clone(&starter), loaded_tx.clone(), ended_tx.clone());
            let rank = spawn(format!("rank {}", seat.rank), move || starter.rank(&seat, &loaded, &ended))?;
            threads.ranks.push((seat.group, rank));
        }
        drop(ended_tx);
        let delivering = Arc::clone(&shared.outbox);
        threads.others.push(spawn("deliver".into(), move || delivering.deliver())?);
        let edges = config.lattice.buckets().iter().map(|bucket| bucket.rows()).collect();
        let page_size = scheduler.prefix_cache.then_some(scheduler.page_size);
        let full = scheduler.max_num_seqs + config.queue_max;
        let balancer = Balancer::new(config.load_balance, edges, page_size, full);
        let host = Self {
            shared,
            limits,
            queue_max: config.queue_max,
            threads: Mutex::new(threads),
            balancer: Mutex::new(balancer),
        };
        host.wait_loaded(&loaded_rx)?;
        let watched = Arc::clone(&host.shared);
        let supervisor = spawn("supervisor".into(), move || supervisor::watch(&watched, &ended_rx))?;
        host.lock_threads().others.push(supervisor);
        host.wait_ready()?;
        Ok(host)
    }

    /// What this host can serve.
    pub fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    /// Takes a request; its events go to `sink`, ending with exactly one terminal event.
    pub fn submit(&self, request: Request, sink: EventSink) -> Result<(), Refusal> {
        if let Some(fault) = self.shared.fault.get() {
            return Err(Refusal::Closed(format!("a rank failed: {fault}")));
        }
        if self.shared.draining.load(Ordering::SeqCst) {
            return Err(Refusal::Closed("it is shutting down".into()));
        }
        self.limits.check(&request)?;
        let id = request.id;
        let lane = self.shared.outbox.route(id, request.prompt.len(), sink, |loads| {
            let mut balancer = self.balancer.lock().unwrap_or_else(PoisonError::into_inner);
            let full = self.limits.max_num_seqs + self.queue_max;
            let placement = balancer.place(loads, &request.prompt, request.lane, request.session);
            placement
                .filter(|placed| loads[usize::from(placed.lane.0)].requests < full)
                .ok_or(Refusal::QueueFull { waiting: self.queue_max })
        })?;
        let (group, lane_shared) = self.lane(usize::from(lane.0));
        lane_shared.mailbox.put(Mail::Submit(request));
        group.exchange.ring();
        // The group may have been lost in between: then nobody reads that mail.
        if let Some(fault) = self.shared.fault.get()
            && self.shared.outbox.unroute(id).is_some()
        {
            // Or another group was, and this lane has the mail: it must not compute for nobody.
            lane_shared.mailbox.put(Mail::Abort(id));
            group.exchange.ring();
            return Err(Refusal::Closed(format!("a rank failed: {fault}")));
        }
        Ok(())
    }

    /// Ends a request that nobody listens to any more.
    pub fn abort(&self, id: RequestId) {
        if let Some(lane) = self.shared.outbox.unroute(id) {
            let (group, lane) = self.lane(usize::from(lane.0));
            lane.mailbox.put(Mail::Abort(id));
            group.exchange.ring();
        }
    }

    /// Every lane's counters.
    pub fn stats(&self) -> Vec<LaneStats> {
        self.shared.groups.iter().flat_map(|g| g.lanes.iter().map(|l| l.gauges.stats())).collect()
    }

    /// How the host is, without asking any rank.
    pub fn health(&self) -> Health {
        self.shared.health()
    }

    /// Refuses new requests from now on; those that run go on.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::SeqCst);
    }

    /// Every group stops after the step it is in, once all of its lanes have seen the wish; requests keep
    /// what they have and wait, new ones are taken and wait too.
    pub fn pause(&self) {
        self.shared.paused.store(true, Ordering::SeqCst);
        self.ring();
    }

    /// Ends a [`pause`](Self::pause).
    pub fn resume(&self) {
        self.shared.paused.store(false, Ordering::SeqCst);
        self.ring();
    }

    /// Requests that were taken and have not ended.
    pub fn open_requests(&self) -> usize {
        self.shared.outbox.open()
    }

    fn ring(&self) {
        self.shared.groups.iter().for_each(|group| group.exchange.ring());
    }

    /// Ends all groups once their requests are done, and joins the threads. A rank that is stuck is left
    /// behind once its group was given up; the returned fault says so. Requests that nobody will compute
    /// any more get an error.
    pub fn shutdown(self) -> Result<(), String> {
        self.stop();
        self.shared.fault.get().map_or(Ok(()), |fault| Err(fault.clone()))
    }

    fn stop(&self) {
        self.drain();
        for group in &self.shared.groups {
            group.exit.store(true, Ordering::SeqCst);
            group.exchange.ring();
        }
        let Threads { ranks, others } = std::mem::take(&mut *self.lock_threads());
        let mut left_behind = false;
        for (group, thread) in ranks {
            let group = &self.shared.groups[usize::from(group)];
            let mut given_up = None;
            while !thread.is_finished() {
                if group.exchange.is_closed() {
                    let since = *given_up.get_or_insert_with(Instant::now);
                    if since.elapsed() > GIVE_UP_AFTER {
                        left_behind = true;
                        break;
                    }
                }
                std::thread::park_timeout(STOP_LOOK_EVERY);
            }
            if thread.is_finished() {
                // A panic was reported by the supervisor already.
                let _ = thread.join();
            }
        }
        self.shared.outbox.close();
        // The supervisor waits for every rank: if one is stuck, it is left behind too.
        others.into_iter().filter(|_| !left_behind).for_each(|t| drop(t.join()));
    }

    fn lock_threads(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lane(&self, lane: usize) -> (&GroupShared, &LaneShared) {
        let per_group = self.shared.mesh.lanes_per_group();
        let group = &self.shared.groups[lane / per_group];
        (group, &group.lanes[lane % per_group])
    }

    fn wait_loaded(&self, loaded: &mpsc::Receiver<(u16, Result<(), StartError>)>) -> Result<(), HostError> {
        let mut first_error = None;
        for (rank, result) in loaded.iter().take(self.shared.mesh.ranks()) {
            if let Err(source) = result {
                // Ranks that did load must not wait for this one.
                self.shared.loaded.close();
                self.shared.groups.iter().for_each(|group| supervisor::close(group));
                first_error.get_or_insert(HostError::Rank { rank, source });
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    fn wait_ready(&self) -> Result<(), HostError> {
        loop {
            let lanes = self.shared.groups.iter().flat_map(|g| &g.lanes);
            if lanes.into_iter().all(|l| l.gauges.ready.load(Ordering::SeqCst)) {
                return Ok(());
            }
            if let Some(fault) = self.shared.fault.get() {
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
            self.lane(usize::from(lane.0)).1.mailbox.put(Mail::Abort(id));
        }
        self.stop();
    }
}

impl HostShared {
    fn new(config: &HostConfig) -> Self {
        let mesh = config.mesh;
        let top = config.lattice.top();
        let stride = config.scheduler.max_model_len.div_ceil(config.scheduler.page_size);
        let plan = || Plan::with_capacity(top.rows(), config.scheduler.max_num_seqs, stride);
        let lane = || LaneShared {
            mailbox: Mailbox::default(),
            board: Board::new(mesh.ranks_per_lane(), mesh.lanes_per_group(), config.spins, plan),
            window: Arc::new(Window::new(mesh.ranks_per_lane(), config.spins)),
            gauges: Gauges::default(),
        };
        let paused = Arc::new(AtomicBool::new(false));
        let group = || {
            Arc::new(GroupShared {
                exchange: Exchange::new(mesh.lanes_per_group(), config.spins),
                window: Arc::new(Window::new(mesh.lanes_per_group(), config.spins)),
                lanes: (0..mesh.lanes_per_group()).map(|_| lane()).collect(),
                exit: AtomicBool::new(false),
                paused: Arc::clone(&paused),
            })
        };
        let groups = (0..mesh.groups()).map(|_| group()).collect();
        Self {
            mesh,
            epoch: Instant::now(),
            groups,
            outbox: Outbox::new(mesh.lanes()),
            loaded: Meeting::new(mesh.ranks(), 0),
            fault: OnceLock::new(),
            draining: AtomicBool::new(false),
            paused,
        }
    }

    /// Keeps the first fault, and logs it.
    pub(crate) fn set_fault(&self, reason: &str) {
        if self.fault.set(reason.to_owned()).is_ok() {
            tracing::error!("a group is lost: {reason}");
        }
    }

    /// Numbers of a group's lanes over the whole mesh.
    pub(crate) fn lanes_of(&self, group: usize) -> Vec<LaneId> {
        let per_group = self.mesh.lanes_per_group();
        (group * per_group..(group + 1) * per_group).map(|lane| LaneId(lane as u16)).collect()
    }

    fn health(&self) -> Health {
        let now_ms = self.epoch.elapsed().as_millis() as u64;
        let mut lanes = Vec::with_capacity(self.mesh.lanes());
        for group in &self.groups {
            for (place, lane) in group.lanes.iter().enumerate() {
                let sighting = group.exchange.sighting(place);
                let since = now_ms.saturating_sub(lane.gauges.since_ms.load(Ordering::Relaxed));
                lanes.push(LaneHealth {
                    lane: LaneId(lanes.len() as u16),
                    activity: sighting.activity,
                    step: sighting.step,
                    since: Duration::from_millis(since),
                });
            }
        }
        let ready = self.groups.iter().flat_map(|g| &g.lanes).all(|l| l.gauges.ready.load(Ordering::SeqCst));
        let draining = self.draining.load(Ordering::SeqCst);
        let paused = self.paused.load(Ordering::SeqCst);
        Health { ready, draining, paused, fault: self.fault.get().cloned(), lanes }
    }
}

/// Makes ranks, each on its own thread.
struct Starter {
    config: HostConfig,
    checkpoint: Arc<Checkpoint>,
    #[expect(clippy::type_complexity, reason = "named once, here")]
    backend: Box<dyn Fn(&Seat) -> Result<Box<dyn Backend>, OpsError> + Send + Sync>,
    shared: Arc<HostShared>,
    progress: Arc<Progress>,
}

impl Starter {
    /// A rank thread, from loading to its end. A panic anywhere becomes a report.
    fn rank(
        &self,
        seat: &Seat,
        loaded: &mpsc::Sender<(u16, Result<(), StartError>)>,
        ended: &mpsc::Sender<Ended>,
    ) {
        let device = catch_unwind(AssertUnwindSafe(|| self.load(seat)));
        let device = device.unwrap_or_else(|panic| Err(StartError::Panic(text_of(&*panic))));
        let (device, report) = match device {
            Ok(device) => (Some(device), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let failed = report.as_ref().err().map(ToString::to_string);
        // The receiver outlives loading; after a failed start nobody is left to tell.
        let _ = loaded.send((seat.rank.0, report));
        let outcome = match (device, failed) {
            (Some(device), _) => {
                let run = catch_unwind(AssertUnwindSafe(|| self.run_when_all_have_loaded(seat, device)));
                run.unwrap_or_else(|panic| Err(format!("panicked: {}", text_of(&*panic))))
            }
            (None, failed) => Err(failed.unwrap_or_default()),
        };
        let _ = ended.send(Ended { seat: *seat, outcome });
    }

    fn load(&self, seat: &Seat) -> Result<Device, StartError> {
        let mut backend = (self.backend)(seat)?;
        let progress = |done, total| (self.progress)(usize::from(seat.rank.0), done, total);
        let layout = (&self.config.mesh, self.config.experts);
        let model = Model::load(&self.checkpoint, layout, seat, &mut *backend, &progress)?;
        let top = self.config.lattice.top();
        let scheduler = &self.config.scheduler;
        let reserve = Reserve {
            top: StepShape {
                rows: top.rows(),
                out_rows: top.out_rows(),
                lanes: self.config.mesh.lanes_per_group(),
            },
            layers: model.config().layers,
            attention: Arc::clone(model.attention()),
            page_size: scheduler.page_size,
            pages: scheduler.pages,
            pages_per_sequence: scheduler.max_model_len.div_ceil(scheduler.page_size),
            kv_dtype: self.config.kv_dtype,
            slots: scheduler.max_num_seqs + 1,
            vocab: model.config().vocab_size,
            samples: seat.rank_in_lane == 0,
            poison: self.config.poison,
        };
        let group = &self.shared.groups[usize::from(seat.group)];
        let collectives = SharedCollectives::new(
            (Arc::clone(&group.lanes[seat.lane_in_group].window), seat.rank_in_lane),
            (Arc::clone(&group.window), seat.lane_in_group),
        );
        Ok(Device::new(backend, model, collectives, &reserve, seat.lane_in_group)?)
    }

    fn run_when_all_have_loaded(&self, seat: &Seat, device: Device) -> Result<(), String> {
        let gate = &self.shared.loaded;
        gate.arrive(usize::from(seat.rank.0), 1);
        let all = || (0..gate.seats()).all(|rank| gate.number(rank) > 0);
        gate.wait_until(all, None).map_err(|_| "another rank could not be loaded".to_owned())?;
        self.run(seat, device)
    }

    fn run(&self, seat: &Seat, device: Device) -> Result<(), String> {
        let shared = Arc::clone(&self.shared.groups[usize::from(seat.group)]);
        let lane_in_group = seat.lane_in_group;
        let outcome = if seat.rank_in_lane == 0 {
            let lanes = self.config.mesh.lanes_per_group();
            let mut lane = Lane {
                shared,
                lane_in_group,
                outbox: Arc::clone(&self.shared.outbox),
                epoch: self.shared.epoch,
                state: GroupState::new(Arc::clone(&self.config.lattice), lanes, self.config.record_all)
                    .with_patience(self.config.patience)
                    .with_policy(self.config.policy),
                scheduler: Scheduler::new(self.config.scheduler.clone()),
                device,
                mail: VecDeque::new(),
                events: Vec::with_capacity(EVENTS_PER_SEQUENCE * self.config.scheduler.max_num_seqs),
                facts: vec![Facts::default(); lanes],
                last_signature: 0,
                last_replay_us: 0,
                order: 0,
                asked_pause: false,
            };
            let outcome = lane.run();
            if let Err(error) = &outcome {
                // Before any answer: who gets one must find health red.
                self.shared.set_fault(&reason(seat, error));
                let error = EngineError::Rank(error.to_string());
                lane.scheduler.fail_all(&error, &mut lane.events);
                self.shared.outbox.post(&mut lane.events);
            }
            outcome
        } else {
            Follower { shared, lane_in_group, rank_in_lane: seat.rank_in_lane, device }.run()
        };
        outcome.map_err(|e| e.to_string())
    }
}

/// A fault with the rank that it happened in.
pub(crate) fn reason(seat: &Seat, error: &impl std::fmt::Display) -> String {
    format!("rank {} (lane {}): {error}", seat.rank, seat.lane)
}

fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, HostError> {
    std::thread::Builder::new().name(name).spawn(body).map_err(HostError::Thread)
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".into())
}

/// Events of one request in one step: it may start, get a token and end.
const EVENTS_PER_SEQUENCE: usize = 3;
/// How often a stopping host looks whether a rank has ended.
const STOP_LOOK_EVERY: Duration = Duration::from_millis(1);
/// What a rank has after its group was closed; every wait of the group returns at once.
const GIVE_UP_AFTER: Duration = Duration::from_secs(2);
