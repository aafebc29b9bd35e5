//! The workers of one rank and the barrier between them.
//!
//! The rank's own thread is worker 0. [`Pool::run`] gives all of them one closure and returns when all
//! are done; inside it they meet at [`Worker::meet`]. Waiting spins first, for as long as this process
//! does not have more workers than the machine has processors, then yields, then sleeps.

mod barrier;

use atom_ops::OpsError;
use barrier::{Barrier, Broken};
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// The threads of one rank.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// One worker inside [`Pool::run`].
pub(crate) struct Worker<'p> {
    /// This worker: `0 .. count`; 0 is the rank's thread.
    pub(crate) index: usize,
    /// Workers of the pool.
    pub(crate) count: usize,
    fence: &'p Barrier,
}

struct Shared {
    workers: usize,
    /// Where all workers meet before and after a job.
    gate: Barrier,
    /// Where they meet within a job; broken by a panic.
    fence: Barrier,
    /// The job between the two gates. Written by worker 0 while the others wait at the first one.
    job: UnsafeCell<Option<Job>>,
    /// Set before the first gate to end the threads.
    stop: AtomicBool,
    /// What the first worker that panicked said.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// The lifetime is erased; see `Pool::run` for why that is sound.
type Job = &'static (dyn Fn(&Worker<'_>) + Sync);

// SAFETY: `job` is written only by worker 0 before it passes the gate and read by the others after
// they passed it; the gate orders the two. Everything else is `Sync` by itself.
unsafe impl Sync for Shared {}

