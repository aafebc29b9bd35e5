//! Whose mask is next, and what becomes of those that find no room, or misbehave.

use super::*;
use atom_base::{MaskCell, TokenId};
use atom_engine::{Grammar, GrammarRef, TokenConstraint};

/// Writes down whose mask was computed.
struct Named {
    name: &'static str,
    log: Arc<Mutex<Vec<&'static str>>>,
}

impl Grammar for Named {
    fn start(&self) -> Result<Box<dyn TokenConstraint>, String> {
        Ok(Box::new(Self { name: self.name, log: Arc::clone(&self.log) }))
    }
}

impl TokenConstraint for Named {
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
        self.log.lock().unwrap().push(self.name);
        allowed[0] = 1;
        Ok(())
    }

    fn advance(&mut self, _: TokenId) -> Result<(), String> {
        Ok(())
    }
}

/// Its constraints panic when they are dropped.
struct OfBrittle;

/// Panics when it is dropped.
struct Brittle;

impl Grammar for OfBrittle {
    fn start(&self) -> Result<Box<dyn TokenConstraint>, String> {
        Ok(Box::new(Brittle))
    }
}

impl Grammar for Brittle {
    fn start(&self) -> Result<Box<dyn TokenConstraint>, String> {
        Ok(Box::new(Brittle))
    }
}

impl TokenConstraint for Brittle {
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
        allowed[0] = 1;
        Ok(())
    }

    fn advance(&mut self, _: TokenId) -> Result<(), String> {
        Ok(())
    }
}

impl Drop for Brittle {
    fn drop(&mut self) {
        panic!("a bug");
    }
}

type Log = Arc<Mutex<Vec<&'static str>>>;

/// A request's grammar, and its choices' first masks.
fn request(name: &'static str, log: &Log, choices: usize) -> (Vec<MaskWork>, Vec<Arc<MaskCell>>) {
    let grammar = GrammarRef(Arc::new(Named { name, log: Arc::clone(log) }));
    (0..choices).map(|_| MaskWork::first(&grammar)).unzip()
}

/// Computes all that waits.
fn run(queue: &mut Queue) {
    while let Some(work) = queue.pop() {
        work.run(32);
    }
}

#[test]
fn requests_take_turns_however_many_choices_they_have() {
    let (log, mut queue) = (Log::default(), Queue::new(100));
    let (heavy, _cells) = request("heavy", &log, 5);
    let (light, _light) = request("light", &log, 2);
    let (late, _late) = request("late", &log, 1);
    assert!(heavy.into_iter().chain(light).all(|work| queue.push(work)));
    for _ in 0..4 {
        queue.pop().unwrap().run(32);
    }
    // Whoever comes later does not wait for what others have left, nor does it overtake for what it missed.
    late.into_iter().for_each(|work| assert!(queue.push(work)));
    run(&mut queue);
    let turns = ["heavy", "light", "heavy", "light", "late", "heavy", "heavy", "heavy"];
    assert_eq!(*log.lock().unwrap(), turns);
}

#[test]
fn a_full_queue_forgets_who_is_gone_and_refuses_the_rest_with_its_number() {
    let (log, mut queue) = (Log::default(), Queue::new(4));
    let (work, cells) = request("a", &log, 4);
    work.into_iter().for_each(|work| assert!(queue.push(work)));
    let (more, more_cells) = request("b", &log, 1);
    more.into_iter().for_each(|work| assert!(!queue.push(work)));
    assert_eq!(more_cells[0].fault(), Some(MaskFault::Busy { waiting: 4 }));
    // Two of the first request's choices are aborted.
    let _stay = cells[..2].to_vec();
    drop(cells);
    let (more, _more_cells) = request("c", &log, 1);
    more.into_iter().for_each(|work| assert!(queue.push(work)));
    assert_eq!(queue.work.len(), 3);
    run(&mut queue);
    assert_eq!(*log.lock().unwrap(), ["a", "c", "a"]);
}

/// What the queue does, by looking at all of it each time.
#[derive(Default)]
struct Searched {
    work: Vec<(u64, usize, &'static str)>,
    turn: u64,
}

impl Searched {
    fn push(&mut self, client: usize, name: &'static str) {
        let last = self.work.iter().rev().find(|(_, other, _)| *other == client);
        let turn = last.map_or(self.turn, |(last, ..)| (last + 1).max(self.turn));
        self.work.push((turn, client, name));
    }

