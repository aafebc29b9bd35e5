//! The ring, the writer, and what they say of steps that did not fit.

use super::*;
use atom_group::{GroupState, Lattice, LatticeArgs, TraceEnd, TraceReader, TraceRecord};
use std::sync::{Mutex, mpsc};

/// A file that takes nothing until it is told to, and then everything.
struct Slow {
    bytes: Arc<Mutex<Vec<u8>>>,
    gate: Option<(mpsc::Sender<()>, mpsc::Receiver<()>)>,
}

impl Write for Slow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some((reached, gate)) = self.gate.take() {
            reached.send(()).expect("the test waits");
            gate.recv().expect("the test opens it");
        }
        self.bytes.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Full;

impl Write for Full {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::Error::other("no space left"))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn trace(groups: usize) -> StepTrace {
    let lattice = LatticeArgs { rows_max: 8, max_num_seqs: 4, ..LatticeArgs::default() };
    let state = GroupState::new(Arc::new(Lattice::new(&lattice).unwrap()), 2, true);
    StepTrace::new(TraceHeader::of(&state, groups), Instant::now())
}

fn facts(step: u64) -> [Facts; 2] {
    [1, 2].map(|rows| Facts { step: StepNo(step), decode_rows: rows, ..Facts::default() })
}

/// Group and step number of each step, and the rest of the records as text.
fn read(bytes: &[u8]) -> (Vec<String>, TraceEnd) {
    let mut reader = TraceReader::new(bytes).unwrap();
    let mut records = Vec::new();
    while let Some(record) = reader.read().unwrap() {
        records.push(match record {
            TraceRecord::Step(step) => format!("{}:{}", step.group, step.facts[1].step),
            TraceRecord::Gap { group, steps } => format!("{group} lost {steps}"),
            TraceRecord::Epoch { group, epoch } => format!("{group} epoch {epoch}"),
        });
    }
    (records, reader.end().unwrap())
}

/// What comes of steps that are taken while the file takes nothing.
fn write(groups: usize, steps: impl FnOnce(&StepTrace)) -> Vec<u8> {
    let trace = trace(groups);
    let bytes = Arc::new(Mutex::new(Vec::new()));
    let ((open, gate), (reaches, reached)) = (mpsc::channel(), mpsc::channel());
    let file = Slow { bytes: Arc::clone(&bytes), gate: Some((reaches, gate)) };
    std::thread::scope(|scope| {
        scope.spawn(|| trace.write(file).unwrap());
        // It stops at the header, with an empty ring.
        reached.recv().unwrap();
        steps(&trace);
        open.send(()).unwrap();
        trace.close();
    });
    let bytes = bytes.lock().unwrap();
    bytes.clone()
}

#[test]
fn steps_come_out_as_they_went_in() {
    let bytes = write(2, |trace| {
        for step in 1..=100 {
            (0..2).for_each(|group| trace.step(group, 1, &facts(step), &Ok(GroupStep::Park)));
        }
    });
    let (records, end) = read(&bytes);
    let expected: Vec<_> = (1..=100).flat_map(|step| [format!("0:{step}"), format!("1:{step}")]).collect();
    assert_eq!((records, end), (expected, TraceEnd::Closed));
}

#[test]
fn steps_that_find_no_room_are_counted_in_the_trace() {
    let total = RING_STEPS as u64 + 300;
    let bytes = write(2, |trace| {
        trace.step(1, 1, &facts(1), &Ok(GroupStep::Park));
        (1..=total).for_each(|step| trace.step(0, 1, &facts(step), &Ok(GroupStep::Park)));
        trace.step(1, 1, &facts(2), &Ok(GroupStep::Park));
    });
    let (records, end) = read(&bytes);
    assert_eq!(end, TraceEnd::Closed);
    let of = |group: &str| records.iter().filter(|r| r.starts_with(group)).cloned().collect::<Vec<_>>();
    let (first, second) = (of("0"), of("1"));
    let kept = RING_STEPS as u64 - 1;
    assert_eq!(first.len() as u64, kept + 1);
    assert_eq!(first[first.len() - 1], format!("0 lost {}", total - kept));
    assert_eq!(second, ["1:1", "1 lost 1"]);
}

#[test]
fn steps_after_a_loss_come_after_the_gap() {
    let bytes = write(1, |trace| {
        trace.step(0, 1, &facts(1), &Ok(GroupStep::Park));
        trace.lost[0].fetch_add(3, Ordering::Relaxed);
        trace.step(0, 1, &facts(5), &Ok(GroupStep::Park));
        // Lost before the first step of an epoch, and within one.
        trace.lost[0].fetch_add(1, Ordering::Relaxed);
        trace.step(0, 2, &facts(1), &Ok(GroupStep::Park));
        trace.lost[0].fetch_add(2, Ordering::Relaxed);
        trace.step(0, 3, &facts(3), &Ok(GroupStep::Park));
        // By a thread that lost its seat.
        trace.step(0, 2, &facts(9), &Ok(GroupStep::Park));
    });
    let expected = ["0:1", "0 lost 3", "0:5", "0 lost 1", "0 epoch 2", "0:1", "0 epoch 3", "0 lost 2", "0:3"]
        .map(String::from);
    assert_eq!(read(&bytes), (expected.to_vec(), TraceEnd::Closed));
}

#[test]
fn a_full_disk_stops_the_trace_and_no_step() {
    let trace = trace(1);
    let error = trace.write(Full).unwrap_err();
    assert_eq!(error.to_string(), "no space left");
    for step in 0..RING_STEPS as u64 + 7 {
        trace.step(0, 1, &facts(step), &Ok(GroupStep::Park));
    }
    assert_eq!(trace.lost[0].load(Ordering::Relaxed), 7, "what is in the ring is not lost in the count yet");
}
