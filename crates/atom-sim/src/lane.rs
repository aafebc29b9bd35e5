//! One lane: the shipped scheduler over a device that checks, with a ledger that listens.

use crate::broken::Broken;
use crate::device::FakeDevice;
use crate::ledger::{Gaps, Ledger};
use crate::model::{Ending, FakeModel, mix};
use atom_base::{RequestId, SamplingParams, ScoredToken, StopParams, TokenId};
use atom_engine::{Counters, EngineError, Plan, Request, Scheduler, SchedulerConfig, Want};
use atom_group::{Bucket, Grant};
use std::sync::Arc;

/// A scheduler, its device and its requests' books. Every call checks what can be checked.
pub struct Lane {
    config: SchedulerConfig,
    scheduler: Scheduler,
    device: FakeDevice,
    ledger: Ledger,
    plan: Plan,
    results: Vec<ScoredToken>,
    /// `plan` was computed and not applied.
    is_in_flight: bool,
    /// The step before, while that is so of it; at depth 1 only.
    before: Option<(Plan, Vec<ScoredToken>)>,
    spare: Option<(Plan, Vec<ScoredToken>)>,
    depth: usize,
    /// The oldest request, while it runs: it may not give way.
    oldest: Option<RequestId>,
    submitted: u64,
}

impl Lane {
    /// A lane without requests.
    pub fn new(config: SchedulerConfig, model: FakeModel) -> Self {
        let pages_per_sequence = config.max_model_len.div_ceil(config.page_size);
        let plan = || Plan::with_capacity(config.rows_max, config.max_num_seqs, pages_per_sequence);
        Self {
            scheduler: Scheduler::new(config.clone()),
            device: FakeDevice::new(&config, model.clone()),
            ledger: Ledger::new(model),
            plan: plan(),
            results: Vec::with_capacity(config.max_num_seqs),
            is_in_flight: false,
            before: None,
            spare: Some((plan(), Vec::with_capacity(config.max_num_seqs))),
            depth: 0,
            oldest: None,
            submitted: 0,
            config,
        }
    }

    /// Steps that may be computed and not applied when the next one is planned: 0 or 1.
    pub fn at_depth(self, depth: usize) -> Self {
        assert!(depth < 2, "one step ahead at the most");
        Self { depth, ..self }
    }

    /// Takes a request that passed the door.
    pub fn submit(&mut self, request: Request, now_ms: u64) -> Result<(), Broken> {
        self.submitted += 1;
        self.ledger.open(request.clone());
        self.scheduler.submit(request, now_ms, &mut self.ledger);
        self.ledger.take_broken()
    }

    /// Aborts a request, whatever it is doing. False if it has ended before.
    pub fn abort(&mut self, id: RequestId) -> Result<bool, Broken> {
        let account = self.ledger.account_mut(id)?;
        let had_ended = account.ended.is_some();
        account.abort_asked = true;
        let said = self.scheduler.abort(id, &mut self.ledger);
        self.ledger.take_broken()?;
        let has_ended = self.ledger.account_mut(id)?.ended.is_some();
        match (had_ended, said, has_ended) {
            (false, true, true) | (true, false, true) => Ok(said),
            (true, ..) => Err(Broken::Abort { request: id, said, truth: "it had ended" }),
            (false, ..) => Err(Broken::Abort { request: id, said, truth: "it had not ended" }),
        }
    }

    /// Makes the youngest give way. False if nobody runs.
    pub fn preempt_youngest(&mut self) -> bool {
        if self.counters().running == 1 {
            self.oldest = None;
        }
        self.scheduler.preempt_youngest()
    }

    /// Answers everybody with an error.
    pub fn fail(&mut self, why: &str) -> Result<(), Broken> {
        self.ledger.set_failing(true);
        self.scheduler.fail_all(&EngineError::Rank(why.to_owned()), &mut self.ledger);
        self.is_in_flight = false;
        self.spare = self.spare.take().or(self.before.take());
        self.ledger.set_failing(false);
        self.oldest = None;
        self.ledger.take_broken()
    }

    /// What it could run.
    pub fn want(&self, now_ms: u64) -> Want {
        self.scheduler.want(now_ms)
    }

    /// Plans, within a grant.
    pub fn commit(&mut self, grant: Grant) -> Result<(), Broken> {
        let (idle, want, before) = (self.scheduler.is_idle(), self.want(0), self.counters());
        if std::mem::take(&mut self.is_in_flight) {
            let (plan, results) = self.spare.take().expect("the step before that was applied");
            let (plan, results) =
                (std::mem::replace(&mut self.plan, plan), std::mem::replace(&mut self.results, results));
            self.before = Some((plan, results));
        }
        self.scheduler.commit(grant, &mut self.plan);
        let (rows, after) = (self.plan.rows(), self.counters());
        let granted = grant.rows() as usize;
        if rows > granted {
            return Err(Broken::AboveGrant { rows, granted });
        }
        if idle && (rows, after.pages_held) != (0, 0) {
            return Err(Broken::IdleLaneWorks { rows, pages: after.pages_held });
        }
        let whole = (grant.decode_rows, grant.prefill_rows) == (want.decode_rows, want.prefill_rows);
        // An admission may take kept pages that the next one hoped to share: rare, and not foreseen.
        let foreseeable = after.preempted == before.preempted && after.pages_kept >= before.pages_kept;
        // Pages of those who leave come back too late for this step.
        let foreseeable = foreseeable && after.leaving == 0;
        if whole && foreseeable && rows < granted {
            return Err(Broken::WantNotMeant { wanted: granted, rows });
        }
        self.check_order(after.running)?;
        self.oldest = self.ledger.live().first().copied().filter(|_| after.running > 0);
        Ok(())
    }

