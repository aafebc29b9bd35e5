//! How hosts find each other: all come to the first one, which tells everybody where the others are.
//!
//! ```text
//! host i > 0   -> host 0:   hello (node, nodes, fingerprint, port where it listens)
//! host 0       -> host i:   hello, and once all have come, a letter: where hosts 1 .. i listen
//! host i       -> host j:   hello, for 0 < j < i, and back
//! host i       -> host 0:   a letter: has met everybody
//! host 0       -> host i:   a letter: go, once all have
//! ```
//! Hosts that were started for different meshes, models or builds refuse each other by fingerprint, before
//! any step. Until it says go, host 0 watches everybody and everybody watches host 0, so nobody waits for
//! a host that is gone: before all have come its place is free again, for whoever is started in its stead;
//! afterwards, and when host 0 gives up, a letter says why.

use super::Link;
use super::letter::{Letter, arrived, silent};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Who is where.
#[derive(Clone, Debug)]
pub struct LinkArgs {
    /// Hosts in all, at least 2 (`--nodes`).
    pub nodes: usize,
    /// This host's number, from 0 (`--node-rank`).
    pub node: usize,
    /// Where host 0 listens, `NAME:PORT` (`--master`).
    pub master: String,
    /// Equal on hosts that fit together: a hash of mesh, lattice, policy and model.
    pub fingerprint: u64,
    /// How long hosts wait for each other.
    pub patience: Duration,
}

/// Why hosts did not come together.
#[derive(Debug, Error)]
pub enum LinkError {
    /// The network, on this side.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// Somebody stayed away.
    #[error(
        "after {waited:?} {missing} of {nodes} hosts have not come to {master}; start them with the same --master"
    )]
    Missing {
        /// How long.
        waited: Duration,
        /// How many.
        missing: usize,
        /// Of how many.
        nodes: usize,
        /// Where.
        master: String,
    },
    /// A host that doesn't fit.
    #[error(
        "host {node} does not fit: it says {theirs}, this one {ours}; all hosts need the same build, model and flags but \
         for --node-rank and --port"
    )]
    Unfit {
        /// What it calls itself.
        node: usize,
        /// Its numbers.
        theirs: String,
        /// This host's.
        ours: String,
    },
    /// A host that had come went away.
    #[error("host {node} went away while the hosts met: {why}")]
    Gone {
        /// Which.
        node: usize,
        /// What was seen of it.
        why: String,
    },
    /// Host 0 says why it does not go on.
    #[error("host 0 sends this one away: {why}")]
    SentAway {
        /// In its words.
        why: String,
    },
}

/// What a host says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hello {
    node: u32,
    nodes: u32,
    port: u32,
    fingerprint: u64,
}

impl Link {
    /// Meets all other hosts.
    pub fn connect(args: &LinkArgs) -> Result<Self, LinkError> {
        let streams = if args.node == 0 { gather(args)? } else { join(args)? };
        Self::new(args.node, streams).map_err(|source| failed("setting up connections", source))
    }
}

/// A host that has come to host 0.
struct Guest {
    stream: TcpStream,
    /// Where it listens.
    place: SocketAddr,
}

/// Host 0: waits for everybody, tells all where the others are, and waits until they have met.
fn gather(args: &LinkArgs) -> Result<Vec<Option<TcpStream>>, LinkError> {
    let listener = TcpListener::bind(&args.master)
        .map_err(|source| failed(&format!("listening on --master {}", args.master), source))?;
    let mut guests: Vec<Option<Guest>> = (0..args.nodes).map(|_| None).collect();
    let met = receive(args, &listener, &mut guests).and_then(|()| introduce(args, &mut guests));
    if let Err(error) = met {
        // Whoever has come can say why it ends, and need not find out by itself.
        for guest in guests.iter_mut().flatten() {
            let _ = Letter::NotToday(error.to_string()).send(&mut guest.stream);
        }
        return Err(error);
    }
    Ok(guests.into_iter().map(|guest| guest.map(|guest| guest.stream)).collect())
}

/// Host 0, until all have come.
fn receive(args: &LinkArgs, listener: &TcpListener, guests: &mut [Option<Guest>]) -> Result<(), LinkError> {
    let start = Instant::now();
    listener.set_nonblocking(true).map_err(|e| failed("waiting for other hosts", e))?;
    loop {
        if let Some((hello, stream, from)) = accept(listener, args)? {
            let node = hello.node as usize;
            let place = SocketAddr::new(from.ip(), hello.port as u16);
            if let Some(mut earlier) = guests[node].replace(Guest { stream, place }) {
                // Of a machine that lost power nobody hears that it is gone: who comes last is the one.
                tracing::warn!("host {node} has come again, from {from}; the earlier one is sent away");
                let _ = Letter::NotToday(format!("another host has come as --node-rank {node}"))
                    .send(&mut earlier.stream);
            }
        }
        for (node, guest) in guests.iter_mut().enumerate() {
            if let Some(why) = guest.as_ref().and_then(|guest| silent(&guest.stream).err()) {
                tracing::warn!("host {node} is gone again ({why}); its place is free");
                *guest = None;
            }
        }
        let missing = guests.iter().skip(1).filter(|guest| guest.is_none()).count();
        if missing == 0 {
            return Ok(());
        }
        be_patient(args, start, missing)?;
    }
}

