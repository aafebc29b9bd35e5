//! One thread that decides whether a group can go on: it hears of every rank that loads, ends or finds
//! itself alone, and watches every lane's deadline. Loss is decided here and nowhere else.

use crate::host::StartError;
use crate::link::News;
use crate::shared::{Form, HostShared, reason};
use crate::starter::Starter;
use atom_base::Seat;
use atom_engine::EngineError;
use atom_group::{Act, Activity, Addressee, Loss, Sighting, Watch};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What a rank's thread says of itself.
pub(crate) enum Report {
    /// It has loaded, or failed to.
    Loaded { seat: Seat, outcome: Result<(), StartError> },
    /// It ended because of something in itself.
    Lost { seat: Seat, tenure: Arc<Tenure>, loss: Loss, why: String },
    /// Others did not come, or the epoch was closed; it waits for the next one.
    Alone { seat: Seat, epoch: u64, why: String },
    /// Another host.
    Host { node: usize, news: News },
    /// It ended because it was asked to, or because its group did.
    Left { seat: Seat, tenure: Arc<Tenure> },
}

/// Whether a thread still holds its seat. A thread that was given up finds out when it wakes.
#[derive(Default)]
pub(crate) struct Tenure(AtomicBool);

/// A rank's thread, for whoever joins it.
pub(crate) struct RankThread {
    pub(crate) handle: JoinHandle<()>,
    pub(crate) tenure: Arc<Tenure>,
    pub(crate) group: u16,
}

/// Threads of ranks, past ones too.
pub(crate) type RankThreads = Arc<Mutex<Vec<RankThread>>>;

/// See the module.
pub(crate) struct Supervisor {
    starter: Arc<Starter>,
    threads: RankThreads,
    reports: Sender<Report>,
    groups: Vec<Watched>,
    /// The last wish of which other hosts were told that this one rests under it.
    said_resting: u64,
}

/// What the supervisor knows of one group.
struct Watched {
    /// What it does about it, and in which order.
    watch: Watch,
    tenures: Vec<Arc<Tenure>>, // [ranks of the group]
    forming_since: Instant,
    /// Lanes whose caches went with a rank since the last epoch.
    lost: Vec<bool>, // [lanes]
}

