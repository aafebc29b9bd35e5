//! Step traces: everybody's [`Facts`] and what followed, kept compactly, so that a group's decisions
//! can be made again somewhere else. No IO: bytes out, bytes in.
//!
//! A trace is magic and version, a frame with the [`TraceHeader`], and a frame for each record. A frame
//! is `length: u16, !length: u16, payload, checksum: u32`, little-endian; checksums are chained. So a
//! trace that was cut short ends cleanly before its first incomplete frame, and every other damage is
//! an error that names the byte.
//!
//! A step's record has what changed in each lane's facts since the group's step before. In steady
//! decode that is each lane's replay time, and so a record is 36 bytes and 3 or 4 for each lane.

mod bytes;
mod decision;
mod header;

pub use decision::{Decision, Difference};
pub use header::TraceHeader;

use crate::facts::Facts;
use crate::settle::GroupStep;
use crate::state::Divergence;
use bytes::{Cursor, put_difference, put_frame, put_varint, put_word, take_frame};
use thiserror::Error;

/// What [`crate::settle`] decided.
pub type Outcome = Result<GroupStep, Divergence>;

/// Writes a trace into a growing buffer that the caller empties as it likes.
#[derive(Debug)]
pub struct TraceEncoder {
    groups: Vec<Vec<Facts>>, // [groups][lanes], as last written
    at_us: u64,
    chain: u32,
}

/// Reads a trace.
#[derive(Clone, Debug)]
pub struct TraceReader<'a> {
    bytes: &'a [u8],
    offset: usize,
    header: TraceHeader,
    groups: Vec<Vec<Facts>>, // [groups][lanes], as last read
    at_us: u64,
    chain: u32,
    end: Option<TraceEnd>,
}

/// One record.
#[derive(Clone, Debug, PartialEq)]
pub enum TraceRecord {
    /// A step of a group.
    Step(TracedStep),
    /// Steps of a group that the writer had no room for. What the group knew after them is not known.
    Gap {
        /// The group.
        group: usize,
        /// How many.
        steps: u64,
    },
    /// A group formed again: it starts over from the header's state, whatever was before.
    Epoch {
        /// The group.
        group: usize,
        /// Number of the epoch that begins; the first, which no record begins, is 1.
        epoch: u64,
    },
}

/// What went into a step of a group and what came out.
#[derive(Clone, Debug, PartialEq)]
pub struct TracedStep {
    /// The group.
    pub group: usize,
    /// When it was decided, by the clock of the group's first lane.
    pub at_us: u64,
    /// What each lane said.
    pub facts: Vec<Facts>,
    /// What followed.
    pub decision: Decision,
    /// See [`step_hash`](Self::step_hash_of).
    pub step_hash: u64,
}

/// How a trace ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceEnd {
    /// As its writer meant it to.
    Closed,
    /// Short: its writer was killed, or still writes. Everything before `offset` is whole.
    Cut {
        /// Where the record that is not whole begins.
        offset: usize,
        /// Bytes of it that are there.
        bytes: usize,
    },
}

/// Bytes that are no trace.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum TraceError {
    /// Something else.
    #[error("this is no step trace: it does not begin with \"atomstep\"")]
    NotATrace,
    /// Written by another version.
    #[error(
        "the trace has version {found} and this build reads version {known}; replay it with the build that wrote it"
    )]
    Version {
        /// The trace's.
        found: u16,
        /// This build's.
        known: u16,
    },
    /// Cut before the first record.
    #[error("the trace ends after {bytes} bytes, within its header: there is nothing in it")]
    NoHeader {
        /// Bytes that are there.
        bytes: usize,
    },
    /// Damaged.
    #[error("byte {offset} of the trace is damaged: {what} can't be read")]
    Corrupt {
        /// Where.
        offset: usize,
        /// What can't be read there.
        what: &'static str,
    },
}

impl TraceEncoder {
    /// Begins a trace.
    pub fn new(header: &TraceHeader, out: &mut Vec<u8>) -> Self {
        let mut chain = 0;
        header.encode(out, &mut chain);
        Self { groups: vec![vec![Facts::default(); header.lanes]; header.groups], at_us: 0, chain }
    }

