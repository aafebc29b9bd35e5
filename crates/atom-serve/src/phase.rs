//! The server's way out: serving, draining, cut.

use tokio::sync::watch;

/// Which part of its life the server is in, and how many generation requests are running.
#[derive(Debug)]
pub(crate) struct Phases {
    phase: watch::Sender<Phase>,
    running: watch::Sender<usize>,
}

/// In order; the server never goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Requests are taken.
    Serving,
    /// Running requests go on; new ones are refused and `/health` is red.
    Draining,
    /// As before, and the process ends with the last of them: no pause may hold them up.
    Leaving,
    /// Running requests end with an error now.
    Cut,
    /// Connections close as soon as what was answered has left.
    Closed,
}

/// A generation request in progress, body included.
#[derive(Debug)]
pub(crate) struct Running {
    running: watch::Sender<usize>,
}

impl Phases {
    pub(crate) fn new() -> Self {
        Self { phase: watch::Sender::new(Phase::Serving), running: watch::Sender::new(0) }
    }

    /// Moves on to `phase`.
    pub(crate) fn enter(&self, phase: Phase) {
        self.phase.send_modify(|now| {
            assert!(*now <= phase, "the server went from {now:?} back to {phase:?}");
            *now = phase;
        });
    }

    /// Moves on to `phase`, or stays where it is if that is further.
    pub(crate) fn enter_at_least(&self, phase: Phase) {
        self.phase.send_modify(|now| *now = phase.max(*now));
    }

    pub(crate) fn now(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Counts a request in, or refuses it because the server is on its way out.
    pub(crate) fn begin(&self) -> Option<Running> {
        // Counted first: a drain that begins in between waits for this request or is seen here.
        self.running.send_modify(|count| *count += 1);
        let running = Running { running: self.running.clone() };
        (self.now() == Phase::Serving).then_some(running)
    }

    /// Requests in progress.
    pub(crate) fn running(&self) -> usize {
        *self.running.borrow()
    }

    /// Resolves when no request is in progress.
    pub(crate) async fn idle(&self) {
        let mut running = self.running.subscribe();
        running.wait_for(|&count| count == 0).await.expect("the sender is in self");
    }

    /// Resolves when the server has come to `phase` or is past it. The future outlives the borrow.
    pub(crate) fn reached(&self, phase: Phase) -> impl Future<Output = ()> + Send + use<> {
        let mut watch = self.phase.subscribe();
        async move {
            if watch.wait_for(|&now| now >= phase).await.is_err() {
                // The server is gone without having drained: then nobody is told anything any more.
                std::future::pending::<()>().await;
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.running.send_modify(|count| *count -= 1);
    }
}
