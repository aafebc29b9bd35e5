//! Requests that are held to a grammar: through the whole engine, among others, at both depths, in every
//! layout, after a preemption; and what becomes of a grammar that fails, allows nothing or is late.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_base::{FinishReason, LaneId, MaskFault, SamplingParams, TokenId};
use atom_engine::{Allowance, EngineError, Event, Grammar, GrammarRef, Refusal, Request, TokenConstraint};
use atom_group::Patience;
use common::hooked::{Hooked, Hooks};
use common::sums::{Door, END, Sums, check, held, metered, odd, prompt, requests};
use common::{Answer, Setup, ask, expert_parallel, mesh, request, rest, send, tiny};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Steps have all the time: nobody is to be late because the machine is busy.
fn small() -> Setup {
    let patience = Patience { min: Duration::from_secs(1200), first: Duration::from_secs(1200) };
    Setup {
        max_num_seqs: 6,
        rows_max: 48,
        max_model_len: 160,
        pages: 90,
        eos: vec![END],
        patience,
        ..Setup::default()
    }
}

type Bits = Vec<Vec<(TokenId, u32)>>;

fn answers(setup: &Setup, model: &str) -> (Bits, u64) {
    let host = setup.start(&tiny(model));
    let lanes = host.limits().lanes as u16;
    let all: Vec<_> = requests().zip((0..lanes).cycle()).collect();
    let on = |(request, lane): &(Request, u16)| Request { lane: Some(LaneId(*lane)), ..request.clone() };
    let sent: Vec<_> = all.iter().map(|item| send(&host, on(item))).collect();
    let got: Vec<_> = sent.into_iter().map(common::Pending::wait).collect();
    all.iter().zip(&got).for_each(|((request, _), answer)| check(request, answer));
    rest(&host);
    let stats = host.stats();
    for lane in &stats {
        let counters = lane.counters;
        assert_eq!((counters.running, counters.waiting, counters.leaving, counters.pages_held), (0, 0, 0, 0));
    }
    host.shutdown().unwrap();
    let preempted = stats.iter().map(|lane| lane.counters.preempted).sum();
    (got.iter().map(Answer::bits).collect(), preempted)
}

#[test]
fn a_request_with_a_grammar_is_the_same_alone_among_others_at_both_depths_and_after_giving_way() {
    // One by one, for the bits that everybody has alone.
    let host = small().start(&tiny("llama"));
    let alone: Bits = requests().map(|request| ask(&host, request).bits()).collect();
    host.shutdown().unwrap();
    for (name, setup) in [
        ("together", small()),
        ("a full cache", Setup { pages: 12, ..small() }),
        ("other lanes", Setup { mesh: mesh(1, 2, false), threads: 2, ..small() }),
        ("DP attention", Setup { mesh: mesh(2, 1, true), ..small() }),
    ] {
        // Sums over ranks are added in another order: there depth 0 says what depth 1 must.
        let mut expected = (name != "DP attention").then(|| alone.clone());
        for depth in [0, 1] {
            let (got, preempted) = answers(&Setup { depth, ..setup.clone() }, "llama");
            let expected = expected.get_or_insert_with(|| got.clone());
            for (at, (got, expected)) in got.iter().zip(&*expected).enumerate() {
                assert_eq!(got, expected, "{name}, depth {depth}: request {at}");
            }
            assert!(setup.pages > 12 || preempted > 0, "{name}: nobody gave way");
        }
    }
}

#[test]
fn every_rank_of_a_lane_and_every_lane_of_a_group_sees_the_same_masks() {
    for (model, setup) in [
        ("llama", Setup { mesh: mesh(2, 1, false), pages: 12, ..small() }),
        ("qwen3_moe", Setup { mesh: mesh(2, 1, true), experts: expert_parallel(), ..small() }),
    ] {
        let (expected, _) = answers(&setup, model);
        let (got, _) = answers(&Setup { depth: 1, ..setup }, model);
        assert_eq!(got, expected, "{model}");
    }
}

#[test]
fn every_choice_has_a_constraint_of_its_own() {
    let host = small().start(&tiny("llama"));
    let grammar = Some(GrammarRef(Arc::new(Sums { length: 12 })));
    let choice = |choice| {
        let sampling = SamplingParams { choice, seed: 9, ..SamplingParams::default() };
        Request { grammar: grammar.clone(), ..request(&prompt(3), 30, sampling) }
    };
    let together: Vec<_> = (0..5).map(|at| send(&host, choice(at))).collect();
    let together: Vec<_> = together.into_iter().map(|sent| sent.wait()).collect();
    for (at, answer) in together.iter().enumerate() {
        assert_eq!(answer.end, Some(Ok(FinishReason::Stop)));
        assert_eq!(answer.ids(), ask(&host, choice(at as u32)).ids());
    }
    assert!(together.windows(2).any(|pair| pair[0].ids() != pair[1].ids()), "choices differ");
}

