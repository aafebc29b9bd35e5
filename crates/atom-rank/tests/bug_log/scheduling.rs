//! Queues, pages, chunks and aborts of lanes that step together.

use super::*;
use crate::watch::{Moment, Step, Twist, Watched, leave_alone, watched};
use atom_base::FinishReason;
use atom_engine::{EngineError, Event, Refusal};
use atom_group::Policy;
use atom_rank::Host;
use common::{Pending, rest, tiny};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

/// Nothing runs, waits or holds a page, and nothing was lost on the way there.
fn assert_at_rest(host: &Host) {
    rest(host);
    assert_eq!(host.open_requests(), 0);
    for lane in host.stats() {
        let counters = lane.counters;
        assert_eq!((counters.running, counters.waiting, counters.pages_held), (0, 0, 0), "{lane:?}");
        assert_eq!(lane.epoch, 1, "{lane:?}");
    }
    assert_eq!(host.health().fault, None);
}

fn assert_all_long(answers: &[Answer], max_tokens: usize) {
    for answer in answers {
        assert_eq!((answer.tokens.len(), &answer.end), (max_tokens, &Some(Ok(FinishReason::Length))));
    }
}

/// A cache of so many positions in each of four lanes.
fn tight(pages: usize) -> Setup {
    Setup { pages: pages + 1, max_model_len: 176, max_num_seqs: 8, ..lanes(4, DEP) }
}

/// vllm-project/vllm#45387, #45388, #15996: under pressure on the cache requests waited for ever, and steps
/// were empty. Twice as much at once as there is room for, in every lane, while peers step on: no step is
/// empty (see `watch`), and everybody finishes.
#[test]
fn b_65_b_68_twice_what_the_cache_holds_finishes() {
    for prefix_cache in [true, false] {
        // 8 requests of up to 122 + 40 tokens are 80 pages and more.
        let setup = Setup { prefix_cache, ..tight(40) };
        let watched = watched(&setup, &tiny("qwen3_moe"), |_| leave_alone());
        assert_all_long(&together(&watched.host, &mixed(160, 4, 40)), 40);
        assert_at_rest(&watched.host);
        let preempted: u64 = watched.host.stats().iter().map(|lane| lane.counters.preempted).sum();
        assert!(preempted > 0, "there was room for all");
        watched.steps();
    }
}

/// vllm-project/vllm-metal#479: what admission counts was not given back, until an empty cache admitted
/// nobody. Requests that need all pages of a lane, one after the other, with aborted ones between them.
#[test]
fn b_67_an_empty_cache_admits_whatever_fits() {
    let setup = tight(11);
    let host = setup.start(&tiny("qwen3_moe"));
    for round in 0..40u32 {
        let lane = round as u16 % 4;
        let all = on(lane, greedy(&prompt(round, 150), 26));
        let aborted = send(&host, again(&all));
        if round % 2 == 0 {
            assert!(matches!(aborted.next(), Event::Started { .. }));
        }
        host.abort(aborted.id);
        assert_all_long(&[ask(&host, all)], 26);
        assert_at_rest(&host);
    }
}

/// sgl-project/sglang#26265: a cache that was full during a prefill ended the process. Prompts of which no
/// two fit are computed one after the other.
#[test]
fn b_69_a_full_cache_is_backpressure() {
    let setup = Setup { rows_max: 16, ..tight(11) };
    let watched = watched(&setup, &tiny("qwen3_moe"), |_| leave_alone());
    let requests: Vec<_> =
        (0..24).map(|i| on(i as u16 % 3, greedy(&prompt(i, 100 + i as usize), 20))).collect();
    assert_all_long(&together(&watched.host, &requests), 20);
    assert_at_rest(&watched.host);
    watched.steps();
}

/// sgl-project/sglang#9142: prompts that together were more than a step may prefill crashed it.
#[test]
fn b_70_prompts_of_more_rows_than_a_step_share_steps() {
    let setup = Setup { rows_max: 64, ..lanes(3, DEP) };
    let watched = watched(&setup, &tiny("qwen3_moe"), |_| leave_alone());
    // 16 x 50 rows in lane 0, 16 x 63 in lane 1.
    let requests: Vec<_> = (0..32u32)
        .map(|i| on(i as u16 % 2, greedy(&prompt(i, if i % 2 == 0 { 50 } else { 63 }), 4)))
        .collect();
    let expected: Vec<_> = alone(&setup.start(&tiny("qwen3_moe")), &requests);
    let found = together(&watched.host, &requests);
    assert!(bits(&found) == bits(&expected));
    assert_at_rest(&watched.host);
    let steps = watched.steps();
    let prefills = |step: &Step| step.spans.iter().filter(|&&rows| rows > 1).count();
    assert!(steps.iter().any(|ranks| prefills(&ranks[0]) > 1), "several prompts in one step");
    assert!(steps.iter().flatten().all(|step| step.rows <= 64));
}

