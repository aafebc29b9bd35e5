//! One tile of attention: scores, softmax and weighted values of a few (row, head) pairs that share a
//! kv head.
//!
//! The order of operations of a pair is fixed by absolute positions alone. A *partition* is
//! [`PARTITION`] positions, seen up to the pair's own: its scores are chains of fma over the elements of
//! the head; their maximum is exact; the sum of weights runs in sixteen lanes, position `i` in lane
//! `i % 16`; values are added position by position. Partitions are merged first to last. So neither the
//! other pairs of a tile, nor the cut of a chunk, nor the page size can change a bit, and a position
//! that a pair may not see never meets its numbers: it is left out, not multiplied by zero.

use super::cache::{Element, KvCache};
use super::strips::{AddValues, Scores, strip};
use super::{BUNDLE, PARTITION, TILE};
use crate::elementwise::exp::exp;
use crate::elementwise::lanes::{LANES, Lanes};
use std::ops::Range;

/// Blocks of sixteen positions in a partition.
pub(super) const BLOCKS: usize = PARTITION / LANES;

/// What a worker needs beside the cache; reserved once.
pub(super) struct Scratch {
    /// Scaled queries of the tile: `[TILE / BUNDLE, head_dim, BUNDLE]`.
    queries: Vec<f32>,
    /// Scores, then weights, of one partition: `[BUNDLE, PARTITION]`.
    weights: Vec<f32>,
    /// Sums over one partition: `[BUNDLE, sum_width]`.
    partial: Vec<f32>,
    /// Sums over all partitions so far: `[TILE, sum_width]`.
    merged: Vec<f32>,
}

/// The positions that a tile reads: one kv head of one sequence.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) cache: &'a KvCache,
    pub(super) layer: usize,
    pub(super) kv_head: usize,
    /// Pages of the sequence.
    pub(super) pages: &'a [u32],
}

/// Where a partition's keys and values lie, sixteen positions at a time.
pub(super) struct Blocks<T> {
    /// Element 0 of the keys of sixteen positions; the next element is `key_stride` further.
    pub(super) keys: [*const T; BLOCKS],
    /// Values of the first of sixteen positions; the next position's are `value_stride` further.
    pub(super) values: [*const T; BLOCKS],
    pub(super) key_stride: usize,
    pub(super) value_stride: usize,
}

/// Floats of a *sum*: values weighted by `e^(score - max)`. Element 0 is that max, element 1 the sum of
/// the weights, elements 16 .. the weighted values.
pub(super) fn sum_width(padded: usize) -> usize {
    LANES + padded
}

impl Scratch {
    pub(super) fn new(head_dim: usize, padded: usize) -> Self {
        let width = sum_width(padded);
        Self {
            queries: vec![0.0; TILE * head_dim],
            weights: vec![0.0; BUNDLE * PARTITION],
            partial: vec![0.0; BUNDLE * width],
            merged: vec![0.0; TILE * width],
        }
    }

    /// Takes the query of the tile's pair `pair`.
    pub(super) fn load_query(&mut self, pair: usize, query: &[f32], scale: f32) {
        let bundle = &mut self.queries[pair / BUNDLE * BUNDLE * query.len()..][..BUNDLE * query.len()];
        for (column, element) in bundle.chunks_exact_mut(BUNDLE).zip(query) {
            column[pair % BUNDLE] = element * scale;
        }
    }

    /// Of the tile's pair `pair`: the sum over all partitions merged so far, and the sum over the
    /// partition that was attended last.
    pub(super) fn sums(&mut self, pair: usize) -> (&mut [f32], &[f32]) {
        let width = self.partial.len() / BUNDLE;
        let merged = &mut self.merged[pair * width..][..width];
        (merged, &self.partial[pair % BUNDLE * width..][..width])
    }
}

/// Computes the partition that `blocks` holds, which begins at position `start`, for the tile's bundle
/// `bundle` of pairs, whose positions are `positions`, ascending. Returns the pairs of the bundle that
/// see any of it: their sums are left in the scratch.
#[inline(always)]
pub(super) fn attend_bundle<S: Lanes, T: Element>(
    s: S,
    blocks: &Blocks<T>,
    start: usize,
    bundle: usize,
    positions: &[usize],
    scratch: &mut Scratch,
) -> Range<usize> {
    let width = scratch.partial.len() / BUNDLE;
    let head_dim = scratch.queries.len() / TILE;
    let mut seen = [0; BUNDLE];
    for (seen, &position) in seen.iter_mut().zip(positions) {
        *seen = (position + 1).saturating_sub(start).min(PARTITION);
    }
    let pairs = positions.len();
    let blind = seen[..pairs].iter().take_while(|&&seen| seen == 0).count();
    let queries = &scratch.queries[bundle * BUNDLE * head_dim..][..BUNDLE * head_dim];
    // As many pairs at once as registers hold; fewer pairs hide latency with more positions.
    let step = S::ACCUMULATORS.min(BUNDLE);
    for first in (blind..pairs).step_by(step) {
        let end = (first + step).min(pairs);
        let seen = &seen[first..end];
        let weights = &mut scratch.weights[first * PARTITION..end * PARTITION];
        let sums = &mut scratch.partial[first * width..end * width];
        strip(s, seen.len(), Scores { blocks, queries, first, seen, weights });
        let pairs = weights.chunks_exact_mut(PARTITION).zip(sums.chunks_exact_mut(width));
        for ((weights, sum), &seen) in pairs.zip(seen) {
            (sum[0], sum[1]) = soften(s, &mut weights[..seen.next_multiple_of(LANES)], seen);
            sum[LANES..].fill(0.0);
        }
        add_values(s, blocks, seen, weights, sums);
    }
    blind..pairs
}

