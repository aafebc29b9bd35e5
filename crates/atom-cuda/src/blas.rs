//! Plain matrix products by cuBLASLt, each with an algorithm that was chosen before it is captured.

mod timing;

pub(crate) use timing::Operands;

use crate::api::CublasLt;
use crate::choices::{AllChoices, Choices};
use crate::device::{Device, Stream};
use crate::element::Element;
use crate::error::CudaError;
use crate::memory::{Address, DeviceMem};
use crate::order::SumOrder;
use cudarc::cublaslt::sys as lt;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::Path;
use std::sync::{Arc, Mutex};

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

/// How the library names one of its kernels with what it is told.
type Algorithm = lt::cublasLtMatmulAlgo_t;

impl Product {
    /// Bytes of x, weight and out.
    fn bytes(&self) -> [usize; 3] {
        let Self { rows, inputs, outputs, element, out, .. } = *self;
        [rows * inputs * element.bytes(), outputs * inputs * element.bytes(), rows * outputs * out.bytes()]
    }
}

/// A handle with its workspace and the algorithms that were chosen.
pub struct Blas {
    library: Arc<CublasLt>,
    handle: lt::cublasLtHandle_t,
    workspace: DeviceMem,
    order: SumOrder,
    choices: Arc<Mutex<Choices>>,
    chosen: RefCell<HashMap<Product, Chosen>>,
    tally: Cell<timing::Tally>,
}

// SAFETY: a handle may be used from any thread, by one at a time.
unsafe impl Send for Blas {}

/// Descriptions that a call needs, with the algorithm.
struct Chosen {
    library: Arc<CublasLt>,
    product: Product,
    desc: lt::cublasLtMatmulDesc_t,
    layouts: [lt::cublasLtMatrixLayout_t; 3], // weight, x, out
    algorithm: Algorithm,
}

