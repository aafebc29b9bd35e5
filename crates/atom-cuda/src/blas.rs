//! Plain matrix products by cuBLASLt, each with an algorithm that was chosen before it is captured.

use crate::api::CublasLt;
use crate::device::{Device, Stream};
use crate::element::Element;
use crate::error::CudaError;
use crate::memory::{Address, DeviceMem};
use cudarc::cublaslt::sys as lt;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

/// `out[rows, outputs] = x[rows, inputs] weight[outputs, inputs]^T`, all row-major and without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of x and out.
    pub rows: usize,
    /// Inputs: the length that is summed over.
    pub inputs: usize,
    /// Outputs.
    pub outputs: usize,
    /// Type of x and weight; sums are f32.
    pub element: Element,
    /// Type of out.
    pub out: Element,
    /// Adds to out what is there.
    pub adds: bool,
}

/// A handle with its workspace and the algorithms that were chosen.
pub struct Blas {
    library: Arc<CublasLt>,
    handle: lt::cublasLtHandle_t,
    workspace: DeviceMem,
    chosen: RefCell<HashMap<Product, Chosen>>,
}

// SAFETY: a handle may be used from any thread, by one at a time.
unsafe impl Send for Blas {}

/// Descriptions that a call needs, with the algorithm.
struct Chosen {
    library: Arc<CublasLt>,
    desc: lt::cublasLtMatmulDesc_t,
    layouts: [lt::cublasLtMatrixLayout_t; 3], // weight, x, out
    algorithm: lt::cublasLtMatmulAlgo_t,
}

impl Blas {
    /// Takes the workspace. Of one stream only: calls in turn share it.
    pub fn new(library: &Arc<CublasLt>, device: &Device) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place lives for the call; the context is current.
        library.check("cublasLtCreate", unsafe { library.cublasLtCreate(&raw mut handle) })?;
        let chosen = RefCell::default();
        let mut blas =
            Self { library: Arc::clone(library), handle, workspace: DeviceMem::new(device, 0)?, chosen };
        blas.workspace = DeviceMem::new(device, WORKSPACE_BYTES)?;
        Ok(blas)
    }

    /// Chooses an algorithm, if that has not been done. Not within a capture: it may take a millisecond.
    pub fn choose(&self, product: Product) -> Result<(), CudaError> {
        if !self.chosen.borrow().contains_key(&product) {
            let chosen = Chosen::new(&self.library, self.handle, product)?;
            self.chosen.borrow_mut().insert(product, chosen);
        }
        Ok(())
    }

    pub(crate) fn library(&self) -> &Arc<CublasLt> {
        &self.library
    }

    pub(crate) fn handle(&self) -> lt::cublasLtHandle_t {
        self.handle
    }

    /// [`WORKSPACE_BYTES`] of it.
    pub(crate) fn workspace(&self) -> Address {
        self.workspace.address()
    }

    /// Queues a product, choosing first if nobody did.
    ///
    /// # Safety
    /// The three arrays have the sizes of `product` and live until the stream has passed it (for a captured one:
    /// each replay); `out` overlaps neither of the others.
    pub unsafe fn multiply(
        &self,
        stream: &Stream,
        product: Product,
        x: Address,
        weight: Address,
        out: Address,
    ) -> Result<(), CudaError> {
        if product.rows == 0 {
            return Ok(());
        }
        self.choose(product)?;
        let chosen = self.chosen.borrow();
        let chosen = &chosen[&product];
        let (one, beta) = (1.0_f32, if product.adds { 1.0_f32 } else { 0.0 });
        let [weight_layout, x_layout, out_layout] = chosen.layouts;
        let pointer = |address: Address| address.0 as *const c_void;
        // SAFETY: descriptions are alive; scalars live for the call, which copies them; the rest is the caller's.
        let status = unsafe {
            self.library.cublasLtMatmul(
                self.handle,
                chosen.desc,
                (&raw const one).cast(),
                pointer(weight),
                weight_layout,
                pointer(x),
                x_layout,
                (&raw const beta).cast(),
                pointer(out),
                out_layout,
                out.0 as *mut c_void,
                out_layout,
                &raw const chosen.algorithm,
                self.workspace.address().0 as *mut c_void,
                WORKSPACE_BYTES,
                stream.handle().cast(),
            )
        };
        self.library.check("cublasLtMatmul", status)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle.
        let _ = unsafe { self.library.cublasLtDestroy(self.handle) };
    }
}

