//! Norms of heads, rotary embedding, cache and attention in one kernel, against f64: with NaN wherever nothing is to be read,
//! keys and values of the step itself included.

use crate::attend::{Shape, bound, reference};
use crate::kit::Kit;
use crate::rope::{Case, EPS};
use atom_cuda::launch::attend::{AttendHeads, AttendStep};
use atom_cuda::launch::attend_few::{self, AttendFew, FewMaps};
use atom_cuda::launch::rope::{CacheLayer, HeadNorms, Heads, Places};
use atom_cuda::{Address, CudaError, DeviceMem, Element, KvElement};

/// `(start, rows)` of each sequence of a step.
const MIXES: &[&[(u32, u32)]] = &[
    &[(0, 1)],
    &[(1023, 1)],
    &[(8191, 1)],
    &[(31, 1), (32, 1), (33, 1), (63, 1), (2600, 1)],
    &[(0, 3), (27, 2)],
    &[(16383, 1), (5, 1), (700, 3)],
    &[(997, 1), (4, 2), (500, 4)],
    &[(1, 1), (15, 1), (17, 1), (255, 1), (256, 1), (257, 1), (1024, 1), (4100, 1)],
];

/// Rows of a step at most, padding included: more are not for this kernel.
const ROWS: usize = 8;

/// Query heads, kv heads, elements, rotated ones.
const HEADS: &[(usize, usize, usize, usize)] = &[
    (16, 8, 128, 128),
    (32, 8, 128, 128),
    (32, 4, 128, 64),
    (32, 2, 128, 128),
    (4, 4, 64, 64),
    (12, 4, 96, 96),
    (4, 2, 256, 256),
    (16, 1, 256, 128),
    (20, 1, 64, 32),
    (34, 2, 64, 64),
    (4, 2, 80, 80),
    (4, 2, 192, 192),
    (2, 2, 16, 12),
    (7, 1, 112, 112),
];

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    for (round, &heads) in HEADS.iter().enumerate() {
        for (i, mix) in MIXES.iter().enumerate() {
            let turn = round * MIXES.len() + i;
            let shape = Shape {
                heads: (heads.0, heads.1, heads.2),
                page_size: [64, 16, 32, 128, 48, 8, 24][turn % 7],
                window: [0, 100, 0, 17, 1, 0, 700][(turn + round) % 7],
                has_sinks: turn % 4 == 1,
                doubled: 0,
            };
            World::new(kit, shape, heads.3, (turn % 5 == 3, turn % 3 != 2), mix, turn % 4)?.check(kit)?;
        }
    }
    Ok(())
}

/// A step, its cache as it was before, and what is to come out.
struct World {
    name: String,
    few: AttendFew,
    attend: AttendHeads,
    heads: Heads,
    norms: Option<HeadNorms>,
    cache: CacheLayer,
    pages: usize,
    rows: usize,
    stride: usize,
    expected: Vec<f64>,
    /// Elements of the cache that the step writes: place, key, value.
    written: Vec<(usize, f64, f64)>,
    before: [Vec<f32>; 2],
    /// Real rows, padding.
    counts: (usize, usize),
    words: [DeviceMem; 4],
    qkv: DeviceMem,
    keys: DeviceMem,
    values: DeviceMem,
    /// Keeps what `attend`, `heads` and `norms` point to.
    _floats: [DeviceMem; 4],
}

