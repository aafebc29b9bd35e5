//! Where the time of a step goes: graphs of its first operators, each with one more than the one before.
//!
//! Kernels overlap, so an operator has no time of its own. What it adds to those in front of it is well defined, needs
//! no tool, is computed from what those in front of it really left in the buffers, and all of it together is the whole
//! step. Only layers in the middle are taken apart, with what stands before the first and behind the last; others do the
//! same on other weights.

use super::{CudaBackend, early};
use crate::device::{Event, Stream};
use crate::element::KvElement;
use crate::error::CudaError;
use crate::fuse::{AddedExperts, Step, fuse};
use crate::graph::Graph;
use crate::kernels::Queue;
use crate::launch::linear_small::SmallOut;
use crate::memory::DeviceMem;
use crate::record::Capture;
use crate::weights::{Loaded, Shelf};
use atom_ops::{AttentionSpec, Op, OpsError, Recording, StepInputs, Weight};
use std::collections::{BTreeMap, BTreeSet};

/// Operators of one kind: of one name and, for products, one size.
#[derive(Clone, Debug, PartialEq)]
pub struct OperatorTime {
    /// What they do.
    pub name: String,
    /// How many a step has.
    pub count: usize,
    /// What all of them take.
    pub us: f64,
    /// Weights, keys and values that all of them read.
    pub bytes: u64,
}

/// A step, taken apart.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTimes {
    /// By kind, in the order of the step.
    pub operators: Vec<OperatorTime>,
    /// The whole graph, one launch behind the other.
    pub whole_us: f64,
    /// Bytes that a copy within the GPU's memory reads and writes in a microsecond, now.
    pub copy_bytes_per_us: f64,
}

impl CudaBackend {
    /// Takes apart the step that was launched last, which was of `recording` with `inputs`, and is computed again
    /// many times on the way: to measure, not to serve. `experts_read` is how many experts of a layer it reads.
    pub fn time_operators(
        &mut self,
        recording: &Recording,
        inputs: &StepInputs<'_>,
        experts_read: f64,
    ) -> Result<StepTimes, OpsError> {
        self.bind()?;
        let reserved = self.reserved.as_ref().ok_or_else(|| early("time_operators"))?;
        let (element, order) = (self.shelf.element(), self.blas.order());
        let codes = |weight| self.shelf.codes(weight);
        let few = reserved.attention.few.as_ref();
        let steps = fuse(recording, element, order, codes, self.gpu.device.properties(), few);
        let capture = Capture {
            queue: Queue { kernels: &self.gpu.kernels, stream: &self.stream },
            blas: &self.blas,
            fp8_blas: &self.fp8_blas,
            shelf: &self.shelf,
            weights: self.weights.address(),
            weights_bytes: self.weights.bytes(),
            reserved,
        };
        let counts: BTreeSet<usize> =
            taken_apart(&steps).into_iter().flat_map(|at| [at, at + 1]).chain([steps.len()]).collect();
        let graph = |&count: &usize| capture.first_steps(recording, &steps, count);
        let graphs: Vec<Graph> = counts.iter().map(graph).collect::<Result<_, _>>()?;
        let times = graphs_us(&self.stream, &graphs)?;
        let seen: BTreeMap<usize, f64> = counts.into_iter().zip(times).collect();
        let positions = inputs.spans.iter().map(|span| u64::from(span.start + span.rows)).sum();
        let cached_bytes = KvElement::from(reserved.reserve.kv_dtype).bytes(element);
        let sizes = Bytes { shelf: &self.shelf, positions, cached_bytes, experts_read };
        let operators = by_kind(&steps, &seen, |step| kind(&self.shelf, step), |step| sizes.of(step));
        let (whole_us, copy_bytes_per_us) = (seen[&steps.len()], copy_bytes_per_us(&self.stream)?);
        Ok(StepTimes { operators, whole_us, copy_bytes_per_us })
    }
}

