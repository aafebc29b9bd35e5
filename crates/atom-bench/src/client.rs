//! One keep-alive connection that sends completions and times their streams.

use crate::error::{Failure, FailureKind};
use crate::options::Endpoint;
use crate::prompt::Prompt;
use crate::sse::EventParser;
use crate::target::Target;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// What all requests of a bench have in common.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) target: Target,
    pub(crate) api_key: Option<String>,
    pub(crate) model: String,
    pub(crate) endpoint: Endpoint,
    pub(crate) ignore_eos: bool,
    pub(crate) timeout: Duration,
}

/// One request.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// Position in the workload.
    pub(crate) number: usize,
    pub(crate) prompt: Prompt,
    pub(crate) max_tokens: u32,
    pub(crate) temperature: f32,
    pub(crate) seed: Option<u64>,
}

/// One answer, timed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    /// None: the answer held no text at all.
    pub(crate) ttft: Option<Duration>,
    /// From each piece of text to the next.
    pub(crate) gaps: Vec<Duration>,
    pub(crate) e2e: Duration,
    pub(crate) prompt_tokens: Option<u64>,
    pub(crate) cached_tokens: Option<u64>,
    /// As the server counted; none when it sent no usage.
    pub(crate) completion_tokens: Option<u64>,
    pub(crate) text: String,
}

/// A client with a connection of its own.
#[derive(Debug)]
pub(crate) struct Client {
    call: Arc<Call>,
    /// Taken out while a request runs, so that a request that is dropped half-way takes its
    /// half-read connection with it.
    idle: Option<SendRequest<Full<Bytes>>>,
}

/// A server on this machine or the next one answers within milliseconds.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Of an error's body, this much is read.
const ERROR_BYTES_MAX: usize = 64 << 10;
/// Of an error's text, this much is shown.
const ERROR_CHARS_MAX: usize = 200;
/// A list of models, read whole.
const MODELS_BYTES_MAX: usize = 4 << 20;

impl Client {
    pub(crate) fn new(call: Arc<Call>) -> Self {
        Self { call, idle: None }
    }

    /// Sends a job and reads its answer to the end, within the call's time limit.
    pub(crate) async fn complete(&mut self, job: &Job) -> Result<Sample, Failure> {
        let limit = self.call.timeout;
        tokio::time::timeout(limit, self.complete_untimed(job)).await.unwrap_or_else(|_| {
            Err(Failure::new(FailureKind::Timeout, format!("no end within {} s", limit.as_secs_f64())))
        })
    }

    /// The first model that the server lists.
    pub(crate) async fn first_model(&mut self) -> Result<String, Failure> {
        #[derive(Deserialize)]
        struct Models {
            data: Vec<Model>,
        }
        #[derive(Deserialize)]
        struct Model {
            id: String,
        }
        let (response, sender) = self.send(Method::GET, "/v1/models", Bytes::new()).await?;
        let body = whole_body(response, MODELS_BYTES_MAX).await?;
        self.idle = Some(sender);
        let models: Models = serde_json::from_slice(&body)
            .map_err(|error| Failure::new(FailureKind::Protocol, format!("no list of models: {error}")))?;
        let first = models.data.into_iter().next();
        first
            .map(|model| model.id)
            .ok_or_else(|| Failure::new(FailureKind::Protocol, "the list of models is empty"))
    }

