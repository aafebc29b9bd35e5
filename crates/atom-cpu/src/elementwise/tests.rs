use super::e4m3::E4M3;
use super::*;
use atom_weights::{DType, quant};
use half::{bf16, f16};

/// The sets that this processor can run.
pub(crate) fn supported() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_supported())
}

/// Numbers in `-1 .. 1`, the same for the same seed.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<f32> {
    (0..len).map(|i| atom_base::rng::uniform(seed, 0, i as u32, 0) * 2.0 - 1.0).collect()
}

/// Asserts that every set gives the bits of the first, and returns them.
fn same_bits(what: &str, f: impl Fn(Isa) -> Vec<f32>) -> Vec<f32> {
    let first = f(Isa::Portable);
    for isa in supported() {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&f(isa)), bits(&first), "{what}: {isa} differs from portable");
    }
    first
}

fn assert_close(what: &str, got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(got) - expected).abs();
        assert!(error <= tolerance * expected.abs().max(1e-3), "{what} [{i}]: {got} instead of {expected}");
    }
}

fn exact_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let exact = |x: &f32| f64::from(*x);
    let mean = x.iter().map(exact).map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + exact(&eps)).sqrt();
    x.iter().zip(weight).map(|(x, w)| exact(x) * scale * exact(w)).collect()
}

const WIDTHS: [usize; 9] = [1, 7, 15, 16, 17, 64, 100, 576, 1030];

#[test]
fn norms_match_f64_on_every_width_and_set() {
    for (seed, width) in (0..).zip(WIDTHS) {
        let (x, weight, residual) =
            (noise(seed, 3 * width), noise(seed + 100, width), noise(seed + 200, 3 * width));
        let got = same_bits("norm", |isa| {
            let mut out = vec![f32::NAN; 3 * width];
            norm(isa, &x, &weight, 1e-5, &mut out);
            out
        });
        let expected: Vec<f64> = x.chunks(width).flat_map(|x| exact_norm(x, &weight, 1e-5)).collect();
        assert_close("norm", &got, &expected, 1e-6);

        let got = same_bits("add_norm", |isa| {
            let (mut residual, mut out) = (residual.clone(), vec![f32::NAN; 3 * width]);
            add_norm(isa, &mut residual, &x, &weight, 1e-6, &mut out);
            [residual, out].concat()
        });
        let sum: Vec<f32> = residual.iter().zip(&x).map(|(r, x)| r + x).collect();
        assert_eq!(got[..3 * width], sum);
        let expected: Vec<f64> = sum.chunks(width).flat_map(|x| exact_norm(x, &weight, 1e-6)).collect();
        assert_close("add_norm", &got[3 * width..], &expected, 1e-6);

        let alone = same_bits("norm in place", |isa| {
            struct InPlace<'a>(&'a mut [f32], &'a [f32]);
            impl Kernel for InPlace<'_> {
                type Output = ();
                #[inline(always)]
                fn run<S: Lanes>(self, s: S) {
                    norm_in_place(s, self.0, self.1, 1e-5);
                }
            }
            let mut x = x[..width].to_vec();
            dispatch(isa, InPlace(&mut x, &weight));
            x
        });
        assert_close("norm in place", &alone, &exact_norm(&x[..width], &weight, 1e-5), 1e-6);
    }
}

#[test]
fn gated_silu_matches_f64_for_all_magnitudes() {
    for (seed, width) in (0..).zip(WIDTHS) {
        let mut gate_up = noise(seed, 4 * width);
        let magnitude = |i: usize| [1.0, 8.0, 60.0, 200.0][i % 4];
        gate_up.iter_mut().enumerate().for_each(|(i, x)| *x *= magnitude(i));
        let got = same_bits("gated_silu", |isa| {
            let mut out = vec![f32::NAN; 2 * width];
            gated_silu(isa, &gate_up, width, &mut out);
            out
        });
        let expected: Vec<f64> = gate_up
            .chunks(2 * width)
            .flat_map(|row| row[..width].iter().zip(&row[width..]))
            .map(|(&gate, &up)| f64::from(gate) / (1.0 + (-f64::from(gate)).exp()) * f64::from(up))
            .collect();
        assert_close("gated_silu", &got, &expected, 2e-6);
    }
}