/// Which steps are timed: all up to the first layer's attention, layers in the middle, all from the last one's attention
/// on. The first of them is what a step begins with, and comes with number 0 of what follows.
fn taken_apart(steps: &[Step<'_>]) -> BTreeSet<usize> {
    let is_attention = |step: &Step<'_>| matches!(step, Step::Op(Op::Attend { .. }) | Step::Attend(_));
    let layers: Vec<usize> = (0..steps.len()).filter(|&at| is_attention(&steps[at])).collect();
    if layers.len() <= LAYERS_TAKEN + 2 {
        return (0..steps.len()).collect();
    }
    let first = (layers.len() - LAYERS_TAKEN) / 2;
    let middle = layers[first]..layers[first + LAYERS_TAKEN];
    (0..layers[0]).chain(middle).chain(layers[layers.len() - 1]..steps.len()).collect()
}

/// `seen[n]` is the time of the first `n` steps. A kind's time is the mean of those that were timed, times its count.
fn by_kind<T>(
    steps: &[T],
    seen: &BTreeMap<usize, f64>,
    name: impl Fn(&T) -> String,
    bytes: impl Fn(&T) -> u64,
) -> Vec<OperatorTime> {
    let mut kinds: Vec<OperatorTime> = Vec::new();
    let mut timed: Vec<(usize, f64)> = Vec::new(); // [kinds]
    if let Some(&us) = seen.get(&0) {
        kinds.push(OperatorTime { name: "begin".into(), count: 1, us: 0.0, bytes: 0 });
        timed.push((1, us));
    }
    for (at, step) in steps.iter().enumerate() {
        let name = name(step);
        let place = kinds.iter().position(|kind| kind.name == name).unwrap_or_else(|| {
            kinds.push(OperatorTime { name, count: 0, us: 0.0, bytes: 0 });
            timed.push((0, 0.0));
            kinds.len() - 1
        });
        kinds[place].count += 1;
        kinds[place].bytes += bytes(step);
        if let (Some(before), Some(after)) = (seen.get(&at), seen.get(&(at + 1))) {
            timed[place].0 += 1;
            timed[place].1 += after - before;
        }
    }
    for (kind, (count, us)) in kinds.iter_mut().zip(timed) {
        kind.us = us / count.max(1) as f64 * kind.count as f64;
    }
    kinds
}

/// Name and sizes of a step.
fn kind(shelf: &Shelf, step: &Step<'_>) -> String {
    let sizes = |weight: Weight| match shelf.loaded(weight) {
        Ok(Loaded::Matrix { outputs, inputs, .. }) => format!("{inputs} to {outputs}"),
        _ => String::new(),
    };
    let product = |kind: &str, norms: bool, weight: Weight, out: SmallOut| {
        let norm = if norms { "norm, " } else { "" };
        let out = match out {
            SmallOut::Residual => ", add",
            SmallOut::GatedSilu => ", SiLU",
            SmallOut::Activations | SmallOut::F32 => "",
        };
        format!("{norm}{kind}linear {}{out}", sizes(weight))
    };
    match step {
        Step::Op(Op::Linear { weight, .. }) => format!("linear {}", sizes(*weight)),
        Step::Product(fused) => {
            let norms = fused.norm.is_some() || fused.scale.is_some();
            product("", norms, fused.weight, fused.product.out)
        }
        Step::Fp8(fused) => product("FP8 ", fused.norm.is_some(), fused.weight, fused.product.out),
        _ => step.name().into(),
    }
}

/// What steps read of weights and of the cache.
struct Bytes<'a> {
    shelf: &'a Shelf,
    /// Of the cache, over all requests.
    positions: u64,
    /// Of one number there.
    cached_bytes: usize,
    experts_read: f64,
}

impl Bytes<'_> {
    fn cache(&self, spec: &AttentionSpec) -> u64 {
        self.positions * (2 * spec.kv_heads * spec.head_dim * self.cached_bytes) as u64
    }

    fn of(&self, step: &Step<'_>) -> u64 {
        let matrix = |weight: Weight| match self.shelf.loaded(weight) {
            Ok(Loaded::Matrix { outputs, inputs, .. } | Loaded::Experts { outputs, inputs, .. }) => {
                // A code is a byte.
                let element = self.shelf.codes(weight).map_or(self.shelf.element().bytes(), |_| 1);
                (outputs * inputs * element) as u64
            }
            _ => 0,
        };
        match step {
            Step::Op(Op::Linear { weight, .. }) => matrix(*weight),
            Step::Product(fused) => matrix(fused.weight),
            Step::Fp8(fused) => matrix(fused.weight),
            Step::Router(routed) => matrix(routed.weight),
            Step::Op(Op::Experts { gate_up, down, .. })
            | Step::Experts(AddedExperts { op: Op::Experts { gate_up, down, .. }, .. }) => {
                (self.experts_read * (matrix(*gate_up) + matrix(*down)) as f64) as u64
            }
            Step::Op(Op::Attend { spec, .. }) => self.cache(spec),
            Step::Attend(few) => self.cache(few.spec),
            _ => 0,
        }
    }
}

