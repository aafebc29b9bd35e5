//! What a recording does on a GPU: its operators, with products of few rows taking in what stands around them.
//!
//! Where rows are few, a product's time is the reading of its weights, and a kernel between two products costs as much as
//! megabytes of them. So such a product takes in the gated activation behind it, or the addition to the residual of the
//! norm behind it, and the norm in front of it, wherever nobody else wants what they would have written between. Layers
//! of Qwen3-0.6B on an H200, one row, without attention: 32 us with each operator by itself and cuBLASLt, 14 us so.
//! Where rows are many, gate and up take in their activation, which saves four fifths of what the two
//! would write and read of outputs.

mod mixture;

pub(crate) use mixture::{AddedExperts, Routed};

use crate::buffers::{Use, elements, uses};
use crate::device::Properties;
use crate::element::Element;
use crate::fp8::Fp8Form;
use crate::launch::attend_few::AttendFew;
use crate::launch::linear_fp8::Fp8Product;
use crate::launch::linear_small::{SmallOut, SmallProduct};
use crate::order::SumOrder;
use crate::product_kernel::ProductKernel;
use atom_ops::{AttentionSpec, Buf, Extent, Op, Recording, Weight};

/// One step of a recording.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Step<'a> {
    /// As it was recorded.
    Op(&'a Op),
    /// What is left of an `add and norm` whose sum a product makes.
    Norm { x: Buf, weight: Weight, eps: f32, out: Buf },
    /// A product by a kernel of ours, with its surroundings.
    Product(Fused),
    /// A product with weights of FP8, whatever its rows, behind the quantising of its inputs.
    Fp8(FusedFp8),
    /// Attention of few rows with what stands in front of it.
    Attend(FewAttention<'a>),
    /// A norm with the router's product and its choice.
    Router(Routed<'a>),
    /// Experts whose sums go to the residual.
    Experts(AddedExperts<'a>),
}

/// See [`AttendFew`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FewAttention<'a> {
    /// As the product left it.
    pub(crate) qkv: Buf,
    pub(crate) layer: usize,
    pub(crate) qk_norm: Option<(Weight, Weight, f32)>,
    pub(crate) spec: &'a AttentionSpec,
    pub(crate) out: Buf,
}

/// See [`SmallProduct`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Fused {
    /// The residual if it norms.
    pub(crate) x: Buf,
    pub(crate) norm: Option<(Weight, f32)>,
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Weight>,
    /// Written, or added to.
    pub(crate) out: Buf,
    pub(crate) product: SmallProduct,
    /// `x` is a residual times a norm's weights, which the product in front made: what is left to do of the norm.
    pub(crate) scale: Option<f32>,
    /// The weights of the norm behind an addition to the residual, and where its product with the residual goes.
    pub(crate) next: Option<(Weight, Buf)>,
}

/// See [`Fp8Product`]. The norm is taken in by the quantising, where nobody else wants it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FusedFp8 {
    /// The residual if it norms.
    pub(crate) x: Buf,
    pub(crate) norm: Option<(Weight, f32)>,
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Weight>,
    /// Written, or added to.
    pub(crate) out: Buf,
    pub(crate) product: Fp8Product,
}

impl Step<'_> {
    /// What it is called in messages.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Op(op) => op.name(),
            Self::Norm { .. } => "norm",
            Self::Product(_) | Self::Fp8(_) => "linear",
            Self::Attend(_) => "attend",
            Self::Router(_) => "router",
            Self::Experts(_) => "experts",
        }
    }

    /// What it does to buffers.
    pub(crate) fn uses(&self) -> Use {
        let (reads, makes) = match *self {
            Self::Op(op) => return uses(op),
            Self::Router(ref routed) => return routed.uses(),
            Self::Experts(ref experts) => return experts.uses(),
            Self::Norm { x, out, .. } => (vec![x], vec![out]),
            Self::Attend(FewAttention { qkv, out, .. }) => (vec![qkv], vec![out]),
            Self::Product(Fused { x, out, next: Some((_, next)), .. }) => (vec![x, out], vec![next]),
            Self::Product(Fused { x, out, product: SmallProduct { out: made, .. }, .. })
            | Self::Fp8(FusedFp8 { x, out, product: Fp8Product { out: made, .. }, .. }) => match made {
                SmallOut::Residual => (vec![x, out], Vec::new()),
                SmallOut::Activations | SmallOut::F32 | SmallOut::GatedSilu => (vec![x], vec![out]),
            },
        };
        Use { reads, makes, scratches: Vec::new() }
    }

    fn touches(&self, buf: Buf) -> bool {
        let Use { reads, makes, scratches } = self.uses();
        [reads, makes, scratches].concat().contains(&buf)
    }
}

