//! Connections between the hosts of one group: one process each, one TCP connection between any two.
//!
//! A remote lane is a seat like any other. Whatever a local rank writes for its peers, facts of a step or
//! its part of a collective, also goes to every other host, where a thread writes it into the same place
//! that a rank there would: into the exchange, or into a cell of the group's window. So all that is true of
//! meetings inside a host is true between hosts: nothing is asked for, nothing is answered, and a set of
//! cells is written again only after everybody came to the meeting after next.
//!
//! Every second a heartbeat goes out; a host that was not heard of for [`SILENCE_MAX`] is gone, and so is one
//! whose connection ends. A group can't go on without one of its hosts: it ends, with the host's name.

mod frame;
mod letter;
mod rendezvous;

pub use rendezvous::{LinkArgs, LinkError};

use crate::shared::GroupShared;
use crate::starter::text_of;
use crate::wish::Wish;
use atom_group::Facts;
use frame::{
    Frame, FrameReader, write_bye, write_cell, write_facts, write_heartbeat, write_ready, write_resting,
    write_wish,
};
use std::fmt;
use std::io::{self, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// This host's connections to all others.
pub struct Link {
    node: usize,
    peers: Vec<Option<Peer>>, // [nodes], none at `node`
    closing: Mutex<bool>,
    closed: Condvar,
    farewell_said: AtomicBool,
}

/// What is heard of another host.
pub(crate) enum News {
    /// All of its ranks have loaded.
    Ready,
    /// Somebody asked it for something.
    Wish(Wish),
    /// It rests under the wish of this number.
    Resting(u64),
    /// It is gone, and why.
    Gone(String),
}

struct Peer {
    /// What goes out, and room to put it together: a frame leaves in one piece.
    out: Mutex<(TcpStream, Vec<u8>)>,
    /// Kept to end the reading thread.
    stream: TcpStream,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Link(host {} of {})", self.node, self.peers.len())
    }
}

impl Link {
    fn new(node: usize, streams: Vec<Option<TcpStream>>) -> io::Result<Self> {
        let peer = |stream: TcpStream| {
            stream.set_nodelay(true)?;
            stream.set_write_timeout(Some(SILENCE_MAX))?;
            stream.set_read_timeout(Some(SILENCE_MAX))?;
            Ok::<_, io::Error>(Peer { out: Mutex::new((stream.try_clone()?, Vec::new())), stream })
        };
        Ok(Self {
            node,
            peers: streams.into_iter().map(|s| s.map(peer).transpose()).collect::<Result<_, _>>()?,
            closing: Mutex::new(false),
            closed: Condvar::new(),
            farewell_said: AtomicBool::new(false),
        })
    }

    /// Which host this is.
    pub fn node(&self) -> usize {
        self.node
    }

    /// How many there are.
    pub fn nodes(&self) -> usize {
        self.peers.len()
    }

    /// The lanes of this host, of `lanes` in all.
    pub fn lanes(&self, lanes: usize) -> Range<usize> {
        let each = lanes / self.nodes();
        self.node * each..(self.node + 1) * each
    }

    /// Facts of a local lane, to everybody.
    pub(crate) fn send_facts(&self, lane: usize, facts: &Facts) -> io::Result<()> {
        self.send(|out| write_facts(out, lane, facts))
    }

    /// What a local member brings to a collective of the group, to everybody.
    pub(crate) fn send_cell(
        &self,
        member: usize,
        round: u64,
        values: &[f32],
        counts: &[usize],
    ) -> io::Result<()> {
        self.send(|out| write_cell(out, member, round, values, counts))
    }

    /// Says that all ranks of this host have loaded.
    pub(crate) fn say_ready(&self) -> io::Result<()> {
        self.send(write_ready)
    }

    /// Tells of a wish that was made here.
    pub(crate) fn send_wish(&self, wish: &Wish) -> io::Result<()> {
        self.send(|out| write_wish(out, wish))
    }

    /// Says that the lanes of this host rest under a wish.
    pub(crate) fn say_resting(&self, number: u64) -> io::Result<()> {
        self.send(|out| write_resting(out, number))
    }

    /// Says why this host leaves, once. Peers that can't be told find the connection closed.
    pub(crate) fn say_farewell(&self, why: &str) {
        if !self.farewell_said.swap(true, Ordering::SeqCst) {
            let _ = self.send(|out| write_bye(out, why));
        }
    }

