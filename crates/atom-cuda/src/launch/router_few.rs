//! What stands between attention and experts where rows are few: norm, router and choice in one launch.

use crate::compile::Program;
use crate::device::Properties;
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::norm::NormWeight;
use crate::launch::route::{TOP_K_MAX, router_words};
use crate::launch::rows::{RowExtent, bytes};
use crate::memory::Address;
use crate::module::Launch;
use atom_ops::RouteSpec;

/// Arrays of one launch, see kernels/router_few.cu.
#[derive(Clone, Copy, Debug)]
pub struct RouterArrays {
    /// f32 `[rows, hidden]`.
    pub residual: Address,
    /// bf16 `[rows, hidden]`, added to the residual first; null: nothing is.
    pub added: Address,
    /// bf16 `[rows, hidden]`: the norm's output.
    pub normed: Address,
    /// bf16 `[experts, hidden]`.
    pub weight: Address,
    /// f32 `[experts]` of the choice, or null.
    pub bias: Address,
    /// f32 `[rows, 2 top_k]`.
    pub routes: Address,
    /// This lane's entry of the rows granted to each.
    pub granted: Address,
}

/// Whether the kernel can do it on such a GPU, and is faster than norm, product and choice by themselves.
pub fn is_for(spec: &RouteSpec, rows: usize, hidden: usize, properties: &Properties) -> bool {
    properties.capability >= (9, 0)
        && (1..=ROWS_MAX).contains(&rows)
        && hidden.is_multiple_of(4)
        && (1..=PIECES_MAX).contains(&pieces(hidden))
        && spec.experts <= EXPERTS_MAX
        && spec.top_k <= TOP_K_MAX.min(spec.experts)
        && spec.groups_kept * (spec.experts / spec.groups) >= spec.top_k
}

/// What must be loaded for rows of `hidden` elements.
pub fn program(hidden: usize) -> Program {
    Program::with("router_few", &[&format!("PIECES={}", pieces(hidden))])
}

/// `residual += added; normed = norm(residual); routes = route(normed W^T)`
///
/// # Safety
/// Arrays have the rows of `extent`, which has one lane, and the sizes of a spec and norm that [`is_for`] took.
pub unsafe fn router_few(
    queue: &Queue<'_>,
    spec: &RouteSpec,
    norm: NormWeight,
    arrays: RouterArrays,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let RouterArrays { residual, added, normed, weight, bias, routes, granted } = arrays;
    let clusters = extent.capacity().min(CLUSTERS_MAX) as u32;
    let launch = Launch::new(clusters * BLOCKS, THREADS).overlapping();
    let (router, words) = (router_words(spec), extent.words());
    let args = [
        residual.into(),
        added.into(),
        norm.weight.into(),
        norm.eps.into(),
        (norm.width as u32).into(),
        normed.into(),
        weight.into(),
        bias.into(),
        bytes(&router),
        routes.into(),
        granted.into(),
        bytes(&words),
    ];
    // SAFETY: the caller's.
    unsafe { queue.launch_of(&program(norm.width), "router_few", launch, &args) }
}

/// Groups of columns, PIECES of the kernel.
fn pieces(hidden: usize) -> usize {
    hidden.div_ceil(COLUMNS)
}

/// More rows are for the kernels that read the router's weights once for many.
pub const ROWS_MAX: usize = 32;

/// Columns that a block's threads have at a time.
const COLUMNS: usize = 2048;

/// Of weights that a thread's registers hold.
const PIECES_MAX: usize = 2;

/// 16 of each block.
const EXPERTS_MAX: usize = 128;

/// Blocks of a cluster.
const BLOCKS: u32 = 8;
const THREADS: u32 = 512;

/// Clusters take rows in turns; an H200 holds about 16 at a time.
const CLUSTERS_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_taken_that_registers_hold() {
        let gpu = |capability| Properties {
            name: String::new(),
            capability,
            processors: 132,
            shared_bytes_max: 232_448,
            l2_bytes: 60 << 20,
        };
        let spec = |experts, top_k| RouteSpec {
            experts,
            top_k,
            is_sigmoid: false,
            groups: 1,
            groups_kept: 1,
            normalise: true,
            scale: 1.0,
        };
        let taken = |experts, top_k, rows, hidden| is_for(&spec(experts, top_k), rows, hidden, &gpu((9, 0)));
        assert!(taken(128, 8, 1, 2048) && taken(60, 4, ROWS_MAX, 4096) && taken(1, 1, 1, 4));
        assert!(!taken(129, 8, 1, 2048), "more experts than 8 blocks have");
        assert!(!taken(128, 8, ROWS_MAX + 1, 2048) && !taken(128, 8, 1, 4100) && !taken(128, 8, 1, 2046));
        assert!(!is_for(&spec(128, 8), 1, 2048, &gpu((8, 9))), "clusters came with compute capability 9.0");
        let grouped = RouteSpec { groups: 16, groups_kept: 2, ..spec(64, 8) };
        assert!(is_for(&grouped, 1, 2048, &gpu((9, 0))));
        assert_eq!([4, 2048, 2052, 4096].map(pieces), [1, 1, 2, 2]);
    }
}
