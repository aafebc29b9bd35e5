//! Paged attention: all kernels against f64, at odd lengths, with NaN wherever nothing is to be read.

use crate::kit::Kit;
use atom_base::{SlotId, Span};
use atom_cuda::launch::attend::{self, AttendHeads, AttendKernels, AttendScratch, AttendStep, TileMaps};
use atom_cuda::launch::rope::CacheLayer;
use atom_cuda::{Address, CudaError, DeviceMem, Element, KvElement, WorkCutter, WorkSpec};
use atom_weights::{DType, quant};

/// `(start, rows)` of each sequence of a step.
const MIXES: &[&[(u32, u32)]] = &[
    &[(0, 1), (0, 15), (1, 16), (46, 17)],
    &[(0, 63), (0, 64), (0, 65)],
    &[(999, 1), (437, 63), (4096, 1), (16, 1)],
    &[(37, 130), (5119, 2), (700, 9)],
];

/// Query heads, kv heads, elements.
const HEADS: &[(usize, usize, usize)] = &[
    (4, 4, 128),
    (8, 2, 128),
    (14, 2, 64),
    (3, 1, 64),
    (32, 1, 128),
    (6, 2, 96),
    (4, 2, 80),
    (2, 2, 112),
    (4, 2, 256),
    (4, 2, 192),
    (4, 1, 32),
    (2, 2, 16),
    (20, 1, 64),
    (4, 2, 12),
];

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    for (round, &(q, kv, head_dim)) in HEADS.iter().enumerate() {
        for (i, mix) in MIXES.iter().enumerate() {
            let turn = round * MIXES.len() + i;
            let shape = Shape {
                heads: (q, kv, head_dim),
                page_size: [16, 64, 32, 128, 48][turn % 5],
                window: [0, 0, 100, 17, 1, 700][turn % 6],
                has_sinks: turn % 4 == 1,
                doubled: [0, 40, 0, -40, 0, 0, 14][turn % 7],
            };
            for cache in [KvElement::Own, KvElement::E4M3] {
                let world = World::new(kit, shape, mix, (Element::BF16, cache))?;
                check_all(kit, &world)?;
                if turn.is_multiple_of(3) {
                    let world = World::new(kit, shape, mix, (Element::F32, cache))?;
                    check_simple(kit, &world)?;
                }
            }
        }
    }
    an_empty_list_writes_nothing(kit, KvElement::Own)?;
    an_empty_list_writes_nothing(kit, KvElement::E4M3)
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) heads: (usize, usize, usize),
    pub(crate) page_size: usize,
    pub(crate) window: usize,
    pub(crate) has_sinks: bool,
    /// Queries are times 2 to this, and scores divided by it: some would be too large for a half, or too small.
    pub(crate) doubled: i32,
}

impl Shape {
    fn scale(self) -> f32 {
        2f32.powi(-self.doubled) / (self.heads.2 as f32).sqrt()
    }
}

/// A step, a cache with shuffled pages, and what is to come out.
struct World {
    name: String,
    element: Element,
    heads: AttendHeads,
    cache: CacheLayer,
    pages: usize,
    spans: Vec<Span>,
    rows: usize,
    expected: Vec<f64>,
    tables: DeviceMem,
    stride: usize,
    qkv: DeviceMem,
    positions: DeviceMem,
    row_slots: DeviceMem,
    /// Keeps what `heads` and `cache` point to.
    _memory: [DeviceMem; 3],
}

/// Rows of the bucket that are not real.
const PADDING: usize = 5;

