//! Log-probabilities: of one token, and of the likeliest.

use crate::elementwise::exp::exp;
use crate::elementwise::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::isa::Isa;
use atom_base::limits::TOP_LOGPROBS_MAX;
use atom_base::{ScoredToken, TokenId, TopLogprobs};

/// The largest value; `None` if any is NaN or the largest is infinite: nothing can be chosen then.
pub(crate) fn largest(isa: Isa, logits: &[f32]) -> Option<f32> {
    let (most, sum_of_zeros) = dispatch(isa, Largest { logits });
    // A NaN anywhere makes `0 * x` NaN and stays in the sum; so does an infinity.
    (sum_of_zeros == 0.0 && most.is_finite()).then_some(most)
}

/// The first token with this logit: among equals the lowest id.
pub(crate) fn first_at(logits: &[f32], value: f32) -> TokenId {
    let at = logits.iter().position(|&l| l == value);
    at.expect("the largest value is one of them") as TokenId
}

/// `token` with its log-probability and the `top` likeliest. `most` is the largest logit.
pub(crate) fn score(isa: Isa, logits: &[f32], most: f32, token: TokenId, top: u8) -> ScoredToken {
    let norm = most + dispatch(isa, SumExp { logits, most }).ln();
    let mut result = ScoredToken { token, logprob: logits[token as usize] - norm, top: TopLogprobs::EMPTY };
    let mut best = [(0, f32::NEG_INFINITY); TOP_LOGPROBS_MAX];
    for &(token, logit) in likeliest(logits, usize::from(top), &mut best) {
        result.top.push(token, logit - norm);
    }
    result
}

/// The `n` largest, largest first, equal ones by id.
fn likeliest<'a>(
    logits: &[f32],
    n: usize,
    best: &'a mut [(TokenId, f32); TOP_LOGPROBS_MAX],
) -> &'a [(TokenId, f32)] {
    let n = n.min(logits.len());
    if n == 0 {
        return &[];
    }
    let mut len = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if len == n && logit <= best[n - 1].1 {
            continue;
        }
        let place = best[..len].partition_point(|&(_, other)| other >= logit);
        len = (len + 1).min(n);
        best.copy_within(place..len - 1, place + 1);
        best[place] = (token as TokenId, logit);
    }
    &best[..len]
}

struct Largest<'a> {
    logits: &'a [f32],
}

impl Kernel for Largest<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> (f32, f32) {
        let (mut most, mut zeros) = (s.splat(f32::NEG_INFINITY), s.splat(0.0));
        let chunks = self.logits.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            let x = s.read(chunk);
            most = s.max(x, most);
            zeros = s.fma(x, s.splat(0.0), zeros);
        }
        let (mut mosts, mut sums) = ([0.0; LANES], [0.0; LANES]);
        s.store(most, &mut mosts);
        s.store(zeros, &mut sums);
        let most = mosts.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
        let zeros = rest.iter().fold(sums.iter().sum::<f32>(), |sum, &x| x.mul_add(0.0, sum));
        (most, zeros)
    }
}

struct SumExp<'a> {
    logits: &'a [f32],
    most: f32,
}

impl Kernel for SumExp<'_> {
    type Output = f32;

    /// Sixteen partial sums, element `i` in lane `i % 16`, added in f64 in lane order.
    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> f32 {
        let mut sums = s.splat(0.0);
        let most = s.splat(self.most);
        let chunks = self.logits.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            sums = s.add(sums, exp(s, s.sub(s.read(chunk), most)));
        }
        let mut last = [f32::NEG_INFINITY; LANES];
        last[..rest.len()].copy_from_slice(rest);
        sums = s.add(sums, exp(s, s.sub(s.load(&last), most)));
        let mut lanes = [0.0; LANES];
        s.store(sums, &mut lanes);
        lanes.iter().map(|&x| f64::from(x)).sum::<f64>() as f32
    }
}
