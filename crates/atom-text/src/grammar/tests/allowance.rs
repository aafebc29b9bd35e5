//! What the parser does for a grammar that is ambiguous without end, against the allowance of a request. The clock
//! counts the parser's items, so nothing here depends on the machine.

use super::{byte_tokenizer, compile};
use crate::GrammarSource;
use atom_base::TokenId;
use atom_engine::{Allowance, Grammar, Metered, Spent, TokenConstraint};
use serde_json::{Map, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// An item is held against those of its place: what SmolLM2's vocabulary takes at the 140th token of the ambiguous
/// grammar, 30 ms for 715 items.
const ITEM_OF_AN_ITEM: Duration = Duration::from_nanos(50);

/// Items of one place, with llguidance's limits.
const ITEMS_MAX: u64 = 2_000;

/// A grammar that moves a clock by its items.
struct Counted {
    grammar: crate::Grammar,
    clock: Arc<AtomicU64>,
    most: Arc<AtomicU64>,
}

struct CountedOne {
    constraint: crate::Constraint,
    clock: Arc<AtomicU64>,
    most: Arc<AtomicU64>,
}

impl Grammar for Counted {
    fn start(&self) -> Result<Box<dyn TokenConstraint>, String> {
        let (clock, most) = (Arc::clone(&self.clock), Arc::clone(&self.most));
        Ok(Box::new(CountedOne { constraint: self.grammar.start(), clock, most }))
    }
}

impl TokenConstraint for CountedOne {
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
        self.constraint.mask(allowed)?;
        let items = self.constraint.matcher.last_step_stats().unwrap().all_items as u64;
        self.clock.fetch_add(items * items, Ordering::SeqCst);
        self.most.fetch_max(items, Ordering::SeqCst);
        Ok(())
    }

    fn advance(&mut self, token: TokenId) -> Result<(), String> {
        self.constraint.advance(token)
    }
}

/// Writes `text` under a Lark grammar: what was spent, the most items of a mask, and how it ended.
fn written(lark: &str, text: &str) -> (Spent, u64, Result<(), String>) {
    let (clock, most) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let grammar = compile(&GrammarSource::Lark(lark.into())).unwrap();
    let counted = Counted { grammar, clock: Arc::clone(&clock), most: Arc::clone(&most) };
    let time = move || ITEM_OF_AN_ITEM * u32::try_from(clock.load(Ordering::SeqCst)).unwrap();
    let metered = Metered::new(Arc::new(counted), Allowance::OF_A_REQUEST, time);
    let mut one = metered.start().unwrap();
    let mut words = vec![0; byte_tokenizer().vocab_size().div_ceil(32)];
    let ended = text.bytes().try_for_each(|byte| {
        one.mask(&mut words)?;
        one.advance(byte.into())
    });
    (metered.spent(), most.load(Ordering::SeqCst), ended)
}

#[test]
fn a_grammar_that_is_ambiguous_without_end_stays_below_the_parsers_bounds_and_ends_by_its_allowance() {
    let text = "a".repeat(390);
    let (spent, most, ended) = written("start: e\ne: e e | e e e | \"a\" | \"\"", &text);
    let words = ended.unwrap_err();
    assert!(words.contains("too slow") && words.contains(&format!("for {} tokens", spent.masks)), "{words}");
    assert!((100..250).contains(&spent.masks), "{spent:?}");
    assert!(most < ITEMS_MAX / 2, "the parser's own bound is far: {most} items");

    // The same texts, said in one way: a hundredth, and to the end.
    let (spent, most, ended) = written("start: e\ne: e \"a\" | \"\"", &text);
    assert_eq!((ended, spent.masks), (Ok(()), 390));
    assert!(spent.time < Allowance::OF_A_REQUEST.each * 390 / 100 && most < 20, "{spent:?}, {most} items");
}

#[test]
fn an_object_of_five_hundred_optional_properties_meets_the_bound_of_a_place() {
    for (count, fits) in [(490, true), (500, false)] {
        let properties: Map<_, _> =
            (0..count).map(|at| (format!("p{at}"), json!({"type": "integer"}))).collect();
        let schema = json!({"type": "object", "properties": properties});
        let mut constraint = compile(&GrammarSource::JsonSchema(schema)).unwrap().start();
        let mut words = vec![0; byte_tokenizer().vocab_size().div_ceil(32)];
        let written = "{\"p1\": 1}".bytes().try_for_each(|byte| {
            constraint.mask(&mut words)?;
            constraint.advance(byte.into())
        });
        match written {
            Ok(()) => assert!(fits, "{count} properties"),
            Err(words) => assert!(!fits && words.contains("max is 2000"), "{count} properties: {words}"),
        }
    }
}