impl Blas {
    /// Takes the workspace. Of one stream only: calls in turn share it. `cache` is a folder that keeps choices, `choices` those
    /// of the process.
    pub fn new(
        library: &Arc<CublasLt>,
        device: &Device,
        order: SumOrder,
        (cache, choices): (Option<&Path>, &AllChoices),
    ) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place lives for the call; the context is current.
        library.check("cublasLtCreate", unsafe { library.cublasLtCreate(&raw mut handle) })?;
        // SAFETY: it takes nothing.
        let version = unsafe { library.cublasLtGetVersion() };
        if order == SumOrder::Fixed && version / 100 != FIXED_VERSION {
            tracing::warn!(
                "sums in a fixed order were checked with cuBLASLt 13.1, this is {version}: `gpu_check blas` and `gpu_models \
                 deterministic` tell whether they have one order here too"
            );
        }
        let properties = device.properties();
        let of = format!(
            "{}, {} multiprocessors; cuBLASLt {version}; sums {order:?}; {FORM}",
            properties.name, properties.processors
        );
        let (choices, chosen) = (choices.of(cache, of), RefCell::default());
        let (library, workspace) = (Arc::clone(library), DeviceMem::new(device, 0)?);
        let tally = Cell::default();
        let mut blas = Self { library, handle, workspace, order, choices, chosen, tally };
        blas.workspace = DeviceMem::new(device, WORKSPACE_BYTES)?;
        Ok(blas)
    }

    /// Of all sums.
    pub fn order(&self) -> SumOrder {
        self.order
    }

    /// Chooses an algorithm without a trial, if that has not been done. Not within a capture: it may take a millisecond.
    pub fn choose(&self, product: Product) -> Result<(), CudaError> {
        if !self.chosen.borrow().contains_key(&product) {
            let mut chosen = Chosen::new(&self.library, product)?;
            chosen.algorithm = self.first_choice(&chosen)?;
            self.chosen.borrow_mut().insert(product, chosen);
        }
        Ok(())
    }

    fn first_choice(&self, chosen: &Chosen) -> Result<Algorithm, CudaError> {
        match self.order {
            SumOrder::Fastest => chosen.first(self.handle, Reductions::Any),
            SumOrder::Fixed => self.one_for_all_rows(chosen),
        }
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

    /// The algorithm that any number of rows may have: it adds nothing up but in its own registers, so the order of a sum
    /// is that of its one loop over the inputs. Of the library's kinds of kernels it is of the one that most of its
    /// choices for some rows are of, so that a step of other rows finds a fast one of the same kind.
    fn one_for_all_rows(&self, chosen: &Chosen) -> Result<Algorithm, CudaError> {
        let usual = Chosen::new(&self.library, Product { rows: FIXED_ROWS, ..chosen.product })?;
        let found = usual.algorithms(self.handle, Reductions::None, FIXED_CANDIDATES)?;
        let kinds: Vec<i32> = found.iter().map(|algorithm| self.kind(algorithm)).collect::<Result<_, _>>()?;
        let first = most_common(&kinds).map(|place| found[place]);
        first.filter(|algorithm| chosen.takes(self.handle, algorithm)).ok_or_else(|| {
            CudaError::Unsupported(format!(
                "sums in a fixed order: cuBLASLt's algorithm for {FIXED_ROWS} rows does not take {:?}; leave out \
                 --deterministic",
                chosen.product
            ))
        })
    }

    /// The library's number of a kind of kernels, which come in many sizes of tiles.
    fn kind(&self, algorithm: &Algorithm) -> Result<i32, CudaError> {
        let (mut kind, mut written) = (0_i32, 0);
        // SAFETY: places live for the call.
        let status = unsafe {
            self.library.cublasLtMatmulAlgoConfigGetAttribute(
                std::ptr::from_ref(algorithm),
                lt::cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_ID,
                (&raw mut kind).cast(),
                size_of::<i32>(),
                &raw mut written,
            )
        };
        self.library.check("cublasLtMatmulAlgoConfigGetAttribute", status)?;
        Ok(kind)
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
        // SAFETY: the caller's.
        unsafe { self.run(chosen, &chosen.algorithm, stream, [x, weight, out]) }
    }

    /// # Safety
    /// As for [`Self::multiply`], of the product that was described.
    unsafe fn run(
        &self,
        chosen: &Chosen,
        algorithm: &Algorithm,
        stream: &Stream,
        [x, weight, out]: [Address; 3],
    ) -> Result<(), CudaError> {
        let (one, beta) = (1.0_f32, if chosen.product.adds { 1.0_f32 } else { 0.0 });
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
                std::ptr::from_ref(algorithm),
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
        self.workspace.device().release(|_| unsafe { self.library.cublasLtDestroy(self.handle) });
    }
}

