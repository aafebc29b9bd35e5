//! Connections: accepting them, serving them, and closing down without cutting anybody short.

use crate::connection::{FLUSH, connection};
use crate::phase::Phase;
use crate::routes::router_for;
use crate::server::Server;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinSet, unconstrained, yield_now};
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// How a server came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Requests that were still running at the drain's deadline, and got an error.
    pub cut: usize,
}

/// Serves until `shutdown` resolves, then drains.
///
/// While it drains the server still accepts connections, so that `/health` can say 503 and new requests
/// get a 503 that names the reason instead of a refused connection. Running requests have
/// [`ServerOptions::drain`](crate::ServerOptions) to finish; what runs longer is aborted and gets an error.
pub async fn serve(
    listener: TcpListener,
    server: Arc<Server>,
    shutdown: impl Future<Output = ()>,
) -> Drained {
    let is_local = listener.local_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback());
    let routes = router_for(server.clone(), is_local);
    let mut connections = JoinSet::new();
    {
        let drained = drain(&server, shutdown);
        let mut drained = pin!(drained);
        loop {
            tokio::select! {
                biased;
                (drained, deadline) = &mut drained => {
                    let pending = waiting(&listener).await;
                    for (stream, peer) in pending {
                        connections.spawn(connection(stream, peer, routes.clone(), server.clone()));
                    }
                    close(&server, connections, deadline).await;
                    break drained;
                }
                Some(ended) = connections.join_next(), if !connections.is_empty() => report(ended),
                accepted = listener.accept(), if connections.len() < CONNECTIONS_MAX => {
                    match accepted {
                        Ok((stream, peer)) => {
                            connections.spawn(connection(stream, peer, routes.clone(), server.clone()));
                        }
                        Err(error) => refused(error).await,
                    }
                }
            }
        }
    }
}

/// Connections that were made and not accepted yet: who has sent a request on one gets an answer, a 503, and
/// not a reset.
async fn waiting(listener: &TcpListener) -> Vec<(TcpStream, SocketAddr)> {
    // Lets the runtime hear of the newest.
    yield_now().await;
    let mut pending = Vec::new();
    let accept = poll_fn(|cx| {
        while pending.len() < BACKLOG_MAX {
            match listener.poll_accept(cx) {
                Poll::Ready(Ok(accepted)) => pending.push(accepted),
                Poll::Ready(Err(_)) | Poll::Pending => break,
            }
        }
        Poll::Ready(())
    });
    unconstrained(accept).await;
    pending
}

/// Waits for the word, then for the running requests. Says until when the drain may take.
async fn drain(server: &Server, shutdown: impl Future<Output = ()>) -> (Drained, Instant) {
    tokio::select! {
        () = shutdown => {}
        () = server.exit.notified() => tracing::info!("told to exit over HTTP"),
    }
    server.phases.enter(Phase::Leaving);
    let running = server.phases.running();
    tracing::info!(running, "draining for at most {:?}", server.options.drain);
    let deadline = Instant::now() + server.options.drain;
    let in_time = timeout_at(deadline, finish(server)).await.is_ok();
    let cut = if in_time { 0 } else { server.phases.running() };
    if cut > 0 {
        tracing::warn!(cut, "requests are aborted: the drain's time is over");
        server.phases.enter(Phase::Cut);
        // They only have to notice; a reader that takes nothing can't hold us up.
        let _ = timeout(FLUSH, server.phases.idle()).await;
    }
    (Drained { cut }, deadline)
}

/// Waits until every request has its answer. A pause would keep them from it, whoever ordered it: before
/// this server was told to leave, or meanwhile of another host. So it is ended whenever it is seen.
async fn finish(server: &Server) {
    let go_on = async {
        loop {
            if server.engine.is_pausing() {
                tracing::info!("the pause ends: the server is leaving");
                server.engine.resume();
            }
            sleep(PAUSE_LOOK_EVERY).await;
        }
    };
    tokio::select! {
        // In this order: other hosts of a paused group have requests too when this one has none.
        biased;
        () = go_on => {}
        () = server.phases.idle() => {}
    }
}

/// Lets answers that are complete leave, until `deadline` at the most as long as their readers take them, and closes.
async fn close(server: &Server, mut connections: JoinSet<()>, deadline: Instant) {
    server.phases.enter(Phase::Closed);
    let all = async {
        while connections.join_next().await.is_some_and(|ended| {
            report(ended);
            true
        }) {}
    };
    if timeout_at(deadline.max(Instant::now() + FLUSH), all).await.is_err() {
        connections.shutdown().await;
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended.as_ref()
        && error.is_panic()
    {
        tracing::error!("a connection panicked, which is a bug of ours: {error}");
    }
}

/// Out of descriptors, most likely: accepting again at once would only spin.
async fn refused(error: io::Error) {
    let transient =
        [io::ErrorKind::ConnectionRefused, io::ErrorKind::ConnectionAborted, io::ErrorKind::ConnectionReset];
    if !transient.contains(&error.kind()) {
        tracing::warn!("can't accept a connection: {error}");
        sleep(ACCEPT_PAUSE).await;
    }
}

/// Connections at once. Each holds a descriptor and some 10 kB; beyond this they wait in the backlog.
const CONNECTIONS_MAX: usize = 16_384;

/// What the system's backlog holds at the most, by default.
const BACKLOG_MAX: usize = 4096;

/// How long another host's pause may hold up the requests of a server that leaves.
const PAUSE_LOOK_EVERY: Duration = Duration::from_millis(100);

const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
