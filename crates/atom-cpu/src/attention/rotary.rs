//! Rotary position embedding: the angles of a step's rows, computed once and used by all layers.

use crate::elementwise::lanes::{LANES, Lanes};
use atom_ops::Rotary;

/// Rows of one interval of the coarse table.
const FINE: usize = 256;

/// Cosines and sines of the rows of a step.
///
/// The angle of position `256 a + b` is the sum of two from tables made at start in f64, so that a row
/// costs a few multiplications instead of a sine: 8192 positions of 32 pairs take 150 kB, and the error
/// stays at that of f64, rounded to f32 once.
pub(crate) struct RotaryTable {
    dim: usize,
    pairs: bool,
    /// Of positions `0 .. 256`: `[FINE, dim / 2]` of (cos, sin).
    fine: Vec<(f64, f64)>,
    /// Of positions `0, 256, 512 ..`, times the magnitude: `[.., dim / 2]`.
    coarse: Vec<(f64, f64)>,
    /// `[rows, 2, dim]`: for each element its cosine; then the factor of its partner, the sine with
    /// the sign of the element's place in the pair.
    rows: Vec<f32>,
}

impl RotaryTable {
    /// Tables for `positions` positions, and room for the angles of `rows` rows.
    pub(crate) fn new(rotary: &Rotary, positions: usize, rows: usize) -> Self {
        let half = rotary.dim / 2;
        assert_eq!(rotary.frequencies.len(), half, "a frequency for each pair of {} elements", rotary.dim);
        let table = |positions: &mut dyn Iterator<Item = usize>, magnitude: f64| {
            let mut table = Vec::new();
            for position in positions {
                for &frequency in &rotary.frequencies {
                    let (sin, cos) = (position as f64 * f64::from(frequency)).sin_cos();
                    table.push((cos * magnitude, sin * magnitude));
                }
            }
            table
        };
        Self {
            dim: rotary.dim,
            pairs: rotary.pairs,
            fine: table(&mut (0..FINE), 1.0),
            coarse: table(&mut (0..positions).step_by(FINE), f64::from(rotary.magnitude)),
            rows: vec![0.0; rows * 2 * rotary.dim],
        }
    }

    /// Computes the angles of a step's rows.
    pub(crate) fn fill(&mut self, positions: &[u32]) {
        if self.dim == 0 {
            return;
        }
        let (half, pairs) = (self.dim / 2, self.pairs);
        assert!(positions.len() * 2 * self.dim <= self.rows.len(), "{} rows in a step", positions.len());
        for (row, &position) in self.rows.chunks_exact_mut(2 * self.dim).zip(positions) {
            let position = position as usize;
            let coarse = &self.coarse[position / FINE * half..][..half];
            let fine = &self.fine[position % FINE * half..][..half];
            let (cosines, sines) = row.split_at_mut(self.dim);
            for (i, (&(cos_a, sin_a), &(cos_b, sin_b))) in coarse.iter().zip(fine).enumerate() {
                let cos = (cos_a * cos_b - sin_a * sin_b) as f32;
                let sin = (sin_a * cos_b + cos_a * sin_b) as f32;
                let (first, second) = if pairs { (2 * i, 2 * i + 1) } else { (i, i + half) };
                (cosines[first], cosines[second]) = (cos, cos);
                (sines[first], sines[second]) = (-sin, sin);
            }
        }
    }

    /// Rotates the first `dim` elements of a head of the step's row `row`.
    #[inline(always)]
    pub(crate) fn rotate<S: Lanes>(&self, s: S, row: usize, head: &mut [f32]) {
        let (cosines, sines) = self.rows[row * 2 * self.dim..][..2 * self.dim].split_at(self.dim);
        let head = &mut head[..self.dim];
        if self.pairs {
            rotate_pairs(s, head, cosines, sines);
        } else {
            let half = self.dim / 2;
            let (low, high) = head.split_at_mut(half);
            rotate_halves(s, (low, high), cosines.split_at(half), sines.split_at(half));
        }
    }
}

/// Partners lie next to each other. `dim` is even, so no pair is cut by a vector's edge.
#[inline(always)]
fn rotate_pairs<S: Lanes>(s: S, head: &mut [f32], cosines: &[f32], sines: &[f32]) {
    let operands = head.chunks_mut(LANES).zip(cosines.chunks(LANES)).zip(sines.chunks(LANES));
    for ((x, cos), sin) in operands {
        let v = s.read(x);
        let turned = s.mul(s.swap_pairs(v), s.read(sin));
        s.write(s.fma(v, s.read(cos), turned), x);
    }
}

/// Partners lie half the rotated elements apart.
#[inline(always)]
fn rotate_halves<S: Lanes>(
    s: S,
    head: (&mut [f32], &mut [f32]),
    cosines: (&[f32], &[f32]),
    sines: (&[f32], &[f32]),
) {
    let elements = head.0.chunks_mut(LANES).zip(head.1.chunks_mut(LANES));
    let low = cosines.0.chunks(LANES).zip(sines.0.chunks(LANES));
    let high = cosines.1.chunks(LANES).zip(sines.1.chunks(LANES));
    for (((a, b), low), high) in elements.zip(low).zip(high) {
        let (x, y) = (s.read(a), s.read(b));
        s.write(s.fma(x, s.read(low.0), s.mul(y, s.read(low.1))), a);
        s.write(s.fma(y, s.read(high.0), s.mul(x, s.read(high.1))), b);
    }
}
