//! Norms of heads, rotary embedding, and the cache.

use crate::kit::Kit;
use crate::rows::{Rows, bound};
use atom_cuda::launch::rope::{self, CacheLayer, HeadNorms, Heads, Places};
use atom_cuda::{Address, CudaError, DeviceMem, Element, KvElement};
use atom_weights::{DType, quant};

/// q heads, kv heads, elements of a head, rotated ones.
const SHAPES: &[(usize, usize, usize, usize)] = &[
    (1, 1, 16, 16),
    (9, 3, 64, 64),
    (32, 8, 128, 128),
    (96, 8, 128, 64),
    (10, 2, 96, 96),
    (24, 2, 256, 256),
    (8, 8, 32, 12),
    (7, 1, 24, 24),
    (3, 1, 256, 250),
    (2, 2, 10, 6),
    (4, 1, 64, 0),
];

pub(crate) struct Case {
    pub(crate) heads: Heads,
    pub(crate) frequencies: Vec<f32>,
    pub(crate) norms: Option<(Vec<f32>, Vec<f32>)>,
    pub(crate) positions: Vec<u32>,
}

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    for element in [Element::F32, Element::BF16] {
        for (&shape, cached) in SHAPES.iter().flat_map(|s| [(s, KvElement::Own), (s, KvElement::E4M3)]) {
            for (pairs, has_norms, count, page_size) in
                [(false, false, 37, 16), (true, true, 1, 16), (false, true, 300, 64), (true, false, 3, 48)]
            {
                one(kit, (element, cached), shape, (pairs, has_norms), count, page_size)?;
            }
        }
    }
    Ok(())
}

fn one(
    kit: &mut Kit,
    (element, cached): (Element, KvElement),
    (q, kv, head_dim, dim): (usize, usize, usize, usize),
    (pairs, has_norms): (bool, bool),
    count: usize,
    page_size: usize,
) -> Result<(), CudaError> {
    let rows = Rows::new(kit, &[count as u32], count + 3)?;
    let width = (q + 2 * kv) * head_dim;
    let frequencies: Vec<f32> =
        (0..dim / 2).map(|i| 1e6_f64.powf(-2.0 * i as f64 / dim as f64) as f32).collect();
    let frequency_memory = kit.upload(&frequencies, Element::F32)?;
    let mut positions: Vec<u32> = (0..count + 3).map(|_| kit.below(1 << 20) as u32).collect();
    positions[0] = (1 << 20) - 1;
    // Distinct places, far from in order.
    let pages = count.div_ceil(page_size) + 3;
    let places = pages * page_size;
    let stride = (1..places).rev().find(|&s| s > places / 3 && gcd(s, places) == 1 && s < 2 * places / 3);
    let stride = stride.unwrap_or(1);
    let cache_rows: Vec<u32> = (0..count + 3).map(|row| (row * stride % places) as u32).collect();
    let norms = has_norms.then(|| (kit.random(head_dim, 1.0), kit.random(head_dim, 1.0)));
    let norm_memory = match &norms {
        Some((q, k)) => Some((kit.upload(q, Element::F32)?, kit.upload(k, Element::F32)?)),
        None => None,
    };
    let (x, qkv) = rows.fill(kit, width, 2.0, element)?;
    let position_memory = kit.upload_words(&positions)?;
    let row_memory = kit.upload_words(&cache_rows)?;
    let [keys, values] = [(); 2].map(|()| poisoned(kit, places * kv * head_dim, element, cached));
    let (keys, values) = (keys?, values?);
    let frequency_address = if dim > 0 { frequency_memory.address() } else { Address::NULL };
    let heads = Heads { q, kv, head_dim, dim, pairs, magnitude: 1.25, frequencies: frequency_address };
    let cache = CacheLayer { keys: keys.address(), values: values.address(), page_size, element: cached };
    let norm_addresses =
        norm_memory.as_ref().map(|(q, k)| HeadNorms { q: q.address(), k: k.address(), eps: EPS });
    let step = Places { positions: position_memory.address(), cache_rows: row_memory.address() };
    // SAFETY: arrays have the sizes that the launcher wants and live until they are read back.
    unsafe {
        let of = (&heads, norm_addresses);
        rope::rotate_and_cache(&kit.queue(), element, qkv.address(), cache, of, step, rows.extent)
    }?;
    let case = Case { heads, frequencies, norms, positions };
    let name = format!(
        "{}, {q} + {kv} heads of {head_dim}, {dim} turn, pairs {pairs}, norms {has_norms}, {count} rows",
        cached.suffix(element)
    );
    let found = kit.download(&qkv, element)?;
    let expected: Vec<Vec<f64>> = (0..count).map(|row| case.row(row, &x[row * width..][..width])).collect();
    let q_of = |row: &[f32]| row[..q * head_dim].to_vec();
    let found: Vec<f32> = found.chunks(width).take(count).flat_map(q_of).collect();
    let wanted: Vec<f64> = expected.iter().flat_map(|row| row[..q * head_dim].to_vec()).collect();
    kit.near(&format!("q {name}"), &found, &wanted, bound(element));
    for (what, memory, first) in [("k", &keys, q), ("v", &values, q + kv)] {
        let mut found = match cached {
            KvElement::Own => kit.download(memory, element)?,
            KvElement::E4M3 => quant::dequantize_bytes(DType::F8_E4M3, &kit.download_bytes(memory)?),
        };
        let (mut written, mut wanted) = (Vec::new(), Vec::new());
        for (row, expected) in expected.iter().enumerate() {
            let (page, offset) = (cache_rows[row] as usize / page_size, cache_rows[row] as usize % page_size);
            for head in 0..kv {
                let place = ((page * kv + head) * page_size + offset) * head_dim;
                written.extend_from_slice(&found[place..][..head_dim]);
                wanted.extend_from_slice(&expected[(first + head) * head_dim..][..head_dim]);
                found[place..][..head_dim].fill(f32::NAN);
            }
        }
        match (cached, what) {
            (KvElement::Own, "v") => kit.near(&format!("v {name}"), &written, &wanted, 0.0),
            (KvElement::Own, _) => kit.near(&format!("{what} {name}"), &written, &wanted, bound(element)),
            (KvElement::E4M3, _) => nearest_codes(kit, &format!("{what} {name}"), &written, &wanted),
        }
        kit.untouched(&format!("other places of {what} {name}"), &found, 0);
    }
    Ok(())
}

