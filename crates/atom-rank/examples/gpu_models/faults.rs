//! A GPU that fails, really: each case in a process of its own, since a context that failed stays so.

use crate::common::{Pending, Setup, greedy, request, send, tiny};
use crate::{plan, start_on, the_gpu};
use atom_base::SamplingParams;
use atom_cuda::{CudaError, Device, DeviceMem, Element, Launch, Module, SumOrder};
use atom_engine::{EngineError, Event, Refusal};
use atom_group::Patience;
use atom_rank::{Host, HostError};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

const PLAIN: (Element, SumOrder) = (Element::F32, SumOrder::Fastest);

/// Cases by name, with the part of a text that tells who found the fault.
const CASES: &[(&str, fn())] = &[
    ("trap", || a_sticky_error_answers_everybody("trap_now", "(7")),
    ("write", || a_sticky_error_answers_everybody("write_nowhere", "(7")),
    ("hang", a_step_that_never_ends_is_given_up),
    ("memory", memory_that_is_not_there_is_named),
];

/// Every case in its process; the process must end by itself, and soon.
pub(crate) fn faults() {
    for (name, _) in CASES {
        let start = Instant::now();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([CHILD, name])
            .stdout(Stdio::inherit())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let code = end_of(&mut child);
        println!("  fault {name}: {code:?} after {:.1} s", start.elapsed().as_secs_f64());
        assert_eq!(code, Some(0), "{name}");
    }
}

/// Runs one case, if this process is there for that.
pub(crate) fn run_as_child() -> Option<ExitCode> {
    let mut args = std::env::args().skip(1);
    (args.next()? == CHILD).then(|| {
        let name = args.next().expect("a case is named");
        let (_, case) = CASES.iter().find(|(known, _)| *known == name).expect("it is one of the cases");
        let start = Instant::now();
        case();
        println!("  its work was done after {:.1} s", start.elapsed().as_secs_f64());
        atom_cuda::quit(0)
    })
}

/// Its exit code; none if it had to be killed.
fn end_of(child: &mut Child) -> Option<i32> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if start.elapsed() > CHILD_MAX {
            child.kill().unwrap();
            child.wait().unwrap();
            return None;
        }
        std::thread::park_timeout(Duration::from_millis(10));
    }
}

/// Deadlines are a minute here, so whoever finds the fault earlier has asked the driver or made a call that failed.
fn a_sticky_error_answers_everybody(kernel: &str, code: &str) {
    let patience = Patience { min: Duration::from_secs(60), first: Duration::from_secs(60) };
    let (host, pending, device) = under_way(patience);
    launch(&device, kernel, 1);
    let since = Instant::now();
    let end = end(&pending);
    println!("  {kernel}: answered after {:.1} ms: {end}", since.elapsed().as_secs_f64() * 1e3);
    assert!(end.contains("cu") && end.contains(code), "{end}");
    refuses_everything(host);
}

fn a_step_that_never_ends_is_given_up() {
    let patience = Patience { min: Duration::from_secs(1), first: Duration::from_secs(1) };
    let (host, pending, device) = under_way(patience);
    let since = Instant::now();
    // All threads that the GPU holds at a time.
    launch(&device, "spin", 2 * device.properties().processors);
    let end = end(&pending);
    println!("  spin: answered after {:.2} s: {end}", since.elapsed().as_secs_f64());
    assert!(end.contains("a step did not end in"), "{end}");
    refuses_everything(host);
}

/// A host with two requests that have begun, and its GPU for others.
fn under_way(patience: Patience) -> (Host, [Pending; 2], Device) {
    let setup =
        Setup { poison: false, depth: 1, max_model_len: 4096, pages: 1200, patience, ..Setup::default() };
    let gpu = the_gpu();
    let device = gpu.device().clone();
    let host = start_on(vec![gpu], PLAIN, &setup, &tiny("qwen3")).unwrap();
    greedy(&host, &[1, 2, 3], 8);
    let pending = [5, 6].map(|token| send(&host, request(&[token, 7], 4000, SamplingParams::greedy())));
    for pending in &pending {
        while !matches!(pending.next(), Event::Token(_)) {}
    }
    (host, pending, device)
}

