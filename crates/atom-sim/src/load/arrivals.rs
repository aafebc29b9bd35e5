//! When requests come, by the seed.

use super::args::{Recorded, Shape, Source};
use crate::dice::Dice;
use atom_base::TokenId;
use std::sync::Arc;

/// A request that comes.
#[derive(Clone, Debug)]
pub(super) struct Arrival {
    pub(super) at_us: f64,
    pub(super) prompt: Arc<[TokenId]>,
    pub(super) output: usize,
}

/// Draws requests one after the other.
pub(super) struct Arrivals {
    source: Source,
    dice: Dice,
    /// Beginnings that prompts share.
    prefixes: Vec<Vec<TokenId>>,
    drawn: usize,
    last_us: f64,
    until_us: f64,
}

impl Arrivals {
    /// Requests until `until_us`.
    pub(super) fn new(source: Source, seed: u64, until_us: f64) -> Self {
        let mut dice = Dice::new(seed, STREAM);
        let prefixes = match &source {
            Source::Open { shape, .. } | Source::Closed { shape, .. } => {
                (0..shape.prefixes).map(|_| tokens(&mut dice, shape.prefix_tokens)).collect()
            }
            Source::Recorded(_) => Vec::new(),
        };
        Self { source, dice, prefixes, drawn: 0, last_us: 0.0, until_us }
    }

    /// What comes by itself, one after the other: nothing in a closed loop but the first request of
    /// each user.
    pub(super) fn next(&mut self) -> Option<Arrival> {
        let (at_us, lengths) = match &self.source {
            Source::Open { rate, .. } => {
                let uniform = (self.dice.word() >> 11) as f64 / (1u64 << 53) as f64;
                self.last_us += -(1.0 - uniform).ln() / rate * 1e6;
                (self.last_us, None)
            }
            Source::Closed { concurrency, .. } => {
                if self.drawn == *concurrency {
                    return None;
                }
                (0.0, None)
            }
            Source::Recorded(requests) => {
                let &Recorded { at_seconds, prompt, output } = requests.get(self.drawn)?;
                (at_seconds * 1e6, Some((prompt, output)))
            }
        };
        self.drawn += 1;
        (at_us < self.until_us).then(|| self.draw(at_us, lengths))
    }

    /// What comes since a request has ended at `at_us`.
    pub(super) fn after_one_ended(&mut self, at_us: f64) -> Option<Arrival> {
        let goes_on = matches!(self.source, Source::Closed { .. }) && at_us < self.until_us;
        goes_on.then(|| self.draw(at_us, None))
    }

    fn draw(&mut self, at_us: f64, lengths: Option<(usize, usize)>) -> Arrival {
        let shape = match &self.source {
            Source::Open { shape, .. } | Source::Closed { shape, .. } => Some(shape),
            Source::Recorded(_) => None,
        };
        let (prompt, output) = lengths.unwrap_or_else(|| {
            let Shape { prompt, output, .. } = shape.expect("recorded requests have lengths");
            (self.dice.within(prompt.0.clone()), self.dice.within(output.0.clone()))
        });
        let shared: &[TokenId] = match self.prefixes.len() {
            0 => &[],
            count => &self.prefixes[self.dice.below(count)],
        };
        let shared = &shared[..shared.len().min(prompt)];
        let own = tokens(&mut self.dice, prompt - shared.len());
        Arrival { at_us, prompt: shared.iter().copied().chain(own).collect(), output }
    }
}

/// Tokens that nobody else has: the first few are drawn, the others follow from them.
fn tokens(dice: &mut Dice, count: usize) -> Vec<TokenId> {
    let mut word = dice.word();
    let next = |_| {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (word >> 40) as TokenId
    };
    (0..count).map(next).collect()
}

/// Keeps these numbers apart from those of other worlds.
const STREAM: u32 = 3;
