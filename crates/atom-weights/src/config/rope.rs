//! Rotary frequencies, in f64 from the numbers of the configuration.

use super::{Rope, RopeScaling};
use std::f64::consts::TAU;

impl Rope {
    /// The angle per position of each pair, `dim / 2` of them: `theta^(-2i / dim)`, changed as the
    /// scaling says. Computed in f64 and rounded once.
    ///
    /// Llama 3.1's ramp is as Meta published it with the weights: wavelengths above
    /// `original / low_freq_factor` are stretched by `factor`, those below
    /// `original / high_freq_factor` are kept, and between them the two are mixed linearly in
    /// `original / wavelength`.
    pub fn inverse_frequencies(&self) -> Vec<f32> {
        let base = (0..self.dim / 2).map(|i| self.theta.powf(-2.0 * i as f64 / self.dim as f64));
        match &self.scaling {
            RopeScaling::None => base.map(|f| f as f32).collect(),
            RopeScaling::Linear { factor } => base.map(|f| (f / factor) as f32).collect(),
            &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => base
                .map(|f| {
                    let turns = original * f / TAU; // of this pair over the training context
                    let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let kept = kept.clamp(0.0, 1.0);
                    (kept * f + (1.0 - kept) * f / factor) as f32
                })
                .collect(),
            RopeScaling::Divisors(divisors) => {
                base.zip(divisors).map(|(f, &divisor)| (f / f64::from(divisor)) as f32).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::RopeLayout;
    use super::*;

    fn frequencies(theta: f64, dim: usize, scaling: RopeScaling) -> Vec<f32> {
        Rope { theta, dim, layout: RopeLayout::Halves, scaling }.inverse_frequencies()
    }

    #[test]
    fn unscaled_frequencies_are_a_geometric_series_from_one() {
        assert_eq!(frequencies(10_000.0, 8, RopeScaling::None), [1.0, 0.1, 0.01, 0.001]);
        assert_eq!(frequencies(500_000.0, 2, RopeScaling::None), [1.0]);
    }

    #[test]
    fn linear_scaling_divides_every_frequency() {
        let scaled = frequencies(10_000.0, 8, RopeScaling::Linear { factor: 4.0 });
        assert_eq!(scaled, [0.25, 0.025, 0.0025, 0.00025]);
    }

    /// Values of the published definition, written out in another language with its three cases:
    /// kept, mixed and stretched.
    #[test]
    fn the_llama3_ramp_keeps_mixes_and_stretches() {
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original: 64.0 };
        let found = frequencies(500_000.0, 16, scaling);
        let expected = LLAMA3_EXPECTED;
        for (i, (a, b)) in found.iter().zip(expected).enumerate() {
            assert!((f64::from(*a) - b).abs() <= b * 1e-6, "pair {i}: {a} instead of {b}");
        }
    }

    #[test]
    fn stored_divisors_divide_the_base_frequencies() {
        let scaled = frequencies(10_000.0, 8, RopeScaling::Divisors(vec![1.0, 2.0, 4.0, 8.0]));
        assert_eq!(scaled, [1.0, 0.05, 0.0025, 0.000125]);
    }

    const LLAMA3_EXPECTED: [f64; 8] = [
        1.000000000e+00,
        7.940300918e-02,
        4.700753866e-03,
        9.115830922e-04,
        1.767766953e-04,
        3.428102196e-05,
        6.647869871e-06,
        1.289173172e-06,
    ];
}
