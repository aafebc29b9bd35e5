//! Requests that are held to a grammar, on a GPU: the CPU's tokens, and nothing that hangs where masks don't come.

use crate::common::sums::{Door, END, Sums, check, held, odd, prompt, requests};
use crate::common::{Answer, Pending, Setup, ask, request, rest, send, tiny};
use crate::start;
use atom_base::{FinishReason, MaskFault, SamplingParams};
use atom_cuda::Element;
use atom_engine::EngineError;
use atom_rank::Host;
use std::sync::Arc;
use std::time::Duration;

pub(crate) fn grammars() {
    for (name, pages) in [("llama", 90), ("qwen3_moe", 12)] {
        let setup = Setup { pages, ..small() };
        let checkpoint = tiny(name);
        let gpu = start(&setup, &checkpoint, Element::F32);
        let (found, preempted) = answers(gpu);
        let (expected, _) = answers(setup.start(&checkpoint));
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found.ids(), expected.ids(), "{name}, request {at}");
            assert!(near(found, expected), "{name}, request {at}: {found:?}, not {expected:?}");
        }
        assert!(pages > 12 || preempted > 0, "{name}: nobody gave way");
        println!("  {name}: {} answers are the CPU's, {preempted} requests gave way", found.len());
    }
    a_mask_that_does_not_come_fails_its_own_request();
    a_host_ends_while_a_step_waits_for_a_mask();
}

fn small() -> Setup {
    Setup {
        max_num_seqs: 6,
        rows_max: 48,
        max_model_len: 160,
        pages: 90,
        depth: 1,
        eos: vec![END],
        ..Setup::default()
    }
}

fn answers(host: Host) -> (Vec<Answer>, u64) {
    let sent: Vec<_> = requests().map(|request| send(&host, request)).collect();
    let got: Vec<_> = sent.into_iter().map(Pending::wait).collect();
    requests().zip(&got).for_each(|(request, answer)| check(&request, answer));
    rest(&host);
    let counters = host.stats()[0].counters;
    assert_eq!((counters.running, counters.waiting, counters.leaving, counters.pages_held), (0, 0, 0, 0));
    host.shutdown().unwrap();
    (got, counters.preempted)
}

/// Log-probabilities of two devices in f32.
fn near(a: &Answer, b: &Answer) -> bool {
    let is_near = |a: f32, b: f32| (a.is_nan() && b.is_nan()) || (a - b).abs() < 1e-3;
    a.tokens.iter().zip(&b.tokens).all(|(a, b)| {
        let tops = a.top.as_slice().iter().zip(b.top.as_slice());
        is_near(a.logprob, b.logprob)
            && a.top.as_slice().len() == b.top.as_slice().len()
            && tops.into_iter().all(|(a, b)| is_near(a.1, b.1))
    })
}

fn a_mask_that_does_not_come_fails_its_own_request() {
    let door = Arc::new(Door::default());
    let wait = Arc::clone(&door);
    let stuck = move |taken| {
        if taken == 4 {
            wait.pass();
        }
        Ok(())
    };
    let setup = Setup { max_num_seqs: 8, mask_threads: 3, mask_wait: Duration::from_millis(500), ..small() };
    let host = start(&setup, &tiny("llama"), Element::F32);
    let neighbour = send(&host, request(&prompt(8), 100, SamplingParams::greedy()));
    let ended = ask(&host, odd(stuck, request(&prompt(1), 60, SamplingParams::default())));
    let Some(Err(EngineError::Grammar { fault: MaskFault::Late { waited }, .. })) = ended.end else {
        panic!("{ended:?}");
    };
    println!("  a mask that did not come was given up after {waited:?}");
    assert_eq!(neighbour.wait().end, Some(Ok(FinishReason::Length)), "whoever has no grammar goes on");
    let next = ask(&host, held(Sums { length: 6 }, request(&prompt(2), 60, SamplingParams::default())));
    assert_eq!((next.tokens.len(), next.end), (6, Some(Ok(FinishReason::Stop))));
    assert_eq!(host.health().fault, None);
    door.open();
    host.shutdown().unwrap();
}

/// Nobody listens any more, and the mask never comes: the step is let go at its deadline, and all ends.
fn a_host_ends_while_a_step_waits_for_a_mask() {
    let door = Arc::new(Door::default());
    let wait = Arc::clone(&door);
    let stuck = move |_| {
        wait.pass();
        Ok(())
    };
    let setup = Setup { mask_wait: Duration::from_millis(500), ..small() };
    let host = start(&setup, &tiny("llama"), Element::F32);
    let pending = send(&host, odd(stuck, request(&prompt(1), 60, SamplingParams::default())));
    door.wait_for_somebody();
    drop(pending);
    drop(host);
    door.open();
}
