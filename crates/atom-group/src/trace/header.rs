//! What a trace begins with: all that the first [`GroupState`] is made of.

use super::bytes::{Cursor, put_frame, put_option, put_varint, put_word, take_frame};
use super::{TraceError, VERSION};
use crate::lattice::{BUCKETS_MAX, Lattice};
use crate::policy::{Alignment, Policy};
use crate::state::{GroupState, Patience};
use atom_base::limits::RANKS_MAX;
use std::sync::Arc;
use std::time::Duration;

/// What every group of the trace started with: a replay needs nothing else.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceHeader {
    /// Groups that write into the trace, all alike.
    pub groups: usize,
    /// Lanes of each.
    pub lanes: usize,
    /// Legal step shapes.
    pub lattice: Arc<Lattice>,
    /// Record every bucket before anything else.
    pub record_all: bool,
    /// Deadlines.
    pub patience: Patience,
    /// What groups may decide otherwise than to run everything at once.
    pub policy: Policy,
    /// Hash of the first state, by the build that wrote the trace.
    pub start_hash: u64,
}

impl TraceHeader {
    /// Of `groups` groups that all begin with `state`.
    pub fn of(state: &GroupState, groups: usize) -> Self {
        Self {
            groups,
            lanes: state.lanes,
            lattice: Arc::clone(&state.lattice),
            record_all: state.record_all,
            patience: state.patience,
            policy: state.policy,
            start_hash: state.hash(),
        }
    }

    /// The state before the first step. Its hash is [`start_hash`](Self::start_hash), unless this build
    /// hashes other things than the one that wrote the trace, and so may decide otherwise.
    pub fn state(&self) -> GroupState {
        GroupState::new(Arc::clone(&self.lattice), self.lanes, self.record_all)
            .with_patience(self.patience)
            .with_policy(self.policy)
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>, chain: &mut u32) {
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        // Taken apart, so that a part that is added later can't be forgotten here.
        let Self { groups, lanes, lattice, record_all, patience, policy, start_hash } = self;
        put_frame(out, chain, |out| {
            put_varint(out, *groups as u64);
            put_varint(out, *lanes as u64);
            put_varint(out, lattice.max_num_seqs().into());
            put_varint(out, lattice.buckets().len() as u64);
            let mut below = 0;
            for rows in lattice.buckets().iter().map(|bucket| bucket.rows() as u64) {
                put_varint(out, rows - below);
                below = rows;
            }
            out.push(u8::from(*record_all));
            let Patience { min, first } = patience;
            for time in [min, first] {
                put_varint(out, time.as_secs());
                put_varint(out, time.subsec_nanos().into());
            }
            put_policy(out, policy);
            put_word(out, *start_hash);
        });
    }

    /// The header, and where the first record begins.
    pub(super) fn decode(bytes: &[u8], chain: &mut u32) -> Result<(Self, usize), TraceError> {
        let magic = bytes.len().min(MAGIC.len());
        if bytes[..magic] != MAGIC[..magic] {
            return Err(TraceError::NotATrace);
        }
        let cut = TraceError::NoHeader { bytes: bytes.len() };
        let version = bytes.get(MAGIC.len()..).and_then(|rest| rest.first_chunk());
        let found = u16::from_le_bytes(*version.ok_or_else(|| cut.clone())?);
        if found != VERSION {
            return Err(TraceError::Version { found, known: VERSION });
        }
        let (mut cursor, next) = take_frame(bytes, MAGIC.len() + size_of::<u16>(), chain)?.ok_or(cut)?;
        Ok((read(&mut cursor)?, next))
    }
}

fn read(cursor: &mut Cursor<'_>) -> Result<TraceHeader, TraceError> {
    let groups = cursor.number("the number of groups")?;
    let lanes = cursor.number("the number of lanes")?;
    if !(1..=RANKS_MAX).contains(&groups) || !(1..=RANKS_MAX).contains(&lanes) {
        return Err(cursor.corrupt("the number of groups or lanes"));
    }
    let max_num_seqs: u32 = cursor.number("max_num_seqs")?;
    let count: usize = cursor.number("the number of step sizes")?;
    if max_num_seqs == 0 || !(1..=BUCKETS_MAX).contains(&count) {
        return Err(cursor.corrupt("the number of step sizes"));
    }
    let (mut sizes, mut below) = (Vec::with_capacity(count), 0u32);
    for _ in 0..count {
        let step: u32 = cursor.number("a step size")?;
        let rows = below.checked_add(step).filter(|&rows| rows > below);
        below = rows.ok_or_else(|| cursor.corrupt("a step size"))?;
        sizes.push(below);
    }
    let record_all = read_switch(cursor, "record_all")?;
    let (min, first) = (read_time(cursor)?, read_time(cursor)?);
    let policy = read_policy(cursor)?;
    let start_hash = cursor.word("the hash of the first state")?;
    cursor.finish()?;
    Ok(TraceHeader {
        groups,
        lanes,
        lattice: Arc::new(Lattice::of_sizes(&sizes, max_num_seqs)),
        record_all,
        patience: Patience { min, first },
        policy,
        start_hash,
    })
}

fn put_policy(out: &mut Vec<u8>, policy: &Policy) {
    let Policy { alignment, step_ms_max, padding_per_mille_max } = *policy;
    put_option(out, step_ms_max);
    put_option(out, padding_per_mille_max);
    out.push(u8::from(alignment.is_some()));
    if let Some(alignment) = alignment {
        let Alignment {
            target_fill_per_mille,
            hold_steps_max,
            partial_hold_steps_max,
            stall_steps,
            kv_high_per_mille,
            kv_low_per_mille,
            queue_ms_max,
        } = alignment;
        for number in [target_fill_per_mille, hold_steps_max, partial_hold_steps_max, stall_steps] {
            put_varint(out, number.into());
        }
        for bound in [kv_high_per_mille, kv_low_per_mille, queue_ms_max] {
            put_option(out, bound);
        }
    }
}

fn read_policy(cursor: &mut Cursor<'_>) -> Result<Policy, TraceError> {
    let what = "the policy";
    let (step_ms_max, padding_per_mille_max) = (cursor.option(what)?, cursor.option(what)?);
    let alignment = read_switch(cursor, what)?.then(|| -> Result<_, TraceError> {
        Ok(Alignment {
            target_fill_per_mille: cursor.number(what)?,
            hold_steps_max: cursor.number(what)?,
            partial_hold_steps_max: cursor.number(what)?,
            stall_steps: cursor.number(what)?,
            kv_high_per_mille: cursor.option(what)?,
            kv_low_per_mille: cursor.option(what)?,
            queue_ms_max: cursor.option(what)?,
        })
    });
    Ok(Policy { alignment: alignment.transpose()?, step_ms_max, padding_per_mille_max })
}

fn read_switch(cursor: &mut Cursor<'_>, what: &'static str) -> Result<bool, TraceError> {
    match cursor.byte(what)? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(cursor.corrupt(what)),
    }
}

fn read_time(cursor: &mut Cursor<'_>) -> Result<Duration, TraceError> {
    let (seconds, nanos): (u64, u32) = (cursor.number("a deadline")?, cursor.number("a deadline")?);
    if nanos >= 1_000_000_000 {
        return Err(cursor.corrupt("a deadline"));
    }
    Ok(Duration::new(seconds, nanos))
}

/// The first bytes of every trace.
const MAGIC: &[u8; 8] = b"atomstep";