/// The steps of `recording` on such a GPU, in order; with the kernel for attention of few rows, if there is one. `codes` says
/// which matrices are FP8.
pub(crate) fn fuse<'a>(
    recording: &'a Recording,
    element: Element,
    order: SumOrder,
    codes: impl Fn(Weight) -> Option<Fp8Form>,
    properties: &Properties,
    few: Option<&AttendFew>,
) -> Vec<Step<'a>> {
    let takes = |product: &SmallProduct| {
        element == Element::BF16 && ProductKernel::choose(product, order, properties).is_some()
    };
    // What these add is in another order than where the operators stand apart.
    let mixtures = (order == SumOrder::Fastest).then_some(mixture::Mixtures {
        recording,
        element,
        codes: &codes,
        properties,
    });
    let mut steps = fuse_where(recording, element, &codes, takes, mixtures.as_ref());
    if order == SumOrder::Fastest && element == Element::BF16 {
        let is_rows = |product: &SmallProduct| {
            matches!(ProductKernel::choose(product, order, properties), Some(ProductKernel::Rows(_)))
        };
        share_norms(&mut steps, is_rows);
    }
    fuse_attention(steps, recording, few)
}

/// A norm between two products by `linear_rows`, which nobody else reads, is shared by them: the one in front makes the
/// residual's product with the norm's weights and its sums of squares, the one behind divides by the root.
fn share_norms(steps: &mut Vec<Step<'_>>, is_rows: impl Fn(&SmallProduct) -> bool) {
    let mut all: Vec<Option<Step<'_>>> = std::mem::take(steps).into_iter().map(Some).collect();
    for index in 1..all.len() {
        let Some(Step::Norm { x, weight, eps, out }) = all[index] else { continue };
        let Some(Step::Product(front)) = all[index - 1] else { continue };
        let Some(reader) = only_reader(&all, index, out) else { continue };
        let Some(Step::Product(behind)) = all[reader] else { continue };
        let is_next = all[index + 1..reader].iter().all(Option::is_none);
        let adds = is_next && front.out == x && front.product.out == SmallOut::Residual && front.x != out;
        let fits = behind.x == out && behind.product.rows == front.product.rows;
        // Sums of squares have one place: a product doesn't read those of the norm in front and write those of the one behind.
        let is_free = front.scale.is_none();
        if adds && fits && is_free && is_rows(&front.product) && is_rows(&behind.product) {
            all[index - 1] = Some(Step::Product(Fused { next: Some((weight, out)), ..front }));
            all[reader] = Some(Step::Product(Fused { scale: Some(eps), ..behind }));
            all[index] = None;
        }
    }
    steps.extend(all.into_iter().flatten());
}

fn fuse_where<'a>(
    recording: &'a Recording,
    element: Element,
    codes: impl Fn(Weight) -> Option<Fp8Form>,
    takes: impl Fn(&SmallProduct) -> bool,
    mixtures: Option<&mixture::Mixtures<'a, '_>>,
) -> Vec<Step<'a>> {
    let elements = elements(recording, element);
    let is_exact = |buf: Buf| elements[usize::from(buf.0)] == Element::F32;
    let mut steps: Vec<Option<Step<'a>>> = recording.ops().iter().map(|op| Some(Step::Op(op))).collect();
    if let Some(mixtures) = mixtures {
        mixtures.add_experts(&mut steps);
    }
    for index in 0..steps.len() {
        if let Some(Step::Op(&Op::Linear { x, weight, bias, out })) = steps[index] {
            let plain = if is_exact(out) { SmallOut::F32 } else { SmallOut::Activations };
            let spec = |buf: Buf| recording.buffers()[usize::from(buf.0)];
            let rows = spec(x).capacity_rows(&recording.shape());
            let (inputs, outputs) = (spec(x).width, spec(out).width);
            if let Some(form) = codes(weight) {
                let product = Fp8Product { rows, inputs, outputs, form, out: plain };
                take_in_codes(&mut steps, index, FusedFp8 { x, norm: None, weight, bias, out, product });
                continue;
            }
            let product = SmallProduct { rows, inputs, outputs, norms: false, out: plain };
            let fused = Fused { x, norm: None, weight, bias, out, product, scale: None, next: None };
            take_in_what_follows(&mut steps, index, fused, &takes);
        }
    }
    if let Some(mixtures) = mixtures {
        mixtures.join_routers(&mut steps);
    }
    for index in 0..steps.len() {
        let (x, weight, eps, out) = match steps[index] {
            Some(Step::Op(&Op::Norm { x, weight, eps, out })) | Some(Step::Norm { x, weight, eps, out }) => {
                (x, weight, eps, out)
            }
            _ => continue,
        };
        let Some(reader) = only_reader(&steps, index, out) else { continue };
        if let Some(Step::Fp8(fused)) = steps[reader]
            && is_exact(x)
            && fused.out != x
            && is_left_alone(&steps, index, reader, x)
        {
            steps[reader] = Some(Step::Fp8(FusedFp8 { x, norm: Some((weight, eps)), ..fused }));
            steps[index] = None;
            continue;
        }
        let Some(Step::Product(fused)) = steps[reader] else { continue };
        let product = SmallProduct { norms: true, ..fused.product };
        if is_exact(x) && fused.out != x && takes(&product) && is_left_alone(&steps, index, reader, x) {
            steps[reader] = Some(Step::Product(Fused { x, norm: Some((weight, eps)), product, ..fused }));
            steps[index] = None;
        }
    }
    steps.into_iter().flatten().collect()
}