/// kvcache-ai/sglang PR#44: of a prompt of several chunks the second one never began. 3.5 chunks are four
/// steps, without a cache of prefixes, beside an idle lane and beside a decoding one.
#[test]
fn b_71_a_prompt_of_three_and_a_half_chunks_takes_four_steps() {
    let setup = Setup { rows_max: 32, prefix_cache: false, policy: Policy::NONE, ..lanes(2, DEP) };
    for busy in [false, true] {
        let watched = watched(&setup, &tiny("qwen3_moe"), |_| leave_alone());
        let peer = busy.then(|| send(&watched.host, on(0, greedy(&prompt(1, 5), 200))));
        if let Some(peer) = &peer {
            assert!(matches!(peer.next(), Event::Started { .. }));
        }
        assert_all_long(&[ask(&watched.host, on(1, greedy(&prompt(2, 112), 3)))], 3);
        peer.map(Pending::wait);
        assert_at_rest(&watched.host);
        let steps = watched.steps();
        let rows: Vec<_> = steps.iter().map(|ranks| ranks[1].rows).filter(|&rows| rows > 0).collect();
        assert_eq!(rows, [32, 32, 32, 16, 1, 1], "busy {busy}");
    }
}

/// A host whose lane 1 waits in every step of its own until it is let go, and says what the step has.
struct Halting {
    watched: Watched,
    halted: Receiver<Vec<usize>>,
    go: Sender<()>,
}

fn halting(setup: &Setup) -> Halting {
    let ((says, halted), (go, word)) = (channel(), channel());
    let ways = Mutex::new(Some((says, word)));
    let halt = move |rank| -> Twist {
        if rank != 1 {
            return leave_alone();
        }
        let (says, word): (Sender<Vec<usize>>, Receiver<()>) = ways.lock().unwrap().take().unwrap();
        Box::new(move |moment| {
            if let Moment::Replay(inputs) = moment
                && !inputs.tokens.is_empty()
            {
                let _ = says.send(inputs.spans.iter().map(|span| span.rows as usize).collect());
                // An error means that nobody halts it any more.
                let _ = word.recv();
            }
            Ok(())
        })
    };
    Halting { watched: watched(setup, &tiny("qwen3_moe"), halt), halted, go }
}

impl Halting {
    /// Lets steps pass until one has these rows, and leaves the lane in it.
    fn until(&self, spans: &[usize]) {
        while self.halted.recv().unwrap() != spans {
            self.go.send(()).unwrap();
        }
    }

    fn go_on(&self) {
        self.go.send(()).unwrap();
    }

    /// Nobody halts it any more.
    fn run_free(self) -> Watched {
        drop((self.go, self.halted));
        self.watched
    }
}

/// sgl-project/sglang PR#20182, vllm-project/vllm PR#18485, #46283: aborts at some points of a request's
/// life left something behind. Every point, while lane 1 is in the very step, with peers stepping.
#[test]
fn b_73_an_abort_in_every_state_leaves_nothing() {
    let setup = Setup { max_num_seqs: 2, rows_max: 32, pages: 13, max_model_len: 176, ..lanes(3, DEP) };
    let short = || on(1, greedy(&prompt(1, 10), 4));
    let long = || on(1, greedy(&prompt(2, 120), 40));
    let expected = ask(&setup.start(&tiny("qwen3_moe")), short()).ids();
    // What is sent, in which step of the lane the last one is aborted.
    let cases: [(&str, Vec<Request>, &[usize]); 6] = [
        ("not yet read", vec![short(), long()], &[10]),
        ("computed in part", vec![long()], &[24]),
        ("decoding", vec![long()], &[1]),
        ("decoding beside another", vec![short(), short()], &[1, 1]),
        ("waiting for a slot", vec![short(), short(), long()], &[1, 1]),
        ("waiting for pages", vec![long(), long()], &[1]),
    ];
    for (state, requests, spans) in cases {
        let host = halting(&setup);
        let peer = send(&host.watched.host, on(0, greedy(&prompt(5, 10), 100)));
        let (last, first) = requests.split_last().unwrap();
        let others: Vec<_> = first.iter().map(|r| send(&host.watched.host, again(r))).collect();
        let aborted = if state == "not yet read" {
            host.until(spans);
            send(&host.watched.host, again(last))
        } else {
            let pending = send(&host.watched.host, again(last));
            host.until(spans);
            pending
        };
        host.watched.host.abort(aborted.id);
        host.watched.host.abort(aborted.id);
        let watched = host.run_free();
        others.into_iter().for_each(|other| drop(other.wait()));
        assert_eq!(peer.wait().tokens.len(), 100, "{state}");
        assert_eq!(ask(&watched.host, short()).ids(), expected, "{state}");
        assert_at_rest(&watched.host);
        watched.steps();
    }
}

