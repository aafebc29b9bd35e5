//! Plain products, in any form of weights.

use super::{Scene, equal};
use crate::blas::Product;
use crate::element::Element;
use crate::fp8::Stored;
use crate::fuse::{Fused, FusedFp8};
use crate::launch::linear_fp8::{self, Fp8Operands, Fp8Path};
use crate::launch::linear_rows;
use crate::launch::linear_small::{RowsNorms, SmallOperands};
use crate::launch::quantise;
use crate::launch::step;
use crate::memory::Address;
use crate::product_kernel::ProductKernel;
use crate::weights::Loaded;
use atom_ops::{Buf, OpsError, Weight};

impl Scene<'_> {
    pub(super) fn product(&self, x: Buf, weight: Weight, out: Buf) -> Result<(Product, Address), OpsError> {
        let Loaded::Matrix { outputs, inputs, at, stored: Stored::Plain } = self.with.shelf.loaded(weight)?
        else {
            return Err(OpsError::Weights(format!("{weight:?} is no matrix of plain numbers")));
        };
        equal("inputs", inputs, self.spec(x).width)?;
        equal("outputs", outputs, self.spec(out).width)?;
        if self.element(x) != self.with.shelf.element() {
            return Err(OpsError::Weights(format!("{x:?} is not of the weights' type")));
        }
        let rows = self.spec(x).capacity_rows(&self.recording.shape());
        let (element, out) = (self.element(x), self.element(out));
        Ok((Product { rows, inputs, outputs, element, out, adds: false }, self.with.weights.plus(at)))
    }

    pub(super) fn linear(
        &self,
        x: Buf,
        weight: Weight,
        bias: Option<Weight>,
        out: Buf,
    ) -> Result<(), OpsError> {
        let (product, weight) = self.product(x, weight, out)?;
        let stream = self.with.queue.stream;
        // SAFETY: see `op`.
        unsafe { self.with.blas.multiply(stream, product, self.at(x), weight, self.at(out)) }?;
        if let Some(bias) = bias {
            let (width, element) = (product.outputs, self.element(out));
            let (bias, real) = (self.vector(bias, width)?, self.real(out));
            // SAFETY: see `op`.
            unsafe { step::add_bias(&self.with.queue, element, self.at(out), bias, width, real) }?;
        }
        Ok(())
    }

    pub(super) fn fused(&self, fused: &Fused) -> Result<(), OpsError> {
        let &Fused { x, norm, weight, bias, out, ref product, scale, next } = fused;
        let Loaded::Matrix { outputs, inputs, at, stored: Stored::Plain } = self.with.shelf.loaded(weight)?
        else {
            return Err(OpsError::Weights(format!("{weight:?} is no matrix of plain numbers")));
        };
        equal("inputs", inputs, product.inputs)?;
        equal("outputs", outputs, product.outputs)?;
        let properties = self.with.queue.stream.device().properties();
        let kernel = ProductKernel::choose(product, self.with.blas.order(), properties)
            .expect("what no kernel takes is not fused");
        let norm = match norm {
            None => (Address::NULL, 0.0),
            Some((weight, eps)) => (self.vector(weight, inputs)?, eps),
        };
        // One place for all: who writes there reads nothing there, and does so when everybody before has ended.
        let squares = self.with.reserved.quantised.address();
        let mut norms = RowsNorms::NONE;
        let needed = match (scale, next) {
            (None, None) => 0,
            (Some(_), None) => linear_rows::squares_bytes(product.rows, inputs),
            (_, Some(_)) => linear_rows::squares_bytes(product.rows, outputs),
        };
        self.has_room_for_codes(needed, product)?;
        if let Some(eps) = scale {
            norms.squares = (squares, eps);
        }
        if let Some((weight, out)) = next {
            norms = RowsNorms {
                next_weight: self.vector(weight, outputs)?,
                next: self.at(out),
                next_squares: squares,
                ..norms
            };
        }
        let operands = SmallOperands {
            weight: self.with.weights.plus(at),
            bias: bias.map_or(Ok(Address::NULL), |bias| self.vector(bias, outputs))?,
            norm,
            x: self.at(x),
            out: self.at(out),
            norms,
        };
        // SAFETY: see `op`.
        unsafe { kernel.multiply(&self.with.queue, product, operands, self.real(x)) }?;
        Ok(())
    }

    /// The plan counted for the buckets it was told of.
    fn has_room_for_codes(&self, needed: usize, product: &impl std::fmt::Debug) -> Result<(), OpsError> {
        let there = self.with.reserved.quantised.bytes();
        if needed <= there {
            return Ok(());
        }
        Err(OpsError::Device(format!(
            "{product:?} needs {needed} bytes for codes or sums of squares, and {there} were planned"
        )))
    }

    /// Inputs become codes, by a norm if there is one, and are multiplied with the weights'.
    pub(super) fn fp8(&self, fused: &FusedFp8) -> Result<(), OpsError> {
        let &FusedFp8 { x, norm, weight, bias, out, ref product } = fused;
        let Loaded::Matrix { outputs, inputs, at, stored: Stored::Fp8 { form, scales } } =
            self.with.shelf.loaded(weight)?
        else {
            return Err(OpsError::Weights(format!("{weight:?} is no matrix of FP8")));
        };
        equal("inputs", inputs, product.inputs)?;
        equal("outputs", outputs, product.outputs)?;
        assert_eq!(form, product.form, "the form that the step was made for");
        let wanted = if norm.is_some() { Element::F32 } else { Element::BF16 };
        if self.element(x) != wanted {
            return Err(OpsError::Weights(format!("{x:?} is not {wanted:?}, which is quantised")));
        }
        self.has_room_for_codes(product.scratch_bytes(), product)?;
        let (queue, shape, real) = (&self.with.queue, product.quantised(), self.real(x));
        let quantised = shape.at(self.with.reserved.quantised.address());
        // SAFETY: see `op`; the plan has room for the largest product's codes.
        unsafe {
            match norm {
                None => quantise::rows(queue, &shape, self.at(x), quantised, real),
                Some((weight, eps)) => {
                    let norm = self.norm(x, weight, eps)?;
                    quantise::normed_rows(queue, &shape, self.at(x), norm, quantised, real)
                }
            }
        }?;
        let operands = Fp8Operands {
            weight: self.with.weights.plus(at),
            weight_scales: self.with.weights.plus(scales),
            bias: bias.map_or(Ok(Address::NULL), |bias| self.vector(bias, outputs))?,
            x: quantised,
            out: self.at(out),
        };
        let (fp8_blas, stream) = (self.with.fp8_blas, queue.stream);
        match product.path() {
            Fp8Path::Few | Fp8Path::Rows => {
                // SAFETY: see `op`.
                unsafe { linear_fp8::multiply_few(queue, product, operands, real) }?
            }
            Fp8Path::Finished => {
                let sums = self.with.reserved.quantised.address().plus(product.sums_offset());
                let unscaled = Fp8Operands { out: sums, ..operands };
                // SAFETY: see `op`; the plan has room for the sums.
                unsafe {
                    fp8_blas.multiply(self.with.blas, stream, product, &unscaled)?;
                    linear_fp8::finish(queue, product, operands, sums, real)?;
                }
            }
            Fp8Path::Scaled => {
                // SAFETY: see `op`; buffers and codes have room for rows by 4.
                unsafe { fp8_blas.multiply(self.with.blas, stream, product, &operands) }?;
                if bias.is_some() {
                    let (element, at) = (self.element(out), operands.out);
                    // SAFETY: see `op`.
                    unsafe { step::add_bias(queue, element, at, operands.bias, outputs, self.real(out)) }?;
                }
            }
        }
        Ok(())
    }
}
