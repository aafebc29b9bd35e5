//! The ledger must notice: each case tells a request something that it may not hear.

use super::*;
use atom_base::{SamplingParams, StopParams, TokenId};
use std::sync::Arc;

const MODEL: FakeModel = FakeModel { vocab: 50, eos: 0, eos_per_mille: 0, nan_per_mille: 0 };
const ID: RequestId = RequestId(7);

fn request(prompt_logprobs: Option<u8>) -> Request {
    Request {
        id: ID,
        prompt: (10..14).collect::<Vec<TokenId>>().into(),
        sampling: Arc::new(SamplingParams { prompt_logprobs, ..SamplingParams::default() }),
        stop: StopParams { max_tokens: 3, ignore_eos: true, ..StopParams::default() },
        lane: None,
        session: None,
        grammar: None,
    }
}

/// What the request hears when all is well.
fn right(prompt_logprobs: Option<u8>) -> Vec<Event> {
    let answer = MODEL.answer(&request(prompt_logprobs));
    let scored = (1..).zip(&answer.scored).map(|(index, s)| Event::PromptScored { index, scored: *s });
    std::iter::once(Event::Started { cached_tokens: 0 })
        .chain(scored)
        .chain(answer.tokens.iter().map(|t| Event::Token(*t)))
        .chain([Event::Finished(FinishReason::Length)])
        .collect()
}

fn hear(prompt_logprobs: Option<u8>, events: Vec<Event>) -> Result<(), Broken> {
    let mut ledger = Ledger::new(MODEL);
    ledger.open(request(prompt_logprobs));
    for event in events {
        ledger.emit(ID, event);
    }
    ledger.take_broken()?;
    ledger.live().first().map_or(Ok(()), |&request| Err(Broken::NeverEnded { request }))
}

#[test]
fn the_right_events_are_accepted() {
    assert_eq!(hear(None, right(None)), Ok(()));
    assert_eq!(hear(Some(1), right(Some(1))), Ok(()));
    assert_eq!(right(Some(1)).len(), 1 + 3 + 3 + 1);
}

#[test]
fn every_wrong_event_is_found() {
    type Case = (&'static str, Option<u8>, fn(&mut Vec<Event>));
    let cases: [Case; 16] = [
        ("OutOfOrder", None, |e| drop(e.remove(0))),
        ("OutOfOrder", None, |e| e.insert(1, Event::Started { cached_tokens: 0 })),
        ("CachedTokens", None, |e| e[0] = Event::Started { cached_tokens: 4 }),
        ("CachedTokens", None, |e| e[0] = Event::Started { cached_tokens: 2 }),
        ("CachedTokens", Some(0), |e| e[0] = Event::Started { cached_tokens: 2 }),
        ("OutOfOrder", Some(0), |e| drop(e.remove(1))),
        ("OutOfOrder", Some(0), |e| e.insert(1, e[1].clone())),
        ("OutOfOrder", Some(0), |e| e.swap(3, 4)),
        ("WrongContent", None, |e| e.swap(1, 2)),
        ("WrongContent", None, |e| e.insert(1, e[1].clone())),
        ("WrongContent", None, |e| drop(e.remove(1))),
        ("WrongEnding", None, |e| drop(e.remove(3))),
        ("WrongEnding", None, |e| e[4] = Event::Finished(FinishReason::Stop)),
        ("WrongEnding", None, |e| e[4] = Event::Finished(FinishReason::Aborted)),
        ("WrongEnding", None, |e| e[4] = Event::Failed(EngineError::Rank(String::new()))),
        ("AfterEnd", None, |e| e.push(e[4].clone())),
    ];
    for (expected, prompt_logprobs, spoil) in cases {
        let mut events = right(prompt_logprobs);
        spoil(&mut events);
        let broken = hear(prompt_logprobs, events.clone()).unwrap_err();
        assert!(format!("{broken:?}").starts_with(expected), "expected {expected}, found {broken:?}");
    }
    let mut events = right(None);
    events.pop();
    assert_eq!(hear(None, events), Err(Broken::NeverEnded { request: ID }));
}

#[test]
fn events_for_strangers_are_found() {
    let mut ledger = Ledger::new(MODEL);
    ledger.emit(RequestId(1), Event::Started { cached_tokens: 0 });
    assert_eq!(ledger.take_broken(), Err(Broken::Unknown { request: RequestId(1) }));
}

#[test]
fn what_was_aborted_or_failed_may_end_anywhere_but_hears_nothing_wrong() {
    for length in 0..right(Some(0)).len() - 1 {
        let mut ledger = Ledger::new(MODEL);
        ledger.open(request(Some(0)));
        ledger.account_mut(ID).unwrap().abort_asked = true;
        for event in &right(Some(0))[..length] {
            ledger.emit(ID, event.clone());
        }
        ledger.emit(ID, Event::Finished(FinishReason::Aborted));
        assert_eq!(ledger.take_broken(), Ok(()), "after {length} events");
    }
}