    /// Appends a step of a group: what every lane said and what `settle` made of it. Allocates nothing
    /// if `out` has [`RECORD_BYTES_MAX`](Self::RECORD_BYTES_MAX) of room.
    pub fn step(&mut self, group: usize, at_us: u64, facts: &[Facts], outcome: &Outcome, out: &mut Vec<u8>) {
        let Self { groups, at_us: last_us, chain } = self;
        let before = &mut groups[group];
        assert_eq!(facts.len(), before.len(), "facts of every lane");
        put_frame(out, chain, |out| {
            out.push(STEP);
            put_varint(out, group as u64);
            put_difference(out, *last_us, at_us);
            put_facts(out, before, facts);
            decision::put(out, facts, outcome);
            put_word(out, decision::hash(facts, outcome));
        });
        before.copy_from_slice(facts);
        *last_us = at_us;
    }

    /// Appends that `steps` steps of a group are missing here.
    pub fn gap(&mut self, group: usize, steps: u64, out: &mut Vec<u8>) {
        put_frame(out, &mut self.chain, |out| {
            out.push(GAP);
            put_varint(out, group as u64);
            put_varint(out, steps);
        });
        // Nothing that was not written may be needed to read what follows.
        self.groups[group].fill(Facts::default());
    }

    /// Appends that a group forms again.
    pub fn epoch(&mut self, group: usize, epoch: u64, out: &mut Vec<u8>) {
        put_frame(out, &mut self.chain, |out| {
            out.push(EPOCH);
            put_varint(out, group as u64);
            put_varint(out, epoch);
        });
        self.groups[group].fill(Facts::default());
    }

    /// Ends the trace: what is cut off before can be told from what was closed.
    pub fn end(mut self, out: &mut Vec<u8>) {
        put_frame(out, &mut self.chain, |out| out.push(END));
    }

    /// No record is longer.
    pub const RECORD_BYTES_MAX: usize = 8192;
}

impl<'a> TraceReader<'a> {
    /// Reads the header.
    pub fn new(bytes: &'a [u8]) -> Result<Self, TraceError> {
        let mut chain = 0;
        let (header, offset) = TraceHeader::decode(bytes, &mut chain)?;
        let groups = vec![vec![Facts::default(); header.lanes]; header.groups];
        Ok(Self { bytes, offset, header, groups, at_us: 0, chain, end: None })
    }

    /// What the groups started with.
    pub fn header(&self) -> &TraceHeader {
        &self.header
    }

    /// The next record; `None` at the [`end`](Self::end). Not to be called again after an error.
    pub fn read(&mut self) -> Result<Option<TraceRecord>, TraceError> {
        if self.end.is_some() {
            return Ok(None);
        }
        let offset = self.offset;
        let Some((mut cursor, next)) = take_frame(self.bytes, offset, &mut self.chain)? else {
            self.end = Some(TraceEnd::Cut { offset, bytes: self.bytes.len() - offset });
            return Ok(None);
        };
        let record = match cursor.byte("a kind of record")? {
            STEP => Some(TraceRecord::Step(self.step(&mut cursor)?)),
            GAP => {
                let (group, steps) = (self.group(&mut cursor)?, cursor.varint("the length of a gap")?);
                self.groups[group].fill(Facts::default());
                Some(TraceRecord::Gap { group, steps })
            }
            EPOCH => {
                let (group, epoch) = (self.group(&mut cursor)?, cursor.varint("the number of an epoch")?);
                self.groups[group].fill(Facts::default());
                Some(TraceRecord::Epoch { group, epoch })
            }
            END => {
                self.end = Some(TraceEnd::Closed);
                None
            }
            _ => return Err(TraceError::Corrupt { offset, what: "a kind of record" }),
        };
        cursor.finish()?;
        self.offset = next;
        if self.end.is_some() && next < self.bytes.len() {
            return Err(TraceError::Corrupt { offset: next, what: "what follows the end" });
        }
        Ok(record)
    }

    /// How the trace ends, once [`read`](Self::read) has come there.
    pub fn end(&self) -> Option<TraceEnd> {
        self.end
    }

    fn step(&mut self, cursor: &mut Cursor<'_>) -> Result<TracedStep, TraceError> {
        let group = self.group(cursor)?;
        self.at_us = cursor.difference(self.at_us, "a time")?;
        read_facts(cursor, &mut self.groups[group])?;
        let facts = self.groups[group].clone();
        let decision = decision::read(cursor, &facts, self.header.lattice.buckets().len())?;
        let step_hash = cursor.word("the hash of a decision")?;
        Ok(TracedStep { group, at_us: self.at_us, facts, decision, step_hash })
    }

