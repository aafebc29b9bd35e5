//! The seam to the engine: what the server asks of it, and nothing about how it is done.

use crate::report::{CacheUse, Layout, Profile, ProfileRefusal};
use atom_base::{LaneId, RequestId, StepNo};
use atom_engine::{EngineError, EngineLimits, Event, Refusal, Request};
use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Takes requests and computes them. The binary implements it over the rank threads.
///
/// All methods are called from the server's reactor threads, so they return at once.
pub trait Engine: Send + Sync + 'static {
    /// What can be served: fixed at start.
    fn limits(&self) -> &EngineLimits;

    /// Takes a request or says why not. Dropping the stream before its end aborts the request.
    fn submit(&self, request: Request) -> Result<EventStream, Refusal>;

    /// What each lane is doing, and whether that is well.
    fn health(&self) -> Health;

    /// Stops after the step that goes on, once all lanes agree; requests stay and wait.
    fn pause(&self);

    /// Ends a [`pause`](Self::pause).
    fn resume(&self);

    /// Takes no request from now on, for good.
    fn drain(&self);

    /// True while the newest order that was heard, here or on another host, is to pause.
    fn is_pausing(&self) -> bool;

    /// True when a pause is complete: no lane computes.
    fn is_at_rest(&self) -> bool;

    /// Of every lane, in order, the steps that it took after its number `seen[lane]`, as far back as they are
    /// kept; all of them of a lane beyond the end of `seen`. Nothing waits for who asks.
    fn steps_after(&self, seen: &[u64]) -> Vec<LaneStep>;

    /// How the model is laid out: fixed at start.
    fn layout(&self) -> &Layout;

    /// What the lanes' caches hold, lane by lane.
    fn caches(&self) -> Vec<CacheUse>;

    /// Begins to record what steps do.
    fn start_profile(&self) -> Result<(), ProfileRefusal>;

    /// Ends that and writes it down. The one method that is called where it may take its time.
    fn stop_profile(&self) -> Result<Profile, ProfileRefusal>;

    /// Appends the engine's own metrics; [`atom_telemetry::Exposition`] has the format.
    fn write_metrics(&self, out: &mut String);
}

/// Events of one request, in order, ending with exactly one terminal event.
///
/// The queue has no bound of its own: a request sends at most one event per prompt token, one per
/// generated token and two more, all of them bounded by the model's context.
pub struct EventStream {
    queue: Arc<Mutex<Queue>>,
    /// Taken off the queue, to be read first.
    taken: VecDeque<Event>,
    /// Armed until the terminal event was taken.
    abort: Option<Box<dyn FnOnce() + Send>>,
}

/// The engine's end of an [`EventStream`]. What a step has for a request is sent together, and wakes the
/// reader once.
#[derive(Debug)]
pub struct EventSender {
    queue: Arc<Mutex<Queue>>,
}

/// Between the two ends.
#[derive(Debug, Default)]
struct Queue {
    events: VecDeque<Event>,
    /// Of the reader, since it found nothing.
    waker: Option<Waker>,
    /// Either end is gone.
    is_closed: bool,
}

/// The engine's word on itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Health {
    /// The whole of it.
    pub condition: Condition,
    /// One entry per lane.
    pub lanes: Vec<LaneHealth>,
}

/// Alive, and willing to take a request?
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Steps are taken when there is work, and requests are admitted.
    Ready,
    /// Steps are taken, but nothing is admitted now: starting, recording, draining.
    Unready(String),
    /// The step loop has missed a deadline or reported a fault. It won't recover by waiting.
    Stalled(String),
}

/// What one lane is doing.
#[derive(Clone, Debug, PartialEq)]
pub struct LaneHealth {
    /// Which lane.
    pub lane: LaneId,
    /// In the engine's words: `parked`, `replay 32`, `exchange` ..
    pub doing: String,
    /// For how long.
    pub since: Duration,
    /// The lane's part of the engine's condition.
    pub condition: Condition,
}

