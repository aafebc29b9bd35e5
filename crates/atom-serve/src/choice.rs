//! One choice of an answer: tokens in, text and log-probabilities out.

use crate::engine::EventStream;
use crate::error::ApiError;
use crate::record::Record;
use atom_base::{FinishReason, ScoredToken, TokenId};
use atom_engine::Event;
use atom_telemetry::{Outcome, ServeMetrics};
use atom_text::{AnswerEnd, AnswerParser, AnswerPart, Detokenizer, StopStrings};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

/// What became sure of one choice since the last piece: never empty. Concatenated, the pieces are the
/// choice's whole answer, however they were cut.
#[derive(Debug, Default)]
pub(crate) struct Piece {
    /// Place among the choices of the answer.
    pub(crate) index: u32,
    /// Whole characters; neighbours are of different kinds.
    pub(crate) parts: Vec<AnswerPart>,
    /// One for every token since the last piece, if log-probabilities were asked for; those of held-back
    /// text are here already, those of text behind a stop string too.
    pub(crate) entries: Vec<Entry>,
    /// Set in the last piece.
    pub(crate) finish: Option<Finish>,
}

/// A token of the prompt or of the continuation with its log-probability.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) token: TokenId,
    /// `None` for the first token of a prompt: nothing precedes it.
    pub(crate) score: Option<ScoredToken>,
    /// Characters of the text before this token.
    pub(crate) offset: usize,
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The model said so.
    Stop,
    /// The stop string of this place in the request's list.
    StopString(usize),
    /// It calls tools and waits for what they say.
    ToolCalls,
    /// Its tokens are used up.
    Length,
}

/// A choice in progress.
pub(crate) struct Choice {
    index: u32,
    /// `None` once it ended; dropping it before aborts the request.
    events: Option<EventStream>,
    text: TextEnd,
    /// The prompt's own entries, where they are wanted.
    prompt: Option<PromptEnd>,
    with_entries: bool,
    ready: Piece,
    failure: Option<ApiError>,
    pub(crate) prompt_tokens: usize,
    pub(crate) cached_tokens: usize,
    pub(crate) generated_tokens: usize,
    pub(crate) reasoning_tokens: usize,
    meter: Meter,
}

/// Tokens to text that may be shown, in this order: characters, the first stop string, parts.
pub(crate) struct TextEnd {
    pub(crate) detokenizer: Detokenizer,
    pub(crate) stops: StopStrings,
    pub(crate) parser: AnswerParser,
    /// Calls at the most; the answer ends before one more.
    pub(crate) calls_max: u32,
    /// Characters decoded so far, those of an echoed prompt included: where the next token begins.
    pub(crate) offset: usize,
}

/// The prompt of an echo, token by token.
pub(crate) struct PromptEnd {
    pub(crate) tokens: Arc<[TokenId]>,
    pub(crate) detokenizer: Detokenizer,
    /// Characters of a BOS that the tokenizer added and that the echoed text doesn't show.
    pub(crate) unshown: usize,
    pub(crate) offset: usize,
}

/// When things happened, for the histograms and the request log.
pub(crate) struct Meter {
    pub(crate) metrics: Arc<ServeMetrics>,
    pub(crate) record: Option<Arc<Record>>,
    pub(crate) arrived: Instant,
    pub(crate) last_token: Option<Instant>,
}

impl Choice {
    /// `echo` is shown before the continuation.
    pub(crate) fn new(
        index: u32,
        events: EventStream,
        prompt_tokens: usize,
        text: TextEnd,
        with_entries: bool,
        meter: Meter,
    ) -> Self {
        Self {
            index,
            events: Some(events),
            text,
            prompt: None,
            with_entries,
            ready: Piece { index, ..Piece::default() },
            failure: None,
            prompt_tokens,
            cached_tokens: 0,
            generated_tokens: 0,
            reasoning_tokens: 0,
            meter,
        }
    }

    /// Shows the prompt's text before the continuation, and its tokens' entries if `prompt` is given.
    pub(crate) fn echo(&mut self, text: &str, prompt: Option<PromptEnd>) {
        self.ready.push(AnswerPart::Content(text.to_owned()));
        self.text.offset = text.chars().count();
        self.prompt = prompt;
        self.push_prompt_entry(0, None);
    }

