//! The group's step: buckets, idle ranks, sleep and wake, ranks that disagree.

use super::*;
use crate::watch::{Moment, Twist, leave_alone, watched};
use atom_base::ScoredToken;
use atom_engine::{EngineError, Event};
use atom_group::{Alignment, Patience, Policy};
use atom_ops::{Extent, Ops, Recording};
use common::{rest, tiny};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// ROCm/ATOM#2696: an idle rank stood in with a small prefill while its peer's prompt took a large one.
#[test]
fn b_01_an_idle_rank_replays_the_bucket_of_its_peers_2048_rows() {
    for experts in LAYOUTS {
        let setup = Setup {
            rows_max: 2048,
            sizes: Some(vec![256, 512, 1024]),
            max_model_len: 2100,
            pages: 140,
            ..lanes(2, experts)
        };
        let watched = watched(&setup, &tiny("qwen3_moe"), |_| leave_alone());
        assert_eq!(ask(&watched.host, on(0, greedy(&prompt(1, 2048), 4))).tokens.len(), 4);
        let steps = watched.steps();
        let [busy, idle] = &steps[0][..] else { panic!("two ranks") };
        assert_eq!((busy.shape.rows, busy.rows), (2048, 2048));
        assert_eq!((idle.shape.rows, idle.rows, idle.experts.chosen), (2048, 0, 0));
    }
}

/// sgl-project/sglang PR#36262, #33200: sizes that the attention ranks do not divide failed in a scatter
/// while the graphs were captured.
#[test]
fn b_04_every_size_records_and_replays_whatever_the_mesh() {
    let sizes = [17, 20, 23, 28, 33];
    let single = Setup { rows_max: 33, sizes: Some(sizes.to_vec()), ..Setup::default() };
    let requests: Vec<_> =
        [1, 5, 7, 12, 17, 20, 23, 28, 33].map(|len| greedy(&prompt(len as u32, len), 3)).into();
    let expected: Vec<_> =
        alone(&single.start(&tiny("qwen3_moe")), &requests).iter().map(Answer::ids).collect();
    let meshes = [(2, 1, false), (2, 2, false), (2, 1, true), (3, 1, true), (2, 2, true)];
    for (tp, dp, dp_attention) in meshes {
        for experts in LAYOUTS {
            let setup = Setup { mesh: mesh(tp, dp, dp_attention), experts, ..single.clone() };
            if !dp_attention && experts.expert_parallel && experts.exchange == ExchangeChoice::Dispatch {
                // The ranks of a lane have its rows already: nothing to dispatch.
                continue;
            }
            let host = setup.start(&tiny("qwen3_moe"));
            let found: Vec<_> = alone(&host, &requests).iter().map(Answer::ids).collect();
            assert_eq!(found, expected, "{:?} {experts:?}", setup.mesh);
        }
    }
}

/// vllm-project/vllm PR#25906; vllm-project/vllm#32626, #33450, PR#34187: ranks without work made up
/// inputs of their own, with other counts than real ones. Here the inputs of every rank pass one check
/// (see `watch`), and its collectives are those that were signed.
#[test]
fn b_06_b_15_inputs_of_idle_ranks_pass_the_checks_of_busy_ones() {
    for experts in LAYOUTS {
        let watched = watched(&lanes(4, experts), &tiny("glm4_moe"), |_| leave_alone());
        // One busy rank, two, all, none of which stays busy for as long as another.
        for busy in [1, 2, 4] {
            for answer in together(&watched.host, &mixed(3 * u32::from(busy), busy, 12)) {
                assert_eq!(answer.tokens.len(), 12, "{answer:?}");
            }
        }
        let idle = watched.steps().iter().flatten().filter(|step| step.rows == 0).count();
        assert!(idle > 30, "{experts:?}: {idle} times");
    }
}

