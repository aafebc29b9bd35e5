//! Continuous batching for one lane: decode rows of everybody who runs, then prompt chunks, then
//! admissions, all in one step.
//!
//! Order is first come, first served. A request is admitted when its whole prompt fits into the
//! cache; when a later page is missing, the youngest gives way: its pages return, it waits at the front
//! of the queue with all its tokens, and computes them again. The oldest always advances, and a request
//! that could not finish alone is refused at the door, so everybody finishes.
//!
//! A step may be committed while the one before is still *in flight*: its rows take as given what that
//! one computes, and name the tokens that it samples by their slot. Who ends or gives way with a row in
//! flight *leaves*: slot and pages stay taken until that step is applied, and its result reaches nobody.

use crate::constraint::MaskWork;
use crate::pages::Pages;
use crate::plan::Plan;
use crate::request::{EngineError, Event, Request};
use crate::sequence::{Leaving, Running, Sequence};
use atom_base::{FinishReason, OutRow, RequestId, ScoredToken, SlotId, SlotLoad, Span, TableEntry, TokenId};
use atom_group::{Facts, FactsFlags, Grant};
use std::collections::VecDeque;
use std::sync::Arc;

/// What a scheduler is made with.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Pages of the cache, the Sink included.
    pub pages: usize,
    /// Positions of a page.
    pub page_size: usize,
    /// Requests that run at once.
    pub max_num_seqs: usize,
    /// Rows of the largest bucket.
    pub rows_max: usize,
    /// Tokens of prompt and continuation together.
    pub max_model_len: usize,
    /// Look for prompts in what was computed before.
    pub prefix_cache: bool,
    /// The model's end tokens.
    pub eos: Box<[TokenId]>,
}

/// What a lane would like to run now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Want {
    /// Requests that would decode one token each.
    pub decode_rows: u32,
    /// Prompt positions that could be computed.
    pub prefill_rows: u32,
    /// Age of the oldest waiting request.
    pub oldest_wait_ms: u32,
    /// Share of the cache that requests hold, in thousandths.
    pub kv_per_mille: u16,
    /// A prompt is computed in part.
    pub partial: bool,
}

impl Want {
    /// Rows of all kinds.
    pub fn rows(&self) -> u32 {
        self.decode_rows + self.prefill_rows
    }

    /// The same as the group hears it; what is not of the want is left at its default.
    pub fn facts(self) -> Facts {
        let Self { decode_rows, prefill_rows, oldest_wait_ms, kv_per_mille, partial } = self;
        let flags = if partial { FactsFlags::PARTIAL } else { FactsFlags::default() };
        Facts { decode_rows, prefill_rows, oldest_wait_ms, kv_per_mille, flags, ..Facts::default() }
    }
}

/// Totals since start, and what is held now. All return to baseline when nothing runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests running.
    pub running: usize,
    /// Requests waiting.
    pub waiting: usize,
    /// Slots of requests that ended or gave way while a step of theirs is in flight.
    pub leaving: usize,
    /// Pages held by running and leaving requests.
    pub pages_held: usize,
    /// Pages kept for their content only.
    pub pages_kept: usize,
    /// Requests admitted, again after a preemption too.
    pub admitted: u64,
    /// Times that a request gave way.
    pub preempted: u64,
    /// Requests that ended, for whatever reason.
    pub finished: u64,
    /// Prompt tokens of requests that started.
    pub prompt_tokens: u64,
    /// Of those, tokens taken from the prefix cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Rows planned.
    pub rows: u64,
}

/// Where events go. Implementations must not block for long: the step waits.
pub trait Events {
    /// Takes one event of one request.
    fn emit(&mut self, request: RequestId, event: Event);
}

impl Events for Vec<(RequestId, Event)> {
    fn emit(&mut self, request: RequestId, event: Event) {
        self.push((request, event));
    }
}

/// What a step has left for prompts. Both [`Scheduler::want`] and [`Scheduler::commit`] take from it
/// by the same rule, so that what was wanted is what is used.
struct Left {
    rows: usize,
    /// Rows with logits.
    out_rows: usize,
}

/// One lane's requests.
///
/// Invariants: `running` is in order of admission; `places[slot]` is the index in `running` of the
/// request that holds `slot`; a slot is in `free_slots` exactly if nobody runs in it or leaves it.
pub struct Scheduler {
    config: SchedulerConfig,
    pages: Pages,
    waiting: VecDeque<Sequence>,
    running: Vec<Running>,
    leaving: Vec<Leaving>,
    free_slots: Vec<SlotId>,
    places: Vec<usize>, // [slots]
    /// Masks that can be computed now.
    mask_work: Vec<MaskWork>,
    totals: Counters,
}

