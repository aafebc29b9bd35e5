//! Launches of the kernels that every operator has, whatever the shape.

use crate::element::Element;
use crate::error::CudaError;
use crate::kernels::Queue;
use crate::memory::Address;
use crate::module::{Arg, Launch};
use atom_ops::{AttentionSpec, ExpertSpec, RouteSpec};

/// Which rows of a buffer are real, as `Extent` of kernels/rows.cuh: place of the counts, lanes, rows of a lane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RealRows {
    pub(crate) counts: Address,
    pub(crate) lanes: usize,
    pub(crate) lane_rows: usize,
}

impl RealRows {
    fn capacity(&self) -> usize {
        self.lanes * self.lane_rows
    }

    fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.counts.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&(self.lanes as u32).to_le_bytes());
        bytes[12..].copy_from_slice(&(self.lane_rows as u32).to_le_bytes());
        bytes
    }
}

/// What ends the names of kernels that read or write the residual.
pub(crate) fn residual_suffix(element: Element) -> &'static str {
    match element {
        Element::F32 => "f32",
        Element::BF16 => "bf16_res32",
    }
}

fn by_rows(rows: &RealRows, width: usize) -> Launch {
    let capacity = rows.capacity();
    let pieces = if capacity > 4096 { 1 } else { width.div_ceil(2048) };
    Launch::new(capacity as u32, 256).by(pieces as u32, 1).overlapping()
}

/// A row-wise kernel of `rows.cu`: `args`, then width, out, extent.
///
/// # Safety
/// `args` and the width are those of the kernel; what they point at is large enough and lives as long as a replay.
pub(crate) unsafe fn row_kernel(
    queue: &Queue<'_>,
    name: &str,
    inputs: &[Address],
    width: usize,
    out: Address,
    rows: &RealRows,
) -> Result<(), CudaError> {
    let extent = rows.bytes();
    let mut args: Vec<Arg<'_>> = inputs.iter().map(|&input| input.into()).collect();
    args.extend([Arg::Uint(width as u32), out.into(), Arg::Bytes(&extent)]);
    // SAFETY: the caller's.
    unsafe { queue.launch("rows", name, by_rows(rows, width), &args) }
}

/// # Safety
/// As for [`row_kernel`].
pub(crate) unsafe fn norm(
    queue: &Queue<'_>,
    name: &str,
    inputs: &[Address],
    (eps, width): (f32, usize),
    out: Address,
    rows: &RealRows,
) -> Result<(), CudaError> {
    if width > NORM_WIDTH_MAX {
        return Err(CudaError::Unsupported(format!(
            "norms of rows of {width} elements; {NORM_WIDTH_MAX} are the most"
        )));
    }
    let extent = rows.bytes();
    let mut args: Vec<Arg<'_>> = inputs.iter().map(|&input| input.into()).collect();
    args.extend([Arg::Float(eps), Arg::Uint(width as u32), out.into(), Arg::Bytes(&extent)]);
    let threads = width.div_ceil(16).next_multiple_of(32).min(1024) as u32;
    let launch = Launch::new(rows.capacity() as u32, threads).overlapping();
    // SAFETY: the caller's.
    unsafe { queue.launch("norm", name, launch, &args) }
}

/// # Safety
/// As for [`row_kernel`].
pub(crate) unsafe fn add_bias(
    queue: &Queue<'_>,
    element: Element,
    out: Address,
    bias: Address,
    width: usize,
    rows: &RealRows,
) -> Result<(), CudaError> {
    let extent = rows.bytes();
    let args = [out.into(), bias.into(), Arg::Uint(width as u32), Arg::Bytes(&extent)];
    let launch = Launch::new(rows.capacity() as u32, 256).overlapping();
    // SAFETY: the caller's.
    unsafe { queue.launch("weights", &format!("add_bias_{}", element.suffix()), launch, &args) }
}

fn widths(spec: &AttentionSpec) -> [Arg<'static>; 3] {
    let (q, k) = (spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    [Arg::Uint(q as u32), Arg::Uint(k as u32), Arg::Uint((q + 2 * k) as u32)]
}

/// # Safety
/// As for [`row_kernel`].
pub(crate) unsafe fn square_sums(
    queue: &Queue<'_>,
    element: Element,
    qkv: Address,
    spec: &AttentionSpec,
    out: Address,
    rows: &RealRows,
) -> Result<(), CudaError> {
    let (extent, [q, k, stride]) = (rows.bytes(), widths(spec));
    let args = [qkv.into(), q, k, stride, out.into(), Arg::Bytes(&extent)];
    let launch = Launch::new(rows.capacity() as u32, 256).overlapping();
    // SAFETY: the caller's.
    unsafe { queue.launch("norm", &format!("square_sums_{}", element.suffix()), launch, &args) }
}

/// Arguments of [`scale_heads`].
pub(crate) struct ScaleHeads<'a> {
    pub(crate) qkv: Address,
    pub(crate) sums: Address,
    pub(crate) weights: (Address, Address),
    pub(crate) elements: (usize, usize),
    pub(crate) eps: f32,
    pub(crate) spec: &'a AttentionSpec,
}

