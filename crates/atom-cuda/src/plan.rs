//! How much device memory a rank takes, known to the byte before any of it is taken.

use crate::buffers::Places;
use crate::device::Properties;
use crate::element::{Element, KvElement};
use crate::error::CudaError;
use crate::fp8;
use crate::fuse::{Fused, Step, fuse};
use crate::launch::attend::{AttendHeads, AttendKernels};
use crate::launch::attend_few::AttendFew;
use crate::launch::experts::{Experts, ExpertsShape};
use crate::launch::linear_rows;
use crate::launch::rope::head_dim_max;
use crate::launch::sample::{SampleMemory, VOCAB_MAX};
use crate::layout::{Layout, Limits};
use crate::memory::Address;
use crate::order::SumOrder;
use crate::peers::{COMMS, Members, index};
use crate::record::exchange;
use crate::sample_rows::{BIAS_BYTES, BIAS_LOAD_BYTES, RESULT_BYTES, ROW_BYTES, SEEN_LOAD_BYTES};
use crate::weights::Shelf;
use crate::window::Window;
use crate::work::WorkSpec;
use atom_base::limits::LOGIT_BIAS_MAX;
use atom_ops::{Comm, Extent, KvDType, LoadWeights, Op, OpsError, Recording, Reserve, Slice, Weight};
use atom_weights::Tensor;
use std::fmt;

/// Loads a model without a device: it only counts. Give it to `Model::load`, then the recordings of all buckets to
/// [`Self::size`].
pub struct Sizer {
    properties: Properties,
    order: SumOrder,
    shelf: Shelf,
    experts: usize,
    room: usize,
    quantised: usize,
    staging: usize,
    recordings: usize,
    counts: usize,
    members: Members,
    sets: [usize; COMMS],
}

/// Bytes of device memory by purpose, all but the cache's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Type of activations and matrices.
    pub element: Element,
    /// Of all sums.
    pub order: SumOrder,
    /// Weights, one block.
    pub weights: usize,
    /// Buffers of the largest recording.
    pub room: usize,
    /// Inputs of a product as FP8 codes with scales, and sums that are still to be scaled; or sums of squares of a shared norm.
    pub quantised: usize,
    /// What a step uploads.
    pub staging: usize,
    /// What a step brings back.
    pub results: usize,
    /// Page tables of all slots.
    pub tables: usize,
    /// What sampling keeps of each slot, and its scratch.
    pub sampling: usize,
    /// Loads of slots, on their way.
    pub loads: usize,
    /// Scratch of attention.
    pub attention: usize,
    /// Scratch of experts.
    pub experts: usize,
    /// Where different experts are counted, if they are.
    pub counts: usize,
    /// What others bring to collectives: a set of each communicator's window.
    pub sets: [usize; 2],
    /// Windows with that.
    pub windows: usize,
    /// cuBLASLt's.
    pub workspace: usize,
    /// Kept free for what the driver takes by itself: code of the libraries, and the recordings' nodes.
    pub driver: usize,
    /// One page of the cache in all layers.
    pub page: usize,
}

/// Sizes with a number of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// All but the pages.
    pub sizes: Sizes,
    /// Pages of the cache, the Sink included.
    pub pages: usize,
}

impl Sizer {
    /// For a model in `element` on such a GPU.
    pub fn new(element: Element, properties: &Properties) -> Self {
        let (properties, order) = (properties.clone(), SumOrder::default());
        let shelf = Shelf::new(element, fp8::stays(element, order, &properties));
        let (experts, room, quantised, staging, recordings, counts) = (0, 0, 0, 0, 0, 0);
        let (members, sets) = (Members::ALONE, [0; COMMS]);
        Self {
            properties,
            order,
            shelf,
            experts,
            room,
            quantised,
            staging,
            recordings,
            counts,
            members,
            sets,
        }
    }

    /// With sums in this order. Before anything is loaded: it decides what FP8 weights become.
    pub fn with_order(self, order: SumOrder) -> Self {
        assert_eq!(self.shelf.used(), 0, "weights were loaded before the order was known");
        let element = self.shelf.element();
        let shelf = Shelf::new(element, fp8::stays(element, order, &self.properties));
        Self { order, shelf, ..self }
    }

    /// Of a rank that meets so many.
    pub fn meeting(self, members: Members) -> Self {
        Self { members, ..self }
    }

