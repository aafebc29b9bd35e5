//! Checks of the tree that the compiler doesn't make: `cargo xtask tidy`, also run as a test; `mutants`, which
//! tests the tests; `explore`, which looks further than they have time for; and `kernels`, which compiles GPU kernels
//! without a GPU.

#![forbid(unsafe_code)]

mod direction;
mod mutants;
mod tidy;

use anyhow::{Context, Result, anyhow, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match args.as_slice() {
        ["tidy"] => check().map(|files| println!("{files} files are tidy, dependencies point down")),
        ["mutants"] => mutants::run(&root(), "", false),
        ["mutants", "--list"] => mutants::run(&root(), "", true),
        ["mutants", name] if !name.starts_with('-') => mutants::run(&root(), name, false),
        ["explore", rest @ ..] => explore(rest),
        ["kernels", rest @ ..] => kernels(rest),
        _ => Err(anyhow!(
            "usage: cargo xtask tidy | mutants [NAME | PACKAGE | --list] | explore [--lanes 1..4] [--supervised] [--deep] | \
             kernels [--all]"
        )),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Builds the explorer of `atom-sim` for speed and runs it.
fn explore(args: &[&str]) -> Result<()> {
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .current_dir(root())
        .args(["run", "--quiet", "--release", "--package", "atom-sim", "--example", "explore", "--"])
        .args(args)
        .status()
        .context("starting cargo")?;
    if !status.success() {
        bail!("the exploration ended with {status}");
    }
    Ok(())
}

/// Compiles all kernels of `atom-cuda` by NVRTC, which `pip install "nvidia-cuda-nvrtc==13.0.*"` brings.
fn kernels(args: &[&str]) -> Result<()> {
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .current_dir(root())
        .args(["run", "--quiet", "--package", "atom-cuda", "--example", "kernels", "--"])
        .args(args)
        .status()
        .context("starting cargo")?;
    if !status.success() {
        bail!("kernels don't compile: {status}");
    }
    Ok(())
}

fn check() -> Result<usize> {
    let root = root();
    let mut complaints = direction::check(&root)?;
    let files = files(&root)?;
    for file in &files {
        let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        let name = file.strip_prefix(&root).unwrap_or(file).display().to_string();
        complaints.extend(tidy::check(&name, &text));
    }
    if !complaints.is_empty() {
        bail!("{}", complaints.join("\n"));
    }
    Ok(files.len())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_owned()
}

/// Sources and pages of the project, in order.
fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).with_context(|| format!("listing {}", folder.display()))? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                if !name.starts_with('.') && !matches!(name.as_str(), "target" | "golden" | "__pycache__") {
                    folders.push(path);
                }
            } else if matches!(
                path.extension().and_then(|e| e.to_str()),
                Some("rs" | "md" | "toml" | "sh" | "py")
            ) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_tree_is_tidy_and_dependencies_point_down() {
        if let Err(error) = super::check() {
            panic!("{error:#}");
        }
    }
}
