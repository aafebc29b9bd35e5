//! The decoder in f64, straight from the formulas.

use super::{DIM, Decoder, EPS, HEADS, HIDDEN, KV_HEADS, MLP, VOCAB, attention};
use atom_base::TokenId;
use atom_weights::{DType, Tensor};
use half::{bf16, f16};

impl Decoder {
    /// Log-probabilities after the last of `tokens`.
    pub fn logprobs(&self, tokens: &[TokenId]) -> [f64; VOCAB] {
        let mut xs: Vec<Vec<f64>> = tokens.iter().map(|&token| row(&self.table, token as usize)).collect();
        for layer in &self.layers {
            let mut kv: Vec<(Vec<f64>, Vec<f64>)> = Vec::new();
            for (position, x) in xs.iter_mut().enumerate() {
                let normed = norm(x, &layer.norms[0]);
                let bias = row(&layer.bias, 0);
                let qkv: Vec<f64> = layer
                    .qkv
                    .iter()
                    .flat_map(|w| product(w, &normed))
                    .zip(bias)
                    .map(|(a, b)| a + b)
                    .collect();
                let (q, rest) = qkv.split_at(HEADS * DIM);
                let (k, v) = rest.split_at(KV_HEADS * DIM);
                kv.push((rotate(k, position), v.to_vec()));
                let attended = attend(&rotate(q, position), &kv);
                add(x, &product(&layer.o, &attended));
                let normed = norm(x, &layer.norms[1]);
                let (gate, up) = (product(&layer.gate_up[0], &normed), product(&layer.gate_up[1], &normed));
                let gated: Vec<f64> = (0..MLP).map(|i| gate[i] / (1.0 + (-gate[i]).exp()) * up[i]).collect();
                add(x, &product(&layer.down, &gated));
            }
        }
        let logits = product(&self.head, &norm(xs.last().unwrap(), &self.norm));
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total = most + logits.iter().map(|l| (l - most).exp()).sum::<f64>().ln();
        std::array::from_fn(|i| logits[i] - total)
    }
}

fn attend(q: &[f64], kv: &[(Vec<f64>, Vec<f64>)]) -> Vec<f64> {
    let mut out = Vec::new();
    for (head, q) in q.chunks(DIM).enumerate() {
        let at = head / (HEADS / KV_HEADS) * DIM;
        let score = |k: &[f64]| 0.25 * q.iter().zip(&k[at..]).map(|(a, b)| a * b).sum::<f64>();
        let weights: Vec<f64> = kv.iter().map(|(k, _)| score(k).exp()).collect();
        let total: f64 = weights.iter().sum();
        out.extend(
            (at..at + DIM).map(|i| kv.iter().zip(&weights).map(|((_, v), w)| v[i] * w).sum::<f64>() / total),
        );
    }
    out
}

fn rotate(heads: &[f64], position: usize) -> Vec<f64> {
    let mut heads = heads.to_vec();
    for head in heads.chunks_mut(DIM) {
        for (i, &frequency) in attention().rotary.frequencies.iter().enumerate() {
            let (sin, cos) = (position as f64 * f64::from(frequency)).sin_cos();
            let (a, b) = (head[i], head[i + DIM / 2]);
            (head[i], head[i + DIM / 2]) = (a * cos - b * sin, b * cos + a * sin);
        }
    }
    heads
}

fn norm(x: &[f64], weight: &Tensor) -> Vec<f64> {
    let square = x.iter().map(|x| x * x).sum::<f64>() / HIDDEN as f64;
    let scale = 1.0 / (square + f64::from(EPS)).sqrt();
    x.iter().zip(row(weight, 0)).map(|(x, w)| x * scale * w).collect()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn product(weights: &Tensor, x: &[f64]) -> Vec<f64> {
    (0..weights.rows()).map(|o| row(weights, o).iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

/// A row as the format defines it.
fn row(tensor: &Tensor, index: usize) -> Vec<f64> {
    let bytes = tensor.row(index);
    let half = |at: &[u8]| f64::from(f16::from_le_bytes([at[0], at[1]]));
    let nibble = |codes: &[u8], i: usize| f64::from(if i < 16 { codes[i] & 15 } else { codes[i - 16] >> 4 });
    let blocks = bytes.chunks(tensor.dtype.block_bytes());
    blocks
        .flat_map(|block| -> Vec<f64> {
            match tensor.dtype {
                DType::F32 => vec![f64::from(f32::from_le_bytes(block.try_into().unwrap()))],
                DType::F16 => vec![half(block)],
                DType::F8_E4M3 | DType::Q5_0 | DType::Q5_1 | DType::Q4_K | DType::Q5_K | DType::Q6_K => {
                    unreachable!("not drawn")
                }
                DType::BF16 => vec![f64::from(bf16::from_le_bytes(block.try_into().unwrap()))],
                DType::Q8_0 => block[2..].iter().map(|&code| half(block) * f64::from(code as i8)).collect(),
                DType::Q4_0 => (0..32).map(|i| half(block) * (nibble(&block[2..], i) - 8.0)).collect(),
                DType::Q4_1 => {
                    (0..32).map(|i| half(block) * nibble(&block[4..], i) + half(&block[2..])).collect()
                }
            }
        })
        .collect()
}
