//! A grammar whose masks depend on every token before, requests that are held to it, and one that misbehaves.

use super::{Answer, request};
use atom_base::{FinishReason, SamplingParams, TokenId};
use atom_engine::{Allowance, Grammar, GrammarRef, Metered, Request, TokenConstraint};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// A token may follow those before it if it is of their kind: `token % 7` is the sum of all before it,
/// `% 7`. So a mask depends on everything that was taken in, in order and once. After `length` tokens only
/// the end may come.
#[derive(Clone, Copy)]
pub struct Sums {
    pub length: usize,
}

struct Sum {
    sum: u32,
    left: usize,
}

/// Ends every text.
pub const END: TokenId = 3;

impl Grammar for Sums {
    fn start(&self) -> Result<Box<dyn TokenConstraint>, String> {
        Ok(Box::new(Sum { sum: 0, left: self.length }))
    }
}

impl TokenConstraint for Sum {
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
        let fits = |token: TokenId| {
            if self.left == 0 { token == END } else { token != END && token % 7 == self.sum }
        };
        for token in (0..allowed.len() as u32 * 32).filter(|&token| fits(token)) {
            allowed[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(())
    }

    fn advance(&mut self, token: TokenId) -> Result<(), String> {
        if self.left == 0 || token == END || token % 7 != self.sum {
            return Err(format!("{token} was not allowed"));
        }
        (self.sum, self.left) = ((self.sum + token) % 7, self.left - 1);
        Ok(())
    }
}

/// A grammar that waits, fails or panics when a token was taken in.
struct Odd {
    with: Arc<dyn Fn(usize) -> Result<(), String> + Send + Sync>,
}

struct OddOne {
    inner: Sum,
    with: Arc<dyn Fn(usize) -> Result<(), String> + Send + Sync>,
    taken: usize,
}

impl Grammar for Odd {
    fn start(&self) -> Result<Box<dyn TokenConstraint>, String> {
        Ok(Box::new(OddOne { inner: Sum { sum: 0, left: 1000 }, with: Arc::clone(&self.with), taken: 0 }))
    }
}

impl TokenConstraint for OddOne {
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
        (self.with)(self.taken)?;
        self.inner.mask(allowed)
    }

    fn advance(&mut self, token: TokenId) -> Result<(), String> {
        self.taken += 1;
        self.inner.advance(token)
    }
}

/// A door that a mask waits at until it is opened.
#[derive(Default)]
pub struct Door {
    /// How many have come, and whether it is open.
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Door {
    pub fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.0 += 1;
        self.changed.notify_all();
        while !state.1 {
            state = self.changed.wait(state).unwrap();
        }
    }

    pub fn wait_for_somebody(&self) {
        let mut state = self.state.lock().unwrap();
        while state.0 == 0 {
            state = self.changed.wait(state).unwrap();
        }
    }

    pub fn open(&self) {
        self.state.lock().unwrap().1 = true;
        self.changed.notify_all();
    }
}

pub fn held(grammar: impl Grammar + 'static, request: Request) -> Request {
    Request { grammar: Some(GrammarRef(Arc::new(grammar))), ..request }
}

pub fn odd(with: impl Fn(usize) -> Result<(), String> + Send + Sync + 'static, request: Request) -> Request {
    held(Odd { with: Arc::new(with) }, request)
}

/// Every mask takes so many milliseconds of a clock that only they move.
pub fn metered(mask_ms: u64, allowance: Allowance, request: Request) -> Request {
    let clock = Arc::new(AtomicU64::new(0));
    let moved = Arc::clone(&clock);
    let with = move |_| {
        moved.fetch_add(mask_ms, Ordering::SeqCst);
        Ok(())
    };
    let clock = move || Duration::from_millis(clock.load(Ordering::SeqCst));
    held(Metered::new(Arc::new(Odd { with: Arc::new(with) }), allowance, clock), request)
}

pub fn prompt(seed: u32) -> Vec<TokenId> {
    (0..2 + seed * 5 % 40).map(|at| (at * at * 31 + at * 7 + seed * 13) % 256).collect()
}

/// Requests of all kinds, every other one with a grammar.
pub fn requests() -> impl Iterator<Item = Request> {
    (0..32u32).map(|i| {
        let sampling = SamplingParams {
            temperature: if i % 3 == 0 { 0.0 } else { 0.9 },
            seed: i.into(),
            top_k: if i % 5 == 1 { 4 } else { 0 },
            top_p: if i % 5 == 2 { 0.7 } else { 1.0 },
            min_p: if i % 5 == 3 { 0.05 } else { 0.0 },
            presence_penalty: if i % 4 == 1 { 0.7 } else { 0.0 },
            repetition_penalty: if i % 4 == 2 { 1.2 } else { 1.0 },
            logit_bias: if i % 6 == 4 { Box::new([(5, 3.0), (12, -100.0)]) } else { Box::default() },
            logprobs: (i % 3 == 1).then_some(20),
            prompt_logprobs: (i % 8 == 5).then_some(2),
            ..SamplingParams::default()
        };
        let request = request(&prompt(i), 10 + i * 7 % 60, sampling);
        if i % 2 == 0 { request } else { held(Sums { length: 20 + i as usize % 30 }, request) }
    })
}

/// The grammar was followed to its end, or as far as there was room.
pub fn check(request: &Request, answer: &Answer) {
    if request.grammar.is_none() {
        return;
    }
    let length = 20 + (request.sampling.seed as usize) % 30;
    let room = request.stop.max_tokens as usize;
    let mut sum = 0;
    for scored in &answer.tokens {
        assert_eq!(scored.token % 7, sum, "{:?}", answer.ids());
        sum = (sum + scored.token) % 7;
        let top = scored.top.as_slice();
        assert!(top.iter().all(|(token, p)| *token != END && token % 7 == scored.token % 7 && p.is_finite()));
        if request.sampling.logprobs.is_some() {
            // Of the tokens that are allowed, as if there were no others.
            assert!(scored.logprob.is_finite() && scored.logprob <= 0.0, "{scored:?}");
            assert_eq!(top.len(), 20);
            assert!(top.iter().map(|(_, p)| p.exp()).sum::<f32>() < 1.0001, "{top:?}");
        }
    }
    let expected = if length < room { (length, FinishReason::Stop) } else { (room, FinishReason::Length) };
    assert_eq!((answer.tokens.len(), answer.end.clone()), (expected.0, Some(Ok(expected.1))));
}
