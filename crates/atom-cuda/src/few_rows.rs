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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::linear_small::SmallOut;

    fn properties(capability: (i32, i32)) -> Properties {
        let (name, processors, shared_bytes_max) = ("a GPU".into(), 132, 232_448);
        Properties { name, capability, processors, shared_bytes_max, l2_bytes: 60 << 20 }
    }

    fn product(rows: usize, norms: bool) -> SmallProduct {
        SmallProduct { rows, inputs: 4096, outputs: 6144, norms, out: SmallOut::Activations }
    }

    #[test]
    fn each_number_of_rows_has_its_kernel() {
        let hopper = properties((9, 0));
        let choose = |rows, norms| FewRows::choose(&product(rows, norms), SumOrder::Fastest, &hopper);
        for rows in 1..=SMALL_ROWS {
            assert_eq!([false, true].map(|norms| choose(rows, norms)), [Some(FewRows::Small); 2]);
        }
        for rows in SMALL_ROWS + 1..=ROWS_ROWS {
            assert!(matches!(choose(rows, false), Some(FewRows::Rows(_))), "{rows}");
            assert_eq!(choose(rows, true), None, "{rows}");
        }
        assert_eq!(choose(ROWS_ROWS + 1, false), None);
        let older = |rows| FewRows::choose(&product(rows, true), SumOrder::Fastest, &properties((8, 0)));
        assert_eq!([1, 16, 17].map(older), [Some(FewRows::Small), Some(FewRows::Small), None]);
    }

    #[test]
    fn in_a_fixed_order_few_rows_have_the_sums_of_many() {
        let choose = |capability, norms| {
            (1..=ROWS_ROWS + 1)
                .filter_map(|rows| {
                    FewRows::choose(&product(rows, norms), SumOrder::Fixed, &properties(capability))
                })
                .collect::<Vec<_>>()
        };
        assert!(choose((8, 0), false).is_empty() && choose((9, 0), true).is_empty());
        let found = choose((9, 0), false);
        assert_eq!(found.len(), ROWS_ROWS);
        assert!(found.iter().all(|kernel| matches!(kernel, FewRows::Rows(_))));
    }
}
