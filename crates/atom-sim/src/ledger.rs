//! What each request has been told so far, against what it gets when it runs alone.

use crate::broken::Broken;
use crate::model::{Answer, Ending, FakeModel, identical};
use atom_base::{FinishReason, RequestId, ScoredToken};
use atom_engine::{EngineError, Event, Events, Request};
use std::collections::BTreeMap;

/// Receives the events of one lane and checks each as it comes.
pub struct Ledger {
    model: FakeModel,
    accounts: BTreeMap<RequestId, Account>,
    /// Who has not ended, in order of submission.
    live: Vec<RequestId>,
    /// Where in virtual time and in the group's steps we are.
    now_us: u64,
    step: u64,
    /// True while the lane fails everybody.
    failing: bool,
    broken: Option<Broken>,
    gaps: Gaps,
}

/// One request's books.
#[derive(Debug)]
pub struct Account {
    /// What was asked.
    pub request: Request,
    /// What it gets alone.
    pub answer: Answer,
    /// Reported by `Event::Started`.
    pub cached_tokens: Option<u32>,
    /// Scores received.
    pub scored: usize,
    /// Tokens received.
    pub tokens: usize,
    /// The terminal event.
    pub ended: Option<Ending>,
    /// Times that it was given a slot.
    pub admissions: u32,
    /// Position where its first row was, and where the next must be.
    pub first_start: u32,
    pub(crate) next_start: u32,
    pub(crate) abort_asked: bool,
    last_us: u64,
    since_step: u64,
}

/// Times seen by requests, in virtual time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gaps {
    pub(crate) first_token_us: Vec<u64>,
    pub(crate) next_token_us: Vec<u64>,
    pub(crate) steps_to_finish: Vec<u64>,
}

impl Ledger {
    pub(crate) fn new(model: FakeModel) -> Self {
        Self {
            model,
            accounts: BTreeMap::new(),
            live: Vec::new(),
            now_us: 0,
            step: 0,
            failing: false,
            broken: None,
            gaps: Gaps::default(),
        }
    }

    pub(crate) fn model(&self) -> &FakeModel {
        &self.model
    }

    /// The books of a request.
    pub fn account(&self, id: RequestId) -> Option<&Account> {
        self.accounts.get(&id)
    }

    /// Everybody's books, by id.
    pub fn accounts(&self) -> impl Iterator<Item = &Account> {
        self.accounts.values()
    }

    /// Requests that have not ended, in order of submission.
    pub fn live(&self) -> &[RequestId] {
        &self.live
    }

    pub(crate) fn open(&mut self, request: Request) {
        let id = request.id;
        let answer = self.model.answer(&request);
        let account = Account {
            request,
            answer,
            cached_tokens: None,
            scored: 0,
            tokens: 0,
            ended: None,
            admissions: 0,
            first_start: 0,
            next_start: 0,
            abort_asked: false,
            last_us: self.now_us,
            since_step: self.step,
        };
        let before = self.accounts.insert(id, account);
        assert!(before.is_none(), "request {id} was submitted twice");
        self.live.push(id);
    }

    pub(crate) fn account_mut(&mut self, id: RequestId) -> Result<&mut Account, Broken> {
        self.accounts.get_mut(&id).ok_or(Broken::Unknown { request: id })
    }

    /// Tells what time it is, and which step.
    pub(crate) fn tick(&mut self, now_us: u64, step: u64) {
        (self.now_us, self.step) = (now_us, step);
    }

    pub(crate) fn set_failing(&mut self, failing: bool) {
        self.failing = failing;
    }

    /// The first thing that was wrong since the last call.
    pub(crate) fn take_broken(&mut self) -> Result<(), Broken> {
        self.broken.take().map_or(Ok(()), Err)
    }

    pub(crate) fn take_gaps(&mut self) -> Gaps {
        std::mem::take(&mut self.gaps)
    }

    fn receive(&mut self, id: RequestId, event: &Event) -> Result<(), Broken> {
        let (now_us, step, failing) = (self.now_us, self.step, self.failing);
        let account = self.accounts.get_mut(&id).ok_or(Broken::Unknown { request: id })?;
        if account.ended.is_some() {
            return Err(Broken::AfterEnd { request: id, event: format!("{event:?}") });
        }
        match event {
            Event::Started { cached_tokens } => account.start(*cached_tokens)?,
            Event::PromptScored { index, scored } => account.score(*index, scored)?,
            Event::Token(token) => {
                let gaps = if account.tokens == 0 {
                    &mut self.gaps.first_token_us
                } else {
                    &mut self.gaps.next_token_us
                };
                gaps.push(now_us - account.last_us);
                account.last_us = now_us;
                account.token(token)?;
            }
            Event::Finished(_) | Event::Failed(_) => {
                account.end(ending(event), failing)?;
                self.gaps.steps_to_finish.push(step - account.since_step);
                self.live.retain(|&live| live != id);
            }
        }
        Ok(())
    }
}

