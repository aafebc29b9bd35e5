//! Parameters from measured steps: least squares of relative errors, none below zero.

use super::{Machine, StepCost, StepWork, TERMS};

/// A step and what it took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Its shape.
    pub work: StepWork,
    /// µs.
    pub us: f64,
}

/// The parameters that explain the samples best: those with the least sum of squared relative errors,
/// all at or above zero (what is negative explains noise). Coordinate descent on the normal equations
/// (Franc, Hlaváč and Navara, "Sequential coordinate-wise algorithm for the non-negative least squares
/// problem", CAIP 2005). Without samples all are zero.
pub fn fit(machine: Machine, samples: &[Sample]) -> StepCost {
    const N: usize = TERMS.len();
    let rows: Vec<[f64; N]> = samples.iter().map(|s| machine.quantities(&s.work).map(|q| q / s.us)).collect();
    let norm = |at: usize| rows.iter().map(|row| row[at] * row[at]).sum::<f64>().sqrt();
    let norms: [f64; N] = std::array::from_fn(norm);
    let unit = |row: &[f64; N], at: usize| if norms[at] > 0.0 { row[at] / norms[at] } else { 0.0 };
    let products = |i: usize, j: usize| rows.iter().map(|row| unit(row, i) * unit(row, j)).sum::<f64>();
    let matrix: [[f64; N]; N] = std::array::from_fn(|i| std::array::from_fn(|j| products(i, j)));
    // Every relative quantity should add up to 1.
    let target: [f64; N] = std::array::from_fn(|at| rows.iter().map(|row| unit(row, at)).sum());
    let mut scaled = [0.0; N];
    for _ in 0..SWEEPS {
        for at in (0..N).filter(|&at| norms[at] > 0.0) {
            let gradient: f64 = (0..N).map(|j| matrix[at][j] * scaled[j]).sum::<f64>() - target[at];
            scaled[at] = f64::max(0.0, scaled[at] - gradient);
        }
    }
    let parameters = std::array::from_fn(|at| if norms[at] > 0.0 { scaled[at] / norms[at] } else { 0.0 });
    StepCost { machine, parameters }
}

/// Quantities that grow together converge slowly; this many sweeps of ten terms take a few
/// milliseconds and leave nothing that measurements could resolve.
const SWEEPS: usize = 50_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Spread;

    fn works() -> impl Iterator<Item = StepWork> {
        let shapes = [(1, 1), (1, 64), (2, 8), (2, 64), (4, 16), (4, 256)];
        shapes.into_iter().flat_map(|(lanes, rows)| {
            [10, 1000].into_iter().flat_map(move |context| {
                [1, lanes].map(|busy| {
                    let of = |max: u64| Spread { max, sum: max * busy };
                    let bucket_rows = rows + rows / 8;
                    StepWork {
                        lanes,
                        bucket_rows,
                        rows: of(rows),
                        out_rows: of(1),
                        pairs: of(rows * context),
                        reads: of(rows + context),
                    }
                })
            })
        })
    }

    #[test]
    fn steps_made_of_parameters_give_them_back() {
        let machine = Machine { lanes_at_once: 2, expert_share: 0.2, row_bytes: 4096.0, row_lanes: 0 };
        let truth =
            StepCost { machine, parameters: [500.0, 40.0, 0.0, 30.0, 90.0, 0.0, 20.0, 60.0, 0.05, 300.0] };
        let samples: Vec<_> = works().map(|work| Sample { work, us: truth.step_us(&work) }).collect();
        let found = fit(machine, &samples);
        for sample in &samples {
            let error = found.step_us(&sample.work) / sample.us - 1.0;
            assert!(error.abs() < 1e-3, "{:?}: {error}", sample.work);
        }
        // Also between and beyond the samples.
        let mut other = StepWork::new(8, 40);
        (0..8).for_each(|lane| {
            other.rows.add(5 * lane);
            other.pairs.add(300 * lane);
        });
        let error = found.step_us(&other) / truth.step_us(&other) - 1.0;
        assert!(error.abs() < 0.05, "{error}: {found:?}");
    }

    #[test]
    fn noise_makes_no_parameter_negative() {
        let machine = Machine::default();
        let noise = |at: usize| if at.is_multiple_of(2) { 1.3 } else { 0.7 };
        let samples: Vec<_> =
            works().enumerate().map(|(at, work)| Sample { work, us: 1000.0 * noise(at) }).collect();
        assert!(fit(machine, &samples).parameters.iter().all(|p| p.is_finite() && *p >= 0.0));
        assert_eq!(fit(machine, &[]).parameters, [0.0; TERMS.len()]);
    }
}
