//! What may be asked of steps, on a mixture of random weights that nobody loads.

use super::*;
use crate::args::{Cli, Command, normalise};
use atom_base::MeshArgs;
use atom_model::ExchangeChoice;
use clap::Parser;
use std::ffi::OsString;

/// 16 experts, 4 to a row.
const CONFIG: &str = r#"{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 256,
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 16,
    "num_experts_per_tok": 4, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": false}"#;

fn model() -> Checkpoint {
    Checkpoint::synthetic(CONFIG, 1).expect("a legal configuration")
}

fn args(flags: &str) -> EngineArgs {
    let words = ["atom", "serve", "--max-num-seqs", "8"].into_iter().chain(flags.split_whitespace());
    let cli = Cli::try_parse_from(normalise(words.map(OsString::from))).expect("known flags");
    let Command::Serve(serve) = cli.command else { panic!("serve") };
    serve.engine
}

fn lanes(lanes: u16) -> Mesh {
    Mesh::new(MeshArgs { tp: lanes, dp: 1, dp_attention: lanes > 1 }).expect("a mesh")
}

fn experts(expert_parallel: bool) -> ExpertLayout {
    ExpertLayout { expert_parallel, exchange: ExchangeChoice::Auto }
}

fn try_lattice(flags: &str, mesh: u16, expert_parallel: bool) -> Result<Vec<usize>, String> {
    let layout = (&lanes(mesh), experts(expert_parallel));
    let lattice = lattice(&args(flags), &model(), layout, 1).map_err(|error| format!("{error:#}"))?;
    Ok(lattice.buckets().iter().map(|bucket| bucket.rows()).collect())
}

fn bytes(rows: u32, mesh: u16, expert_parallel: bool) -> u64 {
    let layout = (&lanes(mesh), experts(expert_parallel));
    Workspace::sketch(&args(""), &model(), layout, 1).expect("it divides").bytes(rows)
}

#[test]
fn steps_that_work_in_too_much_are_refused_with_the_numbers() {
    for (mesh, expert_parallel) in [(1, false), (4, false), (4, true)] {
        let needed = bytes(300, mesh, expert_parallel);
        let flags =
            |rows: u32, bytes: u64| format!("--max-num-batched-tokens {rows} --workspace-memory {bytes}");
        let sizes = try_lattice(&flags(300, needed), mesh, expert_parallel).expect("just enough");
        assert_eq!(sizes.last(), Some(&300));
        let text = try_lattice(&flags(300, needed - 1), mesh, expert_parallel).expect_err("a byte less");
        for part in ["steps of 300 rows", "workspace for 299", "lower it to 299", "--workspace-memory is"] {
            assert!(text.contains(part), "{part:?}: {text}");
        }
        assert!(text.contains(&format!("{mesh} ranks")) && text.contains(&mib(needed)), "{text}");
        assert_eq!(
            try_lattice(&flags(299, needed - 1), mesh, expert_parallel).expect("it does").last(),
            Some(&299)
        );
    }
}

#[test]
fn without_a_wish_steps_are_as_large_as_memory_allows() {
    let top = |bytes: u64| {
        try_lattice(&format!("--workspace-memory {bytes}"), 4, true).map(|sizes| sizes[sizes.len() - 1])
    };
    assert_eq!(top(1 << 40), Ok(512), "what time allows");
    assert_eq!(top(bytes(100, 4, true)), Ok(100));
    // Eight requests decode at once: no step is smaller.
    assert_eq!(top(bytes(8, 4, true)), Ok(8));
    let text = top(bytes(8, 4, true) - 1).expect_err("less than decode needs");
    assert!(text.contains("steps of 8 rows") && text.contains("workspace for 7"), "{text}");
    let nothing = top(1).expect_err("nothing fits");
    assert!(nothing.contains("workspace for 0") && !nothing.contains("lower it"), "{nothing}");
}

#[test]
fn sizes_of_the_variable_are_held_to_the_same_bounds() {
    let flags = "--token-graph-sizes 64,32 --max-num-batched-tokens 100 --workspace-memory";
    let enough = bytes(100, 4, true);
    assert_eq!(try_lattice(&format!("{flags} {enough}"), 4, true), Ok(vec![1, 2, 4, 8, 32, 64, 100]));
    assert!(try_lattice(&format!("{flags} {}", enough - 1), 4, true).is_err());
    // What no step of this mesh can have is out of range before memory is looked at.
    let text = try_lattice("--token-graph-sizes 4096 --workspace-memory 1", 4, true).expect_err("too large");
    assert!(text.contains("4096"), "{text}");
}

/// (ATOM PR#2006) Buffers sized by a lane's own budget were fed everybody's rows.
#[test]
fn b_42_workspace_counts_the_rows_of_all_lanes() {
    let per_rank = |mesh: u16, expert_parallel| bytes(256, mesh, expert_parallel) / u64::from(mesh);
    // Slices: rows of twice as many lanes, each half as wide in the experts.
    let (few, many) = (per_rank(4, false), per_rank(8, false));
    assert!(many * 4 > few * 5, "{many} with 8 lanes, {few} with 4");
    // Whole experts: of four choices of a row, four fall on a rank that holds 4 of 16, two on one that holds 2.
    let (few, many) = (per_rank(4, true), per_rank(8, true));
    assert!(many * 4 < few * 5, "{many} with 8 lanes, {few} with 4");
}
