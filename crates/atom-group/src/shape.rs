//! The shape of a step: how large it may be, what is held back, and the bucket.
//!
//! In this order: `--step-ms-max` caps the bucket, alignment holds prompts or lets them run, and the
//! bound of padding cuts them to an edge. Each takes prompt rows away and none takes decode rows; each
//! leaves every lane with prompts a row, or has a bound on how long it does not.

use crate::facts::Facts;
use crate::hold::{Hold, Prefill, Release};
use crate::lattice::{Bucket, GroupRows};
use crate::policy::{STARVED_STEPS_MAX, STEP_FIXED_ROWS};
use crate::settle::{Grant, Grants, StepNote};
use crate::state::GroupState;

/// What [`choose`] found.
#[expect(clippy::large_enum_variant, reason = "lives for a moment, and a step allocates nothing")]
pub(crate) enum Shape {
    /// Make this recording first.
    Record(Bucket),
    /// Replay.
    Step {
        bucket: Bucket,
        grants: Grants,
        note: StepNote,
        hold: Hold,
        /// See [`GroupState::starved_steps`].
        starved_steps: u32,
    },
}

/// Shapes a step of lanes of which at least one has rows.
pub(crate) fn choose(state: &GroupState, facts: &[Facts]) -> Shape {
    let top = state.top();
    let wanted = Grants::of(facts, top, false);
    let decoding = facts.iter().any(|f| f.decode_rows > 0);
    let cap = match state.policy.step_ms_max {
        Some(ms) if decoding => match Cap::within(ms, state, &wanted) {
            Ok(cap) => cap,
            Err(record) => return Shape::Record(record),
        },
        _ => Cap { bucket: top, next: None },
    };
    let (hold, prefill) = hold(state, facts, cap.bucket);
    let held = matches!(prefill, Prefill::Held { .. });
    if !held && let Some(record) = cap.next {
        return Shape::Record(record);
    }
    let capped = Grants::of(facts, cap.bucket, held);
    let bucket = match bucket(state, &capped, decoding) {
        Ok(bucket) => bucket,
        Err(record) => return Shape::Record(record),
    };
    let grants = capped.within(bucket);
    let note = StepNote {
        prefill,
        time_cut_rows: if held { 0 } else { wanted.prefill_rows() - capped.prefill_rows() },
        edge_cut_rows: capped.prefill_rows() - grants.prefill_rows(),
    };
    let starved = |(f, g): (&Facts, &Grant)| f.prefill_rows > 0 && g.prefill_rows == 0;
    let is_starved = !held && facts.iter().zip(grants.as_slice()).any(starved);
    let starved_steps = if is_starved { state.starved_steps.saturating_add(1) } else { 0 };
    Shape::Step { bucket, grants, note, hold, starved_steps }
}

/// Prompts that the cap left without a row are not held besides.
fn hold(state: &GroupState, facts: &[Facts], cap: Bucket) -> (Hold, Prefill) {
    let mut hold = state.hold;
    let prefill = match &state.policy.alignment {
        None => Prefill::Free,
        Some(_) if state.starved_steps > 0 => {
            hold.rest();
            Prefill::Released { steps: 0, why: Release::Starved }
        }
        Some(knobs) => hold.decide(knobs, facts, cap.rows() as u32),
    };
    (hold, prefill)
}

/// How large a step may be while somebody decodes.
struct Cap {
    /// The largest recorded bucket that is predicted to be fast enough, or the one that decode needs.
    bucket: Bucket,
    /// A recording that would allow much more.
    next: Option<Bucket>,
}

impl Cap {
    /// `Err`: record this bucket, since somebody's prompts have had no row for too long.
    fn within(step_ms_max: u32, state: &GroupState, wanted: &Grants) -> Result<Self, Bucket> {
        let limit_us = step_ms_max.saturating_mul(1000);
        let decode = wanted.as_slice().iter().map(|g| g.decode_rows).max().unwrap_or(0);
        let floor = state.recorded_holding(GroupRows::settled(decode));
        let (mut legal, mut recorded) = (floor, floor);
        for (bucket, us) in state.pace.predicted(state.lattice.buckets(), state.step) {
            if us.is_some_and(|us| us <= limit_us) && bucket.rows() > floor.rows() {
                legal = bucket;
                recorded = if state.has_recorded(bucket) { bucket } else { recorded };
            }
        }
        let starving = |g: &&Grant| g.prefill_rows > 0 && g.decode_rows as usize >= recorded.rows();
        let needed = wanted.as_slice().iter().filter(starving).map(|g| g.decode_rows + 1).max();
        if let Some(rows) = needed.filter(|_| state.starved_steps >= STARVED_STEPS_MAX) {
            let lifted = state.lattice.holding(GroupRows::settled(rows));
            match state.has_recorded(lifted) {
                true => return Ok(Self { bucket: lifted, next: None }),
                false if spaced(state) => return Err(lifted),
                false => {}
            }
        }
        // Of what fits, no more than is wanted.
        let next = state.lattice.holding(wanted.largest().min(GroupRows::settled(legal.rows() as u32)));
        let pays = next.rows() >= 2 * recorded.rows() && !state.has_recorded(next) && spaced(state);
        Ok(Self { bucket: recorded, next: pays.then_some(next) })
    }
}