    /// True when every event was taken and every piece too.
    pub(crate) fn is_over(&self) -> bool {
        self.events.is_none() && self.failure.is_none() && self.ready.is_empty()
    }

    /// Takes every event that is there, then gives what became sure, or the failure behind it.
    pub(crate) fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<Piece, ApiError>> {
        self.take_events(cx);
        if !self.ready.is_empty() {
            let index = self.index;
            return Poll::Ready(Ok(std::mem::replace(&mut self.ready, Piece { index, ..Piece::default() })));
        }
        match self.failure.take() {
            Some(failure) => Poll::Ready(Err(failure)),
            None => Poll::Pending,
        }
    }

    fn take_events(&mut self, cx: &mut Context<'_>) {
        let before = self.generated_tokens;
        let mut end = None;
        while let Some(events) = &mut self.events
            && let Poll::Ready(Some(event)) = events.poll_next(cx)
        {
            match event {
                Event::Started { cached_tokens } => {
                    self.cached_tokens = cached_tokens as usize;
                    self.meter.admitted(self.index, self.prompt_tokens, self.cached_tokens);
                }
                Event::PromptScored { index, scored } => self.push_prompt_entry(index as usize, Some(scored)),
                Event::Token(scored) => {
                    if self.push_token(scored) {
                        // Dropping the stream aborts the request: nobody wants what follows.
                        self.events = None;
                        end = Some(Outcome::Stop);
                    }
                }
                Event::Finished(reason) => {
                    self.events = None;
                    end = Some(self.finish(reason));
                }
                Event::Failed(error) => {
                    self.events = None;
                    self.failure = Some(error.into());
                    end = Some(Outcome::Error);
                }
            }
        }
        self.meter.tokens(self.generated_tokens - before, before == 0);
        if let Some(outcome) = end {
            self.meter.ended(self.index, outcome);
        }
    }

    /// True when a stop string is complete: the text ends before it.
    fn push_token(&mut self, scored: ScoredToken) -> bool {
        self.generated_tokens += 1;
        self.reasoning_tokens += usize::from(self.text.parser.is_reasoning());
        if self.with_entries {
            let entry = Entry { token: scored.token, score: Some(scored), offset: self.text.offset };
            self.ready.entries.push(entry);
        }
        let delta = self.text.detokenizer.push(scored.token);
        self.text.offset += delta.chars().count();
        let stopped = self.text.stops.push(delta);
        let mut parts = Vec::new();
        self.text.parser.push(stopped.text, &mut parts);
        let matched = stopped.matched;
        if let Some(stop) = matched {
            self.text.parser.finish(AnswerEnd::Cut, &mut parts);
            self.ready.finish = Some(self.stopped(Finish::StopString(stop)));
        }
        let cut = self.cut_calls(&mut parts);
        self.ready.extend(parts);
        matched.is_some() || cut
    }

    /// Ends the answer before a call that is one too many; true if there was one.
    fn cut_calls(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        let is_over = |part: &AnswerPart| matches!(part, AnswerPart::Call { index, .. } if *index >= self.text.calls_max);
        let Some(at) = parts.iter().position(is_over) else { return false };
        parts.truncate(at);
        self.ready.finish = Some(Finish::ToolCalls);
        true
    }

    /// What was held back comes out. The end of a character that never came may complete a stop string.
    fn finish(&mut self, reason: FinishReason) -> Outcome {
        let TextEnd { detokenizer, stops, parser, .. } = &mut self.text;
        let mut parts = Vec::new();
        let stopped = stops.push(detokenizer.finish());
        let matched = stopped.matched;
        parser.push(stopped.text, &mut parts);
        parser.push(stops.finish(), &mut parts);
        let by_itself = reason == FinishReason::Stop && matched.is_none();
        parser.finish(if by_itself { AnswerEnd::Whole } else { AnswerEnd::Cut }, &mut parts);
        let cut = self.cut_calls(&mut parts);
        self.ready.extend(parts);
        match (reason, matched) {
            _ if cut => {}
            // We drop the stream when we abort, so this is the engine's own doing.
            (FinishReason::Aborted, _) => self.failure = Some(ApiError::Aborted),
            (_, Some(stop)) => self.ready.finish = Some(self.stopped(Finish::StopString(stop))),
            (FinishReason::Stop, None) => self.ready.finish = Some(self.stopped(Finish::Stop)),
            (FinishReason::Length, None) => self.ready.finish = Some(Finish::Length),
        }
        Outcome::from(reason)
    }

