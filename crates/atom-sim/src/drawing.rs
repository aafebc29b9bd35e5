//! A replayed trace as a picture: steps from left to right, a band for each lane, and in each step a
//! bar as high as its bucket, filled with decode rows, prompt rows and padding.

use crate::replay::{Replayed, Run, Timeline};
use crate::svg::Svg;
use crate::timeline::{Note, cell, replay_ms, what};
use atom_group::{Decision, Grant, Prefill};
use thiserror::Error;

/// A picture that nobody could look at.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DrawingError {
    /// Too many steps.
    #[error("a picture has at most {max} steps, and these are {steps}; choose some with --from and --to", max = STEPS_MAX)]
    TooWide {
        /// Of the group that made most.
        steps: u64,
    },
}

impl Replayed {
    /// The picture of the steps that were asked for: SVG, one file, nothing outside of it.
    pub fn svg(&self) -> Result<String, DrawingError> {
        let steps = self.timelines.iter().map(Timeline::span).max().unwrap_or(0);
        if steps > STEPS_MAX {
            return Err(DrawingError::TooWide { steps });
        }
        let step_width = (WIDTH_USUAL / steps.max(1) as usize).clamp(1, STEP_WIDTH_MAX);
        let width = LEFT + (steps as usize * step_width).max(LEGEND_WIDTH) + MARGIN;
        let group_height = TITLE + self.header.lanes * (BAND + MARGIN);
        let height = LEGEND + self.timelines.len() * group_height + MARGIN;
        let mut svg = Svg::new(width, height);
        svg.element("rect", &[("width", &width), ("height", &height), ("fill", &"#ffffff")]);
        legend(&mut svg);
        let top_rows = self.header.lattice.top().rows();
        for (group, timeline) in self.timelines.iter().enumerate() {
            let picture = Picture { step_width, top_rows, top: LEGEND + group * group_height };
            picture.group(&mut svg, group, timeline, self.header.lanes);
        }
        Ok(svg.finish())
    }
}

impl Timeline {
    /// Steps from the first to the last.
    fn span(&self) -> u64 {
        let (first, last) = (self.runs.first(), self.runs.last());
        first.zip(last).map_or(0, |(first, last)| last.last() + 1 - first.first)
    }
}

/// Where one group is drawn.
struct Picture {
    step_width: usize,
    top_rows: usize,
    /// Pixels above it.
    top: usize,
}

impl Picture {
    fn group(&self, svg: &mut Svg, group: usize, timeline: &Timeline, lanes: usize) {
        let first = timeline.runs.first().map_or(0, |run| run.first);
        let title = match timeline.runs.last() {
            Some(last) => format!("group {group}, steps {first} to {}", last.last()),
            None => format!("group {group}: no step"),
        };
        svg.text("text", &[("x", &MARGIN), ("y", &(self.top + TITLE - 7)), ("fill", &INK)], &title);
        for lane in 0..lanes {
            let (y, label) = (self.band_bottom(lane), format!("lane {lane}"));
            svg.text("text", &[("x", &MARGIN), ("y", &(y - BAND / 2)), ("fill", &INK)], &label);
            let right = LEFT + timeline.span() as usize * self.step_width;
            svg.element("path", &[("d", &format!("M{LEFT} {y}H{right}")), ("stroke", &"#999999")]);
        }
        let mut epoch = 1;
        for run in &timeline.runs {
            let x = LEFT + (run.first - first) as usize * self.step_width;
            if run.epoch != epoch {
                epoch = run.epoch;
                let path = format!("M{x} {}V{}", self.top + TITLE - 4, self.band_bottom(lanes - 1));
                svg.open("g", &[]);
                svg.text("title", &[], &format!("epoch {epoch}: the group has formed again"));
                svg.element("path", &[("d", &path), ("stroke", &END), ("stroke-dasharray", &"3 2")]);
                svg.close();
            }
            for lane in 0..lanes {
                self.bar(svg, run, lane, x);
            }
        }
    }

