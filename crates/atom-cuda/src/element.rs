//! Types that activations and weights may have on a GPU.

use half::bf16;

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Element {
    /// 4 bytes: tiny models against their references, and buffers that stay exact.
    F32,
    /// 2 bytes: everything else.
    BF16,
}

impl Element {
    /// Bytes of one number.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::BF16 => 2,
        }
    }

    /// What ends the names of kernels for it.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::BF16 => "bf16",
        }
    }

    /// `values` as they lie in memory, rounded to nearest even.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Self::BF16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        }
    }

    /// Numbers from memory.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::F32 => {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            Self::BF16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        }
    }

    /// `values` after a round trip through memory: what kernels see.
    pub fn rounded(self, values: &[f32]) -> Vec<f32> {
        self.decode(&self.encode(values))
    }
}
