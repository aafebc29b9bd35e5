//! The beginning of a step.

use crate::error::CudaError;
use crate::kernels::Queue;
use crate::memory::Address;
use crate::module::Launch;

/// Brings new entries into the page tables.
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
