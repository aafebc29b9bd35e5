//! Passes over a row of logits, in vectors.

use super::keys::Key;
use crate::elementwise::exp::exp;
use crate::elementwise::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::isa::Isa;
use atom_base::TokenId;

/// Tokens that are weighed together: a draw looks at blocks first and then into one.
pub(super) const BLOCK: usize = 512;

/// The largest logit, and the first token that has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Peak {
    pub(super) logit: f32,
    pub(super) token: TokenId,
}

/// How logits become weights: `e^((logit - largest) / temperature)`, as a whole number of 2^-40. What is
/// less than one such part, 12 digits below the likeliest, is never drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weights {
    pub(super) largest: f32,
    pub(super) temperature: f32,
}

/// `None` if a logit is NaN, or if the largest is infinite: nothing can be chosen then.
pub(super) fn peak(isa: Isa, logits: &[f32]) -> Option<Peak> {
    let (logit, block) = dispatch(isa, FindPeak { logits })?;
    let start = block * BLOCK;
    let place = logits[start..].iter().position(|&l| l == logit).expect("the block has it");
    logit.is_finite().then_some(Peak { logit, token: (start + place) as TokenId })
}

/// Weight of all tokens.
pub(super) fn mass(isa: Isa, logits: &[f32], weights: Weights) -> u64 {
    logits.chunks(BLOCK).map(|block| dispatch(isa, Mass { logits: block, weights })).sum()
}

/// Weight of each block of tokens.
pub(super) fn block_masses(isa: Isa, logits: &[f32], weights: Weights, masses: &mut Vec<u64>) {
    masses.clear();
    masses.extend(logits.chunks(BLOCK).map(|block| dispatch(isa, Mass { logits: block, weights })));
}

/// Weight of one token each, for at most a block of them.
pub(super) fn each_mass(isa: Isa, logits: &[f32], weights: Weights) -> [u64; BLOCK] {
    dispatch(isa, EachMass { logits, weights })
}

/// Weight of some tokens.
pub(super) fn mass_of(isa: Isa, keys: &[Key], weights: Weights) -> u64 {
    dispatch(isa, MassOf { keys, weights })
}

/// Appends the tokens of at most a block whose logits are at least `floor`; the first one is `first`.
pub(super) fn collect(isa: Isa, logits: &[f32], first: usize, floor: f32, keys: &mut Vec<Key>) {
    assert!(keys.capacity() - keys.len() >= logits.len(), "no room for {} more candidates", logits.len());
    dispatch(isa, Collect { logits, first, floor, keys });
}

struct FindPeak<'a> {
    logits: &'a [f32],
}

impl Kernel for FindPeak<'_> {
    /// Largest logit, and the first block that has it.
    type Output = Option<(f32, usize)>;

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> Self::Output {
        let lowest = s.splat(f32::NEG_INFINITY);
        let mut best = (f32::NEG_INFINITY, 0);
        let mut nan = s.nan(lowest);
        for (index, block) in self.logits.chunks(BLOCK).enumerate() {
            let (chunks, rest) = block.as_chunks::<LANES>();
            // Four chains, since one would wait for itself.
            let mut largest = [lowest; 4];
            let (quads, single) = chunks.as_chunks::<4>();
            for quad in quads {
                for (largest, x) in largest.iter_mut().zip(quad) {
                    let x = s.load(x);
                    nan = s.or(nan, s.nan(x));
                    *largest = s.max(x, *largest);
                }
            }
            let mut last = [f32::NEG_INFINITY; LANES];
            last[..rest.len()].copy_from_slice(rest);
            for x in single.iter().chain([&last]) {
                let x = s.load(x);
                nan = s.or(nan, s.nan(x));
                largest[0] = s.max(x, largest[0]);
            }
            let [a, b, c, d] = largest;
            let largest = s.largest(s.max(s.max(a, b), s.max(c, d)));
            if largest > best.0 {
                best = (largest, index);
            }
        }
        (s.bits(nan) == 0 && best.0 > f32::NEG_INFINITY).then_some(best)
    }
}

impl Weights {
    #[inline(always)]
    fn weigh<S: Lanes>(self, s: S, logits: S::F) -> S::F {
        // Divided, not multiplied by an inverse: the inverse of a tiny temperature is infinite, and
        // infinity times the likeliest token's 0 is NaN.
        exp(s, s.div(s.sub(logits, s.splat(self.largest)), s.splat(self.temperature)))
    }

    /// Whole parts of the lanes' weights.
    #[inline(always)]
    fn parts<S: Lanes>(self, s: S, logits: S::F) -> [u64; LANES] {
        let parts = s.array(s.mul(self.weigh(s, logits), s.splat(ONE)));
        // Adding 2^52 rounds to an integer, which is left in the mantissa.
        parts.map(|parts| (f64::from(parts) + MANTISSA as f64).to_bits() & (MANTISSA - 1))
    }

    #[inline(always)]
    fn sum<S: Lanes>(self, s: S, logits: S::F) -> u64 {
        self.parts(s, logits).iter().sum()
    }
}

struct Mass<'a> {
    logits: &'a [f32],
    weights: Weights,
}

impl Kernel for Mass<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> u64 {
        let (chunks, rest) = self.logits.as_chunks::<LANES>();
        let mut last = [f32::NEG_INFINITY; LANES];
        last[..rest.len()].copy_from_slice(rest);
        let mut sum = self.weights.sum(s, s.load(&last));
        // A loop, since a closure given to an iterator would be compiled without the instructions.
        for x in chunks {
            sum += self.weights.sum(s, s.load(x));
        }
        sum
    }
}

struct EachMass<'a> {
    logits: &'a [f32],
    weights: Weights,
}

impl Kernel for EachMass<'_> {
    type Output = [u64; BLOCK];

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> [u64; BLOCK] {
        let mut masses = [0; BLOCK];
        for (x, masses) in self.logits.chunks(LANES).zip(masses.chunks_mut(LANES)) {
            masses[..x.len()].copy_from_slice(&self.weights.parts(s, s.read(x))[..x.len()]);
        }
        masses
    }
}

struct MassOf<'a> {
    keys: &'a [Key],
    weights: Weights,
}

impl Kernel for MassOf<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> u64 {
        let mut sum = 0;
        for keys in self.keys.chunks(LANES) {
            let mut logits = [f32::NEG_INFINITY; LANES];
            for (logit, key) in logits.iter_mut().zip(keys) {
                *logit = key.logit();
            }
            sum += self.weights.sum(s, s.load(&logits));
        }
        sum
    }
}

struct Collect<'a> {
    logits: &'a [f32],
    first: usize,
    floor: f32,
    keys: &'a mut Vec<Key>,
}

impl Kernel for Collect<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let floor = s.splat(self.floor);
        for (index, chunk) in self.logits.chunks(LANES).enumerate() {
            // Lanes behind the chunk's end are dropped with those below the floor.
            let below = s.bits(s.greater(floor, s.read(chunk)));
            let mut left = !below & s.bits(s.first(chunk.len()));
            while left != 0 {
                let lane = left.trailing_zeros() as usize;
                let token = self.first + index * LANES + lane;
                self.keys.push(Key::new(chunk[lane], token as TokenId));
                left &= left - 1;
            }
        }
    }
}

/// Parts of the likeliest token's weight.
const ONE: f32 = (1u64 << 40) as f32;

const MANTISSA: u64 = 1 << 52;

/// What a whole weight counts, for who turns sums back into numbers.
pub(super) const ONE_PARTS: f64 = ONE as f64;