    fn pop(&mut self) -> Option<&'static str> {
        let (at, first) = self.work.iter().enumerate().min_by_key(|(_, (turn, ..))| *turn)?;
        self.turn = first.0;
        Some(self.work.remove(at).2)
    }
}

#[test]
fn turns_are_those_that_a_search_of_the_whole_queue_finds() {
    const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
    for seed in 0..50 {
        let (log, mut queue, mut model) = (Log::default(), Queue::new(64), Searched::default());
        let grammars: Vec<_> = NAMES
            .map(|name| GrammarRef(Arc::new(Named { name, log: Arc::clone(&log) })))
            .into_iter()
            .collect();
        let (mut cells, mut expected) = (Vec::new(), Vec::new());
        for at in 0..400u32 {
            let draw = atom_base::rng::philox([at, seed, 0, 0], [1, 2]);
            let name = draw[0] as usize % NAMES.len();
            // More come than go at first, then fewer: it fills and drains.
            if draw[1] % 100 < (if at < 120 { 70 } else { 45 }) && model.work.len() < 64 {
                let (work, cell) = MaskWork::first(&grammars[name]);
                cells.push(cell);
                assert!(queue.push(work));
                model.push(name, NAMES[name]);
            } else {
                let popped = queue.pop();
                assert_eq!(popped.is_some(), !model.work.is_empty());
                popped.into_iter().for_each(|work| work.run(32));
                expected.extend(model.pop());
            }
            assert_eq!(queue.work.len(), model.work.len());
            let clients: std::collections::HashSet<_> = model.work.iter().map(|(_, name, _)| name).collect();
            assert_eq!(queue.clients.len(), clients.len(), "who has nothing that waits is forgotten");
        }
        run(&mut queue);
        while let Some(name) = model.pop() {
            expected.push(name);
        }
        assert_eq!(*log.lock().unwrap(), expected);
        assert!(queue.clients.is_empty());
    }
}

#[test]
fn a_request_whose_work_was_forgotten_begins_again_with_the_others() {
    let (log, mut queue) = (Log::default(), Queue::new(4));
    // All of the first request's choices but one are gone when room is short.
    let (work, mut cells) = request("a", &log, 4);
    work.into_iter().for_each(|work| assert!(queue.push(work)));
    cells.truncate(1);
    let (more, _more) = request("b", &log, 2);
    more.into_iter().for_each(|work| assert!(queue.push(work)));
    assert_eq!((queue.work.len(), queue.clients.len()), (3, 2));
    run(&mut queue);
    assert_eq!(*log.lock().unwrap(), ["a", "b", "b"]);
}

#[test]
fn a_grammar_that_panics_when_it_ends_takes_no_thread_along() {
    let pool = MaskPool::new(32, 8);
    let log = Log::default();
    // One whose request is gone already, and one that is computed.
    let (gone, _) = MaskWork::first(&GrammarRef(Arc::new(Brittle)));
    let (computed, cell) = MaskWork::first(&GrammarRef(Arc::new(OfBrittle)));
    let (other, cells) = request("other", &log, 1);
    pool.hand_out([gone, computed].into_iter().chain(other));
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| pool.compute());
        for cell in cells.iter().chain([&cell]) {
            cell.set_deadline(Instant::now() + Duration::from_secs(600));
            assert_eq!(cell.wait(<[u32]>::to_vec), Some(vec![1]));
        }
        pool.close();
        thread.join().expect("it ended as it should");
    });
}

#[test]
fn what_several_rows_waited_for_at_once_counts_once_and_the_time_between_not_at_all() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let ms =
        |stretches: &[(u64, u64)]| sum(|| stretches.iter().map(|&(from, to)| (at(from), at(to)))).as_millis();
    assert_eq!(ms(&[]), 0);
    assert_eq!(ms(&[(5, 9)]), 4);
    assert_eq!(ms(&[(5, 9), (100, 110)]), 14);
    assert_eq!(ms(&[(100, 110), (0, 10), (1, 2), (1, 20), (20, 25), (105, 112)]), 25 + 12);
}
