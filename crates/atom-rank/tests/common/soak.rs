//! Random load on a group whose ranks fail, are slow or get stuck, pause and run out of cache. Every answer is compared with
//! that of the same request alone, and at rests everything must be back where it was.
#![allow(unreachable_pub, reason = "shared by a test and an example")]

use crate::common::spoil::{Kind, STAGES, Spoil, Spoiled, Spoiler};
use crate::common::{Setup, ask, expert_parallel, mesh, request, rest, tiny};
use atom_base::{FinishReason, LaneId, RequestId, SamplingParams, TokenId};
use atom_engine::{EngineError, Event, Request};
use atom_group::{Alignment, Patience, Policy};
use atom_ops::KvDType;
use atom_rank::{Host, Stage};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Answers that were whole and right.
    pub finished: u64,
    pub aborted: u64,
    /// Answered with the error of a lost rank.
    pub lost: u64,
    pub tokens: u64,
    /// Ranks that failed or got stuck, and were replaced.
    pub faults: u64,
    /// Of those, ranks that got stuck.
    pub stuck: u64,
    /// Ranks that were slower than all others for once.
    pub slow: u64,
    pub pauses: u64,
    pub preempted: u64,
    /// Times that all was at rest and was looked at.
    pub rests: u64,
    /// Steps of lane 0.
    pub replays: u64,
}

/// Runs until `goes_on` is false, which is asked before every request. Fails at the first wrong answer, error that
/// nobody injected, or remainder; ends the process if nothing at all happens for two minutes.
pub fn soak(seed: u32, goes_on: impl FnMut(&Totals) -> bool) -> Totals {
    let spoiler = Arc::new(Spoiler::new(usize::from(LANES), false));
    let host = setup().start_probed(&tiny(MODEL), Arc::clone(&spoiler));
    let pulse = Pulse::default();
    let totals = std::thread::scope(|scope| {
        let watchdog = scope.spawn(|| pulse.watch(&host));
        // Also when a check fails.
        let _end = End { pulse: &pulse, watchdog: watchdog.thread().clone() };
        Load::new(seed, &host, spoiler, &pulse).run(goes_on)
    });
    assert_eq!(host.shutdown(), Ok(()));
    totals
}

/// Four lanes that share experts, with a cache for a fraction of what they are asked for.
fn setup() -> Setup {
    Setup {
        mesh: mesh(LANES, 1, true),
        experts: expert_parallel(),
        rank_restarts_max: u32::MAX,
        rows_max: 48,
        max_num_seqs: 8,
        pages: PAGES,
        max_model_len: 200,
        kv_dtype: KvDType::F16,
        record_all: false,
        policy: Policy { alignment: Some(Alignment::default()), ..Policy::default() },
        // Of a machine that has other things to do: who is not stuck must not be taken for it.
        patience: Patience { min: Duration::from_secs(5), first: Duration::from_secs(5) },
        ..Setup::default()
    }
}

/// Beats with all that happens.
#[derive(Default)]
struct Pulse {
    beats: AtomicU64,
    is_over: AtomicBool,
}

struct End<'a> {
    pulse: &'a Pulse,
    watchdog: std::thread::Thread,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.pulse.is_over.store(true, Ordering::SeqCst);
        self.watchdog.unpark();
    }
}

impl Pulse {
    fn beat(&self) {
        self.beats.fetch_add(1, Ordering::Relaxed);
    }

    fn watch(&self, host: &Host) {
        let (mut seen, mut since) = (0, Instant::now());
        while !self.is_over.load(Ordering::SeqCst) {
            std::thread::park_timeout(Duration::from_secs(1));
            let beats = self.beats.load(Ordering::Relaxed);
            if beats != seen {
                (seen, since) = (beats, Instant::now());
            } else if since.elapsed() > HANGS_AFTER {
                eprintln!("nothing has happened for {:?}: {:#?}", since.elapsed(), host.health());
                eprintln!("{:#?}, {} requests open", host.stats(), host.open_requests());
                std::process::abort();
            }
        }
    }
}

/// A request on its way.
struct Open {
    recipe: u32,
    lane: Option<u16>,
    /// Ranks that were lost when it was sent.
    lost: usize,
    has_started: bool,
    bits: Bits,
}

/// Tokens with the bits of their log-probabilities, the prompt's first.
type Bits = Vec<(TokenId, u32)>;

/// Who sends, listens and interferes.
struct Load<'a> {
    seed: u32,
    drawn: u32,
    host: &'a Host,
    spoiler: Arc<Spoiler>,
    pulse: &'a Pulse,
    /// Does one request at a time, with room for all and no faults.
    reference: Host,
    expected: HashMap<u32, Bits>,
    open: BTreeMap<RequestId, Open>,
    events: Receiver<(RequestId, Event)>,
    sender: Sender<(RequestId, Event)>,
    is_paused: bool,
    threads: Option<usize>,
    preempted: [u64; LANES as usize],
    totals: Totals,
}

