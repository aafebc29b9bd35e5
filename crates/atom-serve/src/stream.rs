//! Server-sent events: the body of a streamed answer.

use crate::choice::Piece;
use crate::error::ApiError;
use crate::generation::Generation;
use crate::params::StreamOptions;
use crate::shape::Shape;
use bytes::Bytes;
use serde_json::{Map, Value};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};
use tokio_stream::Stream;

/// The frames of one answer. The connection polls it when it can write, so a slow reader slows nobody
/// but itself: what came in the meantime leaves as one frame. Dropping it aborts the request.
pub(crate) struct SseBody<S> {
    /// `None` after the last frame.
    generation: Option<Generation>,
    shape: S,
    options: StreamOptions,
    /// Which choices have said that they begin.
    opened: Vec<bool>,
    /// Resolves when the server ends what is still running.
    cut: Pin<Box<dyn Future<Output = ApiError> + Send>>,
    silence: Pin<Box<Sleep>>,
}

impl<S: Shape> SseBody<S> {
    pub(crate) fn new(
        generation: Generation,
        shape: S,
        options: StreamOptions,
        cut: impl Future<Output = ApiError> + Send + 'static,
    ) -> Self {
        Self {
            opened: vec![false; generation.choices()],
            generation: Some(generation),
            shape,
            options,
            cut: Box::pin(cut),
            silence: Box::pin(sleep(KEEP_ALIVE)),
        }
    }

    /// The frames of one piece: the opening of its choice, its text, its end.
    fn frames(&mut self, piece: &Piece, usage: &Value) -> Bytes {
        let mut out = String::new();
        let mut send = |choice| {
            let mut chunk = self.shape.chunk(vec![choice]);
            if self.options.continuous_usage_stats {
                chunk.insert("usage".into(), usage.clone());
            } else if self.options.include_usage {
                chunk.insert("usage".into(), Value::Null);
            }
            push_frame(&mut out, chunk);
        };
        if !std::mem::replace(&mut self.opened[piece.index as usize], true)
            && let Some(opening) = self.shape.opening(piece.index)
        {
            send(opening);
        }
        if !piece.text.is_empty() || !piece.entries.is_empty() {
            send(self.shape.delta(piece));
        }
        if let Some(finish) = piece.finish {
            send(self.shape.closing(piece.index, finish));
        }
        out.into()
    }

    fn last_frames(&self, usage: Value) -> Bytes {
        let mut out = String::new();
        if self.options.include_usage {
            let mut chunk = self.shape.chunk(Vec::new());
            chunk.insert("usage".into(), usage);
            push_frame(&mut out, chunk);
        }
        out.push_str("data: [DONE]\n\n");
        out.into()
    }
}

impl<S: Shape> Stream for SseBody<S> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let Some(generation) = &mut this.generation else { return Poll::Ready(None) };
        let next = match generation.poll_piece(cx) {
            Poll::Pending => this.cut.as_mut().poll(cx).map(|error| Some(Err(error))),
            other => other,
        };
        let frames = match next {
            Poll::Ready(Some(Ok(piece))) => {
                let usage =
                    if this.options.continuous_usage_stats { generation.usage() } else { Value::Null };
                this.frames(&piece, &usage)
            }
            Poll::Ready(Some(Err(error))) => {
                tracing::warn!("a stream ended with an error: {error}");
                this.generation = None;
                error_frame(&error)
            }
            Poll::Ready(None) => {
                let usage = generation.usage();
                this.generation = None;
                this.last_frames(usage)
            }
            Poll::Pending => {
                if this.silence.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                Bytes::from_static(b": keep-alive\n\n")
            }
        };
        this.silence.as_mut().reset(Instant::now() + KEEP_ALIVE);
        Poll::Ready(Some(Ok(frames)))
    }
}

/// After this frame the stream ends without `[DONE]`, so that nobody takes a part for the whole.
fn error_frame(error: &ApiError) -> Bytes {
    format!("data: {}\n\n", error.body()).into()
}

/// JSON has no raw line breaks, so a frame is one line.
fn push_frame(out: &mut String, chunk: Map<String, Value>) {
    out.push_str("data: ");
    out.push_str(&Value::Object(chunk).to_string());
    out.push_str("\n\n");
}

/// Below the idle limit of every common proxy (nginx and AWS: 60 s), and often enough to notice a reader
/// who is gone without a word.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
