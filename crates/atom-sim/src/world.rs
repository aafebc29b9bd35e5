//! The world: members of a group in lock step, one virtual clock, and the script that disturbs them.

use crate::broken::Broken;
use crate::dice::Dice;
use crate::lane::Lane;
use crate::member::Member;
use crate::model::{Ending, mix};
use crate::options::{CostModel, WorldOptions};
use crate::report::{Failure, Report};
use crate::script::{Arrival, Calamity, Script};
use crate::tape::Tape;
use atom_base::RequestId;
use atom_group::{
    Bucket, Divergence, ExitCause, Facts, FactsFlags, Grants, GroupState, GroupStep, HOLD_STEPS_MAX, Prefill,
    StepNote,
};
use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// A group of lanes with a seed.
pub struct World {
    seed: u64,
    options: WorldOptions,
    script: Script,
    members: Vec<Member>,
    dice: Dice,
    now_us: u64,
    tick: u64,
    pending: VecDeque<Arrival>,
    aborts: BTreeMap<(u64, RequestId), usize>,
    /// Preemptions still to be forced: somebody who always gives way never ends.
    preemptions_left: usize,
    /// The calamity has begun.
    struck: bool,
    /// Steps in succession in which prompts were held.
    held: u32,
    /// What the first lane sees, if it is kept.
    tape: Option<Tape>,
    report: Report,
}

/// Why a group stopped.
#[derive(Clone, Debug, PartialEq)]
enum End {
    Exit(ExitCause),
    Late(usize),
    Diverged(Divergence),
}

impl World {
    /// The world of a seed.
    pub fn new(seed: u64, options: &WorldOptions) -> Self {
        let args = options.args();
        let mut script = Script::draw(seed, args);
        let state = GroupState::new(Arc::new(script.lattice.clone()), args.lanes, script.record_all)
            .with_policy(script.policy);
        let member = |place| {
            // Every other world plans a step while the one before is in flight.
            let lane = Lane::new(script.scheduler.clone(), script.model.clone()).at_depth(seed as usize % 2);
            Member::new(place, lane, state.clone())
        };
        Self {
            seed,
            options: *options,
            members: (0..args.lanes).map(member).collect(),
            dice: Dice::new(seed, STREAM),
            now_us: 0,
            tick: 0,
            pending: std::mem::take(&mut script.arrivals).into(),
            aborts: BTreeMap::new(),
            preemptions_left: PREEMPTIONS_MAX,
            struck: false,
            held: 0,
            tape: None,
            report: Report::new(),
            script,
        }
    }

    /// Runs until the group ends, then checks that everything is as it was at the start. An assertion
    /// that fails on the way is a failure like others.
    pub fn run(mut self) -> Result<Report, Failure> {
        self.run_to_end()
    }

    /// The same, with a step trace of what the first lane saw: see [`crate::Replayed`].
    pub fn run_traced(mut self) -> (Result<Report, Failure>, Vec<u8>) {
        self.tape = Some(Tape::new(self.members[0].state()));
        let outcome = self.run_to_end();
        let tape = self.tape.take().expect("put there above");
        (outcome, tape.finish())
    }