    /// Takes a recording into account; `reserve` is what [`Backend::reserve`] will get (its pages don't matter).
    ///
    /// # Errors
    /// The model has a size that no kernel takes: [`CudaError::Unsupported`] with the numbers.
    pub fn add(&mut self, recording: &Recording, reserve: &Reserve) -> Result<(), CudaError> {
        check_kv(reserve.kv_dtype, self.shelf.element())?;
        check_model(reserve)?;
        let codes = |weight| self.shelf.codes(weight);
        let few = attend_few(reserve, &self.properties, self.shelf.element(), self.order);
        let steps = fuse(recording, self.shelf.element(), self.order, codes, &self.properties, few.as_ref());
        let quantised = steps.iter().filter_map(|step| match step {
            Step::Fp8(fused) => Some(fused.product.scratch_bytes()),
            Step::Product(Fused { next: Some(_), product, .. }) => {
                Some(linear_rows::squares_bytes(product.rows, product.outputs))
            }
            Step::Op(_) | Step::Norm { .. } | Step::Product(_) => None,
            Step::Attend(_) | Step::Router(_) | Step::Experts(_) => None,
        });
        self.quantised = self.quantised.max(quantised.max().unwrap_or(0));
        self.room = self.room.max(Places::new(recording, &steps, self.shelf.element()).bytes);
        let limits = limits(reserve, &self.properties, self.shelf.element(), self.order);
        self.staging = self.staging.max(Layout::new(&recording.shape(), &limits).end);
        let shape = |op| experts_shape(recording, op, self.shelf.element(), codes);
        let experts = recording.ops().iter().filter_map(shape);
        let bytes = experts
            .map(|shape| Experts::in_order(shape, self.order, &self.properties).workspace_bytes())
            .max();
        self.experts = self.experts.max(bytes.unwrap_or(0));
        for (comm, bytes) in exchange::set_bytes(recording, self.members, self.shelf.element()) {
            let set = &mut self.sets[index(comm)];
            *set = (*set).max(bytes);
        }
        self.recordings += recording.ops().len();
        if recording.counts_experts() {
            // A second graph.
            self.recordings += recording.ops().len();
            self.counts = COUNTS_BYTES;
        }
        Ok(())
    }

    /// What it comes to.
    pub fn sizes(&self, reserve: &Reserve) -> Sizes {
        let out_rows = reserve.top.out_rows;
        let element = self.shelf.element();
        let attention = &reserve.attention;
        let head = attention.kv_heads * attention.head_dim;
        let window = |comm| match self.members.of(comm) {
            1 => 0,
            members => Window::bytes(members, self.sets[index(comm)]),
        };
        Sizes {
            element,
            order: self.order,
            weights: self.shelf.used(),
            room: self.room,
            quantised: self.quantised,
            staging: self.staging,
            results: out_rows * RESULT_BYTES,
            tables: 4 * reserve.slots * reserve.pages_per_sequence,
            sampling: if reserve.samples { sample_memory(reserve).bytes() } else { 0 } + 4 * reserve.slots,
            loads: LOADS_ROOM + load_items_bytes(reserve),
            attention: attention_bytes(reserve, &self.properties, element, self.order),
            experts: self.experts,
            counts: self.counts,
            sets: self.sets,
            windows: window(Comm::Lane) + window(Comm::Group),
            workspace: crate::blas::WORKSPACE_BYTES,
            driver: DRIVER_BYTES + self.recordings * NODE_BYTES,
            page: 2
                * reserve.layers
                * head
                * KvElement::from(reserve.kv_dtype).bytes(element)
                * reserve.page_size,
        }
    }
}

impl Sizes {
    /// Bytes that do not depend on the number of pages.
    pub fn fixed(&self) -> usize {
        self.parts().map(rounded).iter().sum::<usize>() + rounded(self.driver)
    }

    /// All but what the driver takes by itself.
    fn parts(&self) -> [usize; 13] {
        let Self { weights, room, staging, results, tables, sampling, .. } = *self;
        let Self { loads, attention, experts, counts, windows, workspace, quantised, .. } = *self;
        [
            weights, room, staging, results, tables, sampling, loads, attention, experts, counts, windows,
            workspace, quantised,
        ]
    }

