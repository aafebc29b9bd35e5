//! Kernel sources to cubins: NVRTC, many at once, and a folder that remembers.

use crate::api::Nvrtc;
use crate::error::CudaError;
use crate::kernels::{HEADERS, PRELUDE, Source};
use sha2::{Digest, Sha256};
use std::ffi::{CString, c_char, c_int};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A source with the definitions that it is compiled with.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Program {
    /// Name of the [`Source`].
    pub source: &'static str,
    /// `NAME=VALUE` or `NAME`, each a macro.
    pub defines: Vec<String>,
}

impl Program {
    /// A source as it is.
    pub fn plain(source: &'static str) -> Self {
        Self { source, defines: Vec::new() }
    }

    /// A source with definitions.
    pub fn with(source: &'static str, defines: &[&str]) -> Self {
        Self { source, defines: defines.iter().map(|&define| define.to_owned()).collect() }
    }

    fn text(&self) -> Result<&'static str, CudaError> {
        Source::named(self.source).map(|source| source.text)
    }
}

impl std::fmt::Display for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.source)?;
        self.defines.iter().try_for_each(|define| write!(f, " -D{define}"))
    }
}

/// Compiles programs for one architecture.
pub struct Compiler<'a> {
    nvrtc: &'a Nvrtc,
    version: (c_int, c_int),
    arch: String,
    cache: Option<PathBuf>,
}

/// A compiled program.
pub struct Compiled {
    /// What was compiled.
    pub program: Program,
    /// The image for the driver.
    pub cubin: Vec<u8>,
    /// False if it came from the cache.
    pub is_new: bool,
}

impl<'a> Compiler<'a> {
    /// For `arch`, such as `sm_90a`. Without a `cache` folder every program is compiled anew.
    pub fn new(nvrtc: &'a Nvrtc, arch: &str, cache: Option<PathBuf>) -> Result<Self, CudaError> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the places live for the call.
        let result = unsafe { nvrtc.nvrtcVersion(&raw mut major, &raw mut minor) };
        nvrtc.check("nvrtcVersion", result)?;
        Ok(Self { nvrtc, version: (major, minor), arch: arch.to_owned(), cache })
    }

    /// NVRTC's version.
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// All of `programs`, in their order, on as many threads as there are cores. `progress` is called with how
    /// many are done, and of how many.
    pub fn compile(
        &self,
        programs: &[Program],
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Vec<Compiled>, CudaError> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(programs.len());
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = || {
            let mut compiled = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(program) = programs.get(index) else { return Ok(compiled) };
                compiled.push((index, self.one(program)?));
                progress(done.fetch_add(1, Ordering::Relaxed) + 1, programs.len());
            }
        };
        let mut all: Vec<(usize, Compiled)> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let joined = workers.into_iter().map(|w| w.join().expect("compiling does not panic"));
            joined.collect::<Result<Vec<_>, _>>()
        })?
        .into_iter()
        .flatten()
        .collect();
        all.sort_by_key(|(index, _)| *index);
        Ok(all.into_iter().map(|(_, compiled)| compiled).collect())
    }

    fn one(&self, program: &Program) -> Result<Compiled, CudaError> {
        let source = format!("{PRELUDE}\n#line 1 \"{}.cu\"\n{}", program.source, program.text()?);
        let mut options = vec![
            format!("--gpu-architecture={}", self.arch),
            "--std=c++20".to_owned(),
            // Line numbers for profilers cost nothing at run time.
            "--generate-line-info".to_owned(),
        ];
        options.extend(program.defines.iter().map(|define| format!("-D{define}")));
        let key = self.key(&source, &options);
        let file =
            self.cache.as_ref().map(|c| c.join(format!("{}-{}-{key}.cubin", program.source, self.arch)));
        if let Some(cubin) = file.as_deref().and_then(recall) {
            return Ok(Compiled { program: program.clone(), cubin, is_new: false });
        }
        let cubin = self.run(program, &source, &options)?;
        if let Some(file) = &file
            && let Err(error) = remember(file, &cubin)
        {
            // The next start compiles again: slower, and still right.
            tracing::warn!("{} could not be written: {error}", file.display());
        }
        Ok(Compiled { program: program.clone(), cubin, is_new: true })
    }

    /// Changes with anything that the cubin depends on.
    fn key(&self, source: &str, options: &[String]) -> String {
        let mut hash = Sha256::new();
        hash.update(format!("{} {}\n", self.version.0, self.version.1));
        options.iter().for_each(|option| hash.update(format!("{option}\n")));
        HEADERS.iter().for_each(|(name, text)| hash.update(format!("{name}\n{text}\n")));
        hash.update(source);
        hex(&hash.finalize()[..16])
    }

    fn run(&self, program: &Program, source: &str, options: &[String]) -> Result<Vec<u8>, CudaError> {
        let c_string = |text: &str| CString::new(text).expect("kernel sources and options have no 0");
        let (text, name) = (c_string(source), c_string(&format!("{}.cu", program.source)));
        let options: Vec<CString> = options.iter().map(|option| c_string(option)).collect();
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let texts: Vec<CString> = HEADERS.iter().map(|(_, text)| c_string(text)).collect();
        let names: Vec<CString> = HEADERS.iter().map(|(name, _)| c_string(name)).collect();
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (texts, names) = (pointers(&texts), pointers(&names));
        let mut job = Job { nvrtc: self.nvrtc, program: std::ptr::null_mut() };
        let nvrtc = self.nvrtc;
        // SAFETY: all strings end in 0 and live until the end of this function; the library copies them.
        unsafe {
            let result = nvrtc.nvrtcCreateProgram(
                &raw mut job.program,
                text.as_ptr(),
                name.as_ptr(),
                HEADERS.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            );
            nvrtc.check("nvrtcCreateProgram", result)?;
            let result = nvrtc.nvrtcCompileProgram(job.program, options.len() as c_int, options.as_ptr());
            if let Err(error) = nvrtc.check("nvrtcCompileProgram", result) {
                let log = job.log().unwrap_or_default();
                let log = if log.trim().is_empty() { error.to_string() } else { log };
                let source_name = program.to_string();
                return Err(CudaError::Compile { source_name, arch: self.arch.clone(), log });
            }
        }
        job.cubin()
    }
}