/// vllm-project/vllm#43547: after an hour a rank that schedules nothing in a step was one collective
/// behind. Here lane 1's prompts are held back and lane 2 has none, for thousands of steps.
#[test]
fn b_08_a_rank_that_is_granted_nothing_for_long_stays_in_step() {
    let alignment = Some(Alignment { hold_steps_max: 30, ..Alignment::default() });
    let policy = Policy { alignment, ..Policy::default() };
    let setup = Setup { max_model_len: 4000, pages: 300, policy, ..lanes(3, DEP) };
    let watched = watched(&setup, &tiny("qwen3_moe"), |_| leave_alone());
    let stepping: Vec<_> = (0..3).map(|i| send(&watched.host, on(0, greedy(&prompt(i, 9), 3900)))).collect();
    let mut short = 0;
    while watched.host.open_requests() > 1 {
        assert_eq!(ask(&watched.host, on(1, greedy(&prompt(100 + short, 20), 2))).tokens.len(), 2);
        short += 1;
    }
    stepping.into_iter().for_each(|pending| assert_eq!(pending.wait().tokens.len(), 3900));
    rest(&watched.host);
    let health = watched.host.health();
    assert!(health.lanes.iter().all(|lane| lane.step == health.lanes[0].step), "{health:?}");
    let held: u64 = watched.host.stats()[0].held_steps;
    assert!(held > 0, "lane 1 was never held");
    let steps = watched.steps();
    assert!(steps.len() >= 3900, "{} steps", steps.len());
    let blocked = steps.iter().filter(|ranks| ranks[1].granted[1] == 0 && ranks[0].rows > 0).count();
    assert!(blocked > 1000 && steps.iter().all(|ranks| ranks[2].rows == 0), "{blocked} steps");
}

/// vllm-project/vllm#49594, #41862: groups with experts deadlocked under load, in some modes. All of ours,
/// under 32 requests at once, on 2 to 4 ranks: the bits of each request alone.
#[test]
fn b_10_b_11_no_layout_hangs_or_errs_under_32_requests() {
    for (name, ranks) in [("qwen3_moe", 2), ("mixtral", 3), ("minimax_m2", 4)] {
        for experts in LAYOUTS {
            let requests = mixed(32, ranks, 16);
            let setup = Setup { poison: false, ..lanes(ranks, experts) };
            let expected = bits(&alone(&setup.start(&tiny(name)), &requests));
            for (poison, record_all) in [(false, true), (true, true), (true, false)] {
                let setup = Setup { poison, record_all, ..setup.clone() };
                let watched = watched(&setup, &tiny(name), |_| leave_alone());
                let found = bits(&together(&watched.host, &requests));
                assert!(found == expected, "{name} on {ranks}, {experts:?}, {poison}, {record_all}");
                watched.steps();
            }
            let eager = Setup { enforce_eager: true, poison: true, ..setup }.start(&tiny(name));
            assert!(bits(&together(&eager, &requests)) == expected, "{name} on {ranks}, {experts:?}, eager");
        }
    }
}

/// vllm-project/vllm PR#16277: ranks that fall asleep raced with requests that come in. Many threads, each
/// on another lane, with a rest after every request, while another one pauses and resumes.
#[test]
fn b_16_no_request_is_slept_through() {
    let setup = lanes(4, DEP);
    let watched = watched(&setup, &tiny("qwen3_moe"), |_| leave_alone());
    let (host, going) = (&watched.host, AtomicUsize::new(8));
    std::thread::scope(|scope| {
        for thread in 0..8u32 {
            let going = &going;
            scope.spawn(move || {
                for i in 0..60 {
                    let tokens = prompt(thread * 1000 + i, 1 + i as usize % 5);
                    let answer = ask(host, on((thread + i) as u16 % 4, greedy(&tokens, 1 + i % 3)));
                    assert_eq!(answer.tokens.len() as u32, 1 + i % 3);
                }
                going.fetch_sub(1, Ordering::SeqCst);
            });
        }
        while going.load(Ordering::SeqCst) > 0 {
            host.pause();
            std::thread::yield_now();
            host.resume();
            std::thread::yield_now();
        }
    });
    rest(host);
    let health = host.health();
    assert!(health.lanes.iter().all(|lane| lane.step == health.lanes[0].step), "{health:?}");
    watched.steps();
}