#[test]
fn a_rows_bits_depend_on_that_row_only() {
    let (x, weight) = (noise(1, 5 * 100), noise(2, 100));
    for isa in supported() {
        let mut together = vec![0.0; 500];
        let mut poisoned = x.clone();
        poisoned[200..300].fill(f32::NAN);
        norm(isa, &poisoned, &weight, 1e-5, &mut together);
        for row in [0, 1, 3, 4] {
            let mut alone = vec![0.0; 100];
            norm(isa, &x[row * 100..][..100], &weight, 1e-5, &mut alone);
            assert_eq!(alone, together[row * 100..][..100], "{isa} row {row}");
        }
        assert!(together[200..300].iter().all(|x| x.is_nan()), "a poisoned row must show");
    }
}

struct Exp<'a>(&'a [f32]);

impl Kernel for Exp<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> Vec<f32> {
        self.0.chunks(LANES).flat_map(|x| s.array(exp::exp(s, s.read(x)))).collect()
    }
}

#[test]
fn exp_is_within_1_1_ulp_and_exact_where_promised() {
    let x: Vec<f32> = (0..400_000).map(|i| -87.0 + 175.3 * i as f32 / 400_000.0).collect();
    let got = same_bits("exp", |isa| dispatch(isa, Exp(&x)));
    let mut worst = 0f64;
    for (&x, &y) in x.iter().zip(&got) {
        let exact = f64::from(x).exp();
        let ulp = f64::from(f32::from_bits(y.to_bits() + 1)) - f64::from(y);
        worst = worst.max((f64::from(y) - exact).abs() / ulp);
    }
    assert!(worst < 1.1, "{worst} ulp");

    let special = [0.0, -0.0, f32::NEG_INFINITY, -87.1, -1e30, f32::NAN, 1e30, f32::INFINITY];
    let got = same_bits("special", |isa| dispatch(isa, Exp(&special)));
    assert_eq!(got[..5], [1.0, 1.0, 0.0, 0.0, 0.0]);
    assert!(got[5].is_nan());
    assert!(got[6] > 2.3e38 && got[6].is_finite() && got[7] == got[6]);
}

struct Widen<'a>(&'a [u16]);

impl Kernel for Widen<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> Vec<f32> {
        let (chunks, _) = self.0.as_chunks::<LANES>();
        let f16s = chunks.iter().flat_map(|x| s.array(s.load_f16(&x.map(f16::from_bits))));
        let bf16s = chunks.iter().flat_map(|x| s.array(s.load_bf16(&x.map(bf16::from_bits))));
        f16s.chain(bf16s).collect()
    }
}

struct Narrow<'a>(&'a [f32]);

impl Kernel for Narrow<'_> {
    type Output = Vec<u16>;

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> Vec<u16> {
        self.0.chunks(LANES).flat_map(|x| s.to_f16(s.read(x)).map(f16::to_bits)).collect()
    }
}

#[test]
fn halves_widen_exactly_and_narrow_to_nearest_even() {
    let all: Vec<u16> =
        (0..=u16::MAX).filter(|&x| !f16::from_bits(x).is_nan() && !bf16::from_bits(x).is_nan()).collect();
    let all = &all[..all.len() / LANES * LANES];
    let expected: Vec<f32> = (all.iter().map(|&x| f16::from_bits(x).to_f32()))
        .chain(all.iter().map(|&x| bf16::from_bits(x).to_f32()))
        .collect();
    assert_eq!(same_bits("widen", |isa| dispatch(isa, Widen(all))), expected);

    let mut x: Vec<f32> = noise(3, 4096);
    x.iter_mut().enumerate().for_each(|(i, x)| *x *= 2f32.powi(i as i32 % 48 - 28));
    x.extend([0.0, -0.0, 65504.0, 65519.9, 65520.0, -1e9, 5.96e-8, 2.98e-8, 2.99e-8, f32::INFINITY]);
    let expected: Vec<u16> = x.iter().map(|&x| f16::from_f32(x).to_bits()).collect();
    for isa in supported() {
        assert_eq!(dispatch(isa, Narrow(&x))[..x.len()], expected, "{isa}");
    }
}

