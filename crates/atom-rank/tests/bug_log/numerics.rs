//! Padding that can't be seen, and bits that depend on nothing but the request.

use super::*;
use crate::watch::{Step, leave_alone, watched};
use atom_ops::KvDType;
use common::tiny;

/// vllm-project/vllm PR#37442, PR#38436, flashinfer-ai/flashinfer#2883: what stood in padding rows and in
/// free pages came into real rows. Poisoned or not, the bits are equal, with every type of cache.
#[test]
fn b_55_poison_changes_no_bit() {
    for (name, kv_dtype) in [
        ("qwen3_moe", KvDType::F16),
        ("glm4_moe", KvDType::BF16),
        ("mixtral", KvDType::F32),
        ("minimax_m2", KvDType::E4M3),
    ] {
        for experts in LAYOUTS {
            let requests = mixed(12, 2, 10);
            let found = [false, true].map(|poison| {
                let host = Setup { poison, kv_dtype, ..lanes(3, experts) }.start(&tiny(name));
                bits(&together(&host, &requests))
            });
            assert!(found[0] == found[1], "{name} {experts:?} {kv_dtype:?}");
            assert!(found[0].iter().flatten().all(|(_, logprob)| f32::from_bits(*logprob).is_finite()));
        }
    }
}

/// local-inference-lab/vllm#621, lightseekorg/tokenspeed PR#969: rows of padding were written into the state
/// of others. What a prompt left in its pages is what it is after hundreds of padded steps of everybody
/// else, in pages of its own and in those that it had and gave back.
#[test]
fn b_58_b_61_padded_steps_leave_other_requests_pages_alone() {
    for experts in LAYOUTS {
        let setup = Setup { pages: 200, kv_dtype: KvDType::F16, ..lanes(2, experts) };
        let probe = on(0, request(&prompt(7, 90), 12, penalised(7)));
        let fresh = ask(&setup.start(&tiny("qwen3_moe")), again(&probe));
        let watched = watched(&setup, &tiny("qwen3_moe"), |_| leave_alone());
        assert_eq!(ask(&watched.host, again(&probe)).bits(), fresh.bits());
        let others = mixed(24, 2, 30);
        let lasting = send(&watched.host, on(0, request(&prompt(8, 70), 200, penalised(8))));
        together(&watched.host, &others);
        let found = ask(&watched.host, again(&probe));
        assert_eq!((found.cached_tokens, found.bits()), (80, fresh.bits()), "{experts:?}");
        let expected =
            ask(&setup.start(&tiny("qwen3_moe")), on(0, request(&prompt(8, 70), 200, penalised(8))));
        assert_eq!(lasting.wait().bits(), expected.bits(), "{experts:?}");
        let padded = watched.steps().iter().flatten().filter(|step| step.rows < step.shape.rows).count();
        assert!(padded > 100, "{padded} steps");
    }
}

/// sgl-project/sglang#30898: logits of a small bucket were not those of a large one once experts were
/// spread over ranks.
#[test]
fn b_63_expert_parallel_bits_do_not_depend_on_the_bucket() {
    let probe = on(1, request(&prompt(9, 45), 20, penalised(9)));
    for experts in LAYOUTS {
        let of = |rows_max: u32, sizes: Option<Vec<u32>>, busy: bool| {
            let host = Setup { rows_max, sizes, ..lanes(3, experts) }.start(&tiny("minimax_m2"));
            // A peer with long prompts drags everybody into its buckets.
            let peer = busy.then(|| send(&host, on(0, greedy(&prompt(1, 400), 60))));
            let answer = ask(&host, again(&probe)).bits();
            peer.map(|pending| pending.wait());
            answer
        };
        let expected = of(64, None, false);
        for (rows_max, sizes) in [(16, None), (19, None), (64, Some(vec![64])), (256, Some(vec![200]))] {
            for busy in [false, true] {
                assert_eq!(
                    of(rows_max, sizes.clone(), busy),
                    expected,
                    "{experts:?} {rows_max} {sizes:?} {busy}"
                );
            }
        }
    }
}

/// vllm-project/vllm#5898, #23138, #6735: at temperature 0 the text depended on who was in the batch.
#[test]
fn b_95_greedy_text_is_the_same_alone_and_among_63_others() {
    let probe = on(2, greedy(&prompt(11, 40), 30));
    for experts in LAYOUTS {
        let setup = Setup { max_num_seqs: 64, rows_max: 128, pages: 700, ..lanes(4, experts) };
        let alone = ask(&setup.start(&tiny("mixtral")), again(&probe));
        let host = setup.start(&tiny("mixtral"));
        // All in one lane with it, and dealt to all.
        for lanes in [1, 4] {
            let mut requests: Vec<_> = mixed(63, lanes, 25);
            if lanes == 1 {
                requests.iter_mut().for_each(|request| request.lane = probe.lane);
            }
            requests.push(probe.clone());
            assert_eq!(together(&host, &requests)[63].ids(), alone.ids(), "{experts:?} over {lanes}");
        }
    }
}

/// Rows, not phases; idle lanes run the same; padding can't be seen: on mixtures, with every type of cache.
#[test]
fn rows_of_all_kinds_share_steps_with_every_cache_type() {
    let decoding = on(0, request(&prompt(1, 9), 60, penalised(1)));
    let prefilling = on(1, request(&prompt(2, 400), 2, penalised(2)));
    for name in ["qwen3_moe", "mixtral", "glm4_moe", "minimax_m2"] {
        for kv_dtype in [KvDType::F32, KvDType::F16, KvDType::BF16, KvDType::E4M3] {
            for experts in [LAYOUTS[0], LAYOUTS[1]] {
                let setup = Setup { kv_dtype, ..lanes(3, experts) };
                let expected =
                    bits(&alone(&setup.start(&tiny(name)), &[decoding.clone(), prefilling.clone()]));
                let watched = watched(&setup, &tiny(name), |_| leave_alone());
                // Both are there before the first step: the short prompt is done with it.
                common::rest(&watched.host);
                watched.host.pause();
                let [first, second] = [&decoding, &prefilling].map(|r| send(&watched.host, again(r)));
                wait_until(&watched.host, |lanes| lanes[..2].iter().all(|lane| lane.counters.waiting == 1));
                watched.host.resume();
                assert_eq!([first.wait().bits(), second.wait().bits()], expected[..], "{name} {kv_dtype:?}");
                let rides =
                    |ranks: &&Vec<Step>| ranks[0].spans == [1] && ranks[1].rows > 8 && ranks[2].rows == 0;
                assert!(watched.steps().iter().any(|ranks| rides(&ranks)), "{name} {kv_dtype:?} {experts:?}");
            }
        }
    }
}
