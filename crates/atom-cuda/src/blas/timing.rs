//! Chooses algorithms by timing them where they will run.
//!
//! cuBLASLt's own first choice for a product is a guess from its sizes. Here its first few, and some that it has for other
//! rows, are timed on the GPU, with weights that lie where the model's do and are too many for the cache, as in a step.
//! The fastest one is kept, in memory and on disk. With sums in a fixed order only those are timed whose rows have the bits of
//! the one algorithm that takes any number of rows; see [`Blas::trial`].

use super::{Algorithm, Blas, Chosen, Product, Reductions};
use crate::choices::Choices;
use crate::device::{Event, Stream};
use crate::error::CudaError;
use crate::graph::Graph;
use crate::memory::{Address, DeviceMem};
use crate::order::SumOrder;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What products are timed with: the model's weights as both operands, and a step's buffers for the output, which hold
/// nothing between steps.
pub(crate) struct Operands<'a> {
    pub(crate) stream: &'a Stream,
    pub(crate) weights: (Address, usize),
    pub(crate) room: &'a DeviceMem,
}

/// What was timed so far.
#[derive(Clone, Copy, Default)]
pub(super) struct Tally {
    /// Since it was told.
    timed: usize,
    /// Products that came when the time was spent, since it was told.
    left: usize,
    /// In all.
    spent: Duration,
}

/// How a product got its algorithm.
enum Settled {
    /// It had one, or an earlier start kept one.
    Known,
    Timed,
    /// The library's first choice, untimed.
    Left,
}

/// A candidate with its times so far, in microseconds.
struct Timed {
    algorithm: Algorithm,
    graph: Graph,
    times: Vec<f32>,
}

impl Blas {
    /// Chooses the algorithms of those products that nothing was chosen for, now or at an earlier start. Not within a
    /// capture.
    pub(crate) fn choose_by_time(
        &self,
        products: &[Product],
        operands: &Operands<'_>,
    ) -> Result<(), CudaError> {
        let (mut tally, start) = (self.tally.get(), Instant::now());
        let before = tally;
        for product in products.iter().filter(|product| product.rows > 0) {
            let may_time = before.spent + start.elapsed() < TIMING_MAX;
            match self.settle(*product, may_time.then_some(operands))? {
                Settled::Timed => tally.timed += 1,
                Settled::Left if !may_time => tally.left += 1,
                Settled::Left | Settled::Known => {}
            }
        }
        if tally.timed > before.timed {
            self.choices().save();
        }
        tally.spent += start.elapsed();
        self.tally.set(tally);
        Ok(())
    }

    /// Tells how many products were timed since it was asked last, if any were.
    pub(crate) fn report(&self) {
        let Tally { timed, left, spent } = self.tally.get();
        if timed > 0 {
            tracing::info!(
                "{timed} products timed to choose their algorithms in {:.2} s; {left} left to cuBLASLt's first choice until \
                 the next start",
                spent.as_secs_f64()
            );
        }
        self.tally.set(Tally { timed: 0, left: 0, spent });
    }

    /// Chooses one product, by timing only if there are operands for it.
    fn settle(&self, product: Product, operands: Option<&Operands<'_>>) -> Result<Settled, CudaError> {
        if self.chosen.borrow().contains_key(&product) {
            return Ok(Settled::Known);
        }
        let mut chosen = Chosen::new(&self.library, product)?;
        // Held while it is timed: another rank that wants the same waits for what comes of it.
        let mut choices = self.choices();
        let kept = choices.of(&product).map(|data| Algorithm { data });
        let settled = if let Some(algorithm) = kept.filter(|kept| chosen.takes(self.handle, kept)) {
            chosen.algorithm = algorithm;
            Settled::Known
        } else if let Some(operands) = operands.filter(|operands| operands.have_room_for(&product)) {
            chosen.algorithm = self.fastest(&chosen, operands)?;
            choices.keep(&product, chosen.algorithm.data);
            Settled::Timed
        } else {
            chosen.algorithm = self.first_choice(&chosen)?;
            choices.agree(&product, chosen.algorithm.data);
            Settled::Left
        };
        self.chosen.borrow_mut().insert(product, chosen);
        Ok(settled)
    }

