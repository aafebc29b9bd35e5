//! What threads of one host share: groups, the form that each has in its present epoch, and the ways
//! between ranks and the outside.

use crate::board::Board;
use crate::collectives::Window;
use crate::host::HostConfig;
use crate::mail::{Mail, Mailbox};
use crate::masks::MaskPool;
use crate::outbox::Outbox;
use crate::profile::Profile;
use crate::recent::StepRing;
use crate::stats::{Gauges, Health, LaneHealth};
use crate::step_trace::StepTrace;
use crate::wish::Wishes;
use atom_base::{LaneId, Mesh, Seat};
use atom_engine::Plan;
use atom_group::machine::behind;
use atom_group::{Activity, Addressee, Exchange, TraceHeader};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// What all threads of the host share.
pub(crate) struct HostShared {
    pub(crate) mesh: Mesh,
    /// Lanes whose ranks are threads of this process; the others of the mesh are on other hosts.
    pub(crate) local: Range<usize>,
    pub(crate) start: Instant,
    pub(crate) groups: Vec<Arc<GroupShared>>,
    pub(crate) outbox: Arc<Outbox>,
    /// What every group's first lane tells of each step, if somebody wants to know.
    pub(crate) step_trace: Option<Arc<StepTrace>>,
    /// What this host's lanes tell of each step while somebody wants to know.
    pub(crate) profile: Arc<Profile>,
    fault: OnceLock<String>,
    /// What the outside wants of all groups.
    pub(crate) wishes: Wishes,
    /// Computes masks for all lanes.
    pub(crate) masks: MaskPool,
    /// Every rank that has loaded so far heeds masks.
    pub(crate) heeds_masks: AtomicBool,
    /// Somebody wants to know how many different experts the rows of a step choose.
    pub(crate) counts_experts: AtomicBool,
}

/// What a group keeps over its epochs.
pub(crate) struct GroupShared {
    pub(crate) lanes: Vec<LaneShared>,
    pub(crate) exit: AtomicBool,
    /// See [`Wishes::paused`].
    pub(crate) paused: Arc<AtomicBool>,
    standing: Mutex<Standing>,
    changed: Condvar,
}

/// What a lane keeps over its group's epochs.
#[derive(Default)]
pub(crate) struct LaneShared {
    pub(crate) mailbox: Mailbox,
    pub(crate) gauges: Gauges,
    /// Of a lane whose ranks are threads of this process.
    pub(crate) recent: OnceLock<StepRing>,
}

/// Where a group stands.
#[derive(Clone)]
enum Standing {
    /// Its members load or have lost one; the last form, if there was one, is closed.
    Forming { last: Option<Arc<Form>>, why: String },
    /// It runs.
    Formed(Arc<Form>),
    /// It won't run again.
    Ended { last: Option<Arc<Form>>, why: String },
}

/// One epoch of a group: everything that its ranks meet in. Closed as a whole when a member is lost.
pub(crate) struct Form {
    pub(crate) epoch: u64,
    pub(crate) exchange: Exchange,
    pub(crate) window: Arc<Window>,
    pub(crate) lanes: Vec<FormLane>,
}

/// One lane in one epoch.
pub(crate) struct FormLane {
    pub(crate) board: Board,
    pub(crate) window: Arc<Window>,
    /// A rank of the lane is new: what the others have in their caches is of no use without it.
    pub(crate) cache_is_lost: bool,
}

/// Events that a step of a lane can have: of every request that runs its beginning, a token and its end, and of
/// every row the score of a prompt's token.
fn events_max(max_num_seqs: usize, rows: usize) -> usize {
    3 * max_num_seqs + rows
}

impl HostShared {
    pub(crate) fn new(config: &HostConfig, vocab: usize) -> Self {
        let mesh = config.mesh;
        let (node, nodes) = config.link.as_ref().map_or((0, 1), |link| (link.node(), link.nodes()));
        let wishes = Wishes::new(node, nodes);
        let group = || Arc::new(GroupShared::new(mesh.lanes_per_group(), Arc::clone(&wishes.paused)));
        let groups = (0..mesh.groups()).map(|_| group()).collect();
        let lanes = mesh.lanes();
        let start = Instant::now();
        let header = || TraceHeader::of(&config.first_state(), mesh.groups());
        Self {
            mesh,
            local: config.link.as_ref().map_or(0..lanes, |link| link.lanes(lanes)),
            start,
            step_trace: config.step_trace.as_ref().map(|_| Arc::new(StepTrace::new(header(), start))),
            profile: Arc::default(),
            groups,
            outbox: Outbox::new(
                mesh.lanes(),
                events_max(config.scheduler.max_num_seqs, config.lattice.top().rows()),
            ),
            fault: OnceLock::new(),
            wishes,
            masks: MaskPool::new(vocab, lanes * config.scheduler.max_num_seqs),
            heeds_masks: AtomicBool::new(true),
            counts_experts: AtomicBool::new(false),
        }
    }