    /// First come, first served: whoever runs is among the `running` oldest; the oldest never gives
    /// way; and everybody goes on where they were, or was admitted again.
    fn check_order(&mut self, running: usize) -> Result<(), Broken> {
        let residents = &self.ledger.live()[..running.min(self.ledger.live().len())];
        if let Some(&owner) = self.plan.owners.iter().find(|owner| !residents.contains(owner)) {
            return Err(Broken::Overtaken { owner, running });
        }
        for (span, &owner) in self.plan.spans.iter().zip(&self.plan.owners) {
            let admitted = self.plan.table_entries.iter().any(|e| e.slot == span.slot && e.index == 0);
            if admitted && self.oldest == Some(owner) {
                return Err(Broken::OldestGaveWay { owner });
            }
            let (start, page_size) = (span.start, self.config.page_size as u32);
            let account = self.ledger.account_mut(owner)?;
            if admitted {
                account.admissions += 1;
                if account.admissions == 1 {
                    account.first_start = start;
                }
                let expected = if self.config.prefix_cache { start / page_size * page_size } else { 0 };
                if start != expected {
                    return Err(Broken::WrongStart { owner, start, expected });
                }
            } else if start != account.next_start {
                return Err(Broken::WrongStart { owner, start, expected: account.next_start });
            }
            account.next_start = start + span.rows;
        }
        Ok(())
    }

    /// Computes the plan in `bucket`. Returns the recording's signature.
    pub fn replay(&mut self, bucket: Bucket) -> Result<u64, Broken> {
        self.device.replay(bucket, &self.plan, &mut self.results)
    }

    /// As [`replay`](Self::replay), but the lane's own part fails: everybody here is answered with an
    /// error. Peers see the same operations.
    pub fn replay_torn(&mut self, bucket: Bucket) -> Result<u64, Broken> {
        let signature = self.device.replay_torn(bucket, &self.plan)?;
        self.fail("injected")?;
        Ok(signature)
    }

    /// Takes in what the replay computed: of the last step, or at depth 1 of the one before.
    pub fn apply(&mut self) -> Result<(), Broken> {
        self.is_in_flight = true;
        if self.depth == 0 {
            return self.drain();
        }
        self.apply_before()
    }

    /// Takes in all that was computed, if requests are here that can do nothing before: what a lane says
    /// of itself would be that it has nothing to do.
    pub fn catch_up(&mut self) -> Result<(), Broken> {
        let Want { decode_rows, prefill_rows, .. } = self.want(0);
        if decode_rows + prefill_rows == 0 && !self.is_idle() { self.drain() } else { Ok(()) }
    }

    /// Takes in all that was computed.
    pub fn drain(&mut self) -> Result<(), Broken> {
        self.apply_before()?;
        if std::mem::take(&mut self.is_in_flight) {
            self.scheduler.apply(&self.plan, &self.results, &mut self.ledger);
        }
        self.ledger.take_broken()
    }

    /// Takes in the step before the last one, if it was not yet.
    pub(crate) fn apply_before(&mut self) -> Result<(), Broken> {
        if let Some((plan, results)) = self.before.take() {
            self.scheduler.apply(&plan, &results, &mut self.ledger);
            self.spare = Some((plan, results));
        }
        self.ledger.take_broken()
    }

    /// Commits all that it wants, replays the bucket and applies: a step of a lane that is alone.
    /// Buckets are recorded as they come.
    pub fn step_alone(&mut self, bucket: Bucket) -> Result<(), Broken> {
        self.catch_up()?;
        let Want { decode_rows, prefill_rows, .. } = self.want(0);
        if !self.device.has_recording(bucket) {
            self.device.record(bucket, false);
        }
        self.commit(Grant { decode_rows, prefill_rows })?;
        self.replay(bucket)?;
        self.apply()
    }

    /// Steps until nobody is here, 20,000 times at most.
    pub fn finish_alone(&mut self, bucket: Bucket) -> Result<(), Broken> {
        for _ in 0..TICKS_MAX {
            if self.scheduler.is_idle() {
                return Ok(());
            }
            self.step_alone(bucket)?;
        }
        Err(Broken::NoEnd { ticks: TICKS_MAX })
    }

