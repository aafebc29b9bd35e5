//! How events leave a lane: all those of a step as one batch, exchanged for an empty one, to one thread,
//! which hands each request what is its own. The step allocates nothing and never waits for a reader.

use atom_base::{LaneId, RequestId};
use atom_engine::{EngineError, Event, LaneLoad, Placement};
use std::collections::HashMap;
use std::iter;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;

/// Takes the events of one request, in order. Must not block: it runs on the one delivering thread.
pub type EventSink = Box<dyn FnMut(Event) + Send>;

/// Takes the events of one request, in order, and those of a step together: for whoever wakes a reader,
/// which is then done once. Must not block: it runs on the one delivering thread.
pub trait StepSink: Send {
    /// Takes what a step has for the request: never nothing, and of several late steps perhaps all.
    fn take(&mut self, events: &mut dyn Iterator<Item = Event>);
}

/// Events of a lane with whom they are for; those of one request stand together.
pub(crate) type Batch = Vec<(RequestId, Event)>;

/// The batches on their way, the sinks, and the thread between them.
pub(crate) struct Outbox {
    waiting: Box<[Mutex<Batch>]>, // [lanes]
    /// Events of a lane that may wait. Room for them is reserved at the start and used from its beginning on.
    room: usize,
    routes: Mutex<Routes>,
    thread: OnceLock<Thread>,
    closed: AtomicBool,
}

/// A sink that doesn't care where a step ends.
pub(crate) struct Each(pub(crate) EventSink);

/// Every open request, and what each lane has of them: changed together, under one lock.
struct Routes {
    open: HashMap<RequestId, Route>,
    loads: Box<[LaneLoad]>, // [lanes]
}

struct Route {
    placement: Placement,
    tokens: usize,
    started: bool,
    sink: Box<dyn StepSink>,
}

impl Outbox {
    /// For lanes whose steps have so many events at the most.
    pub(crate) fn new(lanes: usize, step_events_max: usize) -> Arc<Self> {
        let room = STEPS_WAITING_MAX * step_events_max;
        Arc::new(Self {
            waiting: (0..lanes).map(|_| Mutex::new(Batch::with_capacity(room))).collect(),
            room,
            routes: Mutex::new(Routes {
                open: HashMap::new(),
                loads: vec![LaneLoad::default(); lanes].into(),
            }),
            thread: OnceLock::new(),
            closed: AtomicBool::new(false),
        })
    }

    /// An empty batch with its room. Whoever posts one gets another back, so there are three to a lane for
    /// ever: what the lane fills, what waits, what is handed over.
    pub(crate) fn batch(&self) -> Batch {
        Vec::with_capacity(self.room)
    }

    /// Registers where a request's events go; before the request can have any. `place` chooses its lane
    /// from what all lanes have open, or refuses; nobody else is placed meanwhile.
    pub(crate) fn route<E>(
        &self,
        request: RequestId,
        tokens: usize,
        sink: Box<dyn StepSink>,
        place: impl FnOnce(&[LaneLoad]) -> Result<Placement, E>,
    ) -> Result<LaneId, E> {
        let mut routes = self.lock_routes();
        let placement = place(&routes.loads)?;
        let load = routes.load(placement.lane);
        load.requests += 1;
        load.tokens += tokens;
        load.backlog += placement.prefill_rows;
        routes.open.insert(request, Route { placement, tokens, started: false, sink });
        Ok(placement.lane)
    }

    /// Forgets a request that its caller no longer listens to.
    pub(crate) fn unroute(&self, request: RequestId) -> Option<LaneId> {
        self.lock_routes().remove(request).map(|route| route.placement.lane)
    }

    /// True if the request has not ended.
    pub(crate) fn is_open(&self, request: RequestId) -> bool {
        self.lock_routes().open.contains_key(&request)
    }

    /// Requests that have not ended.
    pub(crate) fn open(&self) -> usize {
        self.lock_routes().open.len()
    }

    /// Forgets every request; nobody listens to any of them any more.
    pub(crate) fn unroute_all(&self) -> Vec<(RequestId, LaneId)> {
        let mut routes = self.lock_routes();
        routes.loads.fill(LaneLoad::default());
        routes.open.drain().map(|(request, route)| (request, route.placement.lane)).collect()
    }

    /// Fails every request of these lanes.
    pub(crate) fn fail(&self, lanes: &[LaneId], error: &EngineError) {
        self.fail_and(lanes, error, || {});
    }

    /// The same, and does `also` before any other request can be placed: what it clears away belongs to
    /// requests that were failed here, or that their submitters will find not to be open any more.
    pub(crate) fn fail_and(&self, lanes: &[LaneId], error: &EngineError, also: impl FnOnce()) {
        let mut routes = self.lock_routes();
        let lost = |route: &Route| lanes.contains(&route.placement.lane);
        let ids: Vec<_> = routes.open.iter().filter(|(_, route)| lost(route)).map(|(&id, _)| id).collect();
        for id in ids {
            let mut route = routes.remove(id).expect("found above, under the same lock");
            route.tell(id, &mut iter::once(Event::Failed(error.clone())));
        }
        also();
    }

