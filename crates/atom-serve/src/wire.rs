//! The bytes of a connection, below HTTP: peers that take nothing, peers that have sent all they will, and the
//! answers that hyper would give on its own.

use crate::exchange::{AutomaticAnswer, Exchange};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep, sleep_until};
use tokio_rustls::server::TlsStream;

/// A stream whose peer must take what is sent to it: something now and then, and not too little altogether.
///
/// It lies below TLS, where bytes move. What waits for the peer is bounded in any case (the system's buffer,
/// [`WRITE_BUFFER`](crate::connection::WRITE_BUFFER), and an answer's tokens); this bounds for how long.
pub(crate) struct Paced<S> {
    stream: S,
    patience: Duration,
    /// Bytes that the system took over for the peer.
    taken: Arc<AtomicU64>,
    /// Runs while the peer takes nothing.
    stalled: Option<Stall>,
    /// How long the stream was stalled since `blocked_from`, without the stall that goes on.
    blocked: Duration,
    /// What was taken when `blocked` was last 0.
    blocked_from: u64,
}

/// Bytes that can't be written.
struct Stall {
    since: Instant,
    end: Pin<Box<Sleep>>,
}

/// A connection's stream, as hyper sees it.
pub(crate) struct Wire<S> {
    stream: S,
    exchange: Arc<Exchange>,
    /// Set once the peer has sent all it will, in the middle of an exchange.
    half_closed: Option<Looks>,
    /// Everything that hyper gave us has been passed on.
    is_flushed: bool,
    /// Rings when the answer has to be over, see [`Exchange::due`].
    overdue: Option<(Instant, Pin<Box<Sleep>>)>,
}

/// What lies below HTTP.
pub(crate) trait Transport: AsyncRead + AsyncWrite + Unpin + Send {
    /// True where a peer may close its sending side and still read.
    const HALF_CLOSES: bool;

    /// What has become of a connection that can't be read any more.
    fn lost(&self) -> Option<io::Error>;
}

/// When to look again whether a peer that sends nothing any more is still there.
struct Looks {
    /// The request that it waits for.
    number: u64,
    next: Pin<Box<Sleep>>,
    pause: Duration,
    asked: bool,
    /// The first pause is over. Until then the last bytes of a body may be on their way from hyper to its reader.
    waited: bool,
    /// How often hyper came to read. Between two times it lets the body's reader run, however late a timer is.
    calls: u32,
}

impl<S> Paced<S> {
    /// `taken` counts for whoever else wants to know.
    pub(crate) fn new(stream: S, patience: Duration, taken: Arc<AtomicU64>) -> Self {
        Self { stream, patience, taken, stalled: None, blocked: Duration::ZERO, blocked_from: 0 }
    }

    /// A write that gave `outcome`: goes on, or ends when the peer has taken nothing for too long, or too little
    /// in all the time that it was waited for.
    fn paced<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        let patience = self.patience;
        if outcome.is_pending() {
            let stalled = self
                .stalled
                .get_or_insert_with(|| Stall { since: Instant::now(), end: Box::pin(sleep(patience)) });
            ready!(stalled.end.as_mut().poll(cx));
            return Poll::Ready(Err(too_slow(format!("the client took nothing for {patience:?}"))));
        }
        if let Some(stall) = self.stalled.take() {
            self.blocked += stall.since.elapsed();
            if self.blocked >= patience {
                let (blocked, taken) = (self.blocked, self.taken.load(Ordering::Relaxed));
                let bytes = taken - std::mem::replace(&mut self.blocked_from, taken);
                self.blocked = Duration::ZERO;
                if bytes < READ_RATE_MIN * blocked.as_secs() {
                    let words = format!("the client took {bytes} bytes in {blocked:?} of waiting for it");
                    return Poll::Ready(Err(too_slow(words)));
                }
            }
        }
        outcome
    }
}

fn too_slow(words: String) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, words)
}

impl<S: AsyncRead + Unpin> AsyncRead for Paced<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Paced<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(bytes)) = outcome {
            this.taken.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        this.paced(cx, outcome)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_flush(cx);
        this.paced(cx, outcome)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

impl Transport for Paced<TcpStream> {
    const HALF_CLOSES: bool = true;

    /// A reset that answers what we sent. `read` would not tell: after an end it says nothing but the end.
    fn lost(&self) -> Option<io::Error> {
        self.stream.take_error().unwrap_or_else(Some)
    }
}

impl Transport for TlsStream<Paced<TcpStream>> {
    /// TLS has an alert for the end, which clients send when they leave.
    const HALF_CLOSES: bool = false;

    fn lost(&self) -> Option<io::Error> {
        self.get_ref().0.lost()
    }
}

impl<S: Transport> Wire<S> {
    pub(crate) fn new(stream: S, exchange: Arc<Exchange>) -> Self {
        Self { stream, exchange, half_closed: None, is_flushed: true, overdue: None }
    }

    pub(crate) fn into_inner(self) -> S {
        self.stream
    }

    /// An error once the time for the answer is over: a reader that takes a byte now and then would have it for
    /// ever.
    fn poll_overdue(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let Some(due) = self.exchange.due() else { return Ok(()) };
        if self.overdue.as_ref().is_none_or(|(at, _)| *at != due) {
            self.overdue = Some((due, Box::pin(sleep_until(due))));
        }
        let (_, ring) = self.overdue.as_mut().expect("set above");
        match ring.as_mut().poll(cx) {
            Poll::Pending => Ok(()),
            Poll::Ready(()) => Err(too_slow("the answer was not read by the end of its time".into())),
        }
    }

