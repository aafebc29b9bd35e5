//! Finds the vendor's libraries at run time, so that the program needs none of them to be built or to start.

use crate::error::CudaError;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Where to look. A path that a user named is the only one tried; others are tried in order.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// `ATOM_CUDA_DRIVER`: the driver's file.
    pub driver: Option<PathBuf>,
    /// `ATOM_NVRTC`: NVRTC's file.
    pub nvrtc: Option<PathBuf>,
    /// `ATOM_CUBLASLT`: cuBLASLt's file.
    pub cublaslt: Option<PathBuf>,
    /// Folders of Python packages, whose wheels carry NVRTC and cuBLASLt.
    pub site_packages: Vec<PathBuf>,
}

impl Search {
    /// Reads `ATOM_CUDA_DRIVER`, `ATOM_NVRTC`, `ATOM_CUBLASLT`, `ATOM_PYTHON`, `VIRTUAL_ENV`, `PATH` and
    /// `HOME` through `variable`.
    pub fn from_env(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let file = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self {
            driver: file("ATOM_CUDA_DRIVER"),
            nvrtc: file("ATOM_NVRTC"),
            cublaslt: file("ATOM_CUBLASLT"),
            site_packages: site_packages(&variable),
        }
    }

    /// Files to try for `kind`, in order, and whether a user named the one.
    fn candidates(&self, kind: Kind) -> (Vec<PathBuf>, bool) {
        let named = match kind {
            Kind::Driver => &self.driver,
            Kind::Nvrtc => &self.nvrtc,
            Kind::CublasLt => &self.cublaslt,
        };
        if let Some(named) = named {
            return (vec![named.clone()], true);
        }
        let names = kind.file_names();
        let mut candidates: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
        let mut add = |folder: &Path| candidates.extend(names.iter().map(|name| folder.join(name)));
        if kind == Kind::Driver {
            DRIVER_FOLDERS.iter().for_each(|folder| add(Path::new(folder)));
        } else {
            for packages in &self.site_packages {
                kind.wheel_folders().iter().for_each(|folder| add(&packages.join(folder)));
            }
            TOOLKIT_FOLDERS.iter().for_each(|folder| add(Path::new(folder)));
        }
        (candidates, false)
    }
}

/// The libraries that are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Driver,
    Nvrtc,
    CublasLt,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        self.file_names()[0]
    }

    fn file_names(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1", "libcuda.so"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so"],
        }
    }

    fn what(self) -> &'static str {
        match self {
            Self::Driver => "the NVIDIA driver",
            Self::Nvrtc => "the compiler of the kernels",
            Self::CublasLt => "matrix products",
        }
    }

    /// Where wheels of CUDA 13 put it.
    fn wheel_folders(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &[],
            Self::Nvrtc => &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
            Self::CublasLt => &["nvidia/cu13/lib", "nvidia/cublas/lib"],
        }
    }

    fn variable(self) -> &'static str {
        match self {
            Self::Driver => "ATOM_CUDA_DRIVER",
            Self::Nvrtc => "ATOM_NVRTC",
            Self::CublasLt => "ATOM_CUBLASLT",
        }
    }

    fn advice(self) -> String {
        let bring = match self {
            Self::Driver => "It comes with the NVIDIA driver, version 580 or later",
            Self::Nvrtc => "pip install \"nvidia-cuda-nvrtc==13.0.*\" brings it",
            Self::CublasLt => "pip install \"nvidia-cublas==13.0.*\" brings it",
        };
        format!("{bring}; {} names its file where it lies elsewhere.", self.variable())
    }
}

/// A library that is open, and stays so as long as this lives.
pub(crate) struct Opened {
    kind: Kind,
    library: Library,
    path: String,
    /// Libraries that it opens by name, which the system would not find beside it.
    _companions: Vec<Library>,
}

