//! Attention on the CPU: the cache, rotary embedding, and causal attention over cached positions.
//!
//! A step goes: [`Attention::begin_step`] once; then per layer [`Attention::rotate_and_cache`] and,
//! behind a barrier, [`Attention::attend`], each called once by every worker.

pub(crate) mod cache;
mod kernel;
mod plan;
mod rotary;
mod strips;

use crate::elementwise::e4m3::E4M3;
use crate::elementwise::lanes::{Kernel, Lanes, dispatch};
use crate::elementwise::norm_in_place;
use crate::isa::Isa;
use crate::shared::{Rows, share};
use atom_ops::{AttentionSpec, KvDType, OpsError, Reserve, StepInputs};
use cache::{Element, KvCache};
use half::{bf16, f16};
use kernel::{Blocks, Scratch, Source};
use plan::{Plan, Split, Tile};
use rotary::RotaryTable;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Positions that are reduced on their own before they are merged: part of the numbers' definition.
const PARTITION: usize = 256;

/// (row, head) pairs whose sums stand in registers together.
const BUNDLE: usize = 8;

/// Most pairs of a tile: they share what they read of the cache while it is in the first two caches.
const TILE: usize = 4 * BUNDLE;

/// Bytes of partial results that splits may take; beyond it work is cut less finely.
const PARTIAL_BYTES_MAX: usize = 64 << 20;

/// The attention of one rank: its cache, and what a step needs.
pub(crate) struct Attention {
    isa: Isa,
    workers: usize,
    spec: Arc<AttentionSpec>,
    cache: KvCache,
    rotary: RotaryTable,
    plan: Plan,
    scratch: Vec<Mutex<Scratch>>,
    queue: Queue,
    /// Finished pieces of each split tile and kv head.
    pending: Vec<AtomicUsize>,
    partials: Partials,
}

/// Norm weights of q heads and k heads, `[head_dim]` each, and their eps.
pub(crate) type QkNorm<'a> = (&'a [f32], &'a [f32], f32);

/// Hands out units of work; ready for the next operator once every worker has seen the end.
struct Queue {
    next: AtomicUsize,
    left: AtomicUsize,
    workers: usize,
}

/// Sums over single partitions, each written by one worker and read by the one that merges them.
struct Partials {
    floats: Vec<f32>,
    start: *mut f32,
    width: usize,
}

// SAFETY: `start` points into `floats`, which is never touched but through it, under the contract of
// `Rows`.
unsafe impl Send for Partials {}
// SAFETY: as above.
unsafe impl Sync for Partials {}

impl Attention {
    /// Reserves the cache and everything else that a step needs.
    pub(crate) fn new(isa: Isa, workers: usize, reserve: &Reserve) -> Result<Self, OpsError> {
        let spec = Arc::clone(&reserve.attention);
        assert!(
            spec.kv_heads > 0 && spec.q_heads.is_multiple_of(spec.kv_heads),
            "{} query heads can't share {} kv heads evenly",
            spec.q_heads,
            spec.kv_heads
        );
        assert!(
            spec.rotary.dim <= spec.head_dim && spec.rotary.dim.is_multiple_of(2),
            "{} rotated elements of {}",
            spec.rotary.dim,
            spec.head_dim
        );
        let cache = KvCache::new(reserve)?;
        let rows = reserve.top.rows;
        let positions = reserve.pages_per_sequence * reserve.page_size;
        let width = kernel::sum_width(cache.padded());
        // A tile is cut when it is more than a unit of the step's work, so few are.
        let partials_max = if workers == 1 {
            0
        } else {
            let cut = plan::UNITS_PER_WORKER * workers * TILE * positions.div_ceil(PARTITION);
            cut.min(PARTIAL_BYTES_MAX / (width * size_of::<f32>()))
        };
        let group = spec.q_heads / spec.kv_heads;
        let plan = Plan::new(rows, group, spec.kv_heads, workers, partials_max);
        let pending = (0..plan.pending_max()).map(|_| AtomicUsize::new(0)).collect();
        let scratch = || Mutex::new(Scratch::new(spec.head_dim, cache.padded()));
        Ok(Self {
            isa,
            workers,
            rotary: RotaryTable::new(&spec.rotary, positions, rows),
            scratch: (0..workers).map(|_| scratch()).collect(),
            queue: Queue { next: AtomicUsize::new(0), left: AtomicUsize::new(0), workers },
            pending,
            partials: Partials::new(partials_max, width),
            plan,
            cache,
            spec,
        })
    }

