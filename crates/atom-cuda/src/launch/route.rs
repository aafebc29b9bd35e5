//! Routers.

use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::rows::{RowExtent, bytes};
use crate::memory::Address;
use crate::module::Launch;
use atom_ops::RouteSpec;

/// See [`atom_ops::Op::Route`]. `logits`, `bias` (null: none) and `out` are f32; `granted` is this lane's entry of
/// the rows granted to each.
///
/// # Safety
/// `logits` and `out` have the rows of `extent`, which has one lane; `bias` has an entry for each expert.
pub unsafe fn route(
    queue: &Queue<'_>,
    spec: &RouteSpec,
    (logits, bias): (Address, Address),
    out: Address,
    granted: Address,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let RouteSpec { experts, top_k, groups, groups_kept, .. } = *spec;
    assert!(
        experts <= EXPERTS_MAX && top_k <= TOP_K_MAX && groups_kept * (experts / groups) >= top_k,
        "{spec:?}"
    );
    // Experts that each lane of a warp holds.
    let each = (experts.div_ceil(32)).next_power_of_two().max(4);
    let router = router_words(spec);
    let launch = Launch::new(extent.capacity().div_ceil(WARPS) as u32, 32 * WARPS as u32).overlapping();
    let words = extent.words();
    let args = [logits.into(), bias.into(), bytes(&router), out.into(), granted.into(), bytes(&words)];
    // SAFETY: the caller's.
    unsafe { queue.launch("route", &format!("route_{each}"), launch, &args) }
}

/// `Router` of the kernels.
pub(crate) fn router_words(spec: &RouteSpec) -> [u32; 7] {
    [
        spec.experts as u32,
        spec.top_k as u32,
        u32::from(spec.is_sigmoid),
        spec.groups as u32,
        spec.groups_kept as u32,
        u32::from(spec.normalise),
        spec.scale.to_bits(),
    ]
}

/// Adds the number of different experts that the real rows of `routes` name, as [`route`] left them, to the u64 at
/// `total`. No part of a step that is served: for measuring.
///
/// # Safety
/// `routes` has the rows of `extent`, `2 * spec.top_k` f32 each.
pub unsafe fn count_experts(
    queue: &Queue<'_>,
    spec: &RouteSpec,
    routes: Address,
    extent: RowExtent,
    total: Address,
) -> Result<(), CudaError> {
    assert!(spec.experts <= EXPERTS_MAX, "{spec:?}");
    let words = extent.words();
    let sizes = (spec.experts as u32, spec.top_k as u32);
    let args = [routes.into(), sizes.0.into(), sizes.1.into(), bytes(&words), total.into()];
    // SAFETY: the caller's.
    unsafe { queue.launch("route", "count_experts", Launch::new(1, 512), &args) }
}

/// Most experts: 16 in each lane of a warp.
pub const EXPERTS_MAX: usize = 512;

/// Most choices of a row.
pub const TOP_K_MAX: usize = 32;

/// Rows of a block, ROUTE_WARPS of route.cu.
const WARPS: usize = 4;
