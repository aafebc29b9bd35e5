//! How events leave a lane: through a ring of fixed size to one thread, which hands them to the
//! requests' sinks. The step allocates nothing and never waits for a reader.

use atom_base::{LaneId, RequestId};
use atom_engine::{EngineError, Event};
use crossbeam_queue::ArrayQueue;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Thread;

/// Takes the events of one request, in order. Must not block: it runs on the one delivering thread.
pub type EventSink = Box<dyn FnMut(Event) + Send>;

/// The ring, the sinks, and the thread between them.
pub(crate) struct Outbox {
    ring: ArrayQueue<(RequestId, Event)>,
    routes: Mutex<HashMap<RequestId, Route>>,
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
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            ring: ArrayQueue::new(RING_EVENTS),
            routes: Mutex::default(),
            thread: OnceLock::new(),
            closed: AtomicBool::new(false),
        })
    }

    /// Registers where a request's events go; before the request can have any.
    pub(crate) fn route(&self, request: RequestId, lane: LaneId, sink: EventSink) {
        self.lock_routes().insert(request, Route { lane, sink });
    }

    /// Forgets a request that its caller no longer listens to.
    pub(crate) fn unroute(&self, request: RequestId) -> Option<LaneId> {
        self.lock_routes().remove(&request).map(|r| r.lane)
    }

    /// Requests on this lane that have not ended.
    pub(crate) fn open_on(&self, lane: LaneId) -> usize {
        self.lock_routes().values().filter(|r| r.lane == lane).count()
    }

    /// Fails every request of these lanes.
    pub(crate) fn fail(&self, lanes: &[LaneId], error: &EngineError) {
        self.lock_routes().retain(|_, route| {
            let lost = lanes.contains(&route.lane);
            if lost {
                (route.sink)(Event::Failed(error.clone()));
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
                return;
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
                // Bounded: the delivering thread never blocks, so a full ring empties.
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
            routes.remove(&request);
        }
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