/// # Safety
/// As for [`row_kernel`].
pub(crate) unsafe fn scale_heads(
    queue: &Queue<'_>,
    element: Element,
    op: &ScaleHeads<'_>,
    rows: &RealRows,
) -> Result<(), CudaError> {
    let (extent, [q, k, stride]) = (rows.bytes(), widths(op.spec));
    let args = [
        op.qkv.into(),
        op.sums.into(),
        op.weights.0.into(),
        op.weights.1.into(),
        q,
        k,
        stride,
        Arg::Uint(op.elements.0 as u32),
        Arg::Uint(op.elements.1 as u32),
        Arg::Float(op.eps),
        Arg::Bytes(&extent),
    ];
    let launch = Launch::new(rows.capacity() as u32, 256).overlapping();
    // SAFETY: the caller's.
    unsafe { queue.launch("norm", &format!("scale_heads_{}", element.suffix()), launch, &args) }
}

/// Arguments of [`rotate_and_cache`].
pub(crate) struct Rotate<'a> {
    pub(crate) qkv: Address,
    pub(crate) keys: Address,
    pub(crate) values: Address,
    pub(crate) positions: Address,
    pub(crate) cache_rows: Address,
    pub(crate) frequencies: Address,
    pub(crate) norms: Option<(Address, Address, f32)>,
    pub(crate) page_size: usize,
    pub(crate) spec: &'a AttentionSpec,
}

/// # Safety
/// As for [`row_kernel`].
pub(crate) unsafe fn rotate_and_cache(
    queue: &Queue<'_>,
    element: Element,
    op: &Rotate<'_>,
    rows: &RealRows,
) -> Result<(), CudaError> {
    let (spec, rotary) = (op.spec, &op.spec.rotary);
    let (q_norm, k_norm, eps) = op.norms.unwrap_or((Address::NULL, Address::NULL, 0.0));
    let mut bytes = Vec::with_capacity(72);
    for address in [op.positions, op.cache_rows, op.frequencies, q_norm, k_norm] {
        bytes.extend(address.0.to_le_bytes());
    }
    for number in [eps, rotary.magnitude] {
        bytes.extend(number.to_le_bytes());
    }
    for count in
        [spec.q_heads, spec.kv_heads, spec.head_dim, rotary.dim, usize::from(rotary.pairs), op.page_size]
    {
        bytes.extend((count as u32).to_le_bytes());
    }
    let narrow = !(rotary.dim / 2).is_multiple_of(8) || !((spec.head_dim - rotary.dim) / 2).is_multiple_of(8);
    let (dim_max, kind) = if narrow { (256, "_narrow") } else { (512, "") };
    if spec.head_dim > dim_max || !spec.head_dim.is_multiple_of(2) {
        return Err(CudaError::Unsupported(format!(
            "heads of {} elements, {} of them rotated",
            spec.head_dim, rotary.dim
        )));
    }
    let threads_a_head = if narrow { 32 } else { spec.head_dim.div_ceil(16).next_power_of_two() };
    let heads = spec.q_heads + 2 * spec.kv_heads;
    let warps = heads.div_ceil(32 / threads_a_head.min(32)).clamp(1, 16);
    let extent = rows.bytes();
    let args = [op.qkv.into(), op.keys.into(), op.values.into(), Arg::Bytes(&bytes), Arg::Bytes(&extent)];
    let launch = Launch::new(rows.capacity() as u32, 32 * warps as u32).overlapping();
    // SAFETY: the caller's.
    unsafe { queue.launch("rope", &format!("rotate_and_cache_{}{kind}", element.suffix()), launch, &args) }
}

/// Arguments of [`attend`].
pub(crate) struct Attend<'a> {
    pub(crate) header: Address,
    pub(crate) positions: Address,
    pub(crate) row_slots: Address,
    pub(crate) tables: Address,
    pub(crate) table_stride: usize,
    pub(crate) qkv: Address,
    pub(crate) keys: Address,
    pub(crate) values: Address,
    pub(crate) out: Address,
    pub(crate) page_size: usize,
    pub(crate) spec: &'a AttentionSpec,
}