impl Scheduler {
    /// A scheduler with everything that steps need already reserved.
    pub fn new(config: SchedulerConfig) -> Self {
        assert!(config.rows_max >= config.max_num_seqs, "every running request needs a row in a step");
        let slots = config.max_num_seqs + 1;
        Self {
            pages: Pages::new(config.pages, config.page_size),
            waiting: VecDeque::new(),
            running: Vec::with_capacity(slots),
            leaving: Vec::with_capacity(slots),
            free_slots: (1..slots as u32).rev().map(SlotId).collect(),
            places: vec![NOWHERE; slots],
            mask_work: Vec::with_capacity(slots),
            totals: Counters::default(),
            config,
        }
    }

    /// Takes a request that passed [`crate::EngineLimits::check`]. `now_ms` by any clock that only grows.
    pub fn submit(&mut self, request: Request, now_ms: u64, events: &mut impl Events) {
        let sequence = Sequence::new(request, now_ms);
        let nothing_to_compute =
            sequence.length() == 0 || (sequence.scores_only() && sequence.target(0).is_none());
        if nothing_to_compute {
            let id = sequence.request.id;
            events.emit(id, Event::Started { cached_tokens: 0 });
            events.emit(id, Event::Finished(FinishReason::Length));
            self.totals.finished += 1;
        } else {
            // Room for everybody who runs, too: giving way must not allocate.
            self.waiting.reserve(1 + self.config.max_num_seqs);
            self.waiting.push_back(sequence);
        }
    }

    /// Ends a request wherever it is. What it held is free when this returns, or as soon as the last step
    /// in flight that it has rows in is applied. False if unknown.
    pub fn abort(&mut self, id: RequestId, events: &mut impl Events) -> bool {
        if let Some(at) = self.waiting.iter().position(|s| s.request.id == id) {
            self.waiting.remove(at);
        } else if let Some(at) = self.running.iter().position(|r| r.sequence.request.id == id) {
            self.running[at].finished = true;
            self.sweep();
        } else {
            return false;
        }
        self.totals.finished += 1;
        events.emit(id, Event::Finished(FinishReason::Aborted));
        true
    }

    /// Fails everybody, waiting and running. Steps in flight are not applied any more.
    pub fn fail_all(&mut self, error: &EngineError, events: &mut impl Events) {
        self.leaving.clear();
        self.mask_work.clear();
        let waiting = self.waiting.drain(..).map(|s| s.request.id);
        for id in waiting.chain(self.running.drain(..).map(|r| r.sequence.request.id)) {
            self.totals.finished += 1;
            events.emit(id, Event::Failed(error.clone()));
        }
        self.free_slots = (1..self.places.len() as u32).rev().map(SlotId).collect();
    }

    /// What could run now. Changes nothing.
    pub fn want(&self, now_ms: u64) -> Want {
        let decode = self.running.iter().filter(|r| r.remaining() == 1).count();
        let rows = self.config.rows_max - decode;
        let mut left = Left { rows, out_rows: self.config.max_num_seqs - decode };
        let partial = || self.running.iter().filter(|r| r.remaining() > 1);
        for running in partial() {
            left.take_chunk(&running.sequence, running.planned);
        }
        self.foresee_admissions(&mut left);
        let oldest = self.waiting.iter().map(|s| s.arrived_ms).min();
        let total = self.pages.total();
        Want {
            decode_rows: decode as u32,
            prefill_rows: (rows - left.rows) as u32,
            oldest_wait_ms: oldest.map_or(0, |at| now_ms.saturating_sub(at).min(u32::MAX.into()) as u32),
            kv_per_mille: ((total - self.pages.room()) as u64 * 1000 / total as u64) as u16,
            partial: partial().next().is_some(),
        }
    }

