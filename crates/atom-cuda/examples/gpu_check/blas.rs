//! Products of cuBLASLt.

use crate::kit::Kit;
use atom_cuda::{Blas, CudaError, Element, Product};

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    let blas = Blas::new(&kit.cublaslt, &kit.device)?;
    let shapes = [(1, 64, 48), (3, 1024, 3072), (17, 96, 512), (129, 768, 40)];
    for (rows, inputs, outputs) in shapes {
        let types =
            [(Element::F32, Element::F32), (Element::BF16, Element::BF16), (Element::BF16, Element::F32)];
        for (element, out_element) in types {
            let x = element.rounded(&kit.random(rows * inputs, 1.0));
            let w = element.rounded(&kit.random(outputs * inputs, 0.1));
            let mut expected = Vec::new();
            for row in x.chunks(inputs) {
                expected.extend(
                    w.chunks(inputs)
                        .map(|w| row.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum::<f64>()),
                );
            }
            let product = Product { rows, inputs, outputs, element, out: out_element, adds: false };
            let (x, w) = (kit.upload(&x, element)?, kit.upload(&w, element)?);
            let out = kit.poisoned(rows * outputs, out_element)?;
            // SAFETY: the arrays have the product's sizes and live until they are read back.
            unsafe { blas.multiply(&kit.stream, product, x.address(), w.address(), out.address()) }?;
            let found = kit.download(&out, out_element)?;
            let bound = if out_element == Element::F32 { 1e-5 } else { 4e-3 };
            kit.near(&format!("{product:?}"), &found, &expected, bound);
        }
    }
    Ok(())
}
