//! The type and the size of the KV cache.

use crate::args::{EngineArgs, KvCacheDType};
use crate::steps;
use anyhow::{Result, bail, ensure};
use atom_base::Mesh;
use atom_ops::KvDType;
use atom_weights::{Checkpoint, DType, ModelConfig};

/// What a CPU keeps keys and values in: what the checkpoint's own type suggests, unless asked otherwise.
pub(crate) fn kv_dtype(asked: KvCacheDType, checkpoint: &Checkpoint) -> Result<KvDType> {
    let own = match checkpoint.tensor(steps::TYPICAL_MATRIX)?.dtype {
        DType::F32 => KvDType::F32,
        _ => KvDType::F16,
    };
    Ok(asked_kv_dtype(asked).unwrap_or(own))
}

/// What a GPU keeps keys and values in, whose own type is `own`.
pub(crate) fn gpu_kv_dtype(asked: KvCacheDType, own: KvDType) -> Result<KvDType> {
    let kv_dtype = asked_kv_dtype(asked).unwrap_or(own);
    ensure!(
        kv_dtype == own || kv_dtype == KvDType::E4M3,
        "--kv-cache-dtype: a GPU keeps keys and values as it computes them, {own:?} here, or in fp8; {kv_dtype:?} is not \
         built yet"
    );
    Ok(kv_dtype)
}

/// `None`: what suits the device.
fn asked_kv_dtype(asked: KvCacheDType) -> Option<KvDType> {
    match asked {
        KvCacheDType::Auto => None,
        KvCacheDType::F32 => Some(KvDType::F32),
        KvCacheDType::F16 => Some(KvDType::F16),
        KvCacheDType::Bf16 => Some(KvDType::BF16),
        KvCacheDType::Fp8 => Some(KvDType::E4M3),
    }
}

/// Pages of each lane, the Sink included.
pub(crate) fn plan_pages(
    args: &EngineArgs,
    model: &ModelConfig,
    mesh: &Mesh,
    kv: KvDType,
    (page_size, useful): (usize, usize),
) -> Result<usize> {
    // Ranks that share a key/value head each keep a copy.
    let heads = model.kv_heads.max(mesh.ranks_per_lane());
    let page_bytes = (2 * model.layers * heads * model.head_dim * kv.bytes() * page_size) as u64;
    let bytes = args.kv_cache_memory.unwrap_or_else(default_cache_bytes) / mesh.lanes() as u64;
    let pages = (bytes / page_bytes).min(useful as u64) as usize;
    if pages < 2 {
        bail!(
            "the KV cache of {bytes} bytes a lane holds {pages} pages of {page_bytes} bytes; it needs at least 2. \
             Raise --kv-cache-memory to {} or more",
            2 * page_bytes * mesh.lanes() as u64
        );
    }
    Ok(pages)
}

fn default_cache_bytes() -> u64 {
    steps::free_bytes().map_or(CACHE_BYTES_MIN, |free| free / 4).min(CACHE_BYTES_MAX)
}

/// The KV cache takes a quarter of what is free, but not more than this.
const CACHE_BYTES_MAX: u64 = 4 << 30;
/// Where the system does not say what is free.
const CACHE_BYTES_MIN: u64 = 512 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_keeps_its_own_type_unless_it_is_told_fp8() {
        for own in [KvDType::BF16, KvDType::F32] {
            assert_eq!(gpu_kv_dtype(KvCacheDType::Auto, own).unwrap(), own);
            assert_eq!(gpu_kv_dtype(KvCacheDType::Fp8, own).unwrap(), KvDType::E4M3);
        }
        assert_eq!(gpu_kv_dtype(KvCacheDType::Bf16, KvDType::BF16).unwrap(), KvDType::BF16);
        for (asked, own) in [(KvCacheDType::F16, KvDType::BF16), (KvCacheDType::F32, KvDType::BF16)] {
            let text = gpu_kv_dtype(asked, own).unwrap_err().to_string();
            assert!(text.contains("--kv-cache-dtype") && text.contains("BF16"), "{text}");
        }
    }

    #[test]
    fn names_of_the_field_are_taken_for_types_of_the_cache() {
        use clap::ValueEnum;
        for (name, expected) in [
            ("auto", None),
            ("fp8", Some(KvDType::E4M3)),
            ("fp8_e4m3", Some(KvDType::E4M3)),
            ("bf16", Some(KvDType::BF16)),
            ("bfloat16", Some(KvDType::BF16)),
            ("f16", Some(KvDType::F16)),
            ("f32", Some(KvDType::F32)),
        ] {
            assert_eq!(asked_kv_dtype(KvCacheDType::from_str(name, false).unwrap()), expected, "{name}");
        }
        assert!(KvCacheDType::from_str("fp8_e5m2", false).is_err());
    }
}
