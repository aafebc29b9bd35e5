//! Which of our kernels makes a product, with what stands around it: of few rows, where the time is that of reading weights,
//! and of gate and up for many.

use crate::compile::Program;
use crate::device::Properties;
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::launch::linear_gated;
use crate::launch::linear_rows::{self, RowsCut};
use crate::launch::linear_small::{self, SmallOperands, SmallProduct};
use crate::launch::rows::RowExtent;
use crate::order::SumOrder;

/// One of the kernels that take in what stands around a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProductKernel {
    /// `linear_small`
    Small,
    /// `linear_rows`
    Rows(RowsCut),
    /// `linear_gated`
    Gated,
}

impl ProductKernel {
    /// The one that is fastest; `None` if cuBLASLt and kernels of their own are. In a fixed order only those whose sums
    /// have the order that cuBLASLt's have there.
    pub(crate) fn choose(product: &SmallProduct, order: SumOrder, properties: &Properties) -> Option<Self> {
        let is_small = order == SumOrder::Fastest
            && product.rows <= SMALL_ROWS
            && 2 * product.inputs * product.outputs < SMALL_BYTES
            && product.is_possible(properties);
        if is_small {
            return Some(Self::Small);
        }
        if product.rows <= ROWS_ROWS
            && let Some(cut) = RowsCut::new(product, order, properties)
        {
            return Some(Self::Rows(cut));
        }
        if product.rows >= GATED_ROWS && linear_gated::is_possible(product, properties) {
            return Some(Self::Gated);
        }
        let has_no_other = order == SumOrder::Fastest && properties.capability != (9, 0);
        (has_no_other && product.is_possible(properties) && product.pays()).then_some(Self::Small)
    }

    /// What must be loaded for it.
    pub(crate) fn program(self, product: &SmallProduct, properties: &Properties) -> Program {
        match self {
            Self::Small => product.program(properties),
            Self::Rows(cut) => cut.program(product.out),
            Self::Gated => linear_gated::program(),
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
                Self::Gated => linear_gated::multiply(queue, product, &operands, extent),
            }
        }
    }
}

/// Up to so many rows `linear_small`, which takes norms in too, is the fastest, unless the matrix is large.
const SMALL_ROWS: usize = 8;

/// Matrices of so many bytes go by `linear_rows` at any number of rows, where there is that kernel. (H200, next token of one
/// request: Qwen3-8B, whose smallest matrix has 32 MiB, 4.90 ms by `linear_small` and 4.01 so; Qwen3-30B-A3B with all of its
/// matrices by `linear_rows`, 16 and 20 MiB in a layer, 2.67 ms, and 2.55 so; Qwen3-0.6B, 4 to 12 MiB, 0.763 and 0.690.)
const SMALL_BYTES: usize = 32 << 20;

/// Up to so many rows `linear_rows` is.
const ROWS_ROWS: usize = 64;

/// From so many on `linear_gated` is faster than cuBLASLt's first choice with the activation behind it. (H200, 24576 x 4096, us:
/// 1,024 rows 281 to 287 and 297 to 325, 2,048 rows 541 to 563 and 563 to 598, 8,192 rows 2137 to 2148 and 2235 to 2255; but 512 rows
/// 145 to 158 and 148 to 200, 256 rows 95 to 110 and 84 to 118, where tiles don't fill the last round.)
const GATED_ROWS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::linear_small::SmallOut;

    fn properties(capability: (i32, i32)) -> Properties {
        let (name, processors, shared_bytes_max) = ("a GPU".into(), 132, 232_448);
        Properties { name, capability, processors, shared_bytes_max, l2_bytes: 60 << 20 }
    }

    fn product(rows: usize, norms: bool) -> SmallProduct {
        SmallProduct { rows, inputs: 2048, outputs: 5120, norms, out: SmallOut::Activations }
    }

    fn large(rows: usize, norms: bool) -> SmallProduct {
        SmallProduct { inputs: 4096, outputs: 4096, ..product(rows, norms) }
    }

    #[test]
    fn each_number_of_rows_has_its_kernel() {
        let hopper = properties((9, 0));
        let choose = |product: SmallProduct| ProductKernel::choose(&product, SumOrder::Fastest, &hopper);
        for rows in 1..=SMALL_ROWS {
            assert_eq!(
                [false, true].map(|norms| choose(product(rows, norms))),
                [Some(ProductKernel::Small); 2]
            );
        }
        for rows in SMALL_ROWS + 1..=ROWS_ROWS {
            assert!(matches!(choose(product(rows, false)), Some(ProductKernel::Rows(_))), "{rows}");
            assert_eq!(choose(product(rows, true)), None, "{rows}");
        }
        assert_eq!(choose(product(ROWS_ROWS + 1, false)), None);
        let older =
            |rows| ProductKernel::choose(&product(rows, true), SumOrder::Fastest, &properties((8, 0)));
        assert_eq!([1, 16, 17].map(older), [Some(ProductKernel::Small), Some(ProductKernel::Small), None]);
    }

    #[test]
    fn gate_and_up_of_many_rows_take_in_their_activation_in_either_order() {
        let gate_up = |rows| SmallProduct { out: SmallOut::GatedSilu, ..product(rows, false) };
        for order in [SumOrder::Fastest, SumOrder::Fixed] {
            let choose = |product: SmallProduct, capability| {
                ProductKernel::choose(&product, order, &properties(capability))
            };
            assert_eq!(choose(gate_up(GATED_ROWS - 1), (9, 0)), None);
            for rows in [GATED_ROWS, 8192] {
                assert_eq!(choose(gate_up(rows), (9, 0)), Some(ProductKernel::Gated));
                assert_eq!(choose(SmallProduct { norms: true, ..gate_up(rows) }, (9, 0)), None);
                assert_eq!(choose(product(rows, false), (9, 0)), None);
                assert_eq!(choose(gate_up(rows), (8, 0)), None);
            }
        }
    }

    #[test]
    fn few_rows_of_a_large_matrix_have_the_kernel_of_more_rows_where_there_is_one() {
        let (hopper, older) = (properties((9, 0)), properties((8, 0)));
        for rows in 1..=SMALL_ROWS {
            let [plain, norms] = [false, true]
                .map(|norms| ProductKernel::choose(&large(rows, norms), SumOrder::Fastest, &hopper));
            assert!(matches!(plain, Some(ProductKernel::Rows(_))), "{rows}: {plain:?}");
            assert_eq!(norms, None, "the products around share the norm, or it has a kernel");
            for norms in [false, true] {
                let choice = ProductKernel::choose(&large(rows, norms), SumOrder::Fastest, &older);
                assert_eq!(choice, Some(ProductKernel::Small), "{rows}");
            }
        }
    }

    #[test]
    fn in_a_fixed_order_few_rows_have_the_sums_of_many() {
        let choose = |capability, norms| {
            (1..=ROWS_ROWS + 1)
                .filter_map(|rows| {
                    ProductKernel::choose(&product(rows, norms), SumOrder::Fixed, &properties(capability))
                })
                .collect::<Vec<_>>()
        };
        assert!(choose((8, 0), false).is_empty() && choose((9, 0), true).is_empty());
        let found = choose((9, 0), false);
        assert_eq!(found.len(), ROWS_ROWS);
        assert!(found.iter().all(|kernel| matches!(kernel, ProductKernel::Rows(_))));
    }
}
