//! Starting: ranks that are late, requests that are early, shares of the weights.

use super::*;
use crate::watch::{Moment, Twist, leave_alone, watched};
use atom_base::Seat;
use atom_ops::Backend;
use atom_rank::Host;
use common::tiny;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

/// What a late rank does meanwhile: another host starts and serves, which takes its time.
fn be_late() {
    let host = lanes(2, DEP).start(&tiny("qwen3_moe"));
    for i in 0..10 {
        assert_eq!(ask(&host, on(i as u16 % 2, greedy(&prompt(i, 30), 20))).tokens.len(), 20);
    }
}

/// vllm-project/vllm PR#55319: a rank that came to the capture of graphs after the others ran into a
/// barrier's timeout. Here it is late with its device, which it begins with when the others have
/// loaded, and then with its first recording.
#[test]
fn b_23_a_rank_that_loads_late_is_waited_for() {
    let setup = lanes(3, DEP);
    let (loaded, others) = channel();
    let progress = move |rank: usize, done: usize, total: usize| {
        if rank != 1 && done == total {
            // Only the late rank listens, and only once.
            let _ = loaded.send(rank);
        }
    };
    let others: Mutex<Receiver<usize>> = Mutex::new(others);
    let cpu = setup.cpu();
    let backend = move |seat: &Seat| -> Result<Box<dyn Backend>, _> {
        if seat.rank.0 == 1 {
            let others = others.lock().unwrap();
            let mut ranks = [others.recv().unwrap(), others.recv().unwrap()];
            ranks.sort_unstable();
            assert_eq!(ranks, [0, 2]);
            be_late();
        }
        cpu(seat)
    };
    let host = Host::start(&setup.config(), &tiny("qwen3_moe"), backend, Arc::new(progress)).unwrap();
    assert_eq!(ask(&host, on(0, greedy(&prompt(1, 64), 3))).tokens.len(), 3);

    let was_late = Arc::new(AtomicBool::new(false));
    let late = Arc::clone(&was_late);
    let records_late = move |rank| -> Twist {
        let late = Arc::clone(&late);
        Box::new(move |moment| {
            if let (1, Moment::Record(_)) = (rank, moment)
                && !late.swap(true, Ordering::SeqCst)
            {
                be_late();
            }
            Ok(())
        })
    };
    let watched = watched(&setup, &tiny("qwen3_moe"), records_late);
    assert!(was_late.load(Ordering::SeqCst));
    assert_eq!(ask(&watched.host, on(0, greedy(&prompt(1, 64), 3))).tokens.len(), 3);
    watched.steps();
}

/// sgl-project/sglang#34582: all ranks hung in the exchange of the very first batch.
#[test]
fn b_24_the_first_request_may_come_at_once() {
    for (ranks, record_all) in [(2, true), (4, false), (8, true), (16, false)] {
        for experts in [LAYOUTS[0], LAYOUTS[1]] {
            let setup = Setup { record_all, ..lanes(ranks, experts) };
            let watched = watched(&setup, &tiny("minimax_m2"), |_| leave_alone());
            let answer = ask(&watched.host, on(ranks - 1, greedy(&prompt(1, 64), 2)));
            assert_eq!(answer.tokens.len(), 2, "{ranks} ranks, {experts:?}");
            watched.steps();
        }
    }
    // Many at once, from threads that were there before.
    let host = lanes(4, DEP).start(&tiny("qwen3_moe"));
    std::thread::scope(|scope| {
        for seed in 0..16 {
            let host = &host;
            scope.spawn(move || assert_eq!(ask(host, greedy(&prompt(seed, 64), 2)).tokens.len(), 2));
        }
    });
}

/// NVIDIA/TensorRT-LLM PR#14240: what one rank found in the cache of its tuner the others had not, and they
/// hung at the start. What a host decides for itself at its start goes into the state that all lanes begin
/// with; its hash is compared before hosts are one group, and in the first exchange.
#[test]
fn b_37_what_is_decided_at_the_start_is_part_of_what_is_compared() {
    let setup = lanes(4, DEP);
    let hash = |setup: &Setup| setup.config().first_state().hash();
    assert_eq!(hash(&setup), hash(&setup.clone()));
    let alignment = Some(atom_group::Alignment::default());
    let decided = [
        Setup { rows_max: 96, ..setup.clone() },
        Setup { max_num_seqs: 8, ..setup.clone() },
        Setup { sizes: Some(vec![20, 64]), ..setup.clone() },
        Setup { record_all: false, ..setup.clone() },
        Setup { policy: atom_group::Policy { alignment, ..setup.policy }, ..setup.clone() },
        lanes(2, DEP),
    ];
    for (index, other) in decided.iter().enumerate() {
        assert_ne!(hash(other), hash(&setup), "decision {index} would not be noticed");
    }
}

/// Expert parallelism: a rank of N has an N-th of the experts, and nothing is held for safety.
#[test]
fn a_rank_of_n_loads_an_nth_of_the_experts() {
    for name in ["qwen3_moe", "mixtral", "glm4_moe", "minimax_m2"] {
        let bytes = |setup: &Setup| {
            let watched = watched(setup, &tiny(name), |_| leave_alone());
            watched.expert_bytes.lock().unwrap().clone()
        };
        let whole = bytes(&Setup::default())[0];
        assert!(whole > 0, "{name}");
        for experts in LAYOUTS {
            for ranks in [2, 4, 8] {
                let shares = bytes(&lanes(ranks, experts));
                assert_eq!(shares.iter().sum::<usize>(), whole, "{name} {experts:?}: {shares:?}");
                for share in shares {
                    let most = whole as f64 / f64::from(ranks) * 1.05;
                    assert!(share as f64 <= most, "{name} {experts:?} on {ranks}: {share} bytes of {whole}");
                }
            }
        }
    }
}
