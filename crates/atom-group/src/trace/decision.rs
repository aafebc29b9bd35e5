//! What a step decided, as plain data: read from a trace, or made from what `settle` says now.

use super::bytes::{Cursor, put_varint, put_word};
use super::{Outcome, TraceError};
use crate::Facts;
use crate::hold::{Prefill, Release};
use crate::lattice::Bucket;
use crate::settle::{ExitCause, Grant, Grants, GroupStep, StepNote};
use crate::state::{Divergence, Hash};
use atom_base::StepNo;
use std::fmt;

/// A [`GroupStep`] or a [`Divergence`] in which a bucket is only its place in the lattice: buckets
/// themselves come from `settle` alone.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Sleep.
    Park,
    /// End, since everybody asked for it.
    Exit,
    /// End, since this lane can't go on.
    Fatal {
        /// Place of the lane within the group.
        lane: usize,
    },
    /// Record a bucket.
    Record {
        /// Its place in the lattice.
        bucket: usize,
    },
    /// Replay a bucket.
    Replay {
        /// Its place in the lattice.
        bucket: usize,
        /// Rows of each lane.
        grants: Vec<Grant>,
        /// What policy did.
        note: StepNote,
    },
    /// The lanes disagreed, and the group ended.
    Diverged {
        /// What differed.
        what: String,
        /// The step whose exchange found it.
        step: u64,
        /// The lane that differs, and its value.
        lane: (usize, u64),
        /// The lane compared with, and its value.
        own_lane: (usize, u64),
    },
}

/// The first part in which two decisions differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Which part.
    pub field: String,
    /// What the trace has.
    pub recorded: String,
    /// What `settle` says now.
    pub replayed: String,
}

impl Decision {
    /// Of what `settle` returned for these facts.
    pub fn of(facts: &[Facts], outcome: &Outcome) -> Self {
        match outcome {
            Ok(GroupStep::Park) => Self::Park,
            Ok(GroupStep::Exit(ExitCause::Asked)) => Self::Exit,
            Ok(GroupStep::Exit(ExitCause::Fatal { lane })) => Self::Fatal { lane: *lane },
            Ok(GroupStep::Record(bucket)) => Self::Record { bucket: bucket.index() },
            Ok(GroupStep::Step { bucket, grants, note }) => {
                let grants = facts.iter().map(|facts| grants.of(facts)).collect();
                Self::Replay { bucket: bucket.index(), grants, note: *note }
            }
            Err(Divergence { step, what, lane, theirs, own_lane, ours }) => Self::Diverged {
                what: (*what).to_owned(),
                step: step.0,
                lane: (*lane, *theirs),
                own_lane: (*own_lane, *ours),
            },
        }
    }

    /// Where `self`, from a trace, differs from `replayed`.
    pub fn difference(&self, replayed: &Self) -> Option<Difference> {
        let differ = |field: &str, recorded: &dyn fmt::Debug, replayed: &dyn fmt::Debug| {
            let (recorded, replayed) = (format!("{recorded:?}"), format!("{replayed:?}"));
            Some(Difference { field: field.to_owned(), recorded, replayed })
        };
        if self == replayed {
            return None;
        }
        let Self::Replay { bucket, grants, note } = self else { return differ("decision", self, replayed) };
        let Self::Replay { bucket: their_bucket, grants: theirs, note: their_note } = replayed else {
            return differ("decision", self, replayed);
        };
        if bucket != their_bucket {
            return differ("bucket, by its place in the lattice", bucket, their_bucket);
        }
        if grants.len() != theirs.len() {
            return differ("number of grants", &grants.len(), &theirs.len());
        }
        if let Some(lane) = (0..grants.len()).find(|&lane| grants[lane] != theirs[lane]) {
            return differ(&format!("grant of lane {lane}"), &grants[lane], &theirs[lane]);
        }
        differ("note", note, their_note)
    }
}

