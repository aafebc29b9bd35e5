//! Frames between hosts, little-endian: kind, lane or member, number, lengths, payload.
//!
//! ```text
//! u8 kind | u8 0 | u16 lane | u32 counts | u64 number | u32 length | payload
//! ```
//! Facts: their words. Cell: `counts` x u32, then `length` x f32. Bye: `length` bytes of text. Wish: its
//! number, and its flags in place of the lane.

use crate::wish::Wish;
use atom_group::Facts;
use std::io::{self, Read};

/// What comes from another host.
pub(super) enum Frame<'a> {
    Facts {
        lane: usize,
        facts: Facts,
    },
    Cell {
        member: usize,
        round: u64,
        values: Floats<'a>,
        counts: Counts<'a>,
    },
    Heartbeat,
    /// All ranks of the host have loaded.
    Ready,
    /// What somebody wants of the group.
    Wish(Wish),
    /// The lanes of the host rest, as the wish of this number has it.
    Resting(u64),
    Bye(&'a str),
}

/// Values as they lie in the frame.
pub(super) type Floats<'a> = std::iter::Map<std::slice::Iter<'a, [u8; 4]>, fn(&[u8; 4]) -> f32>;
/// Counts as they lie in the frame.
pub(super) type Counts<'a> = std::iter::Map<std::slice::Iter<'a, [u8; 4]>, fn(&[u8; 4]) -> usize>;

/// Cuts a stream of bytes into frames.
pub(super) struct FrameReader<R> {
    stream: R,
    payload: Vec<u8>,
}

impl<R: Read> FrameReader<R> {
    pub(super) fn new(stream: R) -> Self {
        Self { stream, payload: Vec::new() }
    }

    /// The next frame; none if the stream ends before one begins.
    pub(super) fn next(&mut self) -> io::Result<Option<Frame<'_>>> {
        let mut head = [0; HEAD];
        let first = loop {
            match self.stream.read(&mut head) {
                // A debugger, or a shell that stops and continues us.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        if first == 0 {
            return Ok(None);
        }
        self.stream.read_exact(&mut head[first..])?;
        let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
        let (kind, lane) = (head[0], usize::from(u16::from_le_bytes([head[2], head[3]])));
        let (counts, length) = (word(4) as usize, word(16) as usize);
        let number = u64::from_le_bytes(head[8..16].try_into().expect("eight bytes"));
        let bytes = match kind {
            FACTS => Facts::BYTES,
            CELL => 4 * (counts + length),
            BYE => length,
            HEARTBEAT | READY | WISH | RESTING => 0,
            other => return Err(damaged(format!("a frame of kind {other}"))),
        };
        if bytes > PAYLOAD_MAX {
            return Err(damaged(format!("a frame of {bytes} bytes")));
        }
        self.payload.resize(bytes, 0);
        self.stream.read_exact(&mut self.payload)?;
        Ok(Some(match kind {
            FACTS => {
                let bytes = self.payload.as_slice().try_into().expect("read as many");
                Frame::Facts { lane, facts: Facts::from_bytes(bytes) }
            }
            CELL => {
                let (count_bytes, value_bytes) = self.payload.split_at(4 * counts);
                let counts = count_bytes.as_chunks::<4>().0.iter();
                let values = value_bytes.as_chunks::<4>().0.iter();
                Frame::Cell {
                    member: lane,
                    round: number,
                    values: values.map((|b| f32::from_le_bytes(*b)) as fn(&[u8; 4]) -> f32),
                    counts: counts.map((|b| u32::from_le_bytes(*b) as usize) as fn(&[u8; 4]) -> usize),
                }
            }
            BYE => Frame::Bye(std::str::from_utf8(&self.payload).unwrap_or("something that is no text")),
            READY => Frame::Ready,
            WISH => Frame::Wish(Wish {
                number,
                node: counts,
                paused: lane & PAUSED != 0,
                draining: lane & DRAINING != 0,
            }),
            RESTING => Frame::Resting(number),
            _ => Frame::Heartbeat,
        }))
    }
}

pub(super) fn write_facts(out: &mut Vec<u8>, lane: usize, facts: &Facts) {
    head(out, FACTS, lane, 0, facts.step.0, 0);
    out.extend_from_slice(&facts.to_bytes());
}

pub(super) fn write_cell(out: &mut Vec<u8>, member: usize, round: u64, values: &[f32], counts: &[usize]) {
    head(out, CELL, member, counts.len(), round, values.len());
    for &count in counts {
        out.extend_from_slice(&(count as u32).to_le_bytes());
    }
    for value in values {
        out.extend_from_slice(&value.to_le_bytes());
    }
}

pub(super) fn write_heartbeat(out: &mut Vec<u8>) {
    head(out, HEARTBEAT, 0, 0, 0, 0);
}

pub(super) fn write_ready(out: &mut Vec<u8>) {
    head(out, READY, 0, 0, 0, 0);
}

pub(super) fn write_wish(out: &mut Vec<u8>, wish: &Wish) {
    let flag = |is_set, flag| if is_set { flag } else { 0 };
    let flags = flag(wish.paused, PAUSED) | flag(wish.draining, DRAINING);
    head(out, WISH, flags, wish.node, wish.number, 0);
}

pub(super) fn write_resting(out: &mut Vec<u8>, number: u64) {
    head(out, RESTING, 0, 0, number, 0);
}

pub(super) fn write_bye(out: &mut Vec<u8>, why: &str) {
    head(out, BYE, 0, 0, 0, why.len());
    out.extend_from_slice(why.as_bytes());
}

fn head(out: &mut Vec<u8>, kind: u8, lane: usize, counts: usize, number: u64, length: usize) {
    out.extend_from_slice(&[kind, 0]);
    out.extend_from_slice(&(lane as u16).to_le_bytes());
    out.extend_from_slice(&(counts as u32).to_le_bytes());
    out.extend_from_slice(&number.to_le_bytes());
    out.extend_from_slice(&(length as u32).to_le_bytes());
}

fn damaged(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{what}: this is no host of the same build"))
}

const FACTS: u8 = 1;
const CELL: u8 = 2;
const HEARTBEAT: u8 = 3;
const BYE: u8 = 4;
const READY: u8 = 5;
const WISH: u8 = 6;
const RESTING: u8 = 7;
const PAUSED: usize = 1;
const DRAINING: usize = 2;
const HEAD: usize = 20;
/// Bytes of a frame. The rows of a whole step of 16,384 rows of 8,192 values, eight times, are 4 GiB.
const PAYLOAD_MAX: usize = 4 << 30;