impl World {
    fn new(
        kit: &mut Kit,
        shape: Shape,
        dim: usize,
        (pairs, has_norms): (bool, bool),
        mix: &[(u32, u32)],
        padding: usize,
    ) -> Result<Self, CudaError> {
        let (q, kv, head_dim) = shape.heads;
        let (element, page_size) = (Element::BF16, shape.page_size);
        let pages_of = |&(start, rows): &(u32, u32)| ((start + rows) as usize).div_ceil(page_size);
        let stride = mix.iter().map(pages_of).max().expect("a mix has sequences") + 2;
        let pages = mix.iter().map(pages_of).sum::<usize>() + 4;
        let mut free: Vec<usize> = (1..pages).collect();
        (1..free.len()).rev().for_each(|i| free.swap(i, kit.below(i + 1)));
        let rows: usize = mix.iter().map(|&(_, rows)| rows as usize).sum();
        let padding = padding.min(ROWS - rows);
        let width = (q + 2 * kv) * head_dim;
        let mut qkv = element.rounded(&kit.random(rows * width, 1.5));
        let frequencies: Vec<f32> =
            (0..dim / 2).map(|i| 1e6_f64.powf(-2.0 * i as f64 / dim as f64) as f32).collect();
        let weights = (kit.random(head_dim, 1.0), kit.random(head_dim, 1.0));
        let sinks = kit.random(q, 2.0);
        let floats = [&frequencies, &weights.0, &weights.1, &sinks];
        let floats = floats.map(|values| kit.upload(values, Element::F32));
        let [a, b, c, d] = floats;
        let floats = [a?, b?, c?, d?];
        let frequencies_at = floats[0].address();
        let heads = Heads { q, kv, head_dim, dim, pairs, magnitude: 1.1, frequencies: frequencies_at };
        let spans = mix.iter().flat_map(|&(start, rows)| start..start + rows);
        let norms = has_norms.then_some(weights);
        let case = Case { heads, frequencies, norms, positions: spans.collect() };

        let mut tables = vec![u32::MAX / 2; (mix.len() + 1) * stride];
        let mut cache = [(); 2].map(|()| vec![f32::NAN; pages * kv * page_size * head_dim]);
        let (mut row_slots, mut cache_rows) = (vec![], vec![]);
        let (mut expected, mut written) = (vec![], vec![]);
        for (i, &(start, count)) in mix.iter().enumerate() {
            let table = &mut tables[(i + 1) * stride..][..pages_of(&(start, count))];
            table.fill_with(|| free.pop().expect("pages for all") as u32);
            let length = (start + count) as usize;
            let mut k = element.rounded(&kit.random(length * kv * head_dim, 1.0));
            let mut v = element.rounded(&kit.random(length * kv * head_dim, 1.0));
            let place = |position: usize, head: usize| {
                let page = table[position / page_size] as usize;
                ((page * kv + head) * page_size + position % page_size) * head_dim
            };
            let first = row_slots.len();
            let turned: Vec<Vec<f64>> = (first..first + count as usize)
                .map(|row| case.row(row, &qkv[row * width..][..width]))
                .collect();
            for (position, head) in (0..length).flat_map(|position| (0..kv).map(move |head| (position, head)))
            {
                let (from, to) = ((position * kv + head) * head_dim, place(position, head));
                let Some(row) = position.checked_sub(start as usize) else {
                    cache[0][to..to + head_dim].copy_from_slice(&k[from..from + head_dim]);
                    cache[1][to..to + head_dim].copy_from_slice(&v[from..from + head_dim]);
                    continue;
                };
                let of = |first: usize| turned[row][(first + head) * head_dim..][..head_dim].iter();
                for (i, (&key, &value)) in of(q).zip(of(q + kv)).enumerate() {
                    written.push((to + i, key, value));
                    (k[from + i], v[from + i]) = (element.rounded(&[key as f32])[0], value as f32);
                }
            }
            for (row, turned) in turned.iter().enumerate() {
                let position = start as usize + row;
                row_slots.push(i as u32 + 1);
                cache_rows
                    .push((table[position / page_size] as usize * page_size + position % page_size) as u32);
                let row: Vec<f32> = turned[..q * head_dim].iter().map(|&x| x as f32).collect();
                expected.extend(reference(shape, &element.rounded(&row), &k, &v, position, &sinks));
            }
        }
        qkv.resize((rows + padding) * width, f32::NAN);
        let mut positions = case.positions.clone();
        for words in [&mut positions, &mut row_slots, &mut cache_rows] {
            words.resize(rows + padding, 0);
        }
        let scale = 1.0 / (head_dim as f32).sqrt();
        let sinks = if shape.has_sinks { floats[3].address() } else { Address::NULL };
        let attend = AttendHeads { q, kv, head_dim, scale, window: shape.window, sinks };
        let (keys, values) = (kit.upload(&cache[0], element)?, kit.upload(&cache[1], element)?);
        let few = AttendFew::new(kit.device.properties(), element, &attend, page_size);
        Ok(Self {
            name: format!("{shape:?}, {dim} turn, pairs {pairs}, norms {has_norms}, {mix:?} + {padding}"),
            few: few.ok_or_else(|| CudaError::Unsupported(format!("few rows of {attend:?} on this GPU")))?,
            attend,
            heads,
            norms: has_norms.then(|| HeadNorms { q: floats[1].address(), k: floats[2].address(), eps: EPS }),
            cache: CacheLayer {
                keys: keys.address(),
                values: values.address(),
                page_size,
                element: KvElement::Own,
            },
            pages,
            rows,
            stride,
            expected,
            written,
            before: cache,
            counts: (rows, padding),
            words: [
                kit.upload_words(&positions)?,
                kit.upload_words(&cache_rows)?,
                kit.upload_words(&row_slots)?,
                kit.upload_words(&tables)?,
            ],
            qkv: kit.upload(&qkv, element)?,
            keys,
            values,
            _floats: floats,
        })
    }

