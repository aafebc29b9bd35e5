//! A server on the loopback interface that answers as a test tells it.

use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A running server; it ends with its test.
pub(crate) struct FakeServer {
    pub(crate) url: String,
    state: Arc<State>,
    task: JoinHandle<()>,
}

/// What one completion request gets.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    /// Pieces of text, then usage and the end mark.
    Whole(Completion),
    /// Pieces of text, then the connection ends.
    CutOff(Vec<String>),
    /// Pieces of text, then an error event.
    ErrorInStream(Vec<String>, &'static str),
    /// A status with a body.
    Status(u16, &'static str),
    /// 200, JSON, no stream.
    NoStream,
    /// The head of an answer, and then nothing ever.
    Hang,
    /// The connection ends without an answer, and no other is accepted.
    Die,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Completion {
    pub(crate) pieces: Vec<String>,
    /// prompt, cached and completion tokens.
    pub(crate) usage: Option<(u64, u64, u64)>,
    /// Ends the connection after the answer, without having said so.
    pub(crate) hangs_up: bool,
}

struct State {
    bodies: Mutex<Vec<Value>>,
    connections: AtomicUsize,
    models: &'static str,
    answer: Box<AnswerOf>,
}

type AnswerOf = dyn Fn(usize, &Value) -> Answer + Send + Sync;

impl FakeServer {
    /// `answer` gets the number of the completion request, from 0, and its body.
    pub(crate) async fn start(answer: impl Fn(usize, &Value) -> Answer + Send + Sync + 'static) -> Self {
        Self::start_with_models(r#"{"data": [{"id": "tiny"}, {"id": "other"}]}"#, answer).await
    }

    pub(crate) async fn start_with_models(
        models: &'static str,
        answer: impl Fn(usize, &Value) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(State {
            bodies: Mutex::default(),
            connections: AtomicUsize::new(0),
            models,
            answer: Box::new(answer),
        });
        let task = tokio::spawn(accept(listener, Arc::clone(&state)));
        Self { url, state, task }
    }

    /// The bodies of the completion requests so far.
    pub(crate) fn bodies(&self) -> Vec<Value> {
        self.state.bodies.lock().unwrap().clone()
    }

    pub(crate) fn connections(&self) -> usize {
        self.state.connections.load(Ordering::Relaxed)
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The prompt, whichever API carried it.
pub(crate) fn prompt(body: &Value) -> &str {
    body["prompt"].as_str().or_else(|| body["messages"][0]["content"].as_str()).unwrap()
}

/// The prompt's ids, where it is a list of them.
pub(crate) fn ids(body: &Value) -> Option<Vec<u64>> {
    body["prompt"].as_array().map(|ids| ids.iter().map(|id| id.as_u64().unwrap()).collect())
}

/// What a right server says: as many tokens as were asked for, and text that depends on the
/// request alone. Words count twice, and a template adds three; ids count as they are.
pub(crate) fn right(body: &Value) -> Completion {
    if let Some(ids) = ids(body) {
        let tokens = body["max_tokens"].as_u64().unwrap();
        let pieces = (0..tokens).map(|token| format!(" {}-{token}{}", ids[0], body["seed"])).collect();
        return Completion { pieces, usage: Some((ids.len() as u64, 0, tokens)), hangs_up: false };
    }
    let words = prompt(body).split(' ').count() as u64;
    let tokens = body["max_tokens"].as_u64().unwrap();
    let first = prompt(body).split(' ').next().unwrap().to_owned();
    let pieces = (0..tokens).map(|token| format!(" {first}{token}{}", body["seed"])).collect();
    Completion { pieces, usage: Some((2 * words + 3, 1, tokens)), hangs_up: false }
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    let mut open = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                state.connections.fetch_add(1, Ordering::Relaxed);
                open.spawn(serve(accepted.unwrap().0, Arc::clone(&state)));
            }
            Some(ended) = open.join_next() => {
                if ended.unwrap() == Next::Die {
                    return;
                }
            }
        }
    }
}

#[derive(PartialEq)]
enum Next {
    Close,
    Die,
}

async fn serve(stream: TcpStream, state: Arc<State>) -> Next {
    stream.set_nodelay(true).unwrap();
    let mut stream = BufReader::new(stream);
    loop {
        let (mut line, mut head, mut length) = (String::new(), String::new(), 0);
        while stream.read_line(&mut line).await.unwrap_or(0) > 0 && line != "\r\n" {
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            head.push_str(&line);
            line.clear();
        }
        if head.is_empty() {
            return Next::Close;
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.unwrap();
        if head.starts_with("GET /v1/models ") {
            let models = state.models;
            send_json(&mut stream, if models.is_empty() { 404 } else { 200 }, models).await;
            continue;
        }
        let body: Value = serde_json::from_slice(&body).unwrap();
        let number = {
            let mut bodies = state.bodies.lock().unwrap();
            bodies.push(body.clone());
            bodies.len() - 1
        };
        let is_chat = head.starts_with("POST /v1/chat/completions ");
        assert!(is_chat || head.starts_with("POST /v1/completions "), "{head}");
        match (state.answer)(number, &body) {
            Answer::Whole(completion) => {
                send_stream(&mut stream, is_chat, &completion.pieces).await;
                if let Some((prompt, cached, completion)) = completion.usage {
                    let usage = json!({"prompt_tokens": prompt, "completion_tokens": completion,
                        "prompt_tokens_details": {"cached_tokens": cached}});
                    send_event(&mut stream, &json!({"choices": [], "usage": usage}).to_string()).await;
                }
                send_event(&mut stream, "[DONE]").await;
                send(&mut stream, b"0\r\n\r\n").await;
                if completion.hangs_up {
                    return Next::Close;
                }
            }
            Answer::CutOff(pieces) => {
                send_stream(&mut stream, is_chat, &pieces).await;
                return Next::Close;
            }
            Answer::ErrorInStream(pieces, message) => {
                send_stream(&mut stream, is_chat, &pieces).await;
                send_event(&mut stream, &json!({"error": {"message": message}}).to_string()).await;
                send(&mut stream, b"0\r\n\r\n").await;
            }
            Answer::Status(status, message) => {
                let error = json!({"error": {"message": message}}).to_string();
                send_json(&mut stream, status, &error).await;
            }
            Answer::NoStream => send_json(&mut stream, 200, r#"{"choices": [{"text": "x"}]}"#).await,
            Answer::Hang => {
                send_stream(&mut stream, is_chat, &[]).await;
                std::future::pending::<()>().await;
            }
            Answer::Die => return Next::Die,
        }
    }
}

async fn send_json(stream: &mut BufReader<TcpStream>, status: u16, body: &str) {
    let head = format!(
        "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    send(stream, head.as_bytes()).await;
    send(stream, body.as_bytes()).await;
}

/// Head and text of a chunked event stream, in the shape of either API.
async fn send_stream(stream: &mut BufReader<TcpStream>, is_chat: bool, pieces: &[String]) {
    send(stream, b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await;
    if is_chat {
        send_event(stream, r#"{"choices": [{"delta": {"role": "assistant", "content": ""}}]}"#).await;
    }
    for piece in pieces {
        let choice = if is_chat { json!({"delta": {"content": piece}}) } else { json!({"text": piece}) };
        send_event(stream, &json!({"choices": [choice]}).to_string()).await;
    }
}

async fn send_event(stream: &mut BufReader<TcpStream>, data: &str) {
    let event = format!("data: {data}\n\n");
    send(stream, format!("{:x}\r\n{event}\r\n", event.len()).as_bytes()).await;
}

async fn send(stream: &mut BufReader<TcpStream>, bytes: &[u8]) {
    // A client that hangs up early is a client's right.
    stream.get_mut().write_all(bytes).await.ok();
}
