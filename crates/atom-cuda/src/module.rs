//! Compiled kernels on a GPU, and their launch.

use crate::device::{Device, Stream};
use crate::error::CudaError;
use crate::memory::Address;
use cudarc::driver::sys as cu;
use cudarc::driver::sys::CUfunction_attribute as Attribute;
use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

/// A cubin, loaded.
#[derive(Clone)]
pub struct Module {
    inner: Arc<Loaded>,
}

struct Loaded {
    device: Device,
    handle: cu::CUmodule,
    name: String,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above; nothing of it changes.
unsafe impl Sync for Loaded {}

/// A function of a module.
#[derive(Clone)]
pub struct Kernel {
    module: Module,
    handle: cu::CUfunction,
    name: String,
}

// SAFETY: as for `Loaded`.
unsafe impl Send for Kernel {}
// SAFETY: as for `Loaded`.
unsafe impl Sync for Kernel {}

/// How a kernel is started.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Blocks of a cluster; 1 is none.
    pub cluster: u32,
    /// May start while the kernel before it ends. The kernel then waits itself (`griddepcontrol.wait`) before it
    /// reads what that one wrote.
    pub overlaps: bool,
}

impl Launch {
    /// `blocks` in one dimension.
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], threads, shared: 0, cluster: 1, overlaps: false }
    }

    /// Blocks in the other dimensions.
    #[must_use]
    pub fn by(mut self, y: u32, z: u32) -> Self {
        (self.grid[1], self.grid[2]) = (y, z);
        self
    }

    /// Dynamic shared memory.
    #[must_use]
    pub fn shared(mut self, bytes: u32) -> Self {
        self.shared = bytes;
        self
    }

    /// Blocks that run together and see each other's shared memory.
    #[must_use]
    pub fn cluster(mut self, blocks: u32) -> Self {
        self.cluster = blocks;
        self
    }

    /// See [`Launch::overlaps`].
    #[must_use]
    pub fn overlapping(mut self) -> Self {
        self.overlaps = true;
        self
    }
}

/// An argument of a kernel. Its type must be the parameter's.
#[derive(Clone, Copy)]
pub enum Arg<'a> {
    /// Any pointer.
    Address(Address),
    /// `int`
    Int(i32),
    /// `u32`
    Uint(u32),
    /// `u64`
    Long(u64),
    /// `float`
    Float(f32),
    /// A struct by value, of these bytes.
    Bytes(&'a [u8]),
    /// `const __grid_constant__ TensorMap`
    Map(&'a TensorMap),
}

/// A description of a tile of an array, for the copy engine of compute capability 9.0 and later.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct TensorMap(cu::CUtensorMap);

/// What [`TensorMap::new`] is made from.
#[derive(Clone, Copy, Debug)]
pub struct Tiling<'a> {
    /// First element.
    pub address: Address,
    /// Type of the elements.
    pub element: cu::CUtensorMapDataType,
    /// Elements in each dimension, the contiguous one first.
    pub sizes: &'a [u64],
    /// Bytes from one index to the next, of each dimension but the first.
    pub strides: &'a [u64],
    /// Elements of a tile in each dimension.
    pub tile: &'a [u32],
    /// How 16-byte pieces are spread over the banks.
    pub swizzle: cu::CUtensorMapSwizzle,
}

