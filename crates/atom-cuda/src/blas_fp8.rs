//! Products of e4m3 codes by cuBLASLt, with scales of rows and outputs, or of 128 inputs of a row and blocks of 128 x 128:
//! compute capability 9.0.

use crate::api::CublasLt;
use crate::blas::{Blas, WORKSPACE_BYTES, data_type};
use crate::device::Stream;
use crate::element::Element;
use crate::error::CudaError;
use crate::fp8::Fp8Form;
use crate::launch::linear_fp8::{Fp8Operands, Fp8Path, Fp8Product};
use crate::launch::linear_small::SmallOut;
use crate::memory::Address;
use cudarc::cublaslt::sys as lt;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

/// The algorithms that were chosen.
#[derive(Default)]
pub struct Fp8Blas {
    chosen: RefCell<HashMap<Fp8Product, Chosen>>,
}

impl Fp8Blas {
    /// Chooses an algorithm, if that has not been done. Not within a capture.
    pub fn choose(&self, blas: &Blas, product: &Fp8Product) -> Result<(), CudaError> {
        if !self.chosen.borrow().contains_key(product) {
            let chosen = Chosen::new(blas, product)?;
            self.chosen.borrow_mut().insert(*product, chosen);
        }
        Ok(())
    }

    /// Queues a product of many rows, choosing first if nobody did. A bias is not added. If it is [`Fp8Path::Finished`], `out`
    /// gets f32 sums of codes.
    ///
    /// # Safety
    /// The arrays have the sizes of `product` (rows rounded up to a multiple of 4 if its scales are of blocks, `out` too)
    /// and live until the stream has passed it; `out` overlaps none of the others.
    pub unsafe fn multiply(
        &self,
        blas: &Blas,
        stream: &Stream,
        product: &Fp8Product,
        operands: &Fp8Operands,
    ) -> Result<(), CudaError> {
        self.choose(blas, product)?;
        let (chosen, library) = (self.chosen.borrow(), blas.library());
        let chosen = &chosen[product];
        if product.path() == Fp8Path::Scaled {
            chosen.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &operands.weight_scales.0)?;
            chosen.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &operands.x.scales.0)?;
        }
        let (one, zero) = (1.0_f32, 0.0_f32);
        let [weight, x, out] = chosen.layouts;
        let pointer = |address: Address| address.0 as *const c_void;
        // SAFETY: descriptions are alive; scalars live for the call, which copies them; the rest is the caller's.
        let status = unsafe {
            library.cublasLtMatmul(
                blas.handle(),
                chosen.desc,
                (&raw const one).cast(),
                pointer(operands.weight),
                weight,
                pointer(operands.x.codes),
                x,
                (&raw const zero).cast(),
                pointer(operands.out),
                out,
                operands.out.0 as *mut c_void,
                out,
                &raw const chosen.algorithm,
                blas.workspace().0 as *mut c_void,
                WORKSPACE_BYTES,
                stream.handle().cast(),
            )
        };
        library.check("cublasLtMatmul", status)
    }
}

/// Descriptions that a call needs, with the algorithm.
struct Chosen {
    library: Arc<CublasLt>,
    desc: lt::cublasLtMatmulDesc_t,
    preference: lt::cublasLtMatmulPreference_t,
    layouts: [lt::cublasLtMatrixLayout_t; 3], // weight, x, out
    algorithm: lt::cublasLtMatmulAlgo_t,
}

// SAFETY: descriptions may be used from any thread, by one at a time.
unsafe impl Send for Chosen {}