/// vllm-project/vllm PR#38761: every rank answered a pause for itself, and some went on.
#[test]
fn b_19_a_pause_is_the_groups() {
    let setup = lanes(4, DEP);
    let watched = watched(&setup, &tiny("qwen3_moe"), |_| leave_alone());
    let host = &watched.host;
    // All lanes busy, one of them only later.
    let busy: Vec<_> =
        (0..3).map(|lane| send(host, on(lane, greedy(&prompt(lane.into(), 20), 300)))).collect();
    for pending in &busy {
        assert!(matches!(pending.next(), Event::Started { .. }));
    }
    for round in 0..5 {
        host.pause();
        let late = send(host, on(3, greedy(&prompt(50 + round, 20), 3)));
        rest(host);
        let (health, stats) = (host.health(), host.stats());
        assert!(
            health.paused && health.lanes.iter().all(|lane| lane.step == health.lanes[0].step),
            "{health:?}"
        );
        assert!(stats.iter().all(|lane| lane.replays == stats[0].replays), "{stats:?}");
        assert_eq!(host.open_requests(), 4, "what runs keeps what it has, what comes waits");
        host.resume();
        assert_eq!(late.wait().tokens.len(), 3);
    }
    busy.into_iter().for_each(|pending| assert_eq!(pending.wait().tokens.len(), 300));
    watched.steps();
}

/// sgl-project/sglang#29144: an idle rank left out collectives of a part of the model that it had no rows
/// for. All recordings of all ranks have equal operators and collectives, and all are met in every step.
#[test]
fn b_25_idle_ranks_come_to_every_collective() {
    for (name, ranks, layouts) in
        [("qwen3_moe", 4, &LAYOUTS[..]), ("glm4_moe", 3, &LAYOUTS), ("llama", 2, &LAYOUTS[..1])]
    {
        for &experts in layouts {
            let setup = Setup { policy: Policy::NONE, ..lanes(ranks, experts) };
            let watched = watched(&setup, &tiny(name), |_| leave_alone());
            for lane in 0..ranks {
                ask(&watched.host, on(lane, greedy(&prompt(lane.into(), 90), 5)));
            }
            for ranks in watched.steps() {
                // One collective a layer at the least, whoever is idle.
                assert!(
                    ranks.iter().all(|step| step.met.len() >= 3),
                    "{name} {experts:?}: {:?}",
                    ranks[0].met
                );
            }
        }
    }
}

/// sgl-project/sglang#5527: a sum over ranks was compared with one rank's limit, and no graph was replayed.
#[test]
fn b_28_32_requests_on_each_of_8_ranks_replay_every_step() {
    let setup = Setup { max_num_seqs: 32, pages: 400, ..lanes(8, DEP) };
    let watched = watched(&setup, &tiny("qwen3_moe"), |_| leave_alone());
    for answer in together(&watched.host, &mixed(256, 8, 6)) {
        assert_eq!(answer.tokens.len(), 6);
    }
    rest(&watched.host);
    let stats = watched.host.stats();
    let buckets = setup.config().lattice.buckets().len() as u64;
    for lane in &stats {
        assert_eq!((lane.eager_steps.total(), lane.replays, lane.recordings), (0, stats[0].replays, buckets));
    }
    assert_eq!(watched.steps().len() as u64, stats[0].replays);
}

