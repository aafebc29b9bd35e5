//! A replayed trace as text: a line for each run of equal steps, then sums.

use crate::replay::{Gap, Replayed, Run, Timeline, Totals, TraceEnding};
use atom_group::{Decision, Grant, Prefill, Release, StepNote};
use std::cmp::Reverse;
use std::fmt::{self, Display, Formatter, Write};

impl Display for Replayed {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let buckets = self.header.lattice.buckets();
        let top = buckets.last().map_or(0, |bucket| bucket.rows());
        for (group, timeline) in self.timelines.iter().enumerate() {
            writeln!(
                f,
                "group {group} of {}: {} lanes, {} step sizes up to {top} rows",
                self.timelines.len(),
                self.header.lanes,
                buckets.len()
            )?;
            timeline.write_runs(f)?;
            write!(f, "{}", timeline.totals)?;
            for gap in &timeline.gaps {
                writeln!(f, "gap       {gap}")?;
            }
        }
        writeln!(f, "trace     {}", self.ending)?;
        match &self.mismatch {
            None => writeln!(f, "replay    {} steps settled again, all equal", self.equal_steps),
            Some(mismatch) => writeln!(f, "replay    {} steps equal, then {mismatch}", self.equal_steps),
        }
    }
}

impl Timeline {
    fn write_runs(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let step = |run: &Run| match run.steps {
            1 => run.first.to_string(),
            _ => format!("{}..{}", run.first, run.last()),
        };
        let steps = self.runs.iter().map(|run| step(run).len()).max().unwrap_or(0).max("step".len());
        let lanes = self.runs.iter().map(|run| lanes(run).len()).max().unwrap_or(0).max(LANES_TITLE.len());
        writeln!(f, "{:>steps$}    rows  {LANES_TITLE:lanes$}  padding  replay ms", "step")?;
        let mut epoch = 1;
        for run in &self.runs {
            if run.epoch != epoch {
                epoch = run.epoch;
                writeln!(
                    f,
                    "{:>steps$}          epoch {epoch}: the group has formed again, from its first state",
                    ""
                )?;
            }
            let (step, rows) = (step(run), run.rows);
            let line = match &run.decision {
                Decision::Replay { note, .. } => {
                    let (all, padding) = run.rows_and_padding();
                    let (lanes_text, percent, replay) =
                        (self::lanes(run), percent(padding, all), replay_ms(run));
                    let note = Note(note);
                    format!("{rows:>6}  {lanes_text:lanes$}  {percent:>6.1}%  {replay:<13}{note}")
                }
                Decision::Record { .. } => format!("{rows:>6}  record"),
                other => format!("{:>6}  {}", "", what(other)),
            };
            writeln!(f, "{step:>steps$}  {}", line.trim_end())?;
        }
        Ok(())
    }
}

/// What a decision that is no replay is called.
pub(crate) fn what(decision: &Decision) -> String {
    match decision {
        Decision::Park => "park".to_owned(),
        Decision::Exit => "end: every lane asked for it".to_owned(),
        Decision::Fatal { lane } => format!("end: lane {lane} can't go on"),
        Decision::Record { .. } => "record".to_owned(),
        Decision::Replay { .. } => "replay".to_owned(),
        Decision::Diverged { what, lane: (lane, theirs), own_lane: (own_lane, ours), .. } => {
            format!("end: lane {lane} says {what} {theirs:#x}, lane {own_lane} has {ours:#x}")
        }
    }
}

/// The lanes of a replay, equal neighbours as one.
fn lanes(run: &Run) -> String {
    let mut text = String::new();
    let mut cells =
        run.grants().iter().zip(&run.wanted).map(|(grant, wanted)| cell(*grant, *wanted)).peekable();
    while let Some(cell) = cells.next() {
        let mut count = 1;
        while cells.next_if_eq(&cell).is_some() {
            count += 1;
        }
        let gap = if text.is_empty() { "" } else { "  " };
        let times = if count > 1 { format!("{count} x ") } else { String::new() };
        write!(text, "{gap}{times}{cell}").expect("a string takes all");
    }
    text
}