    /// Why the host can't go on, if it can't.
    pub(crate) fn fault(&self) -> Option<&String> {
        self.fault.get()
    }

    /// Keeps the first fault, and logs it.
    pub(crate) fn set_fault(&self, reason: &str) {
        if self.fault.set(reason.to_owned()).is_ok() {
            tracing::error!("a group is lost: {reason}");
        }
    }

    /// Wakes whoever is parked, to look for work or orders.
    pub(crate) fn ring(&self) {
        self.groups.iter().for_each(|group| group.ring());
    }

    /// The lanes of a group, by their numbers over the whole mesh.
    pub(crate) fn lanes_of(&self, group: usize) -> Vec<LaneId> {
        let per_group = self.mesh.lanes_per_group();
        (group * per_group..(group + 1) * per_group).map(|lane| LaneId(lane as u16)).collect()
    }

    /// The lanes of this host.
    pub(crate) fn local_lanes(&self) -> impl Iterator<Item = &LaneShared> {
        self.groups.iter().flat_map(|group| &group.lanes).skip(self.local.start).take(self.local.len())
    }

    /// A lane by its number over the whole mesh, and its group.
    pub(crate) fn lane(&self, lane: LaneId) -> (&GroupShared, &LaneShared) {
        let (lane, per_group) = (usize::from(lane.0), self.mesh.lanes_per_group());
        let group = &self.groups[lane / per_group];
        (group, &group.lanes[lane % per_group])
    }

    /// Leaves mail for a lane.
    pub(crate) fn leave(&self, lane: LaneId, mail: Mail) {
        let (group, lane) = self.lane(lane);
        lane.mailbox.put(mail);
        group.ring();
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.local_lanes().all(|lane| lane.gauges.ready.load(Ordering::SeqCst))
    }

    /// The number of the wish under which this host's lanes rest, if they do: none of them brings facts
    /// any more but such as ask for a rest.
    pub(crate) fn rests_under(&self) -> Option<u64> {
        let number = self.wishes.pause()?;
        self.health().lanes.iter().all(|lane| lane.activity == Activity::Parked).then_some(number)
    }

    pub(crate) fn health(&self) -> Health {
        let now_ms = self.start.elapsed().as_millis() as u64;
        let mut lanes = Vec::with_capacity(self.local.len());
        let per_group = self.mesh.lanes_per_group();
        for (number, group) in self.groups.iter().enumerate() {
            let form = group.last_form();
            for (place, lane) in group.lanes.iter().enumerate() {
                if !self.local.contains(&(number * per_group + place)) {
                    continue;
                }
                let sighting = form.as_ref().map(|form| form.exchange.sighting(place));
                let since = now_ms.saturating_sub(lane.gauges.since_ms.load(Ordering::Relaxed));
                lanes.push(LaneHealth {
                    lane: LaneId((number * per_group + place) as u16),
                    epoch: form.as_ref().map_or(0, |form| form.epoch),
                    activity: sighting.as_ref().map_or(Activity::Starting, |s| s.activity),
                    step: sighting.map(|s| s.step).unwrap_or_default(),
                    since: Duration::from_millis(since),
                });
            }
        }
        Health {
            ready: self.is_ready(),
            draining: self.wishes.draining.load(Ordering::SeqCst),
            paused: self.wishes.paused.load(Ordering::SeqCst),
            forming: self.groups.iter().find_map(|group| group.forming()),
            fault: self.fault.get().cloned(),
            lanes,
        }
    }
}

impl GroupShared {
    pub(crate) fn new(lanes: usize, paused: Arc<AtomicBool>) -> Self {
        Self {
            lanes: (0..lanes).map(|_| LaneShared::default()).collect(),
            exit: AtomicBool::new(false),
            paused,
            standing: Mutex::new(Standing::Forming { last: None, why: "ranks are loading".into() }),
            changed: Condvar::new(),
        }
    }