/// Host 0, once all have come: until all have met.
fn introduce(args: &LinkArgs, guests: &mut [Option<Guest>]) -> Result<(), LinkError> {
    let places: Vec<_> = guests.iter().flatten().map(|guest| guest.place.to_string()).collect();
    let start = Instant::now();
    let mut waiting = Vec::new();
    for (guest, node) in guests.iter_mut().flatten().zip(1..) {
        tell(guest, node, &Letter::Places(places[..node - 1].join("\n")))?;
        waiting.push(node);
    }
    while !waiting.is_empty() {
        for (guest, node) in guests.iter_mut().flatten().zip(1..) {
            match arrived(&mut guest.stream) {
                Ok(None) => {}
                Ok(Some(Letter::Met)) => waiting.retain(|&other| other != node),
                Ok(Some(_)) => return Err(LinkError::Gone { node, why: NONSENSE.into() }),
                Err(error) => return Err(LinkError::Gone { node, why: error.to_string() }),
            }
        }
        be_patient(args, start, waiting.len())?;
    }
    guests.iter_mut().flatten().zip(1..).try_for_each(|(guest, node)| tell(guest, node, &Letter::Go))
}

fn tell(guest: &mut Guest, node: usize, letter: &Letter) -> Result<(), LinkError> {
    letter.send(&mut guest.stream).map_err(|error| LinkError::Gone { node, why: error.to_string() })
}

/// Another host: comes to host 0, hears where the earlier ones are, and waits for the later ones.
fn join(args: &LinkArgs) -> Result<Vec<Option<TcpStream>>, LinkError> {
    let mut streams: Vec<Option<TcpStream>> = (0..args.nodes).map(|_| None).collect();
    let mut master = reach(args, &args.master, || Ok(()))?;
    let ip = master.local_addr().map_or(IpAddr::from([0, 0, 0, 0]), |own| own.ip());
    let listener = TcpListener::bind((ip, 0)).map_err(|e| failed("listening for later hosts", e))?;
    let port = listener.local_addr().map_err(|e| failed("listening for later hosts", e))?.port();
    let hello = Hello { port: port.into(), ..Hello::of(args) };
    greet(&mut master, &hello, args)?;
    let Letter::Places(places) = await_letter(args, &mut master)? else { return Err(strange_master()) };
    for (place, node) in places.lines().zip(1..) {
        let mut stream = reach(args, place, || heed(&mut master))?;
        greet(&mut stream, &hello, args)?;
        streams[node] = Some(stream);
    }
    let start = Instant::now();
    listener.set_nonblocking(true).map_err(|e| failed("waiting for other hosts", e))?;
    loop {
        let missing = streams[args.node + 1..].iter().filter(|stream| stream.is_none()).count();
        if missing == 0 {
            break;
        }
        if let Some((hello, stream, _)) = accept(&listener, args)? {
            let place = streams.get_mut(hello.node as usize).filter(|_| hello.node as usize > args.node);
            match place {
                Some(place) => *place = Some(stream),
                None => return Err(unfit(&hello, &Hello::of(args))),
            }
        }
        heed(&mut master)?;
        be_patient(args, start, missing)?;
    }
    Letter::Met.send(&mut master).map_err(|e| LinkError::Gone { node: 0, why: e.to_string() })?;
    let Letter::Go = await_letter(args, &mut master)? else { return Err(strange_master()) };
    streams[0] = Some(master);
    Ok(streams)
}

/// The next letter of host 0, which has begun to wait before this host came to it.
fn await_letter(args: &LinkArgs, master: &mut TcpStream) -> Result<Letter, LinkError> {
    let patience = args.patience + HELLO_WITHIN;
    let heard = master.set_read_timeout(Some(patience)).and_then(|()| Letter::read(master));
    match heard {
        Ok(Letter::NotToday(why)) => Err(LinkError::SentAway { why }),
        Ok(letter) => Ok(letter),
        Err(error) => Err(LinkError::Gone { node: 0, why: error.to_string() }),
    }
}

/// An error if host 0 is gone or says that this is in vain.
fn heed(master: &mut TcpStream) -> Result<(), LinkError> {
    match arrived(master) {
        Ok(None) => Ok(()),
        Ok(Some(Letter::NotToday(why))) => Err(LinkError::SentAway { why }),
        Ok(Some(_)) => Err(strange_master()),
        Err(error) => Err(LinkError::Gone { node: 0, why: error.to_string() }),
    }
}

/// A newcomer that fits, if there is one; others are answered and sent away.
fn accept(
    listener: &TcpListener,
    args: &LinkArgs,
) -> Result<Option<(Hello, TcpStream, SocketAddr)>, LinkError> {
    match listener.accept() {
        Ok((mut stream, from)) => Ok(welcome(&mut stream, args)?.map(|hello| (hello, stream, from))),
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
            // It went away again before it was looked at.
            io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset => Ok(None),
            _ => Err(failed("waiting for other hosts", error)),
        },
    }
}