    /// Everybody ended, and nothing is held.
    pub fn check_baseline(&self) -> Result<(), Broken> {
        if let Some(&request) = self.ledger.live().first() {
            return Err(Broken::NeverEnded { request });
        }
        let counters = self.counters();
        let Counters { running, waiting, leaving, pages_held, finished, .. } = counters;
        let off = |what| Err(Broken::NotAtBaseline { what, counters });
        match () {
            () if running > 0 => off("somebody runs"),
            () if waiting > 0 => off("somebody waits"),
            () if leaving > 0 => off("somebody leaves"),
            () if pages_held > 0 => off("pages are held"),
            () if finished != self.submitted => off("not as many finished as were submitted"),
            () => Ok(()),
        }
    }

    /// Proves on an idle lane that every slot can be had, and that what a request leaves behind is
    /// found by the next one: exact `cached_tokens`, and exactly as many rows fewer.
    ///
    /// `ids`: the first of `max_num_seqs + 2` unused request ids.
    pub fn probe(&mut self, bucket: Bucket, ids: u64) -> Result<(), Broken> {
        let seqs = self.config.max_num_seqs as u64;
        for id in ids..ids + seqs {
            self.submit(probe_request(id, 1, 0), 0)?;
        }
        // A page each, and one more in reserve for everybody who runs already.
        let expected = (seqs as usize).min(self.config.pages / 2);
        self.drain()?;
        self.step_alone(bucket)?;
        let got = self.plan.spans.len();
        if got != expected {
            return Err(Broken::Probe { what: "requests of one token in a step", got, expected });
        }
        self.finish_alone(bucket)?;
        self.probe_reuse(bucket, ids + seqs)
    }

    fn probe_reuse(&mut self, bucket: Bucket, id: u64) -> Result<(), Broken> {
        let SchedulerConfig { pages, page_size, max_model_len, prefix_cache, .. } = self.config;
        let prompt = (max_model_len - 1).min((pages - 1) * page_size - 1).min(3 * page_size + 2);
        // One that ends well: what leads to a NaN is not kept.
        let ends_well = |seed: &u64| {
            let answer = self.ledger.model().answer(&probe_request(id, prompt, *seed));
            answer.ending == Ending::Length
        };
        let seed = (0..).find(ends_well).expect("not every choice is a NaN");
        let mut run = |id: u64| {
            let before = self.counters().rows;
            self.submit(probe_request(id, prompt, seed), 0)?;
            self.finish_alone(bucket)?;
            let cached = self.ledger.account_mut(RequestId(id))?.cached_tokens.unwrap_or_default();
            Ok((cached as usize, (self.counters().rows - before) as usize))
        };
        run(id)?;
        let (cached, rows) = run(id + 1)?;
        let expected = if prefix_cache { (prompt - 1) / page_size * page_size } else { 0 };
        if cached != expected {
            return Err(Broken::Probe { what: "cached tokens of a repeated prompt", got: cached, expected });
        }
        if rows != prompt - cached {
            let expected = prompt - cached;
            return Err(Broken::Probe { what: "rows of a repeated prompt", got: rows, expected });
        }
        self.check_baseline()
    }

    /// The books.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The device.
    pub fn device(&self) -> &FakeDevice {
        &self.device
    }

    pub(crate) fn device_mut(&mut self) -> &mut FakeDevice {
        &mut self.device
    }

    /// The last plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The scheduler's counters.
    pub fn counters(&self) -> Counters {
        self.scheduler.counters()
    }

    /// What it was made with.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// True if no request is here.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    pub(crate) fn tick(&mut self, now_us: u64, step: u64) {
        self.ledger.tick(now_us, step);
    }

    pub(crate) fn take_gaps(&mut self) -> Gaps {
        self.ledger.take_gaps()
    }

    /// A hash of the last plan and its results.
    pub(crate) fn fingerprint(&self) -> u64 {
        let words = |words: &[u32]| words.iter().fold(1, |hash, &word| mix(hash ^ u64::from(word)));
        let results = self.results.iter().fold(2, |hash, r| mix(hash ^ u64::from(r.token)));
        let Plan { tokens, positions, cache_rows, owners, .. } = &self.plan;
        let owners = owners.iter().fold(3, |hash, owner| mix(hash ^ owner.0));
        [words(tokens), words(positions), words(cache_rows), owners, results]
            .into_iter()
            .fold(4, |a, b| mix(a ^ b))
    }
}

/// A request of one token that nothing but a NaN ends early.
fn probe_request(id: u64, prompt: usize, seed: u64) -> Request {
    let tokens: Vec<TokenId> = (0..prompt).map(|i| (i % 2) as TokenId).collect();
    Request {
        id: RequestId(id),
        prompt: tokens.into(),
        sampling: Arc::new(SamplingParams { seed, ..SamplingParams::default() }),
        stop: StopParams { max_tokens: 1, stop_token_ids: Box::default(), ignore_eos: true },
        lane: None,
        session: None,
        grammar: None,
    }
}

/// Steps after which a lane that still has requests runs in circles: for lanes of tests, which are small.
const TICKS_MAX: usize = 20_000;