impl TensorMap {
    /// Elements outside of the array read as 0.
    pub fn new(device: &Device, tiling: &Tiling<'_>) -> Result<Self, CudaError> {
        let rank = tiling.sizes.len();
        assert!(rank >= 1 && tiling.strides.len() == rank - 1 && tiling.tile.len() == rank, "{tiling:?}");
        let mut map = cu::CUtensorMap { opaque: [0; 16] };
        let steps = [1_u32; 5];
        // SAFETY: all arrays have `rank` elements (strides one less), and live for the call.
        let result = unsafe {
            device.driver().cuTensorMapEncodeTiled(
                &raw mut map,
                tiling.element,
                rank as u32,
                tiling.address.0 as *mut c_void,
                tiling.sizes.as_ptr(),
                tiling.strides.as_ptr(),
                tiling.tile.as_ptr(),
                steps.as_ptr(),
                cu::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                tiling.swizzle,
                cu::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                cu::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        device.driver().check("cuTensorMapEncodeTiled", result)?;
        Ok(Self(map))
    }
}

impl Module {
    /// Loads a cubin. `name` is for messages.
    pub fn load(device: &Device, name: &str, cubin: &[u8]) -> Result<Self, CudaError> {
        // The driver reads the image's own headers and wants them aligned.
        let mut image = vec![0_u64; cubin.len().div_ceil(8)];
        for (word, bytes) in image.iter_mut().zip(cubin.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: the image is a whole cubin and lives for the call.
        let result = unsafe { device.driver().cuModuleLoadData(&raw mut handle, image.as_ptr().cast()) };
        device.driver().check("cuModuleLoadData", result)?;
        Ok(Self { inner: Arc::new(Loaded { device: device.clone(), handle, name: name.to_owned() }) })
    }

    /// A function by its name. It may have as much dynamic shared memory as the GPU allows.
    pub fn kernel(&self, name: &str) -> Result<Kernel, CudaError> {
        let driver = self.inner.device.driver();
        let symbol = CString::new(name).expect("names of kernels have no 0");
        let mut handle = std::ptr::null_mut();
        // SAFETY: module, name and place are alive.
        let result =
            unsafe { driver.cuModuleGetFunction(&raw mut handle, self.inner.handle, symbol.as_ptr()) };
        driver.check("cuModuleGetFunction", result).map_err(|error| {
            CudaError::Unsupported(format!("no kernel {name} in {}: {error}", self.inner.name))
        })?;
        let kernel = Kernel { module: self.clone(), handle, name: name.to_owned() };
        let most = self.inner.device.properties().shared_bytes_max;
        let fixed = kernel.attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        let free = most.saturating_sub(fixed) as c_int;
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is alive.
        let result = unsafe { driver.cuFuncSetAttribute(handle, attribute, free) };
        driver.check("cuFuncSetAttribute", result)?;
        Ok(kernel)
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: kernels hold the module, so none is left.
        self.device.release(|driver| unsafe { driver.cuModuleUnload(self.handle) });
    }
}

impl Kernel {
    /// Registers of a thread.
    pub fn registers(&self) -> Result<u32, CudaError> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)
    }

    /// Blocks that one multiprocessor holds at a time.
    pub fn occupancy(&self, launch: &Launch) -> Result<u32, CudaError> {
        let (driver, mut blocks) = (self.module.inner.device.driver(), 0);
        // SAFETY: the place lives for the call, the function is alive.
        let result = unsafe {
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                self.handle,
                launch.threads as c_int,
                launch.shared as usize,
            )
        };
        driver.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", result)?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    /// Queues the kernel. A grid without blocks is nothing to do.
    ///
    /// # Safety
    /// Arguments must be those of the kernel in number, order and type, and what they point at must be alive
    /// and large enough until the stream has passed the kernel (for a captured one: each replay).
    pub unsafe fn launch(&self, stream: &Stream, launch: Launch, args: &[Arg<'_>]) -> Result<(), CudaError> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        assert!(args.len() <= ARGUMENTS_MAX, "{} arguments of {}", args.len(), self.name);
        let mut places = [std::ptr::null_mut::<c_void>(); ARGUMENTS_MAX];
        for (place, arg) in places.iter_mut().zip(args) {
            *place = match arg {
                Arg::Address(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::Int(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::Uint(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::Long(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::Float(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::Bytes(value) => value.as_ptr().cast_mut().cast(),
                Arg::Map(value) => std::ptr::from_ref(*value).cast_mut().cast(),
            };
        }
        let mut attributes = [attribute_none(), attribute_none()];
        let mut count = 0;
        if launch.overlaps {
            attributes[count].id =
                cu::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        if launch.cluster > 1 {
            attributes[count].id = cu::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.clusterDim =
                cu::CUlaunchAttributeValue_union__bindgen_ty_1 { x: launch.cluster, y: 1, z: 1 };
            count += 1;
        }
        let config = cu::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared,
            hStream: stream.handle(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        let driver = self.module.inner.device.driver();
        // SAFETY: the configuration and the values live for the call, which copies them; the rest is the caller's.
        let result = unsafe {
            driver.cuLaunchKernelEx(&raw const config, self.handle, places.as_mut_ptr(), std::ptr::null_mut())
        };
        driver.check("cuLaunchKernelEx", result).map_err(|error| match error {
            CudaError::Driver { call, code, name, text } => {
                let text = format!("{text} (kernel {} with {launch:?})", self.name);
                CudaError::Driver { call, code, name, text }
            }
            other => other,
        })
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32, CudaError> {
        let (driver, mut value) = (self.module.inner.device.driver(), 0);
        // SAFETY: the place lives for the call, the function is alive.
        let result = unsafe { driver.cuFuncGetAttribute(&raw mut value, attribute, self.handle) };
        driver.check("cuFuncGetAttribute", result)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }
}

fn attribute_none() -> cu::CUlaunchAttribute {
    cu::CUlaunchAttribute {
        id: cu::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE,
        pad: [0; 4],
        value: cu::CUlaunchAttributeValue { pad: [0; 64] },
    }
}

/// Parameters of the longest list in `kernels/`, with room.
const ARGUMENTS_MAX: usize = 32;

macro_rules! args {
    ($($from:ty => $to:ident),*) => { $(
        impl From<$from> for Arg<'_> {
            fn from(value: $from) -> Self {
                Self::$to(value)
            }
        }
    )* };
}

args!(Address => Address, i32 => Int, u32 => Uint, u64 => Long, f32 => Float);

impl<'a> From<&'a TensorMap> for Arg<'a> {
    fn from(map: &'a TensorMap) -> Self {
        Self::Map(map)
    }
}
