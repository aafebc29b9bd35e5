//! Tables of the vendor's functions, bound to libraries that were found at run time.
//!
//! Types come from cudarc's bindings; its own loader is not used, because it panics where a library or a
//! function is missing. Every call is counted by name: the counts show what a step asks of the driver.

#![allow(non_snake_case, clippy::too_many_arguments, reason = "the vendor's names and signatures")]

use crate::error::CudaError;
use crate::library::{Kind, Opened, Search};
use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys as cu;
use cudarc::nvrtc::sys as rtc;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! table {
    (
        $(#[$doc:meta])* $name:ident, $kind:expr, $calls:ident;
        $( fn $f:ident($($a:ident: $t:ty),* $(,)?) -> $r:ty; )*
    ) => {
        $(#[$doc])*
        pub struct $name {
            $( $f: unsafe extern "C" fn($($t),*) -> $r, )*
            counts: Vec<AtomicU64>, // one for each function
            library: Opened,
        }

        #[allow(non_camel_case_types, clippy::enum_variant_names, reason = "the vendor's names")]
        enum $calls { $( $f, )* }

        impl $name {
            /// What must be in the library.
            pub const NAMES: &[&str] = &[$( stringify!($f) ),*];

            /// Finds the library and all functions in it.
            pub fn load(search: &Search) -> Result<Self, CudaError> {
                let library = Opened::find($kind, search)?;
                Ok(Self {
                    // SAFETY: the types are those of the vendor's headers, as cudarc has them.
                    $( $f: unsafe { library.function(stringify!($f)) }?, )*
                    counts: Self::NAMES.iter().map(|_| AtomicU64::new(0)).collect(),
                    library,
                })
            }

            /// The file that was found.
            pub fn path(&self) -> &str {
                self.library.path()
            }

            /// Every function with the number of its calls so far.
            pub fn counts(&self) -> Vec<(&'static str, u64)> {
                let counts = self.counts.iter().map(|n| n.load(Ordering::Relaxed));
                Self::NAMES.iter().copied().zip(counts).collect()
            }

            $(
                /// # Safety
                /// As the vendor's manual says.
                pub(crate) unsafe fn $f(&self, $($a: $t),*) -> $r {
                    self.counts[$calls::$f as usize].fetch_add(1, Ordering::Relaxed);
                    // SAFETY: the caller's.
                    unsafe { (self.$f)($($a),*) }
                }
            )*
        }
    };
}

// What waits without a bound has no place here: `cuStreamSynchronize`, `cuEventSynchronize`. See `wait.rs`.
table! {
    /// The driver.
    Driver, Kind::Driver, DriverCalls;
    fn cuInit(flags: c_uint) -> cu::CUresult;
    fn cuGetErrorName(error: cu::CUresult, text: *mut *const c_char) -> cu::CUresult;
    fn cuGetErrorString(error: cu::CUresult, text: *mut *const c_char) -> cu::CUresult;
    fn cuDeviceGetCount(count: *mut c_int) -> cu::CUresult;
    fn cuDeviceGet(device: *mut cu::CUdevice, ordinal: c_int) -> cu::CUresult;
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: cu::CUdevice) -> cu::CUresult;
    fn cuDeviceGetAttribute(
        value: *mut c_int, attribute: cu::CUdevice_attribute, device: cu::CUdevice,
    ) -> cu::CUresult;
    fn cuDevicePrimaryCtxRetain(context: *mut cu::CUcontext, device: cu::CUdevice) -> cu::CUresult;
    fn cuDevicePrimaryCtxRelease_v2(device: cu::CUdevice) -> cu::CUresult;
    fn cuCtxSetCurrent(context: cu::CUcontext) -> cu::CUresult;
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: cu::CUdevice, peer: cu::CUdevice) -> cu::CUresult;
    fn cuCtxEnablePeerAccess(peer: cu::CUcontext, flags: c_uint) -> cu::CUresult;
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> cu::CUresult;
    fn cuMemAlloc_v2(address: *mut cu::CUdeviceptr, bytes: usize) -> cu::CUresult;
    fn cuMemFree_v2(address: cu::CUdeviceptr) -> cu::CUresult;
    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint) -> cu::CUresult;
    fn cuMemFreeHost(address: *mut c_void) -> cu::CUresult;
    fn cuMemHostGetDevicePointer_v2(
        address: *mut cu::CUdeviceptr, start: *mut c_void, flags: c_uint,
    ) -> cu::CUresult;
    fn cuMemcpyHtoDAsync_v2(
        to: cu::CUdeviceptr, from: *const c_void, bytes: usize, stream: cu::CUstream,
    ) -> cu::CUresult;
    fn cuMemcpyDtoHAsync_v2(
        to: *mut c_void, from: cu::CUdeviceptr, bytes: usize, stream: cu::CUstream,
    ) -> cu::CUresult;
    fn cuMemcpyDtoDAsync_v2(
        to: cu::CUdeviceptr, from: cu::CUdeviceptr, bytes: usize, stream: cu::CUstream,
    ) -> cu::CUresult;
    fn cuMemsetD8Async(to: cu::CUdeviceptr, value: u8, count: usize, stream: cu::CUstream) -> cu::CUresult;
    fn cuStreamCreate(stream: *mut cu::CUstream, flags: c_uint) -> cu::CUresult;
    fn cuStreamDestroy_v2(stream: cu::CUstream) -> cu::CUresult;
    fn cuStreamQuery(stream: cu::CUstream) -> cu::CUresult;
    fn cuStreamWaitEvent(stream: cu::CUstream, event: cu::CUevent, flags: c_uint) -> cu::CUresult;
    fn cuStreamBeginCapture_v2(stream: cu::CUstream, mode: cu::CUstreamCaptureMode) -> cu::CUresult;
    fn cuStreamEndCapture(stream: cu::CUstream, graph: *mut cu::CUgraph) -> cu::CUresult;
    fn cuEventCreate(event: *mut cu::CUevent, flags: c_uint) -> cu::CUresult;
    fn cuEventDestroy_v2(event: cu::CUevent) -> cu::CUresult;
    fn cuEventRecord(event: cu::CUevent, stream: cu::CUstream) -> cu::CUresult;
    fn cuEventQuery(event: cu::CUevent) -> cu::CUresult;
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: cu::CUevent, end: cu::CUevent) -> cu::CUresult;
    fn cuModuleLoadData(module: *mut cu::CUmodule, image: *const c_void) -> cu::CUresult;
    fn cuModuleUnload(module: cu::CUmodule) -> cu::CUresult;
    fn cuModuleGetFunction(
        function: *mut cu::CUfunction, module: cu::CUmodule, name: *const c_char,
    ) -> cu::CUresult;
    fn cuFuncSetAttribute(
        function: cu::CUfunction, attribute: cu::CUfunction_attribute, value: c_int,
    ) -> cu::CUresult;
    fn cuFuncGetAttribute(
        value: *mut c_int, attribute: cu::CUfunction_attribute, function: cu::CUfunction,
    ) -> cu::CUresult;
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int, function: cu::CUfunction, threads: c_int, shared: usize,
    ) -> cu::CUresult;
    fn cuLaunchKernelEx(
        config: *const cu::CUlaunchConfig, function: cu::CUfunction, arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> cu::CUresult;
    fn cuGraphInstantiateWithFlags(
        exec: *mut cu::CUgraphExec, graph: cu::CUgraph, flags: u64,
    ) -> cu::CUresult;
    fn cuGraphExecDestroy(exec: cu::CUgraphExec) -> cu::CUresult;
    fn cuGraphDestroy(graph: cu::CUgraph) -> cu::CUresult;
    fn cuGraphLaunch(exec: cu::CUgraphExec, stream: cu::CUstream) -> cu::CUresult;
    fn cuGraphUpload(exec: cu::CUgraphExec, stream: cu::CUstream) -> cu::CUresult;
    fn cuGraphGetNodes(graph: cu::CUgraph, nodes: *mut cu::CUgraphNode, count: *mut usize) -> cu::CUresult;
    fn cuTensorMapEncodeTiled(
        map: *mut cu::CUtensorMap, element: cu::CUtensorMapDataType, rank: u32, address: *mut c_void,
        sizes: *const u64, strides: *const u64, tile: *const u32, steps: *const u32,
        interleave: cu::CUtensorMapInterleave, swizzle: cu::CUtensorMapSwizzle,
        promotion: cu::CUtensorMapL2promotion, fill: cu::CUtensorMapFloatOOBfill,
    ) -> cu::CUresult;
}

