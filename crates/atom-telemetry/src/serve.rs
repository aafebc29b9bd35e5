//! Metrics of the HTTP side.

use atom_base::FinishReason;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder, prometheus_text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::fmt::{self, Write as _};
use std::time::Duration;

/// `Content-Type` of what [`ServeMetrics::write`] writes.
pub const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

/// Counters, gauges and histograms of requests. Every method is a few atomic operations.
#[derive(Debug)]
pub struct ServeMetrics {
    registry: Registry,
    responses: Family<ResponseLabels, Counter>,
    in_flight: Gauge,
    outcomes: Family<OutcomeLabels, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    generation_tokens: Counter,
    log_dropped: Counter,
    first_token_s: Histogram,
    inter_token_s: Histogram,
    e2e_s: Histogram,
}

/// What was asked of the server. Unknown paths are all [`Endpoint::Other`]: a client can't make series.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
    /// `/v1/messages/count_tokens`
    CountTokens,
    /// `/v1/models` and below
    Models,
    /// `/health` and below
    Health,
    /// `/metrics`
    Metrics,
    /// Everything else.
    Other,
}

/// How one continuation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// End token, stop token or stop string.
    Stop,
    /// `max_tokens` or the context's end.
    Length,
    /// The client went away, or the server's drain ended.
    Abort,
    /// The engine failed.
    Error,
}

/// Counts a request as in flight until it is dropped.
#[derive(Debug)]
pub struct InFlight {
    gauge: Gauge,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResponseLabels {
    endpoint: Endpoint,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    finished_reason: Outcome,
}

impl Default for ServeMetrics {
    fn default() -> Self {
        Self::new()
    }
}

impl ServeMetrics {
    /// All at zero.
    pub fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("atom"),
            responses: Family::default(),
            in_flight: Gauge::default(),
            outcomes: Family::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generation_tokens: Counter::default(),
            log_dropped: Counter::default(),
            // From 1 ms: a cached prompt on a fast device. To 131 s: a long prompt behind a queue.
            first_token_s: Histogram::new(exponential_buckets(0.001, 2.0, 18)),
            // From 0.5 ms to 8 s: the slowest step that a user would still call streaming.
            inter_token_s: Histogram::new(exponential_buckets(0.000_5, 2.0, 15)),
            // From 10 ms to 1 h 27 min.
            e2e_s: Histogram::new(exponential_buckets(0.01, 2.0, 20)),
        };
        metrics.register();
        metrics.begin_at_zero();
        metrics
    }

    /// Makes the series whose growth people watch. One that is first seen with what it has counted shows no
    /// growth: that of the first requests would be lost.
    fn begin_at_zero(&self) {
        for endpoint in Endpoint::ALL {
            for status in WATCHED_STATUSES {
                drop(self.responses.get_or_create(&ResponseLabels { endpoint, status }));
            }
        }
        for finished_reason in Outcome::ALL {
            drop(self.outcomes.get_or_create(&OutcomeLabels { finished_reason }));
        }
    }

    /// The names: kept from one release to the next, since dashboards know them.
    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register("http_requests", "Responses by endpoint and status", self.responses.clone());
        registry.register(
            "num_requests_in_flight",
            "HTTP generation requests that are not answered in full",
            self.in_flight.clone(),
        );
        registry.register("request_success", "Continuations by how they ended", self.outcomes.clone());
        registry.register("prompt_tokens", "Prompt tokens taken in", self.prompt_tokens.clone());
        registry.register(
            "prompt_tokens_cached",
            "Prompt tokens found in the prefix cache",
            self.cached_tokens.clone(),
        );
        registry.register(
            "generation_tokens",
            "Tokens generated and received",
            self.generation_tokens.clone(),
        );
        registry.register(
            "request_log_dropped",
            "Entries that the request log lost: its disk is full or too slow",
            self.log_dropped.clone(),
        );
        registry.register(
            "time_to_first_token_seconds",
            "From the request's last byte to its first generated token",
            self.first_token_s.clone(),
        );
        registry.register(
            "inter_token_latency_seconds",
            "Between tokens of one continuation as they leave the server",
            self.inter_token_s.clone(),
        );
        registry.register(
            "e2e_request_latency_seconds",
            "From the request's last byte to the end of a continuation",
            self.e2e_s.clone(),
        );
    }

    /// A response's head was sent.
    pub fn responded(&self, endpoint: Endpoint, status: u16) {
        self.responses.get_or_create(&ResponseLabels { endpoint, status }).inc();
    }

    /// A generation request begins; it ends when the guard is dropped.
    pub fn begin(&self) -> InFlight {
        self.in_flight.inc();
        InFlight { gauge: self.in_flight.clone() }
    }

    /// A continuation was admitted with a prompt of `prompt` tokens, `cached` of them from the cache.
    pub fn admitted(&self, prompt: usize, cached: usize) {
        self.prompt_tokens.inc_by(prompt as u64);
        self.cached_tokens.inc_by(cached as u64);
    }

    /// A continuation's first token came `after` its request.
    pub fn first_token(&self, after: Duration) {
        self.generation_tokens.inc();
        self.first_token_s.observe(after.as_secs_f64());
    }

    /// `count` more tokens of a continuation came together, `gap` after those before.
    pub fn next_tokens(&self, count: usize, gap: Duration) {
        self.generation_tokens.inc_by(count as u64);
        for _ in 0..count {
            self.inter_token_s.observe(gap.as_secs_f64() / count as f64);
        }
    }

    /// A continuation ended, `after` its request came.
    pub fn ended(&self, outcome: Outcome, after: Duration) {
        self.outcomes.get_or_create(&OutcomeLabels { finished_reason: outcome }).inc();
        self.e2e_s.observe(after.as_secs_f64());
    }

    /// The request log lost `count` entries.
    pub fn log_dropped(&self, count: u64) {
        self.log_dropped.inc_by(count);
    }

    /// Appends everything in the Prometheus text format.
    pub fn write(&self, out: &mut String) {
        prometheus_text::encode(out, &self.registry).expect("writing to a String can't fail");
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}

