//! Which type each buffer of a recording has, and where it lies: buffers that are never alive together share memory.

use crate::element::Element;
use crate::fuse::Step;
use atom_ops::{Buf, Op, Recording};

/// A buffer's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Bytes from the start of the step's room.
    pub(crate) offset: usize,
    /// Type of its elements.
    pub(crate) element: Element,
}

/// All buffers of one recording.
pub(crate) struct Places {
    pub(crate) places: Vec<Place>,
    /// Bytes of room that they need.
    pub(crate) bytes: usize,
}

/// What an operator does to buffers.
#[derive(Default)]
pub(crate) struct Use {
    pub(crate) reads: Vec<Buf>,
    /// Written whole, as far as any row is real: what was there before is not needed.
    pub(crate) makes: Vec<Buf>,
    /// Scratch: nothing comes in and nothing goes out.
    pub(crate) scratches: Vec<Buf>,
}

impl Places {
    /// `element` is the type of activations, `steps` are what is done of the recording.
    pub(crate) fn new(recording: &Recording, steps: &[Step<'_>], element: Element) -> Self {
        let elements = elements(recording, element);
        let sizes: Vec<usize> = recording
            .buffers()
            .iter()
            .zip(widths(recording))
            .zip(&elements)
            .map(|((spec, width), element)| {
                let rows = spec.capacity_rows(&recording.shape()).next_multiple_of(ROWS_STEP);
                (rows * width * element.bytes()).next_multiple_of(ALIGN)
            })
            .collect();
        let conflicts = conflicts(recording.buffers().len(), steps);
        // Largest first, each at the lowest place where it disturbs nobody.
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        order.sort_by_key(|&buf| (std::cmp::Reverse(sizes[buf]), buf));
        let mut offsets: Vec<Option<usize>> = vec![None; sizes.len()];
        for &buf in &order {
            let mut taken: Vec<(usize, usize)> = (0..sizes.len())
                .filter(|&other| conflicts[buf][other])
                .filter_map(|other| offsets[other].map(|start| (start, start + sizes[other])))
                .collect();
            taken.sort_unstable();
            let mut offset = 0;
            for (start, end) in taken {
                if start >= offset + sizes[buf] {
                    break;
                }
                offset = offset.max(end);
            }
            offsets[buf] = Some(offset);
        }
        let places: Vec<Place> = offsets
            .iter()
            .zip(elements)
            .map(|(offset, element)| Place { offset: offset.expect("all were placed"), element })
            .collect();
        let bytes = places.iter().zip(&sizes).map(|(place, size)| place.offset + size).max().unwrap_or(0);
        Self { places, bytes }
    }
}

/// Residual streams, router logits, routes, sums of squares, sums over ranks and the logits that are sampled are f32. A residual in
/// bf16 would lose what small layers add to it; in f32 it costs 4 bytes more of traffic for each element of an
/// `add and norm`, about 1% of a step's.
pub(crate) fn elements(recording: &Recording, element: Element) -> Vec<Element> {
    let mut elements = vec![element; recording.buffers().len()];
    for op in recording.ops() {
        let exact: &[Buf] = match op {
            Op::AddNorm { residual, .. } => &[*residual],
            Op::Route { logits, out, .. } => &[*logits, *out],
            Op::Experts { routes, .. } => &[*routes],
            Op::SquareSums { out, .. } => &[*out],
            Op::Sample { logits } => &[*logits],
            // Sums that are not complete yet.
            Op::ScatterSum { x, .. } => &[*x],
            _ => &[],
        };
        exact.iter().for_each(|buf| elements[usize::from(buf.0)] = Element::F32);
    }
    // What is gathered is of the type that it is wanted in.
    for op in recording.ops() {
        if let Op::GatherColumns { x, out, .. } | Op::GatherRows { x, out } = op {
            elements[usize::from(x.0)] = match (elements[usize::from(x.0)], elements[usize::from(out.0)]) {
                (Element::F32, _) | (_, Element::F32) => Element::F32,
                (x, _) => x,
            };
            elements[usize::from(out.0)] = elements[usize::from(x.0)];
        }
    }
    elements
}

/// Elements of a row of each buffer. Kernels of experts give a row a slot for each of its choices, whoever holds the expert,
/// where the recording has as many as can fall on experts held here; and gate and up stay within a kernel.
fn widths(recording: &Recording) -> Vec<usize> {
    let mut widths: Vec<usize> = recording.buffers().iter().map(|spec| spec.width).collect();
    for op in recording.ops() {
        let Op::Experts { x, ref spec, inner, gated, sums, out, .. } = *op else { continue };
        let hidden = recording.buffers()[usize::from(x.0)].width;
        widths[usize::from(inner.0)] = 0;
        let mut slots = vec![(gated, spec.width)];
        slots.extend((!sums).then_some((out, hidden)));
        for (buf, width) in slots {
            let of = &mut widths[usize::from(buf.0)];
            *of = (*of).max(spec.top_k * width);
        }
    }
    widths
}

/// `[a][b]` is true if both are needed at one time.
fn conflicts(count: usize, steps: &[Step<'_>]) -> Vec<Vec<bool>> {
    let mut conflicts = vec![vec![false; count]; count];
    let mut alive = vec![false; count]; // after the operator, going backwards
    for step in steps.iter().rev() {
        let Use { reads, makes, scratches } = step.uses();
        let mut now = alive.clone();
        for buf in reads.iter().chain(&makes).chain(&scratches) {
            now[usize::from(buf.0)] = true;
        }
        for a in (0..count).filter(|&a| now[a]) {
            for b in (0..count).filter(|&b| b != a && now[b]) {
                conflicts[a][b] = true;
            }
        }
        makes.iter().for_each(|buf| alive[usize::from(buf.0)] = false);
        reads.iter().for_each(|buf| alive[usize::from(buf.0)] = true);
    }
    conflicts
}

pub(crate) fn uses(op: &Op) -> Use {
    let of = |reads: &[Buf], makes: &[Buf]| Use {
        reads: reads.to_vec(),
        makes: makes.to_vec(),
        scratches: Vec::new(),
    };
    match *op {
        Op::Embed { out, .. } => of(&[], &[out]),
        Op::Norm { x, out, .. } => of(&[x], &[out]),
        Op::AddNorm { residual, x, out, .. } => of(&[residual, x], &[out]),
        Op::Linear { x, out, .. } => of(&[x], &[out]),
        Op::SquareSums { qkv, out, .. } => of(&[qkv], &[out]),
        Op::ScaleHeads { qkv, sums, .. } => of(&[qkv, sums], &[]),
        Op::RotateAndCache { qkv, .. } => of(&[qkv], &[]),
        Op::Attend { qkv, out, .. } => of(&[qkv], &[out]),
        Op::GatedSilu { gate_up, out } => of(&[gate_up], &[out]),
        Op::Add { x, out } => of(&[x, out], &[]),
        Op::Route { logits, out, .. } => of(&[logits], &[out]),
        Op::Experts { x, routes, inner, gated, sums, out, .. } => Use {
            // Outputs that are not summed are written only where a choice was made.
            reads: if sums { vec![x, routes] } else { vec![x, routes, out] },
            makes: if sums { vec![out] } else { Vec::new() },
            scratches: vec![inner, gated],
        },
        Op::DispatchRows { x, routes, out, .. } => of(&[x, routes, out], &[]),
        Op::CombineRows { y, routes, out, .. } => of(&[y, routes], &[out]),
        Op::AllReduce { x, .. } => of(&[x], &[]),
        Op::GatherRows { x, out } | Op::ScatterSum { x, out } | Op::PickRows { x, out } => of(&[x], &[out]),
        Op::GatherColumns { x, out, .. } => of(&[x], &[out]),
        Op::Sample { logits } => of(&[logits], &[]),
    }
}

/// cuBLASLt multiplies rows with scales of groups by 4: there is room for what it makes of the last ones.
const ROWS_STEP: usize = 4;
/// Tiles of the copy engine start on 128 bytes.
const ALIGN: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use atom_ops::{Extent, Ops, StepShape, Weight};

    fn chain() -> (Recording, [Buf; 6]) {
        let mut ops = Ops::new(StepShape { rows: 8, out_rows: 2, lanes: 1 });
        let [residual, normed, projected] = [0; 3].map(|_| ops.buffer(Extent::Rows, 64));
        let (wide, gated) = (ops.buffer(Extent::Rows, 512), ops.buffer(Extent::Rows, 256));
        let logits = ops.buffer(Extent::Rows, 300);
        let weight = Weight(0);
        ops.embed(weight, residual);
        ops.norm(residual, weight, 1e-6, normed);
        for _ in 0..2 {
            ops.linear(normed, weight, None, wide);
            ops.gated_silu(wide, gated);
            ops.linear(gated, weight, None, projected);
            ops.add_norm(residual, projected, weight, 1e-6, normed);
        }
        ops.linear(normed, weight, None, logits);
        (ops.finish(), [residual, normed, projected, wide, gated, logits])
    }

    #[test]
    fn buffers_that_are_needed_together_lie_apart_and_others_share() {
        let (recording, bufs) = chain();
        let steps: Vec<Step<'_>> = recording.ops().iter().map(Step::Op).collect();
        let Places { places, bytes } = Places::new(&recording, &steps, Element::BF16);
        let range = |buf: Buf| {
            let (place, spec) = (places[usize::from(buf.0)], recording.buffers()[usize::from(buf.0)]);
            place.offset..place.offset + spec.capacity(&recording.shape()) * place.element.bytes()
        };
        let overlap = |a: Buf, b: Buf| range(a).start < range(b).end && range(b).start < range(a).end;
        let [residual, normed, projected, wide, gated, logits] = bufs;
        for (a, b) in [
            (residual, normed),
            (residual, wide),
            (residual, gated),
            (residual, projected),
            (normed, wide),
            (wide, gated),
            (gated, projected),
            (projected, normed),
            (normed, logits),
        ] {
            assert!(!overlap(a, b), "{a:?} at {:?} and {b:?} at {:?}", range(a), range(b));
        }
        assert!(overlap(wide, projected), "projected is made when gate and up are done with");
        let apart: usize = bufs.iter().map(|&buf| range(buf).len()).sum();
        assert!(bytes < apart, "{bytes} of {apart}");
    }

    #[test]
    fn residuals_are_f32_and_activations_are_not() {
        let (recording, [residual, normed, ..]) = chain();
        let places = Places::new(&recording, &[], Element::BF16).places;
        assert_eq!(places[usize::from(residual.0)].element, Element::F32);
        assert_eq!(places[usize::from(normed.0)].element, Element::BF16);
    }
}
