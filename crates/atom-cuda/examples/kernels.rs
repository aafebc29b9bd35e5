//! Compiles all kernel sources without a GPU: `kernels [--all]`. sm_90a always; with `--all` also sm_80, sm_89,
//! sm_100a and sm_120. NVRTC comes from `ATOM_NVRTC` or from the Python package nvidia-cuda-nvrtc, see `Search`.

use atom_cuda::{Compiler, Nvrtc, Program, SOURCES, Search, Source};
use std::process::ExitCode;
use std::time::Instant;

/// The architecture that has kernels of its own.
const FIRST: &[&str] = &["sm_90a"];
/// Every generation from the oldest that is supported.
const ALL: &[&str] = &["sm_90a", "sm_80", "sm_89", "sm_100a", "sm_120"];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let archs = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => FIRST,
        ["--all"] => ALL,
        _ => {
            eprintln!("usage: kernels [--all]");
            return ExitCode::FAILURE;
        }
    };
    match compile(archs) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn compile(archs: &[&str]) -> Result<(), atom_cuda::CudaError> {
    let nvrtc = Nvrtc::load(&Search::from_env(|name| std::env::var_os(name)))?;
    let programs: Vec<Program> = SOURCES.iter().flat_map(Source::programs).collect();
    for arch in archs {
        let (compiler, start) = (Compiler::new(&nvrtc, arch, None)?, Instant::now());
        let compiled = compiler.compile(&programs, &|_, _| {})?;
        let bytes: usize = compiled.iter().map(|compiled| compiled.cubin.len()).sum();
        println!(
            "{arch}: {} programs, {} KiB, by NVRTC {} in {:.1} s",
            compiled.len(),
            bytes >> 10,
            compiler.version(),
            start.elapsed().as_secs_f64()
        );
    }
    Ok(())
}