/// Sends one odd request among five others, and says how it ended; the others must not notice.
fn beside_others(setup: &Setup, odd_one: Request) -> (Answer, Vec<Answer>) {
    let host = setup.start(&tiny("llama"));
    let others = || {
        (0..5u32).map(|i| {
            let one = request(&prompt(i), 25, SamplingParams { seed: i.into(), ..SamplingParams::default() });
            if i % 2 == 0 { one } else { held(Sums { length: 100 }, one) }
        })
    };
    let sent: Vec<_> = others().map(|request| send(&host, request)).collect();
    let ended = ask(&host, odd_one);
    let got: Vec<_> = sent.into_iter().map(common::Pending::wait).collect();
    for (request, answer) in others().zip(&got) {
        assert_eq!(answer.bits(), ask(&host, request).bits());
    }
    assert_eq!(host.health().fault, None);
    rest(&host);
    assert_eq!(host.stats()[0].counters.pages_held, 0);
    host.shutdown().unwrap();
    (ended, got)
}

fn fault(answer: &Answer) -> &MaskFault {
    match &answer.end {
        Some(Err(EngineError::Grammar { token, fault })) => {
            assert_eq!(*token as usize, answer.tokens.len() + 1, "the prompt is no part of the output");
            fault
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_grammar_that_fails_panics_or_allows_nothing_ends_its_own_request_with_the_reason() {
    let plain = || request(&prompt(1), 60, SamplingParams::default());
    let at = |n: usize, why: fn() -> Result<(), String>| {
        move |taken: usize| if taken == n { why() } else { Ok(()) }
    };
    for depth in [0, 1] {
        let setup = Setup { depth, max_num_seqs: 8, ..small() };
        for n in [0, 7] {
            let (ended, _) = beside_others(&setup, odd(at(n, || Err("no way on".into())), plain()));
            assert_eq!((ended.tokens.len(), fault(&ended)), (n, &MaskFault::Failed("no way on".into())));
            let (ended, _) = beside_others(&setup, odd(at(n, || panic!("a bug")), plain()));
            assert!(matches!(fault(&ended), MaskFault::Failed(why) if why.contains("panicked")), "{ended:?}");
        }
    }
    // Without an end token nothing is left behind a complete text.
    let setup = Setup { eos: vec![], ..small() };
    struct Nothing;
    impl Grammar for Nothing {
        fn start(&self) -> Result<Box<dyn TokenConstraint>, String> {
            Ok(Box::new(Nothing))
        }
    }
    impl TokenConstraint for Nothing {
        fn mask(&mut self, _: &mut [u32]) -> Result<(), String> {
            Ok(())
        }
        fn advance(&mut self, _: TokenId) -> Result<(), String> {
            Ok(())
        }
    }
    let (ended, _) = beside_others(&setup, held(Nothing, plain()));
    assert!(ended.tokens.is_empty());
    assert!(matches!(fault(&ended), MaskFault::Failed(why) if why.contains("no token")), "{ended:?}");
}

/// An ambiguous grammar makes steps of 170 ms, one after the other, and everybody else waits for them.
#[test]
fn a_request_whose_masks_take_too_much_of_a_processor_ends_with_the_numbers_and_its_neighbours_go_on() {
    let allowance = Allowance::OF_A_REQUEST;
    let long = || request(&prompt(1), 60, SamplingParams::default());
    for depth in [0, 1] {
        let setup = Setup { depth, max_num_seqs: 8, ..small() };
        let (ended, _) = beside_others(&setup, metered(170, allowance, long()));
        let MaskFault::Failed(why) = fault(&ended) else { panic!("{ended:?}") };
        assert_eq!(ended.tokens.len(), 3, "{why}");
        for number in ["680.000ms", "4 tokens", "10ms", "500ms"] {
            assert!(why.contains(number), "{number}: {why}");
        }
        // Within its allowance it is like any other.
        let (whole, _) = beside_others(&setup, metered(10, allowance, long()));
        assert_eq!((whole.tokens.len(), whole.end), (60, Some(Ok(FinishReason::Length))));
    }
}

#[test]
fn a_mask_that_does_not_come_fails_its_own_request_at_the_deadline() {
    for depth in [0, 1] {
        let door = Arc::new(Door::default());
        let wait = Arc::clone(&door);
        let stuck = move |taken| {
            if taken == 4 {
                wait.pass();
            }
            Ok(())
        };
        // Short for the one that never comes; a thread more than those that wait at the door.
        let setup =
            Setup { depth, max_num_seqs: 8, mask_threads: 3, mask_wait: Duration::from_secs(1), ..small() };
        let host = setup.start(&tiny("llama"));
        let neighbour = send(&host, request(&prompt(8), 100, SamplingParams::greedy()));
        let ended = ask(&host, odd(stuck, request(&prompt(1), 60, SamplingParams::default())));
        let neighbour = neighbour.wait();
        assert_eq!(neighbour.end, Some(Ok(FinishReason::Length)), "whoever has no grammar goes on");
        // The thread is still in there, and others are served.
        let next = ask(&host, held(Sums { length: 6 }, request(&prompt(2), 60, SamplingParams::default())));
        assert!(next.tokens.len() == 6 || matches!(fault(&next), MaskFault::Late { .. }), "{next:?}");
        assert_eq!(host.health().fault, None);
        rest(&host);
        assert_eq!(host.stats()[0].counters.pages_held, 0);
        door.open();
        host.shutdown().unwrap();
        assert!(ended.tokens.len() <= 4);
        let text = ended.end.clone().unwrap().unwrap_err().to_string();
        assert!(matches!(fault(&ended), MaskFault::Late { .. }) && text.contains("waiting"), "{text}");
    }
}

#[test]
fn a_wait_for_a_mask_does_not_make_steps_look_slow() {
    // What waits is no replay: deadlines of steps are made of what replays took.
    let setup = Setup { mask_wait: Duration::from_secs(2), ..small() };
    let door = Arc::new(Door::default());
    let wait = Arc::clone(&door);
    let host = setup.start(&tiny("llama"));
    let stuck = move |_| {
        wait.pass();
        Ok(())
    };
    let (before, start) = (host.stats()[0].replay_time, Instant::now());
    let ended = ask(&host, odd(stuck, request(&prompt(1), 60, SamplingParams::default())));
    rest(&host);
    let replayed = host.stats()[0].replay_time - before;
    let MaskFault::Late { waited } = fault(&ended) else { panic!("{ended:?}") };
    assert!(ended.tokens.is_empty() && *waited > Duration::ZERO, "{waited:?}");
    // Both are parts of the time that went by: one that was in the other would make them more.
    assert!(replayed + *waited <= start.elapsed(), "{replayed:?} of replays beside {waited:?} of waiting");
    door.open();
    host.shutdown().unwrap();
}

#[test]
fn an_abort_while_a_mask_is_computed_frees_everything() {
    for depth in [0, 1] {
        let door = Arc::new(Door::default());
        let wait = Arc::clone(&door);
        let stuck = move |taken| {
            if taken == 2 {
                wait.pass();
            }
            Ok(())
        };
        let setup = Setup { depth, mask_wait: Duration::from_secs(600), ..small() };
        let host = setup.start(&tiny("llama"));
        let pending = send(&host, odd(stuck, request(&prompt(1), 60, SamplingParams::default())));
        door.wait_for_somebody();
        host.abort(pending.id);
        // The step that waits takes the abort in when it has its mask.
        door.open();
        let next = ask(&host, held(Sums { length: 6 }, request(&prompt(2), 60, SamplingParams::default())));
        assert_eq!((next.tokens.len(), next.end), (6, Some(Ok(FinishReason::Stop))));
        rest(&host);
        let counters = host.stats()[0].counters;
        assert_eq!((counters.running, counters.waiting, counters.leaving, counters.pages_held), (0, 0, 0, 0));
        assert_eq!(host.open_requests(), 0);
        host.shutdown().unwrap();
    }
}

#[test]
fn a_device_that_heeds_no_masks_is_given_none() {
    struct Deaf;
    impl Hooks for Deaf {
        fn is_deaf(&self) -> bool {
            true
        }
    }
    let setup = small();
    let cpu = setup.cpu();
    let host = setup.start_with(&tiny("llama"), move |seat| Ok(Box::new(Hooked::new(cpu(seat)?, Deaf))));
    assert!(!host.limits().grammars);
    let refused = host
        .submit(held(Sums { length: 3 }, request(&[1, 2], 5, SamplingParams::greedy())), Box::new(|_| {}));
    assert_eq!(refused, Err(Refusal::NoGrammars));
    assert_eq!(ask(&host, request(&[1, 2], 5, SamplingParams::greedy())).tokens.len(), 5);
    let hearing = setup.start(&tiny("llama"));
    assert!(hearing.limits().grammars);
    let sent = send(&hearing, held(Sums { length: 3 }, request(&[1, 2], 5, SamplingParams::greedy())));
    assert!(matches!(sent.next(), Event::Started { .. }));
}
