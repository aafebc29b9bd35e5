//! `atom chat --url`: a conversation with any server that speaks the OpenAI API, over HTTP or HTTPS.

mod reply;

use anyhow::{Context, Result, bail};
use reply::{Reader, error_text};
use serde_json::{Map, Value, json};
use std::io::{BufRead, BufReader, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::time::Duration;
use ureq::{Agent, Body};

pub(crate) use reply::Part;

/// A server, a model of it, and what every request says beside the messages.
pub(crate) struct Remote {
    agent: Agent,
    /// What precedes `/chat/completions`; no slash at its end.
    base: String,
    key: Option<String>,
    model: String,
    sampling: Map<String, Value>,
}

/// What the user chose.
#[derive(Default)]
pub(crate) struct RemoteOptions {
    pub(crate) url: String,
    /// Sent as a bearer token.
    pub(crate) key: Option<String>,
    /// Else the first one that the server lists.
    pub(crate) model: Option<String>,
    /// Fields of the request; the rest is the server's to choose.
    pub(crate) sampling: Map<String, Value>,
}

/// An answer, as far as it came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) text: String,
    pub(crate) interrupted: bool,
    /// It was cut by a limit of tokens.
    pub(crate) is_cut: bool,
}

impl Remote {
    /// Asks the server which models it has, unless one was named.
    pub(crate) fn connect(options: RemoteOptions) -> Result<Self> {
        let RemoteOptions { url, key, model, sampling } = options;
        let config = Agent::config_builder()
            .timeout_resolve(Some(CONNECT_MAX))
            .timeout_connect(Some(CONNECT_MAX))
            .timeout_recv_response(Some(ANSWER_MAX))
            .timeout_per_read(Some(SILENCE_MAX))
            .http_status_as_error(false)
            // A redirect would send the conversation where nobody asked it to go.
            .max_redirects(0)
            .user_agent(concat!("atom/", env!("CARGO_PKG_VERSION")))
            .build();
        let mut remote =
            Self { agent: config.into(), base: base(&url)?, key, model: String::new(), sampling };
        remote.model = match model {
            Some(model) => model,
            None => remote.first_model()?,
        };
        Ok(remote)
    }

    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// Sends the conversation and hands over each part of the answer as it comes, until it ends or
    /// `interrupt` is set.
    pub(crate) fn answer(
        &self,
        messages: &[Value],
        interrupt: &AtomicBool,
        mut show: impl FnMut(&Part) -> Result<()>,
    ) -> Result<Said> {
        let mut body = json!({"model": self.model, "messages": messages, "stream": true});
        let fields = body.as_object_mut().expect("it is made as one");
        fields.extend(self.sampling.clone());
        let (sender, parts) = mpsc::sync_channel(PARTS_WAITING_MAX);
        let (agent, url) = (self.agent.clone(), format!("{}/chat/completions", self.base));
        let (key, body) = (self.key.clone(), body.to_string());
        // A thread of its own, since nothing else stops waiting for a silent server. It ends with the next
        // thing that comes, once nobody listens.
        let ask = move || {
            if let Err(error) = ask(&agent, &url, key.as_deref(), &body, &sender) {
                // Whoever does not listen any more has no use for it.
                let _ = sender.send(Err(error));
            }
        };
        std::thread::Builder::new().name("answer".into()).spawn(ask).context("starting a thread")?;
        let mut said = Said::default();
        loop {
            if interrupt.swap(false, Ordering::SeqCst) {
                said.interrupted = true;
                return Ok(said);
            }
            match parts.recv_timeout(LOOK_EVERY) {
                Ok(part) => {
                    let part = part?;
                    show(&part)?;
                    match part {
                        Part::Text(text) => said.text.push_str(&text),
                        Part::Reasoning(_) => {}
                        Part::Call(name) => {
                            bail!("the server wants to call the tool '{name}', and this chat has none")
                        }
                        Part::Cut => said.is_cut = true,
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(said),
            }
        }
    }

    fn first_model(&self) -> Result<String> {
        let url = format!("{}/models", self.base);
        let request = with_key(self.agent.get(&url), self.key.as_deref());
        let response = request.call().map_err(|error| unreachable_server(&url, &error))?;
        let (head, body) = response.into_parts();
        let text = read_all(body)?;
        if head.status != 200 {
            bail!(
                "{url} answers {}: {}; name a model with --model if this server lists none",
                head.status,
                error_text(&text)
            );
        }
        let list: Value = serde_json::from_str(&text).unwrap_or_default();
        // Most servers say {"data": [{"id"}]}; some give the list bare, or call it models and the id name.
        let cards = ["data", "models"].iter().find_map(|&name| list[name].as_array()).or(list.as_array());
        let first = cards.and_then(|cards| cards.first()).and_then(|card| {
            let names = [&card["id"], &card["name"], card];
            names.into_iter().find_map(Value::as_str)
        });
        let first = first.with_context(|| format!("{url} lists no model; name one with --model"))?;
        Ok(first.to_owned())
    }
}

/// One request, and its parts to the channel; ends early when nobody listens any more.
fn ask(
    agent: &Agent,
    url: &str,
    key: Option<&str>,
    body: &str,
    parts: &SyncSender<Result<Part>>,
) -> Result<()> {
    let request =
        agent.post(url).header("Content-Type", "application/json").header("Accept", "text/event-stream");
    let request = with_key(request, key);
    let response = request.send(body).map_err(|error| unreachable_server(url, &error))?;
    let (head, body) = response.into_parts();
    if head.status != 200 {
        bail!("{url} answers {}: {}", head.status, error_text(&read_all(body)?));
    }
    let kind = head.headers.get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let mut reader = Reader::default();
    if kind.trim_start().to_ascii_lowercase().starts_with("application/json") {
        // A server that does not stream, or an error with the status of a success.
        let text = read_all(body)?;
        reader.take(&text)?;
        send(&mut reader, parts);
        return reader.finish();
    }
    let mut stream = BufReader::new(body.into_reader());
    while let Some(line) = read_line(&mut stream)? {
        reader.line(&line)?;
        if !send(&mut reader, parts) || reader.is_done() {
            return Ok(());
        }
    }
    reader.end_of_stream()?;
    send(&mut reader, parts);
    reader.finish()
}

/// False when nobody listens.
fn send(reader: &mut Reader, parts: &SyncSender<Result<Part>>) -> bool {
    reader.parts().all(|part| parts.send(Ok(part)).is_ok())
}

fn with_key<T>(request: ureq::RequestBuilder<T>, key: Option<&str>) -> ureq::RequestBuilder<T> {
    match key {
        Some(key) => request.header("Authorization", format!("Bearer {key}")),
        None => request,
    }
}

/// A line without its end, which may be CR LF; `None` at the end of the stream.
fn read_line(stream: &mut impl BufRead) -> Result<Option<String>> {
    let mut line = Vec::new();
    let read = stream.take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
    if read.context("the answer broke off")? == 0 {
        return Ok(None);
    }
    if line.last() != Some(&b'\n') && line.len() as u64 == LINE_BYTES_MAX {
        bail!("an event of more than {LINE_BYTES_MAX} bytes: this is no stream of chat completions");
    }
    let line = line.strip_suffix(b"\n").unwrap_or(&line);
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    Ok(Some(String::from_utf8_lossy(line).into_owned()))
}

fn read_all(mut body: Body) -> Result<String> {
    body.with_config().limit(LINE_BYTES_MAX).lossy_utf8(true).read_to_string().context("the answer broke off")
}

fn unreachable_server(url: &str, error: &ureq::Error) -> anyhow::Error {
    match error {
        ureq::Error::Timeout(what) => anyhow::anyhow!("no answer from {url} in time ({what})"),
        error => anyhow::anyhow!("{url} can't be reached: {error}"),
    }
}

/// The address as clients take it: with `/v1` or without, with a path before it, with the whole path of the
/// endpoint. A server whose API is elsewhere is named by that whole path.
fn base(url: &str) -> Result<String> {
    let url = url.trim();
    let with_scheme = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let uri: ureq::http::Uri = with_scheme
        .parse()
        .with_context(|| format!("--url {url}: it is no address; write http://host:port or https://host"))?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        bail!("--url {url}: only http:// and https:// are spoken here");
    }
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    if uri.host().is_none_or(str::is_empty) || uri.query().is_some() || authority.contains('@') {
        bail!("--url {url}: write http://host:port or https://host, with a path if there is one and no more");
    }
    let trimmed = with_scheme.trim_end_matches('/');
    if let Some(base) = trimmed.strip_suffix("/chat/completions") {
        return Ok(base.to_owned());
    }
    Ok(if trimmed.ends_with("/v1") { trimmed.to_owned() } else { format!("{trimmed}/v1") })
}

/// A server that is there accepts within this.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// From the request to the head of the answer: some servers send it with the first token, after a long prompt
/// and a longer queue.
const ANSWER_MAX: Duration = Duration::from_secs(600);
/// A stream that is silent for this long has broken off.
const SILENCE_MAX: Duration = Duration::from_secs(600);
/// How soon an interrupt is seen while nothing comes.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Parts read ahead of a terminal that is slow.
const PARTS_WAITING_MAX: usize = 64;
/// A line of an event, or a whole answer: more is no chat.
const LINE_BYTES_MAX: u64 = 16 << 20;

#[cfg(test)]
#[path = "remote/tests.rs"]
mod tests;