/// # Safety
/// As for [`row_kernel`].
pub(crate) unsafe fn attend(
    queue: &Queue<'_>,
    element: Element,
    op: &Attend<'_>,
    rows: &RealRows,
) -> Result<(), CudaError> {
    let spec = op.spec;
    let [.., stride] = widths(spec);
    let uint = |count: usize| Arg::Uint(count as u32);
    let args = [
        op.header.into(),
        op.positions.into(),
        op.row_slots.into(),
        op.tables.into(),
        uint(op.table_stride),
        op.qkv.into(),
        stride,
        op.keys.into(),
        op.values.into(),
        op.out.into(),
        Address::NULL.into(),
        uint(spec.q_heads),
        uint(spec.kv_heads),
        uint(spec.head_dim),
        uint(op.page_size),
        uint(0),
        Arg::Float(spec.scale),
    ];
    let launch = Launch::new(rows.capacity() as u32, 128).by(spec.q_heads as u32, 1);
    // SAFETY: the caller's.
    unsafe { queue.launch("attend_simple", &format!("attend_simple_{}", element.suffix()), launch, &args) }
}

/// # Safety
/// As for [`row_kernel`].
pub(crate) unsafe fn route(
    queue: &Queue<'_>,
    logits: Address,
    bias: Address,
    spec: &RouteSpec,
    (out, granted): (Address, Address),
    rows: &RealRows,
) -> Result<(), CudaError> {
    let name = match spec.experts {
        ..=128 => "route_4",
        ..=256 => "route_8",
        ..=512 => "route_16",
        more => {
            return Err(CudaError::Unsupported(format!("{more} experts to choose from; 512 are the most")));
        }
    };
    if spec.top_k > 32 {
        return Err(CudaError::Unsupported(format!("{} experts a row; 32 are the most", spec.top_k)));
    }
    let mut bytes = Vec::with_capacity(28);
    for count in [
        spec.experts,
        spec.top_k,
        usize::from(spec.is_sigmoid),
        spec.groups,
        spec.groups_kept,
        usize::from(spec.normalise),
    ] {
        bytes.extend((count as u32).to_le_bytes());
    }
    bytes.extend(spec.scale.to_le_bytes());
    let extent = rows.bytes();
    let args =
        [logits.into(), bias.into(), Arg::Bytes(&bytes), out.into(), granted.into(), Arg::Bytes(&extent)];
    let launch = Launch::new(rows.capacity().div_ceil(4) as u32, 128).overlapping();
    // SAFETY: the caller's.
    unsafe { queue.launch("route", name, launch, &args) }
}

/// Arguments of [`experts`].
pub(crate) struct Experts<'a> {
    pub(crate) x: Address,
    pub(crate) routes: Address,
    pub(crate) gate_up: Address,
    pub(crate) down: Address,
    pub(crate) gated: Address,
    pub(crate) out: Address,
    pub(crate) hidden: usize,
    pub(crate) sums: bool,
    pub(crate) spec: &'a ExpertSpec,
}

/// # Safety
/// As for [`row_kernel`].
pub(crate) unsafe fn experts(
    queue: &Queue<'_>,
    element: Element,
    op: &Experts<'_>,
    rows: &RealRows,
) -> Result<(), CudaError> {
    let (spec, hidden) = (op.spec, op.hidden);
    let int = |count: usize| Arg::Int(count as i32);
    let who = [
        Arg::from(rows.counts),
        int(rows.lanes),
        int(rows.lane_rows),
        int(spec.top_k),
        int(spec.first),
        int(spec.held),
        int(hidden),
        int(spec.width),
    ];
    let capacity = rows.capacity();
    let mut args = vec![op.x.into(), op.routes.into(), op.gate_up.into(), op.gated.into()];
    args.extend(who);
    let launch = Launch::new((capacity * spec.top_k) as u32, 256).by(spec.width.div_ceil(8) as u32, 1);
    let suffix = element.suffix();
    // SAFETY: the caller's.
    unsafe { queue.launch("experts_simple", &format!("experts_simple_gate_{suffix}"), launch, &args) }?;
    let mut args = vec![op.gated.into(), op.routes.into(), op.down.into(), op.out.into()];
    args.extend(who);
    args.push(int(usize::from(op.sums)));
    let launch = Launch::new(capacity as u32, 256).by(hidden.div_ceil(8) as u32, 1);
    // SAFETY: the caller's.
    unsafe { queue.launch("experts_simple", &format!("experts_simple_down_{suffix}"), launch, &args) }
}

/// Elements of a row that the norms' threads hold in registers.
const NORM_WIDTH_MAX: usize = 16384;
