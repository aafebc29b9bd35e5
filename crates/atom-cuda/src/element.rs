//! Types that activations and weights may have on a GPU.

use atom_ops::KvDType;
use half::bf16;

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Element {
    /// 4 bytes: tiny models against their references, and buffers that stay exact.
    F32,
    /// 2 bytes: everything else.
    BF16,
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KvElement {
    /// As they are computed.
    Own,
    /// In a byte, rounded on their way to the cache.
    E4M3,
}

impl KvElement {
    /// Bytes of one number beside activations of `element`.
    pub fn bytes(self, element: Element) -> usize {
        match self {
            Self::Own => element.bytes(),
            Self::E4M3 => 1,
        }
    }

    /// What ends the names of kernels that compute in `element`.
    pub fn suffix(self, element: Element) -> &'static str {
        match (self, element) {
            (Self::Own, _) => element.suffix(),
            (Self::E4M3, Element::F32) => "f32_e4m3",
            (Self::E4M3, Element::BF16) => "bf16_e4m3",
        }
    }
}

/// What other types may stand beside is `check_kv`'s matter.
impl From<KvDType> for KvElement {
    fn from(kv: KvDType) -> Self {
        if kv == KvDType::E4M3 { Self::E4M3 } else { Self::Own }
    }
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