/// Decode rows, and prompt rows of those wanted if they differ.
pub(crate) fn cell(grant: Grant, wanted: Grant) -> String {
    let Grant { decode_rows, prefill_rows } = grant;
    match wanted.prefill_rows {
        0 if decode_rows == 0 => "-".to_owned(),
        0 => decode_rows.to_string(),
        all if all == prefill_rows => format!("{decode_rows}+{prefill_rows}"),
        all => format!("{decode_rows}+{prefill_rows}/{all}"),
    }
}

/// Mean time of the slowest lane, and how far the fastest was from it.
pub(crate) fn replay_ms(run: &Run) -> String {
    if run.timed_steps == 0 {
        return String::new();
    }
    let mean = |us: u64| us as f64 / run.timed_steps as f64 / 1000.0;
    format!("{:.2} (-{:.2})", mean(run.slowest_us), mean(run.spread_us))
}

/// What policy did, in words; nothing if nothing.
pub(crate) struct Note<'a>(pub(crate) &'a StepNote);

impl Display for Note<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let StepNote { prefill, time_cut_rows, edge_cut_rows } = self.0;
        match prefill {
            Prefill::Free => {}
            Prefill::Held { steps } => write!(f, " held, step {steps}")?,
            // Most prompts are let go at once.
            Prefill::Released { steps: 0, .. } => {}
            Prefill::Released { steps, why } => write!(f, " held for {steps} steps until {}", reason(*why))?,
        }
        if *time_cut_rows > 0 {
            write!(f, " {time_cut_rows} rows cut for time")?;
        }
        if *edge_cut_rows > 0 {
            write!(f, " {edge_cut_rows} rows cut to an edge")?;
        }
        Ok(())
    }
}

fn reason(why: Release) -> &'static str {
    match why {
        Release::NobodyDecodes => "nobody decoded",
        Release::Cache => "a cache was too full or too empty",
        Release::Queue => "somebody had waited too long",
        Release::Limit => "the limit",
        Release::Partial => "the limit of prompts computed in part",
        Release::Filled => "there were enough prompts",
        Release::Stalled => "no more prompts came",
        Release::Starved => "a prompt had been left without a row",
    }
}

impl Display for Totals {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let steps = self.replays + self.records + self.parks;
        let share = percent(self.replays, steps);
        writeln!(
            f,
            "steps     {steps}: {} replays ({share:.1}%), {} records, {} parks",
            self.replays, self.records, self.parks
        )?;
        let all = self.rows + self.padding_rows;
        writeln!(f, "rows      {} granted, {:.1}% padding", self.rows, percent(self.padding_rows, all))?;
        writeln!(
            f,
            "policy    {} steps held prompts; {} rows cut for time, {} to an edge",
            self.held_steps, self.time_cut_rows, self.edge_cut_rows
        )?;
        let seconds = |us: u64| us as f64 / 1e6;
        writeln!(
            f,
            "time      {:.3} s in steps, {:.1}% of it in replays; lanes were {:.3} s faster than the slowest",
            seconds(self.step_us),
            percent(self.replay_us, self.step_us),
            seconds(self.wait_us)
        )?;
        let mut buckets: Vec<_> = self.buckets.iter().collect();
        buckets.sort_by_key(|&(rows, steps)| (Reverse(steps), Reverse(rows)));
        let bucket = |&(rows, &steps): &(&usize, &u64)| {
            format!("{rows} rows {steps} ({:.1}%)", percent(steps, self.replays))
        };
        let buckets: Vec<_> = buckets.iter().map(bucket).collect();
        writeln!(f, "buckets   {}", buckets.join(", "))
    }
}

impl Display for Gap {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} steps are missing after step {}: the trace's writer fell behind. What a group knows is the sum of all \
             its steps, so the {} steps after that, up to a new epoch if there is one, can't be settled again and are not shown",
            self.lost_steps, self.after_step, self.unchecked_steps
        )
    }
}

impl Display for TraceEnding {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => write!(f, "whole, and closed by its writer"),
            Self::Cut { offset, bytes } => write!(
                f,
                "cut at byte {offset}, with {bytes} bytes of a record that is not whole: its writer was killed, or still \
                 writes"
            ),
            Self::Damaged(error) => write!(f, "damaged: {error}"),
            Self::Unread => write!(f, "not read to its end"),
        }
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

const LANES_TITLE: &str = "lanes: decode+prompt rows granted/wanted";
