//! FP8 checkpoints against the logits of the weights that they mean, on one rank and where shares cut blocks of scales:
//! 6 heads of 32, 320 columns, 160 of an expert, and blocks of 128.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_model::{ExchangeChoice, ExpertLayout};
use common::{Setup, expert_parallel, fp8, goldens, mesh};

const DENSE: [&str; 3] = ["qwen3_fp8_tensor", "qwen3_fp8_channel", "qwen3_fp8_block"];
const MIXTURES: [&str; 3] = ["qwen3_moe_fp8_tensor", "qwen3_moe_fp8_channel", "qwen3_moe_fp8_block"];

fn check(name: &str, setups: &[Setup]) {
    let checkpoint = fp8::checkpoint(name);
    let matrices = checkpoint.names().filter(|name| name.ends_with("_proj.weight")).count();
    let scaled = checkpoint.names().filter(|name| checkpoint.tensor(name).unwrap().scales().is_some());
    assert_eq!(scaled.count(), matrices);
    let inputs = if name.ends_with("tensor") { matrices } else { 0 };
    assert_eq!(checkpoint.unused_scales(), inputs);
    for setup in setups {
        goldens::check(name, &setup.start(&checkpoint));
    }
}

/// `-tp 2`.
fn within_a_lane() -> Setup {
    Setup { mesh: mesh(2, 1, false), ..Setup::default() }
}

/// `-tp 2 --enable-dp-attention`: slices of each expert, or whole ones.
fn lanes(experts: ExpertLayout) -> Setup {
    Setup { mesh: mesh(2, 1, true), experts, ..Setup::default() }
}

#[test]
fn dense_models_agree_with_the_reference() {
    for name in DENSE {
        check(name, &[Setup::default()]);
    }
}

#[test]
fn dense_models_of_two_ranks_agree_with_the_reference() {
    check("qwen3_fp8_tensor", &[within_a_lane()]);
    check("qwen3_fp8_channel", &[within_a_lane()]);
    check("qwen3_fp8_block", &[within_a_lane(), lanes(ExpertLayout::default())]);
}

#[test]
fn mixtures_agree_with_the_reference() {
    for name in MIXTURES {
        check(name, &[Setup::default()]);
    }
}

#[test]
fn mixtures_of_two_ranks_agree_with_the_reference() {
    check("qwen3_moe_fp8_channel", &[lanes(expert_parallel())]);
    let gathered = ExpertLayout { expert_parallel: false, exchange: ExchangeChoice::Gather };
    check("qwen3_moe_fp8_block", &[within_a_lane(), lanes(gathered), lanes(expert_parallel())]);
}
