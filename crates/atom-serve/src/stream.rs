//! Server-sent events: the body of a streamed answer.

use crate::error::ApiError;
use crate::generation::Generation;
use crate::shape::Shape;
use bytes::Bytes;
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
    /// Of the request.
    id: String,
    has_begun: bool,
    /// Resolves when the server ends what is still running.
    cut: Pin<Box<dyn Future<Output = ApiError> + Send>>,
    /// Set off when there was nothing to send, see [`poll_silence`](Self::poll_silence).
    silence: Pin<Box<Sleep>>,
    /// When something was sent.
    sent: Instant,
}

impl<S: Shape> SseBody<S> {
    pub(crate) fn new(
        generation: Generation,
        shape: S,
        id: String,
        cut: impl Future<Output = ApiError> + Send + 'static,
    ) -> Self {
        Self {
            generation: Some(generation),
            shape,
            id,
            has_begun: false,
            cut: Box::pin(cut),
            silence: Box::pin(sleep(KEEP_ALIVE)),
            sent: Instant::now(),
        }
    }

    /// Ready when nothing was sent for so long that something should be. The timer is moved when it rings and
    /// not with every token: that would cost more than a token's own work.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.silence.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            let due = self.sent + KEEP_ALIVE;
            if due <= Instant::now() {
                return Poll::Ready(());
            }
            self.silence.as_mut().reset(due);
        }
    }
}

impl<S: Shape> Stream for SseBody<S> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        // A piece may have nothing to show, such as thoughts that the client doesn't want: that is silence.
        loop {
            let Some(generation) = &mut this.generation else { return Poll::Ready(None) };
            // First, or a reader who always finds the next piece ready would never meet the end.
            let next = match this.cut.as_mut().poll(cx) {
                Poll::Ready(error) => Poll::Ready(Some(Err(error))),
                Poll::Pending => generation.poll_piece(cx),
            };
            let mut frames = String::new();
            if next.is_ready() {
                frames.reserve(FRAME_BYTES);
            }
            match next {
                Poll::Ready(Some(Ok(piece))) => {
                    let usage = generation.usage();
                    if !std::mem::replace(&mut this.has_begun, true) {
                        this.shape.begin(&usage, &mut frames);
                    }
                    this.shape.piece(&piece, &usage, &mut frames);
                }
                Poll::Ready(Some(Err(error))) => {
                    tracing::warn!("a stream ended with an error: {error}");
                    this.generation = None;
                    this.shape.failed(&error, &this.id, &mut frames);
                }
                Poll::Ready(None) => {
                    let usage = generation.usage();
                    this.generation = None;
                    this.shape.end(&usage, &mut frames);
                }
                Poll::Pending => {
                    if this.poll_silence(cx).is_pending() {
                        return Poll::Pending;
                    }
                    frames.push_str(this.shape.keep_alive());
                }
            }
            if !frames.is_empty() {
                this.sent = Instant::now();
                return Poll::Ready(Some(Ok(frames.into())));
            }
        }
    }
}

/// What the frame of a token takes, roughly: it is written without growing.
const FRAME_BYTES: usize = 320;

/// Below the idle limit of every common proxy (nginx and AWS: 60 s), and often enough to notice a reader
/// who is gone without a word.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