    /// As many pages as fit into `budget` bytes; fewer than 2 are an error with the numbers.
    pub fn pages_within(&self, budget: u64) -> Result<usize, CudaError> {
        let left = budget.saturating_sub(self.fixed() as u64);
        let pages = (left / self.page as u64) as usize;
        if pages < 2 {
            let needed = self.fixed() + 2 * self.page;
            return Err(CudaError::Memory(format!(
                "the model needs {} of GPU memory and may have {}: {}. A larger --gpu-memory-utilization, or fewer \
                 --max-num-batched-tokens or --max-num-seqs, would help",
                mib(needed),
                mib(budget as usize),
                Plan { sizes: *self, pages: 2 }
            )));
        }
        Ok(pages)
    }
}

impl Plan {
    /// All of it.
    pub fn total(&self) -> usize {
        self.sizes.fixed() + rounded(self.pages * self.sizes.page)
    }

    /// What is asked of the driver. It hands it out in larger pieces, so as much or somewhat more is gone then.
    pub(crate) fn asked(&self) -> usize {
        self.sizes.parts().iter().sum::<usize>() + self.pages * self.sizes.page
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = &self.sizes;
        write!(
            f,
            "weights {}, {} pages of the KV cache {}, step buffers {}, sampling {}, staging and tables {}, workspace {}, \
             kept for the driver {}",
            mib(s.weights),
            self.pages,
            mib(self.pages * s.page),
            mib(s.room + s.quantised),
            mib(s.sampling + s.loads),
            mib(s.staging + s.results + s.tables),
            mib(s.workspace + s.attention + s.experts),
            mib(s.driver)
        )?;
        if s.windows > 0 {
            write!(f, ", from other ranks {}", mib(s.windows))?;
        }
        Ok(())
    }
}

impl LoadWeights for Sizer {
    fn load_matrix(&mut self, parts: &[Slice]) -> Result<Weight, OpsError> {
        self.shelf.matrix(parts).map(|(weight, _)| weight)
    }

    fn load_experts(&mut self, experts: &[Vec<Slice>]) -> Result<Weight, OpsError> {
        self.shelf.experts(experts).map(|(weight, _)| weight)
    }

    fn load_vector(&mut self, parts: &[Slice]) -> Result<Weight, OpsError> {
        self.shelf.vector(parts).map(|(weight, _)| weight)
    }

    fn load_table(&mut self, table: &Tensor) -> Result<Weight, OpsError> {
        self.shelf.table(table).map(|(weight, _)| weight)
    }
}

/// What a layout depends on besides the shape.
pub(crate) fn limits(
    reserve: &Reserve,
    properties: &Properties,
    element: Element,
    order: SumOrder,
) -> Limits {
    Limits {
        slots: reserve.slots,
        pages_per_sequence: reserve.pages_per_sequence,
        work: work(reserve, properties, element, order),
        sample_bytes: if reserve.samples { ROW_BYTES } else { 0 },
    }
}

/// Heads as the attention kernels get them.
pub(crate) fn attend_heads(reserve: &Reserve) -> AttendHeads {
    let spec = &reserve.attention;
    AttendHeads {
        q: spec.q_heads,
        kv: spec.kv_heads,
        head_dim: spec.head_dim,
        scale: spec.scale,
        window: 0,
        sinks: Address::NULL,
    }
}

pub(crate) fn attend_kernels(reserve: &Reserve, properties: &Properties, element: Element) -> AttendKernels {
    AttendKernels::new(properties, element, reserve.kv_dtype.into(), &attend_heads(reserve))
}

/// What work lists are made for; `None` where the plain kernel does everything.
pub(crate) fn work(
    reserve: &Reserve,
    properties: &Properties,
    element: Element,
    order: SumOrder,
) -> Option<WorkSpec> {
    attend_kernels(reserve, properties, element).work(0, order == SumOrder::Fixed)
}

/// The kernel for steps of few rows. Where all rows have one order of sums there is none, and a cache of another type than
/// bf16 is not for it.
pub(crate) fn attend_few(
    reserve: &Reserve,
    properties: &Properties,
    element: Element,
    order: SumOrder,
) -> Option<AttendFew> {
    if order == SumOrder::Fixed || reserve.kv_dtype != KvDType::BF16 {
        return None;
    }
    AttendFew::new(properties, element, &attend_heads(reserve), reserve.page_size)
}

/// Of the kernels for lists, then of the one for few rows.
fn attention_bytes(reserve: &Reserve, properties: &Properties, element: Element, order: SumOrder) -> usize {
    letters_offset(reserve, properties, element, order)
        + attend_few(reserve, properties, element, order).map_or(0, |few| few.letters_bytes())
}

