//! How events leave a lane: through a ring of fixed size to one thread, which hands them to the
//! requests' sinks. The step allocates nothing and never waits for a reader.

use atom_base::{LaneId, RequestId};
use atom_engine::{EngineError, Event, LaneLoad, Placement};
use crossbeam_queue::ArrayQueue;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;

/// Takes the events of one request, in order. Must not block: it runs on the one delivering thread.
pub type EventSink = Box<dyn FnMut(Event) + Send>;

/// The ring, the sinks, and the thread between them.
pub(crate) struct Outbox {
    ring: ArrayQueue<(RequestId, Event)>,
    routes: Mutex<Routes>,
    thread: OnceLock<Thread>,
    closed: AtomicBool,
}

/// Every open request, and what each lane has of them: changed together, under one lock.
struct Routes {
    open: HashMap<RequestId, Route>,
    loads: Box<[LaneLoad]>, // [lanes]
}

struct Route {
    placement: Placement,
    tokens: usize,
    started: bool,
    sink: EventSink,
}

/// Events of several steps of a full batch; the delivering thread empties it in microseconds.
const RING_EVENTS: usize = 4096;

impl Outbox {
    pub(crate) fn new(lanes: usize) -> Arc<Self> {
        Arc::new(Self {
            ring: ArrayQueue::new(RING_EVENTS),
            routes: Mutex::new(Routes {
                open: HashMap::new(),
                loads: vec![LaneLoad::default(); lanes].into(),
            }),
            thread: OnceLock::new(),
            closed: AtomicBool::new(false),
        })
    }

    /// Registers where a request's events go; before the request can have any. `place` chooses its lane
    /// from what all lanes have open, or refuses; nobody else is placed meanwhile.
    pub(crate) fn route<E>(
        &self,
        request: RequestId,
        tokens: usize,
        sink: EventSink,
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
            (route.sink)(Event::Failed(error.clone()));
        }
        also();
    }

    /// The delivering thread's loop; returns after [`close`](Self::close) once the ring is empty.
    pub(crate) fn deliver(&self) {
        self.thread.set(std::thread::current()).expect("one thread delivers");
        loop {
            while let Some((request, event)) = self.ring.pop() {
                self.hand_over(request, event);
            }
            if self.closed.load(Ordering::SeqCst) && self.ring.is_empty() {
                // Nobody computes any more: what is still open would wait for ever.
                let lanes: Vec<_> =
                    (0..self.lock_routes().loads.len()).map(|lane| LaneId(lane as u16)).collect();
                return self.fail(&lanes, &EngineError::Rank("the engine was shut down".into()));
            }
            std::thread::park();
        }
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Sends off the events of one step and leaves `events` empty, with its room.
    pub(crate) fn post(&self, events: &mut Vec<(RequestId, Event)>) {
        if events.is_empty() {
            return;
        }
        for mut item in events.drain(..) {
            while let Err(back) = self.ring.push(item) {
                // Bounded: the delivering thread never blocks, so a full ring empties, or it has ended and
                // has answered every request itself.
                if self.closed.load(Ordering::SeqCst) {
                    break;
                }
                item = back;
                self.wake();
                std::thread::yield_now();
            }
        }
        self.wake();
    }

    fn hand_over(&self, request: RequestId, event: Event) {
        let mut routes = self.lock_routes();
        let Some(route) = routes.open.get_mut(&request) else { return };
        let last = matches!(event, Event::Finished(_) | Event::Failed(_));
        // The first event comes with the end of the prompt, whatever it is.
        let begins = !std::mem::replace(&mut route.started, true);
        (route.sink)(event);
        let Placement { lane, prefill_rows } = route.placement;
        if begins {
            routes.load(lane).backlog -= prefill_rows;
        }
        if last {
            routes.remove(request);
        }
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    fn lock_routes(&self) -> MutexGuard<'_, Routes> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
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