    /// Prepares a step: the angles of its rows, and how its work is cut.
    pub(crate) fn begin_step(&mut self, inputs: &StepInputs<'_>) {
        assert_eq!(inputs.positions.len(), inputs.cache_rows.len(), "rows of a step");
        self.rotary.fill(inputs.positions);
        self.plan.cut(inputs.spans);
    }

    /// Fills a page of all layers with NaN.
    pub(crate) fn poison_page(&mut self, page: usize) {
        self.cache.poison_page(page);
    }

    /// [`atom_ops::Op::RotateAndCache`], this worker's share of it. `qkv` is
    /// `[rows, (q_heads + 2 kv_heads) * head_dim]`.
    ///
    /// # Safety
    /// Until the next barrier nothing else reads or writes `qkv` or this layer of the cache; the
    /// step's `cache_rows` are distinct.
    pub(crate) unsafe fn rotate_and_cache(
        &self,
        worker: usize,
        inputs: &StepInputs<'_>,
        layer: usize,
        qkv: Rows<'_>,
        qk_norm: Option<QkNorm<'_>>,
    ) {
        let rows = share(inputs.cache_rows.len(), worker, self.workers);
        dispatch(self.isa, RotateAndCache { attention: self, inputs, layer, qkv, qk_norm, rows });
    }

    /// [`atom_ops::Op::Attend`], as much of it as this worker gets hold of. Every worker calls it once.
    /// `qkv` is as above; `out` holds heads as rows, `[rows * q_heads, head_dim]`.
    ///
    /// # Safety
    /// Until the next barrier nothing else touches `out`, and nothing writes `qkv` or this layer of the
    /// cache.
    pub(crate) unsafe fn attend(
        &self,
        worker: usize,
        inputs: &StepInputs<'_>,
        layer: usize,
        qkv: Rows<'_>,
        out: Rows<'_>,
    ) {
        assert_eq!(out.width(), self.spec.head_dim, "attention writes heads as rows");
        let mut scratch = self.scratch[worker].try_lock().expect("each worker has a number of its own");
        dispatch(self.isa, Attend { attention: self, inputs, layer, qkv, out, scratch: &mut scratch });
        drop(scratch);
        self.queue.leave();
    }

    fn group(&self) -> usize {
        self.spec.q_heads / self.spec.kv_heads
    }
}

struct RotateAndCache<'a> {
    attention: &'a Attention,
    inputs: &'a StepInputs<'a>,
    layer: usize,
    qkv: Rows<'a>,
    qk_norm: Option<QkNorm<'a>>,
    rows: std::ops::Range<usize>,
}

impl Kernel for RotateAndCache<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        match self.attention.cache.dtype() {
            KvDType::F32 => self.typed::<S, f32>(s),
            KvDType::F16 => self.typed::<S, f16>(s),
            KvDType::BF16 => self.typed::<S, bf16>(s),
            KvDType::E4M3 => self.typed::<S, E4M3>(s),
        }
    }
}

