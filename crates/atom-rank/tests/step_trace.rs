//! What is told of steps: the file that `--step-trace` writes, enough to settle every step again, and the last
//! ones that a host keeps of each lane.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_base::SamplingParams;
use atom_group::{Decision, TraceEnd, TraceReader, TraceRecord, TracedStep, settle};
use atom_ops::{Backend, OpsError, StepInputs};
use atom_rank::{HostError, StepRecord};
use common::hooked::{Hooked, Hooks};
use common::{Setup, ask, mesh, request, rest, send, tiny};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

/// What a trace has.
#[derive(Debug, Default)]
struct Seen {
    replays: Vec<u64>, // [groups]
    steps: u64,
    epochs: Vec<u64>,
    ends: u64,
}

fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("atom-step-trace-{}-{name}", std::process::id()))
}

/// Settles every step of the file again, and takes the file away.
fn settle_again(path: &PathBuf) -> (Seen, TraceEnd) {
    let bytes = std::fs::read(path).unwrap();
    let mut reader = TraceReader::new(&bytes).unwrap();
    let header = reader.header().clone();
    assert_eq!(header.state().hash(), header.start_hash);
    let mut states = vec![header.state(); header.groups];
    let mut seen = Seen { replays: vec![0; header.groups], ..Seen::default() };
    while let Some(record) = reader.read().unwrap() {
        let step = match record {
            TraceRecord::Step(step) => step,
            TraceRecord::Gap { group, steps } => panic!("group {group} lost {steps} steps"),
            TraceRecord::Epoch { group, epoch } => {
                states[group] = header.state();
                seen.epochs.push(epoch);
                continue;
            }
        };
        let outcome = settle(&states[step.group], &step.facts).map(|(state, settled)| {
            states[step.group] = state;
            settled
        });
        assert_eq!(step.decision.difference(&Decision::of(&step.facts, &outcome)), None);
        assert_eq!(step.step_hash, TracedStep::step_hash_of(&step.facts, &outcome));
        seen.steps += 1;
        seen.replays[step.group] += u64::from(matches!(step.decision, Decision::Replay { .. }));
        seen.ends += u64::from(step.decision == Decision::Exit);
    }
    (seen, reader.end().unwrap())
}

#[test]
fn every_step_of_every_group_can_be_settled_again() {
    for (name, mesh) in
        [("lockstep", mesh(2, 1, true)), ("replicas", mesh(1, 2, false)), ("tp", mesh(2, 1, false))]
    {
        let path = file(name);
        let setup = Setup { mesh, step_trace: Some(path.clone()), ..Setup::default() };
        let host = setup.start(&tiny("llama"));
        let ask = |at: u32| send(&host, request(&[at + 1; 50], 20, SamplingParams::greedy()));
        let pending: Vec<_> = (0..6).map(ask).collect();
        pending.into_iter().for_each(|pending| assert!(pending.wait().end.unwrap().is_ok()));
        let replays: Vec<_> = host.stats().iter().map(|lane| lane.replays).collect();
        host.shutdown().unwrap();
        let (seen, end) = settle_again(&path);
        std::fs::remove_file(&path).unwrap();
        assert_eq!((end, seen.ends), (TraceEnd::Closed, mesh.groups() as u64), "{name}: {seen:?}");
        // All lanes of a group replay all of its steps.
        let per_group = mesh.lanes_per_group();
        let expected: Vec<_> = replays.chunks(per_group).map(|lanes| lanes[0]).collect();
        assert_eq!(seen.replays, expected, "{name}");
        assert!(expected.iter().all(|&replays| replays >= 20), "{name}: {expected:?}");
    }
}

/// A process that is killed now leaves this behind.
#[test]
fn the_file_is_whole_while_the_host_runs() {
    let path = file("running");
    let setup = Setup { step_trace: Some(path.clone()), ..Setup::default() };
    let host = setup.start(&tiny("llama"));
    let answer = send(&host, request(&[5; 9], 30, SamplingParams::greedy())).wait();
    assert_eq!(answer.tokens.len(), 30);
    // The last step's record is written beside the step, so it is waited for, not timed.
    let mut seen = settle_again(&path);
    while seen.0.replays[0] < 30 {
        std::thread::yield_now();
        seen = settle_again(&path);
    }
    assert!(matches!(seen.1, TraceEnd::Cut { bytes: 0, .. }), "{seen:?}");
    host.shutdown().unwrap();
    std::fs::remove_file(&path).unwrap();
}

/// Fails once.
struct Faulty {
    replays_left: usize,
    done: Arc<AtomicBool>,
}