impl World {
    /// With a cache of e4m3, keys and values are what codes stand for.
    fn new(
        kit: &mut Kit,
        shape: Shape,
        mix: &[(u32, u32)],
        (element, cached): (Element, KvElement),
    ) -> Result<Self, CudaError> {
        let (q, kv, dim) = shape.heads;
        let page_size = shape.page_size;
        let page_counts: Vec<usize> =
            mix.iter().map(|&(start, rows)| (start + rows).div_ceil(page_size as u32) as usize).collect();
        let stride = page_counts.iter().max().expect("a mix has sequences") + 2;
        let pages = page_counts.iter().sum::<usize>() + 4;
        let mut free: Vec<usize> = (1..pages).collect();
        for i in (1..free.len()).rev() {
            free.swap(i, kit.below(i + 1));
        }
        // Entries behind a sequence's last page lead far outside of the cache.
        let mut tables = vec![u32::MAX / 2; (mix.len() + 1) * stride];
        let row_width = (q + 2 * kv) * dim;
        let rows: usize = mix.iter().map(|&(_, rows)| rows as usize).sum();
        let mut qkv = element.rounded(&kit.random(rows * row_width, 1.5));
        qkv.iter_mut().for_each(|x| *x *= 2f32.powi(shape.doubled));
        let (mut keys, mut values) = (vec![f32::NAN; pages * kv * page_size * dim], Vec::new());
        values.resize(keys.len(), f32::NAN);
        let sinks = kit.random(q, 2.0);
        let (mut spans, mut positions, mut row_slots, mut expected) = (vec![], vec![], vec![], vec![]);
        for (i, (&(start, count), &page_count)) in mix.iter().zip(&page_counts).enumerate() {
            let table = &mut tables[(i + 1) * stride..][..page_count];
            table.fill_with(|| free.pop().expect("pages for all") as u32);
            let length = (start + count) as usize;
            let k = rounded(&kit.random(length * kv * dim, 1.0), element, cached);
            let v = rounded(&kit.random(length * kv * dim, 1.0), element, cached);
            for (at, (k, v)) in k.chunks(dim).zip(v.chunks(dim)).enumerate() {
                let (position, head) = (at / kv, at % kv);
                let page = table[position / page_size] as usize;
                let place = ((page * kv + head) * page_size + position % page_size) * dim;
                keys[place..place + dim].copy_from_slice(k);
                values[place..place + dim].copy_from_slice(v);
            }
            let first_row = positions.len() as u32;
            spans.push(Span { slot: SlotId(i as u32 + 1), first_row, rows: count, start });
            for position in start..start + count {
                let row = &qkv[positions.len() * row_width..][..q * dim];
                positions.push(position);
                row_slots.push(i as u32 + 1);
                expected.extend(reference(shape, row, &k, &v, position as usize, &sinks));
            }
        }
        qkv.resize((rows + PADDING) * row_width, f32::NAN);
        let sinks = kit.upload(&sinks, Element::F32)?;
        let (keys, values) = (upload(kit, &keys, element, cached)?, upload(kit, &values, element, cached)?);
        let scale = shape.scale();
        let address = if shape.has_sinks { sinks.address() } else { Address::NULL };
        Ok(Self {
            name: format!("{} {shape:?} {mix:?}", cached.suffix(element)),
            element,
            heads: AttendHeads { q, kv, head_dim: dim, scale, window: shape.window, sinks: address },
            cache: CacheLayer { keys: keys.address(), values: values.address(), page_size, element: cached },
            pages,
            spans,
            rows,
            expected,
            tables: kit.upload_words(&tables)?,
            stride,
            qkv: kit.upload(&qkv, element)?,
            positions: kit.upload_words(&positions)?,
            row_slots: kit.upload_words(&row_slots)?,
            _memory: [keys, values, sinks],
        })
    }

    fn step(&self, header: &DeviceMem, out: &DeviceMem) -> AttendStep {
        AttendStep {
            header: header.address(),
            positions: self.positions.address(),
            row_slots: self.row_slots.address(),
            tables: self.tables.address(),
            table_stride: self.stride,
            rows: self.rows + PADDING,
            qkv: self.qkv.address(),
            out: out.address(),
        }
    }

    fn poisoned(&self, kit: &Kit) -> Result<DeviceMem, CudaError> {
        kit.poisoned((self.rows + PADDING) * self.heads.q * self.heads.head_dim, self.element)
    }

    /// Spans cut elsewhere: the same rows as chunks of other steps would have them.
    fn rechunked(&self, height: u32) -> Vec<Span> {
        let cut = |span: &Span| {
            let span = *span;
            (0..span.rows).step_by(height as usize).map(move |offset| Span {
                first_row: span.first_row + offset,
                rows: (span.rows - offset).min(height),
                start: span.start + offset,
                ..span
            })
        };
        self.spans.iter().flat_map(cut).collect()
    }
}

/// `values` as the cache gives them back.
fn rounded(values: &[f32], element: Element, cached: KvElement) -> Vec<f32> {
    match cached {
        KvElement::Own => element.rounded(values),
        KvElement::E4M3 => quant::dequantize_bytes(CODES, &quant::quantize(CODES, values)),
    }
}