/// One step of one lane, for the page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneStep {
    /// Which lane.
    pub lane: LaneId,
    /// Lanes of one group take every step together.
    pub group: u16,
    /// Counts the lane's steps, from 1: what [`Engine::steps_after`] goes on from.
    pub number: u64,
    /// The group's life, and
    pub epoch: u32,
    /// its count of steps, equal on all of its lanes.
    pub step: StepNo,
    /// When it ended, in microseconds since the engine's start.
    pub at_us: u64,
    /// Rows that the whole group computed for each lane: what is not decoded or prefilled is padding.
    pub bucket_rows: u32,
    /// The lane's rows that decode.
    pub decode_rows: u32,
    /// The lane's prompt rows.
    pub prefill_rows: u32,
    /// Waited for other lanes before it.
    pub wait_us: u32,
    /// Computed for so long.
    pub replay_us: u32,
    /// Requests running after it.
    pub running: u32,
    /// Requests waiting after it.
    pub waiting: u32,
    /// Age of the oldest of them.
    pub oldest_wait_ms: u32,
    /// Share of the cache that requests held, in thousandths.
    pub kv_per_mille: u16,
    /// Prompts waited for other lanes' prompts.
    pub is_held: bool,
}

/// Hands out request ids, each once in the life of the process.
#[derive(Debug, Default)]
pub struct RequestIds {
    next: AtomicU64,
}

impl EventStream {
    /// A stream and the sender that feeds it. `abort` is called when the stream is dropped before its
    /// terminal event was taken: it must be short, since it may run on a reactor thread.
    pub fn new(abort: impl FnOnce() + Send + 'static) -> (EventSender, Self) {
        let queue = Arc::<Mutex<Queue>>::default();
        let stream = Self { queue: queue.clone(), taken: VecDeque::new(), abort: Some(Box::new(abort)) };
        (EventSender { queue }, stream)
    }

    /// The next event; `None` after the terminal one.
    ///
    /// A sender that is dropped without a terminal event has failed: that is reported as
    /// [`Event::Failed`], so that nobody waits for an engine that is gone.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.abort.is_none() {
            return Poll::Ready(None);
        }
        let event = match self.take(cx) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Some(event)) => event,
            Poll::Ready(None) => {
                Event::Failed(EngineError::Rank("it went away before the request was finished".into()))
            }
        };
        if matches!(event, Event::Finished(_) | Event::Failed(_)) {
            self.abort = None;
        }
        Poll::Ready(Some(event))
    }

    /// The next event that was sent; `None` when there will be none.
    fn take(&mut self, cx: &Context<'_>) -> Poll<Option<Event>> {
        if self.taken.is_empty() {
            let mut queue = lock(&self.queue);
            if queue.events.is_empty() && !queue.is_closed {
                queue.waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
            // All of it: one look into the queue for each time that the reader is woken.
            mem::swap(&mut queue.events, &mut self.taken);
        }
        Poll::Ready(self.taken.pop_front())
    }

    /// [`poll_next`](Self::poll_next) as a future.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|cx| self.poll_next(cx)).await
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        lock(&self.queue).is_closed = true;
        if let Some(abort) = self.abort.take() {
            abort();
        }
    }
}

impl fmt::Debug for EventStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventStream").field("ended", &self.abort.is_none()).finish_non_exhaustive()
    }
}

impl EventSender {
    /// Sends; false when the other end is gone, and the request is aborted.
    pub fn send(&self, event: Event) -> bool {
        self.send_all([event])
    }

    /// Sends what a step has for the request, in order.
    pub fn send_all(&self, events: impl IntoIterator<Item = Event>) -> bool {
        let mut queue = lock(&self.queue);
        if queue.is_closed {
            return false;
        }
        queue.events.extend(events);
        let waker = queue.waker.take();
        // The reader may run at once, and look into the queue.
        drop(queue);
        waker.into_iter().for_each(Waker::wake);
        true
    }
}

