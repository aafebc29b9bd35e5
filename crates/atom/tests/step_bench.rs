//! `atom bench step` as a user starts it: on a CPU, a model so small that it is done at once.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

#[path = "common/model.rs"]
mod model;
#[path = "common/server.rs"]
mod server;

use serde_json::Value;
use std::path::Path;
use std::process::Output;

fn bench(folder: &Path, flags: &[&str]) -> Output {
    let mut command = model::atom();
    command.args(["bench", "step", "--load-dummy", "--device", "cpu", "--threads", "1", "--log", "warn"]);
    command.arg("--model").arg(folder).args(flags).output().unwrap()
}

/// A shape alone is enough: there is no tokenizer in the folder.
fn shape(name: &str) -> std::path::PathBuf {
    let folder = server::mixture_without_weights(name);
    std::fs::remove_file(folder.join("tokenizer.json")).unwrap();
    folder
}

#[test]
fn every_figure_is_in_the_table_and_in_the_file() {
    let folder = shape("step-bench");
    let file = folder.join("out.json");
    let flags =
        ["--first", "5,40", "--decode", "1,6", "--context", "20", "--steps", "8", "--prefill", "3x50"];
    let more = ["--load", "4x9+7", "--first-repeats", "3", "--json", file.to_str().unwrap()];
    let output = bench(&folder, &[&flags[..], &more].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (text, json) = (String::from_utf8(output.stdout).unwrap(), std::fs::read(&file).unwrap());
    let json: Value = serde_json::from_slice(&json).unwrap();
    let figures = json["figures"].as_array().unwrap();
    let names: Vec<&str> = figures.iter().map(|figure| figure["name"].as_str().unwrap()).collect();
    let expected = [
        "first token, 5 tokens",
        "first token, 40 tokens",
        "next token, 1 at 20",
        "next token, 6 at 20",
        "prefill, 3 x 50",
        "load, 4 x 9 + 7",
    ];
    assert_eq!(names, expected);
    assert!(expected.iter().all(|name| text.contains(name)), "{text}");
    let counts: Vec<u64> = figures.iter().map(|figure| figure["count"].as_u64().unwrap()).collect();
    assert_eq!(counts, [3, 3, 8, 8, 3, 1]);
    assert!(figures.iter().all(|figure| figure["median"].as_f64().unwrap() > 0.0), "{json:#}");
    // Of 8 experts a row chooses 2.
    for figure in figures {
        let read = |key: &str| figure["experts"][key].as_f64().unwrap();
        let (found, expected) = (read("per_layer_and_step"), read("expected"));
        assert!((2.0..=8.0).contains(&found) && (2.0..=8.0).contains(&expected), "{figure:#}");
    }
    let alone = &figures[2]["experts"];
    assert_eq!((alone["per_layer_and_step"].as_f64(), alone["counts"].as_bool()), (Some(2.0), Some(true)));
    assert!(text.contains("2.0 experts, 2.0 if even: +0.0%"), "{text}");
    // Prompts that were computed: 3 + 1 times 5 and 40, 20 + 6 x 20, (3 + 1) x 3 x 50, (1 + 1) x 4 x 9; and answers. A
    // batch whose requests ended before anybody counted is there twice.
    let (rows, steps) = (json["steps"]["rows"].as_u64().unwrap(), &json["steps"]);
    let (prompts, answers) = (4 * 45 + 7 * 20 + 4 * 150 + 72, 8 + 6 * 8 + 2 * 4 * 6);
    assert!(rows >= prompts + answers && rows <= prompts + answers + 7 * (20 + 2 * 60), "{rows}");
    assert_eq!((steps["eager"].as_u64(), steps["preempted"].as_u64()), (Some(0), Some(0)));
}

/// Rows of one prompt grew alike from layer to layer, by what attention averages: after some layers half of the experts
/// were left, and a mixture with dummy weights was faster than any real one.
/// One lane streams while the other one prefills; and a prompt on each lane at once.
#[test]
fn streams_beside_prompts_are_measured_in_a_group_of_two_lanes() {
    let folder = shape("step-bench-beside");
    let file = folder.join("out.json");
    let group = ["-tp", "2", "--enable-dp-attention", "--enable-expert-parallel"];
    let flags =
        ["--only", "first", "--first", "5", "--first-repeats", "2", "--first-lanes", "2", "--context", "20"];
    let more = ["--beside", "2+3x300", "--json", file.to_str().unwrap()];
    let output = bench(&folder, &[&group[..], &flags, &more].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let figures = json["figures"].as_array().unwrap();
    let names: Vec<&str> = figures.iter().map(|figure| figure["name"].as_str().unwrap()).collect();
    let beside = |what| format!("2 streams beside 3 x 300: {what}");
    let expected = ["p99", "next token", "prefill", "alone"].map(beside);
    assert_eq!(names, [&["first token, 5 tokens on each of 2 lanes".to_owned()][..], &expected].concat());
    let median = |at: usize| figures[at]["median"].as_f64().unwrap();
    assert!((0..5).all(|at| median(at) > 0.0) && median(1) >= median(2), "{json:#}");
    let refused = bench(&folder, &["--only", "first", "--beside", "2+3x300"]);
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && text.contains("--enable-dp-attention"), "{text}");
}

#[test]
fn rows_of_a_prompt_of_dummy_weights_choose_evenly() {
    let folder = shape("step-bench-even");
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    for (key, value) in [
        ("vocab_size", 4096),
        ("hidden_size", 256),
        ("num_hidden_layers", 12),
        ("num_experts", 64),
        ("num_experts_per_tok", 4),
        ("moe_intermediate_size", 16),
        ("head_dim", 64),
    ] {
        config[key] = value.into();
    }
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let file = folder.join("out.json");
    let flags =
        ["--only", "first,decode", "--first", "24,96", "--decode", "8", "--context", "40", "--steps", "4"];
    let output =
        bench(&folder, &[&flags[..], &["--first-repeats", "1", "--json", file.to_str().unwrap()]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    for figure in json["figures"].as_array().unwrap() {
        assert_eq!(figure["experts"]["counts"], true, "{figure:#}");
    }
}

#[test]
fn what_can_not_be_measured_is_refused_with_its_numbers() {
    let folder = shape("step-bench-refused");
    for (flags, parts) in [
        (&["--load", "4x"][..], &["'4x'", "256x1024+256"][..]),
        (&["--steps", "0"], &["--steps 0"]),
        (&["--decode", "1,0"], &["--decode 0"]),
        (&["--prefill", "4x4+4"], &["--prefill 4x4+4", "--load"]),
        (&["--first", "5000"], &["--first 5000", "5000 + 1", "--max-model-len is 4096"]),
        (
            &["--max-num-seqs", "4", "--decode", "16"],
            &["--decode 16", "16 requests", "--max-num-seqs 4", "16 or more"],
        ),
        (
            &["--kv-cache-memory", "1MiB", "--decode", "64"],
            &["--decode 64", "tokens of KV cache", "--kv-cache-memory"],
        ),
        (&["--json", "/nowhere/out.json"], &["--json", "/nowhere/out.json"]),
        (&["--nodes", "2"], &["--nodes"]),
        (&["--operators", "0"], &["--operators 0"]),
        (&["--operators", "4"], &["--operators", "CPU"]),
    ] {
        let output = bench(&folder, flags);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && parts.iter().all(|part| text.contains(part)),
            "{flags:?}: {text}"
        );
    }
}