/// Adds the sum over the next partition to the sum over those before it.
#[inline(always)]
pub(super) fn merge<S: Lanes>(s: S, sum: &mut [f32], next: &[f32]) {
    let (before, after) = (sum[0], next[0]);
    let max = if before > after { before } else { after };
    let (keep, take) = (s.splat(before - max), s.splat(after - max));
    let (keep, take) = (exp(s, keep), exp(s, take));
    for (sum, next) in sum[LANES..].chunks_exact_mut(LANES).zip(next[LANES..].chunks_exact(LANES)) {
        let taken = s.mul(s.read(next), take);
        s.write(s.fma(s.read(sum), keep, taken), sum);
    }
    let weights = s.fma(s.splat(sum[1]), keep, s.mul(s.splat(next[1]), take));
    (sum[0], sum[1]) = (max, s.array(weights)[0]);
}

/// `out` = the mean of the values that `sum` holds.
#[inline(always)]
pub(super) fn finish<S: Lanes>(s: S, sum: &[f32], out: &mut [f32]) {
    let inverse = s.splat(1.0 / sum[1]);
    for (out, values) in out.chunks_mut(LANES).zip(sum[LANES..].chunks_exact(LANES)) {
        s.write(s.mul(s.read(values), inverse), out);
    }
}

/// Turns the scores of `seen` positions into weights; returns the largest score and the sum of the
/// weights. What lies behind `seen` in the last vector is left out.
#[inline(always)]
fn soften<S: Lanes>(s: S, scores: &mut [f32], seen: usize) -> (f32, f32) {
    let (blocks, _) = scores.as_chunks_mut::<LANES>();
    let ragged = blocks.len() - 1;
    let hidden = s.splat(f32::NEG_INFINITY);
    let tail = s.select(s.first(seen - ragged * LANES), s.load(&blocks[ragged]), hidden);
    s.store(tail, &mut blocks[ragged]);
    let mut max = hidden;
    for block in blocks.iter() {
        max = s.max(max, s.load(block));
    }
    let largest = s.largest(max);
    let max = s.splat(largest);
    let mut sum = s.splat(0.0);
    for block in blocks.iter_mut() {
        let weights = exp(s, s.sub(s.load(block), max));
        sum = s.add(sum, weights);
        s.store(weights, block);
    }
    (largest, s.sum(sum))
}

/// Adds the weighted values of what each pair sees: together as far as all of them see, then alone.
#[inline(always)]
fn add_values<S: Lanes, T: Element>(
    s: S,
    blocks: &Blocks<T>,
    seen: &[usize],
    weights: &[f32],
    sums: &mut [f32],
) {
    let width = sums.len() / seen.len();
    let common = seen[0];
    strip(s, seen.len(), AddValues { blocks, positions: 0..common, weights, sums });
    for ((&seen, weights), sum) in
        seen.iter().zip(weights.chunks_exact(PARTITION)).zip(sums.chunks_exact_mut(width))
    {
        if seen > common {
            strip(s, 1, AddValues { blocks, positions: common..seen, weights, sums: sum });
        }
    }
}

impl<T: Element> Blocks<T> {
    /// Looks up `len` positions from `start`, a multiple of sixteen.
    pub(super) fn find(source: Source<'_>, start: usize, len: usize) -> Self {
        let Source { cache, layer, kv_head, pages } = source;
        let (page_size, value_stride) = (cache.page_size(), cache.padded());
        let (mut keys, mut values) = ([std::ptr::null(); BLOCKS], [std::ptr::null(); BLOCKS]);
        for i in 0..len.div_ceil(LANES) {
            let (page, offset) = ((start + i * LANES) / page_size, (start + i * LANES) % page_size);
            let block = cache.block::<T>(layer, kv_head, pages[page] as usize).cast_const();
            // SAFETY: a block holds page_size keys and values; sixteen from `offset` lie within, since
            // page_size is a multiple of sixteen.
            unsafe {
                keys[i] = block.add(offset);
                values[i] = block.add(page_size * cache.head_dim() + offset * value_stride);
            }
        }
        Self { keys, values, key_stride: page_size, value_stride }
    }
}