/// A program of NVRTC's, destroyed in any case.
struct Job<'a> {
    nvrtc: &'a Nvrtc,
    program: cudarc::nvrtc::sys::nvrtcProgram,
}

impl Job<'_> {
    fn log(&self) -> Result<String, CudaError> {
        let mut size = 0;
        // SAFETY: the program is alive; the second call writes `size` bytes.
        unsafe {
            let result = self.nvrtc.nvrtcGetProgramLogSize(self.program, &raw mut size);
            self.nvrtc.check("nvrtcGetProgramLogSize", result)?;
            let mut log = vec![0_u8; size];
            let result = self.nvrtc.nvrtcGetProgramLog(self.program, log.as_mut_ptr().cast());
            self.nvrtc.check("nvrtcGetProgramLog", result)?;
            log.retain(|&byte| byte != 0);
            Ok(String::from_utf8_lossy(&log).into_owned())
        }
    }

    fn cubin(&self) -> Result<Vec<u8>, CudaError> {
        let mut size = 0;
        // SAFETY: the program is alive; the second call writes `size` bytes.
        unsafe {
            let result = self.nvrtc.nvrtcGetCUBINSize(self.program, &raw mut size);
            self.nvrtc.check("nvrtcGetCUBINSize", result)?;
            let mut cubin = vec![0_u8; size];
            let result = self.nvrtc.nvrtcGetCUBIN(self.program, cubin.as_mut_ptr().cast());
            self.nvrtc.check("nvrtcGetCUBIN", result)?;
            Ok(cubin)
        }
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: nobody else has the handle.
            let _ = unsafe { self.nvrtc.nvrtcDestroyProgram(&raw mut self.program) };
        }
    }
}

/// What was written for a key; nothing if the file is not whole: then it is made again.
pub(crate) fn recall(file: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(file).ok()?;
    let (digest, cubin) = bytes.split_at_checked(DIGEST)?;
    (Sha256::digest(cubin)[..] == *digest).then(|| cubin.to_vec())
}

/// Another process may write the same file or read it: it appears whole or not at all.
pub(crate) fn remember(file: &Path, contents: &[u8]) -> std::io::Result<()> {
    static UNIQUE: AtomicU64 = AtomicU64::new(0);
    let folder = file.parent().expect("the cache is a folder");
    std::fs::create_dir_all(folder)?;
    let unique = format!("{}-{}.part", std::process::id(), UNIQUE.fetch_add(1, Ordering::Relaxed));
    let part = file.with_extension(unique);
    let write = || -> std::io::Result<()> {
        let mut out = std::fs::File::create(&part)?;
        out.write_all(&Sha256::digest(contents))?;
        out.write_all(contents)?;
        out.sync_all()?;
        std::fs::rename(&part, file)
    };
    write().inspect_err(|_| drop(std::fs::remove_file(&part)))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes of a SHA-256.
const DIGEST: usize = 32;

#[cfg(test)]
mod tests;