impl RotateAndCache<'_> {
    #[inline(always)]
    fn typed<S: Lanes, T: Element>(self, s: S) {
        let Self { attention, inputs, layer, qkv, qk_norm, rows } = self;
        let AttentionSpec { q_heads, kv_heads, head_dim, .. } = *attention.spec;
        for row in rows {
            // SAFETY: the row is in this worker's share, and nothing else touches `qkv` now.
            let heads = unsafe { qkv.row_mut(row) };
            let (q, kv) = heads.split_at_mut(q_heads * head_dim);
            let (k, v) = kv.split_at_mut(kv_heads * head_dim);
            for q in q.chunks_exact_mut(head_dim) {
                if let Some((weight, _, eps)) = qk_norm {
                    norm_in_place(s, q, weight, eps);
                }
                attention.rotary.rotate(s, row, q);
            }
            let cache_row = inputs.cache_rows[row] as usize;
            for (head, (k, v)) in k.chunks_exact_mut(head_dim).zip(v.chunks_exact(head_dim)).enumerate() {
                if let Some((_, weight, eps)) = qk_norm {
                    norm_in_place(s, k, weight, eps);
                }
                attention.rotary.rotate(s, row, k);
                // SAFETY: cache rows are distinct and this layer is ours until the barrier, by the
                // promise of `rotate_and_cache`.
                unsafe { attention.cache.write::<S, T>(s, layer, head, cache_row, k, v) };
            }
        }
    }
}

struct Attend<'a> {
    attention: &'a Attention,
    inputs: &'a StepInputs<'a>,
    layer: usize,
    qkv: Rows<'a>,
    out: Rows<'a>,
    scratch: &'a mut Scratch,
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        match self.attention.cache.dtype() {
            KvDType::F32 => s.call(Typed::<f32>(self, std::marker::PhantomData)),
            KvDType::F16 => s.call(Typed::<f16>(self, std::marker::PhantomData)),
            KvDType::BF16 => s.call(Typed::<bf16>(self, std::marker::PhantomData)),
            KvDType::E4M3 => s.call(Typed::<E4M3>(self, std::marker::PhantomData)),
        }
    }
}

struct Typed<'a, T>(Attend<'a>, std::marker::PhantomData<T>);

impl<T: Element> Kernel for Typed<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let mut attend = self.0;
        let kv_heads = attend.attention.spec.kv_heads;
        let tiles = attend.attention.plan.tiles();
        while let Some(unit) = attend.attention.queue.pop(tiles.len() * kv_heads) {
            attend.unit::<S, T>(s, &tiles[unit / kv_heads], unit % kv_heads);
        }
    }
}