/// The bucket for these grants: recorded, and holding them all unless it pays to cut prompts to the
/// edge below. `Err`: record this one first.
fn bucket(state: &GroupState, grants: &Grants, decoding: bool) -> Result<Bucket, Bucket> {
    let rows = grants.largest();
    let legal = |rows| state.lattice.holding(rows);
    let recorded = |rows| state.recorded_holding(rows);
    let (wanted, above) = (legal(rows), recorded(rows));
    let below = || state.lattice.at_most(rows.count() as usize);
    let edge = below().filter(|edge| pays(state, grants, *edge, wanted, legal));
    let best = edge.unwrap_or(wanted);
    if state.has_recorded(best) {
        return Ok(best);
    }
    let padding = above.rows() - rows.count() as usize;
    let much = above.rows() >= 2 * best.rows()
        || is_wasteful(state, rows, above) && padding > STEP_FIXED_ROWS as usize;
    if spaced(state) && (!decoding || much) {
        return Err(best);
    }
    let buckets = state.lattice.buckets();
    let below = buckets[..wanted.index()].iter().rev().copied().find(|b| state.has_recorded(*b));
    Ok(below.filter(|edge| pays(state, grants, *edge, above, recorded)).unwrap_or(above))
}

/// True if prompts should be cut to `edge` rather than padded to `above`: the padding is above its
/// bound, nobody's decode rows and nobody's prompts suffer, and it takes less, counting for each step
/// its rows and what it costs beside them. `holding` finds buckets as `above` was found.
fn pays(
    state: &GroupState,
    grants: &Grants,
    edge: Bucket,
    above: Bucket,
    holding: impl Fn(GroupRows) -> Bucket,
) -> bool {
    let rows = grants.largest();
    if edge.rows() >= rows.count() as usize || !is_wasteful(state, rows, above) {
        return false;
    }
    let edge_rows = edge.rows() as u32;
    let grants = grants.as_slice();
    let fits = |g: &Grant| g.decode_rows + u32::from(g.prefill_rows > 0) <= edge_rows;
    if !grants.iter().all(fits) {
        return false;
    }
    // The lane that needs most steps needs `chunks` of the edge, and one for what is left.
    let lane = |g: &Grant| {
        let chunk = edge_rows - g.decode_rows;
        let (chunks, rest) = (g.prefill_rows / chunk, g.prefill_rows % chunk);
        let last = if rest == 0 { 0 } else { cost(holding(GroupRows::settled(rest + g.decode_rows))) };
        u64::from(chunks) * cost(edge) + last
    };
    let cut = grants.iter().filter(|g| g.rows() > edge_rows).map(lane).max();
    cut.is_some_and(|cut| cut < cost(above))
}

/// More padding beside the largest lane's rows than policy allows.
fn is_wasteful(state: &GroupState, rows: GroupRows, bucket: Bucket) -> bool {
    let padding = bucket.rows() as u64 - u64::from(rows.count());
    state
        .policy
        .padding_per_mille_max
        .is_some_and(|max| padding * 1000 > u64::from(max) * bucket.rows() as u64)
}

/// Time of a step, in that of a row.
fn cost(bucket: Bucket) -> u64 {
    u64::from(STEP_FIXED_ROWS) + bucket.rows() as u64
}

/// A recording stalls everybody once: they are made at intervals.
fn spaced(state: &GroupState) -> bool {
    state.steps_since_record >= RECORD_SPACING_STEPS
}

/// Steps between two recordings that are made while serving.
const RECORD_SPACING_STEPS: u32 = 50;

#[cfg(test)]
#[path = "shape_tests.rs"]
mod tests;
