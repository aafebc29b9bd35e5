//! Where to compute, on a machine whose NVIDIA driver can't be used.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

use std::process::Command;

/// Standard error of `atom generate` that must fail before it looks for a model.
fn refusal(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_atom"))
        .args(["generate", "Once upon a time", "--offline"])
        .args(args)
        .env("ATOM_CUDA_DRIVER", "/nowhere/libcuda.so.1")
        .output()
        .unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_gpu_that_is_asked_for_and_not_there_is_an_error_with_the_paths() {
    let text = refusal(&["--device", "cuda"]);
    for part in
        ["libcuda.so.1 was not found", "/nowhere/libcuda.so.1: ", "no other was tried", "ATOM_CUDA_DRIVER"]
    {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

/// A user who names a driver means it: the CPU is not taken silently.
#[test]
fn a_driver_that_is_named_and_not_there_is_an_error_for_auto_too() {
    let text = refusal(&["--device", "auto"]);
    assert!(text.contains("/nowhere/libcuda.so.1: ") && text.contains("--device cpu"), "{text}");
}

#[test]
fn flags_of_one_device_are_refused_beside_the_other() {
    for (args, part) in [
        (&["--device", "cuda", "--threads", "2"][..], "--threads is for --device cpu"),
        (&["--device", "cuda", "--isa", "portable"], "--isa is for --device cpu"),
        (&["--device", "cuda", "--activations", "f32"], "--activations is for --device cpu"),
        (&["--device", "cuda", "-tp", "2", "--enable-dp-attention", "--nodes", "2"], "GPUs of several hosts"),
        (&["--device", "cuda", "--gpus", "0,1"], "--gpus names 2 GPUs for 1 ranks"),
        (&["--device", "cpu", "--gpus", "0"], "--gpus is for --device cuda"),
        (&["--device", "cuda", "--rank-restarts-max", "1"], "--rank-restarts-max"),
        (&["--device", "cpu", "--dtype", "float32"], "--dtype is for --device cuda"),
        (&["--device", "cpu", "--gpu-memory-utilization", "0.5"], "--gpu-memory-utilization is for"),
    ] {
        let text = refusal(args);
        assert!(text.contains(part), "{args:?}: {text}");
    }
}

/// What `atom inspect` says of a model that would have to be fetched from a hub where nobody listens.
fn inspected(offline: &str) -> String {
    let home = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("offline");
    let output = Command::new(env!("CARGO_BIN_EXE_atom"))
        .args(["inspect", "nobody/nothing"])
        .env("ATOM_HOME", home)
        .env("HF_ENDPOINT", "http://127.0.0.1:1")
        .env("ATOM_OFFLINE", offline)
        .output()
        .unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

/// `ATOM_OFFLINE=1`, which the documentation names, was refused: only true and false were taken.
#[test]
fn every_word_for_yes_and_no_is_taken_from_the_environment() {
    let online = inspected("0");
    for no in ["false", "off", "no", "OFF"] {
        assert_eq!(inspected(no), online, "{no}");
    }
    let offline = inspected("1");
    assert!(offline.contains("offline") && offline != online, "{offline} {online}");
    for yes in ["true", "on", "yes", "On"] {
        assert_eq!(inspected(yes), offline, "{yes}");
    }
    assert!(inspected("perhaps").contains("invalid value 'perhaps'"));
}