fn poisoned(kit: &Kit, count: usize, element: Element, cached: KvElement) -> Result<DeviceMem, CudaError> {
    let memory = DeviceMem::new(&kit.device, count * cached.bytes(element))?;
    memory.fill(&kit.stream, 0, memory.bytes(), 0xff)?;
    Ok(memory)
}

/// Every number must be that of the nearest code, or of one that is as near but for the f32 that was rounded.
fn nearest_codes(kit: &mut Kit, name: &str, found: &[f32], wanted: &[f64]) {
    let near = |wanted: f64| {
        let slack = 1e-5 * wanted.abs() + 1e-6;
        let around = [wanted - slack, wanted + slack].map(|x| x as f32);
        quant::dequantize_bytes(DType::F8_E4M3, &quant::quantize(DType::F8_E4M3, &around))
    };
    let wrong = found.iter().zip(wanted).position(|(found, &wanted)| !near(wanted).contains(found));
    let detail = wrong.map_or(String::new(), |i| format!("place {i}: {} for {}", found[i], wanted[i]));
    kit.check(name, wrong.is_none() && found.len() == wanted.len(), &detail);
}

impl Case {
    /// All heads of a row after norms and rotation, in f64.
    pub(crate) fn row(&self, row: usize, x: &[f32]) -> Vec<f64> {
        let Heads { q, kv, head_dim, dim, pairs, magnitude, .. } = self.heads;
        let mut out: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        for (index, head) in out.chunks_mut(head_dim).enumerate().take(q + kv) {
            if let Some((of_q, of_k)) = &self.norms {
                let mean = head.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
                let weight = if index < q { of_q } else { of_k };
                for (x, &w) in head.iter_mut().zip(weight) {
                    *x = *x / (mean + f64::from(EPS)).sqrt() * f64::from(w);
                }
            }
            for (i, &frequency) in self.frequencies.iter().enumerate() {
                let (sin, cos) = (f64::from(self.positions[row]) * f64::from(frequency)).sin_cos();
                let (sin, cos) = (sin * f64::from(magnitude), cos * f64::from(magnitude));
                let (a, b) = if pairs { (2 * i, 2 * i + 1) } else { (i, i + dim / 2) };
                (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
            }
        }
        out
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

pub(crate) const EPS: f32 = 1e-6;