    fn choices(&self) -> MutexGuard<'_, Choices> {
        self.choices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fastest(&self, chosen: &Chosen, operands: &Operands<'_>) -> Result<Algorithm, CudaError> {
        let candidates = self.candidates(chosen, operands)?;
        let clock = Clock::new(operands.stream)?;
        let mut all = Vec::new();
        for algorithm in candidates {
            // Some algorithms that heuristics name refuse when they are asked.
            if let Ok(graph) = self.graph(chosen, &algorithm, operands) {
                let mut timed = Timed { algorithm, graph, times: Vec::new() };
                if launches(&chosen.product) > 1 {
                    // The first launch brings code in, which is little beside a large product.
                    clock.time(&timed.graph)?;
                }
                timed.times.push(clock.time(&timed.graph)?);
                all.push(timed);
            }
        }
        let best = all.iter().map(|timed| timed.times[0]).fold(f32::INFINITY, f32::min);
        all.retain(|timed| timed.times[0] <= best * CLOSE);
        for _ in 0..ROUNDS {
            for timed in &mut all {
                timed.times.push(clock.time(&timed.graph)?);
            }
        }
        let all = all.into_iter().map(|timed| (timed.algorithm, median(timed.times)));
        all.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(algorithm, _)| algorithm).ok_or_else(|| {
            CudaError::Unsupported(format!("cuBLASLt has no algorithm that runs {:?}", chosen.product))
        })
    }

    /// What may be chosen among, the library's own first choice in front.
    fn candidates(&self, chosen: &Chosen, operands: &Operands<'_>) -> Result<Vec<Algorithm>, CudaError> {
        let mut all = Vec::new();
        let mut add = |found: Vec<Algorithm>| {
            for algorithm in found {
                if all.iter().all(|known: &Algorithm| known.data != algorithm.data) {
                    all.push(algorithm);
                }
            }
        };
        if self.order == SumOrder::Fastest {
            add(chosen.algorithms(self.handle, Reductions::Any, CANDIDATES)?);
        }
        add(chosen.algorithms(self.handle, Reductions::None, CANDIDATES)?);
        for rows in others(chosen.product.rows) {
            let other = Chosen::new(&self.library, Product { rows, ..chosen.product })?;
            let mut found = other.algorithms(self.handle, Reductions::None, CANDIDATES_OF_OTHERS)?;
            found.retain(|algorithm| chosen.takes(self.handle, algorithm));
            add(found);
        }
        if self.order == SumOrder::Fixed {
            let usual = self.one_for_all_rows(chosen)?;
            let (kind, bits) = (self.kind(&usual)?, self.trial(chosen, &usual, operands)?);
            let mut same = vec![usual];
            for algorithm in all.into_iter().filter(|algorithm| algorithm.data != usual.data) {
                let is_of_kind = self.kind(&algorithm)? == kind;
                // One that refuses the trial has no bits to compare.
                if is_of_kind && bits.is_some() && self.trial(chosen, &algorithm, operands)? == bits {
                    same.push(algorithm);
                }
            }
            return Ok(same);
        }
        Ok(all)
    }

    /// The first rows that an algorithm makes of the first operands; nothing if it refuses. All of a kind run one loop over
    /// the inputs, and differ in how outputs are dealt to blocks. The trial is there for a kernel that would add
    /// otherwise: of so many sums some would show it.
    fn trial(
        &self,
        chosen: &Chosen,
        algorithm: &Algorithm,
        operands: &Operands<'_>,
    ) -> Result<Option<Vec<u8>>, CudaError> {
        let product = &chosen.product;
        let mut rows = vec![0; product.rows.min(TRIAL_ROWS) * product.outputs * product.out.bytes()];
        operands.room.fill(operands.stream, 0, rows.len(), 0)?;
        // SAFETY: `have_room_for` was asked.
        if unsafe { self.run(chosen, algorithm, operands.stream, operands.arrays(product, 0)) }.is_err() {
            return Ok(None);
        }
        operands.room.read(operands.stream, 0, &mut rows)?;
        Ok(Some(rows))
    }

    /// As many launches as take some time, each with other weights as far as there are other ones.
    fn graph(
        &self,
        chosen: &Chosen,
        algorithm: &Algorithm,
        operands: &Operands<'_>,
    ) -> Result<Graph, CudaError> {
        let launches = launches(&chosen.product);
        Graph::capture(operands.stream, || {
            (0..launches).try_for_each(|launch| {
                let arrays = operands.arrays(&chosen.product, launch);
                // SAFETY: `have_room_for` was asked, and graphs do not outlive the choice.
                unsafe { self.run(chosen, algorithm, operands.stream, arrays) }
            })
        })
    }
}