table! {
    /// The compiler.
    Nvrtc, Kind::Nvrtc, NvrtcCalls;
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> rtc::nvrtcResult;
    fn nvrtcGetErrorString(result: rtc::nvrtcResult) -> *const c_char;
    fn nvrtcCreateProgram(
        program: *mut rtc::nvrtcProgram, source: *const c_char, name: *const c_char, headers: c_int,
        texts: *const *const c_char, names: *const *const c_char,
    ) -> rtc::nvrtcResult;
    fn nvrtcDestroyProgram(program: *mut rtc::nvrtcProgram) -> rtc::nvrtcResult;
    fn nvrtcCompileProgram(
        program: rtc::nvrtcProgram, count: c_int, options: *const *const c_char,
    ) -> rtc::nvrtcResult;
    fn nvrtcGetCUBINSize(program: rtc::nvrtcProgram, size: *mut usize) -> rtc::nvrtcResult;
    fn nvrtcGetCUBIN(program: rtc::nvrtcProgram, cubin: *mut c_char) -> rtc::nvrtcResult;
    fn nvrtcGetProgramLogSize(program: rtc::nvrtcProgram, size: *mut usize) -> rtc::nvrtcResult;
    fn nvrtcGetProgramLog(program: rtc::nvrtcProgram, log: *mut c_char) -> rtc::nvrtcResult;
}