impl Hooks for Faulty {
    fn before_replay(&mut self, _: usize, _: &StepInputs<'_>) -> Result<(), OpsError> {
        self.replays_left = self.replays_left.saturating_sub(1);
        if self.replays_left == 0 && !self.done.swap(true, Ordering::SeqCst) {
            return Err(OpsError::Device("injected".into()));
        }
        Ok(())
    }
}

#[test]
fn a_fault_is_in_the_trace_and_so_is_what_comes_after_it() {
    for (restarts, epochs) in [(0, vec![]), (1, vec![2])] {
        let path = file(&format!("fault-{restarts}"));
        let setup = Setup {
            mesh: mesh(2, 1, true),
            step_trace: Some(path.clone()),
            rank_restarts_max: restarts,
            ..Setup::default()
        };
        let (cpu, done) = (setup.cpu(), Arc::new(AtomicBool::new(false)));
        let host = setup.start_with(&tiny("llama"), move |seat| {
            // The lane that writes: another's fault may close the group before this one has settled the step.
            let replays_left = if seat.rank.0 == 0 { 10 } else { usize::MAX };
            let hooks = Faulty { replays_left, done: Arc::clone(&done) };
            Ok(Box::new(Hooked::new(cpu(seat)?, hooks)) as Box<dyn Backend>)
        });
        let (first, answered) = mpsc::channel();
        let sink = move |event| drop(first.send(event));
        host.submit(request(&[3; 8], 40, SamplingParams::greedy()), Box::new(sink)).unwrap();
        answered.iter().for_each(drop);
        if restarts > 0 {
            let again = send(&host, request(&[4; 8], 10, SamplingParams::greedy())).wait();
            assert!(again.end.unwrap().is_ok());
        }
        assert_eq!(host.shutdown().is_ok(), restarts > 0);
        let (seen, end) = settle_again(&path);
        std::fs::remove_file(&path).unwrap();
        assert_eq!((end, &seen.epochs), (TraceEnd::Closed, &epochs), "{seen:?}");
        // The step that was lost is in it.
        assert!(seen.replays[0] >= 10, "{seen:?}");
    }
}

#[test]
fn every_lane_keeps_its_last_steps_for_whoever_looks() {
    for (depth, mesh) in [(0, mesh(2, 1, true)), (1, mesh(2, 1, true)), (0, mesh(1, 2, false))] {
        let host = Setup { mesh, depth, prefix_cache: false, ..Setup::default() }.start(&tiny("llama"));
        assert_eq!(host.steps_after(&[]), []);
        let prompt: Vec<_> = (1..=20).collect();
        let mut seen = vec![0, 0];
        for asked in 1..=2 {
            ask(&host, request(&prompt, 10, SamplingParams::greedy()));
            rest(&host);
            let fresh = host.steps_after(&seen);
            assert!(!fresh.is_empty());
            for step in &fresh {
                let last = &mut seen[usize::from(step.lane.0)];
                assert_eq!(step.number, *last + 1, "each once, in order");
                *last = step.number;
                assert!(step.decode_rows + step.prefill_rows <= step.bucket_rows && step.replay_us > 0);
            }
            let sum =
                |rows: fn(&StepRecord) -> u32| fresh.iter().map(|step| u64::from(rows(step))).sum::<u64>();
            // The last token of an answer is never computed.
            assert_eq!(
                (sum(|step| step.prefill_rows), sum(|step| step.decode_rows)),
                (20, 9),
                "request {asked}"
            );
        }
        assert_eq!(host.steps_after(&seen), []);
        let all = host.steps_after(&[]);
        for (lane, stats) in host.stats().iter().enumerate() {
            let of_lane = || all.iter().filter(|step| usize::from(step.lane.0) == lane);
            let rows = |step: &StepRecord| u64::from(step.decode_rows + step.prefill_rows);
            assert_eq!(of_lane().map(rows).sum::<u64>(), stats.real_rows, "lane {lane}");
            let padding = |step: &StepRecord| u64::from(step.bucket_rows) - rows(step);
            assert_eq!(of_lane().map(padding).sum::<u64>(), stats.padding_rows, "lane {lane}");
        }
        if host.lanes_per_group() == 2 {
            let shared = |lane: u16| {
                let of_lane = all.iter().filter(move |step| step.lane.0 == lane);
                of_lane.map(|step| (step.epoch, step.step, step.bucket_rows)).collect::<Vec<_>>()
            };
            assert_eq!(shared(0), shared(1), "one bucket for the whole group");
        }
        host.shutdown().unwrap();
    }
}

#[test]
fn a_trace_that_can_not_be_written_is_refused_at_start() {
    let path = file("no/such/folder");
    let setup = Setup { step_trace: Some(path.clone()), ..Setup::default() };
    match setup.try_start(&tiny("llama")).err() {
        Some(HostError::StepTrace { path: named, .. }) => assert_eq!(named, path),
        other => panic!("{other:?}"),
    }
}
