//! Figures, as a table for people and as JSON for programs.

use super::experts::ExpertsRead;
use super::operators::Operators;
use serde::Serialize;
use std::fmt;

/// All that came of a run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// This program's version.
    pub(super) atom: &'static str,
    pub(super) model: String,
    /// Family, layers, parameters, type.
    pub(super) description: String,
    pub(super) device: String,
    /// What a GPU's memory was planned for.
    pub(super) plan: Option<String>,
    /// From the start of this program to ranks that take requests, in seconds.
    pub(super) start_s: f64,
    pub(super) figures: Vec<Figure>,
    pub(super) steps: Steps,
    pub(super) operators: Vec<Operators>,
}

/// A measured figure: the median of what was seen, and how far it spread.
#[derive(Debug, Serialize)]
pub(super) struct Figure {
    pub(super) name: String,
    pub(super) unit: Unit,
    pub(super) median: f64,
    /// First and third quartile.
    pub(super) quartiles: [f64; 2],
    /// Steps or runs that were seen.
    pub(super) count: usize,
    /// Of a mixture, in the same scenario but not in what was timed.
    pub(super) experts: Option<ExpertsRead>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Unit {
    #[serde(rename = "ms")]
    Milliseconds,
    #[serde(rename = "tokens/s")]
    TokensEachSecond,
}

/// What all steps of the run were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Steps {
    /// Replays of a recording.
    pub(super) replays: u64,
    /// Steps that were none.
    pub(super) eager: u64,
    pub(super) rows: u64,
    pub(super) padding_rows: u64,
    /// Times that a request gave way to others.
    pub(super) preempted: u64,
}

impl Figure {
    /// Panics if nothing was seen.
    pub(super) fn new(name: String, unit: Unit, mut seen: Vec<f64>) -> Self {
        seen.sort_by(f64::total_cmp);
        let at = |quarter: usize| seen[(seen.len() - 1) * quarter / 4];
        // Of an even count the mean of the two in the middle.
        let median = (seen[(seen.len() - 1) / 2] + seen[seen.len() / 2]) / 2.0;
        Self { name, unit, median, quartiles: [at(1), at(3)], count: seen.len(), experts: None }
    }
}

impl Steps {
    pub(super) fn replay_share(&self) -> f64 {
        self.replays as f64 / (self.replays + self.eager).max(1) as f64
    }
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Milliseconds if value < 10.0 => format!("{value:.3} ms"),
            Self::Milliseconds => format!("{value:.2} ms"),
            Self::TokensEachSecond => format!("{value:.0} tok/s"),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.model, self.description)?;
        writeln!(f, "atom {} on {}; start to ready {:.2} s", self.atom, self.device, self.start_s)?;
        writeln!(f, "\n{:34} {:>14} {:>28} {:>6}", "", "median", "quartiles", "seen")?;
        for Figure { name, unit, median, quartiles: [low, high], count, experts } in &self.figures {
            let quartiles = format!("{} .. {}", unit.show(*low), unit.show(*high));
            write!(f, "{name:34} {:>14} {quartiles:>28} {count:>6}", unit.show(*median))?;
            match experts {
                Some(experts) => writeln!(f, "   {experts}")?,
                None => writeln!(f)?,
            }
        }
        let Steps { replays, eager, rows, padding_rows, preempted } = self.steps;
        writeln!(
            f,
            "\n{} steps, {:.1}% of them replays; {rows} rows and {padding_rows} of padding; {preempted} preemptions",
            replays + eager,
            100.0 * self.steps.replay_share()
        )?;
        self.operators.iter().try_for_each(|operators| operators.fmt(f))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_the_median_of_what_was_seen() {
        let figure = |seen: &[f64]| Figure::new("x".into(), Unit::Milliseconds, seen.to_vec());
        assert_eq!((figure(&[3.0]).median, figure(&[3.0]).quartiles), (3.0, [3.0, 3.0]));
        assert_eq!(figure(&[4.0, 1.0, 3.0, 90.0]).median, 3.5);
        let five = figure(&[5.0, 1.0, 2.0, 4.0, 3.0]);
        assert_eq!((five.median, five.quartiles, five.count), (3.0, [2.0, 4.0], 5));
    }

    #[test]
    fn the_table_has_every_figure_with_its_unit() {
        let figures = vec![
            Figure::new("first token, 128 tokens".into(), Unit::Milliseconds, vec![1.23456]),
            Figure::new("prefill, 48 x 2048".into(), Unit::TokensEachSecond, vec![402_600.4]),
        ];
        let steps = Steps { replays: 3, eager: 1, rows: 7, padding_rows: 9, preempted: 0 };
        let (model, description, device) = ("m".to_owned(), "d".to_owned(), "a device".to_owned());
        let report = Report {
            atom: "1.2.3",
            model,
            description,
            device,
            plan: None,
            start_s: 2.0,
            figures,
            steps,
            operators: vec![],
        };
        let text = report.to_string();
        for part in ["atom 1.2.3 on a device", "1.235 ms", "402600 tok/s", "4 steps, 75.0% of them replays"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["figures"][1]["unit"], "tokens/s");
        assert_eq!(json["steps"]["replays"], 3);
    }
}