impl<'a> Load<'a> {
    fn new(seed: u32, host: &'a Host, spoiler: Arc<Spoiler>, pulse: &'a Pulse) -> Self {
        let alone = Setup { pages: 600, policy: Policy::default(), poison: false, ..setup() };
        let (sender, events) = channel();
        Self {
            seed,
            drawn: 0,
            host,
            spoiler,
            pulse,
            reference: alone.start(&tiny(MODEL)),
            expected: HashMap::new(),
            open: BTreeMap::new(),
            events,
            sender,
            is_paused: false,
            threads: threads(),
            preempted: [0; LANES as usize],
            totals: Totals::default(),
        }
    }

    fn run(mut self, mut goes_on: impl FnMut(&Totals) -> bool) -> Totals {
        let mut sent = 0;
        while goes_on(&self.totals) {
            self.pulse.beat();
            match self.below(100) {
                0..70 => {
                    while self.open.len() >= OPEN_MAX {
                        self.listen();
                    }
                    self.send();
                    sent += 1;
                    if sent % REST_EVERY == 0 {
                        self.rest();
                    }
                }
                70..78 => self.abort(),
                78..80 => self.pause(),
                80..82 => self.arm(),
                _ => (0..self.below(60)).for_each(|_| self.listen()),
            }
        }
        self.rest();
        self.totals
    }

    /// A number below `n`; the same ones for the same seed.
    fn below(&mut self, n: u32) -> u32 {
        self.drawn += 1;
        atom_base::rng::philox([self.drawn, 0, 0, 0], [self.seed, 0xd1ce])[0] % n
    }

    fn send(&mut self) {
        let (recipe, lane) = (self.below(RECIPES), self.below(2 * u32::from(LANES)) as u16);
        let lane = (lane < LANES).then_some(lane);
        let session = Some(u64::from(self.below(40))).filter(|session| *session < 10);
        let request = Request { lane: lane.map(LaneId), session, ..made(recipe) };
        let (id, sender) = (request.id, self.sender.clone());
        let lost = self.lost().len();
        self.open.insert(id, Open { recipe, lane, lost, has_started: false, bits: Bits::new() });
        let taken = self.host.submit(request, Box::new(move |event| drop(sender.send((id, event)))));
        assert_eq!(taken, Ok(()), "{:#?}", self.host.health());
    }

    fn abort(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let at = self.below(self.open.len() as u32) as usize;
        let id = *self.open.keys().nth(at).expect("there are as many");
        self.host.abort(id);
        self.open.remove(&id);
        self.totals.aborted += 1;
    }

    fn pause(&mut self) {
        if !self.is_paused {
            self.host.pause();
            self.totals.pauses += 1;
        } else {
            self.host.resume();
        }
        self.is_paused = !self.is_paused;
    }

    /// Lets a rank fail soon, once the last loss is dealt with.
    fn arm(&mut self) {
        let lost = self.lost().len() as u64;
        let has_formed = self.host.stats().iter().all(|lane| lane.epoch == lost + 1);
        let stage = STAGES[self.below(STAGES.len() as u32) as usize];
        // Recordings are rare, and who gets stuck costs everybody its deadline.
        let passes = if stage == Stage::Record { 0 } else { self.below(200) };
        let kind = match self.below(20) {
            0..7 => Kind::Error,
            7..14 => Kind::Panic,
            14..19 => Kind::Slow,
            _ => Kind::Stuck,
        };
        // Before an exchange the others may be asleep, and would not come before the slow one.
        let stage = if kind == Kind::Slow { stage.max(Stage::Settle) } else { stage };
        let rank = self.below(LANES.into()) as u16;
        if has_formed && !self.spoiler.is_armed() {
            self.spoiler.arm(Some(Spoil { rank, stage, kind, passes }));
        }
    }

    /// Faults that cost a rank so far.
    fn lost(&self) -> Vec<Spoiled> {
        self.spoiler.spoiled().into_iter().filter(|spoiled| spoiled.kind != Kind::Slow).collect()
    }

    /// Takes in one event, if one is due.
    fn listen(&mut self) {
        if self.is_paused {
            self.pause();
        }
        if self.open.is_empty() {
            return;
        }
        let (id, event) = self.events.recv().expect("the sender is here");
        self.pulse.beat();
        // What was aborted may still have events on the way.
        let Some(open) = self.open.get_mut(&id) else { return };
        match event {
            Event::Started { .. } => {
                assert!(!open.has_started, "a request starts once");
                open.has_started = true;
            }
            Event::PromptScored { scored, .. } => open.bits.push((scored.token, scored.logprob.to_bits())),
            Event::Token(token) => open.bits.push((token.token, token.logprob.to_bits())),
            Event::Finished(reason) => {
                assert_eq!(reason, FinishReason::Length);
                let open = self.open.remove(&id).expect("found above");
                self.check(&open, true);
                self.totals.finished += 1;
            }
            Event::Failed(EngineError::Rank(why)) => {
                let open = self.open.remove(&id).expect("found above");
                // One that had failed before may not have been noticed yet.
                let lost = self.lost().split_off(open.lost.saturating_sub(1));
                let explains = |lost: &Spoiled| {
                    let Spoiled { rank, step, kind, .. } = *lost;
                    let name = match kind {
                        Kind::Stuck => format!("rank {rank} (lane {rank}, "),
                        _ => format!("rank {rank} (lane {rank}): step {step}: "),
                    };
                    open.lane.is_none_or(|lane| lane == rank) && why.contains(&name)
                };
                assert!(lost.iter().any(explains), "{lost:?}, lane {:?}: {why}", open.lane);
                self.check(&open, false);
                self.totals.lost += 1;
            }
            Event::Failed(error) => panic!("recipe {}: {error}", open.recipe),
        }
    }

