//! Which crate may use which: arrows point down one list.

use anyhow::{Context, Result};
use std::path::Path;

/// Top to bottom. A crate may depend on those below it, less what [`FORBIDDEN`] says.
const ORDER: &[&str] = &[
    "atom",
    "atom-serve",
    "atom-bench",
    "atom-sim",
    "atom-text",
    "atom-rank",
    "atom-engine",
    "atom-group",
    "atom-model",
    "atom-cuda",
    "atom-cpu",
    "atom-ops",
    "atom-weights",
    "atom-telemetry",
    "atom-base",
];

/// Pairs that the list would allow and the architecture doesn't: (crate, what it must not know).
const FORBIDDEN: &[(&str, &[&str])] = &[
    (
        "atom-serve",
        &["atom-rank", "atom-group", "atom-model", "atom-cuda", "atom-cpu", "atom-ops", "atom-weights"],
    ),
    ("atom-bench", &["atom-engine", "atom-text", "atom-rank", "atom-ops", "atom-weights", "atom-group"]),
    ("atom-engine", &["atom-ops", "atom-model", "atom-cuda", "atom-cpu", "atom-weights", "atom-telemetry"]),
    ("atom-group", &["atom-ops", "atom-model", "atom-cuda", "atom-cpu", "atom-weights", "atom-telemetry"]),
    ("atom-model", &["atom-cuda", "atom-cpu"]),
    ("atom-rank", &["atom-cuda", "atom-cpu"]),
    ("atom-cuda", &["atom-cpu", "atom-telemetry"]),
    ("atom-text", &["atom-rank", "atom-engine", "atom-ops", "atom-group"]),
];

/// One line for each arrow that points the wrong way.
pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let mut complaints = Vec::new();
    for (place, name) in ORDER.iter().enumerate() {
        let manifest = root.join("crates").join(name).join("Cargo.toml");
        let text =
            std::fs::read_to_string(&manifest).with_context(|| format!("reading {}", manifest.display()))?;
        let table: toml::Table = text.parse().with_context(|| format!("parsing {}", manifest.display()))?;
        let used = table.get("dependencies").and_then(|d| d.as_table()).into_iter().flat_map(|d| d.keys());
        for used in used.filter(|used| used.starts_with("atom")) {
            let below = ORDER[place + 1..].contains(&used.as_str());
            let forbidden = FORBIDDEN.iter().any(|(from, to)| from == name && to.contains(&used.as_str()));
            if !below || forbidden {
                complaints.push(format!("{name} must not depend on {used}"));
            }
        }
    }
    for entry in std::fs::read_dir(root.join("crates"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !ORDER.contains(&name.as_str()) {
            complaints.push(format!("crate {name} has no place in the order of xtask/src/direction.rs"));
        }
    }
    Ok(complaints)
}