/// Where the letters begin in the scratch of attention.
pub(crate) fn letters_offset(
    reserve: &Reserve,
    properties: &Properties,
    element: Element,
    order: SumOrder,
) -> usize {
    let kernels = attend_kernels(reserve, properties, element);
    let lists = work(reserve, properties, element, order).map_or(0, |work| kernels.scratch_bytes(work.slots));
    lists.next_multiple_of(LETTERS_ALIGN)
}

pub(crate) fn sample_memory(reserve: &Reserve) -> SampleMemory {
    SampleMemory::new(reserve.vocab, reserve.top.out_rows, reserve.slots)
}

/// The shape of an operator of experts, `None` for others. `codes` says which weights are FP8.
pub(crate) fn experts_shape(
    recording: &Recording,
    op: &Op,
    element: Element,
    codes: impl Fn(Weight) -> Option<fp8::Fp8Form>,
) -> Option<ExpertsShape> {
    let Op::Experts { x, gate_up, spec, .. } = op else { return None };
    let (shape, buffer) = (recording.shape(), recording.buffers()[usize::from(x.0)]);
    let lanes = if buffer.extent == Extent::GroupRows { shape.lanes } else { 1 };
    Some(ExpertsShape {
        lanes,
        lane_rows: shape.rows,
        top_k: spec.top_k,
        first: spec.first,
        held: spec.held,
        hidden: buffer.width,
        width: spec.width,
        element,
        fp8: codes(*gate_up),
    })
}

/// Vocabularies and heads that no kernel takes are refused before anything is taken.
pub(crate) fn check_model(reserve: &Reserve) -> Result<(), CudaError> {
    let (vocab, head_dim, dim) = (reserve.vocab, reserve.attention.head_dim, reserve.attention.rotary.dim);
    if reserve.samples && !(1..=VOCAB_MAX).contains(&vocab) {
        return Err(CudaError::Unsupported(format!(
            "a vocabulary of {vocab} tokens is not built for GPUs, where sampling takes up to {VOCAB_MAX}; use --device cpu"
        )));
    }
    if dim > head_dim || !dim.is_multiple_of(2) || !head_dim.is_multiple_of(2) {
        return Err(CudaError::Unsupported(format!(
            "heads of {head_dim} elements of which {dim} rotate: both must be even, and the second not above the first"
        )));
    }
    let most = head_dim_max(head_dim, dim);
    if head_dim > most {
        return Err(CudaError::Unsupported(format!(
            "heads of {head_dim} elements of which {dim} rotate are not built for GPUs, where {most} are the most for \
             these sizes (512 if those that rotate and those that don't are multiples of 16, else 256); use --device cpu"
        )));
    }
    Ok(())
}

/// The type of the cache's elements is that of activations, or e4m3.
pub(crate) fn check_kv(kv: KvDType, element: Element) -> Result<(), CudaError> {
    match (kv, element) {
        (KvDType::BF16, Element::BF16) | (KvDType::F32, Element::F32) | (KvDType::E4M3, _) => Ok(()),
        _ => Err(CudaError::Unsupported(format!(
            "a KV cache of {kv:?} beside activations of {element:?} is not built yet on a GPU; leave --kv-cache-dtype \
             at auto, or make it fp8"
        ))),
    }
}

/// Tokens or biases that one load may bring at a time: a whole context, and the biases of all rows.
pub(crate) fn load_items_bytes(reserve: &Reserve) -> usize {
    let tokens = 4 * reserve.pages_per_sequence * reserve.page_size;
    tokens.max(reserve.top.out_rows * LOGIT_BIAS_MAX * BIAS_BYTES)
}

fn rounded(bytes: usize) -> usize {
    bytes.next_multiple_of(GRANULE)
}

fn mib(bytes: usize) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

/// A line of the cache.
const LETTERS_ALIGN: usize = 128;
/// One number, 8 bytes.
pub(crate) const COUNTS_BYTES: usize = 8;
/// What the driver hands out memory in.
const GRANULE: usize = 2 << 20;
/// Records of as many loads as one launch takes, and their count in front.
pub(crate) const LOADS_MAX: usize = 64;
pub(crate) const LOADS_ROOM: usize =
    256 + LOADS_MAX * if SEEN_LOAD_BYTES > BIAS_LOAD_BYTES { SEEN_LOAD_BYTES } else { BIAS_LOAD_BYTES };
