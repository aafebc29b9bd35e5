//! A recorded piece of a stream, launched as one.

use crate::device::Stream;
use crate::error::CudaError;
use cudarc::driver::sys as cu;

/// Work that was captured and can be launched any number of times.
pub struct Graph {
    device: crate::device::Device,
    exec: cu::CUgraphExec,
    nodes: usize,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures what `work` queues on the stream; nothing of it runs.
    pub fn capture<E: From<CudaError>>(
        stream: &Stream,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let driver = stream.device().driver();
        // Other threads may allocate meanwhile; only calls of this thread matter.
        let mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and nothing is being captured.
        let result = unsafe { driver.cuStreamBeginCapture_v2(stream.handle(), mode) };
        driver.check("cuStreamBeginCapture", result)?;
        let outcome = work();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the capture began above, and ends here whatever became of it.
        let result = unsafe { driver.cuStreamEndCapture(stream.handle(), &raw mut graph) };
        if let Err(error) = outcome {
            destroy(stream, graph);
            return Err(error);
        }
        driver.check("cuStreamEndCapture", result)?;
        let instantiated = Self::instantiate(stream, graph);
        destroy(stream, graph);
        Ok(instantiated?)
    }

    fn instantiate(stream: &Stream, graph: cu::CUgraph) -> Result<Self, CudaError> {
        let driver = stream.device().driver();
        let (mut exec, mut nodes) = (std::ptr::null_mut(), 0);
        // SAFETY: the graph is alive; a null list asks for the count only.
        unsafe {
            let result = driver.cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut nodes);
            driver.check("cuGraphGetNodes", result)?;
            let result = driver.cuGraphInstantiateWithFlags(&raw mut exec, graph, 0);
            driver.check("cuGraphInstantiate", result)?;
        }
        let graph = Self { device: stream.device().clone(), exec, nodes };
        // SAFETY: both are alive. What the first launch would have to bring to the GPU goes there now.
        driver.check("cuGraphUpload", unsafe { driver.cuGraphUpload(graph.exec, stream.handle()) })?;
        Ok(graph)
    }

    /// Kernels and copies in it.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Queues all of it.
    pub fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        let driver = self.device.driver();
        // SAFETY: both are alive.
        driver.check("cuGraphLaunch", unsafe { driver.cuGraphLaunch(self.exec, stream.handle()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle; the driver waits for a launch that runs.
        self.device.release(|driver| unsafe { driver.cuGraphExecDestroy(self.exec) });
    }
}

fn destroy(stream: &Stream, graph: cu::CUgraph) {
    if !graph.is_null() {
        // SAFETY: nobody else has the handle.
        let _ = unsafe { stream.device().driver().cuGraphDestroy(graph) };
    }
}
