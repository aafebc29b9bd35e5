//! The calibration file: `name = value` lines, comments from `#`.

use super::{Machine, StepCost, TERMS};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// A text that is no calibration: the user's fault.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CostError {
    /// Not `name = value`.
    #[error("{line:?}: expected name = value, one of {names}", names = names())]
    Line {
        /// What was there.
        line: String,
    },
    /// A name that nothing has.
    #[error("{name:?} is no part of the cost model; it has {names}", names = names())]
    Name {
        /// The name.
        name: String,
    },
    /// Not a number, or below zero.
    #[error("{name} = {value:?}: expected a number from 0 on{}", if .name == "expert_share" { ", here to 1" } else { "" })]
    Value {
        /// Whose.
        name: String,
        /// What was there.
        value: String,
    },
}

impl StepCost {
    /// The same with one `name = value` changed.
    pub fn with(mut self, line: &str) -> Result<Self, CostError> {
        let (name, text) =
            line.split_once('=').ok_or_else(|| CostError::Line { line: line.trim().to_owned() })?;
        let (name, text) = (name.trim(), text.trim());
        let refused = || CostError::Value { name: name.to_owned(), value: text.to_owned() };
        let value = text.parse().ok().filter(|v: &f64| v.is_finite() && *v >= 0.0).ok_or_else(refused)?;
        match name {
            "lanes_at_once" => self.machine.lanes_at_once = text.parse().map_err(|_| refused())?,
            "expert_share" if value > 1.0 => return Err(refused()),
            "expert_share" => self.machine.expert_share = value,
            "row_bytes" => self.machine.row_bytes = value,
            "row_lanes" => self.machine.row_lanes = text.parse().map_err(|_| refused())?,
            _ => {
                let at = TERMS.iter().position(|(term, _)| *term == name);
                let at = at.ok_or_else(|| CostError::Name { name: name.to_owned() })?;
                self.parameters[at] = value;
            }
        }
        Ok(self)
    }
}

impl FromStr for StepCost {
    type Err = CostError;

    /// Reads a file. What it does not name is 0, and 1 for the share of experts.
    fn from_str(text: &str) -> Result<Self, CostError> {
        let nothing = Self { machine: Machine::default(), parameters: [0.0; TERMS.len()] };
        let lines = text.lines().map(|line| line.split_once('#').map_or(line, |(line, _)| line).trim());
        lines.filter(|line| !line.is_empty()).try_fold(nothing, Self::with)
    }
}

impl fmt::Display for StepCost {
    /// Writes the file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { lanes_at_once, expert_share, row_bytes, row_lanes } = self.machine;
        writeln!(f, "lanes_at_once = {lanes_at_once} # 0: every lane has a device")?;
        writeln!(f, "expert_share = {expert_share} # of the experts, that a row meets; 1 for a dense model")?;
        writeln!(f, "row_bytes = {row_bytes} # that a row brings to the collectives of a step")?;
        writeln!(f, "row_lanes = {row_lanes} # other lanes that a row is sent to at the most; 0: all")?;
        let mut terms = TERMS.iter().zip(self.parameters);
        terms.try_for_each(|((name, what), value)| writeln!(f, "{name} = {value:.6} # {what}"))
    }
}

fn names() -> String {
    let fixed = ["lanes_at_once", "expert_share", "row_bytes", "row_lanes"];
    fixed.into_iter().chain(TERMS.iter().map(|(name, _)| *name)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_as_it_was_written() {
        let machine = Machine { lanes_at_once: 2, expert_share: 0.125, row_bytes: 65536.0, row_lanes: 3 };
        let cost = StepCost { machine, parameters: [1.5, 2.0, 0.0, 4.25, 5.0, 6.0, 7.0, 8.5, 0.125, 9.0] };
        assert_eq!(cost.to_string().parse(), Ok(cost));
        assert_eq!(cost.parameter("row_us"), Some(4.25));
    }

    #[test]
    fn what_is_no_calibration_is_refused_by_name() {
        let refused = |text: &str| text.parse::<StepCost>().unwrap_err().to_string();
        assert!(refused("row_us 5").contains("\"row_us 5\""));
        assert!(refused("rows = 5").contains("\"rows\""));
        for line in ["row_us = -1", "row_us = NaN", "row_us = x", "expert_share = 1.5", "lanes_at_once = 0.5"]
        {
            assert!(refused(line).contains("expected a number"), "{line}");
        }
        assert_eq!("# nothing\n\n".parse::<StepCost>().unwrap().machine, Machine::default());
    }
}
