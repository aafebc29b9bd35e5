//! What a step costs: a linear model of its shape, with the parameters of one machine.

mod file;
mod fit;

pub use file::CostError;
pub use fit::{Sample, fit};

use atom_base::Span;
use atom_engine::Plan;

/// A quantity that lanes have: of the lane with most, and of all together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spread {
    /// Of the lane with most.
    pub max: u64,
    /// Of all lanes.
    pub sum: u64,
}

/// All that the cost of a step depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// Lanes of the group.
    pub lanes: u64,
    /// Rows of the bucket.
    pub bucket_rows: u64,
    /// Real rows.
    pub rows: Spread,
    /// Rows with logits.
    pub out_rows: Spread,
    /// Pairs of a real row and a position that it reads, itself included.
    pub pairs: Spread,
    /// Cached positions that are read, once for all rows of a sequence that read them.
    pub reads: Spread,
}

/// The machine and the model that the parameters are about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Lanes that compute at the same time: cores of a CPU divided by the threads of a lane. 0: every
    /// lane has a device of its own.
    pub lanes_at_once: u64,
    /// Share of the experts that a row meets; 1 for a dense model.
    pub expert_share: f64,
    /// Bytes that a row brings to the collectives of a step, over all layers.
    pub row_bytes: f64,
    /// Other lanes that a row is sent to at the most: as many as it has experts, where rows are sent to
    /// those of their experts only. 0: all.
    pub row_lanes: u64,
}

/// Parameters of a step's cost. A step takes the sum over [`TERMS`] of a parameter times a quantity of
/// its [`StepWork`]; see [`StepCost::quantities`] for what they are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCost {
    /// What it was measured on.
    pub machine: Machine,
    /// In the order of [`TERMS`].
    pub parameters: [f64; TERMS.len()],
}

/// Names of the parameters, with what each is paid for.
///
/// A quantity "of the lanes" is that of the lane with most where lanes compute at the same time, and
/// never less than that of all lanes divided by those that do.
pub const TERMS: [(&str, &str); 10] = [
    ("step_us", "every step"),
    ("lane_us", "each lane beyond the first: meeting"),
    ("bucket_row_us", "each row of the bucket, padding too"),
    ("row_us", "each real row of the lanes: attention projections"),
    ("shared_row_us", "each real row of the group, divided by lanes: MLP or experts"),
    ("out_row_us", "each row with logits of the lanes"),
    ("pair_ns", "each pair of a row and a position that it reads, of the lanes"),
    ("read_ns", "each cached position that the sequences of the lanes read, once for all their rows"),
    ("byte_ns", "each byte of other lanes' rows, at the bucket's size, that a lane takes in"),
    ("experts_us", "reading all experts; a step reads those that its rows meet"),
];

impl Spread {
    /// Takes in one lane.
    pub fn add(&mut self, of_lane: u64) {
        self.max = self.max.max(of_lane);
        self.sum += of_lane;
    }
}

impl StepWork {
    /// A step of `bucket_rows` in which no lane has rows yet.
    pub fn new(lanes: usize, bucket_rows: usize) -> Self {
        Self { lanes: lanes as u64, bucket_rows: bucket_rows as u64, ..Self::default() }
    }

    /// Takes in what a lane runs.
    pub fn add(&mut self, plan: &Plan) {
        self.rows.add(plan.rows() as u64);
        self.out_rows.add(plan.out.len() as u64);
        self.pairs.add(plan.spans.iter().map(pairs).sum());
        self.reads.add(plan.spans.iter().map(reads).sum());
    }
}

/// Pairs of a row of the span and a position that it reads, itself included.
pub fn pairs(span: &Span) -> u64 {
    let (rows, start) = (u64::from(span.rows), u64::from(span.start));
    rows * (2 * start + rows + 1) / 2
}

/// Cached positions that the span reads, its own included.
pub fn reads(span: &Span) -> u64 {
    if span.rows == 0 { 0 } else { u64::from(span.start) + u64::from(span.rows) }
}

impl Machine {
    /// How many of `lanes` compute at the same time.
    fn at_once(&self, lanes: u64) -> u64 {
        if self.lanes_at_once == 0 { lanes } else { self.lanes_at_once.min(lanes) }
    }

    /// What each parameter is multiplied with, in the order of [`TERMS`]; ns are counted in thousands.
    pub fn quantities(&self, work: &StepWork) -> [f64; TERMS.len()] {
        let (lanes, bucket) = (work.lanes as f64, work.bucket_rows as f64);
        let at_once = self.at_once(work.lanes) as f64;
        let of_lanes = |spread: Spread| (spread.max as f64).max(spread.sum as f64 / at_once);
        let turns = lanes / at_once;
        let others = work.lanes - 1;
        let senders = if self.row_lanes == 0 { others } else { self.row_lanes.min(others) } as f64;
        [
            1.0,
            others as f64,
            bucket * turns,
            of_lanes(work.rows),
            work.rows.sum as f64 / at_once,
            of_lanes(work.out_rows),
            of_lanes(work.pairs) / 1000.0,
            of_lanes(work.reads) / 1000.0,
            senders * bucket * self.row_bytes * turns / 1000.0,
            1.0 - (1.0 - self.expert_share).powf(work.rows.sum as f64),
        ]
    }
}