impl Chosen {
    /// cuBLASLt stores columns one behind the other, so its `out^T = weight x^T` is ours.
    fn new(blas: &Blas, product: &Fp8Product) -> Result<Self, CudaError> {
        let &Fp8Product { inputs, outputs, form, out, .. } = product;
        let out = match (product.path(), out) {
            (Fp8Path::Finished, _) | (_, SmallOut::F32) => Element::F32,
            (_, SmallOut::Activations) => Element::BF16,
            (_, SmallOut::Residual | SmallOut::GatedSilu) => {
                return Err(CudaError::Unsupported(format!("{product:?} by cuBLASLt, which fuses nothing")));
            }
        };
        let mut chosen = Self {
            library: Arc::clone(blas.library()),
            desc: std::ptr::null_mut(),
            preference: std::ptr::null_mut(),
            layouts: [std::ptr::null_mut(); 3],
            algorithm: lt::cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        let library = Arc::clone(blas.library());
        // SAFETY: the place lives for the call.
        library.check("cublasLtMatmulDescCreate", unsafe {
            let compute = lt::cublasComputeType_t::CUBLAS_COMPUTE_32F;
            library.cublasLtMatmulDescCreate(&raw mut chosen.desc, compute, lt::cudaDataType_t::CUDA_R_32F)
        })?;
        let (of_weight, of_x) = match form {
            Fp8Form::Channel => (OUTER_VEC, OUTER_VEC),
            Fp8Form::Block => (BLOCK_128X128, VEC_128),
        };
        chosen.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        if product.path() == Fp8Path::Scaled {
            chosen.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &of_weight)?;
            chosen.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &of_x)?;
            // Without scales the library finds no algorithm; any address will do until the call.
            chosen.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &blas.workspace().0)?;
            chosen.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &blas.workspace().0)?;
        }
        let (codes, rows) = (lt::cudaDataType::CUDA_R_8F_E4M3, product.quantised().stride());
        let sizes = [(codes, inputs, outputs), (codes, inputs, rows), (data_type(out), outputs, rows)];
        for (layout, (kind, height, columns)) in chosen.layouts.iter_mut().zip(sizes) {
            // SAFETY: the place lives for the call.
            library.check("cublasLtMatrixLayoutCreate", unsafe {
                library.cublasLtMatrixLayoutCreate(layout, kind, height as u64, columns as u64, height as i64)
            })?;
        }
        chosen.algorithm = chosen.first(blas).map_err(|error| match error {
            CudaError::Library { call, code, text } => {
                CudaError::Library { call, code, text: format!("{text} for {product:?}") }
            }
            other => other,
        })?;
        Ok(chosen)
    }

    fn set<T>(&self, attribute: Attribute, value: &T) -> Result<(), CudaError> {
        // SAFETY: the value lives for the call, which copies it.
        let status = unsafe {
            let value = std::ptr::from_ref(value);
            self.library.cublasLtMatmulDescSetAttribute(self.desc, attribute, value.cast(), size_of::<T>())
        };
        self.library.check("cublasLtMatmulDescSetAttribute", status)
    }

    /// The library's own first choice within the workspace.
    fn first(&mut self, blas: &Blas) -> Result<lt::cublasLtMatmulAlgo_t, CudaError> {
        let library = &self.library;
        let workspace_bytes = WORKSPACE_BYTES;
        let [weight, x, out] = self.layouts;
        // SAFETY: an all-zero result is a value of this plain struct.
        let mut found: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: places live for the calls; one result was asked for.
        unsafe {
            let status = library.cublasLtMatmulPreferenceCreate(&raw mut self.preference);
            library.check("cublasLtMatmulPreferenceCreate", status)?;
            let status = library.cublasLtMatmulPreferenceSetAttribute(
                self.preference,
                lt::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace_bytes).cast(),
                size_of::<usize>(),
            );
            library.check("cublasLtMatmulPreferenceSetAttribute", status)?;
            let status = library.cublasLtMatmulAlgoGetHeuristic(
                blas.handle(),
                self.desc,
                weight,
                x,
                out,
                out,
                self.preference,
                1,
                &raw mut found,
                &raw mut count,
            );
            library.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        }
        library.check("cublasLtMatmulAlgoGetHeuristic", found.state)?;
        if count == 0 {
            let none = lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED;
            library.check("cublasLtMatmulAlgoGetHeuristic", none)?;
        }
        Ok(found.algo)
    }
}

impl Drop for Chosen {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handles; those that were never made are null.
        unsafe {
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                let _ = self.library.cublasLtMatrixLayoutDestroy(layout);
            }
            if !self.preference.is_null() {
                let _ = self.library.cublasLtMatmulPreferenceDestroy(self.preference);
            }
            if !self.desc.is_null() {
                let _ = self.library.cublasLtMatmulDescDestroy(self.desc);
            }
        }
    }
}

type Attribute = lt::cublasLtMatmulDescAttributes_t;

/// CUBLAS_OP_T
const TRANSPOSED: i32 = 1;
/// CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
const OUTER_VEC: i32 = 3;
/// CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
const VEC_128: i32 = 4;
/// CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
const BLOCK_128X128: i32 = 5;
