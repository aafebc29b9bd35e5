//! One thread that decides whether the host can go on: it hears of every rank that ends and watches
//! every lane's deadline. Loss is decided here and nowhere else.

use crate::host::{GroupShared, HostShared, reason};
use atom_base::Seat;
use atom_engine::EngineError;
use atom_group::Activity;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// A rank thread ended: `Ok` if it was asked to.
pub(crate) struct Ended {
    pub(crate) seat: Seat,
    pub(crate) outcome: Result<(), String>,
}

/// Runs until every rank has ended or will never end.
pub(crate) fn watch(host: &Arc<HostShared>, ended: &Receiver<Ended>) {
    let mut left = host.mesh.ranks();
    while left > 0 {
        match ended.recv_timeout(LOOK_EVERY) {
            Ok(Ended { seat, outcome }) => {
                left -= 1;
                if let Err(error) = outcome {
                    lose(host, usize::from(seat.group), &reason(&seat, &error));
                }
            }
            Err(RecvTimeoutError::Timeout) => look(host),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Finds lanes that are past their deadline. A peer would notice in its exchange; a lane alone has none.
fn look(host: &Arc<HostShared>) {
    let now_ms = host.epoch.elapsed().as_millis() as u64;
    for (number, group) in host.groups.iter().enumerate() {
        if group.exchange.is_closed() {
            continue;
        }
        for (lane, shared) in group.lanes.iter().enumerate() {
            let sighting = group.exchange.sighting(lane);
            if matches!(sighting.activity, Activity::Starting | Activity::Parked | Activity::Ended) {
                continue;
            }
            let late = now_ms.saturating_sub(shared.gauges.deadline_ms.load(Ordering::Relaxed));
            if late > GRACE_MS {
                lose(host, number, &format!("{sighting} is {late} ms past its deadline"));
            }
        }
    }
}

/// Ends a group: the first reason is kept, every wait returns, every request is answered.
fn lose(host: &Arc<HostShared>, group: usize, reason: &str) {
    host.set_fault(reason);
    close(&host.groups[group]);
    let error = EngineError::Rank(reason.to_owned());
    host.outbox.fail(&host.lanes_of(group), &error);
}

/// Ends every wait of a group.
pub(crate) fn close(group: &GroupShared) {
    group.exchange.close();
    group.window.meeting.close();
    for lane in &group.lanes {
        lane.window.meeting.close();
        lane.board.meeting.close();
    }
}

/// Health must be red within a second of a deadline.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Peers in the exchange find a late lane first and know more about it.
const GRACE_MS: u64 = 500;