/// Code, cuBLASLt's as it is chosen too: 28 MiB were measured (docs/performance/gpu-steps.md).
const DRIVER_BYTES: usize = 96 << 20;
/// A kernel's node in an instantiated graph: 2.2 KiB were measured, and an operator may have several.
const NODE_BYTES: usize = 4 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use atom_ops::{AttentionSpec, Rotary, StepShape};
    use std::sync::Arc;

    fn reserve(vocab: usize, head_dim: usize, dim: usize) -> Reserve {
        let rotary = Rotary { frequencies: vec![1.0; dim / 2], dim, pairs: false, magnitude: 1.0 };
        Reserve {
            top: StepShape { rows: 8, out_rows: 8, lanes: 1 },
            layers: 1,
            attention: Arc::new(AttentionSpec { q_heads: 2, kv_heads: 1, head_dim, scale: 0.25, rotary }),
            page_size: 16,
            pages: 2,
            pages_per_sequence: 4,
            kv_dtype: KvDType::BF16,
            slots: 9,
            vocab,
            samples: true,
            poison: false,
        }
    }

    #[test]
    fn a_page_of_e4m3_takes_half_of_one_of_bf16() {
        let properties = Properties {
            name: String::new(),
            capability: (9, 0),
            processors: 132,
            shared_bytes_max: 232_448,
            l2_bytes: 0,
        };
        let sizes = |element, kv_dtype| {
            Sizer::new(element, &properties).sizes(&Reserve { kv_dtype, ..reserve(512, 64, 64) })
        };
        let [half, whole] = [KvDType::E4M3, KvDType::BF16].map(|kv| sizes(Element::BF16, kv));
        // 2 tensors, 1 layer, 1 head of 64, 16 positions.
        assert_eq!((half.page, whole.page), (2 * 64 * 16, 4 * 64 * 16));
        // The kernel for few rows is for bf16 alone, and has room of its own.
        let Sizes { page, attention, .. } = whole;
        assert_eq!(Sizes { page, attention, ..half }, whole, "nothing else changes");
        let budget = (whole.fixed() + 10 * whole.page) as u64;
        assert_eq!([half, whole].map(|sizes| sizes.pages_within(budget).unwrap()), [20, 10]);
        assert_eq!(sizes(Element::F32, KvDType::E4M3).page, half.page);
    }

    #[test]
    fn types_of_the_cache_that_no_kernel_takes_are_refused() {
        for (kv, element, is_taken) in [
            (KvDType::BF16, Element::BF16, true),
            (KvDType::F32, Element::F32, true),
            (KvDType::E4M3, Element::BF16, true),
            (KvDType::E4M3, Element::F32, true),
            (KvDType::F16, Element::BF16, false),
            (KvDType::F16, Element::F32, false),
            (KvDType::F32, Element::BF16, false),
            (KvDType::BF16, Element::F32, false),
        ] {
            let refused = check_kv(kv, element).err().map(|error| error.to_string());
            assert_eq!(refused.is_none(), is_taken, "{kv:?} {element:?}: {refused:?}");
            assert!(refused.is_none_or(|text| text.contains(&format!("{kv:?}")) && text.contains("fp8")));
        }
    }

    #[test]
    fn sizes_that_no_kernel_takes_are_refused_with_their_numbers() {
        for (vocab, head_dim, dim, parts) in [
            (VOCAB_MAX + 1, 128, 128, &["327681 tokens", "up to 327680", "--device cpu"][..]),
            (0, 128, 128, &["0 tokens"]),
            (512, 528, 528, &["528 elements", "512 are the most"]),
            (512, 264, 264, &["264 elements of which 264 rotate", "256 are the most"]),
            (512, 272, 8, &["272 elements of which 8 rotate", "256 are the most"]),
            (512, 128, 63, &["of which 63 rotate", "even"]),
            (512, 64, 66, &["of which 66 rotate"]),
        ] {
            let CudaError::Unsupported(text) = check_model(&reserve(vocab, head_dim, dim)).unwrap_err()
            else {
                panic!("{vocab} {head_dim} {dim}");
            };
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        }
        for (vocab, head_dim, dim) in [(VOCAB_MAX, 512, 512), (1, 256, 2), (512, 512, 256), (512, 100, 50)] {
            check_model(&reserve(vocab, head_dim, dim)).unwrap();
        }
        // A rank that samples nothing has no bound.
        check_model(&Reserve { samples: false, ..reserve(VOCAB_MAX + 1, 64, 64) }).unwrap();
    }
}