impl Tenure {
    pub(crate) fn is_over(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    fn end(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Supervisor {
    /// Starts a thread for every rank.
    pub(crate) fn start(
        starter: Arc<Starter>,
        threads: RankThreads,
        reports: Sender<Report>,
    ) -> std::io::Result<Self> {
        let mesh = starter.config.mesh;
        let (per_group, lanes) = (mesh.lanes_per_group() * mesh.ranks_per_lane(), mesh.lanes_per_group());
        let link = starter.config.link.as_ref();
        // Processes would have to agree on an epoch, and the lost one's part of the weights is with it.
        let restarts_max = if link.is_some() { 0 } else { starter.config.rank_restarts_max };
        let hosts = link.map_or(0, |link| link.nodes() - 1);
        let group = |_| Watched {
            watch: Watch::new(restarts_max, hosts),
            tenures: (0..per_group).map(|_| Arc::default()).collect(),
            forming_since: Instant::now(),
            lost: vec![false; lanes],
        };
        let groups = (0..mesh.groups()).map(group).collect();
        let local = starter.shared.local.clone();
        let mut supervisor = Self { starter, threads, reports, groups, said_resting: 0 };
        for seat in mesh.seats().filter(|seat| local.contains(&usize::from(seat.lane.0))) {
            supervisor.spawn(seat)?;
        }
        Ok(supervisor)
    }

    /// Hears of the other hosts.
    pub(crate) fn listen(&self) -> std::io::Result<Vec<JoinHandle<()>>> {
        let Some(link) = &self.starter.config.link else { return Ok(Vec::new()) };
        let reports = self.reports.clone();
        let tell = move |node, news| drop(reports.send(Report::Host { node, news }));
        link.listen(&self.shared().groups[0], &tell)
    }

    /// Runs until every rank has ended or was given up with its group.
    pub(crate) fn watch(mut self, reports: &Receiver<Report>) {
        while self.groups.iter().any(|group| group.watch.holders() > 0) {
            match reports.recv_timeout(LOOK_EVERY) {
                Ok(report) => self.take(report),
                Err(RecvTimeoutError::Timeout) => self.look(),
                // Not while this very thread holds a sender.
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.say_resting();
        }
    }

    /// Takes a report while the host starts: a rank that can't load is the start's failure.
    pub(crate) fn take_first(&mut self, report: Report) -> Option<(u16, StartError)> {
        let failed = match report {
            Report::Loaded { seat, outcome: Err(error) } => (seat.rank.0, error),
            report => {
                self.take(report);
                return None;
            }
        };
        if let Some(link) = &self.starter.config.link {
            link.say_farewell(&format!("its rank {} could not be loaded: {}", failed.0, failed.1));
        }
        // Ranks that did load must not wait for this one.
        for group in 0..self.groups.len() {
            self.shared().groups[group].end("another rank could not be loaded");
        }
        Some(failed)
    }

    /// True while ranks of any group load for the first time.
    pub(crate) fn is_loading(&self) -> bool {
        self.groups.iter().any(|group| group.watch.is_forming() && group.watch.epoch() == 1)
    }

    fn shared(&self) -> &Arc<HostShared> {
        &self.starter.shared
    }

    fn take(&mut self, report: Report) {
        match report {
            Report::Loaded { seat, outcome: Ok(()) } => self.loaded(&seat),
            Report::Loaded { seat, outcome: Err(error) } => {
                self.groups[usize::from(seat.group)].watch.gone(true);
                self.end(usize::from(seat.group), &reason(&seat, &error));
            }
            Report::Host { news: News::Ready, .. } => {
                self.groups[0].watch.host_ready();
                self.form_if_complete(0);
            }
            Report::Host { news: News::Wish(wish), .. } => {
                self.shared().wishes.hear(&wish);
                self.shared().ring();
            }
            Report::Host { node, news: News::Resting(number) } => {
                self.shared().wishes.note_resting(node, number);
            }
            Report::Host { node, news: News::Gone(why) } => {
                let group = &self.shared().groups[0];
                // On the way out hosts leave one after the other.
                if !group.is_ended() && !group.exit.load(Ordering::SeqCst) {
                    let why = format!("host {node}{} is gone: {why}", self.ranks_of_host(node));
                    self.end(0, &why);
                }
            }
            Report::Left { seat, tenure } => {
                self.groups[usize::from(seat.group)].watch.gone(!tenure.is_over());
            }
            Report::Lost { seat, tenure, loss, why } => {
                let (group, holds_seat) = (usize::from(seat.group), !tenure.is_over());
                let stopping = self.is_stopping(group);
                let first = self.groups[group].watch.lost(holds_seat, loss, stopping);
                // Otherwise the seat is somebody else's by now.
                let seats = [seat];
                self.follow(group, first, (loss, &seats[..usize::from(holds_seat)]), &reason(&seat, &why));
            }
            Report::Alone { seat, epoch, why } => {
                let group = usize::from(seat.group);
                if !self.groups[group].watch.heeds(epoch) {
                    return;
                }
                let form = self.shared().groups[group].last_form().expect("somebody ran in it");
                let missing = form.missing();
                // Nobody is behind: then it is the one who complains that can't go on.
                let seats = if missing.is_empty() { vec![seat] } else { self.seats_at(group, &missing) };
                let why = format!("{} did not come; {}", sighted(&form, &seats), reason(&seat, &why));
                self.lose(group, Loss::Stuck, &seats, &why);
            }
        }
    }

    /// Whoever asked for a pause wants to know when it is complete.
    fn say_resting(&mut self) {
        let Some(link) = &self.starter.config.link else { return };
        if let Some(number) = self.shared().rests_under().filter(|number| *number > self.said_resting) {
            // As in `Host::wish`.
            let _ = link.say_resting(number);
            self.said_resting = number;
        }
    }

    fn loaded(&mut self, seat: &Seat) {
        let group = usize::from(seat.group);
        if !self.groups[group].watch.loaded() {
            return;
        }
        if let Some(link) = &self.starter.config.link
            && let Err(error) = link.say_ready()
        {
            return self.end(group, &error.to_string());
        }
        self.form_if_complete(group);
    }

    fn form_if_complete(&mut self, group: usize) {
        let first = self.groups[group].watch.complete();
        self.carry_out(group, first, (Loss::Ended, &[]), "");
    }

    /// Finds lanes that are past their deadline, and ranks that load for too long. A peer would notice in
    /// its exchange; a lane alone has none.
    fn look(&mut self) {
        let now_ms = self.shared().start.elapsed().as_millis() as u64;
        for number in 0..self.groups.len() {
            let Watched { watch, forming_since, .. } = &self.groups[number];
            if watch.is_forming() {
                let waited = forming_since.elapsed();
                if watch.epoch() > 1 && waited > FORM_WITHIN {
                    self.end(number, &format!("new ranks have not loaded after {waited:?}"));
                }
                continue;
            }
            let shared = Arc::clone(&self.shared().groups[number]);
            let Some(form) = shared.last_form().filter(|_| !shared.is_ended()) else { continue };
            let first = number * shared.lanes.len();
            for (lane, parts) in shared.lanes.iter().enumerate() {
                // Hosts look after their own lanes.
                if !self.shared().local.contains(&(first + lane)) {
                    continue;
                }
                let sighting = form.exchange.sighting(lane);
                if matches!(sighting.activity, Activity::Parked | Activity::Ended) {
                    continue;
                }
                let late = now_ms.saturating_sub(parts.gauges.deadline_ms.load(Ordering::Relaxed));
                if late > GRACE_MS {
                    let missing = form.missing();
                    let missing = if missing.is_empty() { vec![(lane, 0)] } else { missing };
                    let seats = self.seats_at(number, &missing);
                    let late_lane = self.shared().lanes_of(number)[lane];
                    let names = sighted(&form, &seats);
                    let why =
                        format!("{names} did not come; lane {late_lane} is {late} ms past its deadline");
                    self.lose(number, Loss::Stuck, &seats, &why);
                    break;
                }
            }
        }
    }

    /// Decides about a loss: the group forms again with new threads in the lost seats, or ends.
    fn lose(&mut self, group: usize, loss: Loss, seats: &[Seat], why: &str) {
        let stopping = self.is_stopping(group);
        let first = self.groups[group].watch.lose(loss, stopping);
        self.follow(group, first, (loss, seats), why);
    }

    fn follow(&mut self, group: usize, first: Act, lost: (Loss, &[Seat]), why: &str) {
        match first {
            Act::TakeSeats { end: Some(cause) } => {
                self.carry_out(group, first, lost, &format!("{why}; {cause}"));
            }
            _ => self.carry_out(group, first, lost, why),
        }
    }

    fn is_stopping(&self, group: usize) -> bool {
        self.shared().groups[group].exit.load(Ordering::SeqCst)
    }

    /// Ends a group: the first reason is kept, every wait returns, every request is answered.
    /// The ranks of a host and how far they were heard of, in brackets; nothing before they run.
    fn ranks_of_host(&self, node: usize) -> String {
        let Some(form) = self.shared().groups[0].last_form() else { return String::new() };
        let mesh = self.starter.config.mesh;
        let nodes = self.starter.config.link.as_ref().map_or(1, |link| link.nodes());
        let lanes = node * mesh.lanes() / nodes..(node + 1) * mesh.lanes() / nodes;
        let seats = mesh.seats().filter(|seat| lanes.contains(&usize::from(seat.lane.0)));
        let name =
            |seat: Seat| format!("rank {} at step {}", seat.rank, form.exchange.step_of(seat.lane_in_group));
        format!(" ({})", seats.map(name).collect::<Vec<_>>().join(", "))
    }

    fn end(&mut self, group: usize, why: &str) {
        let first = self.groups[group].watch.end();
        self.carry_out(group, first, (Loss::Ended, &[]), why);
    }

    /// Does what the watch of a group says, in its order.
    fn carry_out(&mut self, group: usize, first: Act, (loss, seats): (Loss, &[Seat]), why: &str) {
        let shared = Arc::clone(self.shared());
        let own = &shared.groups[group];
        let mut act = first;
        while act != Act::Rest {
            match act {
                Act::Rest => {}
                Act::Close { epoch } => {
                    tracing::error!("{why}; group {group} forms again, as epoch {epoch}");
                    self.groups[group].forming_since = Instant::now();
                    self.groups[group].lost.fill(false);
                    own.unform(why);
                }
                Act::ShutMail => own.address_mail(Addressee::NOBODY),
                Act::TakeSeats { .. } => self.take_seats(group, loss, seats),
                Act::FailLost => self.fail_lost(group, seats, why),
                Act::Replace => {
                    let spawned = seats.iter().try_for_each(|seat| self.spawn(*seat));
                    if let Err(error) = spawned {
                        return self.end(group, &format!("{why}; no thread for a new rank: {error}"));
                    }
                }
                Act::OpenMail { epoch } => own.address_mail(Addressee::of(epoch)),
                Act::Publish { epoch } => {
                    if epoch > 1 {
                        tracing::warn!("group {group} has formed again: epoch {epoch}");
                    }
                    // Whoever hangs before its first step is late like any other.
                    let first = self.starter.config.patience.first.as_millis() as u64;
                    let deadline = (shared.start.elapsed().as_millis() as u64).saturating_add(first);
                    for lane in &own.lanes {
                        lane.gauges.deadline_ms.store(deadline, Ordering::Relaxed);
                    }
                    own.form(Form::new(&self.starter.config, epoch, &self.groups[group].lost));
                }
                Act::TurnRed => shared.set_fault(why),
                Act::CloseForGood => own.end(why),
                Act::FailAll => {
                    shared.outbox.fail(&shared.lanes_of(group), &EngineError::Rank(why.to_owned()));
                    if let Some(link) = &self.starter.config.link {
                        link.say_farewell(why);
                    }
                }
            }
            act = act.after();
        }
    }

    /// Requests of lanes whose leaders are lost get an error.
    fn fail_lost(&mut self, group: usize, seats: &[Seat], why: &str) {
        for seat in seats {
            self.groups[group].lost[seat.lane_in_group] = true;
            if seat.rank_in_lane == 0 {
                let shared = self.shared();
                let mailbox = &shared.groups[group].lanes[seat.lane_in_group].mailbox;
                shared.outbox.fail_and(&[seat.lane], &EngineError::Rank(why.to_owned()), || mailbox.clear());
            }
        }
    }

    /// Takes seats away from their threads, once.
    fn take_seats(&mut self, group: usize, loss: Loss, seats: &[Seat]) {
        let ranks_per_lane = self.shared().mesh.ranks_per_lane();
        let local = self.shared().local.clone();
        for seat in seats.iter().filter(|seat| local.contains(&usize::from(seat.lane.0))) {
            let Watched { watch, tenures, .. } = &mut self.groups[group];
            let tenure = &tenures[seat.lane_in_group * ranks_per_lane + seat.rank_in_lane];
            watch.take_seat(!tenure.is_over(), loss);
            tenure.end();
        }
    }

    fn seats_at(&self, group: usize, places: &[(usize, usize)]) -> Vec<Seat> {
        let seats = self.shared().mesh.seats();
        seats
            .filter(|s| usize::from(s.group) == group && places.contains(&(s.lane_in_group, s.rank_in_lane)))
            .collect()
    }

    fn spawn(&mut self, seat: Seat) -> std::io::Result<()> {
        let ranks_per_lane = self.shared().mesh.ranks_per_lane();
        let place = seat.lane_in_group * ranks_per_lane + seat.rank_in_lane;
        let tenure = Arc::<Tenure>::default();
        self.groups[usize::from(seat.group)].tenures[place] = Arc::clone(&tenure);
        let (starter, reports, own) = (Arc::clone(&self.starter), self.reports.clone(), Arc::clone(&tenure));
        let handle = std::thread::Builder::new()
            .name(format!("rank {}", seat.rank))
            .spawn(move || starter.rank(&seat, &own, &reports))?;
        self.groups[usize::from(seat.group)].watch.spawned();
        let thread = RankThread { handle, tenure, group: seat.group };
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }
}

/// Ranks with what their lanes were last seen doing.
fn sighted(form: &Form, seats: &[Seat]) -> String {
    let name = |seat: &Seat| {
        let Sighting { step, activity, .. } = form.exchange.sighting(seat.lane_in_group);
        format!("rank {} (lane {}, {activity} at step {step})", seat.rank, seat.lane)
    };
    seats.iter().map(name).collect::<Vec<_>>().join(" and ")
}

/// Health must be red within a second of a deadline.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Peers in the exchange find a late lane first and know more about it.
const GRACE_MS: u64 = 500;
/// A rank that takes its seat reads its share of the weights, hundreds of gigabytes at the most.
const FORM_WITHIN: Duration = Duration::from_secs(600);
