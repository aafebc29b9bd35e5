//! Seeded faults, one at a time: the tests that guard the protocol are themselves tested.
//!
//! The tree is copied into the target folder and each fault is made there. Its test must fail, or never
//! come to an end; else the fault survives, and so could the same fault made by somebody in earnest.

mod list;
mod scratch;

use anyhow::{Context, Result, bail};
use list::{MUTANTS, Mutant, Test};
use scratch::{Outcome, Scratch};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// Runs the mutants whose names contain `wanted`, or whose tests are in the package of that name; with `list`
/// only prints them.
pub(crate) fn run(root: &Path, wanted: &str, list: bool) -> Result<()> {
    let chosen: Vec<&Mutant> =
        MUTANTS.iter().filter(|m| m.name.contains(wanted) || m.test.package == wanted).collect();
    if chosen.is_empty() {
        bail!("no mutant has {wanted:?} in its name or tests in such a package; --list names them");
    }
    if list {
        chosen.iter().for_each(|mutant| println!("{}", line(mutant)));
        return Ok(());
    }
    let start = Instant::now();
    let scratch = Scratch::new(root)?;
    let limits = baseline(&scratch, &chosen)?;
    let mut survivors = Vec::new();
    for mutant in &chosen {
        let outcome = attempt(&scratch, mutant, limits[&mutant.test])?;
        println!("{}\t{outcome}", line(mutant));
        if outcome == Outcome::Passed {
            survivors.push(mutant.name);
        }
    }
    if !survivors.is_empty() {
        bail!("these faults survive their tests: {}", survivors.join(", "));
    }
    println!("{} mutants, all caught, in {} s", chosen.len(), start.elapsed().as_secs());
    Ok(())
}

/// Every test must pass without a fault, and how long that takes bounds how long it may take with one.
fn baseline(scratch: &Scratch, mutants: &[&Mutant]) -> Result<BTreeMap<Test, Duration>> {
    let mut limits = BTreeMap::new();
    for test in mutants.iter().map(|m| m.test) {
        if limits.contains_key(&test) {
            continue;
        }
        let binary = scratch.build(test)?;
        let start = Instant::now();
        match scratch.run(&binary, test, BASELINE_MAX)? {
            Outcome::Passed => {}
            outcome => bail!("{}: {outcome} without any fault", place(test)),
        }
        limits.insert(test, HANG_AFTER + 10 * start.elapsed());
    }
    Ok(limits)
}

fn attempt(scratch: &Scratch, mutant: &Mutant, limit: Duration) -> Result<Outcome> {
    let path = scratch.tree().join(mutant.file);
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    std::fs::write(&path, applied(mutant, &text)?)?;
    let outcome = scratch.build(mutant.test).and_then(|binary| scratch.run(&binary, mutant.test, limit));
    std::fs::write(&path, text)?;
    outcome.with_context(|| format!("mutant {}", mutant.name))
}

fn applied(mutant: &Mutant, text: &str) -> Result<String> {
    match text.matches(mutant.find).count() {
        1 => Ok(text.replacen(mutant.find, mutant.replace, 1)),
        count => bail!(
            "mutant {}: its text stands {count} times in {}; bring it up to date:\n{}",
            mutant.name,
            mutant.file,
            mutant.find
        ),
    }
}

/// For machines: name, file, test.
fn line(mutant: &Mutant) -> String {
    format!("{}\t{}\t{}", mutant.name, mutant.file, place(mutant.test))
}

fn place(test: Test) -> String {
    format!("{}::{}::{}", test.package, test.target, test.name)
}

/// Nothing that is sound takes as long.
const BASELINE_MAX: Duration = Duration::from_secs(300);
/// A test that takes so much longer than it did, and ten times as long besides, hangs.
const HANG_AFTER: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutant_applies_and_has_a_line_in_the_book() {
        let root = crate::root();
        let book = std::fs::read_to_string(root.join("docs/lockstep.md")).expect("the book is there");
        for mutant in MUTANTS {
            let text = std::fs::read_to_string(root.join(mutant.file)).expect("its file is there");
            if let Err(error) = applied(mutant, &text) {
                panic!("{error:#}");
            }
            let entry = book.lines().find(|line| line.starts_with(&format!("| `{}` |", mutant.name)));
            let entry = entry.unwrap_or_else(|| panic!("docs/lockstep.md has no line for {}", mutant.name));
            assert!(entry.contains(mutant.test.name), "{entry} does not name {}", mutant.test.name);
        }
    }

    #[test]
    fn a_text_that_stands_twice_or_not_at_all_is_refused() {
        let mutant = &MUTANTS[0];
        let twice = [mutant.find, mutant.find].concat();
        assert!(applied(mutant, &twice).is_err() && applied(mutant, "").is_err());
        assert_eq!(applied(mutant, mutant.find).expect("stands once"), mutant.replace);
    }
}
