//! A hub on the loopback interface that does what a test tells it.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A running server; its threads end with it.
pub(super) struct FakeHub {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Request>>>,
}

/// What a client asked.
#[derive(Clone, Debug, Default)]
pub(super) struct Request {
    pub(super) path: String,
    pub(super) from_byte: Option<usize>,
    pub(super) token: Option<String>,
}

/// What it gets.
pub(super) enum Reply {
    /// The file, or the rest of it from the byte that was asked for.
    File(Vec<u8>),
    /// The file's length, and only this many of its bytes.
    CutFile(Vec<u8>, usize),
    Status(u16),
    Redirect(String),
}

impl FakeHub {
    pub(super) fn start(answer: impl Fn(&Request) -> Reply + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let Some(request) = read_request(&stream) else { return };
                let reply = answer(&request);
                log.lock().unwrap().push(request.clone());
                // A client that hangs up early is a client's right.
                send(&mut stream, &request, reply).ok();
            }
        });
        Self { address, seen }
    }

    pub(super) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(super) fn port(&self) -> u16 {
        self.address.port()
    }

    /// The requests so far.
    pub(super) fn seen(&self) -> Vec<Request> {
        self.seen.lock().unwrap().clone()
    }
}

impl Drop for FakeHub {
    fn drop(&mut self) {
        // An empty request ends the thread.
        TcpStream::connect(self.address).ok();
    }
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut request = Request::default();
    for line in BufReader::new(stream).lines() {
        let line = line.ok()?;
        if line.is_empty() {
            return Some(request);
        }
        if let Some(rest) = line.strip_prefix("GET ") {
            request.path = rest.split(' ').next()?.into();
        }
        if let Some((name, value)) = line.split_once(": ") {
            match name.to_ascii_lowercase().as_str() {
                "range" => {
                    let from = value.strip_prefix("bytes=")?.strip_suffix('-')?;
                    request.from_byte = Some(from.parse().ok()?);
                }
                "authorization" => request.token = Some(value.into()),
                _ => {}
            }
        }
    }
    None
}

fn send(stream: &mut TcpStream, request: &Request, reply: Reply) -> std::io::Result<()> {
    let (status, extra, body, sent) = match reply {
        Reply::Status(status) => (status, String::new(), Vec::new(), 0),
        Reply::Redirect(to) => (302, format!("Location: {to}\r\n"), Vec::new(), 0),
        Reply::CutFile(file, sent) => (200, String::new(), file, sent),
        Reply::File(file) => match request.from_byte {
            Some(from) => {
                let range = format!("Content-Range: bytes {from}-{}/{}\r\n", file.len() - 1, file.len());
                let rest = file[from..].to_vec();
                let all = rest.len();
                (206, range, rest, all)
            }
            None => {
                let all = file.len();
                (200, String::new(), file, all)
            }
        },
    };
    write!(
        stream,
        "HTTP/1.1 {status} X\r\n{extra}Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    )?;
    stream.write_all(&body[..sent])
}
