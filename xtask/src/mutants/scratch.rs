//! A copy of the tree in the target folder, with builds and runs of single tests in it.

use super::list::Test;
use anyhow::{Context, Result, bail};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The copy. Builds in it go on from one to the next.
pub(crate) struct Scratch {
    folder: PathBuf,
    /// The target folder of the tree itself: what is not the project's own was built there already.
    target: PathBuf,
}

/// What became of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    Failed,
    /// It came to no end.
    Hung,
}

impl Scratch {
    /// Copies what differs, so that little is built again.
    pub(crate) fn new(root: &Path) -> Result<Self> {
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
        let folder = target.join("mutants");
        copy(root, &folder.join("tree")).with_context(|| format!("copying into {}", folder.display()))?;
        // Cargo runs in the copy.
        let target = std::path::absolute(&target)?;
        Ok(Self { folder: std::path::absolute(folder)?, target })
    }

    pub(crate) fn tree(&self) -> PathBuf {
        self.folder.join("tree")
    }

    /// Builds a test's program and says where it is.
    pub(crate) fn build(&self, test: Test) -> Result<PathBuf> {
        let target = match test.target {
            "lib" => vec!["--lib"],
            file => vec!["--test", file],
        };
        let built = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .current_dir(self.tree())
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CARGO_PROFILE_DEV_DEBUG", "false")
            .env("CARGO_INCREMENTAL", "1")
            .env("CARGO_TERM_COLOR", "never")
            .args(["test", "--no-run", "--offline", "--package", test.package])
            .args(target)
            .output()
            .context("starting cargo")?;
        let said = String::from_utf8_lossy(&built.stderr);
        let program = said.lines().find_map(executable);
        match program {
            Some(program) if built.status.success() => Ok(self.tree().join(program)),
            _ => bail!("{} does not build, so nothing was tested:\n{said}", test.package),
        }
    }

    /// Runs one test for so long at the most.
    pub(crate) fn run(&self, program: &Path, test: Test, limit: Duration) -> Result<Outcome> {
        let said = self.folder.join("said");
        let mut child = Command::new(program)
            .current_dir(self.tree().join("crates").join(test.package))
            .args(["--exact", test.name])
            .stdout(std::fs::File::create(&said)?)
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let start = Instant::now();
        loop {
            if let Some(status) = child.try_wait()? {
                // A name that matches no test would pass whatever is broken.
                if !std::fs::read_to_string(&said)?.contains("running 1 test") {
                    bail!("{} has no test {}", program.display(), test.name);
                }
                return Ok(if status.success() { Outcome::Passed } else { Outcome::Failed });
            }
            if start.elapsed() > limit {
                child.kill()?;
                child.wait()?;
                return Ok(Outcome::Hung);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Passed => "SURVIVED",
            Self::Failed => "caught",
            Self::Hung => "caught: it hung",
        })
    }
}

/// The path in "Executable unittests src/lib.rs (build/debug/deps/x-0123)".
fn executable(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix("Executable")?.rsplit_once('(')?.1.strip_suffix(')')
}

/// Makes `to` like `from`, without what is built or hidden. Equal files keep their times.
fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    let names = |folder: &Path| -> Result<Vec<std::ffi::OsString>> {
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name())).collect()
    };
    let hidden = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with('.') || name == "target";
    let wanted: Vec<_> = names(from)?.into_iter().filter(|name| !hidden(name)).collect();
    for stale in names(to)?.into_iter().filter(|name| !wanted.contains(name)) {
        let path = to.join(stale);
        if path.is_dir() { std::fs::remove_dir_all(path)? } else { std::fs::remove_file(path)? }
    }
    for name in wanted {
        let (source, copied) = (from.join(&name), to.join(&name));
        if source.is_dir() {
            copy(&source, &copied)?;
        } else {
            let bytes = std::fs::read(&source)?;
            if std::fs::read(&copied).ok().as_ref() != Some(&bytes) {
                std::fs::write(&copied, bytes)?;
            }
        }
    }
    Ok(())
}

const LOOK_EVERY: Duration = Duration::from_millis(50);
