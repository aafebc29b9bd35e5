//! What a group may decide otherwise than to run everything at once. Part of [`crate::GroupState`], so
//! equal on all lanes; the tightest bounds are constants here, whatever the knobs say.

use std::str::FromStr;
use thiserror::Error;

/// All policy of a group. The default bounds padding and does nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// Prefills of several lanes are brought into the same steps. `None`: prompts run as they come
    /// (`ATOM_ENABLE_PREFILL_DELAYER=0`).
    pub alignment: Option<Alignment>,
    /// `--step-ms-max`: while any lane decodes, steps are predicted to take no longer, so that a peer's
    /// prompts can't stretch the time from one token to the next. Three limits of the promise: decode
    /// rows always ride, however long they take; prompts that the bound has left without a row for
    /// [`STARVED_STEPS_MAX`] steps get one, in the smallest bucket that has one to spare (which is
    /// recorded first, at the usual intervals); and making a recording takes as long as it takes
    /// (a CPU makes them all before anybody is served). Groups of several lanes are served with
    /// [`GROUP_STEP_MS_MAX`] unless told otherwise.
    pub step_ms_max: Option<u32>,
    /// `--padding-max`, in thousandths of the bucket: prompt chunks are cut to a bucket's edge rather
    /// than padded by more. It bounds the largest lane's padding, which is what a grant can change; a
    /// lane beside it that has less to do pads more, and that is reported, not bounded. A cut that
    /// would take longer than the padding, by [`STEP_FIXED_ROWS`], is not made. `None`: never cut.
    pub padding_per_mille_max: Option<u32>,
}

/// How long prompts may wait for other lanes' prompts while somebody decodes. Steps, not time: a clock
/// would differ from lane to lane.
///
/// A hold ends at once when no lane decodes, when all lanes have enough prompt rows, and for each of
/// the reasons in [`crate::Release`]. After holds that were in vain the next ones are shorter, down to
/// none: with one busy lane among idle ones nothing is gained by waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Alignment {
    /// `ATOM_PREFILL_DELAYER_TARGET_FILL`, here in thousandths: once all lanes have prompts, a hold
    /// ends when together they fill this share of the rows that they may prefill in a step.
    pub target_fill_per_mille: u32,
    /// `ATOM_PREFILL_DELAYER_TTFT_MAX_TICKS`: steps that a prompt is held at the most.
    pub hold_steps_max: u32,
    /// `ATOM_PREFILL_DELAYER_PARTIAL_MAX_TICKS`: the same while some prompt is computed in part, which
    /// holds pages that nobody reads.
    pub partial_hold_steps_max: u32,
    /// `ATOM_PREFILL_DELAYER_STALL_TICKS`: once all lanes have prompts, a hold ends after so many steps
    /// in which no more rows came.
    pub stall_steps: u32,
    /// `ATOM_PREFILL_DELAYER_KV_HIGH_WATERMARK`, in thousandths: a lane with prompts whose cache is as
    /// full is not held; it will have to prefill now or not at all. `None`: off.
    pub kv_high_per_mille: Option<u32>,
    /// `ATOM_PREFILL_DELAYER_TOKEN_USAGE_LOW_WATERMARK`, in thousandths: a lane with prompts whose cache
    /// is emptier is not held; it decodes too little to be worth it. `None`: off.
    pub kv_low_per_mille: Option<u32>,
    /// `ATOM_PREFILL_DELAYER_MAX_QUEUE_MS`: once somebody has waited as long, by the lane's own clock,
    /// nobody is held. `None`: off.
    pub queue_ms_max: Option<u32>,
}

/// A knob that can't be: the user's fault, found at start.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PolicyError {
    /// Not a number of the kind that it takes, or outside of its range.
    #[error("{name}={text:?}: expected {expected}")]
    Knob {
        /// The variable or flag.
        name: &'static str,
        /// What it was set to.
        text: String,
        /// What it may be set to.
        expected: String,
    },
    /// Neither on nor off.
    #[error("{ENABLE}={text:?}: expected 1 (also true, on, yes) or 0 (also false, off, no)")]
    Switch {
        /// What it was set to.
        text: String,
    },
    /// The low watermark would let everybody go that the high one lets go, and all between.
    #[error("{KV_LOW}={low} is not below {KV_HIGH}={high} (in thousandths): no prompt would ever be held")]
    Watermarks {
        /// In thousandths.
        low: u32,
        /// In thousandths.
        high: u32,
    },
}

