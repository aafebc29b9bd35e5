//! How a rank's attention is computed, and its scratch.

use crate::device::Stream;
use crate::error::CudaError;
use crate::launch::attend::{AttendHeads, AttendKernels};
use crate::launch::attend_few::AttendFew;
use crate::memory::{Address, DeviceMem};
use crate::work::WorkSpec;

/// How this model's attention is computed.
pub(crate) struct Attention {
    pub(crate) heads: AttendHeads,
    pub(crate) kernels: AttendKernels,
    pub(crate) work: Option<WorkSpec>,
    /// For steps of few rows.
    pub(crate) few: Option<AttendFew>,
    pub(crate) scratch: DeviceMem,
    pub(super) letters_offset: usize,
}

impl Attention {
    /// Where the blocks of [`AttendFew`] leave their sums.
    pub(crate) fn letters(&self) -> Address {
        self.scratch.address().plus(self.letters_offset)
    }

    /// Counters start at 0, letters with all bits 1, and every launch leaves them so.
    pub(super) fn clear(&self, stream: &Stream) -> Result<(), CudaError> {
        let (start, end) = (self.letters_offset, self.scratch.bytes());
        self.scratch.fill(stream, 0, start, 0)?;
        self.scratch.fill(stream, start, end - start, 0xff)
    }
}