/// How all of them ended: by one error.
fn end(pending: &[Pending]) -> String {
    let ends = pending.iter().map(|pending| {
        loop {
            match pending.next() {
                Event::Failed(EngineError::Rank(text)) => break text,
                Event::Failed(_) | Event::Finished(_) => panic!("it ended without the fault"),
                _ => {}
            }
        }
    });
    let ends: Vec<String> = ends.collect();
    assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    ends[0].clone()
}

fn refuses_everything(host: Host) {
    assert!(host.health().fault.is_some(), "health is red");
    let refused = host.submit(request(&[1], 1, SamplingParams::greedy()), Box::new(|_| {}));
    assert!(matches!(refused, Err(Refusal::Closed(_))), "{refused:?}");
    // What `atom serve` makes its exit code of.
    assert!(host.shutdown().is_err());
}

/// Puts a kernel of this file beside what the host runs.
fn launch(device: &Device, kernel: &str, blocks: u32) {
    device.bind().unwrap();
    let module = Module::load(device, "faults", PTX.as_bytes()).unwrap();
    let (kernel, stream) = (module.kernel(kernel).unwrap(), device.stream().unwrap());
    // SAFETY: none of them has parameters; what they break is this process's own.
    unsafe { kernel.launch(&stream, Launch::new(blocks, 1024), &[]) }.unwrap();
    // Giving them back waits for the kernel.
    std::mem::forget((module, kernel, stream));
}

fn memory_that_is_not_there_is_named() {
    let (setup, checkpoint) = (Setup { poison: false, depth: 1, ..Setup::default() }, tiny("qwen3"));
    let gpu = the_gpu();
    let device = gpu.device().clone();
    let plan = plan(&setup, &checkpoint, PLAIN, device.properties(), &setup.mesh.seats().next().unwrap());
    let least = plan.sizes.fixed() + 2 * plan.sizes.page;
    let (free, total) = device.memory().unwrap();
    // Shares of the memory that are too small, and too large for what others leave.
    let error = plan.sizes.pages_within(gpu.budget(1e-4).unwrap()).unwrap_err();
    println!("  too small a share: {error}");
    assert!(matches!(error, CudaError::Memory(_)) && error.to_string().contains("--gpu-memory-utilization"));
    // They leave enough for code and the workspace, and too little for what comes then.
    let others = DeviceMem::new(&device, free as usize - least * 3 / 4).unwrap();
    let error = plan.sizes.pages_within(gpu.budget(1.0).unwrap()).unwrap_err();
    println!("  others have the memory: {error}");
    assert!(matches!(error, CudaError::Memory(_)), "{error}");
    // A plan that was made before they came.
    let error = start_on(vec![gpu], PLAIN, &setup, &checkpoint).err().unwrap();
    println!("  planned before others came: {error}");
    assert!(matches!(error, HostError::Rank { .. }) && error.to_string().contains("are free"), "{error}");
    let too_much = DeviceMem::new(&device, total as usize).err().unwrap();
    assert!(too_much.is_out_of_memory() && too_much.to_string().contains(&total.to_string()), "{too_much}");
    // Nothing of that is a failure of the GPU.
    drop(others);
    let host = start_on(vec![the_gpu()], PLAIN, &setup, &checkpoint).unwrap();
    assert_eq!(greedy(&host, &[1, 2, 3], 8).len(), 8);
}

/// Asks this program to be one case.
const CHILD: &str = "--fault";
/// Far more than any of them takes: a process that waits for a dead GPU is found, and killed.
const CHILD_MAX: Duration = Duration::from_secs(20);
/// The driver compiles it.
const PTX: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry trap_now() {
  trap;
}
.visible .entry write_nowhere() {
  .reg .u64 %place;
  .reg .u32 %word;
  mov.u64 %place, 64;
  mov.u32 %word, 1;
  st.volatile.global.u32 [%place], %word;
  ret;
}
.visible .entry spin() {
  .reg .u32 %time;
again:
  mov.u32 %time, %clock;
  bra.uni again;
}
\0";