impl Drop for EventSender {
    fn drop(&mut self) {
        let mut queue = lock(&self.queue);
        queue.is_closed = true;
        let waker = queue.waker.take();
        drop(queue);
        waker.into_iter().for_each(Waker::wake);
    }
}

impl Health {
    /// The step loop moves.
    pub fn is_live(&self) -> bool {
        self.condition.is_live()
    }

    /// A request would be admitted.
    pub fn is_ready(&self) -> bool {
        self.condition == Condition::Ready
    }
}

impl Condition {
    /// Not stalled.
    pub fn is_live(&self) -> bool {
        !matches!(self, Self::Stalled(_))
    }

    /// Why not, when it isn't ready.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Ready => None,
            Self::Unready(reason) | Self::Stalled(reason) => Some(reason),
        }
    }
}

impl RequestIds {
    /// The next id, from 1.
    pub fn next(&self) -> RequestId {
        RequestId(self.next.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use atom_base::{FinishReason, ScoredToken};
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    /// Counts how often it is woken.
    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn counted() -> (Arc<AtomicUsize>, EventSender, EventStream) {
        let aborts = Arc::new(AtomicUsize::new(0));
        let count = aborts.clone();
        let (sender, stream) = EventStream::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        (aborts, sender, stream)
    }

    #[tokio::test]
    async fn a_stream_aborts_once_when_dropped_early_and_never_after_its_end() {
        let (aborts, sender, stream) = counted();
        drop(stream);
        assert_eq!(aborts.load(Ordering::Relaxed), 1);
        assert!(!sender.send(Event::Started { cached_tokens: 0 }));

        let (aborts, sender, mut stream) = counted();
        assert!(sender.send(Event::Finished(FinishReason::Stop)));
        assert_eq!(stream.next().await, Some(Event::Finished(FinishReason::Stop)));
        assert_eq!(stream.next().await, None);
        drop(stream);
        assert_eq!(aborts.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn an_engine_that_goes_away_is_a_failure_and_not_an_end() {
        let (aborts, sender, mut stream) = counted();
        sender.send(Event::Started { cached_tokens: 3 });
        drop(sender);
        assert_eq!(stream.next().await, Some(Event::Started { cached_tokens: 3 }));
        assert!(matches!(stream.next().await, Some(Event::Failed(EngineError::Rank(_)))));
        assert_eq!(stream.next().await, None);
        drop(stream);
        assert_eq!(aborts.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_a_step_has_for_a_request_wakes_its_reader_once_and_comes_in_order() {
        let (_, sender, mut stream) = counted();
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(wakes.clone());
        let mut cx = Context::from_waker(&waker);
        let token = |id| Event::Token(ScoredToken { logprob: 0.0, ..ScoredToken::bare(id) });
        assert_eq!(stream.poll_next(&mut cx), Poll::Pending);
        let begin = Event::Started { cached_tokens: 0 };
        assert!(sender.send_all([begin.clone(), token(1)]));
        // Before the reader has looked: it is awake already.
        assert!(sender.send_all([token(2), Event::Finished(FinishReason::Length)]));
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        let end = Event::Finished(FinishReason::Length);
        for event in [begin, token(1), token(2), end] {
            assert_eq!(stream.poll_next(&mut cx), Poll::Ready(Some(event)));
        }
        assert_eq!(stream.poll_next(&mut cx), Poll::Ready(None));
        drop(sender);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_reader_is_woken_when_the_engine_goes_away_and_has_what_it_sent_before() {
        let (_, sender, mut stream) = counted();
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(wakes.clone());
        let mut cx = Context::from_waker(&waker);
        assert_eq!(stream.poll_next(&mut cx), Poll::Pending);
        drop(sender);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert!(matches!(stream.poll_next(&mut cx), Poll::Ready(Some(Event::Failed(_)))));
        assert_eq!(stream.poll_next(&mut cx), Poll::Ready(None));
    }
}