impl Events for Ledger {
    fn emit(&mut self, request: RequestId, event: Event) {
        if let Err(broken) = self.receive(request, &event) {
            self.broken.get_or_insert(broken);
        }
    }
}

impl Account {
    /// Rows of logits that the request needs from its prompt: none of them may come from the cache.
    fn scores_prompt(&self) -> bool {
        self.request.sampling.prompt_logprobs.is_some()
    }

    fn start(&mut self, cached: u32) -> Result<(), Broken> {
        if self.cached_tokens.replace(cached).is_some() {
            return Err(self.out_of_order("Started", "twice"));
        }
        let prompt = self.request.prompt.len();
        let wrong = |why: String| Err(Broken::CachedTokens { request: self.request.id, cached, prompt, why });
        if cached as usize >= prompt {
            return wrong("one row at least is computed".into());
        }
        if cached > 0 && self.scores_prompt() {
            return wrong("rows to be scored are computed".into());
        }
        if cached != self.first_start {
            return wrong(format!("its first row was at position {}", self.first_start));
        }
        Ok(())
    }

    fn score(&mut self, index: u32, scored: &ScoredToken) -> Result<(), Broken> {
        let event = || format!("score of prompt token {index}");
        if self.cached_tokens.is_none() {
            return Err(self.out_of_order(&event(), "before it started"));
        }
        if index as usize != self.scored + 1 {
            return Err(self.out_of_order(&event(), "out of order"));
        }
        let expected = self.answer.scored.get(self.scored);
        self.scored += 1;
        self.same(&event(), scored, expected)
    }

    fn token(&mut self, token: &ScoredToken) -> Result<(), Broken> {
        if self.cached_tokens.is_none() {
            return Err(self.out_of_order("a token", "before it started"));
        }
        if self.scored < self.answer.scored.len() {
            return Err(self.out_of_order("a token", "before its prompt was scored"));
        }
        let expected = self.answer.tokens.get(self.tokens);
        self.tokens += 1;
        self.same(&format!("token {}", self.tokens), token, expected)
    }

    fn end(&mut self, ending: Ending, failing: bool) -> Result<(), Broken> {
        self.ended = Some(ending);
        let all = self.scored == self.answer.scored.len() && self.tokens == self.answer.tokens.len();
        let right = match ending {
            Ending::Aborted => self.abort_asked,
            Ending::Failed => failing,
            Ending::Stop | Ending::Length | Ending::NotANumber { .. } => {
                ending == self.answer.ending && all && self.cached_tokens.is_some()
            }
        };
        let expected = || {
            let Answer { scored, tokens, ending } = &self.answer;
            format!("{ending:?} after {} and {}", scored.len(), tokens.len())
        };
        right.then_some(()).ok_or_else(|| Broken::WrongEnding {
            request: self.request.id,
            got: ending,
            scored: self.scored,
            tokens: self.tokens,
            expected: expected(),
        })
    }

    fn same(&self, what: &str, got: &ScoredToken, expected: Option<&ScoredToken>) -> Result<(), Broken> {
        if expected.is_some_and(|expected| identical(got, expected)) {
            return Ok(());
        }
        let name = |t: &ScoredToken| format!("{what} = {} ({})", t.token, t.logprob);
        let expected = expected.map_or_else(|| format!("no {what}"), name);
        Err(Broken::WrongContent { request: self.request.id, got: name(got), expected })
    }

    fn out_of_order(&self, event: &str, when: &'static str) -> Broken {
        Broken::OutOfOrder { request: self.request.id, event: event.to_owned(), when }
    }
}

fn ending(event: &Event) -> Ending {
    match event {
        Event::Finished(FinishReason::Stop) => Ending::Stop,
        Event::Finished(FinishReason::Length) => Ending::Length,
        Event::Finished(FinishReason::Aborted) => Ending::Aborted,
        Event::Failed(EngineError::NotANumber { position }) => Ending::NotANumber { position: *position },
        Event::Failed(EngineError::Rank(_)) => Ending::Failed,
        other => unreachable!("{other:?} is not terminal"),
    }
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
