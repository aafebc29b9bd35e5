//! The beginning of a step, and biases of products.

use crate::element::Element;
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::rows::{RowExtent, bytes};
use crate::memory::Address;
use crate::module::Launch;

/// Brings new entries into the page tables. It lets no kernel start before it is done, so all later ones of a step may read
/// tables whenever they like.
///
/// # Safety
/// `header` is a step's header, `updates` has `[entries, 2]` u32 for as many entries as it says, and each of them
/// lies in `tables`.
pub unsafe fn update_tables(
    queue: &Queue<'_>,
    header: Address,
    updates: Address,
    tables: Address,
) -> Result<(), CudaError> {
    // Few entries in most steps; a burst of admissions with long prefixes takes some rounds.
    let launch = Launch::new(4, 256);
    // SAFETY: the caller's.
    unsafe { queue.launch("step", "update_tables", launch, &[header.into(), updates.into(), tables.into()]) }
}

/// `out += bias` for every real row.
///
/// # Safety
/// `out` has the rows of `extent`, `width` of `element` each; `bias` has `width` f32.
pub unsafe fn add_bias(
    queue: &Queue<'_>,
    element: Element,
    out: Address,
    bias: Address,
    width: usize,
    extent: RowExtent,
) -> Result<(), CudaError> {
    let words = extent.words();
    let args = [out.into(), bias.into(), (width as u32).into(), bytes(&words)];
    let launch = Launch::new(extent.capacity() as u32, 256).overlapping();
    // SAFETY: the caller's.
    unsafe { queue.launch("weights", &format!("add_bias_{}", element.suffix()), launch, &args) }
}

/// Brings the results of the step, and what it has counted, to the host and says that it has ended. The count at `count`
/// begins anew.
///
/// # Safety
/// `header` is a step's header, `results` has as many results as it says (or is null), `count` is a `u64` or null, and
/// `host` is memory of a [`crate::Landing`] for as many results. Everything before it in the stream waits for what is before itself.
pub unsafe fn publish(
    queue: &Queue<'_>,
    header: Address,
    results: Address,
    count: Address,
    (host, stride): (Address, usize),
) -> Result<(), CudaError> {
    let launch = Launch::new(1, 1024);
    // Kernels of sampling wait for all before them; others may not.
    let launch = if results == Address::NULL { launch } else { launch.overlapping() };
    let args = [header.into(), results.into(), count.into(), host.into(), (stride as u32).into()];
    // SAFETY: the caller's.
    unsafe { queue.launch("step_end", "publish", launch, &args) }
}
