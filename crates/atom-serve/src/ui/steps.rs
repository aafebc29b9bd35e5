//! `GET /debug/steps`: the last steps of every lane, and new ones as they come, as server-sent events.
//!
//! The engine keeps them whether anybody looks or not; each viewer takes a look of its own, as often as its
//! connection takes the frames. Who reads slowly misses steps, and their numbers say so.

use crate::engine::{Health, LaneStep};
use crate::error::ApiError;
use crate::phase::Phase;
use crate::routes::event_stream;
use crate::server::Server;
use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use serde_json::json;
use std::convert::Infallible;
use std::fmt::Write;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_stream::Stream;

/// Answers with the stream, or says that enough others look already.
pub(super) async fn stream(State(server): State<Arc<Server>>) -> Result<Response, ApiError> {
    let place = server.viewers.clone().try_acquire_owned();
    let place = place.map_err(|_| ApiError::TooManyViewers { max: VIEWERS_MAX })?;
    let closed = server.phases.reached(Phase::Cut);
    Ok(event_stream(StepFeed::new(server, place, closed)))
}

/// What one viewer gets.
struct StepFeed {
    server: Arc<Server>,
    _place: OwnedSemaphorePermit,
    /// The server closes down: a viewer must not hold it up.
    closed: Pin<Box<dyn Future<Output = ()> + Send>>,
    looks: Interval,
    /// The newest step that was sent of each lane. `[lanes]`
    seen: Vec<u64>,
    /// What each lane was doing in the last frame. `[lanes]`
    doing: Vec<String>,
    quiet_looks: u32,
    begun: bool,
}

impl StepFeed {
    fn new(
        server: Arc<Server>,
        place: OwnedSemaphorePermit,
        closed: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let seen = vec![0; server.engine.limits().lanes];
        let closed = Box::pin(closed);
        Self { server, _place: place, closed, looks, seen, doing: Vec::new(), quiet_looks: 0, begun: false }
    }

    /// The next frame, if there is anything new.
    fn look(&mut self) -> Option<Bytes> {
        let steps = self.server.engine.steps_after(&self.seen);
        let health = self.server.engine.health();
        let is_same = health.lanes.iter().map(|lane| &lane.doing).eq(&self.doing);
        if self.begun && steps.is_empty() && is_same {
            self.quiet_looks += 1;
            if self.quiet_looks < KEEP_ALIVE_LOOKS {
                return None;
            }
            self.quiet_looks = 0;
            return Some(Bytes::from_static(b": keep-alive\n\n"));
        }
        self.quiet_looks = 0;
        let first = health.lanes.first().map_or(0, |lane| lane.lane.0);
        for step in &steps {
            // Lanes of one host have numbers in a row.
            if let Some(seen) = self.seen.get_mut(usize::from(step.lane.0.wrapping_sub(first))) {
                *seen = step.number.max(*seen);
            }
        }
        let frame = self.frame(&health, &steps);
        self.doing = health.lanes.into_iter().map(|lane| lane.doing).collect();
        self.begun = true;
        Some(frame)
    }

    fn frame(&self, health: &Health, steps: &[LaneStep]) -> Bytes {
        let lanes: Vec<_> = health
            .lanes
            .iter()
            .map(|lane| json!({"lane": lane.lane.0, "doing": lane.doing, "since_ms": lane.since.as_millis() as u64}))
            .collect();
        let mut out = String::with_capacity(256 + steps.len() * STEP_BYTES_ABOUT);
        let written = write!(out, "data: {{\"lanes\":{}", serde_json::Value::from(lanes));
        written.expect("writing to a String can't fail");
        if !self.begun {
            let limits = self.server.engine.limits();
            let limits = json!({"max_num_seqs": limits.max_num_seqs, "cache_tokens": limits.cache_tokens,
                "max_model_len": limits.max_model_len, "queue_max": limits.queue_max});
            let fields = json!(STEP_FIELDS);
            write!(out, ",\"fields\":{fields},\"limits\":{limits}").expect("as above");
        }
        out.push_str(",\"steps\":[");
        for (at, step) in steps.iter().enumerate() {
            out.push_str(if at == 0 { "" } else { "," });
            let mut between = '[';
            for value in values(step) {
                write!(out, "{between}{value}").expect("as above");
                between = ',';
            }
            out.push(']');
        }
        out.push_str("]}\n\n");
        out.into()
    }
}

impl Stream for StepFeed {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if this.closed.as_mut().poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            if this.looks.poll_tick(cx).is_pending() {
                return Poll::Pending;
            }
            if let Some(frame) = this.look() {
                return Poll::Ready(Some(Ok(frame)));
            }
        }
    }
}

/// The numbers of a step, in the order of [`STEP_FIELDS`]: 64 lanes make thousands a second, and names would
/// be most of them.
fn values(step: &LaneStep) -> [u64; STEP_FIELDS.len()] {
    [
        step.lane.0.into(),
        step.group.into(),
        step.number,
        step.epoch.into(),
        step.step.0,
        step.at_us,
        step.bucket_rows.into(),
        step.decode_rows.into(),
        step.prefill_rows.into(),
        step.wait_us.into(),
        step.replay_us.into(),
        step.running.into(),
        step.waiting.into(),
        step.oldest_wait_ms.into(),
        step.kv_per_mille.into(),
        step.is_held.into(),
    ]
}

/// What the numbers of a step are.
#[rustfmt::skip]
const STEP_FIELDS: [&str; 16] = [
    "lane", "group", "number", "epoch", "step", "at_us", "bucket_rows", "decode_rows", "prefill_rows", "wait_us",
    "replay_us", "running", "waiting", "oldest_wait_ms", "kv_per_mille", "is_held",
];

/// Streams of steps at once. Each look reads what the lanes keep, at the most a megabyte for 64 lanes; this
/// many viewers must stay unnoticed beside the model.
pub(crate) const VIEWERS_MAX: usize = 16;
/// Fluent to the eye.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// As other streams are kept alive: every 15 s.
const KEEP_ALIVE_LOOKS: u32 = 150;
/// For the first guess of a frame's size.
const STEP_BYTES_ABOUT: usize = 64;
