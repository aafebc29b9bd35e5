use super::*;
use crate::record::Head;
use atom_telemetry::Endpoint;
use axum::http::StatusCode;
use std::sync::mpsc::Sender;

fn entry(id: &str) -> Entry {
    let head = Head {
        id: id.into(),
        peer: None,
        endpoint: Endpoint::Other,
        method: String::new(),
        path: String::new(),
    };
    Entry::refused(head, StatusCode::BAD_REQUEST)
}

fn start(target: Target) -> (RequestLog, Arc<ServeMetrics>) {
    let metrics = Arc::new(ServeMetrics::new());
    (LogSink { target, content: false }.start(metrics.clone(), Arc::default()), metrics)
}

fn dropped(metrics: &ServeMetrics) -> u64 {
    let mut text = String::new();
    metrics.write(&mut text);
    let line = text.lines().find(|line| line.starts_with("atom_request_log_dropped_total ")).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

fn ids(text: &str) -> Vec<String> {
    let id = |line: &str| serde_json::from_str::<Value>(line).unwrap()["id"].as_str().unwrap().to_owned();
    text.lines().filter(|line| !line.is_empty()).map(id).collect()
}

/// A disk that says when it is asked to write, and does so when it is let.
struct SlowDisk {
    asked: Mutex<Sender<()>>,
    let_go: Mutex<Receiver<()>>,
    written: Arc<Mutex<Vec<u8>>>,
}

impl Write for SlowDisk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.asked.lock().unwrap().send(()).unwrap();
        // Once the test has let go for good, writes are as fast as any.
        let _ = self.let_go.lock().unwrap().recv();
        self.written.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_disk_that_is_too_slow_costs_entries_and_never_a_request() {
    let ((asked, is_asked), (go, let_go)) = (channel(), channel());
    let written = Arc::new(Mutex::new(Vec::new()));
    let disk = SlowDisk { asked: Mutex::new(asked), let_go: Mutex::new(let_go), written: written.clone() };
    let (log, metrics) = start(Target::Test(Box::new(disk)));
    log.write(entry("first"));
    is_asked.recv().unwrap();
    // The thread is in the disk now, and the queue is empty.
    for number in 0..QUEUE_ENTRIES_MAX + 7 {
        log.write(entry(&number.to_string()));
    }
    assert_eq!(dropped(&metrics), 7);
    drop(go);
    wait_for_lines(&is_asked, &written, QUEUE_ENTRIES_MAX + 1);
    drop(log);
    let text = String::from_utf8(written.lock().unwrap().clone()).unwrap();
    assert_eq!(ids(&text).len(), QUEUE_ENTRIES_MAX + 1);
}

/// Waits until so many lines are written.
fn wait_for_lines(is_asked: &Receiver<()>, written: &Mutex<Vec<u8>>, lines: usize) {
    let count = || written.lock().unwrap().iter().filter(|&&byte| byte == b'\n').count();
    while count() < lines {
        // Every write asks once, and may not have written yet.
        let _ = is_asked.recv_timeout(Duration::from_millis(1));
    }
}

/// A disk that is full now and then.
struct FullDisk {
    outcomes: Vec<bool>,
    written: Arc<Mutex<Vec<u8>>>,
    done: Mutex<Sender<()>>,
}

impl Write for FullDisk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let outcome = self.outcomes.remove(0);
        // Half a line gets through.
        let taken = if outcome { bytes.len() } else { bytes.len() / 2 };
        self.written.lock().unwrap().extend_from_slice(&bytes[..taken]);
        self.done.lock().unwrap().send(()).unwrap();
        if outcome { Ok(taken) } else { Err(io::ErrorKind::StorageFull.into()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn entries_that_a_full_disk_cuts_are_counted_and_spoil_no_other() {
    let (done, is_done) = channel();
    let written = Arc::new(Mutex::new(Vec::new()));
    let disk = FullDisk {
        outcomes: vec![true, false, false, true],
        written: written.clone(),
        done: Mutex::new(done),
    };
    let (log, metrics) = start(Target::Test(Box::new(disk)));
    for id in ["a", "b", "c", "d"] {
        log.write(entry(id));
        // One write each.
        is_done.recv().unwrap();
    }
    drop(log);
    assert_eq!(dropped(&metrics), 2);
    let text = String::from_utf8(written.lock().unwrap().clone()).unwrap();
    let whole = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let ids: Vec<Value> = whole.map(|entry| entry["id"].clone()).collect();
    assert_eq!(ids, ["a", "d"], "{text}");
}

#[test]
fn a_file_that_was_moved_away_is_opened_anew() {
    let path = std::env::temp_dir().join(format!("atom-reopen-{}.jsonl", std::process::id()));
    let old = path.with_extension("old");
    let sink = LogSink::file(&path).unwrap();
    let log = sink.start(Arc::new(ServeMetrics::new()), Arc::default());
    log.write(entry("before"));
    std::fs::rename(&path, &old).unwrap();
    log.write(entry("moved"));
    log.reopen();
    log.write(entry("after"));
    drop(log);
    let read = |path: &Path| ids(&std::fs::read_to_string(path).unwrap());
    assert_eq!((read(&old), read(&path)), (vec!["before".into(), "moved".into()], vec!["after".to_owned()]));
    for path in [old, path] {
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_path_that_can_not_be_written_is_found_at_start() {
    assert!(LogSink::file(Path::new("/no/such/folder/log")).is_err());
}
