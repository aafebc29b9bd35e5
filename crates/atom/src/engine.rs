//! The host as the HTTP server's engine.

use crate::profile;
use atom_engine::{EngineLimits, Event, Refusal, Request};
use atom_group::Activity;
use atom_rank::{EagerCause, Host, PaddingShares, StepRecord, StepSink};
use atom_serve::{
    CacheUse, Condition, Engine, EventSender, EventStream, Health, LaneHealth, LaneStep, Layout, Profile,
    ProfileRefusal,
};
use atom_telemetry::{Exposition, Kind};
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// A host that can be served.
pub(crate) struct HostEngine {
    pub(crate) host: Arc<Host>,
    pub(crate) layout: Layout,
    /// Where profiles are written, if they may be.
    pub(crate) profile_dir: Option<PathBuf>,
}

impl Engine for HostEngine {
    fn limits(&self) -> &EngineLimits {
        self.host.limits()
    }

    fn submit(&self, request: Request) -> Result<EventStream, Refusal> {
        let (host, id) = (Arc::clone(&self.host), request.id);
        let (sender, stream) = EventStream::new(move || host.abort(id));
        self.host.submit_by_step(request, Box::new(ToStream(sender)))?;
        Ok(stream)
    }

    fn health(&self) -> Health {
        let health = self.host.health();
        let condition = match &health.fault {
            Some(fault) => Condition::Stalled(fault.clone()),
            None if health.draining => Condition::Unready("the server is shutting down".into()),
            None if health.forming.is_some() => {
                Condition::Unready(format!("a group forms again: {}", health.forming.unwrap_or_default()))
            }
            None if health.paused => Condition::Unready("the engine is paused".into()),
            None if !health.ready => Condition::Unready("recordings are being made".into()),
            None => Condition::Ready,
        };
        let lane = |l: &atom_rank::LaneHealth| LaneHealth {
            lane: l.lane,
            doing: doing(l.activity).to_owned(),
            since: l.since,
            condition: condition.clone(),
        };
        Health { lanes: health.lanes.iter().map(lane).collect(), condition }
    }

    fn pause(&self) {
        self.host.pause();
    }

    fn resume(&self) {
        self.host.resume();
    }

    fn drain(&self) {
        self.host.drain();
    }

    fn is_pausing(&self) -> bool {
        self.host.health().paused
    }

    fn is_at_rest(&self) -> bool {
        self.host.is_at_rest()
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn caches(&self) -> Vec<CacheUse> {
        let cache = |stats: &atom_rank::LaneStats| CacheUse {
            pages_held: stats.counters.pages_held,
            pages_kept: stats.counters.pages_kept,
            prompt_tokens: stats.counters.prompt_tokens,
            cached_tokens: stats.counters.cached_tokens,
            preempted: stats.counters.preempted,
        };
        self.host.stats().iter().map(cache).collect()
    }

    fn start_profile(&self) -> Result<(), ProfileRefusal> {
        match &self.profile_dir {
            None => Err(ProfileRefusal::Off),
            Some(_) if self.host.start_profile() => Ok(()),
            Some(_) => Err(ProfileRefusal::Running),
        }
    }

    fn stop_profile(&self) -> Result<Profile, ProfileRefusal> {
        let folder = self.profile_dir.as_ref().ok_or(ProfileRefusal::Off)?;
        let steps = self.host.stop_profile().ok_or(ProfileRefusal::NotRunning)?;
        let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        profile::write(folder, &steps, now_ms)
    }

    fn steps_after(&self, seen: &[u64]) -> Vec<LaneStep> {
        let per_group = self.host.lanes_per_group();
        let step = |step: StepRecord| LaneStep {
            lane: step.lane,
            group: (usize::from(step.lane.0) / per_group) as u16,
            number: step.number,
            epoch: step.epoch,
            step: step.step,
            at_us: step.at_us,
            bucket_rows: step.bucket_rows,
            decode_rows: step.decode_rows,
            prefill_rows: step.prefill_rows,
            wait_us: step.wait_us,
            replay_us: step.replay_us,
            running: step.running,
            waiting: step.waiting,
            oldest_wait_ms: step.oldest_wait_ms,
            kv_per_mille: step.kv_per_mille,
            is_held: step.is_held,
        };
        self.host.steps_after(seen).into_iter().map(step).collect()
    }

    fn write_metrics(&self, out: &mut String) {
        let lanes = self.host.stats();
        let mut text = Exposition::new(out);
        for (kind, name, help, value) in FAMILIES {
            let mut family = text.family(*kind, name, help);
            for (lane, stats) in lanes.iter().enumerate() {
                family = family.sample(&[("lane", &lane)], value(stats));
            }
        }
        let mut eager =
            text.family(Kind::Counter, "atom_eager_steps_total", "Steps that were not a replay, by cause.");
        for (lane, stats) in lanes.iter().enumerate() {
            for cause in EagerCause::ALL {
                let labels: [(&str, &dyn Display); 2] = [("lane", &lane), ("cause", &cause.name())];
                eager = eager.sample(&labels, stats.eager_steps.by(cause) as f64);
            }
        }
        for (name, help, shares) in SHARES {
            let mut family = text.family(Kind::Histogram, name, help);
            for (lane, stats) in lanes.iter().enumerate() {
                let PaddingShares { steps, sum } = shares(stats);
                family = family.histogram(&[("lane", &lane)], &PaddingShares::BOUNDS, &steps, sum);
            }
        }
    }
}

/// Where the events of one request go: what a step has for it wakes its reader once.
struct ToStream(EventSender);

impl StepSink for ToStream {
    fn take(&mut self, events: &mut dyn Iterator<Item = Event>) {
        self.0.send_all(events);
    }
}

fn doing(activity: Activity) -> &'static str {
    match activity {
        Activity::Starting => "starting",
        Activity::Parked => "parked",
        Activity::Wanting => "want",
        Activity::Exchanging => "exchange",
        Activity::Committing => "commit",
        Activity::Recording => "record",
        Activity::Replaying => "replay",
        Activity::Applying => "apply",
        Activity::Leaving => "leave",
        Activity::Ended => "ended",
    }
}

