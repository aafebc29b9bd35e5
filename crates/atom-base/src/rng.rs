//! Counter-based random numbers: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as
//! 1, 2, 3", SC 2011).
//!
//! A draw is a pure function of its key, so it is the same in any batch, lane, bucket or order, and
//! on any device. Sampling keys it by (seed, choice, position, draw).

const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// The Philox 4x32-10 block function.
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    for _ in 0..ROUNDS {
        let left = u64::from(MULTIPLIER[0]) * u64::from(c0);
        let right = u64::from(MULTIPLIER[1]) * u64::from(c2);
        (c0, c1, c2, c3) =
            ((right >> 32) as u32 ^ c1 ^ k0, right as u32, (left >> 32) as u32 ^ c3 ^ k1, left as u32);
        (k0, k1) = (k0.wrapping_add(WEYL[0]), k1.wrapping_add(WEYL[1]));
    }
    [c0, c1, c2, c3]
}

/// A uniform number in `[0, 1)` with 24 random bits, for one draw of one sampled token.
///
/// * `seed`: the request's seed; `choice`: which of its `n` choices;
/// * `position`: absolute position of the token that is being sampled;
/// * `draw`: several draws may be needed for one token (rejection sampling).
pub fn uniform(seed: u64, choice: u32, position: u32, draw: u32) -> f32 {
    let word = philox([position, choice, draw, 0], [seed as u32, (seed >> 32) as u32])[0];
    (word >> 8) as f32 * (1.0 / (1u32 << 24) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the authors' Random123 distribution (`kat_vectors`).
    #[test]
    fn philox_gives_the_published_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }

    #[test]
    fn draws_are_uniform_enough_and_differ_by_every_part_of_the_key() {
        let mean = (0..4096).map(|p| f64::from(uniform(7, 0, p, 0))).sum::<f64>() / 4096.0;
        assert!((mean - 0.5).abs() < 0.02, "mean {mean}");
        let one = uniform(7, 0, 5, 0);
        assert!(
            [uniform(8, 0, 5, 0), uniform(7, 1, 5, 0), uniform(7, 0, 6, 0), uniform(7, 0, 5, 1)]
                .iter()
                .all(|&other| other != one)
        );
    }
}
