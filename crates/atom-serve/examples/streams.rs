//! Many streams at once in front of an engine that computes nothing: what the front end costs.
//!
//! ```text
//! ulimit -n 4096
//! cargo run --release -p atom-serve --example streams -- --streams 1000 --requests 4000 --tokens 200 --step-ms 50
//! cargo run --release -p atom-serve --example streams -- --streams 1000 --requests 100000 --tokens 8 --step-ms 5
//! ```
//!
//! The server runs here, on two reactor threads as in `atom serve`; the clients are a process of their own,
//! so that CPU time and memory are the server's alone (its simulated engine's thread included). Every client
//! keeps its connection and sends the next request when an answer is complete.

#![allow(clippy::unwrap_used, reason = "a program for measuring: a surprise may end it")]

use atom_base::{FinishReason, ScoredToken, TokenId};
use atom_engine::{EngineLimits, Event, Refusal, Request};
use atom_serve::{
    CacheUse, Condition, Engine, EventSender, EventStream, Health, LaneStep, Layout, Profile, ProfileRefusal,
    SeedSource, Server, ServerOptions, TextModel, serve,
};
use atom_text::{ChatTemplate, Dialect, GgufVocabulary, Tokenizer, TokenizerSource};
use std::collections::HashSet;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

fn main() {
    let load = Load::from_args();
    match load.client {
        Some(address) => client(&load, address),
        None => server(&load),
    }
}

/// What is asked of the server.
#[derive(Clone, Copy)]
struct Load {
    streams: usize,
    requests: usize,
    tokens: u32,
    step: Duration,
    /// The server to send it to; without one, this process is the server.
    client: Option<SocketAddr>,
}

impl Load {
    fn from_args() -> Self {
        let mut load = Self {
            streams: 1000,
            requests: 4000,
            tokens: 200,
            step: Duration::from_millis(50),
            client: None,
        };
        let mut args = std::env::args().skip(1);
        while let Some(name) = args.next() {
            let value = args.next().unwrap_or_else(|| panic!("{name} needs a value"));
            match name.as_str() {
                "--streams" => load.streams = value.parse().unwrap(),
                "--requests" => load.requests = value.parse().unwrap(),
                "--tokens" => load.tokens = value.parse().unwrap(),
                "--step-ms" => load.step = Duration::from_millis(value.parse().unwrap()),
                "--client" => load.client = Some(value.parse().unwrap()),
                _ => panic!("unknown flag {name}"),
            }
        }
        load
    }
}

/// An engine that gives every request a token in each step.
struct Paced {
    limits: EngineLimits,
    layout: Layout,
    arrived: Mutex<Vec<Running>>,
    aborted: Arc<Mutex<HashSet<u64>>>,
    ended: AtomicUsize,
    tokens: AtomicUsize,
}

struct Running {
    id: u64,
    sender: EventSender,
    sent: u32,
    wanted: u32,
}

impl Paced {
    fn new() -> Self {
        Self {
            limits: EngineLimits {
                grammars: false,
                max_model_len: 1 << 16,
                cache_tokens: 1 << 16,
                queue_max: 1 << 16,
                max_num_seqs: 1 << 16,
                vocab_size: 1 << 9,
                lanes: 1,
            },
            layout: Layout::default(),
            arrived: Mutex::default(),
            aborted: Arc::default(),
            ended: AtomicUsize::new(0),
            tokens: AtomicUsize::new(0),
        }
    }

    /// Steps until `requests` have ended, and says what the process holds at every fifth of them.
    fn run(&self, requests: usize, pace: Duration) {
        let mut running: Vec<Running> = Vec::new();
        let (mut next, mut shown) = (Instant::now(), 0);
        while self.ended.load(Ordering::SeqCst) < requests {
            running.append(&mut self.arrived.lock().unwrap());
            let aborted = std::mem::take(&mut *self.aborted.lock().unwrap());
            running.retain_mut(|one| {
                let goes_on = !aborted.contains(&one.id) && self.step(one);
                if !goes_on {
                    self.ended.fetch_add(1, Ordering::SeqCst);
                }
                goes_on
            });
            let fifth = self.ended.load(Ordering::SeqCst) * 5 / requests;
            if fifth > shown {
                shown = fifth;
                println!("{:>9} requests: resident {:>7} KiB", requests * fifth / 5, status_kib("VmRSS:"));
            }
            next = (next + pace).max(Instant::now());
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    }

    /// What one step has for one request; false if that was the end of it.
    fn step(&self, one: &mut Running) -> bool {
        self.tokens.fetch_add(1, Ordering::Relaxed);
        // Two letters, a blank now and then.
        let token = if one.sent % 4 == 3 { TokenId::from(b' ') } else { WORD };
        let token = Event::Token(ScoredToken::bare(token));
        let first = (one.sent == 0).then_some(Event::Started { cached_tokens: 0 });
        one.sent += 1;
        let last = (one.sent == one.wanted).then_some(Event::Finished(FinishReason::Length));
        let goes_on = last.is_none();
        one.sender.send_all(first.into_iter().chain([token]).chain(last)) && goes_on
    }
}

impl Engine for Paced {
    fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    fn submit(&self, request: Request) -> Result<EventStream, Refusal> {
        self.limits.check(&request)?;
        let (id, aborted) = (request.id.0, self.aborted.clone());
        let (sender, stream) = EventStream::new(move || {
            aborted.lock().unwrap().insert(id);
        });
        let one = Running { id, sender, sent: 0, wanted: request.stop.max_tokens };
        self.arrived.lock().unwrap().push(one);
        Ok(stream)
    }

    fn health(&self) -> Health {
        Health { condition: Condition::Ready, lanes: Vec::new() }
    }