type Shares = (&'static str, &'static str, fn(&atom_rank::LaneStats) -> PaddingShares);

#[rustfmt::skip]
const SHARES: &[Shares] = &[
    ("atom_step_padding_share", "Share of the lane's bucket that was padding, step by step.", |s| s.padding_shares),
    ("atom_step_padding_share_of_fullest_lane", "The same of the group's fullest lane: what --padding-max bounds.", |s| s.fullest_padding_shares),
];

type Family = (Kind, &'static str, &'static str, fn(&atom_rank::LaneStats) -> f64);

#[rustfmt::skip]
const FAMILIES: &[Family] = &[
    (Kind::Gauge, "atom_group_epoch", "Times that the lane's group has formed: 1, and one more for every lost rank.", |s| s.epoch as f64),
    (Kind::Counter, "atom_replays_total", "Steps that replayed a recording.", |s| s.replays as f64),
    (Kind::Counter, "atom_recordings_total", "Buckets recorded.", |s| s.recordings as f64),
    (Kind::Counter, "atom_rows_total", "Rows computed for requests.", |s| s.real_rows as f64),
    (Kind::Counter, "atom_padding_rows_total", "Rows of replayed buckets that no request used.", |s| s.padding_rows as f64),
    (Kind::Counter, "atom_expert_rows_chosen_total", "Experts that rows were routed to, over all layers.", |s| s.expert_rows_chosen as f64),
    (Kind::Counter, "atom_expert_rows_computed_total", "Rows of any lane that the first rank's experts computed.", |s| s.expert_rows_computed as f64),
    (Kind::Counter, "atom_prefill_held_steps_total", "Steps in which prompts waited for other lanes' prompts.", |s| s.held_steps as f64),
    (Kind::Counter, "atom_time_cut_rows_total", "Prompt rows of the group that --step-ms-max left for later steps.", |s| s.time_cut_rows as f64),
    (Kind::Counter, "atom_edge_cut_rows_total", "Prompt rows of the group that --padding-max left for later steps.", |s| s.edge_cut_rows as f64),
    (Kind::Counter, "atom_exchange_wait_seconds_total", "Time in exchanges with other lanes.", |s| s.exchange_wait.as_secs_f64()),
    (Kind::Counter, "atom_replay_seconds_total", "Time in replays.", |s| s.replay_time.as_secs_f64()),
    (Kind::Gauge, "atom_num_requests_running", "Requests that hold a slot and pages.", |s| s.counters.running as f64),
    (Kind::Gauge, "atom_num_requests_waiting", "Requests that wait.", |s| s.counters.waiting as f64),
    (Kind::Gauge, "atom_kv_pages_held", "Pages of the KV cache that running requests hold.", |s| s.counters.pages_held as f64),
    (Kind::Gauge, "atom_kv_pages_kept", "Pages kept for the prefix cache only.", |s| s.counters.pages_kept as f64),
    (Kind::Counter, "atom_num_preemptions_total", "Times that a request gave way and was computed again.", |s| s.counters.preempted as f64),
    (Kind::Counter, "atom_requests_finished_total", "Requests that ended, for whatever reason.", |s| s.counters.finished as f64),
    (Kind::Counter, "atom_prefix_cache_queries_total", "Prompt tokens of requests that started.", |s| s.counters.prompt_tokens as f64),
    (Kind::Counter, "atom_prefix_cache_hits_total", "Of those, tokens found in the prefix cache.", |s| s.counters.cached_tokens as f64),
    (Kind::Counter, "atom_engine_generation_tokens_total", "Tokens generated.", |s| s.counters.generated_tokens as f64),
];