fn upload(kit: &Kit, values: &[f32], element: Element, cached: KvElement) -> Result<DeviceMem, CudaError> {
    match cached {
        KvElement::Own => kit.upload(values, element),
        KvElement::E4M3 => kit.upload_bytes(&quant::quantize(CODES, values)),
    }
}

const CODES: DType = DType::F8_E4M3;

/// One row: `[q * dim]` in f64.
pub(crate) fn reference(
    shape: Shape,
    row: &[f32],
    k: &[f32],
    v: &[f32],
    position: usize,
    sinks: &[f32],
) -> Vec<f64> {
    let (q, kv, dim) = shape.heads;
    let scale = f64::from(shape.scale());
    let first = if shape.window == 0 { 0 } else { (position + 1).saturating_sub(shape.window) };
    let mut out = vec![0.0; q * dim];
    for (head, (query, out)) in row.chunks(dim).zip(out.chunks_mut(dim)).enumerate() {
        let at = |position: usize| (position * kv + head / (q / kv)) * dim;
        let score = |position: usize| {
            let products = query.iter().zip(&k[at(position)..]).map(|(&q, &k)| f64::from(q) * f64::from(k));
            products.sum::<f64>() * scale
        };
        let scores: Vec<f64> = (first..=position).map(score).collect();
        let sink = if shape.has_sinks { f64::from(sinks[head]) } else { f64::NEG_INFINITY };
        let max = scores.iter().copied().fold(sink, f64::max);
        let sum = scores.iter().map(|score| (score - max).exp()).sum::<f64>() + (sink - max).exp();
        for (score, position) in scores.iter().zip(first..) {
            let weight = (score - max).exp() / sum;
            for (out, &v) in out.iter_mut().zip(&v[at(position)..at(position) + dim]) {
                *out += weight * f64::from(v);
            }
        }
    }
    out
}

/// bf16 keeps 8 bits, of weights and of the result: about 2^-9 each where errors do not average out.
pub(crate) fn bound(element: Element) -> f64 {
    if element == Element::F32 { 2e-6 } else { 6e-3 }
}

fn judge(kit: &mut Kit, world: &World, kernel: &str, out: &DeviceMem) -> Result<Vec<f32>, CudaError> {
    let found = kit.download(out, world.element)?;
    let real = world.expected.len();
    kit.near(&format!("{kernel}: {}", world.name), &found[..real], &world.expected, bound(world.element));
    kit.untouched(&format!("{kernel}, padding: {}", world.name), &found, real);
    Ok(found)
}

fn check_simple(kit: &mut Kit, world: &World) -> Result<(), CudaError> {
    let header = kit.header(&[(0, world.rows as u32)])?;
    let out = world.poisoned(kit)?;
    let step = world.step(&header, &out);
    // SAFETY: all arrays of the world live, and hold what their types say.
    unsafe { attend::simple(&kit.queue(), world.element, &world.heads, &step, &world.cache) }?;
    judge(kit, world, "simple", &out).map(drop)
}

fn cleared(kit: &Kit, bytes: usize) -> Result<DeviceMem, CudaError> {
    let memory = DeviceMem::new(&kit.device, bytes)?;
    memory.fill(&kit.stream, 0, bytes, 0)?;
    Ok(memory)
}

/// Runs the two kernels for lists on spans.
fn run(
    kit: &mut Kit,
    world: &World,
    kernels: &AttendKernels,
    spec: WorkSpec,
    spans: &[Span],
) -> Result<DeviceMem, CudaError> {
    let room = spec.room(world.rows);
    let (mut tiles, mut pieces) = (vec![[0; 4]; room.tiles + 1], vec![[0; 8]; room.pieces + 1]);
    let counts = WorkCutter::new(spec, world.rows).cut(spans, &mut tiles, &mut pieces);
    let header = kit.header(&[(0, world.rows as u32), (3, counts.tiles), (4, counts.pieces)])?;
    let (tiles, pieces) = (kit.upload_words(tiles.as_flattened())?, kit.upload_words(pieces.as_flattened())?);
    let out = world.poisoned(kit)?;
    let step = world.step(&header, &out);
    let room = cleared(kit, kernels.scratch_bytes(spec.slots))?;
    let scratch = AttendScratch { start: room.address(), slots: spec.slots };
    let queue = kit.queue();
    if counts.tiles > 0 {
        let maps = TileMaps::new(&kit.device, kernels, &world.heads, &step, (&world.cache, world.pages))?;
        // SAFETY: all arrays of the world live, and the lists are those of its spans.
        unsafe {
            attend::tiles(
                &queue,
                kernels,
                &world.heads,
                &step,
                (&world.cache, &maps),
                tiles.address(),
                scratch,
            )?;
        }
    }
    // SAFETY: as above.
    unsafe { attend::split(&queue, kernels, &world.heads, &step, &world.cache, pieces.address(), scratch)? };
    let mut counters = vec![1; 256 + 4 * (spec.slots * spec.units()) as usize];
    room.read(&kit.stream, 0, &mut counters)?;
    let counters = counters.iter().all(|&byte| byte == 0);
    kit.check(&format!("counters are 0 again: {}", world.name), counters, "");
    Ok(out)
}