    /// Reads from every peer until the link is closed. `tell` hears of hosts that are ready, and of those
    /// that are gone.
    pub(crate) fn listen(
        self: &Arc<Self>,
        group: &Arc<GroupShared>,
        tell: &(impl Fn(usize, News) + Clone + Send + 'static),
    ) -> io::Result<Vec<JoinHandle<()>>> {
        let mut threads = Vec::new();
        for (node, peer) in self.peers.iter().enumerate() {
            let Some(peer) = peer else { continue };
            let (group, tell, stream) = (Arc::clone(group), tell.clone(), peer.stream.try_clone()?);
            let each = group.lanes.len() / self.nodes();
            let own = node * each..(node + 1) * each;
            let body = move || {
                let (mut form, mut is_ready) = (None, false);
                let take = |frame: Frame<'_>| {
                    match (frame, &form) {
                        (Frame::Ready, _) if !std::mem::replace(&mut is_ready, true) => {
                            tell(node, News::Ready);
                            // What a faster host sends from now on waits until there is a place for it.
                            form = group.next_form(0).ok();
                        }
                        (Frame::Facts { lane, facts }, Some(form)) if own.contains(&lane) => {
                            form.exchange.deliver(lane, &facts);
                        }
                        (Frame::Cell { member, round, values, counts }, Some(form))
                            if own.contains(&member) =>
                        {
                            form.window.deliver(member, round, values, counts);
                        }
                        // Without a form the group has ended, and nobody looks any more.
                        (Frame::Facts { .. } | Frame::Cell { .. }, None) if is_ready => {}
                        (Frame::Wish(wish), _) => tell(node, News::Wish(wish)),
                        (Frame::Resting(number), _) => tell(node, News::Resting(number)),
                        (Frame::Heartbeat | Frame::Bye(_), _) => {}
                        (Frame::Ready | Frame::Facts { .. } | Frame::Cell { .. }, _) => return Err(NONSENSE),
                    }
                    Ok(())
                };
                // Who reads no more must say so: a group that is parked would notice nothing.
                let why = catch_unwind(AssertUnwindSafe(|| read_all(stream, take))).unwrap_or_else(|panic| {
                    format!("the thread that reads from it panicked: {}", text_of(&*panic))
                });
                tell(node, News::Gone(why));
            };
            threads.push(std::thread::Builder::new().name(format!("link {node}")).spawn(body)?);
        }
        let beating = Arc::clone(self);
        threads.push(std::thread::Builder::new().name("heartbeat".into()).spawn(move || beating.beat())?);
        Ok(threads)
    }

    /// Ends all connections.
    pub fn close(&self) {
        *self.closing.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.closed.notify_all();
        for peer in self.peers.iter().flatten() {
            // It may be closed from the other side already.
            let _ = peer.stream.shutdown(Shutdown::Both);
        }
    }

    fn beat(&self) {
        let mut closing = self.closing.lock().unwrap_or_else(PoisonError::into_inner);
        while !*closing {
            // Who can't be reached is found by the thread that reads from it.
            let _ = self.send(write_heartbeat);
            closing = self.closed.wait_timeout(closing, BEAT_EVERY).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn send(&self, write: impl Fn(&mut Vec<u8>)) -> io::Result<()> {
        let mut failed = Ok(());
        for (node, peer) in self.peers.iter().enumerate() {
            let Some(peer) = peer else { continue };
            let mut out = lock(&peer.out);
            let (stream, buffer) = &mut *out;
            buffer.clear();
            write(buffer);
            if let Err(error) = stream.write_all(buffer) {
                // Part of a frame may have left: nothing may follow it.
                let _ = stream.shutdown(Shutdown::Both);
                let error = io::Error::new(error.kind(), format!("host {node} can't be reached: {error}"));
                failed = failed.and(Err(error));
            }
        }
        failed
    }
}

fn lock(out: &Mutex<(TcpStream, Vec<u8>)>) -> MutexGuard<'_, (TcpStream, Vec<u8>)> {
    out.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hands every frame over until the connection ends; says how it did.
fn read_all(stream: TcpStream, mut take: impl FnMut(Frame<'_>) -> Result<(), &'static str>) -> String {
    let mut reader = FrameReader::new(stream);
    loop {
        let start = Instant::now();
        match reader.next() {
            Ok(Some(Frame::Bye(why))) => return format!("it said: {why}"),
            Ok(Some(frame)) => {
                if let Err(why) = take(frame) {
                    return why.to_owned();
                }
            }
            Ok(None) => return "its connection was closed".into(),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return format!("nothing was heard of it for {:?}", start.elapsed());
            }
            Err(error) => return format!("its connection broke: {error}"),
        }
    }
}

/// What a peer did that brings facts or rows of lanes that are not its own, or is ready twice.
const NONSENSE: &str = "it sent what no host of this group sends";
/// Beats are this far apart, also while everybody is parked.
const BEAT_EVERY: Duration = Duration::from_secs(1);
/// A host that beats every second and was not heard of for so long is gone or cut off.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;
