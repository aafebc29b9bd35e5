//! Logits and greedy tokens against an independent implementation, through the whole host: scheduler,
//! chunked prefill, paged cache, recordings, sampling.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_model::{ExchangeChoice, ExpertLayout};
use atom_ops::KvDType;
use common::goldens::{self, MIXTURES, MODELS};
use common::{Setup, expert_parallel, golden, mesh, tiny};

fn check(name: &str, setup: &Setup) {
    goldens::check(name, &setup.start(&tiny(name)));
}

#[test]
fn every_family_agrees_with_the_reference() {
    for name in MODELS.iter().chain(MIXTURES) {
        check(name, &Setup::default());
    }
}

/// e4m3 keeps four bits of a key or value where bf16 keeps eight, so logits should be off by sixteen times as much.
#[test]
fn an_fp8_cache_is_four_bits_further_from_the_reference_than_bf16() {
    for name in MODELS.iter().chain(MIXTURES) {
        let distance = |kv_dtype, page_size| {
            let setup = Setup { kv_dtype, page_size, ..Setup::default() };
            goldens::distance(name, &setup.start(&tiny(name)))
        };
        let exact = distance(KvDType::F32, 16);
        assert!(exact.worst < 1e-3, "{name}: {exact:?}");
        let (bf16, e4m3) = (distance(KvDType::BF16, 16), distance(KvDType::E4M3, 16));
        println!("{name}: bf16 {bf16:?}, e4m3 {e4m3:?}");
        assert_eq!(distance(KvDType::E4M3, 64), e4m3, "{name}: pages of another size");
        // Logits have a standard deviation of about 3.
        if MODELS.contains(name) {
            assert!((8.0..32.0).contains(&(e4m3.mean / bf16.mean)), "{name}: bf16 {bf16:?}, e4m3 {e4m3:?}");
            assert!(e4m3.mean < 0.3 && e4m3.worst < 2.5, "{name}: {e4m3:?}");
        } else {
            // A router near a tie chooses other experts, with either: that is most of the difference.
            assert!(bf16.mean < e4m3.mean && e4m3.mean < 0.5, "{name}: bf16 {bf16:?}, e4m3 {e4m3:?}");
        }
    }
}

/// `-tp N --enable-dp-attention` and one expert layout.
fn group(ranks: u16, expert_parallel: bool, exchange: ExchangeChoice) -> Setup {
    let experts = ExpertLayout { expert_parallel, exchange };
    Setup { mesh: mesh(ranks, 1, true), experts, ..Setup::default() }
}

/// DTP2, DTP4 and DTP8: every rank has a slice of each expert.
#[test]
fn slices_of_experts_in_every_rank_agree_with_the_reference() {
    for name in MIXTURES {
        check(name, &group(2, false, ExchangeChoice::Auto));
    }
    check("mixtral", &Setup { threads: 2, ..group(4, false, ExchangeChoice::Gather) });
    check("qwen3_moe", &group(8, false, ExchangeChoice::Auto));
    check("glm4_moe", &group(8, false, ExchangeChoice::Gather));
}

/// DEP2, DEP4 and DEP8: every rank has some experts whole; both exchanges.
#[test]
fn whole_experts_spread_over_ranks_agree_with_the_reference() {
    for name in MIXTURES {
        check(name, &group(2, true, ExchangeChoice::Dispatch));
        check(name, &group(4, true, ExchangeChoice::Gather));
    }
    check("glm4_moe", &Setup { threads: 2, ..group(4, true, ExchangeChoice::Auto) });
    check("qwen3_moe", &group(8, true, ExchangeChoice::Auto));
    check("minimax_m2", &group(8, true, ExchangeChoice::Gather));
    // Uneven: 8 experts over 3 ranks.
    check("mixtral", &group(3, true, ExchangeChoice::Dispatch));
}

/// Experts without DP attention: the ranks of one lane share rows, and the sum over the lane is all.
#[test]
fn experts_within_a_lane_agree_with_the_reference() {
    for name in MIXTURES {
        check(name, &Setup { mesh: mesh(2, 1, false), ..Setup::default() });
        check(name, &Setup { mesh: mesh(2, 1, false), experts: expert_parallel(), ..Setup::default() });
    }
    // More ranks than key/value heads: norms over all heads count shared ones alike.
    check("minimax_m2", &Setup { mesh: mesh(4, 1, false), ..Setup::default() });
}

#[test]
fn the_published_spelling_of_a_config_is_the_same_model() {
    let read = |file| {
        let text = std::fs::read_to_string(golden("llama").join(file)).unwrap();
        atom_weights::Checkpoint::synthetic(&text, 1).unwrap().config().clone()
    };
    assert_eq!(read("config.json"), read("config.published.json"));
}

#[test]
fn tensor_parallel_agrees_with_the_reference() {
    check("llama", &Setup { mesh: mesh(2, 1, false), ..Setup::default() });
    check("llama_bias", &Setup { mesh: mesh(2, 1, false), ..Setup::default() });
    check("llama_tied", &Setup { mesh: mesh(3, 1, false), ..Setup::default() });
    check("qwen2", &Setup { mesh: mesh(4, 1, false), ..Setup::default() });
    check("qwen3", &Setup { mesh: mesh(2, 2, false), threads: 2, ..Setup::default() });
}

#[test]
fn dp_attention_agrees_with_the_reference() {
    check("llama", &Setup { mesh: mesh(2, 1, true), ..Setup::default() });
    check("llama_bias", &Setup { mesh: mesh(3, 1, true), ..Setup::default() });
    check("qwen3_tied", &Setup { mesh: mesh(4, 1, true), threads: 2, ..Setup::default() });
}

#[test]
fn chunks_of_any_size_agree_with_the_reference() {
    for (rows_max, page_size) in [(16, 16), (17, 32), (301, 64)] {
        check("qwen2", &Setup { rows_max, page_size, threads: 2, ..Setup::default() });
    }
}
