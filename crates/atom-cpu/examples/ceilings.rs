//! What this processor can do at the most, for judging kernels: bytes read from memory each second, and operations
//! each second of the multiplications that kernels are made of, on all threads at once. A line of JSON.
//!
//! `cargo run --release -p atom-cpu --example ceilings [threads]`

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

/// Of all threads together, far above any cache that is theirs.
const BYTES: usize = 1 << 30;
const HUGE_PAGE: usize = 2 << 20;
/// One thread gets more of the memory's speed from several places at once than from one.
const STREAMS: usize = 4;
/// Figures are the best of so many runs.
const RUNS: usize = 5;
/// Operands of the multiplications: few enough for the first cache.
const OPERANDS: usize = 120;
const TURNS: usize = 200_000;

fn main() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::args().nth(1).map_or(cores, |arg| arg.parse().expect("a number of threads"));
    assert!(threads > 0, "threads must be at least 1");
    let words = (BYTES / threads / HUGE_PAGE).max(1) * HUGE_PAGE / 8;
    let read = best(threads, || Words::new(words), |words| sum(words.all));
    print!("{{\"threads\": {threads}, \"read_gb_s\": {:.2}", (8 * words * threads) as f64 / read / 1e9);
    for (name, operations, run) in products() {
        let seconds = best(threads, || (), |()| run());
        print!(", \"{name}_gop_s\": {:.0}", (operations * TURNS * OPERANDS * threads) as f64 / seconds / 1e9);
    }
    println!("}}");
}

/// Seconds of the fastest run of `work` on all threads at once, each with its own of what `make` makes.
fn best<T>(threads: usize, make: impl Fn() -> T + Sync, work: impl Fn(&T) -> u64 + Sync) -> f64 {
    let (barrier, make, work) = (Barrier::new(threads), &make, &work);
    let one = || {
        let mine = make();
        let run = |_| {
            barrier.wait();
            let start = Instant::now();
            black_box(work(&mine));
            barrier.wait();
            start.elapsed().as_secs_f64()
        };
        (0..RUNS).map(run).fold(f64::INFINITY, f64::min)
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        running.into_iter().map(|thread| thread.join().expect("no thread panics")).fold(0.0, f64::max)
    })
}

/// Memory in huge pages where the system gives them.
struct Words {
    all: &'static mut [u64],
    layout: Layout,
}

impl Words {
    fn new(len: usize) -> Self {
        let layout = Layout::from_size_align(8 * len, HUGE_PAGE).expect("a size below the address space's");
        // SAFETY: the size isn't zero.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        prefer_huge_pages(start, 8 * len);
        // SAFETY: allocated above, zeroed, aligned, and given back in `drop` only.
        let all = unsafe { std::slice::from_raw_parts_mut(start.cast::<u64>(), len) };
        // Written, since pages that nobody wrote to are all the same one.
        all.iter_mut().enumerate().for_each(|(i, word)| *word = i as u64);
        Self { all, layout }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; nobody has the slice any more.
        unsafe { dealloc(self.all.as_mut_ptr().cast(), self.layout) };
    }
}

#[cfg(target_os = "linux")]
fn prefer_huge_pages(start: *mut u8, bytes: usize) {
    use std::ffi::{c_int, c_void};
    unsafe extern "C" {
        fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int;
    }
    const MADV_HUGEPAGE: c_int = 14;
    // SAFETY: the range is ours, and the advice changes no content. A refusal costs speed only.
    unsafe { madvise(start.cast(), bytes, MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn prefer_huge_pages(_start: *mut u8, _bytes: usize) {}

fn sum(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has it.
        return unsafe { sum_wide(words) };
    }
    sum_streams(words)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_wide(words: &[u64]) -> u64 {
    sum_streams(words)
}

#[inline(always)]
fn sum_streams(words: &[u64]) -> u64 {
    let (chunks, _) = words.as_chunks::<8>();
    let each = chunks.len() / STREAMS;
    let mut sums = [[0_u64; 8]; STREAMS];
    for i in 0..each {
        for (stream, sums) in sums.iter_mut().enumerate() {
            let chunk = &chunks[stream * each + i];
            sums.iter_mut().zip(chunk).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
        }
    }
    sums.iter().flatten().fold(0, |all, sum| all.wrapping_add(*sum))
}

/// A kind of multiplication: its name, operations an instruction (a product and a sum are two), and what runs it
/// [`TURNS`] times [`OPERANDS`].
type Product = (&'static str, usize, fn() -> u64);

#[cfg(not(target_arch = "x86_64"))]
fn products() -> Vec<Product> {
    Vec::new()
}

#[cfg(target_arch = "x86_64")]
fn products() -> Vec<Product> {
    use atom_cpu::Isa;
    match Isa::detect() {
        Isa::Portable => Vec::new(),
        Isa::Avx2 => vec![("f32", 16, x86::f32_avx2), ("int8", 64, x86::int8_avx2)],
        Isa::Avx512 | Isa::Amx => vec![("f32", 32, x86::f32_avx512), ("int8", 128, x86::int8_avx512)],
    }
}

/// As many sums as hide the latency, and operands from the first cache, so that no product is known before.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{OPERANDS, TURNS, black_box};
    use std::arch::x86_64::*;

    const SUMS: usize = 10;

    macro_rules! run {
        ($name:ident, $feature:literal, $zero:expr, $filled:expr, $step:expr, $first:expr) => {
            pub(super) fn $name() -> u64 {
                #[target_feature(enable = $feature)]
                fn run() -> u64 {
                    let operands = black_box([$filled; OPERANDS]);
                    let factor = black_box($filled);
                    let mut sums = [$zero; SUMS];
                    for _ in 0..TURNS {
                        // Anew in each turn, for all that the compiler knows: sums of integers it would multiply.
                        let (groups, _) = black_box(&operands).as_chunks::<SUMS>();
                        for group in groups {
                            for (sum, operand) in sums.iter_mut().zip(group) {
                                *sum = $step(*sum, factor, *operand);
                            }
                        }
                    }
                    sums.into_iter().map(|sum| $first(sum)).fold(0, u64::wrapping_add)
                }
                // SAFETY: `products` names it only on a processor that has the instructions.
                unsafe { run() }
            }
        };
    }

    run!(
        f32_avx2,
        "avx2,fma",
        _mm256_setzero_ps(),
        _mm256_set1_ps(1e-3),
        |sum, a, b| _mm256_fmadd_ps(a, b, sum),
        |sum| u64::from(_mm256_cvtss_f32(sum).to_bits())
    );
    // The sums of pairs, in 16 bits: what comes behind, widening them, is the kernel's to keep small.
    run!(
        int8_avx2,
        "avx2",
        _mm256_setzero_si256(),
        _mm256_set1_epi8(3),
        |sum, a, b| _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b)),
        |sum| _mm256_extract_epi64::<0>(sum) as u64
    );
    run!(
        f32_avx512,
        "avx512f",
        _mm512_setzero_ps(),
        _mm512_set1_ps(1e-3),
        |sum, a, b| _mm512_fmadd_ps(a, b, sum),
        |sum| u64::from(_mm512_cvtss_f32(sum).to_bits())
    );
    run!(
        int8_avx512,
        "avx512f,avx512vnni",
        _mm512_setzero_si512(),
        _mm512_set1_epi8(3),
        |sum, a, b| _mm512_dpbusd_epi32(sum, a, b),
        |sum| _mm_cvtsi128_si64(_mm512_castsi512_si128(sum)) as u64
    );
}