impl Policy {
    /// Nothing is held and nothing is cut but by the largest bucket.
    pub const NONE: Self = Self { alignment: None, step_ms_max: None, padding_per_mille_max: None };

    /// Reads `--step-ms-max`; 0 stands for no bound.
    pub fn parse_step_ms(text: &str) -> Result<u32, PolicyError> {
        whole("--step-ms-max", text, 0, STEP_MS_MAX)
    }

    /// The bound for groups of `lanes`, if `asked` was read by [`parse_step_ms`](Self::parse_step_ms) or
    /// nothing was asked for.
    pub fn step_ms_max_of(asked: Option<u32>, lanes: usize) -> Option<u32> {
        asked.or((lanes > 1).then_some(GROUP_STEP_MS_MAX)).filter(|&ms| ms > 0)
    }

    /// Reads `--padding-max`, a share such as 0.25, into thousandths.
    pub fn parse_padding(text: &str) -> Result<u32, PolicyError> {
        share("--padding-max", text, 0, 999)
    }

    /// Words that differ when any part does: they go into the hash of the state.
    pub(crate) fn words(&self) -> [u64; 10] {
        let word = |value: Option<u32>| value.map_or(0, |value| 1 << 32 | u64::from(value));
        let knobs = self.alignment.map_or([0; 8], |a| {
            let [fill, hold, partial, stall] =
                [a.target_fill_per_mille, a.hold_steps_max, a.partial_hold_steps_max, a.stall_steps];
            let [high, low, queue] = [a.kv_high_per_mille, a.kv_low_per_mille, a.queue_ms_max].map(word);
            [1, fill.into(), hold.into(), partial.into(), stall.into(), high, low, queue]
        });
        let [a, b, c, d, e, f, g, h] = knobs;
        [a, b, c, d, e, f, g, h, word(self.step_ms_max), word(self.padding_per_mille_max)]
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self { padding_per_mille_max: Some(PADDING_PER_MILLE), ..Self::NONE }
    }
}

impl Alignment {
    /// Variables that [`parse`](Self::parse) knows.
    pub const VARIABLES: [&str; 8] = [ENABLE, TARGET_FILL, HOLD, PARTIAL, STALL, KV_HIGH, KV_LOW, QUEUE];

    /// Reads the variables through `lookup`: `Ok(None)` if they switch it off. Unset or empty ones have
    /// their defaults; a knob that is set wrongly is refused even if the whole is off.
    pub fn parse(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, PolicyError> {
        let set = |name: &'static str| lookup(name).map(|t| t.trim().to_owned()).filter(|t| !t.is_empty());
        let steps =
            |name, min, default| set(name).map_or(Ok(default), |t| whole(name, &t, min, HOLD_STEPS_MAX));
        let default = Self::default();
        let watermark = |name| set(name).map(|t| share(name, &t, 0, 1000)).transpose();
        let alignment = Self {
            target_fill_per_mille: set(TARGET_FILL)
                .map_or(Ok(default.target_fill_per_mille), |t| share(TARGET_FILL, &t, 50, 1000))?,
            hold_steps_max: steps(HOLD, 1, default.hold_steps_max)?,
            partial_hold_steps_max: steps(PARTIAL, 0, default.partial_hold_steps_max)?,
            stall_steps: steps(STALL, 1, default.stall_steps)?,
            kv_high_per_mille: watermark(KV_HIGH)?.or(default.kv_high_per_mille),
            kv_low_per_mille: watermark(KV_LOW)?.or(default.kv_low_per_mille),
            queue_ms_max: set(QUEUE).map(|t| whole(QUEUE, &t, 1, u32::MAX)).transpose()?,
        };
        if let (Some(low), Some(high)) = (alignment.kv_low_per_mille, alignment.kv_high_per_mille)
            && low >= high
        {
            return Err(PolicyError::Watermarks { low, high });
        }
        let Some(text) = set(ENABLE) else { return Ok(Some(alignment)) };
        match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "on" | "yes" => Ok(Some(alignment)),
            "0" | "false" | "off" | "no" => Ok(None),
            _ => Err(PolicyError::Switch { text }),
        }
    }
}