    /// Twice on the same letters: what a launch leaves behind must suit the next.
    fn check(&self, kit: &mut Kit) -> Result<(), CudaError> {
        let capacity = self.counts.0 + self.counts.1;
        kit.load(&[self.few.program()])?;
        let letters = DeviceMem::new(&kit.device, self.few.letters_bytes())?;
        letters.fill(&kit.stream, 0, letters.bytes(), 0xff)?;
        let header = kit.header(&[(0, self.rows as u32)])?;
        let maps = FewMaps::new(&kit.device, &self.few, &self.attend, (&self.cache, self.pages))?;
        let [positions, cache_rows, row_slots, tables] = self.words.each_ref().map(DeviceMem::address);
        let mut first = Vec::new();
        for round in 0..2 {
            let out = kit.poisoned(capacity * self.attend.q * self.attend.head_dim, Element::BF16)?;
            let step = AttendStep {
                header: header.address(),
                positions,
                row_slots,
                tables,
                table_stride: self.stride,
                rows: capacity,
                qkv: self.qkv.address(),
                out: out.address(),
            };
            let heads = (&self.heads, self.norms, &self.attend);
            let places = Places { positions, cache_rows };
            let cache = (&self.cache, &maps);
            // SAFETY: all arrays of the world live, and hold what their types say.
            unsafe {
                attend_few::attend_few(
                    &kit.queue(),
                    &self.few,
                    heads,
                    (&step, places),
                    cache,
                    letters.address(),
                )?;
            }
            let found = kit.download(&out, Element::BF16)?;
            let real = self.expected.len();
            let name = format!("few rows, round {round}: {}", self.name);
            kit.near(&name, &found[..real], &self.expected, bound(Element::BF16));
            kit.untouched(&format!("padding, {name}"), &found, real);
            let bits: Vec<u32> = found.iter().map(|value| value.to_bits()).collect();
            if round > 0 {
                kit.equal(&format!("the same bits, {name}"), &bits, &first);
            }
            first = bits;
        }
        let empty = kit.download_words(&letters)?.iter().all(|&word| word == u32::MAX);
        kit.check(&format!("letters are empty again: {}", self.name), empty, "");
        self.judge_cache(kit)
    }

    fn judge_cache(&self, kit: &mut Kit) -> Result<(), CudaError> {
        for (what, memory, before) in
            [("keys", &self.keys, &self.before[0]), ("values", &self.values, &self.before[1])]
        {
            let mut found = kit.download(memory, Element::BF16)?;
            let (mut new, mut wanted) = (Vec::new(), Vec::new());
            for &(place, key, value) in &self.written {
                new.push(found[place]);
                wanted.push(if what == "keys" { key } else { value });
                found[place] = before[place];
            }
            let bound = if what == "keys" { bound(Element::BF16) } else { 0.0 };
            kit.near(&format!("{what}: {}", self.name), &new, &wanted, bound);
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            kit.equal(&format!("other {what}: {}", self.name), &bits(&found), &bits(before));
        }
        Ok(())
    }
}
