//! A single row's experts, `experts_one.cu`.

use super::{Experts, ExpertsArrays, ExpertsShape, int, out_suffix};
use crate::compile::Program;
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::module::Launch;

impl Experts {
    pub(super) unsafe fn one(
        &self,
        queue: &Queue<'_>,
        a: &ExpertsArrays,
        depth: usize,
    ) -> Result<(), CudaError> {
        let s = &self.shape;
        assert_eq!(s.rows(), 1, "{s:?}");
        let [who0, who1, who2, who3, who4, who5] = self.choosers(a);
        // Blocks wait for each other, so there are no more than the GPU holds at a time.
        let launch = Launch::new(queue.processors(), 512).shared(one_shared(s, depth) as u32).overlapping();
        let args = [
            a.x.into(),
            a.routes.into(),
            a.gate_up.into(),
            a.down.into(),
            a.gated.into(),
            a.out.into(),
            a.meeting.into(),
            who0,
            who1,
            who2,
            who3,
            who4,
            who5,
            int(s.hidden),
            int(s.width),
            a.sums_word(),
        ];
        let name = format!("experts_one_{}", out_suffix(a.out_element));
        // SAFETY: the caller's.
        unsafe { queue.launch_of(&one_program(depth), &name, launch, &args) }
    }
}

pub(super) fn one_program(depth: usize) -> Program {
    Program::with("experts_one", &[&format!("DEPTH={depth}")])
}

/// Dynamic shared memory of `experts_one.cu`.
pub(super) fn one_shared(shape: &ExpertsShape, depth: usize) -> usize {
    depth * 32768 + 2 * shape.hidden.max(shape.choices() * shape.width)
}

/// Depth of the rings in `experts_one.cu`, if a shape is for it.
pub(super) fn one_depth(shape: &ExpertsShape, room: usize) -> Option<usize> {
    // What is in shared memory beside the rings and the inputs, and what the driver takes of it.
    let (room, fixed) = (room / 2, 5632);
    let fits = |&depth: &usize| one_shared(shape, depth) + fixed <= room;
    (shape.rows() == 1 && shape.top_k <= ONE_CHOICES).then(|| (3..=ONE_DEPTH).rev().find(fits)).flatten()
}

/// Deeper rings leave no room for the next kernel's beside them.
const ONE_DEPTH: usize = 6;

/// A lane reads each.
const ONE_CHOICES: usize = 32;