impl Operands<'_> {
    fn have_room_for(&self, product: &Product) -> bool {
        let [x, weight, out] = product.bytes();
        x <= self.weights.1 && weight <= self.weights.1 && out <= self.room.bytes()
    }

    /// x, weights and output of launch number `launch`.
    fn arrays(&self, product: &Product, launch: usize) -> [Address; 3] {
        let ([_, weight, _], (start, all)) = (product.bytes(), self.weights);
        let each = weight.next_multiple_of(ALIGN);
        let places = (all / each).max(1);
        [start, start.plus(launch % places * each), self.room.address()]
    }
}

fn median(mut times: Vec<f32>) -> f32 {
    times.sort_by(f32::total_cmp);
    times[times.len() / 2]
}

/// Two events around a launch.
struct Clock<'a> {
    stream: &'a Stream,
    start: Event,
    end: Event,
}

impl<'a> Clock<'a> {
    fn new(stream: &'a Stream) -> Result<Self, CudaError> {
        Ok(Self { stream, start: stream.device().event()?, end: stream.device().event()? })
    }

    /// Microseconds.
    fn time(&self, graph: &Graph) -> Result<f32, CudaError> {
        self.stream.mark(&self.start)?;
        graph.launch(self.stream)?;
        self.stream.mark(&self.end)?;
        self.end.wait()?;
        Ok(self.end.since_ms(&self.start)? * 1e3)
    }
}

/// Launches that are timed together: about `ENOUGH_US` at rates that a large GPU reaches.
fn launches(product: &Product) -> usize {
    let operations = 2.0 * (product.rows * product.inputs * product.outputs) as f64;
    let bytes: usize = product.bytes().iter().sum();
    let us = (operations / 600e6).max(bytes as f64 / 3e6).max(3.0);
    ((ENOUGH_US / us).ceil() as usize).clamp(1, LAUNCHES_MAX)
}

/// Rows whose algorithms are tried too. The library picks tiles by what they leave empty, and so for 8 rows leaves out the
/// pairs of blocks that fetch weights for each other; it has these for 12, and they take 8 in 11.7 us where its own take
/// 12.7 (4096 x 4096, H200). Large ones differ by how tiles follow one another.
fn others(rows: usize) -> Vec<usize> {
    match rows {
        ..=64 => vec![12, 24, 48],
        65..=1024 => vec![rows / 2 + 1, 2 * rows],
        _ => vec![2048],
    }
}

/// A start spends no more than this on timing; what is left is timed by the next ones. (Qwen3-8B's 256 products took 5.4 s.)
const TIMING_MAX: Duration = Duration::from_secs(10);
/// Algorithms that heuristics are asked for, with reductions and without.
const CANDIDATES: usize = 8;
/// And for each of the other numbers of rows.
const CANDIDATES_OF_OTHERS: usize = 4;
/// Rows whose bits are looked at.
const TRIAL_ROWS: usize = 16;
/// Those that one launch showed to be slower than the best by more than this are not timed again.
const CLOSE: f32 = 1.12;
/// Times that the close ones are timed again.
const ROUNDS: usize = 3;
/// Microseconds of a graph, next to which the ends of a launch are small.
const ENOUGH_US: f64 = 80.0;
/// Launches of one graph at the most.
const LAUNCHES_MAX: usize = 12;
/// Matrices start on multiples of it.
const ALIGN: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Element;

    #[test]
    fn small_products_are_launched_often_and_large_ones_once() {
        let product = |rows, inputs, outputs| Product {
            rows,
            inputs,
            outputs,
            element: Element::BF16,
            out: Element::BF16,
            adds: false,
        };
        assert_eq!(launches(&product(8192, 4096, 24576)), 1);
        assert_eq!(launches(&product(1, 64, 64)), LAUNCHES_MAX);
        let middle = launches(&product(64, 4096, 4096));
        assert!((2..LAUNCHES_MAX).contains(&middle), "{middle}");
    }
}
