//! All choices of one request: submitted together, read together, dropped together.

use crate::choice::{Choice, Meter, Piece, PromptEnd, TextEnd};
use crate::error::ApiError;
use crate::params::Params;
use crate::phase::Running;
use crate::record::Record;
use crate::server::Server;
use crate::shape::Usage;
use crate::text::Reading;
use atom_base::{SamplingParams, StopParams, TokenId};
use atom_engine::{Refusal, Request};
use atom_telemetry::InFlight;
use atom_text::{Detokenizer, Tokenizer};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

/// A request that was read in full: nothing about it can be wrong any more but its fit.
pub(crate) struct Work {
    pub(crate) params: Params,
    /// At least one.
    pub(crate) prompts: Vec<Prompt>,
    /// Hash of the client's session id, if it sent one.
    pub(crate) session: Option<u64>,
    /// How the text of an answer is taken apart.
    pub(crate) reading: Reading,
}

/// Tokens to continue.
pub(crate) struct Prompt {
    pub(crate) tokens: Arc<[TokenId]>,
    /// Tokens to generate at the most.
    pub(crate) max_tokens: u32,
    /// Text to show before the continuation.
    pub(crate) echo: Option<String>,
}

/// A request's place in the counts: dropped when its answer is complete or given up.
pub(crate) struct Admission {
    pub(crate) running: Running,
    pub(crate) in_flight: InFlight,
    pub(crate) arrived: Instant,
    /// Where a request log is kept.
    pub(crate) record: Option<Arc<Record>>,
}

/// A request in progress. Dropping it aborts what still runs.
pub(crate) struct Generation {
    choices: Vec<Choice>,
    choices_per_prompt: usize,
    /// Tokens of reasoning are told apart.
    counts_reasoning: bool,
    /// Where the next look begins, so that a chatty choice can't hide the others.
    cursor: usize,
    _running: Running,
    _in_flight: InFlight,
}

impl Generation {
    /// Submits every choice, or none: what was submitted before a refusal is aborted again.
    pub(crate) fn submit(server: &Server, work: &Work, admission: Admission) -> Result<Self, ApiError> {
        let Admission { running, in_flight, arrived, record } = admission;
        let requests = requests(server, work)?;
        let per_prompt = work.params.n as usize;
        let mut choices = Vec::with_capacity(requests.len());
        for (index, request) in requests.into_iter().enumerate() {
            let prompt = &work.prompts[index / per_prompt];
            let text = TextEnd {
                detokenizer: work.reading.detokenizer(server.text.tokenizer.clone()),
                stops: work.params.stops.clone(),
                parser: work.reading.parser(),
                calls_max: work.reading.calls_max,
                offset: 0,
            };
            let (metrics, record) = (server.metrics.clone(), record.clone());
            let meter = Meter { metrics, record, arrived, last_token: None };
            let scored = request.sampling.prompt_logprobs.is_some();
            let with_entries = request.sampling.logprobs.is_some();
            let asked = request.lane;
            let events = server.engine.submit(request).map_err(|refusal| match refusal {
                // Each lane has a queue of its own; the engine doesn't say that the client chose which.
                Refusal::QueueFull { waiting } => ApiError::LaneFull { waiting, asked },
                other => other.into(),
            })?;
            let mut choice =
                Choice::new(index as u32, events, prompt.tokens.len(), text, with_entries, meter);
            if let Some(echo) = &prompt.echo {
                choice.echo(echo, scored.then(|| prompt_end(&server.text.tokenizer, &prompt.tokens, echo)));
            }
            choices.push(choice);
        }
        Ok(Self {
            choices,
            choices_per_prompt: per_prompt,
            counts_reasoning: work.reading.knows_reasoning(),
            cursor: 0,
            _running: running,
            _in_flight: in_flight,
        })
    }

