//! A row's sum over its choices, and where it goes.

use super::{Experts, ExpertsArrays, ExpertsThen, int};
use crate::element::Element;
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::memory::Address;
use crate::module::Launch;

impl Experts {
    pub(super) unsafe fn combine(
        &self,
        queue: &Queue<'_>,
        a: &ExpertsArrays,
        y: Address,
        y_element: Element,
    ) -> Result<(), CudaError> {
        let s = &self.shape;
        let [who0, who1, who2, who3, who4, who5] = self.choosers(a);
        if let ExpertsThen::AddNorm(norm, normed) = a.then {
            assert_eq!(norm.width, s.hidden, "{s:?}");
            let threads = s.hidden.div_ceil(8).next_multiple_of(32) as u32;
            let launch = Launch::new(s.rows() as u32, threads).overlapping();
            let args = [
                y.into(),
                a.routes.into(),
                a.out.into(),
                norm.weight.into(),
                norm.eps.into(),
                normed.into(),
                who0,
                who1,
                who2,
                who3,
                who4,
                who5,
                int(s.hidden),
            ];
            let name = format!("experts_combine_norm_{}", y_element.suffix());
            // SAFETY: the caller's.
            return unsafe { queue.launch("experts_plan", &name, launch, &args) };
        }
        let name = format!("experts_combine_{}_{}", y_element.suffix(), a.out_element.suffix());
        let launch = Launch::new(s.rows() as u32, 128).by(s.hidden.div_ceil(1024) as u32, 1).overlapping();
        let args =
            [y.into(), a.routes.into(), a.out.into(), who0, who1, who2, who3, who4, who5, int(s.hidden)];
        // SAFETY: the caller's.
        unsafe { queue.launch("experts_plan", &name, launch, &args) }
    }
}

/// Widest row that a block adds and norms.
pub(super) const COMBINE_NORM_MAX: usize = 8 * 1024;