    /// Waits for an epoch after `seen`; the reason if there will be none.
    pub(crate) fn next_form(&self, seen: u64) -> Result<Arc<Form>, String> {
        let mut standing = self.lock();
        loop {
            match &*standing {
                Standing::Formed(form) if form.epoch > seen => return Ok(Arc::clone(form)),
                Standing::Ended { why, .. } => return Err(why.clone()),
                Standing::Formed(_) | Standing::Forming { .. } => {}
            }
            // Bounded by the supervisor, which forms the group within its time or ends it.
            standing = self.changed.wait(standing).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The form that runs or ran last.
    pub(crate) fn last_form(&self) -> Option<Arc<Form>> {
        match &*self.lock() {
            Standing::Formed(form) => Some(Arc::clone(form)),
            Standing::Forming { last, .. } | Standing::Ended { last, .. } => last.clone(),
        }
    }

    /// From now on mail is for these lanes and no others.
    pub(crate) fn address_mail(&self, to: Addressee) {
        self.lanes.iter().for_each(|lane| lane.mailbox.address(to));
    }

    pub(crate) fn form(&self, form: Form) {
        self.stand(|_| Standing::Formed(Arc::new(form)));
    }

    /// Ends every wait of the epoch that runs.
    pub(crate) fn unform(&self, why: &str) {
        self.stand(|last| Standing::Forming { last, why: why.to_owned() });
        self.lanes.iter().for_each(|lane| lane.gauges.ready.store(false, Ordering::SeqCst));
    }

    /// The same, for good.
    pub(crate) fn end(&self, why: &str) {
        self.stand(|last| Standing::Ended { last, why: why.to_owned() });
    }

    pub(crate) fn is_ended(&self) -> bool {
        matches!(*self.lock(), Standing::Ended { .. })
    }

    pub(crate) fn ring(&self) {
        if let Some(form) = self.last_form() {
            form.exchange.ring();
        }
    }

    /// Why the group does not run at the moment, if it will again.
    fn forming(&self) -> Option<String> {
        match &*self.lock() {
            Standing::Forming { why, .. } => Some(why.clone()),
            Standing::Formed(_) | Standing::Ended { .. } => None,
        }
    }

    fn stand(&self, next: impl FnOnce(Option<Arc<Form>>) -> Standing) {
        let mut standing = self.lock();
        let last = match &*standing {
            Standing::Formed(form) => Some(Arc::clone(form)),
            Standing::Forming { last, .. } | Standing::Ended { last, .. } => last.clone(),
        };
        let next = next(last.clone());
        if let (Some(form), Standing::Forming { .. } | Standing::Ended { .. }) = (last, &next) {
            form.close();
        }
        *standing = next;
        drop(standing);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Form {
    /// For `epoch` of a group. `lost[l]` is true if a rank of lane `l` is new in it.
    pub(crate) fn new(config: &HostConfig, epoch: u64, lost: &[bool]) -> Self {
        let (mesh, spins) = (config.mesh, config.spins);
        let top = config.lattice.top();
        let stride = config.scheduler.max_model_len.div_ceil(config.scheduler.page_size);
        let plan = || Plan::with_capacity(top.rows(), config.scheduler.max_num_seqs, stride);
        let lane = |&cache_is_lost: &bool| FormLane {
            board: Board::new(mesh.ranks_per_lane(), mesh.lanes_per_group(), spins, plan),
            window: Arc::new(Window::new(mesh.ranks_per_lane(), spins)),
            cache_is_lost,
        };
        Self {
            epoch,
            exchange: Exchange::new(mesh.lanes_per_group(), spins),
            window: Arc::new(Window::new(mesh.lanes_per_group(), spins)),
            lanes: lost.iter().map(lane).collect(),
        }
    }

    /// Ends every wait.
    pub(crate) fn close(&self) {
        self.exchange.close();
        self.window.meeting.close();
        for lane in &self.lanes {
            lane.window.meeting.close();
            lane.board.meeting.close();
        }
    }

    /// Who is behind the others, wherever they meet: lane and rank in the lane. Asked after a deadline
    /// passed, when whoever still could has come. The first meeting that somebody is missing in says
    /// who holds up the rest: a lane's own, then the group's inside the recording, then the exchange.
    pub(crate) fn missing(&self) -> Vec<(usize, usize)> {
        let of_lanes: Vec<_> = self
            .lanes
            .iter()
            .enumerate()
            .flat_map(|(lane, form)| {
                let ranks = 0..form.window.meeting.seats();
                behind(ranks, |rank| form.window.meeting.number(rank))
                    .into_iter()
                    .map(move |rank| (lane, rank))
            })
            .collect();
        // A follower that has not carried out an order, beside a leader that has come to the end of it.
        let of_boards: Vec<_> = self
            .lanes
            .iter()
            .enumerate()
            .flat_map(|(lane, form)| {
                let (leader, seats) = (form.board.meeting.number(0), 1..form.board.meeting.seats());
                seats
                    .filter(move |&rank| form.board.meeting.number(rank) < leader)
                    .map(move |rank| (lane, rank))
            })
            .collect();
        let lanes = 0..self.lanes.len();
        let leaders = |lanes: Vec<usize>| lanes.into_iter().map(|lane| (lane, 0)).collect::<Vec<_>>();
        let in_window = leaders(behind(lanes.clone(), |lane| self.window.meeting.number(lane)));
        let in_exchange = leaders(behind(lanes, |lane| self.exchange.step_of(lane)));
        [of_lanes, in_window, of_boards, in_exchange]
            .into_iter()
            .find(|missing| !missing.is_empty())
            .unwrap_or_default()
    }
}

/// A fault with the rank that it happened in.
pub(crate) fn reason(seat: &Seat, error: &impl std::fmt::Display) -> String {
    format!("rank {} (lane {}): {error}", seat.rank, seat.lane)
}