impl Default for Alignment {
    /// Shorter holds than the predecessor's 200, 100 and 10 ticks: a hold that has not paid after a few
    /// decode steps seldom does, and a prompt is late by all of it.
    fn default() -> Self {
        Self {
            target_fill_per_mille: 700,
            hold_steps_max: 8,
            partial_hold_steps_max: 2,
            stall_steps: 3,
            kv_high_per_mille: Some(900),
            kv_low_per_mille: None,
            queue_ms_max: None,
        }
    }
}

fn whole(name: &'static str, text: &str, min: u32, max: u32) -> Result<u32, PolicyError> {
    let value = u32::from_str(text).ok().filter(|value| (min..=max).contains(value));
    value.ok_or_else(|| PolicyError::Knob {
        name,
        text: text.to_owned(),
        expected: format!("a whole number from {min} to {max}"),
    })
}

/// A share such as 0.7, in thousandths, rounded to the nearest.
fn share(name: &'static str, text: &str, min: u32, max: u32) -> Result<u32, PolicyError> {
    let per_mille = f64::from_str(text).ok().map(|share| (share * 1000.0).round());
    // NaN is in no range.
    let value = per_mille.filter(|p| (f64::from(min)..=f64::from(max)).contains(p)).map(|p| p as u32);
    value.ok_or_else(|| PolicyError::Knob {
        name,
        text: text.to_owned(),
        expected: format!("a share from {} to {}", f64::from(min) / 1000.0, f64::from(max) / 1000.0),
    })
}

/// `--step-ms-max` of groups of several lanes that were not told: without a bound one lane's long prompt makes
/// all lanes replay its bucket. In simulation 50 ms gave 1.2 to 1.9 times the throughput of no bound on 4 to 1,024
/// lanes; `docs/simulator.md` has the table.
pub const GROUP_STEP_MS_MAX: u32 = 50;

/// No hold is longer, in steps, whatever the knobs say.
pub const HOLD_STEPS_MAX: u32 = 30;
/// Steps in succession in which `--step-ms-max` may leave a lane's prompts without a row.
pub const STARVED_STEPS_MAX: u32 = 16;
/// What a step costs beside its rows, in rows: weights are read and collectives are begun whatever
/// comes through. Of the order of where matrix products stop being bound by memory: a few tens of rows
/// on CPUs, a few hundreds on GPUs.
pub const STEP_FIXED_ROWS: u32 = 64;
/// A quarter: a step of the default lattice above 8 rows never pads more.
const PADDING_PER_MILLE: u32 = 250;
/// A minute: no longer bound bounds anything.
const STEP_MS_MAX: u32 = 60_000;

const ENABLE: &str = "ATOM_ENABLE_PREFILL_DELAYER";
const TARGET_FILL: &str = "ATOM_PREFILL_DELAYER_TARGET_FILL";
const HOLD: &str = "ATOM_PREFILL_DELAYER_TTFT_MAX_TICKS";
const PARTIAL: &str = "ATOM_PREFILL_DELAYER_PARTIAL_MAX_TICKS";
const STALL: &str = "ATOM_PREFILL_DELAYER_STALL_TICKS";
const KV_HIGH: &str = "ATOM_PREFILL_DELAYER_KV_HIGH_WATERMARK";
const KV_LOW: &str = "ATOM_PREFILL_DELAYER_TOKEN_USAGE_LOW_WATERMARK";
const QUEUE: &str = "ATOM_PREFILL_DELAYER_MAX_QUEUE_MS";

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