    async fn complete_untimed(&mut self, job: &Job) -> Result<Sample, Failure> {
        let body = Bytes::from(self.body(job).to_string());
        let path = self.call.endpoint.path();
        let started = Instant::now();
        let (mut response, sender) = self.send(Method::POST, path, body).await?;
        let kind = response.headers().get(hyper::header::CONTENT_TYPE);
        if !kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream")) {
            let kind = kind.map_or("no content type".into(), |kind| format!("{kind:?}"));
            return Err(Failure::new(
                FailureKind::Protocol,
                format!("{kind} instead of \"text/event-stream\""),
            ));
        }
        let mut parser = EventParser::default();
        let mut stream = Stream::new(started);
        while let Some(frame) = response.frame().await {
            let frame = frame.map_err(|error| stream.cut_off(&with_causes(&error)))?;
            if let Some(bytes) = frame.data_ref() {
                let now = Instant::now();
                parser.push(bytes, |data| stream.take(data, now))?;
            }
        }
        let sample = stream.finish()?;
        self.idle = Some(sender);
        Ok(sample)
    }

    fn body(&self, job: &Job) -> serde_json::Value {
        let mut body = json!({
            "model": self.call.model,
            "max_tokens": job.max_tokens,
            "temperature": job.temperature,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        match (self.call.endpoint, &job.prompt) {
            (Endpoint::Completions, Prompt::Text(text)) => body["prompt"] = text.as_str().into(),
            (Endpoint::Completions, Prompt::Ids(ids)) => body["prompt"] = ids.as_slice().into(),
            (Endpoint::Chat, Prompt::Text(text)) => {
                body["messages"] = json!([{"role": "user", "content": text}]);
            }
            (Endpoint::Chat, Prompt::Ids(_)) => unreachable!("refused with the options"),
        }
        if let Some(seed) = job.seed {
            body["seed"] = seed.into();
        }
        if self.call.ignore_eos {
            body["ignore_eos"] = true.into();
        }
        body
    }

    /// Sends a request and gives the head of a successful response, with the connection to put back
    /// once its body has been read.
    ///
    /// A server may close an idle connection at any time: then, and only then, it is sent once more.
    async fn send(
        &mut self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(Response<Incoming>, SendRequest<Full<Bytes>>), Failure> {
        let idle = self.idle.take().filter(|sender| !sender.is_closed());
        let was_idle = idle.is_some();
        let mut sender = match idle {
            Some(sender) => sender,
            None => self.connect().await?,
        };
        let mut answer = self.send_once(&mut sender, &method, path, &body).await;
        if was_idle && answer.is_err() {
            sender = self.connect().await?;
            answer = self.send_once(&mut sender, &method, path, &body).await;
        }
        let response = answer.map_err(|error| {
            Failure::new(FailureKind::Closed, format!("no answer: {}", with_causes(&error)))
        })?;
        let status = response.status();
        if status != StatusCode::OK {
            let said = whole_body(response, ERROR_BYTES_MAX).await.unwrap_or_default();
            return Err(Failure::new(FailureKind::Status(status.as_u16()), error_text(&said)));
        }
        Ok((response, sender))
    }

    async fn send_once(
        &self,
        sender: &mut SendRequest<Full<Bytes>>,
        method: &Method,
        path: &str,
        body: &Bytes,
    ) -> hyper::Result<Response<Incoming>> {
        let mut request = Request::new(Full::new(body.clone()));
        *request.method_mut() = method.clone();
        *request.uri_mut() = self.call.target.path(path).parse().expect("a parsed URL's path and a constant");
        let headers = request.headers_mut();
        let mut set = |name: hyper::header::HeaderName, value: &str| {
            // The user's key may hold what no header can; the server will then say 401.
            if let Ok(value) = value.parse() {
                headers.insert(name, value);
            }
        };
        set(hyper::header::HOST, &self.call.target.authority());
        set(hyper::header::USER_AGENT, concat!("atom-bench/", env!("CARGO_PKG_VERSION")));
        if *method == Method::POST {
            set(hyper::header::CONTENT_TYPE, "application/json");
        }
        if let Some(key) = &self.call.api_key {
            set(hyper::header::AUTHORIZATION, &format!("Bearer {key}"));
        }
        sender.ready().await?;
        sender.send_request(request).await
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, Failure> {
        let failed = |why: String| Failure::new(FailureKind::Connect, why);
        let stream = tokio::time::timeout(CONNECT_MAX, TcpStream::connect(self.call.target.socket()))
            .await
            .map_err(|_| failed(format!("none within {} s", CONNECT_MAX.as_secs())))?
            .map_err(|error| failed(error.to_string()))?;
        stream.set_nodelay(true).map_err(|error| failed(error.to_string()))?;
        let (sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| failed(error.to_string()))?;
        // It ends when the sender is dropped or the server hangs up; the sender hears of errors.
        tokio::spawn(connection);
        Ok(sender)
    }
}

/// An answer as it grows.
struct Stream {
    started: Instant,
    last_piece: Option<Instant>,
    last_event: Instant,
    is_finished: bool,
    sample: Sample,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning_content: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

impl Stream {
    fn new(started: Instant) -> Self {
        Self { started, last_piece: None, last_event: started, is_finished: false, sample: Sample::default() }
    }

    fn take(&mut self, data: &[u8], now: Instant) -> Result<(), Failure> {
        self.last_event = now;
        if data == b"[DONE]" {
            self.is_finished = true;
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_slice(data).map_err(|error| {
            let shown = shorten(&String::from_utf8_lossy(data));
            Failure::new(FailureKind::Protocol, format!("an event that is no chunk ({error}): {shown}"))
        })?;
        if chunk.error.is_some() {
            return Err(Failure::new(FailureKind::InStream, error_text(data)));
        }
        for choice in chunk.choices {
            self.is_finished |= choice.finish_reason.is_some();
            let delta = choice.delta.map(|delta| [delta.reasoning_content, delta.content]);
            let pieces = delta.into_iter().flatten().chain([choice.text]).flatten();
            let before = self.sample.text.len();
            pieces.for_each(|piece| self.sample.text.push_str(&piece));
            if self.sample.text.len() > before {
                match self.last_piece {
                    None => self.sample.ttft = Some(now - self.started),
                    Some(last) => self.sample.gaps.push(now - last),
                }
                self.last_piece = Some(now);
            }
        }
        if let Some(usage) = chunk.usage {
            self.sample.prompt_tokens = usage.prompt_tokens;
            self.sample.completion_tokens = usage.completion_tokens;
            self.sample.cached_tokens = usage.prompt_tokens_details.and_then(|details| details.cached_tokens);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Sample, Failure> {
        if !self.is_finished {
            return Err(self.cut_off("the stream has no end mark"));
        }
        self.sample.e2e = self.last_event - self.started;
        Ok(self.sample)
    }

    fn cut_off(&self, why: &str) -> Failure {
        let pieces = self.sample.gaps.len() + usize::from(self.sample.ttft.is_some());
        Failure::new(FailureKind::Closed, format!("after {pieces} pieces of text: {why}"))
    }
}

impl Sample {
    /// Pieces of text in the stream: what is counted when the server counts no tokens.
    pub(crate) fn pieces(&self) -> u64 {
        self.gaps.len() as u64 + u64::from(self.ttft.is_some())
    }

    /// Tokens of the answer, as well as they are known.
    pub(crate) fn output_tokens(&self) -> u64 {
        self.completion_tokens.unwrap_or_else(|| self.pieces())
    }
}

async fn whole_body(response: Response<Incoming>, bytes_max: usize) -> Result<Bytes, Failure> {
    let body = Limited::new(response.into_body(), bytes_max).collect().await;
    Ok(body.map_err(|error| Failure::new(FailureKind::Closed, error))?.to_bytes())
}

/// The message of an OpenAI error body, else the beginning of whatever it is.
fn error_text(body: &[u8]) -> String {
    let message = serde_json::from_slice::<serde_json::Value>(body).ok().and_then(|value| {
        let error = value.get("error").unwrap_or(&value);
        Some(error.get("message").unwrap_or(error).as_str()?.to_owned())
    });
    shorten(&message.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned()))
}

/// An error and what caused it: the HTTP library's own words leave the cause out.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

fn shorten(text: &str) -> String {
    let one_line: String =
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(ERROR_CHARS_MAX).collect();
    if one_line.trim().is_empty() { "(empty)".into() } else { one_line }
}
