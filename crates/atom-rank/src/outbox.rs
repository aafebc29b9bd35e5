//! How events leave a lane: through a ring of fixed size to one thread, which hands them to the
//! requests' sinks. The step allocates nothing and never waits for a reader.

use atom_base::{LaneId, RequestId};
use atom_engine::{EngineError, Event};
use crossbeam_queue::ArrayQueue;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Thread;

/// Takes the events of one request, in order. Must not block: it runs on the one delivering thread.
pub type EventSink = Box<dyn FnMut(Event) + Send>;

/// The ring, the sinks, and the thread between them.
pub(crate) struct Outbox {
    ring: ArrayQueue<(RequestId, Event)>,
    routes: Mutex<HashMap<RequestId, Route>>,
    open: Box<[AtomicUsize]>, // [lanes], routes of each
    thread: OnceLock<Thread>,
    closed: AtomicBool,
}

struct Route {
    lane: LaneId,
    sink: EventSink,
}

/// Events of several steps of a full batch; the delivering thread empties it in microseconds.
const RING_EVENTS: usize = 4096;

impl Outbox {
    pub(crate) fn new(lanes: usize) -> Arc<Self> {
        Arc::new(Self {
            ring: ArrayQueue::new(RING_EVENTS),
            routes: Mutex::default(),
            open: (0..lanes).map(|_| AtomicUsize::new(0)).collect(),
            thread: OnceLock::new(),
            closed: AtomicBool::new(false),
        })
    }

    /// Registers where a request's events go; before the request can have any.
    pub(crate) fn route(&self, request: RequestId, lane: LaneId, sink: EventSink) {
        let mut routes = self.lock_routes();
        routes.insert(request, Route { lane, sink });
        self.open_of(lane).fetch_add(1, Ordering::SeqCst);
    }

    /// Forgets a request that its caller no longer listens to.
    pub(crate) fn unroute(&self, request: RequestId) -> Option<LaneId> {
        let route = self.lock_routes().remove(&request)?;
        self.open_of(route.lane).fetch_sub(1, Ordering::SeqCst);
        Some(route.lane)
    }

    /// Requests on this lane that have not ended.
    pub(crate) fn open_on(&self, lane: LaneId) -> usize {
        self.open_of(lane).load(Ordering::SeqCst)
    }

    /// Forgets every request; nobody listens to any of them any more.
    pub(crate) fn unroute_all(&self) -> Vec<(RequestId, LaneId)> {
        let mut routes = self.lock_routes();
        let all = routes.drain().map(|(request, route)| (request, route.lane)).collect();
        self.open.iter().for_each(|open| open.store(0, Ordering::SeqCst));
        all
    }

    /// Fails every request of these lanes.
    pub(crate) fn fail(&self, lanes: &[LaneId], error: &EngineError) {
        self.lock_routes().retain(|_, route| {
            let lost = lanes.contains(&route.lane);
            if lost {
                (route.sink)(Event::Failed(error.clone()));
                self.open_of(route.lane).fetch_sub(1, Ordering::SeqCst);
            }
            !lost
        });
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
                let lanes: Vec<LaneId> = (0..self.open.len()).map(|lane| LaneId(lane as u16)).collect();
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
        let Some(route) = routes.get_mut(&request) else { return };
        let last = matches!(event, Event::Finished(_) | Event::Failed(_));
        (route.sink)(event);
        if last {
            self.open_of(route.lane).fetch_sub(1, Ordering::SeqCst);
            routes.remove(&request);
        }
    }

    fn open_of(&self, lane: LaneId) -> &AtomicUsize {
        &self.open[usize::from(lane.0)]
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    fn lock_routes(&self) -> std::sync::MutexGuard<'_, HashMap<RequestId, Route>> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
