//! Letters between hosts that meet: kind, length, text.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;
use thiserror::Error;

/// What host 0 and the others write to each other after their hellos: kind, length, text.
pub(super) enum Letter {
    /// Where hosts listen, one a line.
    Places(String),
    /// The sender has met everybody.
    Met,
    Go,
    /// The hosts won't come together, or not with the one that reads this.
    NotToday(String),
}

impl Letter {
    pub(super) fn send(&self, stream: &mut TcpStream) -> io::Result<()> {
        let (kind, text) = match self {
            Self::Places(places) => (PLACES, places.as_str()),
            Self::Met => (MET, ""),
            Self::Go => (GO, ""),
            Self::NotToday(why) => (NOT_TODAY, why.as_str()),
        };
        let mut bytes = vec![kind];
        bytes.extend_from_slice(&(text.len() as u32).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
        stream.set_write_timeout(Some(PROMPT))?;
        stream.write_all(&bytes)
    }

    pub(super) fn read(stream: &mut TcpStream) -> io::Result<Self> {
        let mut head = [0; LETTER_HEAD];
        stream.read_exact(&mut head)?;
        let length = u32::from_le_bytes(head[1..].try_into().expect("four bytes"));
        if length > TEXT_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a letter of {length} bytes")));
        }
        let mut bytes = vec![0; length as usize];
        stream.read_exact(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        match head[0] {
            PLACES => Ok(Self::Places(text)),
            MET => Ok(Self::Met),
            GO => Ok(Self::Go),
            NOT_TODAY => Ok(Self::NotToday(text)),
            other => Err(io::Error::new(io::ErrorKind::InvalidData, format!("a letter of kind {other}"))),
        }
    }
}

/// A letter, if one has begun to come; an error if its writer is gone.
pub(super) fn arrived(stream: &mut TcpStream) -> io::Result<Option<Letter>> {
    match silent(stream) {
        Ok(()) => Ok(None),
        Err(Noise::Words) => {
            stream.set_read_timeout(Some(PROMPT))?;
            Letter::read(stream).map(Some)
        }
        Err(Noise::End(error)) => Err(error),
    }
}

/// What breaks a silence.
#[derive(Debug, Error)]
pub(super) enum Noise {
    #[error("it spoke before its time")]
    Words,
    #[error(transparent)]
    End(#[from] io::Error),
}

/// Looks, without waiting, whether a connection is open and quiet.
pub(super) fn silent(stream: &TcpStream) -> Result<(), Noise> {
    stream.set_nonblocking(true)?;
    let peeked = stream.peek(&mut [0]);
    stream.set_nonblocking(false)?;
    match peeked {
        Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "its connection was closed").into()),
        Ok(_) => Err(Noise::Words),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

const PLACES: u8 = 1;
const MET: u8 = 2;
const GO: u8 = 3;
const NOT_TODAY: u8 = 4;
const LETTER_HEAD: usize = 5;
/// A letter is small and leaves in one piece.
const PROMPT: Duration = Duration::from_secs(5);
/// Addresses of 64 hosts are 3 KB.
const TEXT_MAX: u32 = 1 << 16;
