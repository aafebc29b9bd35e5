//! Norms of heads, rotary embedding, and keys and values into the cache.

use crate::element::{Element, KvElement};
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::rows::{RowExtent, bytes, halves};
use crate::memory::Address;
use crate::module::Launch;

/// Heads of a fused row and how they turn.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Query heads.
    pub q: usize,
    /// Key heads, and as many value heads.
    pub kv: usize,
    /// Elements of a head; even, at most 256 (512 if the parts are multiples of 16).
    pub head_dim: usize,
    /// Rotated elements of a head; even.
    pub dim: usize,
    /// Pairs are neighbours, not halves apart.
    pub pairs: bool,
    /// Factor on cosine and sine.
    pub magnitude: f32,
    /// `[dim / 2]` f32.
    pub frequencies: Address,
}

/// RMS-norm weights of q heads and of k heads, `[head_dim]` f32 each.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms {
    /// Of q.
    pub q: Address,
    /// Of k.
    pub k: Address,
    /// Added to the mean square.
    pub eps: f32,
}

/// A layer of the cache: `[pages, kv heads, page_size, head_dim]` each.
#[derive(Clone, Copy, Debug)]
pub struct CacheLayer {
    /// Keys.
    pub keys: Address,
    /// Values.
    pub values: Address,
    /// Positions of a page.
    pub page_size: usize,
    /// Type of its elements.
    pub element: KvElement,
}

/// Where the rows of a step are: u32 each.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// Absolute positions.
    pub positions: Address,
    /// `page * page_size + offset`.
    pub cache_rows: Address,
}

/// Norms (if there are any) and rotary embedding of q (in place) and k; k and v go to the cache.
///
/// # Safety
/// `qkv` has the rows of `extent`, `(q + 2 kv) * head_dim` of `element` each; `places` has as many entries, and they
/// lead to distinct rows within the cache.
pub unsafe fn rotate_and_cache(
    queue: &Queue<'_>,
    element: Element,
    qkv: Address,
    cache: CacheLayer,
    (heads, norms): (&Heads, Option<HeadNorms>),
    places: Places,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let Heads { q, kv, head_dim, dim, pairs, magnitude, frequencies } = *heads;
    assert!(dim % 2 == 0 && head_dim % 2 == 0 && dim <= head_dim, "{heads:?}");
    let is_wide = is_wide(head_dim, dim);
    assert!(head_dim <= head_dim_max(head_dim, dim), "{heads:?}");
    // Lanes that work on one head.
    let lanes = if is_wide { (head_dim / 16).next_power_of_two() } else { 32 };
    let warps = (q + 2 * kv).div_ceil(32 / lanes);
    let warps = if extent.capacity() > ROWS_FEW { warps.min(WARPS_OF_MANY) } else { warps.min(WARPS_MAX) };
    let launch = Launch::new(extent.capacity() as u32, 32 * warps as u32).overlapping();
    let norms = norms.unwrap_or(HeadNorms { q: Address::NULL, k: Address::NULL, eps: 0.0 });
    let mut rotation = [0; 18];
    let addresses = [places.positions, places.cache_rows, frequencies, norms.q, norms.k];
    for (words, address) in rotation.chunks_exact_mut(2).zip(addresses) {
        words.copy_from_slice(&halves(address));
    }
    rotation[10..].copy_from_slice(&[
        norms.eps.to_bits(),
        magnitude.to_bits(),
        q as u32,
        kv as u32,
        head_dim as u32,
        dim as u32,
        u32::from(pairs),
        cache.page_size as u32,
    ]);
    let words = extent.words();
    let args = [qkv.into(), cache.keys.into(), cache.values.into(), bytes(&rotation), bytes(&words)];
    let name =
        format!("rotate_and_cache_{}{}", cache.element.suffix(element), if is_wide { "" } else { "_narrow" });
    // SAFETY: the caller's.
    unsafe { queue.launch("rope", &name, launch, &args) }
}

/// Whether a lane's 16 elements all rotate, or none does.
fn is_wide(head_dim: usize, dim: usize) -> bool {
    dim.is_multiple_of(16) && (head_dim - dim).is_multiple_of(16)
}

/// Elements of the longest head of which `dim` elements may rotate. `dim` is at most `head_dim`.
pub(crate) fn head_dim_max(head_dim: usize, dim: usize) -> usize {
    if is_wide(head_dim, dim) { HEAD_DIM_MAX_WIDE } else { HEAD_DIM_MAX_NARROW }
}

/// 32 lanes with 16 elements each.
const HEAD_DIM_MAX_WIDE: usize = 512;

/// 32 lanes with 8 elements each, `rotate_and_cache_.._narrow`.
const HEAD_DIM_MAX_NARROW: usize = 256;

/// With more rows than this a block takes several rounds over a row's heads: angles cost less that way.
const ROWS_FEW: usize = 256;

/// Warps of a block then; measured best on an H200 (8192 rows of 48 heads).
const WARPS_OF_MANY: usize = 2;

/// Warps of a block at the most, as the kernel is compiled.
const WARPS_MAX: usize = 16;
