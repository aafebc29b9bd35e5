//! The vendor's libraries where they are missing, wrong, or stand-ins: errors that say what to do, never a panic.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

use atom_cuda::{CublasLt, CudaError, Driver, Gpu, GpuOptions, Nvrtc, Search};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder of its own, gone in the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("atom-cuda-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// A library in which every one of `names` returns `value`, and of the first what `first` says.
    fn stub(&self, file: &str, names: &[&str], bodies: &[(&str, &str)]) -> PathBuf {
        let body = |name: &str| bodies.iter().find(|(n, _)| *n == name).map_or("return 999;", |(_, b)| b);
        let text: String =
            names.iter().map(|name| format!("int {name}(int *p) {{ {} }}\n", body(name))).collect();
        let (source, library) = (self.0.join(format!("{file}.c")), self.0.join(file));
        std::fs::write(&source, text).unwrap();
        let mut gcc = Command::new("gcc");
        gcc.args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source);
        assert!(gcc.status().unwrap().success());
        library
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn named(path: &Path) -> Search {
    let path = Some(path.to_owned());
    Search { driver: path.clone(), nvrtc: path.clone(), cublaslt: path, ..Search::default() }
}

fn text<T>(outcome: Result<T, CudaError>) -> String {
    outcome.err().unwrap().to_string()
}

#[test]
fn a_file_that_a_user_names_is_the_only_one_tried() {
    let search = named(Path::new("/nowhere/lib.so"));
    for (error, variable) in [
        (text(Driver::load(&search)), "ATOM_CUDA_DRIVER"),
        (text(Nvrtc::load(&search)), "ATOM_NVRTC"),
        (text(CublasLt::load(&search)), "ATOM_CUBLASLT"),
    ] {
        assert!(error.contains("/nowhere/lib.so: "), "{error}");
        assert!(error.contains(&format!("{variable} names this file, so no other was tried")), "{error}");
        assert_eq!(error.lines().filter(|line| line.starts_with("  ")).count(), 1, "{error}");
    }
    // Naming a file that can't be used is an error, not a machine without a GPU.
    assert!(Gpu::is_there(&search).is_err());
}

#[test]
fn without_a_library_every_path_and_the_pip_line_are_told() {
    let folder = Folder::new("missing");
    let search = Search { site_packages: vec![folder.0.clone()], ..Search::default() };
    // This machine may have the library: then there is nothing to tell.
    if let Err(error) = Nvrtc::load(&search) {
        let error = error.to_string();
        for part in [
            "libnvrtc.so.13 was not found (the compiler of the kernels)",
            &format!("{}/nvidia/cu13/lib/libnvrtc.so.13: no such file", folder.0.display()),
            "/usr/local/cuda/lib64/libnvrtc.so.13",
            "pip install \"nvidia-cuda-nvrtc==13.0.*\"",
            "ATOM_NVRTC",
        ] {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
    }
}

#[test]
fn a_file_that_is_no_library_says_what_the_system_said() {
    let folder = Folder::new("wrong");
    let file = folder.0.join("libcuda.so.1");
    std::fs::write(&file, "not an object file").unwrap();
    let error = text(Driver::load(&named(&file)));
    assert!(error.contains("libcuda.so.1: ") && !error.contains("no such file"), "{error}");
}

#[test]
fn a_library_without_a_function_is_named_with_it() {
    let folder = Folder::new("stub");
    let library = folder.stub("libother.so", &["something_else"], &[]);
    let search = named(&library);
    for (error, symbol) in [
        (text(Driver::load(&search)), Driver::NAMES[0]),
        (text(Nvrtc::load(&search)), Nvrtc::NAMES[0]),
        (text(CublasLt::load(&search)), CublasLt::NAMES[0]),
    ] {
        assert!(error.contains(symbol) && error.contains("libother.so"), "{error}");
    }
    let old: Vec<&str> = Driver::NAMES.iter().copied().filter(|name| *name != "cuLaunchKernelEx").collect();
    let error = text(Driver::load(&named(&folder.stub("libold.so", &old, &[]))));
    assert!(error.contains("cuLaunchKernelEx") && error.contains("too old"), "{error}");
}

#[test]
fn a_driver_without_a_gpu_is_no_gpu() {
    let folder = Folder::new("no-gpu");
    // CUDA_ERROR_NO_DEVICE is 100.
    let none = folder.stub("libnone.so", Driver::NAMES, &[("cuInit", "return 100;")]);
    assert!(!Gpu::is_there(&named(&none)).unwrap());
    let empty = [("cuInit", "return 0;"), ("cuDeviceGetCount", "*p = 0; return 0;")];
    let empty = folder.stub("libempty.so", Driver::NAMES, &empty);
    assert!(!Gpu::is_there(&named(&empty)).unwrap());
    let options = GpuOptions { search: named(&empty), ordinal: 0, sharers: 1, cache: None };
    let error = text(Gpu::open(&options));
    assert!(error.contains("sees no GPU"), "{error}");
}

#[test]
fn a_driver_that_fails_is_an_error_with_the_call() {
    let folder = Folder::new("broken");
    let broken = folder.stub("libbroken.so", Driver::NAMES, &[("cuInit", "return 999;")]);
    let error = text(Gpu::is_there(&named(&broken)));
    assert!(error.contains("cuInit") && error.contains("999"), "{error}");
}

/// NVRTC was found through a relative path, and its built-in functions were not.
#[test]
fn a_library_that_is_named_relative_to_here_is_opened_by_its_whole_path() {
    let folder = Folder::new("relative");
    let broken = folder.stub("libbroken.so", Driver::NAMES, &[("cuInit", "return 999;")]);
    let here = std::env::current_dir().unwrap();
    let up: PathBuf = here.components().skip(1).map(|_| "..").collect();
    let relative = up.join(broken.strip_prefix("/").unwrap());
    assert!(relative.is_relative() && relative.is_file(), "{relative:?}");
    let gone = text(Gpu::is_there(&named(&relative.with_extension("gone"))));
    assert!(gone.contains(&here.display().to_string()), "{gone}");
    assert!(text(Gpu::is_there(&named(&relative))).contains("cuInit"));
}

#[test]
fn the_environment_names_files_and_pythons() {
    let folder = Folder::new("python");
    let packages = folder.0.join("lib/python3.12/site-packages");
    std::fs::create_dir_all(packages.join("nvidia")).unwrap();
    std::fs::create_dir_all(folder.0.join("bin")).unwrap();
    std::fs::write(folder.0.join("bin/python3"), "").unwrap();
    let home = folder.0.display().to_string();
    for (name, value) in [
        ("VIRTUAL_ENV", home.clone()),
        ("ATOM_PYTHON", format!("{home}/bin/python3")),
        ("PATH", format!("{home}/bin")),
    ] {
        let search = Search::from_env(|asked| (asked == name).then(|| OsString::from(&value)));
        assert_eq!(search.site_packages.first(), Some(&packages), "{name}");
        assert_eq!(search.driver, None);
    }
    let search = Search::from_env(|name| (name == "ATOM_NVRTC").then(|| OsString::from("/x/nvrtc.so")));
    assert_eq!(search.nvrtc.as_deref(), Some(Path::new("/x/nvrtc.so")));
}