impl Chosen {
    /// cuBLASLt stores columns one behind the other, so its `out^T = weight x^T` is ours.
    fn new(
        library: &Arc<CublasLt>,
        handle: lt::cublasLtHandle_t,
        product: Product,
    ) -> Result<Self, CudaError> {
        let Product { rows, inputs, outputs, element, out, .. } = product;
        let mut chosen = Self {
            library: Arc::clone(library),
            desc: std::ptr::null_mut(),
            layouts: [std::ptr::null_mut(); 3],
            algorithm: lt::cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        // SAFETY: places live for the calls.
        unsafe {
            let compute = lt::cublasComputeType_t::CUBLAS_COMPUTE_32F;
            let status = library.cublasLtMatmulDescCreate(
                &raw mut chosen.desc,
                compute,
                lt::cudaDataType_t::CUDA_R_32F,
            );
            library.check("cublasLtMatmulDescCreate", status)?;
            let transposed = TRANSPOSED;
            let status = library.cublasLtMatmulDescSetAttribute(
                chosen.desc,
                lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of::<i32>(),
            );
            library.check("cublasLtMatmulDescSetAttribute", status)?;
        }
        let sizes = [(element, inputs, outputs), (element, inputs, rows), (out, outputs, rows)];
        for (layout, (element, height, columns)) in chosen.layouts.iter_mut().zip(sizes) {
            // SAFETY: the place lives for the call.
            let status = unsafe {
                library.cublasLtMatrixLayoutCreate(
                    layout,
                    data_type(element),
                    height as u64,
                    columns as u64,
                    height as i64,
                )
            };
            library.check("cublasLtMatrixLayoutCreate", status)?;
        }
        chosen.algorithm = chosen.best(handle).map_err(|error| match error {
            CudaError::Library { call, code, text } => {
                CudaError::Library { call, code, text: format!("{text} for {product:?}") }
            }
            other => other,
        })?;
        Ok(chosen)
    }

    /// The library's own first choice within the workspace.
    fn best(&self, handle: lt::cublasLtHandle_t) -> Result<lt::cublasLtMatmulAlgo_t, CudaError> {
        let library = &self.library;
        let workspace_bytes = WORKSPACE_BYTES;
        let mut preference = Preference { library, handle: std::ptr::null_mut() };
        let [weight, x, out] = self.layouts;
        // SAFETY: an all-zero result is a value of this plain struct.
        let mut found: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: places live for the calls; one result was asked for.
        unsafe {
            let status = library.cublasLtMatmulPreferenceCreate(&raw mut preference.handle);
            library.check("cublasLtMatmulPreferenceCreate", status)?;
            let attribute =
                lt::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let status = library.cublasLtMatmulPreferenceSetAttribute(
                preference.handle,
                attribute,
                (&raw const workspace_bytes).cast(),
                size_of::<usize>(),
            );
            library.check("cublasLtMatmulPreferenceSetAttribute", status)?;
            let status = library.cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.desc,
                weight,
                x,
                out,
                out,
                preference.handle,
                1,
                &raw mut found,
                &raw mut count,
            );
            library.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        }
        library.check("cublasLtMatmulAlgoGetHeuristic", found.state)?;
        if count == 0 {
            return library
                .check("cublasLtMatmulAlgoGetHeuristic", lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)
                .map(|()| found.algo);
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
            if !self.desc.is_null() {
                let _ = self.library.cublasLtMatmulDescDestroy(self.desc);
            }
        }
    }
}

struct Preference<'a> {
    library: &'a CublasLt,
    handle: lt::cublasLtMatmulPreference_t,
}

impl Drop for Preference<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: nobody else has the handle.
            let _ = unsafe { self.library.cublasLtMatmulPreferenceDestroy(self.handle) };
        }
    }
}

pub(crate) fn data_type(element: Element) -> lt::cudaDataType {
    match element {
        Element::F32 => lt::cudaDataType::CUDA_R_32F,
        Element::BF16 => lt::cudaDataType::CUDA_R_16BF,
    }
}

/// CUBLAS_OP_T
const TRANSPOSED: i32 = 1;
/// What cuBLASLt's Hopper kernels ask for at the most, by its manual.
pub(crate) const WORKSPACE_BYTES: usize = 32 << 20;
