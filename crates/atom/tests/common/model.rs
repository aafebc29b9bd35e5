//! The real model: found in the cache or fetched as a user would.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// Where models are kept during tests: the user's cache if there is one, so that they are fetched once.
pub(crate) fn atom() -> Command {
    Command::new(env!("CARGO_BIN_EXE_atom"))
}

/// Path of SmolLM2-135M-Instruct, checked.
pub(crate) fn smollm2() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    let pull = || {
        let output = atom().args(["pull", "smollm2-135m"]).output().expect("the binary runs");
        assert!(output.status.success(), "atom pull: {}", String::from_utf8_lossy(&output.stderr));
        PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
    };
    PATH.get_or_init(pull).clone()
}