    /// An answer that ended by itself and calls tools waits for them, but not if a stop string stands within a call.
    fn stopped(&self, finish: Finish) -> Finish {
        let parser = &self.text.parser;
        let is_half = parser.is_call_cut() && matches!(finish, Finish::StopString(_));
        if parser.calls() > 0 && !is_half { Finish::ToolCalls } else { finish }
    }

    fn push_prompt_entry(&mut self, index: usize, score: Option<ScoredToken>) {
        let Some(prompt) = &mut self.prompt else { return };
        let token = prompt.tokens[index];
        let offset = prompt.offset.saturating_sub(prompt.unshown);
        self.ready.entries.push(Entry { token, score, offset });
        prompt.offset += prompt.detokenizer.push(token).chars().count();
    }
}

impl Drop for Choice {
    fn drop(&mut self) {
        if self.events.is_some() {
            self.meter.ended(self.index, Outcome::Abort);
        }
    }
}

impl Piece {
    fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.entries.is_empty() && self.finish.is_none()
    }

    /// Appends a part, to the last one if that is of its kind.
    fn push(&mut self, part: AnswerPart) {
        use AnswerPart::{Arguments, Content, Reasoning};
        match (self.parts.last_mut(), part) {
            (_, Content(text) | Reasoning(text)) if text.is_empty() => {}
            (Some(Content(last)), Content(text)) | (Some(Reasoning(last)), Reasoning(text)) => {
                last.push_str(&text);
            }
            (Some(Arguments { index: last, json }), Arguments { index, json: more }) if *last == index => {
                json.push_str(&more);
            }
            (_, part) => self.parts.push(part),
        }
    }

    fn extend(&mut self, parts: impl IntoIterator<Item = AnswerPart>) {
        parts.into_iter().for_each(|part| self.push(part));
    }

    /// The content in one string.
    pub(crate) fn content(&self) -> String {
        let texts = self.parts.iter().filter_map(|part| match part {
            AnswerPart::Content(text) => Some(text.as_str()),
            _ => None,
        });
        texts.collect()
    }

    /// Puts a later piece of the same choice behind this one.
    pub(crate) fn append(&mut self, later: Piece) {
        assert_eq!(self.index, later.index, "pieces of two choices in one text");
        assert!(self.finish.is_none(), "a piece behind the last one");
        self.extend(later.parts);
        self.entries.extend(later.entries);
        self.finish = later.finish;
    }
}

impl Finish {
    /// In the words of the OpenAI API.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Stop | Self::StopString(_) => "stop",
            Self::ToolCalls => "tool_calls",
            Self::Length => "length",
        }
    }
}

impl Meter {
    fn admitted(&self, choice: u32, prompt: usize, cached: usize) {
        self.metrics.admitted(prompt, cached);
        if let Some(record) = &self.record {
            record.admitted(choice, prompt, cached);
        }
    }

    fn ended(&self, choice: u32, outcome: Outcome) {
        self.metrics.ended(outcome, self.arrived.elapsed());
        if let Some(record) = &self.record {
            record.ended(choice, outcome);
        }
    }

    /// `count` tokens were taken just now; `first`: none came before them.
    fn tokens(&mut self, count: usize, first: bool) {
        if count == 0 {
            return;
        }
        let now = Instant::now();
        let before = self.last_token.replace(now).unwrap_or(now);
        if let Some(record) = &self.record {
            record.tokens(count, now - self.arrived);
        }
        if first {
            self.metrics.first_token(now - self.arrived);
        }
        let rest = count - usize::from(first);
        if rest > 0 {
            self.metrics.next_tokens(rest, now - before);
        }
    }
}