    /// Fills `plan` with at most what was granted: allocates pages and slots, admits, preempts.
    ///
    /// Without prompt rows nobody is admitted, and a prompt that is computed in part stays where it
    /// is, with its place, its slot and its pages: being held costs it nothing but the time.
    pub fn commit(&mut self, grant: Grant, plan: &mut Plan) {
        plan.clear();
        self.plan_decode(grant.decode_rows as usize, plan);
        plan.decode_rows = plan.rows();
        let out_rows = self.config.max_num_seqs - plan.out.len();
        let mut left = Left { rows: grant.prefill_rows as usize, out_rows };
        for place in 0..self.running.len() {
            if self.running[place].remaining() > 1 {
                self.plan_chunk(place, &mut left, plan);
            }
        }
        while left.some() && self.admit(plan) {
            self.plan_chunk(self.running.len() - 1, &mut left, plan);
        }
        self.totals.rows += plan.rows() as u64;
    }

    /// Takes in what a step computed. `results[i]` belongs to `plan.out[i]`. Steps are applied in the
    /// order in which they were committed.
    pub fn apply(&mut self, plan: &Plan, results: &[ScoredToken], events: &mut impl Events) {
        assert_eq!(plan.out.len(), results.len(), "one result for each row with logits");
        let mut out = plan.out.iter().zip(results).peekable();
        for (span, &owner) in plan.spans.iter().zip(&plan.owners) {
            let place = self.places[span.slot.0 as usize];
            if place == NOWHERE {
                self.let_go(span, owner);
                while out.next_if(|(row, _)| row.row < span.first_row + span.rows).is_some() {}
                continue;
            }
            let running = &mut self.running[place];
            assert_eq!(running.sequence.request.id, owner, "slot {} changed hands during a step", span.slot);
            running.computed += span.rows as usize;
            let mut is_sound = true;
            while let Some((row, result)) = out.next_if(|(row, _)| row.row < span.first_row + span.rows) {
                is_sound &= !result.is_not_a_number();
                if !running.finished {
                    take_result(running, row, result, &self.config, &mut self.totals, events);
                    self.mask_work.extend(running.next_mask(row));
                }
            }
            // Keys and values behind a NaN may be NaN too: nobody shall find them.
            if self.config.prefix_cache && is_sound {
                seal_full_pages(running, self.config.page_size);
            }
            let is_scored = running.sequence.scores_only() && running.computed == running.sequence.length();
            if !running.finished && is_scored {
                running.finished = true;
                events.emit(owner, Event::Finished(FinishReason::Length));
            }
        }
        self.totals.finished += self.running.iter().filter(|r| r.finished).count() as u64;
        self.sweep();
    }

    /// What has to be computed for the next plans, since the last call: of those who were admitted, and of
    /// those who got a token. Whoever calls sees that it is run.
    pub fn mask_work(&mut self) -> impl Iterator<Item = MaskWork> {
        self.mask_work.drain(..)
    }

    /// Makes the youngest running request give way, as a full cache would. False if nobody runs.
    pub fn preempt_youngest(&mut self) -> bool {
        let Some(running) = self.running.pop() else { return false };
        self.places[running.slot.0 as usize] = NOWHERE;
        let sequence = running.leave(&mut self.leaving, &mut self.free_slots);
        self.waiting.push_front(sequence);
        self.totals.preempted += 1;
        true
    }

    /// Everybody who runs gives way, as for an engine that starts anew with the same requests; if the
    /// cache `is_lost`, nothing that was computed before is found in it any more. Steps in flight are
    /// not applied any more.
    pub fn start_over(&mut self, is_lost: bool) {
        while self.preempt_youngest() {}
        self.free_slots.extend(self.leaving.drain(..).map(|left| left.slot));
        if is_lost {
            self.pages = Pages::new(self.config.pages, self.config.page_size);
        }
    }

