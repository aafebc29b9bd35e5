//! A client that sends exactly the bytes it is told to, and reads what HTTP/1.1 answers.

use crate::document;
use serde_json::Value;
use std::net::SocketAddr;
use std::pin::Pin;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// One connection.
pub(crate) struct Client {
    stream: BufReader<Pin<Box<dyn Duplex>>>,
}

/// What a connection may lie on.
pub(crate) trait Duplex: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Duplex for S {}

/// A response's head, and its body where it was read to the end.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address).await.unwrap())
    }

    pub(crate) fn over(stream: impl Duplex + 'static) -> Self {
        Self { stream: BufReader::new(Box::pin(stream)) }
    }

    /// Sends nothing any more, and still reads.
    pub(crate) async fn half_close(&mut self) {
        self.stream.get_mut().shutdown().await.unwrap();
    }

    /// Everything until the server closes the connection.
    pub(crate) async fn rest(&mut self) -> String {
        let mut bytes = Vec::new();
        // A reset ends it as well.
        let _ = self.stream.read_to_end(&mut bytes).await;
        String::from_utf8(bytes).unwrap()
    }

    /// Some more of what comes, `bytes` at the most; nothing once the server has closed the connection.
    pub(crate) async fn some(&mut self, bytes: u64) -> Vec<u8> {
        let mut some = Vec::new();
        let mut left = (&mut self.stream).take(bytes);
        // A reset is an end as well.
        let _ = left.read_to_end(&mut some).await;
        some
    }

    /// Sends a request without reading anything.
    pub(crate) async fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if method == "POST" {
            head.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        // In one piece: a second small write would wait for the acknowledgement of the first.
        self.write(&[head.as_bytes(), b"\r\n", body].concat()).await;
    }

    /// Sends raw bytes. A server that stopped listening is found when reading.
    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        let _ = self.stream.get_mut().write_all(bytes).await;
    }

    /// Posts JSON, and holds the answer to the OpenAPI document.
    pub(crate) async fn post(&mut self, path: &str, body: &Value) -> Response {
        self.send("POST", path, &[JSON], body.to_string().as_bytes()).await;
        let response = self.response().await;
        document::check("POST", path, Some(body), &response).await;
        response
    }

    /// The same for what is only asked.
    pub(crate) async fn get(&mut self, path: &str) -> Response {
        self.send("GET", path, &[], b"").await;
        let response = self.response().await;
        document::check("GET", path, None, &response).await;
        response
    }

    /// Reads a head; the body stays in the connection.
    pub(crate) async fn head(&mut self) -> Response {
        let status = self.line().await;
        let status =
            status.split(' ').nth(1).unwrap_or_else(|| panic!("no status in {status:?}")).parse().unwrap();
        let mut headers = Vec::new();
        loop {
            let line = self.line().await;
            let Some((name, value)) = line.split_once(':') else {
                return Response { status, headers, body: Vec::new() };
            };
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    /// Reads a whole response.
    pub(crate) async fn response(&mut self) -> Response {
        let mut response = self.head().await;
        if let Some(length) = response.header("content-length") {
            response.body = vec![0; length.parse().unwrap()];
            self.stream.read_exact(&mut response.body).await.unwrap();
        } else {
            while let Some(chunk) = self.chunk().await {
                response.body.extend(chunk);
            }
        }
        response
    }

    /// The next chunk of a chunked body; `None` at its end.
    pub(crate) async fn chunk(&mut self) -> Option<Vec<u8>> {
        let length = usize::from_str_radix(&self.line().await, 16).unwrap();
        let mut chunk = vec![0; length + 2];
        self.stream.read_exact(&mut chunk).await.unwrap();
        chunk.truncate(length);
        (length > 0).then_some(chunk)
    }

    /// True when the server has closed the connection and nothing is left to read.
    pub(crate) async fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]).await, Ok(0) | Err(_))
    }

    async fn line(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).await.unwrap();
        line.trim_end().to_owned()
    }
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {:?}", self.text()))
    }

    /// The error object of a failed request.
    pub(crate) fn error(&self) -> Value {
        let error = self.json()["error"].clone();
        for field in ["message", "type"] {
            assert!(error[field].is_string(), "no {field} in {error}");
        }
        for field in ["param", "code"] {
            assert!(error.get(field).is_some(), "no {field} in {error}");
        }
        error
    }

    /// The payloads of an event stream, `[DONE]` included; each frame is checked on the way.
    pub(crate) fn events(&self) -> Vec<&str> {
        assert_eq!(self.status, 200, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("text/event-stream; charset=utf-8"));
        let text = self.text().strip_suffix("\n\n").expect("a frame ends with a blank line");
        text.split("\n\n")
            .filter(|frame| !frame.starts_with(':'))
            .map(|frame| {
                let payload = frame.strip_prefix("data: ").unwrap_or_else(|| panic!("frame {frame:?}"));
                assert!(!payload.contains(['\n', '\r']), "a line break in {payload:?}");
                payload
            })
            .collect()
    }

    /// The events of a stream of named events: name and data, which repeats it.
    pub(crate) fn named_events(&self) -> Vec<(String, Value)> {
        assert_eq!(self.status, 200, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("text/event-stream; charset=utf-8"));
        let text = self.text().strip_suffix("\n\n").expect("an event ends with a blank line");
        text.split("\n\n")
            .filter(|event| !event.starts_with(':'))
            .map(|event| {
                let (name, data) = event.split_once('\n').unwrap_or_else(|| panic!("event {event:?}"));
                let name = name.strip_prefix("event: ").unwrap_or_else(|| panic!("event {event:?}"));
                let data = data.strip_prefix("data: ").unwrap_or_else(|| panic!("event {event:?}"));
                let data: Value = serde_json::from_str(data).unwrap();
                assert_eq!(data["type"], name);
                (name.to_owned(), data)
            })
            .collect()
    }

    /// The chunks of a stream that ended well.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop(), Some("[DONE]"));
        events.iter().map(|payload| serde_json::from_str(payload).unwrap()).collect()
    }
}

pub(crate) const JSON: (&str, &str) = ("content-type", "application/json");
