//! What all connections share.

use crate::auth::ApiKeys;
use crate::body::Room;
use crate::cors::CorsOrigins;
use crate::engine::{Engine, RequestIds};
use crate::error::ApiError;
use crate::hosts::AllowedHosts;
use crate::phase::{Phase, Phases};
use crate::request_log::{LogSink, RequestLog};
use crate::text::TextModel;
use crate::tls::Tls;
use crate::ui::VIEWERS_MAX;
use atom_base::limits::BODIES_BYTES_MAX;
use atom_base::{TokenId, rng};
use atom_telemetry::ServeMetrics;
use atom_text::{GrammarVocabulary, TextError, TokenCache};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

/// One model behind one address. Built once by the binary, shared by every connection.
pub struct Server {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) text: Arc<TextModel>,
    /// Makes tokens of every prompt.
    pub(crate) tokens: TokenCache,
    pub(crate) options: ServerOptions,
    pub(crate) metrics: Arc<ServeMetrics>,
    pub(crate) request_log: Option<RequestLog>,
    pub(crate) ids: RequestIds,
    pub(crate) phases: Phases,
    /// Places for those who watch the steps.
    pub(crate) viewers: Arc<Semaphore>,
    /// For the bodies of requests that are being read.
    pub(crate) body_room: Room,
    /// Rung by `/admin/exit`.
    pub(crate) exit: Notify,
    /// Seconds since 1970 at start: `created` of the model's card.
    pub(crate) started_s: u64,
    /// Tells this process from others in the ids of its answers.
    instance: u64,
    text_threads: Arc<Semaphore>,
    /// Made when the first request asks for a constraint.
    vocabulary: OnceLock<GrammarVocabulary>,
}

/// What the user of the binary chose.
#[derive(Debug)]
pub struct ServerOptions {
    /// The name that requests use and `/v1/models` shows.
    pub model: String,
    /// Further names for the same model.
    pub aliases: Vec<String>,
    /// Values for fields that a request leaves out.
    pub defaults: SamplingDefaults,
    /// Seeds for requests that bring none.
    pub seeds: SeedSource,
    /// Requests whose text is worked on at once: the cores that may be taken from the engine.
    pub text_threads: usize,
    /// Tokens that end an answer beside those that the tokenizer knows: a checkpoint may name more.
    pub end_tokens: Vec<TokenId>,
    /// How long running requests may take to finish once the server was told to stop.
    pub drain: Duration,
    /// Whoever can reach the server may pause, resume, drain and end it over HTTP.
    pub admin: bool,
    /// The page at `/`, and the stream of steps that it draws.
    pub ui: bool,
    /// Whoever can reach the server may look inside, below `/debug`.
    pub debug: bool,
    /// One of these must come with every request; empty: everybody is served.
    pub api_keys: Arc<ApiKeys>,
    /// Names by which it may be asked, where it listens on the loopback interface and has neither keys nor TLS.
    pub hosts: AllowedHosts,
    /// Web pages whose scripts may use the server.
    pub cors: CorsOrigins,
    /// The server speaks HTTPS.
    pub tls: Option<Tls>,
    /// How long a generation may take from its request's head until its answer was read. `None`: as long as it
    /// takes.
    pub request_timeout: Option<Duration>,
    /// How long a client may keep the server waiting: for the next request and all of its head, for the next
    /// bytes of a body, and for room to send more of an answer. Waiting for the model is not the client's.
    pub idle_timeout: Duration,
    /// Where a line is written for each request.
    pub request_log: Option<LogSink>,
}

/// Sampling where a request says nothing. The default is the OpenAI API's; a checkpoint's
/// `generation_config.json` may say otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// See [`atom_base::SamplingParams::temperature`].
    pub temperature: f32,
    /// See [`atom_base::SamplingParams::top_p`].
    pub top_p: f32,
    /// See [`atom_base::SamplingParams::top_k`].
    pub top_k: u32,
    /// See [`atom_base::SamplingParams::min_p`].
    pub min_p: f32,
    /// See [`atom_base::SamplingParams::repetition_penalty`].
    pub repetition_penalty: f32,
}

/// Seeds for requests that bring none: a sequence that the start seed determines.
#[derive(Debug)]
pub struct SeedSource {
    start: u64,
    drawn: AtomicU64,
}

impl Server {
    /// Puts the parts together. Nothing listens until [`serve`](crate::serve).
    ///
    /// Panics when `options.text_threads` is 0: no request could ever be read.
    pub fn new(engine: Arc<dyn Engine>, text: TextModel, mut options: ServerOptions) -> Arc<Self> {
        assert!(options.text_threads > 0, "a server without text threads reads no request");
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let metrics = Arc::new(ServeMetrics::new());
        let sink = options.request_log.take();
        Arc::new(Self {
            request_log: sink.map(|sink| sink.start(metrics.clone(), options.api_keys.clone())),
            engine,
            tokens: TokenCache::new(text.tokenizer.clone(), TOKEN_CACHE_BYTES_MAX),
            text: Arc::new(text),
            text_threads: Arc::new(Semaphore::new(options.text_threads)),
            instance: mix(options.seeds.start, started.as_nanos() as u64),
            started_s: started.as_secs(),
            options,
            metrics,
            ids: RequestIds::default(),
            phases: Phases::new(),
            viewers: Arc::new(Semaphore::new(VIEWERS_MAX)),
            body_room: Room::new(BODIES_BYTES_MAX),
            exit: Notify::new(),
            vocabulary: OnceLock::new(),
        })
    }