/// The same for the states that need no step: paused, preempted, refused at the door.
#[test]
fn b_73_an_abort_at_rest_and_a_refusal_leave_nothing() {
    let setup = Setup { max_num_seqs: 2, pages: 15, max_model_len: 128, ..lanes(3, DEP) };
    let mut config = setup.config();
    config.queue_max = 1;
    let host = Host::start(&config, &tiny("qwen3_moe"), setup.cpu(), Arc::new(|_, _, _| {})).unwrap();
    let one = || on(1, greedy(&prompt(1, 40), 60));
    for _ in 0..5 {
        rest(&host);
        host.pause();
        let pending: Vec<_> = (0..3).map(|_| send(&host, one())).collect();
        for _ in 0..3 {
            let refused = host.submit(one(), Box::new(|_| panic!("it was not taken")));
            assert!(matches!(refused, Err(Refusal::QueueFull { .. })), "{refused:?}");
        }
        host.abort(pending[2].id);
        host.resume();
        assert_all_long(&pending.into_iter().take(2).map(Pending::wait).collect::<Vec<_>>(), 60);
        assert_at_rest(&host);
    }
    // Two that don't fit together: the younger one gives way, and is aborted some time after.
    let tight = Setup { pages: 10, ..setup };
    let watched = watched(&tight, &tiny("qwen3_moe"), |_| leave_alone());
    let [older, younger] = [(); 2].map(|()| send(&watched.host, one()));
    wait_until(&watched.host, |lanes| lanes[1].counters.preempted > 0);
    watched.host.abort(younger.id);
    assert_all_long(&[older.wait()], 60);
    assert_at_rest(&watched.host);
    watched.steps();
}

/// vllm-project/vllm PR#49620: what a step computed for a request that had gone was given to whoever had
/// taken its place. The one slot of a lane changes hands in the middle of a step.
#[test]
fn b_76_a_late_result_goes_to_nobody() {
    let setup = Setup { max_num_seqs: 1, rows_max: 32, ..lanes(3, DEP) };
    let next = on(1, request(&prompt(3, 20), 10, penalised(3)));
    let expected = ask(&setup.start(&tiny("qwen3_moe")), again(&next)).bits();
    for spans in [32, 1] {
        let host = halting(&setup);
        let events = Arc::new(Mutex::new(0));
        let (seen, first) = (Arc::clone(&events), on(1, greedy(&prompt(2, 50), 30)));
        let id = first.id;
        host.watched.host.submit(first, Box::new(move |_| *seen.lock().unwrap() += 1)).unwrap();
        host.until(&[spans]);
        host.watched.host.abort(id);
        let silent_at = *events.lock().unwrap();
        let pending = send(&host.watched.host, again(&next));
        host.go_on();
        let watched = host.run_free();
        assert_eq!(pending.wait().bits(), expected);
        assert_eq!(*events.lock().unwrap(), silent_at, "an event after the abort");
        assert_at_rest(&watched.host);
        watched.steps();
    }
}

/// tenstorrent/vllm#415: every request that began with something cached was wrong. No hit, one page, all
/// but one token, the whole prompt: the bits of a cold start, in each lane, and no hit from lane to lane.
#[test]
fn b_80_cache_hits_of_every_length_change_no_bit() {
    for experts in LAYOUTS {
        let setup = lanes(2, experts);
        let whole = prompt(1, 48);
        let one_page: Vec<_> = whole[..16].iter().copied().chain(prompt(2, 30)).collect();
        let but_one: Vec<_> = whole.iter().copied().chain([7]).collect();
        // The last token of a prompt is always computed, so of three full pages two are taken.
        let cases = [(&whole[..], 0), (&one_page[..], 16), (&but_one[..], 48), (&whole[..], 32)];
        let host = setup.start(&tiny("glm4_moe"));
        for lane in 0..2 {
            for (tokens, cached) in cases {
                let request = on(lane, request(tokens, 12, penalised(4)));
                let cold = ask(&setup.start(&tiny("glm4_moe")), again(&request));
                let found = ask(&host, request);
                assert_eq!((cold.cached_tokens, found.cached_tokens), (0, cached), "{experts:?} lane {lane}");
                assert_eq!(found.bits(), cold.bits(), "{experts:?} lane {lane}, {cached} cached");
            }
        }
    }
}