/// sgl-project/sglang#29942: the buffer of an exchange was sized for fewer rows than a step could bring.
/// All rows of all lanes are alike, so all of a full step go to the same experts of a layer.
#[test]
fn b_32_the_largest_step_may_send_all_of_its_rows_to_one_rank() {
    for (name, top_k) in [("qwen3_moe", 2), ("glm4_moe", 4)] {
        for experts in &LAYOUTS[1..] {
            let watched = watched(&lanes(4, *experts), &tiny(name), |_| leave_alone());
            for token in 0..12 {
                let alike: Vec<_> = (0..4).map(|lane| on(lane, greedy(&[token; 64], 1))).collect();
                // At rest first: a step that has begun would take the first ones with it.
                rest(&watched.host);
                watched.host.pause();
                let pending: Vec<_> = alike.into_iter().map(|r| send(&watched.host, r)).collect();
                wait_until(&watched.host, |lanes| lanes.iter().all(|lane| lane.counters.waiting > 0));
                watched.host.resume();
                assert!(pending.into_iter().all(|pending| pending.wait().tokens.len() == 1));
            }
            let steps = watched.steps();
            let is_full = |ranks: &&Vec<watch::Step>| ranks.iter().all(|step| step.rows == 64);
            let (mut full, mut most) = (0, 0);
            for ranks in steps.iter().filter(is_full) {
                full += 1;
                most = most.max(ranks.iter().map(|step| step.experts.computed).max().unwrap());
            }
            // A layer's choices all on one rank are this many.
            assert_eq!(full, 12, "{name}: full steps");
            assert!(most >= 4 * 64 * top_k, "{name} {experts:?}: {most} rows at the most");
        }
    }
}

/// NVIDIA/TensorRT-LLM PR#13900, #13902: one rank had an error with one request and took another way
/// than its peers. Logits that are no numbers are that request's error, and nobody else notices.
#[test]
fn b_35_an_error_of_one_request_on_one_rank_is_nobody_elses() {
    let requests = mixed(16, 4, 20);
    for experts in LAYOUTS {
        let expected = bits(&alone(&lanes(4, experts).start(&tiny("qwen3_moe")), &requests));
        let spoil = |rank| -> Twist {
            let mut left = 12;
            Box::new(move |moment| {
                if let (1, Moment::Results(_, results @ [_, ..])) = (rank, moment) {
                    left -= 1;
                    if left == 0 {
                        results[0] = ScoredToken::NOT_A_NUMBER;
                    }
                }
                Ok(())
            })
        };
        let watched = watched(&lanes(4, experts), &tiny("qwen3_moe"), spoil);
        let answers = together(&watched.host, &requests);
        let is_error = |answer: &Answer| matches!(answer.end, Some(Err(EngineError::NotANumber { .. })));
        let failed: Vec<_> = (0..16).filter(|&i| is_error(&answers[i])).collect();
        assert!(failed.len() == 1 && failed[0] % 4 == 1, "{failed:?} of 16");
        for (index, answer) in answers.iter().enumerate().filter(|(index, _)| !failed.contains(index)) {
            assert_eq!(answer.bits(), expected[index], "{experts:?}: request {index}");
        }
        watched.steps();
    }
}

/// NVIDIA/TensorRT-LLM#17095, PR#18176: a rank computes a prompt for the second time, after a preemption,
/// while its peers decode or have nothing.
#[test]
fn b_36_a_preempted_prompt_is_computed_again_beside_decoding_peers() {
    for experts in LAYOUTS {
        let setup = Setup { pages: 15, max_model_len: 200, prefix_cache: false, ..lanes(3, experts) };
        let one = |(lane, seed, tokens)| on(lane, request(&prompt(seed, 40), tokens, penalised(seed.into())));
        let requests = [(1, 1, 150), (0, 2, 50), (0, 3, 50), (0, 4, 50), (0, 5, 50), (0, 6, 50)].map(one);
        let large = Setup { pages: 600, ..setup.clone() };
        let expected = bits(&alone(&large.start(&tiny("qwen3_moe")), &requests));
        let watched = watched(&setup, &tiny("qwen3_moe"), |_| leave_alone());
        assert!(bits(&together(&watched.host, &requests)) == expected, "{experts:?}");
        assert!(watched.host.stats()[0].counters.preempted > 0, "nobody was preempted");
        let beside = |ranks: &&Vec<watch::Step>| {
            // Prompts have 40 tokens: what is more than that comes again, with what was generated.
            ranks[0].spans.iter().any(|&rows| rows > 40) && ranks[1].spans == [1] && ranks[2].rows == 0
        };
        assert!(watched.steps().iter().any(|ranks| beside(&ranks)), "{experts:?}");
    }
}

