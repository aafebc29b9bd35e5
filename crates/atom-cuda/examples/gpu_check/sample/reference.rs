//! Sampling by sorting: atom-cpu's rules written down a second time, without any of its or the kernels' shortcuts.

use atom_base::{OutRow, ScoredToken, TokenId, TopLogprobs, rng};

/// How often each token was generated, and whether it was in the prompt.
pub(super) type History = Vec<(u32, bool)>;

/// Chooses or scores a row's token. The history counts it if it has penalties.
pub(super) fn sample(raw: &[f32], out: &OutRow, history: &mut History) -> ScoredToken {
    let params = &*out.params;
    if largest(raw).is_none() {
        return ScoredToken::NOT_A_NUMBER;
    }
    let raw = &allowed(raw, out)[..];
    let Some(peak) = largest(raw) else { return ScoredToken::NOT_A_NUMBER };
    if let Some(target) = out.target {
        return score(raw, peak, target, params.prompt_logprobs.unwrap_or(0));
    }
    let mut logits = raw.to_vec();
    if params.has_penalties() {
        for (logit, &(count, prompted)) in logits.iter_mut().zip(history.iter()) {
            if count > 0 || prompted {
                let repetition = params.repetition_penalty;
                *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            }
            if count > 0 {
                *logit = *logit - params.frequency_penalty * count as f32 - params.presence_penalty;
            }
        }
    }
    params.logit_bias.iter().for_each(|&(token, bias)| logits[token as usize] += bias);
    let Some(changed) = largest(&logits) else { return ScoredToken::NOT_A_NUMBER };
    let token = if params.temperature == 0.0 {
        logits.iter().position(|&l| l == changed).expect("it is one of them") as TokenId
    } else {
        draw(&logits, changed, out)
    };
    if params.has_penalties() {
        history[token as usize].0 += 1;
    }
    params.logprobs.map_or(ScoredToken::bare(token), |top| score(raw, peak, token, top))
}

/// The logits of tokens that the row's mask leaves; others are as if the model had never heard of them.
fn allowed(raw: &[f32], out: &OutRow) -> Vec<f32> {
    let Some(cell) = &out.mask else { return raw.to_vec() };
    cell.set_deadline(std::time::Instant::now());
    let of = |mask: &[u32], token: usize| {
        if mask[token / 32] >> (token % 32) & 1 == 1 { raw[token] } else { f32::NEG_INFINITY }
    };
    cell.wait(|mask| (0..raw.len()).map(|token| of(mask, token)).collect()).expect("it was filled")
}

/// The largest logit, if all are numbers and it is finite.
fn largest(logits: &[f32]) -> Option<f32> {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    (top.is_finite() && !logits.iter().any(|l| l.is_nan())).then_some(top)
}

fn draw(logits: &[f32], peak: f32, out: &OutRow) -> TokenId {
    let params = &*out.params;
    let weigh = |token: TokenId| parts(logits[token as usize], peak, params.temperature);
    let top_k = params.top_k as usize;
    let limited = (1..logits.len()).contains(&top_k);
    let mut kept: Vec<TokenId> = (0..logits.len() as TokenId).collect();
    if limited || params.min_p > 0.0 || params.top_p < 1.0 {
        sort(&mut kept, logits);
    }
    if limited {
        kept.truncate(top_k);
    }
    if params.min_p > 0.0 {
        let distance = f64::from(params.temperature) * f64::from(params.min_p).ln();
        let floor = (f64::from(peak) + distance).min(f64::from(peak)) as f32;
        kept.retain(|&token| logits[token as usize] >= floor);
    }
    if params.top_p < 1.0 {
        let total: u64 = kept.iter().map(|&t| weigh(t)).sum();
        let need = ((f64::from(params.top_p) * total as f64).ceil() as u64).clamp(1, total);
        kept.truncate(reach(&kept, need, weigh));
    }
    let total: u64 = kept.iter().map(|&t| weigh(t)).sum();
    let uniform = rng::uniform(params.seed, params.choice, out.position, 0);
    let target = (u128::from(total) * ((uniform * (1u32 << 24) as f32) as u128)) >> 24;
    kept[reach(&kept, target as u64 + 1, weigh) - 1]
}

/// How many tokens weigh `need` together.
fn reach(tokens: &[TokenId], need: u64, weigh: impl Fn(TokenId) -> u64) -> usize {
    let mut sum = 0;
    let last = tokens.iter().position(|&token| {
        sum += weigh(token);
        sum >= need
    });
    last.expect("all of them weigh enough") + 1
}

fn sort(tokens: &mut [TokenId], logits: &[f32]) {
    let logit = |token: &TokenId| logits[*token as usize];
    tokens.sort_by(|a, b| logit(b).partial_cmp(&logit(a)).expect("numbers").then(a.cmp(b)));
}

fn score(logits: &[f32], peak: f32, token: TokenId, top: u8) -> ScoredToken {
    let total: u64 = logits.iter().map(|&logit| parts(logit, peak, 1.0)).sum();
    let log_total = (total as f64 / (1u64 << 40) as f64).ln();
    let logprob = |token: TokenId| (f64::from(logits[token as usize]) - f64::from(peak) - log_total) as f32;
    let mut scored = ScoredToken { token, logprob: logprob(token), top: TopLogprobs::EMPTY };
    if top > 0 {
        let mut order: Vec<TokenId> = (0..logits.len() as TokenId).collect();
        sort(&mut order, logits);
        let possible = order.iter().filter(|&&token| logits[token as usize] > f32::NEG_INFINITY);
        possible.take(usize::from(top)).for_each(|&token| scored.top.push(token, logprob(token)));
    }
    scored
}

/// `e^((logit - peak) / temperature)` in parts of 2^-40, with atom-cpu's polynomial.
fn parts(logit: f32, peak: f32, temperature: f32) -> u64 {
    const POLYNOMIAL: [f32; 7] =
        [0.001_381_454, 0.008_368_745, 0.041_668_39, 0.166_665_21, 0.499_999_94, 1.0, 1.0];
    let x = (logit - peak) / temperature;
    if x < -87.0 {
        return 0;
    }
    let n = x.mul_add(std::f32::consts::LOG2_E, 12_582_912.0) - 12_582_912.0;
    let r = n.mul_add(1.904_654_2e-9, n.mul_add(-std::f32::consts::LN_2, x));
    let p = POLYNOMIAL[1..].iter().fold(POLYNOMIAL[0], |p, &c| p.mul_add(r, c));
    (p * 2f32.powi(n as i32) * (1u64 << 40) as f32).round_ties_even() as u64
}