struct WidenCodes<'a>(&'a [E4M3]);

impl Kernel for WidenCodes<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> Vec<f32> {
        let (chunks, _) = self.0.as_chunks::<LANES>();
        chunks.iter().flat_map(|codes| s.array(s.load_e4m3(codes))).collect()
    }
}

/// Against what reads and makes FP8 weights, which was written apart.
#[test]
fn codes_widen_exactly_and_numbers_become_the_nearest_code() {
    let codes: Vec<u8> = (0..=u8::MAX).collect();
    let expected = quant::dequantize_bytes(DType::F8_E4M3, &codes);
    for isa in supported() {
        let found = dispatch(isa, WidenCodes(&codes.iter().map(|&code| E4M3(code)).collect::<Vec<_>>()));
        for ((code, found), expected) in codes.iter().zip(found).zip(&expected) {
            let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
            assert!(same, "{isa}: {code:#x} is {found}, not {expected}");
        }
    }
    let mut numbers = expected.clone();
    // Halfway between neighbours, and as near to there as f32 can be.
    for pair in expected[..0x7f].windows(2) {
        let middle = f32::midpoint(pair[0], pair[1]);
        numbers.extend([middle, middle.next_up(), middle.next_down(), -middle]);
    }
    numbers.extend([448.1, 463.9, 464.0, 480.0, 1e30, f32::INFINITY, f32::NEG_INFINITY, 1e-30, -1e-30, -0.0]);
    let spread = noise(17, 1 << 16);
    numbers.extend(spread.iter().enumerate().map(|(i, x)| x * 2f32.powi(i as i32 % 24 - 13)));
    for (number, expected) in numbers.iter().zip(quant::quantize(DType::F8_E4M3, &numbers)) {
        let E4M3(found) = E4M3::from_f32(*number);
        let same = found == expected || number.is_nan() && found & 0x7f == 0x7f;
        assert!(same, "{number} is {found:#x}, not {expected:#x}");
    }
}

/// One lane operation a row, so that a set that differs says where.
struct Each<'a>(&'a [f32; LANES], &'a [f32; LANES]);

impl Kernel for Each<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> Vec<f32> {
        let (a, b) = (s.load(self.0), s.load(self.1));
        let mut out = Vec::new();
        out.extend(s.array(s.max(a, b)));
        out.extend(s.array(s.min(a, b)));
        out.extend(s.array(s.swap_pairs(a)));
        out.extend(s.array(s.select(s.greater(a, b), a, b)));
        out.extend(
            [s.bits(s.greater(a, b)), s.bits(s.nan(a)), s.bits(s.or(s.nan(a), s.nan(b)))].map(f32::from),
        );
        out.extend((0..=17).map(|n| f32::from(s.bits(s.first(n)))));
        out.extend([s.sum(a), s.largest(b)]);
        out
    }
}

#[test]
fn lane_operations_agree_on_nan_and_on_both_zeros() {
    let mut a = [0.0; LANES];
    let mut b = [0.0; LANES];
    a.copy_from_slice(&noise(5, LANES));
    b.copy_from_slice(&noise(6, LANES));
    (a[3], b[5], a[7], b[7], a[8], b[8], a[9], b[9]) =
        (f32::NAN, f32::NAN, f32::NAN, f32::NAN, 0.0, -0.0, -0.0, 0.0);
    let got = same_bits("lanes", |isa| dispatch(isa, Each(&a, &b)));
    assert_eq!(got[3], b[3], "max takes the second operand on NaN");
    assert!(got[5].is_nan());
    assert_eq!(got[64 + 3 + 16], 65535.0, "first(16) is all lanes");
    assert_eq!(got[64 + 3 + 3], 7.0, "first(3)");
}