/// Gathers rows of `width` so many times, and nothing else.
fn other_recording(like: &Recording, collectives: usize, width: usize) -> Recording {
    let mut ops = Ops::new(like.shape());
    let rows = ops.buffer(Extent::Rows, width);
    let all = ops.buffer(Extent::GroupRows, width);
    (0..collectives).for_each(|_| ops.gather_rows(rows, all));
    ops.finish()
}

/// NVIDIA/nccl#1417: ranks that meet with different sizes hang, or go on with what is wrong. A rank whose
/// recording is another one than it signed gives an error that says so, or who did not come; never a token.
///
/// What a rank signs is taken from the recording before its backend sees it, so no backend can make
/// signatures differ: that they are refused is tested where they are compared, in `atom-group`.
#[test]
fn b_45_a_rank_that_meets_otherwise_is_an_error_and_no_hang() {
    let patience = Patience { min: Duration::from_millis(500), first: Duration::from_millis(1500) };
    for (collectives, width, said) in [(1, 7, "diverged"), (0, 7, "rank 1 (lane 1")] {
        for experts in LAYOUTS {
            let setup = Setup { patience, ..lanes(3, experts) };
            let exchange = move |rank| -> Twist {
                Box::new(move |moment| {
                    if let (1, Moment::Record(recording)) = (rank, moment) {
                        *recording = other_recording(recording, collectives, width);
                    }
                    Ok(())
                })
            };
            let watched = watched(&setup, &tiny("qwen3_moe"), exchange);
            let answer = ask(&watched.host, on(0, greedy(&[1, 2, 3, 4, 5], 10)));
            let Some(Err(EngineError::Rank(why))) = &answer.end else { panic!("{answer:?}") };
            assert!(answer.tokens.is_empty() && why.contains(said), "{experts:?}: {why}");
            assert_eq!(watched.host.health().fault.as_ref(), Some(why));
            assert!(watched.host.shutdown().is_err());
        }
    }
}

/// deepseek-ai/DeepEP#93: graphs for different numbers of rows shared a buffer, and one read counts where the
/// other had put something else. Here steps of all sizes take turns in the same buffers: every choice is
/// computed as often as it was made, and answers are those of a single rank.
#[test]
fn b_43_steps_of_all_sizes_take_turns_in_the_same_buffers() {
    let sizes = Some(vec![20, 33, 48]);
    let lengths = [60, 3, 33, 1, 48, 20, 64, 2, 19, 34, 7, 49];
    let one = |(i, &len): (usize, &usize)| on(i as u16 % 4, greedy(&prompt(300 + i as u32, len), 2));
    let requests: Vec<_> = lengths.iter().enumerate().map(one).collect();
    let single = Setup { sizes: sizes.clone(), ..Setup::default() }.start(&tiny("glm4_moe"));
    let anywhere = requests.iter().map(|request| Request { lane: None, ..again(request) });
    let expected: Vec<_> = anywhere.map(|request| ask(&single, request).ids()).collect();
    for experts in LAYOUTS {
        let setup = Setup { sizes: sizes.clone(), ..lanes(4, experts) };
        let watched = watched(&setup, &tiny("glm4_moe"), |_| leave_alone());
        let found: Vec<_> = alone(&watched.host, &requests).iter().map(Answer::ids).collect();
        assert_eq!(found, expected, "{experts:?}");
        let steps = watched.steps();
        // Slices of an expert are computed on every rank.
        let times = if experts.expert_parallel { 1 } else { 4 };
        for (index, ranks) in steps.iter().enumerate() {
            let sum = |of: fn(&atom_ops::ExpertRows) -> u64| -> u64 {
                ranks.iter().map(|step| of(&step.experts)).sum()
            };
            assert_eq!(sum(|e| e.computed), times * sum(|e| e.chosen), "{experts:?}, step {index}");
        }
        let turns = steps.windows(2).filter(|pair| pair[0][0].shape != pair[1][0].shape).count();
        assert!(turns >= lengths.len(), "{experts:?}: {turns} changes of size");
    }
}