impl Opened {
    /// The first of the candidates that opens.
    pub(crate) fn find(kind: Kind, search: &Search) -> Result<Self, CudaError> {
        let (candidates, named) = search.candidates(kind);
        let mut tried = Vec::new();
        for path in candidates {
            // What it opens by itself is looked for beside it, so where it lies must not depend on where we are.
            let is_bare = path.components().count() == 1;
            let path = if is_bare { path } else { std::path::absolute(&path).unwrap_or(path) };
            // Bare names go to the system's own search; of full paths, only files that exist are worth a try.
            if !named && path.is_absolute() && !path.exists() {
                tried.push(format!("  {}: no such file", path.display()));
                continue;
            }
            // SAFETY: opening runs the library's initialisers; these are the vendor's own libraries, or a file
            // that the user named.
            match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) } {
                Ok(library) => {
                    let _companions = companions(kind, &path);
                    return Ok(Self { kind, library, path: path.display().to_string(), _companions });
                }
                Err(error) => tried.push(format!("  {}: {}", path.display(), reason(&error))),
            }
        }
        let advice = if named {
            format!("{} names this file, so no other was tried. {}", kind.variable(), kind.advice())
        } else {
            kind.advice()
        };
        Err(CudaError::NoLibrary { library: kind.name(), what: kind.what(), tried, advice })
    }

    /// The file, or the name that the system knew.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// The address of a function as a function pointer type `F`.
    ///
    /// # Safety
    /// `F` must be the type of that function.
    pub(crate) unsafe fn function<F: Copy>(&self, symbol: &str) -> Result<F, CudaError> {
        let missing = || CudaError::NoSymbol {
            library: self.kind.name(),
            path: self.path.clone(),
            symbol: symbol.to_owned(),
        };
        // SAFETY: the caller says that `F` is the function's type.
        unsafe { self.library.get::<F>(symbol.as_bytes()) }.map(|found| *found).map_err(|_| missing())
    }
}

/// NVRTC opens its built-in functions by a bare name when it first compiles. In a wheel they lie beside it, where the
/// system does not look; a library that is open already is found by its name.
fn companions(kind: Kind, path: &Path) -> Vec<Library> {
    let folder = path.parent().filter(|_| kind == Kind::Nvrtc && path.is_absolute());
    let entries = folder.and_then(|folder| std::fs::read_dir(folder).ok());
    let files = entries.into_iter().flatten().filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let builtins = files.filter(|file| {
        file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc-builtins.so"))
    });
    // SAFETY: as for the library itself. One that does not open is missed, and named, when NVRTC asks for it.
    builtins.filter_map(|file| unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) }.ok()).collect()
}

/// What the system's loader said, without repeating the path.
fn reason(error: &libloading::Error) -> String {
    let mut source: &dyn std::error::Error = error;
    while let Some(deeper) = source.source() {
        source = deeper;
    }
    source.to_string()
}

/// Package folders of the Python that a user named, of the active virtual environment, of each `python3` on the
/// path, and of the user and the system.
fn site_packages(variable: &impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> = Vec::new();
    // bin/python3 of a virtual environment is a link to another prefix; both may hold packages.
    let add_python = |python: &Path, prefixes: &mut Vec<PathBuf>| {
        for python in [Some(python.to_owned()), python.canonicalize().ok()].into_iter().flatten() {
            prefixes.extend(python.parent().and_then(Path::parent).map(Path::to_owned));
        }
    };
    if let Some(python) = variable("ATOM_PYTHON") {
        add_python(Path::new(&python), &mut prefixes);
    }
    prefixes.extend(variable("VIRTUAL_ENV").map(PathBuf::from));
    for folder in variable("PATH").iter().flat_map(std::env::split_paths) {
        let python = folder.join("python3");
        if python.is_file() {
            add_python(&python, &mut prefixes);
        }
    }
    prefixes.extend(variable("HOME").map(|home| Path::new(&home).join(".local")));
    prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));
    let mut found = Vec::new();
    for prefix in prefixes {
        for library in ["lib", "lib64"] {
            let Ok(entries) = std::fs::read_dir(prefix.join(library)) else { continue };
            let mut versions: Vec<PathBuf> = entries
                .filter_map(|entry| entry.ok().map(|entry| entry.path()))
                .filter(|path| {
                    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
                })
                .collect();
            versions.sort();
            for version in versions.iter().rev() {
                found.extend(["site-packages", "dist-packages"].map(|name| version.join(name)));
            }
        }
    }
    found.retain(|folder| folder.join("nvidia").is_dir());
    let mut seen = Vec::new();
    found.retain(|folder| {
        let fresh = !seen.contains(folder);
        seen.push(folder.clone());
        fresh
    });
    found
}

/// Where drivers lie that the system's loader does not search: containers, NixOS, WSL.
const DRIVER_FOLDERS: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
];

/// Where installers of the toolkit put libraries.
const TOOLKIT_FOLDERS: &[&str] =
    &["/usr/local/cuda/lib64", "/usr/local/cuda-13.0/lib64", "/opt/cuda/lib64", "/usr/lib/x86_64-linux-gnu"];