impl Pool {
    /// Starts `threads - 1` threads beside the caller's. Worker `i` is bound to `cores[i]`, the caller
    /// included; with no cores given the system places them.
    pub(crate) fn new(threads: usize, cores: &[usize]) -> Result<Self, OpsError> {
        if threads == 0 || threads > THREADS_MAX {
            return Err(OpsError::Device(format!("{threads} threads per rank; use 1 to {THREADS_MAX}")));
        }
        if !cores.is_empty() && cores.len() != threads {
            return Err(OpsError::Device(format!(
                "{} cores for {threads} threads; name one each",
                cores.len()
            )));
        }
        let shared = Arc::new(Shared {
            workers: threads,
            gate: Barrier::new(threads),
            fence: Barrier::new(threads),
            job: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        barrier::workers_joined(threads);
        let mut pool = Self { shared, threads: Vec::with_capacity(threads - 1) };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let started = std::thread::Builder::new()
                .name(format!("atom-cpu-{index}"))
                .spawn(move || serve(&shared, index));
            match started {
                Ok(thread) => pool.threads.push(thread),
                Err(error) => {
                    pool.abandon();
                    return Err(OpsError::Device(format!(
                        "worker {index} of {threads} did not start: {error}"
                    )));
                }
            }
        }
        pool.bind(cores)?;
        Ok(pool)
    }

    /// Workers, the caller's thread included.
    pub(crate) fn workers(&self) -> usize {
        self.shared.workers
    }

    /// Runs `job` once on every worker and returns when all are done. A panic of any of them ends the
    /// job on all (those that wait for it in [`Worker::meet`] are unwound) and is resumed here.
    pub(crate) fn run(&mut self, job: &(dyn Fn(&Worker<'_>) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. No worker uses the job after the second gate, and this
        // function does not return, nor unwind, before it has passed that gate itself.
        let job: Job = unsafe { std::mem::transmute::<&(dyn Fn(&Worker<'_>) + Sync), Job>(job) };
        // SAFETY: all other workers wait at the gate, so nobody reads the cell.
        unsafe { *shared.job.get() = Some(job) };
        shared.gate.pass();
        shared.work(job, 0);
        shared.gate.pass();
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            shared.fence.mend();
            resume_unwind(panic);
        }
    }

    fn bind(&mut self, cores: &[usize]) -> Result<(), OpsError> {
        if cores.is_empty() {
            return Ok(());
        }
        let refused = Mutex::new(None);
        self.run(&|worker| {
            if let Err(error) = bind_this_thread(cores[worker.index]) {
                let text =
                    format!("worker {} can't run on core {}: {error}", worker.index, cores[worker.index]);
                *refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
            }
        });
        let refused = refused.into_inner().unwrap_or_else(PoisonError::into_inner);
        refused.map_or(Ok(()), |text| Err(OpsError::Device(text)))
    }

    /// Ends threads of a pool that never became whole: the missing ones are counted as arrived.
    fn abandon(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for _ in self.threads.len()..self.shared.workers - 1 {
            self.shared.gate.arrive();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.gate.pass();
        for thread in self.threads.drain(..) {
            thread.join().expect("workers catch the panics of their jobs");
        }
        barrier::workers_left(self.shared.workers);
    }
}

impl Worker<'_> {
    /// Waits for all workers of the job; what they wrote before is visible after.
    pub(crate) fn meet(&self) {
        if self.fence.wait().is_err() {
            // Another worker panicked: end here too, without a second message.
            resume_unwind(Box::new(Broken));
        }
    }
}

impl Shared {
    fn work(&self, job: Job, index: usize) {
        let worker = Worker { index, count: self.workers, fence: &self.fence };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(&worker))) {
            let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            if first.is_none() && !panic.is::<Broken>() {
                *first = Some(panic);
            }
            drop(first);
            self.fence.shatter();
        }
    }
}

fn serve(shared: &Shared, index: usize) {
    loop {
        shared.gate.pass();
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: worker 0 wrote the cell before the gate and writes it again only after the next.
        let job = unsafe { (*shared.job.get()).expect("worker 0 passes the gate with a job") };
        shared.work(job, index);
        shared.gate.pass();
    }
}

#[cfg(target_os = "linux")]
fn bind_this_thread(core: usize) -> std::io::Result<()> {
    use std::ffi::{c_int, c_ulong};
    unsafe extern "C" {
        fn sched_setaffinity(thread: c_int, bytes: usize, mask: *const c_ulong) -> c_int;
    }
    let mut mask = [0 as c_ulong; CORES_MAX / c_ulong::BITS as usize];
    let word = mask.get_mut(core / c_ulong::BITS as usize);
    *word.ok_or_else(|| std::io::Error::other(format!("cores are below {CORES_MAX}")))? |=
        1 << (core % c_ulong::BITS as usize);
    // SAFETY: the mask has the length that is passed, is only read, and 0 means the calling thread.
    match unsafe { sched_setaffinity(0, size_of_val(&mask), mask.as_ptr()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(not(target_os = "linux"))]
fn bind_this_thread(_core: usize) -> std::io::Result<()> {
    Err(std::io::Error::other("binding to cores is only known for Linux"))
}

/// Threads of one rank; more would wait at barriers longer than they work.
const THREADS_MAX: usize = 256;

/// Bits of the affinity mask, as glibc's `CPU_SETSIZE`.
#[cfg(target_os = "linux")]
const CORES_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn every_worker_runs_every_job_and_sees_what_others_wrote_before_the_fence() {
        // Also with far more workers than this machine has processors.
        for threads in [1, 2, 3, 33] {
            let mut pool = Pool::new(threads, &[]).unwrap();
            assert_eq!(pool.workers(), threads);
            for _ in 0..20 {
                let ran: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
                pool.run(&|worker| {
                    for round in 1..=5 {
                        ran[worker.index].store(round, Ordering::Relaxed);
                        worker.meet();
                        assert!(ran.iter().all(|r| r.load(Ordering::Relaxed) == round));
                        worker.meet();
                    }
                });
                assert!(ran.iter().all(|r| r.load(Ordering::Relaxed) == 5));
            }
        }
    }

    #[test]
    fn a_panic_of_any_worker_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = Pool::new(3, &[]).unwrap();
        for culprit in [0, 1, 2, 0] {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|worker| {
                    worker.meet();
                    // Quiet: the default hook would print a backtrace into the test's output.
                    if worker.index == culprit {
                        resume_unwind(Box::new(culprit));
                    }
                    worker.meet();
                    worker.meet();
                });
            }));
            assert_eq!(caught.unwrap_err().downcast_ref::<usize>(), Some(&culprit));
            let ran = AtomicUsize::new(0);
            pool.run(&|worker| {
                worker.meet();
                ran.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(ran.into_inner(), 3);
        }
    }

    #[test]
    fn counts_and_cores_that_make_no_sense_are_refused_with_the_numbers() {
        let refused = |threads, cores: &[usize]| Pool::new(threads, cores).err().unwrap().to_string();
        assert!(refused(0, &[]).contains("0 threads"));
        assert!(refused(257, &[]).contains("257"));
        assert!(refused(2, &[0]).contains("1 cores for 2"));
        assert!(refused(2, &[0, 1023]).contains("core 1023"));
    }
}