    fn group(&self, cursor: &mut Cursor<'_>) -> Result<usize, TraceError> {
        let group = cursor.number("a group")?;
        if group < self.groups.len() { Ok(group) } else { Err(cursor.corrupt("a group")) }
    }
}

impl TracedStep {
    /// A hash of a whole [`GroupStep`], with what it grants to lanes that said `facts`, or of a
    /// [`Divergence`]; equal if all parts are.
    pub fn step_hash_of(facts: &[Facts], outcome: &Outcome) -> u64 {
        decision::hash(facts, outcome)
    }
}

/// Step number and hash are mostly equal in all lanes, so those of the first are written once. Then of
/// each lane a set of what changed, as bits of a varint, and those parts.
fn put_facts(out: &mut Vec<u8>, before: &[Facts], facts: &[Facts]) {
    let words = |facts: &[Facts], lane: usize| facts[lane].to_words();
    let [step, hash, ..] = words(facts, 0);
    put_difference(out, words(before, 0)[0].wrapping_add(1), step);
    put_word(out, hash);
    for lane in 0..facts.len() {
        let (old, new) = (words(before, lane), words(facts, lane));
        let signature = if lane == 0 { old[2] } else { words(facts, 0)[2] };
        let [own_step, own_hash, own_signature, ..] = new;
        let mut changed = 0;
        for (at, (old, new)) in halves(&old).zip(halves(&new)).enumerate() {
            changed |= u64::from(old != new) << at;
        }
        changed |= u64::from(own_signature != signature) << SIGNATURE;
        changed |= u64::from(own_hash != hash) << HASH;
        changed |= u64::from(own_step != step) << STEP_NO;
        put_varint(out, changed);
        for (_, half) in halves(&new).enumerate().filter(|(at, _)| changed >> at & 1 != 0) {
            put_varint(out, half.into());
        }
        for (bit, word) in [(SIGNATURE, own_signature), (HASH, own_hash), (STEP_NO, own_step)] {
            if changed >> bit & 1 != 0 {
                put_word(out, word);
            }
        }
    }
}

/// `facts`: as they were before, then as they are.
fn read_facts(cursor: &mut Cursor<'_>, facts: &mut [Facts]) -> Result<(), TraceError> {
    let step = cursor.difference(facts[0].to_words()[0].wrapping_add(1), "a step number")?;
    let hash = cursor.word("the hash of a state")?;
    let mut signature = facts[0].to_words()[2];
    for (lane, facts) in facts.iter_mut().enumerate() {
        let mut words = facts.to_words();
        let changed = cursor.varint("what changed in a lane")?;
        if changed >> (STEP_NO + 1) != 0 {
            return Err(cursor.corrupt("what changed in a lane"));
        }
        for at in (0..HALVES).filter(|at| changed >> at & 1 != 0) {
            let half: u32 = cursor.number("a lane's facts")?;
            let shift = 32 * (at as u32 % 2);
            let word = &mut words[WHOLE + at / 2];
            *word = *word & !(u64::from(u32::MAX) << shift) | u64::from(half) << shift;
        }
        let mut whole = |bit: usize, otherwise: u64| match changed >> bit & 1 {
            0 => Ok(otherwise),
            _ => cursor.word("a lane's facts"),
        };
        words[2] = whole(SIGNATURE, signature)?;
        words[1] = whole(HASH, hash)?;
        words[0] = whole(STEP_NO, step)?;
        signature = if lane == 0 { words[2] } else { signature };
        *facts = Facts::from_words(words);
    }
    Ok(())
}

/// The parts of facts beside step, hash and signature: low half first.
fn halves(words: &[u64; Facts::WORDS]) -> impl Iterator<Item = u32> + '_ {
    words[WHOLE..].iter().flat_map(|&word| [word as u32, (word >> 32) as u32])
}

/// Words of facts that are one number: step, hash, signature.
const WHOLE: usize = 3;
const HALVES: usize = 2 * (Facts::WORDS - WHOLE);
const SIGNATURE: usize = HALVES;
const HASH: usize = HALVES + 1;
const STEP_NO: usize = HALVES + 2;

const STEP: u8 = 0;
const GAP: u8 = 1;
const END: u8 = 2;
const EPOCH: u8 = 3;

/// Of the format. It counts as changed when [`Facts`], decisions or the header do.
const VERSION: u16 = 1;

#[cfg(test)]
mod tests;