    /// A lane's part of a run.
    fn bar(&self, svg: &mut Svg, run: &Run, lane: usize, x: usize) {
        let width = run.steps as usize * self.step_width;
        let bottom = self.band_bottom(lane);
        let rect = |svg: &mut Svg, (from, height): (f64, f64), fill: &str| {
            if height > 0.0 {
                let (y, height) = (format!("{:.1}", bottom as f64 - from - height), format!("{height:.1}"));
                svg.element(
                    "rect",
                    &[("x", &x), ("y", &y), ("width", &width), ("height", &height), ("fill", &fill)],
                );
            }
        };
        svg.open("g", &[]);
        svg.text("title", &[], &tooltip(run, lane));
        match &run.decision {
            Decision::Replay { grants, note, .. } => {
                let Grant { decode_rows, prefill_rows } = grants[lane];
                let height = self.height(run.rows);
                let part = |rows: u32| height * f64::from(rows) / run.rows as f64;
                let (decode, prefill) = (part(decode_rows), part(prefill_rows));
                let rest = if grants[lane].rows() == 0 { IDLE } else { PADDING };
                rect(svg, (0.0, decode), DECODE);
                rect(svg, (decode, prefill), PREFILL);
                rect(svg, (decode + prefill, height - decode - prefill), rest);
                if matches!(note.prefill, Prefill::Held { .. }) && run.wanted[lane].prefill_rows > 0 {
                    rect(svg, (height + 1.0, HELD_HEIGHT), HELD);
                }
            }
            Decision::Record { .. } => rect(svg, (0.0, self.height(run.rows)), RECORD),
            Decision::Park => rect(svg, (0.0, THIN), PARK),
            Decision::Exit | Decision::Fatal { .. } | Decision::Diverged { .. } => {
                rect(svg, (0.0, BAR_MAX), END);
            }
        }
        svg.close();
    }

    /// By the square root, so that a step of 8 rows is seen beside one of 2048.
    fn height(&self, rows: usize) -> f64 {
        BAR_MAX * (rows as f64 / self.top_rows as f64).sqrt()
    }

    fn band_bottom(&self, lane: usize) -> usize {
        self.top + TITLE + lane * (BAND + MARGIN) + BAND
    }
}

fn tooltip(run: &Run, lane: usize) -> String {
    let steps = match run.steps {
        1 => format!("step {}", run.first),
        _ => format!("steps {} to {}", run.first, run.last()),
    };
    match &run.decision {
        Decision::Replay { grants, note, .. } => {
            let padding = run.rows - grants[lane].rows() as usize;
            let cell = match grants[lane].rows() {
                0 if run.wanted[lane].prefill_rows == 0 => "idle".to_owned(),
                _ => format!("{} decode+prompt rows", cell(grants[lane], run.wanted[lane])),
            };
            let replay = replay_ms(run);
            let time = if replay.is_empty() { replay } else { format!("\nreplay {replay} ms") };
            format!(
                "{steps}: {} rows\nlane {lane}: {cell}, {padding} padding{time}\n{}",
                run.rows,
                Note(note)
            )
        }
        Decision::Record { .. } => format!("{steps}: record {} rows", run.rows),
        other => format!("{steps}: {}", what(other)),
    }
}

fn legend(svg: &mut Svg) {
    let entries = [
        (DECODE, "decode rows"),
        (PREFILL, "prompt rows"),
        (PADDING, "padding"),
        (IDLE, "idle lane"),
        (HELD, "prompts held"),
        (RECORD, "record"),
        (PARK, "park"),
        (END, "end"),
    ];
    for (at, (fill, text)) in entries.iter().enumerate() {
        let x = MARGIN + at * (LEGEND_WIDTH / entries.len());
        svg.element("rect", &[("x", &x), ("y", &8), ("width", &10), ("height", &10), ("fill", fill)]);
        svg.text("text", &[("x", &(x + 14)), ("y", &17), ("fill", &INK)], text);
    }
}

/// A picture of more would be wider than what browsers draw.
const STEPS_MAX: u64 = 20_000;

// Pixels.
const WIDTH_USUAL: usize = 1600;
const STEP_WIDTH_MAX: usize = 16;
const LEFT: usize = 60;
const MARGIN: usize = 8;
const LEGEND: usize = 28;
const LEGEND_WIDTH: usize = 800;
const TITLE: usize = 22;
const BAND: usize = 46;
const BAR_MAX: f64 = 40.0;
const HELD_HEIGHT: f64 = 3.0;
const THIN: f64 = 2.0;

const INK: &str = "#333333";
const DECODE: &str = "#2b6cb0";
const PREFILL: &str = "#dd7a1f";
const PADDING: &str = "#d9dde3";
const IDLE: &str = "#eef0f3";
const HELD: &str = "#c53030";
const RECORD: &str = "#805ad5";
const PARK: &str = "#68a085";
const END: &str = "#1a202c";