/// Medians of the times of graphs. Round after round all of them run one behind the other, so that a clock that
/// changes changes all of them; the host is always ahead.
fn graphs_us(stream: &Stream, graphs: &[Graph]) -> Result<Vec<f64>, CudaError> {
    let marks: Vec<Event> = (0..=graphs.len()).map(|_| stream.device().event()).collect::<Result<_, _>>()?;
    let round = || -> Result<Vec<f64>, CudaError> {
        // The whole step, so that the host gets ahead while it runs: a GPU that waits for the first would be timed too.
        if let Some(longest) = graphs.last() {
            longest.launch(stream)?;
        }
        stream.mark(&marks[0])?;
        for (graph, mark) in graphs.iter().zip(&marks[1..]) {
            graph.launch(stream)?;
            stream.mark(mark)?;
        }
        marks[graphs.len()].wait()?;
        marks.windows(2).map(|pair| Ok(f64::from(pair[1].since_ms(&pair[0])?) * 1e3)).collect()
    };
    let warm: f64 = round()?.iter().sum();
    let rounds = ((ROUNDS_US / warm) as usize).clamp(ROUNDS_MIN, ROUNDS_MAX);
    let seen: Vec<Vec<f64>> = (0..rounds).map(|_| round()).collect::<Result<_, _>>()?;
    let median = |at: usize| {
        let mut times: Vec<f64> = seen.iter().map(|round| round[at]).collect();
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    Ok((0..graphs.len()).map(median).collect())
}

/// Of a copy within the GPU's memory, reading and writing counted.
fn copy_bytes_per_us(stream: &Stream) -> Result<f64, CudaError> {
    let device = stream.device();
    let (from, to) = (DeviceMem::new(device, COPY_BYTES)?, DeviceMem::new(device, COPY_BYTES)?);
    // Not zeros, which some memories move faster.
    from.fill(stream, 0, COPY_BYTES, 0x5a)?;
    let (start, end) = (device.event()?, device.event()?);
    let mut fastest_ms = f64::INFINITY;
    for _ in 0..COPIES {
        stream.mark(&start)?;
        to.copy(stream, &from)?;
        stream.mark(&end)?;
        end.wait()?;
        fastest_ms = fastest_ms.min(f64::from(end.since_ms(&start)?));
    }
    Ok(2.0 * COPY_BYTES as f64 / fastest_ms / 1e3)
}

/// Layers that are taken apart: their mean is a layer's time.
const LAYERS_TAKEN: usize = 4;
/// Rounds over all graphs: as many as that takes, within bounds.
const ROUNDS_US: f64 = 3e6;
const ROUNDS_MIN: usize = 5;
const ROUNDS_MAX: usize = 41;
/// Beyond any cache; there is as much beside what --gpu-memory-utilization leaves.
const COPY_BYTES: usize = 512 << 20;
const COPIES: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kinds_time_is_the_mean_of_what_was_timed_times_its_count() {
        let steps = ["embed", "a", "b", "a", "b", "a", "b", "head"];
        // Up to step 2, and from step 5 on.
        let seen = BTreeMap::from([(0, 1.0), (1, 3.0), (2, 7.0), (5, 20.0), (6, 26.0), (7, 27.0), (8, 40.0)]);
        let kinds = by_kind(&steps, &seen, |step| (*step).into(), |step| if *step == "a" { 100 } else { 0 });
        let expected = [("begin", 1, 1.0, 0), ("embed", 1, 2.0, 0), ("a", 3, 15.0, 300), ("b", 3, 3.0, 0)];
        for ((name, count, us, bytes), kind) in expected.into_iter().zip(&kinds) {
            assert_eq!(*kind, OperatorTime { name: name.into(), count, us, bytes });
        }
        assert_eq!((kinds.len(), kinds[4].us), (5, 13.0));
    }
}
