//! How long replays take, learnt from what all lanes said: equal on all lanes.

use crate::lattice::{BUCKETS_MAX, Bucket};
use atom_base::StepNo;

/// Replay times of each bucket, µs; 0 = not measured.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    /// The slowest so far: what deadlines are made of.
    slowest_us: [u32; BUCKETS_MAX],
    /// What a full replay takes at the moment: what `--step-ms-max` is compared with.
    typical_us: [u32; BUCKETS_MAX],
    /// When `typical_us` was last set.
    measured_at: [StepNo; BUCKETS_MAX],
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self {
            slowest_us: [0; BUCKETS_MAX],
            typical_us: [0; BUCKETS_MAX],
            measured_at: [StepNo(0); BUCKETS_MAX],
        }
    }

    /// Takes in a replay whose largest lane had `rows` rows.
    ///
    /// A first replay loads code and touches memory, so it counts for deadlines only. Then the estimate
    /// rises half of the way to what was seen and falls an eighth, with what was seen taken at twice
    /// the estimate at the most: near the upper end of what is usual, and of one hiccup, however long,
    /// little is left after ten replays. Replays that are mostly padding say nothing of full ones on
    /// backends that don't compute padding, so they can only raise it.
    pub(crate) fn observe(&mut self, bucket: Bucket, replay_us: u32, rows: u32, step: StepNo) {
        let at = bucket.index();
        let is_first = self.slowest_us[at] == 0;
        self.slowest_us[at] = self.slowest_us[at].max(replay_us);
        let is_full = u64::from(rows) * 4 >= bucket.rows() as u64 * 3;
        let typical = self.typical_us[at];
        let seen = replay_us.min(typical.saturating_mul(2));
        self.typical_us[at] = match typical {
            _ if is_first => return,
            0 if is_full => replay_us,
            _ if seen > typical => typical + (seen - typical).div_ceil(2),
            1.. if is_full => typical - (typical - seen) / 8,
            _ => return,
        };
        self.measured_at[at] = step;
    }

    pub(crate) fn slowest_us(&self) -> u32 {
        self.slowest_us.iter().copied().max().unwrap_or(0)
    }

    pub(crate) fn is_measured(&self, bucket: Bucket) -> bool {
        self.slowest_us[bucket.index()] > 0
    }

    /// What a full replay of each bucket is predicted to take, `None` below the first that was measured.
    ///
    /// An unmeasured bucket is predicted from the next measured one below, in proportion to its rows:
    /// too much, since part of a step's time does not grow with rows, so sizes are tried from below.
    /// An estimate that was not renewed for [`FRESH_STEPS`] gives way to such a prediction that is
    /// lower: a bucket that was avoided for being slow once is tried again.
    pub(crate) fn predicted<'a>(
        &'a self,
        buckets: &'a [Bucket],
        now: StepNo,
    ) -> impl Iterator<Item = (Bucket, Option<u32>)> + 'a {
        // Rows and time of the nearest below: any, and one that is fresh.
        let (mut below, mut fresh_below) = (None, None);
        let scaled = |from: Option<(u64, u32)>, bucket: Bucket| {
            from.map(|(rows, us)| u64::from(us) * bucket.rows() as u64 / rows)
                .map(|us| us.min(u32::MAX.into()) as u32)
        };
        buckets.iter().map(move |&bucket| {
            let measured = Some(self.typical_us[bucket.index()]).filter(|&us| us > 0);
            let is_fresh = now.0 - self.measured_at[bucket.index()].0 <= FRESH_STEPS;
            let us = match measured {
                Some(us) if is_fresh => Some(us),
                Some(us) => Some(scaled(fresh_below, bucket).map_or(us, |other| other.min(us))),
                None => scaled(below, bucket),
            };
            if let Some(us) = measured {
                below = Some((bucket.rows() as u64, us));
                fresh_below = if is_fresh { below } else { fresh_below };
            }
            (bucket, us)
        })
    }

    /// Words of one bucket for the hash of the state.
    pub(crate) fn words(&self, bucket: Bucket) -> [u64; 2] {
        let at = bucket.index();
        [u64::from(self.slowest_us[at]) << 32 | u64::from(self.typical_us[at]), self.measured_at[at].0]
    }
}

/// Steps for which an estimate stands against what smaller buckets suggest.
const FRESH_STEPS: u64 = 256;

#[cfg(test)]
#[path = "pace_tests.rs"]
mod tests;