/// Rests before another look, unless it has been long enough.
fn be_patient(args: &LinkArgs, start: Instant, missing: usize) -> Result<(), LinkError> {
    let (waited, nodes, master) = (start.elapsed(), args.nodes, args.master.clone());
    if waited > args.patience {
        return Err(LinkError::Missing { waited, missing, nodes, master });
    }
    std::thread::park_timeout(LOOK_EVERY);
    Ok(())
}

/// Hears a newcomer's hello and answers with one's own. `None` for whoever is no host at all.
fn welcome(stream: &mut TcpStream, args: &LinkArgs) -> Result<Option<Hello>, LinkError> {
    let heard = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(HELLO_WITHIN)))
        .and_then(|()| Hello::read(stream));
    let Ok(Some(theirs)) = heard else { return Ok(None) };
    let ours = Hello::of(args);
    // Whatever becomes of it, the newcomer can say why.
    let _ = stream.write_all(&ours.bytes());
    let is_other = theirs.node != ours.node && theirs.node > 0 && theirs.node < ours.nodes;
    if !theirs.fits(&ours) || !is_other {
        return Err(unfit(&theirs, &ours));
    }
    Ok(Some(theirs))
}

fn greet(stream: &mut TcpStream, ours: &Hello, args: &LinkArgs) -> Result<(), LinkError> {
    let answered = stream
        .set_read_timeout(Some(args.patience))
        .and_then(|()| stream.write_all(&ours.bytes()))
        .and_then(|()| Hello::read(stream));
    match answered {
        Ok(Some(theirs)) if theirs.fits(ours) => Ok(()),
        Ok(Some(theirs)) => Err(unfit(&theirs, ours)),
        Ok(None) => {
            let source =
                io::Error::new(io::ErrorKind::InvalidData, "whoever listens there is no host of a mesh");
            Err(failed("greeting another host", source))
        }
        Err(source) => Err(failed("greeting another host", source)),
    }
}

/// Connects, again and again until `patience` is over or `heed` has had enough: hosts start in any order.
fn reach(
    args: &LinkArgs,
    place: &str,
    mut heed: impl FnMut() -> Result<(), LinkError>,
) -> Result<TcpStream, LinkError> {
    let start = Instant::now();
    loop {
        heed()?;
        let found = place.to_socket_addrs().and_then(|mut all| {
            all.next().ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the name has no address"))
        });
        match found.and_then(|address| TcpStream::connect_timeout(&address, HELLO_WITHIN)) {
            Ok(stream) => return Ok(stream),
            Err(source) if start.elapsed() > args.patience => {
                return Err(failed(&format!("reaching {place} for {:?}", start.elapsed()), source));
            }
            Err(_) => std::thread::park_timeout(LOOK_EVERY),
        }
    }
}

impl Hello {
    fn of(args: &LinkArgs) -> Self {
        Self { node: args.node as u32, nodes: args.nodes as u32, port: 0, fingerprint: args.fingerprint }
    }

    fn fits(&self, other: &Self) -> bool {
        (self.nodes, self.fingerprint) == (other.nodes, other.fingerprint)
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for word in [self.node, self.nodes, self.port] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&self.fingerprint.to_le_bytes());
        bytes
    }

    /// `None` if these are other bytes.
    fn read(stream: &mut TcpStream) -> io::Result<Option<Self>> {
        let mut bytes = [0; MAGIC.len() + 20];
        stream.read_exact(&mut bytes)?;
        let (magic, rest) = bytes.split_at(MAGIC.len());
        if magic != MAGIC {
            return Ok(None);
        }
        let word = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().expect("four bytes"));
        let fingerprint = u64::from_le_bytes(rest[12..20].try_into().expect("eight bytes"));
        Ok(Some(Self { node: word(0), nodes: word(4), port: word(8), fingerprint }))
    }
}

fn unfit(theirs: &Hello, ours: &Hello) -> LinkError {
    let says = |hello: &Hello| {
        format!("number {} of {} with fingerprint {:#018x}", hello.node, hello.nodes, hello.fingerprint)
    };
    LinkError::Unfit { node: theirs.node as usize, theirs: says(theirs), ours: says(ours) }
}

fn strange_master() -> LinkError {
    LinkError::Gone { node: 0, why: NONSENSE.into() }
}

fn failed(what: &str, source: io::Error) -> LinkError {
    LinkError::Io { what: what.to_owned(), source }
}

/// Name and version of the protocol.
const MAGIC: &[u8] = b"atom link 2\n";
/// A host that has connected speaks at once.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// How soon another try is made, and a host that is gone is missed.
const LOOK_EVERY: Duration = Duration::from_millis(20);
const NONSENSE: &str = "it sent what no host of this build sends";

#[cfg(test)]
mod tests;