/// Steps whose layers' norms of heads, rotary embedding, cache and attention are one kernel each, if `few` takes the bucket.
/// Nobody else may want q, k and v as they are between.
fn fuse_attention<'a>(
    steps: Vec<Step<'a>>,
    recording: &'a Recording,
    few: Option<&AttendFew>,
) -> Vec<Step<'a>> {
    if !few.is_some_and(|few| few.takes(recording.shape().rows)) {
        return steps;
    }
    let mut steps: Vec<Option<Step<'a>>> = steps.into_iter().map(Some).collect();
    for index in 0..steps.len() {
        let Some(Step::Op(Op::RotateAndCache { qkv, layer, qk_norm, spec })) = steps[index] else { continue };
        let Some(reader) = only_reader(&steps, index, *qkv) else { continue };
        let Some(Step::Op(Op::Attend { layer: of, out, .. })) = steps[reader] else { continue };
        let is_rows = recording.buffers()[usize::from(qkv.0)].extent == Extent::Rows;
        if of == layer && out != qkv && is_rows && is_left_alone(&steps, index, reader, *out) {
            let (qkv, layer, qk_norm, out) = (*qkv, *layer, *qk_norm, *out);
            steps[reader] = Some(Step::Attend(FewAttention { qkv, layer, qk_norm, spec, out }));
            steps[index] = None;
        }
    }
    steps.into_iter().flatten().collect()
}

/// The product at `index` becomes one of few rows, with the activation or the addition behind it if it can.
fn take_in_what_follows(
    steps: &mut [Option<Step<'_>>],
    index: usize,
    fused: Fused,
    takes: &impl Fn(&SmallProduct) -> bool,
) {
    if let Some(Follower { reader, out, made, left }) = follower(steps, index, (fused.x, fused.out)) {
        let product = SmallProduct { out: made, ..fused.product };
        if takes(&product) {
            steps[index] = Some(Step::Product(Fused { out, product, ..fused }));
            steps[reader] = left;
            return;
        }
    }
    if takes(&fused.product) {
        steps[index] = Some(Step::Product(fused));
    }
}

/// The same with weights of FP8. Where rows are many, what stands around them stays as it is.
fn take_in_codes(steps: &mut [Option<Step<'_>>], index: usize, fused: FusedFp8) {
    if let Some(Follower { reader, out, made, left }) = follower(steps, index, (fused.x, fused.out)) {
        let product = Fp8Product { out: made, ..fused.product };
        if product.fuses() {
            steps[index] = Some(Step::Fp8(FusedFp8 { out, product, ..fused }));
            steps[reader] = left;
            return;
        }
    }
    steps[index] = Some(Step::Fp8(fused));
}

/// What a product can take in behind it.
struct Follower<'a> {
    /// The step.
    reader: usize,
    /// What the product writes or adds to then.
    out: Buf,
    made: SmallOut,
    /// What is left of the step.
    left: Option<Step<'a>>,
}

/// The activation or the addition behind the product at `index`, if nobody else wants what comes between. `x` and
/// `product` are what it reads and writes.
fn follower<'a>(steps: &[Option<Step<'a>>], index: usize, (x, product): (Buf, Buf)) -> Option<Follower<'a>> {
    let reader = only_reader(steps, index, product)?;
    let (out, made, left) = match steps[reader] {
        Some(Step::Op(&Op::GatedSilu { out, .. })) => (out, SmallOut::GatedSilu, None),
        Some(Step::Op(&Op::AddNorm { residual, x, weight, eps, out })) if x == product => {
            (residual, SmallOut::Residual, Some(Step::Norm { x: residual, weight, eps, out }))
        }
        _ => return None,
    };
    let is_free = out != x && is_left_alone(steps, index, reader, out);
    is_free.then_some(Follower { reader, out, made, left })
}

/// The step that reads what step `index` writes to `buf`, if it is the only one and reads it once.
fn only_reader(steps: &[Option<Step<'_>>], index: usize, buf: Buf) -> Option<usize> {
    let mut found = None;
    for (at, step) in steps.iter().enumerate().skip(index + 1) {
        let Some(step) = step else { continue };
        let Use { reads, makes, scratches } = step.uses();
        match reads.iter().filter(|&&read| read == buf).count() {
            0 => {}
            1 if found.is_none() => found = Some(at),
            _ => return None,
        }
        if makes.contains(&buf) || scratches.contains(&buf) {
            break;
        }
    }
    found
}

/// Nothing between the two steps touches `buf`.
fn is_left_alone(steps: &[Option<Step<'_>>], first: usize, last: usize, buf: Buf) -> bool {
    steps[first + 1..last].iter().flatten().all(|step| !step.touches(buf))
}

#[cfg(test)]
mod tests;