/// A hash of all parts of a decision, sizes of its bucket too.
pub(super) fn hash(facts: &[Facts], outcome: &Outcome) -> u64 {
    let mut hash = Hash(0x6a09_e667_f3bc_c908);
    let mut bucket_words = |kind: u64, bucket: &Bucket| {
        hash.eat_all(&[kind, bucket.index() as u64, bucket.rows() as u64, bucket.out_rows() as u64]);
    };
    match outcome {
        Ok(GroupStep::Park) => hash.eat(PARK.into()),
        Ok(GroupStep::Exit(ExitCause::Asked)) => hash.eat(EXIT.into()),
        Ok(GroupStep::Exit(ExitCause::Fatal { lane })) => hash.eat_all(&[FATAL.into(), *lane as u64]),
        Ok(GroupStep::Record(bucket)) => bucket_words(RECORD.into(), bucket),
        Ok(GroupStep::Step { bucket, grants, note }) => {
            bucket_words(REPLAY.into(), bucket);
            for Grant { decode_rows, prefill_rows } in facts.iter().map(|facts| grants.of(facts)) {
                hash.eat(u64::from(decode_rows) << 32 | u64::from(prefill_rows));
            }
            let StepNote { prefill, time_cut_rows, edge_cut_rows } = *note;
            let (kind, steps, why) = prefill_parts(prefill);
            hash.eat_all(&[kind, steps, why].map(u64::from));
            hash.eat(u64::from(time_cut_rows) << 32 | u64::from(edge_cut_rows));
        }
        Err(Divergence { step, what, lane, theirs, own_lane, ours }) => {
            what.bytes().for_each(|byte| hash.eat(byte.into()));
            hash.eat_all(&[DIVERGED.into(), step.0, *lane as u64, *theirs, *own_lane as u64, *ours]);
        }
    }
    hash.0
}

/// Grants are mostly what was wanted, and then take no room.
pub(super) fn put(out: &mut Vec<u8>, facts: &[Facts], outcome: &Outcome) {
    let put_lane = |out: &mut Vec<u8>, lane: usize| put_varint(out, lane as u64);
    match outcome {
        Ok(GroupStep::Park) => out.push(PARK),
        Ok(GroupStep::Exit(ExitCause::Asked)) => out.push(EXIT),
        Ok(GroupStep::Exit(ExitCause::Fatal { lane })) => {
            out.push(FATAL);
            put_lane(out, *lane);
        }
        Ok(GroupStep::Record(bucket)) => {
            out.push(RECORD);
            put_varint(out, bucket.index() as u64);
        }
        Ok(GroupStep::Step { bucket, grants, note }) => {
            out.push(REPLAY);
            put_varint(out, bucket.index() as u64);
            put_grants(out, facts, grants);
            put_note(out, *note);
        }
        Err(Divergence { step, what, lane, theirs, own_lane, ours }) => {
            out.push(DIVERGED);
            put_varint(out, what.len() as u64);
            out.extend_from_slice(what.as_bytes());
            let StepNo(step) = *step;
            put_varint(out, step);
            put_lane(out, *lane);
            put_word(out, *theirs);
            put_lane(out, *own_lane);
            put_word(out, *ours);
        }
    }
}

/// `buckets`: of the lattice.
pub(super) fn read(cursor: &mut Cursor<'_>, facts: &[Facts], buckets: usize) -> Result<Decision, TraceError> {
    let read_bucket = |cursor: &mut Cursor<'_>| {
        let bucket = cursor.number("a bucket")?;
        if bucket < buckets { Ok(bucket) } else { Err(cursor.corrupt("a bucket")) }
    };
    let read_lane = |cursor: &mut Cursor<'_>| {
        let lane = cursor.number("a lane")?;
        if lane < facts.len() { Ok(lane) } else { Err(cursor.corrupt("a lane")) }
    };
    let value = "a lane's value";
    Ok(match cursor.byte("a kind of decision")? {
        PARK => Decision::Park,
        EXIT => Decision::Exit,
        FATAL => Decision::Fatal { lane: read_lane(cursor)? },
        RECORD => Decision::Record { bucket: read_bucket(cursor)? },
        REPLAY => Decision::Replay {
            bucket: read_bucket(cursor)?,
            grants: read_grants(cursor, facts)?,
            note: read_note(cursor)?,
        },
        DIVERGED => Decision::Diverged {
            what: cursor.text("what differed")?,
            step: cursor.varint("a step")?,
            lane: (read_lane(cursor)?, cursor.word(value)?),
            own_lane: (read_lane(cursor)?, cursor.word(value)?),
        },
        _ => return Err(cursor.corrupt("a kind of decision")),
    })
}