    fn run_to_end(&mut self) -> Result<Report, Failure> {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.until_end().and_then(|end| self.conclude(&end))));
        match outcome.unwrap_or_else(|cause| Err(panicked(&*cause))) {
            Ok(()) => {
                self.report.worlds = 1;
                Ok(std::mem::replace(&mut self.report, Report::new()))
            }
            Err(broken) => {
                let command = self.options.command(self.seed);
                Err(Failure { seed: self.seed, tick: self.tick, broken: Box::new(broken), command })
            }
        }
    }

    fn until_end(&mut self) -> Result<End, Broken> {
        let length = self.script.limits.max_model_len.div_ceil(LENGTH_USUAL);
        let ticks = TICKS_MIN + TICKS_PER_REQUEST * length * self.options.args().requests;
        for _ in 0..ticks {
            self.deliver()?;
            self.disturb();
            if let Some(end) = self.tick()? {
                return Ok(end);
            }
        }
        Err(Broken::NoEnd { ticks })
    }

    /// Brings what is due: arrivals, aborts, wishes to leave.
    fn deliver(&mut self) -> Result<(), Broken> {
        for (place, member) in self.members.iter_mut().enumerate() {
            member.lane.tick(self.now_us, self.tick);
            if self.script.exits_us[place] <= self.now_us {
                member.raise(FactsFlags::EXIT);
            }
            match self.script.pauses_us[place].iter().any(|pause| pause.contains(&self.now_us)) {
                true => member.raise(FactsFlags::PAUSE),
                false => member.lower(FactsFlags::PAUSE),
            }
        }
        while self.pending.front().is_some_and(|a| a.at_us <= self.now_us) {
            let arrival = self.pending.pop_front().expect("looked at above");
            self.admit(arrival)?;
        }
        self.abort_due()
    }

    fn abort_due(&mut self) -> Result<(), Broken> {
        while let Some(entry) = self.aborts.first_entry().filter(|e| e.key().0 <= self.now_us) {
            let ((_, id), place) = entry.remove_entry();
            self.members[place].lane.abort(id)?;
        }
        Ok(())
    }

    /// The door: refuses what can't be served, else hands over to the least loaded lane.
    fn admit(&mut self, arrival: Arrival) -> Result<(), Broken> {
        let Arrival { request, abort_at_us, refusal, .. } = arrival;
        self.report.counts.requests += 1;
        let got = self.script.limits.check(&request).err();
        let as_expected = match (&got, refusal) {
            (None, None) => true,
            (Some(got), Some(expected)) => format!("{got:?}").starts_with(expected),
            _ => false,
        };
        if !as_expected {
            return Err(Broken::Door { got, expected: refusal.unwrap_or("to let it in") });
        }
        if got.is_some() {
            self.report.counts.refused += 1;
            return Ok(());
        }
        let load = |member: &Member| {
            let counters = member.lane.counters();
            counters.running + counters.waiting
        };
        let least = || (0..self.members.len()).min_by_key(|&place| load(&self.members[place]));
        let place = request.lane.map(|lane| usize::from(lane.0)).or_else(least).expect("a group has lanes");
        if self.members[place].lane.counters().waiting >= self.script.limits.queue_max {
            self.report.counts.refused += 1;
            return Ok(());
        }
        if let Some(at_us) = abort_at_us {
            self.aborts.insert((at_us, request.id), place);
        }
        let now_ms = self.clock_ms(place);
        self.members[place].lane.submit(request, now_ms)
    }

    /// Each lane has a clock of its own, and none agrees with another.
    fn clock_ms(&self, place: usize) -> u64 {
        self.now_us / 1000 + place as u64 * 1_000_000
    }

    fn disturb(&mut self) {
        for member in &mut self.members {
            let forced = self.preemptions_left > 0 && self.dice.chance(self.script.preempt_per_mille);
            if forced && member.lane.preempt_youngest() {
                self.preemptions_left -= 1;
            }
        }
        match self.script.calamity {
            Calamity::Fatal { lane, step } if self.tick >= step => {
                self.struck = true;
                self.members[lane].raise(FactsFlags::FATAL);
            }
            Calamity::WrongRecording { lane, step } if self.tick >= step && !self.struck => {
                self.struck = true;
                self.members[lane].skew_next_recording();
            }
            _ => {}
        }
    }

    /// One exchange, and what follows from it. `Some`: the group ended.
    fn tick(&mut self) -> Result<Option<End>, Broken> {
        self.tick += 1;
        if let Some(lane) = self.meet() {
            return Ok(Some(End::Late(lane)));
        }
        self.members.iter_mut().try_for_each(|member| member.lane.catch_up())?;
        let facts: Vec<Facts> =
            (0..self.members.len()).map(|place| self.members[place].facts(self.clock_ms(place))).collect();
        check_ages(&facts, self.now_us)?;
        let step = match self.settle(&facts)? {
            Ok(step) => step,
            Err(divergence) => return Ok(Some(End::Diverged(divergence))),
        };
        match step {
            GroupStep::Exit(cause) => {
                self.members.iter_mut().try_for_each(|member| member.perform(&step, false))?;
                return Ok(Some(End::Exit(cause)));
            }
            GroupStep::Park => {
                self.members.iter_mut().try_for_each(|member| member.perform(&step, false))?;
                self.park(&facts)?;
            }
            GroupStep::Record(_) => self.record(&step)?,
            GroupStep::Step { bucket, grants, note } => {
                check_grants(&facts, bucket, grants)?;
                self.check_note(&facts, note)?;
                self.step(&step, bucket)?;
            }
        }
        self.compare()?;
        Ok(None)
    }

    /// Lanes come one after the other; all go on when the last is there, or give up when the first has
    /// waited as long as it may. `Some`: who did not come in time.
    fn meet(&mut self) -> Option<usize> {
        let patience_us = self.members[0].state().patience().as_micros() as u64;
        let mut last = (0, 0);
        for place in 0..self.members.len() {
            let mut late_us = self.dice.below(50) as u64;
            if self.dice.chance(self.script.late_per_mille) {
                late_us += self.dice.within(0..=LATE_US_MAX) as u64;
            }
            if matches!(self.script.calamity, Calamity::Late { lane, step } if lane == place && self.tick >= step)
            {
                self.struck = true;
                late_us += patience_us;
            }
            last = last.max((late_us, place));
        }
        let (late_us, place) = last;
        self.now_us += late_us.min(patience_us);
        (late_us >= patience_us).then_some(place)
    }

    /// Every lane settles for itself. All must conclude the same.
    fn settle(&mut self, facts: &[Facts]) -> Result<Result<GroupStep, Divergence>, Broken> {
        let known = self.members[0].state().hash();
        let have_diverged = self.members.iter().any(|member| member.state().hash() != known);
        let mut steps = Vec::with_capacity(self.members.len());
        for place in 0..self.members.len() {
            let mut seen = facts.to_vec();
            if let Calamity::TornFacts { lane, step } = self.script.calamity
                && lane == place
                && self.tick >= step
                && !self.struck
                && facts[0].last_signature != 0
            {
                // Has an effect only after a replay, so it goes on until it is found.
                seen[0].replay_us ^= 1 << 30;
            }
            let outcome = self.members[place].settle(&seen);
            if let Some(tape) = self.tape.as_mut().filter(|_| place == 0) {
                tape.step(self.now_us, &seen, &outcome);
            }
            steps.push(outcome);
        }
        let (go_on, found): (Vec<_>, Vec<_>) = steps.into_iter().partition(Result::is_ok);
        if have_diverged && !go_on.is_empty() {
            return Err(differ(0, "the group state", "nobody noticed", "everybody should have"));
        }
        if !found.is_empty() && !go_on.is_empty() {
            return Err(differ(
                0,
                "whether they have diverged",
                &format!("{found:?}"),
                &format!("{go_on:?}"),
            ));
        }
        if let Some(found) = found.into_iter().find_map(Result::err) {
            self.struck = true;
            return Ok(Err(found));
        }
        let mut steps = go_on.into_iter().flatten();
        let first = steps.next().expect("a group has lanes");
        match steps.position(|step| step != first) {
            Some(at) => Err(differ(at + 1, "the step", "another", &format!("{first:?}"))),
            None => Ok(Ok(first)),
        }
    }

    /// Sleeps until something happens.
    fn park(&mut self, facts: &[Facts]) -> Result<(), Broken> {
        self.report.counts.parks += 1;
        let all = |flag| facts.iter().all(|f| f.flags.has(flag));
        let paused = all(FactsFlags::PAUSE) && !all(FactsFlags::EXIT);
        if let Some(lane) = facts.iter().position(|f| f.decode_rows + f.prefill_rows > 0) {
            if !paused {
                let (wanted, granted) = (format!("{:?}", facts[lane]), "a pause".to_owned());
                return Err(Broken::WrongGrant { lane, wanted, granted, bucket: 0 });
            }
            self.report.counts.pauses += 1;
        }
        let arrival = self.pending.front().map(|a| a.at_us);
        let abort = self.aborts.keys().next().map(|&(at_us, _)| at_us);
        let resumes = self.script.pauses_us.iter().flatten().map(|pause| pause.end);
        let later = |&at_us: &u64| at_us > self.now_us;
        let exits = self.script.exits_us.iter().copied().chain(resumes).filter(later);
        let next = arrival.into_iter().chain(abort).chain(exits).min();
        // Without any event left, a lane was told to stop and the group parked all the same.
        self.now_us = next.unwrap_or(self.now_us).max(self.now_us);
        Ok(())
    }

    fn record(&mut self, step: &GroupStep) -> Result<(), Broken> {
        self.report.counts.records += 1;
        self.now_us += RECORD_US;
        self.members.iter_mut().try_for_each(|member| member.perform(step, false))
    }

    /// A hold is bounded, and decode goes on meanwhile.
    fn check_note(&mut self, facts: &[Facts], note: StepNote) -> Result<(), Broken> {
        let counts = &mut self.report.counts;
        counts.time_cut_rows += u64::from(note.time_cut_rows);
        counts.edge_cut_rows += u64::from(note.edge_cut_rows);
        let is_held = matches!(note.prefill, Prefill::Held { .. });
        counts.held_steps += u64::from(is_held);
        self.held = if is_held { self.held + 1 } else { 0 };
        let decode_rows = facts.iter().map(|f| f.decode_rows).sum();
        match is_held && (self.held > HOLD_STEPS_MAX || decode_rows == 0) {
            true => Err(Broken::Held { steps: self.held, decode_rows }),
            false => Ok(()),
        }
    }

    fn step(&mut self, step: &GroupStep, bucket: Bucket) -> Result<(), Broken> {
        self.report.counts.steps += 1;
        if self.dice.chance(500) {
            // Between what was wanted and what is planned: a plan may end up without a row.
            self.abort_due()?;
        }
        *self.report.buckets.entry(bucket.rows()).or_default() += 1;
        self.members.iter_mut().try_for_each(|member| member.plan(step))?;
        // The step before ended when this one could begin.
        self.members.iter_mut().try_for_each(|member| member.lane.apply_before())?;
        let pairs = self.members.iter().map(|member| CostModel::pairs(member.lane.plan())).max();
        let cost_us = self.options.args().cost.of(bucket, pairs.unwrap_or(0));
        self.now_us += cost_us;
        for place in 0..self.members.len() {
            let torn = self.dice.chance(self.script.torn_per_mille);
            self.report.counts.lane_faults += u64::from(torn);
            let member = &mut self.members[place];
            member.lane.tick(self.now_us, self.tick);
            member.execute(step, torn)?;
            // Replays of one bucket differ a little.
            member.took((cost_us + self.dice.below(200) as u64) as u32);
            let rows = member.lane.plan().rows();
            self.report.counts.rows += rows as u64;
            self.report.counts.padding_rows += (bucket.rows() - rows) as u64;
            self.report.counts.idle_lane_steps += u64::from(rows == 0);
        }
        Ok(())
    }

    /// Busy or idle, decoding or prefilling: all lanes did the same and know the same.
    fn compare(&mut self) -> Result<(), Broken> {
        let first = &self.members[0];
        for (lane, member) in self.members.iter().enumerate().skip(1) {
            let (theirs, ours) = (member.lane.device().executed(), first.lane.device().executed());
            if theirs != ours {
                let operations = |o| format!("{o:?}");
                return Err(differ(lane, "the operations", &operations(theirs), &operations(ours)));
            }
            let (theirs, ours) = (member.state().hash(), first.state().hash());
            let torn = matches!(self.script.calamity, Calamity::TornFacts { .. });
            if theirs != ours && !torn {
                return Err(differ(lane, "the group state", &format!("{theirs:#x}"), &format!("{ours:#x}")));
            }
        }
        for member in &self.members {
            self.report.trace = mix(self.report.trace ^ member.fingerprint());
        }
        Ok(())
    }

    /// After the end: it is the end that the script made, everybody got an answer, nothing is held,
    /// and everything can be had again.
    fn conclude(&mut self, end: &End) -> Result<(), Broken> {
        self.check_end(end)?;
        if *end != End::Exit(ExitCause::Asked) {
            self.report.counts.calamities += 1;
            for member in &mut self.members {
                member.lane.fail("the group ended")?;
            }
        }
        for place in 0..self.members.len() {
            self.members[place].lane.check_baseline()?;
            self.count(place);
            let lane = &mut self.members[place].lane;
            lane.probe(self.script.lattice.top(), PROBE_IDS)?;
        }
        Ok(())
    }

    fn check_end(&self, end: &End) -> Result<(), Broken> {
        let lanes = self.members.len();
        let right = match (self.script.calamity, end) {
            (Calamity::Fatal { lane, .. }, End::Exit(cause)) if self.struck => {
                *cause == ExitCause::Fatal { lane }
            }
            (Calamity::Late { lane, .. }, End::Late(late)) => lane == *late,
            (Calamity::WrongRecording { lane, .. }, End::Diverged(found)) => {
                found.what == "recording signature" && (found.lane == lane || lane == 0)
            }
            (Calamity::TornFacts { .. }, End::Diverged(found)) => found.what == "group state" && lanes > 1,
            // Its time never came: the group ended before, since all asked for it and had no work left.
            (_, End::Exit(ExitCause::Asked)) => {
                let is_done = |m: &Member| m.lane.is_idle() && m.flags().has(FactsFlags::EXIT);
                self.pending.is_empty() && self.members.iter().all(is_done)
            }
            _ => false,
        };
        let expected = || format!("{:?}", self.script.calamity);
        right.then_some(()).ok_or_else(|| Broken::WrongEnd { got: format!("{end:?}"), expected: expected() })
    }

    fn count(&mut self, place: usize) {
        let lane = &mut self.members[place].lane;
        let totals = lane.counters();
        let counts = &mut self.report.counts;
        counts.admissions += totals.admitted;
        counts.preemptions += totals.preempted;
        counts.prompt_tokens += totals.prompt_tokens;
        counts.cached_tokens += totals.cached_tokens;
        counts.generated_tokens += totals.generated_tokens;
        for account in lane.ledger().accounts() {
            match account.ended {
                Some(Ending::Aborted) => counts.aborted += 1,
                Some(Ending::Failed | Ending::NotANumber { .. }) => counts.failed += 1,
                _ => counts.finished += 1,
            }
        }
        self.report.note(&lane.take_gaps());
    }
}