    /// The peer has sent its last byte and waits for an answer, or has gone away: both look the same until
    /// something is sent to it, which one that is gone answers with a reset. So it is asked.
    ///
    /// hyper learns of the end when the answer is complete; before, it would drop the answer.
    fn poll_half_closed(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(looks) = &mut self.half_closed else { return Poll::Ready(Ok(())) };
        looks.calls += 1;
        loop {
            let Some((number, is_read)) = self.exchange.now() else { return Poll::Ready(Ok(())) };
            if let Some(error) = self.stream.lost() {
                return Poll::Ready(Err(error));
            }
            if looks.number != number {
                *looks = Looks::new(number);
            }
            if !is_read && looks.waited {
                if looks.calls > CALLS_MIN {
                    // It ended within the body.
                    return Poll::Ready(Ok(()));
                }
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if is_read && !looks.asked {
                looks.asked = true;
                if self.exchange.ask_in_stream() && self.is_flushed {
                    // Nothing of the answer has left, and nothing waits: the buffer takes a line.
                    match Pin::new(&mut self.stream).poll_write(cx, STILL_WORKING) {
                        Poll::Ready(Ok(sent)) if sent < STILL_WORKING.len() => {
                            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                        }
                        Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                        Poll::Ready(Ok(_)) | Poll::Pending => {}
                    }
                }
            }
            ready!(looks.next.as_mut().poll(cx));
            looks.pause = (looks.pause * 2).min(LOOK_PAUSE_MAX);
            looks.next.as_mut().reset(Instant::now() + looks.pause);
            (looks.asked, looks.waited) = (false, true);
        }
    }
}

impl<S: Transport> AsyncRead for Wire<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.half_closed.is_none() {
            let before = buf.filled().len();
            ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
            let read = &buf.filled()[before..];
            if !read.is_empty() || !S::HALF_CLOSES {
                this.exchange.saw(read);
                return Poll::Ready(Ok(()));
            }
            this.half_closed = Some(Looks::new(0));
        }
        this.poll_half_closed(cx)
    }
}

impl<S: Transport> AsyncWrite for Wire<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.is_flushed = false;
        this.poll_overdue(cx)?;
        let bytes = match this.exchange.automatic_answer(bytes) {
            // Its place is taken by one of ours, once hyper has ended the connection.
            Some(AutomaticAnswer { at: 0, status }) => {
                this.exchange.refuse(status);
                return Poll::Ready(Ok(bytes.len()));
            }
            Some(AutomaticAnswer { at, .. }) => &bytes[..at],
            None => bytes,
        };
        Pin::new(&mut this.stream).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(Pin::new(&mut this.stream).poll_flush(cx))?;
        this.is_flushed = true;
        this.exchange.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.exchange.is_refused() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut this.stream).poll_shutdown(cx)
    }
}

impl Looks {
    fn new(number: u64) -> Self {
        let next = Box::pin(sleep(LOOK_PAUSE_MIN));
        Self { number, next, pause: LOOK_PAUSE_MIN, asked: false, waited: false, calls: 0 }
    }
}

/// An interim response: every HTTP/1.1 client must take any number of them before the answer, and this one is
/// the one that the older ones know.
const STILL_WORKING: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Bytes that a client must take in a second on average, of the time in which it is waited for: what a body has to
/// come with, too.
const READ_RATE_MIN: u64 = crate::body::RATE_MIN;

/// See `Looks::calls`.
const CALLS_MIN: u32 = 3;

/// First wait for the reset of a peer that is gone: a round trip in a data centre. Later ones are longer: most
/// that leave are found at once.
const LOOK_PAUSE_MIN: Duration = Duration::from_millis(20);
/// How long one that leaves later computes for nobody.
const LOOK_PAUSE_MAX: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    /// Writes until the peer is given up, which reads so many bytes every 19 s. How much it took, and how long.
    async fn read_by(bytes: usize) -> (u64, Duration, io::Error) {
        let (ours, mut theirs) = duplex(bytes);
        let taken = Arc::default();
        let mut paced = Paced::new(ours, Duration::from_secs(20), Arc::clone(&taken));
        let reader = tokio::spawn(async move {
            let mut buffer = vec![0; bytes];
            while sleep_then_read(&mut theirs, &mut buffer).await {}
        });
        let (block, began) = (vec![0; bytes], Instant::now());
        let error = loop {
            // Whoever reads well enough is written to for an hour.
            if began.elapsed() > Duration::from_secs(3600) {
                break io::ErrorKind::Other.into();
            }
            if let Err(error) = paced.write_all(&block).await {
                break error;
            }
        };
        let time = began.elapsed();
        drop(paced);
        reader.await.unwrap();
        (taken.load(Ordering::Relaxed), time, error)
    }

    async fn sleep_then_read(from: &mut (impl AsyncRead + Unpin), buffer: &mut [u8]) -> bool {
        sleep(Duration::from_secs(19)).await;
        from.read_exact(buffer).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_byte_now_and_then_does_not_hold_a_connection() {
        let (taken, time, error) = read_by(100).await;
        assert_eq!((taken, error.kind()), (300, io::ErrorKind::TimedOut), "{error}");
        assert!(time < Duration::from_secs(60) && error.to_string().contains("38s"), "{time:?}, {error}");
        // A kilobyte a second is enough.
        let (taken, time, error) = read_by(20 << 10).await;
        assert_eq!(error.kind(), io::ErrorKind::Other, "{error}");
        assert!(taken > 3 << 20 && time > Duration::from_secs(3600), "{taken} bytes in {time:?}");
    }
}