impl Attend<'_> {
    /// One tile of one kv head.
    #[inline(always)]
    fn unit<S: Lanes, T: Element>(&mut self, s: S, tile: &Tile, kv_head: usize) {
        let mut positions = [0; TILE];
        let positions = &mut positions[..tile.pairs.len()];
        self.load(tile, kv_head, positions);
        let last = *positions.last().expect("a tile has pairs");
        let pages = self.inputs.tables.pages(self.inputs.spans[tile.span].slot);
        let source = Source { cache: &self.attention.cache, layer: self.layer, kv_head, pages };
        for partition in tile.partitions.clone() {
            let start = partition * PARTITION;
            let blocks = Blocks::<T>::find(source, start, (last + 1 - start).min(PARTITION));
            for (bundle, positions) in positions.chunks(BUNDLE).enumerate() {
                let pairs = kernel::attend_bundle(s, &blocks, start, bundle, positions, self.scratch);
                for pair in pairs {
                    self.keep(s, tile, kv_head, partition, bundle * BUNDLE + pair);
                }
            }
        }
        match tile.split {
            None => self.finish(s, tile, kv_head),
            Some(split) => {
                // The last piece to finish sees what all the others wrote.
                let pending = &self.attention.pending[split.pending + kv_head];
                if pending.fetch_add(1, Ordering::AcqRel) + 1 == split.pieces {
                    pending.store(0, Ordering::Relaxed);
                    self.merge_pieces(s, tile, split, kv_head, positions);
                    self.finish(s, tile, kv_head);
                }
            }
        }
    }

    /// Takes the queries of a tile's pairs, and their positions.
    fn load(&mut self, tile: &Tile, kv_head: usize, positions: &mut [usize]) {
        let AttentionSpec { head_dim, scale, .. } = *self.attention.spec;
        let start = self.inputs.spans[tile.span].start as usize;
        for (i, position) in positions.iter_mut().enumerate() {
            let (row, head) = self.place(tile, kv_head, i);
            *position = start + (tile.pairs.start + i) / self.attention.group();
            // SAFETY: nothing writes `qkv` until the barrier behind this operator.
            let qkv = unsafe { self.qkv.row(row) };
            self.scratch.load_query(i, &qkv[head * head_dim..][..head_dim], scale);
        }
    }

    /// Row of the step and query head of a tile's pair `i`.
    #[inline(always)]
    fn place(&self, tile: &Tile, kv_head: usize, i: usize) -> (usize, usize) {
        let (pair, group) = (tile.pairs.start + i, self.attention.group());
        let first_row = self.inputs.spans[tile.span].first_row as usize;
        (first_row + pair / group, kv_head * group + pair % group)
    }

    /// Merges the sum of a pair over a partition, or leaves it to be merged by the last piece.
    #[inline(always)]
    fn keep<S: Lanes>(&mut self, s: S, tile: &Tile, kv_head: usize, partition: usize, pair: usize) {
        let (merged, sum) = self.scratch.sums(pair);
        match tile.split {
            None if partition == 0 => merged.copy_from_slice(sum),
            None => kernel::merge(s, merged, sum),
            Some(split) => {
                let index = self.attention.partial(tile, split, kv_head, partition, pair);
                // SAFETY: this partition of this tile and head is this worker's alone.
                unsafe { self.attention.partials.rows().row_mut(index) }.copy_from_slice(sum);
            }
        }
    }

    /// Merges what the pieces of a split tile left.
    #[inline(always)]
    fn merge_pieces<S: Lanes>(
        &mut self,
        s: S,
        tile: &Tile,
        split: Split,
        kv_head: usize,
        positions: &[usize],
    ) {
        for (pair, position) in positions.iter().enumerate() {
            let (merged, _) = self.scratch.sums(pair);
            for partition in 0..=position / PARTITION {
                let index = self.attention.partial(tile, split, kv_head, partition, pair);
                // SAFETY: all pieces of the tile are finished, so nothing writes its partial sums.
                let sum = unsafe { self.attention.partials.rows().row(index) };
                if partition == 0 {
                    merged.copy_from_slice(sum);
                } else {
                    kernel::merge(s, merged, sum);
                }
            }
        }
    }

    /// Writes the tile's outputs.
    #[inline(always)]
    fn finish<S: Lanes>(&mut self, s: S, tile: &Tile, kv_head: usize) {
        for i in 0..tile.pairs.len() {
            let (row, head) = self.place(tile, kv_head, i);
            // SAFETY: no two tiles share a pair but the pieces of a split, and only the last of them
            // comes here.
            let out = unsafe { self.out.row_mut(row * self.attention.spec.q_heads + head) };
            kernel::finish(s, self.scratch.sums(i).0, out);
        }
    }
}

impl Attention {
    /// Where the sum of a split tile's pair over one partition stands.
    fn partial(&self, tile: &Tile, split: Split, kv_head: usize, partition: usize, pair: usize) -> usize {
        split.partials + (partition * self.spec.kv_heads + kv_head) * tile.pairs.len() + pair
    }
}

impl Partials {
    fn new(rows: usize, width: usize) -> Self {
        let mut floats = vec![0.0; rows * width];
        Self { start: floats.as_mut_ptr(), floats, width }
    }

    fn rows(&self) -> Rows<'_> {
        // SAFETY: `start` is valid for the length of `floats`, which lives as long as `self` and is
        // reached only through here.
        unsafe { Rows::from_raw(self.start, self.floats.len() / self.width, self.width) }
    }
}

impl Queue {
    /// The next of `units` units.
    fn pop(&self, units: usize) -> Option<usize> {
        // Relaxed: units only meet through the counters of splits and the barrier behind the operator.
        let unit = self.next.fetch_add(1, Ordering::Relaxed);
        (unit < units).then_some(unit)
    }

    /// Called once by each worker after `pop` gave it nothing; the last one resets the queue.
    fn leave(&self) {
        if self.left.fetch_add(1, Ordering::AcqRel) + 1 == self.workers {
            self.left.store(0, Ordering::Relaxed);
            self.next.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests;
