//! Which kernel multiplies few rows, where the time is that of reading weights.

use crate::compile::Program;
use crate::device::Properties;
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::linear_rows::{self, RowsCut};
use crate::launch::linear_small::{self, SmallOperands, SmallProduct};
use crate::launch::rows::RowExtent;
use crate::order::SumOrder;

/// One of the kernels that take in what stands around a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FewRows {
    /// `linear_small`
    Small,
    /// `linear_rows`
    Rows(RowsCut),
}

impl FewRows {
    /// The one that is fastest; `None` if cuBLASLt and kernels of their own are. In a fixed order only the one whose sums
    /// have the order that cuBLASLt's have at more rows.
    pub(crate) fn choose(product: &SmallProduct, order: SumOrder, properties: &Properties) -> Option<Self> {
        let is_small =
            order == SumOrder::Fastest && product.is_possible(properties) && product.rows <= SMALL_ROWS;
        if is_small {
            return Some(Self::Small);
        }
        if product.rows <= ROWS_ROWS
            && let Some(cut) = RowsCut::new(product, properties)
        {
            return Some(Self::Rows(cut));
        }
        let has_no_other = order == SumOrder::Fastest && properties.capability != (9, 0);
        (has_no_other && product.is_possible(properties) && product.pays()).then_some(Self::Small)
    }

    /// What must be loaded for it.
    pub(crate) fn program(self, product: &SmallProduct, properties: &Properties) -> Program {
        match self {
            Self::Small => product.program(properties),
            Self::Rows(cut) => cut.program(product.out),
        }
    }

    /// Queues the product.
    ///
    /// # Safety
    /// As for [`linear_small::multiply`].
    pub(crate) unsafe fn multiply(
        self,
        queue: &Queue<'_>,
        product: &SmallProduct,
        operands: SmallOperands,
        extent: RowExtent,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe {
            match self {
                Self::Small => linear_small::multiply(queue, product, operands, extent),
                Self::Rows(cut) => linear_rows::multiply(queue, product, cut, &operands, extent),
            }
        }
    }
}

/// Up to so many rows `linear_small`, which takes norms in too, is the fastest.
const SMALL_ROWS: usize = 8;

/// Up to so many rows `linear_rows` is.
const ROWS_ROWS: usize = 64;