table! {
    /// Matrix products.
    CublasLt, Kind::CublasLt, CublasLtCalls;
    fn cublasLtGetStatusString(status: lt::cublasStatus_t) -> *const c_char;
    fn cublasLtGetVersion() -> usize;
    fn cublasLtCreate(handle: *mut lt::cublasLtHandle_t) -> lt::cublasStatus_t;
    fn cublasLtDestroy(handle: lt::cublasLtHandle_t) -> lt::cublasStatus_t;
    fn cublasLtMatmulDescCreate(
        desc: *mut lt::cublasLtMatmulDesc_t, compute: lt::cublasComputeType_t, scale: lt::cudaDataType_t,
    ) -> lt::cublasStatus_t;
    fn cublasLtMatmulDescDestroy(desc: lt::cublasLtMatmulDesc_t) -> lt::cublasStatus_t;
    fn cublasLtMatmulDescSetAttribute(
        desc: lt::cublasLtMatmulDesc_t, attribute: lt::cublasLtMatmulDescAttributes_t,
        value: *const c_void, bytes: usize,
    ) -> lt::cublasStatus_t;
    fn cublasLtMatrixLayoutCreate(
        layout: *mut lt::cublasLtMatrixLayout_t, element: lt::cudaDataType, rows: u64, cols: u64,
        stride: i64,
    ) -> lt::cublasStatus_t;
    fn cublasLtMatrixLayoutDestroy(layout: lt::cublasLtMatrixLayout_t) -> lt::cublasStatus_t;
    fn cublasLtMatmulPreferenceCreate(preference: *mut lt::cublasLtMatmulPreference_t) -> lt::cublasStatus_t;
    fn cublasLtMatmulPreferenceDestroy(preference: lt::cublasLtMatmulPreference_t) -> lt::cublasStatus_t;
    fn cublasLtMatmulPreferenceSetAttribute(
        preference: lt::cublasLtMatmulPreference_t, attribute: lt::cublasLtMatmulPreferenceAttributes_t,
        value: *const c_void, bytes: usize,
    ) -> lt::cublasStatus_t;
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: lt::cublasLtHandle_t, desc: lt::cublasLtMatmulDesc_t, a: lt::cublasLtMatrixLayout_t,
        b: lt::cublasLtMatrixLayout_t, c: lt::cublasLtMatrixLayout_t, d: lt::cublasLtMatrixLayout_t,
        preference: lt::cublasLtMatmulPreference_t, asked: c_int,
        found: *mut lt::cublasLtMatmulHeuristicResult_t, count: *mut c_int,
    ) -> lt::cublasStatus_t;
    fn cublasLtMatmulAlgoConfigGetAttribute(
        algorithm: *const lt::cublasLtMatmulAlgo_t, attribute: lt::cublasLtMatmulAlgoConfigAttributes_t,
        value: *mut c_void, bytes: usize, written: *mut usize,
    ) -> lt::cublasStatus_t;
    fn cublasLtMatmulAlgoCheck(
        handle: lt::cublasLtHandle_t, desc: lt::cublasLtMatmulDesc_t, a: lt::cublasLtMatrixLayout_t,
        b: lt::cublasLtMatrixLayout_t, c: lt::cublasLtMatrixLayout_t, d: lt::cublasLtMatrixLayout_t,
        algorithm: *const lt::cublasLtMatmulAlgo_t, found: *mut lt::cublasLtMatmulHeuristicResult_t,
    ) -> lt::cublasStatus_t;
    fn cublasLtMatmul(
        handle: lt::cublasLtHandle_t, desc: lt::cublasLtMatmulDesc_t, alpha: *const c_void,
        a: *const c_void, a_layout: lt::cublasLtMatrixLayout_t, b: *const c_void,
        b_layout: lt::cublasLtMatrixLayout_t, beta: *const c_void, c: *const c_void,
        c_layout: lt::cublasLtMatrixLayout_t, d: *mut c_void, d_layout: lt::cublasLtMatrixLayout_t,
        algorithm: *const lt::cublasLtMatmulAlgo_t, workspace: *mut c_void, workspace_bytes: usize,
        stream: lt::cudaStream_t,
    ) -> lt::cublasStatus_t;
}