    /// All names of the model, the first one first.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.options.model.as_str()).chain(self.options.aliases.iter().map(String::as_str))
    }

    /// The name under which the answer goes out: the one that was asked for, if it is ours.
    pub(crate) fn resolve_model(&self, asked: Option<String>) -> Result<String, ApiError> {
        match asked {
            None => Ok(self.options.model.clone()),
            Some(name) if self.names().any(|known| known == name) => Ok(name),
            Some(asked) => {
                let served = self.names().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(" or ");
                Err(ApiError::ModelNotFound { asked, served })
            }
        }
    }

    /// Opens the request log's file anew: it was moved away.
    pub fn reopen_request_log(&self) {
        if let Some(log) = &self.request_log {
            log.reopen();
        }
    }

    /// When the time of a request is over that comes now.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.options.request_timeout.map(|after| Instant::now() + after)
    }

    /// Resolves, with what to tell the client, when a request has to end: it is [`due`](Self::due), or the server
    /// cuts what still runs. The future outlives the borrow.
    pub(crate) fn end_of_patience(
        &self,
        due: Option<Instant>,
    ) -> impl Future<Output = ApiError> + Send + use<> {
        let cut = self.phases.reached(Phase::Cut);
        let deadline = self.options.request_timeout.zip(due);
        async move {
            let over = async {
                match deadline {
                    Some((after, at)) => {
                        tokio::time::sleep_until(at).await;
                        ApiError::Deadline { after }
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = cut => ApiError::Draining,
                error = over => error,
            }
        }
    }

    /// Tokens that a request can have at the most: the smaller of the model's context and a lane's cache.
    pub(crate) fn context(&self) -> usize {
        let limits = self.engine.limits();
        limits.max_model_len.min(limits.cache_tokens)
    }

    /// The tokens as constraints see them. Takes some tens of milliseconds the first time.
    pub(crate) fn vocabulary(&self) -> Result<&GrammarVocabulary, TextError> {
        if let Some(vocabulary) = self.vocabulary.get() {
            return Ok(vocabulary);
        }
        let made = GrammarVocabulary::new(&self.text.tokenizer, &self.options.end_tokens)?;
        Ok(self.vocabulary.get_or_init(|| made))
    }

    /// An id that no other answer has, here, elsewhere or after a restart.
    pub(crate) fn answer_id(&self, prefix: &str) -> String {
        format!("{prefix}-{:016x}{:08x}", self.instance, self.ids.next().0)
    }

    /// Runs work on text (parsing, templates, tokens) where it can't stall the reactor, on a bounded
    /// number of threads. When the caller goes away the work still ends, and only then gives its
    /// place to the next.
    pub(crate) async fn on_text_thread<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let place = self.text_threads.clone().acquire_owned().await.expect("the semaphore is never closed");
        let server = self.clone();
        let joined = tokio::task::spawn_blocking(move || {
            let _place = place;
            work(&server)
        })
        .await;
        joined.unwrap_or_else(|error| Err(ApiError::Internal(format!("a text thread failed: {error}"))))
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("options", &self.options).finish_non_exhaustive()
    }
}

impl ServerOptions {
    /// A server of `model`, everything else by default: one text thread per core, half a minute to drain.
    pub fn new(model: impl Into<String>, seeds: SeedSource) -> Self {
        Self {
            model: model.into(),
            aliases: Vec::new(),
            defaults: SamplingDefaults::default(),
            seeds,
            text_threads: std::thread::available_parallelism().map_or(1, usize::from),
            end_tokens: Vec::new(),
            // What Kubernetes waits before it kills.
            drain: Duration::from_secs(30),
            admin: false,
            ui: true,
            debug: false,
            api_keys: Arc::default(),
            hosts: AllowedHosts::default(),
            cors: CorsOrigins::default(),
            tls: None,
            request_timeout: None,
            // Above the 60 s of common proxies, so that it is they who close a connection that idles.
            idle_timeout: Duration::from_secs(75),
            request_log: None,
        }
    }
}

impl Default for SamplingDefaults {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

impl SeedSource {
    /// The sequence of `start`: draw it from the system for a fresh one, fix it for a repeatable server.
    pub fn new(start: u64) -> Self {
        Self { start, drawn: AtomicU64::new(0) }
    }

    /// The next seed.
    pub fn draw(&self) -> u64 {
        mix(self.start, self.drawn.fetch_add(1, Ordering::Relaxed))
    }
}

/// Text and tokens of prompts that may come again: of some hundred agents with 100 kB each.
const TOKEN_CACHE_BYTES_MAX: usize = 32 << 20;

/// The `count`-th number of the sequence of `key`.
fn mix(key: u64, count: u64) -> u64 {
    let [low, high, ..] =
        rng::philox([count as u32, (count >> 32) as u32, 0, 0], [key as u32, (key >> 32) as u32]);
    u64::from(low) | u64::from(high) << 32
}

/// Now, in seconds since 1970.
pub(crate) fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_seed_determines_the_sequence_and_its_numbers_differ() {
        let draw = |start| {
            let source = SeedSource::new(start);
            (0..100).map(|_| source.draw()).collect::<Vec<_>>()
        };
        let (one, two) = (draw(1), draw(2));
        assert_eq!(one, draw(1));
        let distinct: std::collections::HashSet<_> = one.iter().chain(&two).collect();
        assert_eq!(distinct.len(), 200);
    }
}
