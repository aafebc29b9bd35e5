//! Prefill alignment: whether prompts wait a few steps for those of other lanes.
//!
//! A step in which one lane prefills costs every lane the large bucket. If all lanes prefill in it, the
//! price is paid once (Nagle's idea, RFC 896, for steps in place of packets). What must not happen is
//! that waiting becomes a habit that does not pay: a hold that ends without the others halves the next
//! one, down to none, and only prompts that do come together make holds longer again.

use crate::facts::{Facts, FactsFlags};
use crate::policy::{Alignment, HOLD_STEPS_MAX};

/// Where the group is in holding prompts back: part of the state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hold {
    /// Steps that the hold that goes on has lasted.
    steps: u32,
    /// Steps in succession in which all lanes had prompts and no more rows came.
    stalled: u32,
    /// Prompt rows of all lanes when that was last looked at.
    pending: u64,
    /// Holds in vain, less the times that prompts came together: each halves the next hold.
    futile: u32,
    /// Releases since holds were halved to none.
    unheld: u32,
}

/// What became of the group's prompts in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefill {
    /// There are none, or nothing may hold them.
    #[default]
    Free,
    /// They wait for other lanes' prompts.
    Held {
        /// Steps of this hold so far, this one included.
        steps: u8,
    },
    /// They run.
    Released {
        /// Steps that they were held before.
        steps: u8,
        /// Why they run now.
        why: Release,
    },
}

/// Why prompts are not held, or no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// No lane decodes: while they wait, nothing would run.
    NobodyDecodes,
    /// A lane's cache is so full, or so empty, that it should not wait.
    Cache,
    /// Somebody has been waiting for too long.
    Queue,
    /// The hold has lasted as long as it may.
    Limit,
    /// The same, sooner, since a prompt is computed in part.
    Partial,
    /// All lanes have prompts, and enough of them.
    Filled,
    /// All lanes have prompts, and no more come.
    Stalled,
    /// `--step-ms-max` left a lane's prompts no row in the step before: that is wait enough.
    Starved,
}

impl Hold {
    /// Decides about a step in which no lane may run more than `rows_max` rows.
    pub(crate) fn decide(&mut self, knobs: &Alignment, facts: &[Facts], rows_max: u32) -> Prefill {
        let lanes = facts.iter().filter(|f| f.prefill_rows > 0).count();
        if lanes == 0 || facts.len() == 1 {
            self.rest();
            return Prefill::Free;
        }
        let all = lanes == facts.len();
        match self.release(knobs, facts, rows_max, all) {
            Some(why) => {
                let steps = self.steps as u8;
                self.learn(knobs, why, all);
                self.rest();
                Prefill::Released { steps, why }
            }
            None => {
                self.steps += 1;
                Prefill::Held { steps: self.steps as u8 }
            }
        }
    }

    /// Forgets a hold that goes on, keeps what holds were worth.
    pub(crate) fn rest(&mut self) {
        (self.steps, self.stalled, self.pending) = (0, 0, 0);
    }

    pub(crate) fn words(&self) -> [u64; 3] {
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        [pair(self.steps, self.stalled), self.pending, pair(self.futile, self.unheld)]
    }

    fn release(&mut self, knobs: &Alignment, facts: &[Facts], rows_max: u32, all: bool) -> Option<Release> {
        let prompts = || facts.iter().filter(|f| f.prefill_rows > 0);
        let out_of_range = |f: &Facts| {
            let kv = u32::from(f.kv_per_mille);
            knobs.kv_high_per_mille.is_some_and(|high| kv >= high)
                || knobs.kv_low_per_mille.is_some_and(|low| kv < low)
        };
        if facts.iter().all(|f| f.decode_rows == 0) {
            return Some(Release::NobodyDecodes);
        }
        if prompts().any(out_of_range) {
            return Some(Release::Cache);
        }
        if knobs.queue_ms_max.is_some_and(|max| prompts().any(|f| f.oldest_wait_ms >= max)) {
            return Some(Release::Queue);
        }
        let room = |f: &Facts| u64::from(rows_max.saturating_sub(f.decode_rows));
        let pending: u64 = facts.iter().map(|f| room(f).min(f.prefill_rows.into())).sum();
        let rows: u64 = facts.iter().map(room).sum();
        if all && pending * 1000 >= rows * u64::from(knobs.target_fill_per_mille) {
            return Some(Release::Filled);
        }
        if self.steps >= self.limit(knobs) {
            return Some(Release::Limit);
        }
        let partial = prompts().any(|f| f.flags.has(FactsFlags::PARTIAL));
        if partial && self.steps >= knobs.partial_hold_steps_max {
            return Some(Release::Partial);
        }
        if !all {
            return None;
        }
        self.stalled = if pending > self.pending { 0 } else { self.stalled + 1 };
        self.pending = pending;
        (self.stalled >= knobs.stall_steps).then_some(Release::Stalled)
    }

    fn limit(&self, knobs: &Alignment) -> u32 {
        knobs.hold_steps_max.min(HOLD_STEPS_MAX).checked_shr(self.futile).unwrap_or(0)
    }

    /// Whether to wait longer or shorter next time.
    fn learn(&mut self, knobs: &Alignment, why: Release, all: bool) {
        if all {
            self.futile = self.futile.saturating_sub(1);
            self.unheld = 0;
        } else if matches!(why, Release::Limit | Release::Partial) {
            if self.limit(knobs) > 0 {
                self.futile += u32::from(self.steps > 0);
            } else {
                self.unheld += 1;
                if self.unheld == PROBE_RELEASES {
                    // Lanes that take turns never meet unless somebody waits now and then.
                    self.unheld = 0;
                    self.futile = self.futile.saturating_sub(1);
                }
            }
        }
    }
}

/// After so many releases without a hold one is tried again: a decode step in so many prefill steps.
const PROBE_RELEASES: u32 = 16;

#[cfg(test)]
#[path = "hold_tests.rs"]
mod tests;