fn check_all(kit: &mut Kit, world: &World) -> Result<(), CudaError> {
    check_simple(kit, world)?;
    let kernels =
        AttendKernels::new(kit.device.properties(), world.element, world.cache.element, &world.heads);
    let Some(spec) = kernels.work(world.heads.window, false) else { return Ok(()) };
    let out = run(kit, world, &kernels, spec, &world.spans)?;
    judge(kit, world, "tiles and pieces", &out)?;

    if spec.window > 0 {
        let out = run(kit, world, &kernels, WorkSpec { window: 0, ..spec }, &world.spans)?;
        judge(kit, world, "lists of a wider window", &out)?;
    }

    // One order of sums: whatever the chunks, whoever else is in the step.
    let one_order = kernels.work(world.heads.window, true).expect("there are kernels for lists");
    let tall = run(kit, world, &kernels, one_order, &world.spans)?;
    let tall = judge(kit, world, "one order", &tall)?;
    let height = 1 + kit.below(40) as u32;
    let low = run(kit, world, &kernels, one_order, &world.rechunked(height))?;
    let low = judge(kit, world, "one order, rechunked", &low)?;
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    kit.equal(&format!("bits of chunks of {height}: {}", world.name), &bits(&low), &bits(&tall));

    // Pieces of all, cut as little and as much as can be.
    let pieces = WorkSpec { piece_rows_max: u32::MAX, ..spec };
    let whole = run(kit, world, &kernels, WorkSpec { slots: 0, ..pieces }, &world.spans)?;
    let whole = judge(kit, world, "whole items", &whole)?;
    let fine = WorkSpec { slots: 400, blocks: 1 << 20, ..pieces };
    let fine = run(kit, world, &kernels, fine, &world.rechunked(1))?;
    let fine = judge(kit, world, "single splits", &fine)?;
    kit.equal(&format!("bits of pieces: {}", world.name), &bits(&fine), &bits(&whole));
    Ok(())
}

fn an_empty_list_writes_nothing(kit: &mut Kit, cached: KvElement) -> Result<(), CudaError> {
    let shape = Shape { heads: (8, 2, 128), page_size: 64, window: 0, has_sinks: false, doubled: 0 };
    let world = World::new(kit, shape, &[(3, 20)], (Element::BF16, cached))?;
    let kernels =
        AttendKernels::new(kit.device.properties(), world.element, world.cache.element, &world.heads);
    let spec = kernels.work(0, false).expect("there are kernels for lists");
    let header = kit.header(&[(0, world.rows as u32)])?;
    let out = world.poisoned(kit)?;
    let step = world.step(&header, &out);
    let room = cleared(kit, kernels.scratch_bytes(spec.slots))?;
    let scratch = AttendScratch { start: room.address(), slots: spec.slots };
    let list = kit.upload_words(&[u32::MAX; 64])?;
    if kernels.work(0, true).is_some_and(|work| work.piece_rows_max == 0) {
        let maps = TileMaps::new(&kit.device, &kernels, &world.heads, &step, (&world.cache, world.pages))?;
        // SAFETY: counts are 0, so nothing is read.
        unsafe {
            attend::tiles(
                &kit.queue(),
                &kernels,
                &world.heads,
                &step,
                (&world.cache, &maps),
                list.address(),
                scratch,
            )?;
        }
    }
    // SAFETY: as above.
    unsafe {
        attend::split(&kit.queue(), &kernels, &world.heads, &step, &world.cache, list.address(), scratch)?;
    }
    let found = kit.download(&out, world.element)?;
    kit.untouched("an empty list writes nothing", &found, 0);
    Ok(())
}