/// Ages are durations: no lane's clock shows in them.
fn check_ages(facts: &[Facts], now_us: u64) -> Result<(), Broken> {
    let now_ms = now_us / 1000;
    match facts.iter().position(|f| u64::from(f.oldest_wait_ms) > now_ms) {
        Some(lane) => Err(Broken::WrongAge { lane, age_ms: facts[lane].oldest_wait_ms, now_ms }),
        None => Ok(()),
    }
}

/// The bucket holds everybody; decode rows are granted whole; nobody gets more than asked for; and
/// somebody gets something.
fn check_grants(facts: &[Facts], bucket: Bucket, grants: Grants) -> Result<(), Broken> {
    if grants.each(facts).all(|g| g.rows() == 0) {
        let (wanted, granted) = (format!("{:?}", facts[0]), "nothing, as everybody".to_owned());
        return Err(Broken::WrongGrant { lane: 0, wanted, granted, bucket: bucket.rows() });
    }
    for (lane, (want, grant)) in facts.iter().zip(grants.each(facts)).enumerate() {
        let right = grant.rows() as usize <= bucket.rows()
            && grant.decode_rows == want.decode_rows
            && grant.prefill_rows <= want.prefill_rows;
        if !right {
            let (wanted, granted) = (format!("{want:?}"), format!("{grant:?}"));
            return Err(Broken::WrongGrant { lane, wanted, granted, bucket: bucket.rows() });
        }
    }
    Ok(())
}

fn panicked(cause: &(dyn Any + Send)) -> Broken {
    let text = cause.downcast_ref::<String>().map(String::as_str);
    Broken::Panic(text.or(cause.downcast_ref().copied()).unwrap_or("without a message").to_owned())
}

fn differ(lane: usize, what: &'static str, theirs: &str, ours: &str) -> Broken {
    Broken::LanesDiffer { lane, what, theirs: theirs.to_owned(), ours: ours.to_owned() }
}

/// Keeps these numbers apart from those that drew the script.
const STREAM: u32 = 2;
/// Preemptions forced in one world.
const PREEMPTIONS_MAX: usize = 200;
/// How late a lane comes that is late, µs: far below any patience.
const LATE_US_MAX: usize = 20_000;
/// A world that takes more ticks runs in circles: requests have seldom more than 96 tokens, and even one row a
/// step, one request after the other, with everybody giving way a few times, takes fewer.
const LENGTH_USUAL: usize = 72;
const TICKS_MIN: usize = 2000;
const TICKS_PER_REQUEST: usize = 300;
/// Virtual time of recording a bucket, µs.
const RECORD_US: u64 = 30_000;
/// Ids of the requests that prove at the end that all is free: above all others.
const PROBE_IDS: u64 = 1 << 32;