    /// True if no request is here.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.leaving.is_empty()
    }

    /// Requests waiting.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// See [`Counters`].
    pub fn counters(&self) -> Counters {
        Counters {
            running: self.running.len(),
            waiting: self.waiting.len(),
            leaving: self.leaving.len(),
            pages_held: self.pages.total() - self.pages.room(),
            pages_kept: self.pages.kept(),
            ..self.totals
        }
    }

    /// A step in flight with rows of somebody who left was applied.
    fn let_go(&mut self, span: &Span, owner: RequestId) {
        let at = self.leaving.iter().position(|left| left.slot == span.slot);
        let at = at.expect("a slot with rows in flight is held or being left");
        let left = &mut self.leaving[at];
        assert_eq!(left.owner, owner, "slot {} changed hands during a step", span.slot);
        left.in_flight -= span.rows as usize;
        if left.in_flight == 0 {
            self.free_slots.push(self.leaving.swap_remove(at).slot);
        }
    }

    /// Takes from `left` what admissions would, simulated in queue order.
    fn foresee_admissions(&self, left: &mut Left) {
        let grows = |r: &&Running| r.remaining() == 1 && r.pages_needed(self.config.page_size) > 0;
        let decode_takes = self.running.iter().filter(grows).count();
        let (mut room, mut runners) = (self.pages.room().saturating_sub(decode_takes), self.running.len());
        for sequence in self.waiting.iter().take(self.free_slots.len()) {
            if !left.some() {
                break;
            }
            let (shared, kept) = self.matching(sequence);
            let takes = sequence.length().div_ceil(self.config.page_size) - shared + kept;
            if !fits(takes, room, runners) {
                break;
            }
            room -= takes;
            runners += 1;
            left.take_chunk(sequence, shared * self.config.page_size);
        }
    }

    fn matching(&self, sequence: &Sequence) -> (usize, usize) {
        if self.config.prefix_cache { self.pages.matching(sequence.cacheable()) } else { (0, 0) }
    }

    fn plan_decode(&mut self, rows_max: usize, plan: &mut Plan) {
        let (mut rows, mut place) = (0, 0);
        while place < self.running.len() && rows < rows_max {
            if self.running[place].remaining() == 1 && self.make_room(place) {
                self.push_rows(place, 1, plan);
                rows += 1;
            }
            place += 1;
        }
    }

    /// Sees that the next position of `place` has a page. The youngest give way. False if `place` itself
    /// had to, or if pages come back once the step in flight is applied: then it waits for them.
    fn make_room(&mut self, place: usize) -> bool {
        while self.running[place].pages_needed(self.config.page_size) > 0 {
            if self.running[place].lease.grow() {
                continue;
            }
            if !self.leaving.is_empty() {
                return false;
            }
            self.preempt_youngest();
            if place == self.running.len() {
                return false;
            }
        }
        true
    }

    /// Admits the first waiting request if its prompt fits.
    fn admit(&mut self, plan: &mut Plan) -> bool {
        let Some(sequence) = self.waiting.front() else { return false };
        let (shared, kept) = self.matching(sequence);
        let pages = sequence.length().div_ceil(self.config.page_size);
        if self.free_slots.is_empty() || !fits(pages - shared + kept, self.pages.room(), self.running.len()) {
            return false;
        }
        let mut sequence = self.waiting.pop_front().expect("looked at above");
        let end = (sequence.prompt_len() + sequence.request.stop.max_tokens as usize)
            .min(self.config.max_model_len);
        let mut lease = self.pages.lease(end.div_ceil(self.config.page_size));
        let prefix = lease.share(sequence.cacheable(), shared);
        while lease.pages().len() < pages {
            assert!(lease.grow(), "room was counted before");
        }
        let slot = self.free_slots.pop().expect("looked at above");
        if sequence.request.sampling.has_penalties() {
            plan.slot_loads.push(SlotLoad {
                slot,
                prompt: Arc::clone(&sequence.request.prompt),
                generated: sequence.generated().into(),
            });
        }
        self.mask_work.extend(sequence.first_mask());
        self.totals.admitted += 1;
        self.places[slot.0 as usize] = self.running.len();
        let computed = shared * self.config.page_size;
        sequence.cached_tokens.get_or_insert(computed);
        self.running.push(Running {
            sequence,
            slot,
            lease,
            computed,
            planned: computed,
            pending: 0,
            end,
            tabled: 0,
            sealed: shared,
            prefix,
            finished: false,
        });
        true
    }

    /// Plans a chunk of a prompt, as large as is left.
    fn plan_chunk(&mut self, place: usize, left: &mut Left, plan: &mut Plan) {
        let running = &self.running[place];
        let rows = left.take_chunk(&running.sequence, running.planned);
        if rows > 0 {
            self.push_rows(place, rows, plan);
        }
    }

    fn push_rows(&mut self, place: usize, rows: usize, plan: &mut Plan) {
        let running = &mut self.running[place];
        let (start, page_size) = (running.planned, self.config.page_size);
        let length = running.sequence.tokens.len() + running.pending;
        let pages = running.lease.pages();
        let known = running.tabled;
        plan.table_entries.extend((known..pages.len()).map(|i| TableEntry {
            slot: running.slot,
            index: i as u32,
            page: pages[i],
        }));
        running.tabled = pages.len();
        let sequence = &running.sequence;
        for position in start..start + rows {
            let page = pages[position / page_size];
            plan.push_row(running.token(position), position as u32, page, page_size);
            let target = sequence.target(position);
            let chooses = position + 1 == length;
            running.pending += usize::from(chooses);
            if target.is_some() || chooses {
                plan.out.push(OutRow {
                    row: plan.rows() as u32 - 1,
                    slot: running.slot,
                    position: position as u32 + 1,
                    target,
                    params: Arc::clone(&sequence.request.sampling),
                    mask: if target.is_none() { sequence.mask() } else { None },
                });
            }
        }
        running.planned += rows;
        plan.push_span(running.sequence.request.id, running.slot, rows, start as u32);
    }

    /// Lets go of everybody who finished, keeping the order of the rest.
    fn sweep(&mut self) {
        let Self { running, leaving, free_slots, places, .. } = self;
        for gone in running.extract_if(.., |r| r.finished) {
            places[gone.slot.0 as usize] = NOWHERE;
            gone.leave(leaving, free_slots);
        }
        for (place, r) in running.iter().enumerate() {
            places[r.slot.0 as usize] = place;
        }
    }
}

