//! The outbox without ranks: batches in, what every sink saw out.

use super::*;
use atom_base::{FinishReason, ScoredToken};
use std::convert::Infallible;

/// Events of a step, and of all that may wait.
const STEP_EVENTS: usize = 1000;
const ROOM: usize = STEPS_WAITING_MAX * STEP_EVENTS;

/// What one sink took, take by take.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<Vec<Event>>>>);

impl StepSink for Seen {
    fn take(&mut self, events: &mut dyn Iterator<Item = Event>) {
        lock(&self.0).push(events.collect());
    }
}

impl Seen {
    fn takes(&self) -> Vec<Vec<Event>> {
        lock(&self.0).clone()
    }
}

fn token(id: u32) -> Event {
    Event::Token(ScoredToken { logprob: 0.0, ..ScoredToken::bare(id) })
}

fn open(outbox: &Outbox, request: u64, lane: u16) -> Seen {
    let seen = Seen::default();
    let place = |_: &[LaneLoad]| Ok::<_, Infallible>(Placement { lane: LaneId(lane), prefill_rows: 5 });
    assert_eq!(outbox.route(RequestId(request), 7, Box::new(seen.clone()), place), Ok(LaneId(lane)));
    seen
}

fn post(outbox: &Outbox, lane: u16, events: &[(u64, Event)]) {
    let mut batch = outbox.batch();
    batch.extend(events.iter().map(|(id, event)| (RequestId(*id), event.clone())));
    outbox.post(LaneId(lane), &mut batch);
    assert!(batch.is_empty() && batch.capacity() >= ROOM, "{}", batch.capacity());
}

/// No sink panics.
fn nobody(id: RequestId, _: LaneId) {
    unreachable!("{id:?} is cancelled");
}

fn loads(outbox: &Outbox) -> Vec<LaneLoad> {
    outbox.lock_routes().loads.to_vec()
}

#[test]
fn a_request_takes_what_a_step_has_for_it_at_once_and_in_order() {
    let outbox = Outbox::new(2, STEP_EVENTS);
    let (one, two, three) = (open(&outbox, 1, 0), open(&outbox, 2, 0), open(&outbox, 3, 1));
    let started = Event::Started { cached_tokens: 0 };
    let end = Event::Finished(FinishReason::Stop);
    post(&outbox, 0, &[(1, started.clone()), (1, token(10)), (2, started.clone()), (2, token(20))]);
    post(&outbox, 1, &[(3, started.clone()), (3, end.clone())]);
    outbox.close();
    outbox.deliver(nobody);
    assert_eq!(one.takes()[0], [started.clone(), token(10)]);
    assert_eq!(two.takes()[0], [started.clone(), token(20)]);
    // Whoever was open when the engine ended got one end, whoever had ended no other.
    let failed = |takes: &[Vec<Event>]| takes.len() == 2 && matches!(takes[1][..], [Event::Failed(_)]);
    assert!(failed(&one.takes()) && failed(&two.takes()), "{:?}", one.takes());
    assert_eq!(three.takes(), [vec![started, end]]);
    assert_eq!((outbox.open(), loads(&outbox)), (0, vec![LaneLoad::default(); 2]));
}

#[test]
fn a_request_that_nobody_listens_to_takes_nothing_and_the_others_all() {
    let outbox = Outbox::new(1, STEP_EVENTS);
    let (gone, stays) = (open(&outbox, 1, 0), open(&outbox, 2, 0));
    post(&outbox, 0, &[(1, token(10)), (1, token(11)), (2, token(20))]);
    assert_eq!(outbox.unroute(RequestId(1)), Some(LaneId(0)));
    outbox.close();
    outbox.deliver(nobody);
    assert_eq!(gone.takes(), Vec::<Vec<Event>>::new());
    assert_eq!(stays.takes()[0], [token(20)]);
}

#[test]
fn steps_that_wait_stand_behind_each_other_and_a_full_lane_waits_for_room() {
    let outbox = Outbox::new(1, STEP_EVENTS);
    let seen = open(&outbox, 1, 0);
    let steps = 3 * ROOM as u32;
    std::thread::scope(|scope| {
        scope.spawn(|| outbox.deliver(nobody));
        let mut batch = outbox.batch();
        for id in 0..steps {
            batch.push((RequestId(1), token(id)));
            outbox.post(LaneId(0), &mut batch);
        }
        outbox.close();
    });
    let all: Vec<Event> = seen.takes().concat();
    assert_eq!(all.len(), steps as usize + 1);
    assert!((0..steps).all(|id| all[id as usize] == token(id)));
    assert!(matches!(all.last(), Some(Event::Failed(_))));
}

#[test]
fn nobody_waits_for_room_once_the_outbox_is_closed() {
    let outbox = Outbox::new(1, STEP_EVENTS);
    let full = vec![(1, token(1)); ROOM];
    outbox.close();
    outbox.deliver(nobody);
    post(&outbox, 0, &full);
    post(&outbox, 0, &full);
}

/// Panics with its second event.
struct Brittle(usize);

impl StepSink for Brittle {
    fn take(&mut self, events: &mut dyn Iterator<Item = Event>) {
        for _ in events {
            self.0 += 1;
            assert!(self.0 < 2, "a bug");
        }
    }
}

#[test]
fn a_sink_that_panics_takes_nobody_elses_events_along() {
    let outbox = Outbox::new(1, STEP_EVENTS);
    let place = |_: &[LaneLoad]| Ok::<_, Infallible>(Placement { lane: LaneId(0), prefill_rows: 5 });
    outbox.route(RequestId(1), 7, Box::new(Brittle(0)), place).unwrap();
    let other = open(&outbox, 2, 0);
    post(&outbox, 0, &[(1, token(10)), (1, token(11)), (1, token(12)), (2, token(20))]);
    outbox.close();
    let cancelled = Mutex::new(Vec::new());
    // It is still known then: nobody takes it for gone whom its lane has not been told of.
    outbox.deliver(|id, lane| lock(&cancelled).push((id, lane, outbox.is_open(id))));
    assert_eq!(*lock(&cancelled), [(RequestId(1), LaneId(0), true)], "its lane computes for nobody");
    assert_eq!(other.takes()[0], [token(20)]);
    assert!(matches!(other.takes()[1][..], [Event::Failed(_)]), "{:?}", other.takes());
    assert_eq!((outbox.open(), loads(&outbox)), (0, vec![LaneLoad::default()]));
    // Nor when everybody is told that it is over.
    let outbox = Outbox::new(1, STEP_EVENTS);
    outbox.route(RequestId(1), 7, Box::new(Brittle(1)), place).unwrap();
    let other = open(&outbox, 2, 0);
    outbox.give_up(&EngineError::Rank("gone".into()));
    assert!(matches!(other.takes()[0][..], [Event::Failed(_)]));
    post(&outbox, 0, &vec![(2, token(1)); ROOM]);
    post(&outbox, 0, &vec![(2, token(1)); ROOM]);
}