impl Chosen {
    /// cuBLASLt stores columns one behind the other, so its `out^T = weight x^T` is ours.
    fn new(library: &Arc<CublasLt>, product: Product) -> Result<Self, CudaError> {
        let Product { rows, inputs, outputs, element, out, .. } = product;
        let mut chosen = Self {
            library: Arc::clone(library),
            product,
            desc: std::ptr::null_mut(),
            layouts: [std::ptr::null_mut(); 3],
            algorithm: Algorithm { data: [0; 8] },
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
        Ok(chosen)
    }

    /// The library's own first choice within the workspace.
    fn first(&self, handle: lt::cublasLtHandle_t, reductions: Reductions) -> Result<Algorithm, CudaError> {
        let found = self.algorithms(handle, reductions, 1)?;
        found.first().copied().ok_or_else(|| CudaError::Library {
            call: "cublasLtMatmulAlgoGetHeuristic",
            code: lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as u32,
            text: format!("no algorithm for {:?}", self.product),
        })
    }

    /// Whether an algorithm that was found for other rows can do this product.
    fn takes(&self, handle: lt::cublasLtHandle_t, algorithm: &Algorithm) -> bool {
        let [weight, x, out] = self.layouts;
        // SAFETY: an all-zero result is a value of this plain struct.
        let mut found: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: descriptions are alive, places live for the call.
        let status = unsafe {
            self.library.cublasLtMatmulAlgoCheck(
                handle,
                self.desc,
                weight,
                x,
                out,
                out,
                std::ptr::from_ref(algorithm),
                &raw mut found,
            )
        };
        status == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS
            && found.state == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS
            && found.workspaceSize <= WORKSPACE_BYTES
    }

    /// The library's first `count` choices within the workspace, the one that it holds for the best in front.
    fn algorithms(
        &self,
        handle: lt::cublasLtHandle_t,
        reductions: Reductions,
        count: usize,
    ) -> Result<Vec<Algorithm>, CudaError> {
        let library = &self.library;
        let workspace_bytes = WORKSPACE_BYTES;
        let mut preference = Preference { library, handle: std::ptr::null_mut() };
        let [weight, x, out] = self.layouts;
        // SAFETY: an all-zero result is a value of this plain struct.
        let mut found: Vec<lt::cublasLtMatmulHeuristicResult_t> = vec![unsafe { std::mem::zeroed() }; count];
        let mut filled = 0;
        // SAFETY: places live for the calls; no more results are asked for than there is room for.
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
            if reductions == Reductions::None {
                let none = NO_REDUCTION;
                let status = library.cublasLtMatmulPreferenceSetAttribute(
                    preference.handle,
                    lt::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                    (&raw const none).cast(),
                    size_of::<u32>(),
                );
                library.check("cublasLtMatmulPreferenceSetAttribute", status)?;
            }
            let status = library.cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.desc,
                weight,
                x,
                out,
                out,
                preference.handle,
                count as i32,
                found.as_mut_ptr(),
                &raw mut filled,
            );
            if status == lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
                return Ok(Vec::new());
            }
            library.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        }
        found.truncate(usize::try_from(filled).unwrap_or(0));
        found.retain(|result| result.state == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        Ok(found.into_iter().map(|result| result.algo).collect())
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

/// Whether blocks may share a sum and add their parts up in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reductions {
    Any,
    None,
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

/// The first place of the value that comes most often; of several the one that comes first.
fn most_common(values: &[i32]) -> Option<usize> {
    let count = |value: i32| values.iter().filter(|&&other| other == value).count();
    (0..values.len()).max_by_key(|&place| (count(values[place]), std::cmp::Reverse(place)))
}

pub(crate) fn data_type(element: Element) -> lt::cudaDataType {
    match element {
        Element::F32 => lt::cudaDataType::CUDA_R_32F,
        Element::BF16 => lt::cudaDataType::CUDA_R_16BF,
    }
}

/// The version, without its patch, whose kernels were seen to add in one order.
const FIXED_VERSION: usize = 1301;
/// Choices of the library that are looked at for it.
const FIXED_CANDIDATES: usize = 16;
/// Changes with the way that algorithms are chosen and kept.
const FORM: &str = "third form";
/// Rows whose algorithm all have where sums have a fixed order.
const FIXED_ROWS: usize = 128;
/// CUBLASLT_REDUCTION_SCHEME_NONE
const NO_REDUCTION: u32 = 0;
/// CUBLAS_OP_T
const TRANSPOSED: i32 = 1;
/// What cuBLASLt's Hopper kernels ask for at the most, by its manual.
pub(crate) const WORKSPACE_BYTES: usize = 32 << 20;

#[cfg(test)]
mod tests {
    use super::most_common;

    #[test]
    fn the_first_of_the_most_common_kind_is_taken() {
        assert_eq!(most_common(&[]), None);
        assert_eq!(most_common(&[41, 66, 66, 16]), Some(1));
        assert_eq!(most_common(&[66, 41, 41, 66]), Some(0));
        assert_eq!(most_common(&[7]), Some(0));
    }
}