impl StepCost {
    /// µs of a step.
    pub fn step_us(&self, work: &StepWork) -> f64 {
        self.machine.quantities(work).iter().zip(self.parameters).map(|(q, p)| q * p).sum()
    }

    /// A parameter by its name in [`TERMS`].
    pub fn parameter(&self, name: &str) -> Option<f64> {
        TERMS.iter().position(|(term, _)| *term == name).map(|at| self.parameters[at])
    }
}

impl Default for Machine {
    fn default() -> Self {
        Self { lanes_at_once: 0, expert_share: 1.0, row_bytes: 0.0, row_lanes: 0 }
    }
}

impl Default for StepCost {
    /// Lanes with a device each that computes padding: of the order of a mixture of experts on current
    /// accelerators. A step reads weights for 8 ms; a row of the bucket takes 20 µs (400 rows make a step
    /// twice as long); 10 ns a pair are 40 µs for a decode row at 4,000 positions; rows go to 8 lanes,
    /// 7 KiB for each of 60 layers, at 300 GB/s. Only proportions matter, and nobody measured them:
    /// calibrate for a machine that you have.
    fn default() -> Self {
        Self {
            machine: Machine { lanes_at_once: 0, expert_share: 1.0, row_bytes: 430_080.0, row_lanes: 8 },
            parameters: [8000.0, 0.05, 20.0, 0.0, 0.0, 0.0, 10.0, 0.0, 0.0033, 0.0],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use atom_base::SlotId;

    fn span(rows: u32, start: u32) -> Span {
        Span { slot: SlotId(1), first_row: 0, rows, start }
    }

    #[test]
    fn pairs_are_a_triangle_on_what_was_there() {
        for (rows, start, expected) in [(1, 0, 1), (1, 9, 10), (3, 0, 1 + 2 + 3), (2, 5, 6 + 7), (0, 7, 0)] {
            assert_eq!(pairs(&span(rows, start)), expected, "{rows} rows from {start}");
        }
        for (rows, start, expected) in [(1, 0, 1), (1, 9, 10), (3, 4, 7), (0, 7, 0)] {
            assert_eq!(reads(&span(rows, start)), expected, "{rows} rows from {start}");
        }
    }

    /// Four lanes, two at a time: everything by hand.
    #[test]
    fn a_step_is_predicted_by_hand() {
        let machine = Machine { lanes_at_once: 2, expert_share: 0.25, row_bytes: 10.0, row_lanes: 0 };
        let mut work = StepWork::new(4, 32);
        for (rows, out, pairs, reads) in [(30, 1, 465, 30), (1, 1, 100, 100), (0, 0, 0, 0), (1, 1, 7, 7)] {
            work.rows.add(rows);
            work.out_rows.add(out);
            work.pairs.add(pairs);
            work.reads.add(reads);
        }
        let quantities = machine.quantities(&work);
        let experts = 1.0 - 0.75_f64.powi(32);
        // The lane of 30 rows is waited for; logits are even enough to be shared out: 3 / 2.
        let bytes = 3.0 * 32.0 * 10.0 * 2.0;
        let expected = [1.0, 3.0, 64.0, 30.0, 16.0, 1.5, 0.465, 0.1, bytes / 1000.0, experts];
        for (at, (got, expected)) in quantities.iter().zip(expected).enumerate() {
            assert!((got - expected).abs() < 1e-9, "{}: {got} for {expected}", TERMS[at].0);
        }
        let parameters = [100.0, 10.0, 1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 6.0, 7.0];
        let us = StepCost { machine, parameters }.step_us(&work);
        let by_hand = 100.0 + 30.0 + 64.0 + 60.0 + 48.0 + 6.0 + 2.325 + 0.8 + 11.52 + 7.0 * experts;
        assert!((us - by_hand).abs() < 1e-9, "{us} for {by_hand}");
    }

    #[test]
    fn rows_that_go_to_few_lanes_cost_no_more_in_a_larger_group() {
        let machine = Machine { row_bytes: 1000.0, row_lanes: 8, ..Machine::default() };
        let bytes = |lanes| machine.quantities(&StepWork::new(lanes, 64))[8];
        assert_eq!([1, 2, 9, 1024].map(bytes), [0.0, 64.0, 512.0, 512.0]);
    }

    #[test]
    fn lanes_with_a_device_each_wait_for_the_one_with_most() {
        let machine = Machine::default();
        let mut work = StepWork::new(8, 64);
        (0..8).for_each(|lane| work.rows.add(lane));
        assert_eq!(machine.quantities(&work)[3], 7.0);
        assert_eq!(machine.quantities(&work)[4], 28.0 / 8.0);
        assert_eq!(machine.quantities(&work)[2], 64.0);
    }
}
