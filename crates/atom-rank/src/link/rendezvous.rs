//! How hosts find each other: all come to the first one, which tells everybody where the others are.
//!
//! ```text
//! host i > 0   -> host 0:   hello (node, nodes, fingerprint, port where it listens)
//! host 0       -> host i:   where hosts 1 .. i listen
//! host i       -> host j:   hello, for 0 < j < i
//! ```
//! Hosts that were started for different meshes, models or builds refuse each other by fingerprint, before
//! any step.

use super::Link;
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

/// Host 0: waits for everybody, then tells all where the others are.
fn gather(args: &LinkArgs) -> Result<Vec<Option<TcpStream>>, LinkError> {
    let listener = TcpListener::bind(&args.master)
        .map_err(|source| failed(&format!("listening on --master {}", args.master), source))?;
    let mut streams: Vec<Option<TcpStream>> = (0..args.nodes).map(|_| None).collect();
    let mut places = vec![None; args.nodes];
    accept_all(args, &listener, args.nodes - 1, |hello, stream, from| {
        let node = hello.node as usize;
        places[node] = Some(SocketAddr::new(from.ip(), hello.port as u16));
        streams[node] = Some(stream);
    })?;
    for node in 1..args.nodes {
        let stream = streams[node].as_mut().expect("all have come");
        let mut text = String::new();
        for place in places[1..node].iter().flatten() {
            text.push_str(&format!("{place}\n"));
        }
        let told = stream
            .write_all(&(text.len() as u32).to_le_bytes())
            .and_then(|()| stream.write_all(text.as_bytes()));
        told.map_err(|source| failed(&format!("telling host {node} where the others are"), source))?;
    }
    Ok(streams)
}

/// Another host: comes to host 0, hears where the earlier ones are, and waits for the later ones.
fn join(args: &LinkArgs) -> Result<Vec<Option<TcpStream>>, LinkError> {
    let mut streams: Vec<Option<TcpStream>> = (0..args.nodes).map(|_| None).collect();
    let mut master = reach(args, &args.master)?;
    let ip = master.local_addr().map_or(IpAddr::from([0, 0, 0, 0]), |own| own.ip());
    let listener = TcpListener::bind((ip, 0)).map_err(|e| failed("listening for later hosts", e))?;
    let port = listener.local_addr().map_err(|e| failed("listening for later hosts", e))?.port();
    let hello = Hello { port: port.into(), ..Hello::of(args) };
    greet(&mut master, &hello, args)?;
    let mut places = String::new();
    let heard = read_text(&mut master, &mut places);
    heard.map_err(|source| failed("hearing from host 0 where the others are", source))?;
    for (place, node) in places.lines().zip(1..) {
        let mut stream = reach(args, place)?;
        greet(&mut stream, &hello, args)?;
        streams[node] = Some(stream);
    }
    streams[0] = Some(master);
    accept_all(args, &listener, args.nodes - 1 - args.node, |hello, stream, _| {
        streams[hello.node as usize] = Some(stream);
    })?;
    Ok(streams)
}

/// Takes `count` hosts that fit; others are answered and sent away.
fn accept_all(
    args: &LinkArgs,
    listener: &TcpListener,
    count: usize,
    mut take: impl FnMut(Hello, TcpStream, SocketAddr),
) -> Result<(), LinkError> {
    let start = Instant::now();
    listener.set_nonblocking(true).map_err(|e| failed("waiting for other hosts", e))?;
    let mut come = vec![false; args.nodes];
    let mut left = count;
    while left > 0 {
        match listener.accept() {
            Ok((mut stream, from)) => {
                let hello = welcome(&mut stream, args, &come)?;
                if let Some(hello) = hello {
                    come[hello.node as usize] = true;
                    left -= 1;
                    take(hello, stream, from);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if start.elapsed() > args.patience {
                    return Err(LinkError::Missing {
                        waited: start.elapsed(),
                        missing: left,
                        nodes: args.nodes,
                        master: args.master.clone(),
                    });
                }
                std::thread::park_timeout(RETRY_EVERY);
            }
            Err(error) => return Err(failed("waiting for other hosts", error)),
        }
    }
    Ok(())
}

/// Hears a newcomer's hello and answers with one's own. `None` for whoever is no host at all.
fn welcome(stream: &mut TcpStream, args: &LinkArgs, come: &[bool]) -> Result<Option<Hello>, LinkError> {
    let heard = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(HELLO_WITHIN)))
        .and_then(|()| Hello::read(stream));
    let Ok(Some(theirs)) = heard else { return Ok(None) };
    let ours = Hello::of(args);
    // Whatever becomes of it, the newcomer can say why.
    let _ = stream.write_all(&ours.bytes());
    let known = come.get(theirs.node as usize).copied();
    if !theirs.fits(&ours) || known != Some(false) || theirs.node as usize == args.node {
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

/// Connects, again and again until `patience` is over: hosts start in any order.
fn reach(args: &LinkArgs, place: &str) -> Result<TcpStream, LinkError> {
    let start = Instant::now();
    loop {
        let found = place.to_socket_addrs().and_then(|mut all| {
            all.next().ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the name has no address"))
        });
        match found.and_then(|address| TcpStream::connect_timeout(&address, HELLO_WITHIN)) {
            Ok(stream) => return Ok(stream),
            Err(source) if start.elapsed() > args.patience => {
                return Err(failed(&format!("reaching {place} for {:?}", start.elapsed()), source));
            }
            Err(_) => std::thread::park_timeout(RETRY_EVERY),
        }
    }
}

fn read_text(stream: &mut TcpStream, text: &mut String) -> io::Result<()> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > TEXT_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{length} bytes of addresses")));
    }
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes)?;
    text.push_str(&String::from_utf8_lossy(&bytes));
    Ok(())
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

fn failed(what: &str, source: io::Error) -> LinkError {
    LinkError::Io { what: what.to_owned(), source }
}

/// Name and version of the protocol.
const MAGIC: &[u8] = b"atom link 1\n";
/// A host that has connected speaks at once.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
const RETRY_EVERY: Duration = Duration::from_millis(50);
/// Addresses of 64 hosts are 3 KB.
const TEXT_MAX: u32 = 1 << 16;