impl Endpoint {
    const ALL: [Self; 9] = [
        Self::Chat,
        Self::Completions,
        Self::Responses,
        Self::Messages,
        Self::CountTokens,
        Self::Models,
        Self::Health,
        Self::Metrics,
        Self::Other,
    ];

    /// The value of the label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat_completions",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::CountTokens => "count_tokens",
            Self::Models => "models",
            Self::Health => "health",
            Self::Metrics => "metrics",
            Self::Other => "other",
        }
    }
}

impl Outcome {
    const ALL: [Self; 4] = [Self::Stop, Self::Length, Self::Abort, Self::Error];

    /// The value of the label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

impl From<FinishReason> for Outcome {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
            FinishReason::Aborted => Self::Abort,
        }
    }
}

impl EncodeLabelValue for Endpoint {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        encoder.write_str(self.as_str())
    }
}

impl EncodeLabelValue for Outcome {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        encoder.write_str(self.as_str())
    }
}

/// Answers that alerts and ratios are made of; others begin with the first of them.
const WATCHED_STATUSES: [u16; 6] = [200, 400, 429, 500, 503, 504];

#[cfg(test)]
mod tests {
    use super::*;

    fn text(metrics: &ServeMetrics) -> String {
        let mut out = String::new();
        metrics.write(&mut out);
        out
    }

    #[test]
    fn a_request_shows_up_in_every_family_under_its_documented_name() {
        let metrics = ServeMetrics::new();
        let guard = metrics.begin();
        metrics.admitted(30, 16);
        metrics.first_token(Duration::from_millis(20));
        metrics.next_tokens(4, Duration::from_millis(8));
        metrics.ended(Outcome::Length, Duration::from_millis(100));
        metrics.responded(Endpoint::Chat, 200);
        let now = text(&metrics);
        for line in [
            "atom_http_requests_total{endpoint=\"chat_completions\",status=\"200\"} 1",
            "atom_num_requests_in_flight 1",
            "atom_request_success_total{finished_reason=\"length\"} 1",
            "atom_prompt_tokens_total 30",
            "atom_prompt_tokens_cached_total 16",
            "atom_generation_tokens_total 5",
            "atom_time_to_first_token_seconds_count 1",
            "atom_inter_token_latency_seconds_count 4",
            "atom_inter_token_latency_seconds_sum 0.008",
            "atom_e2e_request_latency_seconds_sum 0.1",
        ] {
            assert!(now.lines().any(|found| found == line), "no line '{line}' in\n{now}");
        }
        drop(guard);
        assert!(text(&metrics).contains("atom_num_requests_in_flight 0\n"));
    }

    /// aiperf takes what it sees first as the beginning, as Prometheus does: of 12 requests it counted 8.
    #[test]
    fn the_first_requests_are_growth_of_a_series_that_was_there_before_them() {
        let metrics = ServeMetrics::new();
        let before = text(&metrics);
        for endpoint in Endpoint::ALL {
            metrics.responded(endpoint, 200);
            metrics.responded(endpoint, 503);
        }
        for outcome in Outcome::ALL {
            metrics.ended(outcome, Duration::ZERO);
        }
        let after = text(&metrics);
        let counted: Vec<&str> =
            after.lines().filter(|line| line.contains('{') && line.ends_with("} 1")).collect();
        let labelled = counted.iter().filter(|line| !line.contains("le=")).count();
        assert_eq!(labelled, 2 * Endpoint::ALL.len() + Outcome::ALL.len(), "{after}");
        for line in counted.iter().filter(|line| !line.contains("le=")) {
            let zero = format!("{}0", line.strip_suffix('1').unwrap());
            assert!(before.lines().any(|found| found == zero), "no line '{zero}' in\n{before}");
        }
    }
}
