//! The life of a rank's thread: load, then one epoch of the group after the other until it ends.

use crate::collectives::SharedCollectives;
use crate::device::Device;
use crate::follower::Follower;
use crate::host::{HostConfig, Progress, StartError};
use crate::lane::{Lane, LaneParts, RankError};
use crate::probe::{Probe, Tap, Tapped, Untapped};
use crate::shared::{Form, HostShared};
use crate::supervisor::{Report, Tenure};
use atom_base::{Seat, StepNo};
use atom_group::{Life, Loss, RunEnd, Tale};
use atom_model::Model;
use atom_ops::{Backend, OpsError};
use atom_weights::Checkpoint;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

/// Makes a rank's device.
pub(crate) type MakeBackend = dyn Fn(&Seat) -> Result<Box<dyn Backend>, OpsError> + Send + Sync;

/// Makes ranks, each on its own thread.
pub(crate) struct Starter {
    pub(crate) config: HostConfig,
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) backend: Box<MakeBackend>,
    pub(crate) shared: Arc<HostShared>,
    pub(crate) progress: Arc<Progress>,
    /// A test's.
    pub(crate) probe: Option<Arc<dyn Probe>>,
}

/// A loaded rank: the one that leads its lane, or another.
trait Member {
    fn join(&mut self, config: &HostConfig, seat: &Seat, form: &Arc<Form>);
    fn run(&mut self) -> Result<(), RankError>;
    /// In which it is, or was last.
    fn step(&self) -> StepNo;
}

impl Starter {
    /// A rank's thread, from loading to its end. A panic anywhere becomes a report.
    pub(crate) fn rank(&self, seat: &Seat, tenure: &Arc<Tenure>, reports: &mpsc::Sender<Report>) {
        let loaded = catch_unwind(AssertUnwindSafe(|| self.load(seat)));
        let loaded = loaded.unwrap_or_else(|panic| Err(StartError::Panic(text_of(&*panic))));
        let (member, outcome) = match loaded {
            Ok(device) => (Some(self.member(seat, device)), Ok(())),
            Err(error) => (None, Err(error)),
        };
        // The receiver ends only after all ranks have; after a failed start nobody is left to tell.
        let _ = reports.send(Report::Loaded { seat: *seat, outcome });
        if let Some(member) = member {
            self.epochs(seat, tenure, member, reports);
        }
    }

    /// Takes part in every epoch, until the group has ended or the seat is somebody else's.
    fn epochs(
        &self,
        seat: &Seat,
        tenure: &Arc<Tenure>,
        mut member: Box<dyn Member>,
        reports: &mpsc::Sender<Report>,
    ) {
        let group = &self.shared.groups[usize::from(seat.group)];
        let (mut life, mut next, mut said) = (Life::Await { seen: 0 }, None, String::new());
        loop {
            life = match life {
                Life::Await { seen } => {
                    // Why there won't be one was said to everybody already.
                    next = group.next_form(seen).ok();
                    Life::formed(next.as_ref().map(|form| form.epoch), !tenure.is_over())
                }
                Life::Run { epoch } => {
                    let form = next.take().expect("an epoch was waited for");
                    let (end, why) = self.run(seat, &mut *member, &form);
                    said = why;
                    Life::ran(epoch, end, !tenure.is_over())
                }
                Life::Tell(tale) => {
                    let (seat, tenure, why) = (*seat, Arc::clone(tenure), std::mem::take(&mut said));
                    let _ = reports.send(match tale {
                        Tale::Alone { epoch } => Report::Alone { seat, epoch, why },
                        Tale::Lost { loss } => Report::Lost { seat, tenure, loss, why },
                        Tale::Left => Report::Left { seat, tenure },
                    });
                    Life::told(tale)
                }
                Life::Over => return,
            };
        }
    }

    /// One epoch of a member, and why it ended.
    fn run(&self, seat: &Seat, member: &mut dyn Member, form: &Arc<Form>) -> (RunEnd, String) {
        let run = catch_unwind(AssertUnwindSafe(|| {
            member.join(&self.config, seat, form);
            member.run()
        }));
        match run {
            Ok(Ok(())) => (RunEnd::Left, String::new()),
            Ok(Err(error)) if error.blames_others() => (RunEnd::Alone, error.to_string()),
            Ok(Err(error)) => {
                let loss = if error.is_divergence() { Loss::Diverged } else { Loss::Ended };
                (RunEnd::Lost(loss), format!("step {}: {error}", member.step()))
            }
            Err(panic) => {
                let why = format!("step {}: panicked: {}", member.step(), text_of(&*panic));
                (RunEnd::Lost(Loss::Ended), why)
            }
        }
    }

    fn load(&self, seat: &Seat) -> Result<Device, StartError> {
        let mut backend = (self.backend)(seat)?;
        let progress = |done, total| (self.progress)(usize::from(seat.rank.0), done, total);
        let layout = (&self.config.mesh, self.config.experts);
        let model = Model::load(&self.checkpoint, layout, seat, &mut *backend, &progress)?;
        let reserve = self.config.reserve(&model, seat);
        let counts_experts = self.config.counts_experts(seat);
        let device = Device::new(backend, model, &reserve, seat.lane_in_group, counts_experts)?;
        self.shared.heeds_masks.fetch_and(device.heeds_masks(), Ordering::SeqCst);
        Ok(device)
    }

    /// Decided once in the life of a rank: the loops of a product know nothing of probes.
    fn member(&self, seat: &Seat, device: Device) -> Box<dyn Member> {
        match &self.probe {
            None => self.tapped(seat, device, Untapped),
            Some(probe) => self.tapped(seat, device, Tapped { probe: Arc::clone(probe), rank: seat.rank }),
        }
    }

    fn tapped(&self, seat: &Seat, device: Device, tap: impl Tap) -> Box<dyn Member> {
        if seat.rank_in_lane > 0 {
            return Box::new(Follower::new(seat, device, self.config.steps_ahead(), tap));
        }
        let parts = LaneParts {
            config: &self.config,
            seat,
            group: Arc::clone(&self.shared.groups[usize::from(seat.group)]),
            shared: Arc::clone(&self.shared),
            device,
            step_trace: self.shared.step_trace.clone(),
            profile: Arc::clone(&self.shared.profile),
        };
        Box::new(Lane::new(parts, tap))
    }
}

impl<T: Tap> Member for Lane<T> {
    fn join(&mut self, config: &HostConfig, seat: &Seat, form: &Arc<Form>) {
        self.join(Arc::clone(form), collectives(config, seat, form), config);
    }

    fn run(&mut self) -> Result<(), RankError> {
        self.run()
    }

    fn step(&self) -> StepNo {
        self.step()
    }
}

impl<T: Tap> Member for Follower<T> {
    fn join(&mut self, config: &HostConfig, seat: &Seat, form: &Arc<Form>) {
        self.join(Arc::clone(form), collectives(config, seat, form));
    }

    fn run(&mut self) -> Result<(), RankError> {
        self.run()
    }

    fn step(&self) -> StepNo {
        self.step()
    }
}

fn collectives(config: &HostConfig, seat: &Seat, form: &Form) -> SharedCollectives {
    SharedCollectives::new(
        (Arc::clone(&form.lanes[seat.lane_in_group].window), seat.rank_in_lane),
        (Arc::clone(&form.window), seat.lane_in_group),
        config.link.clone(),
    )
}

/// What a panic says.
pub(crate) fn text_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".into())
}
