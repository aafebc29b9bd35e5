//! Row-wise operators between the matrix products: RMS norms and the gated activation.
//!
//! Each function takes whole rows, one behind the other; a worker passes its share. A row's bits
//! depend on that row only: partial sums are kept in sixteen lanes, element `i` in lane `i % 16`, and
//! the lanes are added in a fixed tree, on every instruction set (see [`lanes`]).

pub(crate) mod e4m3;
pub(crate) mod exp;
pub(crate) mod lanes;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

use crate::isa::Isa;
use lanes::{Kernel, LANES, Lanes, dispatch};

/// `out = x / sqrt(mean(x^2) + eps) * weight` for each row. `x` and `out` are `[rows, weight.len()]`.
pub(crate) fn norm(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "norm: rows in and out");
    assert!(x.len().is_multiple_of(weight.len()), "norm: {} floats, width {}", x.len(), weight.len());
    dispatch(isa, Norm { x, weight, eps, out });
}

/// `residual += x; out = norm(residual)` for each row. All three are `[rows, weight.len()]`.
pub(crate) fn add_norm(isa: Isa, residual: &mut [f32], x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!(residual.len(), x.len(), "add_norm: residual and x");
    assert_eq!(x.len(), out.len(), "add_norm: rows in and out");
    assert!(x.len().is_multiple_of(weight.len()), "add_norm: {} floats, width {}", x.len(), weight.len());
    dispatch(isa, AddNorm { residual, x, weight, eps, out });
}

/// `out = silu(gate) * up` for each row. `gate_up` is `[rows, 2 * width]`, gate first; `out` is
/// `[rows, width]`.
pub(crate) fn gated_silu(isa: Isa, gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert_eq!(gate_up.len(), 2 * out.len(), "gated_silu: gate and up for each output");
    assert!(out.len().is_multiple_of(width), "gated_silu: {} floats, width {width}", out.len());
    dispatch(isa, GatedSilu { gate_up, width, out });
}

/// Sum of squares of a row.
pub(crate) fn square_sum(isa: Isa, x: &[f32]) -> f32 {
    dispatch(isa, SquareSum { x })
}

/// `x = x * scale * weight`, in place, for one row: with [`inverse_root`] of its own sum of squares the
/// bits of [`norm`].
pub(crate) fn scale_row_in_place(isa: Isa, x: &mut [f32], scale: f32, weight: &[f32]) {
    assert_eq!(x.len(), weight.len(), "a weight for each element");
    dispatch(isa, ScaleRow { x, scale, weight });
}

/// `out += x`
pub(crate) fn add(x: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "add: rows in and out");
    for (out, x) in out.iter_mut().zip(x) {
        *out += x;
    }
}

/// `x = x / sqrt(mean(x^2) + eps) * weight`, in place, for one row.
#[inline(always)]
pub(crate) fn norm_in_place<S: Lanes>(s: S, x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = inverse_rms(s, x, eps);
    scale_in_place(s, x, scale, weight);
}

struct SquareSum<'a> {
    x: &'a [f32],
}

impl Kernel for SquareSum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> f32 {
        sum_of_squares(s, self.x)
    }
}

struct ScaleRow<'a> {
    x: &'a mut [f32],
    scale: f32,
    weight: &'a [f32],
}

impl Kernel for ScaleRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        scale_in_place(s, self.x, self.scale, self.weight);
    }
}

struct Norm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let width = self.weight.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            scale_row(s, x, inverse_rms(s, x, self.eps), self.weight, out);
        }
    }
}

struct AddNorm<'a> {
    residual: &'a mut [f32],
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for AddNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let width = self.weight.len();
        let rows = self.residual.chunks_exact_mut(width).zip(self.x.chunks_exact(width));
        for ((residual, x), out) in rows.zip(self.out.chunks_exact_mut(width)) {
            for (r, x) in residual.iter_mut().zip(x) {
                *r += x;
            }
            scale_row(s, residual, inverse_rms(s, residual, self.eps), self.weight, out);
        }
    }
}

struct GatedSilu<'a> {
    gate_up: &'a [f32],
    width: usize,
    out: &'a mut [f32],
}

impl Kernel for GatedSilu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let rows = self.gate_up.chunks_exact(2 * self.width).zip(self.out.chunks_exact_mut(self.width));
        for (gate_up, out) in rows {
            let (gate, up) = gate_up.split_at(self.width);
            let operands = gate.chunks(LANES).zip(up.chunks(LANES));
            for ((gate, up), out) in operands.zip(out.chunks_mut(LANES)) {
                s.write(silu_times(s, s.read(gate), s.read(up)), out);
            }
        }
    }
}

/// `gate / (1 + e^-gate) * up`
#[inline(always)]
fn silu_times<S: Lanes>(s: S, gate: S::F, up: S::F) -> S::F {
    let e = exp::exp(s, s.sub(s.splat(0.0), gate));
    s.mul(s.div(gate, s.add(s.splat(1.0), e)), up)
}

/// `1 / sqrt(mean(x^2) + eps)`
#[inline(always)]
fn inverse_rms<S: Lanes>(s: S, x: &[f32], eps: f32) -> f32 {
    inverse_root(sum_of_squares(s, x), x.len(), eps)
}

/// `1 / sqrt(square_sum / elements + eps)`
#[inline(always)]
pub(crate) fn inverse_root(square_sum: f32, elements: usize, eps: f32) -> f32 {
    1.0 / (square_sum / elements as f32 + eps).sqrt()
}

#[inline(always)]
fn sum_of_squares<S: Lanes>(s: S, x: &[f32]) -> f32 {
    let mut squares = s.splat(0.0);
    for chunk in x.chunks(LANES) {
        let x = s.read(chunk);
        squares = s.fma(x, x, squares);
    }
    s.sum(squares)
}

/// `x *= scale * weight`
#[inline(always)]
fn scale_in_place<S: Lanes>(s: S, x: &mut [f32], scale: f32, weight: &[f32]) {
    let scale = s.splat(scale);
    for (x, w) in x.chunks_mut(LANES).zip(weight.chunks(LANES)) {
        s.write(s.mul(s.mul(s.read(x), scale), s.read(w)), x);
    }
}

/// `out = x * scale * weight`
#[inline(always)]
fn scale_row<S: Lanes>(s: S, x: &[f32], scale: f32, weight: &[f32], out: &mut [f32]) {
    let scale = s.splat(scale);
    let operands = x.chunks(LANES).zip(weight.chunks(LANES));
    for ((x, w), out) in operands.zip(out.chunks_mut(LANES)) {
        s.write(s.mul(s.mul(s.read(x), scale), s.read(w)), out);
    }
}

#[cfg(test)]
pub(crate) mod tests;