    /// The next piece of any choice; `None` when all have ended. After an error nothing follows, and
    /// what still ran is aborted.
    pub(crate) fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, ApiError>>> {
        let count = self.choices.len();
        let mut over = 0;
        // Linear in the choices, as often as the reactor wakes us: once for all that one step brings.
        for at in (self.cursor..count).chain(0..self.cursor) {
            match self.choices[at].poll_piece(cx) {
                Poll::Ready(Ok(piece)) => {
                    self.cursor = (at + 1) % count;
                    return Poll::Ready(Some(Ok(piece)));
                }
                Poll::Ready(Err(error)) => {
                    self.choices.clear();
                    self.cursor = 0;
                    return Poll::Ready(Some(Err(error)));
                }
                Poll::Pending => over += usize::from(self.choices[at].is_over()),
            }
        }
        if over == count { Poll::Ready(None) } else { Poll::Pending }
    }

    /// Every choice in full, in order, and the usage.
    pub(crate) async fn collect(mut self) -> Result<(Vec<Piece>, Usage), ApiError> {
        let mut whole: Vec<Piece> =
            (0..self.choices.len()).map(|at| Piece { index: at as u32, ..Piece::default() }).collect();
        while let Some(piece) = poll_fn(|cx| self.poll_piece(cx)).await {
            let piece = piece?;
            whole[piece.index as usize].append(piece);
        }
        Ok((whole, self.usage()))
    }

    /// Tokens so far.
    pub(crate) fn usage(&self) -> Usage {
        let firsts = || self.choices.iter().step_by(self.choices_per_prompt);
        Usage {
            prompt: firsts().map(|choice| choice.prompt_tokens).sum(),
            cached: firsts().map(|choice| choice.cached_tokens).sum(),
            generated: self.choices.iter().map(|choice| choice.generated_tokens).sum(),
            reasoning: self
                .counts_reasoning
                .then(|| self.choices.iter().map(|choice| choice.reasoning_tokens).sum()),
        }
    }
}

/// Refuses what [`Generation::submit`] would refuse of an engine with nothing else to do.
pub(crate) fn check(server: &Server, work: &Work) -> Result<(), ApiError> {
    requests(server, work).map(drop)
}

/// The engine's view of the work: one request per choice, each known to fit.
fn requests(server: &Server, work: &Work) -> Result<Vec<Request>, ApiError> {
    let limits = server.engine.limits();
    let params = &work.params;
    let asked = work.prompts.len() * params.n as usize;
    let lanes = if params.lane.is_some() { 1 } else { limits.lanes };
    // More than the queues hold would be refused on an idle server too, and "try later" be a lie.
    let max = limits.queue_max.saturating_add(limits.max_num_seqs).saturating_mul(lanes);
    if asked > max {
        return Err(ApiError::TooManyJobs { asked, max });
    }
    let choices: Vec<Arc<SamplingParams>> =
        (0..params.n).map(|choice| Arc::new(SamplingParams { choice, ..params.sampling.clone() })).collect();
    let mut requests = Vec::with_capacity(asked);
    for prompt in &work.prompts {
        // Whoever scores a text asks for one token and drops the last entry of the list. An end token in
        // that place must be an entry like any other, or the last token of the text would be dropped.
        let scores = params.sampling.prompt_logprobs.is_some() && prompt.max_tokens == 1;
        let stop = StopParams {
            max_tokens: prompt.max_tokens,
            stop_token_ids: params.stop_token_ids.clone(),
            ignore_eos: params.ignore_eos || scores,
        };
        for sampling in &choices {
            let request = Request {
                id: server.ids.next(),
                prompt: prompt.tokens.clone(),
                sampling: sampling.clone(),
                stop: stop.clone(),
                lane: params.lane,
                session: work.session,
                grammar: params.grammar.clone(),
            };
            limits.check(&request)?;
            requests.push(request);
        }
    }
    Ok(requests)
}

fn prompt_end(tokenizer: &Arc<Tokenizer>, tokens: &Arc<[TokenId]>, echo: &str) -> PromptEnd {
    let decoded = tokenizer.decode(tokens, false).chars().count();
    PromptEnd {
        tokens: tokens.clone(),
        detokenizer: Detokenizer::new(tokenizer.clone(), false),
        unshown: decoded.saturating_sub(echo.chars().count()),
        offset: 0,
    }
}