    /// The delivering thread's loop; returns after [`close`](Self::close) once nothing waits. `cancel` is told of
    /// requests whose sinks panicked, before they are forgotten: nobody listens to what they would still compute.
    pub(crate) fn deliver(&self, cancel: impl Fn(RequestId, LaneId)) {
        self.thread.set(std::thread::current()).expect("one thread delivers");
        let mut batch = self.batch();
        loop {
            // In this order: what was posted before the end is found.
            let closed = self.closed.load(Ordering::SeqCst);
            for waiting in &self.waiting {
                std::mem::swap(&mut *lock(waiting), &mut batch);
                self.hand_over(&mut batch, &cancel);
            }
            if closed {
                // Nobody computes any more: what is still open would wait for ever.
                let lanes: Vec<_> = (0..self.waiting.len()).map(|lane| LaneId(lane as u16)).collect();
                return self.fail(&lanes, &EngineError::Rank("the engine was shut down".into()));
            }
            // Returns at once if anything was posted since the last time.
            std::thread::park();
        }
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// True once nothing is delivered any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// For when the delivering thread is gone: nobody waits for room any more, nor for an answer.
    pub(crate) fn give_up(&self, error: &EngineError) {
        self.closed.store(true, Ordering::SeqCst);
        let lanes: Vec<_> = (0..self.waiting.len()).map(|lane| LaneId(lane as u16)).collect();
        self.fail(&lanes, error);
    }

    /// Sends off the events of one step of a lane and leaves `events` empty, with room.
    pub(crate) fn post(&self, lane: LaneId, events: &mut Batch) {
        if events.is_empty() {
            return;
        }
        while !self.put(lane, events) {
            // Bounded: the delivering thread never blocks, so it makes room, or it has ended and has
            // answered every request itself.
            if self.is_closed() {
                return events.clear();
            }
            self.wake();
            std::thread::yield_now();
        }
        self.wake();
    }

    /// False if too much waits.
    fn put(&self, lane: LaneId, events: &mut Batch) -> bool {
        let mut waiting = lock(&self.waiting[usize::from(lane.0)]);
        if waiting.is_empty() {
            std::mem::swap(&mut *waiting, events);
            return true;
        }
        // Only when the delivering thread is a step behind.
        let has_room = waiting.len() + events.len() <= self.room;
        if has_room {
            waiting.append(events);
        }
        has_room
    }

    /// Gives every request its part of a batch, and leaves the batch empty, with its room.
    fn hand_over(&self, batch: &mut Batch, cancel: &impl Fn(RequestId, LaneId)) {
        let mut events = batch.drain(..).peekable();
        while let Some(&(request, _)) = events.peek() {
            let mut own =
                iter::from_fn(|| events.next_if(|(other, _)| *other == request)).map(|(_, event)| event);
            let deaf = self.hand_on(request, &mut own);
            // Of a request that nobody listens to any more.
            own.for_each(drop);
            if let Some(lane) = deaf {
                cancel(request, lane);
                self.unroute(request);
            }
        }
    }

    /// The request's lane if its sink panicked.
    fn hand_on(&self, request: RequestId, events: &mut dyn Iterator<Item = Event>) -> Option<LaneId> {
        let mut routes = self.lock_routes();
        let route = routes.open.get_mut(&request)?;
        let mut ended = false;
        // The first event comes with the end of the prompt, whatever it is.
        let begins = !std::mem::replace(&mut route.started, true);
        let seen =
            &mut events.inspect(|event| ended |= matches!(event, Event::Finished(_) | Event::Failed(_)));
        let heard = route.tell(request, seen);
        let Placement { lane, prefill_rows } = route.placement;
        if begins {
            routes.load(lane).backlog -= prefill_rows;
        }
        if ended && heard {
            routes.remove(request);
        }
        (!heard).then_some(lane)
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    fn lock_routes(&self) -> MutexGuard<'_, Routes> {
        lock(&self.routes)
    }
}

impl Route {
    /// False if the sink panicked. Others share the thread.
    fn tell(&mut self, request: RequestId, events: &mut dyn Iterator<Item = Event>) -> bool {
        let heard = catch_unwind(AssertUnwindSafe(|| self.sink.take(events))).is_ok();
        if !heard {
            tracing::error!("whoever takes the events of {request:?} panicked, which is a bug of ours");
        }
        heard
    }
}

impl StepSink for Each {
    fn take(&mut self, events: &mut dyn Iterator<Item = Event>) {
        events.for_each(&mut self.0);
    }
}

impl Routes {
    fn load(&mut self, lane: LaneId) -> &mut LaneLoad {
        &mut self.loads[usize::from(lane.0)]
    }

    /// Takes a request off its lane's load, with what it still weighs.
    fn remove(&mut self, request: RequestId) -> Option<Route> {
        let route = self.open.remove(&request)?;
        let load = self.load(route.placement.lane);
        load.requests -= 1;
        load.tokens -= route.tokens;
        if !route.started {
            load.backlog -= route.placement.prefill_rows;
        }
        Some(route)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Steps of a lane whose events may wait, if each has as many as a step can: the delivering thread hands them over in
/// less time than a step takes, and may be kept from its core for some of them.
const STEPS_WAITING_MAX: usize = 4;

#[cfg(test)]
#[path = "outbox_tests.rs"]
mod tests;