    fn pause(&self) {}

    fn resume(&self) {}

    fn drain(&self) {}

    fn is_pausing(&self) -> bool {
        false
    }

    fn is_at_rest(&self) -> bool {
        false
    }

    fn steps_after(&self, _: &[u64]) -> Vec<LaneStep> {
        Vec::new()
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn caches(&self) -> Vec<CacheUse> {
        Vec::new()
    }

    fn start_profile(&self) -> Result<(), ProfileRefusal> {
        Err(ProfileRefusal::Off)
    }

    fn stop_profile(&self) -> Result<Profile, ProfileRefusal> {
        Err(ProfileRefusal::Off)
    }

    fn write_metrics(&self, _: &mut String) {}
}

/// Serves, has the clients run, and says what it took.
fn server(load: &Load) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let engine = Arc::new(Paced::new());
    let server = Server::new(engine.clone(), text_model(), ServerOptions::new("paced", SeedSource::new(7)));
    runtime.spawn(serve(listener, server, std::future::pending()));

    let flags = ["--streams", "--requests", "--tokens", "--client"];
    let values =
        [load.streams.to_string(), load.requests.to_string(), load.tokens.to_string(), address.to_string()];
    let mut clients = Command::new(std::env::current_exe().unwrap());
    clients.args(flags.into_iter().zip(&values).flat_map(|(flag, value)| [flag, value.as_str()]));
    let (start, before) = (Instant::now(), cpu());
    let clients = clients.stdout(Stdio::piped()).spawn().unwrap();
    engine.run(load.requests, load.step);
    let clients = clients.wait_with_output().unwrap();
    let (wall, used) = (start.elapsed().as_secs_f64(), (cpu() - before).as_secs_f64());
    assert!(clients.status.success(), "the clients failed");

    let tokens = engine.tokens.load(Ordering::SeqCst) as f64;
    let frames: f64 = String::from_utf8(clients.stdout).unwrap().trim().parse().unwrap();
    println!("{} streams, {} requests of {} tokens", load.streams, load.requests, load.tokens);
    println!("{wall:.1} s, {:.0} tokens/s, {:.0} frames/s", tokens / wall, frames / wall);
    println!("{used:.2} s of CPU, {:.2} us for each token", used / tokens * 1e6);
    println!("peak resident {} KiB", status_kib("VmHWM:"));
}

/// All clients, on one thread; prints the frames that they read.
fn client(load: &Load, address: SocketAddr) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (left, load) = (Arc::new(AtomicUsize::new(load.requests)), *load);
    let frames = runtime.block_on(async {
        let take = |left: &AtomicUsize| {
            left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
        };
        let mut clients = Vec::new();
        for _ in 0..load.streams {
            let left = left.clone();
            clients.push(tokio::spawn(async move {
                let mut stream = TcpStream::connect(address).await.unwrap();
                let mut frames = 0;
                while take(&left) {
                    stream.write_all(request(load.tokens).as_bytes()).await.unwrap();
                    frames += read_answer(&mut stream).await;
                }
                frames
            }));
        }
        let mut frames = 0;
        for client in clients {
            frames += client.await.unwrap();
        }
        frames
    });
    println!("{frames}");
}

fn request(tokens: u32) -> String {
    let body = format!(
        r#"{{"messages":[{{"role":"user","content":"Say the word again and again."}}],"stream":true,"max_tokens":{tokens}}}"#
    );
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Reads to the end of a chunked answer and counts its frames.
async fn read_answer(stream: &mut TcpStream) -> usize {
    const END: &[u8] = b"\r\n0\r\n\r\n";
    let (mut buffer, mut kept, mut frames) = (vec![0; 16 << 10], 0, 0);
    loop {
        let read = stream.read(&mut buffer[kept..]).await.unwrap();
        assert!(read > 0, "the server closed a connection");
        let bytes = &buffer[..kept + read];
        // A frame ends with an empty line, and lines of HTTP with a carriage return before the line feed. The
        // bytes kept of the last read were counted but for a pair that this one completes.
        frames += bytes[kept.saturating_sub(1)..].windows(2).filter(|pair| pair == b"\n\n").count();
        if bytes.ends_with(END) {
            return frames;
        }
        let tail = bytes.len().saturating_sub(END.len());
        buffer.copy_within(tail..kept + read, 0);
        kept = (kept + read) - tail;
    }
}

/// CPU time of this process, of all its threads, in ticks of 10 ms.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // The name in brackets may have blanks; user and system time are the 12th and 13th field behind it.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}

fn status_kib(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// The bytes, a word and the ends of turns.
fn text_model() -> TextModel {
    let mut next = 0xFF;
    let byte = |byte: u8| match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        _ => {
            next += 1;
            char::from_u32(next).unwrap()
        }
    };
    let mut tokens: Vec<String> = (0..=255).map(byte).map(String::from).collect();
    let mut token_types = vec![1; tokens.len()];
    for (text, kind) in [("wo", 1), ("<|im_start|>", 3), ("<|im_end|>", 3)] {
        tokens.push(text.into());
        token_types.push(kind);
    }
    let source = TokenizerSource::Gguf(GgufVocabulary {
        model: "gpt2".into(),
        pre: "gpt-2".into(),
        merges: vec!["w o".into()],
        eos: Some(tokens.len() as TokenId - 1),
        tokens,
        token_types,
        chat_template: Some(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
             <|im_start|>assistant\n"
                .into(),
        ),
        ..Default::default()
    });
    let tokenizer = Arc::new(Tokenizer::load(&source).unwrap());
    let template = ChatTemplate::load(&source, &tokenizer, None).unwrap();
    TextModel::new(tokenizer, template, Dialect::default())
}

const WORD: TokenId = 256;