fn put_grants(out: &mut Vec<u8>, facts: &[Facts], grants: &Grants) {
    let matches =
        |wanted: fn(&Facts) -> Grant| facts.iter().map(wanted).eq(facts.iter().map(|f| grants.of(f)));
    if matches(everything) {
        out.push(EVERYTHING);
    } else if matches(decode_only) {
        out.push(DECODE_ONLY);
    } else {
        out.push(LISTED);
        for Grant { decode_rows, prefill_rows } in facts.iter().map(|facts| grants.of(facts)) {
            put_varint(out, decode_rows.into());
            put_varint(out, prefill_rows.into());
        }
    }
}

fn read_grants(cursor: &mut Cursor<'_>, facts: &[Facts]) -> Result<Vec<Grant>, TraceError> {
    let what = "a grant";
    match cursor.byte(what)? {
        EVERYTHING => Ok(facts.iter().map(everything).collect()),
        DECODE_ONLY => Ok(facts.iter().map(decode_only).collect()),
        LISTED => facts
            .iter()
            .map(|_| Ok(Grant { decode_rows: cursor.number(what)?, prefill_rows: cursor.number(what)? }))
            .collect(),
        _ => Err(cursor.corrupt(what)),
    }
}

fn everything(facts: &Facts) -> Grant {
    Grant { decode_rows: facts.decode_rows, prefill_rows: facts.prefill_rows }
}

fn decode_only(facts: &Facts) -> Grant {
    Grant { decode_rows: facts.decode_rows, prefill_rows: 0 }
}

fn put_note(out: &mut Vec<u8>, note: StepNote) {
    let StepNote { prefill, time_cut_rows, edge_cut_rows } = note;
    let (kind, steps, why) = prefill_parts(prefill);
    out.push(kind);
    if kind != 0 {
        out.extend_from_slice(&[steps, why]);
    }
    put_varint(out, time_cut_rows.into());
    put_varint(out, edge_cut_rows.into());
}

fn read_note(cursor: &mut Cursor<'_>) -> Result<StepNote, TraceError> {
    let what = "what policy did";
    let kind = cursor.byte(what)?;
    let (steps, why) = if kind == 0 { (0, 0) } else { (cursor.byte(what)?, cursor.byte(what)?) };
    let prefill = match kind {
        0 => Prefill::Free,
        1 => Prefill::Held { steps },
        2 => {
            let why = RELEASES.into_iter().find(|&other| release_code(other) == why);
            Prefill::Released { steps, why: why.ok_or_else(|| cursor.corrupt(what))? }
        }
        _ => return Err(cursor.corrupt(what)),
    };
    Ok(StepNote { prefill, time_cut_rows: cursor.number(what)?, edge_cut_rows: cursor.number(what)? })
}

/// Kind, steps, reason.
fn prefill_parts(prefill: Prefill) -> (u8, u8, u8) {
    match prefill {
        Prefill::Free => (0, 0, 0),
        Prefill::Held { steps } => (1, steps, 0),
        Prefill::Released { steps, why } => (2, steps, release_code(why)),
    }
}

/// Part of the format. A reason that is added does not compile until it is here and in [`RELEASES`].
fn release_code(why: Release) -> u8 {
    match why {
        Release::NobodyDecodes => 0,
        Release::Cache => 1,
        Release::Queue => 2,
        Release::Limit => 3,
        Release::Partial => 4,
        Release::Filled => 5,
        Release::Stalled => 6,
        Release::Starved => 7,
    }
}

const RELEASES: [Release; 8] = [
    Release::NobodyDecodes,
    Release::Cache,
    Release::Queue,
    Release::Limit,
    Release::Partial,
    Release::Filled,
    Release::Stalled,
    Release::Starved,
];

const PARK: u8 = 0;
const EXIT: u8 = 1;
const FATAL: u8 = 2;
const RECORD: u8 = 3;
const REPLAY: u8 = 4;
const DIVERGED: u8 = 5;

const EVERYTHING: u8 = 0;
const DECODE_ONLY: u8 = 1;
const LISTED: u8 = 2;