/// vllm-project/vllm PR#29542: a request left the schedule a token or two before its end. The steps of a
/// request are its chunks and its tokens less one; those of several lanes are those of the longest.
#[test]
fn b_84_a_request_takes_its_steps_and_no_more() {
    let setup = Setup { policy: Policy::NONE, prefix_cache: false, ..lanes(3, DEP) };
    for (len, tokens) in [(1_u32, 1), (64, 5), (65, 2), (200, 17), (5, 100)] {
        let watched = watched(&setup, &tiny("qwen3_moe"), |_| leave_alone());
        let expected = u64::from(len).div_ceil(64) + u64::from(tokens) - 1;
        ask(&watched.host, on(2, greedy(&prompt(1, len as usize), tokens)));
        rest(&watched.host);
        let replays: Vec<_> = watched.host.stats().iter().map(|lane| lane.replays).collect();
        assert_eq!(replays, [expected; 3], "{len} of prompt, {tokens} tokens");
        // Paused until each lane knows of its own, so that all begin in one step.
        watched.host.pause();
        let all: Vec<_> = [len, 1, 1]
            .iter()
            .zip(0..)
            .map(|(&len, lane)| send(&watched.host, on(lane, greedy(&prompt(2, len as usize), tokens))))
            .collect();
        wait_until(&watched.host, |lanes| lanes.iter().all(|lane| lane.counters.waiting > 0));
        watched.host.resume();
        all.into_iter().for_each(|pending| assert_eq!(pending.wait().tokens.len(), tokens as usize));
        rest(&watched.host);
        assert_eq!(watched.host.stats()[0].replays, 2 * expected, "{len} of prompt, {tokens} tokens, thrice");
        watched.steps();
    }
}

/// vllm-project/vllm PR#18485, #46283, #50425; vllm-project/vllm-ascend#16662: clients that went away left
/// blocks behind. Twenty clients a round, each gone after another number of events.
#[test]
fn b_93_clients_that_leave_at_any_point_leave_nothing() {
    let watched = watched(&tight(30), &tiny("qwen3_moe"), |_| leave_alone());
    let host = &watched.host;
    for round in 0..10u32 {
        let pending: Vec<_> = (0..20u32)
            .map(|i| send(host, greedy(&prompt(round * 20 + i, 5 + (i as usize * 31) % 100), 60)))
            .collect();
        for (at, pending) in pending.iter().enumerate() {
            let events = atom_base::rng::philox([round, at as u32, 0, 0], [93, 0])[0] % 30;
            // Those that come later are sometimes gone before they start.
            for _ in 0..if at % 3 == 0 { 0 } else { events } {
                assert!(matches!(pending.next(), Event::Started { .. } | Event::Token(_)));
            }
            host.abort(pending.id);
        }
        assert_at_rest(host);
    }
    assert_all_long(&[ask(host, on(3, greedy(&prompt(1, 100), 76)))], 76);
    watched.steps();
}

/// A lane has the keys of its own requests and of nobody else's: prompts of lane `l` are made of tokens that
/// no other lane's are made of.
#[test]
fn lanes_hold_disjoint_requests() {
    let own = |lane: u16| u32::from(lane) * 100..u32::from(lane) * 100 + 100;
    for experts in LAYOUTS {
        let check = move |rank| -> Twist {
            Box::new(move |moment| {
                if let Moment::Replay(inputs) = moment {
                    let rows = inputs.tokens.iter().zip(inputs.positions);
                    let prompts = rows.filter(|(_, position)| **position < 40);
                    prompts
                        .for_each(|(token, _)| assert!(own(rank).contains(token), "{token} on rank {rank}"));
                }
                Ok(())
            })
        };
        let watched = watched(&lanes(4, experts), &tiny("qwen3_moe"), check);
        let requests: Vec<_> = (0..24u32)
            .map(|i| {
                let lane = i as u16 % 4;
                let tokens: Vec<_> =
                    prompt(i, 40).iter().map(|token| token % 100 + own(lane).start).collect();
                on(lane, greedy(&tokens, 10))
            })
            .collect();
        let answers = together(&watched.host, &requests);
        assert!(
            answers.iter().all(|answer| !matches!(answer.end, Some(Err(EngineError::Rank(_))))),
            "{answers:?}"
        );
        assert_all_long(&answers, 10);
        assert_at_rest(&watched.host);
        watched.steps();
    }
}