impl Driver {
    /// Turns a result into an error that names the call.
    pub(crate) fn check(&self, call: &'static str, result: cu::CUresult) -> Result<(), CudaError> {
        if result == cu::CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
        // SAFETY: both places live for the calls; the driver writes pointers to its own constants, or null.
        unsafe {
            let _ = self.cuGetErrorName(result, &raw mut name);
            let _ = self.cuGetErrorString(result, &raw mut text);
        }
        // SAFETY: null, or a constant of the driver.
        let (name, text) = unsafe { (own(name), own(text)) };
        Err(CudaError::Driver { call, code: result as u32, name, text })
    }

    /// The answer of a query: whether all is done.
    pub(crate) fn is_ready(&self, call: &'static str, result: cu::CUresult) -> Result<bool, CudaError> {
        if result == cu::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        self.check(call, result).map(|()| true)
    }
}

impl Nvrtc {
    pub(crate) fn check(&self, call: &'static str, result: rtc::nvrtcResult) -> Result<(), CudaError> {
        if result == rtc::nvrtcResult::NVRTC_SUCCESS {
            return Ok(());
        }
        // SAFETY: the library returns a constant of its own.
        let text = unsafe { own(self.nvrtcGetErrorString(result)) };
        Err(CudaError::Library { call, code: result as u32, text })
    }
}

impl CublasLt {
    pub(crate) fn check(&self, call: &'static str, status: lt::cublasStatus_t) -> Result<(), CudaError> {
        if status == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
            return Ok(());
        }
        // SAFETY: the library returns a constant of its own.
        let text = unsafe { own(self.cublasLtGetStatusString(status)) };
        Err(CudaError::Library { call, code: status as u32, text })
    }
}

/// # Safety
/// Null, or a C string that lives for the call.
unsafe fn own(text: *const c_char) -> String {
    if text.is_null() {
        return "no explanation".into();
    }
    // SAFETY: the caller's.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
