//! What checks share: random inputs, poisoned outputs, comparison with a reference of higher precision.

use atom_cuda::{
    Compiler, CublasLt, CudaError, Device, DeviceMem, Driver, Element, Kernels, Nvrtc, Program, Queue, Search,
};
use atom_cuda::{SOURCES, Source, Stream};
use std::sync::Arc;
use std::time::Instant;

/// One GPU, with all kernels loaded, and the score.
pub(crate) struct Kit {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) kernels: Kernels,
    pub(crate) cublaslt: Arc<CublasLt>,
    nvrtc: Nvrtc,
    seed: u64,
    passed: usize,
    failed: usize,
}

impl Kit {
    /// Opens the first GPU and compiles all kernels for it.
    pub(crate) fn open(search: &Search, seed: u64) -> Result<Self, CudaError> {
        let driver = Arc::new(Driver::load(search)?);
        let device = Device::open(&driver, 0, 1)?;
        let nvrtc = Nvrtc::load(search)?;
        let compiler = Compiler::new(&nvrtc, &device.arch(), None)?;
        let programs: Vec<_> = SOURCES.iter().flat_map(Source::programs).collect();
        let start = Instant::now();
        let mut kernels = Kernels::new(&device);
        kernels.load(&compiler, &programs, &|_, _| {})?;
        println!(
            "{}, {}, NVRTC {}: {} programs in {:.2} s; seed {seed}",
            device.properties().name,
            device.arch(),
            compiler.version(),
            programs.len(),
            start.elapsed().as_secs_f64()
        );
        let cublaslt = Arc::new(CublasLt::load(search)?);
        Ok(Self { stream: device.stream()?, device, kernels, cublaslt, nvrtc, seed, passed: 0, failed: 0 })
    }

    /// Compiles and loads programs beyond those that sources list.
    pub(crate) fn load(&mut self, programs: &[Program]) -> Result<(), CudaError> {
        let compiler = Compiler::new(&self.nvrtc, &self.device.arch(), None)?;
        self.kernels.load(&compiler, programs, &|_, _| {}).map(drop)
    }

    /// Where launchers put their work.
    pub(crate) fn queue(&self) -> Queue<'_> {
        Queue { kernels: &self.kernels, stream: &self.stream }
    }

    /// A fresh 64-bit number (splitmix64).
    pub(crate) fn word(&mut self) -> u64 {
        self.seed = self.seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.word() % end as u64) as usize
    }

    /// About normal with this standard deviation: the sum of twelve uniform numbers.
    pub(crate) fn random(&mut self, count: usize, scale: f32) -> Vec<f32> {
        let mut one = || {
            let sum: f32 = (0..3)
                .map(|_| {
                    let word = self.word();
                    (0..4).map(|i| (word >> (16 * i) & 0xffff) as f32 / 65536.0).sum::<f32>()
                })
                .sum();
            (sum - 6.0) * scale
        };
        (0..count).map(|_| one()).collect()
    }

    /// Values on the GPU.
    pub(crate) fn upload(&self, values: &[f32], element: Element) -> Result<DeviceMem, CudaError> {
        self.upload_bytes(&element.encode(values))
    }

    /// Words on the GPU.
    pub(crate) fn upload_words(&self, words: &[u32]) -> Result<DeviceMem, CudaError> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.upload_bytes(&bytes)
    }

    /// Bytes on the GPU.
    pub(crate) fn upload_bytes(&self, bytes: &[u8]) -> Result<DeviceMem, CudaError> {
        let memory = DeviceMem::new(&self.device, bytes.len())?;
        memory.write(&self.stream, 0, bytes)?;
        Ok(memory)
    }

    /// A step's header, see `Header` in the prelude.
    pub(crate) fn header(&self, places: &[(usize, u32)]) -> Result<DeviceMem, CudaError> {
        let mut words = [0; 16];
        places.iter().for_each(|&(place, value)| words[place] = value);
        self.upload_words(&words)
    }

    /// Room full of NaN (bytes of 0xff).
    pub(crate) fn poisoned(&self, count: usize, element: Element) -> Result<DeviceMem, CudaError> {
        let memory = DeviceMem::new(&self.device, count * element.bytes())?;
        memory.fill(&self.stream, 0, memory.bytes(), 0xff)?;
        Ok(memory)
    }

    /// All of it, once the stream is done.
    pub(crate) fn download(&self, memory: &DeviceMem, element: Element) -> Result<Vec<f32>, CudaError> {
        Ok(element.decode(&self.download_bytes(memory)?))
    }

    /// All of it as words, once the stream is done.
    pub(crate) fn download_words(&self, memory: &DeviceMem) -> Result<Vec<u32>, CudaError> {
        let bytes = self.download_bytes(memory)?;
        Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// All of it, once the stream is done.
    pub(crate) fn download_bytes(&self, memory: &DeviceMem) -> Result<Vec<u8>, CudaError> {
        let mut bytes = vec![0; memory.bytes()];
        memory.read(&self.stream, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// `|found - expected| / |expected|` (Euclidean) must be at most `bound`. NaN never passes.
    pub(crate) fn near(&mut self, name: &str, found: &[f32], expected: &[f64], bound: f64) {
        if found.len() != expected.len() {
            return self.check(name, false, &format!("{} numbers, not {}", found.len(), expected.len()));
        }
        let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
        let difference = square(&mut found.iter().zip(expected).map(|(&f, e)| f64::from(f) - e));
        let size = square(&mut expected.iter().copied());
        let error = if size == 0.0 { difference.sqrt() } else { (difference / size).sqrt() };
        self.check(name, error <= bound, &format!("error {error:.2e} of {bound:.0e}"));
    }

    /// Words must be equal.
    pub(crate) fn equal(&mut self, name: &str, found: &[u32], expected: &[u32]) {
        let place = (0..found.len().max(expected.len())).find(|&i| found.get(i) != expected.get(i));
        let detail = match place {
            None => String::new(),
            Some(i) => format!("word {i} is {:?}, not {:?}", found.get(i), expected.get(i)),
        };
        self.check(name, place.is_none(), &detail);
    }

    /// Everything from `start` on must still be poison: nothing was written beyond the real rows.
    pub(crate) fn untouched(&mut self, name: &str, found: &[f32], start: usize) {
        let written = found[start..].iter().position(|value| !value.is_nan());
        let detail = written.map_or(String::new(), |i| format!("place {} was written", start + i));
        self.check(name, written.is_none(), &detail);
    }

    /// Counts one check; failed ones are printed.
    pub(crate) fn check(&mut self, name: &str, holds: bool, detail: &str) {
        if holds {
            self.passed += 1;
        } else {
            self.failed += 1;
            println!("FAILED {name}: {detail}");
        }
    }

    /// Runs one family's checks and prints how it went.
    pub(crate) fn family(&mut self, name: &str, checks: fn(&mut Self) -> Result<(), CudaError>) {
        let (passed, failed, start) = (self.passed, self.failed, Instant::now());
        if let Err(error) = checks(self) {
            self.check(name, false, &error.to_string());
        }
        println!(
            "{name}: {} passed, {} failed in {:.2} s",
            self.passed - passed,
            self.failed - failed,
            start.elapsed().as_secs_f64()
        );
    }

    /// The score: passed, failed.
    pub(crate) fn score(&self) -> (usize, usize) {
        (self.passed, self.failed)
    }
}