/// The place of a slot in which nobody runs.
const NOWHERE: usize = usize::MAX;

impl Left {
    /// True if another request could have a row.
    fn some(&self) -> bool {
        self.rows > 0 && self.out_rows > 0
    }

    /// Takes the next chunk of a sequence; returns its rows.
    fn take_chunk(&mut self, sequence: &Sequence, computed: usize) -> usize {
        let remaining = sequence.length() - computed;
        let mut rows = remaining.min(self.rows);
        let out_rows = if let Some(from) = sequence.scored_from() {
            // From there on every row has logits.
            let unscored = from.saturating_sub(computed);
            rows = rows.min(unscored + self.out_rows);
            rows.saturating_sub(unscored)
        } else if rows < remaining {
            0
        } else {
            let last = self.out_rows.min(1);
            rows = (rows + last).saturating_sub(1);
            last
        };
        self.rows -= rows;
        self.out_rows -= out_rows;
        rows
    }
}

/// Every runner may soon need one more page; the first admission takes whatever there is.
fn fits(pages: usize, room: usize, runners: usize) -> bool {
    pages + runners <= room
}

fn seal_full_pages(running: &mut Running, page_size: usize) {
    while (running.sealed + 1) * page_size <= running.computed {
        let page = &running.sequence.tokens[running.sealed * page_size..(running.sealed + 1) * page_size];
        running.prefix = running.prefix.extend(page);
        running.lease.seal(running.sealed, running.prefix);
        running.sealed += 1;
    }
}

fn take_result(
    running: &mut Running,
    row: &OutRow,
    result: &ScoredToken,
    config: &SchedulerConfig,
    totals: &mut Counters,
    events: &mut impl Events,
) {
    let id = running.sequence.request.id;
    start_once(running, totals, events);
    if let Some(fault) = row.mask.as_ref().and_then(|mask| mask.fault()) {
        running.finished = true;
        let token = running.sequence.generated().len() as u32 + 1;
        return events.emit(id, Event::Failed(EngineError::Grammar { token, fault }));
    }
    if result.is_not_a_number() {
        running.finished = true;
        return events.emit(id, Event::Failed(EngineError::NotANumber { position: row.position }));
    }
    if row.target.is_some() {
        running.sequence.scored = row.position as usize;
        return events.emit(id, Event::PromptScored { index: row.position, scored: *result });
    }
    let stop = &running.sequence.request.stop;
    let ends =
        !stop.ignore_eos && config.eos.contains(&result.token) || stop.stop_token_ids.contains(&result.token);
    if ends {
        running.finished = true;
        return events.emit(id, Event::Finished(FinishReason::Stop));
    }
    running.pending -= 1;
    running.sequence.tokens.push(result.token);
    totals.generated_tokens += 1;
    events.emit(id, Event::Token(*result));
    if running.sequence.tokens.len() >= running.end {
        running.finished = true;
        events.emit(id, Event::Finished(FinishReason::Length));
    }
}

fn start_once(running: &mut Running, totals: &mut Counters, events: &mut impl Events) {
    if !running.sequence.started {
        running.sequence.started = true;
        let cached = running.sequence.cached_tokens.expect("set on admission");
        totals.prompt_tokens += running.sequence.prompt_len() as u64;
        totals.cached_tokens += cached as u64;
        events.emit(running.sequence.request.id, Event::Started { cached_tokens: cached as u32 });
    }
}