    /// Compares what came with what comes alone: all of it, or its beginning.
    fn check(&mut self, open: &Open, is_whole: bool) {
        let recipe = open.recipe;
        let expected =
            self.expected.entry(recipe).or_insert_with(|| ask(&self.reference, made(recipe)).bits());
        let due = if is_whole { &expected[..] } else { &expected[..open.bits.len()] };
        assert!(open.bits == due, "recipe {recipe}: {:?} in place of {due:?}", open.bits);
        self.totals.tokens += open.bits.len() as u64;
    }

    /// Sends no more, lets everybody finish, and looks whether all is back where it was.
    fn rest(&mut self) {
        self.spoiler.arm(None);
        while !self.open.is_empty() {
            self.listen();
        }
        if self.is_paused {
            self.pause();
        }
        let lost = self.lost();
        let epoch = lost.len() as u64 + 1;
        while self.host.health().forming.is_some() || self.host.stats()[0].epoch < epoch {
            std::thread::yield_now();
        }
        rest(self.host);
        // Who was stuck finds its seat taken, and ends without leaving anything.
        self.spoiler.release();
        while threads() > self.threads {
            std::thread::yield_now();
        }
        let (health, stats) = (self.host.health(), self.host.stats());
        assert!(health.fault.is_none() && health.ready, "{health:#?}");
        assert!(health.lanes.iter().all(|lane| lane.step == health.lanes[0].step), "{health:#?}");
        assert_eq!(self.host.open_requests(), 0);
        for (lane, last) in stats.iter().zip(&mut self.preempted) {
            let counters = lane.counters;
            assert_eq!((counters.running, counters.waiting, counters.pages_held), (0, 0, 0), "{lane:#?}");
            assert!(counters.pages_kept < PAGES, "{lane:#?}");
            assert_eq!((lane.epoch, lane.eager_steps.total()), (epoch, 0), "each loss is one epoch");
            // A lane that was replaced counts from 0.
            let since = counters.preempted.checked_sub(*last).unwrap_or(counters.preempted);
            self.totals.preempted += since;
            *last = counters.preempted;
        }
        self.totals.faults = lost.len() as u64;
        self.totals.stuck = lost.iter().filter(|lost| lost.kind == Kind::Stuck).count() as u64;
        self.totals.slow = self.spoiler.spoiled().len() as u64 - self.totals.faults;
        self.totals.rests += 1;
        self.totals.replays = stats[0].replays;
    }
}

/// The `recipe`-th request: some begin alike, some score their prompts, half are greedy.
fn made(recipe: u32) -> Request {
    let draw = |what: u32, n: u32| atom_base::rng::philox([what, 0, 0, 0], [recipe, 0x50ac])[0] % n;
    let token = |key: u32, at: u32| atom_base::rng::philox([at, 0, 0, 0], [key, 0x70ce])[0] % 500;
    let (family, common) = (1_000_000 + recipe % 8, draw(0, 4) * 20);
    let own = 1 + draw(1, 60);
    let tokens: Vec<_> =
        (0..common).map(|at| token(family, at)).chain((0..own).map(|at| token(recipe, at))).collect();
    let sampling = SamplingParams {
        temperature: if recipe.is_multiple_of(2) { 0.0 } else { 0.9 },
        repetition_penalty: if recipe.is_multiple_of(3) { 1.2 } else { 1.0 },
        seed: recipe.into(),
        logprobs: Some(1),
        prompt_logprobs: recipe.is_multiple_of(7).then_some(1),
        ..SamplingParams::default()
    };
    request(&tokens, 1 + draw(2, 60), sampling)
}

/// Threads of this process, where the system says so.
fn threads() -> Option<usize> {
    std::fs::read_dir("/proc/self/task").ok().map(Iterator::count)
}

const LANES: u16 = 4;
const MODEL: &str = "qwen3_moe";
/// 40 of 16 positions: 4 requests of the longest kind, and 8 may run.
const PAGES: usize = 41;
/// Different requests: each comes again and again, among others.
const RECIPES: u32 = 300;
/// Requests on their way at once.
const OPEN_MAX: usize = 48;
/// Requests between two rests.
const REST_EVERY: u32 = 250;
/// Far beyond any step, recording or loading of a tiny model.
const HANGS_AFTER: Duration = Duration::from_secs(120);
