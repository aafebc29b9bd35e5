//! Ranks that die, or stay away.

use super::*;
use crate::watch::{Moment, Twist, watched};
use atom_base::FinishReason;
use atom_engine::EngineError;
use atom_group::Patience;
use common::tiny;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Misbehaves in the 20th replay of the first rank that sits at 1, once.
fn at_rank_1(fault: impl Fn() + Send + Sync + 'static) -> impl Fn(u16) -> Twist + Send + Sync + 'static {
    let (fault, replays) = (Arc::new(fault), Arc::new(AtomicUsize::new(0)));
    move |rank| {
        let (fault, replays) = (Arc::clone(&fault), Arc::clone(&replays));
        Box::new(move |moment| {
            if let (1, Moment::Replay(_)) = (rank, moment)
                && replays.fetch_add(1, Ordering::SeqCst) == 20
            {
                fault();
            }
            Ok(())
        })
    }
}

/// vllm-project/vllm#30112, PR#38862, #44428, #46370: one rank died and the healthy ones were killed with it.
/// Here its own requests get an error, the others' go on to their last token, and after that all lanes serve.
#[test]
fn b_52_a_rank_that_dies_takes_nobody_along() {
    for experts in LAYOUTS {
        let setup = Setup { rank_restarts_max: 1, ..lanes(3, experts) };
        let watched = watched(&setup, &tiny("qwen3_moe"), at_rank_1(|| panic!("injected")));
        let requests = mixed(9, 3, 60);
        let expected = bits(&alone(&lanes(3, experts).start(&tiny("qwen3_moe")), &requests));
        for (index, answer) in together(&watched.host, &requests).iter().enumerate() {
            match &answer.end {
                Some(Err(EngineError::Rank(why))) => {
                    assert!(index % 3 == 1 && why.contains("rank 1"), "{experts:?}, request {index}: {why}");
                }
                end => {
                    assert_eq!(*end, Some(Ok(FinishReason::Length)), "{experts:?}, request {index}");
                    assert_eq!(answer.bits(), expected[index], "{experts:?}, request {index}");
                }
            }
        }
        let again = bits(&together(&watched.host, &requests));
        assert_eq!(again, expected, "{experts:?}: all lanes serve again");
        assert!(watched.host.stats().iter().all(|lane| lane.epoch == 2), "{experts:?}");
    }
}

/// vllm-project/vllm#39942: collectives waited for a dead rank without an end. Here every wait has a deadline,
/// and what it says names who did not come and what that one was doing.
#[test]
fn b_53_nobody_waits_for_an_absent_rank_for_ever() {
    let patience = Patience { min: Duration::from_millis(200), first: Duration::from_millis(600) };
    for experts in LAYOUTS {
        let (word, go_on) = channel::<()>();
        let go_on = Mutex::new(go_on);
        let stuck = move || {
            // An error means that the test is over.
            let _ = go_on.lock().unwrap().recv();
        };
        let setup = Setup { patience, ..lanes(3, experts) };
        let watched = watched(&setup, &tiny("qwen3_moe"), at_rank_1(stuck));
        for (index, answer) in together(&watched.host, &mixed(9, 3, 300)).iter().enumerate() {
            let Some(Err(EngineError::Rank(why))) = &answer.end else { panic!("{index}: {answer:?}") };
            let is_named = why.contains("rank 1") || why.contains("lane 1");
            assert!(is_named, "{experts:?}, request {index}: {why}");
        }
        let fault = watched.host.health().fault.expect("the group is given up");
        assert!(fault.contains("rank 1") && fault.contains("replay"), "{experts:?}: {fault}");
        drop(word);
        assert!(watched.host.shutdown().is_err());
    }
}
